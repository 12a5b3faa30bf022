//! The options of the HTTP API, of every role that serves it.
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use coordinator::http::keys::{ApiKey, ApiKeyError, ApiKeys, KeyFile, KeyLimits};
use coordinator::http::listener::Endpoint;
use coordinator::http::options::{ApiOptions, ConnectionBound, MAX_LOGPROBS};
use coordinator::http::root_path::RootPath;
use coordinator::http::tls::{Tls, TlsFiles};
use coordinator::http::watch::LOOK_EVERY;
use coordinator::text::model::{GenerationSource, SamplingDefaults, TextOptions};
use coordinator::text::reply::{CallFormat, Reasoning};
use coordinator::text::template::RESERVED;
use serde_json::{Map, Value};
use shared::model_config::ConfigOverrides;
use zeroize::Zeroizing;

use super::options::parse_bytes;
use super::{CliError, traces};

/// The variable that holds an API key if none is given otherwise.
pub(crate) const VARIABLE: &str = "TUTTI_API_KEY";
/// Maximum number of log-probabilities that a GPU's kernels report.
const LOGPROBS_BOUND: i64 = 128;

/// Options of the HTTP API.
#[derive(Args, Clone, Debug)]
pub(crate) struct ApiArgs {
    /// Keys that go before those of the model's config.json, as a JSON object: each replaces the
    /// file's, null removes it; those within text_config (of multimodal models) one by one. Workers
    /// get them from the coordinator; must be the same for the coordinator and all front ends
    #[arg(long, value_name = "JSON", value_parser = ConfigOverrides::parse)]
    pub(crate) hf_overrides: Option<ConfigOverrides>,
    /// Answer only with `Authorization: Bearer KEY` or `x-api-key: KEY`, of any of these keys, on
    /// all paths but probes, /metrics and /version. Others see command lines: --api-key-file, or
    /// TUTTI_API_KEY in the environment, hides it
    #[arg(long, value_name = "KEY", value_parser = parse_key)]
    pub(crate) api_key: Vec<Key>,
    /// Like --api-key, with keys from a file: one per line, # begins a comment. A key can have
    /// limits of its own: KEY requests=N requests-per-minute=N tokens-per-minute=N. The file must
    /// be readable only by its owner; it is reloaded when it changes
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Maximum number of requests in progress per API key; beyond it clients get 429. Each front
    /// end counts for itself; 0 for no limit
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(crate) max_requests_per_key: u32,
    /// Maximum number of requests that one API key may begin per minute, in bursts of up to this
    /// many after a pause; otherwise like --max-requests-per-key. 0 for no limit
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(crate) requests_per_minute_per_key: u32,
    /// Maximum number of tokens that one API key may use per minute, of prompts and answers
    /// together. A request may begin as long as any are left; what it uses beyond them is made up
    /// for before the next one. Otherwise like --requests-per-minute-per-key. 0 for no limit
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000_000))]
    pub(crate) tokens_per_minute_per_key: u32,
    /// Share cached prompt prefixes between API keys; a client can then infer from response times
    /// what others have asked
    #[arg(long)]
    pub(crate) share_prefix_cache: bool,
    /// Maximum number of simultaneous connections from one address (for IPv6, one /64 network); 0
    /// for no limit [default: 256 for public addresses; no limit for private networks and this
    /// host, which may be proxies]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=20_000))]
    pub(crate) max_connections_per_address: Option<u32>,
    /// Jinja file to use as the chat template instead of the model's own; must be the same for the
    /// coordinator and all front ends
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,
    /// Variables of the chat template for requests that do not set them in `chat_template_kwargs`,
    /// as a JSON object, such as {"enable_thinking": false}; must be the same for the coordinator
    /// and all front ends
    #[arg(long, value_name = "JSON", value_parser = parse_variables)]
    pub(crate) default_chat_template_kwargs: Option<Variables>,
    /// Where sampling defaults come from, for requests that do not set them: the model's own
    /// generation_config.json (auto), this server (vllm: temperature 1, no top_p and so on), or
    /// another such file or its folder; must be the same for the coordinator and all front ends
    #[arg(long, value_name = "SOURCE", default_value = "auto", value_parser = parse_generation)]
    pub(crate) generation_config: GenerationSource,
    /// Sampling defaults that go before those of --generation-config, as a JSON object of
    /// temperature, top_p, top_k, min_p, repetition_penalty; and max_new_tokens, which no answer
    /// exceeds; must be the same for the coordinator and all front ends
    #[arg(long, value_name = "JSON", value_parser = SamplingDefaults::parse)]
    pub(crate) override_generation_config: Option<SamplingDefaults>,
    /// Report usage at the end of every stream, as if each request set
    /// `stream_options.include_usage`
    #[arg(long)]
    pub(crate) enable_force_include_usage: bool,
    /// Write tokens as token_id:ID in log-probabilities, for requests that do not set
    /// `return_tokens_as_token_ids`
    #[arg(long)]
    pub(crate) return_tokens_as_token_ids: bool,
    /// Maximum size of a request body, in bytes or with a suffix KiB, MiB or GiB [default: 16 per
    /// token of --max-model-len, at least 16MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_body_bytes)]
    pub(crate) max_body_bytes: Option<u64>,
    /// Maximum number of alternatives per token that a request may ask for (logprobs, top_logprobs,
    /// prompt_logprobs)
    #[arg(long, value_name = "N", default_value_t = MAX_LOGPROBS, value_parser = clap::value_parser!(u32).range(0..=LOGPROBS_BOUND))]
    pub(crate) max_logprobs: u32,
    /// Path under which a proxy shows the API, such as /llm: requests for paths that begin with it
    /// are served as those without it, which are served too, and /openapi.json names it [default:
    /// none]
    #[arg(long, value_name = "PATH", value_parser = RootPath::parse)]
    pub(crate) root_path: Option<RootPath>,
    /// Serve /tokenizer_info: the model's tokenizer_config.json, with the chat template in use
    #[arg(long)]
    pub(crate) enable_tokenizer_info_endpoint: bool,
    /// Origins (SCHEME://HOST) of web pages whose scripts may use the API, comma separated; * for
    /// all [default: none]
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    pub(crate) allowed_origins: Vec<String>,
    /// How the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, seed_oss, glm45,
    /// minimax_m2, deepseek_v3, deepseek_v31, deepseek_v32, kimi_k2, granite, phi4_mini_json,
    /// internlm, pythonic, openai (gpt-oss), or another of vLLM's names for these [default:
    /// detected from its chat template]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub(crate) tool_call_parser: Option<CallFormat>,
    /// Separate a model's reasoning from its answer: think for models that write it between <think>
    /// and </think>, or the name of vLLM's parser for the model; gpt-oss's parser (openai_gptoss)
    /// is detected from the chat template
    #[arg(long, value_name = "PARSER", value_parser = REASONING)]
    pub(crate) reasoning_parser: Option<String>,
    /// Serve HTTPS: PEM file with the server's certificate, followed by any intermediate ones.
    /// Reloaded when it changes
    #[arg(long, visible_alias = "ssl-certfile", value_name = "FILE")]
    pub(crate) tls_certificate: Option<PathBuf>,
    /// PEM file with the key of the server's certificate, readable only by its owner
    #[arg(long, visible_alias = "ssl-keyfile", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Require client certificates signed by the authorities in this PEM file
    #[arg(long, visible_alias = "ssl-ca-certs", value_name = "FILE")]
    pub(crate) tls_client_ca: Option<PathBuf>,
    /// Log every HTTP request: its id, status and duration
    #[arg(long)]
    pub(crate) access_log: bool,
    /// Export a trace of every request to a collector that takes OTLP over HTTP, such as
    /// http://HOST:4318/v1/traces; this path is added if there is none. OpenTelemetry's environment
    /// variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER ..) apply
    /// [default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT in the
    /// environment]
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_traces_endpoint: Option<String>,
    /// Let all who may use the API load and unload LoRA adapters (/v1/load_lora_adapter,
    /// /v1/unload_lora_adapter); otherwise only operators may: holders of the cluster secret, or
    /// without one, users of this host
    #[arg(long)]
    pub(crate) allow_runtime_lora_updating: bool,
}

/// Variables of chat templates.
#[derive(Clone, Debug, Default)]
pub(crate) struct Variables(Map<String, Value>);

/// Longest JSON of them, in bytes: every conversation is rendered with them.
const VARIABLES_BYTES: usize = 64 << 10;

fn parse_variables(text: &str) -> Result<Variables, String> {
    if text.len() > VARIABLES_BYTES {
        return Err(format!("it has {} bytes, the limit is {VARIABLES_BYTES}", text.len()));
    }
    let map: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))?;
    match map.keys().find(|key| RESERVED.contains(&key.as_str())) {
        Some(key) => Err(format!("`{key}` cannot be given here: each request has its own")),
        None => Ok(Variables(map)),
    }
}

fn parse_generation(text: &str) -> Result<GenerationSource, String> {
    match text {
        "auto" => Ok(GenerationSource::Model),
        "vllm" => Ok(GenerationSource::None),
        path if Path::new(path).exists() => Ok(GenerationSource::Other(path.into())),
        _ => Err("it must be auto, vllm, or a file or folder that exists".to_owned()),
    }
}

/// A key, never shown.
#[derive(Clone)]
pub(crate) struct Key(Zeroizing<String>);

impl Key {
    /// What `Authorization` has for it.
    pub(crate) fn bearer(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("Bearer {}", *self.0))
    }
}

/// Takes a key from the command line, or from the environment.
pub(crate) fn parse_key(key: &str) -> Result<Key, String> {
    Ok(Key(Zeroizing::new(key.to_owned())))
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// Checks the options and reads the file of keys. Logs when HTTP is served at `endpoint` without
/// any protection.
pub(crate) fn options(args: &ApiArgs, endpoint: &Endpoint) -> Result<ApiOptions, CliError> {
    if let Endpoint::Unix(_) = endpoint {
        check_socket(args)?;
    }
    for origin in &args.allowed_origins {
        let page = ["http://", "https://"].iter().find_map(|scheme| origin.strip_prefix(scheme));
        if origin != "*" && page.is_none_or(|page| page.is_empty() || page.contains('/')) {
            return Err(CliError::Usage(format!(
                "--allowed-origins {origin}: an origin is https://HOST or http://HOST:PORT, \
                 without a path; or *"
            )));
        }
    }
    if let Some(file) = &args.chat_template
        && let Err(error) = std::fs::File::open(file)
    {
        let file = file.display();
        return Err(CliError::Usage(format!("--chat-template {file}: {error}")));
    }
    let keys = keys(args)?;
    if let Endpoint::Tcp(listen) = endpoint
        && is_open(*listen, &keys, args)
    {
        tracing::warn!(
            %listen,
            "anyone who can reach this address can use the API: there are no API keys \
             (--api-key-file), and no client certificates are required (--tls-client-ca)"
        );
    }
    let reasoning = args.reasoning_parser.as_deref().and_then(Reasoning::of_name);
    if let (Some(calls), Some(reasoning)) = (args.tool_call_parser, reasoning)
        && (calls == CallFormat::Harmony) != (reasoning == Reasoning::Harmony)
    {
        return Err(CliError::Usage(format!(
            "--tool-call-parser {} and --reasoning-parser {} cannot be combined: openai and \
             openai_gptoss are one format",
            calls.name(),
            args.reasoning_parser.as_deref().unwrap_or_default()
        )));
    }
    Ok(ApiOptions {
        keys,
        text: TextOptions {
            config_overrides: args.hf_overrides.clone().unwrap_or_default(),
            chat_template: args.chat_template.clone(),
            variables: args.default_chat_template_kwargs.clone().unwrap_or_default().0,
            generation: args.generation_config.clone(),
            sampling: args.override_generation_config.unwrap_or_default(),
            describes_tokenizer: args.enable_tokenizer_info_endpoint,
        },
        reports_usage: args.enable_force_include_usage,
        tokens_by_id: args.return_tokens_as_token_ids,
        max_body_bytes: args.max_body_bytes,
        max_logprobs: args.max_logprobs,
        allowed_origins: args.allowed_origins.clone(),
        access_log: args.access_log,
        runtime_adapters: args.allow_runtime_lora_updating,
        tls: tls(args)?,
        root_path: args.root_path.clone().unwrap_or_default(),
        traces: traces::start(args.otlp_traces_endpoint.as_deref())?,
        tool_calls: args.tool_call_parser,
        reasoning,
        share_prefix_cache: args.share_prefix_cache,
        connections: args
            .max_connections_per_address
            .map_or_else(ConnectionBound::default, ConnectionBound::Of),
    })
}

/// Rejects what a Unix socket does not have.
fn check_socket(args: &ApiArgs) -> Result<(), CliError> {
    let no_tls = "there is no TLS on a Unix socket";
    let no_address = "who uses a Unix socket has no address";
    let is_bound = args.max_connections_per_address.is_some_and(|most| most > 0);
    let given = [
        ("--tls-certificate", args.tls_certificate.is_some(), no_tls),
        ("--tls-key", args.tls_key.is_some(), no_tls),
        ("--tls-client-ca", args.tls_client_ca.is_some(), no_tls),
        ("--max-connections-per-address", is_bound, no_address),
    ];
    match given.into_iter().find(|(_, is_given, _)| *is_given) {
        Some((option, _, why)) => {
            Err(CliError::Usage(format!("--uds and {option} cannot be combined: {why}")))
        }
        None => Ok(()),
    }
}

/// Whether other hosts may use the API without any credential.
fn is_open(listen: SocketAddr, keys: &ApiKeys, args: &ApiArgs) -> bool {
    !listen.ip().to_canonical().is_loopback() && keys.is_empty() && args.tls_client_ca.is_none()
}

/// Smallest bound on bodies: no useful request takes less.
const BODY_BYTES_MIN: u64 = 1024;

fn parse_body_bytes(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes if bytes < BODY_BYTES_MIN => Err(format!("must be at least {BODY_BYTES_MIN} bytes")),
        bytes => Ok(bytes),
    }
}

/// The names of parsers that [`Reasoning::of_name`] knows.
const REASONING: [&str; 13] = [
    "think",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "ernie45",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "olmo3",
    "openai_gptoss",
    "seed_oss",
    "step3",
];

fn parse_format(name: &str) -> Result<CallFormat, String> {
    let found = CallFormat::of_name(name);
    found.ok_or_else(|| {
        let names: Vec<&str> = CallFormat::names().collect();
        format!("one of {}", names.join(", "))
    })
}

fn tls(args: &ApiArgs) -> Result<Option<Tls>, CliError> {
    let files = tls_files(
        args.tls_certificate.as_ref(),
        args.tls_key.as_ref(),
        args.tls_client_ca.as_ref(),
    )?;
    let started = files.map(|files| Tls::start(files, LOOK_EVERY)).transpose();
    started.map_err(|error| CliError::Usage(error.to_string()))
}

/// Returns the files of HTTPS, if it is to be served.
pub(crate) fn tls_files(
    certificate: Option<&PathBuf>,
    key: Option<&PathBuf>,
    client_authority: Option<&PathBuf>,
) -> Result<Option<TlsFiles>, CliError> {
    match (certificate, key) {
        (Some(certificate), Some(key)) => Ok(Some(TlsFiles {
            certificate: certificate.clone(),
            key: key.clone(),
            client_authority: client_authority.cloned(),
        })),
        (None, None) if client_authority.is_none() => Ok(None),
        (None, None) => {
            let message = "--tls-client-ca needs HTTPS: give --tls-certificate and --tls-key";
            Err(CliError::Usage(message.to_owned()))
        }
        _ => {
            let message = "--tls-certificate and --tls-key belong together: give both";
            Err(CliError::Usage(message.to_owned()))
        }
    }
}

fn keys(args: &ApiArgs) -> Result<ApiKeys, CliError> {
    let bound = |number: u32| (number > 0).then_some(number);
    let limits = KeyLimits {
        requests: bound(args.max_requests_per_key),
        per_minute: bound(args.requests_per_minute_per_key),
        tokens_per_minute: bound(args.tokens_per_minute_per_key),
    };
    let bad = |error: ApiKeyError| {
        CliError::Usage(format!("--api-key, --api-key-file or {VARIABLE}: {error}"))
    };
    let given = args.api_key.iter().map(|key| ApiKey::new(&key.0, limits));
    let mut given: Vec<ApiKey> = given.collect::<Result<_, _>>().map_err(bad)?;
    if let Some(path) = args.api_key_file.clone() {
        let at = format!("--api-key-file {}", path.display());
        let started = KeyFile { path, others: given, limits }.start(LOOK_EVERY);
        return started.map_err(|error| CliError::Usage(format!("{at}: {error}")));
    }
    if given.is_empty()
        && let Some(key) = std::env::var_os(VARIABLE)
    {
        // A key that cannot be read must not open the API.
        let key = key.into_string();
        let key = key.map_err(|_| CliError::Usage(format!("{VARIABLE} is not UTF-8")))?;
        given.push(ApiKey::new(&Zeroizing::new(key), limits).map_err(bad)?);
    }
    if given.is_empty() && limits != KeyLimits::default() {
        let message = "--max-requests-per-key, --requests-per-minute-per-key and \
                       --tokens-per-minute-per-key need API keys: give --api-key-file";
        return Err(CliError::Usage(message.to_owned()));
    }
    Ok(ApiKeys::of(given))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use clap::Parser;

    use super::*;

    const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8000);

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        api: ApiArgs,
    }

    fn parse(words: &[&str]) -> Result<ApiOptions, String> {
        let line = Line::try_parse_from([&["x"], words].concat()).map_err(|e| e.to_string())?;
        assert!(!format!("{:?}", line.api).contains("hidden"), "keys are never shown");
        options(&line.api, &LOOPBACK.into()).map_err(|error| error.to_string())
    }

    #[test]
    fn harmony_is_one_format_under_two_names() {
        let both = ["--tool-call-parser", "openai", "--reasoning-parser", "openai_gptoss"];
        let options = parse(&both).unwrap();
        assert_eq!(options.tool_calls, Some(CallFormat::Harmony));
        assert_eq!(options.reasoning, Some(Reasoning::Harmony));
        assert_eq!(parse(&both[2..]).unwrap().tool_calls, None);
        assert_eq!(parse(&[]).unwrap().reasoning, None);
        for name in REASONING {
            let known = parse(&["--reasoning-parser", name]).unwrap().reasoning;
            assert!(known.is_some(), "{name}");
        }
        for wrong in [["openai", "qwen3"], ["hermes", "openai_gptoss"]] {
            let words = ["--tool-call-parser", wrong[0], "--reasoning-parser", wrong[1]];
            let error = parse(&words).unwrap_err();
            assert!(error.contains(wrong[0]) && error.contains("cannot be combined"), "{error}");
        }
    }

    #[test]
    fn unknown_parsers_are_answered_with_all_names() {
        let error = parse(&["--tool-call-parser", "nonsense"]).unwrap_err();
        assert!(error.contains("--tool-call-parser"), "{error}");
        let known: Vec<&str> = error.split([' ', ',', '\n']).collect();
        let names = [
            "hermes",
            "kimi_k2",
            "deepseek_v32",
            "ernie45",
            "glm47",
            "llama4_json",
            "llama4_pythonic",
            "olmo3",
            "qwen3_xml",
        ];
        for name in names {
            assert!(known.contains(&name), "{name}: {error}");
            assert!(parse(&["--tool-call-parser", name]).is_ok(), "{name}");
        }
        let error = parse(&["--reasoning-parser", "nonsense"]).unwrap_err();
        assert!(error.contains("--reasoning-parser"), "{error}");
        for name in REASONING {
            assert!(error.contains(name), "{name}: {error}");
        }
    }

    #[test]
    fn negative_numbers_are_told_with_the_option_and_its_bounds() {
        let args = ["tutti", "up", "--max-logprobs", "-1"];
        let error = super::super::options::command().try_get_matches_from(args).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("--max-logprobs") && error.contains("0..=128"), "{error}");
    }

    #[test]
    fn keys_come_from_the_line_and_a_file_and_bad_ones_are_not_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "hidden-a\n\n  hidden-b  \n").unwrap();
        let path = file.path().to_str().unwrap();
        let both = parse(&["--api-key", "hidden-c", "--api-key-file", path]).unwrap();
        assert_eq!(format!("{:?}", both.keys), "ApiKeys { number: 3 }");
        std::fs::write(&file, "hidden-a\nhidden b # c\n").unwrap();
        let error = parse(&["--api-key-file", path]).unwrap_err();
        assert!(error.contains(path) && error.contains("line 2") && !error.contains("hidden"));
        std::fs::write(&file, "# nobody\n").unwrap();
        assert!(parse(&["--api-key-file", path]).unwrap_err().contains("no key"));
        std::fs::write(&file, "hidden-a\n").unwrap();
        for (mode, private) in [(0o600, true), (0o644, false), (0o640, false), (0o400, true)] {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&file, mode).unwrap();
            let parsed = parse(&["--api-key-file", path]);
            let refused = parsed.is_err_and(|error| {
                error.contains(path)
                    && error.contains("others may read it")
                    && error.contains("chmod")
            });
            assert_ne!(refused, private);
        }
        std::fs::write(&file, "hidden-a requests=2\nhidden-b hidden\n").unwrap();
        let error = parse(&["--api-key-file", path]).unwrap_err();
        assert!(error.contains("line 2") && !error.contains("hidden"), "{error}");
        assert!(parse(&["--max-requests-per-key", "2"]).unwrap_err().contains("--api-key-file"));
        assert!(parse(&["--max-requests-per-key", "2", "--api-key", "hidden"]).is_ok());
        assert!(parse(&["--api-key-file", "/no/such"]).unwrap_err().contains("/no/such"));
        let error = parse(&["--api-key", "hidden key"]).unwrap_err();
        assert!(error.contains("--api-key") && !error.contains("hidden"), "{error}");
    }

    #[test]
    fn files_that_are_none_and_bounds_that_leave_nothing_are_refused() {
        let error = parse(&["--chat-template", "/no/such.jinja"]).unwrap_err();
        assert!(error.contains("--chat-template /no/such.jinja"), "{error}");
        let error = parse(&["--max-body-bytes", "1"]).unwrap_err();
        assert!(error.contains("--max-body-bytes") && error.contains("1024"), "{error}");
    }

    #[test]
    fn defaults_of_requests_are_checked_at_the_start() {
        let options = parse(&[
            "--default-chat-template-kwargs",
            r#"{"enable_thinking": false}"#,
            "--generation-config",
            "vllm",
            "--override-generation-config",
            r#"{"temperature": 0.5}"#,
            "--enable-force-include-usage",
            "--return-tokens-as-token-ids",
        ])
        .unwrap();
        assert_eq!(options.text.variables["enable_thinking"], false);
        assert_eq!(options.text.generation, GenerationSource::None);
        assert_eq!(options.text.sampling.temperature, Some(0.5));
        assert!(options.reports_usage && options.tokens_by_id);
        assert_eq!(parse(&[]).unwrap().text, TextOptions::default());
        for (option, value, what) in [
            ("--default-chat-template-kwargs", "[]", "JSON object"),
            ("--default-chat-template-kwargs", r#"{"messages": 1}"#, "`messages`"),
            ("--generation-config", "/no/such", "auto, vllm"),
            ("--override-generation-config", r#"{"top_p": 2}"#, "`top_p` is 2"),
        ] {
            let error = parse(&[option, value]).unwrap_err();
            assert!(error.contains(option) && error.contains(what), "{error}");
        }
        let long = format!("{{\"a\": \"{}\"}}", "x".repeat(VARIABLES_BYTES));
        assert!(parse(&["--default-chat-template-kwargs", &long]).unwrap_err().contains("65536"));
    }

    #[test]
    fn an_open_api_is_noticed() {
        let open = |ip: IpAddr, words: &[&str]| {
            let api = Line::try_parse_from([&["x"], words].concat()).unwrap().api;
            is_open(SocketAddr::new(ip, 8000), &keys(&api).unwrap(), &api)
        };
        let all = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        assert!(open(all, &[]) && open(IpAddr::V6(Ipv6Addr::UNSPECIFIED), &[]));
        assert!(!open(all, &["--api-key", "a"]) && !open(all, &["--tls-client-ca", "ca.pem"]));
        assert!(!open(LOOPBACK.ip(), &[]) && !open("::ffff:127.0.0.1".parse().unwrap(), &[]));
    }

    #[test]
    fn connections_of_an_address_are_bounded_as_asked_for() {
        let of = |words: &[&str]| parse(words).unwrap().connections;
        assert_eq!(of(&[]), ConnectionBound::OfInternet);
        assert_eq!(of(&["--max-connections-per-address", "0"]), ConnectionBound::Of(0));
        assert_eq!(of(&["--max-connections-per-address", "40"]), ConnectionBound::Of(40));
    }

    #[test]
    fn a_unix_socket_has_neither_tls_nor_addresses() {
        let socket = Endpoint::Unix("/run/tutti.sock".into());
        let check = |words: &[&str]| {
            let line = Line::try_parse_from([&["x"], words].concat()).unwrap();
            options(&line.api, &socket).map(drop)
        };
        assert!(check(&[]).is_ok() && check(&["--max-connections-per-address", "0"]).is_ok());
        for (option, value, why) in [
            ("--tls-certificate", "c.pem", "no TLS"),
            ("--tls-key", "k.pem", "no TLS"),
            ("--tls-client-ca", "a.pem", "no TLS"),
            ("--max-connections-per-address", "9", "no address"),
        ] {
            let error = check(&[option, value]).unwrap_err();
            let (code, error) = (error.code(), error.to_string());
            assert_eq!(code, 2, "{error}");
            for part in ["--uds", option, why] {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn a_root_path_is_checked_and_the_tokenizer_is_described_when_asked_for() {
        let options = parse(&["--root-path", "/llm/a", "--enable-tokenizer-info-endpoint"]);
        let options = options.unwrap();
        assert_eq!(options.root_path.url(), "/llm/a");
        assert!(options.text.describes_tokenizer);
        assert_eq!(parse(&[]).unwrap().root_path, RootPath::default());
        assert!(!parse(&[]).unwrap().text.describes_tokenizer);
        for (wrong, why) in [("llm", "begin with"), ("/llm/", "end with"), ("/v1", "/v1/compl")] {
            let error = parse(&["--root-path", wrong]).unwrap_err();
            assert!(error.contains("--root-path") && error.contains(why), "{error}");
        }
    }

    #[test]
    fn origins_are_origins() {
        let origins = parse(&["--allowed-origins", "https://a.example,http://b:8080"]).unwrap();
        assert_eq!(origins.allowed_origins, ["https://a.example", "http://b:8080"]);
        for wrong in ["a.example", "https://a.example/", "https://"] {
            assert!(
                parse(&["--allowed-origins", wrong]).unwrap_err().contains("--allowed-origins")
            );
        }
    }
}

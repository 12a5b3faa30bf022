//! Options of the roles that serve HTTP: `tutti up` and `tutti coordinator`.
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use coordinator::metrics::log_line::Field;
use shared::protocol::{Dtype, KvCacheDtype, Quantization};

use super::super::api::ApiArgs;
use super::super::hub::HubArgs;
use super::super::lora::LoraArgs;
use super::super::resources::PlacementArgs;
use super::super::speculative::{self, Speculative};
use super::super::vllm;
use super::{parse_bytes, parse_socket};

/// A server whose metric names can be published too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompatArg {
    /// The vllm: names, a series for each replica
    Vllm,
    /// The vllm: names, one series for the whole cluster: for gateways that choose among servers
    VllmCluster,
    /// The aphrodite: names
    Aphrodite,
}

/// Which waiting request is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArg {
    /// In order of arrival
    Fcfs,
    /// By the requests' `priority`, lowest first; equal ones in order of arrival
    Priority,
}

/// The names of the log line's fields.
pub(super) fn log_fields() -> clap::builder::PossibleValuesParser {
    clap::builder::PossibleValuesParser::new(Field::ALL.map(|(name, _)| name))
}

/// Maximum number of tokens in one step; absent: as suits the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepTokens(pub(crate) Option<u32>);

/// Parses `auto` or a number.
fn parse_step_tokens(text: &str) -> Result<StepTokens, String> {
    const MOST: u32 = 131_072;
    if text == "auto" {
        return Ok(StepTokens(None));
    }
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number));
    number
        .map(|number| StepTokens(Some(number)))
        .ok_or_else(|| format!("expected a number from 1 to {MOST}, or auto"))
}

/// Options of the roles that serve HTTP.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServingArgs {
    /// Model: a name on Hugging Face's hub (ORG/NAME), of which every host downloads what it needs,
    /// or a folder in its format, at the same path on every worker's host [default: models/demo]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    /// The model's names in the API, separated by spaces or commas: requests may give any, answers
    /// say the first [default: the model's name on the hub, or the folder's]
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) served_model_name: Vec<String>,
    /// Type of the activations in matrix products: bfloat16 (rounded; twice as fast on CPUs with
    /// bf16 instructions), float32, or auto: bfloat16 if the model's config.json says so, if its
    /// weights are packed integers (GPTQ, AWQ), and on GPUs; otherwise float32
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = parse_dtype)]
    pub(crate) dtype: Dtype,
    /// Quantise weights while loading: int8 (halves the memory of the layers and, where memory is
    /// the bottleneck, decodes a few sequences 1.6 times as fast, at a small loss of precision) or
    /// none
    #[arg(long, value_name = "METHOD", default_value = "none", value_parser = parse_quantization)]
    pub(crate) quantization: Quantization,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    /// Workers per replica: each holds 1/N of every layer [default: 2; for `up` at most the number
    /// of workers it starts]
    #[arg(long, alias = "tensor-parallel-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) tensor_parallel: Option<u32>,
    /// Continue with fewer workers per replica, down to this many, while some are missing; return
    /// to --tensor-parallel when they are back [default: --tensor-parallel]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) min_tensor_parallel: Option<u32>,
    #[command(flatten)]
    pub(crate) placement: PlacementArgs,
    /// Maximum number of replicas; workers beyond that are kept as spares [default: as many as the
    /// workers allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) replicas: Option<u32>,
    /// Address to serve HTTP on
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: SocketAddr,
    /// Serve HTTP on a Unix socket with this path instead. Who may use it depends on the process's
    /// umask and on the folder; there is no TLS
    #[arg(long, value_name = "PATH", value_parser = parse_socket, conflicts_with = "listen")]
    pub(crate) uds: Option<PathBuf>,
    /// Address that workers and front ends connect to [default: 127.0.0.1:8001; for `up` any free
    /// port]
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) cluster_listen: Option<SocketAddr>,
    /// Let workers and front ends on other hosts join without a secret
    #[arg(long)]
    pub(crate) insecure_no_auth: bool,
    /// Maximum length of prompt plus output, in tokens; also as 4k (4,000), 4K (4,096), 1m or 1M
    /// [default: the model's own limit]
    #[arg(long, value_name = "TOKENS", value_parser = vllm::parse_length)]
    pub(crate) max_model_len: Option<u32>,
    /// Maximum number of sequences in one engine step
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_num_seqs: u32,
    /// Maximum number of tokens in one engine step (longer prompts are prefilled in chunks): a
    /// number, or auto: 2048 for replicas on GPUs, 512 on CPUs, or --max-num-seqs if that is more
    #[arg(long, value_name = "TOKENS", default_value = "auto", value_parser = parse_step_tokens)]
    pub(crate) max_num_batched_tokens: StepTokens,
    /// Maximum number of prompt tokens in one engine step while sequences decode, which wait for
    /// all of it: a number, or auto: no bound for replicas on GPUs, a quarter of a step on CPUs,
    /// unless --max-num-batched-tokens is given
    #[arg(long, value_name = "TOKENS", default_value = "auto", value_parser = parse_step_tokens)]
    pub(crate) max_mixed_prefill_tokens: StepTokens,
    /// Tokens per KV cache block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) block_size: u32,
    /// Type of the KV cache: fp8 (E4M3, also called fp8_e4m3: room for twice as many tokens as
    /// bfloat16, and half the bytes to read for each, at a small loss of precision) or auto: that
    /// of the activations
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = parse_kv_cache_dtype)]
    pub(crate) kv_cache_dtype: KvCacheDtype,
    /// KV cache memory per worker, in bytes or with a suffix KiB, MiB or GiB [default: 512MiB on
    /// CPUs, on GPUs what --gpu-memory-utilization leaves]
    #[arg(long, alias = "kv-cache-memory-bytes", value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) kv_cache_memory: Option<u64>,
    /// Host memory per worker for the KV blocks of requests that are preempted when the KV cache is
    /// full, so that they need not be recomputed: in GiB, or bytes with a suffix KiB, MiB or GiB; 0
    /// to recompute them
    #[arg(long, value_name = "GIB", default_value = "0", value_parser = parse_swap_space)]
    pub(crate) swap_space: u64,
    /// Compute every prompt in full, even if the KV cache still holds its beginning
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,
    /// Number of states kept for prefix caching by models with linear attention (Qwen3-Next,
    /// Qwen3.5, Granite 4.0 H), each of which takes memory [default: half of --max-num-seqs, at
    /// least 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=65_536))]
    pub(crate) prefix_states: Option<u32>,
    /// Speculative decoding: draft tokens and verify several in one step; the text stays the same.
    /// JSON as in vLLM. To draft from repetitions in the prompt and the text so far:
    /// {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2};
    /// or by a small model with the same tokens, a name on the hub, or a folder that the host of
    /// each replica's rank 0 has at this path:
    /// {"method":"draft_model","model":"/models/small","num_speculative_tokens":5};
    /// with "disable_by_batch_size":N nothing is drafted while more than N sequences run
    #[arg(long, value_name = "JSON", value_parser = speculative::parse)]
    pub(crate) speculative_config: Option<Speculative>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Which waiting request is scheduled next: the first to arrive, or the one with the lowest
    /// `priority` (among equal ones, the first to arrive). When KV cache memory runs out, requests
    /// are preempted from the other end of that order. Less urgent requests can wait indefinitely
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = PolicyArg::Fcfs)]
    pub(crate) scheduling_policy: PolicyArg,
    /// Maximum number of requests per replica that wait for their first step; more get 429. Their
    /// choices (n) and prompt tokens are limited too, to 2 and 4,096 times this number, but no less
    /// than 16,384 and 33,554,432
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_queued_requests: u32,
    /// Give up on an engine step after this many seconds and form the replica again; a worker whose
    /// GPU is still not done 10 seconds later ends
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) step_timeout: u64,
    /// Give up a step that takes ten times as long as steps of its size do, but not within so many
    /// seconds; with what --step-timeout says, or more, only that counts
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) min_step_timeout: u64,
    /// Give up forming a replica when a rank has been silent for this many seconds; must exceed the
    /// time to load the largest matrix and, on GPU hosts, to pin --swap-space
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=36_000))]
    pub(crate) form_timeout: u64,
    /// Fail requests when no replica has been ready for this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) unavailable_timeout: u64,
    /// Fail requests with 503 if they have waited this many seconds without starting; 0 for no
    /// limit
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub(crate) max_queue_wait: u64,
    /// Seconds that running requests get to finish on shutdown (SIGTERM, Ctrl-C)
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) drain_timeout: u64,
    /// Also serve /metrics, /live and /ready on a separate address, for scrapers that must not
    /// reach the API and for probes that must get through whatever clients do
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Also publish metrics under the names of other servers, comma separated, so that their
    /// dashboards and autoscaling rules work unchanged
    #[arg(long, value_name = "SERVERS", value_enum, value_delimiter = ',')]
    pub(crate) metrics_compat: Vec<CompatArg>,
    /// Record no metrics, to see what they cost
    #[arg(long)]
    pub(crate) disable_metrics: bool,
    /// Fields of the engine statistics line in the log, comma separated
    #[arg(long, value_name = "FIELDS", value_delimiter = ',', value_parser = log_fields(),
          default_value = "prompt-throughput,generation-throughput,running,swapped,pending,gpu-cache,cpu-cache")]
    pub(crate) log_stats_fields: Vec<String>,
    /// Also append the engine statistics to this file as JSON lines; - for stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) log_stats_json: Option<PathBuf>,
    /// Seconds between two engine statistics lines in the log; 0 turns them off
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) log_stats_interval: u64,
}

/// Parses `auto`, `float32`, `bfloat16`.
pub(super) fn parse_dtype(text: &str) -> Result<Dtype, String> {
    if let "float16" | "half" = text {
        return Err(
            "computing in float16 is not supported: choose bfloat16 or float32 (checkpoints in \
             float16 are fine)"
                .to_owned(),
        );
    }
    let found = Dtype::ALL.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| {
        let names = Dtype::ALL.map(Dtype::name).join(", ");
        format!("it must be one of: {names}")
    })
}

/// Parses `auto`, `fp8`, `fp8_e4m3`.
pub(super) fn parse_kv_cache_dtype(text: &str) -> Result<KvCacheDtype, String> {
    match text {
        "auto" => Ok(KvCacheDtype::Auto),
        "fp8" | "fp8_e4m3" => Ok(KvCacheDtype::Fp8),
        "float32" | "bfloat16" | "float16" | "half" | "bf16" => {
            Err("without fp8 the KV cache has the type of the activations: choose auto, and \
             --dtype bfloat16 or float32"
                .to_owned())
        }
        _ => Err("it must be one of: auto, fp8, fp8_e4m3 (the only 8-bit type is E4M3)".to_owned()),
    }
}

/// Parses a number of GiB, such as `4` or `0.5`, or what `parse_bytes` accepts with a unit.
pub(crate) fn parse_swap_space(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let Ok(gib) = text.parse::<f64>() else {
        return parse_bytes(text).map_err(|why| {
            format!("expected GiB, such as 4 or 0.5, or a size with a unit: {why}")
        });
    };
    let bytes = gib * (1u64 << 30) as f64;
    if !(0.0..=(1u64 << 50) as f64).contains(&bytes) {
        return Err("must be 0 to 1048576 GiB".to_owned());
    }
    Ok(bytes as u64)
}

/// Parses `none`, `int8`.
pub(crate) fn parse_quantization(text: &str) -> Result<Quantization, String> {
    let found = Quantization::ALL.into_iter().find(|method| method.name() == text);
    found.ok_or_else(|| {
        let names = Quantization::ALL.map(Quantization::name).join(", ");
        format!(
            "it must be one of: {names} (a checkpoint's own quantisation is read from its \
             config.json)"
        )
    })
}

//! PURE: where traces are exported to, from an option and OpenTelemetry's environment variables,
//! with their names and meanings.
//!
//! A fault of the option is an error. One of the environment, which platforms give to all programs
//! alike, is a warning: OpenTelemetry wants it so, and nobody is to go without answers because
//! their traces cannot be exported.
use std::path::PathBuf;
use std::time::Duration;

use ureq::http::{HeaderName, HeaderValue, Uri};

use super::sampler::{NAMES, Sampler};

/// The option.
pub const OPTION: &str = "--otlp-traces-endpoint";

const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Where collectors take traces.
const PATH: &str = "/v1/traces";
/// Where collectors take gRPC.
const GRPC_PORT: u16 = 4317;
/// Maximum number of attributes of the resource, and of headers.
const PAIRS_MAX: usize = 128;
/// Longest value of either, in bytes.
const VALUE_MAX: usize = 4096;

/// Variables that other programs follow and this one does not.
const WITHOUT_EFFECT: [&str; 8] = [
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_EXPERIMENTAL_CONFIG_FILE",
    "OTEL_CONFIG_FILE",
];

/// See the module's documentation.
#[derive(Clone, PartialEq)]
pub struct Settings {
    /// Where messages are sent.
    pub endpoint: String,
    /// Headers of every message; they may hold credentials.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Longest time that one attempt to send may take.
    pub timeout: Duration,
    /// The authorities to trust for https.
    pub certificate: Option<PathBuf>,
    /// What to present to the collector: a certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
    /// What describes this process.
    pub resource: Vec<(String, String)>,
    /// Which requests are traced.
    pub sampler: Sampler,
    /// How spans are gathered.
    pub batches: Batches,
}

/// How spans are gathered into messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches {
    /// Longest time that a span waits for others.
    pub delay: Duration,
    /// Most spans that wait.
    pub queued: usize,
    /// Most spans of one message.
    pub spans: usize,
    /// How long a message is tried.
    pub patience: Duration,
}

impl Default for Batches {
    fn default() -> Self {
        Self {
            delay: Duration::from_secs(5),
            queued: 2048,
            spans: 512,
            patience: Duration::from_secs(30),
        }
    }
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// What was read.
#[derive(Debug, Default)]
pub struct Reading {
    /// The settings, if traces are exported.
    pub settings: Option<Settings>,
    /// What is wrong or has no effect, one line each.
    pub warnings: Vec<String>,
}

/// Reads the settings; `variable` looks up a variable of the environment.
///
/// # Errors
/// What is wrong, if the option asks for what cannot be.
pub fn read(
    option: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Reading, String> {
    // As OpenTelemetry has it, an empty variable is none.
    let variable = |name: &str| {
        variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    };
    let is_asked =
        option.is_some() || [TRACES_ENDPOINT, ENDPOINT].iter().any(|it| variable(it).is_some());
    if !is_asked {
        return Ok(Reading::default());
    }
    let mut reader = Reader { variable: &variable, warnings: Vec::new() };
    if let Some(why) = reader.switched_off() {
        reader.warnings.push(format!("traces are not exported: {why}"));
        return Ok(Reading { settings: None, warnings: reader.warnings });
    }
    match reader.settings(option) {
        Ok(settings) => Ok(Reading { settings: Some(settings), warnings: reader.warnings }),
        Err(why) if option.is_some() => Err(why),
        Err(why) => {
            reader.warnings.push(format!("traces are not exported: {why}"));
            Ok(Reading { settings: None, warnings: reader.warnings })
        }
    }
}

struct Reader<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    warnings: Vec<String>,
}

impl Reader<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.variable)(name)
    }

    /// The variable of traces, or that of all signals, and its name.
    fn of_traces(&self, rest: &str) -> Option<(String, String)> {
        let names =
            [format!("OTEL_EXPORTER_OTLP_TRACES_{rest}"), format!("OTEL_EXPORTER_OTLP_{rest}")];
        names.into_iter().find_map(|name| self.get(&name).map(|value| (name, value)))
    }

    fn warn(&mut self, message: String) {
        self.warnings.push(message);
    }

    /// Why the environment wants no traces, if it does not.
    fn switched_off(&mut self) -> Option<&'static str> {
        if self.get("OTEL_SDK_DISABLED").is_some_and(|it| it.eq_ignore_ascii_case("true")) {
            return Some("OTEL_SDK_DISABLED is true");
        }
        let exporters = self.get("OTEL_TRACES_EXPORTER")?;
        let names: Vec<&str> = exporters.split(',').map(str::trim).collect();
        if names == ["none"] {
            return Some("OTEL_TRACES_EXPORTER is none");
        }
        if names != ["otlp"] {
            self.warn(format!(
                "OTEL_TRACES_EXPORTER is {exporters}: traces are exported by OTLP alone"
            ));
        }
        None
    }

    fn settings(&mut self, option: Option<&str>) -> Result<Settings, String> {
        let endpoint = self.endpoint(option)?;
        self.protocol(&endpoint)?;
        if let Some((name, value)) = self.of_traces("COMPRESSION").filter(|(_, it)| it != "none") {
            self.warn(format!("{name} is {value}: spans are sent without compression"));
        }
        if let Some(propagators) = self.get("OTEL_PROPAGATORS")
            && !propagators.split(',').any(|it| it.trim() == "tracecontext")
        {
            self.warn(format!(
                "OTEL_PROPAGATORS is {propagators}: callers' traces are known by tracecontext \
                 (the header traceparent) alone"
            ));
        }
        let ignored: Vec<&str> =
            WITHOUT_EFFECT.into_iter().filter(|name| self.get(name).is_some()).collect();
        if !ignored.is_empty() {
            self.warn(format!("without effect here: {}", ignored.join(", ")));
        }
        let is_secure = endpoint.starts_with("https:");
        let certificate = self.of_traces("CERTIFICATE").map(|(_, file)| PathBuf::from(file));
        let client = self.client()?;
        if !is_secure && (certificate.is_some() || client.is_some()) {
            self.warn(format!("certificates are for https, and {endpoint} is not"));
        }
        Ok(Settings {
            headers: self.headers()?,
            timeout: self.milliseconds_of_traces("TIMEOUT", Duration::from_secs(10)),
            certificate: certificate.filter(|_| is_secure),
            client: client.filter(|_| is_secure),
            resource: self.resource(),
            sampler: self.sampler(),
            batches: self.batches(),
            endpoint,
        })
    }

    fn endpoint(&mut self, option: Option<&str>) -> Result<String, String> {
        let (name, url) = match option {
            Some(url) => (OPTION, url.to_owned()),
            None => match self.get(TRACES_ENDPOINT) {
                Some(url) => (TRACES_ENDPOINT, url),
                None => (ENDPOINT, self.get(ENDPOINT).unwrap_or_default()),
            },
        };
        let expected = "expected the URL where a collector takes OTLP over HTTP, such as \
                        http://HOST:4318/v1/traces";
        if url.starts_with("grpc") {
            return Err(format!("{name} {url}: gRPC is not supported; {expected}"));
        }
        let parsed: Uri = url.parse().map_err(|_| format!("{name} {url}: {expected}"))?;
        let (Some("http" | "https"), Some(authority)) = (parsed.scheme_str(), parsed.authority())
        else {
            return Err(format!("{name} {url}: {expected}"));
        };
        if authority.as_str().contains('@') {
            // The URL is shown in logs.
            return Err(format!(
                "{name} has a user or password: give credentials in OTEL_EXPORTER_OTLP_HEADERS"
            ));
        }
        if authority.port_u16() == Some(GRPC_PORT) {
            self.warn(format!(
                "{name} {url}: collectors take gRPC on port {GRPC_PORT}; OTLP over HTTP usually \
                 has port 4318"
            ));
        }
        let is_bare = matches!(parsed.path(), "" | "/") && parsed.query().is_none();
        let base = url.trim_end_matches('/');
        Ok(match name {
            ENDPOINT => format!("{base}{PATH}"),
            // vLLM's users give it without a path, for gRPC.
            OPTION if is_bare => format!("{base}{PATH}"),
            _ => url,
        })
    }

    fn protocol(&mut self, endpoint: &str) -> Result<(), String> {
        match self.of_traces("PROTOCOL") {
            Some((name, value)) if value == "grpc" => Err(format!(
                "{name} is grpc, and spans are sent as http/json: set it to http/json, and name \
                 the collector's address for HTTP"
            )),
            Some((name, value)) if value != "http/json" => {
                self.warn(format!("{name} is {value}: spans are sent to {endpoint} as http/json"));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn client(&self) -> Result<Option<(PathBuf, PathBuf)>, String> {
        match (self.of_traces("CLIENT_CERTIFICATE"), self.of_traces("CLIENT_KEY")) {
            (Some((_, certificate)), Some((_, key))) => Ok(Some((certificate.into(), key.into()))),
            (None, None) => Ok(None),
            (Some((name, _)), None) | (None, Some((name, _))) => Err(format!(
                "{name}: OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY \
                 belong together"
            )),
        }
    }

    /// The headers. Their values are never shown.
    fn headers(&self) -> Result<Vec<(HeaderName, HeaderValue)>, String> {
        let Some((name, text)) = self.of_traces("HEADERS") else { return Ok(Vec::new()) };
        let wrong = |what: &str| format!("{name}: {what}; expected KEY=VALUE,KEY=VALUE");
        let pairs = pairs(&text).map_err(|what| wrong(&what))?;
        let header = |(key, value): (String, String)| {
            let key = HeaderName::from_bytes(key.as_bytes());
            let key = key.map_err(|_| wrong("a name is not one of a header"))?;
            let value = HeaderValue::from_str(&value);
            let mut value = value.map_err(|_| {
                wrong(&format!("the value of {key} has characters that no header can"))
            })?;
            value.set_sensitive(true);
            Ok((key, value))
        };
        pairs.into_iter().map(header).collect()
    }

    fn resource(&mut self) -> Vec<(String, String)> {
        const VARIABLE: &str = "OTEL_RESOURCE_ATTRIBUTES";
        let given = self.get(VARIABLE).map(|text| pairs(&text)).unwrap_or(Ok(Vec::new()));
        let mut all = given.unwrap_or_else(|what| {
            // All or nothing, as OpenTelemetry wants it.
            self.warn(format!("{VARIABLE} is ignored: {what}; expected KEY=VALUE,KEY=VALUE"));
            Vec::new()
        });
        if let Some(name) = self.get("OTEL_SERVICE_NAME") {
            all.retain(|(key, _)| key != SERVICE_NAME);
            all.push((SERVICE_NAME.to_owned(), name));
        }
        all
    }

    fn sampler(&mut self) -> Sampler {
        const ARGUMENT: &str = "OTEL_TRACES_SAMPLER_ARG";
        let Some(name) = self.get("OTEL_TRACES_SAMPLER") else { return Sampler::default() };
        let ratio = self.get(ARGUMENT).map(|text| (text.parse().ok(), text));
        let ratio = match ratio {
            Some((Some(ratio), _)) if (0.0..=1.0).contains(&ratio) => ratio,
            Some((_, text)) if name.ends_with("traceidratio") => {
                self.warn(format!("{ARGUMENT} is {text}: it must be 0 to 1; all are traced"));
                1.0
            }
            _ => 1.0,
        };
        Sampler::of_name(&name, ratio).unwrap_or_else(|| {
            self.warn(format!(
                "OTEL_TRACES_SAMPLER is {name}: it must be one of {}; parentbased_always_on is \
                 followed",
                NAMES.join(", ")
            ));
            Sampler::default()
        })
    }

    fn batches(&mut self) -> Batches {
        let usual = Batches::default();
        let queued = self.number("OTEL_BSP_MAX_QUEUE_SIZE", usual.queued as u64, 1, 1 << 20);
        let spans = self.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", usual.spans as u64, 1, 1 << 16);
        let patience = usual.patience.as_millis() as u64;
        let delay = usual.delay.as_millis() as u64;
        let delay = self.number("OTEL_BSP_SCHEDULE_DELAY", delay, 0, MILLISECONDS_MAX);
        let patience = self.number("OTEL_BSP_EXPORT_TIMEOUT", patience, 1, MILLISECONDS_MAX);
        let queued = usize::try_from(queued).unwrap_or(usual.queued);
        Batches {
            delay: Duration::from_millis(delay),
            queued,
            spans: usize::try_from(spans).unwrap_or(usual.spans).min(queued),
            patience: Duration::from_millis(patience),
        }
    }

    fn milliseconds_of_traces(&mut self, rest: &str, usual: Duration) -> Duration {
        let Some((name, _)) = self.of_traces(rest) else { return usual };
        let usual = usual.as_millis() as u64;
        Duration::from_millis(self.number(&name, usual, 1, MILLISECONDS_MAX))
    }

    fn number(&mut self, name: &str, usual: u64, least: u64, most: u64) -> u64 {
        let Some(text) = self.get(name) else { return usual };
        match text.parse() {
            Ok(number) if (least..=most).contains(&number) => number,
            _ => {
                self.warn(format!(
                    "{name} is {text}: it must be {least} to {most}; {usual} is used"
                ));
                usual
            }
        }
    }
}

/// The resource's attribute with the name of the service.
pub const SERVICE_NAME: &str = "service.name";
/// Longest time that a variable can ask for: ten minutes.
const MILLISECONDS_MAX: u64 = 600_000;

/// Parses `KEY=VALUE,KEY=VALUE`, where values are percent-encoded.
fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut all = Vec::new();
    for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
        let (key, value) = pair.split_once('=').ok_or("an entry has no =")?;
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() {
            return Err("an entry has no name".to_owned());
        }
        let value = decoded(value).ok_or_else(|| format!("the value of {key} is badly encoded"))?;
        if key.len() > VALUE_MAX || value.len() > VALUE_MAX {
            return Err(format!("an entry has more than {VALUE_MAX} bytes"));
        }
        all.push((key.to_owned(), value));
        if all.len() > PAIRS_MAX {
            return Err(format!("it has more than {PAIRS_MAX} entries"));
        }
    }
    Ok(all)
}

/// Decodes `%41` to `A`; `None` if it is not UTF-8 then, or a `%` stands alone.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        if *first == b'%' {
            let digits = std::str::from_utf8(more.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &more[2..];
        } else {
            bytes.push(*first);
            rest = more;
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests;

//! Sets up logging: to stderr, at the level of `--log-level` or `RUST_LOG`; and keeps the last
//! lines in memory, for those who ask after the process is gone.
//!
//! A separate thread writes to stderr: its reader may stall, and no logging call waits for it.
//!
//! - `json`: lines as JSON
mod json;

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::OnceLock;
use std::time::Duration;

use shared::log::SharedLog;
use shared::log::queue::LineQueue;
use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata};
use tracing_subscriber::filter::{FilterExt as _, LevelFilter};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

pub(crate) use self::json::LogSource;
use super::options::{CommonArgs, LogFormat};

/// Set by `tutti up` for its workers, whose stderr it passes on to a terminal.
pub(crate) const COLOURS: &str = "TUTTI_LOG_COLOURS";
/// How long an ending process waits until its last lines are written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Noise of libraries. Bytes that are not HTTP, and broken connections, are ERROR lines of the HTTP
/// library's dispatcher: anybody could fill the log with them. Such bytes are answered with 400,
/// and we count and log the fate of requests ourselves.
const QUIET: &str = "actix_server=warn,actix_http::h1::dispatcher=off";

/// Whatever level is asked for: at trace the library logs the bytes of requests, tokens included.
const SECRETIVE: &str = "ureq_proto=off";

/// The variable that has precedence over `--log-level`.
const VARIABLE: &str = "RUST_LOG";

/// Names that stand for themselves in [`VARIABLE`]: the crates of this program, and libraries that
/// log.
const MODULES: [&str; 15] = [
    "tutti",
    "coordinator",
    "worker",
    "shared",
    "kernels",
    "actix",
    "actix_http",
    "actix_server",
    "actix_web",
    "h2",
    "hyper",
    "mio",
    "rustls",
    "tonic",
    "ureq",
];

static STDERR: OnceLock<LineQueue> = OnceLock::new();

/// Who writes the log, if its lines are JSON.
static AS_JSON: OnceLock<LogSource> = OnceLock::new();

/// Installs the global subscriber of a role; later calls change nothing. Returns the last lines, of
/// level info and above whatever goes to stderr, as text.
pub(crate) fn init(args: &CommonArgs, process: &'static str, node: &str) -> SharedLog {
    if args.log_format == LogFormat::Json {
        let _ = AS_JSON.set(LogSource { process, node: node.to_owned() });
    }
    init_at(&args.log_level)
}

/// The same for a command, with text on stderr.
pub(crate) fn init_at(level: &str) -> SharedLog {
    let variable = std::env::var_os(VARIABLE).map(|it| it.to_string_lossy().into_owned());
    let (filter, problem) = filter_of(variable.as_deref(), level);
    let filter = match SECRETIVE.parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    let colours = std::io::stderr().is_terminal() || std::env::var_os(COLOURS).is_some();
    if let Some(queue) = queue() {
        let _ = STDERR.set(queue);
    }
    let to_stderr = fmt::layer()
        .with_writer(|| Stderr)
        // A closed stderr is no reason to panic.
        .log_internal_errors(false);
    let to_stderr: Box<dyn Layer<Registry> + Send + Sync> = match AS_JSON.get() {
        Some(source) => to_stderr.with_ansi(false).event_format(source.clone()).boxed(),
        None => to_stderr.with_ansi(colours).with_target(false).boxed(),
    };
    let to_stderr = to_stderr.with_filter(filter.and(NotAtTheEnd));
    let log = SharedLog::default();
    let kept = log.clone();
    let to_memory = fmt::layer()
        .with_writer(move || kept.writer())
        .with_target(false)
        .with_ansi(false)
        .with_filter(EnvFilter::new(format!("info,{QUIET}")).and(NotAtTheEnd));
    let installed = tracing_subscriber::registry().with(to_stderr).with(to_memory).try_init();
    if installed.is_ok() {
        log_panics();
    }
    if let Some(problem) = problem {
        tracing::warn!("{problem}");
    }
    log
}

/// What is logged, given the environment's variable and the option; and why the variable is of no
/// use, if so.
fn filter_of(variable: Option<&str>, level: &str) -> (EnvFilter, Option<String>) {
    let default = || EnvFilter::new(format!("{level},{QUIET}"));
    let Some(text) = variable.filter(|text| !text.trim().is_empty()) else {
        return (default(), None);
    };
    // A word that is no level is taken for the name of a module, and turns off all others' logs.
    let is_module = |word: &str| word.contains("::") || MODULES.contains(&word);
    let is_bare = |word: &&str| !word.is_empty() && !word.contains(['=', '[']);
    let unknown = text
        .split(',')
        .map(str::trim)
        .filter(is_bare)
        .find(|word| !is_module(word) && word.parse::<LevelFilter>().is_err());
    let problem = match (unknown, EnvFilter::try_new(text)) {
        (None, Ok(filter)) => return (filter, None),
        (Some(word), _) => format!("{word} is neither a level nor a module"),
        (None, Err(error)) => error.to_string(),
    };
    let problem = format!(
        "{VARIABLE}={text}: {problem}: --log-level {level} is used instead (levels are error, \
         warn, info, debug, trace and off; MODULE=LEVEL is for one module)"
    );
    (default(), Some(problem))
}

/// Where the HTTP library takes connections.
const ACCEPTS: &str = "actix_server::accept";

/// Drops what the HTTP library says at the error level of a connection that comes while the server
/// ends.
struct NotAtTheEnd;

impl<S> Filter<S> for NotAtTheEnd {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        match metadata.target() {
            // Decided for each event.
            ACCEPTS => Interest::sometimes(),
            _ => Interest::always(),
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        if event.metadata().target() != ACCEPTS {
            return true;
        }
        let mut found = NoWorkers(false);
        event.record(&mut found);
        !found.0
    }
}

/// Whether an event's message is that no thread of the server is left.
struct NoWorkers(bool);

impl Visit for NoWorkers {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 |= field.name() == "message" && format!("{value:?}") == "No workers";
    }
}

/// Makes a queue to a separate descriptor, so that other writers to stderr do not wait for its
/// lock.
fn queue() -> Option<LineQueue> {
    let stderr = std::io::stderr().as_fd().try_clone_to_owned().ok()?;
    LineQueue::start_telling("log", File::from(stderr), dropped).ok()
}

/// Says how many lines were dropped.
fn dropped(lines: u64) -> String {
    let note = format!("{lines} lines dropped here: the reader was too slow");
    match AS_JSON.get() {
        Some(source) => source.said("WARN", &note),
        None => note,
    }
}

/// The process's stderr, through the queue if there is one.
struct Stderr;

impl std::io::Write for Stderr {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        match STDERR.get() {
            Some(queue) => queue.push(text),
            None => std::io::stderr().write_all(text)?,
        }
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Writes a line beside the log to stderr, as the log's lines are.
pub(crate) fn say(level: &str, line: &str) {
    let line = match AS_JSON.get() {
        Some(source) => source.said(level, line),
        None => line.to_owned(),
    };
    let _ = Stderr.write_all(format!("{line}\n").as_bytes());
}

/// Whether the log's lines are JSON.
pub(crate) fn is_json() -> bool {
    AS_JSON.get().is_some()
}

/// Writes whole lines of the stderr of a process of ours to stderr.
pub(crate) fn pass_on(text: &[u8]) {
    let _ = match AS_JSON.get().filter(|_| !text.is_empty()) {
        Some(source) => {
            Stderr.write_all(source.passed_on(&String::from_utf8_lossy(text)).as_bytes())
        }
        None => Stderr.write_all(text),
    };
}

/// Waits until everything logged is written: at most a second, since nobody may be reading.
pub(crate) fn flush() {
    if let Some(queue) = STDERR.get() {
        queue.flush(LAST_LINES);
    }
}

/// Logs panics, since readers of the log look for them.
fn log_panics() {
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        let message = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let trace = std::backtrace::Backtrace::capture();
        if trace.status() == std::backtrace::BacktraceStatus::Captured {
            say("ERROR", &trace.to_string());
        }
        tracing::error!(thread, place, message, "panicked");
        // This may be the process's last line.
        flush();
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unusable_variable_is_named_and_the_option_used() {
        let filter = |variable: Option<&str>| {
            let (filter, problem) = filter_of(variable, "warn");
            (filter.to_string(), problem.unwrap_or_default())
        };
        let (default, _) = filter(None);
        assert!(default.contains("warn"), "{default}");
        assert_eq!(filter(Some(" ")), (default.clone(), String::new()));
        for (text, word) in [("verbose", "verbose"), ("info,loud", "loud"), ("h2=loud", "h2=loud")]
        {
            let (used, problem) = filter(Some(text));
            assert_eq!(used, default, "{text}");
            assert!(problem.contains(word) && problem.contains("--log-level warn"), "{problem}");
        }
        for text in ["debug", "INFO", "info,h2=off", "coordinator", "shared::wire", "off"] {
            let (used, problem) = filter(Some(text));
            assert_ne!(used, default, "{text}");
            assert_eq!(problem, "", "{text}");
        }
    }

    #[test]
    fn a_server_that_ends_is_not_an_error() {
        let log = SharedLog::default();
        let kept = log.clone();
        let layer = fmt::layer().with_ansi(false).with_writer(move || kept.writer());
        let subscriber = tracing_subscriber::registry().with(layer.with_filter(NotAtTheEnd));
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!(target: "actix_server::accept", "No workers");
            tracing::error!(target: "actix_server::accept", "Error accepting connection");
            tracing::error!("No workers");
        });
        let lines = log.ring().since(0, shared::log::LogLimits::OWN).lines;
        let text: String = lines.concat();
        assert!(lines.len() == 2 && text.contains("accepting"), "{text}");
    }
}

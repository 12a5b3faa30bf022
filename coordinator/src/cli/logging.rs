//! Sets up logging: to stderr, level from `--log-level` or `RUST_LOG`; and the last lines in memory,
//! for those who ask after the process is gone.
use std::io::IsTerminal as _;

use shared::log::SharedLog;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, fmt};

/// Set by `tutti up` for its workers, whose stderr it passes on to a terminal.
pub(crate) const COLOURS: &str = "TUTTI_LOG_COLOURS";

/// Installs the global subscriber; later calls change nothing. Returns the last lines, which are of
/// level info and above whatever goes to stderr.
pub(crate) fn init(level: &str) -> SharedLog {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(format!("{level},actix_server=warn")));
    let colours = std::io::stderr().is_terminal() || std::env::var_os(COLOURS).is_some();
    let to_stderr = fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(colours)
        // A closed stderr is no reason to panic.
        .log_internal_errors(false)
        .with_filter(filter);
    let log = SharedLog::default();
    let kept = log.clone();
    let to_memory = fmt::layer()
        .with_writer(move || kept.writer())
        .with_target(false)
        .with_ansi(false)
        .with_filter(EnvFilter::new("info,actix_server=warn"));
    let installed = tracing_subscriber::registry().with(to_stderr).with(to_memory).try_init();
    if installed.is_ok() {
        log_panics();
    }
    log
}

/// A panic becomes a line of the log too: it is what its readers look for.
fn log_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        default(panic);
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        let message = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(thread, place, message, "panicked");
    }));
}

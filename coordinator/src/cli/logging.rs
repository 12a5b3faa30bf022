//! Sets up logging: to stderr, at the level of `--log-level` or `RUST_LOG`; and keeps the last
//! lines in memory, for those who ask after the process is gone.
//!
//! A separate thread writes to stderr: its reader may stall, and no logging call waits for it.
use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::OnceLock;
use std::time::Duration;

use shared::log::SharedLog;
use shared::log::queue::LineQueue;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, fmt};

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

static STDERR: OnceLock<LineQueue> = OnceLock::new();

/// Installs the global subscriber; later calls change nothing. Returns the last lines, of level
/// info and above whatever goes to stderr.
pub(crate) fn init(level: &str) -> SharedLog {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(format!("{level},{QUIET}")));
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
        .with_filter(EnvFilter::new(format!("info,{QUIET}")));
    let installed = tracing_subscriber::registry().with(to_stderr).with(to_memory).try_init();
    if installed.is_ok() {
        log_panics();
    }
    log
}

/// Makes a queue to a separate descriptor, so that other writers to stderr do not wait for its
/// lock.
fn queue() -> Option<LineQueue> {
    let stderr = std::io::stderr().as_fd().try_clone_to_owned().ok()?;
    LineQueue::start("log", File::from(stderr)).ok()
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

/// Writes another process's output to stderr.
pub(crate) fn pass_on(text: &[u8]) {
    let _ = Stderr.write_all(text);
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
            pass_on(format!("{trace}\n").as_bytes());
        }
        tracing::error!(thread, place, message, "panicked");
        // This may be the process's last line.
        flush();
    }));
}

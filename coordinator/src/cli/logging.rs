//! Sets up logging: to stderr, level from `--log-level` or `RUST_LOG`.
use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// Installs the global subscriber; later calls change nothing.
pub(crate) fn init(level: &str) {
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new(format!("{level},actix_server=warn")));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
}

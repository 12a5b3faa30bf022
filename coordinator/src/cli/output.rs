//! What the program prints for people; logs go through `tracing`.
use std::io::Write as _;

use worker::device::exit_without_handlers;

use super::logging;

/// Prints a line to stdout; a closed pipe is no error.
pub(crate) fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints an error line to stderr, after what was logged; waits briefly until it is written.
pub(crate) fn error_line(message: &str) {
    logging::pass_on(format!("error: {message}\n").as_bytes());
    logging::flush();
}

/// Ends the process with this code, once everything is written, without destructors and exit
/// handlers: for where a GPU may still compute, or has failed. NVIDIA's driver has a handler, too.
pub(crate) fn leave_at_once(code: u8) -> ! {
    logging::flush();
    let _ = std::io::stdout().flush();
    exit_without_handlers(code)
}

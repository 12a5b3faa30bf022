//! What the program prints for people; logs go through `tracing`.
use std::io::Write as _;

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

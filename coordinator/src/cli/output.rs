//! What the program prints for people; logs go through `tracing`.
use std::io::Write as _;

/// Prints a line to stdout; a closed pipe is no error.
pub(crate) fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Prints an error line to stderr.
pub(crate) fn error_line(message: &str) {
    let _ = writeln!(std::io::stderr(), "error: {message}");
}

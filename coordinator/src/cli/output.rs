//! What the program prints for people; logs go through `tracing`.
use std::io::{self, ErrorKind, Write as _};
use std::sync::OnceLock;

use worker::device::exit_without_handlers;

use super::logging;

/// Why a line could not be written, if so: the first such error.
static UNWRITTEN: OnceLock<io::Error> = OnceLock::new();

/// Prints a line to stdout. Servers go on if that fails; commands ask [`unwritten`] at their end.
pub(crate) fn print_line(line: &str) {
    note_write(writeln!(io::stdout(), "{line}"));
}

/// Notes whether stdout took everything.
pub(crate) fn note_write(outcome: io::Result<()>) {
    if let Some(error) = failure(outcome) {
        let _ = UNWRITTEN.set(error);
    }
}

/// What went wrong, if anything: whoever closes a pipe has read enough.
fn failure(outcome: io::Result<()>) -> Option<io::Error> {
    outcome.err().filter(|error| error.kind() != ErrorKind::BrokenPipe)
}

/// Says why something printed is not where stdout leads to, if so.
pub(crate) fn unwritten() -> Option<String> {
    note_write(io::stdout().flush());
    UNWRITTEN.get().map(|error| format!("cannot write to stdout: {error}"))
}

/// Prints an error line to stderr, after what was logged; waits briefly until it is written.
pub(crate) fn error_line(message: &str) {
    logging::say("ERROR", &format!("error: {message}"));
    logging::flush();
}

/// Ends the process with this code, once everything is written, without destructors and exit
/// handlers: for where a GPU may still compute, or has failed. NVIDIA's driver has a handler, too.
pub(crate) fn leave_at_once(code: u8) -> ! {
    logging::flush();
    let _ = io::stdout().flush();
    exit_without_handlers(code)
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    #[test]
    fn a_full_disk_is_a_failure_and_a_closed_pipe_is_none() {
        let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = failure(writeln!(full, "line")).unwrap();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        let (reader, mut writer) = io::pipe().unwrap();
        drop(reader);
        let outcome = writeln!(writer, "line");
        assert!(outcome.is_err() && failure(outcome).is_none());
    }
}

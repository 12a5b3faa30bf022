//! `promtool`, Prometheus's linter for metrics pages.
use std::io::{self, Write as _};
use std::process::{Command, Stdio};

use crate::tools;

/// Returns the output of `promtool check metrics` for a page; empty if it finds nothing. `None` if
/// the tool is missing; it comes with the Prometheus server.
///
/// # Errors
/// When it cannot be run; in continuous integration, also when it is missing; and when it fails
/// without any output.
pub fn check_metrics(page: &str) -> io::Result<Option<String>> {
    let Some(program) = tools::find("promtool") else {
        if std::env::var_os("CI").is_some() {
            return Err(io::Error::other("promtool is needed in continuous integration"));
        }
        let notice = b"promtool is not here; the linter was not asked (tests/run gets it)\n";
        io::stderr().write_all(notice)?;
        return Ok(None);
    };
    let mut child = Command::new(program)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(page.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    let said = [output.stderr, output.stdout].concat();
    if !output.status.success() && said.is_empty() {
        return Err(io::Error::other(format!("promtool: {}", output.status)));
    }
    Ok(Some(String::from_utf8_lossy(&said).into_owned()))
}

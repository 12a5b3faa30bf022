//! House rules that no compiler checks, as tests over the repository's files.
//!
//! Each rule is a function from files to findings. One test checks that this repository keeps it,
//! and one feeds it a violation, because a rule that cannot fail checks nothing. The checks of
//! rustc and clippy (docs on public items, `unwrap`) are not repeated here.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test binary: failing is its job"
)]

mod comments;
mod compose;
mod configs;
mod dependencies;
mod documents;
mod features;
mod kubernetes;
mod licences;
mod metric_names;
mod options;
mod program;
mod purity;
mod rust_code;
mod source;
mod tree;

/// Fails the calling test with one line per finding.
#[track_caller]
fn assert_kept(rule: &str, findings: &[String]) {
    assert!(
        findings.is_empty(),
        "{rule}: {} finding(s)\n  {}\n",
        findings.len(),
        findings.join("\n  ")
    );
}

/// Prints a message past libtest's capture, so that it is seen although no test fails.
fn notice(message: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "tidy: {message}");
}

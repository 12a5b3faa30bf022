//! The dashboards and rules of `cluster-configs`, as Grafana and Prometheus see them.
//!
//! - [`form`]: checks of the files alone: layout, units, the form of queries
//! - [`promtool`]: Prometheus's own checker; every alert can fire
//! - [`live`]: every query against a real Prometheus that scrapes a real cluster
//! - [`files`], [`promql`], [`prometheus`]: the files, the text of queries, the server
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking"
)]

mod files;
mod form;
mod live;
mod prometheus;
mod promql;
mod promtool;

/// Fails the calling test with one line per problem.
#[track_caller]
fn assert_none(what: &str, problems: &[String]) {
    let count = problems.len();
    assert!(problems.is_empty(), "{what}: {count} problem(s)\n  {}\n", problems.join("\n  "));
}

/// Prints a message past libtest's capture, so that it is seen although no test fails.
fn notice(message: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "dashboards: {message}");
}

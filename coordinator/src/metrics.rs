//! The coordinator's side of metrics: what it observes and what it publishes.
//!
//! Map:
//! - [`observe`]: called by the replica actors and the cluster actor as things happen
//! - [`frontend`]: what a front end counts, in this process or another
//! - [`hub`]: gathers own observations and all reports; returns the merged totals
//! - [`exposition`]: renders merged totals as a page to scrape
//! - [`logger`]: the trait of everything that takes the totals periodically, and its timer
//! - [`interval`]: what happened between two readings of the totals
//! - [`log_line`], [`json_lines`], [`throughput`]: the log line, JSON, the deprecated gauges
//! - `up_down_gauge`: gauges that go up and down with what they count
//! - [`membership`]: series about the cluster's membership in etcd
//! - [`markdown`]: the catalogue as documentation
//!
//! The definitions of all metrics, and merging, are in `shared::metrics`. Nothing here reads a
//! clock.
pub mod exposition;
pub mod frontend;
pub mod hub;
pub mod interval;
pub mod json_lines;
pub mod log_line;
pub mod logger;
pub mod markdown;
pub mod membership;
pub mod observe;
pub mod throughput;
mod up_down_gauge;

pub use exposition::Exposition;
pub use frontend::FrontendStats;
pub use hub::Hub;
pub use json_lines::JsonLines;
pub use log_line::LogLine;
pub use logger::{StatLogger, StatLoggers};
pub use observe::{Observer, Recording};
pub use throughput::ThroughputGauges;

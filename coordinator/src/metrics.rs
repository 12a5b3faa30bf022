//! The coordinator's side of metrics: what it observes, what it publishes.
//!
//! Map:
//! - [`observe`]: what the replica actors and the cluster actor call
//! - [`frontend`]: what a front end counts, in this process or another
//! - [`hub`]: own observations and all reports behind one door; the merged totals come out
//! - [`exposition`]: merged totals as a page to scrape
//! - [`logger`]: the trait of all that take the totals periodically, and their timer
//! - [`interval`]: what happened between two looks at the totals
//! - [`log_line`], [`json_lines`], [`throughput`]: the log line, JSON, the deprecated gauges
//! - `level`: gauges that go up and down with what they count
//! - [`membership`]: what etcd says of the cluster
//! - [`markdown`]: the catalogue as documentation
//!
//! What is measured, and the merge itself, is in `shared::metrics`. Nothing here reads a clock.
pub mod exposition;
pub mod frontend;
pub mod hub;
pub mod interval;
pub mod json_lines;
mod level;
pub mod log_line;
pub mod logger;
pub mod markdown;
pub mod membership;
pub mod observe;
pub mod throughput;

pub use exposition::Exposition;
pub use frontend::FrontendStats;
pub use hub::Hub;
pub use json_lines::JsonLines;
pub use log_line::LogLine;
pub use logger::{StatLogger, StatLoggers};
pub use observe::{Observer, Recording};
pub use throughput::ThroughputGauges;

//! The coordinator's side of metrics: what it observes, what it publishes.
//!
//! Map:
//! - [`observe`]: what the replica actors and the cluster actor call
//! - [`frontend`]: what a front end counts, in this process or another
//! - [`hub`]: own observations and all reports behind one door; the merged totals come out
//! - [`exposition`]: merged totals as Prometheus text
//! - [`log_line`]: merged totals as the periodic log line
//! - [`logger`]: the trait both implement, and the timer of the periodic ones
//! - [`markdown`]: the catalogue as documentation
//!
//! What is measured, and the merge itself, is in `shared::metrics`. Nothing here reads a clock.
pub mod exposition;
pub mod frontend;
pub mod hub;
mod level;
pub mod log_line;
pub mod logger;
pub mod markdown;
pub mod observe;

pub use exposition::Exposition;
pub use frontend::FrontendStats;
pub use hub::Hub;
pub use log_line::LogLine;
pub use logger::{StatLogger, StatLoggers};
pub use observe::{Observer, Recording};

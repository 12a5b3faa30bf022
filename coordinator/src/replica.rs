//! One replica in operation: requests in, plans out to its ranks, results back, tokens out.
//!
//! - [`driver`]: scheduler, request table and observer, driven by plain method calls
//! - [`completions`]: PURE: how fast requests end, and when a refused one may retry
//! - [`operation`]: PURE: how a replica handles its events
//! - [`agreement`]: PURE: compares what the ranks report on the same step
//! - [`stragglers`]: PURE: ranks that compute much slower than the others for long
//! - [`actor`]: the actix shell: mailbox, timer, links
pub mod actor;
pub mod agreement;
pub mod completions;
pub mod driver;
pub mod operation;
pub mod stragglers;

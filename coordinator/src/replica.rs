//! One replica in operation: requests in, plans out to its ranks, results back, tokens out.
//!
//! - [`driver`]: what happens, as plain method calls: scheduler, request table, observer
//! - [`completions`]: PURE: how fast requests end, and when a refused one may come again
//! - [`deadlines`]: PURE: how long a step may take, by how long such steps take
//! - [`core`]: PURE: what a replica does with what it is told
//! - [`agreement`]: PURE: what the ranks say of the same step
//! - [`stragglers`]: PURE: ranks that compute much slower than the others, for long
//! - [`actor`]: the actix shell: mailbox, timer, links
pub mod actor;
pub mod agreement;
pub mod completions;
pub mod core;
pub mod deadlines;
pub mod driver;
pub mod stragglers;

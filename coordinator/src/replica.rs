//! One replica in operation: requests in, plans out to its ranks, results back, tokens out.
//!
//! - [`driver`]: what happens, as plain method calls: scheduler, request table, observer
//! - [`operation`]: PURE: what a replica does with what it is told
//! - [`actor`]: the actix shell: mailbox, timer, links
pub mod actor;
pub mod driver;
pub mod operation;

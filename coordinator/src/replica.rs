//! One replica in operation: requests in, plans out to its ranks, results back, tokens out.
//!
//! - [`driver`]: what happens, as plain method calls: scheduler, request table, observer
//! - [`actor`]: the actix shell: mailbox, timer, links
pub mod actor;
pub mod driver;

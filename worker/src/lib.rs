//! The worker: loads a shard of the model and executes step plans.
//!
//! Map:
//! - [`rank`]: the seam between message handling and arithmetic
//! - [`actor`]: the link to the coordinator, messages in and out
//! - [`executor`]: the OS thread that owns a rank and runs one command at a time
#![forbid(unsafe_code)]

pub mod actor;
pub mod executor;
pub mod rank;

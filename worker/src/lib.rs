//! The worker: loads a shard of the model and executes step plans.
//!
//! Map:
//! - [`run`]: puts a worker together
//! - [`actor`]: the link to the coordinator, messages in and out
//! - [`executor`]: the OS thread that owns a rank and runs one command at a time
//! - [`health`]: whether it is linked, and serves or is free to
//! - [`outbox`]: sends the executor's messages and measurements
//! - [`rank`]: the seam between message handling and arithmetic
//! - [`engine_rank`]: a rank on some device; [`device`]: CPU cores or a GPU
//! - [`engine`]: turns step plans into tokens
//! - [`check`]: what a model folder needs of a host, without loading it
//! - [`mod@bench`]: measures the speed of the engine alone
//! - [`model`]: configuration, weights, sharding, the decoder
#![forbid(unsafe_code)]

/// Version and build fingerprint: ranks with equal builds compute the same bits.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), "+", env!("TUTTI_BUILD"));

pub mod actor;
pub mod bench;
pub mod check;
pub mod device;
pub mod engine;
pub mod engine_rank;
pub mod executor;
pub mod health;
pub mod model;
pub mod outbox;
pub mod rank;
pub mod run;

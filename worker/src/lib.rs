//! The worker: loads a shard of the model and executes step plans.
//!
//! Map:
//! - [`engine`]: the pure step engine: a plan in, tokens out
//! - [`error`]: what can be wrong with a model folder or a plan
//! - [`kv_cache`]: block tables and how many blocks fit
//! - [`model`]: configuration, weight files, sharding, the forward pass
#![forbid(unsafe_code)]

pub mod engine;
pub mod error;
pub mod kv_cache;
pub mod model;

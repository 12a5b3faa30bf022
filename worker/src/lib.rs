//! The worker: loads a shard of the model and executes step plans.
#![forbid(unsafe_code)]

//! What all Tutti processes share: identifiers, time, sampling parameters, the protocol between
//! coordinator and workers, its wire format, remote actors, membership and metrics.
//!
//! Map:
//! - [`ids`]: newtypes for everything identified across processes
//! - [`clock`]: time as a value, so that pure cores can be simulated
//! - [`mix`]: fast hashes and pseudo-random numbers, maps keyed by ids
//! - [`sampling`]: the sampling parameters of one sequence
//! - [`protocol`]: the messages between the coordinator and its workers and front ends
//! - [`wire`]: how messages are encoded: codec, frames, authentication
//! - [`actor`]: links between processes, liveness, named actors, supervision
//! - [`host`]: CPU, memory and GPU use of a process and its host
//! - [`hub`]: models by their names on Hugging Face's hub, its cache
//! - [`log`]: the last lines of a process's log
//! - [`model_config`]: the parts of a model's `config.json` that every role reads
//! - [`model_identity`]: a fingerprint that distinguishes model folders at the same path
//! - [`membership`]: who is in the cluster and who leads it, through etcd
//! - [`metrics`]: the catalogue of series, local recording, the merge of all reports
//!
//! This crate names no other crate of the workspace and contains no `unsafe`.
#![forbid(unsafe_code)]

pub mod actor;
pub mod clock;
pub mod host;
pub mod hub;
pub mod ids;
pub mod log;
pub mod membership;
pub mod metrics;
pub mod mix;
pub mod model_config;
pub mod model_identity;
pub mod protocol;
pub mod sampling;
pub mod wire;

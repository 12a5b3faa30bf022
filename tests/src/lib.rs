//! What the test binaries share: real processes on loopback, and clients for them.
//!
//! - [`local_cluster`]: `tutti up` (or its parts) as child processes, stopped and checked on drop
//! - [`adapters`]: LoRA adapters of made-up numbers
//! - [`certificates`]: an authority and what it signed
//! - [`etcd`]: a real etcd
//! - [`fake_cuda`]: a stand-in for NVIDIA's driver, with this project's kernels emulated
//! - [`fake_nvml`]: a stand-in for the library that tells of GPUs
//! - [`fleet`]: a coordinator, workers and front ends as processes of their own
//! - [`hosts`]: hosts of their own on one machine, whose network can be cut
//! - [`load`]: a steady load that notices every failure, changed text and pause
//! - [`client`]: a small HTTP client that is not ours underneath, SSE included
//! - [`scrape`]: reads a `/metrics` page into numbers
//! - [`relay`]: the way from rank 0 to the others, for ranks that are threads
//! - [`promtool`]: Prometheus's own linter of pages
//! - [`models`]: where the model folders and their golden values are
#![forbid(unsafe_code)]

pub mod adapters;
pub mod certificates;
pub mod client;
pub mod etcd;
pub mod fake_cuda;
pub mod fake_nvml;
pub mod fleet;
pub mod hosts;
pub mod load;
pub mod local_cluster;
pub mod models;
pub mod promtool;
pub mod relay;
pub mod scrape;

//! Code shared by the test binaries: real processes on loopback, and clients for them.
//!
//! - [`local_cluster`]: `tutti up` (or its parts) as child processes, stopped and checked on drop
//! - [`adapters`]: LoRA adapters with synthetic weights
//! - [`certificates`]: an authority and certificates
//! - [`collector`]: a stand-in for a collector of traces
//! - [`contract`]: a server's description of its API, and what does not agree with it
//! - [`etcd`]: a real etcd
//! - [`fake_cuda`]: a stand-in for NVIDIA's driver, with this project's kernels emulated
//! - [`fake_hub`]: a stand-in for Hugging Face's hub
//! - [`fake_nvml`]: a stand-in for NVML
//! - [`fleet`]: a coordinator, workers and front ends as separate processes
//! - [`hosts`]: simulated hosts on one machine, whose network can be cut
//! - [`load`]: a steady load that notices every failure, changed text and pause
//! - [`client`]: a small HTTP client, independent of this project's code, with SSE
//! - [`scrape`]: parses a `/metrics` page
//! - [`stopped`]: a thread that does nothing any more, while its process goes on
//! - [`relay`]: passes group ids from rank 0 to the others, for ranks that are threads
//! - [`ptx`]: the CUDA kernels as nvcc compiles them
//! - [`promtool`]: Prometheus's linter for metrics pages
//! - [`made_once`]: what several test programs make and use
//! - [`models`]: the model folders and their golden values
//! - [`tools`]: finds external programs: etcd, Prometheus, promtool
//! - [`wait`]: waits for a condition, with a bound
#![forbid(unsafe_code)]

pub mod adapters;
pub mod certificates;
pub mod client;
pub mod collector;
pub mod contract;
pub mod etcd;
pub mod fake_cuda;
pub mod fake_hub;
pub mod fake_nvml;
pub mod fleet;
pub mod hosts;
pub mod load;
pub mod local_cluster;
pub mod made_once;
pub mod models;
pub mod promtool;
pub mod ptx;
pub mod relay;
pub mod scrape;
pub mod stopped;
pub mod tools;
pub mod wait;

//! The CUDA backend: NVIDIA's driver and cuBLASLt, loaded at run time, and this project's kernels.
//!
//! Builds without CUDA; if a library is missing, creating a backend fails with an error that names
//! it.
//! - [`libraries`]: finds the libraries; `calls`: their functions; `context`, `stream`, [`memory`],
//!   [`module`]: safe driver API
//! - [`devices`]: survey of this host's GPUs, for people; `failure`: error messages of one line
//! - [`device`]: a GPU ready for launches
//! - [`held`]: which GPUs this process holds, and which hang
//! - `group`: ranks that exchange data in GPU memory; [`choice`]: PURE: how they exchange it;
//!   [`connect`]: how they join; [`nccl`]: NCCL; [`peer`]: GPUs that access each other's memory;
//!   `stopwatch`: how long exchanges take
//! - `fatbin`: the embedded kernels; [`launch`]: their names, grids and arguments
//! - [`bucket`], [`batch`], [`sample_lists`], [`parts`], [`capacity`]: PURE: buckets of graphs and
//!   plans, a step's inputs, inputs of sampling, splits of decode attention, memory
//! - `backend`: a rank; `step`: the state of a step, and its graph; `uploads`: lists copied to the
//!   GPU; `readback`: rows copied to the host
//! - [`tensors`]: buffers, weights, caches; `swap`: blocks in host memory
//! - the operations: `loading`, `rows`, `attention`, `qk_norm`, `latent`, `delta`, `products`
//!   (of many rows: `matmul`), `experts`, `exchange`, `sample`; what sampling keeps: `sampling`,
//!   `results`; `edits`: PURE: rows whose logits are edited
//! - [`measure`], [`compare`]: how fast, and how right, for checks on a GPU; `late`: inputs that
//!   arrive late
#![allow(unsafe_code, reason = "calls of NVIDIA's libraries")]

mod attention;
mod backend;
pub mod batch;
pub mod bucket;
mod calls;
pub mod capacity;
pub mod choice;
pub mod compare;
pub mod connect;
pub mod context;
mod delta;
pub mod device;
pub mod devices;
mod edits;
mod exchange;
mod experts;
mod failure;
mod fatbin;
mod group;
pub mod held;
mod late;
mod latent;
pub mod launch;
pub mod libraries;
mod loading;
mod matmul;
pub mod measure;
pub mod memory;
pub mod module;
pub mod nccl;
pub mod parts;
pub mod peer;
mod products;
mod qk_norm;
mod readback;
mod results;
mod rows;
mod sample;
pub mod sample_lists;
mod sampling;
mod step;
mod stopwatch;
pub mod stream;
mod swap;
pub mod tensors;
mod uploads;

pub use backend::CudaBackend;
pub use choice::ExchangePolicy;
pub use connect::{GroupSetup, JoinedGroup, Relay};
pub use delta::CudaStates;
pub use device::{CudaOptions, has_kernels};
pub use experts::{CudaRoutes, CudaStack};

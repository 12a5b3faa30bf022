//! Compares the CPU backend, with every instruction set of this machine, and the CUDA kernels'
//! sources, emulated on the host (`cuda_emulation`), with plain loops in f64.
//!
//! `support` has shared inputs and a simulated collective; every other module has naive versions of
//! the operations that it tests. Outputs are filled with NaN before every call.
//!
//! On CPUs:
//! - [`products`], [`int4`], [`mxfp4`], [`fp8`]: matrix products, by weight format
//! - [`attention`]: QKV projection, rotation and paged attention; [`latent`]: multi-head latent
//!   attention; [`delta`]: linear attention
//! - [`rows`], [`norms`]: norms of rows; those that few models have
//! - [`experts`]: mixtures of experts
//! - [`adapters`]: the operations behind LoRA adapters
//! - [`sampling`], [`masks`]: sampling, token masks
//! - [`collectives`]: buffers passed to a collective
//! - [`invariance`]: the same bits alone, in a batch and with any number of threads
//!
//! CUDA kernels, emulated:
//! - [`cuda_emulation`]: compiles and launches them; [`cuda_ptx`]: the same cases on PTX
//! - [`cuda_products`], [`cuda_fp8`], [`cuda_int4`], [`cuda_int8`]: matrix products
//! - [`cuda_attention`], [`cuda_latent`], [`cuda_delta`], [`cuda_rows`], [`cuda_rmsnorm`],
//!   [`cuda_norms`], [`cuda_experts`]: the other parts of a layer
//! - [`cuda_sampling`], [`cuda_select`], [`cuda_masks`], [`cuda_parts`]: sampling
//! - [`cuda_peers`]: the exchange between GPUs
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests, outside of test functions; what was run, for --nocapture"
)]

mod adapters;
mod attention;
mod collectives;
mod cuda_attention;
mod cuda_delta;
mod cuda_emulation;
mod cuda_experts;
mod cuda_fp8;
mod cuda_int4;
mod cuda_int8;
mod cuda_latent;
mod cuda_masks;
mod cuda_norms;
mod cuda_parts;
mod cuda_peers;
mod cuda_products;
mod cuda_ptx;
mod cuda_rmsnorm;
mod cuda_rows;
mod cuda_sampling;
mod cuda_select;
mod delta;
mod experts;
mod fp8;
mod int4;
mod invariance;
mod latent;
mod masks;
mod mxfp4;
mod norms;
mod products;
mod rows;
mod sampling;
mod support;

//! The CPU backend: SIMD kernels over packed bf16, int8 or 4-bit weights, f32 activations, its own
//! threads.
//!
//! The operations check their arguments first (`crate::check`). Modules:
//! - [`isa`]: which instruction set is used
//! - `simd`, `math`: vectors, scalar functions
//! - `precision`: the precision of activations in matrix products
//! - `pack`: the weight layout
//! - `products` over `gemm`: matrix products, and an MLP's gate and up
//! - `attend` over `attention`: paged attention; `qkv`: norm, RoPE and KV cache after the QKV
//!   projection; `qk_norm`: q and k normalised over all heads; `latent`: multi-head latent
//!   attention
//! - `rows` over `elementwise`: embedding, norms, RoPE and activations
//! - `delta`: linear attention
//! - `experts`: mixtures of experts (MoE)
//! - `steps` over [`sample`], `mask`: sampling, token masks
//! - `exchange`: all-reduce, and gathering data of other ranks
//! - `loading`, `kv`, `buffer`, `memory`: weights, the KV cache's layout, activations, aligned
//!   memory; `fp8`: its 8-bit floats
//!
//! The results of a row depend only on that row and its sequence, bit for bit, whatever else is in
//! the batch and whatever the number of threads.
#![allow(unsafe_code, reason = "vector instructions, and tasks that write disjoint places")]
use std::fmt;
use std::time::Duration;

use crate::backend::Tensors as _;
use crate::collective::{ByteCounters, Collective};
use crate::error::KernelError;
use crate::pool::Pool;

mod attend;
mod attention;
mod buffer;
mod delta;
mod elementwise;
mod exchange;
mod experts;
mod fp8;
mod gemm;
pub mod isa;
mod kv;
mod latent;
mod loading;
mod mask;
mod math;
mod memory;
mod pack;
mod precision;
mod products;
mod qk_norm;
mod qkv;
mod rows;
pub mod sample;
mod simd;
mod steps;

pub use buffer::{CpuBuffer, CpuVector};
pub use delta::CpuStates;
pub use experts::CpuRoutes;
pub use isa::Isa;
pub use kv::CpuKvCache;
pub use pack::{CpuMatrix, CpuStack};
pub use precision::Precision;

pub use crate::pool::THREADS_MAX;

use attention::{AttentionScratch, QueryTile};
use experts::Grouping;
use memory::Scratch;
use precision::Arithmetic;
use sample::Sampler;

/// Name of CPU exchanges, also used by devices that have other transports.
const WAY: &str = "host";
/// Number of elements of an elementwise operation that are worth a task of their own.
const GRAIN: usize = 16 * 1024;

/// One rank on CPU cores. Created on, or moved to, the thread that calls it; owns its thread pool.
pub struct CpuBackend {
    isa: Isa,
    precision: Precision,
    pool: Pool,
    collective: Box<dyn Collective>,
    collective_time: Duration,
    exchanged: ByteCounters,
    /// Scratch: activations laid out for a product.
    acts: Scratch<u32>,
    /// Scratch: intermediates of fused operations.
    wide: Scratch<f32>,
    tiles: Vec<QueryTile>,
    grouping: Grouping,
    workers: Vec<Worker>,
}

/// Scratch of one thread of the pool.
#[derive(Debug)]
struct Worker {
    attention: AttentionScratch,
    sampler: Sampler,
}

impl fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuBackend({}, rank {})", self.describe(), self.rank())
    }
}

impl CpuBackend {
    /// Creates a backend with `threads` threads (including the caller), the fastest instruction set
    /// of this machine, and matrix products of this precision.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if `threads` is not in 1..=[`THREADS_MAX`],
    /// [`KernelError::Device`] if threads cannot be started.
    pub fn new(
        threads: usize,
        precision: Precision,
        collective: Box<dyn Collective>,
    ) -> Result<Self, KernelError> {
        Self::with_isa(threads, Isa::detect(), precision, collective)
    }

    /// As [`CpuBackend::new`], with a given instruction set.
    ///
    /// # Errors
    /// As [`CpuBackend::new`]; also [`KernelError::Unsupported`] if this machine lacks the
    /// instructions.
    pub fn with_isa(
        threads: usize,
        isa: Isa,
        precision: Precision,
        collective: Box<dyn Collective>,
    ) -> Result<Self, KernelError> {
        if !isa.is_supported() {
            return Err(KernelError::Unsupported(format!("this machine has no {isa}")));
        }
        let worker =
            |_| Ok(Worker { attention: AttentionScratch::new()?, sampler: Sampler::new() });
        Ok(Self {
            isa,
            precision,
            pool: Pool::new(threads)?,
            collective,
            collective_time: Duration::ZERO,
            exchanged: ByteCounters::default(),
            acts: Scratch::new("activations of a product")?,
            wide: Scratch::new("results within a fused operation")?,
            tiles: Vec::new(),
            grouping: Grouping::default(),
            workers: (0..threads).map(worker).collect::<Result<_, KernelError>>()?,
        })
    }

    /// Exchanges data through `collective` from now on and drops the old one. Weights and buffers
    /// stay.
    pub fn set_collective(&mut self, collective: Box<dyn Collective>) {
        self.collective = collective;
    }

    /// The instruction set and precision of products.
    fn arithmetic(&self) -> Arithmetic {
        Arithmetic { isa: self.isa, precision: self.precision }
    }
}

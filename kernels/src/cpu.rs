//! The CPU backend: SIMD kernels over packed bf16, int8 or 4-bit weights, f32 activations, its own
//! threads.
//!
//! Composes operations from the modules below, after `check` has looked at the arguments:
//! - [`isa`]: which instruction set is used
//! - `simd`, `math`: vectors, scalar functions
//! - `precision`: how precisely activations enter matrix products
//! - `pack`: the weight layout
//! - `gemm`, `gate_up`: matrix products, and those of an MLP's first half
//! - `qkv`: norm, RoPE and KV cache after the QKV projection
//! - `attend` over `attention`: paged attention
//! - `rows` over `elementwise`: embedding, norms, RoPE and activations
//! - `experts`: mixtures of experts (MoE)
//! - [`sample`], `mask`: sampling, token masks
//! - `exchange`: gathering what other ranks have
//! - `kv`: the KV cache's layout
//! - `buffer`, `memory`: activations, aligned memory
//!
//! The results of a row depend only on that row and its sequence, bit for bit, whatever else is in
//! the batch and however many threads there are.
#![allow(unsafe_code, reason = "vector instructions, and tasks that write disjoint places")]
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::backend::{
    Activation, AttentionShape, Backend, Batch, Buffer, Choices, ExpertActivation, HostMatrix,
    KvShape, QkvWeights, RopeTable, Routing,
};
use crate::check::ensure;
use crate::collective::{Collective, Tally};
use crate::error::KernelError;
use crate::pool::Pool;
use crate::sampling::{SampleRow, Sampled};
use crate::weights::Int4Groups;

mod attend;
mod attention;
mod buffer;
mod check;
mod elementwise;
mod exchange;
mod experts;
mod gate_up;
mod gemm;
pub mod isa;
mod kv;
mod mask;
mod math;
mod memory;
mod pack;
mod precision;
mod qkv;
mod rows;
pub mod sample;
mod simd;

pub use buffer::{CpuBuffer, CpuVector};
pub use experts::CpuRoutes;
pub use isa::Isa;
pub use kv::CpuKvCache;
pub use pack::{CpuMatrix, CpuStack};
pub use precision::Precision;

pub use crate::pool::THREADS_MAX;

use attention::{AttentionScratch, RowTile};
use experts::Grouping;
use gemm::Output;
use memory::{Disjoint, Scratch};
use pack::Format;
use precision::Arithmetic;
use sample::Sampler;

/// How CPUs exchange data, as named by devices that have other ways, too.
const WAY: &str = "host";
/// Elements of an elementwise operation that are worth a task of their own.
const GRAIN: usize = 16 * 1024;

/// One rank on CPU cores. Created on, or moved to, the thread that calls it; owns its thread pool.
pub struct CpuBackend {
    isa: Isa,
    precision: Precision,
    pool: Pool,
    collective: Box<dyn Collective>,
    collective_time: Duration,
    exchanged: Tally,
    /// Scratch: activations laid out for a product.
    acts: Scratch<u32>,
    /// Scratch: intermediates of fused operations.
    wide: Scratch<f32>,
    tiles: Vec<RowTile>,
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
    /// A backend with `threads` threads (including the caller), the fastest instruction set of this
    /// machine, and matrix products of this precision.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] when `threads` is not in 1..=[`THREADS_MAX`],
    /// [`KernelError::Device`] when threads cannot be started.
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
    /// As [`CpuBackend::new`]; also [`KernelError::Unsupported`] when this machine lacks the
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
            exchanged: Tally::default(),
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

    /// The instruction set in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The instruction set and precision of products.
    fn arithmetic(&self) -> Arithmetic {
        Arithmetic { isa: self.isa, precision: self.precision }
    }

    /// `out = x weight^T + bias`, where row `i` of `x` is `source(i)`. Arguments are already
    /// checked.
    fn product<'s>(
        &mut self,
        source: &(dyn Fn(usize) -> &'s [f32] + Sync),
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let arithmetic = self.arithmetic();
        let Self { isa, pool, acts, .. } = self;
        let (rows, stride) = (out.rows(), out.width());
        let acts = gemm::prepare(arithmetic, pool, acts, rows, weight.cols(), source)?;
        let out = Output { data: Disjoint::new(out.values_mut()), stride, first_row: 0, column: 0 };
        gemm::multiply(*isa, pool, &acts, weight, bias.map(|b| &**b), &out)
    }

    fn timed<T, E: Into<KernelError>>(
        &mut self,
        operation: impl FnOnce(&mut dyn Collective) -> Result<T, E>,
    ) -> Result<T, KernelError> {
        let start = Instant::now();
        let result = operation(self.collective.as_mut());
        self.collective_time += start.elapsed();
        result.map_err(Into::into)
    }
}

impl Backend for CpuBackend {
    type Buffer = CpuBuffer;
    type Matrix = CpuMatrix;
    type Stack = CpuStack;
    type Routes = CpuRoutes;
    type Vector = CpuVector;
    type KvCache = CpuKvCache;
    type HostKv = CpuKvCache;

    fn describe(&self) -> String {
        let threads = self.pool.num_threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("cpu {} {}, {threads} thread{plural}", self.isa, self.precision)
    }

    fn rank(&self) -> u32 {
        self.collective.rank()
    }

    fn world_size(&self) -> u32 {
        self.collective.world_size()
    }

    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<CpuBuffer, KernelError> {
        CpuBuffer::new(rows_max, width)
    }

    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CpuMatrix, KernelError> {
        CpuMatrix::pack(&mut self.pool, Format::of(parts), parts)
    }

    fn keeps_int4(&self, _: &Int4Groups, _: bool) -> bool {
        true
    }

    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CpuMatrix, KernelError> {
        CpuMatrix::pack(&mut self.pool, Format::Int8, parts)
    }

    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CpuStack, KernelError> {
        CpuStack::pack(&mut self.pool, Format::of(matrices), matrices)
    }

    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CpuStack, KernelError> {
        CpuStack::pack(&mut self.pool, Format::Int8, matrices)
    }

    fn new_routes(&mut self, rows_max: usize, routing: Routing) -> Result<CpuRoutes, KernelError> {
        CpuRoutes::new(rows_max, routing)
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CpuVector, KernelError> {
        CpuVector::new(values)
    }

    fn new_kv_cache(&mut self, shape: KvShape) -> Result<CpuKvCache, KernelError> {
        CpuKvCache::new(shape, self.precision)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        kv::block_bytes(shape, self.precision)
    }

    fn new_host_kv(&mut self, shape: KvShape) -> Result<CpuKvCache, KernelError> {
        CpuKvCache::new(shape, self.precision)
    }

    fn swap_out(
        &mut self,
        cache: &CpuKvCache,
        host: &mut CpuKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        crate::check::swap("swap_out", cache.shape(), host.shape(), pairs, true)?;
        let pair = |i: usize| (pairs[i].0 as usize, pairs[i].1 as usize);
        kv::copy_blocks(&mut self.pool, cache, host, pair, pairs.len())
    }

    fn swap_in(
        &mut self,
        cache: &mut CpuKvCache,
        host: &mut CpuKvCache,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        crate::check::swap("swap_in", cache.shape(), host.shape(), pairs, false)?;
        let pair = |i: usize| (pairs[i].1 as usize, pairs[i].0 as usize);
        kv::copy_blocks(&mut self.pool, host, cache, pair, pairs.len())
    }

    fn embed(
        &mut self,
        table: &CpuMatrix,
        ids: &[u32],
        first_id: u32,
        scale: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.embed_rows(table, ids, first_id, scale, out)
    }

    fn add_rmsnorm(
        &mut self,
        residual: &mut CpuBuffer,
        delta: Option<&CpuBuffer>,
        weight: &CpuVector,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.add_norm(residual, delta, weight, eps, out)
    }

    fn add_normed_rmsnorm(
        &mut self,
        residual: &mut CpuBuffer,
        delta: &CpuBuffer,
        delta_weight: &CpuVector,
        weight: &CpuVector,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.add_normed_norm(residual, delta, delta_weight, weight, eps, out)
    }

    fn qkv_rope_write(
        &mut self,
        x: &CpuBuffer,
        weights: &QkvWeights<CpuMatrix, CpuVector>,
        addend: Option<&CpuBuffer>,
        rope: &RopeTable<CpuVector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &mut CpuKvCache,
        layer: usize,
        q_out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::qkv(x, weights, rope, shape, batch, cache, layer, q_out)?;
        check::addend("qkv_rope_write", addend, x.rows(), weights.weight.rows())?;
        q_out.set_rows(x.rows())?;
        let arithmetic = self.arithmetic();
        let Self { isa, pool, acts, wide, .. } = self;
        let width = weights.weight.rows();
        let projected = wide.get(x.rows() * width)?;
        let acts = gemm::prepare(arithmetic, pool, acts, x.rows(), x.width(), &|i| x.row(i))?;
        let out = Output { data: Disjoint::new(projected), stride: width, first_row: 0, column: 0 };
        let bias = weights.bias.as_deref();
        gemm::multiply(*isa, pool, &acts, &weights.weight, bias, &out)?;
        qkv::Heads { isa: *isa, projected, addend, weights, rope, shape, batch, layer }
            .finish(pool, cache, q_out)
    }

    fn paged_attention(
        &mut self,
        q: &CpuBuffer,
        sinks: Option<&CpuVector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &CpuKvCache,
        layer: usize,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.attend(q, sinks, shape, batch, cache, layer, out)
    }

    fn linear(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::product("linear", x, weight, bias, weight.rows(), out)?;
        out.set_rows(x.rows())?;
        self.product(&|i| x.row(i), weight, bias, out)
    }

    fn columns(&self, matrix: &CpuMatrix) -> usize {
        matrix.cols()
    }

    fn linear_columns(
        &mut self,
        x: &CpuBuffer,
        first: usize,
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::columns("linear_columns", x, first, weight, bias, out)?;
        out.set_rows(x.rows())?;
        self.product(&|i| &x.row(i)[first..first + weight.cols()], weight, bias, out)
    }

    fn add(&mut self, sum: &mut CpuBuffer, other: &CpuBuffer) -> Result<(), KernelError> {
        let shapes = [(sum.rows(), other.rows()), (sum.width(), other.width())];
        ensure!("add", shapes.iter().all(|(a, b)| a == b), "shapes differ: {shapes:?}");
        let (isa, len, other) = (self.isa, sum.values().len(), other.values());
        let sum = Disjoint::new(sum.values_mut());
        self.pool.run_ranges(len, GRAIN, &|range, _| {
            // SAFETY: every element belongs to one task.
            let sum = unsafe { sum.slice(range.start, range.len()) };
            elementwise::add(isa, sum, &other[range]);
        })
    }

    fn gate_up(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuMatrix,
        bias: Option<&CpuVector>,
        addend: Option<&CpuBuffer>,
        activation: Activation,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.multiply_gate_up(x, weight, bias, addend, activation, out)
    }

    fn route(
        &mut self,
        x: &CpuBuffer,
        router: &CpuMatrix,
        bias: Option<&CpuVector>,
        routes: &mut CpuRoutes,
    ) -> Result<(), KernelError> {
        self.choose_experts(x, router, bias, routes)
    }

    fn assign(&mut self, experts: &[u32], routes: &mut CpuRoutes) -> Result<(), KernelError> {
        routes.assign(experts)
    }

    fn experts_gate_up(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuStack,
        bias: Option<&CpuVector>,
        activation: ExpertActivation,
        routes: &CpuRoutes,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.experts_inner(x, (weight, bias), activation, routes, out)
    }

    fn experts_down(
        &mut self,
        x: &CpuBuffer,
        first: usize,
        weight: &CpuStack,
        bias: Option<&CpuVector>,
        routes: &CpuRoutes,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.experts_outer(x, first, (weight, bias), routes, out)
    }

    fn lm_head(
        &mut self,
        x: &CpuBuffer,
        rows: &[u32],
        weight: &CpuMatrix,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let op = "lm_head";
        check::product(op, x, weight, None, weight.rows(), out)?;
        let most = rows.iter().max().map_or(0, |&row| row as usize + 1);
        ensure!(op, most <= x.rows(), "row {} of {} rows is named", most - 1, x.rows());
        out.set_rows(rows.len())?;
        self.product(&|i| x.row(rows[i] as usize), weight, None, out)
    }

    fn all_reduce(&mut self, data: &mut CpuBuffer) -> Result<(), KernelError> {
        self.exchanged.add(WAY, size_of_val(data.values()));
        self.timed(|collective| collective.all_reduce_sum(data.values_mut()))
    }

    fn gather_logits(
        &mut self,
        local: &CpuBuffer,
        full: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        self.gather_rows(local, full)
    }

    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError> {
        self.timed(|collective| collective.broadcast(tokens, 0))
    }

    fn sample(
        &mut self,
        logits: &CpuBuffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check::logits("sample", logits, vocab, first_row, rows.len())?;
        rows.iter().try_for_each(|row| row.check_mask(vocab))?;
        self.each_row(rows.len(), out, &|sampler, i| {
            sampler.sample(&logits.row(first_row + i)[..vocab], &rows[i])
        })
    }

    fn logprobs(
        &mut self,
        logits: &CpuBuffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check::logits("logprobs", logits, vocab, first_row, targets.len())?;
        let largest = targets.iter().max().map_or(0, |&token| token as usize + 1);
        ensure!("logprobs", largest <= vocab, "target {} of {vocab} is named", largest - 1);
        self.each_row(targets.len(), out, &|sampler, i| {
            sampler.score(&logits.row(first_row + i)[..vocab], targets[i], top_n)
        })
    }

    fn read_buffer(&mut self, buffer: &CpuBuffer) -> Result<Vec<f32>, KernelError> {
        Ok(buffer.values().to_vec())
    }

    fn read_rows(
        &mut self,
        buffer: &CpuBuffer,
        rows: &[Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        let (len, width) = (buffer.rows(), buffer.width());
        out.clear();
        for rows in rows {
            ensure!("read_rows", rows.end <= len, "rows {rows:?} are read, {len} are in use");
            out.extend_from_slice(&buffer.values()[rows.start * width..rows.end * width]);
        }
        Ok(())
    }

    fn read_routes(&mut self, routes: &CpuRoutes) -> Result<Choices, KernelError> {
        Ok(routes.choices())
    }

    fn take_collective_time(&mut self) -> Duration {
        std::mem::take(&mut self.collective_time)
    }

    fn take_exchanged(&mut self) -> Tally {
        std::mem::take(&mut self.exchanged)
    }
}

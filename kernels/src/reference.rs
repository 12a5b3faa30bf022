//! The oracle: every operation of [`Backend`] in plain float32 loops, in one thread.
//!
//! Owns no cleverness: weights are widened to f32 when loaded, the KV cache is f32, each operation
//! is its definition. Every kernel, CPU or CUDA, is compared with this one, so what it lacks in
//! speed it must have in obviousness. It serves models too, slowly (`--device reference`).
//!
//! Map: `tensor` (buffers, matrices, the cache), `attention` (QKV, RoPE, attention), `experts`,
//! `sampler`.
mod attention;
mod experts;
mod sampler;
mod tensor;

use std::fmt;
use std::time::{Duration, Instant};

pub use experts::ReferenceRoutes;
pub use tensor::{ReferenceBuffer, ReferenceKvCache, ReferenceMatrix};

use crate::backend::{
    Activation, AttentionShape, Backend, Batch, Buffer, Choices, ExpertActivation, HostMatrix,
    KvShape, QkvWeights, RopeTable, Routing,
};
use crate::check;
use crate::collective::Collective;
use crate::error::{CollectiveError, KernelError};
use crate::sampling::{SampleRow, Sampled};
use crate::weights::Int4Groups;

/// The float32 reference backend of one rank.
#[derive(Debug)]
pub struct ReferenceBackend {
    collective: Box<dyn Collective>,
    collective_time: Duration,
    /// One row of the QKV projection, of gate and up, or of what is added to the residual stream.
    row: Vec<f32>,
    /// Attention weights of one head over one sequence.
    scores: Vec<f32>,
    /// All ranks' logits as gathered, one block per rank.
    gathered: Vec<f32>,
}

impl ReferenceBackend {
    /// Makes the backend of the rank that `collective` is.
    #[must_use]
    pub fn new(collective: Box<dyn Collective>) -> Self {
        Self {
            collective,
            collective_time: Duration::ZERO,
            row: Vec::new(),
            scores: Vec::new(),
            gathered: Vec::new(),
        }
    }

    fn timed<T>(
        &mut self,
        exchange: impl FnOnce(&mut dyn Collective) -> Result<T, CollectiveError>,
    ) -> Result<T, KernelError> {
        let started = Instant::now();
        let result = exchange(self.collective.as_mut());
        self.collective_time += started.elapsed();
        Ok(result?)
    }
}

/// Fails with [`KernelError::Shape`] unless `found == wanted`.
fn same(
    op: &'static str,
    what: impl fmt::Display,
    found: usize,
    wanted: usize,
) -> Result<(), KernelError> {
    if found == wanted {
        return Ok(());
    }
    Err(KernelError::Shape { op, message: format!("{what} is {found}, not {wanted}") })
}

/// Fails with [`KernelError::Shape`] unless `found < bound`.
fn below(
    op: &'static str,
    what: impl fmt::Display,
    found: usize,
    bound: usize,
) -> Result<(), KernelError> {
    if found < bound {
        return Ok(());
    }
    Err(KernelError::Shape { op, message: format!("{what} is {found}, the bound is {bound}") })
}

/// The inner product, in eight interleaved partial sums that are added in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += x[lane] * y[lane];
        }
    }
    sums.iter().sum::<f32>() + tail
}

/// `out = weight x + bias` for one row of activations.
fn project(x: &[f32], weight: &ReferenceMatrix, bias: Option<&[f32]>, out: &mut [f32]) {
    for (i, y) in out.iter_mut().enumerate() {
        *y = dot(weight.row(i), x) + bias.map_or(0.0, |bias| bias[i]);
    }
}

/// `out = x / rms(x) * weight`
fn rmsnorm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for ((y, x), w) in out.iter_mut().zip(x).zip(weight) {
        *y = x * scale * w;
    }
}

fn activated(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// What every product checks: `x [rows, in]`, `weight [out, in]`, `bias [out]`.
fn check_product(
    op: &'static str,
    x: &ReferenceBuffer,
    weight: &ReferenceMatrix,
    bias: Option<&Vec<f32>>,
) -> Result<(), KernelError> {
    same(op, "width of the activations", x.width(), weight.cols())?;
    match bias {
        Some(bias) => same(op, "length of the bias", bias.len(), weight.rows()),
        None => Ok(()),
    }
}

/// `addend: [rows, width]`, where there is one.
fn check_addend(
    op: &'static str,
    addend: Option<&ReferenceBuffer>,
    rows: usize,
    width: usize,
) -> Result<(), KernelError> {
    let Some(addend) = addend else { return Ok(()) };
    same(op, "rows of the addend", addend.rows(), rows)?;
    same(op, "width of the addend", addend.width(), width)
}

/// `row += addend[i]`
fn add_row(row: &mut [f32], addend: Option<&ReferenceBuffer>, i: usize) {
    let Some(addend) = addend else { return };
    row.iter_mut().zip(addend.row(i)).for_each(|(x, a)| *x += a);
}

fn check_logits(
    op: &'static str,
    logits: &ReferenceBuffer,
    vocab: usize,
    first_row: usize,
    rows: usize,
) -> Result<(), KernelError> {
    below(op, "vocab", vocab, logits.width() + 1)?;
    below(op, "first_row + rows", first_row.saturating_add(rows), logits.rows() + 1)
}

impl Backend for ReferenceBackend {
    type Buffer = ReferenceBuffer;
    type Matrix = ReferenceMatrix;
    type Stack = Vec<ReferenceMatrix>;
    type Routes = ReferenceRoutes;
    type Vector = Vec<f32>;
    type KvCache = ReferenceKvCache;
    type HostKv = ReferenceKvCache;

    fn describe(&self) -> String {
        "cpu reference float32, 1 thread".to_owned()
    }

    fn rank(&self) -> u32 {
        self.collective.rank()
    }

    fn world_size(&self) -> u32 {
        self.collective.world_size()
    }

    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<Self::Buffer, KernelError> {
        ReferenceBuffer::new(rows_max, width)
    }

    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError> {
        ReferenceMatrix::widen(parts)
    }

    fn keeps_int4(&self, _: &Int4Groups, _: bool) -> bool {
        true
    }

    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError> {
        ReferenceMatrix::quantise(parts)
    }

    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError> {
        matrices.iter().map(|matrix| ReferenceMatrix::widen(std::slice::from_ref(matrix))).collect()
    }

    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError> {
        let one = |matrix| ReferenceMatrix::quantise(std::slice::from_ref(matrix));
        matrices.iter().map(one).collect()
    }

    fn new_routes(
        &mut self,
        rows_max: usize,
        routing: Routing,
    ) -> Result<Self::Routes, KernelError> {
        ReferenceRoutes::new(rows_max, routing)
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, KernelError> {
        Ok(values.to_vec())
    }

    fn new_kv_cache(&mut self, shape: KvShape) -> Result<Self::KvCache, KernelError> {
        ReferenceKvCache::new(shape)
    }

    fn new_host_kv(&mut self, shape: KvShape) -> Result<Self::HostKv, KernelError> {
        ReferenceKvCache::new(shape)
    }

    fn swap_out(
        &mut self,
        cache: &Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::swap("swap_out", cache.shape(), host.shape(), pairs, true)?;
        pairs.iter().for_each(|(block, to)| host.copy_block(cache, *block, *to));
        Ok(())
    }

    fn swap_in(
        &mut self,
        cache: &mut Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        check::swap("swap_in", cache.shape(), host.shape(), pairs, false)?;
        pairs.iter().for_each(|(block, from)| cache.copy_block(host, *from, *block));
        Ok(())
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        let elements = shape.num_layers * shape.block_size * shape.num_kv_heads * shape.head_dim;
        2 * (elements * size_of::<f32>()) as u64
    }

    fn embed(
        &mut self,
        table: &Self::Matrix,
        ids: &[u32],
        first_id: u32,
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        same("embed", "width of out", out.width(), table.cols())?;
        out.set_rows(ids.len())?;
        for (i, &id) in ids.iter().enumerate() {
            let row = id.checked_sub(first_id).map(|row| row as usize);
            match row.filter(|row| *row < table.rows()) {
                Some(row) => {
                    for (y, x) in out.row_mut(i).iter_mut().zip(table.row(row)) {
                        *y = x * scale;
                    }
                }
                None => out.row_mut(i).fill(0.0),
            }
        }
        Ok(())
    }

    fn add_rmsnorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: Option<&Self::Buffer>,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let op = "add_rmsnorm";
        same(op, "length of the weight", weight.len(), residual.width())?;
        same(op, "width of out", out.width(), residual.width())?;
        if let Some(delta) = delta {
            same(op, "rows of delta", delta.rows(), residual.rows())?;
            same(op, "width of delta", delta.width(), residual.width())?;
        }
        out.set_rows(residual.rows())?;
        for i in 0..residual.rows() {
            if let Some(delta) = delta {
                for (r, d) in residual.row_mut(i).iter_mut().zip(delta.row(i)) {
                    *r += d;
                }
            }
            rmsnorm(residual.row(i), weight, eps, out.row_mut(i));
        }
        Ok(())
    }

    fn add_normed_rmsnorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: &Self::Buffer,
        delta_weight: &Self::Vector,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let op = "add_normed_rmsnorm";
        same(op, "length of the weight", weight.len(), residual.width())?;
        same(op, "length of delta's weight", delta_weight.len(), residual.width())?;
        same(op, "width of out", out.width(), residual.width())?;
        same(op, "rows of delta", delta.rows(), residual.rows())?;
        same(op, "width of delta", delta.width(), residual.width())?;
        out.set_rows(residual.rows())?;
        self.row.resize(residual.width(), 0.0);
        for i in 0..residual.rows() {
            rmsnorm(delta.row(i), delta_weight, eps, &mut self.row);
            for (r, d) in residual.row_mut(i).iter_mut().zip(&self.row) {
                *r += d;
            }
            rmsnorm(residual.row(i), weight, eps, out.row_mut(i));
        }
        Ok(())
    }

    fn qkv_rope_write(
        &mut self,
        x: &Self::Buffer,
        weights: &QkvWeights<Self::Matrix, Self::Vector>,
        addend: Option<&Self::Buffer>,
        rope: &RopeTable<Self::Vector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &mut Self::KvCache,
        layer: usize,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        attention::check_qkv(x, weights, rope, shape, batch, cache, layer, q_out)?;
        check_addend("qkv_rope_write", addend, x.rows(), weights.weight.rows())?;
        q_out.set_rows(x.rows())?;
        let (q_width, kv_width) =
            (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        let mut qkv = std::mem::take(&mut self.row);
        qkv.resize(q_width + 2 * kv_width, 0.0);
        for i in 0..x.rows() {
            project(x.row(i), &weights.weight, weights.bias.as_deref(), &mut qkv);
            add_row(&mut qkv, addend, i);
            let (q, kv) = qkv.split_at_mut(q_width);
            let (k, v) = kv.split_at_mut(kv_width);
            let (cos, sin) = attention::rope_row(rope, shape.head_dim, batch.positions[i]);
            attention::finish_heads(q, weights.q_norm.as_deref(), cos, sin, shape);
            attention::finish_heads(k, weights.k_norm.as_deref(), cos, sin, shape);
            q_out.row_mut(i).copy_from_slice(q);
            let (cached_k, cached_v) = cache.slot_mut(layer, batch.slots[i] as usize);
            cached_k.copy_from_slice(k);
            cached_v.copy_from_slice(v);
        }
        self.row = qkv;
        Ok(())
    }

    fn paged_attention(
        &mut self,
        q: &Self::Buffer,
        sinks: Option<&Self::Vector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &Self::KvCache,
        layer: usize,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        attention::check_attention(q, shape, batch, cache, layer, out)?;
        if let Some(sinks) = sinks {
            same("paged_attention", "number of sinks", sinks.len(), shape.num_heads)?;
        }
        out.set_rows(q.rows())?;
        for seq in batch.seqs {
            let scores = &mut self.scores;
            attention::attend((q, sinks), shape, batch, seq, cache, layer, scores, out);
        }
        Ok(())
    }

    fn linear(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check_product("linear", x, weight, bias)?;
        same("linear", "width of out", out.width(), weight.rows())?;
        out.set_rows(x.rows())?;
        for i in 0..x.rows() {
            project(x.row(i), weight, bias.map(Vec::as_slice), out.row_mut(i));
        }
        Ok(())
    }

    fn columns(&self, matrix: &Self::Matrix) -> usize {
        matrix.cols()
    }

    fn linear_columns(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let op = "linear_columns";
        let end = first + weight.cols();
        same(op, "width of out", out.width(), weight.rows())?;
        if end > x.width() {
            same(op, "columns of the activations", x.width(), end)?;
        }
        if let Some(bias) = bias {
            same(op, "length of the bias", bias.len(), weight.rows())?;
        }
        out.set_rows(x.rows())?;
        for i in 0..x.rows() {
            let bias = bias.map(Vec::as_slice);
            project(&x.row(i)[first..end], weight, bias, out.row_mut(i));
        }
        Ok(())
    }

    fn add(&mut self, sum: &mut Self::Buffer, other: &Self::Buffer) -> Result<(), KernelError> {
        same("add", "width", sum.width(), other.width())?;
        same("add", "rows", sum.rows(), other.rows())?;
        for (sum, other) in sum.values_mut().iter_mut().zip(other.values()) {
            *sum += other;
        }
        Ok(())
    }

    fn gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
        addend: Option<&Self::Buffer>,
        activation: Activation,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let inner = out.width();
        check_product("gate_up", x, weight, bias)?;
        same("gate_up", "rows of the weight", weight.rows(), 2 * inner)?;
        check_addend("gate_up", addend, x.rows(), 2 * inner)?;
        out.set_rows(x.rows())?;
        self.row.resize(2 * inner, 0.0);
        for i in 0..x.rows() {
            project(x.row(i), weight, bias.map(Vec::as_slice), &mut self.row);
            add_row(&mut self.row, addend, i);
            let (gate, up) = self.row.split_at(inner);
            for ((y, g), u) in out.row_mut(i).iter_mut().zip(gate).zip(up) {
                *y = activated(activation, *g) * u;
            }
        }
        Ok(())
    }

    fn route(
        &mut self,
        x: &Self::Buffer,
        router: &Self::Matrix,
        bias: Option<&Self::Vector>,
        routes: &mut Self::Routes,
    ) -> Result<(), KernelError> {
        experts::route(x, router, bias, routes)
    }

    fn assign(&mut self, experts: &[u32], routes: &mut Self::Routes) -> Result<(), KernelError> {
        experts::assign(experts, routes)
    }

    fn experts_gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        activation: ExpertActivation,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        experts::gate_up(x, weight, bias, activation, routes, out)
    }

    fn experts_down(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        experts::down(x, first, (weight, bias), routes, out)
    }

    fn lm_head(
        &mut self,
        x: &Self::Buffer,
        rows: &[u32],
        weight: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check_product("lm_head", x, weight, None)?;
        same("lm_head", "width of out", out.width(), weight.rows())?;
        for &row in rows {
            below("lm_head", "row", row as usize, x.rows())?;
        }
        out.set_rows(rows.len())?;
        for (i, &row) in rows.iter().enumerate() {
            project(x.row(row as usize), weight, None, out.row_mut(i));
        }
        Ok(())
    }

    fn all_reduce(&mut self, data: &mut Self::Buffer) -> Result<(), KernelError> {
        self.timed(|collective| collective.all_reduce_sum(data.values_mut()))
    }

    fn gather_logits(
        &mut self,
        local: &Self::Buffer,
        full: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        if self.rank() != 0 {
            return self.timed(|collective| collective.gather(local.values(), &mut [], 0));
        }
        let (rows, width) = (local.rows(), local.width());
        let world = self.world_size() as usize;
        same("gather_logits", "width of full", full.width(), world * width)?;
        full.set_rows(rows)?;
        let mut gathered = std::mem::take(&mut self.gathered);
        gathered.resize(world * rows * width, 0.0);
        self.timed(|collective| collective.gather(local.values(), &mut gathered, 0))?;
        for rank in 0..world {
            for i in 0..rows {
                let from = &gathered[(rank * rows + i) * width..][..width];
                full.row_mut(i)[rank * width..][..width].copy_from_slice(from);
            }
        }
        self.gathered = gathered;
        Ok(())
    }

    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError> {
        self.timed(|collective| collective.broadcast(tokens, 0))
    }

    fn sample(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check_logits("sample", logits, vocab, first_row, rows.len())?;
        rows.iter().try_for_each(|row| row.check_mask(vocab))?;
        out.clear();
        out.extend(rows.iter().enumerate().map(|(i, row)| {
            let logits = &logits.row(first_row + i)[..vocab];
            sampler::sample(logits, row)
        }));
        Ok(())
    }

    fn logprobs(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check_logits("logprobs", logits, vocab, first_row, targets.len())?;
        for &target in targets {
            below("logprobs", "target", target as usize, vocab)?;
        }
        out.clear();
        out.extend(targets.iter().enumerate().map(|(i, &target)| {
            let logits = &logits.row(first_row + i)[..vocab];
            sampler::score(logits, target, top_n)
        }));
        Ok(())
    }

    fn read_buffer(&mut self, buffer: &Self::Buffer) -> Result<Vec<f32>, KernelError> {
        Ok(buffer.values().to_vec())
    }

    fn read_routes(&mut self, routes: &Self::Routes) -> Result<Choices, KernelError> {
        let all = || routes.chosen.iter().flatten();
        Ok((all().map(|chosen| chosen.0 as u32).collect(), all().map(|chosen| chosen.1).collect()))
    }

    fn take_collective_time(&mut self) -> Duration {
        std::mem::take(&mut self.collective_time)
    }
}

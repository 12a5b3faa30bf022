//! The list of operations, which modules beside this one put together from kernels, cuBLASLt and
//! the collective.
//!
//! Every operation checks its arguments, then asks the step whether it is only to be compared with
//! a recorded one, then launches. Activations that products read are bf16, all others f32.
use std::ops::Range;
use std::time::Duration;

use super::backend::{CudaBackend, Part};
use super::context::version_text;
use super::experts::{CudaRoutes, CudaStack};
use super::launch::{self, Rows};
use super::memory::DevicePtr;
use super::swap::CudaHostKv;
use super::tensors::{
    CudaBuffer, CudaKvCache, CudaMatrix, CudaVector, Element, Uploader, int4_shift, kv_block_bytes,
};
use crate::backend::{
    Activation, AttentionShape, Backend, Batch, Buffer, Choices, ExpertActivation, HostMatrix,
    KvShape, QkvWeights, RopeTable, Routing, StepInputs,
};
use crate::check::ensure;
use crate::collective::Tally;
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};
use crate::weights::Int4Groups;

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Matrix = CudaMatrix;
    type Stack = CudaStack;
    type Routes = CudaRoutes;
    type Vector = CudaVector;
    type KvCache = CudaKvCache;
    type HostKv = CudaHostKv;

    fn describe(&self) -> String {
        let info = self.device.context.info();
        let (major, minor) = info.capability;
        let driver = version_text(self.device.context.driver().version());
        let products = match &self.device.matmul {
            Ok(matmul) => format!("cuBLASLt {}", matmul.version()),
            Err(error) => error.to_string(),
        };
        format!(
            "cuda {} {} (sm_{major}{minor}), driver {driver}, {products}, {}",
            info.ordinal,
            info.name,
            self.step.graphs_text()
        )
    }

    fn rank(&self) -> u32 {
        self.collective.rank()
    }

    fn world_size(&self) -> u32 {
        self.collective.world_size()
    }

    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<CudaBuffer, KernelError> {
        self.step.buffer_made(rows_max);
        CudaBuffer::new(&self.device.context, &self.device.stream, Element::F32, rows_max, width)
    }

    fn new_input_buffer(
        &mut self,
        rows_max: usize,
        width: usize,
    ) -> Result<CudaBuffer, KernelError> {
        self.step.buffer_made(rows_max);
        CudaBuffer::new(&self.device.context, &self.device.stream, Element::Bf16, rows_max, width)
    }

    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CudaMatrix, KernelError> {
        self.load_with(parts, Uploader::load_as_is)
    }

    fn keeps_int4(&self, groups: &Int4Groups, is_stack: bool) -> bool {
        !is_stack && int4_shift(groups).is_some()
    }

    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CudaMatrix, KernelError> {
        self.load_with(parts, Uploader::load_int8)
    }

    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CudaStack, KernelError> {
        self.load_stack_with(matrices, Uploader::load_int8)
    }

    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CudaStack, KernelError> {
        self.load_stack_with(matrices, Uploader::load)
    }

    fn new_routes(&mut self, rows_max: usize, routing: Routing) -> Result<CudaRoutes, KernelError> {
        self.make_routes(rows_max, routing)
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CudaVector, KernelError> {
        CudaVector::new(&self.device.context, &self.device.stream, values)
    }

    fn new_kv_cache(&mut self, shape: KvShape) -> Result<CudaKvCache, KernelError> {
        self.step.forget_graphs();
        self.settle()?;
        self.sampling.forget();
        CudaKvCache::new(&self.device.context, &self.device.stream, shape)
    }

    fn new_host_kv(&mut self, shape: KvShape) -> Result<CudaHostKv, KernelError> {
        CudaHostKv::new(&self.device.context, &self.device.stream, shape)
    }

    fn swap_out(
        &mut self,
        cache: &CudaKvCache,
        host: &mut CudaHostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        host.copy(&self.device, cache, pairs, true)
    }

    fn swap_in(
        &mut self,
        cache: &mut CudaKvCache,
        host: &mut CudaHostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError> {
        host.copy(&self.device, cache, pairs, false)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        kv_block_bytes(shape)
    }

    fn begin_step(&mut self, inputs: &StepInputs<'_>) -> Result<(), KernelError> {
        self.apart = None;
        let rows = inputs.sample_rows.len();
        let Self { device, step, sampling, .. } = self;
        // Before anything is recorded: graphs keep these places.
        if sampling.reserve(device, rows)? {
            step.forget_graphs();
        }
        step.begin(&device.context, &device.stream, inputs)?;
        // A step before may have found out.
        device.set_overlap(step.overlaps());
        sampling.begin(inputs);
        if !inputs.feed.is_empty() {
            // Tokens are words of 32 bits: two of the elements that this kernel moves.
            let tokens = Rows { ptr: sampling.fed(inputs.feed)?, stride: 8 };
            let ids = Rows { ptr: step.at(step.layout().ids), stride: 2 };
            let index = step.at(step.layout().feed);
            let call =
                launch::gather_rows(tokens, index, ids, 2, inputs.feed.len(), DevicePtr::default());
            // SAFETY: the rows named were sampled by the step before, and ids has room for all.
            unsafe { device.launch(call) }?;
        }
        step.open(&device.stream)
    }

    fn launch_step(&mut self) -> Result<(), KernelError> {
        self.step.close(&self.device.stream)
    }

    fn end_step(&mut self) -> Result<(), KernelError> {
        self.step.end(&self.device.stream)
    }

    fn embed(
        &mut self,
        table: &CudaMatrix,
        ids: &[u32],
        first_id: u32,
        scale: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.embed_rows(table, ids, first_id, scale, out)
    }

    fn add_rmsnorm(
        &mut self,
        residual: &mut CudaBuffer,
        delta: Option<&CudaBuffer>,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.add_norm(residual, delta, weight, eps, out)
    }

    fn add_normed_rmsnorm(
        &mut self,
        residual: &mut CudaBuffer,
        delta: &CudaBuffer,
        delta_weight: &CudaVector,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.add_normed_norm(residual, delta, delta_weight, weight, eps, out)
    }

    fn qkv_rope_write(
        &mut self,
        x: &CudaBuffer,
        weights: &QkvWeights<CudaMatrix, CudaVector>,
        addend: Option<&CudaBuffer>,
        rope: &RopeTable<CudaVector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &mut CudaKvCache,
        layer: usize,
        q_out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.write_qkv(x, weights, addend, rope, shape, batch, cache, layer, q_out)
    }

    fn paged_attention(
        &mut self,
        q: &CudaBuffer,
        sinks: Option<&CudaVector>,
        shape: &AttentionShape,
        batch: &Batch<'_>,
        cache: &CudaKvCache,
        layer: usize,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.attend(q, sinks, shape, batch, cache, layer, out)
    }

    fn linear(
        &mut self,
        x: &CudaBuffer,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (width, cols) = (x.width(), weight.cols());
        ensure!("linear", width == cols, "x.width is {width}, not {cols}");
        self.linear_columns(x, 0, weight, bias, out)
    }

    fn columns(&self, matrix: &CudaMatrix) -> usize {
        matrix.cols()
    }

    fn linear_columns(
        &mut self,
        x: &CudaBuffer,
        first: usize,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.multiply_columns(x, first, weight, bias, out)
    }

    fn add(&mut self, sum: &mut CudaBuffer, other: &CudaBuffer) -> Result<(), KernelError> {
        self.add_rows(sum, other)
    }

    fn gate_up(
        &mut self,
        x: &CudaBuffer,
        weight: &CudaMatrix,
        bias: Option<&CudaVector>,
        addend: Option<&CudaBuffer>,
        activation: Activation,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.multiply_gate_up(x, weight, bias, addend, activation, out)
    }

    fn route(
        &mut self,
        x: &CudaBuffer,
        router: &CudaMatrix,
        bias: Option<&CudaVector>,
        routes: &mut CudaRoutes,
    ) -> Result<(), KernelError> {
        self.choose_experts(x, router, bias, routes)
    }

    fn assign(&mut self, experts: &[u32], routes: &mut CudaRoutes) -> Result<(), KernelError> {
        self.assign_experts(experts, routes)
    }

    fn experts_gate_up(
        &mut self,
        x: &CudaBuffer,
        weight: &CudaStack,
        bias: Option<&CudaVector>,
        activation: ExpertActivation,
        routes: &CudaRoutes,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.experts_inner(x, (weight, bias), activation, routes, out)
    }

    fn experts_down(
        &mut self,
        x: &CudaBuffer,
        first: usize,
        weight: &CudaStack,
        bias: Option<&CudaVector>,
        routes: &CudaRoutes,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.experts_outer(x, first, (weight, bias), routes, out)
    }

    fn lm_head(
        &mut self,
        x: &CudaBuffer,
        rows: &[u32],
        weight: &CudaMatrix,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.multiply_rows(x, rows, weight, out)
    }

    fn all_reduce(&mut self, data: &mut CudaBuffer) -> Result<(), KernelError> {
        self.reduce(data)
    }

    fn all_reduce_add_rmsnorm(
        &mut self,
        delta: &mut CudaBuffer,
        residual: &mut CudaBuffer,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.reduce_add_rmsnorm(delta, residual, weight, eps, out)
    }

    fn gather_logits(
        &mut self,
        local: &CudaBuffer,
        full: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.gather(local, full)
    }

    fn may_sample_everywhere(&self) -> bool {
        true
    }

    fn samples_everywhere(&self) -> bool {
        self.is_grouped()
    }

    fn keeps_logits_apart(&mut self, first_id: u32, count: usize) -> bool {
        let apart = !self.alone && self.step.is_open() && self.step.may_be_in_parts();
        self.apart = apart.then_some(Part { first_id, count });
        apart
    }

    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError> {
        self.timed(|collective| collective.broadcast(tokens, 0))
    }

    fn sample(
        &mut self,
        logits: &CudaBuffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        self.sample_rows(logits, vocab, first_row, rows, out)
    }

    fn queues_samples(&self) -> bool {
        self.world_size() == 1 || self.is_grouped()
    }

    fn queue_sample(
        &mut self,
        logits: &CudaBuffer,
        vocab: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<(), KernelError> {
        self.queue_rows(logits, vocab, rows)
    }

    fn is_sampled(&mut self) -> Result<bool, KernelError> {
        // Tokens that are there are good, however late they are asked for: this process may have
        // been stopped meanwhile.
        let is_done = self.sampling.is_done()?;
        if !is_done {
            self.device.context.group.check(self.sampling.waited())?;
        }
        Ok(is_done)
    }

    fn take_sampled(&mut self, out: &mut Vec<Sampled>) -> Result<(), KernelError> {
        self.sampling.take(self.options.patience, out)
    }

    fn logprobs(
        &mut self,
        logits: &CudaBuffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        self.score_rows(logits, vocab, first_row, targets, top_n, out)
    }

    fn read_routes(&mut self, routes: &CudaRoutes) -> Result<Choices, KernelError> {
        self.download_routes(routes)
    }

    fn read_buffer(&mut self, buffer: &CudaBuffer) -> Result<Vec<f32>, KernelError> {
        self.download(buffer)
    }

    fn read_rows(
        &mut self,
        buffer: &CudaBuffer,
        rows: &[Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        self.download_rows(buffer, rows, out)
    }

    fn take_collective_time(&mut self) -> Duration {
        std::mem::take(&mut self.collective_time)
    }

    fn take_exchanged(&mut self) -> Tally {
        std::mem::take(&mut self.exchanged)
    }
}

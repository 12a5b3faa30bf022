//! The operations, put together from kernels, cuBLASLt and the collective.
//!
//! Every operation checks its arguments, then asks the step whether it is only to be compared with
//! a recorded one, then launches. Activations that products read are bf16, all others f32.
use std::ops::Range;
use std::time::Duration;

use super::backend::{CudaBackend, Part, Which};
use super::batch::{Capacity, Cut, live};
use super::context::version_text;
use super::device::Device;
use super::experts::{CudaRoutes, CudaStack};
use super::launch::{self, AttentionIo, DecodeWork, HEAD_DIM_MAX, Partials, QkvFinish, Rows};
use super::memory::DevicePtr;
use super::products::{addend_fits, bias_fits};
use super::swap::CudaHostKv;
use super::tensors::{
    CudaBuffer, CudaKvCache, CudaMatrix, CudaVector, Element, Uploader, int4_shift, kv_block_bytes,
};
use crate::backend::{
    Activation, AttentionShape, Backend, Batch, Buffer, Choices, ExpertActivation, HostMatrix,
    KvShape, QkvWeights, RopeTable, Routing, StepInputs,
};
use crate::check;
use crate::check::ensure;
use crate::collective::Tally;
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};
use crate::weights::Int4Groups;

fn heads(
    op: &'static str,
    shape: &AttentionShape,
    cache: &CudaKvCache,
    layer: usize,
) -> Result<(), KernelError> {
    check::heads(op, shape, cache.shape(), layer)?;
    let (heads, kv_heads, head_dim) = (shape.num_heads, shape.num_kv_heads, shape.head_dim);
    ensure!(op, head_dim <= HEAD_DIM_MAX, "head_dim is {head_dim}: GPUs take up to {HEAD_DIM_MAX}");
    ensure!(
        op,
        (heads * head_dim).is_multiple_of(8) && (kv_heads * head_dim).is_multiple_of(8),
        "{heads} and {kv_heads} heads of {head_dim}: GPUs take rows of a multiple of 8 elements"
    );
    Ok(())
}

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
        let op = "embed";
        let width = out.width();
        ensure!(op, width == table.cols(), "out.width is {width}, not {}", table.cols());
        ensure!(op, table.weight().is_bf16(), "the table is quantised: it must be bf16");
        ensure!(
            op,
            table.at().stride == width,
            "rows of {width} elements: GPUs take embeddings of a multiple of 8"
        );
        let rows = out.of(Element::F32, op, "out")?;
        out.set_rows(ids.len())?;
        if !self.step.has_ids(ids) {
            ensure!(op, !self.step.is_open(), "the ids are not those the step began with");
            let capacity = Capacity { rows: ids.len(), ..Capacity::default() };
            let empty = Batch { positions: &[], slots: &[], seqs: &[], block_tables: &[] };
            let Device { context, stream, .. } = &self.device;
            self.step.stage(context, stream, capacity, ids, (&[], &[]), &empty, Cut::NONE, &[])?;
        }
        if self.step.skips(op, [rows.ptr.0, table.at().ptr.0, u64::from(first_id)])
            || ids.is_empty()
        {
            return Ok(());
        }
        let count = self.step.counts().rows;
        ensure!(op, count <= out.rows_max(), "{count} rows, room for {}", out.rows_max());
        let from = self.step.at(self.step.layout().ids);
        let live = self.step.at(live::ROWS);
        let table = (table.at().ptr, table.rows());
        let call = launch::embed(from, table, rows, width, first_id, scale, count, live);
        // SAFETY: shapes were checked; ids beyond the table are the kernel's to see.
        unsafe { self.device.launch(call) }
    }

    fn add_rmsnorm(
        &mut self,
        residual: &mut CudaBuffer,
        delta: Option<&CudaBuffer>,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "add_rmsnorm";
        let (rows, width) = (residual.rows(), residual.width());
        ensure!(op, weight.len() == width, "weight has {} elements, not {width}", weight.len());
        ensure!(op, out.width() == width, "out.width is {}, not {width}", out.width());
        if let Some(delta) = delta {
            let shape = (delta.rows(), delta.width());
            ensure!(op, shape == (rows, width), "delta is {shape:?}, not {:?}", (rows, width));
        }
        let from = residual.of(Element::F32, op, "residual")?.ptr;
        let added = delta.map(|delta| delta.of(Element::F32, op, "delta")).transpose()?;
        let to = out.of(Element::Bf16, op, "out")?;
        out.set_rows(rows)?;
        let added = added.map(|delta| delta.ptr);
        if self.step.skips(op, [from.0, added.unwrap_or_default().0, weight.ptr().0]) || rows == 0 {
            return Ok(());
        }
        let (count, live) = self.step.launched(op, rows)?;
        let most = residual.rows_max().min(out.rows_max());
        ensure!(op, count <= most, "{count} rows, room for {most}");
        let call = launch::add_rmsnorm((from, added), weight.ptr(), to, width, eps, count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
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
        let op = "add_normed_rmsnorm";
        let (rows, width) = (residual.rows(), residual.width());
        for (name, weight) in [("weight", weight), ("delta_weight", delta_weight)] {
            ensure!(op, weight.len() == width, "{name} has {} elements, not {width}", weight.len());
        }
        ensure!(op, out.width() == width, "out.width is {}, not {width}", out.width());
        let shape = (delta.rows(), delta.width());
        ensure!(op, shape == (rows, width), "delta is {shape:?}, not {:?}", (rows, width));
        let from = residual.of(Element::F32, op, "residual")?.ptr;
        let added = delta.of(Element::F32, op, "delta")?.ptr;
        let to = out.of(Element::Bf16, op, "out")?;
        out.set_rows(rows)?;
        if self.step.skips(op, [from.0, added.0, weight.ptr().0]) || rows == 0 {
            return Ok(());
        }
        let (count, live) = self.step.launched(op, rows)?;
        let most = residual.rows_max().min(delta.rows_max()).min(out.rows_max());
        ensure!(op, count <= most, "{count} rows, room for {most}");
        let added = (added, delta_weight.ptr());
        let call =
            launch::add_normed_rmsnorm(from, added, weight.ptr(), to, width, eps, count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
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
        let op = "qkv_rope_write";
        heads(op, shape, cache, layer)?;
        let head_dim = shape.head_dim;
        let width = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim;
        let (rows, cols) = (weights.weight.rows(), weights.weight.cols());
        ensure!(op, rows == width, "weight has {rows} rows, not {width}");
        ensure!(op, x.width() == cols, "x.width is {}, not {cols}", x.width());
        bias_fits(op, weights.bias.as_ref(), width)?;
        bias_fits(op, weights.q_norm.as_ref(), head_dim)?;
        bias_fits(op, weights.k_norm.as_ref(), head_dim)?;
        let q_width = shape.num_heads * head_dim;
        ensure!(op, q_out.width() == q_width, "q_out.width is {}, not {q_width}", q_out.width());
        let rows = x.rows();
        ensure!(
            op,
            batch.positions.len() == rows && batch.slots.len() == rows,
            "x has {rows} rows, the batch {} positions and {} slots",
            batch.positions.len(),
            batch.slots.len()
        );
        let positions = rope.cos.len().min(rope.sin.len()) / (head_dim / 2);
        let slots = cache.shape().num_blocks * cache.shape().block_size;
        if self.step.is_unchecked(op, batch, [positions, slots]) {
            let last = batch.positions.iter().max().map_or(0, |&position| position as usize + 1);
            ensure!(op, last <= positions, "position {} of {positions} is named", last - 1);
            let last = batch.slots.iter().max().map_or(0, |&slot| slot as usize + 1);
            ensure!(op, last <= slots, "slot {} of {slots} is named", last - 1);
            self.step.checked(op, [positions, slots]);
        }
        let addend = addend_fits(op, addend, rows, width)?;
        let from = x.of(Element::Bf16, op, "x")?;
        let q = q_out.of(Element::Bf16, op, "q_out")?.ptr;
        q_out.set_rows(rows)?;
        self.stage(batch, shape)?;
        let cache = cache.layer(layer);
        if self.step.skips(op, [from.ptr.0, weights.weight.at().ptr.0, cache.keys.0]) || rows == 0 {
            return Ok(());
        }
        let (count, live) = self.step.launched(op, rows)?;
        let most = x.rows_max().min(q_out.rows_max());
        ensure!(op, count <= most, "{count} rows, room for {most}");
        let qkv = Rows { ptr: self.scratch(Which::Wide, count * width * 4)?, stride: width };
        self.product(from, None, &weights.weight, None, qkv, count, live)?;
        if let Some(addend) = addend {
            let call = launch::add(qkv.ptr, addend, width, count, live);
            // SAFETY: shapes were checked.
            unsafe { self.device.launch(call) }?;
        }
        let layout = *self.step.layout();
        let io = QkvFinish {
            qkv: qkv.ptr,
            bias: weights.bias.as_ref().map(CudaVector::ptr),
            q_norm: weights.q_norm.as_ref().map(CudaVector::ptr),
            k_norm: weights.k_norm.as_ref().map(CudaVector::ptr),
            cos: rope.cos.ptr(),
            sin: rope.sin.ptr(),
            positions: self.step.at(layout.positions),
            slots: self.step.at(layout.slots),
            q_out: q,
            cache,
        };
        let call = launch::qkv_finish(&io, shape, count, live);
        // SAFETY: shapes, positions and slots were checked.
        unsafe { self.device.launch(call) }
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
        let op = "paged_attention";
        heads(op, shape, cache, layer)?;
        let width = shape.num_heads * shape.head_dim;
        ensure!(op, q.width() == width, "q.width is {}, not {width}", q.width());
        ensure!(op, out.width() == width, "out.width is {}, not {width}", out.width());
        let (found, wanted) = (sinks.map(CudaVector::len), shape.num_heads);
        ensure!(op, found.unwrap_or(wanted) == wanted, "{found:?} sinks, not {wanted}");
        let from = q.of(Element::Bf16, op, "q")?.ptr;
        let to = out.of(Element::Bf16, op, "out")?.ptr;
        let rows = q.rows();
        out.set_rows(rows)?;
        let (block_size, num_blocks) = (cache.shape().block_size, cache.shape().num_blocks);
        if self.step.is_unchecked(op, batch, [block_size, num_blocks]) {
            check::sequences(op, batch, rows, block_size, num_blocks)?;
            self.step.checked(op, [block_size, num_blocks]);
        }
        self.stage(batch, shape)?;
        let window = u64::from(shape.sliding_window.unwrap_or(0));
        let cache = cache.layer(layer);
        if self.step.skips(op, [from.0, cache.keys.0, window]) || rows == 0 {
            return Ok(());
        }
        let layout = *self.step.layout();
        let io = AttentionIo {
            q: from,
            cache,
            seqs: self.step.at(layout.seqs),
            block_tables: self.step.at(layout.tables),
            out: to,
            sinks: sinks.map(CudaVector::ptr),
        };
        let counts = self.step.counts();
        ensure!(op, counts.rows <= out.rows_max(), "{} rows, too many", counts.rows);
        let tiles = self.step.at(layout.tiles);
        let live_tiles = self.step.at(live::TILES);
        let prefill = launch::prefill_attention(&io, shape, tiles, counts.tiles, live_tiles);
        let Some(prefill) = prefill.filter(|call| self.device.has_room(call)) else {
            let (seqs, live) = (self.step.at(live::SEQS), self.step.at(live::ROWS));
            let call = launch::attention_any(&io, shape, seqs, counts.rows, live);
            // SAFETY: shapes and block tables were checked.
            return unsafe { self.device.launch(call) };
        };
        if counts.tiles > 0 {
            // SAFETY: as above.
            unsafe { self.device.launch(prefill) }?;
        }
        if counts.items > 0 {
            let (out, ml) = Partials::elements(shape, counts.seqs);
            let ptr = self.scratch(Which::Partials, (out + ml) * 4)?;
            let partials = Partials { out: ptr, ml: ptr.offset(out * 4) };
            let (parts, live_parts, parts_most) = self.step.parts(shape.sliding_window)?;
            let work = DecodeWork {
                parts,
                parts_most,
                live_parts,
                items: self.step.at(layout.items),
                items_most: counts.items,
                live_items: self.step.at(live::ITEMS),
            };
            let multiprocessors = self.device.context.info().multiprocessors;
            let calls = launch::decode_attention(&io, shape, &work, partials, multiprocessors);
            for call in calls.into_iter().flatten() {
                // SAFETY: as above; the list names sequences of the batch, and the partial results
                // have room for all splits of each.
                unsafe { self.device.launch(call) }?;
            }
        }
        Ok(())
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
        let op = "add";
        let shapes = [(sum.rows(), other.rows()), (sum.width(), other.width())];
        ensure!(op, shapes.iter().all(|(a, b)| a == b), "shapes differ: {shapes:?}");
        let to = sum.of(Element::F32, op, "sum")?.ptr;
        let from = other.of(Element::F32, op, "other")?.ptr;
        let rows = sum.rows();
        // Not how many rows there are: a graph is of several numbers of them.
        if self.step.skips(op, [to.0, from.0, sum.width() as u64]) || rows == 0 {
            return Ok(());
        }
        let (count, live) = self.step.launched(op, rows)?;
        let most = sum.rows_max().min(other.rows_max());
        ensure!(op, count <= most, "{count} rows, room for {most}");
        let call = launch::add(to, from, sum.width(), count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
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
        // Tokens that are there are good, however late they are asked for: this process may have been
        // stopped meanwhile.
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

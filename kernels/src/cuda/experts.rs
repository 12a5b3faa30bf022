//! Mixtures of experts on the GPU: rows are routed, grouped by expert and multiplied without
//! involving the host, so a decode step with experts is recorded like any other.
use super::backend::{CudaBackend, ScratchKind};
use super::context::Context;
use super::device::Device;
use super::launch::{self, Rows, experts};
use super::memory::{DeviceMemory, DevicePtr};
use super::step::LaunchRows;
use super::stream::Stream;
use super::tensors::{CudaBuffer, CudaMatrix, CudaVector, Element};
use crate::backend::{Buffer as _, Choices, ExpertActivation, ExpertOps, Routing, Scores};
use crate::check::ensure;
use crate::check::experts::{self as check, StackSizes};
use crate::error::KernelError;

/// Bytes of a `TuttiExpertTile`.
const TILE: usize = 12;
/// Slots per tile of the smallest tiles.
const TILE_SLOTS_LEAST: usize = 8;

/// Weight matrices of one shape, one after the other.
#[derive(Debug)]
pub struct CudaStack {
    /// The rows of all matrices.
    pub(super) all: CudaMatrix,
    /// Number of matrices.
    pub(super) count: usize,
}

impl CudaStack {
    /// Number of matrices; rows and columns of each.
    pub(super) fn sizes(&self) -> StackSizes {
        (self.count, self.all.rows() / self.count.max(1), self.all.cols())
    }
}

/// The experts chosen by rows, grouped by expert.
#[derive(Debug)]
pub struct CudaRoutes {
    routing: Routing,
    rows: usize,
    rows_max: usize,
    /// Number of rows that are grouped together.
    chunk_rows: usize,
    /// Number of tiles from one chunk's first to the next one's.
    tiles_stride: usize,
    /// u32 `[rows, top_k]`
    experts: DeviceMemory,
    /// Address of experts that were assigned instead of routed, if any.
    assigned: Option<DevicePtr>,
    /// f32 `[rows, top_k]`
    weights: DeviceMemory,
    /// u32 `[rows * top_k]`
    slots: DeviceMemory,
    tiles: DeviceMemory,
    num_tiles: DeviceMemory,
}

impl CudaRoutes {
    fn new(
        context: &std::rc::Rc<Context>,
        stream: &Stream,
        rows_max: usize,
        routing: Routing,
        chunk_slots: usize,
    ) -> Result<Self, KernelError> {
        routing.check()?;
        let chunk_rows = (chunk_slots / routing.top_k).max(1);
        let slots = rows_max.saturating_mul(routing.top_k);
        // The kernels count slots in 32 bits.
        ensure!("new_routes", u32::try_from(slots).is_ok(), "{slots} slots are too many");
        let chunks = rows_max.div_ceil(chunk_rows);
        let tiles_stride = experts::tiles_most(
            chunk_rows.min(rows_max) * routing.top_k,
            TILE_SLOTS_LEAST,
            routing.num_experts,
        );
        let memory = |bytes: usize| DeviceMemory::zeroed(context, stream, bytes.max(1), "routes");
        Ok(Self {
            routing,
            rows: 0,
            rows_max,
            chunk_rows,
            tiles_stride,
            experts: memory(slots * 4)?,
            assigned: None,
            weights: memory(slots * 4)?,
            slots: memory(slots * 4)?,
            tiles: memory(chunks * tiles_stride * TILE)?,
            num_tiles: memory(chunks * 4)?,
        })
    }

    /// Chunk `index` of the groups of `count` rows.
    fn grouped(&self, count: usize, index: usize) -> experts::Grouped {
        let Routing { num_experts, top_k, .. } = self.routing;
        let tile_slots = experts::tile_slots(count, &self.routing);
        let slots = self.rows_of(count, index).len() * top_k;
        experts::Grouped {
            slots: self.slots.ptr(),
            tiles: self.tiles.ptr().offset(index * self.tiles_stride * TILE),
            num_tiles: self.num_tiles.ptr().offset(index * 4),
            tiles_most: experts::tiles_most(slots, tile_slots, num_experts),
            tile_slots,
        }
    }

    fn chunks(&self, count: usize) -> usize {
        count.div_ceil(self.chunk_rows)
    }

    /// Rows of chunk `index`.
    fn rows_of(&self, count: usize, index: usize) -> std::ops::Range<usize> {
        let first = index * self.chunk_rows;
        first..(first + self.chunk_rows).min(count)
    }
}

impl ExpertOps for CudaBackend {
    fn new_routes(&mut self, rows_max: usize, routing: Routing) -> Result<CudaRoutes, KernelError> {
        self.step.buffer_made(rows_max);
        let Device { context, stream, .. } = &self.device;
        CudaRoutes::new(context, stream, rows_max, routing, self.options.expert_slots)
    }

    fn route(
        &mut self,
        x: &CudaBuffer,
        router: &CudaMatrix,
        bias: Option<&CudaVector>,
        routes: &mut CudaRoutes,
    ) -> Result<(), KernelError> {
        let op = "route";
        let num_logits = routes.routing.num_logits();
        check::route(x, router, bias, &routes.routing, routes.rows_max)?;
        ensure!(op, router.weight().is_bf16(), "the router is quantised: it must be bf16");
        let from = x.of(Element::Bf16, op, "x")?;
        let rows = x.rows();
        (routes.rows, routes.assigned) = (rows, None);
        let what = [from.ptr.0, router.at().ptr.0, routes.experts.ptr().0];
        if self.step.record_or_skip(op, what) || rows == 0 {
            return Ok(());
        }
        let most = x.rows_max().min(routes.rows_max);
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let logits = self.scratch(ScratchKind::Wide, count * num_logits * 4)?;
        let out = Rows { ptr: logits, stride: num_logits };
        // Always this project's own product, whose order of sums depends only on k: another
        // algorithm, on another rank or for another number of rows, could choose another expert
        // without any rank noticing.
        let sizes = (count, num_logits, x.width());
        let bias = bias.map(CudaVector::ptr);
        // Either the logits have it, or what the choice goes by.
        let (of_logits, of_scores) = match routes.routing.scores {
            Scores::Softmax => (bias, None),
            Scores::Sigmoid => (None, bias),
        };
        let call = launch::skinny((from, None), router.at(), of_logits, out, sizes, live);
        // SAFETY: operands and result have the rows and columns that were checked.
        unsafe { self.device.launch(call) }?;
        let chosen = (routes.experts.ptr(), routes.weights.ptr());
        let call = experts::route((logits, of_scores), chosen, &routes.routing, count, live);
        // SAFETY: there are as many logits, and room for as many choices.
        unsafe { self.device.launch(call) }?;
        let sizes = (count, routes.chunk_rows, routes.tiles_stride);
        let grouped = routes.grouped(count, 0);
        let call = experts::group(routes.experts.ptr(), &grouped, &routes.routing, sizes, live);
        // SAFETY: slots and tiles have room for the choices of `count` rows.
        unsafe { self.device.launch(call) }
    }

    // Within a step, rows go to the experts named in its inputs.
    fn assign(&mut self, experts: &[u32], routes: &mut CudaRoutes) -> Result<(), KernelError> {
        let op = "assign";
        check::assign(experts, &routes.routing, routes.rows_max)?;
        let rows = experts.len();
        let staged = self.step.adapters(experts);
        ensure!(
            op,
            staged.is_some() || !self.step.is_open(),
            "the rows are not those the step began with"
        );
        let at = staged.unwrap_or(routes.experts.ptr());
        (routes.rows, routes.assigned) = (rows, Some(at));
        if self.step.record_or_skip(op, [at.0, routes.slots.ptr().0, 0]) || rows == 0 {
            return Ok(());
        }
        if staged.is_none() {
            routes.experts.upload(&self.device.stream, 0, experts)?;
        }
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, routes.rows_max)?;
        let sizes = (count, routes.chunk_rows, routes.tiles_stride);
        let grouped = routes.grouped(count, 0);
        let call = experts::group(at, &grouped, &routes.routing, sizes, live);
        // SAFETY: slots and tiles have room for the choices of `count` rows.
        unsafe { self.device.launch(call) }
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
        let op = "experts_gate_up";
        check::gate_up(x, weight.sizes(), bias, (&routes.routing, routes.rows), out)?;
        let top_k = routes.routing.top_k;
        let (rows, inner, cols) = (x.rows(), out.width(), x.width());
        let from = x.of(Element::Bf16, op, "x")?;
        let to = out.of(Element::Bf16, op, "out")?;
        out.set_rows(rows * top_k)?;
        let w = weight.all.weight();
        if self.step.record_or_skip(op, [from.ptr.0, w.at.ptr.0, to.ptr.0]) || rows == 0 {
            return Ok(());
        }
        let most = x.rows_max().min(out.rows_max() / top_k);
        let LaunchRows { rows: count, .. } = self.step.launched(op, rows, most)?;
        for chunk in 0..routes.chunks(count) {
            let grouped = routes.grouped(count, chunk);
            let (w, sizes) = ((w, bias.map(CudaVector::ptr)), (top_k, inner, cols));
            let call = experts::gate_up(from, w, activation, to, &grouped, sizes);
            // SAFETY: shapes were checked; tiles name only slots of live rows.
            unsafe { self.device.launch(call) }?;
        }
        Ok(())
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
        let op = "experts_down";
        let routed = (&routes.routing, routes.rows);
        check::down((x, first), weight.sizes(), bias, routed, out)?;
        let top_k = routes.routing.top_k;
        let (rows, width, cols) = (routes.rows, out.width(), weight.all.cols());
        let mut from = x.of(Element::Bf16, op, "x")?;
        // The result may be the input of another product.
        let rounded = routes.assigned.and_then(|_| out.of(Element::Bf16, op, "out").ok());
        let to = match rounded {
            Some(rounded) => rounded.ptr,
            None => out.of(Element::F32, op, "out")?.ptr,
        };
        out.set_rows(rows)?;
        let w = weight.all.weight();
        if self.step.record_or_skip(op, [from.ptr.0, w.at.ptr.0, to.0]) || rows == 0 {
            return Ok(());
        }
        let most = (x.rows_max() / top_k).min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        if first.is_multiple_of(8) {
            from.ptr = from.ptr.offset(first * 2);
        } else {
            // Also copies unused slots, as many as were launched for.
            let slots = count * top_k;
            let stride = cols.next_multiple_of(8);
            let copy = Rows { ptr: self.scratch(ScratchKind::Narrow, slots * stride * 2)?, stride };
            let call = launch::copy_columns(from, copy, first, cols, slots, DevicePtr::default());
            // SAFETY: the scratch was made for it; the columns were checked.
            unsafe { self.device.launch(call) }?;
            from = copy;
        }
        for chunk in 0..routes.chunks(count) {
            let own = routes.rows_of(count, chunk);
            let made = self.scratch(ScratchKind::Wide, own.len() * top_k * width * 4)?;
            let parts = Rows { ptr: made, stride: width };
            let grouped = routes.grouped(count, chunk);
            let first_slot = own.start * top_k;
            let w = (w, bias.map(CudaVector::ptr));
            let call = experts::down(from, w, parts, &grouped, (first_slot, width, cols));
            // SAFETY: shapes were checked; tiles name only slots of this chunk's live rows.
            unsafe { self.device.launch(call) }?;
            let sums = to.offset(own.start * width * 4);
            let first = (own.start, live);
            let call = match (routes.assigned, rounded) {
                (None, _) => {
                    let weights = routes.weights.ptr().offset(first_slot * 4);
                    experts::sum(made, weights, sums, (own.len(), top_k, width), first)
                }
                (Some(assigned), None) => {
                    let from = (made, assigned.offset(own.start * 4));
                    experts::assigned_rows(from, sums, (own.len(), width), first)
                }
                (Some(assigned), Some(Rows { ptr, stride })) => {
                    let from = (made, assigned.offset(own.start * 4));
                    let to = Rows { ptr: ptr.offset(own.start * stride * 2), stride };
                    experts::assigned_rows_bf16(from, to, (own.len(), width), first)
                }
            };
            // SAFETY: shapes were checked.
            unsafe { self.device.launch(call) }?;
        }
        Ok(())
    }
}

impl CudaBackend {
    pub(super) fn download_routes(&mut self, routes: &CudaRoutes) -> Result<Choices, KernelError> {
        let stream = &self.device.stream;
        self.step.close(stream)?;
        let slots = routes.rows * routes.routing.top_k;
        let words = |memory: &DeviceMemory| -> Result<Vec<u32>, KernelError> {
            let context = &self.device.context;
            let mut host = super::memory::Pinned::<u32>::new(context, slots, "routes")?;
            memory.download_pinned(stream, 0, &mut host, slots)?;
            stream.synchronize()?;
            Ok(host.as_slice()[..slots].to_vec())
        };
        let weights = words(&routes.weights)?.into_iter().map(f32::from_bits).collect();
        Ok((words(&routes.experts)?, weights))
    }
}

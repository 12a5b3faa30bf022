//! Exchanges between ranks within a step: partial sums and logits. On their devices, in stream
//! order, if the ranks have joined a group; otherwise through host memory.
use std::time::{Duration, Instant};

use super::backend::{CudaBackend, ExchangeScratch, ScratchKind};
use super::group::FusedNorm;
use super::launch;
use super::memory::DevicePtr;
use super::products::SKINNY_MAX;
use super::sample_lists::{Candidates, TOP_MAX, candidate_bytes};
use super::step::LaunchRows;
use super::tensors::{CudaBuffer, CudaVector, Element};
use crate::backend::{Buffer as _, ExchangeOps, RowOps as _, Tensors as _};
use crate::check;
use crate::collective::ByteCounters;
use crate::error::KernelError;

/// Largest message that ranks gather to sum it themselves, where that is not needed for the same
/// bits. Gathering receives `ranks - 1` times the message, a sum by NCCL less than twice. Up to
/// this size both take the time of a message's way: 8 ranks receive 448 KiB, some microseconds over
/// a network of 100 GB/s. It holds one sequence's rows of any model, and several of most.
const GATHERED_MOST: usize = 64 << 10;

impl ExchangeOps for CudaBackend {
    fn all_reduce(&mut self, data: &mut CudaBuffer) -> Result<(), KernelError> {
        self.reduce(data, Precision::F32)
    }

    fn all_reduce_delta(&mut self, delta: &mut CudaBuffer) -> Result<(), KernelError> {
        self.reduce(delta, Precision::Bf16WhereQuicker)
    }

    fn all_reduce_add_rmsnorm(
        &mut self,
        delta: &mut CudaBuffer,
        residual: &mut CudaBuffer,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        if self.alone || !self.is_grouped() {
            self.all_reduce_delta(delta)?;
            return self.add_rmsnorm(residual, Some(delta), weight, eps, out);
        }
        let op = "all_reduce_add_rmsnorm";
        let (rows, width) = (residual.rows(), residual.width());
        check::norm(op, residual, (Some(delta), None), weight, out)?;
        let io = FusedNorm {
            data: delta.of(Element::F32, op, "delta")?.ptr,
            residual: residual.of(Element::F32, op, "residual")?.ptr,
            weight: weight.ptr(),
            out: out.of(Element::Bf16, op, "out")?,
            width,
            eps,
            rows,
            live: DevicePtr::default(),
        };
        out.set_rows(rows)?;
        self.count_sum((rows, width), Precision::Bf16WhereQuicker);
        if self.step.record_or_skip(op, [io.data.0, io.residual.0, io.weight.0]) || rows == 0 {
            return Ok(());
        }
        let most = residual.rows_max().min(out.rows_max()).min(delta.rows_max());
        let LaunchRows { rows, live } = self.step.launched(op, rows, most)?;
        let io = FusedNorm { rows, live, ..io };
        let device = &self.device;
        let fused = device.context.group.call(|group| group.all_reduce_add_rmsnorm(device, &io));
        if fused.unwrap_or(Ok(false))? {
            return Ok(());
        }
        let call = if self.in_bf16((rows, width), Precision::Bf16WhereQuicker) {
            let sums = self.sum_rows_in_bf16(io.data, (rows, width), live)?;
            let from = (io.residual, sums);
            launch::add_rmsnorm_bf16(from, io.weight, io.out, width, eps, rows, live)
        } else {
            self.sum_rows(io.data, (rows, width), live)?;
            let from = (io.residual, Some(io.data));
            launch::add_rmsnorm(from, io.weight, io.out, width, eps, rows, live)
        };
        // SAFETY: shapes were checked; sums in bf16 are as many, in the scratch.
        unsafe { self.device.launch(call) }
    }

    fn gather_logits(
        &mut self,
        local: &CudaBuffer,
        full: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "gather_logits";
        let (rank, world) = (self.rank(), self.world_size() as usize);
        let (rows, width) = (local.rows(), local.width());
        let grouped = self.is_grouped();
        if self.alone {
            // As above, also for graphs that are made for more rows.
            let LaunchRows { rows: most, .. } =
                self.step.launched_samples(op, rows, local.rows_max())?;
            self.reserve(ExchangeScratch::Gathered, world * most * width * 4)?;
            let best = candidate_bytes(Candidates::Few(TOP_MAX), world, most);
            self.reserve(ExchangeScratch::Best, best)?;
            return if rank == 0 || grouped { full.set_rows(rows) } else { Ok(()) };
        }
        if rank == 0 || grouped {
            check::gathered(local, full, world)?;
            full.set_rows(rows)?;
        }
        self.count(rows * width * 4);
        if grouped {
            return self.gather_on_devices(local, full);
        }
        let values = self.download(local)?;
        if rank != 0 {
            return self.timed(|collective| collective.gather(&values, &mut [], 0));
        }
        let mut gathered = std::mem::take(&mut self.host);
        gathered.clear();
        gathered.resize(world * rows * width, 0.0);
        self.timed(|collective| collective.gather(&values, &mut gathered, 0))?;
        // Reorders one block per rank into one row per row.
        let mut whole = vec![0.0; world * rows * width];
        for (i, from) in gathered.chunks_exact(width.max(1)).enumerate() {
            let (rank, row) = (i / rows, i % rows);
            whole[row * world * width + rank * width..][..width].copy_from_slice(from);
        }
        self.host = gathered;
        self.upload(full, &whole)
    }

    fn may_sample_everywhere(&self) -> bool {
        true
    }

    fn samples_everywhere(&self) -> bool {
        self.is_grouped()
    }

    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError> {
        self.timed(|collective| collective.broadcast(tokens, 0))
    }

    fn times_collectives(&self) -> bool {
        self.device.context.group.is_timed()
    }

    fn take_collective_time(&mut self) -> Duration {
        let device = self.device.context.group.call(|group| group.take_time());
        std::mem::take(&mut self.collective_time) + device.unwrap_or_default()
    }

    fn take_exchanged(&mut self) -> ByteCounters {
        std::mem::take(&mut self.exchanged)
    }
}

/// In which precision ranks exchange what they sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Precision {
    /// As it is.
    F32,
    /// Rounded to bf16 where that is quicker.
    Bf16WhereQuicker,
}

impl CudaBackend {
    fn reduce(&mut self, data: &mut CudaBuffer, how: Precision) -> Result<(), KernelError> {
        data.of(Element::F32, "all_reduce", "data")?;
        let grouped = self.is_grouped();
        let (rows, width) = (data.rows(), data.width());
        if self.alone {
            // Reserves now what smaller steps will need as well, so that it is included in
            // measurements.
            let bytes = rows * width * 4;
            let invariant = self.options.batch_invariant;
            let gathered = if invariant { bytes } else { GATHERED_MOST.min(bytes) };
            let gathered = self.world_size() as usize * gathered;
            let narrow = how == Precision::Bf16WhereQuicker && !invariant;
            let most = gathered.max(if narrow { bytes / 2 } else { 0 });
            return self.reserve(ExchangeScratch::Gathered, most);
        }
        if !grouped && self.world_size() == 1 {
            return Ok(());
        }
        self.count_sum((rows, width), how);
        if grouped {
            return self.reduce_on_devices(data, how);
        }
        let start = Instant::now();
        let mut values = self.download(data)?;
        self.collective.all_reduce_sum(&mut values)?;
        self.upload(data, &values)?;
        self.collective_time += start.elapsed();
        Ok(())
    }

    fn reduce_on_devices(&mut self, data: &CudaBuffer, how: Precision) -> Result<(), KernelError> {
        let op = "all_reduce";
        let at = data.of(Element::F32, op, "data")?;
        let (rows, width) = (data.rows(), data.width());
        if self.step.record_or_skip(op, [at.ptr.0, width as u64, 0]) || rows == 0 {
            return Ok(());
        }
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, data.rows_max())?;
        if !self.in_bf16((count, width), how) {
            return self.sum_rows(at.ptr, (count, width), live);
        }
        let sums = self.sum_rows_in_bf16(at.ptr, (count, width), live)?;
        let call = launch::widen_rows(sums, at.ptr, (count, width), live);
        // SAFETY: the sums are as many as the data.
        unsafe { self.device.launch(call) }
    }

    /// Whether sums of these rows are exchanged in bf16: never where a sequence's bits are promised
    /// not to depend on the batch, which is in all steps or in those of few rows. Alike on all
    /// ranks: they have agreed on that promise, and on the group and its thresholds.
    fn in_bf16(&self, (rows, width): (usize, usize), how: Precision) -> bool {
        let bytes = rows * width * 4;
        let may = how == Precision::Bf16WhereQuicker && !self.options.batch_invariant;
        let group = &self.device.context.group;
        may && rows > SKINNY_MAX
            && bytes > GATHERED_MOST
            && group.call(|group| group.sums_in_bf16(bytes)).unwrap_or(false)
    }

    /// Sums rows of f32 over the ranks in bf16; returns where the sums are: bf16 [rows, width], in
    /// scratch memory that the next exchange uses again.
    fn sum_rows_in_bf16(
        &mut self,
        at: DevicePtr,
        (rows, width): (usize, usize),
        live: DevicePtr,
    ) -> Result<DevicePtr, KernelError> {
        let sums = self.scratch(ScratchKind::Gathered, rows * width * 2)?;
        let device = &self.device;
        let call = launch::narrow_rows(at, sums, (rows, width), live);
        // SAFETY: the scratch holds as many bf16 as there are f32.
        unsafe { device.launch(call) }?;
        let group = &device.context.group;
        let reduced =
            group.call(|group| group.all_reduce_sum(device, sums, rows * width, Element::Bf16));
        reduced.unwrap_or(Ok(())).map(|()| sums)
    }

    /// If the group does not guarantee the order of sums, each rank gathers the data of all ranks
    /// and sums it: always where the same bits are promised, otherwise for messages so small that
    /// it is no slower. In others, the group sums in its own order.
    fn sum_rows(
        &mut self,
        at: DevicePtr,
        (rows, width): (usize, usize),
        live: DevicePtr,
    ) -> Result<(), KernelError> {
        let (ranks, bytes) = (self.world_size() as usize, rows * width * 4);
        let group = &self.device.context.group;
        // Two numbers have only one possible sum.
        let is_ordered = ranks <= 2
            // Not decided by the libraries that this rank has: all ranks have to agree.
            || !(bytes <= GATHERED_MOST || self.options.batch_invariant)
            || group.call(|group| group.sums_in_order(bytes)).unwrap_or(true);
        if is_ordered {
            let device = &self.device;
            let reduced =
                group.call(|group| group.all_reduce_sum(device, at, rows * width, Element::F32));
            return reduced.unwrap_or(Ok(()));
        }
        let all = self.scratch(ScratchKind::Gathered, ranks * bytes)?;
        let device = &self.device;
        let gathered = device.context.group.call(|group| group.all_gather(device, at, all, bytes));
        gathered.unwrap_or(Ok(()))?;
        let call = launch::tree_sum(all, at, (ranks, rows, width), live);
        // SAFETY: the scratch holds all ranks' rows, and the result has as many.
        unsafe { device.launch(call) }
    }

    fn count_sum(&mut self, (rows, width): (usize, usize), how: Precision) {
        let bytes = rows * width * 4;
        let halved = self.in_bf16((rows, width), how);
        self.count_as(bytes, if halved { bytes / 2 } else { bytes });
    }

    /// Counts bytes that this rank sends, by transport. Steps of a graph count their actual rows.
    pub(super) fn count(&mut self, bytes: usize) {
        self.count_as(bytes, bytes);
    }

    /// The transport is that of a message of `size` bytes.
    fn count_as(&mut self, size: usize, bytes: usize) {
        let group = &self.device.context.group;
        self.exchanged.add(group.call(|group| group.algorithm(size)).unwrap_or("host"), bytes);
    }

    /// `local` and `full` have the same rows, and `full` is as wide as the `local` of all ranks.
    fn gather_on_devices(
        &mut self,
        local: &CudaBuffer,
        full: &CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "gather_logits";
        let (rows, width, world) = (local.rows(), local.width(), self.world_size() as usize);
        let from = local.of(Element::F32, op, "local")?;
        let to = full.of(Element::F32, op, "full")?;
        if self.step.record_or_skip(op, [from.ptr.0, to.ptr.0, width as u64]) || rows == 0 {
            return Ok(());
        }
        let most = local.rows_max().min(full.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched_samples(op, rows, most)?;
        let bytes = count * width * 4;
        let all = self.scratch(ScratchKind::Gathered, world * bytes)?;
        let device = &self.device;
        let gathered =
            device.context.group.call(|group| group.all_gather(device, from.ptr, all, bytes));
        gathered.unwrap_or(Ok(()))?;
        let call = launch::interleave_ranks(all, to, (world, count, width), live);
        // SAFETY: the scratch holds all ranks' rows; the result's width and rows were checked.
        unsafe { device.launch(call) }
    }
}

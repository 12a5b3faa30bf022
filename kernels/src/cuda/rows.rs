//! Rows of activations: embedding, sums and norms.
//!
//! Like every operation, these check their arguments, then ask the step whether the call is only
//! compared with a recorded one, then launch. Activations that products read are bf16, all others
//! f32.
use super::backend::CudaBackend;
use super::batch::{AttentionTiling, Capacity, live};
use super::device::Device;
use super::launch;
use super::step::{LaunchRows, StepLists};
use super::tensors::{CudaBuffer, CudaMatrix, CudaVector, Element};
use crate::backend::{Batch, Buffer as _, LayerNorm, RowOps};
use crate::check::{self, ensure};
use crate::error::KernelError;

impl RowOps for CudaBackend {
    fn embed(
        &mut self,
        table: &CudaMatrix,
        ids: &[u32],
        first_id: u32,
        scale: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (op, width) = ("embed", table.cols());
        check::width(op, "out", out, width)?;
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
            self.step.stage(
                context,
                stream,
                capacity,
                ids,
                StepLists::default(),
                &empty,
                AttentionTiling::NONE,
                &[],
            )?;
        }
        if self.step.record_or_skip(op, [rows.ptr.0, table.at().ptr.0, u64::from(first_id)])
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
        // SAFETY: shapes were checked; the kernel handles ids beyond the table.
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
        check::norm(op, residual, (delta, None), weight, out)?;
        let from = residual.of(Element::F32, op, "residual")?.ptr;
        let added = delta.map(|delta| delta.of(Element::F32, op, "delta")).transpose()?;
        let to = out.of(Element::Bf16, op, "out")?;
        out.set_rows(rows)?;
        let added = added.map(|delta| delta.ptr);
        if self.step.record_or_skip(op, [from.0, added.unwrap_or_default().0, weight.ptr().0])
            || rows == 0
        {
            return Ok(());
        }
        let most = residual.rows_max().min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let call = launch::add_rmsnorm((from, added), weight.ptr(), to, width, eps, count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }

    fn add_layernorm(
        &mut self,
        residual: &mut CudaBuffer,
        delta: Option<&CudaBuffer>,
        norm: LayerNorm<'_, CudaVector>,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "add_layernorm";
        let (rows, width) = (residual.rows(), residual.width());
        check::layernorm(op, residual, delta, &norm, out)?;
        let from = residual.of(Element::F32, op, "residual")?.ptr;
        let most = delta.map_or(usize::MAX, CudaBuffer::rows_max);
        let added = delta.map(|delta| delta.of(Element::F32, op, "delta")).transpose()?;
        let to = out.of(Element::Bf16, op, "out")?;
        out.set_rows(rows)?;
        let (added, weight) = (added.map(|delta| delta.ptr), norm.weight.ptr());
        if self.step.record_or_skip(op, [from.0, added.unwrap_or_default().0, weight.0])
            || rows == 0
        {
            return Ok(());
        }
        let most = most.min(residual.rows_max()).min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let vectors = (weight, norm.bias.ptr());
        let call = launch::add_layernorm((from, added), vectors, to, width, eps, count, live);
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
        check::norm(op, residual, (Some(delta), Some(delta_weight)), weight, out)?;
        let from = residual.of(Element::F32, op, "residual")?.ptr;
        let added = delta.of(Element::F32, op, "delta")?.ptr;
        let to = out.of(Element::Bf16, op, "out")?;
        out.set_rows(rows)?;
        if self.step.record_or_skip(op, [from.0, added.0, weight.ptr().0]) || rows == 0 {
            return Ok(());
        }
        let most = residual.rows_max().min(delta.rows_max()).min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let added = (added, delta_weight.ptr());
        let call =
            launch::add_normed_rmsnorm(from, added, weight.ptr(), to, width, eps, count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }

    fn add_normed(
        &mut self,
        residual: &mut CudaBuffer,
        added: Option<(&CudaBuffer, &CudaVector)>,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let op = "add_normed";
        let (rows, width) = (residual.rows(), residual.width());
        check::add_normed(op, residual, added, out)?;
        let from = residual.of(Element::F32, op, "residual")?.ptr;
        let most = added.map_or(usize::MAX, |(delta, _)| delta.rows_max());
        let added = match added {
            Some((delta, weight)) => Some((delta.of(Element::F32, op, "delta")?.ptr, weight.ptr())),
            None => None,
        };
        let to = out.of(Element::Bf16, op, "out")?;
        out.set_rows(rows)?;
        let (delta, weight) = added.unwrap_or_default();
        if self.step.record_or_skip(op, [from.0, delta.0, weight.0]) || rows == 0 {
            return Ok(());
        }
        let most = most.min(residual.rows_max()).min(out.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let call = launch::add_normed(from, added, to, width, eps, count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }

    fn add(&mut self, sum: &mut CudaBuffer, other: &CudaBuffer) -> Result<(), KernelError> {
        let op = "add";
        check::shape(op, "other", Some(other), (sum.rows(), sum.width()))?;
        let to = sum.of(Element::F32, op, "sum")?.ptr;
        let from = other.of(Element::F32, op, "other")?.ptr;
        let rows = sum.rows();
        // Does not include the number of rows: a graph covers several.
        if self.step.record_or_skip(op, [to.0, from.0, sum.width() as u64]) || rows == 0 {
            return Ok(());
        }
        let most = sum.rows_max().min(other.rows_max());
        let LaunchRows { rows: count, live } = self.step.launched(op, rows, most)?;
        let call = launch::add(to, from, sum.width(), count, live);
        // SAFETY: shapes were checked.
        unsafe { self.device.launch(call) }
    }
}

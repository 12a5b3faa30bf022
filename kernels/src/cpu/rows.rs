//! Rows in parallel: embedding, sums and norms.
use super::memory::Disjoint;
use super::{CpuBackend, CpuBuffer, CpuMatrix, CpuVector, GRAIN, elementwise};
use crate::backend::{Buffer as _, LayerNorm, RowOps};
use crate::check;
use crate::error::KernelError;

impl RowOps for CpuBackend {
    fn embed(
        &mut self,
        table: &CpuMatrix,
        ids: &[u32],
        first_id: u32,
        scale: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let width = table.cols();
        check::width("embed", "out", out, width)?;
        out.set_rows(ids.len())?;
        let out = Disjoint::new(out.values_mut());
        // A row is gathered from one cache line per pair of inputs.
        self.pool.run_ranges(ids.len(), (GRAIN / 8 / width).max(1), &|range, _| {
            for i in range {
                // SAFETY: every row belongs to one task.
                let row = unsafe { out.slice(i * width, width) };
                match ids[i].checked_sub(first_id).map(|id| id as usize) {
                    Some(id) if id < table.rows() => {
                        table.unpack_row(id, row);
                        row.iter_mut().for_each(|x| *x *= scale);
                    }
                    _ => row.fill(0.0),
                }
            }
        })
    }

    fn add_rmsnorm(
        &mut self,
        residual: &mut CpuBuffer,
        delta: Option<&CpuBuffer>,
        weight: &CpuVector,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::norm("add_rmsnorm", residual, (delta, None), weight, out)?;
        out.set_rows(residual.rows())?;
        let isa = self.isa;
        self.each_normed(residual, out, &|row, residual, out| {
            let delta = delta.map(|delta| delta.row(row));
            elementwise::add_rmsnorm(isa, residual, delta, weight, eps, out);
        })
    }

    fn add_layernorm(
        &mut self,
        residual: &mut CpuBuffer,
        delta: Option<&CpuBuffer>,
        norm: LayerNorm<'_, CpuVector>,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::layernorm("add_layernorm", residual, delta, &norm, out)?;
        out.set_rows(residual.rows())?;
        let (isa, LayerNorm { weight, bias }) = (self.isa, norm);
        self.each_normed(residual, out, &|row, residual, out| {
            let delta = delta.map(|delta| delta.row(row));
            elementwise::add_layernorm(isa, residual, delta, weight, bias, eps, out);
        })
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
        let normed = (Some(delta), Some(delta_weight));
        check::norm("add_normed_rmsnorm", residual, normed, weight, out)?;
        out.set_rows(residual.rows())?;
        let isa = self.isa;
        self.each_normed(residual, out, &|row, residual, out| {
            let delta = delta.row(row);
            elementwise::add_normed_rmsnorm(isa, residual, delta, delta_weight, weight, eps, out);
        })
    }

    fn add_normed(
        &mut self,
        residual: &mut CpuBuffer,
        added: Option<(&CpuBuffer, &CpuVector)>,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::add_normed("add_normed", residual, added, out)?;
        out.set_rows(residual.rows())?;
        let isa = self.isa;
        self.each_normed(residual, out, &|row, residual, out| {
            let added = added.map(|(delta, weight)| (delta.row(row), &**weight));
            elementwise::add_normed(isa, residual, added, eps, out);
        })
    }

    fn add(&mut self, sum: &mut CpuBuffer, other: &CpuBuffer) -> Result<(), KernelError> {
        check::shape("add", "other", Some(other), (sum.rows(), sum.width()))?;
        let (isa, len, other) = (self.isa, sum.values().len(), other.values());
        let sum = Disjoint::new(sum.values_mut());
        self.pool.run_ranges(len, GRAIN, &|range, _| {
            // SAFETY: every element belongs to one task.
            let sum = unsafe { sum.slice(range.start, range.len()) };
            elementwise::add(isa, sum, &other[range]);
        })
    }
}

impl CpuBackend {
    /// Calls `norm` with every row's number, residual and result, for buffers of one width.
    fn each_normed(
        &mut self,
        residual: &mut CpuBuffer,
        out: &mut CpuBuffer,
        norm: &(impl Fn(usize, &mut [f32], &mut [f32]) + Sync),
    ) -> Result<(), KernelError> {
        let (rows, width) = (residual.rows(), residual.width());
        let residual = Disjoint::new(residual.values_mut());
        let out = Disjoint::new(out.values_mut());
        self.pool.run_ranges(rows, (GRAIN / width).max(1), &|range, _| {
            for row in range {
                // SAFETY: every row belongs to one task.
                let residual = unsafe { residual.slice(row * width, width) };
                // SAFETY: as above.
                norm(row, residual, unsafe { out.slice(row * width, width) });
            }
        })
    }
}

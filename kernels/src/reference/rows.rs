//! Embedding, sums and norms, row by row.
use super::{ReferenceBackend, rmsnorm, same};
use crate::backend::{Buffer as _, RowOps};
use crate::error::KernelError;

impl RowOps for ReferenceBackend {
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

    fn add(&mut self, sum: &mut Self::Buffer, other: &Self::Buffer) -> Result<(), KernelError> {
        same("add", "width", sum.width(), other.width())?;
        same("add", "rows", sum.rows(), other.rows())?;
        for (sum, other) in sum.values_mut().iter_mut().zip(other.values()) {
            *sum += other;
        }
        Ok(())
    }
}

//! Embedding, sums and norms, row by row.
use super::{ReferenceBackend, rmsnorm};
use crate::backend::{Buffer as _, LayerNorm, RowOps};
use crate::check;
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
        check::width("embed", "out", out, table.cols())?;
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
        check::norm("add_rmsnorm", residual, (delta, None), weight, out)?;
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

    fn add_layernorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: Option<&Self::Buffer>,
        norm: LayerNorm<'_, Self::Vector>,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::layernorm("add_layernorm", residual, delta, &norm, out)?;
        out.set_rows(residual.rows())?;
        for i in 0..residual.rows() {
            if let Some(delta) = delta {
                for (r, d) in residual.row_mut(i).iter_mut().zip(delta.row(i)) {
                    *r += d;
                }
            }
            let row = residual.row(i);
            let mean = row.iter().sum::<f32>() / row.len() as f32;
            let square = |x: &f32| (x - mean) * (x - mean);
            let variance = row.iter().map(square).sum::<f32>() / row.len() as f32;
            let scale = 1.0 / (variance + eps).sqrt();
            let vectors = norm.weight.iter().zip(norm.bias);
            for ((y, x), (weight, bias)) in out.row_mut(i).iter_mut().zip(row).zip(vectors) {
                *y = (x - mean) * scale * weight + bias;
            }
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
        let normed = (Some(delta), Some(delta_weight));
        check::norm("add_normed_rmsnorm", residual, normed, weight, out)?;
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

    fn add_normed(
        &mut self,
        residual: &mut Self::Buffer,
        added: Option<(&Self::Buffer, &Self::Vector)>,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::add_normed("add_normed", residual, added, out)?;
        out.set_rows(residual.rows())?;
        self.row.resize(residual.width(), 0.0);
        for i in 0..residual.rows() {
            if let Some((delta, weight)) = added {
                rmsnorm(delta.row(i), weight, eps, &mut self.row);
                for (r, d) in residual.row_mut(i).iter_mut().zip(&self.row) {
                    *r += d;
                }
            }
            out.row_mut(i).copy_from_slice(residual.row(i));
        }
        Ok(())
    }

    fn add(&mut self, sum: &mut Self::Buffer, other: &Self::Buffer) -> Result<(), KernelError> {
        check::shape("add", "other", Some(other), (sum.rows(), sum.width()))?;
        for (sum, other) in sum.values_mut().iter_mut().zip(other.values()) {
            *sum += other;
        }
        Ok(())
    }
}

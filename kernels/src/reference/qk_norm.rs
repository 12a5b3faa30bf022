//! The norm of q and k over all heads.
use super::attention::{finish_heads, rope_row, scale_q};
use super::{ReferenceBackend, dot};
use crate::backend::{AttentionAt, Buffer as _, QkNorm, QkNormOps, RopeTable};
use crate::check::{self, attention};
use crate::error::KernelError;

impl QkNormOps for ReferenceBackend {
    fn qk_squares(
        &mut self,
        qkv: &Self::Buffer,
        norm: &QkNorm,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        check::qk_norm::squares(qkv, norm, out)?;
        out.set_rows(qkv.rows())?;
        for i in 0..qkv.rows() {
            let mut first = 0;
            for (which, columns) in norm.columns.into_iter().enumerate() {
                let sections = norm.sections[which];
                let width = columns / sections;
                let part = |part: usize| {
                    let start = first + part * sections / norm.parts * width;
                    let section = &qkv.row(i)[start..start + width];
                    dot(section, section)
                };
                let mut sums: Vec<f32> = (0..norm.parts).map(part).collect();
                while sums.len() > 1 {
                    sums = sums.chunks(2).map(|pair| pair.iter().sum()).collect();
                }
                out.row_mut(i)[which] = sums[0];
                first += columns;
            }
        }
        Ok(())
    }

    fn qk_scale(
        &mut self,
        qkv: &mut Self::Buffer,
        norm: &QkNorm,
        squares: &Self::Buffer,
        weight: &Self::Vector,
    ) -> Result<(), KernelError> {
        check::qk_norm::scale(qkv, norm, squares, weight)?;
        let [q, k] = norm.columns;
        for i in 0..qkv.rows() {
            for (column, (x, weight)) in qkv.row_mut(i)[..q + k].iter_mut().zip(weight).enumerate()
            {
                let which = usize::from(column >= q);
                let mean = squares.row(i)[which] / norm.counts[which] as f32;
                *x = *x / (mean + norm.eps).sqrt() * weight;
            }
        }
        Ok(())
    }

    fn rope_write(
        &mut self,
        qkv: &mut Self::Buffer,
        rope: &RopeTable<Self::Vector>,
        at: AttentionAt<'_>,
        cache: &mut Self::KvCache,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        attention::projected("rope_write", (qkv, rope), at, cache.shape(), q_out)?;
        let AttentionAt { shape, batch, layer } = at;
        attention::places("rope_write", batch, attention::bounds(rope, shape, cache.shape()))?;
        q_out.set_rows(qkv.rows())?;
        let (q, kv) = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        for i in 0..qkv.rows() {
            let (cos, sin) = rope_row(rope, shape.head_dim, batch.positions[i]);
            let (rotated, v) = qkv.row_mut(i).split_at_mut(q + kv);
            finish_heads(rotated, None, cos, sin, shape);
            scale_q(&mut rotated[..q], rope, batch.positions[i]);
            q_out.row_mut(i).copy_from_slice(&rotated[..q]);
            cache.store(layer, batch.slots[i] as usize, &rotated[q..], v);
        }
        Ok(())
    }
}

//! The norm of q and k over all heads, row by row.
use super::memory::Disjoint;
use super::qkv::Heads;
use super::{CpuBackend, CpuBuffer, CpuKvCache, CpuVector, GRAIN, elementwise};
use crate::backend::{AttentionAt, Buffer as _, QkNorm, QkNormOps, RopeTable};
use crate::check::{self, attention};
use crate::error::KernelError;

impl QkNormOps for CpuBackend {
    fn qk_squares(
        &mut self,
        qkv: &CpuBuffer,
        norm: &QkNorm,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::qk_norm::squares(qkv, norm, out)?;
        out.set_rows(qkv.rows())?;
        let (isa, grain) = (self.isa, (GRAIN / qkv.width().max(1)).max(1));
        let out = Disjoint::new(out.values_mut());
        self.pool.run_ranges(qkv.rows(), grain, &|range, _| {
            for row in range {
                let mut rest = qkv.row(row);
                // SAFETY: every row belongs to one task.
                let sums = unsafe { out.slice(row * 2, 2) };
                for (which, sum) in sums.iter_mut().enumerate() {
                    let own;
                    (own, rest) = rest.split_at(norm.columns[which]);
                    *sum = in_parts(norm, which, |section| {
                        let width = own.len() / norm.sections[which];
                        elementwise::squares(isa, &own[section * width..(section + 1) * width])
                    });
                }
            }
        })
    }

    fn qk_scale(
        &mut self,
        qkv: &mut CpuBuffer,
        norm: &QkNorm,
        squares: &CpuBuffer,
        weight: &CpuVector,
    ) -> Result<(), KernelError> {
        check::qk_norm::scale(qkv, norm, squares, weight)?;
        let (isa, rows, width) = (self.isa, qkv.rows(), qkv.width());
        let grain = (GRAIN / width.max(1)).max(1);
        let qkv = Disjoint::new(qkv.values_mut());
        self.pool.run_ranges(rows, grain, &|range, _| {
            for row in range {
                let mut first = 0;
                for (which, columns) in norm.columns.into_iter().enumerate() {
                    let mean = squares.row(row)[which] / norm.counts[which] as f32;
                    let scale = 1.0 / (mean + norm.eps).sqrt();
                    // SAFETY: every row belongs to one task.
                    let own = unsafe { qkv.slice(row * width + first, columns) };
                    elementwise::scale_by(isa, own, scale, &weight[first..first + columns]);
                    first += columns;
                }
            }
        })
    }

    fn rope_write(
        &mut self,
        qkv: &mut CpuBuffer,
        rope: &RopeTable<CpuVector>,
        at: AttentionAt<'_>,
        cache: &mut CpuKvCache,
        q_out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        attention::projected("rope_write", (qkv, rope), at, cache.shape(), q_out)?;
        let AttentionAt { shape, batch, layer } = at;
        attention::places("rope_write", batch, attention::bounds(rope, shape, cache.shape()))?;
        q_out.set_rows(qkv.rows())?;
        let (isa, projected) = (self.isa, qkv.values_mut());
        Heads { isa, projected, addend: None, norms: [None; 2], rope, shape, batch, layer }.finish(
            &mut self.pool,
            cache,
            q_out,
        )
    }
}

/// The sum over the parts, as a binary tree; `of` gives that of a section.
fn in_parts(norm: &QkNorm, which: usize, of: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0.0; QkNorm::PARTS_MAX];
    let mut len = norm.parts;
    for (part, sum) in sums[..len].iter_mut().enumerate() {
        *sum = of(part * norm.sections[which] / norm.parts);
    }
    while len > 1 {
        len /= 2;
        for i in 0..len {
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        }
    }
    sums[0]
}

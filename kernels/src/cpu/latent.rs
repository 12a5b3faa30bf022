//! Multi-head latent attention: the norm and RoPE before attention, and a product for each head.
use super::elementwise::norm_rope;
use super::experts::{Grouping, sizes};
use super::gemm::Grouped;
use super::memory::Disjoint;
use super::{CpuBackend, CpuBuffer, CpuKvCache, CpuStack, CpuVector, GRAIN};
use crate::backend::{AttentionAt, Buffer as _, EXPERT_SLOTS, LatentInput, LatentOps};
use crate::check::{attention, latent as check};
use crate::error::KernelError;

impl LatentOps for CpuBackend {
    /// A task processes its heads for all rows, and the last of them the cache, so that two rows
    /// with the same slot are no data race.
    fn latent_write(
        &mut self,
        input: LatentInput<'_, CpuBuffer, CpuVector>,
        at: AttentionAt<'_>,
        cache: &mut CpuKvCache,
        plain: &mut CpuBuffer,
        q_out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let parts = check::write(&input, at, cache.shape(), plain, q_out)?;
        let LatentInput { q, kv, norm, rope, scale } = input;
        let AttentionAt { shape, batch, layer } = at;
        attention::places("latent_write", batch, check::bounds(rope, parts, cache.shape()))?;
        let (rows, heads) = (q.rows(), shape.num_heads);
        plain.set_rows(rows)?;
        q_out.set_rows(rows)?;
        let (isa, eps, half) = (self.isa, shape.norm_eps, parts.rotated / 2);
        let (wide, width) = (parts.plain + parts.rotated, shape.head_dim);
        let block_size = cache.shape().block_size;
        let (tile_len, first_tile) = (cache.tile_len(), cache.tile_offset(layer, 0, 0));
        let tiles = cache.tiles_mut();
        let kv = Disjoint::new(kv.values_mut());
        let plain = Disjoint::new(plain.values_mut());
        let q_out = Disjoint::new(q_out.values_mut());
        let grain = (GRAIN / 4 / (rows * wide).max(1)).max(1);
        self.pool.run_ranges(heads + 1, grain, &|range, _| {
            for row in 0..rows {
                let start = batch.positions[row] as usize * half;
                let (cos, sin) = (&rope.cos[start..][..half], &rope.sin[start..][..half]);
                for head in range.clone() {
                    if head == heads {
                        // SAFETY: this row of `kv` belongs to the task of the cache.
                        let k = unsafe { kv.slice(row * width, width) };
                        let (latent, rotated) = k.split_at_mut(parts.latent);
                        norm_rope(isa, latent, Some(norm), eps, &[], &[]);
                        norm_rope(isa, rotated, None, eps, cos, sin);
                        let slot = batch.slots[row] as usize;
                        let tile = (first_tile + slot / block_size * tile_len, tile_len);
                        let (offset, v) = (slot % block_size, &k[..parts.latent]);
                        // SAFETY: all tiles belong to one task.
                        unsafe { tiles.write_token(isa, tile, block_size, offset, k, v) };
                        continue;
                    }
                    let (first, second) = q.row(row)[head * wide..][..wide].split_at(parts.plain);
                    let to = (row * heads + head) * parts.plain;
                    // SAFETY: a head belongs to one task.
                    unsafe { plain.slice(to, parts.plain) }.copy_from_slice(first);
                    let to = (row * heads + head) * width + parts.latent;
                    // SAFETY: as above.
                    let out = unsafe { q_out.slice(to, parts.rotated) };
                    out.copy_from_slice(second);
                    norm_rope(isa, out, None, eps, cos, sin);
                    out.iter_mut().for_each(|x| *x *= scale);
                }
            }
        })
    }

    fn heads_product(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuStack,
        scale: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let (heads, n, cols) = sizes(weight);
        let stride = check::heads_product(x, (heads, n, cols), out)?;
        let rows = x.rows();
        out.set_rows(rows)?;
        let arithmetic = self.arithmetic();
        let Self { pool, acts, wide, grouping, .. } = self;
        let out = Disjoint::new(out.values_mut());
        let rows_most = (EXPERT_SLOTS / heads).max(1);
        for first in (0..rows).step_by(rows_most) {
            let count = rows_most.min(rows - first);
            grouping.one_per_head(heads, count);
            let Grouping { groups, tasks, .. } = &mut *grouping;
            let source =
                |place: usize| &x.row(first + place % count)[place / count * cols..][..cols];
            let grouped = Grouped::prepare(arithmetic, pool, acts, groups, cols, &source)?;
            let made = wide.get(heads * count * n)?;
            grouped.multiply(pool, tasks, (weight, None), made)?;
            let made = &*made;
            pool.run_ranges(heads * count, (GRAIN / n).max(1), &|range, _| {
                for place in range {
                    let (head, row) = (place / count, first + place % count);
                    // SAFETY: a head of a row belongs to one task.
                    let out = unsafe { out.slice((row * heads + head) * stride, n) };
                    for (out, made) in out.iter_mut().zip(&made[place * n..][..n]) {
                        *out = made * scale;
                    }
                }
            })?;
        }
        Ok(())
    }
}

//! What follows the fused QKV projection: norm and RoPE per head; K and V are written to the cache.
use super::elementwise::{self, norm_rope};
use super::isa::Isa;
use super::memory::Disjoint;
use super::{CpuBuffer, CpuKvCache, CpuVector, GRAIN};
use crate::backend::{AttentionShape, Batch, RopeTable};
use crate::error::KernelError;
use crate::pool::Pool;

/// One call; arguments are already checked.
pub(crate) struct Heads<'a> {
    pub(crate) isa: Isa,
    /// `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`, with biases. K is modified in place.
    pub(crate) projected: &'a mut [f32],
    /// Added to it first, of the same width (LoRA).
    pub(crate) addend: Option<&'a CpuBuffer>,
    /// Norms of each q head and of each k head.
    pub(crate) norms: [Option<&'a [f32]>; 2],
    pub(crate) rope: &'a RopeTable<CpuVector>,
    pub(crate) shape: &'a AttentionShape,
    pub(crate) batch: &'a Batch<'a>,
    pub(crate) layer: usize,
}

impl Heads<'_> {
    /// A task processes its heads for all rows, so that two rows with the same slot are no data
    /// race; row by row, as they lie in memory.
    pub(crate) fn finish(
        self,
        pool: &mut Pool,
        cache: &mut CpuKvCache,
        q_out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let Self { isa, projected, addend, norms, rope, shape, batch, layer } = self;
        let [q_norm, k_norm] = norms;
        let AttentionShape { num_heads, num_kv_heads, head_dim, norm_eps: eps, .. } = *shape;
        let half = head_dim / 2;
        let width = (num_heads + 2 * num_kv_heads) * head_dim;
        let tables = |row: usize| {
            let start = batch.positions[row] as usize * half;
            (&rope.cos[start..start + half], &rope.sin[start..start + half])
        };
        let kv = *cache.shape();
        let tile_len = cache.tile_len();
        let first_tile = cache.tile_offset(layer, 0, 0);
        let tiles = cache.tiles_mut();
        let projected = Disjoint::new(projected);
        let q_out = Disjoint::new(q_out.values_mut());
        let rows = batch.positions.len();
        let grain = (GRAIN / 4 / (rows * head_dim).max(1)).max(1);
        pool.run_ranges(num_heads + num_kv_heads, grain, &|range, _| {
            for row in 0..rows {
                let (cos, sin) = tables(row);
                for head in range.clone() {
                    // SAFETY: a q or k head belongs to one task.
                    let x = unsafe { projected.slice(row * width + head * head_dim, head_dim) };
                    if let Some(addend) = addend {
                        elementwise::add(isa, x, &addend.row(row)[head * head_dim..][..head_dim]);
                    }
                    let Some(kv_head) = head.checked_sub(num_heads) else {
                        norm_rope(isa, x, q_norm, eps, cos, sin);
                        if let Some(scale) = &rope.q_scale {
                            let scale = scale[batch.positions[row] as usize];
                            x.iter_mut().for_each(|x| *x *= scale);
                        }
                        // SAFETY: as above.
                        let q =
                            unsafe { q_out.slice((row * num_heads + head) * head_dim, head_dim) };
                        q.copy_from_slice(x);
                        continue;
                    };
                    norm_rope(isa, x, k_norm, eps, cos, sin);
                    let v_start = (head + num_kv_heads) * head_dim;
                    // SAFETY: the v head belongs to the task of its k head.
                    let v = unsafe { projected.slice(row * width + v_start, head_dim) };
                    if let Some(addend) = addend {
                        elementwise::add(isa, v, &addend.row(row)[v_start..][..head_dim]);
                    }
                    let slot = batch.slots[row] as usize;
                    let tile = slot / kv.block_size * num_kv_heads + kv_head;
                    let tile = (first_tile + tile * tile_len, tile_len);
                    // SAFETY: a KV head's tiles belong to one task.
                    unsafe {
                        tiles.write_token(isa, tile, kv.block_size, slot % kv.block_size, x, v);
                    }
                }
            }
        })
    }
}

//! The paged KV cache in host memory. Owns its layout; who owns which block is the scheduler's
//! affair.
//!
//! The K and V of one (layer, block, KV head) lie together: K transposed, `[head_dim, block_size]`,
//! so that scores of neighbouring tokens are computed in the lanes of a vector without sums across
//! lanes; then V, `[block_size, head_dim]`.
use super::memory::{AlignedVec, Disjoint};
use super::pool::Pool;
use crate::backend::KvShape;
use crate::error::KernelError;

/// What is stored.
pub(crate) type KvElement = f32;

/// A paged KV cache.
#[derive(Debug)]
pub struct CpuKvCache {
    data: AlignedVec<KvElement>,
    shape: KvShape,
}

/// Bytes of one block over all layers, K and V together.
pub(crate) fn block_bytes(shape: &KvShape) -> u64 {
    [shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size]
        .into_iter()
        .fold(2 * size_of::<KvElement>() as u64, |bytes, n| bytes.saturating_mul(n as u64))
}

/// Where the K of a block and head begins; its V follows.
pub(crate) fn tile_offset(shape: &KvShape, layer: usize, block: usize, head: usize) -> usize {
    let tile = 2 * shape.block_size * shape.head_dim;
    ((layer * shape.num_blocks + block) * shape.num_kv_heads + head) * tile
}

impl CpuKvCache {
    pub(crate) fn new(shape: KvShape) -> Result<Self, KernelError> {
        let bytes = block_bytes(&shape).saturating_mul(shape.num_blocks as u64);
        let len = usize::try_from(bytes).unwrap_or(usize::MAX) / size_of::<KvElement>();
        Ok(Self { data: AlignedVec::zeroed(len, "the KV cache")?, shape })
    }

    /// Its sizes.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Elements of the K (or of the V) of one block and head.
    pub(crate) fn half_len(&self) -> usize {
        self.shape.block_size * self.shape.head_dim
    }

    /// K and V of a block and head.
    pub(crate) fn block(&self, layer: usize, block: usize, head: usize) -> (&[f32], &[f32]) {
        let len = self.half_len();
        self.data[tile_offset(&self.shape, layer, block, head)..][..2 * len].split_at(len)
    }

    pub(crate) fn data_mut(&mut self) -> &mut [KvElement] {
        &mut self.data
    }
}

/// Copies blocks (from, to), which were checked, in all layers. Layers are tasks of their own.
pub(crate) fn copy_blocks(
    pool: &mut Pool,
    from: &CpuKvCache,
    to: &mut CpuKvCache,
    pairs: impl Fn(usize) -> (usize, usize) + Sync,
    count: usize,
) -> Result<(), KernelError> {
    let len = 2 * from.half_len() * from.shape.num_kv_heads;
    let (shape, layers) = (to.shape, from.shape.num_layers);
    let to = Disjoint::new(&mut to.data);
    pool.run_ranges(count * layers, 8, &|range, _| {
        for task in range {
            let (layer, (source, target)) = (task % layers, pairs(task / layers));
            // SAFETY: each block of each layer is the target of one task.
            let target = unsafe { to.slice(tile_offset(&shape, layer, target, 0), len) };
            target.copy_from_slice(&from.data[tile_offset(&from.shape, layer, source, 0)..][..len]);
        }
    })
}

/// Writes one token's `k` and `v` at `offset` of a block and head's K ++ V.
pub(crate) fn write_token(tile: &mut [KvElement], offset: usize, k: &[f32], v: &[f32]) {
    let (keys, values) = tile.split_at_mut(tile.len() / 2);
    let block_size = keys.len() / k.len();
    for (column, &x) in keys.chunks_exact_mut(block_size).zip(k) {
        column[offset] = x;
    }
    values[offset * v.len()..][..v.len()].copy_from_slice(v);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_do_not_overlap() {
        let shape =
            KvShape { num_layers: 2, num_kv_heads: 3, head_dim: 4, block_size: 5, num_blocks: 6 };
        let mut cache = CpuKvCache::new(shape).unwrap();
        let half = cache.half_len();
        let value = |layer, block, head, offset, d| {
            ((((layer * 6 + block) * 3 + head) * 5 + offset) * 4 + d) as f32
        };
        let all = |f: &mut dyn FnMut(usize, usize, usize, usize)| {
            for i in 0..2 * 6 * 3 * 5 {
                f(i / 90, i / 15 % 6, i / 5 % 3, i % 5);
            }
        };
        all(&mut |layer, block, head, offset| {
            let k: Vec<f32> = (0..4).map(|d| value(layer, block, head, offset, d)).collect();
            let v: Vec<f32> = k.iter().map(|x| -x).collect();
            let start = tile_offset(&shape, layer, block, head);
            write_token(&mut cache.data_mut()[start..start + 2 * half], offset, &k, &v);
        });
        all(&mut |layer, block, head, offset| {
            let (k, v) = cache.block(layer, block, head);
            for d in 0..4 {
                let want = value(layer, block, head, offset, d);
                assert_eq!(k[d * 5 + offset], want);
                assert_eq!(v[offset * 4 + d], -want);
            }
        });
        assert_eq!(cache.data.len() as u64 * 4, block_bytes(&shape) * 6);
    }
}

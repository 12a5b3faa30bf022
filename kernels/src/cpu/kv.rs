//! The paged KV cache in host memory. Owns its layout; the scheduler decides who owns which block.
//!
//! K and V of one (layer, block, KV head) form one tile. K is transposed, so that scores of
//! neighbouring tokens are computed in vector lanes, without sums across lanes.
//!
//! - f32: K `[head_dim, block_size]`, then V `[block_size, head_dim]`.
//! - bf16, two per word, the first in the low half: K `[head_dim / 2, block_size]`, where a word
//!   holds two neighbouring elements of a token; then V `[block_size / 2, head_dim]`, where a word
//!   holds the same element of two neighbouring tokens. Blocks of odd size have room for one more
//!   token, which is zero.
use super::isa::{Isa, multiversion};
use super::math::{bf16_pair, round_bf16};
use super::memory::{AlignedVec, Disjoint};
use super::precision::Precision;
use crate::backend::KvShape;
use crate::error::KernelError;
use crate::pool::Pool;

/// A paged KV cache, in the precision in which products take activations.
#[derive(Debug)]
pub struct CpuKvCache {
    tiles: Tiles,
    shape: KvShape,
}

#[derive(Debug)]
enum Tiles {
    Float32(AlignedVec<f32>),
    /// Pairs of elements, two per word.
    Bfloat16(AlignedVec<u32>),
}

/// The cache as tasks write it, each to its own tiles.
pub(crate) enum TilesMut<'a> {
    /// As in [`CpuKvCache`].
    Float32(Disjoint<'a, f32>),
    /// Pairs of elements, two per word.
    Bfloat16(Disjoint<'a, u32>),
}

/// 32-bit words of K, and of V, of one block and head.
fn halves(shape: &KvShape, precision: Precision) -> (usize, usize) {
    let KvShape { head_dim, block_size, .. } = *shape;
    match precision {
        Precision::Float32 => (head_dim * block_size, head_dim * block_size),
        Precision::Bfloat16 => (head_dim / 2 * block_size, block_size.div_ceil(2) * head_dim),
    }
}

/// Bytes of one block over all layers, K and V together.
pub(crate) fn block_bytes(shape: &KvShape, precision: Precision) -> u64 {
    let (keys, values) = halves(shape, precision);
    [shape.num_layers, shape.num_kv_heads, keys + values]
        .into_iter()
        .fold(4, |bytes: u64, n| bytes.saturating_mul(n as u64))
}

impl CpuKvCache {
    pub(crate) fn new(shape: KvShape, precision: Precision) -> Result<Self, KernelError> {
        let bytes = block_bytes(&shape, precision).saturating_mul(shape.num_blocks as u64);
        let len = usize::try_from(bytes).unwrap_or(usize::MAX) / 4;
        let tiles = match precision {
            Precision::Float32 => Tiles::Float32(AlignedVec::zeroed(len, "the KV cache")?),
            Precision::Bfloat16 => Tiles::Bfloat16(AlignedVec::zeroed(len, "the KV cache")?),
        };
        Ok(Self { tiles, shape })
    }

    /// The cache's dimensions.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    pub(crate) fn is_bfloat16(&self) -> bool {
        matches!(self.tiles, Tiles::Bfloat16(_))
    }

    fn precision(&self) -> Precision {
        match self.tiles {
            Tiles::Float32(_) => Precision::Float32,
            Tiles::Bfloat16(_) => Precision::Bfloat16,
        }
    }

    /// Words per tile.
    pub(crate) fn tile_len(&self) -> usize {
        let (keys, values) = halves(&self.shape, self.precision());
        keys + values
    }

    /// Offset, in words, of the tile of a block and head. The next head's tile follows.
    #[inline(always)]
    pub(crate) fn tile_offset(&self, layer: usize, block: usize, head: usize) -> usize {
        let shape = &self.shape;
        ((layer * shape.num_blocks + block) * shape.num_kv_heads + head) * self.tile_len()
    }

    /// K and V of a block and head in f32; empty in a bf16 cache.
    #[inline(always)]
    pub(crate) fn block(&self, layer: usize, block: usize, head: usize) -> (&[f32], &[f32]) {
        let Tiles::Float32(data) = &self.tiles else { return (&[], &[]) };
        let (keys, values) = halves(&self.shape, Precision::Float32);
        data[self.tile_offset(layer, block, head)..][..keys + values].split_at(keys)
    }

    /// K and V of a block and head in bf16 pairs; empty in an f32 cache.
    #[inline(always)]
    pub(crate) fn pairs(&self, layer: usize, block: usize, head: usize) -> (&[u32], &[u32]) {
        let Tiles::Bfloat16(data) = &self.tiles else { return (&[], &[]) };
        let (keys, values) = halves(&self.shape, Precision::Bfloat16);
        data[self.tile_offset(layer, block, head)..][..keys + values].split_at(keys)
    }

    pub(crate) fn tiles_mut(&mut self) -> TilesMut<'_> {
        match &mut self.tiles {
            Tiles::Float32(data) => TilesMut::Float32(Disjoint::new(data)),
            Tiles::Bfloat16(data) => TilesMut::Bfloat16(Disjoint::new(data)),
        }
    }
}

/// Copies blocks, given as checked pairs (from, to), in all layers; one task per block and layer.
pub(crate) fn copy_blocks(
    pool: &mut Pool,
    from: &CpuKvCache,
    to: &mut CpuKvCache,
    pairs: impl Fn(usize) -> (usize, usize) + Sync,
    count: usize,
) -> Result<(), KernelError> {
    let (layers, len) = (from.shape.num_layers, from.tile_len() * from.shape.num_kv_heads);
    let stride = to.shape.num_blocks;
    // Offsets of block (layer, source) and block (layer, target).
    let places = |task: usize| {
        let (layer, (source, target)) = (task % layers, pairs(task / layers));
        (from.tile_offset(layer, source, 0), (layer * stride + target) * len)
    };
    match (&from.tiles, to.tiles_mut()) {
        (Tiles::Float32(from), TilesMut::Float32(to)) => {
            copy(pool, from, &to, &places, count * layers, len)
        }
        (Tiles::Bfloat16(from), TilesMut::Bfloat16(to)) => {
            copy(pool, from, &to, &places, count * layers, len)
        }
        _ => Err(KernelError::Shape {
            op: "swap",
            message: "the cache and host memory are of different precisions".to_owned(),
        }),
    }
}

fn copy<T: Copy + Sync + Send>(
    pool: &mut Pool,
    from: &[T],
    to: &Disjoint<'_, T>,
    places: &(dyn Fn(usize) -> (usize, usize) + Sync),
    tasks: usize,
    len: usize,
) -> Result<(), KernelError> {
    pool.run_ranges(tasks, 8, &|range, _| {
        for (source, target) in range.map(places) {
            // SAFETY: each block of each layer is the target of one task.
            let target = unsafe { to.slice(target, len) };
            target.copy_from_slice(&from[source..source + len]);
        }
    })
}

impl TilesMut<'_> {
    /// Writes `k` and `v` of one token, `[head_dim]` each, to slot `offset` of the tile of `len`
    /// words at `start`.
    ///
    /// # Safety
    /// Nothing else may read or write that tile at the same time.
    pub(crate) unsafe fn write_token(
        &self,
        isa: Isa,
        (start, len): (usize, usize),
        block_size: usize,
        offset: usize,
        k: &[f32],
        v: &[f32],
    ) {
        match self {
            Self::Float32(data) => {
                // SAFETY: the caller's promise.
                let tile = unsafe { data.slice(start, len) };
                let (keys, values) = tile.split_at_mut(k.len() * block_size);
                for (column, &x) in keys.chunks_exact_mut(block_size).zip(k) {
                    column[offset] = x;
                }
                values[offset * v.len()..][..v.len()].copy_from_slice(v);
            }
            Self::Bfloat16(data) => {
                // SAFETY: the caller's promise.
                let tile = unsafe { data.slice(start, len) };
                let (keys, values) = tile.split_at_mut(k.len() / 2 * block_size);
                let row = &mut values[offset / 2 * v.len()..][..v.len()];
                write_pairs(isa, keys, block_size, offset, k, row, v);
            }
        }
    }
}

multiversion! {
    /// Writes a token's `k` to column `offset` of the keys, and its `v` to its halves of a row of
    /// pairs.
    fn write_pairs(
        keys: &mut [u32],
        block_size: usize,
        offset: usize,
        k: &[f32],
        row: &mut [u32],
        v: &[f32],
    ) = write_pairs_body
}

#[inline(always)]
fn write_pairs_body<const FMA: bool>(
    keys: &mut [u32],
    block_size: usize,
    offset: usize,
    k: &[f32],
    row: &mut [u32],
    v: &[f32],
) {
    // Rounded in chunks, which vectorises, before the words are scattered.
    let columns = keys.chunks_exact_mut(16 * block_size).zip(k.chunks_exact(32));
    let whole = k.len() / 32;
    for (columns, k) in columns {
        let mut words = [0; 16];
        for (word, &[first, second]) in words.iter_mut().zip(k.as_chunks::<2>().0) {
            *word = bf16_pair(first, second);
        }
        for (column, word) in columns.chunks_exact_mut(block_size).zip(words) {
            column[offset] = word;
        }
    }
    let rest = keys[whole * 16 * block_size..].chunks_exact_mut(block_size);
    for (column, &[first, second]) in rest.zip(k[whole * 32..].as_chunks::<2>().0) {
        column[offset] = bf16_pair(first, second);
    }
    // The other token of the pair keeps its value.
    if offset.is_multiple_of(2) {
        for (word, &x) in row.iter_mut().zip(v) {
            *word = *word & 0xffff_0000 | round_bf16(x) >> 16;
        }
    } else {
        for (word, &x) in row.iter_mut().zip(v) {
            *word = *word & 0x0000_ffff | round_bf16(x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_do_not_overlap() {
        let shape =
            KvShape { num_layers: 2, num_kv_heads: 3, head_dim: 4, block_size: 5, num_blocks: 6 };
        let value = |layer, block, head, offset, d| {
            // All values are exact in bf16, and all are different.
            let index = (((layer * 6 + block) * 3 + head) * 5 + offset) * 4 + d;
            f32::from_bits(0x3000_0000 + ((index as u32) << 16))
        };
        let all = |f: &mut dyn FnMut(usize, usize, usize, usize)| {
            // Later tokens before earlier ones: no token may overwrite its neighbour.
            for i in (0..2 * 6 * 3 * 5).rev() {
                f(i / 90, i / 15 % 6, i / 5 % 3, i % 5);
            }
        };
        for precision in [Precision::Float32, Precision::Bfloat16] {
            let mut cache = CpuKvCache::new(shape, precision).unwrap();
            all(&mut |layer, block, head, offset| {
                let k: Vec<f32> = (0..4).map(|d| value(layer, block, head, offset, d)).collect();
                let v: Vec<f32> = k.iter().map(|x| -x).collect();
                let tile = (cache.tile_offset(layer, block, head), cache.tile_len());
                // SAFETY: there is one thread.
                unsafe { cache.tiles_mut().write_token(Isa::detect(), tile, 5, offset, &k, &v) };
            });
            let half = |word: u32, second: bool| {
                f32::from_bits(if second { word & 0xffff_0000 } else { word << 16 })
            };
            all(&mut |layer, block, head, offset| {
                for d in 0..4 {
                    let want = value(layer, block, head, offset, d);
                    let (k, v) = cache.block(layer, block, head);
                    let (k_pairs, v_pairs) = cache.pairs(layer, block, head);
                    let got = match precision {
                        Precision::Float32 => (k[d * 5 + offset], v[offset * 4 + d]),
                        Precision::Bfloat16 => (
                            half(k_pairs[d / 2 * 5 + offset], d % 2 == 1),
                            half(v_pairs[offset / 2 * 4 + d], offset % 2 == 1),
                        ),
                    };
                    assert_eq!(got, (want, -want), "{precision}");
                }
            });
            let len = match &cache.tiles {
                Tiles::Float32(data) => data.len(),
                Tiles::Bfloat16(data) => data.len(),
            };
            assert_eq!(len as u64 * 4, block_bytes(&shape, precision) * 6);
        }
        let even = KvShape { block_size: 16, ..shape };
        let bytes = |precision| block_bytes(&even, precision);
        assert_eq!(bytes(Precision::Float32), 2 * bytes(Precision::Bfloat16));
    }

    /// Swaps blocks out over other contents, and back in to other blocks: all layers, heads and
    /// tokens survive.
    #[test]
    fn blocks_keep_what_they_hold() {
        let shape =
            KvShape { num_layers: 3, num_kv_heads: 2, head_dim: 4, block_size: 5, num_blocks: 6 };
        for precision in [Precision::Float32, Precision::Bfloat16] {
            let mut pool = Pool::new(2).unwrap();
            let make = |num_blocks| CpuKvCache::new(KvShape { num_blocks, ..shape }, precision);
            let (mut cache, mut host) = (make(6).unwrap(), make(4).unwrap());
            let tile = cache.tile_len();
            let word = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9) | 1;
            match &mut cache.tiles {
                Tiles::Float32(data) => {
                    (0..data.len()).for_each(|i| data[i] = i as f32 + 1.0);
                }
                Tiles::Bfloat16(data) => (0..data.len()).for_each(|i| data[i] = word(i)),
            }
            let block = |cache: &CpuKvCache, layer, block| -> Vec<u32> {
                let at = cache.tile_offset(layer, block, 0);
                match &cache.tiles {
                    Tiles::Float32(data) => {
                        data[at..at + 2 * tile].iter().map(|x| x.to_bits()).collect()
                    }
                    Tiles::Bfloat16(data) => data[at..at + 2 * tile].to_vec(),
                }
            };
            let before: Vec<_> = (0..3).map(|layer| block(&cache, layer, 5)).collect();
            let kept: Vec<_> = (0..3).map(|layer| block(&cache, layer, 3)).collect();
            let out = [(5, 2), (1, 0)];
            copy_blocks(&mut pool, &cache, &mut host, |i| out[i], 2).unwrap();
            let back = [(2, 0), (0, 4)];
            copy_blocks(&mut pool, &host, &mut cache, |i| back[i], 2).unwrap();
            for layer in 0..3 {
                assert_eq!(block(&cache, layer, 0), before[layer], "{precision}");
                assert_eq!(block(&cache, layer, 4), block(&cache, layer, 1), "{precision}");
                assert_eq!(block(&cache, layer, 3), kept[layer], "others stay");
            }
        }
    }
}

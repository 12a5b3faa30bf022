//! The paged KV cache in host memory. Owns its layout; the scheduler decides who owns which block.
//!
//! K and V of one (layer, block, KV head) form one tile. K is transposed, so that scores of
//! neighbouring tokens are computed in vector lanes, without sums across lanes. V is there even
//! if it is a part of K (and then has fewer elements), since weighted sums take it as it is.
//!
//! - f32: K `[head_dim, block_size]`, then V `[block_size, head_dim]`.
//! - bf16, two per word, the first in the low half: K `[head_dim / 2, block_size]`, where a word
//!   holds two neighbouring elements of a token; then V `[block_size / 2, head_dim]`, where a word
//!   holds the same element of two neighbouring tokens. Blocks of odd size have room for one more
//!   token, which is zero.
//! - FP8: the same as either of these, with a byte ([`super::fp8`]) for each element: of f32 where
//!   products take that, else of bf16, two per 16 bits.
//!
//! `elements`: their types, and loads.
use super::fp8;
use super::isa::{Isa, multiversion};
use super::math::{bf16_pair, round_bf16};
use super::memory::{AlignedVec, Disjoint};
use super::precision::Precision;
use crate::backend::{KvShape, KvStorage};
use crate::error::KernelError;
use crate::pool::Pool;

mod elements;

pub(crate) use elements::{Element, Floats, Kind, Pairs};

/// A paged KV cache, in the precision in which products take activations, or in FP8.
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
    Fp8(AlignedVec<u8>),
    /// Pairs of elements, the first in the low half.
    Fp8Pairs(AlignedVec<u16>),
}

/// The cache as tasks write it, each to its own tiles.
pub(crate) enum TilesMut<'a> {
    /// As in [`CpuKvCache`].
    Float32(Disjoint<'a, f32>),
    /// Pairs of elements, two per word.
    Bfloat16(Disjoint<'a, u32>),
    /// As in [`CpuKvCache`].
    Fp8(Disjoint<'a, u8>),
    /// Pairs of elements, the first in the low half.
    Fp8Pairs(Disjoint<'a, u16>),
}

fn kind(shape: &KvShape, precision: Precision) -> Kind {
    match (precision, shape.storage) {
        (Precision::Float32, KvStorage::AsTaken) => Kind::Floats,
        (Precision::Bfloat16, KvStorage::AsTaken) => Kind::Pairs,
        (Precision::Float32, KvStorage::Fp8) => Kind::Fp8Floats,
        (Precision::Bfloat16, KvStorage::Fp8) => Kind::Fp8Pairs,
    }
}

/// Bytes of an element of a tile: of a number, or of a pair.
fn element_bytes(kind: Kind) -> u64 {
    match kind {
        Kind::Floats | Kind::Pairs => 4,
        Kind::Fp8Floats => 1,
        Kind::Fp8Pairs => 2,
    }
}

/// Elements of K, and of V, of one block and head.
fn halves(shape: &KvShape, kind: Kind) -> (usize, usize) {
    let (KvShape { head_dim, block_size, .. }, value_dim) = (*shape, shape.value_dim());
    match kind {
        Kind::Floats | Kind::Fp8Floats => (head_dim * block_size, value_dim * block_size),
        Kind::Pairs | Kind::Fp8Pairs => {
            (head_dim / 2 * block_size, block_size.div_ceil(2) * value_dim)
        }
    }
}

/// Bytes of one block over all layers, K and V together.
pub(crate) fn block_bytes(shape: &KvShape, precision: Precision) -> u64 {
    let kind = kind(shape, precision);
    let (keys, values) = halves(shape, kind);
    [shape.num_layers, shape.num_kv_heads, keys + values]
        .into_iter()
        .fold(element_bytes(kind), |bytes: u64, n| bytes.saturating_mul(n as u64))
}

impl CpuKvCache {
    pub(crate) fn new(shape: KvShape, precision: Precision) -> Result<Self, KernelError> {
        let bytes = block_bytes(&shape, precision).saturating_mul(shape.num_blocks as u64);
        let kind = kind(&shape, precision);
        let len = usize::try_from(bytes / element_bytes(kind)).unwrap_or(usize::MAX);
        let what = "the KV cache";
        let tiles = match kind {
            Kind::Floats => Tiles::Float32(AlignedVec::zeroed(len, what)?),
            Kind::Pairs => Tiles::Bfloat16(AlignedVec::zeroed(len, what)?),
            Kind::Fp8Floats => Tiles::Fp8(AlignedVec::zeroed(len, what)?),
            Kind::Fp8Pairs => Tiles::Fp8Pairs(AlignedVec::zeroed(len, what)?),
        };
        Ok(Self { tiles, shape })
    }

    /// The cache's dimensions.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.tiles {
            Tiles::Float32(_) => Kind::Floats,
            Tiles::Bfloat16(_) => Kind::Pairs,
            Tiles::Fp8(_) => Kind::Fp8Floats,
            Tiles::Fp8Pairs(_) => Kind::Fp8Pairs,
        }
    }

    /// Elements per tile.
    pub(crate) fn tile_len(&self) -> usize {
        let (keys, values) = halves(&self.shape, self.kind());
        keys + values
    }

    /// Offset, in elements, of the tile of a block and head. The next head's tile follows.
    #[inline(always)]
    pub(crate) fn tile_offset(&self, layer: usize, block: usize, head: usize) -> usize {
        let shape = &self.shape;
        ((layer * shape.num_blocks + block) * shape.num_kv_heads + head) * self.tile_len()
    }

    /// K and V of a block and head; empty if the cache has other elements.
    #[inline(always)]
    pub(crate) fn block<E: Element>(
        &self,
        layer: usize,
        block: usize,
        head: usize,
    ) -> (&[E], &[E]) {
        let data = E::tiles(self);
        if data.is_empty() {
            return (&[], &[]);
        }
        let (keys, values) = halves(&self.shape, self.kind());
        data[self.tile_offset(layer, block, head)..][..keys + values].split_at(keys)
    }

    pub(crate) fn tiles_mut(&mut self) -> TilesMut<'_> {
        match &mut self.tiles {
            Tiles::Float32(data) => TilesMut::Float32(Disjoint::new(data)),
            Tiles::Bfloat16(data) => TilesMut::Bfloat16(Disjoint::new(data)),
            Tiles::Fp8(data) => TilesMut::Fp8(Disjoint::new(data)),
            Tiles::Fp8Pairs(data) => TilesMut::Fp8Pairs(Disjoint::new(data)),
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
        (Tiles::Fp8(from), TilesMut::Fp8(to)) => {
            copy(pool, from, &to, &places, count * layers, len)
        }
        (Tiles::Fp8Pairs(from), TilesMut::Fp8Pairs(to)) => {
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
    /// elements at `start`.
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
            Self::Fp8(data) => {
                // SAFETY: the caller's promise.
                let tile = unsafe { data.slice(start, len) };
                let (keys, values) = tile.split_at_mut(k.len() * block_size);
                let row = &mut values[offset * v.len()..][..v.len()];
                write_bytes(isa, keys, block_size, offset, k, row, v);
            }
            Self::Fp8Pairs(data) => {
                // SAFETY: the caller's promise.
                let tile = unsafe { data.slice(start, len) };
                let (keys, values) = tile.split_at_mut(k.len() / 2 * block_size);
                let row = &mut values[offset / 2 * v.len()..][..v.len()];
                write_byte_pairs(isa, keys, block_size, offset, k, row, v);
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

multiversion! {
    /// As [`write_pairs`], a byte for each element of K and V.
    fn write_bytes(
        keys: &mut [u8],
        block_size: usize,
        offset: usize,
        k: &[f32],
        row: &mut [u8],
        v: &[f32],
    ) = write_bytes_body
}

#[inline(always)]
fn write_bytes_body<const FMA: bool>(
    keys: &mut [u8],
    block_size: usize,
    offset: usize,
    k: &[f32],
    row: &mut [u8],
    v: &[f32],
) {
    for (columns, k) in keys.chunks_mut(16 * block_size).zip(k.chunks(16)) {
        let bytes = encoded(k);
        for (column, byte) in columns.chunks_exact_mut(block_size).zip(bytes) {
            column[offset] = byte;
        }
    }
    for (row, v) in row.chunks_mut(16).zip(v.chunks(16)) {
        row.copy_from_slice(&encoded(v)[..row.len()]);
    }
}

multiversion! {
    /// As [`write_pairs`], with pairs of bytes.
    fn write_byte_pairs(
        keys: &mut [u16],
        block_size: usize,
        offset: usize,
        k: &[f32],
        row: &mut [u16],
        v: &[f32],
    ) = write_byte_pairs_body
}

#[inline(always)]
fn write_byte_pairs_body<const FMA: bool>(
    keys: &mut [u16],
    block_size: usize,
    offset: usize,
    k: &[f32],
    row: &mut [u16],
    v: &[f32],
) {
    for (columns, k) in keys.chunks_mut(8 * block_size).zip(k.chunks(16)) {
        let bytes = encoded(k);
        let pairs = columns.chunks_exact_mut(block_size).zip(bytes.as_chunks().0);
        for (column, &pair) in pairs {
            column[offset] = u16::from_le_bytes(pair);
        }
    }
    let (shift, other) = if offset.is_multiple_of(2) { (0, 0xff00) } else { (8, 0x00ff) };
    for (row, v) in row.chunks_mut(16).zip(v.chunks(16)) {
        for (pair, byte) in row.iter_mut().zip(encoded(v)) {
            *pair = *pair & other | u16::from(byte) << shift;
        }
    }
}

/// The bytes of up to 16 numbers.
#[inline(always)]
fn encoded(values: &[f32]) -> [u8; 16] {
    let mut all = [0.0; 16];
    all[..values.len()].copy_from_slice(values);
    all.map(fp8::encode)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        num_layers: 2,
        num_kv_heads: 3,
        head_dim: 4,
        latent: None,
        block_size: 5,
        num_blocks: 6,
        storage: KvStorage::AsTaken,
    };
    const KINDS: [(Precision, KvStorage); 4] = [
        (Precision::Float32, KvStorage::AsTaken),
        (Precision::Bfloat16, KvStorage::AsTaken),
        (Precision::Float32, KvStorage::Fp8),
        (Precision::Bfloat16, KvStorage::Fp8),
    ];

    #[test]
    fn tokens_do_not_overlap() {
        let value = |layer, block, head, offset, d, storage| {
            // All values are exact in bf16, and all are different; in FP8, neighbours are.
            let index = (((layer * 6 + block) * 3 + head) * 5 + offset) * 4 + d;
            match storage {
                KvStorage::AsTaken => f32::from_bits(0x3000_0000 + ((index as u32) << 16)),
                KvStorage::Fp8 => crate::fp8::from_byte((index % 125) as u8),
            }
        };
        let all = |f: &mut dyn FnMut(usize, usize, usize, usize)| {
            // Later tokens before earlier ones: no token may overwrite its neighbour.
            for i in (0..2 * 6 * 3 * 5).rev() {
                f(i / 90, i / 15 % 6, i / 5 % 3, i % 5);
            }
        };
        for (precision, storage) in KINDS {
            let shape = KvShape { storage, ..SHAPE };
            let mut cache = CpuKvCache::new(shape, precision).unwrap();
            all(&mut |layer, block, head, offset| {
                let k = |d| value(layer, block, head, offset, d, storage);
                let k: Vec<f32> = (0..4).map(k).collect();
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
                    let want = value(layer, block, head, offset, d, storage);
                    let (in_k, in_v) = (d * 5 + offset, offset * 4 + d);
                    let (pair_k, pair_v) = (d / 2 * 5 + offset, offset / 2 * 4 + d);
                    let (second_k, second_v) = (d % 2 == 1, offset % 2 == 1);
                    let got = match cache.kind() {
                        Kind::Floats => {
                            let (k, v) = cache.block::<f32>(layer, block, head);
                            (k[in_k], v[in_v])
                        }
                        Kind::Pairs => {
                            let (k, v) = cache.block::<u32>(layer, block, head);
                            (half(k[pair_k], second_k), half(v[pair_v], second_v))
                        }
                        Kind::Fp8Floats => {
                            let (k, v) = cache.block::<u8>(layer, block, head);
                            (fp8::decode(k[in_k]), fp8::decode(v[in_v]))
                        }
                        Kind::Fp8Pairs => {
                            let (k, v) = cache.block::<u16>(layer, block, head);
                            let [k, v] = [k[pair_k], v[pair_v]].map(fp8::decode_pair);
                            (half(k, second_k), half(v, second_v))
                        }
                    };
                    assert_eq!(got, (want, -want), "{precision} {storage:?}");
                }
            });
            let bytes = match &cache.tiles {
                Tiles::Float32(data) => size_of_val(&**data),
                Tiles::Bfloat16(data) => size_of_val(&**data),
                Tiles::Fp8(data) => size_of_val(&**data),
                Tiles::Fp8Pairs(data) => size_of_val(&**data),
            };
            assert_eq!(bytes as u64, block_bytes(&shape, precision) * 6);
        }
        let bytes = |(precision, storage)| {
            block_bytes(&KvShape { block_size: 16, storage, ..SHAPE }, precision)
        };
        let [floats, pairs, fp8_floats, fp8_pairs] = KINDS.map(bytes);
        assert_eq!((floats, pairs, fp8_floats), (4 * fp8_pairs, 2 * fp8_pairs, fp8_pairs));
    }

    /// Swaps blocks out over other contents, and back in to other blocks: all layers, heads and
    /// tokens survive.
    #[test]
    fn blocks_keep_what_they_hold() {
        let shape = KvShape { num_layers: 3, num_kv_heads: 2, ..SHAPE };
        let all = KINDS.into_iter().flat_map(|it| [(it, None), (it, Some(2))]);
        for ((precision, storage), latent) in all {
            let mut pool = Pool::new(2).unwrap();
            let shape = KvShape { storage, latent, ..shape };
            let make = |num_blocks| CpuKvCache::new(KvShape { num_blocks, ..shape }, precision);
            let (mut cache, mut host) = (make(6).unwrap(), make(4).unwrap());
            let tile = cache.tile_len();
            let word = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9) | 1;
            match &mut cache.tiles {
                Tiles::Float32(data) => {
                    (0..data.len()).for_each(|i| data[i] = i as f32 + 1.0);
                }
                Tiles::Bfloat16(data) => (0..data.len()).for_each(|i| data[i] = word(i)),
                Tiles::Fp8(data) => (0..data.len()).for_each(|i| data[i] = word(i) as u8),
                Tiles::Fp8Pairs(data) => (0..data.len()).for_each(|i| data[i] = word(i) as u16),
            }
            let block = |cache: &CpuKvCache, layer, block| -> Vec<u32> {
                let at = cache.tile_offset(layer, block, 0);
                let range = at..at + 2 * tile;
                match &cache.tiles {
                    Tiles::Float32(data) => data[range].iter().map(|x| x.to_bits()).collect(),
                    Tiles::Bfloat16(data) => data[range].to_vec(),
                    Tiles::Fp8(data) => data[range].iter().map(|&x| x.into()).collect(),
                    Tiles::Fp8Pairs(data) => data[range].iter().map(|&x| x.into()).collect(),
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

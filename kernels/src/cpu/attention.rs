//! Causal attention over the paged KV cache.
//!
//! A query is one head of one row. Up to 8 queries that share a KV head (the heads of its group, in
//! neighbouring rows) traverse K and V together, but each has its own range of positions and its
//! own sums in ascending positions: all scores, then softmax, then the weighted sum of V. So a
//! row's result does not depend on the rows it is computed with.
//!
//! - `avx512bf16`: bf16 with `vdpbf16ps`; `fused`: its products where fused multiply-adds are
//!   faster
//! - `bfloat16`: bf16 on any instruction set; also where that has `vdpbf16ps`, but blocks are not
//!   whole vectors of tokens
//! - `float32`: f32
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
mod bfloat16;
mod float32;
#[cfg(target_arch = "x86_64")]
mod fused;

use super::isa::Isa;
use super::kv::{CpuKvCache, Element, Kind};
use super::math::{LANES, exp, soft_capped, sum_lanes};
use super::memory::{Disjoint, Scratch};
use super::simd::{Plain, Simd, Work};
use crate::backend::{AttentionShape, Batch, KvShape, SeqRows};
use crate::error::KernelError;

/// Maximum number of queries processed together.
const QUERIES: usize = 8;
/// Maximum number of rows per task.
const TILE_ROWS: usize = 16;

/// The queries of one sequence that one task computes for one KV head, counted row by row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryTile {
    seq: SeqRows,
    /// First query, counted within the sequence.
    first: usize,
    count: usize,
}

/// Maximum number of queries per task. All heads share latents, so that a row, too, is divided
/// among threads.
pub(crate) fn queries_most(shape: &AttentionShape) -> usize {
    match shape.latent {
        Some(_) => QUERIES,
        None => TILE_ROWS * (shape.num_heads / shape.num_kv_heads),
    }
}

/// Cuts a batch into tiles.
pub(crate) fn cut(batch: &Batch<'_>, shape: &AttentionShape, tiles: &mut Vec<QueryTile>) {
    let (group, most) = (shape.num_heads / shape.num_kv_heads, queries_most(shape));
    tiles.clear();
    for &seq in batch.seqs {
        let all = seq.num_rows as usize * group;
        let tile = |first| QueryTile { seq, first, count: most.min(all - first) };
        tiles.extend((0..all).step_by(most).map(tile));
    }
}

/// Scratch of one thread.
#[derive(Debug)]
pub(crate) struct AttentionScratch {
    /// Scores, `[queries, positions]`.
    scores: Scratch<f32>,
    /// Scaled queries, `[head_dim, queries]`.
    queries: Scratch<f32>,
    /// Queries as bf16 pairs, `[head_dim / 2, queries]`.
    query_words: Scratch<u32>,
    /// Softmax weights in bf16, `[queries, pairs of positions]`.
    weight_words: Scratch<u32>,
}

impl AttentionScratch {
    pub(crate) fn new() -> Result<Self, KernelError> {
        Ok(Self {
            scores: Scratch::new("attention scores")?,
            queries: Scratch::new("attention queries")?,
            query_words: Scratch::new("attention queries")?,
            weight_words: Scratch::new("attention weights")?,
        })
    }

    /// Frees the memory.
    pub(crate) fn free(&mut self) -> Result<(), KernelError> {
        *self = Self::new()?;
        Ok(())
    }

    /// Makes room for contexts of `blocks` whole blocks of the cache.
    pub(crate) fn reserve(
        &mut self,
        isa: Isa,
        blocks: usize,
        cache: &CpuKvCache,
    ) -> Result<(), KernelError> {
        let KvShape { block_size, head_dim, .. } = *cache.shape();
        #[cfg(target_arch = "x86_64")]
        if takes_vectors(isa, cache) {
            let layout = avx512bf16::Layout::of(blocks * block_size, head_dim);
            self.scores.get(layout.row * QUERIES)?;
            self.query_words.get(layout.query * QUERIES)?;
            self.weight_words.get(layout.row / 2 * QUERIES)?;
            return Ok(());
        }
        self.scores.get(blocks * block_size * QUERIES)?;
        if let Kind::Pairs | Kind::Fp8Pairs = cache.kind() {
            self.query_words.get(head_dim / 2 * QUERIES)?;
            self.weight_words.get(blocks * block_size.div_ceil(2) * QUERIES)?;
        } else {
            self.queries.get(head_dim * QUERIES)?;
        }
        Ok(())
    }
}

/// One call of paged attention; arguments are already checked.
pub(crate) struct Attention<'a> {
    pub(crate) isa: Isa,
    pub(crate) shape: &'a AttentionShape,
    pub(crate) batch: &'a Batch<'a>,
    pub(crate) cache: &'a CpuKvCache,
    pub(crate) layer: usize,
    pub(crate) q: &'a [f32],
    /// Attention sink of each query head, `[num_heads]`, if the model has them.
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) out: Disjoint<'a, f32>,
}

impl Attention<'_> {
    /// Computes the queries of a tile for one KV head; `scratch` has room for its context.
    pub(crate) fn tile(&self, tile: QueryTile, kv_head: usize, scratch: &mut AttentionScratch) {
        let table_start = tile.seq.table_start as usize;
        let view = View {
            cache: self.cache,
            layer: self.layer,
            kv_head,
            table: &self.batch.block_tables[table_start..table_start + tile.seq.table_len as usize],
            block_size: self.cache.shape().block_size,
            head_dim: self.shape.head_dim,
            value_dim: self.shape.value_dim(),
        };
        run_tile(self, tile, &view, scratch);
    }

    /// The position in `q`, the range of positions and the sink of query `index` of a tile.
    fn query(&self, tile: &QueryTile, kv_head: usize, index: usize) -> Query {
        let group = self.shape.num_heads / self.shape.num_kv_heads;
        let index = tile.first + index;
        let row = index / group;
        let end = (tile.seq.context_len - tile.seq.num_rows) as usize + row + 1;
        let start = self.shape.sliding_window.map_or(0, |n| end.saturating_sub(n as usize));
        let head = kv_head * group + index % group;
        let row = tile.seq.row_start as usize + row;
        let index = row * self.shape.num_heads + head;
        let (offset, out) = (index * self.shape.head_dim, index * self.shape.value_dim());
        // No sink is the same as a sink of weight zero.
        let sink = self.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
        Query { offset, out, start, end, sink }
    }
}

/// One head of one row.
#[derive(Clone, Copy)]
struct Query {
    /// Offset in `q`.
    offset: usize,
    /// Offset of the result in `out`.
    out: usize,
    /// First position that it attends to.
    start: usize,
    /// One past the last position, which is its own.
    end: usize,
    /// The attention sink: an additional score without a V.
    sink: f32,
}

/// K and V of one sequence and KV head.
struct View<'a> {
    cache: &'a CpuKvCache,
    layer: usize,
    kv_head: usize,
    table: &'a [u32],
    block_size: usize,
    head_dim: usize,
    value_dim: usize,
}

impl View<'_> {
    /// K and V of a block: `[head_dim, block_size]` and `[block_size, value_dim]`; of pairs,
    /// `[head_dim / 2, block_size]` and `[block_size / 2, value_dim]`.
    #[inline(always)]
    fn block<E: Element>(&self, index: usize) -> (&[E], &[E]) {
        self.cache.block(self.layer, self.table[index] as usize, self.kv_head)
    }
}

/// Whether [`avx512bf16`] applies: its blocks must be whole vectors of tokens.
#[cfg(target_arch = "x86_64")]
fn takes_vectors(isa: Isa, cache: &CpuKvCache) -> bool {
    let is_whole = cache.shape().block_size.is_multiple_of(avx512bf16::LANES);
    isa == Isa::Avx512Bf16 && matches!(cache.kind(), Kind::Pairs | Kind::Fp8Pairs) && is_whole
}

/// Computes a tile with the attention's instruction set.
fn run_tile(
    attention: &Attention<'_>,
    tile: QueryTile,
    view: &View<'_>,
    scratch: &mut AttentionScratch,
) {
    #[cfg(target_arch = "x86_64")]
    use std::arch::x86_64::{__m256, __m512};

    // A function for each kind and instruction set: what is not `apart` is inlined into it.
    macro_rules! run {
        ($module:ident, $element:ty) => {{
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
            fn avx512(a: &Attention<'_>, t: QueryTile, v: &View<'_>, s: &mut AttentionScratch) {
                $module::run_tile::<__m512, $element, 4>(a, t, v, s);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2(a: &Attention<'_>, t: QueryTile, v: &View<'_>, s: &mut AttentionScratch) {
                $module::run_tile::<__m256, $element, 2>(a, t, v, s);
            }
            match attention.isa {
                // SAFETY: the backend refuses an instruction set that this machine lacks.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Avx512 => unsafe { avx512(attention, tile, view, scratch) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2Fma => unsafe { avx2(attention, tile, view, scratch) },
                _ => $module::run_tile::<Plain, $element, 2>(attention, tile, view, scratch),
            }
        }};
    }
    macro_rules! run_pairs {
        ($element:ty) => {{
            match attention.isa {
                // SAFETY: the backend refuses an instruction set that this machine lacks.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 if takes_vectors(attention.isa, view.cache) => unsafe {
                    let is_fused = super::gemm::is_fused();
                    avx512bf16::run_tile::<$element>(attention, tile, view, scratch, is_fused);
                },
                _ => run!(bfloat16, $element),
            }
        }};
    }
    match view.cache.kind() {
        Kind::Pairs => run_pairs!(u32),
        Kind::Fp8Pairs => run_pairs!(u16),
        Kind::Floats => run!(float32, f32),
        Kind::Fp8Floats => run!(float32, u8),
    }
}

/// Replaces the first `len` scores of `row` by `e^(score - max)`, capped before if there is a cap;
/// gives 1 / (their sum plus the sink's). Elements after `len` may change.
struct Softmax<'a> {
    row: &'a mut [f32],
    len: usize,
    sink: f32,
    cap: Option<f32>,
}

impl<S: Simd> Work<S> for Softmax<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let Self { row, len, sink, cap } = self;
        if let Some(cap) = cap {
            row[..len].iter_mut().for_each(|score| *score = soft_capped(*score, cap));
        }
        // Whole vectors where there is room: e^-inf is 0, and adding 0 changes no bit.
        let padded = Some(len.next_multiple_of(LANES)).filter(|&padded| padded <= row.len());
        let scores = &mut row[..padded.unwrap_or(len)];
        scores[len..].fill(f32::NEG_INFINITY);
        let mut largest = S::splat(f32::NEG_INFINITY);
        let chunks = scores.chunks_exact(S::LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            largest = S::load(chunk).max(largest);
        }
        let mut lanes = [f32::NEG_INFINITY; 16];
        largest.store(&mut lanes);
        let larger = |max: f32, &x: &f32| if x > max { x } else { max };
        let max = lanes.iter().chain(rest).fold(sink, larger);
        let (chunks, rest) = scores.as_chunks_mut::<LANES>();
        let mut lanes = [0.0f32; LANES];
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *x = exp(*x - max);
                *lane += *x;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *x = exp(*x - max);
            *lane += *x;
        }
        1.0 / (sum_lanes(lanes) + exp(sink - max))
    }
}

/// Writes `sums * inverse` of a query: vectors of V's dimensions from dimension `dim` on, of which
/// the last may lie past the end of the head, in part or as a whole.
#[inline(always)]
fn store_sums<S: Simd>(
    attention: &Attention<'_>,
    view: &View<'_>,
    query: &Query,
    dim: usize,
    inverse: f32,
    sums: &[S],
) {
    for (w, sum) in sums.iter().enumerate() {
        let first = (dim + w * S::LANES).min(view.value_dim);
        let len = S::LANES.min(view.value_dim - first);
        // SAFETY: one task computes this head of this row, and writes it here alone.
        let out = unsafe { attention.out.slice(query.out + first, len) };
        sum.mul_add(S::splat(inverse), S::splat(0.0)).store_some(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_is_in_one_tile_and_rows_of_latents_are_divided() {
        let shape = |num_heads, num_kv_heads, latent| AttentionShape {
            num_heads,
            num_kv_heads,
            head_dim: 48,
            norm_eps: 0.0,
            sliding_window: None,
            softcap: None,
            latent,
        };
        let seq = |num_rows| SeqRows {
            row_start: 0,
            num_rows,
            context_len: 40,
            table_start: 0,
            table_len: 3,
        };
        let seqs = [seq(1), seq(33)];
        let batch = Batch { positions: &[], slots: &[], seqs: &seqs, block_tables: &[] };
        let mut tiles = Vec::new();
        for (shape, first, second) in [
            (shape(8, 2, None), vec![4], vec![64, 64, 4]),
            (shape(20, 1, Some(32)), vec![8, 8, 4], [vec![8; 82], vec![4]].concat()),
        ] {
            cut(&batch, &shape, &mut tiles);
            for (rows, counts) in [(1, first), (33, second)] {
                let own: Vec<&QueryTile> =
                    tiles.iter().filter(|tile| tile.seq.num_rows == rows).collect();
                assert_eq!(own.iter().map(|tile| tile.count).collect::<Vec<_>>(), counts);
                let mut next = 0;
                for tile in own {
                    assert_eq!(tile.first, next);
                    next += tile.count;
                }
            }
        }
    }
}

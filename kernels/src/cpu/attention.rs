//! Causal attention over the paged KV cache.
//!
//! A query is one head of one row. Up to 8 queries that share a KV head (the heads of its group, of
//! neighbouring rows) go through K and V together, but each has its own range of positions and its
//! own sums in ascending positions: all scores, then softmax, then the weighted sum of V. So a
//! row's result does not depend on which rows it was computed with.
use std::ops::Range;

use super::isa::{Isa, multiversion};
use super::kv::CpuKvCache;
use super::math::{exp, mul_add, sum_by};
use super::memory::{Disjoint, Scratch};
use crate::backend::{AttentionShape, Batch, SeqRows};
use crate::error::KernelError;

/// Most queries at a time.
const QUERIES: usize = 8;
/// Most rows per task.
const TILE_ROWS: u32 = 16;

/// Rows of one sequence that one task computes, for one KV head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTile {
    seq: SeqRows,
    /// First row, counted in the sequence.
    first: u32,
    rows: u32,
}

/// Cuts a batch into tiles.
pub(crate) fn cut(batch: &Batch<'_>, tiles: &mut Vec<RowTile>) {
    tiles.clear();
    for &seq in batch.seqs {
        let mut first = 0;
        while first < seq.num_rows {
            let rows = TILE_ROWS.min(seq.num_rows - first);
            tiles.push(RowTile { seq, first, rows });
            first += rows;
        }
    }
}

/// What one thread needs.
#[derive(Debug)]
pub(crate) struct AttentionScratch {
    /// `[queries, positions]`
    scores: Scratch<f32>,
    /// `[head_dim, queries]`, scaled
    queries: Scratch<f32>,
}

impl AttentionScratch {
    pub(crate) fn new() -> Result<Self, KernelError> {
        Ok(Self {
            scores: Scratch::new("attention scores")?,
            queries: Scratch::new("attention queries")?,
        })
    }

    /// Makes room for contexts of `positions` tokens, whole blocks.
    pub(crate) fn reserve(&mut self, positions: usize, head_dim: usize) -> Result<(), KernelError> {
        self.scores.get(positions * QUERIES)?;
        self.queries.get(head_dim * QUERIES)?;
        Ok(())
    }
}

/// One call of paged attention; arguments are checked.
pub(crate) struct Attention<'a> {
    pub(crate) isa: Isa,
    pub(crate) shape: &'a AttentionShape,
    pub(crate) batch: &'a Batch<'a>,
    pub(crate) cache: &'a CpuKvCache,
    pub(crate) layer: usize,
    pub(crate) q: &'a [f32],
    pub(crate) out: Disjoint<'a, f32>,
}

impl Attention<'_> {
    /// Computes the query heads of one KV head for the rows of a tile.
    pub(crate) fn tile(
        &self,
        tile: RowTile,
        kv_head: usize,
        scratch: &mut AttentionScratch,
    ) -> Result<(), KernelError> {
        let table_start = tile.seq.table_start as usize;
        let view = View {
            cache: self.cache,
            layer: self.layer,
            kv_head,
            table: &self.batch.block_tables[table_start..table_start + tile.seq.table_len as usize],
            block_size: self.cache.shape().block_size,
            head_dim: self.shape.head_dim,
        };
        let positions = tile.seq.table_len as usize * view.block_size;
        let scores = scratch.scores.get(positions * QUERIES)?;
        let queries = scratch.queries.get(view.head_dim * QUERIES)?;
        run_tile(self.isa, self, tile, &view, scores, queries);
        Ok(())
    }

    /// Row (in the batch), head and positions of query `index` of a tile.
    fn query(&self, tile: &RowTile, kv_head: usize, index: usize) -> Query {
        let group = self.shape.num_heads / self.shape.num_kv_heads;
        let row = tile.first as usize + index / group;
        let end = (tile.seq.context_len - tile.seq.num_rows) as usize + row + 1;
        let start = self.shape.sliding_window.map_or(0, |n| end.saturating_sub(n as usize));
        let head = kv_head * group + index % group;
        let row = tile.seq.row_start as usize + row;
        Query { offset: (row * self.shape.num_heads + head) * self.shape.head_dim, start, end }
    }
}

/// One head of one row.
#[derive(Clone, Copy)]
struct Query {
    /// Where it is in `q`, and its result in `out`.
    offset: usize,
    /// First position it attends to.
    start: usize,
    /// One past the last, which is its own.
    end: usize,
}

/// K and V of one sequence and KV head.
struct View<'a> {
    cache: &'a CpuKvCache,
    layer: usize,
    kv_head: usize,
    table: &'a [u32],
    block_size: usize,
    head_dim: usize,
}

impl View<'_> {
    #[inline(always)]
    fn block(&self, index: usize) -> (&[f32], &[f32]) {
        self.cache.block(self.layer, self.table[index] as usize, self.kv_head)
    }
}

/// Scores or weights of several queries: `[queries, stride]`, the first column being position
/// `base`.
#[derive(Clone, Copy)]
struct Columns {
    base: usize,
    stride: usize,
}

multiversion! {
    fn run_tile(attention: &Attention<'_>, tile: RowTile, view: &View<'_>, scores: &mut [f32], queries: &mut [f32])
        = run_tile_body
}

#[inline(always)]
fn run_tile_body<const FMA: bool>(
    attention: &Attention<'_>,
    tile: RowTile,
    view: &View<'_>,
    scores: &mut [f32],
    queries: &mut [f32],
) {
    let group = attention.shape.num_heads / attention.shape.num_kv_heads;
    let total = tile.rows as usize * group;
    let mut next = 0;
    while next < total {
        let query = |i| attention.query(&tile, view.kv_head, next + i);
        next += match total - next {
            8.. => run_queries::<FMA, 8>(attention, view, query, scores, queries),
            4.. => run_queries::<FMA, 4>(attention, view, query, scores, queries),
            2.. => run_queries::<FMA, 2>(attention, view, query, scores, queries),
            _ => run_queries::<FMA, 1>(attention, view, query, scores, queries),
        };
    }
}

#[inline(always)]
fn run_queries<const FMA: bool, const Q: usize>(
    attention: &Attention<'_>,
    view: &View<'_>,
    query: impl Fn(usize) -> Query,
    scores: &mut [f32],
    scaled: &mut [f32],
) -> usize {
    let queries: [Query; Q] = std::array::from_fn(query);
    let scaled = &mut scaled.as_chunks_mut::<Q>().0[..view.head_dim];
    let scale = 1.0 / (view.head_dim as f32).sqrt();
    for (i, query) in queries.iter().enumerate() {
        for (column, &x) in scaled.iter_mut().zip(&attention.q[query.offset..]) {
            column[i] = x * scale;
        }
    }

    let first_block = queries.iter().map(|q| q.start).min().unwrap_or(0) / view.block_size;
    let last_block = queries.iter().map(|q| q.end - 1).max().unwrap_or(0) / view.block_size;
    let columns = Columns {
        base: first_block * view.block_size,
        stride: (last_block + 1 - first_block) * view.block_size,
    };
    for index in first_block..=last_block {
        let (keys, _) = view.block(index);
        let at = (index - first_block) * view.block_size;
        score_block::<FMA, Q>(scaled, keys, view.block_size, scores, columns.stride, at);
    }

    let mut inverse = [0.0; Q];
    for (i, query) in queries.iter().enumerate() {
        let row = &mut scores[i * columns.stride..][..columns.stride];
        inverse[i] = softmax(&mut row[query.start - columns.base..query.end - columns.base]);
    }

    let mut dim = 0;
    while dim < view.head_dim {
        dim += match view.head_dim - dim {
            32.. => mix::<FMA, Q, 32>(attention, view, &queries, scores, columns, inverse, dim),
            16.. => mix::<FMA, Q, 16>(attention, view, &queries, scores, columns, inverse, dim),
            8.. => mix::<FMA, Q, 8>(attention, view, &queries, scores, columns, inverse, dim),
            _ => mix::<FMA, Q, 1>(attention, view, &queries, scores, columns, inverse, dim),
        };
    }
    Q
}

/// Scores of all tokens of a block, to columns `at..`; those that a query does not attend to are
/// computed too and not looked at.
#[inline(always)]
fn score_block<const FMA: bool, const Q: usize>(
    queries: &[[f32; Q]],
    keys: &[f32],
    block_size: usize,
    scores: &mut [f32],
    stride: usize,
    at: usize,
) {
    let mut token = 0;
    while token < block_size {
        let at = at + token;
        token += match block_size - token {
            16.. => score::<FMA, Q, 16>(queries, keys, block_size, token, scores, stride, at),
            4.. => score::<FMA, Q, 4>(queries, keys, block_size, token, scores, stride, at),
            _ => score::<FMA, Q, 1>(queries, keys, block_size, token, scores, stride, at),
        };
    }
}

/// Scores of `T` tokens.
#[inline(always)]
fn score<const FMA: bool, const Q: usize, const T: usize>(
    queries: &[[f32; Q]],
    keys: &[f32],
    block_size: usize,
    token: usize,
    scores: &mut [f32],
    stride: usize,
    at: usize,
) -> usize {
    let mut sums = [[0.0f32; T]; Q];
    for (query, keys) in queries.iter().zip(keys.chunks_exact(block_size)) {
        let keys = &keys[token..token + T];
        for (sums, &query) in sums.iter_mut().zip(query) {
            for (sum, &key) in sums.iter_mut().zip(keys) {
                *sum = mul_add::<FMA>(query, key, *sum);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        scores[i * stride + at..][..T].copy_from_slice(sums);
    }
    T
}

/// Replaces scores by `e^(score - max)` and returns 1 / their sum.
#[inline(always)]
fn softmax(scores: &mut [f32]) -> f32 {
    let max = scores.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    for x in scores.iter_mut() {
        *x = exp(*x - max);
    }
    1.0 / sum_by(scores, |x| x)
}

/// Weighted sums of `D` dimensions of V, from dimension `dim`, for all queries.
#[inline(always)]
fn mix<const FMA: bool, const Q: usize, const D: usize>(
    attention: &Attention<'_>,
    view: &View<'_>,
    queries: &[Query; Q],
    weights: &[f32],
    columns: Columns,
    inverse: [f32; Q],
    dim: usize,
) -> usize {
    let mut sums = [[0.0f32; D]; Q];
    // The positions that all queries attend to are read once for all. A query's own positions
    // before and after come before and after, so that each sum is in ascending order.
    let start = queries.iter().map(|q| q.start).max().unwrap_or(0);
    let end = queries.iter().map(|q| q.end).min().unwrap_or(0).max(start);
    for (i, query) in queries.iter().enumerate() {
        let own = query.start..start.min(query.end);
        let row = &weights[i * columns.stride..];
        add_values::<FMA, 1, D>(view, own, row, columns, dim, std::array::from_mut(&mut sums[i]));
    }
    add_values::<FMA, Q, D>(view, start..end, weights, columns, dim, &mut sums);
    for (i, query) in queries.iter().enumerate() {
        let own = end..query.end;
        let row = &weights[i * columns.stride..];
        add_values::<FMA, 1, D>(view, own, row, columns, dim, std::array::from_mut(&mut sums[i]));
    }
    for ((query, sums), inverse) in queries.iter().zip(&sums).zip(inverse) {
        // SAFETY: one task computes this head of this row, and writes it here alone.
        let out = unsafe { attention.out.slice(query.offset + dim, D) };
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = sum * inverse;
        }
    }
    D
}

#[inline(always)]
fn add_values<const FMA: bool, const Q: usize, const D: usize>(
    view: &View<'_>,
    positions: Range<usize>,
    weights: &[f32],
    columns: Columns,
    dim: usize,
    sums: &mut [[f32; D]; Q],
) {
    let mut position = positions.start;
    while position < positions.end {
        let (_, values) = view.block(position / view.block_size);
        let offset = position % view.block_size;
        let count = (view.block_size - offset).min(positions.end - position);
        for i in 0..count {
            let values = &values[(offset + i) * view.head_dim + dim..][..D];
            let column = position + i - columns.base;
            for (q, sums) in sums.iter_mut().enumerate() {
                let weight = weights[q * columns.stride + column];
                for (sum, &value) in sums.iter_mut().zip(values) {
                    *sum = mul_add::<FMA>(weight, value, *sum);
                }
            }
        }
        position += count;
    }
}

//! Attention over K and V in f32, or in FP8 widened to it.
use std::marker::PhantomData;
use std::ops::Range;

use super::super::kv::Floats;
use super::super::simd::{Simd, Work};
use super::{Attention, AttentionScratch, QUERIES, Query, QueryTile, Softmax, View, store_sums};

/// Scores or weights of several queries: `[queries, stride]`; the first column is position `base`.
#[derive(Clone, Copy)]
struct Columns {
    base: usize,
    stride: usize,
}

/// `e^(score - max)` of several queries.
#[derive(Clone, Copy)]
struct Weights<'a> {
    rows: &'a [f32],
    columns: Columns,
}

/// Computes a tile, with weighted sums of up to `W` vectors of V's dimensions at a time.
#[inline(always)]
pub(super) fn run_tile<S: Simd, E: Floats, const W: usize>(
    attention: &Attention<'_>,
    tile: QueryTile,
    view: &View<'_>,
    scratch: &mut AttentionScratch,
) {
    let positions = tile.seq.table_len as usize * view.block_size;
    let scores = scratch.scores.reserved(positions * QUERIES);
    let queries = scratch.queries.reserved(view.head_dim * QUERIES);
    let total = tile.count;
    let mut next = 0;
    while next < total {
        let query = |i| attention.query(&tile, view.kv_head, next + i);
        // Each query takes two vectors of sums.
        next += match (total - next).min(S::ACCUMULATORS / 2) {
            8.. => run_queries::<S, E, 8, 4, W>(attention, view, query, scores, queries),
            4.. => run_queries::<S, E, 4, 4, W>(attention, view, query, scores, queries),
            2.. => run_queries::<S, E, 2, 2, W>(attention, view, query, scores, queries),
            _ => run_queries::<S, E, 1, 1, W>(attention, view, query, scores, queries),
        };
    }
}

/// Computes `Q` queries, and weighted sums of `G` of them and up to `W` vectors at a time. Returns
/// `Q`.
#[inline(always)]
fn run_queries<S: Simd, E: Floats, const Q: usize, const G: usize, const W: usize>(
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
    let (blocks, element) = (first_block..last_block + 1, PhantomData::<E>);
    S::apart(Score { view, queries: scaled, blocks, scores, element });

    let cap = attention.shape.softcap;
    let mut inverse = [0.0; Q];
    for (i, query) in queries.iter().enumerate() {
        let row = &mut scores[i * columns.stride..][..columns.stride];
        let row = &mut row[query.start - columns.base..];
        inverse[i] = S::apart(Softmax { row, len: query.end - query.start, sink: query.sink, cap });
    }

    let weights = Weights { rows: scores, columns };
    let mut dim = 0;
    while dim < view.value_dim {
        // The more square the tile of sums, the fewer the loads.
        let is_wide = view.value_dim - dim >= W * S::LANES;
        for first in (0..Q).step_by(G) {
            let group: [_; G] = std::array::from_fn(|i| (queries[first + i], inverse[first + i]));
            let queries = &group;
            if is_wide {
                S::apart(Mix::<E, G, W> { attention, view, queries, weights, first, dim, element });
            } else {
                S::apart(Mix::<E, G, 2> { attention, view, queries, weights, first, dim, element });
            }
        }
        dim += if is_wide { W } else { 2 } * S::LANES;
    }
    Q
}

/// Computes the scores of all tokens of `blocks`, `[Q, tokens]`.
struct Score<'a, E, const Q: usize> {
    view: &'a View<'a>,
    queries: &'a [[f32; Q]],
    blocks: Range<usize>,
    scores: &'a mut [f32],
    element: PhantomData<E>,
}

impl<S: Simd, E: Floats, const Q: usize> Work<S> for Score<'_, E, Q> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { view, queries, blocks, scores, .. } = self;
        let block_size = view.block_size;
        let stride = blocks.len() * block_size;
        if block_size.is_multiple_of(S::LANES) {
            // Two vectors of neighbouring tokens at a time: each element of a query is then read
            // once for both.
            let mut at = 0;
            while at < stride {
                let keys = |at: usize| {
                    let (keys, _) = view.block::<E>(blocks.start + at / block_size);
                    &keys[at % block_size..]
                };
                if stride - at >= 2 * S::LANES {
                    let keys = [keys(at), keys(at + S::LANES)];
                    score_vectors::<S, E, Q, 2>(queries, keys, block_size, scores, stride, at);
                    at += 2 * S::LANES;
                } else {
                    let keys = [keys(at)];
                    score_vectors::<S, E, Q, 1>(queries, keys, block_size, scores, stride, at);
                    at += S::LANES;
                }
            }
        } else {
            for index in blocks.clone() {
                let (keys, _) = view.block::<E>(index);
                let at = (index - blocks.start) * block_size;
                score_block::<S, E, Q>(queries, keys, block_size, scores, stride, at);
            }
        }
    }
}

/// Scores of `W` vectors of tokens, written from column `at` on: `keys[w]` begins with the first
/// element of its first token, the next element is `block_size` further. Scores of tokens that a
/// query does not attend to are computed, too, and ignored.
#[inline(always)]
fn score_vectors<S: Simd, E: Floats, const Q: usize, const W: usize>(
    queries: &[[f32; Q]],
    keys: [&[E]; W],
    block_size: usize,
    scores: &mut [f32],
    stride: usize,
    at: usize,
) {
    let mut sums = [[S::splat(0.0); W]; Q];
    for (d, query) in queries.iter().enumerate() {
        let mut vectors = [S::splat(0.0); W];
        for (vector, keys) in vectors.iter_mut().zip(&keys) {
            *vector = E::load(&keys[d * block_size..]);
        }
        for (sums, &x) in sums.iter_mut().zip(query) {
            let x = S::splat(x);
            for (sum, &keys) in sums.iter_mut().zip(&vectors) {
                *sum = x.mul_add(keys, *sum);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            sum.store(&mut scores[i * stride + at + w * S::LANES..]);
        }
    }
}

/// Scores of all tokens of a block, written from column `at` on; those of tokens that a query does
/// not attend to are ignored.
#[inline(always)]
fn score_block<S: Simd, E: Floats, const Q: usize>(
    queries: &[[f32; Q]],
    keys: &[E],
    block_size: usize,
    scores: &mut [f32],
    stride: usize,
    at: usize,
) {
    let mut token = 0;
    while token < block_size {
        let end = (token + S::LANES).min(block_size);
        let mut sums = [S::splat(0.0); Q];
        for (query, keys) in queries.iter().zip(keys.chunks_exact(block_size)) {
            let keys = E::load_some(&keys[token..end]);
            for (sum, &x) in sums.iter_mut().zip(query) {
                *sum = S::splat(x).mul_add(keys, *sum);
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            sum.store_some(&mut scores[i * stride + at + token..i * stride + at + end]);
        }
        token = end;
    }
}

/// Computes weighted sums of `W` vectors of V's dimensions from dimension `dim` on, for `Q`
/// queries; `first` is the row of weights of the first one.
struct Mix<'a, E, const Q: usize, const W: usize> {
    attention: &'a Attention<'a>,
    view: &'a View<'a>,
    queries: &'a [(Query, f32); Q],
    weights: Weights<'a>,
    first: usize,
    dim: usize,
    element: PhantomData<E>,
}

impl<S: Simd, E: Floats, const Q: usize, const W: usize> Work<S> for Mix<'_, E, Q, W> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { attention, view, queries, weights, first, dim, .. } = self;
        let Weights { rows: weights, columns } = weights;
        let mut sums = [[S::splat(0.0); W]; Q];
        // The positions that all queries attend to are read once for all. A query's further
        // positions are added before and after them, so that each sum is in ascending order.
        let start = queries.iter().map(|(q, _)| q.start).max().unwrap_or(0);
        let end = queries.iter().map(|(q, _)| q.end).min().unwrap_or(0).max(start);
        let mut rows: [&[f32]; Q] = [&[]; Q];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = &weights[(first + i) * columns.stride..][..columns.stride];
        }
        // One loop, so that the code for edges is there only once.
        for before in [true, false] {
            for (i, (query, _)) in queries.iter().enumerate() {
                let own = if before { query.start..start.min(query.end) } else { end..query.end };
                add_values::<S, E, 1, W>(view, own, [rows[i]], columns.base, dim, &mut sums[i..=i]);
            }
            if before {
                add_values::<S, E, Q, W>(view, start..end, rows, columns.base, dim, &mut sums);
            }
        }
        for ((query, inverse), sums) in queries.iter().zip(&sums) {
            store_sums(attention, view, query, dim, *inverse, sums);
        }
    }
}

/// `all_sums[q] += weights[q][position - base] * V[position]` over `positions`; `all_sums` has `Q`
/// entries.
#[inline(always)]
fn add_values<S: Simd, E: Floats, const Q: usize, const W: usize>(
    view: &View<'_>,
    positions: Range<usize>,
    weights: [&[f32]; Q],
    base: usize,
    dim: usize,
    all_sums: &mut [[S; W]],
) {
    if positions.is_empty() {
        return;
    }
    // A copy that stays in registers. Loops rather than functions over arrays: these are not always
    // inlined here, and a call puts all sums into memory.
    let mut sums = [[S::splat(0.0); W]; Q];
    sums.copy_from_slice(all_sums);
    let width = (view.value_dim - dim).min(W * S::LANES);
    let mut position = positions.start;
    while position < positions.end {
        let (_, values) = view.block::<E>(position / view.block_size);
        let offset = position % view.block_size;
        let count = (view.block_size - offset).min(positions.end - position);
        let mut rows = weights;
        for row in &mut rows {
            *row = &row[position - base..][..count];
        }
        for i in 0..count {
            let values = &values[(offset + i) * view.value_dim + dim..][..width];
            let mut vectors = [S::splat(0.0); W];
            if width == W * S::LANES {
                for (w, vector) in vectors.iter_mut().enumerate() {
                    *vector = E::load(&values[w * S::LANES..]);
                }
            } else {
                for (w, vector) in vectors.iter_mut().enumerate() {
                    *vector = E::load_some(&values[(w * S::LANES).min(width)..]);
                }
            }
            for (sums, row) in sums.iter_mut().zip(&rows) {
                let weight = S::splat(row[i]);
                for (sum, &value) in sums.iter_mut().zip(&vectors) {
                    *sum = weight.mul_add(value, *sum);
                }
            }
        }
        position += count;
    }
    all_sums.copy_from_slice(&sums);
}

//! Attention over K and V in bf16, or in FP8 widened to it: queries and weights are rounded to
//! bf16, too, and enter products in pairs. Sums, scores and softmax are f32.
//!
//! A pair is two neighbouring elements of a head for scores, and two neighbouring tokens for
//! weighted sums. Where a query attends to only one token of a pair, the other's weight and V count
//! as zero, whatever V contains.
use std::marker::PhantomData;
use std::ops::Range;

use super::super::kv::Pairs;
use super::super::math::bf16_pair;
use super::super::simd::{HIGH, LOW, PairSimd, Work};
use super::{Attention, AttentionScratch, Query, QueryTile, Softmax, View, store_sums};

/// Computes a tile, with weighted sums of up to `W` vectors of V's dimensions at a time.
#[inline(always)]
pub(super) fn run_tile<S: PairSimd, E: Pairs, const W: usize>(
    attention: &Attention<'_>,
    tile: QueryTile,
    view: &View<'_>,
    scratch: &mut AttentionScratch,
) {
    let total = tile.count;
    let mut next = 0;
    while next < total {
        let query = |i| attention.query(&tile, view.kv_head, next + i);
        // Each query takes two vectors of sums.
        next += match (total - next).min(S::ACCUMULATORS / 2) {
            8.. => run_queries::<S, E, 8, 4, W>(attention, view, query, scratch),
            4.. => run_queries::<S, E, 4, 4, W>(attention, view, query, scratch),
            2.. => run_queries::<S, E, 2, 2, W>(attention, view, query, scratch),
            _ => run_queries::<S, E, 1, 1, W>(attention, view, query, scratch),
        };
    }
}

/// Weights of several queries, `[queries, stride]` in pairs of tokens; the first column is pair
/// `base` of the sequence.
#[derive(Clone, Copy)]
struct Weights<'a> {
    words: &'a [u32],
    base: usize,
    stride: usize,
}

/// The pairs of tokens that a query attends to, counted from its first block.
#[derive(Clone, Copy)]
struct OwnPairs {
    /// The first pair of which it attends to both tokens.
    start: usize,
    /// One past the last.
    end: usize,
    /// It also attends to the second token of the pair before `start`.
    front: bool,
    /// It also attends to the first token of the pair at `end`.
    back: bool,
}

impl OwnPairs {
    #[inline(always)]
    fn of(query: &Query, block_size: usize) -> Self {
        let per_block = block_size.div_ceil(2);
        let place = |position: usize| (position / block_size * per_block, position % block_size);
        let (first, offset) = place(query.start);
        let front = offset % 2 == 1;
        let start = first + offset / 2 + usize::from(front);
        let (last, offset) = place(query.end - 1);
        let back = offset.is_multiple_of(2);
        let end = last + offset / 2 + usize::from(!back);
        // A query of a single second token has neither whole pairs nor a back.
        Self { start, end: end.max(start), front, back }
    }
}

/// Computes `Q` queries, and weighted sums of `G` of them and up to `W` vectors at a time. Returns
/// `Q`.
#[inline(always)]
fn run_queries<S: PairSimd, E: Pairs, const Q: usize, const G: usize, const W: usize>(
    attention: &Attention<'_>,
    view: &View<'_>,
    query: impl Fn(usize) -> Query,
    scratch: &mut AttentionScratch,
) -> usize {
    let queries: [Query; Q] = std::array::from_fn(query);
    let (head_dim, block_size) = (view.head_dim, view.block_size);
    let first_block = queries.iter().map(|q| q.start).min().unwrap_or(0) / block_size;
    let last_block = queries.iter().map(|q| q.end - 1).max().unwrap_or(0) / block_size;
    let blocks = last_block + 1 - first_block;
    let (base, stride) = (first_block * block_size, blocks * block_size);
    let per_block = block_size.div_ceil(2);
    let pair_stride = blocks * per_block;

    let rounded = scratch.query_words.reserved(head_dim / 2 * Q).as_chunks_mut::<Q>().0;
    for (i, query) in queries.iter().enumerate() {
        let pairs = attention.q[query.offset..][..head_dim].as_chunks::<2>().0;
        for (words, &[first, second]) in rounded.iter_mut().zip(pairs) {
            words[i] = bf16_pair(first, second);
        }
    }
    let scale = S::splat(1.0 / (head_dim as f32).sqrt());
    let scores = scratch.scores.reserved(stride * Q);
    let (blocks, element) = (first_block..last_block + 1, PhantomData::<E>);
    S::apart(Score { view, queries: rounded, blocks, scale, scores, element });

    let words = scratch.weight_words.reserved(pair_stride * Q);
    let cap = attention.shape.softcap;
    let mut inverse = [0.0; Q];
    for (i, query) in queries.iter().enumerate() {
        let row = &mut scores[i * stride..][..stride];
        let (start, end) = (query.start - base, query.end - base);
        inverse[i] =
            S::apart(Softmax { row: &mut row[start..], len: end - start, sink: query.sink, cap });
        // Half pairs are built from these elements; tokens beyond them are not read.
        row[..start].fill(0.0);
        row[end..].fill(0.0);
        let words = &mut words[i * pair_stride..][..pair_stride];
        round_weights(row, block_size, words);
    }

    let weights = Weights { words, base: first_block * per_block, stride: pair_stride };
    let pairs = queries.map(|query| OwnPairs::of(&query, block_size));
    let mut dim = 0;
    while dim < view.value_dim {
        // The more square the tile of sums, the fewer the loads.
        let is_wide = view.value_dim - dim >= W * S::LANES;
        for first in (0..Q).step_by(G) {
            let group: [_; G] =
                std::array::from_fn(|i| (queries[first + i], pairs[first + i], inverse[first + i]));
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
struct Score<'a, S, E, const Q: usize> {
    view: &'a View<'a>,
    queries: &'a [[u32; Q]],
    blocks: Range<usize>,
    scale: S,
    scores: &'a mut [f32],
    element: PhantomData<E>,
}

impl<S: PairSimd, E: Pairs, const Q: usize> Work<S> for Score<'_, S, E, Q> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { view, queries, blocks, scale, scores, .. } = self;
        let block_size = view.block_size;
        let stride = blocks.len() * block_size;
        if block_size.is_multiple_of(S::LANES) {
            // Two vectors of neighbouring tokens at a time: each element of a query is then read
            // once for both.
            let mut at = 0;
            while at < stride {
                let keys = |at: usize| {
                    &view.block::<E>(blocks.start + at / block_size).0[at % block_size..]
                };
                if stride - at >= 2 * S::LANES {
                    let keys = [keys(at), keys(at + S::LANES)];
                    score_vectors::<S, E, Q, 2>(
                        queries, keys, block_size, scale, scores, stride, at,
                    );
                    at += 2 * S::LANES;
                } else {
                    let keys = [keys(at)];
                    score_vectors::<S, E, Q, 1>(
                        queries, keys, block_size, scale, scores, stride, at,
                    );
                    at += S::LANES;
                }
            }
        } else {
            for index in 0..blocks.len() {
                let (keys, _) = view.block::<E>(blocks.start + index);
                let at = index * block_size;
                score_block::<S, E, Q>(queries, keys, block_size, scale, scores, stride, at);
            }
        }
    }
}

/// Rounds the weights of whole blocks into pairs of tokens; the last pair of an odd block has one
/// token.
#[inline(always)]
fn round_weights(row: &[f32], block_size: usize, words: &mut [u32]) {
    if block_size.is_multiple_of(2) {
        for (word, &[first, second]) in words.iter_mut().zip(row.as_chunks::<2>().0) {
            *word = bf16_pair(first, second);
        }
        return;
    }
    let blocks = words.chunks_exact_mut(block_size.div_ceil(2)).zip(row.chunks_exact(block_size));
    for (words, row) in blocks {
        for (word, pair) in words.iter_mut().zip(row.chunks(2)) {
            *word = bf16_pair(pair[0], pair.get(1).copied().unwrap_or(0.0));
        }
    }
}

/// Scores of `W` vectors of tokens, written from column `at` on: `keys[w]` begins with the first
/// pair of its first token, the next pair is `block_size` words further. Scores of tokens that a
/// query does not attend to are computed, too, and ignored.
#[inline(always)]
fn score_vectors<S: PairSimd, E: Pairs, const Q: usize, const W: usize>(
    queries: &[[u32; Q]],
    keys: [&[E]; W],
    block_size: usize,
    scale: S,
    scores: &mut [f32],
    stride: usize,
    at: usize,
) {
    let mut sums = [[S::splat(0.0); W]; Q];
    for (pair, query) in queries.iter().enumerate() {
        let mut vectors = [S::splat_words(0); W];
        for (vector, keys) in vectors.iter_mut().zip(&keys) {
            *vector = E::load::<S>(&keys[pair * block_size..]);
        }
        for (sums, &word) in sums.iter_mut().zip(query) {
            let x = S::splat_words(word);
            for (sum, &keys) in sums.iter_mut().zip(&vectors) {
                *sum = sum.dot(x, keys);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (w, sum) in sums.iter().enumerate() {
            let scaled = sum.mul_add(scale, S::splat(0.0));
            scaled.store(&mut scores[i * stride + at + w * S::LANES..]);
        }
    }
}

/// Scores of all tokens of a block, written from column `at` on; those of tokens that a query does
/// not attend to are ignored.
#[inline(always)]
fn score_block<S: PairSimd, E: Pairs, const Q: usize>(
    queries: &[[u32; Q]],
    keys: &[E],
    block_size: usize,
    scale: S,
    scores: &mut [f32],
    stride: usize,
    at: usize,
) {
    let mut token = 0;
    while token < block_size {
        let end = (token + S::LANES).min(block_size);
        let mut sums = [S::splat(0.0); Q];
        for (query, keys) in queries.iter().zip(keys.chunks_exact(block_size)) {
            let keys = E::load_some::<S>(&keys[token..end]);
            for (sum, &word) in sums.iter_mut().zip(query) {
                *sum = sum.dot(S::splat_words(word), keys);
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            let scaled = sum.mul_add(scale, S::splat(0.0));
            scaled.store_some(&mut scores[i * stride + at + token..i * stride + at + end]);
        }
        token = end;
    }
}

/// Computes weighted sums of `W` vectors of V's dimensions from dimension `dim` on, for `Q`
/// queries; `first` is the row of weights of the first one.
struct Mix<'a, E, const Q: usize, const W: usize> {
    attention: &'a Attention<'a>,
    view: &'a View<'a>,
    queries: &'a [(Query, OwnPairs, f32); Q],
    weights: Weights<'a>,
    first: usize,
    dim: usize,
    element: PhantomData<E>,
}

impl<S: PairSimd, E: Pairs, const Q: usize, const W: usize> Work<S> for Mix<'_, E, Q, W> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { attention, view, queries, weights, first, dim, .. } = self;
        let mut sums = [[S::splat(0.0); W]; Q];
        // The pairs that all queries attend to are read once for all. A query's further pairs are
        // added before and after them, so that each sum is in ascending order.
        let start = queries.iter().map(|(_, pairs, _)| pairs.start).max().unwrap_or(0);
        let end = queries.iter().map(|(_, pairs, _)| pairs.end).min().unwrap_or(0).max(start);
        let mut rows: [&[u32]; Q] = [&[]; Q];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = &weights.words[(first + i) * weights.stride..][..weights.stride];
        }
        let base = weights.base;
        // One loop, so that the code for edges is there only once.
        for before in [true, false] {
            for (i, (_, pairs, _)) in queries.iter().enumerate() {
                let edges = if before {
                    let half = pairs.start - usize::from(pairs.front)..pairs.start;
                    [(half, HIGH), (pairs.start..start.min(pairs.end), u32::MAX)]
                } else {
                    let half = pairs.end..pairs.end + usize::from(pairs.back);
                    [(end..pairs.end, u32::MAX), (half, LOW)]
                };
                for (edge, mask) in edges {
                    let sums = &mut sums[i..=i];
                    add_values::<S, E, 1, W>(view, edge, [rows[i]], base, dim, mask, sums);
                }
            }
            if before {
                add_values::<S, E, Q, W>(view, start..end, rows, base, dim, u32::MAX, &mut sums);
            }
        }
        for ((query, _, inverse), sums) in queries.iter().zip(&sums) {
            store_sums(attention, view, query, dim, *inverse, sums);
        }
    }
}

/// `all_sums[q] += weights[q][pair - base] * V[pair]` over `pairs`, using only the bits of V's
/// words in `mask`; `all_sums` has `Q` entries.
#[inline(always)]
fn add_values<S: PairSimd, E: Pairs, const Q: usize, const W: usize>(
    view: &View<'_>,
    pairs: Range<usize>,
    weights: [&[u32]; Q],
    base: usize,
    dim: usize,
    mask: u32,
    all_sums: &mut [[S; W]],
) {
    if pairs.is_empty() {
        return;
    }
    // A copy that stays in registers. Loops rather than functions over arrays: these are not always
    // inlined here, and a call puts all sums into memory.
    let mut sums = [[S::splat(0.0); W]; Q];
    sums.copy_from_slice(all_sums);
    let width = (view.value_dim - dim).min(W * S::LANES);
    let per_block = view.block_size.div_ceil(2);
    let mut pair = pairs.start;
    while pair < pairs.end {
        let (_, values) = view.block::<E>(pair / per_block);
        let offset = pair % per_block;
        let count = (per_block - offset).min(pairs.end - pair);
        let mut rows = weights;
        for row in &mut rows {
            *row = &row[pair - base..][..count];
        }
        for i in 0..count {
            let values = &values[(offset + i) * view.value_dim + dim..][..width];
            let mut vectors = [S::splat_words(0); W];
            if width == W * S::LANES {
                for (w, vector) in vectors.iter_mut().enumerate() {
                    *vector = E::load::<S>(&values[w * S::LANES..]);
                }
            } else {
                for (w, vector) in vectors.iter_mut().enumerate() {
                    *vector = E::load_some::<S>(&values[(w * S::LANES).min(width)..]);
                }
            }
            if mask != u32::MAX {
                for vector in &mut vectors {
                    *vector = S::keep(*vector, mask);
                }
            }
            for (sums, row) in sums.iter_mut().zip(&rows) {
                // The weight of the other half is zero where the mask is all ones.
                let weight = S::splat_words(row[i] & mask);
                for (sum, &value) in sums.iter_mut().zip(&vectors) {
                    *sum = sum.dot(weight, value);
                }
            }
        }
        pair += count;
    }
    all_sums.copy_from_slice(&sums);
}

//! Attention over K and V in bf16, or in FP8 widened to it, with `vdpbf16ps`, for blocks of whole
//! vectors of tokens. Computes the same products as [`super::bfloat16`], which handles blocks of
//! any size, and uses what only this instruction set has: registers for four vectors of sums for
//! six queries, masks, and vector powers of two. Where fused multiply-adds are faster than
//! `vdpbf16ps`, most products of bf16 are left to [`fused`], which gives the same bits.
//!
//! A query's scores are summed in the lanes of their positions, its weighted sums over ascending
//! pairs of positions, so nothing depends on which queries are computed together.
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::fp8;
use super::super::gemm::round_row;
use super::super::kv::Pairs;
use super::super::math::soft_capped;
use super::fused::{self, WideRows, Words};
use super::{Attention, AttentionScratch, QUERIES, Query, QueryTile, View};

/// Lanes per vector.
pub(super) const LANES: usize = 16;
/// Queries per pass for which four vectors of sums each fit into registers.
const SQUARE: usize = 6;
/// Vectors of sums per query: for up to [`SQUARE`] queries, and (`NARROW`) for more.
const WIDE: usize = 4;
const NARROW: usize = 2;

/// Pairs as they are in the cache.
pub(super) trait Loaded: Pairs {
    /// Whether the bf16 themselves are in memory, and are not made from what is there.
    const IN_MEMORY: bool;

    /// Loads the pairs of the lanes in `mask`; the others become zero.
    ///
    /// # Safety
    /// The pairs of those lanes are at `at`; and AVX-512 (F, BW and VL).
    unsafe fn load_masked(mask: __mmask16, at: *const Self) -> __m512i;

    /// Loads [`LANES`] pairs.
    ///
    /// # Safety
    /// They are at `at`; and AVX-512 (F, BW and VL).
    unsafe fn load_all(at: *const Self) -> __m512i;
}

impl Loaded for u32 {
    const IN_MEMORY: bool = true;

    #[inline(always)]
    unsafe fn load_masked(mask: __mmask16, at: *const Self) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_epi32(mask, at.cast()) }
    }

    #[inline(always)]
    unsafe fn load_all(at: *const Self) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }
}

impl Loaded for u16 {
    const IN_MEMORY: bool = false;

    #[inline(always)]
    unsafe fn load_masked(mask: __mmask16, at: *const Self) -> __m512i {
        // SAFETY: the caller's promise.
        let bytes = unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) };
        // SAFETY: the same.
        unsafe { fp8::x86::pairs_512(bytes) }
    }

    #[inline(always)]
    unsafe fn load_all(at: *const Self) -> __m512i {
        // SAFETY: the caller's promise.
        let bytes = unsafe { _mm256_loadu_si256(at.cast()) };
        // SAFETY: the same.
        unsafe { fp8::x86::pairs_512(bytes) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
pub(super) fn run_tile<E: Loaded>(
    attention: &Attention<'_>,
    tile: QueryTile,
    view: &View<'_>,
    scratch: &mut AttentionScratch,
    is_fused: bool,
) {
    let is_fused = is_fused && E::IN_MEMORY;
    let total = tile.count;
    // As even as possible. Slightly more queries than fit best go in one pass, which reads K and V
    // only once.
    let parts = if total <= QUERIES && !is_fused { 1 } else { total.div_ceil(SQUARE) };
    let mut next = 0;
    for part in 0..parts {
        let count = (total - next).div_ceil(parts - part);
        let mut queries = [attention.query(&tile, view.kv_head, next); QUERIES];
        for (i, query) in queries[..count].iter_mut().enumerate() {
            *query = attention.query(&tile, view.kv_head, next + i);
        }
        match count {
            1 => run_queries::<E, 1, WIDE>(attention, view, &queries, scratch, is_fused),
            2 => run_queries::<E, 2, WIDE>(attention, view, &queries, scratch, is_fused),
            3 => run_queries::<E, 3, WIDE>(attention, view, &queries, scratch, is_fused),
            4 => run_queries::<E, 4, WIDE>(attention, view, &queries, scratch, is_fused),
            5 => run_queries::<E, 5, WIDE>(attention, view, &queries, scratch, is_fused),
            6 => run_queries::<E, 6, WIDE>(attention, view, &queries, scratch, is_fused),
            7 => run_queries::<E, 7, NARROW>(attention, view, &queries, scratch, is_fused),
            _ => run_queries::<E, 8, NARROW>(attention, view, &queries, scratch, is_fused),
        }
        next += count;
    }
}

/// Computes the first `M` queries, `W` vectors of sums each at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn run_queries<E: Loaded, const M: usize, const W: usize>(
    attention: &Attention<'_>,
    view: &View<'_>,
    queries: &[Query; QUERIES],
    scratch: &mut AttentionScratch,
    is_fused: bool,
) {
    let is_fused = is_fused && (fused::LEAST..=fused::MOST).contains(&M) && W == fused::WIDTH;
    let (head_dim, block_size) = (view.head_dim, view.block_size);
    let (first, rest) = queries.split_at(1);
    let mut span = Span::of(&first[0]);
    for query in &rest[..M - 1] {
        span.add(query);
    }
    let base = span.start / block_size * block_size;
    let layout = Layout::of(span.end - base, head_dim);
    let words = scratch.query_words.reserved(layout.query * M);
    for (query, words) in queries.iter().zip(words.chunks_exact_mut(layout.query)) {
        round_row(&attention.q[query.offset..][..head_dim], words.as_chunks_mut().0);
    }
    let scores = scratch.scores.reserved(layout.row * M);
    let mut wide = WideRows::new();
    let widens_queries = is_fused && head_dim / 2 <= fused::PAIRS;
    if widens_queries {
        wide.set::<M>(&rows(words, Rows { start: 0, stride: layout.query }, 0, head_dim / 2));
    }
    let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); M];
    // The positions that `largest` covers: whole vectors that all queries attend to.
    let mut seen = span.both.start..span.both.start;
    let mut at = span.start / LANES * LANES;
    while at < span.end {
        let vectors = (span.end - at).div_ceil(LANES);
        let width = if vectors >= W { W } else { vectors.min(2) };
        let tokens = at..at + width * LANES;
        let in_all = span.both.start <= tokens.start && tokens.end <= span.both.end;
        let max = in_all.then_some(&mut largest);
        let to = Rows { start: at - base, stride: layout.row };
        match width {
            1 => score::<E, M, 1>(view, words, None, at, scores, to, max),
            2 => score::<E, M, 2>(view, words, None, at, scores, to, max),
            _ => {
                let wide = widens_queries.then_some(&wide);
                score::<E, M, W>(view, words, wide, at, scores, to, max);
            }
        }
        if in_all {
            seen = if seen.is_empty() { tokens.clone() } else { seen.start..tokens.end };
        }
        at = tokens.end;
    }

    let weights = scratch.weight_words.reserved(layout.row / 2 * M);
    let root = (head_dim as f32).sqrt();
    let scale = std::f32::consts::LOG2_E / root;
    let mut inverse = [0.0; M];
    for (i, query) in queries[..M].iter().enumerate() {
        let row = &mut scores[i * layout.row..][..layout.row];
        let own = query.start - base..query.end - base;
        let mut seen =
            if seen.is_empty() { own.start..own.start } else { seen.start - base..seen.end - base };
        // Scores are not scaled yet.
        if let Some(cap) = attention.shape.softcap {
            row[own.clone()].iter_mut().for_each(|score| *score = soft_capped(*score, cap * root));
            // The largest ones so far were not capped.
            largest[i] = _mm512_set1_ps(f32::NEG_INFINITY);
            seen = own.start..own.start;
        }
        let sink = query.sink * root;
        let max = largest_of(row, &own, &seen, largest[i]).max(sink);
        let words = &mut weights[i * (layout.row / 2)..][..layout.row / 2];
        let beside = _mm512_cvtss_f32(power(_mm512_set1_ps((sink - max) * scale)));
        inverse[i] = 1.0 / (weigh(row, &own, max, scale, words) + beside);
    }

    let mut dim = 0;
    while dim < view.value_dim {
        let vectors = (view.value_dim - dim).div_ceil(LANES);
        let from = Rows { start: base / 2, stride: layout.row / 2 };
        let rows = WeightRows { view, queries, span: &span, weights, from };
        match vectors {
            1 => mix::<E, M, 1>(attention, rows, None, &inverse, dim),
            2 | 3 => mix::<E, M, 2>(attention, rows, None, &inverse, dim),
            _ => mix::<E, M, W>(attention, rows, is_fused.then_some(&mut wide), &inverse, dim),
        }
        dim += LANES * if vectors >= W { W } else { vectors.min(2) };
    }
}

/// The positions of several queries.
struct Span {
    /// From here to `end`, some query attends.
    start: usize,
    end: usize,
    /// All queries attend to these.
    both: Range<usize>,
}

impl Span {
    fn of(query: &Query) -> Self {
        Self { start: query.start, end: query.end, both: query.start..query.end }
    }

    fn add(&mut self, query: &Query) {
        self.start = self.start.min(query.start);
        self.end = self.end.max(query.end);
        self.both = self.both.start.max(query.start)..self.both.end.min(query.end);
    }
}

/// Row lengths in scratch: whole vectors of pairs plus one cache line, so that the rows of several
/// queries do not all fall into the same cache sets.
pub(super) struct Layout {
    /// Elements per row of scores; a row of weights has half as many words.
    pub(super) row: usize,
    /// Words per query.
    pub(super) query: usize,
}

impl Layout {
    pub(super) fn of(positions: usize, head_dim: usize) -> Self {
        Self {
            row: positions.next_multiple_of(2 * LANES) + 2 * LANES,
            query: (head_dim / (2 * LANES) + 1) * LANES,
        }
    }
}

/// The rows of several queries in scratch: the position of the first element, and the row stride.
#[derive(Clone, Copy)]
struct Rows {
    start: usize,
    stride: usize,
}

/// The `len` elements of every row from position `at` in the sequence on.
#[inline(always)]
fn rows<const M: usize>(words: &[u32], from: Rows, at: usize, len: usize) -> [&[u32]; M] {
    let mut rows: [&[u32]; M] = [&[]; M];
    for (m, row) in rows.iter_mut().enumerate() {
        *row = &words[m * from.stride + at - from.start..][..len];
    }
    rows
}

/// Computes unscaled scores of the `W` vectors of tokens from position `at` on, which must be the
/// first of a vector; also their maximum, where all queries attend to all of them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn score<E: Loaded, const M: usize, const W: usize>(
    view: &View<'_>,
    queries: &[u32],
    wide: Option<&WideRows>,
    at: usize,
    scores: &mut [f32],
    to: Rows,
    largest: Option<&mut [__m512; M]>,
) {
    let (pairs, block_size) = (view.head_dim / 2, view.block_size);
    let mut keys: [&[E]; W] = [&[]; W];
    for (w, keys) in keys.iter_mut().enumerate() {
        let at = at + w * LANES;
        *keys = &view.block::<E>(at / block_size).0[at % block_size..];
        assert!(keys.len() >= (pairs - 1) * block_size + LANES, "K is too short");
    }
    let queries: [&[u32]; M] =
        rows(queries, Rows { start: 0, stride: queries.len() / M }, 0, pairs);
    let sums = match wide {
        Some(wide) => fused_scores(&keys, pairs, block_size, wide),
        None => dot_scores(&queries, &keys, pairs, block_size),
    };
    for (m, sums) in sums.iter().enumerate() {
        let row = &mut scores[m * to.stride + to.start..][..W * LANES];
        for (&sum, row) in sums.iter().zip(row.as_chunks_mut::<LANES>().0) {
            // SAFETY: the array has 64 bytes.
            unsafe { _mm512_storeu_ps(row.as_mut_ptr(), sum) }
        }
    }
    if let Some(largest) = largest {
        for (largest, sums) in largest.iter_mut().zip(&sums) {
            for &sum in sums {
                // For a NaN score, `_mm512_max_ps` keeps its second operand; that score's weight
                // becomes NaN anyway.
                *largest = _mm512_max_ps(sum, *largest);
            }
        }
    }
}

/// The scores of `W` vectors of keys by dot products: keys of all `pairs` are `block_size` words
/// apart, and long enough.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn dot_scores<E: Loaded, const M: usize, const W: usize>(
    queries: &[&[u32]; M],
    keys: &[&[E]; W],
    pairs: usize,
    block_size: usize,
) -> [[__m512; W]; M] {
    let mut sums = [[_mm512_setzero_ps(); W]; M];
    for pair in 0..pairs {
        let mut vectors = [_mm512_setzero_si512(); W];
        for (vector, keys) in vectors.iter_mut().zip(keys) {
            let words = keys.as_ptr().wrapping_add(pair * block_size);
            // SAFETY: there are `LANES` words there (the caller's promise); and this function's
            // features.
            *vector = unsafe { E::load_all(words) };
        }
        for (sums, query) in sums.iter_mut().zip(queries) {
            // SAFETY: a query has `pairs` words.
            let word = unsafe { *query.get_unchecked(pair) };
            let word = _mm512_set1_epi32(word.cast_signed());
            for (sum, &keys) in sums.iter_mut().zip(&vectors) {
                *sum = dot(*sum, word, keys);
            }
        }
    }
    sums
}

/// The same by fused multiply-adds, with the queries' words in f32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn fused_scores<E: Loaded, const M: usize, const W: usize>(
    keys: &[&[E]; W],
    pairs: usize,
    block_size: usize,
    wide: &WideRows,
) -> [[__m512; W]; M] {
    let first = keys[0].as_ptr();
    // Blocks lie anywhere, so this is a distance between addresses.
    let distance = |keys: &&[E]| (keys.as_ptr() as isize).wrapping_sub(first as isize);
    let mut others = [0; fused::WIDTH - 1];
    for (distance_to, keys) in others.iter_mut().zip(&keys[1..]) {
        *distance_to = distance(keys);
    }
    let stride = block_size * size_of::<u32>();
    let words = Words { blocks: &[first.cast()], others, stride, per_block: pairs };
    let none = [[_mm512_setzero_ps(); W]; M];
    // SAFETY: the keys are long enough for as many pairs (the caller's promise).
    unsafe { fused::sums(&none, &words, wide) }
}

/// `sum + a.low * b.low + a.high * b.high`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn dot(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: both are 512 bits of plain data.
    let a = unsafe { std::mem::transmute::<__m512i, __m512bh>(a) };
    // SAFETY: as above.
    let b = unsafe { std::mem::transmute::<__m512i, __m512bh>(b) };
    _mm512_dpbf16_ps(sum, a, b)
}

/// The lanes, of the vector that begins at `at`, that are in `range`.
#[inline(always)]
fn lanes(at: usize, range: &Range<usize>) -> __mmask16 {
    let below = |end: usize| (1u32 << end.saturating_sub(at).min(LANES)) - 1;
    (below(range.end) & !below(range.start)) as __mmask16
}

/// The largest score of a query's `own` positions; `largest` already covers those of `seen`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn largest_of(row: &[f32], own: &Range<usize>, seen: &Range<usize>, largest: __m512) -> f32 {
    let mut largest = largest;
    for edge in [own.start..seen.start, seen.end..own.end] {
        let mut at = edge.start / LANES * LANES;
        while at < edge.end {
            let scores = load(&row[at..]);
            largest = _mm512_mask_max_ps(largest, lanes(at, &edge), scores, largest);
            at += LANES;
        }
    }
    _mm512_reduce_max_ps(largest)
}

/// Turns a query's scores into weights `e^(score - max)`, in bf16 pairs; returns their sum.
/// Positions outside of `own` get weight zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn weigh(row: &[f32], own: &Range<usize>, max: f32, scale: f32, words: &mut [u32]) -> f32 {
    let (max, scale) = (_mm512_set1_ps(max), _mm512_set1_ps(scale));
    let mut sum = _mm512_setzero_ps();
    let first = own.start / (2 * LANES);
    let vectors = row.as_chunks::<{ 2 * LANES }>().0.iter().zip(words.as_chunks_mut::<LANES>().0);
    let vectors = vectors.enumerate().take(own.end.div_ceil(2 * LANES)).skip(first);
    for (index, (scores, words)) in vectors {
        let at = index * 2 * LANES;
        let mut low = power(_mm512_mul_ps(_mm512_sub_ps(load(scores), max), scale));
        let mut high = power(_mm512_mul_ps(_mm512_sub_ps(load(&scores[LANES..]), max), scale));
        if at < own.start || at + 2 * LANES > own.end {
            low = _mm512_maskz_mov_ps(lanes(at, own), low);
            high = _mm512_maskz_mov_ps(lanes(at + LANES, own), high);
        }
        sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
        let pairs = _mm512_cvtne2ps_pbh(high, low);
        // SAFETY: both are 512 bits of plain data.
        let pairs = unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) };
        // SAFETY: the array has 64 bytes.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), pairs) }
    }
    _mm512_reduce_add_ps(sum)
}

/// `2^x`, accurate to about 2 units in the last place; NaN for NaN.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn power(x: __m512) -> __m512 {
    // Polynomial of `2^r` for r in -1/2..=1/2, from Cephes.
    const TERMS: [f32; 7] = [
        1.535_336_2e-4,
        1.339_887_4e-3,
        9.618_437e-3,
        5.550_332_5e-2,
        2.402_264_8e-1,
        6.931_472e-1,
        1.0,
    ];
    // Clamped far below the smallest f32. NaN stays: it is the second operand.
    let x = _mm512_max_ps(_mm512_set1_ps(-200.0), x);
    let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let rest = _mm512_sub_ps(x, whole);
    let mut sum = _mm512_set1_ps(TERMS[0]);
    for &term in &TERMS[1..] {
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
    }
    _mm512_scalef_ps(sum, whole)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn load(values: &[f32]) -> __m512 {
    let values = &values[..LANES];
    // SAFETY: there are `LANES` values.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

/// The weights of several queries, and what they weigh.
#[derive(Clone, Copy)]
struct WeightRows<'a> {
    view: &'a View<'a>,
    queries: &'a [Query; QUERIES],
    span: &'a Span,
    weights: &'a [u32],
    from: Rows,
}

/// Writes `W` vectors of the weighted sums of V from dimension `dim` on, times `inverse`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
#[inline]
fn mix<E: Loaded, const M: usize, const W: usize>(
    attention: &Attention<'_>,
    rows: WeightRows<'_>,
    wide: Option<&mut WideRows>,
    inverse: &[f32; M],
    dim: usize,
) {
    let WeightRows { view, queries, span, weights, from } = rows;
    // The last vector may extend past the end of the head.
    let mut masks = [0; W];
    for (w, mask) in masks.iter_mut().enumerate() {
        *mask = lanes(dim + w * LANES, &(0..view.value_dim));
    }
    let mut sums = [[_mm512_setzero_ps(); W]; M];
    // Pairs to which all queries attend are read once for all of them. At the edges, some query
    // attends to only one token of a pair or to none; if no pair is common, all pairs count as the
    // first edge.
    let (first, last) = (span.start / 2, span.end.div_ceil(2));
    let common = span.both.start.div_ceil(2)..span.both.end / 2;
    let common = if common.is_empty() { last..last } else { common };
    let tile = SumTile { view, queries, weights, from, masks, dim };
    tile.add_edge::<E, M>(first..common.start, &mut sums);
    // Whole blocks, where the vectors are whole, too.
    let per_block = view.block_size / 2;
    let blocks = common.start.div_ceil(per_block)..common.end / per_block;
    let wide = wide.filter(|_| dim + W * LANES <= view.value_dim && per_block <= fused::CHUNK);
    match wide.filter(|_| E::IN_MEMORY && !blocks.is_empty()) {
        Some(wide) => {
            tile.add::<E, M>(common.start..blocks.start * per_block, &mut sums);
            tile.add_blocks::<E, M>(blocks.clone(), wide, &mut sums);
            tile.add::<E, M>(blocks.end * per_block..common.end, &mut sums);
        }
        None => tile.add::<E, M>(common.clone(), &mut sums),
    }
    tile.add_edge::<E, M>(common.end..last, &mut sums);
    for ((query, sums), &inverse) in queries.iter().zip(&sums).zip(inverse) {
        // SAFETY: one task computes this head of this row, and writes it here alone.
        let out = unsafe { attention.out.slice(query.out, view.value_dim) };
        for (w, (&sum, &mask)) in sums.iter().zip(&masks).enumerate() {
            let result = _mm512_mul_ps(sum, _mm512_set1_ps(inverse));
            let out = out[(dim + w * LANES).min(view.value_dim)..].as_mut_ptr();
            // SAFETY: the mask has no lane beyond the head's end, which is the slice's.
            unsafe { _mm512_mask_storeu_ps(out, mask, result) };
        }
    }
}

/// One register tile of weighted sums.
struct SumTile<'a, const W: usize> {
    view: &'a View<'a>,
    queries: &'a [Query; QUERIES],
    /// The weights of each query, in rows that begin with pair `from.start`.
    weights: &'a [u32],
    from: Rows,
    masks: [__mmask16; W],
    dim: usize,
}

impl<const W: usize> SumTile<'_, W> {
    /// Adds the pairs of positions to which all queries attend.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
    #[inline]
    fn add<E: Loaded, const M: usize>(&self, pairs: Range<usize>, sums: &mut [[__m512; W]; M]) {
        let Self { view, masks, from, .. } = *self;
        let per_block = view.block_size / 2;
        // A copy that stays in registers.
        let mut own = *sums;
        let mut pair = pairs.start;
        while pair < pairs.end {
            let (block, offset) = (pair / per_block, pair % per_block);
            let count = (per_block - offset).min(pairs.end - pair);
            let values = view.block::<E>(block).1;
            let values = &values[offset * view.value_dim..][..count * view.value_dim];
            let rows: [&[u32]; M] = rows(self.weights, from, pair, count);
            for i in 0..count {
                let vectors = self.load(&masks, &values[i * view.value_dim..]);
                for (sums, row) in own.iter_mut().zip(&rows) {
                    // SAFETY: rows have `count` words.
                    let word = unsafe { *row.get_unchecked(i) };
                    let word = _mm512_set1_epi32(word.cast_signed());
                    for (sum, &values) in sums.iter_mut().zip(&vectors) {
                        *sum = dot(*sum, word, values);
                    }
                }
            }
            pair += count;
        }
        *sums = own;
    }

    /// As [`Self::add`] for the pairs of whole blocks, by fused multiply-adds.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
    #[inline]
    fn add_blocks<E: Loaded, const M: usize>(
        &self,
        blocks: Range<usize>,
        wide: &mut WideRows,
        sums: &mut [[__m512; W]; M],
    ) {
        let Self { view, from, .. } = *self;
        let per_block = view.block_size / 2;
        let stride = view.value_dim * size_of::<u32>();
        let chunk = (fused::CHUNK / per_block).min(fused::BLOCKS);
        let mut first = blocks.start;
        while first < blocks.end {
            let count = chunk.min(blocks.end - first);
            wide.set::<M>(&rows(self.weights, from, first * per_block, count * per_block));
            let mut places = [std::ptr::null(); fused::BLOCKS];
            for (i, place) in places[..count].iter_mut().enumerate() {
                let values = view.block::<E>(first + i).1;
                let values = &values[..per_block * view.value_dim][self.dim..];
                *place = values.as_ptr().cast();
            }
            let others = [1, 2, 3].map(|w| w * size_of::<[u32; LANES]>() as isize);
            let words = Words { blocks: &places[..count], others, stride, per_block };
            // SAFETY: every block has as many rows of `value_dim` words (checked above), and the
            // caller has only whole vectors from `dim` on.
            *sums = unsafe { fused::sums(sums, &words, wide) };
            first += count;
        }
    }

    /// As [`Self::add`] for pairs where some query attends to one token or none: V of other tokens
    /// is masked, whatever it contains.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
    #[inline]
    fn add_edge<E: Loaded, const M: usize>(
        &self,
        pairs: Range<usize>,
        sums: &mut [[__m512; W]; M],
    ) {
        let Self { view, masks, from, .. } = *self;
        let per_block = view.block_size / 2;
        let mut own = *sums;
        for pair in pairs {
            let values = view.block::<E>(pair / per_block).1;
            let values = &values[pair % per_block * view.value_dim..];
            let vectors = self.load(&masks, values);
            let rows: [&[u32]; M] = rows(self.weights, from, pair, 1);
            for ((sums, query), row) in own.iter_mut().zip(self.queries).zip(&rows) {
                let halves = [2 * pair, 2 * pair + 1].map(|at| query.start <= at && at < query.end);
                let keep = match halves {
                    [true, true] => u32::MAX,
                    [true, false] => 0x0000_ffff,
                    [false, true] => 0xffff_0000,
                    [false, false] => continue,
                };
                // The other token's weight is zero.
                let word = _mm512_set1_epi32(row[0].cast_signed());
                let keep = _mm512_set1_epi32(keep.cast_signed());
                for (sum, &values) in sums.iter_mut().zip(&vectors) {
                    *sum = dot(*sum, word, _mm512_and_si512(values, keep));
                }
            }
        }
        *sums = own;
    }

    /// `W` vectors of V of a pair; `row` begins with the first dimension.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
    #[inline]
    fn load<E: Loaded>(&self, masks: &[__mmask16; W], row: &[E]) -> [__m512i; W] {
        let row = &row[..self.view.value_dim];
        let mut vectors = [_mm512_setzero_si512(); W];
        for (w, (vector, &mask)) in vectors.iter_mut().zip(masks).enumerate() {
            let words = row.as_ptr().wrapping_add(self.dim + w * LANES);
            // SAFETY: the mask has no lane beyond the head's end, which is the row's; and this
            // function's features.
            *vector = unsafe { E::load_masked(mask, words) };
        }
        vectors
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::isa::Isa;
    use super::*;

    #[test]
    fn powers_of_two_are_accurate() {
        if !Isa::Avx512Bf16.is_supported() {
            return;
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
        fn one(x: f32) -> f32 {
            _mm512_reduce_max_ps(power(_mm512_set1_ps(x)))
        }
        // SAFETY: this machine has the instructions (just checked).
        let power = |x: f32| unsafe { one(x) };
        let mut x = -125.9f32;
        while x < 0.0 {
            let want = f64::from(x).exp2();
            let relative = (f64::from(power(x)) - want).abs() / want;
            assert!(relative < 2.5e-7, "2^{x}: relative error {relative}");
            x += 0.0137;
        }
        assert_eq!(power(0.0), 1.0);
        assert_eq!(power(-1.0), 0.5);
        assert_eq!(power(-1e9), 0.0);
        assert_eq!(power(f32::NEG_INFINITY), 0.0);
        assert!(power(f32::NAN).is_nan());
    }
}

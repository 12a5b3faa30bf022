//! Inner loops for AVX-512 with `vdpbf16ps` for activations of a single bf16 term, row by row: no
//! more operations than products of weights and activations.
//!
//! A pair's word is broadcast from the row, so rows need no special layout, and any number of rows
//! can form a tile. `panels` makes the tiles; `fused` computes them without `vdpbf16ps`.
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, __mmask16, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch,
    _mm256_loadu_si256, _mm512_add_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
    _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_setzero_ps,
    _mm512_storeu_si512,
};

use super::super::fp8;
use super::super::pack::{ByteRow, PANEL, PairRow, PairRows};
use super::Acc;
use super::vector::{broadcast, load, load_bf16, store};

pub(super) mod fused;
mod panels;

/// Rounds a row to bf16 (to nearest, ties to even), two per word. Pads with zeros up to the end of
/// a chunk of 16 words: the last one that the row reaches, or the next if it fills that one.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
pub(crate) fn round_row(row: &[f32], words: &mut [[u32; 16]]) {
    let (chunks, rest) = row.as_chunks::<32>();
    for (chunk, words) in chunks.iter().zip(&mut *words) {
        let (low, high) = chunk.split_at(16);
        let (low, high) = (low.as_chunks().0, high.as_chunks().0);
        store_words(words, _mm512_cvtne2ps_pbh(load(&high[0]), load(&low[0])));
    }
    if let Some(words) = words.get_mut(chunks.len()) {
        let (low, high) = rest.split_at(rest.len().min(16));
        store_words(words, _mm512_cvtne2ps_pbh(load_some(high), load_some(low)));
    }
}

/// Loads `values`, at most 16; the other lanes are 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn load_some(values: &[f32]) -> __m512 {
    let mask = (1u32 << values.len().min(16)) - 1;
    // SAFETY: the mask has no lane beyond the values.
    unsafe { _mm512_maskz_loadu_ps(mask as __mmask16, values.as_ptr()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn store_words(words: &mut [u32; 16], pairs: __m512bh) {
    // SAFETY: both are 512 bits of plain data.
    let pairs = unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) };
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), pairs) }
}

/// What a tile prefetches while it computes: cache lines `line..line + lines` (0, 1, 2 or 4 of the
/// four lines of a pair) of the pairs that are `distance` pairs ahead.
#[derive(Clone, Copy)]
pub(super) struct Prefetch {
    pub(super) line: usize,
    pub(super) lines: usize,
    pub(super) distance: usize,
}

/// The lines that tile `index` of several prefetches of each pair of the next block (`line`,
/// `lines`), so that memory is read continuously.
fn share(tiles: usize, index: usize) -> (usize, usize) {
    match (tiles, index) {
        (..=2, _) => (index * 2, 2),
        (3, 0) => (0, 2),
        (3, _) => (index + 1, 1),
        (_, 0..4) => (index, 1),
        _ => (0, 0),
    }
}

/// What a tile does with its sums, which begin at zero or, without scales, where `acc` is.
#[derive(Clone, Copy)]
pub(super) struct Sums<'a> {
    /// `acc` is not read.
    pub(super) first: bool,
    /// Factors of the sums, which are then added to `acc`, in place of going on from it.
    pub(super) scales: Option<&'a [f32; PANEL]>,
}

/// `acc[m] (+)= rows[m] * weights` over all pairs. Leaves 8-bit weights converted to bf16 in
/// `room`, if that is large enough.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn tile<const M: usize>(
    rows: &[&[u32]; M],
    weights: PairRows<'_>,
    room: &mut [PairRow],
    acc: &mut [&mut Acc; M],
    sums: Sums<'_>,
    ahead: Prefetch,
) {
    match (weights, ahead.lines) {
        (PairRows::Bf16(weights), 0) => {
            fetching_tile::<M, 0, _>(rows, weights, acc, sums, ahead, |_, row| load_pairs(row));
        }
        (PairRows::Bf16(weights), 1) => {
            fetching_tile::<M, 1, _>(rows, weights, acc, sums, ahead, |_, row| load_pairs(row));
        }
        (PairRows::Bf16(weights), 2) => {
            fetching_tile::<M, 2, _>(rows, weights, acc, sums, ahead, |_, row| load_pairs(row));
        }
        (PairRows::Bf16(weights), _) => {
            fetching_tile::<M, 4, _>(rows, weights, acc, sums, ahead, |_, row| load_pairs(row));
        }
        // Such a row takes two cache lines.
        (PairRows::Int8(weights), _) if room.len() < weights.len() => {
            fetching_tile::<M, 2, _>(rows, weights, acc, sums, ahead, |_, row| widen_pairs(row));
        }
        (PairRows::Int8(weights), _) => {
            let room = &mut room[..weights.len()];
            fetching_tile::<M, 2, _>(rows, weights, acc, sums, ahead, |pair, row| {
                let pairs = widen_pairs(row);
                store_pairs(&mut room[pair], pairs);
                pairs
            });
        }
        (PairRows::Fp8(weights), _) if room.len() < weights.len() => {
            fetching_tile::<M, 2, _>(rows, weights, acc, sums, ahead, |_, row| fp8_pairs(row));
        }
        (PairRows::Fp8(weights), _) => {
            let room = &mut room[..weights.len()];
            fetching_tile::<M, 2, _>(rows, weights, acc, sums, ahead, |pair, row| {
                let pairs = fp8_pairs(row);
                store_pairs(&mut room[pair], pairs);
                pairs
            });
        }
    }
}

/// The pair of inputs of all outputs of a panel, in bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn load_pairs(row: &PairRow) -> [__m512bh; 4] {
    [load_bf16(&row[0]), load_bf16(&row[1]), load_bf16(&row[2]), load_bf16(&row[3])]
}

/// The same, converted from int8.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
pub(super) fn widen_pairs(row: &ByteRow) -> [__m512bh; 4] {
    [widen_int8(&row[0]), widen_int8(&row[1]), widen_int8(&row[2]), widen_int8(&row[3])]
}

/// The same, converted from FP8.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn fp8_pairs(row: &ByteRow) -> [__m512bh; 4] {
    [widen_fp8(&row[0]), widen_fp8(&row[1]), widen_fp8(&row[2]), widen_fp8(&row[3])]
}

/// Stores them in the packed layout.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
pub(super) fn store_pairs(row: &mut PairRow, pairs: [__m512bh; 4]) {
    for (words, pairs) in row.iter_mut().zip(pairs) {
        // SAFETY: both are 512 bits of plain data.
        let pairs = unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) };
        // SAFETY: the array has 64 bytes.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), pairs) };
    }
}

/// Integers as bf16, which is exact.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn widen_int8(values: &[i8; 32]) -> __m512bh {
    // SAFETY: the array has 32 bytes.
    let low = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    // SAFETY: as above.
    let high = unsafe { _mm_loadu_si128(values.as_ptr().wrapping_add(16).cast()) };
    let low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low));
    let high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high));
    _mm512_cvtne2ps_pbh(high, low)
}

/// FP8 as bf16, which is exact.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn widen_fp8(values: &[i8; 32]) -> __m512bh {
    // SAFETY: the array has 32 bytes.
    let bytes = unsafe { _mm256_loadu_si256(values.as_ptr().cast()) };
    // SAFETY: this function needs the same instructions.
    let pairs = unsafe { fp8::x86::pairs_512(bytes) };
    // SAFETY: both are 512 bits of plain data.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(pairs) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn fetching_tile<const M: usize, const LINES: usize, W>(
    rows: &[&[u32]; M],
    weights: &[W],
    acc: &mut [&mut Acc; M],
    Sums { first, scales }: Sums<'_>,
    Prefetch { line, distance, .. }: Prefetch,
    mut load_weights: impl FnMut(usize, &W) -> [__m512bh; 4],
) {
    // Checked before the sums are in registers.
    assert!(rows.iter().all(|row| row.len() >= weights.len()), "a row is too short");
    let mut sums = [[_mm512_setzero_ps(); 4]; M];
    if !first && scales.is_none() {
        for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
            for (sum, acc) in sums.iter_mut().zip(acc.iter()) {
                *sum = load(acc);
            }
        }
    }
    for (pair, weight) in weights.iter().enumerate() {
        let ahead = std::ptr::from_ref(weight).wrapping_add(distance).cast::<[u32; 16]>();
        for i in 0..LINES {
            // Harmless past the end: a prefetch of an invalid address does nothing.
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line + i).cast::<i8>());
        }
        let w = load_weights(pair, weight);
        for (sums, row) in sums.iter_mut().zip(rows) {
            // SAFETY: `pair` is below `weights.len()`, and rows are as long (checked above).
            let x = broadcast(*unsafe { row.get_unchecked(pair) });
            for (sum, &w) in sums.iter_mut().zip(&w) {
                *sum = _mm512_dpbf16_ps(*sum, x, w);
            }
        }
    }
    if let Some(scales) = scales {
        let scales = scales.as_chunks::<16>().0;
        for (sums, acc) in sums.iter().zip(acc) {
            for ((&sum, acc), scales) in sums.iter().zip(acc.iter_mut()).zip(scales) {
                let before = if first { _mm512_setzero_ps() } else { load(acc) };
                store(acc, _mm512_add_ps(before, _mm512_mul_ps(sum, load(scales))));
            }
        }
        return;
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc.iter_mut()) {
            store(acc, sum);
        }
    }
}

/// One row times `P` panels, all of one format: `acc[p] = row * panels[p]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn wide<const P: usize>(row: &[u32], panels: &[PairRows<'_>; P], acc: &mut [Acc; P]) {
    if let Some(panels) = all(panels, PairRows::bf16) {
        wide_of(row, &panels, acc, |row| load_pairs(row));
    } else if let Some(panels) = all(panels, PairRows::int8) {
        wide_of(row, &panels, acc, |row| widen_pairs(row));
    } else if let Some(panels) = all(panels, PairRows::fp8) {
        wide_of(row, &panels, acc, |row| fp8_pairs(row));
    }
}

/// The results of `get` for all panels; `None` if one is missing.
fn all<'a, W, const P: usize>(
    panels: &[PairRows<'a>; P],
    get: impl Fn(PairRows<'a>) -> Option<&'a [W]>,
) -> Option<[&'a [W]; P]> {
    let found = panels.map(get);
    found.iter().all(Option::is_some).then(|| found.map(|rows| rows.unwrap_or_default()))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn wide_of<const P: usize, W>(
    row: &[u32],
    panels: &[&[W]; P],
    acc: &mut [Acc; P],
    load_weights: impl Fn(&W) -> [__m512bh; 4],
) {
    let mut sums = [[_mm512_setzero_ps(); 4]; P];
    let panels = panels.map(|panel| &panel[..row.len()]);
    for (pair, &word) in row.iter().enumerate() {
        let x = broadcast(word);
        for (sums, panel) in sums.iter_mut().zip(&panels) {
            for (sum, w) in sums.iter_mut().zip(load_weights(&panel[pair])) {
                *sum = _mm512_dpbf16_ps(*sum, x, w);
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc) {
            store(acc, sum);
        }
    }
}

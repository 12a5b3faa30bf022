//! Inner loops for AVX-512 with `vdpbf16ps` where activations are one bf16 term each, row by row:
//! as many operations as there are products of weights and activations.
//!
//! A pair's word is broadcast from the row, so rows need no layout of their own, and any number of
//! them can be a tile.
use std::arch::x86_64::{
    __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps,
    _mm512_setzero_ps, _mm512_storeu_si512,
};

use super::super::pack::PairRow;
use super::Acc;
use super::vector::{broadcast, load, load_bf16, store};

/// Rounds a row to bf16 (to nearest, ties to even), two to a word; `words` beyond the row become 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn round_row(row: &[f32], words: &mut [[u32; 16]]) {
    let (chunks, rest) = row.as_chunks::<32>();
    let mut last = [0.0; 32];
    last[..rest.len()].copy_from_slice(rest);
    for (chunk, words) in chunks.iter().chain([&last]).zip(words) {
        let (low, high) = chunk.split_at(16);
        let (low, high) = (low.as_chunks().0, high.as_chunks().0);
        let pairs = _mm512_cvtne2ps_pbh(load(&high[0]), load(&low[0]));
        // SAFETY: both are 512 bits of plain data.
        let pairs = unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) };
        // SAFETY: the array has 64 bytes.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), pairs) }
    }
}

/// What a tile fetches while it computes: cache lines `line..line + lines` (0, 1, 2 or 4 of a pair's
/// four) of the pairs that are `distance` pairs behind its own.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) line: usize,
    pub(super) lines: usize,
    pub(super) distance: usize,
}

/// `acc[m] (+)= rows[m] * weights` over all pairs; begins at zero when `first`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn tile<const M: usize>(
    rows: &[&[u32]; M],
    weights: &[PairRow],
    acc: &mut [&mut Acc; M],
    first: bool,
    ahead: Ahead,
) {
    match ahead.lines {
        0 => fetching_tile::<M, 0>(rows, weights, acc, first, ahead),
        1 => fetching_tile::<M, 1>(rows, weights, acc, first, ahead),
        2 => fetching_tile::<M, 2>(rows, weights, acc, first, ahead),
        _ => fetching_tile::<M, 4>(rows, weights, acc, first, ahead),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn fetching_tile<const M: usize, const LINES: usize>(
    rows: &[&[u32]; M],
    weights: &[PairRow],
    acc: &mut [&mut Acc; M],
    first: bool,
    Ahead { line, distance, .. }: Ahead,
) {
    // Before any sum is in a register.
    assert!(rows.iter().all(|row| row.len() >= weights.len()), "a row is too short");
    let mut sums = [[_mm512_setzero_ps(); 4]; M];
    if !first {
        for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
            for (sum, acc) in sums.iter_mut().zip(acc.iter()) {
                *sum = load(acc);
            }
        }
    }
    for (pair, weight) in weights.iter().enumerate() {
        let ahead = std::ptr::from_ref(weight).wrapping_add(distance).cast::<[u32; 16]>();
        for i in 0..LINES {
            // No harm behind the end: nothing is read that is not there.
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line + i).cast::<i8>());
        }
        let w = [
            load_bf16(&weight[0]),
            load_bf16(&weight[1]),
            load_bf16(&weight[2]),
            load_bf16(&weight[3]),
        ];
        for (sums, row) in sums.iter_mut().zip(rows) {
            // SAFETY: `pair` is below `weights.len()`, and rows are as long (checked above).
            let x = broadcast(*unsafe { row.get_unchecked(pair) });
            for (sum, &w) in sums.iter_mut().zip(&w) {
                *sum = _mm512_dpbf16_ps(*sum, x, w);
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc.iter_mut()) {
            store(acc, sum);
        }
    }
}

/// One row times `P` panels at once: `acc[p] = row * panels[p]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn wide<const P: usize>(row: &[u32], panels: &[&[PairRow]; P], acc: &mut [Acc; P]) {
    let mut sums = [[_mm512_setzero_ps(); 4]; P];
    let panels = panels.map(|panel| &panel[..row.len()]);
    for (pair, &word) in row.iter().enumerate() {
        let x = broadcast(word);
        for (sums, panel) in sums.iter_mut().zip(&panels) {
            for (sum, words) in sums.iter_mut().zip(&panel[pair]) {
                *sum = _mm512_dpbf16_ps(*sum, x, load_bf16(words));
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc) {
            store(acc, sum);
        }
    }
}

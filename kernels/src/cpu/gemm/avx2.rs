//! Inner loops for AVX2 and FMA: as for AVX-512, but in halves, and over a quarter of the panel at
//! a time, since 16 registers hold 6 x 16 sums. `one_row`: weights of 4 and 8 bits.
use std::arch::x86_64::{
    __m256, __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_and_si256, _mm256_castsi256_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_slli_epi32, _mm256_storeu_ps,
};

use super::super::pack::{Int4Group, PairRow, PairRows};
use super::{Acc, ActPair};

mod one_row;

/// Pairs of inputs that all parts of a panel are computed for before the next pairs: their weights
/// (8 KiB) stay in the L1 cache, and the next ones are fetched meanwhile. A part alone takes one
/// cache line of four, which processors do not foresee.
const NEAR: usize = 32;

/// The weights of 8 outputs, each for two inputs.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn load_words(words: &[u32; 8]) -> __m256i {
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
}

/// Of these, those for the even input, as f32.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn even_of(words: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
}

/// Of these, those for the odd input, as f32.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn odd_of(words: __m256i) -> __m256 {
    let high = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
    _mm256_castsi256_ps(_mm256_and_si256(words, high))
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn load(values: &[f32; 8]) -> __m256 {
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
fn store(values: &mut [f32; 8], vector: __m256) {
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), vector) }
}

/// See [`super::tile`]; a single row only, unless the weights are bf16.
#[target_feature(enable = "avx2,fma")]
pub(super) fn tile<const M: usize>(acts: &[ActPair<M>], weights: PairRows<'_>, acc: &mut [Acc; M]) {
    match (weights, &mut acc[..]) {
        (PairRows::Bf16(weights), _) => bf16_tile(acts, weights, acc),
        (PairRows::Int8(weights), [acc]) => one_row::bytes(of_one_row(acts), weights, false, acc),
        (PairRows::Fp8(weights), [acc]) => one_row::bytes(of_one_row(acts), weights, true, acc),
        _ => debug_assert!(false, "weights of 8 bits were not converted"),
    }
}

/// See [`super::int4_tile`]; a single row only.
#[target_feature(enable = "avx2,fma")]
pub(super) fn int4_tile<const M: usize>(
    acts: &[ActPair<M>],
    group: &Int4Group<'_>,
    acc: &mut [Acc; M],
) {
    match &mut acc[..] {
        [acc] => one_row::int4(of_one_row(acts), group, acc),
        _ => debug_assert!(false, "weights of 4 bits were not converted"),
    }
}

/// The same activations, where there is one row.
fn of_one_row<const M: usize>(acts: &[ActPair<M>]) -> &[ActPair<1>] {
    acts.as_flattened().as_flattened().as_chunks::<1>().0.as_chunks().0
}

#[target_feature(enable = "avx2,fma")]
fn bf16_tile<const M: usize>(acts: &[ActPair<M>], weights: &[PairRow], acc: &mut [Acc; M]) {
    if M == 1 {
        // The whole panel in one pass over memory: 8 vectors of sums.
        return columns::<M, 4, false>(acts, weights, acc, 0, weights.as_ptr());
    }
    if weights.len() <= 2 * NEAR {
        // Mostly converted just now, and in the L1 cache all the same.
        return parts::<M, false>(acts, weights, acc, weights.as_ptr());
    }
    let last = (weights.len() - 1) / NEAR;
    for (index, (acts, near)) in acts.chunks(NEAR).zip(weights.chunks(NEAR)).enumerate() {
        // Behind the last ones, these again, which are there already.
        let ahead = near.as_ptr().wrapping_add(if index < last { NEAR } else { 0 });
        parts::<M, true>(acts, near, acc, ahead);
    }
}

/// Computes the panel part by part: see [`columns`].
#[target_feature(enable = "avx2,fma")]
#[inline]
fn parts<const M: usize, const FETCH: bool>(
    acts: &[ActPair<M>],
    weights: &[PairRow],
    acc: &mut [Acc; M],
    ahead: *const PairRow,
) {
    if M == 2 {
        for half in 0..2 {
            columns::<M, 2, FETCH>(acts, weights, acc, half * 2, ahead);
        }
    } else {
        for quarter in 0..4 {
            columns::<M, 1, FETCH>(acts, weights, acc, quarter, ahead);
        }
    }
}

/// Computes `Q` quarters of the panel, from quarter `first` on. If so told, it meanwhile fetches as
/// large a part of the weights at `ahead`, in the order in which they are in memory.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn columns<const M: usize, const Q: usize, const FETCH: bool>(
    acts: &[ActPair<M>],
    weights: &[PairRow],
    acc: &mut [Acc; M],
    first: usize,
    ahead: *const PairRow,
) {
    let mut sums = [[[load(&[0.0; 8]); 2]; Q]; M];
    for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
        for (sums, acc) in sums.iter_mut().zip(&acc[first..]) {
            for (sum, acc) in sums.iter_mut().zip(acc.as_chunks().0) {
                *sum = load(acc);
            }
        }
    }
    let ahead = ahead.cast::<[u32; 16]>().wrapping_add(first * NEAR);
    for (pair, ([even, odd], weight)) in acts.iter().zip(weights).enumerate() {
        for q in 0..Q {
            // Always two: a quarter has 16 words.
            let ([low, high], _) = weight[first + q].as_chunks() else { continue };
            if FETCH {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(pair * Q + q).cast());
            }
            let words = [load_words(low), load_words(high)];
            // One input after the other, and each activation for both halves at once: so 6 rows
            // find room in 16 registers.
            let (w_even, w_odd) = (words.map(|it| even_of(it)), words.map(|it| odd_of(it)));
            for (x, w) in [(even, w_even), (odd, w_odd)] {
                for m in 0..M {
                    let x = _mm256_set1_ps(f32::from_bits(x[m]));
                    for half in 0..2 {
                        sums[m][q][half] = _mm256_fmadd_ps(x, w[half], sums[m][q][half]);
                    }
                }
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (sums, acc) in sums.iter().zip(&mut acc[first..]) {
            for (&sum, acc) in sums.iter().zip(acc.as_chunks_mut().0) {
                store(acc, sum);
            }
        }
    }
}

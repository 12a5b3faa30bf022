//! Inner loops for AVX-512 without bf16 instructions: weights are widened to f32 (even inputs by a
//! shift, odd ones by a mask), then fused multiply-added.
use std::arch::x86_64::{
    __m512, __m512i, _mm512_and_si512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_loadu_si512,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32,
};

use super::super::pack::PairRow;
use super::vector::{load, store};
use super::{Acc, ActPair};

/// The weights of 16 outputs for the even and for the odd input, as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn widen(words: &[u32; 16]) -> (__m512, __m512) {
    // SAFETY: the array has 64 bytes.
    let words: __m512i = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
    let high = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
    (
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)),
        _mm512_castsi512_ps(_mm512_and_si512(words, high)),
    )
}

/// See [`super::tile`].
#[target_feature(enable = "avx512f")]
pub(super) fn tile<const M: usize>(acts: &[ActPair<M>], weights: &[PairRow], acc: &mut [Acc; M]) {
    let mut sums = [[load(&[0.0; 16]); 4]; M];
    for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
        for (sum, acc) in sums.iter_mut().zip(acc) {
            *sum = load(acc);
        }
    }
    for ([even, odd], weight) in acts.iter().zip(weights) {
        for (v, words) in weight.iter().enumerate() {
            let (w_even, w_odd) = widen(words);
            for (sums, &x) in sums.iter_mut().zip(even) {
                sums[v] = _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(x)), w_even, sums[v]);
            }
            for (sums, &x) in sums.iter_mut().zip(odd) {
                sums[v] = _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(x)), w_odd, sums[v]);
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc) {
            store(acc, sum);
        }
    }
}

/// See [`super::wide`].
#[target_feature(enable = "avx512f")]
pub(super) fn wide<const P: usize>(
    acts: &[ActPair<1>],
    panels: &[&[PairRow]; P],
    acc: &mut [Acc; P],
) {
    let mut sums = [[load(&[0.0; 16]); 4]; P];
    let panels = panels.map(|panel| &panel[..acts.len()]);
    for (pair, &[[even], [odd]]) in acts.iter().enumerate() {
        let even = _mm512_set1_ps(f32::from_bits(even));
        let odd = _mm512_set1_ps(f32::from_bits(odd));
        for (sums, panel) in sums.iter_mut().zip(&panels) {
            for (sum, words) in sums.iter_mut().zip(&panel[pair]) {
                let (w_even, w_odd) = widen(words);
                *sum = _mm512_fmadd_ps(even, w_even, *sum);
                *sum = _mm512_fmadd_ps(odd, w_odd, *sum);
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc) {
            store(acc, sum);
        }
    }
}

//! Inner loops for AVX-512 with `vdpbf16ps`: activations as two bf16 terms, weights in bf16 as they
//! are.
//!
//! Two dot-product instructions per vector of weights keep 16 bits of the activations' mantissa at
//! the cost of f32 FMAs, without widening the weights.
use std::arch::x86_64::_mm512_dpbf16_ps;

use super::super::pack::PairRow;
use super::vector::{broadcast, load, load_bf16, store};
use super::{Acc, ActPair};

/// See [`super::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn tile<const M: usize>(acts: &[ActPair<M>], weights: &[PairRow], acc: &mut [Acc; M]) {
    let mut sums = [[load(&[0.0; 16]); 4]; M];
    for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
        for (sum, acc) in sums.iter_mut().zip(acc) {
            *sum = load(acc);
        }
    }
    for (act, weight) in acts.iter().zip(weights) {
        let w = [
            load_bf16(&weight[0]),
            load_bf16(&weight[1]),
            load_bf16(&weight[2]),
            load_bf16(&weight[3]),
        ];
        for term in act {
            for (sums, &word) in sums.iter_mut().zip(term) {
                let x = broadcast(word);
                for (sum, &w) in sums.iter_mut().zip(&w) {
                    *sum = _mm512_dpbf16_ps(*sum, x, w);
                }
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn wide<const P: usize>(
    acts: &[ActPair<1>],
    panels: &[&[PairRow]; P],
    acc: &mut [Acc; P],
) {
    let mut sums = [[load(&[0.0; 16]); 4]; P];
    let panels = panels.map(|panel| &panel[..acts.len()]);
    for (pair, &[[hi], [lo]]) in acts.iter().enumerate() {
        let (hi, lo) = (broadcast(hi), broadcast(lo));
        for (sums, panel) in sums.iter_mut().zip(&panels) {
            for (sum, words) in sums.iter_mut().zip(&panel[pair]) {
                let w = load_bf16(words);
                *sum = _mm512_dpbf16_ps(*sum, hi, w);
                *sum = _mm512_dpbf16_ps(*sum, lo, w);
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc) {
            store(acc, sum);
        }
    }
}

//! Inner loops for AVX-512 without bf16 instructions: weights of all formats are widened to f32 in
//! registers (`widen`), then fused multiply-added.
use std::arch::x86_64::{__m512, _mm512_fmadd_ps, _mm512_set1_ps};

use super::super::pack::{Int4Group, PairRow, PairRows};
use super::int4::mantissa::Zeros;
use super::vector::{load, store};
use super::{Acc, ActPair};
use widen::Quarter;

mod widen;

/// See [`super::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn tile<const M: usize>(acts: &[ActPair<M>], weights: PairRows<'_>, acc: &mut [Acc; M]) {
    match weights {
        PairRows::Bf16(rows) => {
            panel::<M, 1, _>(acts, rows, acc, |row, quarter, _| widen::bf16(&row[quarter]));
        }
        PairRows::Int8(rows) => {
            panel::<M, 1, _>(acts, rows, acc, |row, quarter, _| widen::int8(&row[quarter]));
        }
        PairRows::Fp8(rows) => {
            panel::<M, 1, _>(acts, rows, acc, |row, quarter, _| widen::fp8(&row[quarter]));
        }
    }
}

/// See [`super::int4_tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn int4_tile<const M: usize>(
    acts: &[ActPair<M>],
    group: &Int4Group<'_>,
    acc: &mut [Acc; M],
) {
    let rows = group.rows;
    if group.is_float {
        return panel::<M, 4, _>(acts, rows, acc, |row, quarter, pair| {
            widen::float4(&row[quarter], pair)
        });
    }
    match group.zeros {
        None => panel::<M, 4, _>(acts, rows, acc, |row, quarter, pair| {
            widen::int4(&row[quarter], pair, widen::middle(pair))
        }),
        Some(zeros) => {
            let zeros = Zeros::new(zeros);
            panel::<M, 4, _>(acts, rows, acc, |row, quarter, pair| {
                widen::int4(&row[quarter], pair, load(&zeros.0[pair][quarter]))
            });
        }
    }
}

/// `acc[m] += acts[m] * weights` over all pairs, of which an element of `weights` has `PAIRS` (the
/// last may have fewer). `widen` turns a quarter of one of them into f32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn panel<const M: usize, const PAIRS: usize, W>(
    acts: &[ActPair<M>],
    weights: &[W],
    acc: &mut [Acc; M],
    widen: impl Fn(&W, usize, usize) -> Quarter,
) {
    let mut sums = [[load(&[0.0; 16]); 4]; M];
    for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
        for (sum, acc) in sums.iter_mut().zip(acc) {
            *sum = load(acc);
        }
    }
    let (all, rest) = acts.as_chunks::<PAIRS>();
    for (acts, weight) in all.iter().zip(weights) {
        for (pair, act) in acts.iter().enumerate() {
            for quarter in 0..4 {
                add_pair(&mut sums, quarter, act, widen(weight, quarter, pair));
            }
        }
    }
    if let Some(weight) = weights.get(all.len()) {
        for (pair, act) in rest.iter().enumerate() {
            for quarter in 0..4 {
                add_pair(&mut sums, quarter, act, widen(weight, quarter, pair));
            }
        }
    }
    for (sums, acc) in sums.iter().zip(acc) {
        for (&sum, acc) in sums.iter().zip(acc) {
            store(acc, sum);
        }
    }
}

/// Adds the products of one pair of inputs with a quarter of the panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn add_pair<const M: usize>(
    sums: &mut [[__m512; 4]; M],
    quarter: usize,
    act: &ActPair<M>,
    weights: Quarter,
) {
    for (x, w) in act.iter().zip(weights) {
        for (sums, &x) in sums.iter_mut().zip(x) {
            sums[quarter] = _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(x)), w, sums[quarter]);
        }
    }
}

/// See [`super::wide`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
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
                let [w_even, w_odd] = widen::bf16(words);
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

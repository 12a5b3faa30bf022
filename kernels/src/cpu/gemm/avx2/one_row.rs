//! One row times weights of 4 and 8 bits, which are widened in registers (`widen`) rather than in
//! memory. Two rows and more would need more registers than there are.
//!
//! What a loop consists of is inlined always and unrolled by hand, since sums that are not seen to
//! be apart would be kept in memory. It is compiled as part of [`bytes`] or [`int4`], for the
//! instruction set of these: that is what every SAFETY comment means by it.
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "one promise, the instruction set, is what all intrinsics of a function need"
)]
use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_prefetch, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_storeu_ps,
};

use super::super::super::pack::{ByteRow, Int4Group};
use super::super::int4::mantissa::Zeros;
use super::super::{Acc, ActPair};
use widen::{At, Float4, Fp8, Int4, Int8, MIDDLE, Widen};

mod widen;

/// Rows of 4-bit weights that one half of the panel is computed for before the other: 2 KiB, which
/// are in the L1 cache then, while the next ones are fetched.
const NEAR: usize = 8;

/// `acc += acts * weights` over all pairs, of integers or of floats.
#[target_feature(enable = "avx2,fma")]
pub(super) fn bytes(acts: &[ActPair<1>], weights: &[ByteRow], is_float: bool, acc: &mut Acc) {
    match is_float {
        true => columns::<4, 1, _>(acts, weights, acc, 0, &Fp8),
        false => columns::<4, 1, _>(acts, weights, acc, 0, &Int8),
    }
}

/// `acc += acts * group` over all pairs of a group.
#[target_feature(enable = "avx2,fma")]
pub(super) fn int4(acts: &[ActPair<1>], group: &Int4Group<'_>, acc: &mut Acc) {
    match group.zeros {
        _ if group.is_float => halves(acts, group, acc, &Float4),
        None => halves(acts, group, acc, &MIDDLE),
        Some(zeros) => halves(acts, group, acc, &Int4(Zeros::new(zeros))),
    }
}

#[inline(always)]
fn halves<W: Widen<Quarter = [u32; 16]>>(
    acts: &[ActPair<1>],
    group: &Int4Group<'_>,
    acc: &mut Acc,
    widen: &W,
) {
    for (acts, rows) in acts.chunks(4 * NEAR).zip(group.rows.chunks(NEAR)) {
        for half in 0..2 {
            columns::<2, 4, W>(acts, rows, acc, 2 * half, widen);
        }
    }
}

/// The block for each `$i` below `$n`, a constant of at most 4.
macro_rules! unrolled {
    ($i:ident < $n:ident => $body:block) => {
        unrolled!($i < $n => $body for 0 1 2 3);
    };
    ($i:ident < $n:ident => $body:block for $($value:literal)*) => {
        $(
            if $value < $n {
                let $i = $value;
                $body
            }
        )*
    };
}

/// Computes `Q` quarters of the panel, from quarter `first` on. A row of `weights` has `PAIRS`
/// pairs; the last may have fewer.
#[inline(always)]
fn columns<const Q: usize, const PAIRS: usize, W: Widen>(
    acts: &[ActPair<1>],
    weights: &[[W::Quarter; 4]],
    acc: &mut Acc,
    first: usize,
    widen: &W,
) {
    // SAFETY: see the module.
    let mut sums = [[unsafe { _mm256_setzero_ps() }; 2]; Q];
    unrolled!(q < Q => {
        let halves = acc[first + q].as_chunks().0;
        sums[q] = [load(&halves[0]), load(&halves[1])];
    });
    let (all, rest) = acts.as_chunks::<PAIRS>();
    for (index, (acts, row)) in all.iter().zip(weights).enumerate() {
        if Q < 4 {
            // The other half is not in the order in which processors foresee. Behind the last rows
            // are those of the next group or panel.
            let ahead = weights.as_ptr().wrapping_add(weights.len()).cast::<[u32; 16]>();
            let line = first * weights.len() + index * Q;
            // SAFETY: a prefetch of an invalid address does nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line).cast()) };
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line + 1).cast()) };
        }
        let Some(quarters) = row[first..].first_chunk() else { continue };
        if W::HAS_RARE && widen.is_rare(quarters) {
            add_row::<Q, PAIRS, true, W>(&mut sums, acts, (first, quarters), widen);
        } else {
            add_row::<Q, PAIRS, false, W>(&mut sums, acts, (first, quarters), widen);
        }
    }
    if PAIRS > 1
        && let Some(quarters) = weights.get(all.len()).and_then(|row| row[first..].first_chunk())
    {
        let mut acts = [[[0]; 2]; PAIRS];
        acts[..rest.len()].copy_from_slice(rest);
        add_row::<Q, PAIRS, false, W>(&mut sums, &acts, (first, quarters), widen);
    }
    unrolled!(q < Q => {
        let halves = acc[first + q].as_chunks_mut().0;
        store(&mut halves[0], sums[q][0]);
        store(&mut halves[1], sums[q][1]);
    });
}

/// Adds the products of a row's pairs of inputs with quarters of the panel, from `first` on.
#[inline(always)]
fn add_row<const Q: usize, const PAIRS: usize, const RARE: bool, W: Widen>(
    sums: &mut [[__m256; 2]; Q],
    acts: &[ActPair<1>; PAIRS],
    (first, quarters): (usize, &[W::Quarter; Q]),
    widen: &W,
) {
    unrolled!(q < Q => {
        unrolled!(pair < PAIRS => {
            let words = widen.prepare(&quarters[q]);
            let (at, [[even], [odd]]) = (At { quarter: first + q, pair }, acts[pair]);
            add(&mut sums[q], even, widen.widen::<false, RARE>(&words, at));
            add(&mut sums[q], odd, widen.widen::<true, RARE>(&words, at));
        });
    });
}

#[inline(always)]
fn add([low, high]: &mut [__m256; 2], x: u32, w: [__m256; 2]) {
    // SAFETY: see the module.
    unsafe {
        let x = _mm256_set1_ps(f32::from_bits(x));
        *low = _mm256_fmadd_ps(x, w[0], *low);
        *high = _mm256_fmadd_ps(x, w[1], *high);
    }
}

#[inline(always)]
fn load(values: &[f32; 8]) -> __m256 {
    // SAFETY: see the module; the array has 32 bytes.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline(always)]
fn store(values: &mut [f32; 8], vector: __m256) {
    // SAFETY: see the module; the array has 32 bytes.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), vector) }
}

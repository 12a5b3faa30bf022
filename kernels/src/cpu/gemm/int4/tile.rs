//! Inner loops of products of activations of one bf16 term with 4-bit weights, by AVX-512 with bf16
//! dot products.
//!
//! A loop goes over one group, or a part of one, and everything that it does with the sums is in
//! one function: so they stay in registers from the first pair to the scaled result.
use std::arch::x86_64::{
    __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_mul_ps,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_si512,
};
use std::mem::MaybeUninit;

use super::super::super::pack::{Int4Group, Int4Row, MIDDLE, PANEL, PairRow};
use super::super::Acc;
use super::super::one_term::{Prefetch, fused};
use super::super::vector::{broadcast, load, load_bf16, store};
use super::avx512::{difference, differences, load_table, load_zeros, number, table_of};
use super::blocks::Piece;

/// Prefetch distance, in rows of words.
const AHEAD: usize = 32;

/// Four pairs in bf16, possibly not written yet.
pub(super) type FourPairs = [MaybeUninit<PairRow>; 4];

/// Destination of a tile's sums: scaled, they are added to `out`, or overwrite it if the group is
/// the panel's first. Sums of a group that continues are left in `cut`, which must then be `Some`.
pub(super) struct Sums<'a, 'o, const M: usize> {
    pub(super) cut: Option<&'a mut [Acc; M]>,
    pub(super) out: &'a mut [&'o mut Acc; M],
}

/// Multiplies a tile by a piece; leaves the converted weights in `room`, if `KEEP`. `rows` begin
/// with the piece's first pair; they contain zeros after the last pair of all.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn packed<const M: usize, const SYMMETRIC: bool, const KEEP: bool>(
    rows: &[&[u32]; M],
    piece: &Piece<'_>,
    room: &mut [FourPairs],
    sums: Sums<'_, '_, M>,
) {
    let group = &piece.group;
    assert!(!KEEP || room.len() == group.rows.len(), "the room is not the piece's");
    fetch_scales(group);
    let table = load_table(table_of(group.is_float, SYMMETRIC));
    let mut zeros = [_mm512_setzero_si512(); 4];
    if !SYMMETRIC {
        let own = group.zeros.unwrap_or(const { &[MIDDLE; PANEL] });
        for (to, own) in zeros.iter_mut().zip(own.as_chunks().0) {
            *to = load_zeros(own);
        }
    }
    let mut less = [[_mm512_setzero_si512(); 2]; 4];
    tile(rows, group.rows, piece, sums, |i, words, pair| {
        if pair == 0 {
            fetch(words);
            if !SYMMETRIC {
                for ((less, words), &zeros) in less.iter_mut().zip(words).zip(&zeros) {
                    *less = differences(words, zeros);
                }
            }
        }
        let weights = match SYMMETRIC {
            true => [
                number(&words[0], pair, table),
                number(&words[1], pair, table),
                number(&words[2], pair, table),
                number(&words[3], pair, table),
            ],
            false => [
                difference(less[0], pair, table),
                difference(less[1], pair, table),
                difference(less[2], pair, table),
                difference(less[3], pair, table),
            ],
        };
        if KEEP {
            let place = room[i][pair].as_mut_ptr().cast::<__m512i>();
            for (quarter, &weights) in weights.iter().enumerate() {
                // SAFETY: both are 512 bits of plain data.
                let weights = unsafe { std::mem::transmute::<__m512bh, __m512i>(weights) };
                // SAFETY: a pair's row has the size of four vectors.
                unsafe { _mm512_storeu_si512(place.wrapping_add(quarter), weights) };
            }
        }
        weights
    });
}

/// As [`packed`], with the weights that it left in the room.
///
/// # Safety
/// `room` must hold the piece's weights.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn converted<const M: usize>(
    rows: &[&[u32]; M],
    piece: &Piece<'_>,
    room: &mut [FourPairs],
    sums: Sums<'_, '_, M>,
) {
    tile(rows, &*room, piece, sums, |_, four, pair| {
        // SAFETY: they have been written (the caller's promise).
        let row = unsafe { four[pair].assume_init_ref() };
        [load_bf16(&row[0]), load_bf16(&row[1]), load_bf16(&row[2]), load_bf16(&row[3])]
    });
}

/// As [`converted`], by fused multiply-adds. Has its own loads and stores of sums: in functions of
/// their own they made [`tile`] 1 to 2 % slower.
///
/// # Safety
/// As for [`converted`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn fused<const M: usize>(
    rows: &[&[u32]; M],
    piece: &Piece<'_>,
    room: &mut [FourPairs],
    Sums { cut, out }: Sums<'_, '_, M>,
) {
    // SAFETY: they have been written (the caller's promise).
    let weights = unsafe { room.as_flattened().assume_init_ref() };
    let mut sums = [[_mm512_setzero_ps(); 4]; M];
    if let (false, Some(cut)) = (piece.begins, &cut) {
        for (sum, cut) in sums.as_flattened_mut().iter_mut().zip(cut.as_flattened()) {
            *sum = load(cut);
        }
    }
    fused::add(rows, weights, &mut sums, Prefetch { line: 0, lines: 0, distance: 0 });
    if let (false, Some(cut)) = (piece.ends, cut) {
        for (&sum, cut) in sums.as_flattened().iter().zip(cut.as_flattened_mut()) {
            store(cut, sum);
        }
        return;
    }
    let scales = piece.group.scales.as_chunks::<16>().0;
    for (sums, out) in sums.iter().zip(out) {
        for ((&sum, scales), out) in sums.iter().zip(scales).zip(out.iter_mut()) {
            let before = if piece.is_first { _mm512_setzero_ps() } else { load(out) };
            store(out, _mm512_add_ps(before, _mm512_mul_ps(sum, load(scales))));
        }
    }
}

/// Multiplies a tile by a piece; `weights_of` returns a pair of the four at an index.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn tile<const M: usize, W>(
    rows: &[&[u32]; M],
    fours: &[W],
    piece: &Piece<'_>,
    Sums { cut, out }: Sums<'_, '_, M>,
    mut weights_of: impl FnMut(usize, &W, usize) -> [__m512bh; 4],
) {
    // Checked before the sums are in registers.
    assert!(rows.iter().all(|row| row.len() >= 4 * fours.len()), "a row is too short");
    let mut sums = [[_mm512_setzero_ps(); 4]; M];
    if let (false, Some(cut)) = (piece.begins, &cut) {
        for (sums, cut) in sums.iter_mut().zip(cut.iter()) {
            for (sum, cut) in sums.iter_mut().zip(cut) {
                *sum = load(cut);
            }
        }
    }
    for (i, four) in fours.iter().enumerate() {
        // Not a loop: `weights_of` should be inlined for a pair that is known.
        macro_rules! multiply {
            ($pair:literal) => {
                let weights = weights_of(i, four, $pair);
                for (sums, row) in sums.iter_mut().zip(rows) {
                    // SAFETY: `i` is below `fours.len()`, and rows have four words for each
                    // (checked above).
                    let x = broadcast(*unsafe { row.get_unchecked(4 * i + $pair) });
                    for (sum, &weights) in sums.iter_mut().zip(&weights) {
                        *sum = _mm512_dpbf16_ps(*sum, x, weights);
                    }
                }
            };
        }
        multiply!(0);
        multiply!(1);
        multiply!(2);
        multiply!(3);
    }
    if let (false, Some(cut)) = (piece.ends, cut) {
        for (sums, cut) in sums.iter().zip(cut) {
            for (&sum, cut) in sums.iter().zip(cut) {
                store(cut, sum);
            }
        }
        return;
    }
    let scales = piece.group.scales.as_chunks::<16>().0;
    for (sums, out) in sums.iter().zip(out) {
        for ((&sum, scales), out) in sums.iter().zip(scales).zip(out.iter_mut()) {
            let before = if piece.is_first { _mm512_setzero_ps() } else { load(out) };
            store(out, _mm512_add_ps(before, _mm512_mul_ps(sum, load(scales))));
        }
    }
}

/// Prefetches the row of words that is [`AHEAD`] rows after this one.
#[inline(always)]
fn fetch(words: &Int4Row) {
    let ahead = std::ptr::from_ref(words).wrapping_add(AHEAD).cast::<i8>();
    for line in 0..4 {
        // SAFETY: harmless past the end: a prefetch of an invalid address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line)) };
    }
}

/// Prefetches the scales of the group that [`fetch`] has reached.
#[inline(always)]
fn fetch_scales(group: &Int4Group<'_>) {
    let groups = AHEAD.div_ceil(group.rows.len().max(1));
    let ahead = std::ptr::from_ref(group.scales).wrapping_add(groups).cast::<i8>();
    for line in 0..4 {
        // SAFETY: as in `fetch`.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line)) };
    }
}

//! Conversion of 4-bit weights to bf16 by AVX-512: a lookup of 16 bits per weight, by five bits.
use std::arch::x86_64::{
    __m512bh, __m512i, _mm_loadu_si128, _mm512_and_si512, _mm512_cvtepi8_epi32, _mm512_loadu_si512,
    _mm512_or_si512, _mm512_permutexvar_epi16, _mm512_set1_epi8, _mm512_slli_epi32,
    _mm512_srli_epi16, _mm512_storeu_si512, _mm512_sub_epi8,
};

use super::super::super::pack::{Int4Group, Int4Row, PANEL, PairRow};
use crate::weights::E2M1;

/// The values of 5 bits in bf16, all 32 looked up at once: with `SYMMETRIC`, the lower four bits
/// minus 8; otherwise all five as a signed integer.
const fn table<const SYMMETRIC: bool>() -> [u16; 32] {
    let mut table = [0; 32];
    let mut index = 0;
    while index < 32 {
        let value = match SYMMETRIC {
            true => (index & 15) as i32 - 8,
            false if index < 16 => index as i32,
            false => index as i32 - 32,
        };
        table[index] = ((value as f32).to_bits() >> 16) as u16;
        index += 1;
    }
    table
}

/// The same for floats: the values of the lower four bits.
const FLOATS: [u16; 32] = {
    let mut table = [0; 32];
    let mut index = 0;
    while index < 32 {
        table[index] = (E2M1[index & 15].to_bits() >> 16) as u16;
        index += 1;
    }
    table
};

/// Loads a lookup table.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn load_table(table: &[u16; 32]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

/// The zero points of 16 outputs, copied to all bytes of their words.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn load_zeros(zeros: &[i8; 16]) -> __m512i {
    // SAFETY: the array has 16 bytes.
    let zeros = _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(zeros.as_ptr().cast()) });
    let zeros = _mm512_or_si512(zeros, _mm512_slli_epi32::<8>(zeros));
    _mm512_or_si512(zeros, _mm512_slli_epi32::<16>(zeros))
}

/// Converts 16 words to four pairs of bf16 each.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn four_pairs<const SYMMETRIC: bool>(
    words: &[u32; 16],
    zeros: __m512i,
    table: __m512i,
) -> [__m512i; 4] {
    // The lookup uses only the lower five bits.
    let [even, odd] = match SYMMETRIC {
        true => {
            // SAFETY: the array has 64 bytes.
            let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
            [words, _mm512_srli_epi16::<4>(words)]
        }
        false => differences(words, zeros),
    };
    let pairs = [even, odd, _mm512_srli_epi16::<8>(even), _mm512_srli_epi16::<8>(odd)];
    pairs.map(|pair| _mm512_permutexvar_epi16(pair, table))
}

/// Pair `pair` of four of each of 16 words, for weights without zero points.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn number(words: &[u32; 16], pair: usize, table: __m512i) -> __m512bh {
    // SAFETY: the array has 64 bytes.
    let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
    // The lookup uses only the lower five bits.
    look_up(
        table,
        match pair {
            0 => words,
            1 => _mm512_srli_epi16::<4>(words),
            2 => _mm512_srli_epi16::<8>(words),
            _ => _mm512_srli_epi16::<12>(words),
        },
    )
}

/// The numbers of 16 words minus their zero points: those of the even pairs and of the odd pairs.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn differences(words: &[u32; 16], zeros: __m512i) -> [__m512i; 2] {
    // SAFETY: the array has 64 bytes.
    let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
    let lower = _mm512_set1_epi8(15);
    let (even, odd) = (words, _mm512_srli_epi16::<4>(words));
    [
        _mm512_sub_epi8(_mm512_and_si512(even, lower), zeros),
        _mm512_sub_epi8(_mm512_and_si512(odd, lower), zeros),
    ]
}

/// Pair `pair` of four, from [`differences`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(super) fn difference([even, odd]: [__m512i; 2], pair: usize, table: __m512i) -> __m512bh {
    look_up(
        table,
        match pair {
            0 => even,
            1 => odd,
            2 => _mm512_srli_epi16::<8>(even),
            _ => _mm512_srli_epi16::<8>(odd),
        },
    )
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn look_up(table: __m512i, index: __m512i) -> __m512bh {
    let found = _mm512_permutexvar_epi16(index, table);
    // SAFETY: both are 512 bits of plain data.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(found) }
}

/// The lookup table of a panel's weights, for lookups after zero points are subtracted.
pub(super) fn table_of(is_float: bool, is_symmetric: bool) -> &'static [u16; 32] {
    match (is_float, is_symmetric) {
        (true, _) => &FLOATS,
        (false, true) => const { &table::<true>() },
        (false, false) => const { &table::<false>() },
    }
}

/// Converts `rows` (four pairs each) of a group; `room` is large enough.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn widen(rows: &[Int4Row], group: &Int4Group<'_>, room: &mut [PairRow]) {
    let table = table_of(group.is_float, group.zeros.is_none());
    match group.zeros {
        Some(zeros) => widen_of::<false>(rows, zeros, table, room),
        None => widen_of::<true>(rows, &[0; PANEL], table, room),
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn widen_of<const SYMMETRIC: bool>(
    rows: &[Int4Row],
    zeros: &[i8; PANEL],
    table: &[u16; 32],
    room: &mut [PairRow],
) {
    let table = load_table(table);
    for (quarter, zeros) in zeros.as_chunks::<16>().0.iter().enumerate() {
        let zeros = load_zeros(zeros);
        for (row, out) in rows.iter().zip(room.as_chunks_mut::<4>().0) {
            let pairs = four_pairs::<SYMMETRIC>(&row[quarter], zeros, table);
            for (pair, out) in pairs.into_iter().zip(out) {
                // SAFETY: the array has 64 bytes.
                unsafe { _mm512_storeu_si512(out[quarter].as_mut_ptr().cast(), pair) };
            }
        }
    }
}

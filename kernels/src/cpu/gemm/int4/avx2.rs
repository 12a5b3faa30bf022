//! Conversion of 4-bit weights to bf16 by AVX2, which looks up a byte by four bits: of floats, and
//! of integers without zero points.
use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_loadu_si256,
    _mm256_or_si256, _mm256_set1_epi32, _mm256_shuffle_epi8, _mm256_slli_epi32, _mm256_srli_epi32,
    _mm256_storeu_si256,
};

use super::super::super::pack::{Int4Row, MIDDLE, PairRow};
use crate::weights::E2M1;

/// For each number, the lower byte of its bf16, then the upper one.
type Table = [[u8; 16]; 2];

const FLOATS: Table = table::<true>();
/// Less the zero point that all have.
const INTEGERS: Table = table::<false>();

const fn table<const IS_FLOAT: bool>() -> Table {
    let mut table = [[0; 16]; 2];
    let mut index = 0;
    while index < 16 {
        let value = if IS_FLOAT { E2M1[index] } else { index as f32 - MIDDLE as f32 };
        let [.., lower, upper] = value.to_bits().to_le_bytes();
        (table[0][index], table[1][index]) = (lower, upper);
        index += 1;
    }
    table
}

#[target_feature(enable = "avx2")]
#[inline]
fn load_table(table: &[u8; 16]) -> __m256i {
    // SAFETY: the array has 16 bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// Converts `rows` (four pairs each) without zero points; `room` is large enough.
#[target_feature(enable = "avx2")]
pub(super) fn widen(rows: &[Int4Row], is_float: bool, room: &mut [PairRow]) {
    let table = if is_float { &FLOATS } else { &INTEGERS };
    let (lower, upper) = (load_table(&table[0]), load_table(&table[1]));
    // Of each half of a word, the lower byte is looked up; the upper one becomes zero.
    let mask = _mm256_set1_epi32(0x000f_000f);
    let zero = _mm256_set1_epi32(0x8000_8000_u32.cast_signed());
    for (row, out) in rows.iter().zip(room.as_chunks_mut::<4>().0) {
        for (at, words) in row.as_flattened().as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: the array has 32 bytes.
            let words = unsafe { _mm256_loadu_si256(words.as_ptr().cast()) };
            let pairs = [
                words,
                _mm256_srli_epi32::<4>(words),
                _mm256_srli_epi32::<8>(words),
                _mm256_srli_epi32::<12>(words),
            ];
            for (pair, out) in pairs.into_iter().zip(&mut *out) {
                let numbers = _mm256_or_si256(_mm256_and_si256(pair, mask), zero);
                let upper = _mm256_slli_epi32::<8>(_mm256_shuffle_epi8(upper, numbers));
                let pair = _mm256_or_si256(_mm256_shuffle_epi8(lower, numbers), upper);
                let to = &mut out.as_flattened_mut().as_chunks_mut::<8>().0[at];
                // SAFETY: the array has 32 bytes.
                unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), pair) };
            }
        }
    }
}

//! Weights of a quarter of a panel, for one pair of inputs, widened to f32 in registers. Exact.
use std::arch::x86_64::{
    __m512, __m512i, _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_loadu_si512, _mm512_permutexvar_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_srlv_epi32, _mm512_sub_ps,
    _mm512_ternarylogic_epi32,
};

use super::super::super::fp8;
use super::super::int4::mantissa::{MASKS, MIDDLES, POWERS};
use super::load;
use crate::weights::E2M1;

/// Weights for the even input, then for the odd one, of 16 outputs.
pub(super) type Quarter = [__m512; 2];

/// `(a & b) ^ c`, and `(a & b) | c`, of `vpternlogd`.
const AND_XOR: i32 = 0x6a;
const AND_OR: i32 = 0xea;

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_words(words: &[u32; 16]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// Pairs of bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn bf16(words: &[u32; 16]) -> Quarter {
    of_pairs(load_words(words))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn of_pairs(pairs: __m512i) -> Quarter {
    let high = _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed());
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
        _mm512_castsi512_ps(_mm512_and_si512(pairs, high)),
    ]
}

/// Integers: put, plus 128, into the mantissa of a power of two of which the bit that is their
/// lowest one counts 1: 2^23, and 2^15 for those that are 8 bits higher.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn int8(bytes: &[i8; 32]) -> Quarter {
    // SAFETY: the array has 32 bytes.
    let pairs = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) });
    // Their sign bit is inverted, which adds 128.
    [(0xff, 0x4B00_0080, 8_388_608.0 + 128.0), (0xff00, 0x4700_8000, 32_768.0 + 128.0)].map(
        |(mask, power, middle)| {
            let (mask, power) = (_mm512_set1_epi32(mask), _mm512_set1_epi32(power));
            let bits = _mm512_ternarylogic_epi32::<AND_XOR>(pairs, mask, power);
            _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(middle))
        },
    )
}

/// Floats of 8 bits ([`fp8`]).
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn fp8(bytes: &[i8; 32]) -> Quarter {
    // SAFETY: the array has 32 bytes.
    let bytes = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    // SAFETY: this function needs the same instructions.
    of_pairs(unsafe { fp8::x86::pairs_512(bytes) })
}

/// Integers of 4 bits, of pair `pair` of each word, less `zeros`: see `mantissa`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn int4(words: &[u32; 16], pair: usize, zeros: __m512) -> Quarter {
    let words = load_words(words);
    let (mask, power) = (_mm512_set1_epi32(MASKS[pair]), _mm512_set1_epi32(POWERS[pair]));
    [words, _mm512_srli_epi32::<16>(words)].map(|words| {
        let bits = _mm512_ternarylogic_epi32::<AND_OR>(words, mask, power);
        _mm512_sub_ps(_mm512_castsi512_ps(bits), zeros)
    })
}

/// What [`int4`] subtracts if all zero points are the same.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn middle(pair: usize) -> __m512 {
    _mm512_set1_ps(MIDDLES[pair])
}

/// Floats of 4 bits, of pair `pair` of each word.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
pub(super) fn float4(words: &[u32; 16], pair: usize) -> Quarter {
    let (words, table) = (load_words(words), load(&E2M1));
    [4 * pair, 4 * pair + 16].map(|shift| {
        let shift = _mm512_set1_epi32(shift as i32);
        // The look-up uses four bits.
        _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shift), table)
    })
}

//! Loads and stores of 512 bits, shared by the inner loops for AVX-512.
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
    _mm512_storeu_ps,
};

/// Loads 16 pairs of bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
pub(super) fn load_bf16(words: &[u32; 16]) -> __m512bh {
    // SAFETY: the array has 64 bytes.
    let vector: __m512i = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
    // SAFETY: both are 512 bits of plain data.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(vector) }
}

/// One pair of bf16 in all 16 lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
pub(super) fn broadcast(word: u32) -> __m512bh {
    let vector = _mm512_set1_epi32(word.cast_signed());
    // SAFETY: both are 512 bits of plain data.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(vector) }
}

/// Loads 16 f32.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn load(values: &[f32; 16]) -> __m512 {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

/// Stores 16 f32.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn store(values: &mut [f32; 16], vector: __m512) {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), vector) }
}

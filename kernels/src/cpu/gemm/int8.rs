//! int8 weights converted to bf16, exactly, for inner loops that support bf16 only.
//!
//! While a block is used, the next one is prefetched: reading a line prefetches the line one block
//! length further on.
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_castps_si256,
    _mm256_cvtepi16_epi32, _mm256_cvtepi32_ps, _mm256_loadu_si256, _mm256_or_si256,
    _mm256_slli_epi32, _mm256_srai_epi32, _mm256_srli_epi32, _mm256_storeu_si256,
    _mm512_castps_si512, _mm512_cvtepi16_epi32, _mm512_cvtepi32_ps, _mm512_or_si512,
    _mm512_slli_epi32, _mm512_srai_epi32, _mm512_srli_epi32, _mm512_storeu_si512,
};

use super::super::isa::Isa;
use super::super::pack::{ByteRow, PairRow};
#[cfg(target_arch = "x86_64")]
use super::one_term::{store_pairs, widen_pairs};

/// Converts `rows` to bf16 in `room`, which is large enough.
pub(super) fn widen<'a>(isa: Isa, rows: &[ByteRow], room: &'a mut [PairRow]) -> &'a [PairRow] {
    let room = &mut room[..rows.len()];
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        Isa::Avx512Bf16 => unsafe { widen_bf16(rows, room) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { widen_512(rows, room) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2Fma => unsafe { widen_256(rows, room) },
        _ => widen_portable(rows, room),
    }
    room
}

fn widen_portable(rows: &[ByteRow], out: &mut [PairRow]) {
    for (row, out) in rows.iter().zip(out) {
        let (pairs, _) = row.as_flattened().as_chunks::<2>();
        for (word, &[even, odd]) in out.as_flattened_mut().iter_mut().zip(pairs) {
            // The upper half of an f32 holds an 8-bit integer exactly.
            *word = f32::from(even).to_bits() >> 16 | f32::from(odd).to_bits();
        }
    }
}

/// Prefetches the two lines that are `distance` rows after this one.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn fetch(row: &ByteRow, distance: usize) {
    let ahead = std::ptr::from_ref(row).wrapping_add(distance).cast::<i8>();
    for line in [0, 64] {
        // SAFETY: harmless past the end: a prefetch of an invalid address does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line)) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn widen_bf16(rows: &[ByteRow], out: &mut [PairRow]) {
    for (row, out) in rows.iter().zip(out) {
        fetch(row, rows.len());
        store_pairs(out, widen_pairs(row));
    }
}

/// A pair has 16 bits: the odd input's integer in the upper half, the even one's in the lower.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn widen_512(rows: &[ByteRow], out: &mut [PairRow]) {
    for (row, out) in rows.iter().zip(out) {
        fetch(row, rows.len());
        for (words, pairs) in out.iter_mut().zip(row) {
            // SAFETY: the array has 32 bytes.
            let pairs: __m256i = unsafe { _mm256_loadu_si256(pairs.as_ptr().cast()) };
            let pairs = _mm512_cvtepi16_epi32(pairs);
            let odd = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32::<8>(pairs)));
            let even = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(pairs));
            let even = _mm512_castps_si512(_mm512_cvtepi32_ps(even));
            let both = _mm512_or_si512(odd, _mm512_srli_epi32::<16>(even));
            // SAFETY: the array has 64 bytes.
            unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), both) };
        }
    }
}

/// As for 512 bits, in halves.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn widen_256(rows: &[ByteRow], out: &mut [PairRow]) {
    for (row, out) in rows.iter().zip(out) {
        fetch(row, rows.len());
        let halves = row.as_flattened().as_chunks::<16>().0;
        for (words, pairs) in out.as_flattened_mut().as_chunks_mut::<8>().0.iter_mut().zip(halves) {
            // SAFETY: the array has 16 bytes.
            let pairs = _mm256_cvtepi16_epi32(unsafe { _mm_loadu_si128(pairs.as_ptr().cast()) });
            let odd = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32::<8>(pairs)));
            let even = _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(pairs));
            let even = _mm256_castps_si256(_mm256_cvtepi32_ps(even));
            let both = _mm256_or_si256(odd, _mm256_srli_epi32::<16>(even));
            // SAFETY: the array has 32 bytes.
            unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), both) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_integer_is_exact_in_either_half() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for value in i8::MIN..=i8::MAX {
                let other = value.wrapping_mul(57);
                let mut row = [[0; 32]; 4];
                row.as_flattened_mut().as_chunks_mut::<2>().0.fill([value, other]);
                let mut room = [[[u32::MAX; 16]; 4]; 3];
                let words = widen(isa, &[row, row], &mut room);
                assert_eq!(words.len(), 2);
                for word in words.as_flattened().as_flattened() {
                    let (even, odd) = (f32::from_bits(word << 16), word & 0xFFFF_0000);
                    assert_eq!((even, f32::from_bits(odd)), (value.into(), other.into()), "{isa}");
                }
            }
        }
    }
}

//! FP8 in the KV cache and in weights: what a byte stands for, and loads of vectors of them.
//!
//! A byte here is one of E4M3 ([`crate::fp8`]) with its magnitudes in another order, so
//! that four bits are enough to find what is no normal number: a magnitude below 16 is looked up
//! (zero, subnormal numbers, the first normal ones, and NaN as 15), any other is an exponent and a
//! mantissa. Zero is zero.
//!
//! All values are exact in bf16, and none is subnormal there.
use crate::fp8;

/// The magnitude of NaN.
const NAN: u8 = 15;
/// Added to a magnitude, shifted to where a bf16 has its exponent and mantissa: the difference of
/// the exponents' biases, less the place that NaN takes.
pub(super) const BASE: u16 = (120 << 7) - (1 << 4);

/// Bits of each byte's value in bf16.
pub(super) const BF16: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let magnitude = byte as u16 & 0x7f;
        let bits = if magnitude == NAN as u16 {
            0x7fc0
        } else if magnitude > NAN as u16 {
            (magnitude << 4) + BASE
        } else if magnitude >= 8 {
            (magnitude << 4) + (120 << 7)
        } else {
            // Multiples of 2^-9.
            ((magnitude as f32 / 512.0).to_bits() >> 16) as u16
        };
        table[byte] = bits | (byte as u16 >> 7) << 15;
        byte += 1;
    }
    table
};

/// The byte of the nearest value.
#[inline(always)]
pub(super) fn encode(x: f32) -> u8 {
    encode_byte(fp8::to_byte(x))
}

/// The byte for a byte of E4M3.
#[inline(always)]
pub(super) fn encode_byte(byte: u8) -> u8 {
    let magnitude = byte & 0x7f;
    let moved = magnitude + u8::from(magnitude >= NAN);
    byte & 0x80 | if magnitude == 0x7f { NAN } else { moved }
}

/// The value of a byte.
#[inline(always)]
pub(super) fn decode(byte: u8) -> f32 {
    f32::from_bits(u32::from(BF16[usize::from(byte)]) << 16)
}

/// The values of two bytes, as a pair of bf16.
#[inline(always)]
pub(super) fn decode_pair(bytes: u16) -> u32 {
    let [low, high] = bytes.to_le_bytes().map(|byte| u32::from(BF16[usize::from(byte)]));
    high << 16 | low
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    //! Callers are compiled for, and dispatched to, an instruction set that was detected: that is
    //! their part of every SAFETY comment.
    #![expect(
        clippy::multiple_unsafe_ops_per_block,
        reason = "one promise, the instruction set, is what all intrinsics of a function need"
    )]
    use std::arch::x86_64::*;

    use super::{BASE, BF16, NAN};

    /// The values of magnitudes that are looked up: first all low bytes, then all high ones.
    const LOOKED_UP: ([u8; 16], [u8; 16]) = {
        let mut tables = ([0; 16], [0; 16]);
        let mut at = 0;
        while at < 16 {
            [tables.0[at], tables.1[at]] = BF16[at].to_le_bytes();
            at += 1;
        }
        tables
    };
    /// The same in 16 bits, twice, and in 32 bits.
    const LOOKED_UP_16: [u16; 32] = {
        let mut table = [0; 32];
        let mut at = 0;
        while at < 32 {
            table[at] = BF16[at % 16];
            at += 1;
        }
        table
    };
    const LOOKED_UP_32: [u32; 16] = {
        let mut table = [0; 16];
        let mut at = 0;
        while at < 16 {
            table[at] = (BF16[at] as u32) << 16;
            at += 1;
        }
        table
    };
    /// The bits of a byte of which none is set if its magnitude is looked up.
    pub(in super::super) const UPPER: i8 = 0x70;

    /// 32 bytes as 16 pairs of bf16.
    ///
    /// # Safety
    /// See the module; AVX-512 (F and BW).
    #[inline(always)]
    pub(in super::super) unsafe fn pairs_512(bytes: __m256i) -> __m512i {
        // SAFETY: the caller's promise; the table has 64 bytes.
        unsafe {
            let table = _mm512_loadu_si512(LOOKED_UP_16.as_ptr().cast());
            let wide = _mm512_cvtepi8_epi16(bytes);
            let shifted = _mm512_and_si512(_mm512_slli_epi16::<4>(wide), _mm512_set1_epi16(0x7f0));
            let normal = _mm512_add_epi16(shifted, _mm512_set1_epi16(BASE.cast_signed()));
            let other = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(UPPER as i16));
            let magnitude = _mm512_mask_permutexvar_epi16(normal, other, wide, table);
            // `magnitude | (wide & sign)`.
            _mm512_ternarylogic_epi32::<0xf8>(magnitude, wide, _mm512_set1_epi16(i16::MIN))
        }
    }

    /// 16 bytes as 16 f32.
    ///
    /// # Safety
    /// See the module; AVX-512 (F).
    #[inline(always)]
    pub(in super::super) unsafe fn floats_512(bytes: __m128i) -> __m512 {
        // SAFETY: the caller's promise; the table has 64 bytes.
        unsafe {
            let table = _mm512_loadu_si512(LOOKED_UP_32.as_ptr().cast());
            let wide = _mm512_cvtepi8_epi32(bytes);
            let mask = _mm512_set1_epi32(0x7f0_0000);
            let shifted = _mm512_and_si512(_mm512_slli_epi32::<20>(wide), mask);
            let normal = _mm512_add_epi32(shifted, _mm512_set1_epi32((BASE as i32) << 16));
            let other = _mm512_testn_epi32_mask(wide, _mm512_set1_epi32(UPPER as i32));
            let magnitude = _mm512_mask_permutexvar_epi32(normal, other, wide, table);
            let sign = _mm512_set1_epi32(i32::MIN);
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xf8>(magnitude, wide, sign))
        }
    }

    /// 16 bytes as 8 pairs of bf16.
    ///
    /// # Safety
    /// See the module; AVX2.
    #[inline(always)]
    pub(in super::super) unsafe fn pairs_256(bytes: __m128i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let wide = _mm256_cvtepi8_epi16(bytes);
            let index = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
            let base = _mm256_set1_epi16(BASE.cast_signed());
            let normal = _mm256_add_epi16(_mm256_slli_epi16::<4>(index), base);
            // The upper byte of each index is 0, for which both tables have 0.
            let (low, high) = looked_up(index);
            let looked_up = _mm256_or_si256(low, _mm256_slli_epi16::<8>(high));
            let is_normal = _mm256_cmpgt_epi16(index, _mm256_set1_epi16(NAN as i16));
            let magnitude = _mm256_blendv_epi8(looked_up, normal, is_normal);
            let sign = _mm256_and_si256(wide, _mm256_set1_epi16(i16::MIN));
            _mm256_or_si256(magnitude, sign)
        }
    }

    /// 8 bytes, the lower half of `bytes`, as 8 f32.
    ///
    /// # Safety
    /// See the module; AVX2.
    #[inline(always)]
    pub(in super::super) unsafe fn floats_256(bytes: __m128i) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let wide = _mm256_cvtepi8_epi32(bytes);
            let index = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
            let base = _mm256_set1_epi32((BASE as i32) << 16);
            let normal = _mm256_add_epi32(_mm256_slli_epi32::<20>(index), base);
            // The upper bytes of each index are 0, for which both tables have 0.
            let (low, high) = looked_up(index);
            let (low, high) = (_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<24>(high));
            let looked_up = _mm256_or_si256(low, high);
            let is_normal = _mm256_cmpgt_epi32(index, _mm256_set1_epi32(NAN as i32));
            let magnitude = _mm256_blendv_epi8(looked_up, normal, is_normal);
            let sign = _mm256_and_si256(wide, _mm256_set1_epi32(i32::MIN));
            _mm256_castsi256_ps(_mm256_or_si256(magnitude, sign))
        }
    }

    /// For each byte, its low four bits' entry in either table.
    ///
    /// # Safety
    /// As [`pairs_256`].
    #[inline(always)]
    unsafe fn looked_up(index: __m256i) -> (__m256i, __m256i) {
        // SAFETY: the caller's promise; each table has 16 bytes.
        unsafe {
            let low = _mm_loadu_si128(LOOKED_UP.0.as_ptr().cast());
            let high = _mm_loadu_si128(LOOKED_UP.1.as_ptr().cast());
            let (low, high) = (_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high));
            (_mm256_shuffle_epi8(low, index), _mm256_shuffle_epi8(high, index))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::Isa;
    use super::super::simd::{PairSimd, Plain};
    use super::*;

    /// A byte of the cache for each byte of E4M3.
    fn all() -> [u8; 256] {
        std::array::from_fn(|byte| encode(fp8::from_byte(byte as u8)))
    }

    #[test]
    fn every_value_comes_back() {
        for (byte, cached) in all().into_iter().enumerate() {
            let (want, got) = (fp8::from_byte(byte as u8), decode(cached));
            assert!(want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan(), "{byte:#x}");
        }
        assert_eq!((decode(0), encode(0.0)), (0.0, 0));
        let mut different = all().to_vec();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), 256);
    }

    fn loads<S: PairSimd>(what: &str) {
        let same = |got: f32, byte: u8| {
            let want = decode(byte);
            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
        };
        for first in 0..=255u8 {
            let bytes: Vec<u8> = (0..32).map(|i| first.wrapping_add(i)).collect();
            let mut out = [0.0; 16];
            S::load_fp8(&bytes).store(&mut out);
            for (i, &byte) in bytes[..S::LANES].iter().enumerate() {
                assert!(same(out[i], byte), "{what}: {byte:#x}: {}", out[i]);
            }
            let pairs: Vec<u16> =
                bytes.as_chunks().0.iter().map(|x| u16::from_le_bytes(*x)).collect();
            // Times one and zero: each half by itself. Only finite values, since zero times NaN
            // is NaN.
            for (keep, half) in [(0x3f80, 0), (0x3f80_0000, 1)] {
                let words = S::load_fp8_pairs(&pairs);
                let mask = if half == 0 { crate::cpu::simd::LOW } else { crate::cpu::simd::HIGH };
                let words = S::keep(words, mask);
                S::splat(0.0).dot(S::splat_words(keep), words).store(&mut out);
                for i in 0..S::LANES {
                    let (got, byte) = (out[i], bytes[2 * i + half]);
                    // A sum with +0 has no negative zero.
                    assert!(same(got, byte) || got == decode(byte), "{what}: {byte:#x}: {got}");
                }
            }
        }
    }

    #[test]
    fn vectors_are_loaded_alike_on_every_instruction_set() {
        loads::<Plain>("portable");
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m256, __m512};

            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
            fn avx512() {
                loads::<__m512>("avx512");
            }
            #[target_feature(enable = "avx2,fma")]
            fn avx2() {
                loads::<__m256>("avx2");
            }
            for (isa, test) in [
                // SAFETY: called only where the machine has the instructions.
                (Isa::Avx512, (|| unsafe { avx512() }) as fn()),
                // SAFETY: as above.
                (Isa::Avx2Fma, || unsafe { avx2() }),
            ] {
                if isa.is_supported() {
                    test();
                }
            }
        }
    }
}

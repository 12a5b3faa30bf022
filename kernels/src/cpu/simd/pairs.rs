//! Vectors of f32 that accumulate products of bf16 pairs: words with one element in the low half
//! and its neighbour in the high half.
//!
//! The factors of a product, two bf16, are the same on every instruction set. What differs is
//! whether each product is added with a rounding of its own.
use super::super::fp8;
use super::{Plain, Simd};

/// A vector of sums, with words of as many pairs.
pub(crate) trait PairSimd: Simd {
    /// [`Simd::LANES`] words.
    type Words: Copy;

    /// `word` in all lanes.
    fn splat_words(word: u32) -> Self::Words;

    /// Loads the first elements of `words`, which must have at least `LANES`.
    fn load_words(words: &[u32]) -> Self::Words;

    /// Loads the values of the first pairs of bytes of an FP8 cache ([`super::super::fp8`]), which
    /// must have at least `LANES`.
    fn load_fp8_pairs(pairs: &[u16]) -> Self::Words;

    /// The bits of `words` that are set in `mask`.
    fn keep(words: Self::Words, mask: u32) -> Self::Words;

    /// `self + a.low * b.low + a.high * b.high`.
    fn dot(self, a: Self::Words, b: Self::Words) -> Self;
}

impl PairSimd for Plain {
    type Words = [u32; 4];

    #[inline(always)]
    fn splat_words(word: u32) -> [u32; 4] {
        [word; 4]
    }

    #[inline(always)]
    fn load_words(words: &[u32]) -> [u32; 4] {
        [words[0], words[1], words[2], words[3]]
    }

    #[inline(always)]
    fn load_fp8_pairs(pairs: &[u16]) -> [u32; 4] {
        [pairs[0], pairs[1], pairs[2], pairs[3]].map(fp8::decode_pair)
    }

    #[inline(always)]
    fn keep(words: [u32; 4], mask: u32) -> [u32; 4] {
        words.map(|word| word & mask)
    }

    #[inline(always)]
    fn dot(self, a: [u32; 4], b: [u32; 4]) -> Self {
        let low = |word: u32| f32::from_bits(word << 16);
        let high = |word: u32| f32::from_bits(word & HIGH);
        Self(std::array::from_fn(|i| self.0[i] + low(a[i]) * low(b[i]) + high(a[i]) * high(b[i])))
    }
}

/// The half of a word with a pair's second element.
pub(crate) const HIGH: u32 = 0xffff_0000;
/// The half of a word with a pair's first element.
pub(crate) const LOW: u32 = 0x0000_ffff;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{HIGH, PairSimd, Simd, fp8};

    macro_rules! widening {
        ($vector:ident, $words:ident, $splat:ident, $load:ident, $and:ident, $shift:ident, $cast:ident, $fma:ident, $load_bytes:ident, $fp8:ident) => {
            impl PairSimd for $vector {
                type Words = $words;

                #[inline(always)]
                fn splat_words(word: u32) -> $words {
                    // SAFETY: see the module above.
                    unsafe { $splat(word.cast_signed()) }
                }

                #[inline(always)]
                fn load_words(words: &[u32]) -> $words {
                    let words = &words[..Self::LANES];
                    // SAFETY: enough words (just checked); and see the module above.
                    unsafe { $load(words.as_ptr().cast()) }
                }

                #[inline(always)]
                fn load_fp8_pairs(pairs: &[u16]) -> $words {
                    let pairs = &pairs[..Self::LANES];
                    // SAFETY: enough pairs (just checked); and see the module above.
                    unsafe { fp8::x86::$fp8($load_bytes(pairs.as_ptr().cast())) }
                }

                #[inline(always)]
                fn keep(words: $words, mask: u32) -> $words {
                    // SAFETY: see the module above.
                    unsafe { $and(words, Self::splat_words(mask)) }
                }

                #[inline(always)]
                fn dot(self, a: $words, b: $words) -> Self {
                    let (a_high, b_high) = (Self::keep(a, HIGH), Self::keep(b, HIGH));
                    // SAFETY: see the module above.
                    unsafe {
                        let low = $fma($cast($shift::<16>(a)), $cast($shift::<16>(b)), self);
                        $fma($cast(a_high), $cast(b_high), low)
                    }
                }
            }
        };
    }

    widening!(
        __m512,
        __m512i,
        _mm512_set1_epi32,
        _mm512_loadu_si512,
        _mm512_and_si512,
        _mm512_slli_epi32,
        _mm512_castsi512_ps,
        _mm512_fmadd_ps,
        _mm256_loadu_si256,
        pairs_512
    );
    widening!(
        __m256,
        __m256i,
        _mm256_set1_epi32,
        _mm256_loadu_si256,
        _mm256_and_si256,
        _mm256_slli_epi32,
        _mm256_castsi256_ps,
        _mm256_fmadd_ps,
        _mm_loadu_si128,
        pairs_256
    );
}

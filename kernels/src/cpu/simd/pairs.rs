//! Vectors of f32 that accumulate products of bf16 pairs: words with one element in the low half
//! and its neighbour in the high half.
//!
//! The factors of a product, two bf16, are the same on every instruction set. What differs is
//! whether each product is added with a rounding of its own, and that `vdpbf16ps` treats subnormal
//! numbers as zero.
use super::super::fp8;
use super::super::math::bf16_pair;
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

    /// Rounds neighbouring values to bf16, two per word.
    #[inline(always)]
    fn round(values: &[[f32; 2]], words: &mut [u32]) {
        for (word, &[first, second]) in words.iter_mut().zip(values) {
            *word = bf16_pair(first, second);
        }
    }
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

    /// 16 lanes of AVX-512, with an instruction for products of pairs.
    #[derive(Clone, Copy)]
    pub(crate) struct Bf16(__m512);

    impl Simd for Bf16 {
        const LANES: usize = <__m512 as Simd>::LANES;
        const ACCUMULATORS: usize = <__m512 as Simd>::ACCUMULATORS;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            Self(Simd::splat(x))
        }

        #[inline(always)]
        fn load(values: &[f32]) -> Self {
            Self(Simd::load(values))
        }

        #[inline(always)]
        fn store(self, values: &mut [f32]) {
            self.0.store(values);
        }

        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            Self(self.0.mul_add(b.0, c.0))
        }

        #[inline(always)]
        fn max(self, floor: Self) -> Self {
            Self(self.0.max(floor.0))
        }

        #[inline(always)]
        fn load_fp8(bytes: &[u8]) -> Self {
            Self(Simd::load_fp8(bytes))
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    fn round(values: &[[f32; 2]; 16], words: &mut [u32; 16]) {
        let (low, high) = values.as_flattened().split_at(16);
        // SAFETY: there are 16 values.
        let low = unsafe { _mm512_loadu_ps(low.as_ptr()) };
        // SAFETY: as above.
        let high = unsafe { _mm512_loadu_ps(high.as_ptr()) };
        let pairs = _mm512_cvtne2ps_pbh(high, low);
        // SAFETY: both are 512 bits of plain data.
        let pairs = unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) };
        // SAFETY: there are 16 words.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), pairs) };
    }

    impl PairSimd for Bf16 {
        type Words = __m512i;

        #[inline(always)]
        fn splat_words(word: u32) -> __m512i {
            <__m512 as PairSimd>::splat_words(word)
        }

        #[inline(always)]
        fn load_words(words: &[u32]) -> __m512i {
            <__m512 as PairSimd>::load_words(words)
        }

        #[inline(always)]
        fn load_fp8_pairs(pairs: &[u16]) -> __m512i {
            <__m512 as PairSimd>::load_fp8_pairs(pairs)
        }

        #[inline(always)]
        fn keep(words: __m512i, mask: u32) -> __m512i {
            <__m512 as PairSimd>::keep(words, mask)
        }

        #[inline(always)]
        fn round(values: &[[f32; 2]], words: &mut [u32]) {
            let (vectors, rest) = values.as_chunks::<16>();
            let (whole, last) = words[..values.len()].split_at_mut(vectors.len() * 16);
            for (values, words) in vectors.iter().zip(whole.as_chunks_mut::<16>().0) {
                // SAFETY: see the module above.
                unsafe { round(values, words) };
            }
            <__m512 as PairSimd>::round(rest, last);
        }

        #[inline(always)]
        fn dot(self, a: __m512i, b: __m512i) -> Self {
            // SAFETY: all are 512 bits of plain data.
            let [a, b] = [a, b].map(|it| unsafe { std::mem::transmute::<__m512i, __m512bh>(it) });
            // SAFETY: see the module above.
            Self(unsafe { _mm512_dpbf16_ps(self.0, a, b) })
        }
    }
}
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Bf16;

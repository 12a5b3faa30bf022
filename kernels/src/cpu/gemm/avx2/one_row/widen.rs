//! Weights of a quarter of a panel, for one input of a pair, widened to f32 in registers. Exact.
use std::arch::asm;
use std::arch::x86_64::*;

use super::super::super::super::fp8;
use super::super::super::int4::mantissa::{MASKS, MIDDLES, POWERS, Zeros};
use super::load;
use crate::weights::E2M1;

/// How weights of a format are widened.
pub(super) trait Widen {
    /// The weights of 16 outputs for a row's pairs, as they are in memory.
    type Quarter;
    /// The same in registers.
    type Words;
    /// Whether [`is_rare`](Self::is_rare) may say so.
    const HAS_RARE: bool = false;

    /// Whether some of these weights are widened in another way, which is slower.
    #[inline(always)]
    fn is_rare(&self, _: &[Self::Quarter]) -> bool {
        false
    }

    fn prepare(&self, quarter: &Self::Quarter) -> Self::Words;

    /// The weights for the even input of a pair, or the odd one: of the lower 8 outputs, then of
    /// the upper ones.
    fn widen<const ODD: bool, const RARE: bool>(&self, words: &Self::Words, at: At) -> [__m256; 2];
}

/// Where in a panel weights are.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub(super) quarter: usize,
    /// Of the pairs of a row.
    pub(super) pair: usize,
}

/// Of pairs of bf16, those for an input. (With this in common with the loops for bf16, these took
/// up to a sixth longer.)
#[inline(always)]
fn of_pair<const ODD: bool>(pairs: __m256i) -> __m256 {
    // SAFETY: see `one_row`.
    unsafe {
        let high = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
        _mm256_castsi256_ps(match ODD {
            false => _mm256_slli_epi32::<16>(pairs),
            true => _mm256_and_si256(pairs, high),
        })
    }
}

/// 8 words of the lower outputs, then of the upper ones.
#[inline(always)]
fn load_words(words: &[u32; 16]) -> [__m256i; 2] {
    let words = words.as_ptr().cast::<__m256i>();
    // SAFETY: see `one_row`; the array has 64 bytes.
    unsafe { [_mm256_loadu_si256(words), _mm256_loadu_si256(words.wrapping_add(1))] }
}

/// Integers of 8 bits: put, plus 128, into the lowest bits of the mantissa of 2^23, which count as
/// integers do.
pub(super) struct Int8;

impl Widen for Int8 {
    type Quarter = [i8; 32];
    type Words = [__m256i; 2];

    #[inline(always)]
    fn prepare(&self, bytes: &[i8; 32]) -> [__m256i; 2] {
        load_bytes(bytes)
    }

    #[inline(always)]
    fn widen<const ODD: bool, const RARE: bool>(&self, bytes: &[__m256i; 2], _: At) -> [__m256; 2] {
        [int8::<ODD>(bytes[0]), int8::<ODD>(bytes[1])]
    }
}

#[inline(always)]
fn int8<const ODD: bool>(bytes: __m256i) -> __m256 {
    // SAFETY: see `one_row`.
    unsafe {
        let byte = _mm256_shuffle_epi8(bytes, places::<ODD, 0>());
        // Their sign bit is inverted, which adds 128.
        let bits = _mm256_xor_si256(byte, _mm256_set1_epi32(0x4B00_0080));
        _mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(8_388_608.0 + 128.0))
    }
}

/// The 16 bytes of the lower 8 outputs, twice, then those of the upper ones.
#[inline(always)]
fn load_bytes(bytes: &[i8; 32]) -> [__m256i; 2] {
    let bytes = bytes.as_ptr().cast::<__m128i>();
    // SAFETY: see `one_row`; the array has 32 bytes.
    unsafe {
        [
            _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes)),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.wrapping_add(1))),
        ]
    }
}

/// For a shuffle that puts the byte of each even or odd input among 16 into byte `BYTE` of a word
/// of zeros.
#[inline(always)]
fn places<const ODD: bool, const BYTE: usize>() -> __m256i {
    let places = const {
        let mut places = [-1i8; 32];
        let mut output = 0;
        while output < 8 {
            places[4 * output + BYTE] = (2 * output + ODD as usize) as i8;
            output += 1;
        }
        places
    };
    // SAFETY: see `one_row`; the array has 32 bytes.
    unsafe { _mm256_loadu_si256(places.as_ptr().cast()) }
}

/// Floats of 8 bits ([`fp8`]); few weights are so small that they are looked up. (The zeros that
/// pad a last panel are, so it is slower.)
pub(super) struct Fp8;

impl Widen for Fp8 {
    type Quarter = [i8; 32];
    type Words = [__m256i; 2];

    const HAS_RARE: bool = true;

    #[inline(always)]
    fn is_rare(&self, quarters: &[[i8; 32]]) -> bool {
        // SAFETY: see `one_row`; each array has 32 bytes.
        unsafe {
            let mut found = _mm256_setzero_si256();
            for bytes in quarters {
                let bytes = _mm256_loadu_si256(bytes.as_ptr().cast());
                let upper = _mm256_and_si256(bytes, _mm256_set1_epi8(fp8::x86::UPPER));
                found = _mm256_or_si256(found, _mm256_cmpeq_epi8(upper, _mm256_setzero_si256()));
            }
            _mm256_movemask_epi8(found) != 0
        }
    }

    #[inline(always)]
    fn prepare(&self, bytes: &[i8; 32]) -> [__m256i; 2] {
        load_bytes(again(bytes))
    }

    #[inline(always)]
    fn widen<const ODD: bool, const RARE: bool>(&self, bytes: &[__m256i; 2], _: At) -> [__m256; 2] {
        match RARE {
            true => [any_fp8::<ODD>(bytes[0]), any_fp8::<ODD>(bytes[1])],
            false => [fp8::<ODD>(bytes[0]), fp8::<ODD>(bytes[1])],
        }
    }
}

/// The same reference, of which the compiler does not know that. It would otherwise take what
/// [`Widen::is_rare`] has loaded apart, with shuffles between lanes, which cost more than loads.
#[inline(always)]
fn again(bytes: &[i8; 32]) -> &[i8; 32] {
    let mut bytes: *const [i8; 32] = bytes;
    // SAFETY: there is no instruction.
    unsafe {
        asm!("/* {0} */", inout(reg) bytes, options(pure, readonly, nostack, preserves_flags));
    }
    // SAFETY: it is the reference that was given.
    unsafe { &*bytes }
}

#[inline(always)]
fn any_fp8<const ODD: bool>(bytes: __m256i) -> __m256 {
    // SAFETY: see `one_row`.
    of_pair::<ODD>(unsafe { fp8::x86::pairs_256(_mm256_castsi256_si128(bytes)) })
}

/// If none of them is looked up.
#[inline(always)]
fn fp8<const ODD: bool>(bytes: __m256i) -> __m256 {
    // SAFETY: see `one_row`.
    unsafe {
        // The sign stays on top, the magnitude goes where exponent and mantissa are.
        let byte = _mm256_srai_epi32::<4>(_mm256_shuffle_epi8(bytes, places::<ODD, 3>()));
        let moved = _mm256_and_si256(byte, _mm256_set1_epi32(0x87F0_0000_u32.cast_signed()));
        let base = _mm256_set1_epi32((fp8::BASE as i32) << 16);
        _mm256_castsi256_ps(_mm256_add_epi32(moved, base))
    }
}

/// Integers of 4 bits, less their zero points: see `mantissa`.
pub(super) struct Int4<Z>(pub(super) Z);

/// The same where all zero points are in the middle.
pub(super) const MIDDLE: Int4<()> = Int4(());

/// What to subtract.
pub(super) trait Subtrahends {
    fn at(&self, at: At) -> [__m256; 2];
}

impl Subtrahends for () {
    #[inline(always)]
    fn at(&self, at: At) -> [__m256; 2] {
        // SAFETY: see `one_row`.
        [unsafe { _mm256_set1_ps(MIDDLES[at.pair]) }; 2]
    }
}

impl Subtrahends for Zeros {
    #[inline(always)]
    fn at(&self, at: At) -> [__m256; 2] {
        let halves = self.0[at.pair][at.quarter].as_chunks::<8>().0;
        [load(&halves[0]), load(&halves[1])]
    }
}

impl<Z: Subtrahends> Widen for Int4<Z> {
    type Quarter = [u32; 16];
    type Words = [__m256i; 2];

    #[inline(always)]
    fn prepare(&self, words: &[u32; 16]) -> [__m256i; 2] {
        load_words(words)
    }

    #[inline(always)]
    fn widen<const ODD: bool, const RARE: bool>(
        &self,
        words: &[__m256i; 2],
        at: At,
    ) -> [__m256; 2] {
        let (mask, power) = (MASKS[at.pair], POWERS[at.pair]);
        let [low, high] = self.0.at(at);
        [number::<ODD>(words[0], mask, power, low), number::<ODD>(words[1], mask, power, high)]
    }
}

/// What `mask` takes of the lower halves of words, which have the even inputs, or of the upper
/// ones, in the mantissa of `power`, less `zeros`.
#[inline(always)]
fn number<const ODD: bool>(words: __m256i, mask: i32, power: i32, zeros: __m256) -> __m256 {
    // SAFETY: see `one_row`.
    unsafe {
        let words = if ODD { _mm256_srli_epi32::<16>(words) } else { words };
        let bits = _mm256_and_si256(words, _mm256_set1_epi32(mask));
        let bits = _mm256_or_si256(bits, _mm256_set1_epi32(power));
        _mm256_sub_ps(_mm256_castsi256_ps(bits), zeros)
    }
}

/// Floats of 4 bits: twice their value is an integer, which is looked up and goes on as those of
/// [`Int4`] do, by half. Zeros have no sign, which no sum that begins at zero notices.
pub(super) struct Float4;

/// Twice each float of 4 bits, plus 12.
const TWICE: [i8; 16] = {
    let mut twice = [0; 16];
    let mut index = 0;
    while index < 16 {
        twice[index] = (E2M1[index] * 2.0 + 12.0) as i8;
        index += 1;
    }
    twice
};

impl Widen for Float4 {
    type Quarter = [u32; 16];
    /// Bytes of the even pairs, then of the odd ones.
    type Words = [[__m256i; 2]; 2];

    #[inline(always)]
    fn prepare(&self, words: &[u32; 16]) -> [[__m256i; 2]; 2] {
        let [low, high] = load_words(words);
        // SAFETY: see `one_row`.
        let [low_odd, high_odd] =
            unsafe { [_mm256_srli_epi32::<4>(low), _mm256_srli_epi32::<4>(high)] };
        [[twice(low), twice(high)], [twice(low_odd), twice(high_odd)]]
    }

    #[inline(always)]
    fn widen<const ODD: bool, const RARE: bool>(
        &self,
        bytes: &[[__m256i; 2]; 2],
        at: At,
    ) -> [__m256; 2] {
        let byte = at.pair / 2;
        // Half of the power that has integers in that byte.
        let power = POWERS[2 * byte] - (1 << 23);
        // SAFETY: see `one_row`.
        let middle = unsafe { _mm256_set1_ps(f32::from_bits(power.cast_unsigned()) + 6.0) };
        let (mask, [low, high]) = (0x1f << (8 * byte), bytes[at.pair % 2]);
        [number::<ODD>(low, mask, power, middle), number::<ODD>(high, mask, power, middle)]
    }
}

/// Looks up the lower four bits of each byte.
#[inline(always)]
fn twice(words: __m256i) -> __m256i {
    // SAFETY: see `one_row`; the table has 16 bytes.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(TWICE.as_ptr().cast()));
        _mm256_shuffle_epi8(table, _mm256_and_si256(words, _mm256_set1_epi8(15)))
    }
}

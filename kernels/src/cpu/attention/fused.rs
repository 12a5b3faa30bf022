//! The products of attention by fused multiply-adds, for processors on which two of these are
//! faster than one `vdpbf16ps`, with the same bits: see [`gemm::fused`](super::super::gemm), which
//! checks both once before the first use.
//!
//! Both of attention's products have one form. Of each pair, four vectors of words are read that
//! lie at the same distances from one another, and each of several queries multiplies them by a
//! word of its own: for scores, the vectors are tokens of K; for weighted sums, dimensions of V,
//! block after block.
use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_maskz_loadu_ps,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};
use std::mem::MaybeUninit;

use super::super::gemm::{HIGH_HALF, SUBNORMALS_ARE_ZERO, add_row};

/// Fewer queries gain nothing: widening the words takes as long as their products.
pub(super) const LEAST: usize = 3;
/// Most queries whose sums fit into registers.
pub(super) const MOST: usize = 6;
/// Vectors of words of each pair.
pub(super) const WIDTH: usize = 4;
/// Maximum number of pairs of [`WideRows`].
pub(super) const PAIRS: usize = 512;
/// Pairs of weights at a time: widened, those of all queries stay in the L1 cache.
pub(super) const CHUNK: usize = 256;
/// Maximum number of blocks at a time.
pub(super) const BLOCKS: usize = CHUNK / 8;
/// A half row in f32, with another cache line so that the rows do not share all cache sets.
const HALF: usize = PAIRS + 16;

/// Words of several queries in f32: of each query the high halves of all pairs, then the low ones.
#[repr(C, align(64))]
pub(super) struct WideRows {
    halves: [[[MaybeUninit<f32>; HALF]; 2]; MOST],
    /// Pairs that are written, of so many queries.
    pairs: usize,
    queries: usize,
}

impl WideRows {
    pub(super) fn new() -> Self {
        let halves = [const { [[MaybeUninit::uninit(); HALF]; 2] }; MOST];
        Self { halves, pairs: 0, queries: 0 }
    }

    /// Holds these rows, of the same length, which is at most [`PAIRS`]; at most [`MOST`].
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn set<const M: usize>(&mut self, rows: &[&[u32]; M]) {
        let pairs = rows.first().map_or(0, |row| row.len());
        assert!(pairs <= PAIRS && M <= MOST, "{M} rows of {pairs} pairs");
        let high = _mm512_set1_epi32(HIGH_HALF.cast_signed());
        for (row, halves) in rows.iter().zip(&mut self.halves) {
            for (index, words) in row[..pairs].chunks(16).enumerate() {
                let lanes = ((1u32 << words.len()) - 1) as u16;
                // SAFETY: the lanes are those of the words.
                let words = unsafe { _mm512_maskz_loadu_ps(lanes, words.as_ptr().cast()) };
                let words = _mm512_castps_si512(words);
                let both = [_mm512_and_si512(words, high), _mm512_slli_epi32::<16>(words)];
                for (half, words) in halves.iter_mut().zip(both.map(|it| _mm512_castsi512_ps(it))) {
                    let to = half[index * 16..][..16].as_mut_ptr();
                    // SAFETY: there are 64 bytes.
                    unsafe { _mm512_storeu_ps(to.cast(), words) };
                }
            }
        }
        (self.pairs, self.queries) = (pairs, M);
    }
}

/// Where the words are that are multiplied.
pub(super) struct Words<'a> {
    /// The first vector of the first pair of each block.
    pub(super) blocks: &'a [*const u32],
    /// Distance, in bytes, of the other vectors of a pair from the first one.
    pub(super) others: [isize; WIDTH - 1],
    /// Distance, in bytes, of a pair from the next one of its block.
    pub(super) stride: usize,
    /// Pairs per block.
    pub(super) per_block: usize,
}

/// What the assembler code reads from memory, since there are few registers.
#[repr(C)]
struct Constants {
    mode_before: u32,
    mode: u32,
    high: u32,
    per_block: usize,
}

/// A function that adds the products of some queries. In one piece of assembler code, since nothing
/// else may be computed in its mode.
macro_rules! adds {
    ($name:ident, $sums:literal,
        $($first:literal $high:literal $low:literal $a:tt $b:tt $c:tt $d:tt)*) => {
        /// # Safety
        /// As for [`sums`]; and there is a block, with a pair.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn $name(sums: &mut [__m512; $sums], words: &Words<'_>, rows: &WideRows) {
            let mut constants = Constants {
                mode_before: 0,
                mode: SUBNORMALS_ARE_ZERO,
                high: HIGH_HALF,
                per_block: words.per_block,
            };
            // SAFETY: reads the vectors of all pairs of all blocks, and as many elements of each
            // half row (the caller's promise); restores the mode, in which it alone computes.
            unsafe {
                asm!(
                    "stmxcsr dword ptr [{constants}]",
                    "ldmxcsr dword ptr [{constants} + 4]",
                    "vpbroadcastd zmm29, dword ptr [{constants} + 8]",
                    "2:",
                    "mov {w}, qword ptr [{blocks}]",
                    "mov {n}, qword ptr [{constants} + 16]",
                    "3:",
                    "vpandd zmm24, zmm29, zmmword ptr [{w}]",
                    "vpandd zmm25, zmm29, zmmword ptr [{w} + {second}]",
                    "vpandd zmm26, zmm29, zmmword ptr [{w} + {third}]",
                    "vpandd zmm27, zmm29, zmmword ptr [{w} + {fourth}]",
                    $(add_row!($high, $a, $b, $c, $d),)*
                    "vpslld zmm24, zmmword ptr [{w}], 16",
                    "vpslld zmm25, zmmword ptr [{w} + {second}], 16",
                    "vpslld zmm26, zmmword ptr [{w} + {third}], 16",
                    "vpslld zmm27, zmmword ptr [{w} + {fourth}], 16",
                    $(add_row!($low, $a, $b, $c, $d),)*
                    "add {w}, {stride}",
                    "add {x}, 4",
                    "dec {n}",
                    "jnz 3b",
                    "add {blocks}, 8",
                    "dec {count}",
                    "jnz 2b",
                    "ldmxcsr dword ptr [{constants}]",
                    constants = in(reg) &raw mut constants,
                    blocks = inout(reg) words.blocks.as_ptr() => _,
                    count = inout(reg) words.blocks.len() => _,
                    second = in(reg) words.others[0],
                    third = in(reg) words.others[1],
                    fourth = in(reg) words.others[2],
                    stride = in(reg) words.stride,
                    x = inout(reg) rows.halves.as_ptr() => _,
                    w = out(reg) _,
                    n = out(reg) _,
                    $(
                        inout($a) sums[$first],
                        inout($b) sums[$first + 1],
                        inout($c) sums[$first + 2],
                        inout($d) sums[$first + 3],
                    )*
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
                    out("zmm28") _, out("zmm29") _,
                    options(nostack),
                );
            }
        }
    };
}

/// [`adds`] for several numbers of queries. Of each query: its first sum, where its high and low
/// halves are, in bytes, and its sums' registers.
macro_rules! all_adds {
    ([$($before:tt)*]) => {};
    ([$($before:tt)*] $name:ident $sums:literal ($($row:tt)*), $($rest:tt)*) => {
        adds! { $name, $sums, $($before)* $($row)* }
        all_adds! { [$($before)* $($row)*] $($rest)* }
    };
}

// What these offsets are written for.
const _: () = assert!(HALF * size_of::<f32>() == 2112);

all_adds! {
    [
        0 0 2112 "zmm0" "zmm1" "zmm2" "zmm3"
        4 4224 6336 "zmm4" "zmm5" "zmm6" "zmm7"
    ]
    add_3 12 (8 8448 10560 "zmm8" "zmm9" "zmm10" "zmm11"),
    add_4 16 (12 12672 14784 "zmm12" "zmm13" "zmm14" "zmm15"),
    add_5 20 (16 16896 19008 "zmm16" "zmm17" "zmm18" "zmm19"),
    add_6 24 (20 21120 23232 "zmm20" "zmm21" "zmm22" "zmm23"),
}

/// `sums[m][w] += rows[m] * words[w]` over the pairs of all blocks, in ascending order, for as many
/// queries as `rows` has: from [`LEAST`] to [`MOST`].
///
/// # Safety
/// In each block there are as many pairs, of [`WIDTH`] vectors each, at these distances.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
pub(super) unsafe fn sums<const M: usize, const W: usize>(
    before: &[[__m512; W]; M],
    words: &Words<'_>,
    rows: &WideRows,
) -> [[__m512; W]; M] {
    assert!((LEAST..=MOST).contains(&M) && W == WIDTH, "{M} queries, {W} vectors");
    let pairs = words.blocks.len() * words.per_block;
    assert!(M <= rows.queries && pairs <= rows.pairs, "{pairs} of {}", rows.pairs);
    let mut sums = [[_mm512_setzero_ps(); W]; M];
    sums.copy_from_slice(before);
    if pairs > 0 {
        macro_rules! of_rows {
            ($($add:ident),*) => {
                $(
                    if let Ok(sums) = sums.as_flattened_mut().try_into() {
                        // SAFETY: the caller's promise; and the rows have as many pairs.
                        unsafe { $add(sums, words, rows) };
                    }
                )*
            };
        }
        of_rows!(add_3, add_4, add_5, add_6);
    }
    sums
}

#[cfg(test)]
mod tests;

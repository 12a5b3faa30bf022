//! Sums of products by fused multiply-adds, with weights in bf16 or in f32.
use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_maskz_loadu_ps,
    _mm512_set1_epi32, _mm512_slli_epi32, _mm512_store_ps,
};
use std::mem::MaybeUninit;

use super::super::super::super::pack::PairRow;
use super::super::super::TILE_ROWS;
use super::super::super::vector::{load, store};
use super::super::Prefetch;

/// Pairs of inputs at a time: those of the rows (12 KiB in f32) stay in the L1 cache, and those of
/// [`WideWeights`] (128 KiB) in the L2 cache from tile to tile.
pub(super) const PAIRS: usize = 256;

/// Rows in f32: of each the high halves of all pairs, then the low halves.
#[repr(C, align(64))]
struct WideRows([[[MaybeUninit<f32>; PAIRS]; 2]; TILE_ROWS]);

/// Weights in f32, in place of `PairRow`s: of each pair those of the high halves, then those of the
/// low halves.
#[repr(C, align(64))]
pub(super) struct WideWeights {
    /// First, so that it is aligned.
    halves: [[[MaybeUninit<[f32; 16]>; 4]; 2]; PAIRS],
    /// Pairs that are written.
    pairs: usize,
}

impl WideWeights {
    pub(super) fn new() -> Self {
        Self { pairs: 0, halves: [const { [[MaybeUninit::uninit(); 4]; 2] }; PAIRS] }
    }

    /// Holds these weights, of at most `PAIRS` pairs.
    #[target_feature(enable = "avx512f")]
    pub(super) fn set(&mut self, weights: &[PairRow]) {
        self.pairs = 0;
        for (weights, [high, low]) in weights.iter().zip(&mut self.halves[..weights.len()]) {
            for (words, (high, low)) in weights.iter().zip(high.iter_mut().zip(low)) {
                let halves = halves(load(&words.map(f32::from_bits)));
                store(high.write([0.0; 16]), halves[0]);
                store(low.write([0.0; 16]), halves[1]);
            }
        }
        self.pairs = weights.len();
    }
}

/// The high and the low halves of words, in f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn halves(words: __m512) -> [__m512; 2] {
    let words = _mm512_castps_si512(words);
    let high = _mm512_and_si512(words, _mm512_set1_epi32(HIGH_HALF.cast_signed()));
    [_mm512_castsi512_ps(high), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))]
}

/// Widens at most `PAIRS` pairs of a row.
#[target_feature(enable = "avx512f")]
#[inline]
fn widen(row: &[u32], [high, low]: &mut [[MaybeUninit<f32>; PAIRS]; 2]) {
    let to = high.as_chunks_mut::<16>().0.iter_mut().zip(low.as_chunks_mut::<16>().0);
    for (words, (high, low)) in row.chunks(16).zip(to) {
        let lanes = ((1u32 << words.len()) - 1) as u16;
        // SAFETY: the lanes are those of the words.
        let halves = halves(unsafe { _mm512_maskz_loadu_ps(lanes, words.as_ptr().cast()) });
        // SAFETY: 64 bytes, aligned.
        unsafe { _mm512_store_ps(high.as_mut_ptr().cast(), halves[0]) };
        // SAFETY: as above.
        unsafe { _mm512_store_ps(low.as_mut_ptr().cast(), halves[1]) };
    }
}

/// No exception interrupts, rounding to nearest, subnormal results and operands are zero.
pub(crate) const SUBNORMALS_ARE_ZERO: u32 = 0x9FC0;

/// A word's high half.
pub(crate) const HIGH_HALF: u32 = 0xFFFF_0000;

/// Four sums of a row: `sums += x * weights`, where x is `at` bytes from the first row's.
macro_rules! add_row {
    ($at:expr, $a:tt, $b:tt, $c:tt, $d:tt) => {
        concat!(
            "vbroadcastss zmm28, dword ptr [{x} + ",
            $at,
            "]\nvfmadd231ps ",
            $a,
            ", zmm28, zmm24\nvfmadd231ps ",
            $b,
            ", zmm28, zmm25\nvfmadd231ps ",
            $c,
            ", zmm28, zmm26\nvfmadd231ps ",
            $d,
            ", zmm28, zmm27",
        )
    };
}
pub(crate) use add_row;

/// A function that adds the products of `pairs` pairs to the sums of some rows: `WIDE` ones of
/// `WideWeights` or those of `PairRow`s. In one piece of assembler code, since nothing else may be
/// computed in its mode.
macro_rules! adds {
    ($name:ident, $m:literal,
        $($row:literal $high:literal $low:literal $a:tt $b:tt $c:tt $d:tt)*) => {
        /// # Safety
        /// There must be as many pairs of weights, aligned to 64 bytes if `WIDE`, and of all these
        /// rows; at most `PAIRS`.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
        unsafe fn $name<const LINES: usize, const WIDE: bool>(
            sums: &mut [[__m512; 4]; $m],
            weights: *const u8,
            rows: &WideRows,
            pairs: usize,
            ahead: usize,
        ) {
            // What the code below is written for.
            const { assert!(PAIRS * size_of::<f32>() == 1024 && size_of::<PairRow>() == 256) };
            if pairs == 0 {
                return;
            }
            let (mode, mut mode_before) = (SUBNORMALS_ARE_ZERO, 0u32);
            // SAFETY: reads as many pairs of the weights and of each row of activations as there
            // are (the caller's promise); restores the mode, in which it alone computes.
            unsafe {
                asm!(
                    "stmxcsr dword ptr [{before}]",
                    "ldmxcsr dword ptr [{mode}]",
                    "vpbroadcastd zmm29, {mask:e}",
                    "2:",
                    ".if {lines} > 0",
                    "prefetcht0 byte ptr [{w} + {ahead}]",
                    ".endif",
                    ".if {lines} > 1",
                    "prefetcht0 byte ptr [{w} + {ahead} + 64]",
                    ".endif",
                    ".if {wide}",
                    "vmovaps zmm24, zmmword ptr [{w}]",
                    "vmovaps zmm25, zmmword ptr [{w} + 64]",
                    "vmovaps zmm26, zmmword ptr [{w} + 128]",
                    "vmovaps zmm27, zmmword ptr [{w} + 192]",
                    "add {w}, 256",
                    ".else",
                    "vpandd zmm24, zmm29, zmmword ptr [{w}]",
                    "vpandd zmm25, zmm29, zmmword ptr [{w} + 64]",
                    "vpandd zmm26, zmm29, zmmword ptr [{w} + 128]",
                    "vpandd zmm27, zmm29, zmmword ptr [{w} + 192]",
                    ".endif",
                    $(add_row!($high, $a, $b, $c, $d),)*
                    ".if {wide}",
                    "vmovaps zmm24, zmmword ptr [{w}]",
                    "vmovaps zmm25, zmmword ptr [{w} + 64]",
                    "vmovaps zmm26, zmmword ptr [{w} + 128]",
                    "vmovaps zmm27, zmmword ptr [{w} + 192]",
                    ".else",
                    "vpslld zmm24, zmmword ptr [{w}], 16",
                    "vpslld zmm25, zmmword ptr [{w} + 64], 16",
                    "vpslld zmm26, zmmword ptr [{w} + 128], 16",
                    "vpslld zmm27, zmmword ptr [{w} + 192], 16",
                    ".endif",
                    $(add_row!($low, $a, $b, $c, $d),)*
                    "add {w}, 256",
                    "add {x}, 4",
                    "dec {n}",
                    "jnz 2b",
                    "ldmxcsr dword ptr [{before}]",
                    w = inout(reg) weights => _,
                    x = inout(reg) rows.0.as_ptr() => _,
                    n = inout(reg) pairs => _,
                    ahead = in(reg) ahead,
                    before = in(reg) &raw mut mode_before,
                    mode = in(reg) &raw const mode,
                    mask = in(reg) HIGH_HALF,
                    lines = const LINES,
                    wide = const WIDE as usize,
                    $(
                        inout($a) sums[$row][0],
                        inout($b) sums[$row][1],
                        inout($c) sums[$row][2],
                        inout($d) sums[$row][3],
                    )*
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
                    out("zmm28") _, out("zmm29") _,
                    options(nostack),
                );
            }
        }
    };
}

/// [`adds`] for the first row, for the first two, and so on. Of each row: where its high and low
/// halves are, in bytes, and its sums' registers.
macro_rules! all_adds {
    ([$($before:tt)*]) => {};
    ([$($before:tt)*] $name:ident $m:literal ($($row:tt)*), $($rest:tt)*) => {
        adds! { $name, $m, $($before)* $($row)* }
        all_adds! { [$($before)* $($row)*] $($rest)* }
    };
}

all_adds! { []
    add_1 1 (0 0 1024 "zmm0" "zmm1" "zmm2" "zmm3"),
    add_2 2 (1 2048 3072 "zmm4" "zmm5" "zmm6" "zmm7"),
    add_3 3 (2 4096 5120 "zmm8" "zmm9" "zmm10" "zmm11"),
    add_4 4 (3 6144 7168 "zmm12" "zmm13" "zmm14" "zmm15"),
    add_5 5 (4 8192 9216 "zmm16" "zmm17" "zmm18" "zmm19"),
    add_6 6 (5 10240 11264 "zmm20" "zmm21" "zmm22" "zmm23"),
}

/// `sums[m] += rows[m] * weights`, `M` at most 6; prefetches at most two lines of a pair.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(in crate::cpu::gemm) fn add<const M: usize>(
    rows: &[&[u32]; M],
    weights: &[PairRow],
    sums: &mut [[__m512; 4]; M],
    ahead: Prefetch,
) {
    match ahead.lines {
        0 => add_fetching::<M, 0>(rows, weights, sums, ahead),
        1 => add_fetching::<M, 1>(rows, weights, sums, ahead),
        _ => add_fetching::<M, 2>(rows, weights, sums, ahead),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
fn add_fetching<const M: usize, const LINES: usize>(
    rows: &[&[u32]; M],
    weights: &[PairRow],
    sums: &mut [[__m512; 4]; M],
    Prefetch { line, distance, .. }: Prefetch,
) {
    let ahead = line * 64 + distance * size_of::<PairRow>();
    for (index, weights) in weights.chunks(PAIRS).enumerate() {
        let rows = rows.map(|row| &row[index * PAIRS..][..weights.len()]);
        let first = weights.as_ptr().cast();
        // SAFETY: there are as many pairs.
        unsafe { add_pairs::<M, LINES, false>(&rows, first, weights.len(), sums, ahead) };
    }
}

/// As [`add`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn add_wide<const M: usize>(
    rows: &[&[u32]; M],
    weights: &WideWeights,
    sums: &mut [[__m512; 4]; M],
) {
    let rows = rows.map(|row| &row[..weights.pairs]);
    let first = weights.halves.as_ptr().cast();
    // SAFETY: there are as many pairs.
    unsafe { add_pairs::<M, 0, true>(&rows, first, weights.pairs, sums, 0) };
}

/// As [`add`] for `pairs` pairs.
///
/// # Safety
/// As for `adds`: there must be as many pairs of weights, aligned if `WIDE`, and rows must be as
/// long; at most `PAIRS`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
unsafe fn add_pairs<const M: usize, const LINES: usize, const WIDE: bool>(
    rows: &[&[u32]; M],
    weights: *const u8,
    pairs: usize,
    sums: &mut [[__m512; 4]; M],
    ahead: usize,
) {
    const { assert!(M >= 1 && M <= TILE_ROWS) };
    let mut wide = WideRows([const { [[MaybeUninit::uninit(); PAIRS]; 2] }; TILE_ROWS]);
    for (row, wide) in rows.iter().zip(&mut wide.0) {
        widen(row, wide);
    }
    macro_rules! of_rows {
        ($($add:ident),*) => {
            $(
                if let Ok(sums) = (&mut sums[..]).try_into() {
                    // SAFETY: the caller's promise.
                    unsafe { $add::<LINES, WIDE>(sums, weights, &wide, pairs, ahead) };
                }
            )*
        };
    }
    of_rows!(add_1, add_2, add_3, add_4, add_5, add_6);
}

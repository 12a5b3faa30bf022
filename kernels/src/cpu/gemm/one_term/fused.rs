//! Products by fused multiply-adds, for processors on which two of these are faster than one
//! `vdpbf16ps`: Intel's take two cycles for that, and half a cycle for each of them.
//!
//! The bits are the same. `vdpbf16ps` adds the product of the high halves of a pair, then that of
//! the low halves, each with one rounding to nearest, and takes subnormal numbers as zero, whatever
//! the thread's mode is. So neither the number of rows, which decides what computes them, nor the
//! processor's speed changes a result. That is checked before the first use (`choice`).
//!
//! Weights of bf16 are widened to f32 by every tile (`add`), those of 8 bits are converted to bf16
//! before; for many tiles they are widened once, in memory.
use std::arch::x86_64::{__m512, _mm512_add_ps, _mm512_mul_ps, _mm512_setzero_ps};
use std::ops::Range;

use super::super::super::pack::{PairRow, PairRows};
use super::super::scaled::{Block, blocks};
use super::super::vector::{load, store};
use super::super::{
    Acc, BLOCK_PAIRS, FEW_TILES, Product, ROOM_PAIRS, SMALL_BLOCK, fp8, int8, num_tiles, tile_rows,
};
use super::{Prefetch, Sums, share};

mod add;
mod choice;

pub(in crate::cpu::gemm) use add::add;
pub(crate) use add::{HIGH_HALF, SUBNORMALS_ARE_ZERO, add_row};
#[cfg(test)]
pub(crate) use choice::has_same_bits;
pub(crate) use choice::is_used;

use add::WideWeights;

/// From this number of tiles on weights are widened in memory.
const WIDE_TILES: usize = 12;

impl Product<'_> {
    /// All rows, of several tiles, times a whole panel.
    pub(super) fn fused_tiles(&self, panel: usize, stride: usize, room: &mut [PairRow]) {
        let tiles = num_tiles(self.acts.rows);
        if tiles >= WIDE_TILES {
            return self.wide_tiles(panel, stride, room);
        }
        let most = match tiles {
            ..=FEW_TILES => SMALL_BLOCK,
            _ if self.weight.is_bytes() => ROOM_PAIRS,
            _ => BLOCK_PAIRS,
        };
        for block in blocks(&self.weight, most) {
            let weights = self.to_bf16(self.weight.panel(panel, block.pairs.clone()), room);
            for index in 0..tiles {
                let rows = tile_rows(self.acts.rows, index);
                // Conversion prefetches.
                let (line, lines) = match self.weight.is_bytes() {
                    true => (0, 0),
                    false => share(tiles, index),
                };
                let ahead = Prefetch { line, lines, distance: block.pairs.len() };
                let place = (rows.clone(), panel, stride);
                match rows.len() {
                    ..=3 => self.fused_tile::<3>(place, weights, &block, ahead),
                    4 => self.fused_tile::<4>(place, weights, &block, ahead),
                    5 => self.fused_tile::<5>(place, weights, &block, ahead),
                    6.. => self.fused_tile::<6>(place, weights, &block, ahead),
                }
            }
        }
    }

    /// All rows times a whole panel, whose weights are widened in memory: on the stack, which the
    /// callers should not pay for.
    #[inline(never)]
    fn wide_tiles(&self, panel: usize, stride: usize, room: &mut [PairRow]) {
        let mut wide = WideWeights::new();
        let most = if self.weight.is_bytes() { ROOM_PAIRS } else { add::PAIRS };
        let tiles = num_tiles(self.acts.rows);
        for block in blocks(&self.weight, most) {
            let weights = self.to_bf16(self.weight.panel(panel, block.pairs.clone()), room);
            // SAFETY: only an instruction set that this machine has lays out rows.
            unsafe { wide.set(weights) };
            for rows in (0..tiles).map(|index| tile_rows(self.acts.rows, index)) {
                let place = (rows.clone(), panel, stride);
                match rows.len() {
                    ..=5 => self.wide_tile::<5>(place, &wide, &block),
                    6.. => self.wide_tile::<6>(place, &wide, &block),
                }
            }
        }
    }

    /// Weights in bf16; those of 8 bits are converted in `room`.
    fn to_bf16<'a>(&self, weights: PairRows<'a>, room: &'a mut [PairRow]) -> &'a [PairRow] {
        match weights {
            PairRows::Bf16(weights) => weights,
            PairRows::Int8(weights) => int8::widen(self.isa, weights, room),
            PairRows::Fp8(weights) => fp8::widen(self.isa, weights, room),
        }
    }

    fn fused_tile<const M: usize>(
        &self,
        (rows, panel, stride): (Range<usize>, usize, usize),
        weights: &[PairRow],
        block: &Block,
        ahead: Prefetch,
    ) {
        let (acts, to) = (self.block_rows::<M>(rows.start, stride, block), self.sums(panel, block));
        // SAFETY: only an instruction set that this machine has lays out rows.
        unsafe { tile(&acts, weights, &mut self.whole_columns(rows.start, panel), to, ahead) };
        self.finish_rows(rows, panel, block);
    }

    fn wide_tile<const M: usize>(
        &self,
        (rows, panel, stride): (Range<usize>, usize, usize),
        weights: &WideWeights,
        block: &Block,
    ) {
        let (acts, to) = (self.block_rows::<M>(rows.start, stride, block), self.sums(panel, block));
        // SAFETY: as above.
        unsafe { wide_tile(&acts, weights, &mut self.whole_columns(rows.start, panel), to) };
        self.finish_rows(rows, panel, block);
    }
}

/// As [`super::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn tile<const M: usize>(
    rows: &[&[u32]; M],
    weights: &[PairRow],
    acc: &mut [&mut Acc; M],
    to: Sums<'_>,
    ahead: Prefetch,
) {
    let mut sums = load_sums(acc, to);
    add(rows, weights, &mut sums, ahead);
    store_sums(&sums, acc, to);
}

/// The same for weights in f32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn wide_tile<const M: usize>(
    rows: &[&[u32]; M],
    weights: &WideWeights,
    acc: &mut [&mut Acc; M],
    to: Sums<'_>,
) {
    let mut sums = load_sums(acc, to);
    add::add_wide(rows, weights, &mut sums);
    store_sums(&sums, acc, to);
}

/// Where sums begin. Not shared with dot products, which take longer if their sums leave the
/// function: 6 % for 6 rows.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_sums<const M: usize>(acc: &[&mut Acc; M], to: Sums<'_>) -> [[__m512; 4]; M] {
    let mut sums = [[_mm512_setzero_ps(); 4]; M];
    if !to.first && to.scales.is_none() {
        for (sums, acc) in sums.iter_mut().zip(acc.iter()) {
            for (sum, acc) in sums.iter_mut().zip(acc.iter()) {
                *sum = load(acc);
            }
        }
    }
    sums
}

/// Stores or adds sums as [`Sums`] says.
#[target_feature(enable = "avx512f")]
#[inline]
fn store_sums<const M: usize>(
    sums: &[[__m512; 4]; M],
    acc: &mut [&mut Acc; M],
    Sums { first, scales }: Sums<'_>,
) {
    let scales = scales.map(|scales| scales.as_chunks::<16>().0);
    for (sums, acc) in sums.iter().zip(acc) {
        for (i, (&sum, acc)) in sums.iter().zip(acc.iter_mut()).enumerate() {
            let Some(scales) = scales else {
                store(acc, sum);
                continue;
            };
            let before = if first { _mm512_setzero_ps() } else { load(acc) };
            store(acc, _mm512_add_ps(before, _mm512_mul_ps(sum, load(&scales[i]))));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::array::from_fn;
    use std::hint::black_box;

    use super::super::super::super::isa::Isa;
    use super::super::super::super::memory::{Disjoint, Scratch};
    use super::super::super::super::pack::{CpuMatrix, Format, PANEL};
    use super::super::super::super::precision::{Arithmetic, Precision};
    use super::super::super::layout::Layout;
    use super::super::super::{Output, prepare};
    use super::choice::{KINDS, has_same_bits, words};
    use super::*;
    use crate::backend::{DType, HostMatrix};
    use crate::pool::Pool;
    use crate::weights::{BlockScales, Groups, Packed, Packing, Scales};

    /// Elsewhere fused multiply-adds are not used. Intel's processors are known to give the same
    /// bits: there it is a fault if these do not.
    fn is_possible() -> bool {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let possible = Isa::Avx512Bf16.is_supported() && has_same_bits();
        let known = Isa::Avx512Bf16.is_supported() && info.contains("GenuineIntel");
        assert!(possible || !known, "other bits than those of dot products");
        possible
    }

    fn check<const M: usize>() {
        let mut random = words(M as u64);
        let lengths = [1, 15, 16, 100, add::PAIRS, add::PAIRS + 1, 3 * add::PAIRS - 5];
        for (kind, pairs) in KINDS.iter().flat_map(|kind| lengths.map(|pairs| (kind, pairs))) {
            let mut word = || kind(random()) | kind(random()) << 16;
            let weights: Vec<PairRow> =
                (0..pairs).map(|_| from_fn(|_| from_fn(|_| word()))).collect();
            let rows: [Vec<u32>; M] = from_fn(|_| (0..pairs + 3).map(|_| word()).collect());
            let rows = rows.each_ref().map(|row| &row[..]);
            let before: [Acc; M] =
                from_fn(|_| from_fn(|_| from_fn(|_| f32::from_bits(word() & 0xbfff_ffff))));
            let scales = &from_fn(|i| i as f32 + 0.3);
            for (first, scales) in
                [(true, None), (false, None), (true, Some(scales)), (false, Some(scales))]
            {
                let to = Sums { first, scales };
                let none = Prefetch { line: 0, lines: 0, distance: 0 };
                let (mut want, mut wide) = (before, before);
                // SAFETY: the machine has the instructions.
                unsafe {
                    let weights = PairRows::Bf16(&weights);
                    super::super::tile(&rows, weights, &mut [], &mut want.each_mut(), to, none);
                }
                for lines in 0..3 {
                    let ahead = Prefetch { lines, line: 1, distance: 7 };
                    let mut got = before;
                    // SAFETY: as above.
                    unsafe { tile(&rows, &weights, &mut got.each_mut(), to, ahead) };
                    assert_eq!(bits(&want), bits(&got), "{M} rows, {pairs} pairs");
                }
                if pairs <= add::PAIRS {
                    let mut widened = WideWeights::new();
                    // SAFETY: as above.
                    unsafe { widened.set(&weights) };
                    // SAFETY: as above.
                    unsafe { wide_tile(&rows, &widened, &mut wide.each_mut(), to) };
                    assert_eq!(bits(&want), bits(&wide), "{M} rows, {pairs} pairs");
                }
            }
        }
    }

    fn bits<const M: usize>(sums: &[Acc; M]) -> Vec<u32> {
        sums.as_flattened().as_flattened().iter().map(|sum| sum.to_bits()).collect()
    }

    #[test]
    fn the_bits_are_those_of_dot_products() {
        if !is_possible() {
            return;
        }
        check::<1>();
        check::<2>();
        check::<3>();
        check::<4>();
        check::<5>();
        check::<6>();
        // The thread's mode is as it was.
        assert!(black_box(f32::MIN_POSITIVE) / 2.0 > 0.0);
    }

    const OUT: usize = 2 * PANEL;

    /// Numbers between -1 and 1.
    fn value(i: usize) -> f32 {
        ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0
    }

    /// Two panels times `rows` rows, by dot products and by fused multiply-adds.
    fn check_panels(rows: usize, host: HostMatrix<'_>, format: Format) {
        let cols = host.cols;
        let isa = Isa::Avx512Bf16;
        let mut pool = Pool::new(1).unwrap();
        let mut scratch = Scratch::new("activations").unwrap();
        let input: Vec<f32> = (0..rows * cols).map(|i| value(i + 77)).collect();
        let arithmetic = Arithmetic { isa, precision: Precision::Bfloat16 };
        let source = |row: usize| &input[row * cols..][..cols];
        let acts = prepare(arithmetic, &mut pool, &mut scratch, rows, cols, &source).unwrap();
        let Layout::Rows { stride } = acts.layout else { panic!("{:?}", acts.layout) };
        let bias: Vec<f32> = (0..OUT).map(value).collect();
        let weight = CpuMatrix::pack(&mut pool, format, &[host]).unwrap();
        let [dots, fused] = [false, true].map(|is_fused| {
            let mut sums = vec![f32::NAN; rows * OUT];
            let data = Disjoint::new(&mut sums);
            let out = &Output { data, stride: OUT, first_row: 0, column: 0 };
            let (weight, bias) = (weight.panels(), Some(&bias[..]));
            let product = Product { isa, acts: &acts, weight, bias, out, first_panel: 0 };
            let room = &mut [[[0; 16]; 4]; ROOM_PAIRS];
            if weight.is_int4() {
                product.int4_one_term(0..2, stride, is_fused);
            } else {
                for panel in 0..2 {
                    match is_fused {
                        true => product.fused_tiles(panel, stride, room),
                        false => product.dot_tiles(panel, stride, room, true),
                    }
                }
            }
            sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(dots.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        assert_eq!(dots, fused, "{format:?}, {rows} rows of {cols}");
    }

    #[test]
    fn a_panel_has_the_same_bits_by_either_way() {
        if !is_possible() {
            return;
        }
        let shapes = [(7, 64), (13, 1027), (17, 2), (53, 1400), (66, 512), (67, 514), (96, 1027)];
        for (rows, cols) in shapes {
            let bf16: Vec<u8> = (0..OUT * cols)
                .flat_map(|i| ((value(i).to_bits() >> 16) as u16).to_le_bytes())
                .collect();
            let whole = HostMatrix {
                data: &bf16,
                dtype: DType::Bf16,
                rows: OUT,
                cols,
                col_start: 0,
                row_stride: cols,
                scales: None,
            };
            for format in [Format::Bf16, Format::Int8] {
                check_panels(rows, whole, format);
            }
            // No exponent of 15, and so no NaN.
            let fp8: Vec<u8> = (0..OUT * cols).map(|i| (i * 37 % 251) as u8 & 0xbf).collect();
            let width = cols.div_ceil(128);
            let scales: Vec<u8> = (0..width).flat_map(|i| (value(i) + 1.5).to_le_bytes()).collect();
            let blocks = BlockScales {
                data: &scales,
                dtype: DType::F32,
                block: (OUT, 128),
                row_stride: width,
                first_row: 0,
            };
            let (data, scales) = (&fp8[..], Some(Scales::Blocks(blocks)));
            let blocks = HostMatrix { data, dtype: DType::F8E4M3, scales, ..whole };
            assert!(matches!(Format::of(&[blocks]), Format::Fp8(_)));
            check_panels(rows, blocks, Format::of(&[blocks]));
        }
    }

    #[test]
    fn a_panel_of_4_bits_has_the_same_bits_by_either_way() {
        if !is_possible() {
            return;
        }
        // The last group is converted in parts.
        for ((group, cols), rows) in [(32, 96), (128, 1280), (2112, 2112)]
            .into_iter()
            .flat_map(|shape| [7, 13, 53, 97].map(|rows| (shape, rows)))
        {
            let words: Vec<u8> = (0..OUT * cols / 2).map(|i| (i * 37 % 251) as u8).collect();
            let scales: Vec<u8> =
                (0..OUT * cols / group).flat_map(|i| (value(i) + 1.5).to_le_bytes()).collect();
            let packed = Packed {
                packing: Packing::Compressed,
                bits: 4,
                rows: OUT,
                cols,
                words: &words,
                zeros: None,
                scales: &scales,
                scale_type: DType::F32,
                num_groups: cols / group,
                groups: Groups::Even(group),
                first_row: 0,
            };
            let host = HostMatrix {
                data: &[],
                dtype: DType::Packed,
                rows: OUT,
                cols,
                col_start: 0,
                row_stride: cols,
                scales: Some(Scales::Packed(packed)),
            };
            assert!(matches!(Format::of(&[host]), Format::Int4(_)));
            check_panels(rows, host, Format::of(&[host]));
        }
    }
}

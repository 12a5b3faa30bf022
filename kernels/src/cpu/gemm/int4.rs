//! Products with 4-bit weights. A group's integers minus their zero points, or its floats, are
//! exact in bf16. Their products are summed in f32 from zero, as for bf16 weights; then the sum
//! times the group's scale is added to the output, group by group in ascending order. That product
//! and that addition are rounded separately on all instruction sets. So a row gets the same bits
//! alone and in a batch.
//!
//! - `blocks`: which groups are converted together
//! - `avx512`, `avx2`: conversion to bf16
//! - `mantissa`: integers that become floats in registers, by AVX2 and AVX-512
//! - `one_term`: products of activations of one bf16 term, `tile` their inner loops
use std::ops::Range;

use super::super::isa::{Isa, multiversion};
use super::super::pack::{Int4Group, Int4Row, MIDDLE, PANEL, PairRow, PairRows};
use super::layout::Layout;
use super::scaled::add_scaled;
use super::{Acc, ConvertedWeights, Product, TILE_ROWS, num_tiles, tile_rows, with_rows};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod blocks;
#[cfg(target_arch = "x86_64")]
pub(super) mod mantissa;
#[cfg(target_arch = "x86_64")]
mod one_term;
#[cfg(target_arch = "x86_64")]
mod tile;

/// Pairs converted to bf16 at a time: 16 KiB, which stay in the L1 cache for all tiles of a block.
const ROOM: usize = 64;
/// Tiles whose group sums are kept side by side (12 KiB).
const BLOCK_TILES: usize = 8;

/// The group sums of each row of a tile.
type Sums = [Acc; TILE_ROWS];

/// The sums of a block of tiles, aligned as [`ConvertedWeights`] is.
#[repr(C, align(64))]
struct BlockSums([Sums; BLOCK_TILES]);

impl Product<'_> {
    /// As [`Product::panels`], for 4-bit weights.
    pub(super) fn int4_panels(&self, range: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if let Layout::Rows { stride } = self.acts.layout {
            return self.int4_one_term(range, stride, super::one_term::fused::is_used());
        }
        #[cfg(target_arch = "x86_64")]
        if super::widens_in_registers(self.isa, self.acts.rows) {
            return with_rows!(self.acts.rows, M => self.int4_in_registers::<M>(range));
        }
        let mut room = ConvertedWeights::<ROOM>::new();
        let mut sums = BlockSums([[[[0.0; 16]; 4]; TILE_ROWS]; BLOCK_TILES]);
        for panel in range {
            self.int4_tiles(panel, &mut room.0, &mut sums.0);
        }
    }

    /// All rows, a single tile, times whole panels.
    #[cfg(target_arch = "x86_64")]
    fn int4_in_registers<const M: usize>(&self, range: Range<usize>) {
        let acts = self.acts.words.as_chunks::<M>().0.as_chunks::<2>().0;
        for panel in range {
            let Some(weight) = self.weight.int4_panel(panel) else { return };
            for index in 0..weight.num_groups() {
                let group = weight.group(index);
                let acts = &acts[group.first_pair..][..group.pairs];
                let mut sums = [[[0.0; 16]; 4]; M];
                super::int4_tile(self.isa, acts, &group, &mut sums);
                for (row, sums) in sums.iter().enumerate() {
                    let out = self.columns(row, panel);
                    add_scaled(self.isa, sums, group.scales, out, index == 0);
                }
            }
            for row in 0..M {
                self.finish(panel, self.columns(row, panel));
            }
        }
    }

    /// All rows times one panel, a block of tiles at a time.
    fn int4_tiles(&self, panel: usize, room: &mut [PairRow; ROOM], sums: &mut [Sums; BLOCK_TILES]) {
        let Some(weight) = self.weight.int4_panel(panel) else { return };
        let tiles = num_tiles(self.acts.rows);
        for first in (0..tiles).step_by(BLOCK_TILES) {
            let block = first..(first + BLOCK_TILES).min(tiles);
            for index in 0..weight.num_groups() {
                let group = weight.group(index);
                for start in (0..group.pairs).step_by(ROOM) {
                    let pairs = start..(start + ROOM).min(group.pairs);
                    widen(self.isa, &group, pairs.clone(), room);
                    let weights = &room[..pairs.len()];
                    let pairs = group.first_pair + pairs.start..group.first_pair + pairs.end;
                    for (index, sums) in block.clone().zip(&mut *sums) {
                        let rows = tile_rows(self.acts.rows, index);
                        self.int4_tile(rows, pairs.clone(), weights, sums, start == 0);
                    }
                }
                for (tile, sums) in block.clone().zip(&*sums) {
                    for (row, sums) in tile_rows(self.acts.rows, tile).zip(sums) {
                        add_scaled(
                            self.isa,
                            sums,
                            group.scales,
                            self.columns(row, panel),
                            index == 0,
                        );
                    }
                }
            }
            for row in block.flat_map(|tile| tile_rows(self.acts.rows, tile)) {
                self.finish(panel, self.columns(row, panel));
            }
        }
    }

    fn int4_tile(
        &self,
        rows: Range<usize>,
        pairs: Range<usize>,
        weights: &[PairRow],
        sums: &mut Sums,
        first: bool,
    ) {
        with_rows!(rows.len(), M => self.int4_sums::<M>(rows, pairs, weights, sums, first));
    }

    /// `sums (+)= rows weights^T` over some pairs; overwrites `sums` if `first`.
    fn int4_sums<const M: usize>(
        &self,
        rows: Range<usize>,
        pairs: Range<usize>,
        weights: &[PairRow],
        sums: &mut Sums,
        first: bool,
    ) {
        let Some(sums) = sums.first_chunk_mut::<M>() else { return };
        let all_pairs = self.weight.num_pairs();
        let words = &self.acts.words[rows.start * all_pairs * 2..rows.end * all_pairs * 2];
        let acts = &words.as_chunks::<M>().0.as_chunks::<2>().0[pairs];
        if first {
            *sums = [[[0.0; 16]; 4]; M];
        }
        super::tile(self.isa, acts, PairRows::Bf16(weights), sums);
    }
}

/// Converts the pairs `range` of a group to bf16; `range` begins at a multiple of 4.
fn widen(isa: Isa, group: &Int4Group<'_>, range: Range<usize>, room: &mut [PairRow; ROOM]) {
    let rows = &group.rows[range.start / 4..range.end.div_ceil(4)];
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        Isa::Avx512Bf16 | Isa::Avx512 => unsafe { avx512::widen(rows, group, room) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2Fma if group.zeros.is_none() => unsafe {
            avx2::widen(rows, group.is_float, room);
        },
        _ if group.is_float => widen_floats(rows, room),
        _ => widen_rows(isa, rows, group.zeros, room),
    }
}

multiversion! {
    /// Converts `rows` (four pairs each) minus their zero points; `room` is large enough.
    fn widen_rows(rows: &[Int4Row], zeros: Option<&[i8; PANEL]>, room: &mut [PairRow; ROOM]) = widen_body
}

#[inline(always)]
fn widen_body<const FMA: bool>(
    rows: &[Int4Row],
    zeros: Option<&[i8; PANEL]>,
    room: &mut [PairRow; ROOM],
) {
    let zeros = zeros.copied().unwrap_or([MIDDLE; PANEL]).map(i32::from);
    for (row, out) in rows.iter().zip(room.as_chunks_mut::<4>().0) {
        for (pair, out) in out.iter_mut().enumerate() {
            let all = out.as_flattened_mut().iter_mut().zip(row.as_flattened()).zip(&zeros);
            for ((to, word), zero) in all {
                let word = word >> (4 * pair);
                let even = (word & 15).cast_signed() - zero;
                let odd = (word >> 16 & 15).cast_signed() - zero;
                // The upper half of an f32 holds such an integer exactly.
                *to = (even as f32).to_bits() >> 16 | (odd as f32).to_bits();
            }
        }
    }
}

/// Converts `rows` of floats (four pairs each); `room` is large enough.
fn widen_floats(rows: &[Int4Row], room: &mut [PairRow; ROOM]) {
    // Twice the value, which is an integer: not all instruction sets can look up sixteen values.
    let worth = |bits: u32| {
        let (exponent, mantissa) = (bits >> 1 & 3, bits & 1);
        let normal = (2 | mantissa) << exponent >> 1;
        let twice = if exponent == 0 { mantissa } else { normal } as f32;
        (twice * 0.5).to_bits() | (bits & 8) << 28
    };
    for (row, out) in rows.iter().zip(room.as_chunks_mut::<4>().0) {
        for (pair, out) in out.iter_mut().enumerate() {
            for (to, word) in out.as_flattened_mut().iter_mut().zip(row.as_flattened()) {
                let word = word >> (4 * pair);
                *to = worth(word & 15) >> 16 | worth(word >> 16 & 15);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::E2M1;

    #[test]
    fn every_float_is_exact_in_any_place() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            // Each of the 64 outputs gets different floats.
            let code = |output: usize, place: usize| (output * 5 + place * 3) % 16;
            let mut row = [[0u32; 16]; 4];
            for (output, word) in row.as_flattened_mut().iter_mut().enumerate() {
                for pair in 0..4 {
                    *word |= (code(output, 2 * pair) << (4 * pair)) as u32;
                    *word |= (code(output, 2 * pair + 1) << (4 * pair + 16)) as u32;
                }
            }
            let rows = [row, row];
            let group = Int4Group {
                rows: &rows,
                first_pair: 0,
                pairs: 7,
                scales: &[1.0; PANEL],
                zeros: None,
                is_float: true,
            };
            let mut room = [[[u32::MAX; 16]; 4]; ROOM];
            widen(isa, &group, 0..7, &mut room);
            for (pair, words) in room[..7].iter().enumerate() {
                for (output, word) in words.as_flattened().iter().enumerate() {
                    let want = [0, 1].map(|half| E2M1[code(output, 2 * (pair % 4) + half)]);
                    let got = [word << 16, word & 0xFFFF_0000];
                    // Zeros keep their signs.
                    assert_eq!(got, want.map(f32::to_bits), "{isa} {pair} {output}");
                }
            }
        }
    }

    #[test]
    fn every_integer_less_every_zero_is_exact_in_any_place() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            for zero in 0..16i8 {
                // Each of the 64 outputs gets different integers.
                let integer = |output: usize, place: usize| ((output * 5 + place * 3) % 16) as u32;
                let mut row = [[0u32; 16]; 4];
                for (output, word) in row.as_flattened_mut().iter_mut().enumerate() {
                    for pair in 0..4 {
                        *word |= integer(output, 2 * pair) << (4 * pair);
                        *word |= integer(output, 2 * pair + 1) << (4 * pair + 16);
                    }
                }
                let zeros: [i8; PANEL] = std::array::from_fn(|i| (zero + i as i8) % 16);
                for zeros in [Some(&zeros), None] {
                    let rows = [row, row, row];
                    let group = Int4Group {
                        rows: &rows,
                        first_pair: 0,
                        pairs: 11,
                        scales: &[1.0; PANEL],
                        zeros,
                        is_float: false,
                    };
                    let mut room = [[[u32::MAX; 16]; 4]; ROOM];
                    widen(isa, &group, 4..11, &mut room);
                    for (pair, words) in room[..7].iter().enumerate() {
                        for (output, word) in words.as_flattened().iter().enumerate() {
                            let zero = zeros.map_or(8.0, |zeros| f32::from(zeros[output]));
                            let want = [0, 1]
                                .map(|half| integer(output, 2 * (pair % 4) + half) as f32 - zero);
                            let got = [word << 16, word & 0xFFFF_0000].map(f32::from_bits);
                            assert_eq!(got, want, "{isa} {pair} {output}");
                        }
                    }
                    assert_eq!(room[8], [[u32::MAX; 16]; 4], "{isa}");
                }
            }
        }
    }
}

//! Products of activations of one bf16 term, row by row, with 4-bit weights, by AVX-512 with bf16
//! dot products.
//!
//! A tile that is alone converts weights in registers. If there are several tiles, one of them
//! leaves the converted weights in scratch memory for the others. All of them scale a group's sums
//! from registers into the outputs.
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::super::pack::{Int4Panel, PANEL};
use super::super::{
    Acc, BLOCK_PAIRS, FEW_TILES, Product, SMALL_BLOCK, TILE_ROWS, num_tiles, tile_rows,
};
use super::Sums;
use super::blocks::{Block, Piece};
use super::tile::{self, FourPairs, converted, packed};

/// Maximum number of rows of words, four pairs each, that are converted at a time for several
/// tiles.
const ROOM: usize = BLOCK_PAIRS / 4;
/// The same for few tiles, where memory is the bottleneck: converted weights stay in the L1 cache.
const SMALL_ROOM: usize = SMALL_BLOCK / 4;
/// Number of tiles whose sums of a group that is converted in parts are kept side by side (12 KiB).
const CUT_TILES: usize = 8;

/// Converted weights. Aligned, so that no vector lies in two cache lines; not cleared, which would
/// take time for every panel.
#[repr(C, align(64))]
struct ConvertedWeights([FourPairs; ROOM]);

/// Sums of a group that is converted in parts.
#[repr(C, align(64))]
struct CutSums([Sums; CUT_TILES]);

/// Sums of a tile with fewer outputs than a panel.
#[repr(C, align(64))]
struct TileSums<const M: usize>([Acc; M]);

/// Source of a tile's weights.
#[derive(Clone, Copy)]
enum Source {
    /// Converted by this tile.
    Packed,
    /// Converted by this tile, and left in the room.
    Kept,
    /// Taken from the room.
    Room,
    /// The same, by fused multiply-adds.
    Fused,
}

/// An inner loop: `packed`, `converted` or `fused`.
type Multiply<const M: usize> =
    unsafe fn(&[&[u32]; M], &Piece<'_>, &mut [FourPairs], tile::Sums<'_, '_, M>);

struct Tile<'a> {
    stride: usize,
    panel: usize,
    /// All of the panel's 64 outputs exist.
    is_whole: bool,
    block: Block<'a>,
    source: Source,
}

impl Product<'_> {
    /// As [`Product::panels`], for 4-bit weights and activations of one term; several tiles by
    /// fused multiply-adds if `is_fused`.
    pub(in crate::cpu::gemm) fn int4_one_term(
        &self,
        range: Range<usize>,
        stride: usize,
        is_fused: bool,
    ) {
        let rest = if is_fused { Source::Fused } else { Source::Room };
        let mut room = ConvertedWeights([const { [const { MaybeUninit::uninit() }; 4] }; ROOM]);
        let tiles = num_tiles(self.acts.rows);
        for index in range {
            let Some(panel) = self.weight.int4_panel(index) else { return };
            let lens = (0..panel.num_groups()).map(|group| panel.group(group).rows.len());
            let longest = lens.max().unwrap_or(0);
            let most = match tiles {
                1 => usize::MAX,
                2..=FEW_TILES => longest.clamp(SMALL_ROOM, ROOM),
                _ => ROOM,
            };
            if longest > most {
                let mut sums = CutSums([[[[0.0; 16]; 4]; TILE_ROWS]; CUT_TILES]);
                for first in (0..tiles).step_by(CUT_TILES) {
                    let tiles = first..(first + CUT_TILES).min(tiles);
                    self.int4_blocks(
                        (index, panel),
                        most,
                        (stride, rest),
                        tiles,
                        &mut room,
                        &mut sums.0,
                    );
                }
            } else {
                self.int4_blocks(
                    (index, panel),
                    most,
                    (stride, rest),
                    0..tiles,
                    &mut room,
                    &mut [],
                );
            }
        }
    }

    /// Some tiles times a panel. `sums` has room for all of them, or is empty if no group is longer
    /// than `most` rows of words. `rest` is the source of all tiles but the one that converts.
    fn int4_blocks(
        &self,
        (index, panel): (usize, Int4Panel<'_>),
        most: usize,
        (stride, rest): (usize, Source),
        tiles: Range<usize>,
        room: &mut ConvertedWeights,
        sums: &mut [Sums],
    ) {
        let rows = self.acts.rows;
        let is_whole = (index + 1) * PANEL <= self.weight.rows();
        for block in Block::all(panel, most) {
            let mut tile = Tile { stride, panel: index, is_whole, block, source: Source::Kept };
            if num_tiles(rows) == 1 {
                tile.source = Source::Packed;
            }
            // The last tile, which is never larger than others, converts: that takes registers.
            for (i, index) in tiles.clone().enumerate().rev() {
                let (rows, sums) = (tile_rows(rows, index), sums.get_mut(i));
                match rows.len() {
                    ..=1 => self.block_tile::<1>(rows, &tile, room, sums),
                    2 => self.block_tile::<2>(rows, &tile, room, sums),
                    3 => self.block_tile::<3>(rows, &tile, room, sums),
                    4 => self.block_tile::<4>(rows, &tile, room, sums),
                    5 => self.block_tile::<5>(rows, &tile, room, sums),
                    6.. => self.block_tile::<6>(rows, &tile, room, sums),
                }
                tile.source = rest;
            }
        }
    }

    fn block_tile<const M: usize>(
        &self,
        rows: Range<usize>,
        tile: &Tile<'_>,
        room: &mut ConvertedWeights,
        sums: Option<&mut Sums>,
    ) {
        let Tile { stride, panel, is_whole, ref block, source } = *tile;
        let mut cut = sums.and_then(|sums| sums.first_chunk_mut());
        let multiply: Multiply<M> = match (source, block.panel.is_symmetric()) {
            (Source::Packed, true) => packed::<M, true, false>,
            (Source::Packed, false) => packed::<M, false, false>,
            (Source::Kept, true) => packed::<M, true, true>,
            (Source::Kept, false) => packed::<M, false, true>,
            (Source::Room, _) => converted::<M>,
            (Source::Fused, _) => tile::fused::<M>,
        };
        let mut run = |out: &mut [&mut Acc; M]| {
            let mut room = &mut room.0[..];
            for piece in block.pieces() {
                let piece = &piece;
                let len = piece.group.rows.len();
                let first = 4 * piece.first_row;
                let acts: [&[u32]; M] = std::array::from_fn(|i| {
                    &self.acts.words[(rows.start + i) * stride + first..][..4 * len]
                });
                let sums = tile::Sums { cut: cut.as_deref_mut(), out: &mut *out };
                let (own, others) = match source {
                    Source::Packed => (&mut [][..], room),
                    Source::Kept | Source::Room | Source::Fused => room.split_at_mut(len),
                };
                room = others;
                // SAFETY: only an instruction set that this machine has lays out rows. What reads
                // the room does so after another tile of the same block has left its weights there.
                unsafe { multiply(&acts, piece, own, sums) };
            }
        };
        let is_last = block.ends_panel();
        if !is_whole {
            let mut own = TileSums([[[0.0; 16]; 4]; M]);
            if !block.begins_panel() {
                for (row, own) in rows.clone().zip(&mut own.0) {
                    let from = self.columns(row, panel);
                    own.as_flattened_mut()[..from.len()].copy_from_slice(from);
                }
            }
            run(&mut own.0.each_mut());
            for (row, own) in rows.zip(&own.0) {
                self.store(row, panel, own, is_last);
            }
            return;
        }
        run(&mut std::array::from_fn(|i| {
            let columns = self.columns(rows.start + i, panel);
            &mut columns.as_chunks_mut().0.as_chunks_mut().0[0]
        }));
        if is_last && self.bias.is_some() {
            for row in rows {
                self.finish(panel, self.columns(row, panel));
            }
        }
    }
}

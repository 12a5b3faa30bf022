//! Products of activations of one bf16 term, row by row, with weights of 8 and 16 bits: tiles, and
//! what they prefetch.
use std::ops::Range;

use super::super::super::pack::{PANEL, PairRow, PairRows};
use super::super::scaled::{Block, blocks};
use super::super::{
    Acc, BLOCK_PAIRS, FEW_TILES, Product, ROOM_PAIRS, SMALL_BLOCK, WIDE, num_tiles, tile_rows,
};
use super::{Prefetch, Sums, fused, share, wide};

/// Prefetch distance for the weights of a single tile, in pairs.
const AHEAD: usize = 16;

/// A tile of activations of one bf16 term.
struct OneTermTile<'a> {
    stride: usize,
    weights: PairRows<'a>,
    block: Block,
    panel: usize,
    /// All of the panel's 64 outputs exist.
    is_whole: bool,
    /// Index among the `tiles` tiles.
    index: usize,
    tiles: usize,
}

impl Product<'_> {
    /// As [`Product::panels`], for activations of one bf16 term.
    pub(in crate::cpu::gemm) fn one_term_panels(
        &self,
        range: Range<usize>,
        stride: usize,
        room: &mut [PairRow],
    ) {
        let pairs = self.weight.num_pairs();
        if self.acts.rows == 1 {
            let row = &self.acts.words[..pairs];
            let (wide, rest) = (range.len() / WIDE, range.len() % WIDE);
            for group in 0..wide {
                self.one_term_row::<WIDE>(row, range.start + group * WIDE);
            }
            for panel in range.end - rest..range.end {
                self.one_term_row::<1>(row, panel);
            }
            return;
        }
        for panel in range {
            self.one_term_tiles(panel, stride, room);
        }
    }

    fn one_term_row<const P: usize>(&self, row: &[u32], first: usize) {
        for block in blocks(&self.weight, usize::MAX) {
            let panels: [PairRows<'_>; P] =
                std::array::from_fn(|i| self.weight.panel(first + i, block.pairs.clone()));
            let mut acc = [[[0.0; 16]; 4]; P];
            // SAFETY: only an instruction set that this machine has lays out rows.
            unsafe { wide(&row[block.pairs.clone()], &panels, &mut acc) };
            for (i, acc) in acc.iter().enumerate() {
                self.store_block(0, first + i, acc, &block);
            }
        }
    }

    fn one_term_tiles(&self, panel: usize, stride: usize, room: &mut [PairRow]) {
        let is_whole = (panel + 1) * PANEL <= self.weight.rows();
        if is_whole && num_tiles(self.acts.rows) > 1 && fused::is_used() {
            return self.fused_tiles(panel, stride, room);
        }
        self.dot_tiles(panel, stride, room, is_whole);
    }

    /// A panel by `vdpbf16ps`.
    pub(super) fn dot_tiles(
        &self,
        panel: usize,
        stride: usize,
        room: &mut [PairRow],
        is_whole: bool,
    ) {
        let pairs = self.weight.num_pairs();
        let tiles = num_tiles(self.acts.rows);
        let most = match tiles {
            _ if !is_whole => pairs,
            1 => pairs,
            2..=FEW_TILES => SMALL_BLOCK,
            _ if self.weight.is_bytes() => ROOM_PAIRS,
            _ => BLOCK_PAIRS,
        };
        for block in blocks(&self.weight, most) {
            let packed = self.weight.panel(panel, block.pairs.clone());
            for index in 0..tiles {
                let rows = tile_rows(self.acts.rows, index);
                // The first tile leaves the weights that it converts to bf16 for the others.
                let (weights, room) = match packed {
                    PairRows::Bf16(_) => (packed, &mut *room),
                    _ if tiles == 1 || !is_whole => (packed, &mut [][..]),
                    _ if index > 0 => (PairRows::Bf16(&room[..block.pairs.len()]), &mut [][..]),
                    _ => (packed, &mut *room),
                };
                let block = block.clone();
                let tile = OneTermTile { stride, weights, block, panel, is_whole, index, tiles };
                match rows.len() {
                    1 => self.one_term_tile::<1>(rows, &tile, room),
                    2 => self.one_term_tile::<2>(rows, &tile, room),
                    3 => self.one_term_tile::<3>(rows, &tile, room),
                    4 => self.one_term_tile::<4>(rows, &tile, room),
                    5 => self.one_term_tile::<5>(rows, &tile, room),
                    _ => self.one_term_tile::<6>(rows, &tile, room),
                }
            }
        }
    }

    fn one_term_tile<const M: usize>(
        &self,
        rows: Range<usize>,
        tile: &OneTermTile<'_>,
        room: &mut [PairRow],
    ) {
        let OneTermTile { stride, weights, ref block, panel, is_whole, index, tiles } = *tile;
        let acts: [&[u32]; M] = self.block_rows(rows.start, stride, block);
        let (line, lines) = match (tiles, index) {
            (1, _) => (0, 4),
            (_, 0) if weights.bf16().is_none() => (0, 2),
            // The first tile converted the weights: there is nothing to prefetch.
            _ if self.weight.is_bytes() => (0, 0),
            _ => share(tiles, index),
        };
        let distance = if tiles == 1 { AHEAD } else { block.pairs.len() };
        let ahead = Prefetch { line, lines, distance };
        let mut run = |acc: &mut [&mut Acc; M], sums: Sums<'_>| {
            // SAFETY: only an instruction set that this machine has lays out rows.
            unsafe { super::tile(&acts, weights, room, acc, sums, ahead) }
        };
        if !is_whole {
            let mut sums = [[[0.0; 16]; 4]; M];
            run(&mut sums.each_mut(), Sums { first: true, scales: None });
            for (row, sums) in rows.zip(&sums) {
                self.store_block(row, panel, sums, block);
            }
            return;
        }
        run(&mut self.whole_columns(rows.start, panel), self.sums(panel, block));
        self.finish_rows(rows, panel, block);
    }

    /// A block's activations in rows from `first` on.
    pub(super) fn block_rows<const M: usize>(
        &self,
        first: usize,
        stride: usize,
        block: &Block,
    ) -> [&[u32]; M] {
        std::array::from_fn(|i| &self.acts.words[(first + i) * stride..][block.pairs.clone()])
    }

    /// A panel's outputs in rows from `first` on; the panel is whole.
    #[allow(clippy::mut_from_ref, reason = "see `columns`")]
    pub(super) fn whole_columns<const M: usize>(
        &self,
        first: usize,
        panel: usize,
    ) -> [&mut Acc; M] {
        std::array::from_fn(|i| {
            let columns = self.columns(first + i, panel);
            &mut columns.as_chunks_mut().0.as_chunks_mut().0[0]
        })
    }

    /// What becomes of a block's sums.
    pub(super) fn sums(&self, panel: usize, block: &Block) -> Sums<'_> {
        let scales = block.group.and_then(|group| self.weight.group_scales(panel, group));
        Sums { first: block.pairs.start == 0, scales }
    }

    /// Turns a panel's sums into results after its last block.
    pub(super) fn finish_rows(&self, rows: Range<usize>, panel: usize, block: &Block) {
        let is_last = block.pairs.end == self.weight.num_pairs();
        if is_last && (self.bias.is_some() || self.weight.scales().is_some()) {
            for row in rows {
                self.finish(panel, self.columns(row, panel));
            }
        }
    }
}

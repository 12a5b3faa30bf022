//! PURE: a step's inputs in the layout of the kernels: one block of words, uploaded in one copy.
//!
//! The offsets of the arrays depend only on their capacities, with the block tables last, so a
//! graph finds each array at the same place in all steps of its bucket. Only the used part of the
//! block tables is copied; the other arrays are copied in full.
use super::parts::{self, Splits, Windows, least_split};
use super::sample_lists::PARAMS;
use crate::backend::{Batch, SeqRows};
use crate::error::KernelError;

/// Words of `TuttiSeq`.
const SEQ: usize = 5;
/// Words of `TuttiTile`.
const TILE: usize = 2;
/// Queries per tile: `TUTTI_PREFILL_QUERIES`.
const TILE_QUERIES: usize = 64;

/// Maximum number of items of each kind in a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Capacity {
    /// Rows (tokens).
    pub rows: usize,
    /// Sequences.
    pub seqs: usize,
    /// Tiles of prefill attention.
    pub tiles: usize,
    /// Parts that decode attention splits sequences of one row into; every window has room for as
    /// many as the window with the most.
    pub parts: usize,
    /// Rows of logits.
    pub samples: usize,
}

/// How attention's queries are cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionTiling {
    /// Query heads that share a KV head.
    pub group: usize,
    /// Sequences of one row are tiles as well, and none is an item. A row then gets the same bits
    /// whether it belongs to a prompt or to a sampled token.
    pub all_tiles: bool,
    /// Maximum number of parts of a sequence: [`parts::most_splits`].
    pub splits: u32,
    /// Sliding windows of the layers.
    pub windows: Windows,
}

impl AttentionTiling {
    /// For a step without attention.
    pub const NONE: Self = Self { group: 1, all_tiles: false, splits: 1, windows: Windows::ALL };

    /// Whether a sequence is an item, that is, decoded with its context split into parts.
    fn is_item(self, seq: &SeqRows) -> bool {
        seq.num_rows == 1 && !self.all_tiles
    }

    /// Number of tiles of a sequence that is not an item.
    fn tiles_of(self, seq: &SeqRows) -> usize {
        self.tiles_of_rows(seq.num_rows as usize)
    }

    fn tiles_of_rows(self, rows: usize) -> usize {
        (rows * self.group).div_ceil(TILE_QUERIES)
    }

    /// Number of items and of tiles for `rows` sequences of one row each.
    #[must_use]
    pub fn of_single_rows(self, rows: usize) -> (usize, usize) {
        if self.all_tiles { (0, rows * self.tiles_of_rows(1)) } else { (rows, 0) }
    }

    /// Number of items in a batch.
    #[must_use]
    pub fn items(self, batch: &Batch<'_>) -> usize {
        self.all_items(batch).count()
    }

    fn all_items<'a>(self, batch: &Batch<'a>) -> impl Iterator<Item = &'a SeqRows> {
        batch.seqs.iter().filter(move |seq| self.is_item(seq))
    }

    /// Number of parts of a batch's items, counted as in [`Capacity::parts`].
    fn parts(self, batch: &Batch<'_>) -> usize {
        let limits = (self.splits, least_split(self.items(batch)));
        let of = |window| parts::count(self.all_items(batch), window, limits);
        self.windows.count() * self.windows.iter().map(of).max().unwrap_or(0)
    }

    /// Maximum number of parts of `items` sequences, counted likewise.
    #[must_use]
    pub fn most_parts(self, items: usize) -> usize {
        self.windows.count() * items * self.splits as usize
    }
}

/// Word offsets of a block's arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    capacity: Capacity,
    /// `u32 [rows]`
    pub ids: usize,
    /// `u32 [rows]`
    pub positions: usize,
    /// `u32 [rows]`
    pub slots: usize,
    /// `TuttiSeq [seqs]`
    pub seqs: usize,
    /// `TuttiTile [tiles]`: tiles of sequences of several rows.
    pub tiles: usize,
    /// `u32 [seqs]`: sequences of one row.
    pub items: usize,
    /// `u32 [windows, parts of each]`: parts that the items are split into.
    pub parts: usize,
    /// `u32 [samples]`
    pub sample_rows: usize,
    /// `TuttiSampleParams [samples]`
    pub params: usize,
    /// `u32 [rows]`: rows of the previous step whose tokens are fed in.
    pub feed: usize,
    /// `u32 [rows]`: adapter of each row.
    pub adapters: usize,
    /// `u32 [seqs]`: state of each sequence.
    pub states: usize,
    /// `u32 [..]`: block tables.
    pub tables: usize,
}

/// Word offsets of the counts at the beginning of a block.
pub mod live {
    /// Rows.
    pub const ROWS: usize = 0;
    /// Tiles.
    pub const TILES: usize = 1;
    /// Sequences of one row.
    pub const ITEMS: usize = 2;
    /// Rows of logits.
    pub const SAMPLES: usize = 3;
    /// Sequences.
    pub const SEQS: usize = 4;
    /// Parts of sequences of one row, one count per window.
    pub const PARTS: usize = 5;
    /// Number of these words, rounded up to 16 bytes.
    pub(super) const WORDS: usize = 8;
}

impl Layout {
    /// Lays out the arrays, each at a multiple of 16 bytes.
    #[must_use]
    pub fn new(capacity: Capacity) -> Self {
        let mut next = live::WORDS;
        let mut place = |words: usize| {
            let at = next;
            next += words.next_multiple_of(4);
            at
        };
        Self {
            capacity,
            ids: place(capacity.rows),
            positions: place(capacity.rows),
            slots: place(capacity.rows),
            seqs: place(capacity.seqs * SEQ),
            tiles: place(capacity.tiles * TILE),
            items: place(capacity.seqs),
            parts: place(capacity.parts),
            sample_rows: place(capacity.samples),
            params: place(capacity.samples * PARAMS),
            feed: place(capacity.rows),
            adapters: place(capacity.rows),
            states: place(capacity.seqs),
            tables: next,
        }
    }

    /// Offset of the list of parts for a window.
    #[must_use]
    pub fn parts_of(&self, place: usize, windows: Windows) -> usize {
        self.parts + place * (self.capacity.parts / windows.count().max(1))
    }

    /// Number of words of a block with `tables` words of block tables.
    #[must_use]
    pub fn words(&self, tables: usize) -> usize {
        self.tables + tables
    }

    /// Whether a step of these sizes fits.
    #[must_use]
    pub fn holds(&self, sizes: &Capacity) -> bool {
        let own = &self.capacity;
        sizes.rows <= own.rows
            && sizes.seqs <= own.seqs
            && sizes.tiles <= own.tiles
            && sizes.parts <= own.parts
            && sizes.samples <= own.samples
    }

    /// Fills a block. `block` must have at least [`Layout::words`] words, and the sizes must fit;
    /// `found` is scratch.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn fill(
        &self,
        block: &mut [u32],
        ids: &[u32],
        batch: &Batch<'_>,
        cut: AttentionTiling,
        samples: &[u32],
        found: &mut Vec<(u32, Splits)>,
    ) -> Result<(), KernelError> {
        let sizes = sizes(ids.len(), batch, cut, samples.len());
        if !self.holds(&sizes) || block.len() < self.words(batch.block_tables.len()) {
            let message = format!("{sizes:?} in a block for {:?}", self.capacity);
            return Err(KernelError::Shape { op: "begin_step", message });
        }
        block[self.ids..][..ids.len()].copy_from_slice(ids);
        block[self.positions..][..batch.positions.len()].copy_from_slice(batch.positions);
        block[self.slots..][..batch.slots.len()].copy_from_slice(batch.slots);
        let (mut tiles, mut items) = (0, 0);
        for (index, seq) in batch.seqs.iter().enumerate() {
            block[self.seqs + index * SEQ..][..SEQ].copy_from_slice(&seq_words(seq));
            if cut.is_item(seq) {
                block[self.items + items] = index as u32;
                items += 1;
                continue;
            }
            // Later tiles have longer contexts, so they come first.
            for tile in (0..cut.tiles_of(seq)).rev() {
                let words = [index as u32, (tile * TILE_QUERIES) as u32];
                block[self.tiles + tiles * TILE..][..TILE].copy_from_slice(&words);
                tiles += 1;
            }
        }
        let most = sizes.parts / cut.windows.count().max(1);
        for (place, window) in cut.windows.iter().enumerate() {
            let list = &mut block[self.parts_of(place, cut.windows)..][..most];
            let own = (0u32..).zip(batch.seqs).filter(|(_, seq)| cut.is_item(seq));
            let limits = (cut.splits, least_split(items));
            let number = parts::fill(list, own, window, limits, found);
            block[live::PARTS + place] = number as u32;
        }
        block[self.sample_rows..][..samples.len()].copy_from_slice(samples);
        block[self.tables..][..batch.block_tables.len()].copy_from_slice(batch.block_tables);
        let rows = batch.positions.len().max(ids.len());
        let counts = [rows, tiles, items, samples.len(), batch.seqs.len()];
        for (word, count) in block.iter_mut().zip(counts) {
            *word = count as u32;
        }
        Ok(())
    }
}

fn seq_words(seq: &SeqRows) -> [u32; SEQ] {
    [seq.row_start, seq.num_rows, seq.context_len, seq.table_start, seq.table_len]
}

/// Number of items of each kind in a step.
#[must_use]
pub fn sizes(rows: usize, batch: &Batch<'_>, cut: AttentionTiling, samples: usize) -> Capacity {
    let tiled = batch.seqs.iter().filter(|seq| !cut.is_item(seq));
    Capacity {
        rows: rows.max(batch.positions.len()),
        seqs: batch.seqs.len(),
        tiles: tiled.map(|seq| cut.tiles_of(seq)).sum(),
        parts: cut.parts(batch),
        samples,
    }
}

/// The largest capacity needed by steps of at most `rows` rows, with `samples` of them sampled, if
/// no more sequences are decoded than sampled.
#[must_use]
pub fn largest(rows: usize, samples: usize, cut: AttentionTiling) -> Capacity {
    // A sequence has at most one tile that is not full; sequences of one row have tiles only with
    // `all_tiles`.
    let seqs = if cut.all_tiles { rows } else { rows / 2 };
    let tiles = cut.tiles_of_rows(rows) + seqs;
    let parts = cut.most_parts(if cut.all_tiles { 0 } else { samples });
    Capacity { rows, seqs: rows, tiles, parts, samples }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seq(row_start: u32, num_rows: u32, context_len: u32) -> SeqRows {
        SeqRows { row_start, num_rows, context_len, table_start: row_start, table_len: 1 }
    }

    #[test]
    fn arrays_do_not_overlap_and_are_aligned() {
        for rows in [1, 3, 64, 1000] {
            let capacity = Capacity { rows, seqs: rows / 2 + 1, tiles: 5, parts: 7, samples: 3 };
            let at = Layout::new(capacity);
            let seqs = capacity.seqs;
            let arrays = [
                (0, live::WORDS),
                (at.ids, rows),
                (at.positions, rows),
                (at.slots, rows),
                (at.seqs, seqs * 5),
                (at.tiles, 10),
                (at.items, seqs),
                (at.parts, 7),
                (at.sample_rows, 3),
                (at.params, 66),
                (at.feed, rows),
                (at.adapters, rows),
                (at.states, seqs),
                (at.tables, 0),
            ];
            for pair in arrays.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0);
            }
            assert!(arrays.iter().all(|(at, _)| at % 4 == 0));
        }
    }

    #[test]
    fn every_query_of_a_long_sequence_is_in_one_tile() {
        // 1 row, 70 rows of group 3 (210 queries: 4 tiles), 2 rows (1 tile).
        let seqs = [seq(0, 1, 9), seq(1, 70, 70), seq(71, 2, 5)];
        let rows: Vec<u32> = (0..73).collect();
        let batch = Batch { positions: &rows, slots: &rows, seqs: &seqs, block_tables: &[7, 8, 9] };
        let cut = AttentionTiling { group: 3, all_tiles: false, splits: 64, windows: Windows::ALL };
        let sizes = sizes(73, &batch, cut, 2);
        assert_eq!(sizes, Capacity { rows: 73, seqs: 3, tiles: 5, parts: 1, samples: 2 });
        let layout = Layout::new(sizes);
        let mut block = vec![u32::MAX; layout.words(3)];
        layout.fill(&mut block, &rows, &batch, cut, &[0, 72], &mut Vec::new()).unwrap();
        assert_eq!(block[..6], [73, 5, 1, 2, 3, 1]);
        assert_eq!(block[layout.parts], 0);
        assert_eq!(block[layout.items], 0);
        assert_eq!(block[layout.tiles..][..10], [1, 192, 1, 128, 1, 64, 1, 0, 2, 0]);
        assert_eq!(block[layout.seqs + 5..][..5], [1, 70, 70, 1, 1]);
        assert_eq!(block[layout.tables..], [7, 8, 9]);
        assert_eq!(block[layout.sample_rows..][..2], [0, 72]);
        let small = Layout::new(Capacity { tiles: 4, ..sizes });
        assert!(small.fill(&mut block, &rows, &batch, cut, &[0, 72], &mut Vec::new()).is_err());
    }

    #[test]
    fn sequences_of_one_row_can_be_tiles_too() {
        let seqs = [seq(0, 1, 9), seq(1, 70, 70), seq(71, 1, 5)];
        let rows: Vec<u32> = (0..72).collect();
        let batch = Batch { positions: &rows, slots: &rows, seqs: &seqs, block_tables: &[7, 8, 9] };
        let cut = AttentionTiling { group: 3, all_tiles: true, splits: 64, windows: Windows::ALL };
        let sizes = sizes(72, &batch, cut, 2);
        assert_eq!((sizes.tiles, cut.items(&batch), cut.of_single_rows(5)), (6, 0, (0, 5)));
        let layout = Layout::new(sizes);
        let mut block = vec![u32::MAX; layout.words(3)];
        layout.fill(&mut block, &rows, &batch, cut, &[0, 71], &mut Vec::new()).unwrap();
        assert_eq!(block[..6], [72, 6, 0, 2, 3, 0]);
        assert_eq!(block[layout.tiles..][..12], [0, 0, 1, 192, 1, 128, 1, 64, 1, 0, 2, 0]);
        // Many query heads share one KV head: more than a tile has room for.
        assert_eq!(
            AttentionTiling { group: 65, all_tiles: true, splits: 64, windows: Windows::ALL }
                .of_single_rows(3),
            (0, 6)
        );
    }

    #[test]
    fn no_step_needs_more_than_the_largest_block() {
        let cuts = [(64, 1), (64, 4), (100, 7), (100, 70)].into_iter().flat_map(|(rows, group)| {
            [false, true].map(|all_tiles| {
                (rows, AttentionTiling { group, all_tiles, splits: 64, windows: Windows::ALL })
            })
        });
        for (rows, cut) in cuts {
            let most = Layout::new(largest(rows, rows, cut));
            for each in 1..=rows {
                // As many sequences of `each` rows as fit.
                let seqs: Vec<SeqRows> =
                    (0..rows / each).map(|i| seq((i * each) as u32, each as u32, 8199)).collect();
                let all: Vec<u32> = vec![0; rows / each * each];
                let batch = Batch { positions: &all, slots: &all, seqs: &seqs, block_tables: &[] };
                assert!(most.holds(&sizes(all.len(), &batch, cut, 4)), "{rows} {each} {cut:?}");
            }
        }
    }
}

//! PURE: which positions of the KV cache's blocks hold what the draft model has computed. Blocks are
//! those of the model that verifies, with their numbers: what is written there anew, is rejected, or
//! came from host memory has to be computed by the draft model again, and nobody tells it when.
use std::ops::Range;

/// For each block, how many of its first positions hold what belongs there.
#[derive(Debug, Default)]
pub(super) struct Written {
    block_size: u32,
    blocks: Vec<u32>,
}

impl Written {
    /// Nothing is written of so many blocks.
    pub(super) fn new(block_size: u32, num_blocks: u32) -> Self {
        Self { block_size: block_size.max(1), blocks: vec![0; num_blocks as usize] }
    }

    /// The parts of the table's blocks that positions are in: (block, its part).
    fn parts<'a>(
        &self,
        table: &'a [u32],
        positions: Range<u32>,
    ) -> impl Iterator<Item = (usize, Range<u32>)> + use<'a> {
        let size = self.block_size;
        let (first, end) = (positions.start / size, positions.end.div_ceil(size));
        let blocks = if positions.is_empty() { 0..0 } else { first..end };
        blocks.filter_map(move |index| {
            let block = *table.get(index as usize)? as usize;
            let (start, end) = (index * size, (index + 1) * size);
            Some((block, positions.start.max(start) - start..positions.end.min(end) - start))
        })
    }

    /// Other tokens come to these positions of a sequence: what is there, and in their blocks behind
    /// them, is nothing.
    pub(super) fn overwrite(&mut self, table: &[u32], positions: Range<u32>) {
        for (block, part) in self.parts(table, positions) {
            if let Some(written) = self.blocks.get_mut(block) {
                *written = part.start.min(*written);
            }
        }
    }

    /// A block holds something else.
    pub(super) fn replace(&mut self, block: u32) {
        if let Some(written) = self.blocks.get_mut(block as usize) {
            *written = 0;
        }
    }

    /// The first of a sequence's `len` positions that is not written.
    pub(super) fn missing(&self, table: &[u32], len: u32) -> u32 {
        let whole = self.parts(table, 0..len);
        let mut at = 0;
        for (block, part) in whole {
            let written = self.blocks.get(block).copied().unwrap_or(0).min(part.end);
            if written < part.end {
                return at + written;
            }
            at += written;
        }
        at
    }

    /// These positions of a sequence are written, as were those before.
    pub(super) fn write(&mut self, table: &[u32], positions: Range<u32>) {
        for (block, part) in self.parts(table, positions) {
            if let Some(written) = self.blocks.get_mut(block)
                && part.start <= *written
            {
                *written = part.end.max(*written);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_was_rejected_and_what_is_behind_it_is_missing() {
        let mut written = Written::new(4, 10);
        let table = [7, 2, 9];
        assert_eq!(written.missing(&table, 9), 0);
        written.write(&table, 0..9);
        assert_eq!((written.missing(&table, 12), written.missing(&table, 9)), (9, 9));
        assert_eq!(written.missing(&table, 3), 3);
        // Of four drafts from 9 on the first was right.
        written.write(&table, 9..12);
        written.overwrite(&table, 10..12);
        assert_eq!(written.missing(&table, 12), 10);
        // Another sequence has the first block, and what was there.
        assert_eq!(written.missing(&[7, 5], 8), 4);
        // It gets the second, too, with other tokens.
        written.overwrite(&[7, 2], 4..5);
        assert_eq!(written.missing(&table, 12), 4);
        written.replace(7);
        assert_eq!(written.missing(&table, 12), 0);
        // Of a cache that is not there nothing is.
        assert_eq!(Written::default().missing(&[3], 5), 0);
    }

    proptest! {
        /// Against places that remember which token each was computed for.
        #[test]
        fn it_knows_what_a_cache_of_places_would_hold(
            steps in prop::collection::vec((0u8..4, 0usize..3, 0u32..24, 1u32..12), 1..60),
        ) {
            // The first two sequences share their first two blocks.
            let tables = [[0u32, 1, 2, 3, 4, 5], [0, 1, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15]];
            let mut written = Written::new(4, 16);
            // What belongs at a place, and for what the draft model computed it.
            let mut wanted: BTreeMap<(u32, u32), u64> = BTreeMap::new();
            let mut held: BTreeMap<(u32, u32), u64> = BTreeMap::new();
            for (number, (kind, seq, from, count)) in (1u64..).zip(steps) {
                let table = &tables[seq];
                let end = (from + count).min(24);
                let place = |at: u32| (table[(at / 4) as usize], at % 4);
                match kind {
                    // Places shared by two hold what both have: nobody writes there.
                    0 if seq == 2 || from >= 8 => {
                        written.overwrite(table, from..end);
                        for at in from..end {
                            wanted.insert(place(at), number);
                        }
                        // Behind them in the last block stood what is gone.
                        for at in end..end.next_multiple_of(4) {
                            wanted.insert(place(at), number);
                        }
                    }
                    1 if seq == 2 || from >= 8 => {
                        let block = table[(from / 4) as usize];
                        written.replace(block);
                        (0..4).for_each(|at| {
                            wanted.insert((block, at), number);
                        });
                    }
                    _ => {
                        let missing = written.missing(table, end);
                        for at in 0..missing {
                            let place = place(at);
                            prop_assert!(held.contains_key(&place), "{at} was never computed");
                            prop_assert_eq!(held.get(&place), wanted.get(&place).or(Some(&0)));
                        }
                        written.write(table, missing..end);
                        for at in missing..end {
                            held.insert(place(at), wanted.get(&place(at)).copied().unwrap_or(0));
                        }
                        prop_assert_eq!(written.missing(table, end), end.max(missing));
                    }
                }
            }
        }
    }
}

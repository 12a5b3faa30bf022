//! PURE: which positions of the KV cache's blocks hold what the draft model has computed. Its
//! blocks have the numbers of the verifying model's. Positions that are overwritten, rejected, or
//! swapped in from host memory must be computed by the draft model again, at some later time.
use std::ops::Range;

/// For each block, how many of its first positions hold valid K and V of the draft model.
#[derive(Debug, Default)]
pub(super) struct ValidPositions {
    block_size: u32,
    blocks: Vec<u32>,
}

impl ValidPositions {
    /// Creates the state of `num_blocks` blocks with nothing written.
    pub(super) fn new(block_size: u32, num_blocks: u32) -> Self {
        Self { block_size, blocks: vec![0; num_blocks as usize] }
    }

    /// Splits positions by the table's blocks: (block, positions within it).
    fn parts<'a>(
        &self,
        table: &'a [u32],
        positions: Range<u32>,
    ) -> impl Iterator<Item = (usize, Range<u32>)> + use<'a> {
        let size = self.block_size.max(1);
        let (first, end) = (positions.start / size, positions.end.div_ceil(size));
        let blocks = if positions.is_empty() { 0..0 } else { first..end };
        blocks.filter_map(move |index| {
            let block = *table.get(index as usize)? as usize;
            let (start, end) = (index * size, (index + 1) * size);
            Some((block, positions.start.max(start) - start..positions.end.min(end) - start))
        })
    }

    /// Invalidates these positions of a sequence, which get other tokens, and those after them in
    /// the same blocks.
    pub(super) fn overwrite(&mut self, table: &[u32], positions: Range<u32>) {
        for (block, part) in self.parts(table, positions) {
            if let Some(valid_positions) = self.blocks.get_mut(block) {
                *valid_positions = part.start.min(*valid_positions);
            }
        }
    }

    /// Invalidates a block, which holds something else now.
    pub(super) fn replace(&mut self, block: u32) {
        if let Some(valid_positions) = self.blocks.get_mut(block as usize) {
            *valid_positions = 0;
        }
    }

    /// Returns the first of a sequence's `len` positions that is not written.
    pub(super) fn missing(&self, table: &[u32], len: u32) -> u32 {
        let whole = self.parts(table, 0..len);
        let mut at = 0;
        for (block, part) in whole {
            let valid_positions = self.blocks.get(block).copied().unwrap_or(0).min(part.end);
            if valid_positions < part.end {
                return at + valid_positions;
            }
            at += valid_positions;
        }
        at
    }

    /// Selects which of a sequence's `len` positions to write now, at most `budget` positions in at
    /// most `runs_max` runs, and marks them as written. Of sequences that share blocks, only the
    /// first is given a shared position: the others read what it writes.
    pub(super) fn take(
        &mut self,
        table: &[u32],
        len: u32,
        mut budget: u32,
        runs_max: usize,
    ) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        let mut at = 0;
        for (block, part) in self.parts(table, 0..len) {
            let Some(valid_positions) = self.blocks.get_mut(block) else { break };
            let missing = at + part.end.min(*valid_positions)..at + part.end;
            at = missing.end;
            if missing.is_empty() {
                continue;
            }
            let count = missing.end - missing.start;
            let run = missing.start..missing.start + count.min(budget);
            let is_full = run.is_empty() || runs.len() == runs_max;
            match runs.last_mut().filter(|last| last.end == run.start) {
                Some(last) => last.end = run.end,
                None if is_full => break,
                None => runs.push(run.clone()),
            }
            *valid_positions += run.end - run.start;
            budget -= run.end - run.start;
            if run.end < missing.end {
                break;
            }
        }
        runs
    }

    /// Marks these positions of a sequence as written, provided that those before them are.
    pub(super) fn write(&mut self, table: &[u32], positions: Range<u32>) {
        for (block, part) in self.parts(table, positions) {
            if let Some(valid_positions) = self.blocks.get_mut(block)
                && part.start <= *valid_positions
            {
                *valid_positions = part.end.max(*valid_positions);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn what_was_rejected_and_what_is_behind_it_is_missing() {
        let mut valid_positions = ValidPositions::new(4, 10);
        let table = [7, 2, 9];
        assert_eq!(valid_positions.missing(&table, 9), 0);
        valid_positions.write(&table, 0..9);
        assert_eq!(
            (valid_positions.missing(&table, 12), valid_positions.missing(&table, 9)),
            (9, 9)
        );
        assert_eq!(valid_positions.missing(&table, 3), 3);
        // Of four drafts after position 8, the first was right.
        valid_positions.write(&table, 9..12);
        valid_positions.overwrite(&table, 10..12);
        assert_eq!(valid_positions.missing(&table, 12), 10);
        // Another sequence shares the first block, and what is written there.
        assert_eq!(valid_positions.missing(&[7, 5], 8), 4);
        // It gets the second block, too, with other tokens.
        valid_positions.overwrite(&[7, 2], 4..5);
        assert_eq!(valid_positions.missing(&table, 12), 4);
        valid_positions.replace(7);
        assert_eq!(valid_positions.missing(&table, 12), 0);
        // An empty cache has nothing written.
        assert_eq!(ValidPositions::default().missing(&[3], 5), 0);
    }

    /// Blocks may be at the same place in several sequences' tables, also after different blocks.
    #[test]
    fn no_place_is_written_twice_in_a_pass_and_nothing_is_left_out() {
        let (mut gaps, mut cuts) = (0, 0);
        for seed in 0..3000 {
            let mut number = numbers(seed);
            let mut valid_positions = ValidPositions::new(4, 16);
            let tables: Vec<Vec<u32>> =
                (0..3).map(|_| (0..4).map(|at| at * 4 + number(3)).collect()).collect();
            for block in 0..16 {
                valid_positions.write(&[block], 0..number(5));
            }
            let mut places = Vec::new();
            for table in &tables {
                let (len, budget, runs_max) = (1 + number(16), number(30), 1 + number(4) as usize);
                let before: Vec<u32> = valid_positions.blocks.clone();
                let runs = valid_positions.take(table, len, budget, runs_max);
                let place = |at: u32| (table[(at / 4) as usize], at % 4);
                let is_missing = |at: u32| before[place(at).0 as usize] <= place(at).1;
                // In order, the first positions that are missing.
                let expected: Vec<u32> = (0..len).filter(|at| is_missing(*at)).collect();
                let taken: Vec<u32> = runs.iter().cloned().flatten().collect();
                assert_eq!(taken, expected[..taken.len()], "{seed}");
                assert!(taken.len() as u32 <= budget && runs.len() <= runs_max);
                assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
                let is_whole = taken.len() == expected.len();
                assert!(is_whole || taken.len() as u32 == budget || runs.len() == runs_max);
                assert!(!is_whole || valid_positions.missing(table, len) == len);
                places.extend(taken.into_iter().map(place));
                gaps += u32::from(runs.len() > 1);
                cuts += u32::from(!is_whole);
            }
            let count = places.len();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), count, "{seed}: a place is written twice");
        }
        assert!(gaps > 100 && cuts > 100, "{gaps} {cuts}");
    }

    /// Returns a generator of numbers below a bound.
    fn numbers(seed: u64) -> impl FnMut(u32) -> u32 {
        let mut state = seed;
        move |below| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u32 % below
        }
    }

    /// Compares with a cache that records what each place was computed for.
    #[test]
    fn it_knows_what_a_cache_of_places_would_hold() {
        // The first two sequences share their first two blocks.
        let tables = [[0u32, 1, 2, 3, 4, 5], [0, 1, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15]];
        let (mut computed, mut kept) = (0, 0);
        for seed in 0..2000 {
            let mut number = numbers(seed);
            let mut valid_positions = ValidPositions::new(4, 16);
            // What each place should hold, and what the draft model computed it for.
            let mut wanted: BTreeMap<(u32, u32), u32> = BTreeMap::new();
            let mut held: BTreeMap<(u32, u32), u32> = BTreeMap::new();
            for step in 1..60 {
                let (seq, from) = (number(3) as usize, number(24));
                let end = (from + 1 + number(11)).min(24);
                let table = &tables[seq];
                let place = |at: u32| (table[(at / 4) as usize], at % 4);
                // Nobody writes to shared places: they hold what both sequences have.
                let is_own = seq == 2 || from >= 8;
                match number(4) {
                    0 if is_own => {
                        valid_positions.overwrite(table, from..end);
                        // What followed in the last block is gone.
                        for at in from..end.next_multiple_of(4) {
                            wanted.insert(place(at), step);
                        }
                    }
                    1 if is_own => {
                        let block = table[(from / 4) as usize];
                        valid_positions.replace(block);
                        (0..4).for_each(|at| {
                            wanted.insert((block, at), step);
                        });
                    }
                    _ => {
                        let missing = valid_positions.missing(table, end);
                        for at in 0..missing {
                            let belongs = wanted.get(&place(at)).copied().unwrap_or(0);
                            assert_eq!(held.get(&place(at)), Some(&belongs), "{seed}: {at}");
                        }
                        valid_positions.write(table, missing..end);
                        for at in missing..end {
                            let belongs = wanted.get(&place(at)).copied().unwrap_or(0);
                            held.insert(place(at), belongs);
                        }
                        assert_eq!(valid_positions.missing(table, end), end);
                        (computed, kept) = (computed + end - missing, kept + missing);
                    }
                }
            }
        }
        assert!(kept > computed, "{kept} were kept, {computed} computed");
    }
}

//! PURE: the parts that decode attention splits sequences into, and the list of all parts of a
//! step. Mirrors `Splits` in `kernels/cuda/attention.cuh`.
use std::cmp::Reverse;

use crate::backend::SeqRows;
use crate::error::KernelError;

/// Maximum number of parts of a sequence, by the number of blocks that each part takes (for KV
/// heads, or groups of their query heads): a constant of the model and its degree, so that a row's
/// sum is computed in the same way in every batch. A single long sequence is to occupy a GPU: with
/// one block for each part, 64 parts would leave half of an H200's multiprocessors idle.
#[must_use]
pub fn most_splits(blocks: usize) -> u32 {
    if blocks <= 1 { SPLITS_MAX } else { SPLITS_MAX / 2 }
}

/// The most that the kernels support.
pub const SPLITS_MAX: u32 = 128;
/// `TUTTI_PART_SHIFT`
pub(super) const PART_SHIFT: u32 = 8;
/// Alignment of the first part's beginning and of the length of parts, in tokens.
const ALIGNED: u32 = 16;

/// Minimum number of tokens per part, by the number of sequences decoded together. A few sequences
/// must be split to occupy a GPU; many need not be, and each part costs a partial result that is
/// written and read again. Constant for up to 64 sequences, so that a sequence's result does not
/// depend on the number of others. The bounds are row counts that graphs are made for, so that all
/// steps of a graph agree.
#[must_use]
pub fn least_split(items: usize) -> u32 {
    match items {
        0..=64 => 64,
        65..=128 => 128,
        _ => 256,
    }
}

/// The distinct attention windows of a model's layers: the number of tokens that a row attends to,
/// including itself; 0 for all. Sequences are split separately for each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    list: [u32; Self::MOST],
    len: usize,
}

impl Windows {
    /// Maximum number of windows; [`super::batch::live`] has a count for each.
    pub const MOST: usize = 3;

    /// A single window: attention to all tokens.
    pub const ALL: Self = Self { list: [0; Self::MOST], len: 1 };

    /// Collects the given windows, which must differ.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if there are more than [`Windows::MOST`].
    pub fn new(windows: &[Option<u32>]) -> Result<Self, KernelError> {
        let mut list = [0; Self::MOST];
        let (len, most) = (windows.len(), Self::MOST);
        if len > most {
            let message = format!("a model with {len} different windows, {most} at most");
            return Err(KernelError::Unsupported(message));
        }
        for (word, window) in list.iter_mut().zip(windows) {
            *word = window.unwrap_or(0);
        }
        Ok(Self { list, len })
    }

    /// Number of windows.
    #[must_use]
    pub fn count(self) -> usize {
        self.len
    }

    /// All windows.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.list[..self.len].iter().copied()
    }

    /// Index of a window.
    #[must_use]
    pub fn place(self, window: Option<u32>) -> Option<usize> {
        self.iter().position(|known| known == window.unwrap_or(0))
    }
}

/// How a sequence is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Splits {
    /// Tokens per part, except the last.
    pub len: u32,
    /// Number of parts.
    pub count: u32,
}

/// Splits a sequence of one row with `context_len` tokens, of which the last `window` are visible
/// (0: all), into at most `most` parts of at least `least` tokens.
#[must_use]
pub fn splits(context_len: u32, window: u32, (most, least): (u32, u32)) -> Splits {
    let start = if window == 0 { 0 } else { context_len.saturating_sub(window) };
    let tokens = context_len - start / ALIGNED * ALIGNED;
    let len = tokens.div_ceil(most).next_multiple_of(ALIGNED).max(least);
    Splits { len, count: tokens.div_ceil(len) }
}

/// Total number of parts of some sequences.
#[must_use]
pub fn count<'a>(
    items: impl Iterator<Item = &'a SeqRows>,
    window: u32,
    limits: (u32, u32),
) -> usize {
    items.map(|seq| splits(seq.context_len, window, limits).count as usize).sum()
}

/// Writes the list of all parts to the beginning of `list` and returns their number. Long parts
/// come first, since blocks take parts in turn. `items` are the sequences with their numbers, in
/// ascending order; `found` is scratch.
pub fn fill<'a>(
    list: &mut [u32],
    items: impl Iterator<Item = (u32, &'a SeqRows)>,
    window: u32,
    limits: (u32, u32),
    found: &mut Vec<(u32, Splits)>,
) -> usize {
    found.clear();
    found.extend(items.map(|(index, seq)| (index, splits(seq.context_len, window, limits))));
    // Sorted without allocating; equal lengths stay in the order of the numbers.
    found.sort_unstable_by_key(|(index, splits)| (Reverse(splits.len), *index));
    let parts = found.iter().flat_map(|&(index, splits)| {
        (0..splits.count).map(move |split| index << PART_SHIFT | split)
    });
    let mut number = 0;
    for (word, part) in list.iter_mut().zip(parts) {
        *word = part;
        number += 1;
    }
    number
}

#[cfg(test)]
mod tests {
    use super::super::bucket::decode_bucket;
    use super::*;

    fn seq(context_len: u32) -> SeqRows {
        SeqRows { row_start: 0, num_rows: 1, context_len, table_start: 0, table_len: 1 }
    }

    /// The rule of `kernels.h`, position by position.
    #[test]
    fn parts_are_those_of_the_kernels_rule() {
        let windows = [0, 1, 15, 16, 17, 64, 100, 4096, 5000];
        for (context, window) in (1..=9000u32).flat_map(|c| windows.map(|window| (c, window))) {
            let first_visible =
                (0..context).find(|position| window == 0 || context - position <= window).unwrap();
            let first = (0..=first_visible).rev().find(|position| position % 16 == 0).unwrap();
            for (most, least) in [(64, 64), (64, 128), (64, 256), (128, 64)] {
                let Splits { len, count } = splits(context, window, (most, least));
                assert!(len >= least && len % 16 == 0 && (1..=most).contains(&count));
                // The parts end with the last token, and one part less would not reach it.
                assert!(first + (count - 1) * len < context && first + count * len >= context);
                assert!(len == least || (len - 16) * most < context - first);
            }
        }
        assert_eq!(splits(64, 0, (64, 64)), Splits { len: 64, count: 1 });
        assert_eq!(splits(65, 0, (64, 64)), Splits { len: 64, count: 2 });
        assert_eq!(splits(4096, 0, (64, 64)), Splits { len: 64, count: 64 });
        assert_eq!(splits(4097, 0, (64, 64)), Splits { len: 80, count: 52 });
        assert_eq!(splits(4097, 0, (64, 128)), Splits { len: 128, count: 33 });
        // 1 to 16 invisible tokens before the window.
        assert_eq!(splits(81, 64, (64, 64)), Splits { len: 64, count: 2 });
        assert_eq!(splits(80, 64, (64, 64)), Splits { len: 64, count: 1 });
        assert!(splits(u32::MAX - 4096, 0, (64, 64)).count <= 64);
        assert_eq!(splits(8192, 0, (128, 64)), Splits { len: 64, count: 128 });
        assert_eq!(splits(8193, 0, (128, 64)), Splits { len: 80, count: 103 });
    }

    #[test]
    fn one_long_sequence_has_a_block_for_nearly_every_multiprocessor() {
        for blocks in 1..=16 {
            let parts = splits(32_768, 0, (most_splits(blocks), least_split(1))).count as usize;
            assert!(parts * blocks >= 100, "{parts} parts of {blocks} blocks");
        }
    }

    #[test]
    fn steps_of_a_graph_split_alike() {
        for rows_max in [512, 70, 129, 40] {
            for rows in 1..=rows_max {
                let Some(bucket) = decode_bucket(rows, rows_max) else { continue };
                assert_eq!(least_split(rows as usize), least_split(bucket as usize), "{rows}");
            }
        }
        // Documented: up to 32 sequences do not depend on each other.
        assert!((1..=32).all(|items| least_split(items) == least_split(1)));
    }

    #[test]
    fn the_list_has_every_part_once_and_long_ones_first() {
        let seqs = [seq(130), seq(8192), seq(1), seq(20_000), seq(64)];
        let number = count(seqs.iter(), 0, (64, 64));
        assert_eq!(number, 3 + 64 + 1 + 63 + 1);
        let mut list = vec![u32::MAX; number + 2];
        fill(&mut list, (3..).zip(&seqs), 0, (64, 64), &mut Vec::new());
        assert_eq!(list[number..], [u32::MAX; 2]);
        let named: Vec<(u32, u32)> =
            list[..number].iter().map(|part| (part >> PART_SHIFT, part & 255)).collect();
        // Lengths of 320, 128, then 64 tokens, the last in batch order.
        let of = |index, count| (0..count).map(move |split| (index, split));
        let want: Vec<(u32, u32)> =
            of(6, 63).chain(of(4, 64)).chain(of(3, 3)).chain([(5, 0), (7, 0)]).collect();
        assert_eq!(named, want);
    }
}

//! PURE: into which parts decode attention splits the tokens of sequences, and the list of all
//! parts of a step. A mirror of `Splits` in `kernels/cuda/attention.cuh`.
use std::cmp::Reverse;

use crate::backend::SeqRows;
use crate::error::KernelError;

/// Into how many parts a sequence is split at most: a constant, so that the sum of a row is made
/// alike in every batch.
pub const SPLITS_MAX: u32 = 64;
/// `TUTTI_PART_SHIFT`
pub(super) const PART_SHIFT: u32 = 8;
/// Where the first part begins is a multiple of this, and so is every length.
const ALIGNED: u32 = 16;

/// Tokens of a part at least, by how many sequences are decoded together: few must be split to
/// occupy a GPU, many need not be, and each part costs a result that is written and read again. Up
/// to 64 sequences it is a constant: what a sequence gets does not depend on how many others there
/// are. The bounds are rows that graphs are made for, so that all steps of a graph have the same.
#[must_use]
pub fn least_split(items: usize) -> u32 {
    match items {
        0..=64 => 64,
        65..=128 => 128,
        _ => 256,
    }
}

/// The windows of a model's layers, each once: tokens that a row sees, itself included; 0: all.
/// Each splits sequences in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    list: [u32; Self::MOST],
    len: usize,
}

impl Windows {
    /// As many are counted in [`super::batch::live`].
    pub const MOST: usize = 3;

    /// Layers that see everything.
    pub const ALL: Self = Self { list: [0; Self::MOST], len: 1 };

    /// # Errors
    /// [`KernelError::Unsupported`] when there are more than [`Windows::MOST`].
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

    /// How many there are.
    #[must_use]
    pub fn count(self) -> usize {
        self.len
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.list[..self.len].iter().copied()
    }

    /// Which of them this is.
    #[must_use]
    pub fn place(self, window: Option<u32>) -> Option<usize> {
        self.iter().position(|known| known == window.unwrap_or(0))
    }
}

/// How the tokens of a sequence are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Splits {
    /// Tokens of each part, but the last.
    pub len: u32,
    /// Parts.
    pub count: u32,
}

/// Of a sequence of one row with `context_len` tokens, the last `window` of which are visible (0:
/// all).
#[must_use]
pub fn splits(context_len: u32, window: u32, least: u32) -> Splits {
    let start = if window == 0 { 0 } else { context_len.saturating_sub(window) };
    let tokens = context_len - start / ALIGNED * ALIGNED;
    let len = tokens.div_ceil(SPLITS_MAX).next_multiple_of(ALIGNED).max(least);
    Splits { len, count: tokens.div_ceil(len) }
}

/// How many parts there are of some sequences.
#[must_use]
pub fn count<'a>(items: impl Iterator<Item = &'a SeqRows>, window: u32, least: u32) -> usize {
    items.map(|seq| splits(seq.context_len, window, least).count as usize).sum()
}

/// Writes the list of all parts to the beginning of `list`: those of long parts come first, since
/// blocks take them in turns. `items` are the sequences with their names, which ascend; `found` is
/// scratch. Returns how many parts there are.
pub fn fill<'a>(
    list: &mut [u32],
    items: impl Iterator<Item = (u32, &'a SeqRows)>,
    window: u32,
    least: u32,
    found: &mut Vec<(u32, Splits)>,
) -> usize {
    found.clear();
    found.extend(items.map(|(index, seq)| (index, splits(seq.context_len, window, least))));
    // A sort that takes no memory, with names as the order of equals.
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

    /// The rule as `kernels.h` has it, position by position.
    #[test]
    fn parts_are_those_of_the_kernels_rule() {
        let windows = [0, 1, 15, 16, 17, 64, 100, 4096, 5000];
        for (context, window) in (1..=9000u32).flat_map(|c| windows.map(|window| (c, window))) {
            let first_visible =
                (0..context).find(|position| window == 0 || context - position <= window).unwrap();
            let first = (0..=first_visible).rev().find(|position| position % 16 == 0).unwrap();
            for least in [64, 128, 256] {
                let Splits { len, count } = splits(context, window, least);
                assert!(len >= least && len % 16 == 0 && (1..=SPLITS_MAX).contains(&count));
                // They end with the last token, and no shorter ones would do.
                assert!(first + (count - 1) * len < context && first + count * len >= context);
                assert!(len == least || (len - 16) * SPLITS_MAX < context - first);
            }
        }
        assert_eq!(splits(64, 0, 64), Splits { len: 64, count: 1 });
        assert_eq!(splits(65, 0, 64), Splits { len: 64, count: 2 });
        assert_eq!(splits(4096, 0, 64), Splits { len: 64, count: 64 });
        assert_eq!(splits(4097, 0, 64), Splits { len: 80, count: 52 });
        assert_eq!(splits(4097, 0, 128), Splits { len: 128, count: 33 });
        // 1 to 16 tokens that nobody sees, before the window.
        assert_eq!(splits(81, 64, 64), Splits { len: 64, count: 2 });
        assert_eq!(splits(80, 64, 64), Splits { len: 64, count: 1 });
        assert!(splits(u32::MAX - 4096, 0, 64).count <= SPLITS_MAX);
    }

    #[test]
    fn steps_of_a_graph_split_alike() {
        for rows_max in [512, 70, 129, 40] {
            for rows in 1..=rows_max {
                let Some(bucket) = decode_bucket(rows, rows_max) else { continue };
                assert_eq!(least_split(rows as usize), least_split(bucket as usize), "{rows}");
            }
        }
        // Documented: up to 32 sequences none depends on the others.
        assert!((1..=32).all(|items| least_split(items) == least_split(1)));
    }

    #[test]
    fn the_list_has_every_part_once_and_long_ones_first() {
        let seqs = [seq(130), seq(8192), seq(1), seq(20_000), seq(64)];
        let number = count(seqs.iter(), 0, 64);
        assert_eq!(number, 3 + 64 + 1 + 63 + 1);
        let mut list = vec![u32::MAX; number + 2];
        fill(&mut list, (3..).zip(&seqs), 0, 64, &mut Vec::new());
        assert_eq!(list[number..], [u32::MAX; 2]);
        let named: Vec<(u32, u32)> =
            list[..number].iter().map(|part| (part >> PART_SHIFT, part & 255)).collect();
        // 320, 128, then 64 tokens each in the order of the batch.
        let of = |index, count| (0..count).map(move |split| (index, split));
        let want: Vec<(u32, u32)> =
            of(6, 63).chain(of(4, 64)).chain(of(3, 3)).chain([(5, 0), (7, 0)]).collect();
        assert_eq!(named, want);
    }
}

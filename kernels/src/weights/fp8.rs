//! PURE: weights in FP8 that stay so: which do, and which of their inputs share scales.
//!
//! Every number of FP8 is exact in bf16, so products need no other type. Which matrices stay in FP8
//! depends only on the file and on the columns taken, so that all ranks with the same columns
//! compute the same.
use std::ops::{Range, RangeInclusive};

use super::{DType, HostMatrix, Scales};

/// The most inputs of a group, unless it is the only one: backends convert one group at a time.
pub(crate) const GROUP_MOST: usize = 128;
/// Inputs of a group, unless it is the only one. The first and the last can have fewer. Very short
/// ones would cost more than they save.
const GROUP_LEN: RangeInclusive<usize> = 16..=GROUP_MOST;

/// Groups of inputs that share a scale, of the columns that a matrix takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Groups {
    /// Number of inputs in the first group, which can be cut off.
    pub first_len: usize,
    /// Number of inputs in every other group; the last can have fewer.
    pub len: usize,
    /// Number of groups.
    pub count: usize,
}

impl Fp8Groups {
    /// The groups of `cols` inputs from input `first` on, if each `width` inputs of the tensor
    /// share a scale. `None` if there are several and they are too short or too long, or cut a pair
    /// of inputs.
    #[must_use]
    pub fn new(first: usize, cols: usize, width: usize) -> Option<Self> {
        let width = width.max(1);
        let first_len = (width - first % width).min(cols);
        if first_len == cols {
            return Some(Self { first_len, len: cols, count: 1 });
        }
        let is_good =
            GROUP_LEN.contains(&width) && width.is_multiple_of(2) && first_len.is_multiple_of(2);
        let count = 1 + (cols - first_len).div_ceil(width);
        is_good.then_some(Self { first_len, len: width, count })
    }

    /// The inputs of a group, out of `cols`.
    #[must_use]
    pub fn inputs(&self, index: usize, cols: usize) -> Range<usize> {
        let edge = |index: usize| match index {
            0 => 0,
            _ => (self.first_len + (index - 1) * self.len).min(cols),
        };
        edge(index)..edge(index + 1)
    }

    /// Bytes of `rows` x `cols` weights, including an f32 scale per output and group.
    #[must_use]
    pub fn bytes(&self, rows: u64, cols: u64) -> u64 {
        rows * (cols + 4 * self.count as u64)
    }
}

/// Groups of matrices that stay in FP8 together: all of them are in FP8, and have the same groups.
/// `None` if backends convert them to bf16.
#[must_use]
pub fn fp8_groups(parts: &[HostMatrix<'_>]) -> Option<Fp8Groups> {
    let mut found = None;
    for part in parts {
        let own = match (part.dtype, &part.scales) {
            // Zeros below a vocabulary have no scales.
            (DType::F8E4M3, None) => continue,
            (DType::F8E4M3, Some(Scales::Blocks(scales))) => {
                Fp8Groups::new(part.col_start, part.cols, scales.block.1)?
            }
            _ => return None,
        };
        if *found.get_or_insert(own) != own {
            return None;
        }
    }
    let cols = parts.first()?.cols;
    found.or_else(|| Fp8Groups::new(0, cols, usize::MAX))
}

impl<'a> HostMatrix<'a> {
    /// The bytes of a row, the columns taken; `scale` gets the scale of each of its groups.
    pub(crate) fn fp8_row(
        &self,
        row: usize,
        groups: &Fp8Groups,
        mut scale: impl FnMut(usize, f32),
    ) -> &'a [u8] {
        for group in 0..groups.count {
            let col = self.col_start + groups.inputs(group, self.cols).start;
            scale(
                group,
                match &self.scales {
                    Some(Scales::Blocks(all)) => {
                        all.index(row, col).map_or(f32::NAN, |index| all.at(index))
                    }
                    _ => 1.0,
                },
            );
        }
        let start = row * self.row_stride + self.col_start;
        &self.data[start..start + self.cols]
    }
}

#[cfg(test)]
mod tests {
    use super::super::BlockScales;
    use super::*;

    #[test]
    fn groups_are_those_of_the_columns_taken() {
        let groups = |first_len, len, count| Some(Fp8Groups { first_len, len, count });
        // (first column, columns, width)
        for (taken, want) in [
            ((0, 256, 128), groups(128, 128, 2)),
            ((64, 128, 128), groups(64, 128, 2)),
            ((192, 192, 128), groups(64, 128, 2)),
            ((96, 300, 128), groups(32, 128, 4)),
            ((7, 13, usize::MAX), groups(13, 13, 1)),
            // One group, however wide, and wherever it begins.
            ((131, 100, 4096), groups(100, 100, 1)),
            ((5, 3, 8), groups(3, 3, 1)),
            ((0, 64, 8), None),
            ((0, 512, 256), None),
            ((0, 60, 17), None),
            ((1, 200, 128), None),
        ] {
            let (first, cols, width) = taken;
            let found = Fp8Groups::new(first, cols, width);
            assert_eq!(found, want, "{taken:?}");
            let Some(found) = found else { continue };
            // Each input is in one group, next to those with the same scale.
            let all: Vec<usize> = (0..found.count)
                .flat_map(|group| found.inputs(group, cols).map(move |input| (group, input)))
                .map(|(group, input)| {
                    assert_eq!((first + input) / width - first / width, group, "{taken:?}");
                    input
                })
                .collect();
            assert!(all.into_iter().eq(0..cols), "{taken:?}");
        }
    }

    #[test]
    fn matrices_stay_together_or_not_at_all() {
        let data = [0; 64 * 8];
        let scales = [0; 64];
        let part = |dtype, block: Option<(usize, usize)>| HostMatrix {
            data: &data,
            dtype,
            rows: 2,
            cols: 64,
            col_start: 0,
            row_stride: 64,
            scales: block.map(|block| {
                let (dtype, row_stride) = (DType::F32, 64usize.div_ceil(block.1));
                Scales::Blocks(BlockScales {
                    data: &scales,
                    dtype,
                    block,
                    row_stride,
                    first_row: 0,
                })
            }),
        };
        let all = usize::MAX;
        let [blocks, other] = [(2, 32), (2, 16)].map(|block| part(DType::F8E4M3, Some(block)));
        let [channel, tensor] = [(1, all), (all, all)].map(|b| part(DType::F8E4M3, Some(b)));
        let padding = part(DType::F8E4M3, None);
        let count = |parts: &[HostMatrix<'_>]| fp8_groups(parts).map(|groups| groups.count);
        assert_eq!(count(&[blocks, blocks]), Some(2));
        assert_eq!(count(&[blocks, padding]), Some(2));
        assert_eq!(count(&[channel, tensor, padding]), Some(1));
        assert_eq!(count(&[padding]), Some(1));
        assert_eq!(count(&[blocks, other]), None);
        assert_eq!(count(&[blocks, channel]), None);
        assert_eq!(count(&[channel, part(DType::I8, Some((1, all)))]), None);
        assert_eq!(count(&[part(DType::Bf16, None)]), None);
        assert_eq!(count(&[]), None);
    }
}

//! Packed 4-bit weights: eight inputs of an output form a word, and each group of inputs has a zero
//! point and a scale for each output.
//!
//! A word holds the even inputs in its lower half and the odd ones in its upper half, each pair 4
//! bits above the previous one: so one shift puts a pair where bf16 products need it. 4-bit floats
//! are laid out like integers, and have no zero points. A group begins with a new word. Only the
//! last word of a row may be partly unused; the unused part holds the zero point.
use std::ops::Range;

use super::super::memory::{AlignedVec, Disjoint};
use super::panels::part;
use super::rows::Parts;
use super::{PANEL, Shape};
use crate::error::KernelError;
use crate::pool::Pool;
use crate::weights::{E2M1, Int4Groups, int4_row};

/// Inputs per word.
pub(crate) const WORD: usize = 8;

/// Eight inputs for the 64 outputs of a panel.
pub(crate) type Int4Row = [[u32; 16]; 4];

/// The zero point of symmetric weights.
pub(crate) const MIDDLE: i8 = 8;

/// The packed weights of one or more matrices.
#[derive(Debug)]
pub(super) struct Int4 {
    words: AlignedVec<u32>,
    /// `PANEL` per group.
    scales: AlignedVec<f32>,
    /// `PANEL` per group; `None` if all are [`MIDDLE`], and for floats.
    zeros: Option<AlignedVec<i8>>,
    groups: Int4Groups,
}

/// The words, scales and zero points of some panels, and their groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int4Elements<'a> {
    words: &'a [u32],
    scales: &'a [f32],
    zeros: Option<&'a [i8]>,
    groups: Int4Groups,
}

/// Words per row of `cols` inputs.
pub(super) fn row_words(cols: usize) -> usize {
    cols.div_ceil(WORD)
}

impl Int4 {
    pub(super) fn elements(&self) -> Int4Elements<'_> {
        let zeros = self.zeros.as_deref();
        Int4Elements { words: &self.words, scales: &self.scales, zeros, groups: self.groups }
    }

    /// Packs matrices. Each is the vertical concatenation of its `parts`, which are checked and
    /// have these groups.
    pub(super) fn pack(
        pool: &mut Pool,
        shape: Shape,
        groups: Int4Groups,
        parts: &Parts<'_, '_>,
    ) -> Result<Self, KernelError> {
        let panels = shape.rows.div_ceil(PANEL);
        let (blocks, count) = (row_words(shape.cols), groups.count);
        let all = panels.saturating_mul(shape.count);
        let what = "a weight matrix in 4 bits";
        let sized = |per_panel: usize| all.saturating_mul(per_panel).saturating_mul(PANEL);
        let mut words = AlignedVec::<u32>::zeroed(sized(blocks), what)?;
        let mut scales = AlignedVec::<f32>::zeroed(sized(count), what)?;
        let mut zeros = AlignedVec::<i8>::zeroed(sized(count), what)?;
        let to_words = Disjoint::new(&mut words);
        let (to_scales, to_zeros) = (Disjoint::new(&mut scales), Disjoint::new(&mut zeros));
        pool.run_ranges(all, 1, &|range, _| {
            let mut integers = vec![0; blocks * WORD];
            let mut own_zeros = vec![0; count];
            for index in range {
                let (matrix, first) = (index / panels, index % panels * PANEL);
                // SAFETY: every panel belongs to one task.
                let words = unsafe { to_words.slice(index * blocks * PANEL, blocks * PANEL) };
                // SAFETY: as above.
                let scales = unsafe { to_scales.slice(index * count * PANEL, count * PANEL) };
                // SAFETY: as above.
                let zeros = unsafe { to_zeros.slice(index * count * PANEL, count * PANEL) };
                zeros.fill(MIDDLE);
                for lane in 0..PANEL.min(shape.rows - first) {
                    let Some((part, row)) = parts.find(matrix, first + lane) else { continue };
                    let (own, behind) = integers.split_at_mut(shape.cols);
                    int4_row(part, row, &groups, own, |group, zero, scale| {
                        own_zeros[group] = zero;
                        scales[group * PANEL + lane] = scale;
                        zeros[group * PANEL + lane] = zero as i8;
                    });
                    behind.fill(own_zeros[count - 1]);
                    for (eight, place) in integers.as_chunks().0.iter().zip(words.chunks_mut(PANEL))
                    {
                        place[lane] = pack_word(eight);
                    }
                }
            }
        })?;
        let is_symmetric = groups.is_float || zeros.iter().all(|zero| *zero == MIDDLE);
        Ok(Self { words, scales, zeros: (!is_symmetric).then_some(zeros), groups })
    }
}

fn pack_word(eight: &[u8; WORD]) -> u32 {
    eight.as_chunks::<2>().0.iter().enumerate().fold(0, |word, (pair, &[even, odd])| {
        word | u32::from(even & 15) << (4 * pair) | u32::from(odd & 15) << (4 * pair + 16)
    })
}

/// One group of a panel's inputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int4Group<'a> {
    /// Rows of words, four pairs each.
    pub(crate) rows: &'a [Int4Row],
    /// Index, within the row, of the first pair.
    pub(crate) first_pair: usize,
    /// Number of pairs; the last is padded if the row's length is odd.
    pub(crate) pairs: usize,
    /// Factors of the sums.
    pub(crate) scales: &'a [f32; PANEL],
    /// Zero points, unless all of the matrix are [`MIDDLE`].
    pub(crate) zeros: Option<&'a [i8; PANEL]>,
    /// The weights are floats ([`E2M1`]) rather than integers.
    pub(crate) is_float: bool,
}

/// A panel of 4-bit weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int4Panel<'a> {
    rows: &'a [Int4Row],
    scales: &'a [[f32; PANEL]],
    zeros: Option<&'a [[i8; PANEL]]>,
    groups: Int4Groups,
    cols: usize,
}

impl<'a> Int4Elements<'a> {
    /// The elements of the panels `range` out of `panels`.
    pub(super) fn part(self, range: Range<usize>, panels: usize) -> Self {
        let Self { words, scales, zeros, groups } = self;
        Self {
            words: part(words, range.clone(), panels),
            scales: part(scales, range.clone(), panels),
            zeros: zeros.map(|zeros| part(zeros, range, panels)),
            groups,
        }
    }

    /// Bytes of one panel of `cols` inputs.
    pub(super) fn panel_bytes(&self, cols: usize) -> usize {
        (row_words(cols) + self.groups.count) * PANEL * 4
    }

    /// Panel `panel`, of `cols` inputs.
    pub(super) fn panel(&self, panel: usize, cols: usize) -> Int4Panel<'a> {
        let Self { words, scales, zeros, groups } = *self;
        let (blocks, count) = (row_words(cols) * PANEL, groups.count);
        Int4Panel {
            rows: words[panel * blocks..(panel + 1) * blocks].as_chunks().0.as_chunks().0,
            scales: &scales.as_chunks().0[panel * count..(panel + 1) * count],
            zeros: zeros.map(|zeros| &zeros.as_chunks().0[panel * count..(panel + 1) * count]),
            groups,
            cols,
        }
    }

    /// Widens row `row` to f32 (`cols` elements).
    pub(super) fn unpack_row(&self, row: usize, cols: usize, out: &mut [f32]) {
        let (panel, lane) = (self.panel(row / PANEL, cols), row % PANEL);
        for group in (0..panel.num_groups()).map(|group| panel.group(group)) {
            let zero = group.zeros.map_or(MIDDLE, |zeros| zeros[lane]);
            for pair in 0..group.pairs {
                let word = group.rows[pair / 4][lane / 16][lane % 16] >> (4 * (pair % 4));
                for (half, integer) in [word & 15, word >> 16 & 15].into_iter().enumerate() {
                    if let Some(to) = out.get_mut(2 * (group.first_pair + pair) + half) {
                        let number = match group.is_float {
                            true => E2M1[integer as usize],
                            false => integer as f32 - f32::from(zero),
                        };
                        *to = number * group.scales[lane];
                    }
                }
            }
        }
    }
}

impl<'a> Int4Panel<'a> {
    pub(crate) fn num_groups(&self) -> usize {
        self.groups.count
    }

    /// Whether all zero points are [`MIDDLE`], or there are none.
    pub(crate) fn is_symmetric(&self) -> bool {
        self.zeros.is_none()
    }

    pub(crate) fn group(&self, index: usize) -> Int4Group<'a> {
        let Int4Groups { first_len, len, .. } = self.groups;
        let edge = |index: usize| match index {
            0 => 0,
            _ => (first_len + (index - 1) * len).min(self.cols),
        };
        let (start, end) = (edge(index), edge(index + 1));
        Int4Group {
            rows: &self.rows[start / WORD..row_words(end)],
            first_pair: start / 2,
            pairs: end.div_ceil(2) - start / 2,
            scales: &self.scales[index],
            zeros: self.zeros.map(|zeros| &zeros[index]),
            is_float: self.groups.is_float,
        }
    }
}

//! Activations in the layouts of the inner loops: rounded or split into bf16 terms, tiled.
use std::ops::Range;

use super::super::isa::{Isa, multiversion};
use super::super::math::round_bf16;
use super::super::memory::{Disjoint, Scratch};
use super::super::precision::{Arithmetic, Precision};
#[cfg(target_arch = "x86_64")]
use super::one_term;
use super::{Group, TILE_ROWS, num_tiles, tile_rows};
use crate::error::KernelError;
use crate::pool::Pool;

/// Activations in the layout that the inner loops read.
#[derive(Debug)]
pub(crate) struct Activations<'a> {
    pub(super) words: &'a [u32],
    pub(super) rows: usize,
    pub(super) layout: Layout,
}

/// Rows that justify reading all weights once more, from a cache that threads share.
const PART_ROWS: usize = 96;

impl Activations<'_> {
    /// Number of parts into which these rows should be cut, for threads that take a part each.
    pub(super) fn num_parts(&self) -> usize {
        match self.layout {
            Layout::Tiles => 1,
            #[cfg(target_arch = "x86_64")]
            Layout::Rows { .. } => (self.rows / PART_ROWS).max(1),
        }
    }

    /// Part `index` of `parts`, at most [`Activations::num_parts`]; all parts but the last
    /// consist of whole tiles.
    pub(super) fn part(&self, index: usize, parts: usize) -> ActivationRows<'_> {
        let (mut rows, mut start) = (0..self.rows, 0);
        match self.layout {
            Layout::Tiles => {}
            #[cfg(target_arch = "x86_64")]
            Layout::Rows { stride } => {
                let at = |i: usize| (num_tiles(self.rows) * i / parts * TILE_ROWS).min(self.rows);
                rows = at(index)..at(index + 1);
                start = rows.start * stride;
            }
        }
        let Self { words, layout, .. } = *self;
        let acts = Activations { words: &words[start..], rows: rows.len(), layout };
        ActivationRows { first_row: rows.start, acts }
    }
}

/// A range of a product's rows.
pub(super) struct ActivationRows<'a> {
    pub(super) first_row: usize,
    pub(super) acts: Activations<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Layout {
    /// Tile by tile, consisting of [`super::ActPair`]s.
    Tiles,
    /// Row by row, one word per pair of bf16 and `stride` words per row: for `one_term`.
    #[cfg(target_arch = "x86_64")]
    Rows { stride: usize },
}

/// How [`Layout::Tiles`] stores an f32.
#[derive(Clone, Copy, PartialEq)]
enum Terms {
    /// Unchanged.
    Whole,
    /// Rounded to bf16.
    Rounded,
    /// As the sum of two bf16 terms.
    Split,
}

/// Lays out `rows` rows for the inner loops; row `i` is `source(i)`, of `cols` elements.
pub(crate) fn prepare<'s, 'a>(
    arithmetic: Arithmetic,
    pool: &mut Pool,
    scratch: &'a mut Scratch<u32>,
    rows: usize,
    cols: usize,
    source: &(dyn Fn(usize) -> &'s [f32] + Sync),
) -> Result<Activations<'a>, KernelError> {
    let Arithmetic { isa, precision } = arithmetic;
    #[cfg(target_arch = "x86_64")]
    if takes_rows(arithmetic) {
        return prepare_rows(pool, scratch, rows, cols, source);
    }
    let terms = terms(isa, precision);
    let pairs = cols.div_ceil(2);
    let words = scratch.get(rows * pairs * 2)?;
    let all = Disjoint::new(words);
    // About 20 microseconds of work per range.
    let grain = (32 * 1024 / (cols * TILE_ROWS).max(1)).max(1);
    pool.run_ranges(num_tiles(rows), grain, &|range, _| {
        for tile in range {
            let tile_rows = tile_rows(rows, tile);
            // SAFETY: tiles are disjoint in rows and so in words.
            let words =
                unsafe { all.slice(tile_rows.start * pairs * 2, tile_rows.len() * pairs * 2) };
            lay_out_tile(isa, terms, tile_rows, source, words);
        }
    })?;
    Ok(Activations { words, rows, layout: Layout::Tiles })
}

/// Whether products use [`Layout::Rows`].
#[cfg(target_arch = "x86_64")]
fn takes_rows(arithmetic: Arithmetic) -> bool {
    let Arithmetic { isa, precision } = arithmetic;
    matches!((isa, precision), (Isa::Avx512Bf16, Precision::Bfloat16))
}

/// How [`Layout::Tiles`] stores activations.
fn terms(isa: Isa, precision: Precision) -> Terms {
    match (isa, precision) {
        (_, Precision::Bfloat16) => Terms::Rounded,
        (Isa::Avx512Bf16, Precision::Float32) => Terms::Split,
        (_, Precision::Float32) => Terms::Whole,
    }
}

fn lay_out_tile<'s>(
    isa: Isa,
    terms: Terms,
    rows: Range<usize>,
    source: &(dyn Fn(usize) -> &'s [f32] + Sync),
    words: &mut [u32],
) {
    for (lane, row) in rows.clone().enumerate() {
        lay_out_row(isa, source(row), terms, lane, rows.len(), words);
    }
}

/// The rows of several groups, each group laid out as by [`prepare`].
#[derive(Debug)]
pub(super) struct GroupedActivations<'a> {
    words: &'a [u32],
    row_words: usize,
    layout: Layout,
}

impl GroupedActivations<'_> {
    /// The rows of one group.
    pub(super) fn rows(&self, rows: Range<usize>) -> Activations<'_> {
        let words = &self.words[rows.start * self.row_words..rows.end * self.row_words];
        Activations { words, rows: rows.len(), layout: self.layout }
    }
}

/// Lays out groups of rows; row `i` is `source(i)`, of `cols` elements.
pub(super) fn lay_out_groups<'s, 'a>(
    arithmetic: Arithmetic,
    pool: &mut Pool,
    scratch: &'a mut Scratch<u32>,
    groups: &[Group],
    cols: usize,
    source: &(dyn Fn(usize) -> &'s [f32] + Sync),
) -> Result<GroupedActivations<'a>, KernelError> {
    let Arithmetic { isa, precision } = arithmetic;
    let rows = groups.last().map_or(0, |group| group.rows.end);
    #[cfg(target_arch = "x86_64")]
    if takes_rows(arithmetic) {
        let Activations { words, layout, .. } = prepare_rows(pool, scratch, rows, cols, source)?;
        let row_words = words.len().checked_div(rows).unwrap_or(0);
        return Ok(GroupedActivations { words, row_words, layout });
    }
    let terms = terms(isa, precision);
    let row_words = cols.div_ceil(2) * 2;
    let words = scratch.get(rows * row_words)?;
    let all = Disjoint::new(words);
    let grain = (32 * 1024 / (cols * rows.div_ceil(groups.len().max(1))).max(1)).max(1);
    pool.run_ranges(groups.len(), grain, &|range, _| {
        for group in &groups[range] {
            let (first, count) = (group.rows.start, group.rows.len());
            for tile in 0..num_tiles(count) {
                let tile = tile_rows(count, tile);
                let tile = first + tile.start..first + tile.end;
                // SAFETY: groups, and tiles within a group, are disjoint in rows and so in words.
                let words = unsafe { all.slice(tile.start * row_words, tile.len() * row_words) };
                lay_out_tile(isa, terms, tile, source, words);
            }
        }
    })?;
    Ok(GroupedActivations { words, row_words, layout: Layout::Tiles })
}

/// As [`prepare`], for [`Layout::Rows`].
#[cfg(target_arch = "x86_64")]
fn prepare_rows<'s, 'a>(
    pool: &mut Pool,
    scratch: &'a mut Scratch<u32>,
    rows: usize,
    cols: usize,
    source: &(dyn Fn(usize) -> &'s [f32] + Sync),
) -> Result<Activations<'a>, KernelError> {
    // One cache line longer than the row, so that with lengths that are powers of two the rows of a
    // tile do not all fall into the same cache sets.
    let stride = (cols.div_ceil(32) + 1) * 16;
    let words = scratch.get(rows * stride)?;
    let all = Disjoint::new(words);
    let grain = (64 * 1024 / cols.max(1)).max(1);
    pool.run_ranges(rows, grain, &|range, _| {
        for row in range {
            // SAFETY: every row belongs to one task.
            let words = unsafe { all.slice(row * stride, stride) };
            let words = words.as_chunks_mut().0;
            // SAFETY: only called for an instruction set that the backend found on this machine.
            unsafe { one_term::round_row(source(row), words) };
        }
    })?;
    Ok(Activations { words, rows, layout: Layout::Rows { stride } })
}

multiversion! {
    /// Writes one row to lane `lane` of a tile of `lanes` rows.
    fn lay_out_row(row: &[f32], terms: Terms, lane: usize, lanes: usize, words: &mut [u32]) = lay_out_row_body
}

#[inline(always)]
fn lay_out_row_body<const FMA: bool>(
    row: &[f32],
    terms: Terms,
    lane: usize,
    lanes: usize,
    words: &mut [u32],
) {
    let (chunks, rest) = row.as_chunks::<2>();
    let last = rest.first().map(|&even| [even, 0.0]);
    let words = words.chunks_exact_mut(2 * lanes);
    for (&[even, odd], words) in chunks.iter().chain(last.as_ref()).zip(words) {
        let pair = match terms {
            Terms::Whole => [even.to_bits(), odd.to_bits()],
            Terms::Rounded => [round_bf16(even), round_bf16(odd)],
            Terms::Split => {
                let (even_hi, even_lo) = split_bf16(even);
                let (odd_hi, odd_lo) = split_bf16(odd);
                [even_hi >> 16 | odd_hi, even_lo >> 16 | odd_lo]
            }
        };
        [words[lane], words[lanes + lane]] = pair;
    }
}

/// `x` as the sum of two bf16, each given as the bits of an f32 with a zero low half. The remainder
/// is below 2^-17 of `x`. Infinities become NaN.
#[inline(always)]
fn split_bf16(x: f32) -> (u32, u32) {
    let hi = round_bf16(x);
    (hi, round_bf16(x - f32::from_bits(hi)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_bf16_terms_are_close_to_one_f32() {
        for i in 0..100_000u32 {
            let x = f32::from_bits(0x3000_0000 + i * 5347);
            for x in [x, -x] {
                let (hi, lo) = split_bf16(x);
                assert_eq!((hi | lo) & 0xFFFF, 0);
                let error =
                    f64::from(x) - f64::from(f32::from_bits(hi)) - f64::from(f32::from_bits(lo));
                assert!(error.abs() <= f64::from(x.abs()) * (0.5f64).powi(17), "{x}");
            }
        }
        let (hi, _) = split_bf16(f32::from_bits(0x7FFF_FFFF));
        assert!(f32::from_bits(hi).is_nan());
    }
}

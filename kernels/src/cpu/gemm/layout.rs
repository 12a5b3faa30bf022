//! Activations in the layouts that the inner loops read: rounded, split, tiled.
use super::super::isa::{Isa, multiversion};
use super::super::memory::{Disjoint, Scratch};
use super::super::pool::Pool;
use super::super::precision::{Arithmetic, Precision};
#[cfg(target_arch = "x86_64")]
use super::one_term;
use super::{TILE_ROWS, num_tiles, tile_rows};
use crate::error::KernelError;

/// Activations in the layout that the inner loops read.
#[derive(Debug)]
pub(crate) struct Activations<'a> {
    pub(super) words: &'a [u32],
    pub(super) rows: usize,
    pub(super) layout: Layout,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Layout {
    /// Tile by tile, [`super::ActPair`]s within.
    Tiles,
    /// Row by row, a word for each pair of bf16 and `stride` words a row: for `one_term`.
    #[cfg(target_arch = "x86_64")]
    Rows { stride: usize },
}

/// What becomes of an f32 in [`Layout::Tiles`].
#[derive(Clone, Copy, PartialEq)]
enum Terms {
    /// It stays.
    Whole,
    /// It is rounded to bf16.
    Rounded,
    /// It becomes two bf16 terms.
    Split,
}

/// Lays out `rows` rows for the inner loops; row `i` is `source(i)`, `cols` elements.
pub(crate) fn prepare<'s, 'a>(
    arithmetic: Arithmetic,
    pool: &mut Pool,
    scratch: &'a mut Scratch<u32>,
    rows: usize,
    cols: usize,
    source: &(dyn Fn(usize) -> &'s [f32] + Sync),
) -> Result<Activations<'a>, KernelError> {
    let Arithmetic { isa, precision } = arithmetic;
    let terms = match (isa, precision) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16, Precision::Bfloat16) => {
            return prepare_rows(pool, scratch, rows, cols, source);
        }
        (_, Precision::Bfloat16) => Terms::Rounded,
        (Isa::Avx512Bf16, Precision::Float32) => Terms::Split,
        (_, Precision::Float32) => Terms::Whole,
    };
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
            for (lane, row) in tile_rows.clone().enumerate() {
                lay_out_row(isa, source(row), terms, lane, tile_rows.len(), words);
            }
        }
    })?;
    Ok(Activations { words, rows, layout: Layout::Tiles })
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
    // A cache line more than the row has, so that rows of a tile are not all in the same sets of the
    // cache where their length is a power of two.
    let stride = (cols.div_ceil(32) + 1) * 16;
    let words = scratch.get(rows * stride)?;
    let all = Disjoint::new(words);
    let grain = (64 * 1024 / cols.max(1)).max(1);
    pool.run_ranges(rows, grain, &|range, _| {
        for row in range {
            // SAFETY: every row belongs to one task.
            let words = unsafe { all.slice(row * stride, stride) };
            let words = words.as_chunks_mut().0;
            // SAFETY: only called for an instruction set that the backend found this machine to have.
            unsafe { one_term::round_row(source(row), words) };
        }
    })?;
    Ok(Activations { words, rows, layout: Layout::Rows { stride } })
}

multiversion! {
    /// Writes one row to its lane of a tile of `lanes` rows.
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

/// `x` as the sum of two bf16, each as the bits of an f32 with an empty low half. What is left is
/// below 2^-17 of `x`. Infinities become NaN.
#[inline(always)]
fn split_bf16(x: f32) -> (u32, u32) {
    let hi = round_bf16(x);
    (hi, round_bf16(x - f32::from_bits(hi)))
}

/// To nearest, ties to even.
#[inline(always)]
fn round_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    // A NaN must not be rounded up to an infinity or beyond.
    (if x.is_nan() { bits | 0x0040_0000 } else { rounded }) & 0xFFFF_0000
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

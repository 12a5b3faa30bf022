//! Matrix products of activations and packed weights: cutting, order and threads. The inner loops
//! are one file per instruction set below.
//!
//! Every output is one sum over the inputs in ascending pairs, in one f32 accumulator that may rest
//! in memory between blocks of inputs. So neither the number of rows, nor the tiling, nor the thread
//! changes a bit of it.
use std::ops::Range;

use super::isa::{Isa, multiversion};
use super::memory::{Disjoint, Scratch};
use super::pack::{CpuMatrix, PANEL, PairRow};
use super::pool::Pool;
use crate::error::KernelError;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
mod portable;

/// Most rows of a tile: 6 x 64 sums fill 24 of the 32 vector registers.
const TILE_ROWS: usize = 6;
/// Panels that one row is multiplied with at a time, to hide latency.
const WIDE: usize = 4;
/// Pairs of inputs per block when there are several tiles: the block's weights (128 KiB) stay in
/// the L2 cache from tile to tile.
const BLOCK_PAIRS: usize = 512;

/// One pair of inputs for the `M` rows of a tile: two words per row. With split activations they
/// are the pair's high and low bf16 terms, otherwise the two f32.
type ActPair<const M: usize> = [[u32; M]; 2];
/// Sums of one row over a panel.
type Acc = [[f32; 16]; 4];

/// Activations in the layout that the inner loops read.
#[derive(Debug)]
pub(crate) struct Activations<'a> {
    words: &'a [u32],
    rows: usize,
}

/// Where one product goes.
pub(crate) struct Output<'a> {
    /// `[rows, stride]`, written at columns 0..out.
    pub(crate) data: Disjoint<'a, f32>,
    /// Elements per row.
    pub(crate) stride: usize,
}

/// How many tiles `rows` rows are cut into, and the rows of tile `index`: as even as can be.
fn num_tiles(rows: usize) -> usize {
    rows.div_ceil(TILE_ROWS)
}

fn tile_rows(rows: usize, index: usize) -> Range<usize> {
    let tiles = num_tiles(rows);
    let start = |i: usize| i * (rows / tiles) + i.min(rows % tiles);
    start(index)..start(index + 1)
}

/// Lays out `rows` rows for the inner loops; row `i` is `source(i)`, `cols` elements.
pub(crate) fn prepare<'s, 'a>(
    isa: Isa,
    pool: &mut Pool,
    scratch: &'a mut Scratch<u32>,
    rows: usize,
    cols: usize,
    source: &(dyn Fn(usize) -> &'s [f32] + Sync),
) -> Result<Activations<'a>, KernelError> {
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
                lay_out_row(isa, source(row), isa == Isa::Avx512Bf16, lane, tile_rows.len(), words);
            }
        }
    })?;
    Ok(Activations { words, rows })
}

multiversion! {
    /// Writes one row to its lane of a tile of `lanes` rows.
    fn lay_out_row(row: &[f32], split: bool, lane: usize, lanes: usize, words: &mut [u32]) = lay_out_row_body
}

#[inline(always)]
fn lay_out_row_body<const FMA: bool>(
    row: &[f32],
    split: bool,
    lane: usize,
    lanes: usize,
    words: &mut [u32],
) {
    let (chunks, rest) = row.as_chunks::<2>();
    let last = rest.first().map(|&even| [even, 0.0]);
    let words = words.chunks_exact_mut(2 * lanes);
    for (&[even, odd], words) in chunks.iter().chain(last.as_ref()).zip(words) {
        if split {
            let (even_hi, even_lo) = split_bf16(even);
            let (odd_hi, odd_lo) = split_bf16(odd);
            words[lane] = even_hi >> 16 | odd_hi;
            words[lanes + lane] = even_lo >> 16 | odd_lo;
        } else {
            words[lane] = even.to_bits();
            words[lanes + lane] = odd.to_bits();
        }
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

/// What becomes of the sums of two panels that belong together.
type Finish<'a> = &'a (dyn Fn(Range<usize>, Range<usize>) + Sync);

/// `out = acts weight^T + bias`. With `pair = Some((offset, finish))`, panel `p` is followed by
/// panel `p + offset` in the same task, then `finish(rows, columns of p)` is called; `weight` then
/// has `2 * offset` panels.
pub(crate) fn multiply(
    isa: Isa,
    pool: &mut Pool,
    acts: &Activations<'_>,
    weight: &CpuMatrix,
    bias: Option<&[f32]>,
    out: &Output<'_>,
    pair: Option<(usize, Finish<'_>)>,
) -> Result<(), KernelError> {
    if acts.rows == 0 {
        return Ok(());
    }
    let job = Product { isa, acts, weight, bias, out };
    let panels = pair.map_or(weight.num_panels(), |(offset, _)| offset);
    // A task of less than 64 KiB of weights is not worth waking a thread for.
    let panel_bytes = weight.num_pairs() * PANEL * 4 * acts.rows.div_ceil(8);
    let grain = (64 * 1024 / panel_bytes).max(if acts.rows == 1 { WIDE } else { 1 });
    pool.run_ranges(panels, grain, &|range, _| {
        job.panels(range.clone());
        if let Some((offset, finish)) = pair {
            job.panels(range.start + offset..range.end + offset);
            finish(0..acts.rows, range.start * PANEL..range.end * PANEL);
        }
    })
}

struct Product<'a> {
    isa: Isa,
    acts: &'a Activations<'a>,
    weight: &'a CpuMatrix,
    bias: Option<&'a [f32]>,
    out: &'a Output<'a>,
}

impl Product<'_> {
    /// All rows for these panels.
    fn panels(&self, range: Range<usize>) {
        if self.acts.rows == 1 {
            let (wide, rest) = (range.len() / WIDE, range.len() % WIDE);
            for group in 0..wide {
                self.one_row::<WIDE>(range.start + group * WIDE);
            }
            for panel in range.end - rest..range.end {
                self.one_row::<1>(panel);
            }
        } else {
            for panel in range {
                self.tiles(panel);
            }
        }
    }

    fn one_row<const P: usize>(&self, first: usize) {
        let pairs = self.weight.num_pairs();
        let acts = self.acts.words.as_chunks::<1>().0.as_chunks::<2>().0;
        let panels: [&[PairRow]; P] =
            std::array::from_fn(|i| self.weight.panel(first + i, 0..pairs));
        let mut acc = [[[0.0; 16]; 4]; P];
        wide(self.isa, acts, &panels, &mut acc);
        for (i, acc) in acc.iter().enumerate() {
            self.store(0, first + i, acc, true);
        }
    }

    fn tiles(&self, panel: usize) {
        let rows = self.acts.rows;
        let pairs = self.weight.num_pairs();
        let block = if rows <= TILE_ROWS { pairs } else { BLOCK_PAIRS };
        let mut start = 0;
        while start < pairs {
            let range = start..(start + block).min(pairs);
            let weights = self.weight.panel(panel, range.clone());
            for tile in 0..num_tiles(rows) {
                let rows = tile_rows(rows, tile);
                match rows.len() {
                    1 => self.tile::<1>(rows, range.clone(), panel, weights),
                    2 => self.tile::<2>(rows, range.clone(), panel, weights),
                    3 => self.tile::<3>(rows, range.clone(), panel, weights),
                    4 => self.tile::<4>(rows, range.clone(), panel, weights),
                    5 => self.tile::<5>(rows, range.clone(), panel, weights),
                    _ => self.tile::<6>(rows, range.clone(), panel, weights),
                }
            }
            start = range.end;
        }
    }

    fn tile<const M: usize>(
        &self,
        rows: Range<usize>,
        pairs: Range<usize>,
        panel: usize,
        weights: &[PairRow],
    ) {
        let all_pairs = self.weight.num_pairs();
        let words = &self.acts.words[rows.start * all_pairs * 2..rows.end * all_pairs * 2];
        let acts = &words.as_chunks::<M>().0.as_chunks::<2>().0[pairs.clone()];
        let mut acc = [[[0.0; 16]; 4]; M];
        if pairs.start > 0 {
            for (row, acc) in rows.clone().zip(&mut acc) {
                let from = self.columns(row, panel);
                acc.as_flattened_mut()[..from.len()].copy_from_slice(from);
            }
        }
        tile(self.isa, acts, weights, &mut acc);
        for (row, acc) in rows.zip(&acc) {
            self.store(row, panel, acc, pairs.end == all_pairs);
        }
    }

    /// The outputs of a panel in a row; fewer than 64 in the last panel.
    #[allow(clippy::mut_from_ref, reason = "see SAFETY")]
    fn columns(&self, row: usize, panel: usize) -> &mut [f32] {
        let start = panel * PANEL;
        let len = PANEL.min(self.weight.rows() - start);
        // SAFETY: a panel belongs to one task, which holds one such slice at a time.
        unsafe { self.out.data.slice(row * self.out.stride + start, len) }
    }

    fn store(&self, row: usize, panel: usize, acc: &Acc, last: bool) {
        let out = self.columns(row, panel);
        let acc = &acc.as_flattened()[..out.len()];
        match self.bias {
            Some(bias) if last => {
                for ((out, &sum), &bias) in out.iter_mut().zip(acc).zip(&bias[panel * PANEL..]) {
                    *out = sum + bias;
                }
            }
            _ => out.copy_from_slice(acc),
        }
    }
}

/// `acc[m] += acts[m] * weights` over all pairs.
fn tile<const M: usize>(isa: Isa, acts: &[ActPair<M>], weights: &[PairRow], acc: &mut [Acc; M]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        Isa::Avx512Bf16 => unsafe { avx512bf16::tile(acts, weights, acc) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { avx512::tile(acts, weights, acc) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2Fma => unsafe { avx2::tile(acts, weights, acc) },
        _ => portable::tile(acts, weights, acc),
    }
}

/// One row times `P` panels at once: `acc[p] += acts * panels[p]`.
fn wide<const P: usize>(
    isa: Isa,
    acts: &[ActPair<1>],
    panels: &[&[PairRow]; P],
    acc: &mut [Acc; P],
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        Isa::Avx512Bf16 => unsafe { avx512bf16::wide(acts, panels, acc) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { avx512::wide(acts, panels, acc) },
        _ => {
            // Too few registers to gain anything from several panels.
            for (panel, acc) in panels.iter().zip(acc) {
                tile(isa, acts, panel, std::array::from_mut(acc));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_rows_in_order() {
        for rows in 1..200 {
            let mut next = 0;
            for tile in 0..num_tiles(rows) {
                let range = tile_rows(rows, tile);
                assert_eq!(range.start, next);
                assert!((1..=TILE_ROWS).contains(&range.len()));
                next = range.end;
            }
            assert_eq!(next, rows);
        }
    }

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

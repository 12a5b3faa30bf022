//! Matrix products of activations and packed weights (GEMM): tiling, order and threads. The inner
//! loops are in one file per instruction set.
//!
//! Every output is one sum over the inputs in ascending pairs, in one f32 accumulator that may be
//! stored in memory between blocks of inputs (one accumulator per group of inputs, where those have
//! scales of their own).
//! So neither the number of rows, nor the tiling, nor the thread changes a single bit.
//!
//! - `layout`: activations as the inner loops read them
//! - `pairs`: two products whose outputs belong together (gate and up)
//! - `grouped`: products of groups of rows with a matrix each (experts)
//! - `int4`, `int8`, `fp8`: weights of 4 and 8 bits
//! - `scaled`: groups of inputs whose sums are scaled one by one
//! - `one_term`: AVX-512 with bf16 dot products, activations as one bf16 term; `panels` its tiles
//! - `avx512bf16`: AVX-512 with bf16 dot products, activations as two bf16 terms
//! - `avx512`, `avx2`, `portable`: weights widened to f32
//! - `vector`: 512-bit loads and stores
use std::ops::Range;

use super::isa::Isa;
use super::memory::Disjoint;
#[cfg(target_arch = "x86_64")]
use super::pack::Int4Group;
use super::pack::{CpuMatrix, PANEL, PairRow, PairRows, Panels};
use crate::error::KernelError;
use crate::pool::Pool;
use crate::weights::GROUP_MOST;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
mod fp8;
mod grouped;
mod int4;
mod int8;
mod layout;
#[cfg(target_arch = "x86_64")]
mod one_term;
mod pairs;
mod portable;
mod scaled;
#[cfg(target_arch = "x86_64")]
mod vector;

pub(crate) use grouped::{Group, Grouped, Task};
pub(crate) use layout::{Activations, prepare};
#[cfg(all(test, target_arch = "x86_64"))]
pub(crate) use one_term::fused::has_same_bits as have_same_bits;
#[cfg(target_arch = "x86_64")]
pub(crate) use one_term::fused::{HIGH_HALF, SUBNORMALS_ARE_ZERO, add_row, is_used as is_fused};
#[cfg(target_arch = "x86_64")]
pub(crate) use one_term::round_row;
pub(crate) use pairs::{multiply_pairs, pair_panels};

use layout::{ActivationRows, Layout};
use scaled::{Block, add_scaled, blocks};

/// Maximum number of rows per tile: 6 x 64 sums fill 24 of the 32 vector registers.
const TILE_ROWS: usize = 6;
/// Number of panels that one row is multiplied with at once, to hide latency.
const WIDE: usize = 4;
/// Pairs of inputs per block when there are several tiles: the block's weights (128 KiB) stay in
/// the L2 cache from tile to tile. Smaller blocks would stay in the L1 cache, but sums would go to
/// memory and back more often, which costs more than it saves.
const BLOCK_PAIRS: usize = 512;
/// As `BLOCK_PAIRS`, for activations of one term and few tiles, where memory is the bottleneck:
/// leaves room for the next block, which is being prefetched.
const SMALL_BLOCK: usize = 64;
/// Up to this many tiles count as few.
const FEW_TILES: usize = 8;
/// Pairs of inputs times rows, for one panel, that are worth a task of their own: about 15
/// microseconds.
const TASK_COST: usize = 32 * 1024;
/// Maximum number of pairs of 8-bit weights converted to bf16 at a time (32 KiB), for several
/// tiles, or for inner loops that only support bf16.
const ROOM_PAIRS: usize = 128;
/// The same for a single tile: converted weights that are used at once should take little of the L1
/// cache.
const FEW_PAIRS: usize = 32;
/// The same for weights with groups of inputs: the most pairs that a group has.
const GROUP_PAIRS: usize = GROUP_MOST / 2;

/// One pair of inputs for the `M` rows of a tile: two words per row. With split activations they
/// are the high and low bf16 terms of the pair, otherwise the two f32.
type ActPair<const M: usize> = [[u32; M]; 2];
/// The sums of one row over a panel.
type Acc = [[f32; 16]; 4];

/// Weights converted to bf16. Aligned, so that no vector lies in two cache lines.
#[repr(C, align(64))]
struct ConvertedWeights<const PAIRS: usize>([PairRow; PAIRS]);

impl<const PAIRS: usize> ConvertedWeights<PAIRS> {
    fn new() -> Self {
        Self([[[0; 16]; 4]; PAIRS])
    }
}

/// The destination of a product.
pub(crate) struct Output<'a> {
    /// `[rows, stride]`.
    pub(crate) data: Disjoint<'a, f32>,
    /// Elements per row.
    pub(crate) stride: usize,
    /// The row of `data` that gets the product's first row.
    pub(crate) first_row: usize,
    /// The column of `data` that gets the first output of the product's first panel.
    pub(crate) column: usize,
}

/// An expression in which `$m` is the constant number of a tile's rows, at most [`TILE_ROWS`].
macro_rules! with_rows {
    ($rows:expr, $m:ident => $result:expr) => {
        with_rows!($rows, $m => $result, 1 2 3 4 5)
    };
    ($rows:expr, $m:ident => $result:expr, $($number:literal)*) => {
        match $rows {
            $(
                $number => {
                    const $m: usize = $number;
                    $result
                }
            )*
            _ => {
                const $m: usize = TILE_ROWS;
                $result
            }
        }
    };
}
use with_rows;

/// Number of tiles for `rows` rows.
fn num_tiles(rows: usize) -> usize {
    rows.div_ceil(TILE_ROWS)
}

/// The rows of tile `index`; tiles are as equal as possible.
fn tile_rows(rows: usize, index: usize) -> Range<usize> {
    let tiles = num_tiles(rows);
    let start = |i: usize| i * (rows / tiles) + i.min(rows % tiles);
    start(index)..start(index + 1)
}

/// `out = acts weight^T + bias`: acts `[rows, in]`, weight `[out, in]`, bias `[out]`.
pub(crate) fn multiply(
    isa: Isa,
    pool: &mut Pool,
    acts: &Activations<'_>,
    weight: &CpuMatrix,
    bias: Option<&[f32]>,
    out: &Output<'_>,
) -> Result<(), KernelError> {
    if acts.rows == 0 {
        return Ok(());
    }
    let weight = weight.panels();
    run_panels(pool, acts, weight, &|part, panels, _| {
        let data = out.data.again();
        let out = &Output { data, first_row: out.first_row + part.first_row, ..*out };
        Product { isa, acts: &part.acts, weight, bias, out, first_panel: 0 }.panels(panels);
    })
}

/// Runs `task(rows, panels, worker)` so that every row meets every panel once.
fn run_panels(
    pool: &mut Pool,
    acts: &Activations<'_>,
    weight: Panels<'_>,
    task: &(dyn Fn(&ActivationRows<'_>, Range<usize>, usize) + Sync),
) -> Result<(), KernelError> {
    let panels = weight.num_panels();
    let cost = weight.num_pairs() * acts.rows;
    if cost >= TASK_COST && pool.num_threads() > 1 {
        // One panel per task, so that threads end at about the same time; with many rows, each
        // thread gets the rows that it has in its cache.
        let parts = acts.num_parts().min(pool.num_threads());
        return pool.run(parts * panels, &|index, worker| {
            let (part, panel) = (index / panels, index % panels);
            task(&acts.part(part, parts), panel..panel + 1, worker);
        });
    }
    let all = acts.part(0, 1);
    pool.run_ranges(panels, grain(weight, acts.rows), &|panels, worker| task(&all, panels, worker))
}

/// Panels per task: 64 KiB of weights are worth waking a thread.
fn grain(weight: Panels<'_>, rows: usize) -> usize {
    let panel_bytes = weight.panel_bytes() * rows.div_ceil(8);
    (64 * 1024 / panel_bytes).max(if rows == 1 { WIDE } else { 1 })
}

struct Product<'a> {
    isa: Isa,
    acts: &'a Activations<'a>,
    weight: Panels<'a>,
    bias: Option<&'a [f32]>,
    out: &'a Output<'a>,
    /// The panel whose outputs go to the output's first column.
    first_panel: usize,
}

impl Product<'_> {
    /// Multiplies all rows with these panels.
    fn panels(&self, range: Range<usize>) {
        if self.weight.is_int4() {
            return self.int4_panels(range);
        }
        // No larger than needed: clearing it takes time.
        match self.room_pairs() {
            0 => self.panels_in(range, &mut []),
            FEW_PAIRS => self.panels_in(range, &mut ConvertedWeights::<FEW_PAIRS>::new().0),
            GROUP_PAIRS => self.panels_in(range, &mut ConvertedWeights::<GROUP_PAIRS>::new().0),
            _ => self.panels_in(range, &mut ConvertedWeights::<ROOM_PAIRS>::new().0),
        }
    }

    /// Maximum number of pairs of weights converted to bf16 in memory at a time.
    fn room_pairs(&self) -> usize {
        let is_single = num_tiles(self.acts.rows) == 1;
        match self.acts.layout {
            _ if !self.weight.is_bytes() => 0,
            Layout::Tiles if widens_in_registers(self.isa, self.acts.rows) => 0,
            // A single tile converts 8-bit weights in registers.
            #[cfg(target_arch = "x86_64")]
            Layout::Rows { .. } if is_single => 0,
            _ if self.weight.groups().is_some() => GROUP_PAIRS,
            Layout::Tiles if is_single => FEW_PAIRS,
            Layout::Tiles => ROOM_PAIRS,
            #[cfg(target_arch = "x86_64")]
            Layout::Rows { .. } => ROOM_PAIRS,
        }
    }

    /// `room` holds weights converted to bf16: [`Product::room_pairs`] pairs.
    fn panels_in(&self, range: Range<usize>, room: &mut [PairRow]) {
        #[cfg(target_arch = "x86_64")]
        if let Layout::Rows { stride } = self.acts.layout {
            return self.one_term_panels(range, stride, room);
        }
        if self.acts.rows == 1 && self.weight.is_bf16() {
            let (wide, rest) = (range.len() / WIDE, range.len() % WIDE);
            for group in 0..wide {
                self.one_row::<WIDE>(range.start + group * WIDE);
            }
            for panel in range.end - rest..range.end {
                self.one_row::<1>(panel);
            }
        } else {
            for panel in range {
                self.tiles(panel, room);
            }
        }
    }

    fn one_row<const P: usize>(&self, first: usize) {
        let block = Block { pairs: 0..self.weight.num_pairs(), group: None };
        let acts = self.acts.words.as_chunks::<1>().0.as_chunks::<2>().0;
        let panels: [&[PairRow]; P] = std::array::from_fn(|i| {
            self.weight.panel(first + i, block.pairs.clone()).bf16().unwrap_or_default()
        });
        let mut acc = [[[0.0; 16]; 4]; P];
        wide(self.isa, acts, &panels, &mut acc);
        for (i, acc) in acc.iter().enumerate() {
            self.store_block(0, first + i, acc, &block);
        }
    }

    fn tiles(&self, panel: usize, room: &mut [PairRow]) {
        let rows = self.acts.rows;
        let pairs = self.weight.num_pairs();
        let most = match (!room.is_empty(), rows <= TILE_ROWS) {
            (true, true) => FEW_PAIRS,
            (true, false) => ROOM_PAIRS,
            (false, true) => pairs,
            (false, false) => BLOCK_PAIRS,
        };
        for block in blocks(&self.weight, most) {
            let weights = match self.weight.panel(panel, block.pairs.clone()) {
                PairRows::Int8(weights) if !room.is_empty() => {
                    PairRows::Bf16(int8::widen(self.isa, weights, room))
                }
                PairRows::Fp8(weights) if !room.is_empty() => {
                    PairRows::Bf16(fp8::widen(self.isa, weights, room))
                }
                weights => weights,
            };
            for tile in 0..num_tiles(rows) {
                let rows = tile_rows(rows, tile);
                with_rows!(rows.len(), M => self.tile::<M>(rows, &block, panel, weights));
            }
        }
    }

    fn tile<const M: usize>(
        &self,
        rows: Range<usize>,
        block: &Block,
        panel: usize,
        weights: PairRows<'_>,
    ) {
        let all_pairs = self.weight.num_pairs();
        let words = &self.acts.words[rows.start * all_pairs * 2..rows.end * all_pairs * 2];
        let acts = &words.as_chunks::<M>().0.as_chunks::<2>().0[block.pairs.clone()];
        let mut acc = [[[0.0; 16]; 4]; M];
        if block.pairs.start > 0 && block.group.is_none() {
            for (row, acc) in rows.clone().zip(&mut acc) {
                let from = self.columns(row, panel);
                acc.as_flattened_mut()[..from.len()].copy_from_slice(from);
            }
        }
        tile(self.isa, acts, weights, &mut acc);
        for (row, acc) in rows.zip(&acc) {
            self.store_block(row, panel, acc, block);
        }
    }

    /// The outputs of a panel in a row; fewer than 64 in the last panel.
    #[allow(clippy::mut_from_ref, reason = "see SAFETY")]
    fn columns(&self, row: usize, panel: usize) -> &mut [f32] {
        let len = PANEL.min(self.weight.rows() - panel * PANEL);
        let start = (panel - self.first_panel) * PANEL + self.out.column;
        // SAFETY: a panel belongs to one task, which holds one such slice of a row at a time.
        unsafe { self.out.data.slice((self.out.first_row + row) * self.out.stride + start, len) }
    }

    fn store(&self, row: usize, panel: usize, acc: &Acc, last: bool) {
        let out = self.columns(row, panel);
        out.copy_from_slice(&acc.as_flattened()[..out.len()]);
        if last {
            self.finish(panel, out);
        }
    }

    /// Takes the sums up to the end of a block, or, if it is a group, those of the group alone.
    fn store_block(&self, row: usize, panel: usize, acc: &Acc, block: &Block) {
        let last = block.pairs.end == self.weight.num_pairs();
        let scales = block.group.and_then(|group| self.weight.group_scales(panel, group));
        let Some(scales) = scales else { return self.store(row, panel, acc, last) };
        let out = self.columns(row, panel);
        add_scaled(self.isa, acc, scales, out, block.pairs.start == 0);
        if last {
            self.finish(panel, out);
        }
    }

    /// Turns complete sums into results: multiplies by the outputs' scales and adds their biases.
    fn finish(&self, panel: usize, out: &mut [f32]) {
        if let Some(scales) = self.weight.scales() {
            for (out, &scale) in out.iter_mut().zip(&scales[panel * PANEL..]) {
                *out *= scale;
            }
        }
        if let Some(bias) = self.bias {
            for (out, &bias) in out.iter_mut().zip(&bias[panel * PANEL..]) {
                *out += bias;
            }
        }
    }
}

/// Whether inner loops widen weights of 4 and 8 bits in registers: those of a single tile, if there
/// are enough registers.
fn widens_in_registers(isa: Isa, rows: usize) -> bool {
    match isa {
        Isa::Avx512 => rows <= TILE_ROWS,
        Isa::Avx2Fma => rows == 1,
        Isa::Avx512Bf16 | Isa::Portable => false,
    }
}

/// `acc[m] += acts[m] * weights` over all pairs; only of bf16, unless [`widens_in_registers`].
fn tile<const M: usize>(isa: Isa, acts: &[ActPair<M>], weights: PairRows<'_>, acc: &mut [Acc; M]) {
    match (isa, weights) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        (Isa::Avx512, _) => unsafe { avx512::tile(acts, weights, acc) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Isa::Avx2Fma, _) => unsafe { avx2::tile(acts, weights, acc) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (Isa::Avx512Bf16, PairRows::Bf16(weights)) => unsafe {
            avx512bf16::tile(acts, weights, acc);
        },
        (_, PairRows::Bf16(weights)) => portable::tile(acts, weights, acc),
        (_, PairRows::Int8(_) | PairRows::Fp8(_)) => {
            debug_assert!(false, "weights of 8 bits were not converted");
        }
    }
}

/// `acc[m] += acts[m] * group` over the group's pairs, if [`widens_in_registers`].
#[cfg(target_arch = "x86_64")]
fn int4_tile<const M: usize>(
    isa: Isa,
    acts: &[ActPair<M>],
    group: &Int4Group<'_>,
    acc: &mut [Acc; M],
) {
    match isa {
        // SAFETY: the backend refuses an instruction set that this machine lacks.
        Isa::Avx512 => unsafe { avx512::int4_tile(acts, group, acc) },
        // SAFETY: as above.
        Isa::Avx2Fma => unsafe { avx2::int4_tile(acts, group, acc) },
        _ => debug_assert!(false, "weights of 4 bits were not converted"),
    }
}

/// One row times `P` panels: `acc[p] += acts * panels[p]`.
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
            // Too few registers to gain from several panels.
            for (panel, acc) in panels.iter().zip(acc) {
                tile(isa, acts, PairRows::Bf16(panel), std::array::from_mut(acc));
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
}

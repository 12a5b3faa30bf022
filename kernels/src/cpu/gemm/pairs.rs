//! Two products of the same rows whose outputs belong together, as gate and up do: panel by panel, so
//! that the sums of both are still in the cache when they are made one.
use std::ops::Range;

use super::super::isa::Isa;
use super::super::memory::Disjoint;
use super::super::pack::{CpuMatrix, PANEL, Panels};
use super::{Activations, Output, Product, WIDE, run_panels};
use crate::error::KernelError;
use crate::pool::Pool;

/// What becomes of the sums of two panels that belong together: of `panels` of the first half, and of
/// those that are as far into the second. `[rows, 2 * PANEL * pair_panels(rows)]`, each half's in one
/// half of a row.
type PairFinish<'a> = &'a (dyn Fn(Range<usize>, &mut [f32]) + Sync);

/// The same of some rows, of which the first is named too.
pub(crate) type Finish<'a> = &'a (dyn Fn(usize, Range<usize>, &mut [f32]) + Sync);

/// Panels of each half of a matrix that [`multiply_pairs`] multiplies before they are finished: few,
/// so that their sums are still in the cache.
pub(crate) fn pair_panels(rows: usize) -> usize {
    if rows == 1 { WIDE } else { 1 }
}

/// As [`super::multiply`] by a matrix whose halves belong together, both a whole number of panels: `finish`
/// gets what belongs together. `sums` has room for what every thread of the pool gives to `finish`.
pub(crate) fn multiply_pairs(
    isa: Isa,
    pool: &mut Pool,
    acts: &Activations<'_>,
    weight: &CpuMatrix,
    bias: Option<&[f32]>,
    sums: &mut [f32],
    finish: Finish<'_>,
) -> Result<(), KernelError> {
    let halves = weight.panels().halves();
    let biases = match bias {
        Some(bias) => [Some(&bias[..bias.len() / 2]), Some(&bias[bias.len() / 2..])],
        None => [None; 2],
    };
    if acts.rows == 0 {
        return Ok(());
    }
    let room = pair_room(acts.rows);
    let sums = Disjoint::new(sums);
    run_panels(pool, acts, halves[0], &|part, panels, worker| {
        // SAFETY: no two running tasks have the same worker.
        let own = unsafe { sums.slice(worker * room, pair_room(part.acts.rows)) };
        let pair = Pair { isa, acts: &part.acts, halves, biases };
        pair.panels(panels, own, &|panels, sums| finish(part.first_row, panels, sums));
    })
}

/// Elements that [`Pair::panels`] needs room for.
pub(super) fn pair_room(rows: usize) -> usize {
    rows * 2 * PANEL * pair_panels(rows)
}

/// Two products of the same rows whose panels belong together.
pub(super) struct Pair<'a> {
    pub(super) isa: Isa,
    pub(super) acts: &'a Activations<'a>,
    pub(super) halves: [Panels<'a>; 2],
    pub(super) biases: [Option<&'a [f32]>; 2],
}

impl Pair<'_> {
    /// All rows for these panels of both halves; `sums` has room for as many as are finished at once.
    pub(super) fn panels(&self, range: Range<usize>, sums: &mut [f32], finish: PairFinish<'_>) {
        let Self { isa, acts, halves, biases } = *self;
        let step = pair_panels(acts.rows);
        let stride = 2 * PANEL * step;
        for start in range.clone().step_by(step) {
            let panels = start..(start + step).min(range.end);
            for (half, (weight, bias)) in halves.into_iter().zip(biases).enumerate() {
                let data = Disjoint::new(&mut *sums);
                let out = Output { data, stride, first_row: 0, column: PANEL * step * half };
                let first_panel = panels.start;
                Product { isa, acts, weight, bias, out: &out, first_panel }.panels(panels.clone());
            }
            finish(panels, sums);
        }
    }
}

//! Two products of the same rows whose outputs belong together (gate and up), panel by panel, so
//! that both sums are still in the cache when they are combined.
use std::ops::Range;

use super::super::isa::Isa;
use super::super::memory::Disjoint;
use super::super::pack::{CpuMatrix, PANEL, Panels};
use super::{Activations, Output, Product, WIDE, run_panels};
use crate::error::KernelError;
use crate::pool::Pool;

/// Consumes the sums of panels that belong together: `panels` of the first half, and the
/// corresponding ones of the second. Sums are `[rows, 2 * PANEL * pair_panels(rows)]`, with each
/// half's in one half of a row.
type PairFinish<'a> = &'a (dyn Fn(Range<usize>, &mut [f32]) + Sync);

/// As [`PairFinish`], for some of the rows; the first argument is the first row.
pub(crate) type Finish<'a> = &'a (dyn Fn(usize, Range<usize>, &mut [f32]) + Sync);

/// Panels per half that [`multiply_pairs`] multiplies before they are finished: few, so that their
/// sums stay in the cache.
pub(crate) fn pair_panels(rows: usize) -> usize {
    if rows == 1 { WIDE } else { 1 }
}

/// As [`super::multiply`] by a matrix of two corresponding halves, each a whole number of panels;
/// passes corresponding sums to `finish`. `sums` has room for the sums of every thread of the pool.
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

/// Elements of sums that [`Pair::panels`] needs.
pub(super) fn pair_room(rows: usize) -> usize {
    rows * 2 * PANEL * pair_panels(rows)
}

/// Two products of the same rows whose panels correspond.
pub(super) struct Pair<'a> {
    pub(super) isa: Isa,
    pub(super) acts: &'a Activations<'a>,
    pub(super) halves: [Panels<'a>; 2],
    pub(super) biases: [Option<&'a [f32]>; 2],
}

impl Pair<'_> {
    /// Multiplies all rows with these panels of both halves; `sums` has [`pair_room`] elements.
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

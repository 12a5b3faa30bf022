//! Products of groups of rows with a matrix for each group: a layer's experts and the rows that
//! chose them. All groups form one job of the pool, so that no thread waits at the end of each
//! group.
use std::ops::Range;

use super::super::isa::Isa;
use super::super::memory::{Disjoint, Scratch};
use super::super::pack::{CpuStack, Panels};
use super::super::precision::Arithmetic;
use super::layout::{Activations, GroupedActivations, lay_out_groups};
use super::pairs::{Pair, pair_room};
use super::{Output, Product, TASK_COST, WIDE, grain};
use crate::error::KernelError;
use crate::pool::Pool;

/// Rows that are multiplied with the same matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// Index of the expert.
    pub(crate) expert: usize,
    /// Its rows, in an order where the rows of a group are contiguous.
    pub(crate) rows: Range<usize>,
}

/// A range of panels of one group's product.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    group: usize,
    panels: Range<usize>,
}

/// Groups that cover all rows in order, with the rows' activations laid out for products.
pub(crate) struct Grouped<'a> {
    isa: Isa,
    groups: &'a [Group],
    acts: GroupedActivations<'a>,
}

/// Consumes the sums of an expert's gate and up panels, as in [`super::multiply_pairs`]; called
/// with the group, the panels and the sums.
type Finish<'a> = &'a (dyn Fn(&Group, Range<usize>, &[f32]) + Sync);

impl<'a> Grouped<'a> {
    /// Lays out the groups' rows; row `i` is `source(i)`, of `cols` elements.
    pub(crate) fn prepare<'s>(
        arithmetic: Arithmetic,
        pool: &mut Pool,
        scratch: &'a mut Scratch<u32>,
        groups: &'a [Group],
        cols: usize,
        source: &(dyn Fn(usize) -> &'s [f32] + Sync),
    ) -> Result<Self, KernelError> {
        let acts = lay_out_groups(arithmetic, pool, scratch, groups, cols, source)?;
        Ok(Self { isa: arithmetic.isa, groups, acts })
    }

    /// Elements of `sums` per thread for [`Grouped::multiply_pairs`].
    pub(crate) fn pair_room(groups: &[Group]) -> usize {
        groups.iter().map(|group| pair_room(group.rows.len())).max().unwrap_or(0)
    }

    /// For each group, the products with its expert's two matrices, number `2 * expert` and the
    /// next. `sums` has `room` elements per thread of the pool.
    pub(crate) fn multiply_pairs(
        &self,
        pool: &mut Pool,
        tasks: &mut Vec<Task>,
        (weight, bias): (&CpuStack, Option<&[f32]>),
        sums: &mut [f32],
        room: usize,
        finish: Finish<'_>,
    ) -> Result<(), KernelError> {
        self.cut(pool, weight.matrix(0), tasks);
        let sums = Disjoint::new(sums);
        pool.run(tasks.len(), &|index, worker| {
            let Task { group, panels } = tasks[index].clone();
            let group = &self.groups[group];
            // SAFETY: no two running tasks have the same worker.
            let own = unsafe { sums.slice(worker * room, pair_room(group.rows.len())) };
            let halves = [weight.matrix(2 * group.expert), weight.matrix(2 * group.expert + 1)];
            let biases = [0, 1].map(|half| of_matrix(bias, weight, 2 * group.expert + half));
            let acts = &self.activations(group);
            let pair = Pair { isa: self.isa, acts, halves, biases };
            pair.panels(panels, own, &|panels, sums| finish(group, panels, sums));
        })
    }

    /// For each group, the product with its expert's matrix, written to the group's rows of `out`,
    /// `[rows, weight.rows()]`.
    pub(crate) fn multiply(
        &self,
        pool: &mut Pool,
        tasks: &mut Vec<Task>,
        (weight, bias): (&CpuStack, Option<&[f32]>),
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.cut(pool, weight.matrix(0), tasks);
        let (isa, stride) = (self.isa, weight.rows());
        let out = Disjoint::new(out);
        pool.run(tasks.len(), &|index, _| {
            let Task { group, panels } = tasks[index].clone();
            let group = &self.groups[group];
            let acts = &self.activations(group);
            let bias = of_matrix(bias, weight, group.expert);
            let weight = weight.matrix(group.expert);
            let out = Output { data: out.again(), stride, first_row: group.rows.start, column: 0 };
            Product { isa, acts, weight, bias, out: &out, first_panel: 0 }.panels(panels);
        })
    }

    fn activations(&self, group: &Group) -> Activations<'_> {
        self.acts.rows(group.rows.clone())
    }

    /// Cuts the products of all groups into tasks: pieces that let threads finish at about the same
    /// time, and few of them if there is little work.
    fn cut(&self, pool: &Pool, matrix: Panels<'_>, tasks: &mut Vec<Task>) {
        tasks.clear();
        let panels = matrix.num_panels();
        let threads = pool.num_threads();
        for (index, group) in self.groups.iter().enumerate() {
            let rows = group.rows.len();
            let size = if threads == 1 {
                panels
            } else if matrix.num_pairs() * rows >= TASK_COST {
                1
            } else {
                grain(matrix, rows).next_multiple_of(if rows == 1 { WIDE } else { 1 })
            };
            for start in (0..panels).step_by(size.max(1)) {
                tasks.push(Task { group: index, panels: start..(start + size).min(panels) });
            }
        }
    }
}

/// The bias of matrix `index`, from the concatenated biases of the stack.
fn of_matrix<'a>(bias: Option<&'a [f32]>, weight: &CpuStack, index: usize) -> Option<&'a [f32]> {
    bias.map(|bias| &bias[index * weight.rows()..][..weight.rows()])
}

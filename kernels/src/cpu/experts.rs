//! Mixtures of experts (MoE): chooses experts for rows, groups rows by expert, and adds up the
//! weighted results of a row's experts. Products use `gemm`, except the router's (`router`).
use super::elementwise;
use super::gemm::{self, Group, Grouped, Task};
use super::math::{exp, sigmoid};
use super::memory::Disjoint;
use super::pack::{CpuMatrix, CpuStack, PANEL};
use super::{CpuBackend, CpuBuffer, CpuVector, GRAIN};
use crate::backend::{
    Buffer as _, Choices, EXPERT_SLOTS, ExpertActivation, ExpertOps, NOT_ASSIGNED, Routing, Scores,
};
use crate::check::experts::{self as check, StackSizes};
use crate::error::KernelError;

mod router;

/// The place of a slot that is in no group.
const NO_PLACE: usize = usize::MAX;

/// The experts of each row. A slot is one row at one of its experts.
#[derive(Debug)]
pub struct CpuRoutes {
    routing: Routing,
    rows: usize,
    rows_max: usize,
    /// `[rows, top_k]`
    experts: Vec<u32>,
    /// `[rows, top_k]`
    weights: Vec<f32>,
}

/// Scratch for grouping, reused from call to call.
#[derive(Debug, Default)]
pub(super) struct Grouping {
    pub(super) groups: Vec<Group>,
    /// The slot of each row of the groups.
    slots: Vec<usize>,
    /// The row in the groups of each slot; [`NO_PLACE`] for a slot without an expert.
    places: Vec<usize>,
    /// Number of slots per expert.
    counts: Vec<usize>,
    pub(super) tasks: Vec<Task>,
}

impl CpuRoutes {
    pub(super) fn new(rows_max: usize, routing: Routing) -> Result<Self, KernelError> {
        routing.check()?;
        let slots = rows_max.saturating_mul(routing.top_k);
        let (mut experts, mut weights) = (Vec::new(), Vec::new());
        let out_of_memory =
            |_| KernelError::OutOfMemory { what: "routes", bytes: slots as u64 * 8 };
        experts.try_reserve_exact(slots).map_err(out_of_memory)?;
        weights.try_reserve_exact(slots).map_err(out_of_memory)?;
        experts.resize(slots, 0);
        weights.resize(slots, 0.0);
        Ok(Self { routing, rows: 0, rows_max, experts, weights })
    }

    /// Sets the expert of each row from outside (LoRA adapters), instead of by a router.
    fn assign(&mut self, experts: &[u32]) -> Result<(), KernelError> {
        check::assign(experts, &self.routing, self.rows_max)?;
        let rows = experts.len();
        self.rows = rows;
        self.experts[..rows].copy_from_slice(experts);
        self.weights[..rows].fill(1.0);
        Ok(())
    }

    /// The chosen experts and their weights, `[rows, top_k]` each.
    pub(super) fn choices(&self) -> Choices {
        let slots = self.rows * self.routing.top_k;
        (self.experts[..slots].to_vec(), self.weights[..slots].to_vec())
    }
}

/// Chooses the experts of a row by its logits, largest first, and computes their weights; NaN comes
/// last. The shared experts follow. Gives the same bits on every host, as the logits do: see
/// `router`.
fn choose(
    routing: &Routing,
    logits: &mut [f32],
    bias: Option<&[f32]>,
    experts: &mut [u32],
    weights: &mut [f32],
) {
    let (num_experts, chosen) = routing.chosen();
    let (scores, gate) = logits.split_at_mut(num_experts);
    let (experts, shared_experts) = experts.split_at_mut(chosen);
    let (weights, shared_weights) = weights.split_at_mut(chosen);
    for (expert, shared) in (num_experts..).zip(shared_experts) {
        *shared = expert as u32;
    }
    shared_weights.fill(gate.first().map_or(1.0, |logit| sigmoid(*logit)));
    // In the end, weights are divided by this sum.
    let sum: f32 = match routing.scores {
        Scores::Softmax => {
            if let Some(bias) = bias {
                scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
            }
            let among = Among::best(routing, scores, None);
            largest(scores, None, &among, experts, weights);
            let most = weights[0];
            let all = if routing.normalise { &*weights } else { &*scores };
            let sum = all.iter().map(|logit| exp(logit - most)).sum();
            weights.iter_mut().for_each(|weight| *weight = exp(*weight - most));
            sum
        }
        Scores::Sigmoid => {
            scores.iter_mut().for_each(|score| *score = sigmoid(*score));
            let among = Among::best(routing, scores, bias);
            largest(scores, bias, &among, experts, weights);
            match routing.normalise {
                true => weights.iter().sum::<f32>() + SUM_LEAST,
                false => 1.0,
            }
        }
    };
    for weight in weights {
        *weight = *weight / sum * routing.scale;
    }
}

/// Added to sums of sigmoids, which could be 0; as in transformers.
const SUM_LEAST: f32 = 1e-20;

/// What an expert is sorted by.
fn key(scores: &[f32], bias: Option<&[f32]>, expert: usize) -> f32 {
    bias.map_or(scores[expert], |bias| scores[expert] + bias[expert])
}

/// The groups whose experts a row chooses from.
struct Among {
    /// Experts per group.
    size: usize,
    /// Bit `i`: group `i`.
    groups: u32,
}

impl Among {
    /// The best groups, ties by lowest number.
    fn best(routing: &Routing, scores: &[f32], bias: Option<&[f32]>) -> Self {
        let size = routing.group_size();
        if routing.kept_groups == routing.groups {
            return Self { size, groups: u32::MAX };
        }
        let mut sums = [f32::NEG_INFINITY; Routing::GROUPS_MOST];
        for (group, sum) in sums[..routing.groups].iter_mut().enumerate() {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for expert in group * size..(group + 1) * size {
                // False for NaN, which comes last.
                match key(scores, bias, expert) {
                    key if key > first => (first, second) = (key, first),
                    key if key > second => second = key,
                    _ => {}
                }
            }
            *sum = match routing.scores {
                Scores::Softmax => first,
                Scores::Sigmoid => first + second,
            };
        }
        let mut groups = 0u32;
        for _ in 0..routing.kept_groups {
            let mut best: Option<usize> = None;
            for group in (0..routing.groups).filter(|group| groups >> group & 1 == 0) {
                if best.is_none_or(|best| sums[group] > sums[best]) {
                    best = Some(group);
                }
            }
            groups |= best.map_or(0, |best| 1 << best);
        }
        Self { size, groups }
    }

    fn has(&self, expert: usize) -> bool {
        self.groups >> (expert / self.size) & 1 == 1
    }
}

/// Finds the experts with the largest `scores + bias`, ties by lowest number, and their scores.
fn largest(
    scores: &[f32],
    bias: Option<&[f32]>,
    among: &Among,
    experts: &mut [u32],
    found: &mut [f32],
) {
    for (i, found) in found.iter_mut().enumerate() {
        let (chosen, rest) = experts.split_at_mut(i);
        let mut best: Option<(usize, f32)> = None;
        for expert in (0..scores.len()).filter(|expert| among.has(*expert)) {
            let key = key(scores, bias, expert);
            let is_better =
                best.is_none_or(|(_, most)| key > most || (most.is_nan() && !key.is_nan()));
            if is_better && !chosen.contains(&(expert as u32)) {
                best = Some((expert, key));
            }
        }
        let (expert, _) = best.unwrap_or_default();
        rest[0] = expert as u32;
        *found = scores[expert];
    }
}

impl Grouping {
    /// A group for each of `heads` heads, with `rows` rows.
    pub(super) fn one_per_head(&mut self, heads: usize, rows: usize) {
        self.groups.clear();
        let group = |head| Group { expert: head, rows: head * rows..(head + 1) * rows };
        self.groups.extend((0..heads).filter(|_| rows > 0).map(group));
    }

    /// Groups slots by expert: in the order of experts, then of rows.
    fn group(&mut self, experts: &[u32], num_experts: usize) {
        let Self { groups, slots, places, counts, .. } = self;
        counts.clear();
        counts.resize(num_experts, 0);
        let assigned = |expert: &&u32| **expert != NOT_ASSIGNED;
        for &expert in experts.iter().filter(assigned) {
            counts[expert as usize] += 1;
        }
        groups.clear();
        let mut start = 0;
        for (expert, count) in counts.iter_mut().enumerate() {
            let rows = start..start + *count;
            *count = start;
            start = rows.end;
            if !rows.is_empty() {
                groups.push(Group { expert, rows });
            }
        }
        slots.resize(experts.len(), 0);
        places.clear();
        places.resize(experts.len(), NO_PLACE);
        for (slot, &expert) in experts.iter().enumerate().filter(|(_, expert)| assigned(expert)) {
            let place = &mut counts[expert as usize];
            slots[*place] = slot;
            places[slot] = *place;
            *place += 1;
        }
    }
}

pub(super) fn sizes(stack: &CpuStack) -> StackSizes {
    (stack.count(), stack.rows(), stack.cols())
}

impl ExpertOps for CpuBackend {
    fn new_routes(&mut self, rows_max: usize, routing: Routing) -> Result<CpuRoutes, KernelError> {
        CpuRoutes::new(rows_max, routing)
    }

    fn route(
        &mut self,
        x: &CpuBuffer,
        router: &CpuMatrix,
        bias: Option<&CpuVector>,
        routes: &mut CpuRoutes,
    ) -> Result<(), KernelError> {
        check::route(x, router, bias, &routes.routing, routes.rows_max)?;
        let routing = routes.routing;
        let (top_k, num_logits) = (routing.top_k, routing.num_logits());
        let rows = x.rows();
        routes.rows = rows;
        let Self { isa, pool, wide, .. } = self;
        let logits = wide.get(rows * num_logits)?;
        router::multiply(*isa, pool, rows, &|i| x.row(i), router.panels(), logits)?;
        let logits = Disjoint::new(logits);
        let experts = Disjoint::new(&mut routes.experts);
        let weights = Disjoint::new(&mut routes.weights);
        pool.run_ranges(rows, (GRAIN / (num_logits * top_k)).max(1), &|range, _| {
            for row in range {
                // SAFETY: every row belongs to one task.
                let experts = unsafe { experts.slice(row * top_k, top_k) };
                // SAFETY: as above.
                let weights = unsafe { weights.slice(row * top_k, top_k) };
                // SAFETY: as above.
                let logits = unsafe { logits.slice(row * num_logits, num_logits) };
                choose(&routing, logits, bias.map(|bias| &**bias), experts, weights);
            }
        })
    }

    fn assign(&mut self, experts: &[u32], routes: &mut CpuRoutes) -> Result<(), KernelError> {
        routes.assign(experts)
    }

    fn experts_gate_up(
        &mut self,
        x: &CpuBuffer,
        weight: &CpuStack,
        bias: Option<&CpuVector>,
        activation: ExpertActivation,
        routes: &CpuRoutes,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        check::gate_up(x, sizes(weight), bias, (&routes.routing, routes.rows), out)?;
        let Routing { num_experts, top_k, .. } = routes.routing;
        let (rows, inner) = (x.rows(), out.width());
        out.set_rows(rows * top_k)?;
        let arithmetic = self.arithmetic();
        let Self { isa, pool, acts, wide, grouping, .. } = self;
        let experts = &routes.experts[..rows * top_k];
        for (index, experts) in experts.chunks((EXPERT_SLOTS / top_k).max(1) * top_k).enumerate() {
            let first = index * (EXPERT_SLOTS / top_k).max(1) * top_k;
            grouping.group(experts, num_experts);
            let Grouping { groups, slots, tasks, .. } = &mut *grouping;
            let slots = &slots[..];
            let source = |place: usize| x.row((first + slots[place]) / top_k);
            let grouped = Grouped::prepare(arithmetic, pool, acts, groups, x.width(), &source)?;
            let room = Grouped::pair_room(groups);
            let sums = wide.get(pool.num_threads() * room)?;
            let out = Disjoint::new(out.values_mut());
            let weight = (weight, bias.map(|bias| &**bias));
            grouped.multiply_pairs(pool, tasks, weight, sums, room, &|group, panels, sums| {
                let count = group.rows.len();
                let half = gemm::pair_panels(count) * PANEL;
                let start = panels.start * PANEL;
                let len = (panels.len() * PANEL).min(inner - start);
                for (place, sums) in group.rows.clone().zip(sums.chunks_exact(half * 2)) {
                    let (gate, up) = sums.split_at(half);
                    // SAFETY: the columns of the expert's rows belong to one task.
                    let out = unsafe { out.slice((first + slots[place]) * inner + start, len) };
                    elementwise::expert_mul(*isa, activation, &gate[..len], &up[..len], out);
                }
            })?;
        }
        Ok(())
    }

    fn experts_down(
        &mut self,
        x: &CpuBuffer,
        first_column: usize,
        weight: &CpuStack,
        bias: Option<&CpuVector>,
        routes: &CpuRoutes,
        out: &mut CpuBuffer,
    ) -> Result<(), KernelError> {
        let routed = (&routes.routing, routes.rows);
        let end = check::down((x, first_column), sizes(weight), bias, routed, out)?;
        let Routing { num_experts, top_k, .. } = routes.routing;
        let (rows, width, cols) = (routes.rows, out.width(), weight.cols());
        out.set_rows(rows)?;
        let arithmetic = self.arithmetic();
        let Self { isa, pool, acts, wide, grouping, .. } = self;
        let isa = *isa;
        let rows_most = (EXPERT_SLOTS / top_k).max(1);
        let out = Disjoint::new(out.values_mut());
        for first in (0..rows).step_by(rows_most) {
            let count = rows_most.min(rows - first);
            let own = first * top_k..(first + count) * top_k;
            grouping.group(&routes.experts[own.clone()], num_experts);
            let Grouping { groups, slots, places, tasks, .. } = &mut *grouping;
            let source = |place: usize| &x.row(own.start + slots[place])[first_column..end];
            let grouped = Grouped::prepare(arithmetic, pool, acts, groups, cols, &source)?;
            let made = wide.get(count * top_k * width)?;
            grouped.multiply(pool, tasks, (weight, bias.map(|bias| &**bias)), made)?;
            let weights = &routes.weights[own.clone()];
            let (made, places) = (&*made, &places[..]);
            pool.run_ranges(count, (GRAIN / (top_k * width)).max(1), &|range, _| {
                for row in range {
                    // SAFETY: every row belongs to one task.
                    let out = unsafe { out.slice((first + row) * width, width) };
                    out.fill(0.0);
                    for slot in row * top_k..(row + 1) * top_k {
                        if places[slot] == NO_PLACE {
                            continue;
                        }
                        let made = &made[places[slot] * width..][..width];
                        elementwise::add_scaled(isa, out, made, weights[slot]);
                    }
                }
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen_in_order_and_ties_by_number() {
        let check = |logits: &[f32], normalise, want: &[u32]| {
            let mut experts = vec![9; want.len()];
            let mut weights = vec![0.0; want.len()];
            let routing = Routing::softmax(logits.len(), want.len(), normalise);
            choose(&routing, &mut logits.to_vec(), None, &mut experts, &mut weights);
            assert_eq!(experts, want, "{logits:?}");
            weights
        };
        check(&[0.0, 3.0, 1.0, 3.0], true, &[1, 3, 2]);
        check(&[0.5; 6], false, &[0, 1, 2]);
        check(&[f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0], false, &[2, 0]);
        // All choices must differ, whatever the logits.
        check(&[f32::NAN, 1.0, f32::NAN, 2.0], true, &[3, 1, 0]);
        let (a, b) = (0.25f32.ln(), 0.5f32.ln());
        let close = |weights: Vec<f32>, want: [f32; 2]| {
            assert!(weights.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{weights:?}");
        };
        close(check(&[a, b, a], false, &[1, 0]), [0.5, 0.25]);
        close(check(&[a, b, a], true, &[1, 0]), [2.0 / 3.0, 1.0 / 3.0]);
    }

    #[test]
    fn grouping_keeps_every_slot_once_with_its_expert() {
        let mut grouping = Grouping::default();
        let experts = [3, 0, 1, 3, 0, 5, 3, 1];
        grouping.group(&experts, 6);
        let found: Vec<_> = grouping.groups.iter().map(|g| (g.expert, g.rows.clone())).collect();
        assert_eq!(found, [(0, 0..2), (1, 2..4), (3, 4..7), (5, 7..8)]);
        for group in &grouping.groups {
            for place in group.rows.clone() {
                let slot = grouping.slots[place];
                assert_eq!(experts[slot] as usize, group.expert);
                assert_eq!(grouping.places[slot], place);
            }
        }
    }
}

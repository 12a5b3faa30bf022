//! Mixtures of experts, row by row and expert by expert.
use super::{ReferenceBackend, ReferenceMatrix, project};
use crate::backend::{Buffer as _, ExpertActivation, ExpertOps, NOT_ASSIGNED, Routing, Scores};
use crate::check::experts::{self as check, StackSizes};
use crate::error::KernelError;

/// The experts chosen by each row.
#[derive(Debug)]
pub struct ReferenceRoutes {
    pub(super) routing: Routing,
    rows_max: usize,
    /// Experts and weights of each row.
    pub(super) chosen: Vec<Vec<(usize, f32)>>,
}

impl ReferenceRoutes {
    pub(super) fn new(rows_max: usize, routing: Routing) -> Result<Self, KernelError> {
        routing.check()?;
        Ok(Self { routing, rows_max, chosen: Vec::new() })
    }
}

/// The experts with the largest probabilities or scores, then the shared ones; and their weights.
fn choose(logits: &[f32], bias: Option<&[f32]>, routing: &Routing) -> Vec<(usize, f32)> {
    let (num_experts, chosen) = routing.chosen();
    let (logits, gate) = logits.split_at(num_experts);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let of = |i: usize| bias.map_or(0.0, |bias| bias[i]);
    // What experts are sorted by, and their weights before they are divided. Logits differ even
    // where probabilities round to the same value.
    let (keys, scores): (Vec<f32>, Vec<f32>) = match routing.scores {
        Scores::Softmax => {
            let logits: Vec<f32> = (0..num_experts).map(|i| logits[i] + of(i)).collect();
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = logits.iter().map(|logit| (logit - most).exp()).sum();
            let scores = logits.iter().map(|logit| (logit - most).exp() / sum).collect();
            (logits, scores)
        }
        Scores::Sigmoid => {
            let scores: Vec<f32> = logits.iter().map(|logit| sigmoid(*logit)).collect();
            ((0..num_experts).map(|i| scores[i] + of(i)).collect(), scores)
        }
    };
    let is_kept = kept(&keys, routing);
    let mut all: Vec<(usize, f32)> =
        scores.into_iter().enumerate().filter(|(i, _)| is_kept[i / routing.group_size()]).collect();
    // Stable, so that the lowest number comes first among equals. NaN comes last; both zeros are
    // equal.
    let key = |i: usize| if keys[i].is_nan() { f32::NEG_INFINITY } else { keys[i] + 0.0 };
    all.sort_by(|(a, _), (b, _)| key(*b).total_cmp(&key(*a)));
    all.truncate(chosen);
    if routing.normalise {
        let least = if routing.scores == Scores::Sigmoid { 1e-20 } else { 0.0 };
        let sum: f32 = all.iter().map(|(_, weight)| weight).sum::<f32>() + least;
        all.iter_mut().for_each(|(_, weight)| *weight /= sum);
    }
    all.iter_mut().for_each(|(_, weight)| *weight *= routing.scale);
    let weight = gate.first().map_or(1.0, |logit| sigmoid(*logit));
    all.extend((num_experts..routing.num_experts).map(|expert| (expert, weight)));
    all
}

/// For each group, whether it is among the best; ties by lowest number.
fn kept(keys: &[f32], routing: &Routing) -> Vec<bool> {
    let score = |group: &[f32]| {
        let mut sorted: Vec<f32> = group.iter().map(|key| key.max(f32::NEG_INFINITY)).collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        match routing.scores {
            Scores::Softmax => sorted[0] + 0.0,
            Scores::Sigmoid => sorted.iter().take(2).sum(),
        }
    };
    let scores: Vec<f32> = keys.chunks(routing.group_size()).map(score).collect();
    let mut best: Vec<usize> = (0..routing.groups).collect();
    best.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    best.truncate(routing.kept_groups);
    (0..routing.groups).map(|group| best.contains(&group)).collect()
}

/// Number of matrices in a stack, and rows and columns of each.
pub(super) fn sizes(stack: &[ReferenceMatrix]) -> StackSizes {
    stack.first().map_or((0, 0, 0), |matrix| (stack.len(), matrix.rows(), matrix.cols()))
}

impl ExpertOps for ReferenceBackend {
    fn new_routes(
        &mut self,
        rows_max: usize,
        routing: Routing,
    ) -> Result<Self::Routes, KernelError> {
        ReferenceRoutes::new(rows_max, routing)
    }

    fn route(
        &mut self,
        x: &Self::Buffer,
        router: &Self::Matrix,
        bias: Option<&Self::Vector>,
        routes: &mut Self::Routes,
    ) -> Result<(), KernelError> {
        check::route(x, router, bias, &routes.routing, routes.rows_max)?;
        let mut logits = vec![0.0; router.rows()];
        routes.chosen.clear();
        for i in 0..x.rows() {
            project(x.row(i), router, None, &mut logits);
            let bias = bias.map(Vec::as_slice);
            routes.chosen.push(choose(&logits, bias, &routes.routing));
        }
        Ok(())
    }

    fn assign(&mut self, experts: &[u32], routes: &mut Self::Routes) -> Result<(), KernelError> {
        check::assign(experts, &routes.routing, routes.rows_max)?;
        let chosen = |&expert: &u32| match expert {
            NOT_ASSIGNED => Vec::new(),
            expert => vec![(expert as usize, 1.0)],
        };
        routes.chosen.clear();
        routes.chosen.extend(experts.iter().map(chosen));
        Ok(())
    }

    fn experts_gate_up(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        activation: ExpertActivation,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let top_k = routes.routing.top_k;
        let routed = (&routes.routing, routes.chosen.len());
        check::gate_up(x, sizes(weight), bias, routed, out)?;
        let inner = out.width();
        let bias = |matrix: usize| bias.map(|bias| &bias[matrix * inner..][..inner]);
        out.set_rows(x.rows() * top_k)?;
        let (mut gate, mut up) = (vec![0.0; inner], vec![0.0; inner]);
        for (row, chosen) in routes.chosen.iter().enumerate() {
            for (j, &(expert, _)) in chosen.iter().enumerate() {
                project(x.row(row), &weight[2 * expert], bias(2 * expert), &mut gate);
                project(x.row(row), &weight[2 * expert + 1], bias(2 * expert + 1), &mut up);
                for ((y, g), u) in out.row_mut(row * top_k + j).iter_mut().zip(&gate).zip(&up) {
                    *y = activated(activation, *g, *u);
                }
            }
        }
        Ok(())
    }

    fn experts_down(
        &mut self,
        x: &Self::Buffer,
        first: usize,
        weight: &Self::Stack,
        bias: Option<&Self::Vector>,
        routes: &Self::Routes,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let (top_k, routed) = (routes.routing.top_k, (&routes.routing, routes.chosen.len()));
        let end = check::down((x, first), sizes(weight), bias, routed, out)?;
        let width = out.width();
        out.set_rows(routes.chosen.len())?;
        let mut made = vec![0.0; width];
        for (row, chosen) in routes.chosen.iter().enumerate() {
            out.row_mut(row).fill(0.0);
            for (j, &(expert, share)) in chosen.iter().enumerate() {
                let x = &x.row(row * top_k + j)[first..end];
                let bias = bias.map(|bias| &bias[expert * width..][..width]);
                project(x, &weight[expert], bias, &mut made);
                for (y, made) in out.row_mut(row).iter_mut().zip(&made) {
                    *y += share * made;
                }
            }
        }
        Ok(())
    }
}

fn activated(activation: ExpertActivation, gate: f32, up: f32) -> f32 {
    match activation {
        ExpertActivation::Silu => gate / (1.0 + (-gate).exp()) * up,
        ExpertActivation::Clamped { alpha, limit } => {
            // NaN stays NaN, as with `clamp`.
            let gate = if gate > limit { limit } else { gate };
            gate / (1.0 + (-alpha * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
        }
    }
}

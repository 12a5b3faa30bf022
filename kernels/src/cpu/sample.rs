//! Chooses tokens from a row of logits, and computes log-probabilities. Pure: a row in, a token
//! out.
//!
//! The order is: the mask, logit bias, suppression of end tokens, penalties (repetition, frequency,
//! presence); then arg-max if the temperature is 0, otherwise temperature, min-p, top-k, top-p and
//! one uniform number. Ties go to the lower token id. Sums are computed by one thread, in a fixed
//! order and with this crate's own `exp`, so a row gives the same token on any machine.
use std::cmp::Ordering;

use super::mask;
use super::math::exp;
use crate::philox;
use crate::sampling::{SampleParams, SampleRow, Sampled};

/// A sampler, with scratch memory reused from row to row. One per thread.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after bias, suppression, penalties and mask.
    logits: Vec<f32>,
    /// `e^((logit - max) / temperature)`
    weights: Vec<f32>,
    /// Candidate token ids.
    order: Vec<u32>,
    /// Number of occurrences per token; all 0 between rows.
    counts: Vec<u32>,
}

impl Sampler {
    /// A sampler; its scratch memory grows with the first rows.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Chooses a token from `logits` (`[vocab]`) with the parameters of `row`.
    pub fn sample(&mut self, logits: &[f32], row: &SampleRow<'_>) -> Sampled {
        let Some(token) = finite_max(logits).and_then(|_| self.choose(logits, row)) else {
            return Sampled { corrupted: true, ..Sampled::default() };
        };
        match row.params.logprobs {
            Some(top_n) => self.score(logits, token, top_n),
            None => Sampled { token, ..Sampled::default() },
        }
    }

    /// The log-probability and rank of `token`, and the `top_n` most likely tokens. `token` must be
    /// below `logits.len()`.
    pub fn score(&mut self, logits: &[f32], token: u32, top_n: u32) -> Sampled {
        let Some(max) = finite_max(logits) else {
            return Sampled { corrupted: true, ..Sampled::default() };
        };
        let total: f64 = logits.iter().map(|&x| f64::from(exp(x - max))).sum();
        let log_total = f64::from(max) + total.ln();
        let logprob = |token: u32| (f64::from(logits[token as usize]) - log_total) as f32;
        let own = logits[token as usize];
        let above = logits.iter().filter(|&&x| x > own).count();
        let equal_before = logits[..token as usize].iter().filter(|&&x| x == own).count();
        self.order.clear();
        if top_n > 0 {
            self.order.extend(0..logits.len() as u32);
            let keep = self.order.len().min(top_n as usize);
            sort_first(&mut self.order, keep, logits);
            self.order.truncate(keep);
        }
        Sampled {
            token,
            corrupted: false,
            logprob: logprob(token),
            rank: (above + equal_before + 1) as u32,
            top: self.order.iter().map(|&token| (token, logprob(token))).collect(),
        }
    }

    /// The chosen token; `None` when the edited logits are not finite.
    fn choose(&mut self, logits: &[f32], row: &SampleRow<'_>) -> Option<u32> {
        let params = row.params;
        let greedy = params.temperature <= 0.0;
        match row.allowed {
            None if greedy && !edits(row) => return Some(arg_max(logits)),
            Some(mask) if greedy && !edits(row) => return mask::arg_max(logits, mask),
            None => {
                self.logits.clear();
                self.logits.extend_from_slice(logits);
            }
            Some(mask) => mask::apply(logits, mask, &mut self.logits),
        }
        self.edit(row);
        let max = finite_max(&self.logits)?;
        if greedy {
            return Some(arg_max(&self.logits));
        }
        // The inverse of a smaller one would be infinite, and NaN when multiplied by 0.
        let inverse = 1.0 / params.temperature.max(f32::MIN_POSITIVE);
        // The most likely token has weight 1, so min-p can be compared with the weights directly.
        let min_p = params.min_p;
        self.weights.clear();
        self.weights.extend(self.logits.iter().map(|&x| {
            let weight = exp((x - max) * inverse);
            if weight < min_p { 0.0 } else { weight }
        }));
        let position = row.output.len() as u32;
        let uniform = philox::uniform(params.seed, params.choice, position, 0);
        let truncated =
            params.top_p < 1.0 || (params.top_k > 0 && (params.top_k as usize) < self.logits.len());
        if truncated {
            let kept = self.truncate(params);
            let ids = &self.order[..kept];
            draw(uniform, ids.iter().map(|&id| (id, self.weights[id as usize])))
        } else {
            draw(uniform, (0u32..).zip(self.weights.iter().copied()))
        }
    }

    /// Moves the tokens that remain after top-k and top-p to the front of `order`, the most likely
    /// first; returns their number.
    fn truncate(&mut self, params: &SampleParams) -> usize {
        let weights = &self.weights;
        self.order.clear();
        self.order.extend((0..weights.len() as u32).filter(|&id| weights[id as usize] > 0.0));
        let top_k = if params.top_k == 0 { usize::MAX } else { params.top_k as usize };
        let mut sorted = 0;
        if top_k < self.order.len() {
            sort_first(&mut self.order, top_k, &self.logits);
            self.order.truncate(top_k);
            sorted = top_k;
        }
        let total: f64 = self.order.iter().map(|&id| f64::from(weights[id as usize])).sum();
        let wanted = if params.top_p < 1.0 { total * f64::from(params.top_p) } else { f64::MAX };
        let mut sum = 0.0;
        let mut kept = 0;
        while kept < self.order.len() {
            if kept == sorted {
                // Sorting only a few of the most likely tokens is usually enough; otherwise sort
                // more, step by step.
                let more = (sorted * 7).max(64).min(self.order.len() - sorted);
                sort_first(&mut self.order[sorted..], more, &self.logits);
                sorted += more;
            }
            sum += f64::from(weights[self.order[kept] as usize]);
            kept += 1;
            if sum >= wanted {
                break;
            }
        }
        kept
    }

    fn edit(&mut self, row: &SampleRow<'_>) {
        let params = row.params;
        for &(token, bias) in &params.logit_bias {
            if let Some(x) = self.logits.get_mut(token as usize) {
                *x += bias;
            }
        }
        if row.output.len() < params.min_tokens as usize {
            for &token in &params.suppress_until_min {
                if let Some(x) = self.logits.get_mut(token as usize) {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        if self.counts.len() < self.logits.len() {
            self.counts.resize(self.logits.len(), 0);
        }
        let vocab = self.logits.len();
        let (logits, counts) = (&mut self.logits, &mut self.counts);
        let valid = |&&token: &&u32| (token as usize) < vocab;
        if params.repetition_penalty != 1.0 {
            let penalty = params.repetition_penalty;
            for &token in row.prompt.iter().chain(row.output).filter(valid) {
                let (x, count) = (&mut logits[token as usize], &mut counts[token as usize]);
                if *count == 0 {
                    *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
                }
                *count = 1;
            }
            for &token in row.prompt.iter().chain(row.output).filter(valid) {
                counts[token as usize] = 0;
            }
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            for &token in row.output.iter().filter(valid) {
                counts[token as usize] += 1;
            }
            for &token in row.output.iter().filter(valid) {
                let count = std::mem::take(&mut counts[token as usize]);
                if count > 0 {
                    let x = &mut logits[token as usize];
                    *x -= params.frequency_penalty * count as f32;
                    *x -= params.presence_penalty;
                }
            }
        }
    }
}

/// Whether anything except the mask edits the logits.
fn edits(row: &SampleRow<'_>) -> bool {
    let params = row.params;
    !params.logit_bias.is_empty()
        || row.output.len() < params.min_tokens as usize
        || params.repetition_penalty != 1.0
        || params.frequency_penalty != 0.0
        || params.presence_penalty != 0.0
}

/// The largest logit; `None` if any is NaN or +infinity, or none is above -infinity.
fn finite_max(logits: &[f32]) -> Option<f32> {
    let mut max = f32::NEG_INFINITY;
    let mut sound = true;
    for &x in logits {
        // Also false for NaN.
        sound &= x < f32::INFINITY;
        max = if x > max { x } else { max };
    }
    (sound && max > f32::NEG_INFINITY).then_some(max)
}

/// The lowest id of the largest logit.
fn arg_max(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// Orders by larger logit, then by lower id.
fn by_rank(logits: &[f32]) -> impl Fn(&u32, &u32) -> Ordering {
    move |&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
}

/// Moves the first `count` tokens by rank to the front, sorted.
fn sort_first(order: &mut [u32], count: usize, logits: &[f32]) {
    if count == 0 {
        return;
    }
    if count < order.len() {
        order.select_nth_unstable_by(count - 1, by_rank(logits));
    }
    order[..count].sort_unstable_by(by_rank(logits));
}

/// The token at the fraction `uniform` of the cumulative weights; `None` if there is no weight.
fn draw(uniform: f64, weights: impl Iterator<Item = (u32, f32)> + Clone) -> Option<u32> {
    let total: f64 = weights.clone().map(|(_, weight)| f64::from(weight)).sum();
    let target = uniform * total;
    let mut sum = 0.0;
    let mut last = None;
    for (id, weight) in weights {
        if weight > 0.0 {
            sum += f64::from(weight);
            last = Some(id);
            if sum > target {
                break;
            }
        }
    }
    last
}

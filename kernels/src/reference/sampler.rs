//! Sampling by definition: each parameter is one step over a list of candidates, in f64.
//!
//! Order: the mask, logit bias, suppression of end tokens, repetition, frequency and presence
//! penalties; then arg-max if the temperature is 0, otherwise temperature, min-p, top-k, top-p and
//! one uniform number. The number selects from the candidates' cumulative weights, in order of
//! probability if top-k or top-p cut the list, otherwise in order of token id. Ties go to the lower
//! token id.
use std::collections::BTreeMap;

use crate::philox;
use crate::sampling::{SampleRow, Sampled};

/// Chooses a token.
pub(super) fn sample(logits: &[f32], row: &SampleRow<'_>) -> Sampled {
    let params = row.params;
    let edited = edit(logits, row);
    if !is_sound(logits) || !is_sound(&edited) {
        return Sampled { corrupted: true, ..Sampled::default() };
    }
    let token = if params.temperature <= 0.0 { ranked(&edited)[0] } else { draw(&edited, row) };
    match params.logprobs {
        Some(top_n) => score(logits, token, top_n),
        None => Sampled { token, ..Sampled::default() },
    }
}

/// Log-probability and rank of `token`, and the `top_n` most likely tokens.
pub(super) fn score(logits: &[f32], token: u32, top_n: u32) -> Sampled {
    if !is_sound(logits) {
        return Sampled { corrupted: true, ..Sampled::default() };
    }
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - max - sum.ln()) as f32;
    let own = logits[token as usize];
    let better =
        (0u32..).zip(logits).filter(|&(id, &x)| x > own || (x == own && id < token)).count();
    let order = if top_n == 0 { Vec::new() } else { ranked(logits) };
    Sampled {
        token,
        corrupted: false,
        logprob: logprob(token),
        rank: better as u32 + 1,
        top: order.iter().take(top_n as usize).map(|&id| (id, logprob(id))).collect(),
    }
}

/// No NaN, no +infinity, and something to choose.
fn is_sound(logits: &[f32]) -> bool {
    logits.iter().all(|&x| x < f32::INFINITY) && logits.iter().any(|&x| x > f32::NEG_INFINITY)
}

/// All ids, the largest logit first, ties by lower id.
fn ranked(logits: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    ids
}

/// The logits after the mask, bias, suppression and penalties.
fn edit(logits: &[f32], row: &SampleRow<'_>) -> Vec<f32> {
    let params = row.params;
    let mut edited = logits.to_vec();
    if let Some(mask) = row.allowed {
        for (token, x) in edited.iter_mut().enumerate() {
            if mask[token / 32] & (1 << (token % 32)) == 0 {
                *x = f32::NEG_INFINITY;
            }
        }
    }
    for &(token, bias) in &params.logit_bias {
        if let Some(x) = edited.get_mut(token as usize) {
            *x += bias;
        }
    }
    if row.output.len() < params.min_tokens as usize {
        for &token in &params.suppress_until_min {
            if let Some(x) = edited.get_mut(token as usize) {
                *x = f32::NEG_INFINITY;
            }
        }
    }
    let mut seen = BTreeMap::new();
    for &token in row.prompt {
        seen.entry(token).or_insert(0u32);
    }
    for &token in row.output {
        *seen.entry(token).or_insert(0u32) += 1;
    }
    for (&token, &generated) in &seen {
        let Some(x) = edited.get_mut(token as usize) else { continue };
        let penalty = params.repetition_penalty;
        *x = if *x > 0.0 { *x / penalty } else { *x * penalty };
        if generated > 0 {
            *x -= params.frequency_penalty * generated as f32;
            *x -= params.presence_penalty;
        }
    }
    edited
}

fn draw(edited: &[f32], row: &SampleRow<'_>) -> u32 {
    let params = row.params;
    let order = ranked(edited);
    let max = f64::from(edited[order[0] as usize]);
    let temperature = f64::from(params.temperature);
    let weight = |id: u32| ((f64::from(edited[id as usize]) - max) / temperature).exp();

    let min_p = f64::from(params.min_p);
    let mut kept: Vec<u32> =
        order.into_iter().filter(|&id| weight(id) > 0.0 && weight(id) >= min_p).collect();
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let total: f64 = kept.iter().map(|&id| weight(id)).sum();
        let mut sum = 0.0;
        let reaches = kept.iter().position(|&id| {
            sum += weight(id);
            sum >= total * f64::from(params.top_p)
        });
        kept.truncate(reaches.map_or(kept.len(), |last| last + 1));
    }
    let cuts = params.top_p < 1.0 || (1..edited.len()).contains(&(params.top_k as usize));
    if !cuts {
        kept.sort_unstable();
    }

    let position = row.output.len() as u32;
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    let target = philox::uniform(params.seed, params.choice, position, 0) * total;
    let mut sum = 0.0;
    for &id in &kept {
        sum += weight(id);
        if sum > target {
            return id;
        }
    }
    // Rounding can leave the sum slightly below the target.
    kept.last().copied().unwrap_or(0)
}

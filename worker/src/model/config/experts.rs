//! The keys of `config.json` for mixtures of experts.
use kernels::backend::{ExpertActivation, Routing};

use super::architecture::{Architecture, ExpertKeys};
use super::{Raw, SIZE_MAX, gpt_oss, size};
use crate::model::experts::ExpertsConfig;

/// Reads the mixtures of experts, if the architecture has them.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn read(
    raw: &Raw,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Option<ExpertsConfig>, String> {
    let Some(keys) = architecture.experts() else { return Ok(None) };
    let key = match keys {
        ExpertKeys::EveryLayer => "num_local_experts",
        ExpertKeys::SomeLayers => "num_experts",
    };
    let (experts_most, top_most) = Routing::MOST;
    // transformers 5 uses num_local_experts for both.
    let num_experts = raw.num_experts.or(raw.num_local_experts);
    let num_experts = bounded(key, num_experts, experts_most)?;
    let top_k = bounded("num_experts_per_tok", raw.num_experts_per_tok, num_experts.min(top_most))?;
    let (intermediate_size, normalise, layers) = match keys {
        ExpertKeys::EveryLayer => {
            (size("intermediate_size", raw.intermediate_size)?, true, vec![true; num_layers])
        }
        ExpertKeys::SomeLayers => {
            let layers = some_layers(raw, num_layers)?;
            let width = size("moe_intermediate_size", raw.moe_intermediate_size)?;
            (width, raw.norm_topk_prob.unwrap_or(false), layers)
        }
    };
    if !layers.contains(&true) {
        return Err("mlp_only_layers and decoder_sparse_step leave no layer with experts".into());
    }
    let routing = Routing { num_experts, top_k, normalise };
    let is_interleaved = architecture == Architecture::GptOss;
    let activation = match is_interleaved {
        true => gpt_oss::activation(raw.swiglu_alpha, raw.swiglu_limit)?,
        false => ExpertActivation::Silu,
    };
    Ok(Some(ExpertsConfig { routing, intermediate_size, layers, activation, is_interleaved }))
}

/// Every `decoder_sparse_step`th layer, except `mlp_only_layers`.
fn some_layers(raw: &Raw, num_layers: usize) -> Result<Vec<bool>, String> {
    let step = bounded("decoder_sparse_step", raw.decoder_sparse_step.or(Some(1)), SIZE_MAX)?;
    let dense = raw.mlp_only_layers.as_deref().unwrap_or_default();
    let has_experts = |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    Ok((0..num_layers).map(has_experts).collect())
}

fn bounded(key: &str, value: Option<usize>, most: usize) -> Result<usize, String> {
    match value {
        None => Err(format!("key {key} is missing")),
        Some(value) if (1..=most).contains(&value) => Ok(value),
        Some(value) => Err(format!("{key} is {value}, it must be in 1..={most}")),
    }
}

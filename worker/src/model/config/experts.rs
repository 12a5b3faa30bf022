//! The keys of `config.json` for mixtures of experts.
use kernels::backend::{ExpertActivation, Routing, Scores};
use serde_json::Value;

use super::architecture::{Architecture, ExpertKeys};
use super::{Raw, SIZE_MAX, gpt_oss, granite, listed, size};
use crate::model::experts::ExpertsConfig;

/// Reads the mixtures of experts, if the architecture has them.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn read(
    config: &Value,
    raw: &Raw,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Option<ExpertsConfig>, String> {
    let Some(keys) = architecture.experts() else { return Ok(None) };
    let key = match keys {
        ExpertKeys::EveryLayer | ExpertKeys::EveryLayerOrNone | ExpertKeys::EveryLayerSigmoid => {
            "num_local_experts"
        }
        ExpertKeys::EveryLayerAsSaid | ExpertKeys::SomeLayers | ExpertKeys::GatedShared => {
            "num_experts"
        }
        ExpertKeys::AfterFirstGrouped
            if matches!(architecture, Architecture::ExaoneMoe | Architecture::HyV3) =>
        {
            "num_experts"
        }
        ExpertKeys::AfterFirst
        | ExpertKeys::AfterFirstGrouped
        | ExpertKeys::AfterFirstGroupedSoftmax => "n_routed_experts",
    };
    let (experts_most, top_most) = Routing::MOST;
    // transformers 5 can use num_local_experts for all.
    let num_experts = match key {
        "n_routed_experts" => raw.n_routed_experts.or(raw.num_local_experts),
        _ => raw.num_experts.or(raw.num_local_experts),
    };
    if keys == ExpertKeys::EveryLayerOrNone && num_experts == Some(0) {
        return Ok(None);
    }
    let num_experts = bounded(key, num_experts, experts_most)?;
    let top_k = bounded("num_experts_per_tok", raw.num_experts_per_tok, num_experts.min(top_most))?;
    let mut routing = Routing::softmax(num_experts, top_k, true);
    let width = || size("moe_intermediate_size", raw.moe_intermediate_size);
    let (intermediate_size, layers, shared) = match keys {
        ExpertKeys::EveryLayer | ExpertKeys::EveryLayerAsSaid | ExpertKeys::EveryLayerSigmoid => {
            if keys == ExpertKeys::EveryLayerAsSaid {
                routing.normalise = raw.norm_topk_prob.unwrap_or(false);
            }
            if keys == ExpertKeys::EveryLayerSigmoid {
                routing.scores = Scores::Sigmoid;
            }
            (size("intermediate_size", raw.intermediate_size)?, vec![true; num_layers], None)
        }
        ExpertKeys::EveryLayerOrNone => {
            let width = size("intermediate_size", raw.intermediate_size)?;
            let all = granite::shared_width(config)?;
            share_width(
                &mut routing,
                ("shared_intermediate_size", all),
                "intermediate_size",
                width,
            )?;
            (width, vec![true; num_layers], Some("shared_mlp"))
        }
        ExpertKeys::SomeLayers => {
            routing.normalise = raw.norm_topk_prob.unwrap_or(false);
            (width()?, some_layers(raw, num_layers)?, None)
        }
        ExpertKeys::GatedShared => {
            routing.normalise = match architecture {
                // Whatever the file says.
                Architecture::Qwen35Moe => true,
                Architecture::Qwen3Next => raw.norm_topk_prob.unwrap_or(true),
                _ => raw.norm_topk_prob.unwrap_or(false),
            };
            routing.gated = true;
            let (key, width) = ("shared_expert_intermediate_size", width()?);
            let all = size(key, raw.shared_expert_intermediate_size)?;
            share_width(&mut routing, (key, all), "moe_intermediate_size", width)?;
            (width, some_layers(raw, num_layers)?, Some("shared_expert"))
        }
        ExpertKeys::AfterFirstGrouped | ExpertKeys::AfterFirstGroupedSoftmax => {
            let usual = grouped(config, raw, architecture, &mut routing)?;
            let (key, shared) = match raw.num_shared_experts {
                Some(shared) if key == "num_experts" => ("num_shared_experts", shared),
                _ => ("n_shared_experts", raw.n_shared_experts.unwrap_or(usual.shared)),
            };
            share(&mut routing, shared, key)?;
            routing.check_groups().map_err(|error| format!("n_group or topk_group: {error}"))?;
            let layers = after_first(raw, architecture, num_layers, usual.first)?;
            (width()?, layers, (routing.shared > 0).then_some("shared_experts"))
        }
        ExpertKeys::AfterFirst => {
            routing.normalise = raw.norm_topk_prob.unwrap_or(true);
            routing.scores = Scores::Sigmoid;
            routing.scale = factor("routed_scaling_factor", raw.routed_scaling_factor, 1.0)?;
            for (key, groups) in [("n_group", raw.n_group), ("topk_group", raw.topk_group)] {
                if let Some(groups) = groups.filter(|groups| *groups != 1) {
                    return Err(format!("{key} is {groups}, only 1 group of experts is supported"));
                }
            }
            let (key, shared) = ("n_shared_experts", raw.n_shared_experts.unwrap_or(1));
            share(&mut routing, shared, key)?;
            // Whatever files of Solar Open say.
            let usual = usize::from(architecture != Architecture::SolarOpen);
            let layers = after_first(raw, architecture, num_layers, usual)?;
            (width()?, layers, (shared > 0).then_some("shared_experts"))
        }
    };
    if !layers.contains(&true) {
        let keys = match keys {
            ExpertKeys::SomeLayers | ExpertKeys::GatedShared => {
                "mlp_only_layers and decoder_sparse_step leave"
            }
            _ => match reads(architecture) {
                (true, _) if raw.mlp_layer_types.is_some() => "mlp_layer_types leaves",
                (_, true) => "first_k_dense_replace leaves",
                _ => "num_hidden_layers leaves",
            },
        };
        return Err(format!("{keys} no layer with experts"));
    }
    let is_interleaved = architecture == Architecture::GptOss;
    let activation = match is_interleaved {
        true => gpt_oss::activation(raw.swiglu_alpha, raw.swiglu_limit)?,
        false => ExpertActivation::Silu,
    };
    let experts =
        ExpertsConfig { routing, intermediate_size, layers, activation, is_interleaved, shared };
    Ok(Some(experts))
}

/// What DeepSeek's models, and those made like them, have where their files do not say it.
struct Usual {
    /// Number of shared experts.
    shared: usize,
    /// The first layer with experts.
    first: usize,
    /// Factor of the chosen experts' weights.
    scale: f32,
    /// Number of groups, and how many of them experts are chosen from.
    groups: (usize, usize),
    /// Whether the weights are divided by their sum.
    normalise: bool,
}

impl Usual {
    fn of(architecture: Architecture) -> Self {
        let one = Self { shared: 1, first: 1, scale: 1.0, groups: (1, 1), normalise: true };
        match architecture {
            Architecture::DeepseekV2 => Self { shared: 2, first: 0, normalise: false, ..one },
            Architecture::DeepseekV3 => Self { first: 3, scale: 2.5, groups: (8, 4), ..one },
            Architecture::Dots1 => Self { first: 0, normalise: false, ..one },
            Architecture::ExaoneMoe => Self { scale: 2.5, ..one },
            Architecture::Glm4MoeLite => Self { scale: 1.8, ..one },
            Architecture::HyV3 => Self { scale: 2.826, ..one },
            _ => one,
        }
    }
}

/// Whether the architecture's code reads a list of the layers with experts, and the number of those
/// without them in front.
fn reads(architecture: Architecture) -> (bool, bool) {
    use Architecture::{ExaoneMoe, Glm4MoeLite, HyV3, SolarOpen};
    match architecture {
        ExaoneMoe => (true, true),
        Glm4MoeLite | HyV3 => (true, false),
        SolarOpen => (false, false),
        _ => (false, true),
    }
}

/// The layers with experts: from the `usual` one on, or as the file says in the keys that the
/// architecture's code reads.
fn after_first(
    raw: &Raw,
    architecture: Architecture,
    num_layers: usize,
    usual: usize,
) -> Result<Vec<bool>, String> {
    let (lists, counts) = reads(architecture);
    let Some(kinds) = raw.mlp_layer_types.as_ref().filter(|_| lists) else {
        let first = raw.first_k_dense_replace.filter(|_| counts).unwrap_or(usual);
        return Ok((0..num_layers).map(|layer| layer >= first).collect());
    };
    listed("mlp_layer_types", kinds, num_layers, ["dense", "sparse"])
}

/// How DeepSeek's models, and those made like them, choose experts.
fn grouped(
    config: &Value,
    raw: &Raw,
    architecture: Architecture,
    routing: &mut Routing,
) -> Result<Usual, String> {
    let is_second = architecture == Architecture::DeepseekV2;
    let usual = Usual::of(architecture);
    let (methods, scores): (&[&str], &[&str]) = match architecture {
        Architecture::DeepseekV2 => (&["greedy", "group_limited_greedy"], &["softmax"]),
        // Files of dots.llm1 have the method's name in both keys.
        Architecture::Dots1 => (&["noaux_tc"], &["sigmoid", "noaux_tc"]),
        _ => (&["noaux_tc"], &["sigmoid"]),
    };
    for (key, known) in [("topk_method", methods), ("scoring_func", scores)] {
        if let Some(other) = config[key].as_str().filter(|said| !known.contains(said)) {
            let known: Vec<String> = known.iter().map(|name| format!("\"{name}\"")).collect();
            let known = known.join(" and ");
            return Err(format!("{key} is \"{other}\", only {known} is supported"));
        }
    }
    if let Some(other) = config["moe_layer_freq"].as_u64().filter(|every| *every != 1) {
        return Err(format!("moe_layer_freq is {other}, only 1 is supported"));
    }
    // The code of Hy3 reads none of the keys for sums and groups.
    let is_read = architecture != Architecture::HyV3;
    routing.normalise = raw.norm_topk_prob.filter(|_| is_read).unwrap_or(usual.normalise);
    let (key, scale) = match architecture {
        Architecture::HyV3 => ("router_scaling_factor", raw.router_scaling_factor),
        _ => ("routed_scaling_factor", raw.routed_scaling_factor),
    };
    routing.scale = factor(key, scale, usual.scale)?;
    if !is_second {
        routing.scores = Scores::Sigmoid;
    } else if routing.normalise {
        let name = architecture.name();
        return Err(format!("norm_topk_prob is true, only false is supported for {name}"));
    }
    if !is_second || config["topk_method"] == "group_limited_greedy" {
        routing.groups = raw.n_group.filter(|_| is_read).unwrap_or(usual.groups.0);
        routing.kept_groups = raw.topk_group.filter(|_| is_read).unwrap_or(usual.groups.1);
    }
    Ok(usual)
}

/// Adds a shared expert, `all` wide as `key` says, as several of the others' width.
fn share_width(
    routing: &mut Routing,
    (key, all): (&str, usize),
    of_others: &str,
    width: usize,
) -> Result<(), String> {
    if !all.is_multiple_of(width) {
        return Err(format!("{key} is {all}, it must be a multiple of {of_others} ({width})"));
    }
    share(routing, all / width, key)
}

/// Adds shared experts; `key` says how many.
fn share(routing: &mut Routing, shared: usize, key: &str) -> Result<(), String> {
    let (experts_most, top_most) = Routing::MOST;
    let most = (experts_most - routing.num_experts).min(top_most - routing.top_k);
    if shared > most {
        return Err(format!(
            "{key} makes {shared} shared experts of each row beside the {} of {} that it chooses, \
             they must be at most {most}",
            routing.top_k, routing.num_experts
        ));
    }
    routing.num_experts += shared;
    routing.top_k += shared;
    routing.shared = shared;
    Ok(())
}

/// A factor that is `usual` if the file does not say it.
fn factor(key: &str, value: Option<f32>, usual: f32) -> Result<f32, String> {
    match value.unwrap_or(usual) {
        value if (1e-3..=1e3).contains(&value) => Ok(value),
        value => Err(format!("{key} is {value}, it must be in 0.001..=1000")),
    }
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

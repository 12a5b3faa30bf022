//! The keys of `config.json` for rotary embeddings (RoPE).
use serde::Deserialize;
use serde_json::{Value, json};
use shared::model_config;

use super::super::rope::{Growth, RopeConfig, RopeScaling};
use super::architecture::{Architecture, Unrotated};
use super::keys;
use super::windows::{self, Windows};

/// The RoPE table, or the same keys beside it in older files.
#[derive(Default, Deserialize)]
struct Raw {
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    llama_4_scaling_beta: Option<f64>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
}

/// SmolLM3's layers without RoPE: those listed with a 0, or one per interval.
#[derive(Deserialize)]
struct RawLayers {
    no_rope_layers: Option<Vec<u32>>,
    no_rope_layer_interval: Option<usize>,
}

/// Returns the rotary embedding of each layer; [`told`] says which layers have one.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn ropes(
    config: &Value,
    raw: &super::Raw,
    architecture: Architecture,
    head_dim: usize,
    told: &[bool],
) -> Result<Vec<RopeConfig>, String> {
    if let (Some(key), Windows::Listed(usual)) =
        (architecture.local_theta(), architecture.windows())
    {
        // Sliding layers have a rotary embedding of their own, even without a window.
        let slides = windows::slides(raw, usual, told)?;
        let [full, sliding] =
            by_window(config, key).map(|config| rope(&config, architecture, head_dim));
        let (full, sliding) = (full?, sliding?);
        let of = |slides: &bool| if *slides { sliding.clone() } else { full.clone() };
        return Ok(slides.iter().map(of).collect());
    }
    let rope = rope(config, architecture, head_dim)?;
    let of = |told: &bool| if *told { rope.clone() } else { RopeConfig::none() };
    Ok(told.iter().map(of).collect())
}

/// The rotary embeddings of full and of sliding layers, each as the configuration of a model with
/// only one. The newer dialect has a table for each kind of layer; the older one has a scaling only
/// for full layers, and the base of the others under the key `local`.
fn by_window(config: &Value, local: &str) -> [Value; 2] {
    let (full, local) = (&config["rope_theta"], &config[local]);
    let positions = &config["max_position_embeddings"];
    match &config["rope_parameters"] {
        newer if newer["full_attention"].is_object() || newer["sliding_attention"].is_object() => [
            json!({"rope_parameters": newer["full_attention"], "rope_theta": full,
                "max_position_embeddings": positions}),
            json!({"rope_parameters": newer["sliding_attention"], "rope_theta": local,
                "max_position_embeddings": positions}),
        ],
        one => [
            json!({"rope_parameters": one, "rope_scaling": config["rope_scaling"],
                "rope_theta": full, "max_position_embeddings": positions}),
            json!({"rope_theta": local}),
        ],
    }
}

/// Returns which layers have a rotary embedding.
///
/// # Errors
/// Same as [`ropes`].
pub(super) fn told(
    config: &Value,
    raw: &super::Raw,
    architecture: Architecture,
    num_layers: usize,
) -> Result<Vec<bool>, String> {
    match (architecture.unrotated(), architecture.windows()) {
        (Unrotated::Listed, _) => {}
        (Unrotated::UnlessSaid, _) => {
            return Ok(vec![config["position_embedding_type"] == "rope"; num_layers]);
        }
        (Unrotated::BesideWindows, Windows::Listed(usual)) if raw.sliding_window.is_some() => {
            return windows::slides(raw, usual, &vec![true; num_layers]);
        }
        (Unrotated::WithoutWindow, Windows::Listed(usual)) => {
            let has_window = raw.sliding_window.is_some();
            let slides = windows::slides(raw, usual, &vec![true; num_layers])?;
            return Ok(slides.into_iter().map(|slides| slides && has_window).collect());
        }
        _ => return Ok(vec![true; num_layers]),
    }
    let raw: RawLayers = serde_json::from_value(config.clone())
        .map_err(|error| format!("no_rope_layers or no_rope_layer_interval: {error}"))?;
    let Some(layers) = raw.no_rope_layers else {
        return match raw.no_rope_layer_interval.unwrap_or(4) {
            0 => Err("no_rope_layer_interval is 0, it must be at least 1".to_owned()),
            step => Ok((1..=num_layers).map(|layer| !layer.is_multiple_of(step)).collect()),
        };
    };
    if layers.len() < num_layers {
        let len = layers.len();
        return Err(format!("no_rope_layers has {len} entries, num_hidden_layers is {num_layers}"));
    }
    if let Some(other) = layers.iter().find(|has| **has > 1) {
        return Err(format!("no_rope_layers has {other}; 1 (with RoPE) and 0 (without) are known"));
    }
    Ok(layers.into_iter().take(num_layers).map(|has| has == 1).collect())
}

/// Returns the rotary embedding of the layers that have one.
///
/// # Errors
/// Same as [`ropes`].
fn rope(config: &Value, architecture: Architecture, head_dim: usize) -> Result<RopeConfig, String> {
    let read = |table: &Value| {
        keys::<Raw>(table)
            .map_err(|error| format!("rope_parameters, rope_scaling or rope_theta: {error}"))
    };
    let (raw, kind) = match model_config::rope_scaling(config) {
        None if architecture.needs_rope_scaling() => {
            return Err("key rope_scaling (or rope_parameters) is missing".to_owned());
        }
        None => (Raw::default(), "default"),
        Some((table, kind)) => (read(table)?, kind),
    };
    let beside = ["rope_theta", "partial_rotary_factor"].map(|key| config[key].as_f64());
    let theta = raw.rope_theta.or(beside[0]).unwrap_or(architecture.usual_theta());
    if !(theta.is_finite() && theta > 1.0) {
        return Err(format!("rope_theta is {theta}, it must be finite and above 1"));
    }
    // MiniMax's files say how many elements are rotated.
    let said = Some(&config["rotary_dim"]).filter(|_| architecture == Architecture::MiniMaxM2);
    let said = said.and_then(Value::as_f64).map(|elements| elements / head_dim as f64);
    let part = raw.partial_rotary_factor.or(beside[1]).or(said);
    let part = part.unwrap_or(architecture.usual_part());
    if part != 1.0 && !architecture.rotates_parts() {
        let name = architecture.name();
        return Err(format!("partial_rotary_factor is {part}, only 1 is supported for {name}"));
    }
    let dim = (head_dim as f64 * part) as usize;
    if !(part.is_finite() && (2..=head_dim).contains(&dim) && dim.is_multiple_of(2)) {
        return Err(format!(
            "partial_rotary_factor is {part}, which is {dim} of a head's {head_dim} elements; they \
             must be an even number in 2..={head_dim}"
        ));
    }
    // Only the code of this architecture reads the key.
    let beta = raw.llama_4_scaling_beta.filter(|_| architecture == Architecture::Ministral3);
    let growth = match beta {
        None | Some(0.0) => None,
        Some(beta) if (0.0..=10.0).contains(&beta) => Some(Growth {
            beta,
            original_positions: original(model_config::original_positions(config))?,
        }),
        Some(beta) => {
            return Err(format!("rope llama_4_scaling_beta is {beta}, it must be in 0..=10"));
        }
    };
    let scaling = match kind {
        // "dynamic" has no effect up to the original length, and longer sequences are not served.
        "default" | "dynamic" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: positive("factor", raw.factor)? },
        "llama3" => llama3(&raw, config)?,
        "yarn" => yarn(&raw, config)?,
        "longrope" => longrope(raw, config, dim)?,
        other => {
            return Err(format!(
                "rope_type \"{other}\" is not supported; supported are: default, linear, dynamic, \
                 llama3, yarn, longrope"
            ));
        }
    };
    // A key of DeepSeek V3 and of models made like it.
    let is_read = matches!(architecture, Architecture::DeepseekV3 | Architecture::Glm4MoeLite);
    let may_interleave = !is_read || config["rope_interleave"].as_bool() != Some(false);
    let is_interleaved = architecture.interleaves_pairs() && may_interleave;
    Ok(RopeConfig { dim, theta, scaling, is_interleaved, growth })
}

fn positive(key: &str, value: Option<f64>) -> Result<f64, String> {
    match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => Err(format!("rope {key} is {value}, it must be finite and above 0")),
        None => Err(format!("rope key {key} is missing")),
    }
}

fn llama3(raw: &Raw, config: &Value) -> Result<RopeScaling, String> {
    let low = positive("low_freq_factor", raw.low_freq_factor)?;
    let high = positive("high_freq_factor", raw.high_freq_factor)?;
    if high <= low {
        return Err(format!(
            "rope high_freq_factor ({high}) must be above low_freq_factor ({low})"
        ));
    }
    Ok(RopeScaling::Llama3 {
        factor: positive("factor", raw.factor)?,
        low_freq_factor: low,
        high_freq_factor: high,
        original_positions: original(model_config::original_positions(config))?,
    })
}

fn original(positions: Option<f64>) -> Result<f64, String> {
    positive("original_max_position_embeddings", positions)
}

/// Returns the context length of the original training (by default `max_position_embeddings`), and
/// the factor by which the context is stretched.
fn stretched(raw: &Raw, config: &Value) -> Result<(f64, f64), String> {
    let said = config["max_position_embeddings"].as_f64();
    let original = original(model_config::original_positions(config).or(said))?;
    if original <= 1.0 {
        return Err(format!("original_max_position_embeddings is {original}, it must be above 1"));
    }
    let factor = raw.factor.or(said.map(|said| said / original));
    Ok((original, positive("factor", factor)?))
}

/// Reads YaRN's keys, with the defaults of transformers, where 0 counts as absent.
fn yarn(raw: &Raw, config: &Value) -> Result<RopeScaling, String> {
    let (original_positions, factor) = stretched(raw, config)?;
    let or = |key: &str, value: Option<f64>, usual: f64| {
        positive(key, value.filter(|value| *value != 0.0).or(Some(usual)))
    };
    let beta_fast = or("beta_fast", raw.beta_fast, 32.0)?;
    let beta_slow = or("beta_slow", raw.beta_slow, 1.0)?;
    if beta_fast < beta_slow {
        return Err(format!(
            "rope beta_fast ({beta_fast}) must be at least beta_slow ({beta_slow})"
        ));
    }
    let scale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
    let attention_factor = match (raw.attention_factor, raw.mscale, raw.mscale_all_dim) {
        (Some(said), ..) => Some(said),
        (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => Some(scale(one) / scale(all)),
        _ => Some(scale(1.0)),
    };
    Ok(RopeScaling::Yarn {
        factor,
        original_positions,
        beta_fast,
        beta_slow,
        truncate: raw.truncate.unwrap_or(true),
        attention_factor: positive("attention_factor (or mscale)", attention_factor)?,
    })
}

fn longrope(raw: Raw, config: &Value, dim: usize) -> Result<RopeScaling, String> {
    let (original_positions, factor) = stretched(&raw, config)?;
    let usual = (1.0 + factor.ln().max(0.0) / original_positions.ln()).sqrt();
    let attention_factor = positive("attention_factor", raw.attention_factor.or(Some(usual)))?;
    let divisors = |key: &str, all: Option<Vec<f64>>| {
        let all = all.ok_or_else(|| format!("rope key {key} is missing"))?;
        if all.len() != dim / 2 {
            let len = all.len();
            return Err(format!("rope {key} has {len} entries, {dim} elements need {}", dim / 2));
        }
        all.iter().try_for_each(|one| positive(key, Some(*one)).map(|_| ()))?;
        Ok(all)
    };
    Ok(RopeScaling::LongRope {
        original_positions,
        short: divisors("short_factor", raw.short_factor)?,
        long: divisors("long_factor", raw.long_factor)?,
        attention_factor,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Architecture::{Llama, Phi3, Qwen3, SmolLm3};
    use super::*;

    fn of(architecture: Architecture, scaling: Value) -> Result<RopeConfig, String> {
        let config = json!({"max_position_embeddings": 512, "rope_scaling": scaling,
            "rope_theta": 10000.0});
        rope(&config, architecture, 16)
    }

    #[test]
    fn what_is_not_said_is_as_transformers_has_it() {
        let scaling = |more: Value| {
            let mut table = json!({"rope_type": "yarn", "factor": 4.0});
            for (key, value) in more.as_object().unwrap() {
                table[key] = value.clone();
            }
            of(Qwen3, table).unwrap().scaling
        };
        let usual = RopeScaling::Yarn {
            factor: 4.0,
            original_positions: 512.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 0.1 * 4f64.ln() + 1.0,
        };
        assert_eq!(scaling(json!({})), usual);
        assert_eq!(scaling(json!({"beta_fast": 0, "attention_factor": null, "mscale": 1})), usual);
        let factor = |more| match scaling(more) {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            factor(json!({"attention_factor": 1.25, "mscale": 2, "mscale_all_dim": 1})),
            1.25
        );
        let (one, all) = (0.1 * 0.7 * 4f64.ln() + 1.0, 0.1 * 4f64.ln() + 1.0);
        assert_eq!(factor(json!({"mscale": 0.7, "mscale_all_dim": 1.0})), one / all);
        assert_eq!(factor(json!({"factor": 0.5})), 1.0);
        // The factor defaults to the ratio of the two lengths.
        let table = json!({"rope_type": "yarn", "original_max_position_embeddings": 128});
        let RopeScaling::Yarn { factor, .. } = of(Qwen3, table).unwrap().scaling else {
            panic!("no YaRN");
        };
        assert_eq!(factor, 4.0);
        // It has no effect up to the original length.
        let dynamic = json!({"type": "dynamic", "factor": 2.0});
        assert_eq!(of(Llama, dynamic).unwrap().scaling, RopeScaling::None);
    }

    #[test]
    fn layers_without_positions_are_where_the_model_has_them() {
        let raw = |config: &Value| serde_json::from_value(config.clone()).unwrap();
        let told = |more: Value| told(&more, &raw(&more), SmolLm3, 5);
        assert_eq!(told(json!({})).unwrap(), [true, true, true, false, true]);
        let step = json!({"no_rope_layer_interval": 2});
        assert_eq!(told(step).unwrap(), [true, false, true, false, true]);
        let listed = json!({"no_rope_layers": [0, 1, 1, 1, 0], "no_rope_layer_interval": 2});
        assert_eq!(told(listed.clone()).unwrap(), [false, true, true, true, false]);
        assert_eq!(super::told(&listed, &raw(&listed), Llama, 5).unwrap(), [true; 5]);
        let which = told(listed.clone()).unwrap();
        let ropes = ropes(&listed, &raw(&listed), SmolLm3, 16, &which).unwrap();
        assert_eq!((ropes[0].dim, ropes[1].dim, ropes[1].theta), (0, 16, 2e6));
        for (more, expected) in [
            (json!({"no_rope_layers": [1]}), "no_rope_layers has 1 entries"),
            (json!({"no_rope_layers": [1, 1, 2, 1, 1]}), "no_rope_layers has 2; 1"),
            (json!({"no_rope_layers": "all"}), "no_rope_layers or no_rope_layer_interval"),
            (json!({"no_rope_layer_interval": 0}), "no_rope_layer_interval is 0"),
        ] {
            let error = told(more).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_part_of_a_head_may_be_rotated() {
        let dim = |part: f64, architecture: Architecture| {
            of(architecture, json!({"rope_type": "default", "partial_rotary_factor": part}))
                .map(|rope| rope.dim)
        };
        assert_eq!(dim(0.75, Phi3), Ok(12));
        assert_eq!(dim(0.8, Phi3), Ok(12), "rounded down");
        assert_eq!(dim(1.0, Llama), Ok(16));
        let beside = json!({"max_position_embeddings": 512, "partial_rotary_factor": 0.5});
        assert_eq!(rope(&beside, Phi3, 16).unwrap().dim, 8);
        for (part, architecture, expected) in [
            (0.5, Llama, "partial_rotary_factor is 0.5, only 1 is supported for Llama"),
            (0.7, Phi3, "which is 11 of a head's 16 elements"),
            (0.0, Phi3, "which is 0 of"),
            (1.5, Phi3, "which is 24 of"),
            (-1.0, Phi3, "which is 0 of"),
        ] {
            let error = dim(part, architecture).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn errors_name_key_value_and_bound() {
        let eight = || json!([1, 1, 1, 1, 1, 1, 1, 2.5]);
        for (scaling, expected) in [
            (json!({"rope_type": "ntk", "factor": 2.0}), "rope_type \"ntk\" is not supported"),
            (json!({"rope_type": "llama3"}), "low_freq_factor is missing"),
            (json!({"rope_type": "linear", "factor": 0}), "rope factor is 0"),
            (json!({"rope_type": "yarn", "factor": -1}), "rope factor is -1"),
            (
                json!({"rope_type": "yarn", "factor": "4"}),
                "rope_parameters, rope_scaling or rope_theta: factor: invalid type: string",
            ),
            (
                json!({"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}),
                "beta_fast (1) must be at least beta_slow (32)",
            ),
            (
                json!({"rope_type": "yarn", "factor": 4, "attention_factor": -1}),
                "attention_factor (or mscale) is -1",
            ),
            (
                json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1}),
                "original_max_position_embeddings is 1, it must be above 1",
            ),
            (json!({"rope_type": "longrope", "short_factor": eight()}), "long_factor is missing"),
            (
                json!({"rope_type": "longrope", "short_factor": eight(), "long_factor": [1, 1]}),
                "long_factor has 2 entries, 16 elements need 8",
            ),
            (
                json!({"rope_type": "su", "short_factor": eight(),
                    "long_factor": [1, 1, 1, 1, 0, 1, 1, 1]}),
                "long_factor is 0, it must be finite",
            ),
        ] {
            let error = of(Phi3, scaling).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}

//! Gemma 3's keys in `config.json`: the rotary embeddings of sliding and full layers, a scale of q,
//! and unsupported features.
use serde::Deserialize;
use serde_json::{Value, json};

use super::architecture::Architecture;
use super::rope::rope;
use super::windows::{self, Usual};
use crate::model::rope::RopeConfig;

/// The only activation of its models.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The keys that only this architecture has.
#[derive(Deserialize)]
struct Own {
    hidden_activation: Option<String>,
    hidden_act: Option<String>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<bool>,
}

/// Reads and checks the keys; returns the rotary embedding of each layer, and the factor of q in
/// addition to `1 / sqrt(head_dim)`.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn check(
    config: &Value,
    raw: &super::Raw,
    head_dim: usize,
    told: &[bool],
) -> Result<(Vec<RopeConfig>, f32), String> {
    let own: Own = serde_json::from_value(config.clone()).map_err(|error| error.to_string())?;
    let acts = [("hidden_activation", &own.hidden_activation), ("hidden_act", &own.hidden_act)];
    for (key, act) in acts {
        if let Some(act) = act.as_deref().filter(|act| *act != ACTIVATION) {
            return Err(format!("{key} is \"{act}\", only \"{ACTIVATION}\" is supported"));
        }
    }
    let caps = [
        ("attn_logit_softcapping", own.attn_logit_softcapping),
        ("final_logit_softcapping", own.final_logit_softcapping),
    ];
    if let Some((key, Some(cap))) = caps.into_iter().find(|(_, cap)| cap.is_some()) {
        return Err(format!("{key} is {cap}, only null is supported: logits are not capped"));
    }
    if own.use_bidirectional_attention == Some(true) {
        return Err("use_bidirectional_attention is true, only false is supported".to_owned());
    }
    let scalar = own.query_pre_attn_scalar.unwrap_or(head_dim as f64);
    if !(scalar.is_finite() && scalar > 0.0) {
        return Err(format!("query_pre_attn_scalar is {scalar}, it must be finite and above 0"));
    }
    // Sliding layers have a rotary embedding of their own, even without a window.
    let slides = windows::slides(raw, Usual::ButEachPatternth, told)?;
    let [full, sliding] = ropes(config).map(|config| rope(&config, Architecture::Gemma3, head_dim));
    let (full, sliding) = (full?, sliding?);
    let of = |slides: &bool| if *slides { sliding.clone() } else { full.clone() };
    Ok((slides.iter().map(of).collect(), (head_dim as f64 / scalar).sqrt() as f32))
}

/// The rotary embeddings of full and of sliding layers, each as the configuration of a model with
/// only one. The newer dialect has a table for each kind of layer; the older one has a scaling only
/// for full layers.
fn ropes(config: &Value) -> [Value; 2] {
    let (full, local) = (&config["rope_theta"], &config["rope_local_base_freq"]);
    match &config["rope_parameters"] {
        newer if newer["full_attention"].is_object() || newer["sliding_attention"].is_object() => [
            json!({"rope_parameters": newer["full_attention"], "rope_theta": full}),
            json!({"rope_parameters": newer["sliding_attention"], "rope_theta": local}),
        ],
        one => [
            json!({"rope_parameters": one, "rope_scaling": config["rope_scaling"],
                "rope_theta": full}),
            json!({"rope_theta": local}),
        ],
    }
}

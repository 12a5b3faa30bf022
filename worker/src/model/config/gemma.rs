//! Gemma's keys in `config.json`: the rotary embeddings of sliding and full layers, a scale of q,
//! caps of scores and logits, and unsupported features.
use serde::Deserialize;
use serde_json::{Value, json};

use super::architecture::Architecture;
use super::rope::{rope, ropes};
use super::windows::{self, Windows};
use crate::model::rope::RopeConfig;

/// The only activation of its models.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// Bounds of every cap: wider than any model's, and safe in f32.
const CAPS: std::ops::RangeInclusive<f64> = 1e-2..=1e4;

/// The keys that only these architectures have.
#[derive(Deserialize)]
struct Own {
    hidden_activation: Option<String>,
    hidden_act: Option<String>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<bool>,
}

/// What they say.
pub(super) struct Gemma {
    /// The rotary embedding of each layer.
    pub(super) ropes: Vec<RopeConfig>,
    /// Factor of attention scores in addition to `1 / sqrt(head_dim)`.
    pub(super) query_scale: f32,
    /// Caps of attention scores and of logits.
    pub(super) caps: [Option<f32>; 2],
}

impl Gemma {
    /// Reads and checks the keys; `told` says which layers have a rotary embedding.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub(super) fn read(
        config: &Value,
        raw: &super::Raw,
        architecture: Architecture,
        head_dim: usize,
        told: &[bool],
    ) -> Result<Self, String> {
        let own: Own = serde_json::from_value(config.clone()).map_err(|error| error.to_string())?;
        let acts = [("hidden_activation", &own.hidden_activation), ("hidden_act", &own.hidden_act)];
        for (key, act) in acts {
            if let Some(act) = act.as_deref().filter(|act| *act != ACTIVATION) {
                return Err(format!("{key} is \"{act}\", only \"{ACTIVATION}\" is supported"));
            }
        }
        if own.use_bidirectional_attention == Some(true) {
            return Err("use_bidirectional_attention is true, only false is supported".to_owned());
        }
        let is_second = architecture == Architecture::Gemma2;
        let scalar =
            own.query_pre_attn_scalar.unwrap_or(if is_second { 256.0 } else { head_dim as f64 });
        if !(scalar.is_finite() && scalar > 0.0) {
            return Err(format!(
                "query_pre_attn_scalar is {scalar}, it must be finite and above 0"
            ));
        }
        // Without these keys, Gemma 2 has caps; with null, none has.
        let cap = |key: &str, said: Option<f64>, usual: f64| {
            let said = said.or((is_second && config.get(key).is_none()).then_some(usual));
            match said {
                Some(cap) if !CAPS.contains(&cap) => {
                    let (least, most) = (CAPS.start(), CAPS.end());
                    Err(format!("{key} is {cap}, it must be null or in {least}..={most}"))
                }
                said => Ok(said.map(|cap| cap as f32)),
            }
        };
        let caps = [
            cap("attn_logit_softcapping", own.attn_logit_softcapping, 50.0)?,
            cap("final_logit_softcapping", own.final_logit_softcapping, 30.0)?,
        ];
        let ropes = match (is_second, architecture.windows()) {
            (false, Windows::Listed(usual)) => {
                // Sliding layers have a rotary embedding of their own, even without a window.
                let slides = windows::slides(raw, usual, told)?;
                let [full, sliding] =
                    both_ropes(config).map(|config| rope(&config, architecture, head_dim));
                let (full, sliding) = (full?, sliding?);
                let of = |slides: &bool| if *slides { sliding.clone() } else { full.clone() };
                slides.iter().map(of).collect()
            }
            _ => ropes(config, architecture, head_dim, told)?,
        };
        Ok(Self { ropes, query_scale: (head_dim as f64 / scalar).sqrt() as f32, caps })
    }
}

/// The rotary embeddings of full and of sliding layers, each as the configuration of a model with
/// only one. The newer dialect has a table for each kind of layer; the older one has a scaling only
/// for full layers.
fn both_ropes(config: &Value) -> [Value; 2] {
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

//! Gemma 3's part of `config.json`: which layers slide, the rotary embeddings of sliding and other
//! layers, and what is not supported.
use serde::Deserialize;
use serde_json::{Value, json};
pub(super) use shared::model_config::GEMMA3 as ARCHITECTURE;

use super::rope::rope;
use crate::model::rope::RopeConfig;

/// The only activation of its models.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// The keys that only this architecture has.
#[derive(Deserialize)]
struct Raw {
    hidden_activation: Option<String>,
    hidden_act: Option<String>,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    use_bidirectional_attention: Option<bool>,
    layer_types: Option<Vec<String>>,
    #[serde(alias = "_sliding_window_pattern")]
    sliding_window_pattern: Option<usize>,
}

/// What differs from Llama.
pub(super) struct Gemma3 {
    /// See [`super::ModelConfig`].
    pub(super) ropes: Vec<RopeConfig>,
    /// See [`super::ModelConfig`].
    pub(super) sliding_windows: Vec<Option<u32>>,
    /// See [`super::ModelConfig`].
    pub(super) query_scale: f32,
}

impl Gemma3 {
    /// Reads and checks the keys. `window` is `sliding_window`.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub(super) fn check(
        config: &Value,
        window: Option<u32>,
        head_dim: usize,
        num_layers: usize,
    ) -> Result<Self, String> {
        let raw: Raw = serde_json::from_value(config.clone()).map_err(|error| error.to_string())?;
        let acts = [("hidden_activation", &raw.hidden_activation), ("hidden_act", &raw.hidden_act)];
        for (key, act) in acts {
            if let Some(act) = act.as_deref().filter(|act| *act != ACTIVATION) {
                return Err(format!("{key} is \"{act}\", only \"{ACTIVATION}\" is supported"));
            }
        }
        let caps = [
            ("attn_logit_softcapping", raw.attn_logit_softcapping),
            ("final_logit_softcapping", raw.final_logit_softcapping),
        ];
        if let Some((key, Some(cap))) = caps.into_iter().find(|(_, cap)| cap.is_some()) {
            return Err(format!("{key} is {cap}, only null is supported: logits are not capped"));
        }
        if raw.use_bidirectional_attention == Some(true) {
            return Err("use_bidirectional_attention is true, only false is supported".to_owned());
        }
        let scalar = raw.query_pre_attn_scalar.unwrap_or(head_dim as f64);
        if !(scalar.is_finite() && scalar > 0.0) {
            return Err(format!(
                "query_pre_attn_scalar is {scalar}, it must be finite and above 0"
            ));
        }
        let (slides, window) = (slides(&raw, num_layers)?, super::window(window)?);
        let [full, sliding] = ropes(config).map(|config| rope(&config, ARCHITECTURE, head_dim));
        let (full, sliding) = (full?, sliding?);
        let of = |slides: &bool| if *slides { sliding.clone() } else { full.clone() };
        Ok(Self {
            ropes: slides.iter().map(of).collect(),
            sliding_windows: slides.iter().map(|slides| window.filter(|_| *slides)).collect(),
            query_scale: (head_dim as f64 / scalar).sqrt() as f32,
        })
    }
}

/// Which layers slide. Without `layer_types`, each `sliding_window_pattern`th layer (by default the
/// 6th) has full attention, and the others slide.
fn slides(raw: &Raw, num_layers: usize) -> Result<Vec<bool>, String> {
    let Some(types) = &raw.layer_types else {
        return match raw.sliding_window_pattern.unwrap_or(6) {
            0 => Err("sliding_window_pattern is 0, it must be at least 1".to_owned()),
            step => Ok((1..=num_layers).map(|layer| !layer.is_multiple_of(step)).collect()),
        };
    };
    super::slides(types, num_layers)
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

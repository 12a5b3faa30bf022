//! Gemma's keys in `config.json`: a scale of q, caps of scores and logits, what is not supported.
use serde::Deserialize;
use serde_json::Value;

use super::architecture::Architecture;
use super::keys;

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
}

/// What they say.
pub(super) struct Gemma {
    /// Factor of attention scores in addition to `1 / sqrt(head_dim)`.
    pub(super) query_scale: f32,
    /// Caps of attention scores and of logits.
    pub(super) caps: [Option<f32>; 2],
}

impl Gemma {
    /// Reads and checks the keys.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub(super) fn read(
        config: &Value,
        architecture: Architecture,
        head_dim: usize,
    ) -> Result<Self, String> {
        let own: Own = keys(config)?;
        let acts = [("hidden_activation", &own.hidden_activation), ("hidden_act", &own.hidden_act)];
        for (key, act) in acts {
            // Early files of Gemma 1 have another name for it, which transformers corrects.
            let is_known = |act: &str| {
                act == ACTIVATION || (architecture == Architecture::Gemma && act == "gelu")
            };
            if let Some(act) = act.as_deref().filter(|act| !is_known(act)) {
                return Err(format!("{key} is \"{act}\", only \"{ACTIVATION}\" is supported"));
            }
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
        Ok(Self { query_scale: (head_dim as f64 / scalar).sqrt() as f32, caps })
    }
}

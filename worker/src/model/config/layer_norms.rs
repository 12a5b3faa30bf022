//! The keys of `config.json` that only architectures with LayerNorms have: attention and MLP side
//! by side, a factor of the logits, and norms of heads, which are not supported.
use serde::Deserialize;
use serde_json::Value;

use super::architecture::Architecture;
use super::keys;

/// Bounds of the logits' factor: wider than any model's, and safe in f32.
const BOUNDS: std::ops::RangeInclusive<f64> = 1e-4..=1e4;

/// The keys, with the defaults of transformers.
#[derive(Deserialize)]
struct Raw {
    logit_scale: Option<f64>,
    use_parallel_residual: Option<bool>,
    use_qk_norm: Option<bool>,
    qk_layernorm: Option<bool>,
}

/// What they say.
pub(super) struct Own {
    /// Whether attention and MLP read the same norm.
    pub(super) is_parallel: bool,
    /// Divisor of the logits.
    pub(super) logits_scaling: f64,
}

impl Own {
    /// Reads and checks the keys.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub(super) fn read(config: &Value, architecture: Architecture) -> Result<Self, String> {
        let is_cohere = matches!(architecture, Architecture::Cohere | Architecture::Cohere2);
        if !is_cohere && architecture != Architecture::StableLm {
            return Ok(Self { is_parallel: false, logits_scaling: 1.0 });
        }
        let raw: Raw = keys(config)?;
        // LayerNorms with a weight for each head, not one for all.
        let norms = [("use_qk_norm", raw.use_qk_norm), ("qk_layernorm", raw.qk_layernorm)];
        for (key, value) in norms {
            if value == Some(true) {
                let name = architecture.name();
                return Err(format!("{key} is true, only false is supported for {name}"));
            }
        }
        if !is_cohere {
            let is_parallel = raw.use_parallel_residual.unwrap_or(false);
            return Ok(Self { is_parallel, logits_scaling: 1.0 });
        }
        match raw.logit_scale.unwrap_or(0.0625) {
            scale if BOUNDS.contains(&scale) => {
                Ok(Self { is_parallel: true, logits_scaling: 1.0 / scale })
            }
            scale => {
                let (least, most) = (BOUNDS.start(), BOUNDS.end());
                Err(format!("logit_scale is {scale}, it must be in {least}..={most}"))
            }
        }
    }
}

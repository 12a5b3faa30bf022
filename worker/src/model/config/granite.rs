//! Granite's keys in `config.json`: factors of embeddings, attention, layer outputs and logits; and
//! the width of the MLP that every layer of Granite 4's models has.
use serde::Deserialize;
use serde_json::Value;

use super::{keys, size};

/// Bounds of every factor: wider than any model's, and safe in f32.
const BOUNDS: std::ops::RangeInclusive<f64> = 1e-3..=1e4;

/// The keys that only this architecture has, with the defaults of transformers.
#[derive(Deserialize)]
struct Own {
    embedding_multiplier: Option<f64>,
    attention_multiplier: Option<f64>,
    residual_multiplier: Option<f64>,
    logits_scaling: Option<f64>,
}

/// Returns the width of the MLP in every layer of one of Granite 4's models: beside experts, it is
/// a shared one.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn shared_width(config: &Value) -> Result<usize, String> {
    #[derive(Deserialize)]
    struct Own {
        shared_intermediate_size: Option<usize>,
    }
    let Own { shared_intermediate_size } = keys(config)?;
    size("shared_intermediate_size", shared_intermediate_size)
}

/// Its factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Granite {
    embedding: f64,
    /// Factor of attention scores, in place of `1 / sqrt(head_dim)`; `None` keeps the latter.
    attention: Option<f64>,
    /// Factor of what attention and MLP add to the residual stream.
    residual: f64,
    /// Divisor of the logits.
    pub(super) logits_scaling: f64,
}

impl Granite {
    /// No scaling, as in other architectures.
    pub(super) const NONE: Self =
        Self { embedding: 1.0, attention: None, residual: 1.0, logits_scaling: 1.0 };

    /// Reads and checks the keys.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub(super) fn read(config: &Value) -> Result<Self, String> {
        let own: Own = keys(config)?;
        let factor = |key: &str, value: Option<f64>| match value.unwrap_or(1.0) {
            value if BOUNDS.contains(&value) => Ok(value),
            value => {
                let (least, most) = (BOUNDS.start(), BOUNDS.end());
                Err(format!("{key} is {value}, it must be in {least}..={most}"))
            }
        };
        Ok(Self {
            embedding: factor("embedding_multiplier", own.embedding_multiplier)?,
            attention: Some(factor("attention_multiplier", own.attention_multiplier)?),
            residual: factor("residual_multiplier", own.residual_multiplier)?,
            logits_scaling: factor("logits_scaling", own.logits_scaling)?,
        })
    }

    /// Factor of attention scores in addition to `1 / sqrt(head_dim)`.
    pub(super) fn query_scale(&self, head_dim: usize) -> f64 {
        self.attention.map_or(1.0, |factor| factor * (head_dim as f64).sqrt())
    }

    /// Factor of embeddings in a residual stream that is divided by `residual`. Layers then add
    /// their outputs unscaled. Only the norms read the stream, and they undo the division.
    pub(super) fn embedding_scale(&self) -> f64 {
        self.embedding / self.residual
    }

    /// Epsilon of the norms of that stream: `x / sqrt(mean(x * x) + eps)` does not change if x is
    /// scaled by a factor and eps by its square.
    pub(super) fn norm_eps(&self, norm_eps: f64) -> f64 {
        norm_eps / (self.residual * self.residual)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::ModelConfig;
    use super::*;

    /// As published for ibm-granite/granite-3.1-8b-instruct.
    fn published() -> Value {
        json!({
            "architectures": ["GraniteForCausalLM"], "attention_bias": false,
            "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "hidden_act": "silu",
            "hidden_size": 4096, "intermediate_size": 12800, "logits_scaling": 16.0,
            "max_position_embeddings": 131_072, "mlp_bias": false, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1e7,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 49155,
        })
    }

    #[test]
    fn the_published_configuration_is_read() {
        let config = ModelConfig::from_value(published()).unwrap();
        assert!(config.tied && !config.qkv_bias && !config.qk_norm && config.is_bf16);
        // Scores are q k / 128, which is q k / sqrt(128) times 1 / sqrt(128).
        assert!((f64::from(config.query_scale) - 128f64.sqrt().recip()).abs() < 1e-8);
        assert!((config.embedding_scale - 12.0 / 0.22).abs() < 1e-9);
        assert!((config.norm_eps - 1e-5 / 0.0484).abs() < 1e-9);
        assert_eq!((config.logits_scaling, config.rounds_embedding_scale), (16.0, false));
    }

    #[test]
    fn errors_name_key_value_and_bound() {
        for key in ["embedding_multiplier", "attention_multiplier", "residual_multiplier"] {
            let mut config = published();
            config[key] = json!(-0.5);
            let error = ModelConfig::from_value(config).unwrap_err();
            assert_eq!(error, format!("{key} is -0.5, it must be in 0.001..=10000"));
        }
        let mut config = published();
        config["logits_scaling"] = json!(0);
        let error = ModelConfig::from_value(config).unwrap_err();
        assert!(error.starts_with("logits_scaling is 0, it must be"), "{error}");
    }

    #[test]
    fn what_is_not_said_is_as_transformers_has_it() {
        let mut config = published();
        for key in ["attention_multiplier", "embedding_multiplier", "residual_multiplier"] {
            config.as_object_mut().unwrap().remove(key);
        }
        let config = ModelConfig::from_value(config).unwrap();
        assert_eq!((config.embedding_scale, config.norm_eps), (1.0, 1e-5));
        assert_eq!(config.query_scale, 128f32.sqrt(), "scores are not divided at all");
    }
}

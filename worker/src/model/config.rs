//! `config.json` of a Hugging Face model folder, in the dialects of transformers 4 (`rope_theta`,
//! `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`), validated.
use std::path::Path;

use serde::Deserialize;

use super::ModelError;
use super::rope::{RopeConfig, RopeScaling};

/// Architectures this worker computes.
pub const ARCHITECTURES: [&str; 4] =
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];

/// A decoder-only model, as much of it as the forward pass needs.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Longest sequence the model was made for.
    pub max_positions: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Attention reaches back this far, where it is limited.
    pub sliding_window: Option<u32>,
    /// The output head is the embedding.
    pub tied: bool,
    /// q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// The MLP's projections have biases.
    pub mlp_bias: bool,
    /// q and k heads are normalised before the rotary embedding.
    pub qk_norm: bool,
}

/// The file, as it is. Unknown keys are other people's business.
#[derive(Deserialize)]
struct Raw {
    architectures: Option<Vec<String>>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    sliding_window: Option<u32>,
    use_sliding_window: Option<bool>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    layer_types: Option<Vec<String>>,
}

#[derive(Clone, Deserialize)]
struct RawRope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

/// Bounds of every size: far above any model, far below what overflows.
const SIZE_MAX: usize = 1 << 24;

impl ModelConfig {
    /// Reads and checks `config.json` of `folder`.
    ///
    /// # Errors
    /// [`ModelError::File`] naming the key, its value's problem and the bound.
    pub fn load(folder: &Path) -> Result<Self, ModelError> {
        let file = folder.join("config.json");
        let text = std::fs::read_to_string(&file)
            .map_err(|error| ModelError::file(&file, format!("cannot be read: {error}")))?;
        let raw: Raw = serde_json::from_str(&text).map_err(|error| {
            ModelError::file(&file, format!("not a model configuration: {error}"))
        })?;
        Self::check(raw).map_err(|message| ModelError::file(&file, message))
    }

    fn check(raw: Raw) -> Result<Self, String> {
        let architecture = raw.architectures.as_deref().unwrap_or_default().first().cloned();
        let architecture = architecture.ok_or("key architectures is missing or empty")?;
        if !ARCHITECTURES.contains(&architecture.as_str()) {
            let known = ARCHITECTURES.join(", ");
            return Err(format!(
                "architecture {architecture} is not supported; these are: {known}"
            ));
        }
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(format!("hidden_act is \"{act}\", only \"silu\" is supported"));
        }
        let num_heads = size("num_attention_heads", raw.num_attention_heads)?;
        let hidden_size = size("hidden_size", raw.hidden_size)?;
        let num_kv_heads = raw
            .num_key_value_heads
            .map_or(Ok(num_heads), |n| size("num_key_value_heads", Some(n)))?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(format!(
                "num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads \
                 ({num_kv_heads})"
            ));
        }
        let head_dim =
            raw.head_dim.map_or(Ok(hidden_size / num_heads), |dim| size("head_dim", Some(dim)))?;
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {head_dim}, it must be even and at least 2"));
        }
        let norm_eps = raw.rms_norm_eps.ok_or("key rms_norm_eps is missing")?;
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            return Err(format!("rms_norm_eps is {norm_eps}, it must be between 0 and 1"));
        }
        let qwen2 = architecture == "Qwen2ForCausalLM";
        let qwen3 = architecture == "Qwen3ForCausalLM";
        let windowed = if qwen2 || qwen3 {
            raw.use_sliding_window.unwrap_or(false)
        } else {
            architecture == "MistralForCausalLM"
        };
        let mixed = raw.layer_types.iter().flatten().any(|kind| kind != "full_attention");
        if (qwen2 || qwen3) && (windowed || mixed) {
            return Err("layers that differ in their attention (use_sliding_window, layer_types) \
                        are not supported for Qwen models"
                .to_owned());
        }
        let attention_bias = raw.attention_bias.unwrap_or(false);
        Ok(Self {
            hidden_size,
            intermediate_size: size("intermediate_size", raw.intermediate_size)?,
            num_layers: size("num_hidden_layers", raw.num_hidden_layers)?,
            num_heads,
            num_kv_heads,
            head_dim,
            vocab_size: size("vocab_size", raw.vocab_size)?,
            max_positions: size("max_position_embeddings", raw.max_position_embeddings)?,
            norm_eps: norm_eps as f32,
            rope: rope(&raw)?,
            sliding_window: raw.sliding_window.filter(|window| windowed && *window > 0),
            tied: raw.tie_word_embeddings.unwrap_or(false),
            qkv_bias: attention_bias || qwen2,
            output_bias: attention_bias && !qwen2,
            mlp_bias: raw.mlp_bias.unwrap_or(false),
            qk_norm: qwen3,
        })
    }
}

fn size(key: &str, value: Option<usize>) -> Result<usize, String> {
    match value {
        None => Err(format!("key {key} is missing")),
        Some(value) if value == 0 || value > SIZE_MAX => {
            Err(format!("{key} is {value}, it must be in 1..={SIZE_MAX}"))
        }
        Some(value) => Ok(value),
    }
}

fn rope(raw: &Raw) -> Result<RopeConfig, String> {
    let parameters = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref());
    let theta = parameters.and_then(|p| p.rope_theta).or(raw.rope_theta).unwrap_or(10_000.0);
    if !(theta.is_finite() && theta > 1.0) {
        return Err(format!("rope_theta is {theta}, it must be finite and above 1"));
    }
    let Some(parameters) = parameters else {
        return Ok(RopeConfig { theta, scaling: RopeScaling::None });
    };
    let positive = |key: &str, value: Option<f64>| match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => Err(format!("rope {key} is {value}, it must be finite and above 0")),
        None => Err(format!("rope key {key} is missing")),
    };
    let scaling = match parameters.rope_type.as_deref().unwrap_or("default") {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: positive("factor", parameters.factor)? },
        "llama3" => {
            let low = positive("low_freq_factor", parameters.low_freq_factor)?;
            let high = positive("high_freq_factor", parameters.high_freq_factor)?;
            if high <= low {
                return Err(format!(
                    "rope high_freq_factor ({high}) must be above low_freq_factor ({low})"
                ));
            }
            RopeScaling::Llama3 {
                factor: positive("factor", parameters.factor)?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_positions: positive(
                    "original_max_position_embeddings",
                    parameters.original_max_position_embeddings,
                )?,
            }
        }
        other => {
            return Err(format!(
                "rope_type \"{other}\" is not supported; these are: default, linear, llama3"
            ));
        }
    };
    Ok(RopeConfig { theta, scaling })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0"#;

    fn check(more: &str) -> Result<ModelConfig, String> {
        let raw = serde_json::from_str(&format!("{LLAMA}{more}}}")).map_err(|e| e.to_string())?;
        ModelConfig::check(raw)
    }

    #[test]
    fn both_dialects_give_the_same_rope() {
        let four = check(r#", "rope_scaling": {"rope_type": "linear", "factor": 2.0}"#).unwrap();
        let five = check(
            r#", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}"#,
        );
        assert_eq!(four.rope, five.unwrap().rope);
        assert_eq!(check("").unwrap().rope.scaling, RopeScaling::None);
    }

    #[test]
    fn errors_name_key_value_and_bound() {
        let cases = [
            (r#", "head_dim": 7"#, "head_dim is 7, it must be even"),
            (r#", "rope_scaling": {"rope_type": "yarn"}"#, "rope_type \"yarn\" is not supported"),
            (r#", "rope_scaling": {"rope_type": "llama3"}"#, "low_freq_factor is missing"),
            (r#", "hidden_act": "gelu""#, "hidden_act is \"gelu\""),
        ];
        for (more, expected) in cases {
            let error = check(more).unwrap_err();
            assert!(error.contains(expected), "{more}: {error}");
        }
        let text = format!("{LLAMA}}}")
            .replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3");
        let error = ModelConfig::check(serde_json::from_str(&text).unwrap()).unwrap_err();
        assert!(error.contains("num_key_value_heads (3)"), "{error}");
        let text = format!("{LLAMA}}}").replace("\"vocab_size\": 384", "\"vocab_size\": 0");
        let error = ModelConfig::check(serde_json::from_str(&text).unwrap()).unwrap_err();
        assert!(error.contains("vocab_size is 0, it must be in 1..="), "{error}");
    }
}

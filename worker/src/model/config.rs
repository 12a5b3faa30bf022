//! What a model is: `config.json` in either of transformers' dialects, checked and normalised.
//!
//! Owns which architectures are supported and every default that transformers would apply where a
//! key is absent. Version 5 writes `rope_parameters` and `dtype`, version 4 `rope_theta`,
//! `rope_scaling` and `torch_dtype`; both mean the same here. Knows nothing of files of weights.
use std::path::Path;

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::error::ModelError;

/// A supported family of decoders. All share the Llama block; the differences are flags of
/// [`ModelConfig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, and what copies them.
    Llama,
    /// Mistral 7B: sliding window attention in every layer.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: RMSNorm on every q and k head.
    Qwen3,
}

impl Architecture {
    /// All of them, with the names that `architectures` in `config.json` uses.
    pub const ALL: [(Self, &'static str); 4] = [
        (Self::Llama, "LlamaForCausalLM"),
        (Self::Mistral, "MistralForCausalLM"),
        (Self::Qwen2, "Qwen2ForCausalLM"),
        (Self::Qwen3, "Qwen3ForCausalLM"),
    ];
}

/// How RoPE's frequencies are stretched beyond the length the model was first trained with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All frequencies divided by `factor`.
    Linear {
        /// How much longer the context is.
        factor: f64,
    },
    /// Low frequencies divided, high ones kept, a smooth blend between (Llama 3.1).
    Llama3 {
        /// How much longer the context is.
        factor: f64,
        /// Wavelengths above `original_positions / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The length of the original training.
        original_positions: f64,
    },
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// Their scaling.
    pub scaling: RopeScaling,
}

/// A decoder-only model, as checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width within the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Elements per head, even.
    pub head_dim: usize,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Longest sequence that the model was made for.
    pub max_positions: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// The output matrix is the embedding matrix.
    pub tied_embeddings: bool,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// The MLP's three projections have biases.
    pub mlp_bias: bool,
    /// q and k heads are normalised before RoPE.
    pub qk_norm: bool,
    /// Per layer: attend to the last `n` tokens only, the current one included.
    pub sliding_windows: Vec<Option<u32>>,
    /// Position embedding.
    pub rope: RopeConfig,
    /// Tokens that end a sequence, from `generation_config.json` or else `config.json`.
    pub end_tokens: Vec<u32>,
}

// Bounds far beyond any known model: their job is to make a damaged file an error instead of an
// absurd allocation, and to keep products of two sizes within u64.
const HIDDEN_MAX: u64 = 1 << 17;
const INTERMEDIATE_MAX: u64 = 1 << 20;
const LAYERS_MAX: u64 = 1 << 10;
const HEADS_MAX: u64 = 1 << 12;
const HEAD_DIM_MAX: u64 = 1 << 10;
const VOCAB_MAX: u64 = 1 << 24;
const POSITIONS_MAX: u64 = 1 << 28;
/// Heads of Mistral and Qwen2 are grouped by these where `num_key_value_heads` is absent.
const MISTRAL_KV_HEADS: u64 = 8;
const QWEN_KV_HEADS: u64 = 32;
const QWEN3_HEAD_DIM: u64 = 128;
const DEFAULT_EPS: f64 = 1e-6;
const DEFAULT_THETA: f64 = 10_000.0;

impl ModelConfig {
    /// Reads `config.json` and, where there is one, `generation_config.json` of a model folder.
    ///
    /// # Errors
    /// [`ModelError`] naming the file, the key, the value found and what is accepted.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let mut config = Self::from_fields(&Fields::read(&dir.join("config.json"))?)?;
        let generation = dir.join("generation_config.json");
        if generation.is_file()
            && let Some(end_tokens) = end_tokens(&Fields::read(&generation)?, config.vocab_size)?
        {
            config.end_tokens = end_tokens;
        }
        Ok(config)
    }

    /// Checks and normalises the contents of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`ModelConfig::from_dir`].
    pub fn from_json(path: &Path, text: &str) -> Result<Self, ModelError> {
        Self::from_fields(&Fields::parse(path, text)?)
    }

    fn from_fields(fields: &Fields<'_>) -> Result<Self, ModelError> {
        let architecture = architecture(fields)?;
        refuse_unsupported(fields)?;
        let is_qwen = matches!(architecture, Architecture::Qwen2 | Architecture::Qwen3);

        let hidden_size = fields.size("hidden_size", HIDDEN_MAX)?;
        let num_layers = fields.size("num_hidden_layers", LAYERS_MAX)?;
        let num_heads = fields.size("num_attention_heads", HEADS_MAX)?;
        let num_kv_heads = match architecture {
            Architecture::Llama => num_heads as u64,
            Architecture::Mistral => MISTRAL_KV_HEADS,
            Architecture::Qwen2 | Architecture::Qwen3 => QWEN_KV_HEADS,
        };
        let num_kv_heads = fields.size_or("num_key_value_heads", HEADS_MAX, num_kv_heads)?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(fields.error(
                "num_key_value_heads",
                format!("is {num_kv_heads}, it must divide num_attention_heads, {num_heads}"),
            ));
        }
        let head_dim = match (fields.get("head_dim"), architecture) {
            (Some(_), _) => fields.size("head_dim", HEAD_DIM_MAX)?,
            (None, Architecture::Qwen3) => QWEN3_HEAD_DIM as usize,
            (None, _) if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            (None, _) => {
                let problem = format!(
                    "is {hidden_size}, it must be a multiple of num_attention_heads, {num_heads}, \
                     where head_dim is absent"
                );
                return Err(fields.error("hidden_size", problem));
            }
        };
        if !head_dim.is_multiple_of(2) {
            let problem = format!("is {head_dim}, it must be even for rotary embedding");
            return Err(fields.error("head_dim", problem));
        }

        let vocab_size = fields.size("vocab_size", VOCAB_MAX)?;
        let attention_bias =
            !is_mistral_or_qwen2(architecture) && fields.flag_or("attention_bias", false)?;
        Ok(Self {
            architecture,
            hidden_size,
            intermediate_size: fields.size("intermediate_size", INTERMEDIATE_MAX)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            vocab_size,
            max_positions: fields.size("max_position_embeddings", POSITIONS_MAX)?,
            rms_norm_eps: fields.number_or("rms_norm_eps", 0.0, 1.0, DEFAULT_EPS)? as f32,
            tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            output_bias: attention_bias,
            mlp_bias: architecture == Architecture::Llama && fields.flag_or("mlp_bias", false)?,
            qk_norm: architecture == Architecture::Qwen3,
            sliding_windows: sliding_windows(fields, architecture, is_qwen, num_layers)?,
            rope: rope(fields)?,
            end_tokens: end_tokens(fields, vocab_size)?.unwrap_or_default(),
        })
    }

    /// Parameters of the whole model, all ranks together; tied embeddings count once.
    #[must_use]
    pub fn num_parameters(&self) -> u64 {
        let size = |factors: &[usize]| factors.iter().map(|&factor| factor as u64).product::<u64>();
        let bias = |present: bool, len: u64| if present { len } else { 0 };
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let q = size(&[self.num_heads, self.head_dim]);
        let qkv = q + 2 * size(&[self.num_kv_heads, self.head_dim]);
        let layer = (qkv + q) * hidden as u64
            + 3 * size(&[inner, hidden])
            + 2 * hidden as u64
            + bias(self.qkv_bias, qkv)
            + bias(self.output_bias, hidden as u64)
            + bias(self.mlp_bias, 2 * inner as u64 + hidden as u64)
            + bias(self.qk_norm, 2 * self.head_dim as u64);
        let tables = if self.tied_embeddings { 1 } else { 2 };
        layer * self.num_layers as u64 + tables * size(&[self.vocab_size, hidden]) + hidden as u64
    }
}

fn is_mistral_or_qwen2(architecture: Architecture) -> bool {
    matches!(architecture, Architecture::Mistral | Architecture::Qwen2)
}

fn architecture(fields: &Fields<'_>) -> Result<Architecture, ModelError> {
    let key = "architectures";
    let supported = || Architecture::ALL.map(|(_, name)| name).join(", ");
    let names = match fields.get(key) {
        Some(Value::Array(names)) => names.as_slice(),
        Some(other) => return Err(fields.error(key, format!("is {other}, it must be a list"))),
        None => return Err(fields.error(key, format!("is missing; supported: {}", supported()))),
    };
    names
        .iter()
        .find_map(|name| Architecture::ALL.iter().find(|(_, known)| name.as_str() == Some(known)))
        .map(|&(architecture, _)| architecture)
        .ok_or_else(|| {
            let found = Value::Array(names.to_vec());
            fields.error(key, format!("{found} is not supported; supported: {}", supported()))
        })
}

/// Keys whose mere use changes the arithmetic in ways that are not implemented.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ModelError> {
    if fields.get("quantization_config").is_some() {
        return Err(fields.error(
            "quantization_config",
            "quantized weights are not supported; use the bf16, f16 or f32 model".to_owned(),
        ));
    }
    let activation = fields.get("hidden_act").and_then(Value::as_str).unwrap_or("silu");
    if activation != "silu" {
        return Err(fields.error("hidden_act", format!("is `{activation}`, supported: silu")));
    }
    let rotary = fields.number_or("partial_rotary_factor", 0.0, 1.0, 1.0)?;
    if rotary < 1.0 {
        return Err(fields.error("partial_rotary_factor", format!("is {rotary}, supported: 1")));
    }
    Ok(())
}

/// Mistral slides in every layer; Qwen in the layers that `layer_types` names, or else in those
/// from `max_window_layers` on, and only if `use_sliding_window`; Llama never.
fn sliding_windows(
    fields: &Fields<'_>,
    architecture: Architecture,
    is_qwen: bool,
    num_layers: usize,
) -> Result<Vec<Option<u32>>, ModelError> {
    let slides = architecture == Architecture::Mistral
        || (is_qwen && fields.flag_or("use_sliding_window", false)?);
    if !slides || fields.get("sliding_window").is_none() {
        return Ok(vec![None; num_layers]);
    }
    let window = Some(fields.size("sliding_window", POSITIONS_MAX)? as u32);
    if architecture == Architecture::Mistral {
        return Ok(vec![window; num_layers]);
    }
    let Some(types) = fields.get("layer_types") else {
        let first = fields.count_or("max_window_layers", LAYERS_MAX, num_layers as u64)?;
        return Ok((0..num_layers).map(|layer| window.filter(|_| layer >= first)).collect());
    };
    let types = types.as_array().filter(|types| types.len() == num_layers).ok_or_else(|| {
        let problem = format!("is {types}, it must be a list of num_hidden_layers = {num_layers}");
        fields.error("layer_types", problem)
    })?;
    types
        .iter()
        .map(|kind| match kind.as_str() {
            Some("sliding_attention") => Ok(window),
            Some("full_attention") => Ok(None),
            _ => {
                let supported = "supported: full_attention, sliding_attention";
                Err(fields.error("layer_types", format!("{kind} is not supported; {supported}")))
            }
        })
        .collect()
}

fn rope(fields: &Fields<'_>) -> Result<RopeConfig, ModelError> {
    let empty = Map::new();
    let (key, object) = match (fields.get("rope_parameters"), fields.get("rope_scaling")) {
        (Some(value), _) => ("rope_parameters", value),
        (None, Some(value)) => ("rope_scaling", value),
        (None, None) => ("rope_scaling", &Value::Null),
    };
    let object = match object {
        Value::Null => &empty,
        Value::Object(object) => object,
        other => return Err(fields.error(key, format!("is {other}, it must be an object"))),
    };
    let nested = fields.nested(key, object);
    let outer_theta = fields.number_or("rope_theta", 1.0, 1e12, DEFAULT_THETA)?;
    let theta = nested.number_or("rope_theta", 1.0, 1e12, outer_theta)?;
    let kind = nested.get("rope_type").or_else(|| nested.get("type"));
    let scaling = match kind.map(|kind| kind.as_str().unwrap_or("?")) {
        None | Some("default") => RopeScaling::Default,
        Some("linear") => RopeScaling::Linear { factor: nested.number("factor", 1.0, 1e6)? },
        Some("llama3") => {
            let low_freq_factor = nested.number("low_freq_factor", 1e-3, 1e6)?;
            let high_freq_factor = nested.number("high_freq_factor", 1e-3, 1e6)?;
            if high_freq_factor <= low_freq_factor {
                let problem = format!(
                    "is {high_freq_factor}, it must be above low_freq_factor, {low_freq_factor}"
                );
                return Err(nested.error("high_freq_factor", problem));
            }
            RopeScaling::Llama3 {
                factor: nested.number("factor", 1.0, 1e6)?,
                low_freq_factor,
                high_freq_factor,
                original_positions: nested
                    .size("original_max_position_embeddings", POSITIONS_MAX)?
                    as f64,
            }
        }
        Some(_) => {
            let found = kind.unwrap_or(&Value::Null);
            let problem = format!("{found} is not supported; supported: default, linear, llama3");
            return Err(nested.error("rope_type", problem));
        }
    };
    Ok(RopeConfig { theta, scaling })
}

/// `eos_token_id`: absent or null, a number or a list of numbers.
fn end_tokens(fields: &Fields<'_>, vocab_size: usize) -> Result<Option<Vec<u32>>, ModelError> {
    let key = "eos_token_id";
    let values = match fields.get(key) {
        None => return Ok(None),
        Some(Value::Array(values)) => values.as_slice(),
        Some(value) => std::slice::from_ref(value),
    };
    values
        .iter()
        .map(|value| {
            value.as_u64().filter(|&id| id < vocab_size as u64).map(|id| id as u32).ok_or_else(
                || {
                    let problem = format!("has {value}, token ids are in 0..{vocab_size}");
                    fields.error(key, problem)
                },
            )
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

#[cfg(test)]
mod tests;

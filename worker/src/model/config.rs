//! The validated `config.json` of a Hugging Face model folder, in the dialects of transformers 4
//! (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`).
//!
//! - `architecture`: the differences between architectures
//! - `rope`, `windows`, `experts`: the keys for rotary embeddings, sliding windows and experts
//! - `gemma`, `gpt_oss`, `granite`: the keys that only these architectures have; `latent`, `delta`:
//!   those of models with latent and with linear attention; `mamba`: those of layers with state;
//!   `layer_norms`: those of architectures with LayerNorms
//! - `published`, `layered`: tests with configurations as published; `relatives`: of architectures
//!   that differ from others by defaults and names
use std::path::Path;

use kernels::backend::{Activation, ExpertActivation, PlainActivation};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use shared::model_config::{self, Classifier, ConfigOverrides};

use self::architecture::{Architecture, Biases};
pub use self::architecture::{Fused, MlpNames, NormKind, Norms};
pub use self::delta::{Delta, Layout};
use self::gemma::Gemma;
use self::granite::Granite;
pub use self::latent::Latent;
use self::layer_norms::Own as LayerNorms;
use super::ModelError;
use super::experts::ExpertsConfig;
use super::quantization::{self, Quantised};
use super::rope::RopeConfig;

mod architecture;
mod delta;
mod experts;
mod gemma;
mod gpt_oss;
mod granite;
mod latent;
mod layer_norms;
mod mamba;
mod rope;
mod windows;

/// The configuration of a decoder-only model, as far as the forward pass needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Width of the residual stream, in elements.
    pub hidden_size: usize,
    /// Width of the MLP of dense layers; 0 if no layer is dense.
    pub intermediate_size: usize,
    /// Mixtures of experts (MoE), if some layers have one instead of an MLP.
    pub experts: Option<ExpertsConfig>,
    /// Whether it has attention sinks: a learned logit per head that joins the softmax (gpt-oss).
    pub sinks: bool,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads (GQA); divides `num_heads`. With latents there is one.
    pub num_kv_heads: usize,
    /// Elements per head; even. With latents, those that the cache has of a token.
    pub head_dim: usize,
    /// Multi-head latent attention (DeepSeek's models and those made like them), if it has it.
    pub latent: Option<Latent>,
    /// Linear attention in some layers, if there are some.
    pub delta: Option<Delta>,
    /// Whether the result of attention is multiplied by the sigmoid of a gate, whose projection is
    /// a part of that of q: of each head, q, then the gate (Qwen3-Next).
    pub gates_attention: bool,
    /// Size of the vocabulary, in tokens.
    pub vocab_size: usize,
    /// Maximum sequence length that the model supports, in tokens.
    pub max_positions: usize,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Rotary embedding of each layer.
    pub ropes: Vec<RopeConfig>,
    /// Sliding window of each layer: how many tokens its attention sees, including the current one;
    /// `None` for all.
    pub sliding_windows: Vec<Option<u32>>,
    /// Whether the output head is the embedding matrix (tied).
    pub tied: bool,
    /// How it sorts texts into classes, if it does: it has no use for an output head then.
    pub classifier: Option<Classifier>,
    /// Whether the q, k and v projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub output_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Which projections the files store as one tensor.
    pub fused: Fused,
    /// Whether each head of q and k has an RMSNorm, before the rotary embedding (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// Whether q and k are normalised over all heads together, before the rotary embedding
    /// (OLMo 2); never in addition to `qk_norm`.
    pub qk_norm_whole: bool,
    /// Factor of attention scores in addition to `1 / sqrt(head_dim)`. A model with a factor other
    /// than 1 either normalises its heads or rotates them whole, or has latents.
    pub query_scale: f32,
    /// Factor of the embeddings.
    pub embedding_scale: f64,
    /// Whether that factor is first rounded to the embeddings' type (Gemma).
    pub rounds_embedding_scale: bool,
    /// Divisor of the logits (Granite, Cohere).
    pub logits_scaling: f32,
    /// Caps attention scores: `cap * tanh(score / cap)` (Gemma 2).
    pub attention_cap: Option<f32>,
    /// Caps logits in the same way.
    pub logits_cap: Option<f32>,
    /// Added to the weights of all norms as stored in the files (1 for Gemma).
    pub norm_offset: f32,
    /// The norms that each layer has.
    pub norms: Norms,
    /// What the norms of the residual stream are.
    pub norm_kind: NormKind,
    /// Whether attention and MLP both read the output of the layer's only norm, and their results
    /// are added together (Cohere).
    pub is_parallel: bool,
    /// Activation of the MLP.
    pub activation: MlpActivation,
    /// Names of the MLP's projections.
    pub mlp_names: MlpNames,
    /// How the checkpoint's weights are quantised, if they are.
    pub quantised: Option<Quantised>,
    /// Whether `dtype` or `torch_dtype` says bfloat16; false if both are absent.
    pub is_bf16: bool,
}

/// Activation of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpActivation {
    /// Of its gate, times up.
    Gated(Activation),
    /// Of up; there is no gate.
    Plain(PlainActivation),
}

/// The raw file. Unknown keys are ignored.
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
    sliding_window: Option<u32>,
    sliding_window_pattern: Option<Value>,
    /// Gemma 3's own name of the key; some files have both.
    #[serde(rename = "_sliding_window_pattern")]
    own_sliding_window_pattern: Option<Value>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    attention_out_bias: Option<bool>,
    qkv_bias: Option<bool>,
    use_qkv_bias: Option<bool>,
    use_bias: Option<bool>,
    bias: Option<bool>,
    use_qk_norm: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    layer_types: Option<Vec<String>>,
    num_experts: Option<usize>,
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    n_routed_experts: Option<usize>,
    n_shared_experts: Option<usize>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    routed_scaling_factor: Option<f32>,
    first_k_dense_replace: Option<usize>,
    swiglu_alpha: Option<f32>,
    swiglu_limit: Option<f32>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    mlp_layer_types: Option<Vec<String>>,
    num_shared_experts: Option<usize>,
    router_scaling_factor: Option<f32>,
    quantization_config: Option<Value>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
}

/// Upper bound of every size: far above any model's, far below overflow.
const SIZE_MAX: usize = 1 << 24;

impl ModelConfig {
    /// Reads and checks `config.json` of `folder`.
    ///
    /// # Errors
    /// [`ModelError::File`] naming the key, its value's problem and the bound.
    pub fn load(folder: &Path) -> Result<Self, ModelError> {
        Self::load_with(folder, &ConfigOverrides::default())
    }

    /// The same with `overrides` laid over the file.
    ///
    /// # Errors
    /// As [`ModelConfig::load`].
    pub fn load_with(folder: &Path, overrides: &ConfigOverrides) -> Result<Self, ModelError> {
        let file = folder.join("config.json");
        let text = std::fs::read_to_string(&file)
            .map_err(|error| ModelError::file(&file, format!("cannot be read: {error}")))?;
        let config = model_config::parse(&text).map_err(|error| {
            ModelError::file(&file, format!("not a model configuration: {error}"))
        })?;
        let config = overrides.lay_over(config).and_then(Self::from_value);
        config.map_err(|message| ModelError::file(&file, overrides.explain(message)))
    }

    /// Checks the contents of a `config.json`.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub fn from_value(config: Value) -> Result<Self, String> {
        let classifier = model_config::classifier(&config)?;
        let said = config["architectures"][0].as_str().unwrap_or_default().to_owned();
        let config = windows::completed(model_config::text_model(config)?);
        let raw: Raw = keys(&config)?;
        let architecture = raw.architectures.as_deref().unwrap_or_default().first();
        let architecture = architecture.ok_or("key architectures is missing or empty")?;
        let architecture = Architecture::parse(architecture)
            .map_err(|error| error.replacen(architecture, &said, usize::from(!said.is_empty())))?;
        // Embedders and rerankers made from generating models may also look at later tokens.
        for (key, usual) in [("is_causal", true), ("use_bidirectional_attention", false)] {
            let said = &config[key];
            if !said.is_null() && *said != usual {
                return Err(format!("{key} is {said}, only {usual} is supported"));
            }
        }
        let is_gemma = architecture.is_gemma();
        let (usual, activation) = architecture.activation();
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| !is_gemma && *act != usual) {
            return Err(format!("hidden_act is \"{act}\", only \"{usual}\" is supported"));
        }
        let quantised = raw.quantization_config.as_ref().map(quantization::check).transpose()?;
        let hidden_size = size("hidden_size", raw.hidden_size)?;
        let latent = match architecture.has_latents() {
            true => Some(Latent::read(&config, architecture)?),
            false => None,
        };
        let Heads { num_heads, num_kv_heads, head_dim } = match &latent {
            None => Heads::read(&raw, architecture, hidden_size)?,
            Some(latent) => Heads {
                num_heads: size("num_attention_heads", raw.num_attention_heads)?,
                num_kv_heads: 1,
                head_dim: latent.width(),
            },
        };
        let key = architecture.eps_key();
        let norm_eps = match &config[key] {
            Value::Null => return Err(format!("key {key} is missing")),
            said => said.as_f64().ok_or_else(|| format!("{key} is {said}, it must be a number"))?,
        };
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            return Err(format!("{key} is {norm_eps}, it must be between 0 and 1"));
        }
        let num_layers = size("num_hidden_layers", raw.num_hidden_layers)?;
        let delta = match architecture {
            Architecture::GraniteMoeHybrid => mamba::read(&config, norm_eps, num_layers)?,
            _ if architecture.gates_attention() => {
                Delta::read(&config, &raw, architecture, norm_eps, num_layers)?
            }
            _ => None,
        };
        let gate = &config["attn_output_gate"];
        if architecture.gates_attention() && *gate == Value::Bool(false) {
            return Err(format!("attn_output_gate is {gate}, only true is supported"));
        }
        let clip = &config["clip_qkv"];
        if architecture == Architecture::Olmoe && !clip.is_null() {
            return Err(format!("clip_qkv is {clip}, only null is supported"));
        }
        if architecture == Architecture::HyV3 && raw.mlp_bias == Some(true) {
            return Err("mlp_bias is true, only false is supported for HYV3ForCausalLM".to_owned());
        }
        let experts = experts::read(&config, &raw, architecture, num_layers)?;
        let positions = model_config::positions(&config)?;
        let told = rope::told(&config, &raw, architecture, num_layers)?;
        let ropes = {
            let rotated = latent.map_or(head_dim, |latent| latent.rotated);
            rope::ropes(&config, &raw, architecture, rotated, &told)?
        };
        let Gemma { query_scale, caps: [attention_cap, logits_cap] } = match is_gemma {
            true => Gemma::read(&config, architecture, head_dim)?,
            false => Gemma { query_scale: 1.0, caps: [None; 2] },
        };
        let granite = match architecture.is_granite() {
            true => Granite::read(&config)?,
            false => Granite::NONE,
        };
        let layer_norms = LayerNorms::read(&config, architecture)?;
        let is_dense = experts.as_ref().is_none_or(|experts| experts.layers.contains(&false));
        let intermediate_size = match is_dense {
            true if architecture == Architecture::GraniteMoeHybrid => {
                granite::shared_width(&config)?
            }
            true => size("intermediate_size", raw.intermediate_size)?,
            false => 0,
        };
        let Biases { qkv: qkv_bias, output: output_bias, mlp: mlp_bias } =
            architecture.biases(&raw);
        Ok(Self {
            hidden_size,
            intermediate_size,
            experts,
            sinks: architecture == Architecture::GptOss,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            latent,
            delta,
            gates_attention: architecture.gates_attention(),
            vocab_size: size("vocab_size", raw.vocab_size)?,
            max_positions: size("max_position_embeddings", Some(positions.most as usize))?,
            norm_eps: granite.norm_eps(norm_eps) as f32,
            sliding_windows: windows::read(&raw, architecture, &told)?,
            ropes,
            tied: raw
                .tie_word_embeddings
                .unwrap_or_else(|| model_config::is_tied_by_default(architecture.name())),
            classifier,
            qkv_bias,
            output_bias,
            mlp_bias,
            fused: architecture.fused(),
            qk_norm: architecture.normalises_heads(&raw),
            qk_norm_whole: architecture.normalises_all_heads(),
            query_scale: match &latent {
                Some(latent) => latent.query_scale(&config)?,
                None => query_scale * granite.query_scale(head_dim) as f32,
            },
            embedding_scale: match is_gemma {
                true => (hidden_size as f64).sqrt(),
                false => granite.embedding_scale(),
            },
            rounds_embedding_scale: is_gemma,
            logits_scaling: (granite.logits_scaling * layer_norms.logits_scaling) as f32,
            attention_cap,
            logits_cap,
            norm_offset: architecture.norm_offset(),
            norms: if layer_norms.is_parallel { Norms::PARALLEL } else { architecture.norms() },
            norm_kind: architecture.norm_kind(),
            is_parallel: layer_norms.is_parallel,
            activation,
            mlp_names: architecture.mlp_names(),
            quantised,
            is_bf16: raw.dtype.or(raw.torch_dtype).as_deref() == Some("bfloat16"),
        })
    }

    /// Whether its files have an output head of its own that is needed.
    #[must_use]
    pub fn has_own_head(&self) -> bool {
        !self.tied && self.classifier.is_none()
    }

    /// Returns the number of elements of V per head, as the output projection takes them.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value)
    }

    /// Returns the number of elements per head that RoPE tables are for.
    #[must_use]
    pub fn rope_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.rotated)
    }

    /// Returns the distinct sliding windows of its layers.
    #[must_use]
    pub fn windows(&self) -> Vec<Option<u32>> {
        let mut windows = self.sliding_windows.clone();
        windows.sort_unstable();
        windows.dedup();
        windows
    }

    /// Whether a layer has linear attention.
    #[must_use]
    pub fn is_linear(&self, layer: usize) -> bool {
        self.delta.as_ref().is_some_and(|delta| delta.layers[layer])
    }

    /// Returns the number of layers with linear attention.
    #[must_use]
    pub fn num_linear_layers(&self) -> usize {
        self.delta.as_ref().map_or(0, |delta| delta.layers.iter().filter(|it| **it).count())
    }

    /// Returns the number of layers that have a part of the KV cache.
    #[must_use]
    pub fn num_kv_layers(&self) -> usize {
        self.num_layers - self.num_linear_layers()
    }

    /// Returns the place of a layer among those of its kind: in the KV cache, or among the states.
    #[must_use]
    pub fn place(&self, layer: usize) -> usize {
        let is_linear = self.is_linear(layer);
        (0..layer).filter(|before| self.is_linear(*before) == is_linear).count()
    }

    /// Whether the MLPs of dense layers have a gate.
    #[must_use]
    pub fn is_gated(&self) -> bool {
        matches!(self.activation, MlpActivation::Gated(_))
    }

    /// The activation between an expert's gate, up and down projections.
    #[must_use]
    pub fn expert_activation(&self) -> ExpertActivation {
        self.experts.as_ref().map(|experts| experts.activation).unwrap_or_default()
    }
}

/// Attention heads.
struct Heads {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl Heads {
    fn read(raw: &Raw, architecture: Architecture, hidden_size: usize) -> Result<Self, String> {
        let num_heads = size("num_attention_heads", raw.num_attention_heads)?;
        let num_kv_heads = raw
            .num_key_value_heads
            .map_or(Ok(num_heads), |n| size("num_key_value_heads", Some(n)))?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(format!(
                "num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads \
                 ({num_kv_heads})"
            ));
        }
        let head_dim = match raw.head_dim.or(architecture.usual_head_dim()) {
            None => hidden_size / num_heads,
            said => size("head_dim", said)?,
        };
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {head_dim}, it must be even and at least 2"));
        }
        Ok(Self { num_heads, num_kv_heads, head_dim })
    }
}

/// Reads keys, each of which may be missing.
///
/// # Errors
/// The key whose value is of another type, and the type.
fn keys<T: DeserializeOwned>(config: &Value) -> Result<T, String> {
    T::deserialize(config).map_err(|error| {
        let is_wrong = |(key, value): &(&String, &Value)| {
            let alone = Value::from_iter([((*key).clone(), (*value).clone())]);
            T::deserialize(alone).is_err()
        };
        match config.as_object().and_then(|all| all.iter().find(is_wrong)) {
            Some((key, _)) => format!("{key}: {error}"),
            None => error.to_string(),
        }
    })
}

/// Checks that a list has an entry for each layer.
fn of_each_layer(key: &str, len: usize, num_layers: usize) -> Result<(), String> {
    match len == num_layers {
        true => Ok(()),
        false => Err(format!("{key} has {len} entries, num_hidden_layers is {num_layers}")),
    }
}

/// Which layers are of the second of two kinds, according to a list.
fn listed(
    key: &str,
    kinds: &[String],
    num_layers: usize,
    [no, yes]: [&str; 2],
) -> Result<Vec<bool>, String> {
    of_each_layer(key, kinds.len(), num_layers)?;
    let is_second = |kind: &String| match kind.as_str() {
        kind if kind == yes => Ok(true),
        kind if kind == no => Ok(false),
        _ => Err(format!("{key} has \"{kind}\"; supported are: {no}, {yes}")),
    };
    kinds.iter().map(is_second).collect()
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

#[cfg(test)]
mod layered;
#[cfg(test)]
mod published;
#[cfg(test)]
mod relatives;
#[cfg(test)]
mod tests;

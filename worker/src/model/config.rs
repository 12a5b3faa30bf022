//! `config.json` of a Hugging Face model folder, validated; in the dialects of transformers 4
//! (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`).
use std::path::Path;

use kernels::backend::{Activation, ExpertActivation, Routing};
use serde::Deserialize;
use serde_json::Value;
use shared::model_config;

use self::gemma3::Gemma3;
use super::ModelError;
use super::experts::ExpertsConfig;
use super::quantization::{self, Quantised};
use super::rope::RopeConfig;

mod gemma3;
mod gpt_oss;
mod rope;

/// The architectures that this worker supports.
pub const ARCHITECTURES: [&str; 10] = [
    gemma3::ARCHITECTURE,
    gpt_oss::ARCHITECTURE,
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
];

/// The configuration of a decoder-only model, as far as the forward pass needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Width of the residual stream, in elements.
    pub hidden_size: usize,
    /// Width of the MLP of dense layers; 0 when no layer is dense.
    pub intermediate_size: usize,
    /// The mixtures of experts (MoE), if some layers have one instead of an MLP.
    pub experts: Option<ExpertsConfig>,
    /// Has attention sinks: a learned logit per head that joins the softmax (gpt-oss).
    pub sinks: bool,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads (GQA); divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
    /// Size of the vocabulary, in tokens.
    pub vocab_size: usize,
    /// The longest sequence that the model supports, in tokens.
    pub max_positions: usize,
    /// Epsilon of all RMSNorms.
    pub norm_eps: f32,
    /// The rotary embedding of each layer.
    pub ropes: Vec<RopeConfig>,
    /// The sliding window of each layer: how many tokens its attention sees, including the current
    /// one; `None` for all.
    pub sliding_windows: Vec<Option<u32>>,
    /// The output head is the embedding matrix (tied).
    pub tied: bool,
    /// q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// The MLP's projections have biases.
    pub mlp_bias: bool,
    /// The files store q, k and v as one tensor, and gate and up as one.
    pub is_fused: bool,
    /// RMSNorm on each head of q and k, before the rotary embedding (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// Factor of q besides `1 / sqrt(head_dim)`; 1 unless heads are normalised.
    pub query_scale: f32,
    /// Factor of the embeddings.
    pub embedding_scale: f64,
    /// Added to the weights of all RMSNorms as stored in the files (1 for Gemma 3).
    pub norm_offset: f32,
    /// RMSNorm also on the output of attention and MLP, before the residual add (Gemma 3).
    pub delta_norms: bool,
    /// Activation of the MLP's gate.
    pub activation: Activation,
    /// How the checkpoint's weights are quantised, if they are.
    pub quantised: Option<Quantised>,
    /// The checkpoint is bfloat16, as `dtype` or `torch_dtype` says; false where neither does.
    pub is_bf16: bool,
}

/// The file as it is. Unknown keys are ignored.
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
    rms_norm_eps: Option<f64>,
    sliding_window: Option<u32>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    layer_types: Option<Vec<String>>,
    num_experts: Option<usize>,
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    swiglu_alpha: Option<f32>,
    swiglu_limit: Option<f32>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    quantization_config: Option<Value>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
}

/// Upper bound of every size: far above any model's, far below what overflows.
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
        let config = serde_json::from_str(&text).map_err(|error| {
            ModelError::file(&file, format!("not a model configuration: {error}"))
        })?;
        Self::check(config).map_err(|message| ModelError::file(&file, message))
    }

    fn check(config: Value) -> Result<Self, String> {
        let config = model_config::text_model(config)?;
        let raw: Raw = serde_json::from_value(config.clone())
            .map_err(|error| format!("not a model configuration: {error}"))?;
        let architecture = raw.architectures.as_deref().unwrap_or_default().first().cloned();
        let architecture = architecture.ok_or("key architectures is missing or empty")?;
        if !ARCHITECTURES.contains(&architecture.as_str()) {
            let known: Vec<&str> =
                ARCHITECTURES.into_iter().chain(model_config::wrappers()).collect();
            let known = known.join(", ");
            return Err(format!(
                "architecture {architecture} is not supported; these are: {known}"
            ));
        }
        let is_gemma = architecture == gemma3::ARCHITECTURE;
        let act = raw.hidden_act.as_deref().filter(|act| !is_gemma && *act != "silu");
        if let Some(act) = act {
            return Err(format!("hidden_act is \"{act}\", only \"silu\" is supported"));
        }
        let quantised = raw.quantization_config.as_ref().map(quantization::check).transpose()?;
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
        let qwen3 = ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"].contains(&architecture.as_str());
        // The code of Mistral, Mixtral, Phi-3 and Qwen2 ignores the key.
        let llama = ["LlamaForCausalLM", "SmolLM3ForCausalLM"].contains(&architecture.as_str());
        let is_gpt_oss = architecture == gpt_oss::ARCHITECTURE;
        let reads_bias = qwen3 || is_gemma || llama || is_gpt_oss;
        let attention_bias = reads_bias && raw.attention_bias.unwrap_or(is_gpt_oss);
        let num_layers = size("num_hidden_layers", raw.num_hidden_layers)?;
        let experts = experts(&raw, &architecture, num_layers)?;
        let positions = model_config::positions(&config)?;
        let gemma = match is_gemma {
            true => Some(Gemma3::check(&config, raw.sliding_window, head_dim, num_layers)?),
            false => None,
        };
        let (ropes, sliding_windows, query_scale) = match gemma {
            Some(Gemma3 { ropes, sliding_windows, query_scale }) => {
                (ropes, sliding_windows, query_scale)
            }
            None => {
                let ropes = rope::ropes(&config, &architecture, head_dim, num_layers)?;
                let windows = sliding_windows(&raw, &architecture, &ropes)?;
                (ropes, windows, 1.0)
            }
        };
        let is_dense = experts.as_ref().is_none_or(|experts| experts.layers.contains(&false));
        let intermediate_size = match is_dense {
            true => size("intermediate_size", raw.intermediate_size)?,
            false => 0,
        };
        Ok(Self {
            hidden_size,
            intermediate_size,
            experts,
            sinks: is_gpt_oss,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            vocab_size: size("vocab_size", raw.vocab_size)?,
            max_positions: size("max_position_embeddings", Some(positions.most as usize))?,
            norm_eps: norm_eps as f32,
            sliding_windows,
            ropes,
            // The defaults of transformers.
            tied: raw.tie_word_embeddings.unwrap_or(architecture == "SmolLM3ForCausalLM"),
            qkv_bias: attention_bias || qwen2,
            output_bias: attention_bias,
            mlp_bias: llama && raw.mlp_bias.unwrap_or(false),
            is_fused: architecture == "Phi3ForCausalLM",
            qk_norm: qwen3 || is_gemma,
            query_scale,
            embedding_scale: if is_gemma { (hidden_size as f64).sqrt() } else { 1.0 },
            norm_offset: if is_gemma { 1.0 } else { 0.0 },
            delta_norms: is_gemma,
            activation: if is_gemma { Activation::GeluTanh } else { Activation::Silu },
            quantised,
            is_bf16: raw.dtype.or(raw.torch_dtype).as_deref() == Some("bfloat16"),
        })
    }

    /// The activation between an expert's gate, up and down projections.
    #[must_use]
    pub fn expert_activation(&self) -> ExpertActivation {
        self.experts.as_ref().map(|experts| experts.activation).unwrap_or_default()
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

/// The layers with experts. Mixtral and gpt-oss: all layers, of width `intermediate_size`.
/// Qwen3-MoE: every `decoder_sparse_step`th layer, except `mlp_only_layers`.
fn experts(
    raw: &Raw,
    architecture: &str,
    num_layers: usize,
) -> Result<Option<ExpertsConfig>, String> {
    let is_interleaved = architecture == gpt_oss::ARCHITECTURE;
    // Experts in every layer, of `intermediate_size`.
    let mixtral = match architecture {
        "MixtralForCausalLM" => true,
        "Qwen3MoeForCausalLM" => false,
        _ if is_interleaved => true,
        _ => return Ok(None),
    };
    let (experts_most, top_most) = Routing::MOST;
    let bounded = |key: &str, value: Option<usize>, most: usize| match value {
        None => Err(format!("key {key} is missing")),
        Some(value) if (1..=most).contains(&value) => Ok(value),
        Some(value) => Err(format!("{key} is {value}, it must be in 1..={most}")),
    };
    let key = if mixtral { "num_local_experts" } else { "num_experts" };
    // transformers 5 names it num_local_experts for both.
    let num_experts = raw.num_experts.or(raw.num_local_experts);
    let num_experts = bounded(key, num_experts, experts_most)?;
    let top_k = bounded("num_experts_per_tok", raw.num_experts_per_tok, num_experts.min(top_most))?;
    let (intermediate_size, normalise, layers) = if mixtral {
        (size("intermediate_size", raw.intermediate_size)?, true, vec![true; num_layers])
    } else {
        let step = bounded("decoder_sparse_step", raw.decoder_sparse_step.or(Some(1)), SIZE_MAX)?;
        let dense = raw.mlp_only_layers.as_deref().unwrap_or_default();
        let layers: Vec<bool> = (0..num_layers)
            .map(|layer| (layer + 1).is_multiple_of(step) && !dense.contains(&layer))
            .collect();
        let width = size("moe_intermediate_size", raw.moe_intermediate_size)?;
        (width, raw.norm_topk_prob.unwrap_or(false), layers)
    };
    if !layers.contains(&true) {
        return Err("mlp_only_layers and decoder_sparse_step leave no layer with experts".into());
    }
    let routing = Routing { num_experts, top_k, normalise };
    let activation = match is_interleaved {
        true => gpt_oss::activation(raw.swiglu_alpha, raw.swiglu_limit)?,
        false => ExpertActivation::Silu,
    };
    Ok(Some(ExpertsConfig { routing, intermediate_size, layers, activation, is_interleaved }))
}

/// The sliding window of each layer, `None` for full attention:
/// - Mistral, Mixtral, Phi-3, and Qwen3-MoE if `use_sliding_window`: all layers slide.
/// - Other Qwen and SmolLM3, if `use_sliding_window`, and gpt-oss: the layers that `layer_types`
///   names; without that key, Qwen from layer `max_window_layers` on, SmolLM3 in layers without
///   RoPE, and gpt-oss in every second layer, starting with the first.
/// - Llama: none.
fn sliding_windows(
    raw: &Raw,
    architecture: &str,
    ropes: &[RopeConfig],
) -> Result<Vec<Option<u32>>, String> {
    let num_layers = ropes.len();
    let window = match architecture {
        "MistralForCausalLM" | "MixtralForCausalLM" | "Phi3ForCausalLM" => raw.sliding_window,
        "LlamaForCausalLM" => None,
        gpt_oss::ARCHITECTURE => raw.sliding_window,
        _ => raw.sliding_window.filter(|_| raw.use_sliding_window == Some(true)),
    };
    let window = self::window(window)?;
    let everywhere =
        ["MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM"];
    if window.is_none() || everywhere.contains(&architecture) {
        return Ok(vec![window; num_layers]);
    }
    let Some(types) = &raw.layer_types else {
        let first = raw.max_window_layers.unwrap_or(num_layers);
        let slides = |layer: usize| match architecture {
            "SmolLM3ForCausalLM" => ropes[layer].dim == 0,
            gpt_oss::ARCHITECTURE => layer.is_multiple_of(2),
            _ => layer >= first,
        };
        return Ok((0..num_layers).map(|layer| window.filter(|_| slides(layer))).collect());
    };
    Ok(slides(types, num_layers)?.into_iter().map(|slides| window.filter(|_| slides)).collect())
}

/// Which layers slide, according to `layer_types`.
fn slides(types: &[String], num_layers: usize) -> Result<Vec<bool>, String> {
    if types.len() != num_layers {
        let len = types.len();
        return Err(format!("layer_types has {len} entries, num_hidden_layers is {num_layers}"));
    }
    types
        .iter()
        .map(|kind| match kind.as_str() {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            _ => Err(format!(
                "layer_types has \"{kind}\"; supported are: full_attention, sliding_attention"
            )),
        })
        .collect()
}

fn window(window: Option<u32>) -> Result<Option<u32>, String> {
    match window {
        Some(0) => Err("sliding_window is 0, it must be at least 1".to_owned()),
        window => Ok(window),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::rope::RopeScaling;
    use super::*;

    const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0"#;

    fn parse(architecture: &str, more: &str) -> Result<ModelConfig, String> {
        let text = format!("{LLAMA}{more}}}").replace("LlamaForCausalLM", architecture);
        let text = text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4");
        ModelConfig::check(serde_json::from_str(&text).map_err(|error| error.to_string())?)
    }

    /// As published: 1B in full, 4B with only its differences from the defaults, and the latter as
    /// transformers 5 saves it.
    #[test]
    fn gemma_3_is_what_its_three_dialects_say() {
        let check = |config: Value| ModelConfig::check(config);
        let one = json!({"architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152,
            "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262_144,
            "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
            "rope_local_base_freq": 10_000, "rope_scaling": null, "query_pre_attn_scalar": 256,
            "sliding_window": 512, "sliding_window_pattern": 6, "attention_bias": false,
            "attn_logit_softcapping": null, "final_logit_softcapping": null,
            "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16"});
        let config = check(one.clone()).unwrap();
        assert!(config.tied && config.qk_norm && config.delta_norms && config.is_bf16);
        assert!(!config.qkv_bias && config.experts.is_none());
        assert_eq!((config.norm_offset, config.query_scale), (1.0, 1.0));
        assert_eq!(config.embedding_scale, 1152f64.sqrt());
        assert_eq!(config.activation, Activation::GeluTanh);
        let rope = |theta, scaling| RopeConfig { dim: 256, theta, scaling };
        for layer in 0..26 {
            let is_full = layer % 6 == 5;
            assert_eq!(config.sliding_windows[layer], (!is_full).then_some(512));
            let theta = if is_full { 1e6 } else { 1e4 };
            assert_eq!(config.ropes[layer], rope(theta, RopeScaling::None));
        }

        let four = json!({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}});
        let config = check(four).unwrap();
        assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (8, 4, 256));
        assert_eq!((config.vocab_size, config.max_positions), (262_208, 131_072));
        assert_eq!((config.norm_eps, config.tied), (1e-6, true));
        let full = rope(1e6, RopeScaling::Linear { factor: 8.0 });
        assert_eq!(config.ropes[5], full);
        assert_eq!(config.ropes[4], rope(1e4, RopeScaling::None), "only the others are scaled");
        assert_eq!(
            config.sliding_windows[..6],
            [Some(1024), Some(1024), Some(1024), Some(1024), Some(1024), None]
        );
        let types: Vec<&str> = (1..=34)
            .map(|layer| if layer % 6 == 0 { "full_attention" } else { "sliding_attention" })
            .collect();
        let newer = json!({"architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560,
            "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "layer_types": types, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
        assert_eq!(check(newer).unwrap(), config);
        let mut scaled = one.clone();
        scaled["query_pre_attn_scalar"] = json!(1024);
        assert_eq!(check(scaled).unwrap().query_scale, 0.5);

        for (key, value, expected) in [
            ("final_logit_softcapping", json!(30.0), "final_logit_softcapping is 30, only null"),
            ("attn_logit_softcapping", json!(50.0), "attn_logit_softcapping is 50, only null"),
            ("hidden_activation", json!("gelu"), "hidden_activation is \"gelu\", only \"gelu_pyt"),
            ("use_bidirectional_attention", json!(true), "use_bidirectional_attention is true"),
            ("sliding_window_pattern", json!(0), "sliding_window_pattern is 0"),
            ("sliding_window", json!(0), "sliding_window is 0"),
            ("query_pre_attn_scalar", json!(0), "query_pre_attn_scalar is 0"),
            ("layer_types", json!(["full_attention"]), "layer_types has 1 entries, num_hidden"),
            ("layer_types", json!(vec!["other"; 26]), "layer_types has \"other\""),
            ("rope_scaling", json!({"rope_type": "linear"}), "rope key factor is missing"),
        ] {
            let mut config = one.clone();
            config[key] = value;
            let error = check(config).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn windows_slide_where_the_architecture_says() {
        let windows = |architecture, more| parse(architecture, more).unwrap().sliding_windows;
        let window = r#", "sliding_window": 16"#;
        assert_eq!(windows("MistralForCausalLM", window), [Some(16); 4]);
        assert_eq!(windows("MistralForCausalLM", r#", "sliding_window": null"#), [None; 4]);
        assert_eq!(windows("LlamaForCausalLM", window), [None; 4]);
        // Qwen's files contain a window that is not used.
        assert_eq!(windows("Qwen2ForCausalLM", window), [None; 4]);
        let used = r#", "sliding_window": 16, "use_sliding_window": true, "max_window_layers": 3"#;
        assert_eq!(windows("Qwen2ForCausalLM", used), [None, None, None, Some(16)]);
        let types = r#", "sliding_window": 16, "use_sliding_window": true, "layer_types":
            ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]"#;
        let slides = [Some(16), None, None, Some(16)];
        assert_eq!(windows("Qwen3ForCausalLM", types), slides);
        let error = parse("Qwen3ForCausalLM", &types.replace("full", "chunked")).unwrap_err();
        assert!(error.contains("layer_types has \"chunked_attention\""), "{error}");
    }

    #[test]
    fn biases_are_where_the_architecture_has_them() {
        let biases = |architecture, more| {
            let config = parse(architecture, more).unwrap();
            (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
        };
        let all = r#", "attention_bias": true, "mlp_bias": true"#;
        assert_eq!(biases("LlamaForCausalLM", all), (true, true, true, false));
        assert_eq!(biases("MistralForCausalLM", all), (false, false, false, false));
        assert_eq!(biases("Qwen2ForCausalLM", ""), (true, false, false, false));
        assert_eq!(biases("Qwen3ForCausalLM", ""), (false, false, false, true));
        assert_eq!(biases("Qwen3ForCausalLM", all), (true, true, false, true));
    }

    fn check(more: &str) -> Result<ModelConfig, String> {
        let config = serde_json::from_str(&format!("{LLAMA}{more}}}"));
        ModelConfig::check(config.map_err(|e| e.to_string())?)
    }

    #[test]
    fn both_dialects_give_the_same_rope() {
        let four = check(r#", "rope_scaling": {"rope_type": "linear", "factor": 2.0}"#).unwrap();
        let five = check(
            r#", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}"#,
        );
        assert_eq!(four.ropes, five.unwrap().ropes);
        assert_eq!(check("").unwrap().ropes[0].scaling, RopeScaling::None);
    }

    #[test]
    fn both_dialects_name_the_dtype_and_the_newer_one_wins() {
        let is_bf16 = |more| check(more).unwrap().is_bf16;
        assert!(is_bf16(r#", "torch_dtype": "bfloat16""#));
        assert!(is_bf16(r#", "dtype": "bfloat16""#));
        assert!(!is_bf16(r#", "dtype": "float32", "torch_dtype": "bfloat16""#));
        assert!(!is_bf16(r#", "torch_dtype": "float16""#));
        assert!(!is_bf16(r#", "torch_dtype": null"#));
        assert!(!is_bf16(""));
    }

    #[test]
    fn experts_are_where_the_architecture_has_them() {
        let mixtral = r#", "num_local_experts": 8, "num_experts_per_tok": 2"#;
        let config = parse("MixtralForCausalLM", mixtral).unwrap();
        let routing = Routing { num_experts: 8, top_k: 2, normalise: true };
        let layers = vec![true; 4];
        let experts = ExpertsConfig {
            routing,
            intermediate_size: 128,
            layers,
            activation: ExpertActivation::Silu,
            is_interleaved: false,
        };
        assert_eq!((config.experts, config.intermediate_size), (Some(experts), 0));

        // The names of both dialects; not normalised by default.
        for count in ["num_experts", "num_local_experts"] {
            let qwen =
                format!(r#", "{count}": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48"#);
            let config = parse("Qwen3MoeForCausalLM", &qwen).unwrap();
            assert!(config.qk_norm && !config.qkv_bias);
            assert_eq!(config.intermediate_size, 0, "no layer is dense");
            let experts = config.experts.unwrap();
            assert_eq!(experts.routing, Routing { num_experts: 6, top_k: 3, normalise: false });
            assert_eq!((experts.intermediate_size, experts.layers), (48, vec![true; 4]));
            let mixed = format!(
                r#"{qwen}, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": true"#
            );
            let config = parse("Qwen3MoeForCausalLM", &mixed).unwrap();
            assert_eq!(config.intermediate_size, 128, "of the dense layers");
            let experts = config.experts.unwrap();
            assert!(experts.routing.normalise);
            assert_eq!(experts.layers, [false, true, false, false]);
        }
        assert_eq!(parse("Qwen3ForCausalLM", mixtral).unwrap().experts, None);

        for (more, expected) in [
            (r#", "num_local_experts": 8"#, "key num_experts_per_tok is missing"),
            (r#", "num_experts_per_tok": 2"#, "key num_local_experts is missing"),
            (&mixtral.replace("8", "1025"), "num_local_experts is 1025, it must be in 1..=1024"),
            (&mixtral.replace("2", "9"), "num_experts_per_tok is 9, it must be in 1..=8"),
        ] {
            let error = parse("MixtralForCausalLM", more).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let none = r#", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
            "mlp_only_layers": [0, 1, 2, 3]"#;
        let error = parse("Qwen3MoeForCausalLM", none).unwrap_err();
        assert!(error.contains("leave no layer with experts"), "{error}");
    }

    #[test]
    fn errors_name_key_value_and_bound() {
        let cases = [
            (r#", "head_dim": 7"#, "head_dim is 7, it must be even"),
            (r#", "rope_scaling": {"rope_type": "ntk"}"#, "rope_type \"ntk\" is not supported"),
            (r#", "hidden_act": "gelu""#, "hidden_act is \"gelu\""),
            (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor is 0.5, only 1"),
            (
                r#", "quantization_config": {"quant_method": "hqq", "bits": 4}"#,
                "quantization_config (quant_method \"hqq\", 4 bits) is not supported",
            ),
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

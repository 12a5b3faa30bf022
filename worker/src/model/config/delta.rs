//! The keys of `config.json` for linear attention by the gated delta rule (Qwen3-Next, Qwen3.5).
use kernels::backend::{DeltaShape, Rule};
use serde::Deserialize;
use serde_json::Value;

use super::architecture::Architecture;
use super::{Raw as Keys, keys, listed, size};

/// Linear attention, in place of attention over a KV cache, in some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    /// Sizes of the whole model.
    pub shape: DeltaShape,
    /// Whether each layer has it.
    pub layers: Vec<bool>,
    /// How files have its tensors.
    pub layout: Layout,
    /// Epsilon of its norm.
    pub norm_eps: f32,
}

/// How files have the tensors of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Two projections, in which each key head has its own outputs together (Qwen3-Next).
    Grouped,
    /// Four projections (Qwen3.5).
    Split,
    /// One projection: z, v, k, q and a. Convolutions are in the order v, k, q (Mamba 2).
    Mamba,
}

#[derive(Deserialize)]
struct Raw {
    linear_num_key_heads: Option<usize>,
    linear_num_value_heads: Option<usize>,
    linear_key_head_dim: Option<usize>,
    linear_value_head_dim: Option<usize>,
    linear_conv_kernel_dim: Option<usize>,
    full_attention_interval: Option<usize>,
}

impl Delta {
    /// Reads which layers have linear attention, and its sizes; `None` if no layer has it.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub(super) fn read(
        config: &Value,
        all: &Keys,
        architecture: Architecture,
        norm_eps: f64,
        num_layers: usize,
    ) -> Result<Option<Self>, String> {
        if all.attention_bias == Some(true) {
            let name = architecture.name();
            return Err(format!("attention_bias is true, only false is supported for {name}"));
        }
        let raw: Raw = keys(config)?;
        let layers = match (&all.layer_types, raw.full_attention_interval.unwrap_or(4)) {
            (Some(kinds), _) => {
                listed("layer_types", kinds, num_layers, ["full_attention", "linear_attention"])?
            }
            (None, 0) => {
                return Err("full_attention_interval is 0, it must be at least 1".to_owned());
            }
            (None, step) => (1..=num_layers).map(|layer| !layer.is_multiple_of(step)).collect(),
        };
        if !layers.contains(&true) {
            return Ok(None);
        }
        if !layers.contains(&false) {
            let key = match all.layer_types {
                Some(_) => "layer_types",
                None => "full_attention_interval",
            };
            return Err(format!("{key} leaves no layer with full_attention"));
        }
        let (key_most, value_most, _) = DeltaShape::MOST;
        let heads = |key: &str, said: Option<usize>, usual| size(key, said.or(Some(usual)));
        let key_heads = heads("linear_num_key_heads", raw.linear_num_key_heads, 16)?;
        let value_heads = heads("linear_num_value_heads", raw.linear_num_value_heads, 32)?;
        if !value_heads.is_multiple_of(key_heads) {
            return Err(format!(
                "linear_num_value_heads ({value_heads}) is not a multiple of linear_num_key_heads \
                 ({key_heads})"
            ));
        }
        let head = |key: &str, said: Option<usize>, most| head_dim(key, said.unwrap_or(128), most);
        let shape = DeltaShape {
            rule: Rule::GatedDelta,
            key_heads,
            value_heads,
            key_dim: head("linear_key_head_dim", raw.linear_key_head_dim, key_most)?,
            value_dim: head("linear_value_head_dim", raw.linear_value_head_dim, value_most)?,
            kernel: kernel("linear_conv_kernel_dim", raw.linear_conv_kernel_dim)?,
        };
        let layout = match architecture {
            Architecture::Qwen3Next => Layout::Grouped,
            _ => Layout::Split,
        };
        Ok(Some(Self { shape, layers, layout, norm_eps: norm_eps as f32 }))
    }
}

/// Checks the number of elements of a head.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn head_dim(key: &str, size: usize, most: usize) -> Result<usize, String> {
    match size {
        size if (1..=most).contains(&size) && size.is_multiple_of(8) => Ok(size),
        size => Err(format!("{key} is {size}, it must be a multiple of 8, at most {most}")),
    }
}

/// Checks how many tokens a convolution sees: 4 if the file does not say it.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn kernel(key: &str, said: Option<usize>) -> Result<usize, String> {
    let (_, _, most) = DeltaShape::MOST;
    match said.unwrap_or(4) {
        kernel if (2..=most).contains(&kernel) => Ok(kernel),
        kernel => Err(format!("{key} is {kernel}, it must be in 2..={most}")),
    }
}

#[cfg(test)]
mod tests {
    use kernels::backend::Routing;
    use serde_json::json;

    use super::super::ModelConfig;
    use super::*;

    /// Qwen/Qwen3-Next-80B-A3B-Instruct, with fewer layers.
    fn next() -> Value {
        json!({
            "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false,
            "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262_144, "mlp_only_layers": [], "moe_intermediate_size": 512,
            "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 8, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_scaling": null,
            "rope_theta": 10_000_000, "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 151_936,
        })
    }

    /// The text model of Qwen/Qwen3.5-27B as transformers has it by default, with fewer layers.
    fn dense() -> Value {
        let rope = json!({"mrope_interleaved": true, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"});
        json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": false,
            "text_config": {
                "attn_output_gate": true, "head_dim": 256, "hidden_act": "silu",
                "hidden_size": 4096, "intermediate_size": 12_288, "layer_types":
                    ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
                "linear_num_value_heads": 48, "max_position_embeddings": 262_144,
                "model_type": "qwen3_5_text", "num_attention_heads": 16, "num_hidden_layers": 4,
                "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_parameters": rope,
                "vocab_size": 248_320,
            },
        })
    }

    fn with(mut config: Value, key: &str, value: Value) -> Result<ModelConfig, String> {
        let table =
            if config["text_config"].is_null() { &mut config } else { &mut config["text_config"] };
        table[key] = value;
        ModelConfig::from_value(config)
    }

    #[test]
    fn three_of_four_layers_have_it() {
        let config = ModelConfig::from_value(next()).unwrap();
        let delta = config.delta.clone().unwrap();
        let shape = DeltaShape {
            rule: Rule::GatedDelta,
            key_heads: 16,
            value_heads: 32,
            key_dim: 128,
            value_dim: 128,
            kernel: 4,
        };
        assert_eq!((delta.shape, delta.layout), (shape, Layout::Grouped));
        let quarter = [true, true, true, false];
        assert_eq!(delta.layers, [quarter, quarter].concat());
        assert!(config.gates_attention && config.qk_norm && config.norm_offset == 1.0);
        let routing = Routing { shared: 1, gated: true, ..Routing::softmax(513, 11, true) };
        assert_eq!(config.num_kv_layers(), 2);
        assert_eq!((config.place(2), config.place(3), config.place(4)), (2, 0, 3));
        assert_eq!(config.experts.unwrap().routing, routing);

        let config = ModelConfig::from_value(dense()).unwrap();
        let delta = config.delta.clone().unwrap();
        assert_eq!((delta.layers, delta.layout), (quarter.to_vec(), Layout::Split));
        assert_eq!(delta.shape, DeltaShape { value_heads: 48, ..shape });
        assert!(config.gates_attention && config.experts.is_none() && !config.tied);
        assert_eq!(
            with(next(), "norm_topk_prob", json!(null)).unwrap().experts.unwrap().routing,
            routing,
            "the default"
        );
        let all = with(next(), "full_attention_interval", json!(1)).unwrap();
        assert!(all.delta.is_none() && all.gates_attention);
    }

    #[test]
    fn sizes_that_are_not_supported_are_named() {
        for (key, value, expected) in [
            ("linear_num_key_heads", json!(12), "linear_num_value_heads (32) is not a multiple of"),
            (
                "linear_key_head_dim",
                json!(300),
                "linear_key_head_dim is 300, it must be a multiple",
            ),
            ("linear_value_head_dim", json!(20), "linear_value_head_dim is 20, it must be a mult"),
            (
                "linear_conv_kernel_dim",
                json!(1),
                "linear_conv_kernel_dim is 1, it must be in 2..=8",
            ),
            ("full_attention_interval", json!(0), "full_attention_interval is 0"),
            ("full_attention_interval", json!(9), "full_attention_interval leaves no layer with"),
            ("layer_types", json!(["full_attention"]), "layer_types has 1 entries"),
            ("attention_bias", json!(true), "attention_bias is true, only false is supported for"),
        ] {
            let error = with(next(), key, value).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let gate = with(dense(), "attn_output_gate", json!(false)).unwrap_err();
        assert!(gate.contains("attn_output_gate is false, only true is supported"), "{gate}");
    }
}

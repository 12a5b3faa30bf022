//! The keys of `config.json` for multi-head latent attention (DeepSeek V2, V3, GLM-4.7-Flash).
use serde_json::Value;
use shared::model_config;

use super::architecture::Architecture;
use super::size;

/// Sizes of multi-head latent attention, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Width between the two projections that make q, if there are two.
    pub q_rank: Option<usize>,
    /// The latent, of which each head's K and V could be made.
    pub rank: usize,
    /// Elements of a head of q and K without positions.
    pub plain: usize,
    /// Elements of a head of q and K that are rotated. All heads share those of K.
    pub rotated: usize,
    /// Elements of a head of V.
    pub value: usize,
}

impl Latent {
    /// Epsilon of the norms of latents, whatever the file says of the others.
    pub const NORM_EPS: f32 = 1e-6;

    /// Reads the sizes.
    ///
    /// # Errors
    /// The key, its value's problem and the bound.
    pub(super) fn read(config: &Value, architecture: Architecture) -> Result<Self, String> {
        for key in ["attention_bias", "mlp_bias"] {
            if config[key] == Value::Bool(true) {
                let name = architecture.name();
                return Err(format!("{key} is true, only false is supported for {name}"));
            }
        }
        let even = |key: &str| match number(config, key)? {
            value if value.is_multiple_of(2) => Ok(value),
            value => Err(format!("{key} is {value}, it must be even")),
        };
        Ok(Self {
            q_rank: match config["q_lora_rank"] {
                Value::Null => None,
                _ => Some(number(config, "q_lora_rank")?),
            },
            rank: even("kv_lora_rank")?,
            plain: number(config, "qk_nope_head_dim")?,
            rotated: even("qk_rope_head_dim")?,
            value: number(config, "v_head_dim")?,
        })
    }

    /// Elements that the cache has of a token.
    #[must_use]
    pub fn width(&self) -> usize {
        self.rank + self.rotated
    }

    /// Factor of scores in addition to `1 / sqrt(width)`. The models' own is the root of the heads'
    /// size, times the square of YaRN's factor for all elements.
    ///
    /// # Errors
    /// The key that is missing.
    pub(super) fn query_scale(&self, config: &Value) -> Result<f32, String> {
        let heads = (self.plain + self.rotated) as f64;
        let stretched = match model_config::rope_scaling(config) {
            Some((table, kind)) if kind != "default" => {
                match (table["mscale_all_dim"].as_f64(), table["factor"].as_f64()) {
                    (None | Some(0.0), _) => 1.0,
                    // Nothing else stands in for it here, as it does for the table of angles.
                    (_, None) => return Err("rope key factor is missing".to_owned()),
                    (Some(all), Some(factor)) => 0.1 * all * factor.max(1.0).ln() + 1.0,
                }
            }
            _ => 1.0,
        };
        Ok(((self.width() as f64 / heads).sqrt() * stretched * stretched) as f32)
    }
}

fn number(config: &Value, key: &str) -> Result<usize, String> {
    match &config[key] {
        Value::Null => size(key, None),
        said => match said.as_u64().and_then(|value| usize::try_from(value).ok()) {
            Some(value) => size(key, Some(value)),
            None => Err(format!("{key} is {said}, it must be a whole number above 0")),
        },
    }
}

#[cfg(test)]
mod tests {
    use kernels::backend::{Routing, Scores};
    use serde_json::json;

    use super::super::super::rope::RopeScaling;
    use super::super::ModelConfig;
    use super::*;

    /// deepseek-ai/DeepSeek-V2-Lite, with fewer layers.
    fn lite() -> Value {
        json!({
            "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false,
            "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
            "max_position_embeddings": 163_840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
            "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 3,
            "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
            "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
            "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102_400,
        })
    }

    /// deepseek-ai/DeepSeek-V3, with fewer layers.
    fn third() -> Value {
        json!({
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false,
            "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
            "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163_840,
            "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
            "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 5,
            "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
                "quant_method": "fp8", "weight_block_size": [128, 128]},
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129_280,
        })
    }

    fn read(config: &Value) -> Result<ModelConfig, String> {
        ModelConfig::from_value(config.clone())
    }

    fn with(config: &Value, key: &str, value: Value) -> Result<ModelConfig, String> {
        let mut config = config.clone();
        config[key] = value;
        read(&config)
    }

    #[test]
    fn v2_lite() {
        let config = read(&lite()).unwrap();
        let latent = config.latent.unwrap();
        assert_eq!(latent, Latent { q_rank: None, rank: 512, plain: 128, rotated: 64, value: 128 });
        assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (16, 1, 576));
        assert_eq!((config.value_dim(), config.rope_dim()), (128, 64));
        let rope = &config.ropes[0];
        assert_eq!((rope.dim, rope.is_interleaved, rope.attention_factor()), (64, true, 1.0));
        assert!(matches!(rope.scaling, RopeScaling::Yarn { factor: 40.0, .. }));
        // 0.1 * 0.707 * ln 40 + 1, squared; scores are divided by sqrt(192), not by sqrt(576).
        let stretched = 0.1 * 0.707 * 40f64.ln() + 1.0;
        let want = 3f64.sqrt() * stretched * stretched;
        assert!((f64::from(config.query_scale) - want).abs() < 1e-6, "{}", config.query_scale);
        let experts = config.experts.unwrap();
        assert_eq!(experts.layers, [false, true, true]);
        let routing = Routing { shared: 2, ..Routing::softmax(66, 8, false) };
        assert_eq!((experts.routing, experts.intermediate_size), (routing, 1408));

        // DeepSeek-V2 itself.
        let mut larger = lite();
        for (key, value) in [
            ("n_group", json!(8)),
            ("topk_group", json!(3)),
            ("topk_method", json!("group_limited_greedy")),
            ("n_routed_experts", json!(160)),
            ("q_lora_rank", json!(1536)),
            ("routed_scaling_factor", json!(16.0)),
        ] {
            larger[key] = value;
        }
        let routing = read(&larger).unwrap().experts.unwrap().routing;
        assert_eq!((routing.groups, routing.kept_groups, routing.scale), (8, 3, 16.0));
        assert_eq!((routing.num_experts, routing.group_size()), (162, 20));
    }

    #[test]
    fn v3() {
        let config = read(&third()).unwrap();
        assert_eq!(config.latent.unwrap().q_rank, Some(1536));
        let experts = config.experts.unwrap();
        assert_eq!(experts.layers, [false, false, false, true, true]);
        let routing = Routing {
            scores: Scores::Sigmoid,
            scale: 2.5,
            shared: 1,
            groups: 8,
            kept_groups: 4,
            ..Routing::softmax(257, 9, true)
        };
        assert_eq!(experts.routing, routing);
        let plain = with(&third(), "rope_interleave", json!(false)).unwrap();
        assert!(!plain.ropes[0].is_interleaved && config.ropes[0].is_interleaved);
        // Kimi K2 has one group.
        let mut kimi = third();
        kimi["n_group"] = json!(1);
        kimi["topk_group"] = json!(1);
        let routing = read(&kimi).unwrap().experts.unwrap().routing;
        assert_eq!((routing.groups, routing.kept_groups), (1, 1));
        // As transformers 5 saves it.
        let mut newer = third();
        let mut rope = newer.as_object_mut().unwrap().remove("rope_scaling").unwrap();
        rope["rope_type"] = rope.as_object_mut().unwrap().remove("type").unwrap();
        rope["rope_theta"] = newer.as_object_mut().unwrap().remove("rope_theta").unwrap();
        newer["rope_parameters"] = rope;
        newer["head_dim"] = json!(64);
        assert_eq!(read(&newer).unwrap(), read(&third()).unwrap());
    }

    /// As DeepseekV3Config and DeepseekV2Config of transformers have it.
    #[test]
    fn what_is_not_said_is_as_transformers_has_it() {
        let mut config = third();
        let keys = [
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "norm_topk_prob",
            "n_shared_experts",
            "first_k_dense_replace",
            "topk_method",
            "scoring_func",
        ];
        for key in keys {
            assert_eq!(with(&third(), key, Value::Null).unwrap(), read(&third()).unwrap(), "{key}");
            config.as_object_mut().unwrap().remove(key);
        }
        assert_eq!(read(&config).unwrap(), read(&third()).unwrap());
        let mut config = lite();
        for key in keys {
            config.as_object_mut().unwrap().remove(key);
        }
        let experts = read(&config).unwrap().experts.unwrap();
        assert_eq!(experts.layers, [true; 3]);
        assert_eq!(experts.routing, Routing { shared: 2, ..Routing::softmax(66, 8, false) });
    }

    #[test]
    fn scores_are_stretched_by_a_factor_that_is_said() {
        let mut config = lite();
        let table = config["rope_scaling"].as_object_mut().unwrap();
        table.remove("factor");
        assert_eq!(read(&config).unwrap_err(), "rope key factor is missing");
        // Without it, no factor is needed: that of angles follows from the lengths.
        config["rope_scaling"]["mscale_all_dim"] = json!(0);
        assert_eq!(read(&config).unwrap().query_scale, 3f32.sqrt());
    }

    #[test]
    fn errors_name_key_value_and_bound() {
        for (key, value, expected) in [
            ("kv_lora_rank", Value::Null, "key kv_lora_rank is missing"),
            ("kv_lora_rank", json!(511), "kv_lora_rank is 511, it must be even"),
            ("qk_rope_head_dim", json!("64"), "qk_rope_head_dim is \"64\", it must be a whole"),
            ("v_head_dim", json!(0), "v_head_dim is 0, it must be in 1..="),
            ("q_lora_rank", json!(-1), "q_lora_rank is -1, it must be a whole number"),
            ("attention_bias", json!(true), "attention_bias is true, only false is supported for"),
            ("moe_layer_freq", json!(2), "moe_layer_freq is 2, only 1 is supported"),
            ("topk_method", json!("greedy"), "topk_method is \"greedy\", only \"noaux_tc\""),
            ("scoring_func", json!("softmax"), "scoring_func is \"softmax\", only \"sigmoid\""),
            ("n_group", json!(7), "n_group or topk_group: "),
            ("topk_group", json!(9), "n_group or topk_group: "),
        ] {
            let error = with(&third(), key, value).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let error = with(&lite(), "norm_topk_prob", json!(true)).unwrap_err();
        assert!(error.contains("norm_topk_prob is true, only false is supported for"), "{error}");
        let error = with(&lite(), "topk_method", json!("noaux_tc")).unwrap_err();
        assert!(error.contains("only \"greedy\" and \"group_limited_greedy\""), "{error}");
    }
}

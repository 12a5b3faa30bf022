//! gpt-oss's own keys in `config.json`.
use kernels::backend::ExpertActivation;

/// The activation of its experts (clamped SwiGLU), with the defaults of transformers.
///
/// # Errors
/// The key, its value's problem and the bound.
pub(super) fn activation(
    alpha: Option<f32>,
    limit: Option<f32>,
) -> Result<ExpertActivation, String> {
    let positive = |key: &str, value: Option<f32>, usual: f32| match value.unwrap_or(usual) {
        value if value.is_finite() && value > 0.0 => Ok(value),
        value => Err(format!("{key} is {value}, it must be finite and above 0")),
    };
    let alpha = positive("swiglu_alpha", alpha, 1.702)?;
    Ok(ExpertActivation::Clamped { alpha, limit: positive("swiglu_limit", limit, 7.0)? })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::super::rope::RopeScaling;
    use super::super::ModelConfig;
    use super::*;

    /// openai/gpt-oss-20b, but with fewer layers.
    fn published() -> Value {
        json!({
            "architectures": ["GptOssForCausalLM"], "attention_bias": true, "experts_per_token": 4,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "max_position_embeddings": 131_072, "model_type": "gpt_oss",
            "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 3,
            "num_key_value_heads": 8, "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            "rms_norm_eps": 1e-5,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
            "rope_theta": 150_000, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": false, "vocab_size": 201_088,
        })
    }

    fn check(
        change: impl FnOnce(&mut serde_json::Map<String, Value>),
    ) -> Result<ModelConfig, String> {
        let mut config = published();
        change(config.as_object_mut().unwrap());
        ModelConfig::from_value(config)
    }

    #[test]
    fn the_published_configuration_is_read() {
        let config = check(|_| ()).unwrap();
        assert!(config.sinks && config.qkv_bias && config.output_bias && !config.qk_norm);
        assert_eq!(config.sliding_windows, [Some(128), None, None]);
        assert_eq!((config.intermediate_size, config.max_positions), (0, 131_072));
        let experts = config.experts.as_ref().unwrap();
        assert!(experts.is_interleaved && experts.routing.normalise);
        assert_eq!((experts.routing.num_experts, experts.routing.top_k), (32, 4));
        let clamped = ExpertActivation::Clamped { alpha: 1.702, limit: 7.0 };
        assert_eq!(config.expert_activation(), clamped);
        let rope = &config.ropes[0];
        assert_eq!((rope.dim, rope.theta), (64, 150_000.0));
        assert!(matches!(rope.scaling, RopeScaling::Yarn { truncate: false, factor: 32.0, .. }));
        assert!(config.quantised.unwrap().packed.unwrap().is_of_experts());
    }

    #[test]
    fn what_is_not_said_is_as_transformers_has_it() {
        let config = check(|raw| {
            for key in ["attention_bias", "layer_types", "swiglu_limit", "rope_theta"] {
                raw.remove(key);
            }
            // 64, not 2880 / 64, and 128.
            raw.retain(|key, _| !["head_dim", "sliding_window"].contains(&key.as_str()));
        })
        .unwrap();
        assert_eq!(
            config,
            check(|raw| raw["layer_types"][2] = json!("sliding_attention")).unwrap()
        );
        // In the newer dialect, rope_theta is inside the table.
        let newer = check(|raw| {
            let mut table = raw.remove("rope_scaling").unwrap();
            table["rope_theta"] = raw.remove("rope_theta").unwrap();
            raw.insert("rope_parameters".to_owned(), table);
        });
        assert_eq!(newer, check(|_| ()));
        let plain = check(|raw| raw["sliding_window"] = Value::Null).unwrap();
        assert_eq!(plain.sliding_windows, [None; 3]);
    }

    #[test]
    fn errors_name_key_value_and_bound() {
        type Change = fn(&mut serde_json::Map<String, Value>);
        let cases: [(Change, &str); 5] = [
            (|raw| raw["swiglu_limit"] = json!(0), "swiglu_limit is 0, it must be finite"),
            (|raw| drop(raw.insert("swiglu_alpha".into(), json!(-1))), "swiglu_alpha is -1"),
            (
                |raw| drop(raw.remove("rope_scaling")),
                "rope_scaling (or rope_parameters) is missing",
            ),
            (|raw| drop(raw.remove("num_local_experts")), "num_local_experts is missing"),
            (|raw| raw["num_experts_per_tok"] = json!(33), "num_experts_per_tok is 33, it must be"),
        ];
        for (change, expected) in cases {
            let error = check(change).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}

//! Configurations as published, of architectures whose keys are their own, and what is refused.
use kernels::backend::{Routing, Scores};
use serde_json::{Value, json};

use super::super::rope::RopeScaling;
use super::*;

fn read(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_value(config.clone())
}

/// Checks that each change of `config` is an error with these words.
fn refuses(config: &Value, cases: &[(&str, Value, &str)]) {
    for (key, value, expected) in cases {
        let mut config = config.clone();
        config[*key] = value.clone();
        let error = read(&config).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn qwen2_moe() {
    let published = json!({
        "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": false,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
        "vocab_size": 151_936,
    });
    let config = read(&published).unwrap();
    assert!(config.qkv_bias && !config.output_bias && !config.qk_norm);
    assert_eq!(config.sliding_windows, [None; 24]);
    let experts = config.experts.unwrap();
    let Routing { num_experts, top_k, shared, .. } = experts.routing;
    assert_eq!((num_experts, top_k, shared), (64, 8, 4), "four times as wide as the others");
    assert_eq!((experts.routing.num_logits(), experts.intermediate_size), (61, 1408));
    assert!(experts.routing.gated && !experts.routing.normalise);
    let mut slides = published.clone();
    slides["use_sliding_window"] = json!(true);
    let windows = read(&slides).unwrap().sliding_windows;
    assert_eq!(windows[18..23], [Some(32768), None, Some(32768), None, None]);
    refuses(
        &published,
        &[
            ("shared_expert_intermediate_size", json!(5633), "is 5633, it must be a multiple of"),
            ("shared_expert_intermediate_size", Value::Null, "is missing"),
            ("shared_expert_intermediate_size", json!(1408 * 29), "they must be at most 28"),
        ],
    );
}

#[test]
fn glm_4_5() {
    let published = json!({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true,
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 1e6, "routed_scaling_factor": 2.5,
        "tie_word_embeddings": false, "topk_group": 1, "torch_dtype": "bfloat16",
        "use_qk_norm": false, "vocab_size": 151_552,
    });
    let config = read(&published).unwrap();
    assert!(config.qkv_bias && !config.output_bias && !config.qk_norm);
    let rope = &config.ropes[0];
    assert_eq!((rope.dim, rope.theta, rope.is_interleaved), (64, 1e6, false));
    let experts = config.experts.unwrap();
    assert!(!experts.layers[0] && experts.layers[1..].iter().all(|has_experts| *has_experts));
    let routing = Routing { scores: Scores::Sigmoid, scale: 2.5, shared: 1, ..experts.routing };
    assert_eq!(experts.routing, routing);
    assert_eq!((routing.num_experts, routing.top_k, routing.num_logits()), (129, 9, 128));
    assert!(routing.normalise && !routing.gated);
    // The larger model normalises heads; without the key, half of each head is rotated.
    let mut larger = published.clone();
    larger["use_qk_norm"] = json!(true);
    larger.as_object_mut().unwrap().remove("partial_rotary_factor");
    let larger = read(&larger).unwrap();
    assert!(larger.qk_norm && larger.ropes[0].dim == 64);
    refuses(
        &published,
        &[
            ("n_group", json!(8), "n_group is 8, only 1 group"),
            ("topk_group", json!(4), "topk_group is 4, only 1 group"),
            ("routed_scaling_factor", json!(0), "routed_scaling_factor is 0, it must be in"),
            ("first_k_dense_replace", json!(46), "first_k_dense_replace leaves no layer"),
            ("n_routed_experts", Value::Null, "n_routed_experts is missing"),
        ],
    );
}

#[test]
fn gemma_2() {
    let published = json!({
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": false,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608, "intermediate_size": 36864, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256_000,
    });
    let config = read(&published).unwrap();
    assert!(config.tied && !config.qk_norm && config.rounds_embedding_scale);
    assert_eq!((config.attention_cap, config.logits_cap), (Some(50.0), Some(30.0)));
    assert!((config.query_scale - (128f32 / 144.0).sqrt()).abs() < 1e-6);
    assert_eq!(config.norm_offset, 1.0);
    assert_eq!(config.activation, MlpActivation::Gated(Activation::GeluTanh));
    assert_eq!(config.sliding_windows[..3], [Some(4096), None, Some(4096)]);
    assert_eq!(config.norms.post, Some("pre_feedforward_layernorm"));
    // Without a key there is the usual cap; null is none.
    let mut other = published.clone();
    other.as_object_mut().unwrap().remove("attn_logit_softcapping");
    other["final_logit_softcapping"] = Value::Null;
    let other = read(&other).unwrap();
    assert_eq!((other.attention_cap, other.logits_cap), (Some(50.0), None));
    refuses(
        &published,
        &[
            ("attn_logit_softcapping", json!(0), "attn_logit_softcapping is 0, it must be null"),
            ("hidden_activation", json!("gelu"), "hidden_activation is \"gelu\""),
        ],
    );
}

#[test]
fn glm_4() {
    let published = json!({
        "architectures": ["Glm4ForCausalLM"], "attention_bias": false, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "vocab_size": 151_552,
    });
    let config = read(&published).unwrap();
    assert!(!config.qkv_bias && !config.fused.qkv && config.fused.gate_up);
    assert_eq!((config.ropes[0].dim, config.ropes[0].is_interleaved), (64, true));
    assert_eq!(config.norms.output, Some("post_self_attn_layernorm"));
    // The earlier GLM-4 has biases, and Llama's norms.
    let mut earlier = published.clone();
    earlier["architectures"] = json!(["GlmForCausalLM"]);
    earlier["attention_bias"] = json!(true);
    let earlier = read(&earlier).unwrap();
    assert!(earlier.qkv_bias && !earlier.output_bias && earlier.fused.gate_up);
    assert_eq!((earlier.norms.output, earlier.norms.down), (None, None));
}

#[test]
fn exaone_4() {
    let types: Vec<&str> = (1..=8)
        .map(|layer| if layer % 4 == 0 { "full_attention" } else { "sliding_attention" })
        .collect();
    // The 32B in small.
    let published = json!({
        "architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 27392, "layer_types": types,
        "max_position_embeddings": 131_072, "num_attention_heads": 40, "num_hidden_layers": 8,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "vocab_size": 102_400,
    });
    let config = read(&published).unwrap();
    assert!(config.qk_norm && !config.qkv_bias);
    assert_eq!((config.norms.input, config.norms.post), (None, None));
    assert_eq!(config.sliding_windows[2..4], [Some(4096), None]);
    assert!(matches!(config.ropes[2].scaling, RopeScaling::Llama3 { .. }));
    assert_eq!(config.ropes[3], RopeConfig::none(), "no positions beside windows");
    let mut by_number = published.clone();
    by_number.as_object_mut().unwrap().remove("layer_types");
    by_number["sliding_window_pattern"] = json!(4);
    assert_eq!(read(&by_number).unwrap(), config);
    // The 1.2B has no windows, and positions everywhere.
    let mut small = published.clone();
    small["sliding_window"] = Value::Null;
    small["layer_types"] = json!(vec!["full_attention"; 8]);
    let small = read(&small).unwrap();
    assert_eq!((small.ropes[3].dim, small.sliding_windows[2]), (128, None));
    let mut letters = published.clone();
    letters.as_object_mut().unwrap().remove("layer_types");
    refuses(
        &letters,
        &[("sliding_window_pattern", json!("LLLG"), "sliding_window_pattern is \"LLLG\", it must")],
    );
}

#[test]
fn ernie_4_5_and_internlm_3() {
    let mut config = json!({
        "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131_072,
        "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 500_000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_bias": false,
        "vocab_size": 103_424,
    });
    let ernie = read(&config).unwrap();
    assert!(ernie.tied && !ernie.qkv_bias && ernie.ropes[0].is_interleaved);
    for key in ["rope_theta", "tie_word_embeddings", "head_dim"] {
        config.as_object_mut().unwrap().remove(key);
    }
    assert_eq!(read(&config).unwrap(), ernie, "the defaults of transformers");
    config["use_bias"] = json!(true);
    let biased = read(&config).unwrap();
    assert!(biased.qkv_bias && biased.output_bias && biased.mlp_bias);

    let intern = json!({
        "architectures": ["InternLM3ForCausalLM"], "bias": false, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10240,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "qkv_bias": false, "rms_norm_eps": 1e-5,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50_000_000,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128_512,
    });
    let config = read(&intern).unwrap();
    assert!(!config.qkv_bias && !config.output_bias && !config.mlp_bias && !config.tied);
    assert_eq!((config.ropes[0].theta, config.max_positions), (5e7, 32768));
    let mut biased = intern.clone();
    biased["qkv_bias"] = json!(true);
    let biased = read(&biased).unwrap();
    assert!(biased.qkv_bias && !biased.output_bias, "the keys of its own code");
}

#[test]
fn granite_moe() {
    let published = json!({
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": false,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu",
        "hidden_size": 1536, "intermediate_size": 512, "logits_scaling": 6.0,
        "max_position_embeddings": 131_072, "num_attention_heads": 24,
        "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 40, "residual_multiplier": 0.22, "rms_norm_eps": 1e-6,
        "rope_scaling": null, "rope_theta": 1e7, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "vocab_size": 49155,
    });
    let config = read(&published).unwrap();
    assert_eq!((config.query_scale, config.logits_scaling), (0.125, 6.0));
    assert!((config.embedding_scale - 12.0 / 0.22).abs() < 1e-9 && config.tied);
    let experts = config.experts.unwrap();
    assert_eq!(experts.routing, Routing::softmax(40, 8, true));
    assert_eq!((experts.intermediate_size, config.intermediate_size), (512, 0));
}

//! Configurations as published, of architectures whose norms or MLPs differ from Llama's, and of
//! those that differ by little else.
use kernels::backend::{Activation, PlainActivation, Routing, Scores};
use serde_json::{Value, json};

use super::super::rope::RopeScaling;
use super::*;

fn read(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_value(config.clone())
}

fn without(config: &Value, keys: &[&str]) -> ModelConfig {
    let mut config = config.clone();
    for key in keys {
        assert!(config.as_object_mut().unwrap().remove(*key).is_some(), "{key}");
    }
    read(&config).unwrap()
}

fn with(config: &Value, key: &str, value: Value) -> Result<ModelConfig, String> {
    let mut config = config.clone();
    config[key] = value;
    read(&config)
}

#[test]
fn olmo_2_and_3() {
    let mut two = json!({
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 500_000,
        "tie_word_embeddings": false, "torch_dtype": "float32", "vocab_size": 100_352,
    });
    let config = read(&two).unwrap();
    assert!(config.qk_norm_whole && !config.qk_norm && !config.qkv_bias && !config.tied);
    assert_eq!((config.norms.input, config.norms.post), (None, None));
    assert_eq!(config.sliding_windows[0], None);
    // What transformers assumes if only the architecture's name changes.
    two["architectures"] = json!(["Olmo3ForCausalLM"]);
    let three = read(&two).unwrap();
    assert_eq!(three.sliding_windows[2..4], [Some(4096), None]);

    let published = json!({
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
            "full_attention"],
        "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 4,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0,
            "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192,
            "rope_type": "yarn"},
        "rope_theta": 500_000, "sliding_window": 4096, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "vocab_size": 100_278,
    });
    let config = read(&published).unwrap();
    assert!(config.qk_norm_whole);
    assert_eq!((config.max_positions, config.ropes[0].theta), (65536, 5e5));
    assert_eq!(config.ropes[0].scaling, RopeScaling::None, "only full layers are scaled");
    assert!(matches!(config.ropes[3].scaling, RopeScaling::Yarn { factor: 8.0, .. }));
    // As transformers 5 saves it.
    let mut newer = published.clone();
    let scaling = newer.as_object_mut().unwrap().remove("rope_scaling").unwrap();
    newer.as_object_mut().unwrap().remove("rope_theta");
    newer["rope_parameters"] = json!({
        "full_attention": scaling,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500_000},
    });
    newer["rope_parameters"]["full_attention"]["rope_theta"] = json!(500_000);
    assert_eq!(read(&newer).unwrap(), config);
    assert_eq!(without(&published, &["layer_types"]).sliding_windows, config.sliding_windows);
}

#[test]
fn command_r() {
    let published = json!({
        "architectures": ["CohereForCausalLM"], "attention_bias": false, "hidden_act": "silu",
        "hidden_size": 8192, "intermediate_size": 24576, "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625, "max_position_embeddings": 131_072, "num_attention_heads": 64,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "rope_theta": 4_000_000.0,
        "torch_dtype": "float16", "use_cache": true, "use_qk_norm": false, "vocab_size": 256_000,
    });
    let config = read(&published).unwrap();
    assert!(config.tied && config.is_parallel && !config.qkv_bias && config.is_gated());
    assert_eq!(config.norm_kind, NormKind::Layer { has_bias: false });
    assert_eq!((config.norms.post, config.logits_scaling, config.norm_eps), (None, 16.0, 1e-5));
    assert!(config.ropes[0].is_interleaved && config.ropes[0].dim == 128);
    assert_eq!(config.sliding_windows, [None; 40]);
    assert_eq!(without(&published, &["logit_scale", "use_qk_norm"]), config);
    let error = with(&published, "use_qk_norm", json!(true)).unwrap_err();
    assert!(error.contains("use_qk_norm is true, only false is supported for Cohere"), "{error}");
    let error = with(&published, "logit_scale", json!(0)).unwrap_err();
    assert!(error.contains("logit_scale is 0, it must be in 0.0001..=10000"), "{error}");
    let error = with(&published, "layer_norm_eps", Value::Null).unwrap_err();
    assert_eq!(error, "key layer_norm_eps is missing");
    let error = with(&published, "layer_norm_eps", json!(2)).unwrap_err();
    assert_eq!(error, "layer_norm_eps is 2, it must be between 0 and 1");

    let smaller = json!({
        "architectures": ["Cohere2ForCausalLM"], "attention_bias": false, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25,
        "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": null, "rope_theta": 50000,
        "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        "torch_dtype": "bfloat16", "use_embedding_sharing": true, "use_gated_activation": true,
        "use_parallel_block": true, "use_parallel_embedding": true, "vocab_size": 256_000,
    });
    let config = read(&smaller).unwrap();
    assert!(config.tied && config.is_parallel && config.ropes[0].is_interleaved);
    assert_eq!((config.logits_scaling, config.ropes[0].theta), (4.0, 5e4));
    assert_eq!(config.sliding_windows[2..4], [Some(4096), None]);
    assert_eq!((config.ropes[2].dim, config.ropes[3].dim), (128, 0), "no positions");
    assert_eq!(without(&smaller, &["sliding_window", "sliding_window_pattern"]), config);
    // Without windows, transformers rotates nothing.
    let plain = with(&smaller, "sliding_window", Value::Null).unwrap();
    assert_eq!((plain.sliding_windows[2], plain.ropes[2].dim), (None, 0));
}

#[test]
fn starcoder_2_nemotron_and_arcee_have_mlps_without_gates() {
    let published = json!({
        "architectures": ["Starcoder2ForCausalLM"], "activation_function": "gelu",
        "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072,
        "intermediate_size": 12288, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 16384,
        "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm",
        "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
        "rope_theta": 999_999.443_6, "sliding_window": 4096, "torch_dtype": "bfloat16",
        "use_bias": true, "vocab_size": 49152,
    });
    let config = read(&published).unwrap();
    assert!(config.tied && config.qkv_bias && config.output_bias && config.mlp_bias);
    assert_eq!(config.norm_kind, NormKind::Layer { has_bias: true });
    assert_eq!(config.activation, MlpActivation::Plain(PlainActivation::GeluTanh));
    assert_eq!((config.mlp_names.up, config.mlp_names.down), ("mlp.c_fc", "mlp.c_proj"));
    assert_eq!((config.sliding_windows[29], config.is_parallel), (Some(4096), false));
    assert!(!config.is_gated() && without(&published, &["use_bias"]) == config);
    let error = with(&published, "hidden_act", json!("gelu")).unwrap_err();
    assert!(error.contains("\"gelu\", only \"gelu_pytorch_tanh\" is supported"), "{error}");

    let nemotron = json!({
        "architectures": ["NemotronForCausalLM"], "attention_bias": false, "head_dim": 128,
        "hidden_act": "relu2", "hidden_size": 3072, "intermediate_size": 9216,
        "max_position_embeddings": 4096, "mlp_bias": false, "norm_eps": 1e-5,
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "vocab_size": 256_000,
    });
    let config = read(&nemotron).unwrap();
    assert_eq!(config.norm_kind, NormKind::Layer { has_bias: true });
    assert_eq!(config.activation, MlpActivation::Plain(PlainActivation::SquaredRelu));
    assert_eq!((config.norm_offset, config.ropes[0].dim, config.head_dim), (1.0, 64, 128));
    assert_eq!(config.mlp_names.up, "mlp.up_proj");
    assert_eq!(without(&nemotron, &["partial_rotary_factor"]), config);

    let arcee = json!({
        "architectures": ["ArceeForCausalLM"], "attention_bias": false, "head_dim": 128,
        "hidden_act": "relu2", "hidden_size": 2560, "intermediate_size": 18432,
        "max_position_embeddings": 65536, "mlp_bias": false, "num_attention_heads": 20,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn"},
        "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "vocab_size": 128_004,
    });
    let config = read(&arcee).unwrap();
    assert_eq!((config.norm_kind, config.norm_offset), (NormKind::Rms, 0.0));
    assert_eq!(config.activation, MlpActivation::Plain(PlainActivation::SquaredRelu));
}

#[test]
fn stablelm_2() {
    let published = json!({
        "architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "hidden_dropout": 0.0,
        "hidden_size": 2048, "intermediate_size": 5632, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 24,
        "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "qk_layernorm": false,
        "rope_theta": 10000, "tie_word_embeddings": false, "torch_dtype": "float16",
        "use_parallel_residual": false, "use_qkv_bias": true, "vocab_size": 100_352,
    });
    let config = read(&published).unwrap();
    assert!(config.qkv_bias && !config.output_bias && !config.is_parallel && !config.tied);
    assert_eq!(config.norm_kind, NormKind::Layer { has_bias: true });
    assert_eq!((config.ropes[0].dim, config.logits_scaling), (16, 1.0));
    assert_eq!(config.activation, MlpActivation::Gated(Activation::Silu));
    assert_eq!(without(&published, &["partial_rotary_factor", "qk_layernorm"]), config);
    let parallel = with(&published, "use_parallel_residual", json!(true)).unwrap();
    assert!(parallel.is_parallel && parallel.norms.post.is_none());
    let error = with(&published, "layer_norm_eps", json!("1e-5")).unwrap_err();
    assert_eq!(error, "layer_norm_eps is \"1e-5\", it must be a number");
    let error = with(&published, "layer_norm_eps", Value::Null).unwrap_err();
    assert_eq!(error, "key layer_norm_eps is missing");
    // The 12B.
    let error = with(&published, "qk_layernorm", json!(true)).unwrap_err();
    assert!(error.contains("qk_layernorm is true, only false is supported"), "{error}");
}

#[test]
fn helium_and_ministral() {
    let helium = json!({
        "architectures": ["HeliumForCausalLM"], "attention_bias": false, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 7040,
        "max_position_embeddings": 4096, "mlp_bias": false, "num_attention_heads": 20,
        "num_hidden_layers": 24, "num_key_value_heads": 20, "rms_norm_eps": 1e-8,
        "rope_theta": 100_000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "vocab_size": 48000,
    });
    let config = read(&helium).unwrap();
    assert!(config.ropes[0].is_interleaved && !config.qkv_bias && config.norms.post.is_some());
    assert_eq!(without(&helium, &["rope_theta", "head_dim"]), config);

    let ministral = json!({
        "architectures": ["MinistralForCausalLM"], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention",
            "sliding_attention"],
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 4,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 100_000_000.0,
        "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "vocab_size": 131_072,
    });
    let config = read(&ministral).unwrap();
    let window = Some(32768);
    assert_eq!(config.sliding_windows, [None, window, window, window]);
    assert_eq!(without(&ministral, &["layer_types"]).sliding_windows, [window; 4]);
}

#[test]
fn olmoe_and_minimax_m2() {
    let olmoe = json!({
        "architectures": ["OlmoeForCausalLM"], "attention_bias": false, "clip_qkv": null,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "norm_topk_prob": false, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_scaling": null,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "vocab_size": 50304,
    });
    let config = read(&olmoe).unwrap();
    assert!(config.qk_norm_whole && config.norms.input.is_some() && config.norms.down.is_none());
    let experts = config.experts.clone().unwrap();
    assert_eq!(experts.routing, Routing::softmax(64, 8, false));
    assert_eq!((experts.intermediate_size, config.intermediate_size), (1024, 0));
    let normalised = with(&olmoe, "norm_topk_prob", json!(true)).unwrap();
    assert!(normalised.experts.unwrap().routing.normalise);
    let error = with(&olmoe, "clip_qkv", json!(8.0)).unwrap_err();
    assert_eq!(error, "clip_qkv is 8.0, only null is supported");

    let minimax = json!({
        "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196_608,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "num_local_experts": 256, "qk_norm_type": "per_layer",
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn",
            "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-6, "rope_theta": 5_000_000, "rotary_dim": 64,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": false,
        "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200_064,
    });
    let config = read(&minimax).unwrap();
    assert!(config.qk_norm_whole && !config.qk_norm && !config.qkv_bias);
    assert_eq!((config.ropes[0].dim, config.ropes[0].theta), (64, 5e6));
    let routing = config.experts.clone().unwrap().routing;
    assert_eq!(routing, Routing { scores: Scores::Sigmoid, ..Routing::softmax(256, 8, true) });
    assert_eq!(without(&minimax, &["rope_theta", "head_dim"]), config);
    assert_eq!(without(&minimax, &["rotary_dim"]).ropes[0].dim, 128);
}

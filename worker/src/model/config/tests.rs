//! Published configurations, and configurations that are refused.
use kernels::backend::Routing;
use serde_json::json;

use super::super::rope::RopeScaling;
use super::*;

const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0"#;

/// What a mixture of experts adds.
const EXPERTS: &str = r#", "num_local_experts": 4, "num_experts_per_tok": 2"#;

fn parse(architecture: &str, more: &str) -> Result<ModelConfig, String> {
    let text = format!("{LLAMA}{more}}}").replace("LlamaForCausalLM", architecture);
    let text = text.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4");
    ModelConfig::from_value(serde_json::from_str(&text).map_err(|error| error.to_string())?)
}

/// As published: 1B in full, 4B with only its differences from the defaults, and 4B as transformers
/// 5 saves it.
#[test]
fn gemma_3_is_what_its_three_dialects_say() {
    let check = |config: Value| ModelConfig::from_value(config);
    let one = json!({"architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262_144,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000, "rope_scaling": null, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "sliding_window_pattern": 6, "attention_bias": false,
        "attn_logit_softcapping": null, "final_logit_softcapping": null,
        "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "bfloat16"});
    let mut both = one.clone();
    both["_sliding_window_pattern"] = json!(6);
    assert_eq!(check(both).unwrap().sliding_windows, check(one.clone()).unwrap().sliding_windows);
    let config = check(one.clone()).unwrap();
    assert!(config.tied && config.qk_norm && config.norms.output.is_some() && config.is_bf16);
    assert!(!config.qkv_bias && config.experts.is_none());
    assert_eq!((config.norm_offset, config.query_scale), (1.0, 1.0));
    assert_eq!(config.embedding_scale, 1152f64.sqrt());
    assert_eq!(config.activation, MlpActivation::Gated(Activation::GeluTanh));
    let rope = |theta, scaling| RopeConfig {
        dim: 256,
        theta,
        scaling,
        is_interleaved: false,
        growth: None,
    };
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
        ("final_logit_softcapping", json!(0), "final_logit_softcapping is 0, it must be null or"),
        ("attn_logit_softcapping", json!(-5), "attn_logit_softcapping is -5, it must be null or"),
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
fn attention_to_later_tokens_is_refused() {
    for architecture in ["LlamaForCausalLM", "Qwen3ForSequenceClassification"] {
        for (more, says) in [
            (r#", "is_causal": false"#, "is_causal is false, only true is supported"),
            (r#", "use_bidirectional_attention": true"#, "use_bidirectional_attention is true"),
        ] {
            let error = parse(architecture, more).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let usual = r#", "is_causal": true, "use_bidirectional_attention": false"#;
        assert!(parse(architecture, usual).is_ok());
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
    // As in transformers, where the file does not say it; null says that there is none.
    assert!(windows("Exaone4ForCausalLM", "").contains(&Some(4096)));
    assert_eq!(windows("Exaone4ForCausalLM", r#", "sliding_window": null"#), [None; 4]);
    let error = parse("Qwen3ForCausalLM", &types.replace("full", "chunked")).unwrap_err();
    assert!(error.contains("layer_types has \"chunked_attention\""), "{error}");
}

/// The defaults of transformers 4.57 and 5, where its configurations have others than most.
#[test]
fn keys_that_are_missing_have_the_values_of_transformers() {
    let config = |architecture, more| parse(architecture, more).unwrap();
    let windows = |architecture, more| config(architecture, more).sliding_windows;
    assert_eq!(windows("MistralForCausalLM", ""), [Some(4096); 4]);
    assert_eq!(windows("MixtralForCausalLM", EXPERTS), [None; 4]);
    assert_eq!(config("Qwen3ForCausalLM", "").head_dim, 128, "not 64 / 4");
    assert_eq!(config("Qwen3ForCausalLM", r#", "head_dim": 32"#).head_dim, 32);
    // No layer of these four comes after the 28th.
    let window = r#", "sliding_window": 16, "use_sliding_window": true"#;
    let many = r#", "sliding_window": 16, "use_sliding_window": true, "num_hidden_layers": 30"#;
    for architecture in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        assert_eq!(windows(architecture, window), [None; 4]);
        let thirty = windows(architecture, many);
        assert_eq!((thirty[27], thirty[28], thirty[29]), (None, Some(16), Some(16)));
    }
    let theta = |architecture, more: &str| {
        let text = format!("{LLAMA}{more}}}").replace("LlamaForCausalLM", architecture);
        let mut value: Value = serde_json::from_str(&text).unwrap();
        value.as_object_mut().unwrap().remove("rope_theta");
        ModelConfig::from_value(value).unwrap().ropes[0].theta
    };
    assert_eq!(theta("MixtralForCausalLM", EXPERTS), 1e6);
    assert_eq!(theta("MistralForCausalLM", ""), 1e4);
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
    assert_eq!(biases("GraniteForCausalLM", all), (true, true, true, false));
    assert_eq!(biases("SeedOssForCausalLM", ""), (true, false, false, false));
    let output = r#", "attention_bias": false, "attention_out_bias": true, "mlp_bias": true"#;
    assert_eq!(biases("SeedOssForCausalLM", output), (false, true, true, false));
    assert_eq!(parse("SeedOssForCausalLM", "").unwrap().head_dim, 128, "not 64 / 4");
}

fn check(more: &str) -> Result<ModelConfig, String> {
    let config = serde_json::from_str(&format!("{LLAMA}{more}}}"));
    ModelConfig::from_value(config.map_err(|e| e.to_string())?)
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
    let routing = Routing::softmax(8, 2, true);
    let layers = vec![true; 4];
    let experts = ExpertsConfig {
        routing,
        intermediate_size: 128,
        layers,
        activation: ExpertActivation::Silu,
        is_interleaved: false,
        shared: None,
    };
    assert_eq!((config.experts, config.intermediate_size), (Some(experts), 0));

    // The key in both dialects; not normalised by default.
    for count in ["num_experts", "num_local_experts"] {
        let qwen =
            format!(r#", "{count}": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48"#);
        let config = parse("Qwen3MoeForCausalLM", &qwen).unwrap();
        assert!(config.qk_norm && !config.qkv_bias);
        assert_eq!(config.intermediate_size, 0, "no layer is dense");
        let experts = config.experts.unwrap();
        assert_eq!(experts.routing, Routing::softmax(6, 3, false));
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
        (r#", "mlp_bias": "no""#, "mlp_bias: invalid type: string \"no\", expected a boolean"),
        (r#", "sliding_window": -1"#, "sliding_window: invalid value: integer `-1`, expected u32"),
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
    let text =
        format!("{LLAMA}}}").replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3");
    let error = ModelConfig::from_value(serde_json::from_str(&text).unwrap()).unwrap_err();
    assert!(error.contains("num_key_value_heads (3)"), "{error}");
    let text = format!("{LLAMA}}}").replace("\"vocab_size\": 384", "\"vocab_size\": 0");
    let error = ModelConfig::from_value(serde_json::from_str(&text).unwrap()).unwrap_err();
    assert!(error.contains("vocab_size is 0, it must be in 1..="), "{error}");
}

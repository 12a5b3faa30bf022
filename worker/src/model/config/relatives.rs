//! Architectures that differ from others by the defaults and names of their keys. What is not said
//! is as the configurations of transformers have it.
use kernels::backend::{Activation, Routing, Scores};
use serde_json::{Value, json};

use super::*;

fn read(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_value(config.clone())
}

/// The keys that all have, and others.
fn of(architecture: &str, more: Value) -> Value {
    let mut config = json!({
        "architectures": [architecture], "hidden_size": 2048, "intermediate_size": 10240,
        "max_position_embeddings": 131_072, "num_attention_heads": 32, "num_hidden_layers": 5,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        "vocab_size": 1000,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

fn with(config: &Value, key: &str, value: Value) -> Result<ModelConfig, String> {
    let mut config = config.clone();
    config[key] = value;
    read(&config)
}

fn refuses(config: &Value, cases: &[(&str, Value, &str)]) {
    for (key, value, expected) in cases {
        let error = with(config, key, value.clone()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// Sigmoids, and one shared expert beside `experts`.
fn sigmoids(experts: usize, chosen: usize, scale: f32) -> Routing {
    Routing {
        scores: Scores::Sigmoid,
        scale,
        shared: 1,
        ..Routing::softmax(experts + 1, chosen + 1, true)
    }
}

fn routing(config: &ModelConfig) -> Routing {
    config.experts.as_ref().unwrap().routing
}

fn layers(config: &ModelConfig) -> &[bool] {
    &config.experts.as_ref().unwrap().layers
}

#[test]
fn glm_4_moe_lite() {
    let lite = of(
        "Glm4MoeLiteForCausalLM",
        json!({"kv_lora_rank": 512, "moe_intermediate_size": 1536, "n_routed_experts": 64,
            "num_experts_per_tok": 4, "q_lora_rank": 768, "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64, "v_head_dim": 256}),
    );
    let config = read(&lite).unwrap();
    assert_eq!(config.latent.unwrap().width(), 576);
    assert!(config.ropes[0].is_interleaved && !config.tied);
    assert_eq!((config.ropes[0].dim, config.ropes[0].theta), (64, 1e4));
    assert_eq!(routing(&config), sigmoids(64, 4, 1.8));
    assert_eq!(layers(&config), [false, true, true, true, true]);
    // Its code does not read the number of dense layers, but a list.
    assert_eq!(with(&lite, "first_k_dense_replace", json!(3)).unwrap(), config);
    let kinds = json!(["dense", "dense", "sparse", "sparse", "dense"]);
    let listed = with(&lite, "mlp_layer_types", kinds).unwrap();
    assert_eq!(layers(&listed), [false, false, true, true, false]);
    let plain = with(&lite, "rope_interleave", json!(false)).unwrap();
    assert!(!plain.ropes[0].is_interleaved);
    refuses(
        &lite,
        &[
            ("mlp_layer_types", json!(["dense"]), "has 1 entries, num_hidden_layers is 5"),
            (
                "mlp_layer_types",
                json!(["a", "a", "a", "a", "a"]),
                "has \"a\"; supported are: dense",
            ),
            ("mlp_layer_types", json!(vec!["dense"; 5]), "mlp_layer_types leaves no layer"),
            ("scoring_func", json!("softmax"), "only \"sigmoid\" is supported"),
        ],
    );
}

fn with_published(moe: &Value) -> Value {
    let mut published = moe.clone();
    published["architectures"] = json!(["ExaoneMoEForCausalLM"]);
    published["sliding_window_pattern"] = json!("LLLG");
    let kinds = [true, true, true, false, true];
    let kind = |slides| if slides { "sliding_attention" } else { "full_attention" };
    published["layer_types"] = json!(kinds.map(kind));
    published
}

#[test]
fn k_exaone() {
    let moe = of(
        "ExaoneMoeForCausalLM",
        json!({"head_dim": 128, "moe_intermediate_size": 512, "num_experts": 128,
            "num_experts_per_tok": 8}),
    );
    let config = read(&moe).unwrap();
    assert!(config.qk_norm && config.norms.input.is_some() && config.norms.down.is_none());
    assert_eq!(routing(&config), sigmoids(128, 8, 2.5));
    assert_eq!(layers(&config), [false, true, true, true, true]);
    // Three layers with a window, then one without it, which tells no positions.
    let window = Some(4096);
    assert_eq!(config.sliding_windows, [window, window, window, None, window]);
    assert_eq!(
        config.ropes.iter().map(|rope| rope.dim).collect::<Vec<_>>(),
        [128, 128, 128, 0, 128]
    );
    assert_eq!(layers(&with(&moe, "first_k_dense_replace", json!(0)).unwrap()), [true; 5]);
    let two = with(&moe, "num_shared_experts", json!(2)).unwrap();
    assert_eq!((routing(&two).shared, routing(&two).num_experts), (2, 130));
    // As LG's own files have it.
    let mut published = with_published(&moe);
    assert_eq!(read(&published).unwrap(), config);
    published["sliding_window"] = Value::Null;
    assert_eq!(read(&published).unwrap().sliding_windows, [None; 5]);
    refuses(
        &moe,
        &[
            ("first_k_dense_replace", json!(5), "first_k_dense_replace leaves no layer"),
            ("num_experts", Value::Null, "key num_experts is missing"),
            ("num_shared_experts", json!(100), "num_shared_experts makes 100 shared experts"),
        ],
    );
}

#[test]
fn hy_3() {
    let hy = of(
        "HYV3ForCausalLM",
        json!({"moe_intermediate_size": 1536, "num_experts": 192, "num_experts_per_tok": 8}),
    );
    let config = read(&hy).unwrap();
    assert!(config.qk_norm && !config.qkv_bias && !config.output_bias);
    assert_eq!((config.head_dim, config.ropes[0].theta), (128, 11_158_840.0));
    assert_eq!(routing(&config), sigmoids(192, 8, 2.826));
    assert_eq!(layers(&config), [false, true, true, true, true]);
    let scaled = with(&hy, "router_scaling_factor", json!(1.5)).unwrap();
    assert_eq!(routing(&scaled).scale, 1.5);
    for (key, value) in [("norm_topk_prob", json!(false)), ("n_group", json!(2))] {
        assert_eq!(with(&hy, key, value).unwrap(), config, "{key} is not read");
    }
    let kinds = json!(vec!["dense"; 5]);
    refuses(&hy, &[("mlp_layer_types", kinds, "mlp_layer_types leaves no layer with experts")]);
    refuses(&hy, &[("num_hidden_layers", json!(1), "num_hidden_layers leaves no layer")]);
    refuses(&hy, &[("mlp_bias", json!(true), "mlp_bias is true, only false is supported")]);
}

#[test]
fn dots_1_and_solar_open() {
    let dots = of(
        "Dots1ForCausalLM",
        json!({"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "scoring_func": "noaux_tc"}),
    );
    let config = read(&dots).unwrap();
    assert!(config.qk_norm && !config.qkv_bias);
    let own = Routing { scores: Scores::Sigmoid, shared: 2, ..Routing::softmax(130, 8, false) };
    assert_eq!(routing(&config), own);
    assert_eq!(layers(&config), [true; 5]);
    // From the 62nd layer on, which this one does not have.
    assert_eq!(config.sliding_windows, [None; 5]);
    let slides = with(&dots, "max_window_layers", json!(3)).unwrap();
    assert_eq!(slides.sliding_windows, [None, None, None, Some(4096), Some(4096)]);
    let biased = with(&dots, "attention_bias", json!(true)).unwrap();
    assert!(biased.qkv_bias && biased.output_bias);

    let solar = of(
        "SolarOpenForCausalLM",
        json!({"moe_intermediate_size": 1280, "n_routed_experts": 128, "num_experts_per_tok": 8}),
    );
    let config = read(&solar).unwrap();
    assert!(!config.qk_norm);
    assert_eq!((config.head_dim, config.ropes[0].theta, config.ropes[0].dim), (128, 1e6, 128));
    assert_eq!((routing(&config), layers(&config)), (sigmoids(128, 8, 1.0), &[true; 5][..]));
    // Its code reads no number of dense layers.
    assert_eq!(with(&solar, "first_k_dense_replace", json!(1)).unwrap(), config);
    let biased = with(&solar, "attention_bias", json!(true)).unwrap();
    assert!(biased.qkv_bias && !biased.output_bias);
    assert_eq!(with(&solar, "partial_rotary_factor", json!(0.5)).unwrap().ropes[0].dim, 64);
}

#[test]
fn granite_4() {
    let hybrid = of(
        "GraniteMoeHybridForCausalLM",
        json!({"layer_types": vec!["attention"; 5], "num_local_experts": 0,
            "position_embedding_type": "rope", "shared_intermediate_size": 8192,
            "residual_multiplier": 0.5}),
    );
    let config = read(&hybrid).unwrap();
    assert!(config.fused.gate_up && !config.fused.qkv && config.experts.is_none());
    assert_eq!((config.intermediate_size, config.embedding_scale), (8192, 2.0));
    assert_eq!((config.ropes[0].dim, config.sliding_windows[0]), (64, None));
    // transformers' own name of the layers, which otherwise have no positions.
    let newer = with(&hybrid, "layer_types", json!(vec!["full_attention"; 5])).unwrap();
    assert_eq!(newer, config);
    let untold = with(&hybrid, "position_embedding_type", json!("nope")).unwrap();
    assert_eq!(untold.ropes[0].dim, 0);
    refuses(
        &hybrid,
        &[
            (
                "layer_types",
                Value::Null,
                "layer_types is missing, which leaves no layer with attention",
            ),
            ("layer_types", json!([]), "layer_types has 0 entries, num_hidden_layers is 5"),
            ("num_local_experts", json!(62), "key num_experts_per_tok is missing"),
            ("num_local_experts", Value::Null, "key num_local_experts is missing"),
            ("shared_intermediate_size", Value::Null, "key shared_intermediate_size is missing"),
        ],
    );
}

#[test]
fn gemma() {
    let first = of("GemmaForCausalLM", json!({"hidden_act": "gelu"}));
    let config = read(&first).unwrap();
    assert!(config.tied && config.rounds_embedding_scale && !config.qk_norm);
    assert_eq!((config.head_dim, config.query_scale, config.norm_offset), (256, 1.0, 1.0));
    assert_eq!((config.attention_cap, config.logits_cap), (None, None));
    assert_eq!(config.activation, MlpActivation::Gated(Activation::GeluTanh));
    assert!(config.norms.input.is_some() && config.norms.output.is_none());
    refuses(&first, &[("hidden_act", json!("silu"), "hidden_act is \"silu\", only")]);
    let mut second = first;
    second["architectures"] = json!(["Gemma2ForCausalLM"]);
    assert!(read(&second).unwrap_err().contains("hidden_act is \"gelu\", only"));
}

#[test]
fn ministral_3() {
    let rope = json!({"rope_type": "yarn", "factor": 16.0, "rope_theta": 1_000_000.0,
        "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1});
    let three = of("Ministral3ForCausalLM", json!({"rope_parameters": rope}));
    let config = read(&three).unwrap();
    assert_eq!((config.head_dim, config.sliding_windows[0]), (128, None));
    assert_eq!(config.ropes[0].attention_factor(), 1.0);
    assert_eq!(config.max_positions, 16 * 16384);
    let rope = &config.ropes[0];
    assert_eq!(rope.q_scale(16384), None, "all are 1");
    let scale = rope.q_scale(50_000).unwrap();
    // As transformers computes them.
    let want = [(0, 1.0), (16383, 1.0), (16384, 1.0693147), (32768, 1.1098612), (49999, 1.1386294)];
    for (position, factor) in want {
        assert!((scale[position] - factor).abs() < 1e-6, "{position}: {}", scale[position]);
    }
    let mut unscaled = three.clone();
    unscaled["rope_parameters"]["llama_4_scaling_beta"] = json!(0.0);
    assert_eq!(read(&unscaled).unwrap().ropes[0].q_scale(50_000), None);
    unscaled["rope_parameters"]["llama_4_scaling_beta"] = json!(-0.1);
    let error = read(&unscaled).unwrap_err();
    assert_eq!(error, "rope llama_4_scaling_beta is -0.1, it must be in 0..=10");
    refuses(&three, &[("rope_parameters", Value::Null, "key rope_scaling (or rope_parameters)")]);
}

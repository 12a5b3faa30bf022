//! Both dialects, and the defaults that transformers applies where a key is absent.
use super::*;

/// A small `config.json` of an architecture, with `more` keys.
fn parse(architecture: &str, more: &str) -> Result<ModelConfig, ModelError> {
    let text = format!(
        r#"{{"architectures": ["{architecture}"], "hidden_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 32, "intermediate_size": 128, "vocab_size": 100,
            "max_position_embeddings": 512{more}}}"#
    );
    ModelConfig::from_json(Path::new("config.json"), &text)
}

fn config(architecture: &str, more: &str) -> ModelConfig {
    parse(architecture, more).unwrap()
}

const LLAMA: &str = "LlamaForCausalLM";
const MISTRAL: &str = "MistralForCausalLM";
const QWEN2: &str = "Qwen2ForCausalLM";
const QWEN3: &str = "Qwen3ForCausalLM";

#[test]
fn absent_keys_have_the_architecture_s_defaults() {
    let kv_heads = |architecture| config(architecture, "").num_kv_heads;
    assert_eq!([LLAMA, MISTRAL, QWEN2, QWEN3].map(kv_heads), [32, 8, 32, 32]);
    let head_dims = |architecture| config(architecture, "").head_dim;
    assert_eq!([LLAMA, MISTRAL, QWEN2, QWEN3].map(head_dims), [2, 2, 2, 128]);
    let llama = config(LLAMA, "");
    assert_eq!(llama.rope, RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default });
    assert_eq!(llama.rms_norm_eps, 1e-6);
    assert!(!llama.tied_embeddings && !llama.qkv_bias && !llama.mlp_bias);
    assert!(llama.end_tokens.is_empty());
    // Null is absent.
    assert_eq!(config(LLAMA, r#", "head_dim": null, "eos_token_id": null"#), llama);
}

#[test]
fn both_dialects_of_rope_mean_the_same() {
    let scaling = r#""rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192"#;
    let old = format!(r#", "rope_theta": 500000, "rope_scaling": {{{scaling}}}"#);
    let new = format!(r#", "rope_parameters": {{"rope_theta": 500000, {scaling}}}"#);
    let expected = RopeConfig {
        theta: 500_000.0,
        scaling: RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192.0,
        },
    };
    assert_eq!(config(LLAMA, &old).rope, expected);
    assert_eq!(config(LLAMA, &new).rope, expected);
    // Before 4.45 the key was `type`.
    let oldest = r#", "rope_scaling": {"type": "linear", "factor": 2.5}"#;
    let linear = RopeScaling::Linear { factor: 2.5 };
    assert_eq!(config(LLAMA, oldest).rope, RopeConfig { theta: 10_000.0, scaling: linear });
}

#[test]
fn llama3_bands_must_not_cross() {
    let more = r#", "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
        "high_freq_factor": 4, "original_max_position_embeddings": 8192}"#;
    assert_eq!(
        parse(LLAMA, more).unwrap_err().to_string(),
        "config.json: rope_scaling.high_freq_factor: is 4, it must be above low_freq_factor, 4"
    );
}

#[test]
fn windows_slide_where_the_architecture_says() {
    let windows = |architecture, more| config(architecture, more).sliding_windows;
    let window = r#", "sliding_window": 16"#;
    assert_eq!(windows(MISTRAL, window), [Some(16); 4]);
    assert_eq!(windows(MISTRAL, r#", "sliding_window": null"#), [None; 4]);
    assert_eq!(windows(LLAMA, window), [None; 4]);
    // Qwen writes a window that it does not use.
    assert_eq!(windows(QWEN2, window), [None; 4]);
    let used = r#", "sliding_window": 16, "use_sliding_window": true, "max_window_layers": 3"#;
    assert_eq!(windows(QWEN2, used), [None, None, None, Some(16)]);
    let types = r#", "sliding_window": 16, "use_sliding_window": true, "max_window_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention",
        "sliding_attention"]"#;
    assert_eq!(windows(QWEN3, types), [Some(16), None, None, Some(16)]);
    let error = parse(QWEN3, &types.replace("full_attention", "chunked_attention")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "config.json: layer_types: \"chunked_attention\" is not supported; supported: \
         full_attention, sliding_attention"
    );
}

#[test]
fn biases_are_where_the_architecture_has_them() {
    let biases = |architecture, more| {
        let config = config(architecture, more);
        (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    };
    let all = r#", "attention_bias": true, "mlp_bias": true"#;
    assert_eq!(biases(LLAMA, all), (true, true, true, false));
    assert_eq!(biases(MISTRAL, all), (false, false, false, false));
    assert_eq!(biases(QWEN2, ""), (true, false, false, false));
    assert_eq!(biases(QWEN3, ""), (false, false, false, true));
    assert_eq!(biases(QWEN3, all), (true, true, false, true));
}

#[test]
fn end_tokens_are_one_or_many() {
    assert_eq!(config(LLAMA, r#", "eos_token_id": 7"#).end_tokens, [7]);
    assert_eq!(config(LLAMA, r#", "eos_token_id": [7, 9]"#).end_tokens, [7, 9]);
    let error = parse(LLAMA, r#", "eos_token_id": 100"#).unwrap_err().to_string();
    assert_eq!(error, "config.json: eos_token_id: has 100, token ids are in 0..100");
}

/// Published sizes.
#[test]
fn parameters_are_counted_as_published() {
    let llama_8b = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}"#;
    let qwen_half_b = r#"{"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": true}"#;
    let count =
        |text| ModelConfig::from_json(Path::new("config.json"), text).unwrap().num_parameters();
    assert_eq!(count(llama_8b), 8_030_261_248);
    assert_eq!(count(qwen_half_b), 494_032_768);
}

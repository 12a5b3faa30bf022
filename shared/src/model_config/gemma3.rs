//! PURE: defaults of Gemma 3's architecture; the files of its larger models leave out most keys.
use serde_json::{Value, json};

/// Adds the keys that `config` lacks, with the defaults of transformers and vLLM.
pub(super) fn complete(config: &mut Value) {
    let usual = [
        ("vocab_size", json!(262_208)),
        ("hidden_size", json!(2304)),
        ("intermediate_size", json!(9216)),
        ("num_hidden_layers", json!(26)),
        ("num_attention_heads", json!(8)),
        ("num_key_value_heads", json!(4)),
        ("head_dim", json!(256)),
        ("max_position_embeddings", json!(131_072)),
        ("rms_norm_eps", json!(1e-6)),
        ("rope_theta", json!(1e6)),
        ("rope_local_base_freq", json!(1e4)),
        ("query_pre_attn_scalar", json!(256)),
        ("sliding_window", json!(4096)),
        ("tie_word_embeddings", json!(true)),
    ];
    for (key, value) in usual {
        if config[key].is_null() {
            config[key] = value;
        }
    }
}

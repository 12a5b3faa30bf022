//! PURE: multimodal models whose text model is supported: where their files have its keys, and what
//! its own code in transformers does otherwise than that of the same model alone.
use serde_json::{Value, json};

/// Multimodal architectures with a text model in their `text_config`: the architecture, the
/// `model_type` of its `text_config`, the usual one first, and the text model's own architecture.
const WRAPPERS: [(&str, &str, &str); 13] = [
    ("Gemma3ForConditionalGeneration", "gemma3_text", super::GEMMA3),
    ("Glm46VForConditionalGeneration", "glm4v_text", "Glm4ForCausalLM"),
    ("Glm46VForConditionalGeneration", "glm4v_moe_text", "Glm4MoeForCausalLM"),
    ("Glm4vForConditionalGeneration", "glm4v_text", "Glm4ForCausalLM"),
    ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", "Glm4MoeForCausalLM"),
    ("Mistral3ForConditionalGeneration", "mistral", "MistralForCausalLM"),
    ("Mistral3ForConditionalGeneration", "ministral3", "Ministral3ForCausalLM"),
    ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", "Qwen2ForCausalLM"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "Qwen2ForCausalLM"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "Qwen3ForCausalLM"),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", "Qwen3MoeForCausalLM"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", "Qwen3_5ForCausalLM"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
];

/// Of these, those whose files may have the text model's keys beside the others.
const FLAT: [&str; 2] = ["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"];

/// Keys usually found outside `text_config` that apply to the text model.
const OUTER: [&str; 6] = [
    "quantization_config",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
];

/// Returns the multimodal architectures that [`text_model`](super::text_model) unwraps.
pub fn wrappers() -> impl Iterator<Item = &'static str> {
    let is_new = |at: &usize| *at == 0 || WRAPPERS[*at].0 != WRAPPERS[at - 1].0;
    (0..WRAPPERS.len()).filter(is_new).map(|at| WRAPPERS[at].0)
}

/// Returns the text model's configuration; another model's as it is.
///
/// # Errors
/// One sentence if `text_config` is missing or of an unknown type.
pub(super) fn extract_text_config(mut config: Value) -> Result<Value, String> {
    let architecture = config["architectures"][0].as_str().unwrap_or_default();
    let known: Vec<_> = WRAPPERS.iter().filter(|(outer, ..)| *outer == architecture).collect();
    let Some((wrapper, usual, own)) = known.first() else { return Ok(config) };
    if FLAT.contains(wrapper) && config["text_config"].is_null() {
        config["architectures"] = json!([own]);
        complete(&mut config, usual);
        return Ok(config);
    }
    let mut text = match config.get_mut("text_config").map(Value::take) {
        Some(text @ Value::Object(_)) => text,
        _ => return Err(format!("key text_config of {wrapper} is missing, or not a table")),
    };
    let kind = text["model_type"].as_str().unwrap_or(usual);
    let Some((_, kind, own)) = known.iter().find(|(_, known, _)| *known == kind) else {
        let kinds: Vec<&str> = known.iter().map(|(_, kind, _)| *kind).collect();
        return Err(format!(
            "text_config of {wrapper} has model_type \"{kind}\"; supported is: {}",
            kinds.join(", ")
        ));
    };
    text["architectures"] = json!([own]);
    if kind.starts_with("qwen3_vl") || kind.starts_with("qwen3_5") {
        // Whether the head is the embedding is said beside the text model's keys. Its own says
        // nothing: transformers writes a default there.
        text["tie_word_embeddings"] =
            config["tie_word_embeddings"].as_bool().unwrap_or(false).into();
    }
    complete(&mut text, kind);
    for key in OUTER {
        if text[key].is_null() && !config[key].is_null() {
            text[key] = config[key].take();
        }
    }
    Ok(text)
}

/// Gives a text model of this kind the defaults that differ from those of the same model alone, and
/// what its code does whatever the file says.
fn complete(text: &mut Value, kind: &str) {
    let heads = ["hidden_size", "num_attention_heads"].map(|key| text[key].as_u64());
    let (usual, always) = match kind {
        "glm4v_text" => {
            let head_dim = match heads {
                [Some(hidden), Some(heads)] => hidden.checked_div(heads),
                _ => None,
            };
            let always = json!({"attention_bias": true, "head_dim": head_dim});
            (json!({"partial_rotary_factor": 1.0}), always)
        }
        "glm4v_moe_text" => (json!({"attention_bias": true}), json!({"use_qk_norm": false})),
        "qwen2_vl_text" | "qwen2_5_vl_text" => {
            let usual = json!({"max_window_layers": 80, "rope_theta": 1e6, "sliding_window": 4096});
            (usual, json!({}))
        }
        "qwen3_vl_text" => (json!({"rope_theta": 5e5}), json!({"use_sliding_window": false})),
        "qwen3_vl_moe_text" => {
            let always = json!({"norm_topk_prob": true, "use_sliding_window": false});
            (json!({"rope_theta": 5e5}), always)
        }
        _ => return,
    };
    let (Some(text), Value::Object(usual), Value::Object(always)) =
        (text.as_object_mut(), usual, always)
    else {
        return;
    };
    for (key, value) in usual {
        text.entry(key).or_insert(value);
    }
    text.extend(always);
}

#[cfg(test)]
mod tests {
    use super::super::{positions, rope_scaling, text_model};
    use super::*;

    #[test]
    fn a_text_model_is_taken_out_of_what_holds_it() {
        let alone = json!({"architectures": ["LlamaForCausalLM"], "text_config": {"a": 1}});
        assert_eq!(text_model(alone.clone()).unwrap(), alone);
        let outer = |text: Value| {
            json!({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text,
                "vision_config": {"hidden_size": 8}, "torch_dtype": "bfloat16",
                "quantization_config": {"quant_method": "fp8"}, "eos_token_id": 2,
                "tie_word_embeddings": true, "hidden_size": 8})
        };
        let inner = json!({"model_type": "mistral", "hidden_size": 64, "eos_token_id": null,
            "tie_word_embeddings": false});
        assert_eq!(
            text_model(outer(inner)).unwrap(),
            json!({"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                "hidden_size": 64, "torch_dtype": "bfloat16", "eos_token_id": 2,
                "quantization_config": {"quant_method": "fp8"}, "tie_word_embeddings": false})
        );
        let text = text_model(outer(json!({"hidden_size": 64}))).unwrap();
        assert_eq!(text["architectures"], json!(["MistralForCausalLM"]), "the usual kind");
        let error = text_model(outer(json!({"model_type": "pixtral"}))).unwrap_err();
        assert!(error.contains("\"pixtral\"; supported is: mistral, ministral3"), "{error}");
        for missing in [Value::Null, json!([1])] {
            let error = text_model(outer(missing)).unwrap_err();
            assert!(error.contains("text_config of Mistral3ForConditionalGeneration"), "{error}");
        }
    }

    #[test]
    fn a_text_model_may_be_beside_what_it_is_for() {
        // As published for Qwen2.5-VL.
        let flat = json!({"architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "hidden_size": 8, "max_position_embeddings": 128_000, "model_type": "qwen2_5_vl",
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}});
        let text = text_model(flat.clone()).unwrap();
        assert_eq!(
            (&text["architectures"], &text["hidden_size"]),
            (&json!(["Qwen2ForCausalLM"]), &json!(8))
        );
        assert_eq!(rope_scaling(&text).unwrap().1, "default");
        assert_eq!(positions(&text).unwrap().most, 128_000);
        // As transformers saves it since.
        let mut newer = flat;
        newer["text_config"] = json!({"hidden_size": 16, "model_type": "qwen2_5_vl_text"});
        assert_eq!(text_model(newer).unwrap()["hidden_size"], 16);
        let other = json!({"architectures": ["Qwen3VLForConditionalGeneration"], "hidden_size": 8});
        assert!(text_model(other).unwrap_err().contains("text_config of Qwen3VL"));
        let all: Vec<&str> = wrappers().collect();
        assert_eq!(all.iter().filter(|it| **it == "Mistral3ForConditionalGeneration").count(), 1);
    }

    #[test]
    fn text_models_beside_towers_have_defaults_of_their_own() {
        let text = |architecture: &str, kind: &str, more: Value| {
            let mut text = json!({"model_type": kind, "hidden_size": 4096,
                "num_attention_heads": 32});
            text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let architecture = format!("{architecture}ForConditionalGeneration");
            text_model(json!({"architectures": [architecture], "text_config": text})).unwrap()
        };
        let glm = text("Glm4v", "glm4v_text", json!({"attention_bias": false, "head_dim": 64}));
        assert_eq!((&glm["attention_bias"], &glm["head_dim"]), (&json!(true), &json!(128)));
        assert_eq!(glm["partial_rotary_factor"], 1.0);
        let said = text("Glm4v", "glm4v_text", json!({"partial_rotary_factor": 0.5}));
        assert_eq!(said["partial_rotary_factor"], 0.5);
        let glm = text("Glm4vMoe", "glm4v_moe_text", json!({"use_qk_norm": true}));
        assert_eq!((&glm["attention_bias"], &glm["use_qk_norm"]), (&json!(true), &json!(false)));
        let unbiased = text("Glm46V", "glm4v_moe_text", json!({"attention_bias": false}));
        assert_eq!(unbiased["attention_bias"], false);
        let qwen = text("Qwen2_5_VL", "qwen2_5_vl_text", json!({}));
        assert_eq!((&qwen["rope_theta"], &qwen["max_window_layers"]), (&json!(1e6), &json!(80)));
        // As transformers 5 saves it: the text model's own key is a default that nobody reads.
        let saved = json!({"norm_topk_prob": false, "tie_word_embeddings": true,
            "use_sliding_window": true});
        let qwen = text("Qwen3VLMoe", "qwen3_vl_moe_text", saved);
        assert_eq!((&qwen["norm_topk_prob"], &qwen["rope_theta"]), (&json!(true), &json!(5e5)));
        assert_eq!(qwen["tie_word_embeddings"], false);
        assert_eq!(qwen["use_sliding_window"], false);
        let tied = json!({"architectures": ["Qwen3VLForConditionalGeneration"],
            "tie_word_embeddings": true, "text_config": {"model_type": "qwen3_vl_text"}});
        assert_eq!(text_model(tied).unwrap()["tie_word_embeddings"], true);
        let qwen = text("Qwen3_5Moe", "qwen3_5_moe_text", json!({"tie_word_embeddings": true}));
        assert_eq!(qwen["architectures"], json!(["Qwen3_5MoeForCausalLM"]));
        assert_eq!(qwen["tie_word_embeddings"], false);
    }
}

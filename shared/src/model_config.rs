//! PURE: the parts of a model folder's `config.json` that every role must read in the same way: the
//! text model of a multimodal model, the maximum sequence length, and classes; and what is laid
//! over it.
//!
//! - `classifier`: models that sort texts into classes
//! - `gemma3`: defaults of Gemma 3
//! - `overrides`: keys that go before those of the file
use serde_json::Value;

mod classifier;
mod gemma3;
mod overrides;

pub use self::classifier::{Activation, CLASSES_MAX, ClassHeadSource, Classifier, classifier};
pub use self::overrides::{ConfigOverrides, OVERRIDES_BYTES_MAX};

/// Gemma 3's text model.
pub const GEMMA3: &str = "Gemma3ForCausalLM";

/// Multimodal architectures with a text model in their `text_config`: the architecture, the
/// `model_type` of its `text_config`, and the text model's own architecture.
const WRAPPERS: [(&str, &str, &str); 10] = [
    ("Gemma3ForConditionalGeneration", "gemma3_text", GEMMA3),
    ("Glm46VForConditionalGeneration", "glm4v_text", "Glm4ForCausalLM"),
    ("Glm4vForConditionalGeneration", "glm4v_text", "Glm4ForCausalLM"),
    ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", "Glm4MoeForCausalLM"),
    ("Mistral3ForConditionalGeneration", "mistral", "MistralForCausalLM"),
    ("Mistral3ForConditionalGeneration", "ministral3", "Ministral3ForCausalLM"),
    ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", "Qwen2ForCausalLM"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "Qwen2ForCausalLM"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "Qwen3ForCausalLM"),
    ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", "Qwen3MoeForCausalLM"),
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

/// Names of the embedding where the base model was saved, without the name that a model with a head
/// has for it; alone, and within a multimodal model.
const BASE_EMBEDDINGS: [&str; 2] = ["embed_tokens.weight", "language_model.embed_tokens.weight"];

/// Sequence lengths of a model, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// Maximum sequence length that it supports.
    pub most: u32,
    /// Default sequence length. Shorter than `most` for a model that handles short sequences worse
    /// when it is set up for long ones.
    pub usual: u32,
}

/// Returns the multimodal architectures that [`text_model`] unwraps.
pub fn wrappers() -> impl Iterator<Item = &'static str> {
    let is_new = |at: &usize| *at == 0 || WRAPPERS[*at].0 != WRAPPERS[at - 1].0;
    (0..WRAPPERS.len()).filter(is_new).map(|at| WRAPPERS[at].0)
}

/// Returns the configuration of the text model alone: the `text_config` of a multimodal model, or
/// `config` itself; completed with the architecture's defaults. A model that sorts texts into
/// classes has the architecture of the one that generates text.
///
/// # Errors
/// One sentence if `text_config` is missing or of an unknown type.
pub fn text_model(config: Value) -> Result<Value, String> {
    let mut text = extract_text_config(classifier::as_decoder(config))?;
    if text["architectures"][0] == GEMMA3 {
        gemma3::complete(&mut text);
    }
    Ok(text)
}

fn extract_text_config(mut config: Value) -> Result<Value, String> {
    let architecture = config["architectures"][0].as_str().unwrap_or_default();
    let known: Vec<_> = WRAPPERS.iter().filter(|(outer, ..)| *outer == architecture).collect();
    let Some((wrapper, usual, own)) = known.first() else { return Ok(config) };
    if FLAT.contains(wrapper) && config["text_config"].is_null() {
        config["architectures"] = serde_json::json!([own]);
        return Ok(config);
    }
    let mut text = match config.get_mut("text_config").map(Value::take) {
        Some(text @ Value::Object(_)) => text,
        _ => return Err(format!("key text_config of {wrapper} is missing, or not a table")),
    };
    let kind = text["model_type"].as_str().unwrap_or(usual);
    let Some((.., own)) = known.iter().find(|(_, known, _)| *known == kind) else {
        let kinds: Vec<&str> = known.iter().map(|(_, kind, _)| *kind).collect();
        return Err(format!(
            "text_config of {wrapper} has model_type \"{kind}\"; supported is: {}",
            kinds.join(", ")
        ));
    };
    let (is_glm, is_qwen_moe) = (kind == "glm4v_text", kind == "qwen3_vl_moe_text");
    text["architectures"] = serde_json::json!([own]);
    // What the text model's own code reads, and that of the same beside a vision tower does not.
    if is_qwen_moe {
        text["norm_topk_prob"] = true.into();
    }
    if is_glm {
        text["attention_bias"] = true.into();
        let sizes = ["hidden_size", "num_attention_heads"].map(|key| text[key].as_u64());
        text["head_dim"] = match sizes {
            [Some(hidden), Some(heads)] => hidden.checked_div(heads).into(),
            _ => Value::Null,
        };
    }
    for key in OUTER {
        if text[key].is_null() && !config[key].is_null() {
            text[key] = config[key].take();
        }
    }
    Ok(text)
}

/// Whether the output head of an architecture is its embedding if the file does not say.
#[must_use]
pub fn is_tied_by_default(architecture: &str) -> bool {
    const TIED: [&str; 7] = [
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "Ernie4_5ForCausalLM",
        "Gemma2ForCausalLM",
        "GemmaForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    ];
    TIED.contains(&architecture)
}

/// Whether tensors with these names are those of a base model alone, without an output head, as
/// embedding models are saved (Qwen3-Embedding). Such a model generates text only if its head is
/// the embedding.
pub fn lacks_head<'a>(tensors: impl IntoIterator<Item = &'a str>) -> bool {
    let mut is_base = false;
    for name in tensors {
        if name.split('.').any(|part| part == "lm_head") {
            return false;
        }
        is_base |= BASE_EMBEDDINGS.contains(&name);
    }
    is_base
}

/// Returns how a model's rotary embedding (RoPE) is scaled, in either dialect of `config.json`: the
/// table and its type.
#[must_use]
pub fn rope_scaling(config: &Value) -> Option<(&Value, &str)> {
    let tables = ["rope_parameters", "rope_scaling"].map(|key| &config[key]);
    let table = tables.into_iter().find(|table| table.is_object())?;
    // A configuration that newer software has saved again has both keys.
    let kind = table["rope_type"].as_str().or(table["type"].as_str()).unwrap_or("default");
    // Earlier names of longrope, used only by Phi-3.
    let is_long = kind == "su" || (kind == "yarn" && !table["long_factor"].is_null());
    Some((
        table,
        match kind {
            _ if is_long => "longrope",
            // Positions in time, height and width, which are one and the same in a text.
            "mrope" => "default",
            _ => kind,
        },
    ))
}

/// Returns the context length that a model was trained on before its RoPE was stretched, if given.
#[must_use]
pub fn original_positions(config: &Value) -> Option<f64> {
    let own = rope_scaling(config)
        .map_or(&Value::Null, |(table, _)| &table["original_max_position_embeddings"]);
    own.as_f64().or_else(|| config["original_max_position_embeddings"].as_f64())
}

/// Returns the supported and the default sequence length.
///
/// # Errors
/// One sentence naming the key and the bounds.
pub fn positions(config: &Value) -> Result<Positions, String> {
    let said = config["max_position_embeddings"].as_u64().and_then(|n| u32::try_from(n).ok());
    let said = said.filter(|n| *n > 0);
    let said = said.ok_or("key max_position_embeddings must be a positive integer")?;
    // Command R was trained on longer sequences than its files say under the usual key.
    let longer = match config["architectures"][0].as_str() {
        Some("CohereForCausalLM" | "Cohere2ForCausalLM") => config["model_max_length"].as_u64(),
        _ => None,
    };
    let longer = longer.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    let all = Positions { most: said.max(longer), usual: said };
    let Some((table, kind)) = rope_scaling(config) else { return Ok(all) };
    // Whoever adds the older table to a file in the newer dialect means it, but it is ignored.
    let kinds = ["rope_parameters", "rope_scaling"].map(|key| {
        let table = &config[key];
        table["rope_type"].as_str().or(table["type"].as_str())
    });
    if let [Some(newer), Some(older)] = kinds
        && newer != older
    {
        return Err(format!(
            "rope_parameters is of type \"{newer}\", rope_scaling of type \"{older}\": remove one \
             of them, or make them agree"
        ));
    }
    let original = original_positions(config).map_or(said, |n| n as u32).max(1);
    Ok(match (kind, table["factor"].as_f64()) {
        // `max_position_embeddings` may be the length before or after stretching.
        ("yarn", Some(factor)) => {
            let most = f64::from(original) * factor;
            if !(1.0..=f64::from(u32::MAX)).contains(&most) {
                return Err(format!(
                    "original_max_position_embeddings ({original}) times the rope factor ({factor}) \
                     is {most}, it must be in 1..={}",
                    u32::MAX
                ));
            }
            Positions { most: most as u32, usual: most as u32 }
        }
        ("longrope", _) => Positions { most: said, usual: said.min(original) },
        // Up to the original length, dynamic scaling does nothing.
        ("dynamic", _) => Positions { most: said.min(original), usual: said.min(original) },
        _ => all,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
        let glm = json!({"architectures": ["Glm4vForConditionalGeneration"], "text_config": {
            "attention_bias": false, "head_dim": 64, "hidden_size": 4096,
            "model_type": "glm4v_text", "num_attention_heads": 32}});
        let text = text_model(glm).unwrap();
        assert_eq!((&text["attention_bias"], &text["head_dim"]), (&json!(true), &json!(128)));
        let moe = json!({"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": {
            "model_type": "qwen3_vl_moe_text", "norm_topk_prob": false}});
        assert_eq!(text_model(moe).unwrap()["norm_topk_prob"], true);
        let all: Vec<&str> = wrappers().collect();
        assert_eq!(all.iter().filter(|it| **it == "Mistral3ForConditionalGeneration").count(), 1);
    }

    #[test]
    fn only_base_models_may_lack_a_head() {
        for (names, lacks) in [
            (&["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight"][..], true),
            (&["language_model.embed_tokens.weight", "vision_tower.x"], true),
            (&["embed_tokens.weight", "lm_head.weight"], false),
            (&["lm_head.qweight", "embed_tokens.weight"], false),
            (&["language_model.lm_head.weight", "language_model.model.embed_tokens.weight"], false),
            // A folder that is not whole.
            (&["model.embed_tokens.weight", "model.norm.weight"], false),
            (&[], false),
        ] {
            assert_eq!(lacks_head(names.iter().copied()), lacks, "{names:?}");
        }
        assert!(is_tied_by_default("Gemma2ForCausalLM") && !is_tied_by_default("Qwen3ForCausalLM"));
    }

    #[test]
    fn what_files_of_gemma_3_leave_out_is_said() {
        // As published for the 4B model, without the vision tower.
        let config = json!({"architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024}});
        let text = text_model(config).unwrap();
        assert_eq!(text["architectures"], json!([GEMMA3]));
        assert_eq!((&text["hidden_size"], &text["vocab_size"]), (&json!(2560), &json!(262_208)));
        assert_eq!((&text["eos_token_id"], &text["head_dim"]), (&json!([1, 106]), &json!(256)));
        assert_eq!(positions(&text), Ok(Positions { most: 131_072, usual: 131_072 }));
    }

    #[test]
    fn sequences_may_be_as_long_as_the_rotary_embedding_is_stretched() {
        let bounds = |config: Value| positions(&config).map(|found| (found.most, found.usual));
        let of = |said: u32, scaling: Value| {
            bounds(json!({"max_position_embeddings": said, "rope_scaling": scaling}))
        };
        assert_eq!(of(4096, Value::Null), Ok((4096, 4096)));
        let llama = json!({"rope_type": "llama3", "factor": 8.0,
            "original_max_position_embeddings": 8192});
        assert_eq!(of(131_072, llama), Ok((131_072, 131_072)));
        // Qwen2.5's documentation has this length, Qwen3's 40960; both are before stretching.
        let yarn = json!({"type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 32768});
        assert_eq!(of(32768, yarn.clone()), Ok((131_072, 131_072)));
        assert_eq!(of(40960, yarn.clone()), Ok((131_072, 131_072)));
        assert_eq!(of(131_072, yarn.clone()), Ok((131_072, 131_072)), "or after");
        assert_eq!(of(512, json!({"rope_type": "yarn", "factor": 1.5})), Ok((768, 768)));
        // Both dialects must agree.
        let mut both = json!({"max_position_embeddings": 64, "rope_scaling": yarn,
            "rope_parameters": {"rope_type": "default"}});
        let error = bounds(both.clone()).unwrap_err();
        assert!(error.contains("type \"default\", rope_scaling of type \"yarn\""), "{error}");
        both["rope_parameters"] = yarn.clone();
        assert_eq!(bounds(both), Ok((131_072, 131_072)));
        let long = json!({"max_position_embeddings": 131_072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": [1]}});
        assert_eq!(bounds(long.clone()), Ok((131_072, 4096)));
        for old in ["su", "yarn"] {
            let mut config = long.clone();
            config["rope_scaling"]["type"] = json!(old);
            assert_eq!(rope_scaling(&config).unwrap().1, "longrope");
            assert_eq!(bounds(config), Ok((131_072, 4096)), "{old}");
        }
        assert_eq!(of(2048, json!({"type": "dynamic", "factor": 4.0})), Ok((2048, 2048)));
        let stretched = json!({"rope_type": "dynamic", "factor": 4.0,
            "original_max_position_embeddings": 2048});
        assert_eq!(of(8192, stretched), Ok((2048, 2048)));

        let command_r = json!({"architectures": ["CohereForCausalLM"],
            "max_position_embeddings": 8192, "model_max_length": 131_072});
        assert_eq!(bounds(command_r.clone()), Ok((131_072, 8192)));
        let mut command_r7b = command_r;
        command_r7b["architectures"] = json!(["Cohere2ForCausalLM"]);
        assert_eq!(bounds(command_r7b), Ok((131_072, 8192)));

        let error = bounds(json!({"max_position_embeddings": 0})).unwrap_err();
        assert!(error.contains("max_position_embeddings must be a positive integer"), "{error}");
        let error = of(4096, json!({"rope_type": "yarn", "factor": 1e9})).unwrap_err();
        assert!(error.contains("(4096) times the rope factor (1000000000)"), "{error}");
    }
}

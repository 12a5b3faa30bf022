//! PURE: the parts of a model folder's `config.json` that every role must read in the same way: the
//! text model of a multimodal model, the maximum sequence length, and classes; and what is laid
//! over it.
//!
//! - `classifier`: models that sort texts into classes
//! - `gemma3`: defaults of Gemma 3
//! - `overrides`: keys that go before those of the file
//! - `wrappers`: multimodal models whose text model is supported
use serde_json::Value;

mod classifier;
mod gemma3;
mod overrides;
mod wrappers;

pub use self::classifier::{Activation, CLASSES_MAX, ClassHeadSource, Classifier, classifier};
pub use self::overrides::{ConfigOverrides, OVERRIDES_BYTES_MAX};
pub use self::wrappers::wrappers;

/// Gemma 3's text model.
pub const GEMMA3: &str = "Gemma3ForCausalLM";

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

/// Returns the configuration of the text model alone: the `text_config` of a multimodal model, or
/// `config` itself; completed with the architecture's defaults. A model that sorts texts into
/// classes has the architecture of the one that generates text.
///
/// # Errors
/// One sentence if `text_config` is missing or of an unknown type.
pub fn text_model(config: Value) -> Result<Value, String> {
    let mut text = wrappers::extract_text_config(classifier::as_decoder(config))?;
    // As LG's own files have it.
    if text["architectures"][0] == "ExaoneMoEForCausalLM" {
        text["architectures"] = serde_json::json!(["ExaoneMoeForCausalLM"]);
    }
    if text["architectures"][0] == GEMMA3 {
        gemma3::complete(&mut text);
    }
    Ok(text)
}

/// Whether layers of a text model have linear attention: they keep a state of each sequence instead
/// of K and V of its tokens. It is known only where the sequence ends, so no other sequence can
/// begin with a part of it, unless the state there is kept, and no token can be taken back.
#[must_use]
pub fn has_linear_attention(config: &Value) -> bool {
    let kinds = config["layer_types"].as_array();
    let lists = |kind: &str| kinds.is_some_and(|kinds| kinds.iter().any(|said| said == kind));
    match config["architectures"][0].as_str() {
        Some("Qwen3NextForCausalLM" | "Qwen3_5ForCausalLM" | "Qwen3_5MoeForCausalLM") => {
            lists("linear_attention") || kinds.is_none() && config["full_attention_interval"] != 1
        }
        Some("GraniteMoeHybridForCausalLM") => {
            kinds.is_none() || lists("mamba") || lists("linear_attention")
        }
        _ => false,
    }
}

/// Parses a `config.json`. Python also writes numbers that JSON does not have, such as the bounds
/// of Mamba's steps: they are read as null, as if the file did not say them.
///
/// # Errors
/// That of the file as it is.
pub fn parse(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text)
        .or_else(|error| serde_json::from_str(&without_infinities(text)).map_err(|_| error))
}

/// Puts null in place of infinities and of what is not a number, outside of strings.
fn without_infinities(text: &str) -> String {
    let (mut made, mut rest) = (String::with_capacity(text.len()), text);
    let (mut is_quoted, mut is_escaped) = (false, false);
    while let Some(next) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| rest.starts_with(word));
        let taken = match word.filter(|_| !is_quoted) {
            Some(word) => {
                made.push_str("null");
                word.len()
            }
            None => {
                made.push(next);
                next.len_utf8()
            }
        };
        is_quoted ^= next == '"' && !is_escaped;
        is_escaped = is_quoted && next == '\\' && !is_escaped;
        rest = &rest[taken..];
    }
    made
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
    fn it_is_seen_which_models_have_linear_attention() {
        for (name, said, has) in [
            ("Qwen3_5ForCausalLM", json!({}), true),
            ("Qwen3NextForCausalLM", json!({"full_attention_interval": 1}), false),
            ("Qwen3NextForCausalLM", json!({"full_attention_interval": 4}), true),
            ("Qwen3_5ForCausalLM", json!({"layer_types": ["full_attention"]}), false),
            ("Qwen3_5ForCausalLM", json!({"layer_types": ["linear_attention"]}), true),
            ("GraniteMoeHybridForCausalLM", json!({}), true),
            ("GraniteMoeHybridForCausalLM", json!({"layer_types": ["attention"]}), false),
            ("GraniteMoeHybridForCausalLM", json!({"layer_types": ["attention", "mamba"]}), true),
            ("Qwen3ForCausalLM", json!({}), false),
        ] {
            let mut config = said;
            config["architectures"] = json!([name]);
            assert_eq!(has_linear_attention(&config), has, "{config}");
        }
    }

    #[test]
    fn numbers_that_json_does_not_have_are_read_as_null() {
        let text = r#"{"a": [0.0, Infinity], "b": -Infinity, "c": NaN, "d\\": "\"NaN, é",
            "Infinity": 1}"#;
        let want =
            json!({"a": [0.0, null], "b": null, "c": null, "d\\": "\"NaN, é", "Infinity": 1});
        assert_eq!(parse(text).unwrap(), want);
        // Other errors are those of the file itself.
        let error = parse("{\"a\": Infinity, \"b\": }").unwrap_err().to_string();
        assert!(error.contains("line 1 column 7"), "{error}");
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

//! PURE: which files of a model are needed, of those that the hub lists.
//!
//! Configuration, tokenizer, chat templates and weights in safetensors: nothing that is a program,
//! nothing that no one here reads (other weight formats, pictures, a second copy of the weights).
use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

/// The weights in one file.
pub const SINGLE: &str = "model.safetensors";
/// Which file of several has which tensor.
pub const INDEX: &str = "model.safetensors.index.json";
/// The model's configuration, without which there is no model.
pub const CONFIG: &str = "config.json";
/// The tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// An adapter's configuration and weights.
pub const ADAPTER: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// Most files of weights of one model.
const SHARDS_MAX: usize = 4096;
/// Largest file that is no weights.
pub const SMALL_MAX: u64 = 256 << 20;

/// Files of text and configuration, by their whole names.
const TEXTS: [&str; 8] = [
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "modules.json",
    "1_Pooling/config.json",
];

/// Those that most models have, and that change what is generated: chat templates and tokens to
/// begin with, and the tokens that end an answer.
pub const USUAL: [&str; 2] = ["tokenizer_config.json", "generation_config.json"];

/// What of a model is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelPart {
    /// What turns text into tokens and back: for whoever serves HTTP. The index of weights belongs
    /// to it, because it tells whether a model can generate text.
    Text,
    /// What is computed with: for workers. The tokenizer belongs to it, because some models name
    /// tokens in their configuration.
    Weights,
    /// Both.
    All,
    /// A LoRA adapter.
    Adapter,
}

impl ModelPart {
    /// Whether the model's weights belong to it.
    #[must_use]
    pub fn has_weights(self) -> bool {
        matches!(self, Self::Weights | Self::All)
    }

    /// Whether its text side does.
    #[must_use]
    pub fn has_text(self) -> bool {
        matches!(self, Self::Text | Self::All)
    }
}

/// Whether a name may be taken for a file of the folder itself, whoever made it up.
#[must_use]
pub fn is_plain(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    (1..=255).contains(&name.len()) && !name.starts_with('.') && name.chars().all(good)
}

/// The files of `part` that come first, of those `listed`: all but the weights of a model.
#[must_use]
pub fn first<'a>(part: ModelPart, listed: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
    let tokenizer =
        |name: &str| is_plain(name) && name.starts_with("tokenizer") && name.ends_with(".json");
    let wanted = |name: &&str| match part {
        ModelPart::Adapter => ADAPTER.contains(name),
        _ => {
            *name == CONFIG
                || *name == INDEX
                || part.has_text() && (TEXTS.contains(name) || tokenizer(name))
                || part.has_weights() && *name == TOKENIZER
        }
    };
    listed.into_iter().filter(wanted).map(str::to_owned).collect()
}

/// The files of weights, as the index names them, or the one that there is without an index.
///
/// # Errors
/// What is wrong with the index, in one sentence.
pub fn weights(index: Option<&[u8]>) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let Some(index) = index else { return Ok(BTreeSet::from([SINGLE.to_owned()])) };
    let index: Index = serde_json::from_slice(index)
        .map_err(|error| format!("{INDEX} is no index of weights: {error}"))?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    if let Some(name) = files.iter().find(|name| !is_plain(name)) {
        return Err(format!("{INDEX} names the file {name:?}, which is no plain file name"));
    }
    if !(1..=SHARDS_MAX).contains(&files.len()) {
        return Err(format!("{INDEX} names {} files, it must be 1 to {SHARDS_MAX}", files.len()));
    }
    Ok(files)
}

/// Whether a model's configuration names tokens, whose numbers only the tokenizer tells.
#[must_use]
pub fn names_tokens(config: &[u8]) -> bool {
    let config: serde_json::Value = serde_json::from_slice(config).unwrap_or_default();
    !config["classifier_from_token"].is_null()
}

/// Why a model whose files are `listed` cannot be served, if it has no weights that are read.
#[must_use]
pub fn no_weights<'a>(listed: impl IntoIterator<Item = &'a str>) -> String {
    let others = [".bin", ".pth", ".pt", ".gguf", ".onnx", ".safetensors", ".h5", ".msgpack"];
    let ending = |name: &str| others.into_iter().find(|it| name.ends_with(it));
    let found: BTreeSet<&str> = listed.into_iter().filter_map(ending).collect();
    let found: Vec<&str> = found.into_iter().collect();
    let what = match found.as_slice() {
        [] => "no weights at all".to_owned(),
        found => format!("only files in {}", found.join(", ")),
    };
    format!(
        "it has neither {SINGLE} nor {INDEX}, {what}: choose a model that has its weights in safetensors"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: [&str; 24] = [
        ".gitattributes",
        "README.md",
        CONFIG,
        "generation_config.json",
        TOKENIZER,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        INDEX,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "model.gguf",
        "modeling_evil.py",
        "../../.bashrc",
        "/etc/passwd",
        "tokenizer/../../x.json",
        "tokenizer.json\n",
        "1_Pooling/config.json",
        "tokenizer.model",
        "sub/config.json",
    ];

    fn of(part: ModelPart) -> Vec<String> {
        first(part, LISTED).into_iter().collect()
    }

    #[test]
    fn only_what_is_read_is_taken() {
        let text = of(ModelPart::Text);
        let expected = [
            "1_Pooling/config.json",
            "chat_template.jinja",
            CONFIG,
            "generation_config.json",
            INDEX,
            "special_tokens_map.json",
            TOKENIZER,
            "tokenizer_config.json",
        ];
        assert_eq!(text, expected);
        assert_eq!(of(ModelPart::Weights), [CONFIG, INDEX, TOKENIZER]);
        assert_eq!(of(ModelPart::All), expected);
        assert!(of(ModelPart::Adapter).is_empty());
        let adapter: Vec<String> = first(ModelPart::Adapter, ADAPTER).into_iter().collect();
        assert_eq!(adapter, ADAPTER);
    }

    #[test]
    fn an_index_names_files_of_its_own_folder() {
        let of = |files: &[&str]| {
            let map: BTreeMap<String, &str> =
                files.iter().enumerate().map(|(i, file)| (i.to_string(), *file)).collect();
            weights(Some(serde_json::json!({ "weight_map": map }).to_string().as_bytes()))
        };
        let both = of(&["a.safetensors", "b.safetensors", "a.safetensors"]).unwrap();
        assert_eq!(both.into_iter().collect::<Vec<_>>(), ["a.safetensors", "b.safetensors"]);
        for hostile in ["../a", "/a", "a/b", "a\\b", ".a", "", "a\0", "a b"] {
            let error = of(&["a.safetensors", hostile]).unwrap_err();
            assert!(error.contains(INDEX) && error.contains("plain"), "{hostile}: {error}");
        }
        assert!(of(&[]).unwrap_err().contains("0 files"));
        assert!(weights(Some(b"[]")).unwrap_err().contains(INDEX));
        assert_eq!(weights(None).unwrap().into_iter().collect::<Vec<_>>(), [SINGLE]);
    }

    #[test]
    fn what_a_model_has_instead_of_weights_is_said() {
        assert!(no_weights(["a.gguf", "b.gguf", "README.md"]).contains("only files in .gguf"));
        assert!(no_weights([CONFIG]).contains("no weights at all"));
    }
}

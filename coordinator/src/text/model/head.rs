//! Whether a model's weights have an output head. Only the names of tensors are read, which the
//! index of several files has, and the header of a single one.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use shared::hub::files::{INDEX, SINGLE};
use shared::model_config::{is_tied_by_default, lacks_head};

/// Longest header that is read, in bytes: that of what workers load.
const HEADER_MAX: u64 = 16 << 20;

/// Whether the model needs a head of its own, and the files of `folder` have none. Without weights
/// on this host it is taken to have one: workers then fail what it is asked to generate.
pub(super) fn is_missing(folder: &Path, config: &Value) -> bool {
    let usual = || is_tied_by_default(config["architectures"][0].as_str().unwrap_or_default());
    if config["tie_word_embeddings"].as_bool().unwrap_or_else(usual) {
        return false;
    }
    let names = in_index(&folder.join(INDEX)).or_else(|| in_header(&folder.join(SINGLE)));
    // What is wrong with them, workers say.
    names.is_some_and(|names| lacks_head(names.keys().map(String::as_str)))
}

type Names = BTreeMap<String, IgnoredAny>;

fn in_index(file: &Path) -> Option<Names> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: Names,
    }
    let text = std::fs::read(file).ok()?;
    serde_json::from_slice(&text).ok().map(|index: Index| index.weight_map)
}

fn in_header(file: &Path) -> Option<Names> {
    let mut file = File::open(file).ok()?;
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let length = Some(u64::from_le_bytes(length)).filter(|length| *length <= HEADER_MAX)?;
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).ok()?;
    serde_json::from_slice(&header).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_those_of_the_index_or_the_only_file() {
        let folder = tempfile::tempdir().unwrap();
        let untied = json!({"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": false});
        let missing = |config: &Value| is_missing(folder.path(), config);
        assert!(!missing(&untied), "unknown");
        let single = |header: &str| {
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(header.as_bytes());
            std::fs::write(folder.path().join(SINGLE), bytes).unwrap();
        };
        let tensor = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
        single(&format!(r#"{{"__metadata__":{{}},"embed_tokens.weight":{tensor}}}"#));
        assert!(missing(&untied));
        assert!(missing(&json!({"architectures": ["Qwen3ForCausalLM"]})));
        for tied in [
            json!({"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": true}),
            json!({"architectures": ["Gemma2ForCausalLM"]}),
        ] {
            assert!(!missing(&tied), "{tied}");
        }
        single(&format!(r#"{{"embed_tokens.weight":{tensor},"lm_head.weight":{tensor}}}"#));
        assert!(!missing(&untied));
        // An index goes before it, as when weights are loaded.
        let index = json!({"metadata": {}, "weight_map": {"embed_tokens.weight": "a.safetensors"}});
        std::fs::write(folder.path().join(INDEX), index.to_string()).unwrap();
        assert!(missing(&untied));
        std::fs::remove_file(folder.path().join(INDEX)).unwrap();
        for broken in ["[]", "{"] {
            single(broken);
            assert!(!missing(&untied), "{broken}");
        }
        std::fs::write(folder.path().join(SINGLE), u64::MAX.to_le_bytes()).unwrap();
        assert!(!missing(&untied));
    }
}

//! The special tokens around a text, where `tokenizer_config.json` says which, and not
//! `tokenizer.json`.
use serde_json::{Map, Value, json};
use tokenizers::{PostProcessorWrapper, Tokenizer};

/// Tokenizers whose code in transformers 4 puts them around a text as its flags say, whatever the
/// tokenizer's file has. Models were trained with what it makes: DeepSeek's files have flags that
/// say so, and a post-processor that adds nothing.
const CLASSES: [&str; 4] =
    ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"];

/// What `tokenizer_config.json` puts around texts and pairs of texts. `None` if `tokenizer.json`
/// says that: other tokenizers, no flags, or no such tokens.
///
/// # Errors
/// What is wrong with the tokens, in one sentence.
pub(super) fn read(
    tokenizer: &Tokenizer,
    config: &Value,
) -> Result<Option<PostProcessorWrapper>, String> {
    let class = config["tokenizer_class"].as_str().unwrap_or_default();
    let class = class.strip_suffix("Fast").unwrap_or(class);
    let flags = ["add_bos_token", "add_eos_token"].map(|key| config[key].as_bool());
    if !CLASSES.contains(&class) || flags == [None; 2] {
        return Ok(None);
    }
    let mut special = Map::new();
    // The two pieces of a template for texts 0 and 1: none, or the token.
    let mut pieces = |key: &str, is_added: bool| {
        if !is_added {
            return Some([vec![], vec![]]);
        }
        let text = config[key].get("content").unwrap_or(&config[key]).as_str()?;
        let id = tokenizer.token_to_id(text)?;
        special.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
        Some([0, 1].map(|side| vec![json!({"SpecialToken": {"id": text, "type_id": side}})]))
    };
    let begin = pieces("bos_token", flags[0].unwrap_or(true));
    let end = pieces("eos_token", flags[1].unwrap_or(false));
    let (Some([begin, begin_second]), Some([end, end_second])) = (begin, end) else {
        tracing::warn!(
            "tokenizer_config.json adds a token (add_bos_token, add_eos_token) that is none of \
             tokenizer.json, whose own rule is used"
        );
        return Ok(None);
    };
    let text = |name: &str, side: u32| vec![json!({"Sequence": {"id": name, "type_id": side}})];
    let single = [begin, text("A", 0), end].concat();
    let pair = [single.clone(), begin_second, text("B", 1), end_second].concat();
    let template = json!({"type": "TemplateProcessing", "single": single, "pair": pair,
        "special_tokens": special});
    serde_json::from_value(template).map(Some).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use serde_json::{Value, json};

    use super::super::super::template::Conversation;
    use super::super::TextModel;

    fn demo() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
    }

    /// The demo model with these keys, and with a tokenizer that adds nothing by itself, as
    /// DeepSeek's are, or with its own, which adds the first token.
    fn model(keys: &Value, adds_nothing: bool) -> TextModel {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(demo().join("config.json"), folder.path().join("config.json")).unwrap();
        let read = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(demo().join(name)).unwrap()).unwrap()
        };
        let mut tokenizer = read("tokenizer.json");
        if adds_nothing {
            tokenizer["post_processor"] = json!({"type": "ByteLevel", "add_prefix_space": true,
                "trim_offsets": false, "use_regex": true});
        }
        let mut config = read("tokenizer_config.json");
        let all = config.as_object_mut().unwrap();
        all.retain(|key, _| !["add_bos_token", "add_eos_token"].contains(&key.as_str()));
        all.extend(keys.as_object().unwrap().clone());
        for (name, value) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", config)] {
            std::fs::write(folder.path().join(name), value.to_string()).unwrap();
        }
        TextModel::load(folder.path()).unwrap()
    }

    fn ids(model: &TextModel) -> (Vec<u32>, Vec<u32>) {
        let pair = model.encode_pair("Once", "upon", true).unwrap();
        (model.encode("Once", true).unwrap(), pair)
    }

    /// Expected are the ids of `AutoTokenizer` of transformers 4.57.6, for the same files.
    #[test]
    fn flags_of_llamas_tokenizers_go_before_the_file() {
        let named = json!({"__type": "AddedToken", "content": "<|bos|>", "lstrip": false,
            "normalized": true, "rstrip": false, "single_word": false});
        let cases = [
            (json!({"add_bos_token": true}), vec![1, 546], vec![1, 546, 1, 91, 86, 291]),
            (
                json!({"add_bos_token": true, "add_eos_token": true}),
                vec![1, 546, 2],
                vec![1, 546, 2, 1, 91, 86, 291, 2],
            ),
            (json!({"add_bos_token": false}), vec![546], vec![546, 91, 86, 291]),
            (json!({"add_eos_token": true}), vec![1, 546, 2], vec![1, 546, 2, 1, 91, 86, 291, 2]),
            (
                json!({"add_bos_token": false, "add_eos_token": false}),
                vec![546],
                vec![546, 91, 86, 291],
            ),
        ];
        let classes = ["LlamaTokenizerFast", "LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"];
        for class in classes {
            for (keys, one, pair) in &cases {
                let mut keys = keys.clone();
                keys["tokenizer_class"] = class.into();
                keys["bos_token"] = named.clone();
                for adds_nothing in [true, false] {
                    let model = model(&keys, adds_nothing);
                    assert_eq!(ids(&model), (one.clone(), pair.clone()), "{keys} {adds_nothing}");
                    assert_eq!(model.num_special(), one.len() - 1, "{keys}");
                }
            }
        }
    }

    #[test]
    fn other_tokenizers_and_files_without_flags_are_what_their_file_says() {
        let (own, none) = (vec![1, 546], vec![546]);
        for keys in [
            json!({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": true,
                "add_eos_token": true}),
            json!({"tokenizer_class": "LlamaTokenizerFast"}),
            json!({"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": false}),
            // No token that the vocabulary has.
            json!({"tokenizer_class": "LlamaTokenizer", "add_bos_token": true,
                "bos_token": "<none>"}),
        ] {
            assert_eq!(ids(&model(&keys, false)).0, own, "{keys}");
            assert_eq!(ids(&model(&keys, true)).0, none, "{keys}");
        }
    }

    #[test]
    fn templates_that_write_the_first_token_have_it_once() {
        let keys = json!({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": true,
            "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"});
        let model = model(&keys, true);
        let messages = vec![json!({"role": "user", "content": "Once"})];
        let conversation = Conversation::new(messages);
        let rendered = model.template.as_ref().unwrap().render(&conversation).unwrap();
        assert_eq!(model.encode(&rendered, false).unwrap(), [1, 546]);
    }
}

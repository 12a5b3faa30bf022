//! PURE: what a model folder says of its tokenizer, as vLLM tells it to clients: the contents of
//! `tokenizer_config.json`, with the chat template in use.
use serde_json::Value;

/// What transformers takes a `tokenizer.json` for where nothing else is said.
const CLASS: &str = "PreTrainedTokenizerFast";
/// Special tokens. Some files have objects for them, with what only their makers need; clients
/// expect their text.
const TOKENS: [&str; 8] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
];
/// Paths on the host of whoever made the folder.
const PATHS: [&str; 4] = ["vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file"];

/// Describes the tokenizer of a folder whose `tokenizer_config.json` has `config`, null if there is
/// none: a JSON object.
pub(super) fn of(config: &Value, template: Option<String>) -> String {
    let mut told = config.as_object().cloned().unwrap_or_default();
    // In the order of the file, which `remove` would change.
    told.retain(|key, _| {
        let is_unused = key == "chat_template" && template.is_none();
        !is_unused && !PATHS.contains(&key.as_str())
    });
    for (_, value) in told.iter_mut().filter(|(key, _)| TOKENS.contains(&key.as_str())) {
        match value {
            Value::Array(tokens) => tokens.iter_mut().for_each(to_text),
            token => to_text(token),
        }
    }
    if !told.get("tokenizer_class").is_some_and(Value::is_string) {
        told.insert("tokenizer_class".to_owned(), CLASS.into());
    }
    if let Some(template) = template {
        told.insert("chat_template".to_owned(), template.into());
    }
    Value::Object(told).to_string()
}

/// A special token by its text alone.
fn to_text(token: &mut Value) {
    let text = token.get("content").and_then(Value::as_str).map(str::to_owned);
    if let Some(text) = text {
        *token = text.into();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_is_what_the_file_says_with_the_template_in_use() {
        let token = |text: &str| json!({"__type": "AddedToken", "content": text, "lstrip": false});
        let added = json!({"7": {"content": "<s>", "special": true}});
        let file = json!({
            "bos_token": token("<s>"), "vocab_file": "/home/x/vocab", "eos_token": "</s>",
            "pad_token": null, "additional_special_tokens": [token("<a>"), "<b>"],
            "special_tokens_map_file": "/home/x/map", "added_tokens_decoder": added,
            "model_max_length": 1024, "tokenizer_class": "LlamaTokenizer",
            "chat_template": [{"name": "default"}],
        });
        let told = of(&file, Some("{{ x }}".to_owned()));
        let expected = json!({
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": null,
            "additional_special_tokens": ["<a>", "<b>"], "added_tokens_decoder": added,
            "model_max_length": 1024, "tokenizer_class": "LlamaTokenizer",
            "chat_template": "{{ x }}",
        });
        assert_eq!(told, expected.to_string(), "in the same order");
        let told: Value = serde_json::from_str(&of(&file, None)).unwrap();
        assert!(told.get("chat_template").is_none() && told["bos_token"] == "<s>");
    }

    #[test]
    fn a_folder_without_the_file_has_a_class_too() {
        let class = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
        for file in [Value::Null, json!([]), json!({"tokenizer_class": null})] {
            assert_eq!(of(&file, None), class.to_string());
        }
        let both = json!({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "x"});
        assert_eq!(of(&Value::Null, Some("x".to_owned())), both.to_string());
    }
}

//! Minimal tokenizers of other types than the shipped models', for tests.
use std::path::Path;

use serde_json::{Value, json};

use super::model::TextModel;

/// A model folder with this tokenizer, whose last tokens are an end token and a special one.
pub(crate) fn folder(vocabulary: &[String], tokenizer: &Value) -> TextModel {
    let size = vocabulary.len();
    let folder = tempfile::tempdir().unwrap();
    let special = |id: usize, content: &str| {
        json!({"id": id, "content": content,
        "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
    };
    let mut whole = json!({"version": "1.0", "truncation": null, "padding": null,
        "post_processor": null,
        "added_tokens": [special(size, "<|end|>"), special(size + 1, "<|tool|>")]});
    for (name, value) in tokenizer.as_object().unwrap() {
        whole[name] = value.clone();
    }
    // Two more ids than tokens, as where embeddings are padded.
    let config =
        json!({"vocab_size": size + 4, "max_position_embeddings": 64, "eos_token_id": size});
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), whole.to_string()).unwrap();
    TextModel::load(folder.path()).unwrap()
}

/// Pieces as in sentencepiece, plus a token for each byte.
pub(crate) fn pieces() -> Vec<String> {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let pieces = [
        "\u{2581}",
        "a",
        "b",
        "{",
        "}",
        "\"",
        ":",
        "1",
        "\u{2581}a",
        "\u{2581}{",
        "\u{2581}\"",
        "\"a",
        "\u{2581}\u{2581}",
        "ä",
        "x\u{2581}y",
        "<0xZZ>",
        "é\u{2581}",
        "[",
        "]",
        ",",
    ];
    bytes.chain(pieces.map(str::to_owned)).collect()
}

pub(crate) fn numbered(words: &[String]) -> Value {
    Value::Object(words.iter().enumerate().map(|(id, word)| (word.clone(), json!(id))).collect())
}

/// Like Llama 2 and Mistral: the decoder drops a leading space.
pub(crate) fn sentencepiece_bpe() -> TextModel {
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let pieces = pieces();
    folder(
        &pieces,
        &json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"}, replace(" ", "\u{2581}")]},
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": [replace("\u{2581}", " "),
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": true,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": true,
                "vocab": numbered(&pieces), "merges": []},
        }),
    )
}

/// Like Gemma: the decoder keeps all spaces.
pub(crate) fn sentencepiece_that_keeps_spaces() -> TextModel {
    let pieces = pieces();
    folder(
        &pieces,
        &json!({
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": true,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "byte_fallback": true,
                "vocab": numbered(&pieces), "merges": []},
        }),
    )
}

/// The demo model's tokenizer with harmony's special tokens and a harmony chat template.
pub(crate) fn harmony() -> TextModel {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |file: &str| std::fs::read_to_string(root.join("models/demo").join(file)).unwrap();
    let json = |file: &str| serde_json::from_str::<Value>(&read(file)).unwrap();
    let (mut tokenizer, mut config) = (json("tokenizer.json"), json("config.json"));
    let first = config["vocab_size"].as_u64().unwrap();
    let marks = ["start", "message", "channel", "constrain", "return", "call", "endoftext"];
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    added.extend((first..).zip(marks).map(|(id, mark)| {
        json!({"id": id, "content": format!("<|{mark}|>"), "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false})
    }));
    config["vocab_size"] = json!(first + 7);
    config["eos_token_id"] = json!(first + 6);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("tokenizer.json", &tokenizer.to_string());
    write("config.json", &config.to_string());
    let template = std::fs::read_to_string(root.join("tests/models/harmony.jinja")).unwrap();
    write("chat_template.jinja", &template);
    TextModel::load(folder.path()).unwrap()
}

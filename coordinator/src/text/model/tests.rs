//! Tokenizers, templates and incremental decoding against golden values.
use proptest::prelude::*;

use super::super::detokenizer::IncrementalDecoder;
use super::super::template::Conversation;
use super::*;

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders = vec![root.join("models/demo")];
    for entry in std::fs::read_dir(root.join("tests/models")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    assert_eq!(folders.len(), 27);
    folders
}

#[test]
fn prompts_equal_the_goldens() {
    for folder in folders() {
        let model = TextModel::load(&folder).unwrap();
        let goldens = read_json(&folder.join("golden.json")).unwrap();
        for golden in goldens["prompts"].as_array().unwrap() {
            let name = format!("{}: {}", folder.display(), golden["name"]);
            let ids: Vec<u32> = serde_json::from_value(golden["prompt_ids"].clone()).unwrap();
            if let Some(text) = golden["text"].as_str() {
                assert_eq!(model.encode(text, true).unwrap(), ids, "{name}");
            } else {
                let list = golden["messages"].as_array().unwrap();
                let conversation = Conversation::new(list.clone());
                let rendered = model.template.as_ref().unwrap().render(&conversation).unwrap();
                assert_eq!(rendered, golden["rendered"].as_str().unwrap(), "{name}");
                assert_eq!(model.encode(&rendered, false).unwrap(), ids, "{name}");
            }
        }
    }
}

/// Fine-tuned models end turns with a token that their older files do not know of.
#[test]
fn what_the_tokenizer_ends_with_ends_text_too() {
    let (demo, copy) = (&folders()[0], tempfile::tempdir().unwrap());
    for file in ["config.json", "tokenizer.json", "generation_config.json"] {
        std::fs::copy(demo.join(file), copy.path().join(file)).unwrap();
    }
    let ends = || TextModel::load(copy.path()).unwrap().end_tokens;
    let eos = |value: &str| {
        let text = format!("{{\"eos_token\": {value}}}");
        std::fs::write(copy.path().join("tokenizer_config.json"), text).unwrap();
    };
    std::fs::write(copy.path().join("generation_config.json"), "{\"eos_token_id\": 2}").unwrap();
    assert_eq!(ends(), [2]);
    let end = TextModel::load(demo).unwrap().special_token("<|end|>").unwrap();
    for value in ["\"<|end|>\"", "{\"content\": \"<|end|>\", \"lstrip\": false}"] {
        eos(value);
        assert_eq!(ends(), [2, end], "{value}");
    }
    for value in ["\"<|eos|>\"", "\"unknown\"", "null", "7"] {
        eos(value);
        assert_eq!(ends(), [2], "{value}");
    }
}

/// Models that also see have it there, and a tokenizer's own comes first.
#[test]
fn a_template_may_be_in_a_file_of_its_own() {
    let (demo, copy) = (&folders()[0], tempfile::tempdir().unwrap());
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(demo.join(file), copy.path().join(file)).unwrap();
    }
    let write = |file: &str, text: &str| {
        let text = serde_json::json!({"chat_template": text}).to_string();
        std::fs::write(copy.path().join(file), text).unwrap();
    };
    let rendered = || {
        let template = TextModel::load(copy.path()).unwrap().template?;
        let message = serde_json::json!({"role": "user", "content": "?"});
        Some(template.render(&Conversation::new(vec![message])).unwrap())
    };
    assert_eq!(rendered(), None);
    write("chat_template.json", "beside {{ messages[0]['content'] }}");
    assert_eq!(rendered().as_deref(), Some("beside ?"));
    write("tokenizer_config.json", "own {{ messages[0]['content'] }}");
    assert_eq!(rendered().as_deref(), Some("own ?"));
}

/// What bounds a request is the text model's.
#[test]
fn sizes_are_those_of_the_text_model() {
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(folders()[0].join("tokenizer.json"), copy.path().join("tokenizer.json")).unwrap();
    let load = |config: Value| {
        std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
        TextModel::load(copy.path()).map_err(|error| error.to_string())
    };
    let wrapped = serde_json::json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "eos_token_id": 2,
        "text_config": {"vocab_size": 2048, "max_position_embeddings": 64, "hidden_size": 8,
            "rope_scaling": {"type": "yarn", "factor": 2.0}},
    });
    let model = load(wrapped).unwrap();
    assert_eq!((model.vocab_size, model.max_positions, model.hidden_size), (2048, 128, 8));
    assert_eq!(model.end_tokens, [2]);
    let long = serde_json::json!({
        "vocab_size": 2048, "max_position_embeddings": 512, "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope"},
    });
    let model = load(long).unwrap();
    assert_eq!((model.max_positions, model.usual_positions), (512, 64));
    let error = load(serde_json::json!({"vocab_size": 2048})).unwrap_err();
    assert!(error.contains("config.json: key max_position_embeddings must be"), "{error}");
}

fn in_pieces(model: &TextModel, tokens: &[u32]) -> String {
    let mut decoder = IncrementalDecoder::new(model.tokenizer.clone());
    let mut text = String::new();
    for token in tokens {
        decoder.push(*token, &mut text);
    }
    decoder.finish(&mut text);
    text
}

#[test]
fn no_half_character_is_ever_emitted() {
    let model = TextModel::load(&folders()[0]).unwrap();
    let tokens = model.encode("Café — naïve 你好 🦊! done", false).unwrap();
    let mut decoder = IncrementalDecoder::new(model.tokenizer.clone());
    let mut text = String::new();
    for token in &tokens {
        decoder.push(*token, &mut text);
        assert!(!text.contains(char::REPLACEMENT_CHARACTER), "{text}");
    }
    decoder.finish(&mut text);
    assert_eq!(text, "Café — naïve 你好 🦊! done");
    // Cut in the middle of the fox: what is left becomes U+FFFD at the end, as in one piece.
    let cut = &tokens[..tokens.len() - 4];
    assert_eq!(in_pieces(&model, cut), model.decode(cut));
}

#[test]
fn token_bytes_join_to_the_text() {
    let model = TextModel::load(&folders()[0]).unwrap();
    let text = "Café — naïve 你好 🦊!\n\tend";
    let bytes: Vec<u8> =
        model.encode(text, false).unwrap().into_iter().flat_map(|t| model.token_bytes(t)).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn pieces_join_to_what_decoding_at_once_gives(tokens in prop::collection::vec(0u32..2048, 0..60)) {
        let model = TextModel::load(&folders()[0]).unwrap();
        prop_assert_eq!(in_pieces(&model, &tokens), model.decode(&tokens));
    }
}

#[test]
fn broken_folders_name_the_file() {
    let error = TextModel::load(Path::new("/no/such/model")).unwrap_err().to_string();
    assert!(error.contains("/no/such/model"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(folders()[0].join("config.json"), dir.path().join("config.json")).unwrap();
    let error = TextModel::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: is missing"), "{error}");
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    let error = TextModel::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
}

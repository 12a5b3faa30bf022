//! Tokenizers, templates and incremental decoding, compared with golden values.
use proptest::prelude::*;

use super::super::detokenizer::IncrementalDecoder;
use super::super::template::{Conversation, RenderError};
use super::*;

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders = vec![root.join("models/demo")];
    for entry in std::fs::read_dir(root.join("tests/models")).unwrap() {
        let path = entry.unwrap().path();
        if path.join("golden.json").is_file() {
            folders.push(path);
        }
    }
    assert_eq!(folders.len(), 68);
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

/// Like Gemma's template: the system message becomes the beginning of the first turn.
#[test]
fn a_template_without_system_turns_takes_parts_and_wants_roles_to_alternate() {
    let [_, model] = of_bytes();
    assert_eq!(model.end_tokens, [1, 106]);
    let template = model.template.as_ref().unwrap();
    let say = |role: &str, content: Value| serde_json::json!({"role": role, "content": content});
    let text = |text: &str| serde_json::json!([{"type": "text", "text": text}]);
    let messages = vec![say("system", text("Be brief.")), say("user", text(" Hi "))];
    let rendered = template.render(&Conversation::new(messages)).unwrap();
    let want = "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n";
    assert_eq!(rendered, want);
    // One token each, and the beginning of the text is marked only once.
    let tokens = model.encode(&rendered, false).unwrap();
    assert_eq!(tokens[..2], [2, 105]);
    assert_eq!(tokens.iter().filter(|token| [2, 105, 106].contains(*token)).count(), 4);
    let messages = vec![say("user", "a".into()), say("user", "b".into())];
    let error = template.render(&Conversation::new(messages)).unwrap_err();
    assert!(matches!(&error, RenderError::Conversation(text) if text.contains("alternate")));
}

/// Fine-tuned models end turns with a token that their older files do not list.
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

/// Multimodal models have a separate file; a tokenizer's own template takes precedence.
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

/// The text model's sizes bound a request.
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

/// A tokenizer with more tokens than its model: ranks could not compute a text with one of them.
#[test]
fn a_token_that_the_model_lacks_is_named_and_is_part_of_no_prompt() {
    let load = |vocab: u32| {
        let config_overrides = ConfigOverrides::parse(&format!("{{\"vocab_size\": {vocab}}}"));
        let config_overrides = config_overrides.unwrap();
        TextModel::load_with(
            &folders()[0],
            &TextOptions { config_overrides, ..TextOptions::default() },
        )
    };
    let whole = TextModel::load(&folders()[0]).unwrap();
    assert_eq!(whole.lacks_tokens, None);
    let tokens = whole.encode("Once", true).unwrap();
    let (last, all) = (*tokens.iter().max().unwrap(), whole.tokenizer.get_vocab_size(true));
    // The last one that it has, and the first that it lacks.
    assert_eq!(load(last + 1).unwrap().encode("Once", true), Ok(tokens));
    let small = load(last).unwrap();
    let lacks = small.lacks_tokens.clone().unwrap();
    let count = all - last as usize;
    assert!(lacks.contains(&format!("{count} tokens")), "{lacks}");
    assert!(lacks.contains(&format!("from {last} (\"Once\")")), "{lacks}");
    let pair = small.encode_pair("a", "Once", true).map_err(|error| error.to_string());
    for refused in [small.encode("Once", false), small.encode_beginning("Once a", true, 2), pair] {
        let told = refused.unwrap_err();
        assert!(told.contains(&format!("token {last} (\"Once\")")), "{told}");
        assert!(told.contains(&format!("has {last} tokens")), "{told}");
    }
    assert!(small.encode("a b", true).is_ok(), "other texts are served");
}

/// As if the file had been edited; front ends must have the same.
#[test]
fn keys_laid_over_the_configuration_count_for_text_too() {
    let demo = &folders()[0];
    let load = |text: &str| {
        let config_overrides = ConfigOverrides::parse(text).unwrap();
        let options = TextOptions { config_overrides, ..TextOptions::default() };
        TextModel::load_with(demo, &options).map_err(|error| error.to_string())
    };
    let plain = load("{}").unwrap();
    assert_eq!(plain.fingerprint, TextModel::load(demo).unwrap().fingerprint);
    let yarn = r#"{"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1e4}}"#;
    let long = load(yarn).unwrap();
    assert_eq!((plain.max_positions, long.max_positions), (1024, 2048));
    assert_ne!(long.fingerprint, plain.fingerprint);
    let other = r#"{"rope_parameters":{"factor":2,"rope_theta":1e4,"rope_type":"yarn"}}"#;
    assert_eq!(load(other).unwrap().fingerprint, long.fingerprint, "only written in another way");
    let other = yarn.replace(": 2,", ": 3,");
    assert_ne!(load(&other).unwrap().fingerprint, long.fingerprint);
    let classes = r#"{"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}"#;
    assert_eq!(load(classes).unwrap().numbers(), 3);
    let error = load(r#"{"vocab_size": -1}"#).unwrap_err();
    assert!(error.contains("config.json: with --hf-overrides: key vocab_size must be"), "{error}");
    let error = load(r#"{"architectures": ["Mistral3ForConditionalGeneration"]}"#).unwrap_err();
    assert!(error.contains("with --hf-overrides: key text_config of Mistral3"), "{error}");
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

/// A byte-level BPE model, and a BPE model with byte fallback.
fn of_bytes() -> [TextModel; 2] {
    let gemma = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/models/gemma3");
    [folders()[0].clone(), gemma].map(|folder| TextModel::load(&folder).unwrap())
}

#[test]
fn no_half_character_is_ever_emitted() {
    for model in of_bytes() {
        let tokens = model.encode("Café — naïve  你好 🦊! done", false).unwrap();
        let mut decoder = IncrementalDecoder::new(model.tokenizer.clone());
        let mut text = String::new();
        for token in &tokens {
            decoder.push(*token, &mut text);
            assert!(!text.contains(char::REPLACEMENT_CHARACTER), "{text}");
        }
        decoder.finish(&mut text);
        assert_eq!(text, "Café — naïve  你好 🦊! done");
    }
    // Cut in the middle of the fox emoji: the rest becomes U+FFFD at the end, as when decoded at
    // once.
    let [model, _] = of_bytes();
    let tokens = model.encode("Café — naïve 你好 🦊! done", false).unwrap();
    let cut = &tokens[..tokens.len() - 4];
    assert_eq!(in_pieces(&model, cut), model.decode(cut));
}

/// When all tokens are decoded at once, one invalid byte invalidates its whole run of bytes;
/// decoded incrementally, the valid characters before it have been emitted already.
#[test]
fn bytes_that_are_no_character_lose_no_text() {
    let [_, model] = of_bytes();
    let byte = |byte: u8| model.tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap();
    let [b, e] = ["b", "e"].map(|text| model.tokenizer.token_to_id(text).unwrap());
    let tokens = [b, byte(0xc3), byte(0xa9), byte(0xe4), e, byte(0xc3), byte(0xa9), b];
    assert_eq!(in_pieces(&model, &tokens), "bé\u{fffd}eéb");
    assert_eq!(in_pieces(&model, &tokens[..4]), "bé\u{fffd}");
}

#[test]
fn token_bytes_join_to_the_text() {
    for model in of_bytes() {
        let text = "Café — naïve  你好 🦊!\n\tend";
        let tokens = model.encode(text, false).unwrap();
        let bytes: Vec<u8> = tokens.into_iter().flat_map(|t| model.token_bytes(t)).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
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

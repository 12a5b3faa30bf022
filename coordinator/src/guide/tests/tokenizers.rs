//! Tokens of different tokenizers.
use super::*;

/// Every text token adds exactly its bytes to the text, anywhere but at the beginning.
#[test]
fn tokens_bytes_are_what_the_tokenizer_makes_of_them() {
    for (model, anchor) in [
        (model("models/demo"), "a"),
        (model("tests/models/qwen2"), "a"),
        (sentencepiece_bpe(), "a"),
        (sentencepiece_that_keeps_spaces(), "a"),
    ] {
        let vocabulary = Vocabulary::new(&model).unwrap();
        let trie = vocabulary.trie();
        let anchor = (0..model.vocab_size).find(|id| trie.token(*id) == anchor.as_bytes()).unwrap();
        let mut compared = 0;
        for id in 0..model.vocab_size {
            let bytes = trie.token(id);
            if let Ok(text) = std::str::from_utf8(bytes)
                && !text.is_empty()
            {
                assert_eq!(model.decode(&[anchor, id, anchor]), format!("a{text}a"), "token {id}");
                compared += 1;
            } else if bytes.first() == Some(&0xff) && bytes.len() > 1 {
                assert_eq!(model.decode(&[anchor, id]), "a", "a special token is no text");
            }
        }
        assert!(compared > 100, "{compared}");
        // Bytes that form a character only together.
        for character in ["ß", "€", "😀"] {
            let ids: Option<Vec<u32>> = character
                .bytes()
                .map(|byte| (0..model.vocab_size).find(|id| trie.token(*id) == [byte]))
                .collect();
            assert_eq!(model.decode(&ids.unwrap()), character);
        }
        assert!((0..model.vocab_size).any(|id| trie.token(id).is_empty() || id < 4), "holes");
    }
}

#[test]
fn other_tokenizers_are_followed_as_well() {
    for model in [sentencepiece_bpe(), sentencepiece_that_keeps_spaces()] {
        for regex in ["[äß€😀]{1,3} ?a{1,2}", "a( [ab]){2}", "(x y|xy)+1", "b?  a"] {
            let oracle = Regex::new(&format!("^(?:{regex})$")).unwrap();
            let texts = texts(&model, &GuideSpec::Regex(regex.to_owned()), 60);
            assert!(texts.len() > 20, "{regex}: {texts:?}");
            for text in texts {
                assert!(oracle.is_match(&text), "{regex}: {text:?}");
            }
        }
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "array", "items": {"const": 1}, "maxItems": 2},
            "b": {"type": "string", "maxLength": 4}},
            "required": ["a", "b"], "additionalProperties": false});
        let texts = texts(&model, &json_spec(&schema), 200);
        assert!(texts.len() > 20);
        for text in texts {
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
            assert!(value["a"].is_array() && value["b"].is_string(), "{text}");
        }
    }
}

#[test]
fn a_space_that_would_be_left_out_is_not_asked_of_the_model() {
    let begins = |model: &TextModel, regex: &str| {
        let grammar = Guides::new(model).unwrap().compile(&GuideSpec::Regex(regex.to_owned()))?;
        // After other text nothing is left out.
        assert!(grammar.guide(true).unwrap().allowed().is_some());
        grammar.guide(false).map(|_| ())
    };
    let error = begins(&sentencepiece_bpe(), " a").unwrap_err();
    assert!(error.contains("no token of this model's vocabulary"), "{error}");
    assert_eq!(begins(&sentencepiece_that_keeps_spaces(), " a"), Ok(()));
    assert!(texts(&sentencepiece_bpe(), &GuideSpec::Regex(" ?a".into()), 9).contains(&"a".into()));
}

#[test]
fn tokenizers_whose_tokens_are_no_text_by_themselves_are_refused() {
    let words = ["a".to_owned(), "##b".to_owned(), "[UNK]".to_owned()];
    let tokenizer = json!({"normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": numbered(&words)}});
    let error = folder(&words, &tokenizer).guides().map(|_| ()).unwrap_err();
    assert!(error.contains("WordPiece"), "{error}");
}

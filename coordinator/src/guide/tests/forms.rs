//! Each kind of specification of the text.
use super::*;

#[test]
fn regular_expressions_match_as_a_whole() {
    let model = model("models/demo");
    for regex in [
        r"[a-c]{2,5}-\d{3}",
        r"(yes|no|maybe so)\.",
        r"^\w{2,9}@\w{1,8}\.(com|org)$",
        r"[äöü€😀]{1,4}x?",
        r"a\$",
        r"/path/(\w{1,4}/){1,3}",
    ] {
        let oracle = Regex::new(&format!("^(?:{regex})$")).unwrap();
        let texts = texts(&model, &GuideSpec::Regex(regex.to_owned()), 60);
        assert!(texts.len() > 20, "{regex}: {texts:?}");
        for text in texts {
            assert!(oracle.is_match(&text), "{regex}: {text:?}");
        }
    }
}

#[test]
fn a_choice_is_one_of_its_strings() {
    let strings = ["yes", "yes, but", "no \"quotes\" \\ / ", "tab\tline\nbreak", "❤️ <|end|>", "1"];
    let model = model("models/demo");
    let strings: Vec<String> = strings.into_iter().map(str::to_owned).collect();
    let texts = texts(&model, &GuideSpec::Choice(strings.clone()), 60);
    assert!(texts.iter().all(|text| strings.contains(text)), "{texts:?}");
    assert!(strings.iter().all(|string| texts.contains(string)), "{texts:?}");
}

#[test]
fn grammars_in_larks_notation_are_followed() {
    let grammar = "start: sum\nsum: NUMBER (\"+\" NUMBER)~1..3\nNUMBER: /[1-9][0-9]{0,2}/\n";
    let model = model("models/demo");
    let oracle = Regex::new(r"^[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}$").unwrap();
    let texts = texts(&model, &GuideSpec::Lark(grammar.to_owned()), 60);
    assert!(texts.len() > 20);
    assert!(texts.iter().all(|text| oracle.is_match(text)), "{texts:?}");
}

#[test]
fn grammars_in_ebnf_are_followed() {
    let model = model("models/demo");
    // The oracle is a regular expression where the grammar is one, else a parser of its own.
    let sum = "root ::= number (\"+\" number){1,3}\nnumber ::= [1-9] [0-9]{0,2}";
    let oracle = Regex::new(r"^[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}$").unwrap();
    let all = texts(&model, &GuideSpec::Lark(sum.to_owned()), 60);
    assert!(all.len() > 20 && all.iter().all(|text| oracle.is_match(text)), "{all:?}");

    let nested = "root ::= \"[\" ws (item (\",\" ws item)*)? \"]\"\nws ::= [ \\n]{0,2}\n\
                  item ::= (root | word | \"-\"? [0-9]{1,3}) ws | # nothing\n\
                  word ::= \"\\\"\" [^\"\\\\\\x00-\\x1F]{0,5} \"\\\"\"";
    let all = texts(&model, &GuideSpec::Lark(nested.to_owned()), 120);
    assert!(all.len() > 10, "{all:?}");
    assert!(all.iter().any(|text| text.matches('[').count() > 1), "{all:?}");
    for text in &all {
        assert_eq!(list(text), Some(""), "{text:?}");
    }
}

/// Reads a list of the grammar `nested` above; returns what is behind it.
fn list(text: &str) -> Option<&str> {
    let space = |text: &mut &str| {
        for _ in 0..2 {
            *text = text.strip_prefix([' ', '\n']).unwrap_or(text);
        }
    };
    let mut rest = text.strip_prefix('[')?;
    space(&mut rest);
    loop {
        if rest.starts_with('[') {
            rest = list(rest)?;
            space(&mut rest);
        } else if let Some(word) = rest.strip_prefix('"') {
            let (word, behind) = word.split_once('"')?;
            if word.chars().count() > 5 || word.contains(|c: char| c == '\\' || c < ' ') {
                return None;
            }
            rest = behind;
            space(&mut rest);
        } else if rest.starts_with(|c: char| c == '-' || c.is_ascii_digit()) {
            let digits = rest.strip_prefix('-').unwrap_or(rest);
            let count = digits.bytes().take_while(u8::is_ascii_digit).count();
            if !(1..=3).contains(&count) {
                return None;
            }
            rest = &digits[count..];
            space(&mut rest);
        }
        match rest.strip_prefix(',') {
            Some(behind) => {
                rest = behind;
                space(&mut rest);
            }
            None => return rest.strip_prefix(']'),
        }
    }
}

#[test]
fn json_is_what_its_schema_says_and_nothing_comes_behind_it() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["cat", "dog", null]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
            "at": {"$ref": "#/$defs/point"},
        },
        "required": ["name", "age", "kind", "tags", "at"],
        "additionalProperties": false,
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number", "minimum": -2.5, "maximum": 9}},
            "required": ["x"], "additionalProperties": false}},
    });
    let model = model("models/demo");
    let texts = texts(&model, &json_spec(&schema), 400);
    assert!(texts.len() > 20, "{}", texts.len());
    for text in texts {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let map = value.as_object().unwrap();
        assert_eq!(map.len(), 5, "{text}");
        assert!(value["name"].as_str().unwrap().chars().count() <= 6, "{text}");
        assert!(value["age"].as_u64().unwrap() <= 120, "{text}");
        assert!([json!("cat"), json!("dog"), json!(null)].contains(&value["kind"]), "{text}");
        let tags = value["tags"].as_array().unwrap();
        assert!((1..=3).contains(&tags.len()) && tags.iter().all(Value::is_boolean), "{text}");
        assert!(value["at"]["x"].is_number(), "{text}");
        assert!(text.ends_with('}') && text.starts_with('{'), "{text}");
    }
}

#[test]
fn a_number_goes_on_until_it_is_ended() {
    let model = model("models/demo");
    let texts = texts(&model, &json_spec(&json!({"type": "integer", "minimum": 100})), 400);
    assert!(texts.iter().any(|text| text.len() > 3), "{texts:?}");
    assert!(texts.iter().all(|text| text.parse::<f64>().unwrap() >= 100.0), "{texts:?}");
}

#[test]
fn whitespace_is_bounded_or_not_there() {
    let model = model("models/demo");
    let schema = json!({"type": "array", "items": {"const": 1}, "minItems": 4, "maxItems": 4});
    let (space, usual) = (Regex::new(r"\s+").unwrap(), Regex::new("^( |\n *|\n\t+)$").unwrap());
    for text in texts(&model, &json_spec(&schema), 400) {
        for found in space.find_iter(&text) {
            assert!(usual.is_match(found.as_str()), "{text:?}");
        }
    }
    let none = GuideSpec::Json { schema: schema.to_string(), whitespace: Whitespace::None };
    assert!(texts(&model, &none, 400).iter().all(|text| text == "[1,1,1,1]"));
    let pattern = Whitespace::Pattern(" ?".to_owned());
    let pattern = GuideSpec::Json { schema: schema.to_string(), whitespace: pattern };
    assert!(texts(&model, &pattern, 400).iter().all(|text| !text.contains("  ")));
}

#[test]
fn tokens_alone_are_a_mask_that_stays() {
    let model = model("models/demo");
    let grammar =
        Guides::new(&model).unwrap().compile(&GuideSpec::Tokens(vec![300, 9, 300])).unwrap();
    let mut guide = grammar.guide(false).unwrap();
    for token in [9, 300, 300, 9] {
        assert_eq!(known(&mut guide), &TokenMask::Only(vec![9, 300]));
        assert_eq!(guide.accept(token), Ok(Guided::GoesOn));
    }
    let Err(GuideEnd::Broke(why)) = guide.accept(10) else { panic!("ranks obey masks") };
    assert!(why.contains("not one of those allowed"), "{why}");
}

#[test]
fn what_cannot_be_a_grammar_is_refused_in_one_line() {
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let text =
        |text: &str| GuideSpec::Json { schema: text.to_owned(), whitespace: Whitespace::Usual };
    for (spec, what) in [
        (text("{"), "is not JSON"),
        (text("[1]"), "must be a JSON object"),
        (text(r#"{"x-guidance": {}}"#), "x-guidance"),
        (json_spec(&json!({"type": "wrong"})), "wrong"),
        (json_spec(&json!({"$ref": "#/$defs/none"})), "none"),
        (json_spec(&json!({"$ref": "http://127.0.0.1:1/none"})), "127.0.0.1"),
        (json_spec(&json!({"type": "integer", "minimum": 3, "maximum": 2})), "minimum"),
        (GuideSpec::Regex("(".to_owned()), "unclosed"),
        (GuideSpec::Regex("a\\b".to_owned()), ""),
        (GuideSpec::Lark("root ::= other".to_owned()), "there is no rule `other`"),
        (GuideSpec::Lark("start: other".to_owned()), "other"),
        (GuideSpec::Tokens(vec![model.vocab_size]), "vocabulary"),
        (GuideSpec::Choice(vec![]), "0 entries"),
    ] {
        let Err(error) = guides.compile(&spec) else { panic!("{spec:?} is taken") };
        println!("{error}");
        assert!(error.contains(what), "{spec:?}: {error}");
        assert!(!error.contains('\n') && error.len() < 2000, "{error}");
    }
    assert!(guides.compile(&GuideSpec::Regex("fine".to_owned())).is_ok(), "it has harmed nothing");
}

//! Guides over real vocabularies, followed at random and checked by independent oracles.
use std::path::Path;
use std::task::Poll;

use regex::Regex;
use serde_json::{Value, json};
use shared::protocol::{TokenMask, Whitespace};

use super::*;
use crate::engine::{GuideEnd, Guided, TokenGuide};
use crate::text::samples::{folder, numbered, sentencepiece_bpe, sentencepiece_that_keeps_spaces};

mod harmony;

fn model(folder: &str) -> TextModel {
    TextModel::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder)).unwrap()
}

fn json_spec(schema: &Value) -> GuideSpec {
    GuideSpec::Json { schema: schema.to_string(), whitespace: Whitespace::Usual }
}

/// Waits for the mask of the next tokens.
fn wait(guide: &mut Guide) -> Result<&TokenMask, GuideEnd> {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    loop {
        match guide.poll(&mut context) {
            Poll::Ready(Ok(())) => return Ok(guide.allowed().unwrap()),
            Poll::Ready(Err(error)) => return Err(error),
            // Parks for ever if nobody wakes the thread.
            Poll::Pending => std::thread::park(),
        }
    }
}

fn known(guide: &mut Guide) -> &TokenMask {
    wait(guide).unwrap()
}

/// Random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % n
    }
}

/// Takes allowed tokens at random until the text is complete. Returns the text; `None` if it is not
/// complete after `most` tokens.
fn follow(model: &TextModel, grammar: &Arc<Grammar>, seed: u64, most: usize) -> Option<String> {
    follow_behind("", model, grammar, seed, most)
}

/// As [`follow`], for a text that begins with `said`.
fn follow_behind(
    said: &str,
    model: &TextModel,
    grammar: &Arc<Grammar>,
    seed: u64,
    most: usize,
) -> Option<String> {
    tokens_behind(said, model, grammar, seed, most).map(|tokens| model.decode(&tokens))
}

/// As [`follow_behind`], but returns the tokens.
fn tokens_behind(
    said: &str,
    model: &TextModel,
    grammar: &Arc<Grammar>,
    seed: u64,
    most: usize,
) -> Option<Vec<u32>> {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut guide = grammar.guide(false).unwrap();
    let mut tokens = model.encode(said, false).unwrap();
    for token in &tokens {
        known(&mut guide);
        assert_eq!(guide.accept(*token), Ok(Guided::GoesOn), "{said:?}");
    }
    while tokens.len() < most {
        let allowed: Vec<u32> =
            (0..model.vocab_size).filter(|token| known(&mut guide).allows(*token)).collect();
        let token = allowed[dice.below(allowed.len())];
        if model.end_tokens.contains(&token) {
            return Some(tokens);
        }
        tokens.push(token);
        if guide.accept(token).unwrap() == Guided::IsOver {
            return Some(tokens);
        }
    }
    None
}

fn texts(model: &TextModel, spec: &GuideSpec, most: usize) -> Vec<String> {
    let grammar = Guides::new(model).unwrap().make(spec).unwrap();
    (0..40).filter_map(|seed| follow(model, &grammar, seed, most)).collect()
}

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
    let grammar = Guides::new(&model).unwrap().make(&GuideSpec::Tokens(vec![300, 9, 300])).unwrap();
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
        (GuideSpec::Lark("root ::= \"a\"".to_owned()), "EBNF"),
        (GuideSpec::Lark("start: other".to_owned()), "other"),
        (GuideSpec::Tokens(vec![model.vocab_size]), "vocabulary"),
        (GuideSpec::Choice(vec![]), "0 entries"),
    ] {
        let Err(error) = guides.make(&spec) else { panic!("{spec:?} is taken") };
        println!("{error}");
        assert!(error.contains(what), "{spec:?}: {error}");
        assert!(!error.contains('\n') && error.len() < 2000, "{error}");
    }
    assert!(guides.make(&GuideSpec::Regex("fine".to_owned())).is_ok(), "it has harmed nothing");
}

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
        let grammar = Guides::new(model).unwrap().make(&GuideSpec::Regex(regex.to_owned()))?;
        // After other text nothing is left out.
        assert!(grammar.guide(true).unwrap().allowed().is_some());
        grammar.guide(false).map(|_| ())
    };
    let error = begins(&sentencepiece_bpe(), " a").unwrap_err();
    assert!(error.contains("no token of this model's vocabulary"), "{error}");
    assert_eq!(begins(&sentencepiece_that_keeps_spaces(), " a"), Ok(()));
    assert!(texts(&sentencepiece_bpe(), &GuideSpec::Regex(" ?a".into()), 9).contains(&"a".into()));
}

/// A discriminated `Union[Cat, Dog]` inside a model, as pydantic writes it.
#[test]
fn tagged_unions_are_followed() {
    let animal = |kind: &str, name: &str, schema: Value| {
        json!({"properties": {"kind": {"const": kind, "title": "Kind", "type": "string"}, name: schema},
            "required": ["kind", name], "title": kind, "type": "object"})
    };
    let schema = json!({
        "$defs": {
            "Cat": animal("cat", "lives", json!({"type": "integer", "minimum": 1, "maximum": 9})),
            "Dog": animal("dog", "tame", json!({"type": "boolean"})),
        },
        "properties": {"pet": {
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "title": "Pet"}},
        "required": ["pet"], "title": "Owner", "type": "object"});
    let texts = texts(&model("models/demo"), &json_spec(&schema), 400);
    let mut seen = [0, 0];
    for text in texts {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let (owner, pet) = (value.as_object().unwrap(), value["pet"].as_object().unwrap());
        // No other properties: the schema does not mention any.
        assert_eq!((owner.len(), pet.len()), (1, 2), "{text}");
        match pet["kind"].as_str().unwrap() {
            "cat" => assert!((1..=9).contains(&pet["lives"].as_u64().unwrap()), "{text}"),
            _ => assert!(pet["tame"].is_boolean(), "{text}"),
        }
        seen[usize::from(pet["kind"] == "dog")] += 1;
    }
    assert!(seen[0] > 5 && seen[1] > 5, "{seen:?}");
}

#[test]
fn objects_have_other_properties_where_the_schema_lets_them() {
    let schema = |open: Option<bool>| {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "null"}}});
        if let Some(open) = open {
            schema["additionalProperties"] = open.into();
        }
        json_spec(&schema)
    };
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let takes = |open, text: &str| {
        let mut guide = guides.make(&schema(open)).unwrap().guide(false).unwrap();
        let tokens = model.encode(text, false).unwrap();
        tokens.iter().all(|token| known(&mut guide).allows(*token) && guide.accept(*token).is_ok())
    };
    for (open, others) in [(None, false), (Some(false), false), (Some(true), true)] {
        assert!(takes(open, "{\"a\":null}"), "{open:?}");
        assert_eq!(takes(open, "{\"b\":null}"), others, "{open:?}");
    }
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

fn chain(rules: usize, rule: impl Fn(usize) -> String) -> String {
    (0..rules).map(rule).collect()
}

/// Grammars that are unreasonably expensive: each is rejected, or works, or ends with an error.
/// None may end the process, and no token may take long.
#[test]
fn hostile_grammars_cost_what_is_bounded() {
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let schema = |schema: String| GuideSpec::Json { schema, whitespace: Whitespace::Usual };
    let refs = |rules: usize| {
        let defs = chain(rules, |i| format!(r##""d{i}":{{"$ref":"#/$defs/d{}"}},"##, i + 1));
        schema(format!(
            r##"{{"$ref":"#/$defs/d0","$defs":{{{defs}"d{rules}":{{"type":"null"}}}}}}"##
        ))
    };
    let doubled = chain(20, |i| {
        format!(
            r##""d{i}":{{"allOf":[{{"$ref":"#/$defs/d{0}"}},{{"$ref":"#/$defs/d{0}"}}]}},"##,
            i + 1
        )
    });
    let optional = chain(2000, |i| format!(r#""p{i}":{{"type":"integer"}},"#));
    let nested = |open: &str, close: &str| {
        format!("start: {}\"a\"{}", open.repeat(30_000), close.repeat(30_000))
    };
    let specs = [
        GuideSpec::Regex("(".repeat(8000) + "a" + &")".repeat(8000)),
        GuideSpec::Regex("a".repeat(16_000)),
        GuideSpec::Regex("a?".repeat(2000) + &"a".repeat(2000)),
        GuideSpec::Regex("((a{1,100}){1,100}b){1,100}".to_owned()),
        GuideSpec::Regex("(.*a.{20}){5}".to_owned()),
        GuideSpec::Regex(r"\p{L}{1,1000}\w{1,1000}".to_owned()),
        GuideSpec::Lark(nested("(", ")")),
        GuideSpec::Lark(nested("[", "]")),
        // Recursion as deep as the limit on bytes allows.
        GuideSpec::Lark(chain(4500, |i| format!("r{i}:r{}\n", i + 1)) + "r4500:\"a\"\nstart:r0\n"),
        GuideSpec::Lark(chain(4500, |i| format!("R{i}:R{}\n", i + 1)) + "R4500:\"a\"\nstart:R0\n"),
        GuideSpec::Lark("start: start start | \"a\" | ".to_owned()),
        GuideSpec::Lark("start: (((\"a\"~1..1000)~1..1000)~1..1000)\n".to_owned()),
        refs(5000),
        schema(format!(
            r##"{{"$ref":"#/$defs/d0","$defs":{{{doubled}"d20":{{"type":"object"}}}}}}"##
        )),
        schema(r#"{"type":"string","maxLength":1000000}"#.to_owned()),
        schema(r#"{"type":"array","items":{"type":"string"},"minItems":100000}"#.to_owned()),
        schema(format!(r#"{{"type":"object","properties":{{{optional}"z":{{}}}}}}"#)),
        schema(r#"{"type":"integer","multipleOf":9973}"#.to_owned()),
        schema(format!("{}{{}}{}", r#"{"type":"array","items":"#.repeat(120), "}".repeat(120))),
    ];
    let mut followed = 0;
    for spec in specs {
        spec.check().unwrap();
        let name: String = format!("{spec:?}").chars().take(60).collect();
        let grammar = match guides.make(&spec) {
            Ok(grammar) => grammar,
            Err(error) => {
                assert!(error.len() < 2000 && !error.contains('\n'), "{error}");
                assert!(!error.contains("panic"), "{error}");
                continue;
            }
        };
        let (mut guide, mut dice) = (grammar.guide(false).unwrap(), Dice(7));
        for _ in 0..50 {
            let Ok(allowed) = wait(&mut guide) else { break };
            let text = |token: &u32| allowed.allows(*token) && !model.end_tokens.contains(token);
            let allowed: Vec<u32> = (0..model.vocab_size).filter(text).collect();
            let Some(token) = allowed.get(dice.below(allowed.len().max(1))) else { break };
            let start = Instant::now();
            let went = guide.accept(*token);
            // A hundred times what it takes on an idle machine.
            assert!(start.elapsed().as_secs() < 3, "{name}: {:?}", start.elapsed());
            match went {
                Ok(Guided::GoesOn) => {}
                Ok(Guided::IsOver) => break,
                Err(GuideEnd::Broke(error)) => panic!("{name}: {error}"),
                Err(GuideEnd::Refused(error)) => {
                    assert!(error.len() < 2000 && !error.contains('\n'), "{error}");
                    break;
                }
            }
        }
        followed += 1;
    }
    assert!(followed >= 10, "{followed}");
}

/// Schemas whose parts are compared in pairs or multiplied are rejected quickly, also inside a
/// grammar. Without the bounds these take minutes, or most of a gigabyte.
#[test]
fn dear_schemas_are_refused_before_they_are_compiled() {
    let guides = Guides::new(&model("models/demo")).unwrap();
    let patterns = chain(800, |i| format!(r#""^a{i}[bc]*d.{{3}}$":{{}},"#));
    let patterns = format!(r#"{{"type":"object","patternProperties":{{{patterns}"z":{{}}}}}}"#);
    let objects = vec![json!({"type": "object", "properties": {"x": {}}}); 400];
    let many: serde_json::Map<_, _> = (0..1500).map(|i| (format!("p{i}"), json!({}))).collect();
    let merged = json!({"allOf": [{"anyOf": objects}, {"properties": many}]}).to_string();
    for (schema, what) in [(patterns, "801 entries of `patternProperties`"), (merged, "400 alt")] {
        let within = GuideSpec::Lark(format!("start: \"a\" body\nbody: %json {schema}\n"));
        for spec in [GuideSpec::Json { schema, whitespace: Whitespace::Usual }, within] {
            let start = Instant::now();
            let error = guides.make(&spec).unwrap_err();
            assert!(error.contains(what), "{error}");
            assert!(start.elapsed() < Duration::from_secs(5));
        }
    }
}

/// Forced tool calls, in every format: the reader finds calls whose arguments match the schemas.
#[test]
fn calls_that_must_be_made_are_read_as_such() {
    use crate::text::reply::grammar::{self, Function};
    use crate::text::reply::{CallFormat, Part, ReplyReader, ReplyRules};

    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "S\u{e3}o \"P\""]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["city"],
        "additionalProperties": false});
    let functions = [
        Function {
            name: "weather".to_owned(),
            parameters: schema.as_object().cloned(),
            strict: true,
        },
        Function {
            name: "a\"b".to_owned(),
            // Unknown keywords are ignored, and so is what no grammar can express.
            parameters: json!({"additionalProperties": false, "uniqueItems": true, "properties":
                {"city": {"type": "string", "pattern": "^(?!x)a", "format": "binary"}}})
            .as_object()
            .cloned(),
            strict: false,
        },
    ];
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    // Harmony, the last format, has grammars of whole messages.
    for (format, several, begins) in CallFormat::ALL.into_iter().take(4).flat_map(|format| {
        [(format, true, None), (format, false, Some(true)), (format, true, Some(false))]
    }) {
        let rules = grammar::calls("calls", format, &functions, several, &|_| None);
        let text = match begins {
            None => grammar::whole("calls", &rules),
            Some(is_open) => grammar::reasoned("calls", &rules, is_open, &|_| None),
        };
        let made = guides.make(&GuideSpec::Made(text)).unwrap();
        // Forced calls of Qwen3-Coder are written in the form of Hermes.
        let read = if format == CallFormat::Qwen3Coder { CallFormat::Hermes } else { format };
        let rules = Arc::new(ReplyRules {
            calls: Some(read),
            reasoning: begins.is_some(),
            begins_reasoning: begins == Some(true),
            ..ReplyRules::default()
        });
        let (mut names, mut most) = (Vec::new(), 0);
        for seed in 0..40 {
            let said = match begins {
                None => "",
                Some(true) => "Well, <tool_call>, no.\n</think>\n\n",
                Some(false) if seed % 2 == 0 => "",
                Some(false) => "<think>\nYes</think>",
            };
            let text = follow_behind(said, &model, &made, seed, 300);
            let Some(text) = text else { continue };
            let mut reader = ReplyReader::new(rules.clone());
            let mut parts = Vec::new();
            reader.push(&text, &mut parts);
            reader.finish(&mut parts);
            let mut arguments = Vec::new();
            for part in parts {
                match part {
                    Part::Call { name, .. } => {
                        names.push(name);
                        arguments.push(String::new());
                    }
                    Part::Arguments { text, .. } => arguments.last_mut().unwrap().push_str(&text),
                    Part::Content(said) => panic!("{format:?}: {said:?} of {text:?}"),
                    Part::Reasoning(_) => assert!(begins.is_some(), "{text:?}"),
                    Part::End => panic!("{text:?}"),
                }
            }
            assert!(!arguments.is_empty() && (several || arguments.len() == 1), "{text:?}");
            most = most.max(arguments.len());
            for text in arguments {
                let value: Value =
                    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
                assert!(
                    value
                        .as_object()
                        .unwrap()
                        .keys()
                        .all(|key| ["city", "days"].contains(&key.as_str()))
                );
            }
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names, ["a\"b", "weather"], "{format:?} {begins:?}");
        assert!(!several || most > 1, "{format:?}");
    }
}

/// A call begins with special tokens where the vocabulary has them for its marks.
#[test]
fn marks_are_tokens_where_there_are_some() {
    use crate::text::reply::CallFormat;
    use crate::text::reply::grammar::{self, Function};

    let model = model("models/demo");
    let token = model.special_token("<|user|>").unwrap();
    let special = |text: &str| ["<tool_call>", "[TOOL_CALLS]"].contains(&text).then_some(token);
    let functions = [Function { name: "f".to_owned(), parameters: None, strict: false }];
    let guides = Guides::new(&model).unwrap();
    for format in [CallFormat::Hermes, CallFormat::Mistral] {
        let rules = grammar::calls("calls", format, &functions, true, &special);
        let made = guides.make(&GuideSpec::Made(grammar::whole("calls", &rules))).unwrap();
        assert_eq!(
            known(&mut made.guide(false).unwrap()),
            &TokenMask::Only(vec![token]),
            "{format:?}"
        );
    }
    // Also for the end of reasoning: any text may precede that token.
    let special = |text: &str| (text == "</think>").then_some(token);
    let rules = grammar::choice("answer", &["yes".to_owned()]);
    let text = grammar::reasoned("answer", &rules, true, &special);
    let made = guides.make(&GuideSpec::Made(text)).unwrap();
    let mut guide = made.guide(false).unwrap();
    for token in model.encode("Well </think> ", false).unwrap() {
        let _ = known(&mut guide);
        assert_eq!(guide.accept(token), Ok(Guided::GoesOn));
    }
    assert!(known(&mut guide).allows(token));
    assert_eq!(guide.accept(token), Ok(Guided::GoesOn));
    assert!(!known(&mut guide).allows(token), "the answer is next");
}

/// Regular expressions and strings keep their meaning as rules within larger grammars.
#[test]
fn what_is_asked_for_may_come_behind_reasoning_or_beside_calls() {
    use crate::text::reply::grammar;

    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let strings = ["a ::= \"b\"", "c\\d\ne", "f/g"].map(str::to_owned);
    for (rules, oracle) in [
        (grammar::regex("answer", r"a/b\/c\d\\{1,2}"), r"^a/b/c\d\\{1,2}$".to_owned()),
        (
            grammar::choice("answer", &strings),
            format!("^({})$", strings.each_ref().map(|it| regex::escape(it)).join("|")),
        ),
    ] {
        let oracle = Regex::new(&oracle).unwrap();
        let text = grammar::reasoned("answer", &rules, true, &|_| None);
        let made = guides.make(&GuideSpec::Made(text)).unwrap();
        let said = "No.</think>";
        let texts: Vec<String> = (0..20)
            .filter_map(|seed| follow_behind(said, &model, &made, seed, 80))
            .map(|text| text.strip_prefix(said).unwrap().trim_start_matches('\n').to_owned())
            .collect();
        assert!(texts.len() > 10, "{texts:?}");
        assert!(texts.iter().all(|text| oracle.is_match(text)), "{oracle}: {texts:?}");
    }
}

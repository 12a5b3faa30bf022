//! Guides over real vocabularies, followed at random, against oracles that know nothing of them.
use std::path::Path;

use regex::Regex;
use serde_json::{Value, json};
use shared::protocol::Whitespace;

use super::*;
use crate::engine::{Guided, TokenGuide};

fn model(folder: &str) -> TextModel {
    TextModel::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder)).unwrap()
}

fn json_spec(schema: &Value) -> GuideSpec {
    GuideSpec::Json { schema: schema.to_string(), whitespace: Whitespace::Usual }
}

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % n
    }
}

/// Takes allowed tokens at random until the text is over; the text, or none after so many tokens.
fn follow(model: &TextModel, grammar: &Arc<Grammar>, seed: u64, most: usize) -> Option<String> {
    follow_behind("", model, grammar, seed, most)
}

/// As [`follow`], of a text that begins so.
fn follow_behind(
    said: &str,
    model: &TextModel,
    grammar: &Arc<Grammar>,
    seed: u64,
    most: usize,
) -> Option<String> {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut guide = grammar.guide();
    let mut tokens = model.encode(said, false).unwrap();
    for token in &tokens {
        assert_eq!(guide.accept(*token), Ok(Guided::GoesOn), "{said:?}");
    }
    while tokens.len() < most {
        let allowed: Vec<u32> =
            (0..model.vocab_size).filter(|token| guide.allowed().allows(*token)).collect();
        let token = allowed[dice.below(allowed.len())];
        if model.end_tokens.contains(&token) {
            return Some(model.decode(&tokens));
        }
        tokens.push(token);
        if guide.accept(token).unwrap() == Guided::IsOver {
            return Some(model.decode(&tokens));
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
    let space = Regex::new(r"\s+").unwrap();
    for text in texts(&model, &json_spec(&schema), 400) {
        for found in space.find_iter(&text) {
            assert!(Regex::new("^( |\n *|\n\t+)$").unwrap().is_match(found.as_str()), "{text:?}");
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
    let mut guide = grammar.guide();
    for token in [9, 300, 300, 9] {
        assert_eq!(guide.allowed(), &shared::protocol::TokenMask::Only(vec![9, 300]));
        assert_eq!(guide.accept(token), Ok(Guided::GoesOn));
    }
    assert!(guide.accept(10).unwrap_err().contains("not one of those allowed"));
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

#[test]
fn hostile() {
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let text = |text: String| GuideSpec::Json { schema: text, whitespace: Whitespace::Usual };
    let n = 120;
    let chain = |n: usize| {
        let defs: Vec<String> =
            (0..n).map(|i| format!("\"d{i}\":{{\"$ref\":\"#/$defs/d{}\"}}", i + 1)).collect();
        format!(
            "{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{},\"d{n}\":{{\"type\":\"null\"}}}}}}",
            defs.join(",")
        )
    };
    let allof = |n: usize| {
        let defs: Vec<String> = (0..n)
            .map(|i| format!("\"d{i}\":{{\"allOf\":[{{\"$ref\":\"#/$defs/d{}\"}}]}}", i + 1))
            .collect();
        format!(
            "{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{},\"d{n}\":{{\"type\":\"null\"}}}}}}",
            defs.join(",")
        )
    };
    let arrays = |n: usize| {
        format!(
            "{}{{\"type\":\"null\"}}{}",
            "{\"type\":\"array\",\"items\":".repeat(n),
            "}".repeat(n)
        )
    };
    let double = |n: usize| {
        let defs: Vec<String> = (0..n).map(|i| format!("\"d{i}\":{{\"allOf\":[{{\"$ref\":\"#/$defs/d{0}\"}},{{\"$ref\":\"#/$defs/d{0}\"}}]}}", i + 1)).collect();
        format!(
            "{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{},\"d{n}\":{{\"type\":\"object\",\"properties\":{{\"a\":{{\"type\":\"null\"}}}}}}}}}}",
            defs.join(",")
        )
    };
    let which = std::env::var("W").unwrap_or_default();
    for (name, spec) in [
        ("rx parens", GuideSpec::Regex("(".repeat(60000) + "a" + &")".repeat(60000))),
        ("rx parens 200", GuideSpec::Regex("(".repeat(200) + "a" + &")".repeat(200))),
        ("rx alt", GuideSpec::Regex("(a|".repeat(20000) + "a" + &")".repeat(20000))),
        ("rx long", GuideSpec::Regex("a".repeat(250000))),
        ("rx opt", GuideSpec::Regex("a?".repeat(5000) + &"a".repeat(5000))),
        ("rx rep", GuideSpec::Regex("((a{1,100}){1,100}b){1,100}".into())),
        ("rx rep2", GuideSpec::Regex("(.*a.{20}){5}".into())),
        ("rx rep3", GuideSpec::Regex("(a|b)*a(a|b){18}".into())),
        ("rx dots", GuideSpec::Regex(".{0,1000}x.{0,1000}y.{0,1000}".into())),
        ("rx class", GuideSpec::Regex(r"\p{L}{1,1000}\w{1,1000}".into())),
        ("lark parens", GuideSpec::Lark(format!("start: {}\"a\"{}", "(".repeat(100000), ")".repeat(100000)))),
        ("lark brackets", GuideSpec::Lark(format!("start: {}\"a\"{}", "[".repeat(100000), "]".repeat(100000)))),
        ("lark term", GuideSpec::Lark(format!("start: A\nA: {}\"a\"{}", "(".repeat(100000), ")".repeat(100000)))),
        ("lark chain", GuideSpec::Lark((0..8000).map(|i| format!("r{i}: r{}\n", i+1)).collect::<String>() + "r8000: \"a\"\nstart: r0\n")),
        ("lark tchain", GuideSpec::Lark((0..8000).map(|i| format!("R{i}: R{}\n", i+1)).collect::<String>() + "R8000: \"a\"\nstart: R0\n")),
        ("lark leftrec", GuideSpec::Lark("start: start start | \"a\" | ".into())),
        ("lark amb", GuideSpec::Lark("start: s\ns: s s s | s s | \"a\" | \"aa\"\n".into())),
        ("lark rep", GuideSpec::Lark("start: (((\"a\"~1..1000)~1..1000)~1..1000)\n".into())),
        ("choice many", GuideSpec::Choice((0..4096).map(|i| format!("{i} {}", "x".repeat(50))).collect())),
        ("json str nest", text(arrays(n))),
        ("json chain", text(chain(3000))),
        ("json allof", text(allof(3000))),
        ("json double", text(double(20))),
        ("json maxlen", text("{\"type\":\"string\",\"maxLength\":1000000}".into())),
        ("json minlen", text("{\"type\":\"string\",\"minLength\":100000}".into())),
        ("json maxitems", text("{\"type\":\"array\",\"items\":{\"type\":\"string\",\"minLength\":100},\"minItems\":100000}".into())),
        ("json opt", text(format!("{{\"type\":\"object\",\"properties\":{{{}}}}}", (0..3000).map(|i| format!("\"p{i}\":{{\"type\":\"integer\"}}")).collect::<Vec<_>>().join(",")))),
        ("json mult", text("{\"type\":\"integer\",\"multipleOf\":9973}".into())),
        ("json pattern", text("{\"type\":\"string\",\"pattern\":\"^(a|b)*a(a|b){18}$\"}".into())),
    ] {
        if !name.contains(&which) { continue; }
        let start = std::time::Instant::now();
        eprintln!("{name} ...");
        match guides.make(&spec) {
            Err(error) => eprintln!("  refused {:?}: {error}", start.elapsed()),
            Ok(grammar) => {
                eprint!("  made {:?}", start.elapsed());
                let mut worst = std::time::Duration::ZERO;
                let mut guide = grammar.guide();
                let mut dice = Dice(7);
                let mut n = 0;
                let mut first = std::time::Duration::ZERO;
                let mut end = String::new();
                while n < 60 {
                    let allowed: Vec<u32> = (7..model.vocab_size).filter(|token| guide.allowed().allows(*token)).collect();
                    if allowed.is_empty() { break; }
                    let token = allowed[dice.below(allowed.len())];
                    let start = std::time::Instant::now();
                    let went = guide.accept(token);
                    if n == 0 { first = start.elapsed(); } else { worst = worst.max(start.elapsed()); }
                    n += 1;
                    if went != Ok(Guided::GoesOn) { end = format!("{went:?}"); break; }
                }
                eprintln!("  {n} tokens, first {first:?} worst {worst:?} {end}");
            }
        }
    }
}

/// Tools that must be called are, in every form, and what is read of the text is what they take.
#[test]
fn calls_that_must_be_made_are_read_as_such() {
    use crate::text::reply::grammar::{self, Function};
    use crate::text::reply::{CallFormat, Part, ReplyReader, ReplyRules};

    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "S\u{e3}o \"P\""]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["city"],
        "additionalProperties": false});
    let functions = [
        Function { name: "weather".to_owned(), parameters: schema.as_object().cloned() },
        Function {
            name: "a\"b".to_owned(),
            parameters: json!({"additionalProperties": false}).as_object().cloned(),
        },
    ];
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    for (format, several, begins) in CallFormat::ALL.into_iter().flat_map(|format| {
        [(format, true, None), (format, false, Some(true)), (format, true, Some(false))]
    }) {
        let body = grammar::calls(format, &functions, several, |_| None);
        let text = match begins {
            None => grammar::whole(&body),
            Some(is_open) => grammar::reasoned(&body, is_open),
        };
        let made = guides.make(&GuideSpec::Lark(text)).unwrap();
        // Forced calls of Qwen3-Coder are written as Hermes'.
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

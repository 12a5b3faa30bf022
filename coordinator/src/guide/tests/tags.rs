//! Structural tags: which texts they allow.
use super::*;
use crate::http::structural_tag;
use crate::text::reply::grammar;

struct Tags {
    model: TextModel,
    grammar: Arc<Grammar>,
}

fn rules(model: &TextModel, tag: &Value) -> Result<String, String> {
    let tag = tag.as_object().unwrap();
    let special = |mark: &str| model.special_token(mark);
    let rules = structural_tag::rules("response_format", tag, &special);
    rules.map_err(|error| error.to_string())
}

impl Tags {
    fn new(tag: &Value) -> Self {
        let model = model("models/demo");
        let rules = rules(&model, tag).unwrap();
        let spec = GuideSpec::Made(grammar::whole(structural_tag::ROOT, &rules));
        let grammar = Guides::new(&model).unwrap().compile(&spec);
        let grammar = grammar.unwrap_or_else(|error| panic!("{error:?}: {rules}"));
        Self { model, grammar }
    }

    fn format(format: &Value) -> Self {
        Self::new(&json!({"type": "structural_tag", "format": format}))
    }

    /// Whether a whole output can be this text.
    fn takes(&self, text: &str) -> bool {
        let mut guide = self.grammar.guide(false).unwrap();
        for token in self.model.encode(text, false).unwrap() {
            if !known(&mut guide).allows(token) {
                return false;
            }
            match guide.accept(token) {
                Ok(Guided::GoesOn) => {}
                Ok(Guided::IsOver) => return true,
                Err(_) => return false,
            }
        }
        let mask = known(&mut guide);
        self.model.end_tokens.iter().any(|token| mask.allows(*token))
    }

    fn check(&self, takes: &[&str], refuses: &[&str]) {
        for text in takes {
            assert!(self.takes(text), "{text:?}");
        }
        for text in refuses {
            assert!(!self.takes(text), "{text:?}");
        }
    }
}

fn schema(name: &str, kind: &str) -> Value {
    json!({"type": "object", "properties": {name: {"type": kind}}, "required": [name]})
}

fn two_functions() -> [Value; 2] {
    [("f", "integer"), ("go", "boolean")].map(|(name, kind)| {
        let content = json!({"type": "json_schema", "json_schema": schema("x", kind)});
        json!({"type": "tag", "begin": format!("<function={name}>"), "content": content,
            "end": "</function>"})
    })
}

const CALLS: [&str; 2] =
    [r#"<function=f>{"x": 12}</function>"#, r#"<function=go>{"x": true}</function>"#];

#[test]
fn text_is_free_until_a_trigger_comes_and_behind_the_tag() {
    let [f, go] = CALLS;
    let older = json!({"type": "structural_tag", "triggers": ["<function="], "structures": [
        {"begin": "<function=f>", "schema": schema("x", "integer"), "end": "</function>"},
        {"begin": "<function=go>", "schema": schema("x", "boolean").to_string(),
         "end": "</function>"}]});
    let format = json!({"type": "triggered_tags", "triggers": ["<function="],
        "tags": two_functions()});
    for tags in [Tags::new(&older), Tags::format(&format)] {
        let takes = [
            "",
            "No call, but a < and a <func.",
            f,
            go,
            &format!("{f}{go}"),
            &format!("Well,\n{f} and\n\n{go}, done."),
        ];
        let refuses = [
            "<function=other>{}</function>",
            r#"Well, <function=f>{"x": true}</function>"#,
            r#"<function=f>{"x": 1}"#,
            r#"<function=go>{"x": 1}</function>"#,
            &format!("{f}, then <function=f>"),
        ];
        tags.check(&takes, &refuses);
    }
}

#[test]
fn a_tag_can_be_forced_and_be_the_last() {
    let [f, go] = CALLS;
    let of = |at_least_one: bool, stops: bool| {
        Tags::format(&json!({"type": "triggered_tags", "triggers": ["<function="],
            "tags": two_functions(), "at_least_one": at_least_one, "stop_after_first": stops}))
    };
    let (both, between) = (format!("{f}{go}"), format!("a{f}b{go}c"));
    of(true, false).check(&[f, &both, &format!("{f}b{go}c")], &["", "a", &between]);
    of(true, true).check(&[f, go], &["", "a", &format!("a{f}")]);
    of(false, true).check(&["", "a", f, &format!("a{go}")], &[]);
}

#[test]
fn tags_can_be_a_list_with_a_separator() {
    let [f, go] = CALLS;
    let of = |at_least_one: bool, stops: bool| {
        Tags::format(&json!({"type": "tags_with_separator", "separator": ", ",
            "tags": two_functions(), "at_least_one": at_least_one, "stop_after_first": stops}))
    };
    let (two, glued) = (format!("{f}, {go}"), format!("{f}{go}"));
    of(false, false).check(&["", f, &two, &format!("{two}, {f}")], &["a", &glued, "a, "]);
    of(true, false).check(&[go, &two], &["", "x"]);
    of(true, true).check(&[go, f], &["", "x"]);
}

#[test]
fn parts_come_one_after_the_other_or_one_of_them() {
    let thought = json!({"type": "tag", "begin": "<think>", "content": {"type": "any_text"},
        "end": "</think>"});
    let answer = json!({"type": "or", "elements": [
        {"type": "const_string", "value": "I do not know."},
        {"type": "regex", "pattern": "^[0-9]{1,3} (km|mi)$"},
        {"type": "json_schema", "json_schema": schema("far", "integer")}]});
    let tags = Tags::format(&json!({"type": "sequence", "elements": [thought, answer]}));
    let takes = [
        "<think>How far?\n<x></think>I do not know.",
        "<think></think>12 km",
        r#"<think>!</think>{"far": 3}"#,
    ];
    tags.check(&takes, &["12 km", "<think>a</think>12", "<think>a</think>b", "<think>a", ""]);
    let free = json!({"type": "sequence", "elements": [
        {"type": "const_string", "value": "So: "}, {"type": "any_text"}]});
    Tags::format(&free).check(&["So: ", "So: whatever <function=f>"], &["", "whatever"]);
}

/// Marks that are special tokens are these tokens, whatever is around them, and no text.
#[test]
fn marks_within_strings_are_tokens() {
    let call = json!({"begin": "<|user|>call[<|system|>", "end": "<|assistant|>",
        "content": {"type": "regex", "pattern": "[a-z]{1,9}"}});
    let noted = json!({"begin": "<|user|>note ", "end": "<|system|>",
        "content": {"type": "any_text"}});
    let tags = Tags::format(&json!({"type": "triggered_tags", "triggers": ["<|user|>"],
        "tags": [call, noted]}));
    let takes = [
        "a < b <|user|>call[<|system|>abc<|assistant|> and <|user|>note that.<|system|>",
        "<|user|>note <|system|><|user|>note <|system|>",
    ];
    let refuses =
        ["a <|user|>call[abc<|assistant|>", "<|user|>other", "<|user|>note no end", "<|system|>"];
    tags.check(&takes, &refuses);
}

#[test]
fn what_cannot_be_a_tag_is_refused_by_name() {
    let model = model("models/demo");
    let says = |tag: &Value, words: &[&str]| {
        let error = rules(&model, tag).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{tag}: {error}");
    };
    let format = |format: &Value| json!({"format": format});
    says(&json!({}), &["`format` or `structures`"]);
    says(&format(&json!({"type": "no"})), &["`format`", "\"no\""]);
    says(&format(&json!({"type": "grammar", "grammar": "root ::= \"a\""})), &["not supported"]);
    says(&format(&json!({"type": "const_string"})), &["format.value", "not a string"]);
    let text = json!({"type": "any_text"});
    says(&format(&json!({"type": "sequence", "elements": [text, text]})), &["elements[0]"]);
    says(&format(&json!({"type": "any_text", "excluded_str": ["a"]})), &["excluded_str"]);
    says(&format(&json!({"type": "json_schema", "json_schema": 5})), &["format.json_schema"]);
    let tag = json!({"begin": "<a>", "content": text, "end": "</a>"});
    let triggered = |triggers: Value| {
        format(&json!({"type": "triggered_tags", "triggers": triggers, "tags": [tag]}))
    };
    says(&triggered(json!(["<b"])), &["tags[0].begin", "exactly one trigger"]);
    says(&triggered(json!(["<", "<a"])), &["tags[0].begin", "exactly one trigger"]);
    says(&triggered(json!([])), &["format.triggers"]);
    says(&triggered(json!([""])), &["format.triggers"]);
    says(&triggered(json!(["a<|end|>"])), &["tags[0].begin"]);
    says(&json!({"structures": [{"begin": "<a>"}], "triggers": ["<"]}), &["structures[0].schema"]);
    let mut deep = json!({"type": "const_string", "value": "a"});
    for _ in 0..20 {
        deep = json!({"type": "sequence", "elements": [deep]});
    }
    says(&format(&deep), &["16 parts deep"]);
    // Tags are written once each, however deep they are.
    let nested = |levels: u32| {
        let mut nested = json!({"type": "const_string", "value": "a"});
        for _ in 0..levels {
            let tag = json!({"begin": "(", "content": nested, "end": ")"});
            nested = json!({"type": "triggered_tags", "triggers": ["("], "tags": [tag],
                "at_least_one": true, "stop_after_first": true});
        }
        rules(&model, &format(&nested)).unwrap().len()
    };
    assert!(nested(8) - nested(7) <= nested(3) - nested(2) + 10);
}

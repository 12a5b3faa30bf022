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
    let rules = structural_tag::rules(("response_format", ""), tag, &special);
    rules.map_err(|error| error.to_string())
}

/// The grammar of whole outputs.
fn whole(rules: &str) -> String {
    grammar::whole(structural_tag::ROOT, &(rules.to_owned() + &structural_tag::terminals(None)))
}

impl Tags {
    fn new(tag: &Value) -> Self {
        let rules = rules(&model("models/demo"), tag).unwrap();
        Self::of(whole(&rules))
    }

    fn of(text: String) -> Self {
        let model = model("models/demo");
        let grammar = Guides::new(&model).unwrap().compile(&GuideSpec::Made(text.clone()));
        let grammar = grammar.unwrap_or_else(|error| panic!("{error:?}: {text}"));
        Self { model, grammar }
    }

    fn format(format: &Value) -> Self {
        Self::new(&json!({"type": "structural_tag", "format": format}))
    }

    /// Whether a whole output can be this text.
    fn takes(&self, text: &str) -> bool {
        let mut guide = self.grammar.guide(false).unwrap();
        let mut tokens = self.model.encode(text, false).unwrap().into_iter();
        while let Some(token) = tokens.next() {
            if !known(&mut guide).allows(token) {
                return false;
            }
            match guide.accept(token) {
                Ok(Guided::GoesOn) => {}
                Ok(Guided::IsOver) => return tokens.next().is_none(),
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
    let behind = format!("{f}b");
    of(true, true).check(&[f, go], &["", "a", &format!("a{f}"), &both, &behind]);
    of(false, true).check(&["", "a", f, &format!("a{go}")], &[&both, &behind, &between]);
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
    of(true, true).check(&[go, f], &["", "x", &two]);
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

/// What a part matches it never gives back: an end belongs to what it ends.
#[test]
fn expressions_end_where_their_end_first_comes() {
    let quote = |pattern: &str| {
        let content = json!({"type": "regex", "pattern": pattern});
        Tags::format(&json!({"type": "tag", "begin": "<q>", "content": content, "end": "</q>"}))
    };
    quote(".*").check(&["<q>a < b</q>", "<q></q>"], &["<q>a", "<q>a</q>b"]);
    quote("^[0-9]+$").check(&["<q>12</q>"], &["<q>a</q>", "<q></q>"]);
}

/// Strings are never more than strings, and expressions end where they end.
#[test]
fn clients_add_no_rules() {
    for text in ["\"\nst1: \"x\"", "a\\", "/ | st_root", "\u{7f}\u{0}\u{2028}", "<[5]>", "ä<€[ü>"]
    {
        let part = json!({"type": "const_string", "value": text});
        Tags::format(&part).check(&[text], &["x", ""]);
        let tag = json!({"begin": "", "content": part, "end": ""});
        let all = json!({"type": "tags_with_separator", "separator": "", "tags": [tag]});
        Tags::format(&all).check(&["", text, &format!("{text}{text}")], &["x"]);
    }
    let open = json!({"type": "regex", "pattern": "a\\"});
    let error = rules(&model("models/demo"), &json!({"format": open})).unwrap_err();
    assert!(error.contains("format.pattern") && error.contains("within an escape"), "{error}");
    let parts = ["a\\\\", "[/\n#]", "b\\/"].map(|it| json!({"type": "regex", "pattern": it}));
    let all = Tags::format(&json!({"type": "sequence", "elements": parts}));
    all.check(&["a\\/b/", "a\\#b/"], &["a\\", "ab/"]);
}

/// What the model reasons is not held to anything, whether its marks are tokens or text.
#[test]
fn reasoning_comes_before_it() {
    let tag = json!({"format": {"type": "triggered_tags", "triggers": ["<function="],
        "tags": two_functions(), "stop_after_first": true}});
    let rules = rules(&model("models/demo"), &tag).unwrap();
    let [f, go] = CALLS;
    for is_open in [true, false] {
        let unless = (!is_open).then_some("<think>");
        let rules = format!(
            "answer: {}\n{rules}{}",
            structural_tag::ROOT,
            structural_tag::terminals(unless)
        );
        let marks = crate::text::reply::ThinkMarks::THINK;
        let tags = Tags::of(grammar::reasoned("answer", &rules, marks, is_open, &|_| None));
        let open = if is_open { "" } else { "<think>" };
        let takes = [
            format!("{open}A <function= or {f}, so</think>hi"),
            format!("{open}{go}</think>\n\nWell, {f}"),
        ];
        let refuses =
            [format!("{open}a"), format!("{open}{f}"), format!("{open}</think><function=")];
        tags.check(&takes.each_ref().map(String::as_str), &refuses.each_ref().map(String::as_str));
        if !is_open {
            tags.check(&["hi", &format!("<thin {f}")], &[]);
        }
    }
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
    let marked = |begin: &str, triggers: &[&str]| {
        let tag = json!({"begin": begin, "content": text, "end": "x"});
        format(&json!({"type": "triggered_tags", "triggers": triggers, "tags": [tag]}))
    };
    says(&marked("a<|user|>", &["b", "a<|user|>"]), &["format.triggers[1]", "special token"]);
    says(&marked("<|user|>a", &["<|use"]), &["tags[0].begin", "name all of it"]);
    let ended = json!({"type": "tag", "begin": "", "content": text, "end": "a<|user|>"});
    says(&format(&ended), &["format.end", "special token"]);
    says(&json!({"format": text, "at_least_one": true}), &["`at_least_one`", "not supported"]);
    let more = json!({"type": "const_string", "value": "a", "max_tokens": 5});
    says(&format(&more), &["`format.max_tokens`", "not supported"]);
    let many = vec!["a"; 513];
    says(&triggered(json!(many)), &["format.triggers", "513 entries"]);
    says(
        &json!({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["b"]}),
        &["`structures[0].begin`"],
    );
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

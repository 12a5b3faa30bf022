//! Forced calls and answers in harmony: the grammar constrains the message in question, never the
//! reasoning before it.
use super::*;
use crate::text::reply::grammar::{self, Function};
use crate::text::reply::harmony::grammar as messages;
use crate::text::reply::harmony::{FENCE, Harmony, Opening};
use crate::text::reply::{CallFormat, Part, ReplyReader, ReplyRules};
use crate::text::samples::harmony;
use crate::text::stream::{StopRules, TextStream};

const PROMPT: &str = "<|start|>user<|message|>Hi<|end|><|start|>assistant";
const THOUGHT: &str =
    "<|channel|>analysis<|message|>Say {\"a\": 1} or no?<|end|><|start|>assistant";

/// The grammar of replies to a prompt that ends in `opening`.
struct Held {
    model: TextModel,
    grammar: Arc<Grammar>,
    opening: Opening,
}

impl Held {
    fn new(prompt: &str, last: &str, body: Option<&str>, rules: &str) -> Self {
        let model = harmony();
        let special = |text: &str| model.special_token(text);
        let opening = Opening::after(prompt);
        let rules = messages::answer("message", "answer", &special) + rules;
        let text = messages::whole(&opening, last, body, &rules, &special);
        let grammar = model.guides().unwrap().compile(&GuideSpec::Made(text)).unwrap();
        Self { model, grammar, opening }
    }

    /// The parts of random replies that begin with `begin`.
    fn said(&self, begin: &str) -> Vec<Vec<Part>> {
        let rules = Arc::new(ReplyRules {
            calls: Some(CallFormat::Harmony),
            harmony: Some(Harmony { fenced: true, opening: self.opening.clone() }),
            ..ReplyRules::default()
        });
        let fenced = Some(self.model.special_tokens().clone());
        let stops = Arc::new(StopRules { keep_special: true, fenced, ..StopRules::default() });
        let replies = (0..20).filter_map(|seed| {
            let tokens = tokens_behind(begin, &self.model, &self.grammar, seed, 150)?;
            let mut stream = TextStream::new(self.model.tokenizer.clone(), stops.clone());
            let (mut reader, mut parts) = (ReplyReader::new(rules.clone()), Vec::new());
            for token in tokens {
                let mut text = String::new();
                stream.push_token(token, &mut text);
                reader.push(&text, &mut parts);
            }
            let mut text = String::new();
            stream.finish(&mut text);
            reader.push(&text, &mut parts);
            reader.finish(&mut parts);
            Some(parts)
        });
        let replies: Vec<Vec<Part>> = replies.collect();
        assert!(replies.len() > 5, "{begin}: {replies:?}");
        replies
    }

    /// Whether a reply may begin with `begin`.
    fn takes(&self, begin: &str) -> bool {
        let mut guide = self.grammar.guide(false).unwrap();
        self.model.encode(begin, false).unwrap().into_iter().all(|token| {
            let allowed = known(&mut guide).allows(token);
            allowed && guide.accept(token).is_ok()
        })
    }
}

fn content(parts: &[Part]) -> String {
    let parts = parts.iter().filter_map(|part| match part {
        Part::Content(text) => Some(text.as_str()),
        _ => None,
    });
    parts.collect()
}

fn thought(parts: &[Part]) -> String {
    let parts = parts.iter().filter_map(|part| match part {
        Part::Reasoning(text) => Some(text.as_str()),
        _ => None,
    });
    parts.collect()
}

/// The calls: (name, arguments) each.
fn calls(parts: &[Part]) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for part in parts {
        match part {
            Part::Call { name, .. } => calls.push((name.clone(), String::new())),
            Part::Arguments { text, .. } => calls.last_mut().unwrap().1.push_str(text),
            _ => {}
        }
    }
    calls
}

#[test]
fn an_answer_is_held_to_its_form_behind_what_is_thought() {
    let rules = grammar::choice("answer", &["yes".to_owned(), "no <|end|>".to_owned()]);
    let held = Held::new(PROMPT, "message", Some("answer"), &rules);
    let channel = held.model.special_token("<|channel|>").unwrap();
    let mut guide = held.grammar.guide(false).unwrap();
    assert_eq!(known(&mut guide), &TokenMask::Only(vec![channel]));
    let is_answer = |text: String| ["yes", "no <|end|>"].contains(&text.as_str());
    for before in ["", THOUGHT, &THOUGHT.repeat(3)] {
        for header in ["", "<|constrain|>json", " <|constrain|>json"] {
            let begin = format!("{before}<|channel|>final{header}<|message|>");
            let replies = held.said(&begin);
            assert!(replies.iter().all(|parts| is_answer(content(parts))), "{replies:?}");
            let is_thought =
                |parts: &Vec<Part>| thought(parts).contains("or no?") != before.is_empty();
            assert!(replies.iter().all(is_thought), "{replies:?}");
        }
        assert!(!held.takes(&format!("{before}yes")));
        assert!(!held.takes(&format!("{before}<|channel|>commentary")));
        assert!(!held.takes(&format!("{before} to=functions.f<|channel|>")));
        assert!(!held.takes(&format!("{before}<|channel|>final<|message|>maybe")));
    }
    assert!(!held.takes(&THOUGHT.replace("<|start|>assistant", "<|start|>user")));
}

#[test]
fn an_answer_that_the_prompt_has_begun_is_the_rest_of_it() {
    let rules = grammar::choice("answer", &["yes".to_owned()]);
    let within = Held::new(
        &format!("{PROMPT}<|channel|>final<|message|>"),
        "message",
        Some("answer"),
        &rules,
    );
    assert!(within.takes("yes") && !within.takes("<|channel|>"));
    let thinks = Held::new(
        &format!("{PROMPT}<|channel|>analysis<|message|>So"),
        "message",
        Some("answer"),
        &rules,
    );
    assert!(thinks.takes("yes, no<|end|><|start|>assistant<|channel|>final<|message|>yes"));
    assert!(!thinks.takes("no<|end|><|start|>assistant<|channel|>final<|message|>no"));
    let before = Held::new("<|start|>user<|message|>Hi<|end|>", "message", Some("answer"), &rules);
    assert!(before.takes("<|start|>assistant<|channel|>final<|message|>yes"));
    assert!(!before.takes("<|channel|>final<|message|>yes"));
}

#[test]
fn calls_are_held_to_their_schemas_in_both_forms_of_a_header() {
    let parameters = json!({"properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["n"]});
    let function = |name: &str| Function {
        name: name.to_owned(),
        parameters: parameters.as_object().cloned(),
        strict: true,
    };
    let functions = [function("f"), function("g_2")];
    let model = harmony();
    let rules = messages::calls("calls", &functions, &|text| model.special_token(text));
    let held = Held::new(PROMPT, "calls", None, &format!("{rules}answer: \"x\"\n"));
    let both =
        Held::new(PROMPT, "calls | message", Some("answer"), &format!("{rules}answer: \"x\"\n"));
    for header in [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
    ] {
        for begin in [header.to_owned(), format!("{THOUGHT}{header}")] {
            for held in [&held, &both] {
                for parts in held.said(&begin) {
                    let [(name, arguments)] = &calls(&parts)[..] else { panic!("{parts:?}") };
                    let arguments: Value = serde_json::from_str(arguments).unwrap();
                    assert!((1..=99).contains(&arguments["n"].as_i64().unwrap()), "{parts:?}");
                    assert_eq!((name.as_str(), content(&parts)), ("f", String::new()));
                }
            }
        }
    }
    assert!(held.takes("<|channel|>commentary to=functions.g_2"));
    assert!(!held.takes("<|channel|>commentary to=functions.h"));
    assert!(!held.takes("<|channel|>final") && both.takes("<|channel|>final<|message|>x"));
    assert!(!both.takes("<|channel|>final<|message|>y"));
}

/// Text that merely spells a mark is read as text, even when it comes from tokens.
#[test]
fn spelled_marks_are_no_tokens() {
    let model = harmony();
    let ends = ["<|return|>", "<|call|>"].map(|it| model.special_token(it).unwrap());
    assert_eq!(model.harmony_ends, ends);
    let mut tokens = model.encode("<|channel|>final<|message|>é", false).unwrap();
    // Character by character, which no tokenizer would do.
    tokens.extend("<|end|>".chars().flat_map(|c| model.encode(&c.to_string(), false).unwrap()));
    let fenced = Some(model.special_tokens().clone());
    let rules = Arc::new(StopRules { keep_special: true, fenced, ..StopRules::default() });
    let mut stream = TextStream::new(model.tokenizer.clone(), rules);
    let mut text = String::new();
    // A fence character from the model itself is never treated as a fence.
    let spelled = format!("{FENCE}<|call|>");
    tokens.extend(spelled.chars().flat_map(|c| model.encode(&c.to_string(), false).unwrap()));
    tokens.extend(model.encode(&format!("{FENCE}a<|end|>b{FENCE}"), false).unwrap());
    let stops = tokens.into_iter().any(|token| stream.push_token(token, &mut text));
    assert!(!stops);
    stream.finish(&mut text);
    let begin = format!("{FENCE}<|channel|>{FENCE}final{FENCE}<|message|>{FENCE}é<|end|>");
    let rest = ["\u{fffd}<|call|>\u{fffd}a", "<|end|>", "b\u{fffd}"].join(&FENCE.to_string());
    assert_eq!(text, begin + &rest);
}

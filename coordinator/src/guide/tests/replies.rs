//! Tool calls, marks and reasoning around the constrained text.
use super::*;
use crate::text::reply::ThinkMarks;

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
    // Harmony has grammars of whole messages; others are written in the form of another format.
    let is_own = |it: &CallFormat| *it != CallFormat::Harmony && it.forced() == *it;
    for (format, several, begins) in CallFormat::ALL.into_iter().filter(is_own).flat_map(|format| {
        [(format, true, None), (format, false, Some(true)), (format, true, Some(false))]
    }) {
        let rules = grammar::calls("calls", format, &functions, several, &|_| None);
        let text = match begins {
            None => grammar::whole("calls", &rules),
            Some(is_open) => {
                grammar::reasoned("calls", &rules, ThinkMarks::THINK, is_open, &|_| None)
            }
        };
        let made = guides.compile(&GuideSpec::Made(text)).unwrap();
        let rules = Arc::new(ReplyRules {
            calls: Some(format),
            reasoning: begins.map(|_| ThinkMarks::THINK),
            begins_reasoning: begins == Some(true),
            ..ReplyRules::default()
        });
        let (mut names, mut most) = (Vec::new(), 0);
        for seed in 0..40 {
            // Enough, once all that is asked for has come.
            let all = ["a\"b", "weather"].iter().all(|name| names.iter().any(|it| it == name));
            if seed >= 8 && all && (!several || most > 1) {
                break;
            }
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
        let made = guides.compile(&GuideSpec::Made(grammar::whole("calls", &rules))).unwrap();
        assert_eq!(
            known(&mut made.guide(false).unwrap()),
            &TokenMask::Only(vec![token]),
            "{format:?}"
        );
    }
    // Also for the end of reasoning: any text may precede that token.
    let special = |text: &str| (text == "</think>").then_some(token);
    let rules = grammar::choice("answer", &["yes".to_owned()]);
    let text = grammar::reasoned("answer", &rules, ThinkMarks::THINK, true, &special);
    let made = guides.compile(&GuideSpec::Made(text)).unwrap();
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
        let text = grammar::reasoned("answer", &rules, ThinkMarks::THINK, true, &|_| None);
        let made = guides.compile(&GuideSpec::Made(text)).unwrap();
        let said = "No.</think>";
        let texts: Vec<String> = (0..20)
            .filter_map(|seed| follow_behind(said, &model, &made, seed, 80))
            .map(|text| text.strip_prefix(said).unwrap().trim_start_matches('\n').to_owned())
            .collect();
        assert!(texts.len() > 10, "{texts:?}");
        assert!(texts.iter().all(|text| oracle.is_match(text)), "{oracle}: {texts:?}");
    }
}

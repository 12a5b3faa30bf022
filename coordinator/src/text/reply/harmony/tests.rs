//! Harmony replies: as gpt-oss writes them, with its typical errors, and in pieces.
use proptest::prelude::*;

use super::super::{CallFormat, ReplyReader};
use super::*;

/// The rules of replies to `prompt`.
fn rules(prompt: &str, fenced: bool) -> ReplyRules {
    let harmony = Harmony { fenced, opening: Opening::after(prompt) };
    ReplyRules { calls: Some(CallFormat::Harmony), harmony: Some(harmony), ..ReplyRules::default() }
}

const PROMPT: &str = "<|start|>user<|message|>Hi<|end|><|start|>assistant";

/// The text with its marks turned into special tokens.
fn with_fences(text: &str) -> String {
    let mut text = text.to_owned();
    for mark in MARKS {
        text = text.replace(mark, &format!("{FENCE}{mark}{FENCE}"));
    }
    text
}

/// Parses a reply in pieces of the given numbers of characters; merges adjacent parts of one kind.
fn read_in(rules: &ReplyRules, text: &str, pieces: impl Iterator<Item = usize>) -> Vec<Part> {
    let mut reader = ReplyReader::new(Arc::new(rules.clone()));
    let (mut parts, mut rest) = (Vec::new(), text);
    for length in pieces {
        let end = rest.char_indices().nth(length).map_or(rest.len(), |(at, _)| at);
        reader.push(&rest[..end], &mut parts);
        rest = &rest[end..];
    }
    reader.push(rest, &mut parts);
    reader.finish(&mut parts);
    let mut joined: Vec<Part> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(Part::Content(text)), Part::Content(more))
            | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
            (Some(Part::Arguments { index, text }), Part::Arguments { index: of, text: more })
                if *index == of =>
            {
                text.push_str(&more);
            }
            (_, part) => joined.push(part),
        }
    }
    joined
}

/// Parses a reply: whole and in pieces, as tokens and as text; all must agree.
fn read(rules_of: &ReplyRules, text: &str) -> Vec<Part> {
    let mut said = None;
    for fenced in [false, true] {
        let mut rules = rules_of.clone();
        rules.harmony.as_mut().unwrap().fenced = fenced;
        let text = if fenced { with_fences(text) } else { text.to_owned() };
        for length in [usize::MAX, 1, 2, 3, 5, 7, 13] {
            let parts = read_in(&rules, &text, std::iter::repeat_n(length, text.len()));
            let said = said.get_or_insert_with(|| parts.clone());
            assert_eq!(said, &parts, "{text:?} in pieces of {length}");
        }
    }
    said.unwrap()
}

/// In one line: `r:` reasoning, `c:` content, `f(` a call `)`, `|` the end of a message.
fn line(parts: &[Part]) -> String {
    let mut line = String::new();
    for part in parts {
        line += &match part {
            Part::Reasoning(text) => format!("r:{text}"),
            Part::Content(text) => format!("c:{text}"),
            Part::Call { index, name } => format!("{index}{name}"),
            Part::Arguments { text, .. } => format!("({text})"),
            Part::End => "|".to_owned(),
        };
    }
    line
}

fn said(text: &str) -> String {
    line(&read(&rules(PROMPT, false), text))
}

#[test]
fn channels_are_reasoning_answer_and_calls() {
    for (reply, expected) in [
        (
            "<|channel|>analysis<|message|>Simple.\n<|end|><|start|>assistant<|channel|>final\
             <|message|> 2 + 2 = 4. <|return|>",
            "r:Simple.\n|c: 2 + 2 = 4. |",
        ),
        // The last mark ends the sequence and does not appear in the text.
        ("<|channel|>final<|message|>4", "c:4"),
        (
            "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.get_weather <|constrain|>json<|message|>{\"location\": \"Rome\"}<|call|>",
            "r:Need it.|0get_weather({\"location\": \"Rome\"})",
        ),
        // A preamble for the user.
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.f<|constrain|>json<|message|>{}",
            "c:I look.|0f({})",
        ),
        // As its chat template writes calls.
        (
            " to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}<|call|>",
            "0f({\"a\": 1})",
        ),
        (
            "<|channel|>analysis to=functions.f code<|message|>\n {}<|call|><|start|>assistant \
             to=functions.g<|channel|>commentary <|constrain|>json<|message|>[1]<|call|>",
            "0f({})1g([1])",
        ),
        // It omits the prefix of function names; its own tools are not functions.
        ("<|channel|>commentary to=f <|constrain|>json<|message|>{}", "0f({})"),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "r:1 + 1|"),
        ("<|channel|>commentary to=browser.search<|message|>x<|call|>", "r:x|"),
        ("<|channel|>commentary to=functions.<|message|>x", "r:x"),
        ("<|channel|>commentary to=user<|message|>x", "c:x"),
        // A call without arguments gets an empty object.
        ("<|channel|>commentary to=functions.f json<|message|> <|call|>", "0f({})"),
        ("<|channel|>commentary to=functions.f json<|message|>", "0f({})"),
        ("", ""),
    ] {
        assert_eq!(said(reply), expected, "{reply}");
    }
}

#[test]
fn what_is_cut_or_wrong_loses_no_text_and_shows_no_mark() {
    for (reply, expected) in [
        // Cut off at any place.
        ("<|channel|>analysis<|message|>Let me s", "r:Let me s"),
        ("<|channel|>anal", ""),
        ("<|channel|>commentary to=functions.f <|constrain|>js", ""),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a", "0f({\"a)"),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assis", "r:x|"),
        (" to=func", ""),
        // No header at all: the answer.
        ("Hello there.", "c:Hello there."),
        ("{\"a\": [1]}", "c:{\"a\": [1]}"),
        ("final answer", "c:final answer"),
        (" the end", "c: the end"),
        ("x <|channel|>final<|message|>y", "c:x |c:y"),
        // A part of the header is missing.
        ("analysis<|message|>a<|end|><|start|>assistantfinal<|message|>b", "r:a|c:b"),
        ("<|message|>a<|return|>", "c:a|"),
        ("<|channel|><|message|>a", "c:a"),
        ("<|channel|>thoughts<|message|>a", "c:a"),
        ("<|channel|>analysis We need", "r: We need"),
        ("<|channel|>finalHello", "c:Hello"),
        ("<|channel|>We need to say", "c:We need to say"),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json{\"a\": 1}<|call|>",
            "0f({\"a\": 1})",
        ),
        ("<|channel|>commentary to=functions.f json {\"a\": 1}<|call|>", "0f({\"a\": 1})"),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "r:a|c:b"),
        (
            "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
            "r:a|c:b",
        ),
        ("<|channel|>analysis<|channel|>final<|message|>b", "c:b"),
        ("<|channel|>analysis<|message|>a<|end|>b<|end|> \n<|end|>", "r:a|c:b|"),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", "c:abc"),
        ("<|channel|>analysis<|end|>a", "c:a"),
        ("<|start|>assistant<|start|>Hello you<|end|>", "c:Hello you|"),
        ("<|start|><|start|>Hello<|end|><|constrain|>Bye", "c:Hello|c:Bye"),
        // The model invents what others say; that counts as text, but a tool's words are not the
        // answer.
        ("<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>", "c:a|c:b|"),
        ("<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>", "r:{}|"),
        // Not marks.
        (
            "<|channel|>final<|message|>a <| b |> <|end <|tool|> <|mess",
            "c:a <| b |> <|end <|tool|> <|mess",
        ),
    ] {
        assert_eq!(said(reply), expected, "{reply}");
    }
    let long = "word ".repeat(200);
    assert_eq!(said(&format!("<|channel|>analysis {long}")), format!("r: {long}"));
    assert_eq!(said(&format!("<|channel|>é{long}<|message|>x")), format!("c:é{long}x"));
}

#[test]
fn text_that_spells_a_mark_is_text_where_marks_are_tokens() {
    let rules = rules(PROMPT, true);
    let spelled = "A message ends with <|end|>, <|start|>assistant begins one.";
    let reply = format!("{}{spelled}", with_fences("<|channel|>final<|message|>"));
    assert_eq!(line(&read_in(&rules, &reply, std::iter::repeat_n(1, 500))), format!("c:{spelled}"));
    // Special tokens without a meaning are dropped; a lone fence is an ordinary character.
    let reply = format!("a{FENCE}<|reserved|>{FENCE}b{FENCE}");
    assert_eq!(line(&read_in(&rules, &reply, std::iter::repeat_n(1, 500))), "c:ab");
    let far = format!("a{FENCE}{}{}", "b".repeat(200), with_fences("<|end|>"));
    for length in [1, 100, 1000] {
        let parts = read_in(&rules, &far, std::iter::repeat_n(length, 500));
        assert_eq!(line(&parts), format!("c:a{FENCE}{}|", "b".repeat(200)), "{length}");
    }
}

#[test]
fn a_reply_begins_where_its_prompt_ends() {
    let message = "<|channel|>final<|message|>";
    for (prompt, reply, expected, to_answer) in [
        (PROMPT, "<|channel|>analysis<|message|>a", "r:a", message),
        (
            "<|start|>assistant<|channel|>final<|message|>Once upon",
            " a time<|return|>",
            "c: a time|",
            "",
        ),
        (
            "<|start|>assistant<|channel|>analysis<|message|>So ",
            "it is<|end|><|start|>assistant<|channel|>final<|message|>b",
            "r:it is|c:b",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        (
            "<|start|>user<|message|>Hi<|end|>",
            "<|start|>assistant<|channel|>analysis<|message|>a",
            "r:a",
            "<|start|>assistant<|channel|>final<|message|>",
        ),
        ("Hi", "a", "c:a", "<|start|>assistant<|channel|>final<|message|>"),
        ("<|start|>assistant<|channel|>", "analysis<|message|>a", "r:a", message),
    ] {
        assert_eq!(line(&read(&rules(prompt, false), reply)), expected, "{prompt}");
        assert_eq!(Opening::after(prompt).to_answer(), to_answer, "{prompt}");
        let opened = Opening::after(&format!("{prompt}{}", Opening::after(prompt).to_answer()));
        assert!(
            matches!(opened.0, State::Body(MessageBody { of: MessageKind::Content, .. }))
                || prompt.ends_with('>')
        );
    }
}

#[test]
fn calls_that_nobody_asked_for_are_text() {
    let mut rules = rules(PROMPT, false);
    rules.calls = None;
    let reply =
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>";
    assert_eq!(line(&read(&rules, reply)), "c:{\"a\": 1}|");
    rules.calls = Some(CallFormat::Harmony);
    rules.single_call = true;
    let two = format!("{reply}<|start|>assistant{reply}");
    assert_eq!(line(&read(&rules, &two)), "0f({\"a\": 1})");
}

#[test]
fn what_is_reasoning_is_known_while_it_comes() {
    let mut reader = ReplyReader::new(Arc::new(rules(PROMPT, false)));
    let mut reasons = Vec::new();
    for piece in ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>assistant"] {
        reader.push(piece, &mut Vec::new());
        reasons.push(reader.reasons());
    }
    assert_eq!(reasons, [false, false, true, true, false, false]);
}

/// The cost of a reply is linear in its length.
#[test]
fn long_messages_are_read_in_one_go() {
    let mut reader = ReplyReader::new(Arc::new(rules(PROMPT, true)));
    let (mut parts, began) = (Vec::new(), std::time::Instant::now());
    reader.push(&with_fences("<|channel|>final<|message|>"), &mut parts);
    (0..200_000).for_each(|_| reader.push("word ", &mut parts));
    reader.finish(&mut parts);
    assert_eq!(parts.len(), 200_000);
    assert!(began.elapsed().as_secs() < 10, "{:?}", began.elapsed());
}

/// A message as written, and the parts it stands for.
fn message() -> impl Strategy<Value = (String, Vec<Part>)> {
    let text = "[a-z {}\"\\n<|>é]{1,12}x";
    prop_oneof![
        (prop::sample::select(vec!["analysis", "commentary", "final"]), text).prop_map(
            |(channel, text)| {
                let said = match channel {
                    "analysis" => Part::Reasoning(text.clone()),
                    _ => Part::Content(text.clone()),
                };
                let written = format!("<|channel|>{channel}<|message|>{text}<|end|>");
                (written, vec![said, Part::End])
            }
        ),
        ("[a-z_]{1,8}", "[a-z{}\":é]{1,12}", 0..4).prop_map(|(name, text, form)| {
            let header = match form {
                0 => format!("<|channel|>commentary to=functions.{name} <|constrain|>json"),
                1 => format!(" to=functions.{name}<|channel|>commentary <|constrain|>json"),
                2 => format!("<|channel|>analysis to=functions.{name} json"),
                _ => format!(" to=functions.{name}<|channel|>commentary"),
            };
            let call = Part::Call { index: 0, name };
            let said = vec![call, Part::Arguments { index: 0, text: text.clone() }];
            (format!("{header}<|message|>{text}<|call|>"), said)
        }),
    ]
}

/// Marks and words in any order.
fn any_reply() -> impl Strategy<Value = String> {
    let mut pieces = MARKS.to_vec();
    pieces.extend([
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        "json",
        "assistant",
        " zebra ",
        "{}",
        " ",
        "\n",
        "é",
        "<|",
        "|>",
        "<",
    ]);
    prop::collection::vec(prop::sample::select(pieces), 0..16).prop_map(|it| it.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    /// Well-formed messages are parsed as intended, however they are split.
    #[test]
    fn messages_say_what_is_in_them(
        messages in prop::collection::vec(message(), 0..6),
        cuts in prop::collection::vec(1usize..9, 0..40),
        fenced in any::<bool>(),
    ) {
        let written: Vec<String> = messages.iter().map(|(written, _)| written.clone()).collect();
        let mut text = written.join("<|start|>assistant");
        let (mut expected, mut calls) = (Vec::new(), 0);
        for part in messages.into_iter().flat_map(|(_, said)| said) {
            expected.push(match part {
                Part::Call { name, .. } => { calls += 1; Part::Call { index: calls - 1, name } }
                Part::Arguments { text, .. } => Part::Arguments { index: calls - 1, text },
                part => part,
            });
        }
        if fenced {
            text = with_fences(&text);
        }
        prop_assert_eq!(read_in(&rules(PROMPT, fenced), &text, cuts.into_iter()), expected);
    }

    /// Splitting a reply makes no difference; no mark is shown and no message's text is lost.
    #[test]
    fn nothing_is_lost_or_shown(
        text in any_reply(),
        cuts in prop::collection::vec(1usize..30, 0..40),
        fenced in any::<bool>(),
        prompt in prop::sample::select(vec![PROMPT, "", "<|start|>assistant<|channel|>final<|message|>"]),
    ) {
        let rules = rules(prompt, fenced);
        let written = if fenced { with_fences(&text) } else { text.clone() };
        let whole = read_in(&rules, &written, std::iter::empty());
        prop_assert_eq!(&read_in(&rules, &written, cuts.into_iter()), &whole);
        prop_assert_eq!(&read_in(&rules, &written, std::iter::repeat_n(1, written.len())), &whole);
        let shown = line(&whole);
        if fenced {
            prop_assert!(!shown.contains(FENCE), "{}", shown);
        }
        // The text after each mark up to the next: the content of messages.
        let mut rest = shown.as_str();
        let mut pieces = vec![text.as_str()];
        for mark in MARKS {
            prop_assert!(!shown.contains(mark), "{}", shown);
            pieces = pieces.into_iter().flat_map(|piece| split_before(piece, mark)).collect();
        }
        for body in pieces.iter().filter_map(|piece| piece.strip_prefix(MESSAGE)) {
            let at = rest.find(body.trim());
            prop_assert!(at.is_some(), "{:?} is not in {:?}", body, shown);
            rest = &rest[at.unwrap_or(0) + body.trim().len()..];
        }
    }
}

/// The parts of a text that begin with a mark, and what precedes the first.
fn split_before<'a>(text: &'a str, mark: &str) -> Vec<&'a str> {
    let mut starts: Vec<usize> = text.match_indices(mark).map(|(at, _)| at).collect();
    starts.insert(0, 0);
    starts.push(text.len());
    starts.windows(2).map(|pair| &text[pair[0]..pair[1]]).filter(|it| !it.is_empty()).collect()
}

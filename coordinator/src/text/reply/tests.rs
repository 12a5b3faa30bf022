//! Replies in every format, whole and in pieces.
//!
//! - `formats`: what models that write other formats than the first ones write
//! - `python`: calls as Python writes them
//! - `types`: the types of values that are written as text
mod formats;
mod python;
mod types;

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn rules(calls: Option<CallFormat>) -> ReplyRules {
    ReplyRules { calls, ..ReplyRules::default() }
}

/// Parses a reply in pieces cut at these byte offsets (where those are between characters).
fn read_cut(rules: &ReplyRules, text: &str, cuts: &[usize]) -> Vec<Part> {
    let mut reader = ReplyReader::new(Arc::new(rules.clone()));
    let mut parts = Vec::new();
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
    cuts.sort_unstable();
    let mut from = 0;
    for cut in cuts.into_iter().chain([text.len()]).filter(|cut| text.is_char_boundary(*cut)) {
        reader.push(&text[from..cut], &mut parts);
        from = cut;
    }
    reader.finish(&mut parts);
    joined(parts)
}

fn read(rules: &ReplyRules, text: &str) -> Vec<Part> {
    read_cut(rules, text, &[])
}

fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut joined: Vec<Part> = Vec::new();
    for part in parts {
        match (joined.last_mut(), part) {
            (Some(Part::Content(text)), Part::Content(more)) => text.push_str(&more),
            (Some(Part::Reasoning(text)), Part::Reasoning(more)) => text.push_str(&more),
            (
                Some(Part::Arguments { index: a, text }),
                Part::Arguments { index: b, text: more },
            ) if *a == b => {
                text.push_str(&more);
            }
            (_, part) => joined.push(part),
        }
    }
    joined
}

fn said(text: &str) -> Part {
    Part::Content(text.to_owned())
}

fn thought(text: &str) -> Part {
    Part::Reasoning(text.to_owned())
}

fn call(index: u32, name: &str, arguments: &str) -> [Part; 2] {
    [
        Part::Call { index, name: name.to_owned() },
        Part::Arguments { index, text: arguments.to_owned() },
    ]
}

#[test]
fn text_without_calls_is_text() {
    for format in [None, Some(CallFormat::Hermes), Some(CallFormat::Llama3Json)] {
        let text = "  A <tool of { mine } [TOOL] </tool_call> \n";
        assert_eq!(read(&rules(format), text), [said(text)], "{format:?}");
    }
}

#[test]
fn hermes_calls_stand_between_tags() {
    let text = "Let me look.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"S}\\\"ão\"}}\n\
                </tool_call>\n<tool_call>{\"arguments\": [1, {\"a\": null}], \"name\": \"b\"}</tool_call>\n";
    let mut expected = vec![said("Let me look.")];
    expected.extend(call(0, "weather", "{\"city\": \"S}\\\"ão\"}"));
    expected.extend(call(1, "b", "[1, {\"a\": null}]"));
    assert_eq!(read(&rules(Some(CallFormat::Hermes)), text), expected);
}

#[test]
fn arguments_are_told_as_they_come() {
    let mut reader = ReplyReader::new(Arc::new(rules(Some(CallFormat::Hermes))));
    let mut parts = Vec::new();
    reader.push("Yes. <tool_", &mut parts);
    assert_eq!(parts, [said("Yes.")], "what may be a call is held back, with the space before it");
    reader.push("call>{\"name\": \"write\", \"arguments\": {\"text\": \"Once", &mut parts);
    assert_eq!(parts[1..], call(0, "write", "{\"text\": \"Once"));
    parts.clear();
    reader.push(" upon", &mut parts);
    assert_eq!(parts, [Part::Arguments { index: 0, text: " upon".to_owned() }]);
}

#[test]
fn arguments_may_be_absent_or_json_in_a_string() {
    let text = "<tool_call>{\"name\": \"now\"}</tool_call><tool_call>{\"name\": \"f\", \"id\": 7, \
                \"arguments\": \"{\\\"a\\\": 1}\", \"more\": [2]}</tool_call>";
    let expected = [call(0, "now", "{}"), call(1, "f", "{\"a\": 1}")].concat();
    assert_eq!(read(&rules(Some(CallFormat::Hermes)), text), expected);
    for nothing in ["null", "\"\"", "", "\"null\""] {
        let text = format!("<tool_call>{{\"arguments\": {nothing}, \"name\": \"f\"}}</tool_call>");
        assert_eq!(read(&rules(Some(CallFormat::Hermes)), &text), call(0, "f", "{}"), "{text}");
    }
}

#[test]
fn text_behind_calls_that_are_not_closed_is_not_lost() {
    let format = rules(Some(CallFormat::Hermes));
    for (text, rest) in [
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}\nNow I wait.", "Now I wait."),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}\n</tool_call> So.", "So."),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}}\n</tool_call> So.", "So."),
    ] {
        let mut expected = call(0, "f", "{\"a\": 1}").to_vec();
        expected.push(said(rest));
        assert_eq!(read(&format, text), expected, "{text}");
    }
}

#[test]
fn where_only_calls_can_be_written_one_that_is_cut_is_no_text() {
    let only = ReplyRules { only_calls: true, ..rules(Some(CallFormat::Hermes)) };
    for cut in ["<tool", "<tool_call>\n{\"na", "<tool_call>{\"name\": \"f\""] {
        assert_eq!(read(&only, cut), []);
    }
}

#[test]
fn what_is_no_call_in_the_end_is_text() {
    let format = rules(Some(CallFormat::Hermes));
    for text in [
        "<tool_call>not JSON</tool_call>",
        "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>",
        "<tool_call>{\"name\": 5}</tool_call>",
        "<tool_call>{\"name\": \"f\" \"arguments\"",
        "<tool_call>{\"na",
        "<tool_call>",
        "<tool_cal",
    ] {
        assert_eq!(read(&format, text), [said(text)]);
    }
    let spaced = "One \n <tool_call> two";
    assert_eq!(read(&format, spaced), [said(spaced)]);
    // A call that has begun remains a call, however it ends.
    let cut = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b";
    assert_eq!(read(&format, cut), call(0, "f", "{\"a\": \"b"));
}

#[test]
fn a_tag_that_is_not_closed_ends_with_the_next() {
    let text = "<tool_call>{\"name\": \"a\", \"arguments\": {}} <tool_call>{\"name\": \"b\", \
                \"arguments\": {}}";
    let expected = [call(0, "a", "{}"), call(1, "b", "{}")].concat();
    assert_eq!(read(&rules(Some(CallFormat::Hermes)), text), expected);
}

#[test]
fn one_call_is_all_where_only_one_is_wanted() {
    let text = "<tool_call>{\"name\": \"a\", \"arguments\": {}}</tool_call> and <tool_call>{\"name\": \
                \"b\", \"arguments\": {}}</tool_call>";
    let single = ReplyRules { single_call: true, ..rules(Some(CallFormat::Hermes)) };
    let mut expected = call(0, "a", "{}").to_vec();
    expected.push(said("and"));
    assert_eq!(read(&single, text), expected);
}

#[test]
fn llama_calls_are_the_whole_reply() {
    let format = rules(Some(CallFormat::Llama3Json));
    let text = "\n<|python_tag|>{\"name\": \"a\", \"parameters\": {\"x\": 1}}; {\"name\": \"b\", \
                \"parameters\": {}}";
    let expected = [call(0, "a", "{\"x\": 1}"), call(1, "b", "{}")].concat();
    assert_eq!(read(&format, text), expected);
    assert_eq!(read(&format, &text[text.find('{').unwrap()..]), expected);
    for text in
        ["{\"answer\": 42}", "{\"name\": \"Ada\"}", "Call {\"name\": \"a\", \"parameters\": {}}"]
    {
        assert_eq!(read(&format, text), [said(text)], "{text}");
    }
}

#[test]
fn mistral_calls_follow_their_mark() {
    let format = rules(Some(CallFormat::Mistral));
    let expected = [call(0, "a", "{\"x\": [1]}"), call(1, "b", "{}")].concat();
    let list = "[TOOL_CALLS] [{\"name\": \"a\", \"arguments\": {\"x\": [1]}}, {\"name\": \"b\", \"arguments\": {}}]";
    assert_eq!(read(&format, list), expected);
    let named = "[TOOL_CALLS]a{\"x\": [1]}[TOOL_CALLS]b[CALL_ID]123456789[ARGS]{}";
    assert_eq!(read(&format, named), expected);
    assert_eq!(read(&format, "See [TOOLS]."), [said("See [TOOLS].")]);
    for text in
        ["[TOOL_CALLS][ARGS]".to_owned(), format!("[TOOL_CALLS]{}{{}}", "no name ".repeat(40))]
    {
        assert_eq!(read(&format, &text), [said(&text)]);
    }
}

#[test]
fn coder_calls_have_values_of_their_schemas_types() {
    let tools = json!([{"type": "function", "function": {"name": "edit", "parameters": {"properties": {
        "path": {"type": "string"}, "line": {"type": "integer"}, "mode": {"enum": ["1", "2"]},
    }}}}]);
    let format =
        ReplyRules { parameters: Parameters::of(&tools), ..rules(Some(CallFormat::Qwen3Coder)) };
    let text = "Done:\n<tool_call>\n<function=edit>\n<parameter=path>\n42\n</parameter>\n<parameter=line>\n7\n\
                </parameter>\n<parameter=mode>1</parameter>\n<parameter=other>\n{\"a\": [1]}\n</parameter>\n\
                <parameter=text>\n two\n lines \n</parameter>\n</function>\n</tool_call>\n";
    let parts = read(&format, text);
    let [Part::Content(content), Part::Call { index: 0, name }, Part::Arguments { index: 0, text }] =
        &parts[..]
    else {
        panic!("{parts:?}")
    };
    assert_eq!((content.as_str(), name.as_str()), ("Done:", "edit"));
    let arguments: serde_json::Value = serde_json::from_str(text).unwrap();
    let expected =
        json!({"path": "42", "line": 7, "mode": "1", "other": {"a": [1]}, "text": " two\n lines "});
    assert_eq!(arguments, expected);
    let bare = "<function=now></function> then";
    let mut expected = call(0, "now", "{}").to_vec();
    expected.push(said("then"));
    assert_eq!(read(&format, bare), expected);
    for text in ["<tool_call>none</tool_call>", "Write <function=> or <function=f and so on"] {
        assert_eq!(read(&format, text), [said(text)]);
    }
    let twice = "<tool_call> <tool_call>\n<function=now></function>";
    let mut expected = vec![said("<tool_call>")];
    expected.extend(call(0, "now", "{}"));
    assert_eq!(read(&format, twice), expected);
}

#[test]
fn coder_calls_are_told_a_parameter_at_a_time() {
    let mut reader = ReplyReader::new(Arc::new(rules(Some(CallFormat::Qwen3Coder))));
    let mut parts = Vec::new();
    reader.push(
        "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<par",
        &mut parts,
    );
    assert_eq!(joined(std::mem::take(&mut parts)), call(0, "write", "{\"path\": \"a.txt\""));
    reader.push("ameter=text>\nb\n</parameter>\n</function>\n</tool_call>", &mut parts);
    reader.finish(&mut parts);
    let more = Part::Arguments { index: 0, text: ", \"text\": \"b\"}".to_owned() };
    assert_eq!(joined(parts), [more]);
}

#[test]
fn values_have_one_of_the_types_that_their_schema_allows() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": {
        "text": {"type": "string"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flag": {"type": "boolean"}, "list": {"type": ["array", "null"]}, "number": {"type": "number"},
        "either": {"type": ["string", "integer"]},
    }}}}]);
    let format =
        ReplyRules { parameters: Parameters::of(&tools), ..rules(Some(CallFormat::Qwen3Coder)) };
    for (parameter, text, expected) in [
        ("text", "{\"a\": 1}", json!("{\"a\": 1}")),
        ("text", "\"quoted\"", json!("\"quoted\"")),
        ("text", "null", json!("null")),
        ("maybe", "123", json!("123")),
        ("maybe", "null", json!(null)),
        ("maybe", "None", json!(null)),
        ("flag", "True", json!(true)),
        ("flag", "false", json!(false)),
        ("flag", "maybe", json!("maybe")),
        ("list", "[1, 2]", json!([1, 2])),
        ("number", "7", json!(7)),
        ("either", "7", json!(7)),
        ("list", "['a', True]", json!(["a", true])),
        ("text", "['a', True]", json!("['a', True]")),
        ("number", "123456789012345678901234", json!("123456789012345678901234")),
        ("number", "1e3", json!(1000.0)),
        ("either", "seven", json!("seven")),
        ("unknown", "[1]", json!([1])),
        ("unknown", "x", json!("x")),
    ] {
        let reply = format!("<function=f><parameter={parameter}>{text}</parameter></function>");
        let parts = read(&format, &reply);
        let [_, Part::Arguments { text: arguments, .. }] = &parts[..] else { panic!("{parts:?}") };
        let arguments: serde_json::Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(arguments[parameter], expected, "{parameter} {text}");
    }
}

#[test]
fn reasoning_is_told_from_the_answer() {
    let think = ReplyRules { reasoning: Some(ThinkMarks::THINK), ..ReplyRules::default() };
    let both = [thought("First a\n\nthen b"), said("The answer")];
    assert_eq!(read(&think, "\n<think>\nFirst a\n\nthen b\n</think>\n\nThe answer"), both);
    let inside = ReplyRules { begins_reasoning: true, ..think.clone() };
    assert_eq!(read(&inside, "First a\n\nthen b</think>The answer"), both);
    assert_eq!(read(&inside, "\nNo end </thin"), [thought("No end </thin")]);
    assert_eq!(read(&think, "No <think> here</think>"), [said("No <think> here</think>")]);
    assert_eq!(read(&think, "<think>\n\n</think>\n\nAt once"), [said("At once")]);
    assert_eq!(read(&think, "<thi"), [said("<thi")]);
    let calls = ReplyRules { calls: Some(CallFormat::Hermes), ..inside };
    let text =
        "Maybe <tool_call>?</think>\n<tool_call>{\"name\": \"a\", \"arguments\": {}}</tool_call>";
    let mut expected = vec![thought("Maybe <tool_call>?")];
    expected.extend(call(0, "a", "{}"));
    assert_eq!(read(&calls, text), expected);
    let bare = ReplyRules { calls: Some(CallFormat::Llama3Json), ..calls };
    let text = "Maybe <tool_call>?</think>\n{\"name\": \"a\", \"parameters\": {}}";
    assert_eq!(read(&bare, text), expected);
    let plain = [thought("Maybe"), said("No.")];
    assert_eq!(read(&bare, "Maybe</think>\n\nNo."), plain);
    for (marks, text) in [
        (ThinkMarks::MISTRAL, "[THINK]Maybe <think>[/THINK]No."),
        (ThinkMarks::SEED, "<seed:think>Maybe <think></seed:think>\nNo."),
    ] {
        let rules = ReplyRules { reasoning: Some(marks), ..ReplyRules::default() };
        assert_eq!(read(&rules, text), [thought("Maybe <think>"), said("No.")]);
    }
}

#[test]
fn some_models_reason_first_whether_or_not_they_say_so() {
    for (prompt, marked, first) in [
        ("<|Assistant|>", false, true),
        ("<|Assistant|><think>\n", true, true),
        ("<|Assistant|><think>\n\n</think>\n\n", false, false),
    ] {
        assert!(!Reasoning::Untold.begins_after(prompt));
        assert_eq!(Reasoning::Marked(ThinkMarks::THINK).begins_after(prompt), marked, "{prompt}");
        assert_eq!(Reasoning::First(ThinkMarks::THINK).begins_after(prompt), first, "{prompt}");
    }
    let seed = Reasoning::Marked(ThinkMarks::SEED);
    assert!(seed.begins_after("<seed:think><seed:cot_budget_reflect>"));
    assert!(!seed.begins_after("<seed:bos>assistant\n"));
    for (prompt, inside) in [
        ("a <think>b</think> The answer is", false),
        ("x<think>Fir", true),
        ("The answer is", false),
    ] {
        assert!(!Reasoning::Untold.goes_on_in(prompt));
        for told in [Reasoning::Marked, Reasoning::First] {
            let told = told(ThinkMarks::THINK);
            assert_eq!(told.goes_on_in(prompt), inside, "{prompt}");
        }
    }
    let inside = ReplyRules {
        reasoning: Some(ThinkMarks::THINK),
        begins_reasoning: true,
        ..ReplyRules::default()
    };
    let both = [thought("First"), said("Then")];
    assert_eq!(read(&inside, "First</think>Then"), both);
    assert_eq!(read(&inside, "\n<think>\nFirst</think>\nThen"), both, "opened once more");
    assert_eq!(read(&inside, "<thi"), [thought("<thi")]);
    assert_eq!(read(&inside, "<thinner</think>Then"), [thought("<thinner"), said("Then")]);
}

#[test]
fn templates_tell_their_form() {
    let of = CallFormat::of_template;
    assert_eq!(of("{{ '<tool_call>' }}"), Some(CallFormat::Hermes));
    assert_eq!(of("<tool_call>\n<function=f>"), Some(CallFormat::Qwen3Coder));
    assert_eq!(of("[TOOL_CALLS]"), Some(CallFormat::Mistral));
    let llama = "\"parameters\": dictionary of argument name and its value}.";
    assert_eq!(of(llama), Some(CallFormat::Llama3Json));
    assert_eq!(of("{{ messages }}"), None);
    for (mark, format) in [
        ("<seed:tool_call>\n<function=f>", CallFormat::SeedOss),
        ("<tool_call>f\n<arg_key>k</arg_key>", CallFormat::Glm45),
        ("<minimax:tool_call>\n<invoke name=\"f\">", CallFormat::MinimaxM2),
        ("'<｜tool▁calls▁begin｜>' + name + '\\n' + '```json'", CallFormat::DeepseekV3),
        ("'<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>'", CallFormat::DeepseekV31),
        ("respond with <|tool_call|> followed by a JSON list of tools used", CallFormat::Granite),
        ("respond with <tool_call> followed by a JSON list of tools used", CallFormat::Granite),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", CallFormat::Phi4MiniJson),
        ("<|tool|>[..]<|/tool|> .. <|tool_call|>{..}<|/tool_call|>", CallFormat::Phi4MiniJson),
        ("<|action_start|><|plugin|>", CallFormat::Internlm),
        (
            "<|tool_calls_section_begin|>{%- for call in message['tool_calls'] -%}<|tool_call_begin|>",
            CallFormat::KimiK2,
        ),
        ("by writing a \"<｜DSML｜function_calls>\" block", CallFormat::DeepseekV32),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", CallFormat::Pythonic),
        ("within <function_calls></function_calls> XML tags", CallFormat::Pythonic),
    ] {
        assert_eq!(of(mark), Some(format), "{mark}");
    }
}

fn any_rules() -> impl Strategy<Value = ReplyRules> {
    let mut formats = CallFormat::ALL.to_vec();
    formats.retain(|format| *format != CallFormat::Harmony);
    let calls = prop::option::of(prop::sample::select(formats));
    let marks = [ThinkMarks::THINK, ThinkMarks::MISTRAL, ThinkMarks::SEED, ThinkMarks::ERNIE];
    let reasoning = prop::option::of(prop::sample::select(marks.to_vec()));
    (calls, reasoning, any::<bool>(), any::<bool>()).prop_map(
        |(calls, reasoning, begins_reasoning, single_call)| ReplyRules {
            calls,
            reasoning,
            begins_reasoning,
            single_call,
            only_calls: false,
            parameters: Parameters::default(),
            harmony: None,
        },
    )
}

fn any_text() -> impl Strategy<Value = String> {
    let pieces = [
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<seed:think>",
        "</seed:think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<function=f>",
        "</function>",
        "<parameter=p>",
        "</parameter>",
        "{\"name\": \"f\", \"arguments\": {",
        "{\"name\": \"g\", \"parameters\": ",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ",",
        ":",
        ";",
        " ",
        "\n",
        "é",
        "x",
        "\"name\"",
        "1",
        "f",
        "f(a=",
        "'",
        ")",
        "functools",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke name=\"f\">",
        "</invoke>",
        "<parameter name=\"p\">",
        "<arg_key>k</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "function<｜tool▁sep｜>",
        "```",
        "<|python_start|>",
        "<|python_end|>",
        "<function_calls>",
        "</function_calls>",
        "<response>",
        "</response>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "functions.f:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "<｜DSML｜invoke name=\"f\">",
        "</｜DSML｜invoke>",
        "<｜DSML｜parameter name=\"p\" string=\"true\">",
        "</｜DSML｜parameter>",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..14)
        .prop_map(|pieces| pieces.concat())
}

/// Long replies take linear time: a reply of a million tokens in one call.
#[test]
fn long_calls_are_read_in_one_go() {
    let piece = "word ";
    for (format, opening, closing) in [
        (CallFormat::Qwen3Coder, "<function=f><parameter=p>", "</parameter></function>"),
        (CallFormat::Llama3Json, "{\"text\": \"", "\"}"),
        (CallFormat::Hermes, "<tool_call>{\"text\": \"", "\"}</tool_call>"),
        (CallFormat::Mistral, "[TOOL_CALLS]", "{}"),
        (
            CallFormat::Glm45,
            "<tool_call>f<arg_key>p</arg_key><arg_value>",
            "</arg_value></tool_call>",
        ),
        (CallFormat::DeepseekV31, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"", "\"}"),
        (
            CallFormat::KimiK2,
            "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{\"a\": \"",
            "\"}<|tool_call_end|>",
        ),
        (
            CallFormat::DeepseekV32,
            "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"p\" string=\"true\">",
            "</｜DSML｜parameter></｜DSML｜invoke>",
        ),
        (CallFormat::Pythonic, "[f(a='", "')]"),
        (CallFormat::Pythonic, "[f(a=", ")]"),
        (CallFormat::MinimaxM2, "<minimax:tool_call><invoke name=\"f\"><parameter name=\"p\">", ""),
    ] {
        let mut reader = ReplyReader::new(Arc::new(rules(Some(format))));
        let (mut parts, pieces) = (Vec::new(), 200_000);
        let began = std::time::Instant::now();
        reader.push(opening, &mut parts);
        (0..pieces).for_each(|_| reader.push(piece, &mut parts));
        reader.push(closing, &mut parts);
        reader.finish(&mut parts);
        // Rescanning it at every piece would take minutes.
        assert!(began.elapsed().as_secs() < 10, "{format:?}: {:?}", began.elapsed());
        assert!(!parts.is_empty());
    }
}

fn deepseek(arguments: &str) -> String {
    format!(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{arguments}\n```\
         <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
}

fn kimi(arguments: &str) -> String {
    format!(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>\
         {arguments}<|tool_call_end|><|tool_calls_section_end|>"
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// Splitting a reply makes no difference.
    #[test]
    fn cuts_do_not_matter(
        rules in any_rules(),
        text in any_text(),
        cuts in prop::collection::vec(0usize..200, 0..20),
    ) {
        prop_assert_eq!(read_cut(&rules, &text, &cuts), read(&rules, &text));
        let every: Vec<usize> = (0..text.len()).collect();
        prop_assert_eq!(read_cut(&rules, &text, &every), read(&rules, &text));
    }

    /// Text that is not a call is passed on completely.
    #[test]
    fn nothing_is_lost(rules in any_rules(), text in any_text()) {
        let rules = ReplyRules { reasoning: None, ..rules };
        let parts = read(&rules, &text);
        if !parts.iter().any(|part| matches!(part, Part::Call { .. })) {
            let expected = if text.is_empty() { Vec::new() } else { vec![said(&text)] };
            prop_assert_eq!(parts, expected);
        }
    }

    /// Without rules, nothing is changed.
    #[test]
    fn text_is_whole_without_rules(text in any_text(), cuts in prop::collection::vec(0usize..200, 0..20)) {
        let parts = read_cut(&ReplyRules::default(), &text, &cuts);
        let expected = if text.is_empty() { Vec::new() } else { vec![said(&text)] };
        prop_assert_eq!(parts, expected);
    }

    /// Any JSON arguments are passed on as written.
    #[test]
    fn arguments_are_as_written(
        text in "[a-z\\\\\"{}\\[\\], :é\n]{0,30}",
        number in any::<i64>(),
        cuts in prop::collection::vec(0usize..200, 0..20),
        pretty in any::<bool>(),
    ) {
        let arguments = json!({"text": text, "list": [number, null, {"deep": [text]}]});
        let written = if pretty {
            serde_json::to_string_pretty(&arguments).unwrap()
        } else {
            arguments.to_string()
        };
        let objects = [
            (CallFormat::Hermes, format!("<tool_call>{{\"name\": \"f\", \"arguments\": {written}}}</tool_call>")),
            (CallFormat::Llama3Json, format!("{{\"name\": \"f\", \"parameters\": {written}}}")),
            (CallFormat::Mistral, format!("[TOOL_CALLS]f[ARGS]{written}")),
            (CallFormat::Granite, format!("<|tool_call|>[{{\"name\": \"f\", \"arguments\": {written}}}]")),
            (CallFormat::DeepseekV3, deepseek(&written)),
            (CallFormat::KimiK2, kimi(&written)),
        ];
        for (format, reply) in objects {
            prop_assert_eq!(read_cut(&rules(Some(format)), &reply, &cuts), call(0, "f", &written));
        }
    }
}

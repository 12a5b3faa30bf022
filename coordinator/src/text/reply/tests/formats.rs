//! What models that write other formats than the first ones write: texts as their templates show
//! them, and what comes of them.
use super::*;

fn pair(first: &str, second: &str) -> Vec<Part> {
    [call(0, "weather", first), call(1, "now", second)].concat()
}

/// Every character alone, so that no mark arrives whole.
fn read_slowly(rules: &ReplyRules, text: &str) -> Vec<Part> {
    let every: Vec<usize> = (0..text.len()).collect();
    let parts = read_cut(rules, text, &every);
    assert_eq!(parts, read(rules, text), "{text}");
    parts
}

fn typed(format: CallFormat) -> ReplyRules {
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]);
    ReplyRules { parameters: Parameters::of(&tools), ..rules(Some(format)) }
}

#[test]
fn deepseek_calls_are_names_and_fenced_arguments() {
    let text = "I look.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n\
                ```json\n{\"city\": \"Rome\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function\
                <｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let mut expected = vec![said("I look.")];
    expected.extend(pair("{\"city\": \"Rome\"}", "{}"));
    assert_eq!(read_slowly(&rules(Some(CallFormat::DeepseekV3)), text), expected);
}

#[test]
fn deepseek_calls_may_lack_the_fence() {
    let text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Rome\"}\
                <｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>\
                <｜tool▁calls▁end｜> then";
    let mut expected = pair("{\"city\": \"Rome\"}", "{}");
    expected.push(said("then"));
    for format in [CallFormat::DeepseekV3, CallFormat::DeepseekV31] {
        assert_eq!(read_slowly(&rules(Some(format)), text), expected);
        // The model forgets the mark around all calls.
        let bare = text.replace("<｜tool▁calls▁begin｜>", "");
        assert_eq!(read_slowly(&rules(Some(format)), &bare), expected);
        for text in [
            "<｜tool▁calls▁begin｜>weather{}",
            "<｜tool▁call▁begin｜>weather {}",
            "<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
            "See <｜tool▁call",
        ] {
            assert_eq!(read_slowly(&rules(Some(format)), text), [said(text)]);
        }
    }
}

#[test]
fn glm_calls_have_keys_and_values() {
    let format = typed(CallFormat::Glm45);
    let text = "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n</arg_value>\n\
                <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n\
                </tool_call>";
    let mut expected = vec![said("I look.")];
    expected.extend(pair("{\"city\": \"Rome\\n\", \"days\": 3}", "{}"));
    assert_eq!(read_slowly(&format, text), expected);
    // GLM-4.7 leaves the line breaks out.
    let dense = text.replace("Rome\n", "Rome\u{0}").replace('\n', "").replace('\0', "\n");
    assert_eq!(read_slowly(&format, &dense), expected);
    for text in
        ["<tool_call> is a mark", "<tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>a\nb"]
    {
        assert_eq!(read_slowly(&format, text), [said(text)]);
    }
}

#[test]
fn minimax_calls_are_invoked_by_name() {
    let text = "I look.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">7</parameter>\n\
                <parameter name=\"days\">7</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n\
                </minimax:tool_call>";
    let mut expected = vec![said("I look.")];
    expected.extend(pair("{\"city\": \"7\", \"days\": 7}", "{}"));
    assert_eq!(read_slowly(&typed(CallFormat::MinimaxM2), text), expected);
    for text in ["<minimax:tool_call> or <invoke", "Write <invoke name=\"f\"></invoke>."] {
        assert_eq!(read_slowly(&typed(CallFormat::MinimaxM2), text), [said(text)]);
    }
}

#[test]
fn seed_calls_are_like_those_of_coders() {
    let text = "I look.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n\
                <parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call><function=now>\
                </function></seed:tool_call>";
    let mut expected = vec![said("I look.")];
    expected.extend(pair("{\"city\": \"Rome\", \"days\": 2}", "{}"));
    assert_eq!(read_slowly(&typed(CallFormat::SeedOss), text), expected);
}

/// Files of configuration, for example.
#[test]
fn values_may_look_like_parameters() {
    for (format, value) in [
        (CallFormat::MinimaxM2, "<parameter name=\"a\" value=\"5\"/>"),
        (CallFormat::SeedOss, "<parameter=a>5"),
        (CallFormat::Glm45, "<arg_key>a"),
    ] {
        let text = match format {
            CallFormat::MinimaxM2 => format!(
                "<minimax:tool_call><invoke name=\"f\"><parameter name=\"p\">{value}</parameter>\
                 </invoke></minimax:tool_call>"
            ),
            CallFormat::Glm45 => format!(
                "<tool_call>f<arg_key>p</arg_key><arg_value>{value}</arg_value></tool_call>"
            ),
            _ => format!(
                "<seed:tool_call><function=f><parameter=p>{value}</parameter></function>\
                 </seed:tool_call>"
            ),
        };
        let arguments = format!("{{\"p\": {}}}", json!(value));
        assert_eq!(read_slowly(&rules(Some(format)), &text), call(0, "f", &arguments));
    }
}

/// An opening mark, or the beginning of a list, before any amount of white space.
#[test]
fn white_space_without_end_is_text() {
    let space = " ".repeat(2 * SPACE_MAX);
    for (format, opening) in [
        (CallFormat::Pythonic, "["),
        (CallFormat::Pythonic, "<function_calls>"),
        (CallFormat::Mistral, "[TOOL_CALLS]"),
        (CallFormat::Granite, "<|tool_call|>"),
        (CallFormat::DeepseekV31, "<｜tool▁calls▁begin｜>"),
    ] {
        let mut reader = ReplyReader::new(Arc::new(rules(Some(format))));
        let mut parts = Vec::new();
        reader.push(&format!("{opening}{space}"), &mut parts);
        assert_eq!(parts.first(), Some(&said(opening)), "{format:?} {opening}");
        reader.push("x", &mut parts);
        reader.finish(&mut parts);
        assert_eq!(joined(parts), [said(&format!("{opening}{space}x"))]);
    }
}

#[test]
fn granite_and_phi_calls_are_lists() {
    let list = "[{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}, {\"name\": \"now\", \
                \"arguments\": {}}]";
    let expected = pair("{\"city\": \"Rome\"}", "{}");
    for (format, text) in [
        (CallFormat::Granite, format!("<|tool_call|>{list}")),
        (CallFormat::Granite, format!("<tool_call>\n{list}")),
        (CallFormat::Phi4MiniJson, format!("functools{list}")),
        (CallFormat::Phi4MiniJson, format!("<|tool_call|>{list}<|/tool_call|>")),
    ] {
        assert_eq!(read_slowly(&rules(Some(format)), &text), expected, "{text}");
    }
    let text = "The functools module, functools[0] and functool";
    assert_eq!(read_slowly(&rules(Some(CallFormat::Phi4MiniJson)), text), [said(text)]);
}

#[test]
fn internlm_calls_are_actions() {
    let text = "I look.<|action_start|><|plugin|>\n{\"name\": \"weather\", \"parameters\": {\"city\": \
                \"Rome\"}}<|action_end|>\n";
    let mut expected = vec![said("I look.")];
    expected.extend(call(0, "weather", "{\"city\": \"Rome\"}"));
    assert_eq!(read_slowly(&rules(Some(CallFormat::Internlm)), text), expected);
}

#[test]
fn formats_have_vllms_names() {
    for format in CallFormat::ALL {
        assert_eq!(CallFormat::of_name(format.name()), Some(format));
    }
    for (name, format) in [
        ("llama4_json", CallFormat::Llama3Json),
        ("qwen3_xml", CallFormat::Qwen3Coder),
        ("glm47", CallFormat::Glm45),
        ("llama4_pythonic", CallFormat::Pythonic),
        ("olmo3", CallFormat::Pythonic),
    ] {
        assert_eq!(CallFormat::of_name(name), Some(format), "{name}");
    }
    assert_eq!(CallFormat::of_name("kimi_k2"), None);
}

/// A reply that ends here, by a stop string, ends within a call.
#[test]
fn a_reply_is_within_a_call_until_its_arguments_end() {
    for (format, within, behind) in [
        (CallFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", "}}"),
        (CallFormat::Qwen3Coder, "<function=f><parameter=a>1", "</parameter></function>"),
        (CallFormat::Pythonic, "[f(a=1", ")"),
        (CallFormat::DeepseekV31, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1", "}"),
    ] {
        let mut reader = ReplyReader::new(Arc::new(rules(Some(format))));
        assert!(!reader.is_within_call());
        reader.push(within, &mut Vec::new());
        assert!(reader.is_within_call(), "{within}");
        reader.push(behind, &mut Vec::new());
        assert!(!reader.is_within_call(), "{within}{behind}");
    }
}

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
fn kimi_calls_are_numbered() {
    let text = "I look.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0\
                <|tool_call_argument_begin|>{\"city\": \"Rome\"}<|tool_call_end|>\n<|tool_call_begin|>\
                now:12 <|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>";
    let mut expected = vec![said("I look.")];
    expected.extend(pair("{\"city\": \"Rome\"}", "{}"));
    let kimi = rules(Some(CallFormat::KimiK2));
    assert_eq!(read_slowly(&kimi, text), expected);
    // Models write the marks around all calls in the singular, or forget them.
    assert_eq!(read_slowly(&kimi, &text.replace("calls_section", "call_section")), expected);
    let bare = text.replace("<|tool_calls_section_begin|>", "");
    assert_eq!(read_slowly(&kimi, &bare.replace("<|tool_calls_section_end|>", "")), expected);
    let named = "<|tool_call_begin|>functions.a.b<|tool_call_argument_begin|>{}<|tool_call_end|>";
    assert_eq!(read_slowly(&kimi, named), call(0, "a.b", "{}"));
    for text in [
        "<|tool_calls_section_begin|>functions.f:0{}",
        "<|tool_call_begin|>functions.f:0{\"a\": 1}",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>no object{}",
        "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}",
        "See <|tool_call_beg",
    ] {
        assert_eq!(read_slowly(&kimi, text), [said(text)]);
    }
}

/// Kimi K2 Thinking does so now and then.
#[test]
fn kimi_calls_end_reasoning_that_is_open() {
    let kimi = ReplyRules { reasoning: Some(ThinkMarks::THINK), ..rules(Some(CallFormat::KimiK2)) };
    let made = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0\
                <|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    let expected: Vec<Part> = [thought("I look.")].into_iter().chain(call(0, "f", "{}")).collect();
    for text in [format!("<think>I look. {made}"), format!("<think>I look.</think>\n{made}")] {
        assert_eq!(read_slowly(&kimi, &text), expected, "{text}");
    }
}

#[test]
fn deepseek_calls_may_be_elements_that_tell_strings() {
    let text = "I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n\
                <｜DSML｜parameter name=\"city\" string=\"true\">7</｜DSML｜parameter>\n\
                <｜DSML｜parameter name=\"days\" string=\"false\">7</｜DSML｜parameter>\n\
                </｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n\
                </｜DSML｜function_calls>";
    let mut expected = vec![said("I look.")];
    expected.extend(pair("{\"city\": \"7\", \"days\": 7}", "{}"));
    assert_eq!(read_slowly(&typed(CallFormat::DeepseekV32), text), expected);
    // What the model tells goes before the schema, which it may not know.
    let unknown = rules(Some(CallFormat::DeepseekV32));
    assert_eq!(read_slowly(&unknown, text), expected);
    let list = "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"p\" \
                string=\"false\">[1, {\"a\": null}]</｜DSML｜parameter><｜DSML｜parameter name=\"q\" \
                string=\"true\">\n a=\"b\" string=\"false\">\n</｜DSML｜parameter></｜DSML｜invoke>\
                </｜DSML｜function_calls>";
    let parts = read_slowly(&unknown, list);
    let [Part::Call { .. }, Part::Arguments { text, .. }] = &parts[..] else { panic!("{parts:?}") };
    let arguments: serde_json::Value = serde_json::from_str(text).unwrap();
    let expected = json!({"p": [1, {"a": null}], "q": "\n a=\"b\" string=\"false\">\n"});
    assert_eq!(arguments, expected);
    for text in ["<｜DSML｜function_calls> or <｜DSML｜", "Write <｜DSML｜invoke name=\"f\">."]
    {
        assert_eq!(read_slowly(&unknown, text), [said(text)]);
    }
}

#[test]
fn ernie_answers_stand_between_marks() {
    let ernie = ReplyRules {
        reasoning: Some(ThinkMarks::ERNIE),
        begins_reasoning: true,
        ..rules(Some(CallFormat::Hermes))
    };
    let both = [thought("First"), said("Then\n\nmore")];
    for text in [
        "First\n</think>\n\n<response>\nThen\n\nmore\n</response>\n",
        "First\n</think>\n\n\n<response>Then\n\nmore</response>",
        "First\n</think>\nThen\n\nmore",
    ] {
        assert_eq!(read_slowly(&ernie, text), both, "{text}");
    }
    let called =
        "First\n</think>\n\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n";
    let mut expected = vec![thought("First")];
    expected.extend(call(0, "f", "{}"));
    assert_eq!(read_slowly(&ernie, called), expected);
    let talked = called.replace("<tool_call>", "<response>\nI look.\n</response>\n<tool_call>");
    expected.insert(1, said("I look."));
    assert_eq!(read_slowly(&ernie, &talked), expected);
    // Marks that open nothing, or do not end, are text.
    for text in ["A </response> and <response> of it", "<respond"] {
        assert_eq!(read_slowly(&ernie, &format!("</think>{text}")), [said(text)]);
    }
    assert_eq!(read_slowly(&ernie, "</think><response> Cut </resp"), [said("Cut </resp")]);
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
        (CallFormat::DeepseekV32, "<｜DSML｜parameter name=\"a\" string=\"true\">5"),
    ] {
        let text = match format {
            CallFormat::MinimaxM2 => format!(
                "<minimax:tool_call><invoke name=\"f\"><parameter name=\"p\">{value}</parameter>\
                 </invoke></minimax:tool_call>"
            ),
            CallFormat::DeepseekV32 => format!(
                "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"p\" \
                 string=\"true\">{value}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>"
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
        (CallFormat::KimiK2, "<|tool_calls_section_begin|>"),
        (CallFormat::DeepseekV32, "<｜DSML｜function_calls>"),
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
        ("ernie45", CallFormat::Hermes),
    ] {
        assert_eq!(CallFormat::of_name(name), Some(format), "{name}");
    }
    assert_eq!(CallFormat::of_name("kimi_k3"), None);
    let names: Vec<&str> = CallFormat::names().collect();
    assert!(names.iter().all(|name| CallFormat::of_name(name).is_some()), "{names:?}");
    assert_eq!(names.len(), CallFormat::ALL.len() + 6);
}

/// A reply that ends here, by a stop string, ends within a call.
#[test]
fn a_reply_is_within_a_call_until_its_arguments_end() {
    for (format, within, behind) in [
        (CallFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", "}}"),
        (CallFormat::Qwen3Coder, "<function=f><parameter=a>1", "</parameter></function>"),
        (CallFormat::Pythonic, "[f(a=1", ")"),
        (CallFormat::DeepseekV31, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1", "}"),
        (CallFormat::KimiK2, "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{\"a\": 1", "}"),
    ] {
        let mut reader = ReplyReader::new(Arc::new(rules(Some(format))));
        assert!(!reader.is_within_call());
        reader.push(within, &mut Vec::new());
        assert!(reader.is_within_call(), "{within}");
        reader.push(behind, &mut Vec::new());
        assert!(!reader.is_within_call(), "{within}{behind}");
    }
}

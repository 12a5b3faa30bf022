//! Calls as Python writes them.
use serde_json::Value;

use super::*;

fn format() -> ReplyRules {
    rules(Some(CallFormat::Pythonic))
}

fn read_slowly(text: &str) -> Vec<Part> {
    let every: Vec<usize> = (0..text.len()).collect();
    let parts = read_cut(&format(), text, &every);
    assert_eq!(parts, read(&format(), text), "{text}");
    parts
}

#[test]
fn lists_of_calls_are_read() {
    let expected =
        [call(0, "weather", "{\"city\": \"Rome\", \"days\": 3}"), call(1, "now", "{}")].concat();
    for text in [
        "[weather(city=\"Rome\", days=3), now()]",
        "\n[ weather( city = 'Rome' ,days=3, ),now( )]",
        "<|python_start|>[weather(city=\"Rome\", days=3), now()]<|python_end|>",
        "<function_calls>\nweather(city=\"Rome\", days=3)\nnow()\n</function_calls>",
    ] {
        assert_eq!(read_slowly(text), expected, "{text}");
    }
    let mut behind = expected.clone();
    behind.push(said("Done."));
    assert_eq!(read_slowly("[weather(city='Rome', days=3), now()] Done."), behind);
}

#[test]
fn lists_of_something_else_are_text() {
    for text in [
        "[1, 2, 3]",
        "[]",
        "[",
        "[link](https://example.org)",
        "[see (this)]",
        "[f]",
        "[f(1)]",
        "[f(x)]",
        "[f(",
        "[f(a",
        "Say [f(a=1)]",
        "<function_calls> none",
    ] {
        assert_eq!(read_slowly(text), [said(text)], "{text}");
    }
}

#[test]
fn arguments_are_told_one_at_a_time() {
    let mut reader = ReplyReader::new(Arc::new(format()));
    let mut parts = Vec::new();
    reader.push("[f(a='x, ) y', b=[1, ", &mut parts);
    assert_eq!(joined(std::mem::take(&mut parts)), call(0, "f", "{\"a\": \"x, ) y\""));
    reader.push("2])]", &mut parts);
    reader.finish(&mut parts);
    let more = Part::Arguments { index: 0, text: ", \"b\": [1,2]}".to_owned() };
    assert_eq!(joined(parts), [more]);
}

fn argument(literal: &str) -> Value {
    let parts = read_slowly(&format!("[f(a={literal})]"));
    let [Part::Call { .. }, Part::Arguments { text, .. }] = &parts[..] else { panic!("{parts:?}") };
    serde_json::from_str::<Value>(text).unwrap()["a"].take()
}

/// What Python's `ast.literal_eval` gives for these, as JSON.
#[test]
fn literals_are_those_of_python() {
    for (literal, expected) in [
        ("True", json!(true)),
        ("None", json!(null)),
        ("-7", json!(-7)),
        ("+7", json!(7)),
        ("1_000", json!(1000)),
        ("0x1F", json!(31)),
        ("18446744073709551615", json!(u64::MAX)),
        ("2.5", json!(2.5)),
        ("-.5", json!(-0.5)),
        ("1e3", json!(1000.0)),
        ("1.5E-3", json!(0.0015)),
        (r#""a\"b""#, json!("a\"b")),
        (r"'a\'b'", json!("a'b")),
        (r"'\n\t\\ \x41 \u00e9 \U0001F600 \101'", json!("\n\t\\ A é 😀 A")),
        (r"'\ud83d\ude00'", json!("😀")),
        (r"'\d'", json!("\\d")),
        (r"r'C:\new\'s'", json!(r"C:\new\'s")),
        ("'it''s'", json!("its")),
        ("'a' \"b\"", json!("ab")),
        ("''", json!("")),
        ("''''''", json!("")),
        ("'''a 'b' \"c\"\nd'''", json!("a 'b' \"c\"\nd")),
        ("'''a''b'''", json!("a''b")),
        ("\"\"\"x, ) y\"\"\"", json!("x, ) y")),
        ("[1, [2, 3,], ]", json!([1, [2, 3]])),
        ("(1, 'a')", json!([1, "a"])),
        ("(1)", json!(1)),
        ("(1,)", json!([1])),
        ("{'a': {'b': [None]}, 2: 'c'}", json!({"a": {"b": [null]}, "2": "c"})),
        ("{1, 2}", json!([1, 2])),
        ("{}", json!({})),
    ] {
        assert_eq!(argument(literal), expected, "{literal}");
    }
}

#[test]
fn what_is_no_literal_is_given_as_written() {
    for text in [
        "today()",
        "1 + 2",
        "x",
        "1.2.3",
        "-",
        "0x",
        "[1 2]",
        "{'a': 1, 2}",
        "'\\ud83d'",
        "nan",
        "1e999",
        "9 9",
        "123456789012345678901234",
    ] {
        assert_eq!(argument(text), json!(text), "{text}");
    }
    let deep = format!("{}{}", "[".repeat(2000), "]".repeat(2000));
    assert_eq!(argument(&deep), json!(deep));
}

#[test]
fn arguments_are_json_even_if_the_call_is_broken() {
    for (text, arguments) in [
        ("[f(a=1, 2)]", "{\"a\": 1}"),
        ("[f(a=1, b c=2)]", "{\"a\": 1}"),
        ("[f(a=1]", "{\"a\": 1}"),
    ] {
        assert_eq!(read_slowly(text)[..2], call(0, "f", arguments), "{text}");
    }
}

/// Writes a value as Python's `repr` does, in either kind of quotes.
fn repr(value: &Value, quote: char, out: &mut String) {
    match value {
        Value::Null => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Number(number) => out.push_str(&number.to_string()),
        Value::String(text) => {
            out.push(quote);
            for c in text.chars() {
                match c {
                    c if c == quote || c == '\\' => out.extend(['\\', c]),
                    '\n' => out.push_str("\\n"),
                    c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
                    c => out.push(c),
                }
            }
            out.push(quote);
        }
        Value::Array(list) => {
            out.push('[');
            for (index, value) in list.iter().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                repr(value, quote, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push('{');
            for (index, (key, value)) in map.iter().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                repr(&key.as_str().into(), quote, out);
                out.push_str(": ");
                repr(value, quote, out);
            }
            out.push('}');
        }
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<i32>().prop_map(|number| Value::from(f64::from(number) / 4.0)),
        "[a-z'\"\\\\,()\\[\\]{}= é\n\u{1}]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[a-z' ]{0,4}", inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn any_arguments_come_back(
        values in prop::collection::vec(any_value(), 0..4),
        quote in prop::sample::select(vec!['"', '\'']),
        cuts in prop::collection::vec(0usize..200, 0..20),
    ) {
        let mut reply = "[f(".to_owned();
        for (index, value) in values.iter().enumerate() {
            reply.push_str(&format!("{}a{index}=", if index == 0 { "" } else { ", " }));
            repr(value, quote, &mut reply);
        }
        reply.push_str(")]");
        let parts = read_cut(&format(), &reply, &cuts);
        prop_assert_eq!(parts.len(), 2, "{} {:?}", reply, parts);
        let Part::Arguments { text, .. } = &parts[1] else { panic!("{parts:?}") };
        let read: serde_json::Map<String, Value> = serde_json::from_str(text).unwrap();
        prop_assert_eq!(read.values().cloned().collect::<Vec<_>>(), values);
    }
}

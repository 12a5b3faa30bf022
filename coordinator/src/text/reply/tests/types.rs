//! The types of values that models write as text.
use super::*;

/// What one parameter of the function `f` becomes.
fn value(rules: &ReplyRules, parameter: &str, text: &str) -> serde_json::Value {
    let reply = format!("<function=f><parameter={parameter}>{text}</parameter></function>");
    let parts = read(rules, &reply);
    let [_, Part::Arguments { text: arguments, .. }] = &parts[..] else { panic!("{parts:?}") };
    let arguments: serde_json::Value = serde_json::from_str(arguments).unwrap();
    arguments[parameter].clone()
}

/// As pydantic writes the types of fields that are models or enumerations.
#[test]
fn types_may_be_said_elsewhere_in_the_schema() {
    let many: Vec<_> = (0..3000).map(|_| json!({"$ref": "#/$defs/Many"})).collect();
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {
        "properties": {
            "zip": {"$ref": "#/$defs/Zip"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
            "described": {"allOf": [{"$ref": "#/$defs/Zip"}], "description": "x"},
            "both": {"allOf": [{"type": ["string", "integer"]}, {"$ref": "#/$defs/Zip"}]},
            "escaped": {"$ref": "#/$defs/a~1b~0c"},
            "property": {"$ref": "#/properties/zip"},
            "count": {"$ref": "#/$defs/Count"},
            "loop": {"$ref": "#/$defs/Loop"},
            "many": {"$ref": "#/$defs/Many"},
            "absent": {"$ref": "#/$defs/Absent"},
            "remote": {"$ref": "https://example.com/zip"},
        },
        "$defs": {
            "Zip": {"type": "string"}, "Count": {"type": "integer"}, "a/b~c": {"type": "string"},
            "Loop": {"$ref": "#/$defs/Loop"}, "Many": {"anyOf": many},
        },
    }}}]);
    let rules =
        ReplyRules { parameters: Parameters::of(&tools), ..rules(Some(CallFormat::Qwen3Coder)) };
    for (parameter, text, expected) in [
        ("zip", "90210", json!("90210")),
        ("maybe", "90210", json!("90210")),
        ("maybe", "null", json!(null)),
        ("described", "90210", json!("90210")),
        ("both", "90210", json!("90210")),
        ("escaped", "90210", json!("90210")),
        ("property", "90210", json!("90210")),
        ("count", "7", json!(7)),
        // Nothing is known of these.
        ("loop", "7", json!(7)),
        ("many", "x", json!("x")),
        ("absent", "7", json!(7)),
        ("remote", "x", json!("x")),
    ] {
        assert_eq!(value(&rules, parameter, text), expected, "{parameter} {text}");
    }
}

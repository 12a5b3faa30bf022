//! Schemas that combine others, and objects that are open.
use super::*;

/// A discriminated `Union[Cat, Dog]` inside a model, as pydantic writes it.
#[test]
fn tagged_unions_are_followed() {
    let animal = |kind: &str, name: &str, schema: Value| {
        json!({"properties": {"kind": {"const": kind, "title": "Kind", "type": "string"}, name: schema},
            "required": ["kind", name], "title": kind, "type": "object"})
    };
    let schema = json!({
        "$defs": {
            "Cat": animal("cat", "lives", json!({"type": "integer", "minimum": 1, "maximum": 9})),
            "Dog": animal("dog", "tame", json!({"type": "boolean"})),
        },
        "properties": {"pet": {
            "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "title": "Pet"}},
        "required": ["pet"], "title": "Owner", "type": "object"});
    let texts = texts(&model("models/demo"), &json_spec(&schema), 400);
    let mut seen = [0, 0];
    for text in texts {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let (owner, pet) = (value.as_object().unwrap(), value["pet"].as_object().unwrap());
        // No other properties: the schema does not mention any.
        assert_eq!((owner.len(), pet.len()), (1, 2), "{text}");
        match pet["kind"].as_str().unwrap() {
            "cat" => assert!((1..=9).contains(&pet["lives"].as_u64().unwrap()), "{text}"),
            _ => assert!(pet["tame"].is_boolean(), "{text}"),
        }
        seen[usize::from(pet["kind"] == "dog")] += 1;
    }
    assert!(seen[0] > 5 && seen[1] > 5, "{seen:?}");
}

#[test]
fn objects_have_other_properties_where_the_schema_lets_them() {
    let schema = |open: Option<bool>| {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "null"}}});
        if let Some(open) = open {
            schema["additionalProperties"] = open.into();
        }
        json_spec(&schema)
    };
    let model = model("models/demo");
    let guides = Guides::new(&model).unwrap();
    let takes = |open, text: &str| {
        let mut guide = guides.compile(&schema(open)).unwrap().guide(false).unwrap();
        let tokens = model.encode(text, false).unwrap();
        tokens.iter().all(|token| known(&mut guide).allows(*token) && guide.accept(*token).is_ok())
    };
    for (open, others) in [(None, false), (Some(false), false), (Some(true), true)] {
        assert!(takes(open, "{\"a\":null}"), "{open:?}");
        assert_eq!(takes(open, "{\"b\":null}"), others, "{open:?}");
    }
}

//! PURE: small JSON schemas, as OpenAPI 3.1 has them.
use serde_json::{Map, Value, json};

/// The properties of an object, by name.
pub(super) type Properties = Map<String, Value>;

/// The properties written in `json!`.
pub(super) fn properties(object: Value) -> Properties {
    match object {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

pub(super) fn integer(min: impl Into<i64>, max: impl Into<i64>) -> Value {
    json!({"type": "integer", "minimum": min.into(), "maximum": max.into()})
}

pub(super) fn number((min, max): (f64, f64)) -> Value {
    json!({"type": "number", "minimum": min, "maximum": max})
}

pub(super) fn boolean() -> Value {
    json!({"type": "boolean"})
}

pub(super) fn string() -> Value {
    json!({"type": "string"})
}

/// A string of so many bytes: of fewer characters, if not all are ASCII.
pub(super) fn bytes(min: usize, max: usize) -> Value {
    let mut schema = json!({"type": "string", "maxLength": max});
    if min > 0 {
        schema["minLength"] = min.into();
    }
    schema
}

pub(super) fn words(words: &[&str]) -> Value {
    json!({"type": "string", "enum": words})
}

/// This value and no other.
pub(super) fn only(value: impl Into<Value>) -> Value {
    json!({"const": value.into()})
}

pub(super) fn nothing() -> Value {
    json!({"type": "null"})
}

pub(super) fn list(items: Value, min: usize, max: usize) -> Value {
    let mut schema = json!({"type": "array", "items": items, "maxItems": max});
    if min > 0 {
        schema["minItems"] = min.into();
    }
    schema
}

/// A list without a bound of its own.
pub(super) fn any_list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

pub(super) fn any_object() -> Value {
    json!({"type": "object"})
}

pub(super) fn any_of(schemas: impl Into<Vec<Value>>) -> Value {
    json!({"anyOf": schemas.into()})
}

pub(super) fn reference(component: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{component}")})
}

/// Adds a sentence to a schema.
pub(super) fn told(mut schema: Value, text: &str) -> Value {
    schema["description"] = text.into();
    schema
}

/// Allows null, which counts as absent, besides what a schema allows.
pub(super) fn or_null(mut schema: Value) -> Value {
    let kind = schema.get("type").cloned();
    match kind {
        Some(Value::String(kind)) if kind != "null" => {
            schema["type"] = json!([kind, "null"]);
            if let Some(words) = schema.get_mut("enum").and_then(Value::as_array_mut) {
                words.push(Value::Null);
            }
            schema
        }
        Some(_) => schema,
        // Whatever is allowed includes null.
        None if schema.as_object().is_some_and(|it| it.keys().all(|key| key == "description")) => {
            schema
        }
        None => match schema.get("enum").and_then(Value::as_array) {
            Some(values) if values.contains(&Value::Null) => schema,
            _ => match schema.get_mut("anyOf").and_then(Value::as_array_mut) {
                Some(schemas) => {
                    if !schemas.contains(&nothing()) {
                        schemas.push(nothing());
                    }
                    schema
                }
                None => any_of([schema, nothing()]),
            },
        },
    }
}

/// An object of a request: null counts as absent, and fields that nobody knows are ignored.
pub(super) fn given(required: &[&str], properties: Properties) -> Value {
    let properties = properties.into_iter().map(|(name, schema)| {
        let schema = if required.contains(&name.as_str()) { schema } else { or_null(schema) };
        (name, schema)
    });
    let mut schema = json!({"type": "object", "properties": properties.collect::<Map<_, _>>()});
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    schema
}

/// An object of an answer: what it always has, and what it may have.
pub(super) fn answer(always: Value, maybe: Value) -> Value {
    let mut all = properties(always);
    let required: Vec<String> = all.keys().cloned().collect();
    all.extend(properties(maybe));
    json!({"type": "object", "required": required, "properties": all})
}

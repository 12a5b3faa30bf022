//! PURE: closes schemas: an object that does not say which other properties it allows gets none
//! beyond those it names. JSON Schema allows any; models held to that keep writing forever, and
//! vLLM's grammars close objects, too.
//!
//! Schemas that are merged with others (`allOf`, or keywords beside `anyOf`, `oneOf` and `$ref`)
//! stay open: if each part were closed by itself, no object would match them all.
use std::collections::HashSet;

use serde_json::{Map, Value};

use super::bounds::merges;

/// Keywords that map property names to schemas.
const NAMED: [&str; 2] = ["properties", "patternProperties"];
/// Keywords that map names to schemas for `$ref`.
const DEFINED: [&str; 2] = ["$defs", "definitions"];
/// Keywords with a schema, or a list of them, for a part of the described value.
const WITHIN: [&str; 4] = ["items", "prefixItems", "additionalItems", "additionalProperties"];
/// Keywords with a list of schemas for the described value itself.
const IN_PLACE: [&str; 3] = ["allOf", "anyOf", "oneOf"];

/// Formats that grammars know. Others are only annotations, as all formats are in JSON Schema by
/// default: clients' libraries write `password`, `path` or `binary` on their own.
const FORMATS: [&str; 10] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Returns the schema with its objects closed, and without formats that are annotations.
#[must_use]
pub(crate) fn closed(schema: &Value) -> Value {
    let SchemaObjects { seen, open, .. } = SchemaObjects::of(schema);
    let closes = |map: &Map<String, Value>| {
        let (place, has) = (std::ptr::from_ref(map), |key: &str| map.contains_key(key));
        seen.contains(&place)
            && !open.contains(&place)
            && (has("properties") || has("patternProperties"))
            && !has("additionalProperties")
            && !has("unevaluatedProperties")
            && !requires_unnamed(map)
    };
    let change = |map: &Map<String, Value>, copied: &mut Map<String, Value>| {
        if closes(map) {
            copied.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
        let format = map.get("format").and_then(Value::as_str);
        if format.is_some_and(|it| !FORMATS.contains(&it))
            && seen.contains(&std::ptr::from_ref(map))
        {
            copied.remove("format");
        }
    };
    copy(schema, &change)
}

/// Keywords that grammars cannot enforce.
const UNENFORCED: [&str; 14] = [
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// What look-around begins with, in regular expressions.
const LOOK_AROUND: [&str; 4] = ["(?=", "(?!", "(?<=", "(?<!"];

/// Returns the schema without what demands nothing: that names are strings, which zod writes for
/// every map.
#[must_use]
pub(crate) fn without_truisms(schema: &Value) -> Value {
    without(schema, is_truism)
}

/// Returns the schema without what demands nothing, and without `uniqueItems`, which clients'
/// libraries write for sets.
#[must_use]
pub(crate) fn without_unique_items(schema: &Value) -> Value {
    without(schema, |key, value| key == "uniqueItems" || is_truism(key, value))
}

/// Returns the schema without what grammars cannot enforce, for clients that did not ask for
/// strictness: their libraries write `uniqueItems` for sets, `propertyNames` for maps, patterns
/// with look-around for decimals and addresses.
#[must_use]
pub(crate) fn loosened(schema: &Value) -> Value {
    without(schema, |key, value| {
        UNENFORCED.contains(&key) || key == "pattern" && value.as_str().is_some_and(looks_around)
    })
}

/// Whether a pattern has look-around: not what only looks like it, within a class or behind a
/// backslash, and no group with a name (`(?<name>..)`).
fn looks_around(pattern: &str) -> bool {
    let (mut is_escaped, mut in_class) = (false, false);
    for (at, c) in pattern.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class => {
                let rest = &pattern[at..];
                if LOOK_AROUND.iter().any(|look| rest.starts_with(look)) {
                    return true;
                }
            }
            _ => {}
        }
    }
    false
}

/// Whether a keyword holds for every value.
fn is_truism(key: &str, value: &Value) -> bool {
    key == "propertyNames" && *value == serde_json::json!({"type": "string"})
}

/// Returns the schema without the keywords, with their values, of which `goes` says so.
fn without(schema: &Value, goes: impl Fn(&str, &Value) -> bool) -> Value {
    let seen = SchemaObjects::of(schema).seen;
    let change = |map: &Map<String, Value>, copied: &mut Map<String, Value>| {
        if seen.contains(&std::ptr::from_ref(map)) {
            copied.retain(|key, _| map.get(key).is_none_or(|value| !goes(key, value)));
        }
    };
    copy(schema, &change)
}

/// Whether the schema requires a property that it does not name, which must then be an additional
/// one.
fn requires_unnamed(map: &Map<String, Value>) -> bool {
    let named = map.get("properties").and_then(Value::as_object);
    let required = map.get("required").and_then(Value::as_array);
    let is_named = |name: &Value| {
        name.as_str().is_none_or(|name| named.is_some_and(|named| named.contains_key(name)))
    };
    required.is_some_and(|required| !required.iter().all(is_named))
}

fn copy(value: &Value, change: &impl Fn(&Map<String, Value>, &mut Map<String, Value>)) -> Value {
    match value {
        Value::Object(map) => {
            let mut copied: Map<String, Value> =
                map.iter().map(|(key, value)| (key.clone(), copy(value, change))).collect();
            change(map, &mut copied);
            Value::Object(copied)
        }
        Value::Array(list) => list.iter().map(|it| copy(it, change)).collect(),
        other => other.clone(),
    }
}

/// The objects of a JSON document that are schemas, by address: references may point anywhere, and
/// constants and defaults only look like schemas.
struct SchemaObjects<'a> {
    root: &'a Value,
    seen: HashSet<*const Map<String, Value>>,
    /// The schemas that are merged with others.
    open: HashSet<*const Map<String, Value>>,
}

impl<'a> SchemaObjects<'a> {
    fn of(root: &'a Value) -> Self {
        let mut found = Self { root, seen: HashSet::new(), open: HashSet::new() };
        found.all();
        found
    }

    /// Finds all schemas. Iterative, since references may form chains of thousands.
    fn all(&mut self) {
        let mut waiting = vec![(self.root, false)];
        while let Some((value, merged)) = waiting.pop() {
            if let Some(map) = value.as_object() {
                self.schema(map, merged, &mut waiting);
            }
        }
    }

    /// Visits a schema; `merged` tells whether it is part of a merged one.
    fn schema(
        &mut self,
        map: &'a Map<String, Value>,
        merged: bool,
        waiting: &mut Vec<(&'a Value, bool)>,
    ) {
        let place = std::ptr::from_ref(map);
        let merged = merged || merges(map);
        // A schema seen before is visited again when it turns out to be part of a merged one.
        let is_new = self.seen.insert(place);
        let opens = merged && self.open.insert(place);
        if !is_new && !opens {
            return;
        }
        // Several parts may describe the same property, or the same place.
        let within = merged || NAMED.iter().all(|key| map.contains_key(*key));
        for (key, value) in map {
            match (key.as_str(), value) {
                (key, Value::Object(named)) if DEFINED.contains(&key) => {
                    waiting.extend(named.values().map(|it| (it, false)));
                }
                (key, Value::Object(named)) if NAMED.contains(&key) => {
                    waiting.extend(named.values().map(|it| (it, within)));
                }
                (key, Value::Array(list)) if WITHIN.contains(&key) => {
                    waiting.extend(list.iter().map(|it| (it, within)));
                }
                (key, value) if WITHIN.contains(&key) => waiting.push((value, within)),
                (key, Value::Array(list)) if IN_PLACE.contains(&key) => {
                    waiting.extend(list.iter().map(|it| (it, merged)));
                }
                ("$ref", Value::String(to)) => {
                    let target = to.strip_prefix('#').and_then(|to| self.root.pointer(to));
                    waiting.extend(target.map(|target| (target, merged)));
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn look_around_is_told_from_what_looks_like_it() {
        for looks in ["a(?=b)", "^(?!a)b", "(?<=a)b", "(?<!a)b", r"\\(?=a)", "[a](?=b)", "((?=a))"]
        {
            assert!(looks_around(looks), "{looks}");
        }
        for plain in
            ["(?<y>[0-9]{4})", "(?:a)", r"\(?=", "[(?=]", r"[\](?=]", "(a)?=", "(", "é(?i)", ""]
        {
            assert!(!looks_around(plain), "{plain}");
        }
        let named = json!({"properties": {"a": {"pattern": "^(?<y>[0-9]{4})-(?<m>[0-9]{2})$"}}});
        assert_eq!(loosened(&named), named);
    }

    fn object(more: &Value) -> Value {
        let mut object = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        for (key, value) in more.as_object().unwrap() {
            object[key] = value.clone();
        }
        object
    }

    #[test]
    fn objects_that_say_nothing_of_other_properties_have_none() {
        let (open, shut) = (object(&json!({})), object(&json!({"additionalProperties": false})));
        let within = |it: &Value| {
            json!({"$defs": {"d": it}, "type": "array", "prefixItems": [it, {"$ref": "#/$defs/d"}],
                "items": {"anyOf": [it, {"type": "null"}]}})
        };
        assert_eq!(closed(&within(&open)), within(&shut));
        let nested = |it: &Value| {
            let mut outer = object(&json!({"additionalProperties": it}));
            outer["properties"]["b"] = it.clone();
            outer
        };
        assert_eq!(closed(&nested(&open)), nested(&shut));
        // Old versions of pydantic put a reference and a description side by side like this.
        let described = |it: &Value| json!({"allOf": [{"$ref": "#/other/d"}], "description": "x", "other": {"d": it}});
        assert_eq!(closed(&described(&open)), described(&shut));
        let patterns = json!({"patternProperties": {"^a": {}}});
        assert_eq!(closed(&patterns)["additionalProperties"], json!(false));
        let both = json!({"properties": {"a": open}, "patternProperties": {"^a": open}});
        let made = closed(&both);
        assert_eq!(made["additionalProperties"], json!(false));
        assert_eq!((&made["properties"]["a"], &made["patternProperties"]["^a"]), (&open, &open));
        let required = |it: &Value| json!({"properties": {"a": it}, "required": ["a"]});
        assert_eq!(closed(&required(&open))["properties"], required(&shut)["properties"]);
        assert_eq!(closed(&required(&open))["additionalProperties"], json!(false));
    }

    #[test]
    fn what_says_it_and_what_is_merged_stays_as_it_is() {
        let base = object(&json!({}));
        for stays in [
            object(&json!({"additionalProperties": true})),
            object(&json!({"additionalProperties": {"type": "null"}})),
            json!({"type": "object"}),
            json!({"allOf": [base, {"properties": {"b": {}}}]}),
            json!({"$ref": "#/$defs/d", "properties": {"b": {}}, "$defs": {"d": base}}),
            json!({"anyOf": [base, {"$ref": "#/$defs/d"}], "properties": {"b": {}},
                "$defs": {"d": base}}),
            // Seen alone first, then as a part, and through another reference.
            json!({"prefixItems": [{"$ref": "#/$defs/d"},
                {"allOf": [{"$ref": "#/$defs/e"}, {"properties": {"b": {}}}]}],
                "$defs": {"d": base, "e": {"$ref": "#/$defs/d"}}}),
            // One property described in two places.
            json!({"allOf": [{"properties": {"b": base}}, {"properties": {"b": {"properties": {"c": {}}}}}]}),
            json!({"allOf": [{"items": base}, {"items": {"properties": {"c": {}}}}]}),
            // It requires an additional property.
            object(&json!({"required": ["a", "b"]})),
            // Values, not schemas.
            json!({"const": base, "default": base, "enum": [base], "examples": [base]}),
        ] {
            assert_eq!(closed(&stays), stays);
        }
        // Unknown formats are removed; values and names that look like them stay.
        let said = json!({"$defs": {"d": {"type": "string", "format": "password"}}, "items":
            {"anyOf": [{"format": "path"}, {"format": "uuid"}, {"$ref": "#/$defs/d"},
            {"const": {"format": "binary"}}, {"properties": {"format": {"format": "base64"}},
            "additionalProperties": true}]}});
        let kept = json!({"$defs": {"d": {"type": "string"}}, "items": {"anyOf": [{},
            {"format": "uuid"}, {"$ref": "#/$defs/d"}, {"const": {"format": "binary"}},
            {"properties": {"format": {}}, "additionalProperties": true}]}});
        assert_eq!(closed(&said), kept);
        let unique = json!({"items": {"uniqueItems": true, "const": {"uniqueItems": true}},
            "properties": {"uniqueItems": {"uniqueItems": false}, "not": {"not": {}}},
            "propertyNames": {"pattern": "^a"}, "patternProperties": {"^x": {"if": {}, "then": {}}},
            "anyOf": [{"pattern": "^(?!a)b"}, {"pattern": "^b"}, {"type": "string", "contains": {}}],
            "required": ["not"]});
        let kept = json!({"items": {"const": {"uniqueItems": true}},
            "properties": {"uniqueItems": {}, "not": {}}, "patternProperties": {"^x": {}},
            "anyOf": [{}, {"pattern": "^b"}, {"type": "string"}], "required": ["not"]});
        assert_eq!(loosened(&unique), kept);
        let unique = json!({"items": {"uniqueItems": true}, "not": {"uniqueItems": true}});
        let kept = json!({"items": {}, "not": {"uniqueItems": true}});
        assert_eq!(without_unique_items(&unique), kept);
        // As zod writes a map from strings to numbers.
        let names = json!({"type": "string"});
        let map = json!({"type": "object", "propertyNames": names, "not": {"propertyNames": {}},
            "additionalProperties": {"type": "number"}, "properties": {"propertyNames": names}});
        let kept = json!({"type": "object", "not": {"propertyNames": {}},
            "additionalProperties": {"type": "number"}, "properties": {"propertyNames": names}});
        assert_eq!(without_truisms(&map), kept);
        assert_eq!(without_unique_items(&map), kept);
        // Names are not keywords; references may form cycles.
        let named = json!({"properties": {"properties": {"const": base}, "allOf": {"$ref": "#"}}});
        let mut expected = named.clone();
        expected["additionalProperties"] = json!(false);
        assert_eq!(closed(&named), expected);
    }
}

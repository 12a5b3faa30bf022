//! PURE: bounds on what makes compiling a schema expensive, counted before it is compiled. Property
//! patterns are compared in pairs, and where schemas are merged, each alternative gets all
//! properties of what it is merged with.
use std::collections::HashMap;

use serde_json::{Map, Value};

/// Maximum number of `patternProperties` entries in a schema, in total.
const PATTERNS_MAX: usize = 64;
/// Maximum number of properties that merging may produce: alternatives times properties.
const MERGED_MAX: usize = 200_000;
/// Longest chain of references followed when counting alternatives.
const DEPTH_MAX: usize = 64;

/// Checks that the cost of compiling this schema is bounded.
///
/// # Errors
/// One sentence that continues after the field's name.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let mut found = SchemaCounts::default();
    found.schema(schema);
    let SchemaCounts { patterns, properties, members, merges } = found;
    if patterns > PATTERNS_MAX {
        return Err(format!(
            "has {patterns} entries of `patternProperties`, the limit is {PATTERNS_MAX}"
        ));
    }
    if merges.is_empty() {
        return Ok(());
    }
    let mut ways = AlternativeCounts { root: schema, known: HashMap::new() };
    let most = merges.iter().map(|merge| ways.of_object(merge, 0)).max().unwrap_or(1);
    let most = most.max(members);
    if most.saturating_mul(properties) > MERGED_MAX {
        return Err(format!(
            "merges {most} alternatives (`anyOf`, `oneOf`) with {properties} `properties`: the \
             product of the two is limited to {MERGED_MAX} where `allOf` or keywords beside \
             `anyOf` are merged with them"
        ));
    }
    Ok(())
}

/// The counts of a whole schema.
#[derive(Default)]
struct SchemaCounts<'a> {
    patterns: usize,
    properties: usize,
    /// Total members of `anyOf` and `oneOf`.
    members: usize,
    merges: Vec<&'a Map<String, Value>>,
}

impl<'a> SchemaCounts<'a> {
    /// Counts a schema and everything below it, schema or not: references may point anywhere.
    fn schema(&mut self, value: &'a Value) {
        let object = match value {
            Value::Object(object) => object,
            Value::Array(members) => return members.iter().for_each(|it| self.schema(it)),
            _ => return,
        };
        if merges(object) {
            self.merges.push(object);
        }
        for (key, value) in object {
            match (key.as_str(), value) {
                ("properties", Value::Object(named)) => self.properties += named.len(),
                ("patternProperties", Value::Object(named)) => {
                    self.patterns += named.len();
                    self.properties += named.len();
                }
                ("anyOf" | "oneOf", Value::Array(members)) => self.members += members.len(),
                _ => {}
            }
            match (key.as_str(), value) {
                // The keys below these are names, not keywords.
                (
                    "properties" | "patternProperties" | "$defs" | "definitions"
                    | "dependentSchemas",
                    Value::Object(named),
                ) => named.values().for_each(|it| self.schema(it)),
                _ => self.schema(value),
            }
        }
    }
}

/// Whether this schema combines several schemas.
pub(super) fn merges(object: &Map<String, Value>) -> bool {
    let has = |key: &str| object.contains_key(key);
    let parts = object.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    let chooses = has("anyOf") || has("oneOf");
    let plain = has("properties") || has("patternProperties");
    let whole = has("allOf") || has("$ref");
    let merges = [chooses, plain, whole].into_iter().filter(|it| *it).count() >= 2;
    merges || parts >= 2 || (has("anyOf") && has("oneOf")) || (has("allOf") && has("$ref"))
}

/// Counts the alternatives that a schema has once its parts are merged.
struct AlternativeCounts<'a> {
    root: &'a Value,
    /// The count per reference; 1 while it is being counted.
    known: HashMap<&'a str, usize>,
}

impl<'a> AlternativeCounts<'a> {
    fn of(&mut self, value: &'a Value, depth: usize) -> usize {
        value.as_object().map_or(1, |object| self.of_object(object, depth))
    }

    fn of_object(&mut self, object: &'a Map<String, Value>, depth: usize) -> usize {
        let mut ways: usize = 1;
        if depth > DEPTH_MAX {
            return ways;
        }
        for (key, value) in object {
            let times = match (key.as_str(), value) {
                ("anyOf" | "oneOf", Value::Array(members)) => members
                    .iter()
                    .fold(0usize, |sum, it| sum.saturating_add(self.of(it, depth + 1))),
                ("allOf", Value::Array(parts)) => parts
                    .iter()
                    .fold(1usize, |product, it| product.saturating_mul(self.of(it, depth + 1))),
                ("$ref", Value::String(to)) => self.referred(to, depth),
                _ => 1,
            };
            ways = ways.saturating_mul(times.max(1));
        }
        ways
    }

    fn referred(&mut self, to: &'a str, depth: usize) -> usize {
        if let Some(known) = self.known.get(to) {
            return *known;
        }
        let Some(target) = to.strip_prefix('#').and_then(|to| self.root.pointer(to)) else {
            return 1;
        };
        self.known.insert(to, 1);
        let ways = self.of(target, depth + 1);
        self.known.insert(to, ways);
        ways
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn named(count: usize, value: &Value) -> Value {
        (0..count).map(|n| (format!("p{n}"), value.clone())).collect::<Map<_, _>>().into()
    }

    #[test]
    fn what_is_dear_is_said_with_its_bound() {
        let object = |count| json!({"type": "object", "properties": named(count, &json!({}))});
        let objects = |count: usize| vec![object(1); count];
        for (schema, what) in [
            (json!({"patternProperties": named(65, &json!({}))}), "65 entries of `patternProp"),
            (
                json!({"properties": named(33, &json!({"patternProperties": named(2, &json!({}))}))}),
                "66 entries of `patternProp",
            ),
            (
                json!({"allOf": [{"anyOf": objects(400)}, object(1500)]}),
                "merges 400 alternatives (`anyOf`, `oneOf`) with 1900 `properties`",
            ),
            (
                json!({"oneOf": objects(400), "properties": named(1500, &json!({}))}),
                "merges 400 alternatives",
            ),
            (
                json!({"$defs": {"many": object(1500)}, "$ref": "#/$defs/many",
                    "anyOf": objects(400)}),
                "merges 400 alternatives",
            ),
            // Alternatives of alternatives, also through references.
            (
                json!({"$defs": {"a": {"anyOf": objects(50)}},
                    "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}),
                "merges 125000 alternatives",
            ),
        ] {
            let said = check(&schema).unwrap_err();
            assert!(said.contains(what), "{said}");
        }
        for fine in [
            json!({"patternProperties": named(64, &json!({}))}),
            json!({"anyOf": objects(3000), "$defs": {"x": object(3000)}}),
            json!({"allOf": [{"anyOf": objects(100)}, object(1500)]}),
            json!({"allOf": [object(3000), object(3000)]}),
            // Names and values are not keywords.
            json!({"properties": {"patternProperties": {"enum": [1]}, "anyOf": {}, "allOf": {}}}),
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "anyOf": [{}, {}]}}}),
            json!({"$ref": "#", "anyOf": [{"$ref": "#"}], "allOf": true}),
        ] {
            assert_eq!(check(&fine), Ok(()), "{fine}");
        }
    }
}

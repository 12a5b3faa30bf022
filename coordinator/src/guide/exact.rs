//! PURE: takes out of schemas what llguidance does not hold: bounds and constants that no float is,
//! and divisors that none stands for. In their place stands a reference to a definition that
//! refers to itself: the library makes a symbol of it that derives nothing else, and `graft` gives
//! that the text of the numbers.
//!
//! The library cannot merge such a definition with another schema, and fails. What one schema says
//! of numbers is merged here, with what is said of them alone in its `allOf`.
use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::decimal::Decimal;
use super::numbers;
use super::ranges::{End, NumberRule, Range};

/// What a definition is named that stands for a rule, before the rule's number.
pub(super) const NAME: &str = "tutti-number-";
/// Maximum number of rules in a grammar. What has no room is left to the library.
const RULES_MAX: usize = 1000;

/// The types whose values are not numbers.
const OTHERS: [&str; 5] = ["null", "boolean", "string", "array", "object"];
/// Keywords that say something of numbers alone.
const NUMERIC: [&str; 5] =
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
/// Keywords that say something of numbers, too.
const GENERAL: [&str; 4] = ["type", "const", "enum", "allOf"];
/// Keywords that may say something of numbers which is not merged here.
const ELSEWHERE: [&str; 9] =
    ["anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "not", "if", "then", "else"];
/// Keywords that say nothing.
const ANNOTATIONS: [&str; 8] = [
    "$comment",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];
/// Keywords that stay in their place, whatever takes that of the others.
const KEPT: [&str; 7] = ["$anchor", "$defs", "$id", "$schema", "definitions", "id", "x-guidance"];

/// Returns a schema that refers to `rules` where it has numbers that the library does not hold, if
/// they can be told apart from what else it says. Adds to the rules those that are not there yet.
pub(super) fn taken_out(schema: &Value, rules: &mut Vec<NumberRule>) -> Value {
    let mut work = Work { rules, used: BTreeSet::new() };
    let mut made = work.of(schema, false);
    let used = work.used;
    if used.is_empty() {
        return made;
    }
    let Value::Object(root) = &mut made else { return schema.clone() };
    let definitions = root.entry("$defs").or_insert_with(|| Value::Object(Map::new()));
    let Value::Object(definitions) = definitions else { return schema.clone() };
    for rule in used {
        definitions.insert(format!("{NAME}{rule}"), Value::Object(reference(rule)));
    }
    made
}

/// The rule that a symbol of a grammar stands for.
pub(super) fn rule_of(symbol: &str) -> Option<usize> {
    let (_, rest) = symbol.split_once(NAME)?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

fn reference(rule: usize) -> Map<String, Value> {
    Map::from_iter([("$ref".to_owned(), Value::String(format!("#/$defs/{NAME}{rule}")))])
}

struct Work<'r> {
    rules: &'r mut Vec<NumberRule>,
    /// The rules that the schema refers to.
    used: BTreeSet<usize>,
}

impl Work<'_> {
    /// Looks everywhere, at schemas or not, but not at values; `named` tells whether an object's
    /// keys are names.
    fn of(&mut self, value: &Value, named: bool) -> Value {
        match value {
            Value::Array(list) => list.iter().map(|it| self.of(it, false)).collect(),
            Value::Object(map) => {
                let own = if named { None } else { self.own(map) };
                Value::Object(own.unwrap_or_else(|| self.entries(map, named, |_| true)))
            }
            other => other.clone(),
        }
    }

    /// Some entries of an object, with what takes the place of their values.
    fn entries(
        &mut self,
        map: &Map<String, Value>,
        named: bool,
        keys: impl Fn(&str) -> bool,
    ) -> Map<String, Value> {
        let mut made = Map::new();
        for (key, value) in map.iter().filter(|(key, _)| keys(key)) {
            let value = match key.as_str() {
                "const" | "enum" | "default" | "examples" if !named => value.clone(),
                key => self.of(value, !named && numbers::NAMES.contains(&key)),
            };
            made.insert(key.clone(), value);
        }
        made
    }

    /// Returns what takes a schema's place; `None` if it can stay, or must. What may fail comes
    /// first, so that all that lies within is copied once, however deep it lies.
    fn own(&mut self, map: &Map<String, Value>) -> Option<Map<String, Value>> {
        let said = Numbers::of(map)?;
        let mut options = Vec::new();
        let more = match &said.constants {
            Some(constants) => {
                let is_alone = !map.keys().any(|key| is_rest(key));
                let kept = self.constants(&said, constants, is_alone, &mut options)?;
                (!kept.is_empty()).then(|| ("enum", Value::Array(kept)))
            }
            None => {
                if let Some(rule) = said.range.rule() {
                    options.push(self.place(rule)?);
                }
                (!said.others.is_empty()).then(|| ("type", json!(said.others)))
            }
        };
        let mut made = self.entries(map, false, |key| KEPT.contains(&key));
        if let Some((key, value)) = more {
            let mut rest = self.entries(map, false, is_rest);
            rest.insert(key.to_owned(), value);
            options.push(rest);
        }
        if options.len() == 1 {
            made.extend(options.into_iter().flatten());
        } else if options.is_empty() {
            // Nothing matches.
            made.insert("enum".to_owned(), json!([]));
        } else {
            made.insert("anyOf".to_owned(), options.into_iter().map(Value::Object).collect());
        }
        Some(made)
    }

    /// Adds the options for constants, but for those that the library keeps, which it returns.
    /// `is_alone` tells whether nothing else is said of those that are no numbers.
    fn constants(
        &mut self,
        said: &Numbers<'_>,
        constants: &[&Value],
        is_alone: bool,
        options: &mut Vec<Map<String, Value>>,
    ) -> Option<Vec<Value>> {
        let (mut kept, mut own) = (Vec::new(), Vec::new());
        for constant in constants {
            match constant {
                Value::Number(number) => {
                    let is_within = said.has_numbers && said.range.has(Decimal::of(number)?);
                    if is_within && numbers::keeps(constant) {
                        kept.push((*constant).clone());
                    } else if is_within {
                        own.push(literal(constant)?);
                    }
                }
                _ if !said.others.contains(&type_of(constant)) => {}
                _ if numbers::keeps(constant) => kept.push((*constant).clone()),
                _ if is_alone => options.push(self.constant(constant)?),
                _ => return None,
            }
        }
        if !own.is_empty() {
            options.push(self.place(NumberRule { patterns: vec![own.join("|")], divisor: None })?);
        }
        Some(kept)
    }

    /// A schema of this constant alone.
    fn constant(&mut self, constant: &Value) -> Option<Map<String, Value>> {
        let schema = match constant {
            kept if numbers::keeps(kept) => json!({ "const": kept }),
            Value::Array(list) => {
                let items = list.iter().map(|it| self.constant(it)).collect::<Option<Vec<_>>>()?;
                // In any draft: a list stands for the first items.
                json!({"type": "array", "items": items, "additionalItems": false,
                    "minItems": list.len(), "maxItems": list.len()})
            }
            Value::Object(map) => {
                let mut properties = Map::new();
                for (key, value) in map {
                    properties.insert(key.clone(), Value::Object(self.constant(value)?));
                }
                let names: Vec<&String> = map.keys().collect();
                json!({"type": "object", "properties": properties, "required": names,
                    "additionalProperties": false})
            }
            other => {
                let patterns = vec![literal(other)?];
                return self.place(NumberRule { patterns, divisor: None });
            }
        };
        schema.as_object().cloned()
    }

    /// A reference to a rule; `None` if there is no room for it.
    fn place(&mut self, rule: NumberRule) -> Option<Map<String, Value>> {
        let known = self.rules.iter().position(|known| *known == rule);
        let at = known.unwrap_or(self.rules.len());
        if at == RULES_MAX {
            return None;
        }
        if known.is_none() {
            self.rules.push(rule);
        }
        self.used.insert(at);
        Some(reference(at))
    }
}

/// What a schema says of numbers.
struct Numbers<'a> {
    range: Range,
    /// The values it lists, if it does, numbers or not.
    constants: Option<Vec<&'a Value>>,
    /// Whether its types are, or include, numbers.
    has_numbers: bool,
    /// Its types beside numbers.
    others: Vec<&'static str>,
}

impl<'a> Numbers<'a> {
    /// `None` if the library holds all numbers of the schema, or if more is said of them than is
    /// understood here.
    fn of(map: &'a Map<String, Value>) -> Option<Self> {
        let mut parts = vec![map];
        if let Some(all) = map.get("allOf") {
            for part in all.as_array()? {
                let part = part.as_object()?;
                let is_plain = |key: &String| {
                    let key = key.as_str();
                    key == "type" || NUMERIC.contains(&key) || ANNOTATIONS.contains(&key)
                };
                parts.push(Some(part).filter(|part| part.keys().all(is_plain))?);
            }
        }
        let is_said_elsewhere = map.keys().any(|key| ELSEWHERE.contains(&key.as_str()));
        // The library multiplies two divisors in 32 bits, whatever comes of it.
        let divides_twice = parts.iter().filter(|it| it.contains_key("multipleOf")).count() > 1;
        if is_said_elsewhere || !divides_twice && parts.iter().all(|part| is_held(part)) {
            return None;
        }
        let constants = match (map.get("const"), map.get("enum")) {
            (None, None) => None,
            (Some(constant), None) => Some(vec![constant]),
            (None, Some(Value::Array(list))) => Some(list.iter().collect()),
            _ => return None,
        };
        let (mut has_numbers, mut whole, mut others) = (true, false, OTHERS.to_vec());
        for names in parts.iter().filter_map(|part| part.get("type")) {
            let names: Vec<&str> = match names {
                Value::Array(names) => names.iter().map(Value::as_str).collect::<Option<_>>()?,
                name => vec![name.as_str()?],
            };
            let has = |name: &str| names.contains(&name);
            has_numbers &= has("number") || has("integer");
            whole |= !has("number");
            others.retain(|name| has(name));
        }
        if !has_numbers && constants.is_none() {
            return None;
        }
        let mut range = Range::new(whole);
        for part in parts {
            for (key, value) in part {
                let (key, value) = (key.as_str(), numbers::stated(part, key, value));
                let number = match value {
                    _ if !NUMERIC.contains(&key) => continue,
                    Value::Number(number) => number,
                    // A flag whose bound is not there, or that is not set.
                    Value::Bool(_) if key.starts_with("exclusive") => continue,
                    _ => return None,
                };
                if key == "multipleOf" {
                    range.divide(Decimal::of(number)?)?;
                    continue;
                }
                let at = Decimal::of(&numbers::certain(part, key, number)?)?;
                let end = End { at, is_open: key.starts_with("exclusive") };
                match key {
                    "minimum" | "exclusiveMinimum" => range.begin(end),
                    _ => range.finish(end),
                }
            }
        }
        Some(Self { range, constants, has_numbers, others })
    }
}

/// Whether the library holds the numbers of a schema, but for those of schemas within it.
fn is_held(map: &Map<String, Value>) -> bool {
    map.iter().all(|(key, value)| match (key.as_str(), numbers::stated(map, key, value)) {
        ("const" | "enum", value) => numbers::keeps(value),
        ("multipleOf", Value::Number(number)) => numbers::divides(number),
        (key, Value::Number(number)) if NUMERIC.contains(&key) => numbers::holds(map, key, number),
        _ => true,
    })
}

/// The text of a number, as a pattern; `None` if its digits may be lost.
fn literal(constant: &Value) -> Option<String> {
    let number = constant.as_number().filter(|number| !number.is_f64())?;
    Some(number.to_string())
}

const fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Whether a keyword may say something of other values than numbers.
fn is_rest(key: &str) -> bool {
    let is_dealt_with = NUMERIC.contains(&key) || GENERAL.contains(&key);
    !is_dealt_with && !ANNOTATIONS.contains(&key) && !KEPT.contains(&key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guide::decimal::Divisor;

    fn rule(patterns: &[&str]) -> NumberRule {
        let patterns = patterns.iter().map(|it| (*it).to_owned()).collect();
        NumberRule { patterns, divisor: None }
    }

    fn to(rule: usize) -> Value {
        json!({ "$ref": format!("#/$defs/tutti-number-{rule}") })
    }

    /// What takes a property's place, and the rules that it refers to.
    fn taken(property: &Value) -> (Value, Vec<NumberRule>) {
        let schema = |property: &Value| json!({"type": "object", "properties": {"n": property}});
        let mut rules = Vec::new();
        let made = taken_out(&schema(property), &mut rules);
        let mut wanted = schema(&made["properties"]["n"]);
        for at in 0..rules.len() {
            wanted["$defs"][format!("tutti-number-{at}")] = to(at);
        }
        assert_eq!(made, wanted);
        (made["properties"]["n"].clone(), rules)
    }

    #[test]
    fn constants_that_are_no_floats_become_rules() {
        let big = [9_007_199_254_740_993_u64, u64::MAX];
        let literals = rule(&["9007199254740993|18446744073709551615"]);
        let (made, rules) = taken(&json!({"type": "integer", "enum": big, "title": "Big"}));
        assert_eq!((made, rules), (to(0), vec![literals.clone()]));
        // What else is allowed stays; what the type or a bound forbids does not.
        let listed = json!({"type": ["string", "number"], "maxLength": 3, "exclusiveMinimum": 1,
            "enum": ["a", null, 1, 2.5, big[0], -7, big[1]]});
        let (made, rules) = taken(&listed);
        let kept = json!({"maxLength": 3, "enum": ["a", 2.5]});
        assert_eq!((made, rules), (json!({"anyOf": [to(0), kept]}), vec![literals]));
        let (made, rules) = taken(&json!({"const": [{"a": i64::MIN}, "b"]}));
        let object = json!({"type": "object", "properties": {"a": to(0)}, "required": ["a"],
            "additionalProperties": false});
        let list = json!({"type": "array", "items": [object, {"const": "b"}],
            "additionalItems": false, "minItems": 2, "maxItems": 2});
        assert_eq!((made, rules), (list, vec![rule(&["-9223372036854775808"])]));
        let none = json!({"type": "integer", "maximum": 5, "const": big[0]});
        assert_eq!(taken(&none), (json!({"enum": []}), Vec::new()));
    }

    #[test]
    fn bounds_and_divisors_that_are_no_floats_become_rules() {
        let (made, rules) = taken(&json!({"type": "integer", "minimum": u64::MAX, "default": 1}));
        assert_eq!((made, rules.len()), (to(0), 1));
        assert!(rules[0].patterns[0].contains("18446744073709551615"), "{rules:?}");
        // Of other types the schema says the same as before.
        let any = json!({"multipleOf": 0.53, "maxLength": 3, "allOf": [{"minimum": -1}]});
        let (made, rules) = taken(&any);
        let others = json!({"maxLength": 3,
            "type": ["null", "boolean", "string", "array", "object"]});
        assert_eq!(made, json!({"anyOf": [to(0), others]}));
        assert_eq!(rules[0].divisor, Some(Divisor { digits: 53, decimals: 2 }));
        // In several parts, and as a flag.
        let parts = json!({"type": "number", "minimum": 9_007_199_254_740_993_u64,
            "exclusiveMinimum": true, "allOf": [{"maximum": 9_007_199_254_740_994_u64}, {}]});
        let (made, rules) = taken(&parts);
        assert_eq!((made, rules[0].patterns.len()), (to(0), 2));
        // Each is held, but not what the library makes of the two.
        let twice = json!({"multipleOf": 100_000, "allOf": [{"multipleOf": 100_000}],
            "type": "integer"});
        let (made, rules) = taken(&twice);
        let divisor = Some(Divisor { digits: 100_000, decimals: 0 });
        assert_eq!((made, rules.len(), rules[0].divisor), (to(0), 1, divisor));
        let none = json!({"type": "integer", "minimum": 9_007_199_254_740_993_u64,
            "allOf": [{"exclusiveMaximum": 9_007_199_254_740_993_u64}]});
        assert_eq!(taken(&none), (json!({"enum": []}), Vec::new()));
    }

    #[test]
    fn what_lies_within_is_looked_at_too() {
        let within = json!({"const": u64::MAX});
        let (made, rules) =
            taken(&json!({"$defs": {"a": within}, "multipleOf": 0.53, "items": within}));
        let others = json!({"items": to(1),
            "type": ["null", "boolean", "string", "array", "object"]});
        assert_eq!(made, json!({"$defs": {"a": to(1)}, "anyOf": [to(0), others]}));
        assert_eq!(rules[1..], [rule(&["18446744073709551615"])]);
    }

    #[test]
    fn what_the_library_holds_or_must_merge_stays() {
        let big = 9_007_199_254_740_993_u64;
        for stays in [
            json!({"type": "integer", "minimum": 0, "maximum": i64::MAX}),
            json!({"type": "number", "multipleOf": 0.07, "exclusiveMinimum": 0, "maximum": 1e300}),
            json!({"enum": [1, 2.5, 1e16, "a", [9_007_199_254_740_992_u64]]}),
            json!({"default": {"const": big}, "enum": [{"maximum": 5, "const": 1}]}),
            json!({"minimum": big, "anyOf": [{"type": "integer"}, {"type": "null"}]}),
            json!({"const": big, "$ref": "#/$defs/a"}),
            json!({"const": 1e30}),
            json!({"type": "string", "minimum": big}),
            json!({"const": [big], "minItems": 2}),
            // Wrong: the library says so.
            json!({"type": "integer", "minimum": big, "maximum": true}),
        ] {
            assert_eq!(taken(&stays), (stays, Vec::new()));
        }
        assert_eq!(taken_out(&json!([big, true]), &mut Vec::new()), json!([big, true]));
    }

    #[test]
    fn equal_rules_are_one_and_symbols_tell_which() {
        let (one, other) = (json!({"const": u64::MAX}), json!({"const": i64::MIN}));
        let mut rules = Vec::new();
        let first = taken_out(&json!({"items": [one, other]}), &mut rules);
        assert_eq!(first["items"], json!([to(0), to(1)]));
        let second = taken_out(&json!({"$defs": {"a": other}, "$ref": "#/$defs/a"}), &mut rules);
        assert_eq!(second["$defs"], json!({"a": to(1), "tutti-number-1": to(1)}));
        assert_eq!(rules.len(), 2);
        for (symbol, rule) in [
            ("json-schema:///#/$defs/tutti-number-12", Some(12)),
            ("json-schema:///#/$defs/tutti-number-3#2", Some(3)),
            ("json-schema:///#/$defs/tutti-number-", None),
            ("start", None),
        ] {
            assert_eq!(rule_of(symbol), rule, "{symbol}");
        }
    }
}

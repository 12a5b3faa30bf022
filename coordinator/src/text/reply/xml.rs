//! Calls as elements: `<function=f>`, `<parameter=p>`. Values are text; the function's schema tells
//! their type.
use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// Longest function name, in bytes.
const NAME_MAX: usize = 256;

/// The types of functions' parameters, from their schemas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// By function, then by parameter.
    types: HashMap<String, HashMap<String, BTreeSet<&'static str>>>,
}

const STRING: &str = "string";
const NULL: &str = "null";
const BOOLEAN: &str = "boolean";

impl Parameters {
    /// Collects the types from the `tools` of a request.
    #[must_use]
    pub fn of(tools: &Value) -> Self {
        let functions = tools.as_array().into_iter().flatten().filter_map(|it| it.get("function"));
        let types = functions.filter_map(|function| {
            let name = function.get("name")?.as_str()?.to_owned();
            let properties = function.get("parameters").and_then(|it| it.get("properties"));
            let properties = properties.and_then(Value::as_object).into_iter().flatten();
            let types = properties.map(|(name, schema)| {
                let mut types = BTreeSet::new();
                collect(schema, &mut types, 0);
                (name.clone(), types)
            });
            Some((name, types.collect()))
        });
        Self { types: types.collect() }
    }

    /// The JSON value that a parameter's text stands for.
    fn value(&self, function: &str, parameter: &str, text: &str) -> Value {
        let parse = |text: &str| serde_json::from_str::<Value>(text.trim()).ok();
        let types = self.types.get(function).and_then(|types| types.get(parameter));
        let Some(types) = types.filter(|types| !types.is_empty()) else {
            return parse(text).unwrap_or_else(|| text.into());
        };
        let parsed = match text.trim() {
            "True" if types.contains(BOOLEAN) => Some(true.into()),
            "False" if types.contains(BOOLEAN) => Some(false.into()),
            "None" if types.contains(NULL) => Some(Value::Null),
            text => parse(text),
        };
        match parsed {
            // A string is the text as written, including quotes.
            Some(value) if !value.is_string() && types.contains(kind(&value)) => value,
            Some(value) if !types.contains(STRING) => value,
            _ => text.into(),
        }
    }
}

/// Adds the types that a schema allows.
fn collect(schema: &Value, types: &mut BTreeSet<&'static str>, depth: u32) {
    const KNOWN: [&str; 7] = [STRING, NULL, BOOLEAN, "integer", "number", "object", "array"];
    if depth > 4 {
        return;
    }
    let mut add = |name: &Value| {
        let known = KNOWN.into_iter().find(|known| name.as_str() == Some(known));
        types.extend(known);
        // A number does not show which of the two it is.
        if let Some("integer" | "number") = known {
            types.extend(["integer", "number"]);
        }
    };
    match schema.get("type") {
        Some(Value::Array(names)) => names.iter().for_each(&mut add),
        Some(name) => add(name),
        None => {}
    }
    let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    types.extend(values.chain(schema.get("const")).map(kind));
    for key in ["anyOf", "oneOf"] {
        let members = schema.get(key).and_then(Value::as_array).into_iter().flatten();
        members.for_each(|member| collect(member, types, depth + 1));
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => STRING,
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(_) => "number",
        Value::Object(_) => "object",
        Value::Array(_) => "array",
    }
}

/// The result of matching the beginning of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Prefix<T> {
    /// A match, and its length in bytes.
    Match(T, usize),
    /// More text is needed.
    Unknown,
    /// No match.
    NoMatch,
}

/// Matches `<function=NAME>`; returns the name.
pub(super) fn function(text: &str) -> Prefix<String> {
    let Some(rest) = text.strip_prefix(FUNCTION) else {
        return if FUNCTION.starts_with(text) { Prefix::Unknown } else { Prefix::NoMatch };
    };
    match rest.find(['>', '<', '\n']) {
        Some(at) if rest[at..].starts_with('>') && !rest[..at].trim().is_empty() => {
            Prefix::Match(rest[..at].trim().to_owned(), FUNCTION.len() + at + 1)
        }
        None if rest.len() < NAME_MAX => Prefix::Unknown,
        _ => Prefix::NoMatch,
    }
}

/// Matches `<parameter=NAME>VALUE</parameter>`; returns both as a member of a JSON object. An
/// earlier call has searched the first `looked` bytes for its end.
pub(super) fn parameter(
    text: &str,
    looked: usize,
    function: &str,
    parameters: &Parameters,
) -> Prefix<String> {
    let Some(rest) = text.strip_prefix(PARAMETER) else {
        return if PARAMETER.starts_with(text) { Prefix::Unknown } else { Prefix::NoMatch };
    };
    // The end may have begun within those bytes.
    let from = looked.saturating_sub(PARAMETER.len() + PARAMETER_END.len());
    let from = rest.floor_char_boundary(from);
    // A parameter without an end extends to the next element.
    let ends = [PARAMETER_END, PARAMETER, FUNCTION_END];
    let found = ends.iter().filter_map(|end| Some((from + rest[from..].find(end)?, *end))).min();
    let Some((at, end)) = found else { return Prefix::Unknown };
    let taken = PARAMETER.len() + at + if end == PARAMETER_END { end.len() } else { 0 };
    let Some((name, value)) = rest[..at].split_once('>') else {
        return Prefix::Match(String::new(), taken);
    };
    let value = value.strip_prefix('\n').unwrap_or(value);
    let value = value.strip_suffix('\n').unwrap_or(value);
    let name = name.trim();
    let value = parameters.value(function, name, value);
    Prefix::Match(format!("{}: {value}", Value::from(name)), taken)
}

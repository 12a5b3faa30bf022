//! Calls as elements: `<function=f>`, `<parameter=p>`, in the notations of several models. Values
//! are text; the function's schema tells their type.
use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

use super::format::TOOL_CALL_END;
use super::prefix::Prefix;
use super::python;

/// How a model writes elements.
#[derive(Debug)]
pub(super) struct Notation {
    /// Before a function's name.
    pub(super) function: &'static str,
    /// What ends the name; `None` if the first parameter or the end of the function does.
    name_end: Option<char>,
    pub(super) function_end: &'static str,
    /// Before a parameter's name.
    parameter: &'static str,
    parameter_name_end: &'static str,
    /// Before a parameter's value, after its name and white space.
    value: &'static str,
    value_end: &'static str,
    /// A line break at either end of a value is not part of it.
    is_padded: bool,
    /// Several functions may follow a mark.
    pub(super) repeats: bool,
    /// The end of a value may be missing before another parameter.
    may_lack_end: bool,
    /// A parameter tells whether its value is a string.
    tells_strings: bool,
}

pub(super) const FUNCTION: &str = "<function=";
pub(super) const SEED_CALL: &str = "<seed:tool_call>";
pub(super) const SEED_CALL_END: &str = "</seed:tool_call>";
pub(super) const MINIMAX_CALL: &str = "<minimax:tool_call>";
pub(super) const MINIMAX_CALL_END: &str = "</minimax:tool_call>";
/// What all marks of DeepSeek V3.2 have in them.
pub(super) const DSML: &str = "｜DSML｜";
pub(super) const DEEPSEEK_CALL: &str = "<｜DSML｜function_calls>";
pub(super) const DEEPSEEK_CALL_END: &str = "</｜DSML｜function_calls>";
/// The marks within a call of GLM.
pub(super) const GLM_MARKS: [&str; 5] =
    ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", TOOL_CALL_END];
/// Behind a parameter's name, where it tells whether its value is a string.
const STRING_ATTRIBUTE: &str = " string=";
/// Longest function name, in bytes.
const NAME_MAX: usize = 256;

pub(super) const QWEN: Notation = Notation {
    function: FUNCTION,
    name_end: Some('>'),
    function_end: "</function>",
    parameter: "<parameter=",
    parameter_name_end: ">",
    value: "",
    value_end: "</parameter>",
    is_padded: true,
    repeats: false,
    may_lack_end: true,
    tells_strings: false,
};
pub(super) const SEED: Notation = Notation { is_padded: false, may_lack_end: false, ..QWEN };
pub(super) const MINIMAX: Notation = Notation {
    function: "<invoke name=",
    function_end: "</invoke>",
    repeats: true,
    parameter: "<parameter name=",
    ..SEED
};
pub(super) const DEEPSEEK: Notation = Notation {
    function: "<｜DSML｜invoke name=",
    function_end: "</｜DSML｜invoke>",
    parameter: "<｜DSML｜parameter name=",
    value_end: "</｜DSML｜parameter>",
    tells_strings: true,
    ..MINIMAX
};
pub(super) const GLM: Notation = Notation {
    function: "",
    name_end: None,
    function_end: TOOL_CALL_END,
    parameter: "<arg_key>",
    parameter_name_end: "</arg_key>",
    value: "<arg_value>",
    value_end: "</arg_value>",
    ..SEED
};

/// Names of types.
type Types = BTreeSet<&'static str>;

/// The types of functions' parameters, from their schemas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// By function, then by parameter.
    types: HashMap<String, HashMap<String, Types>>,
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
            let root = function.get("parameters").unwrap_or(&Value::Null);
            let properties = root.get("properties").and_then(Value::as_object);
            let mut schemas = Schemas { root, known: HashMap::new() };
            let types = properties.into_iter().flatten();
            let types = types.map(|(name, schema)| (name.clone(), schemas.types(schema, 0)));
            Some((name, types.collect()))
        });
        Self { types: types.collect() }
    }

    /// The JSON value that a parameter's text stands for.
    fn value(&self, function: &str, parameter: &str, text: &str) -> Value {
        let parse = |text: &str| {
            let value = serde_json::from_str::<Value>(text.trim()).ok()?;
            // A whole number that is too large would become another.
            let is_rounded = value.is_f64() && !text.contains(['.', 'e', 'E']);
            (!is_rounded).then_some(value)
        };
        let types = self.types.get(function).and_then(|types| types.get(parameter));
        let Some(types) = types.filter(|types| !types.is_empty()) else {
            return parse(text).unwrap_or_else(|| text.into());
        };
        // Templates that show values as Python writes them have models do the same.
        let literal = || python::literal(text.trim()).filter(|it| types.contains(kind(it)));
        match parse(text).or_else(literal) {
            // A string is the text as written, including quotes.
            Some(value) if !value.is_string() && types.contains(kind(&value)) => value,
            Some(value) if !types.contains(STRING) => value,
            _ => text.into(),
        }
    }
}

/// How deeply schemas within schemas are looked at.
const DEPTH_MAX: u32 = 4;

/// The schemas of one function's parameters.
struct Schemas<'a> {
    root: &'a Value,
    /// The types of what is referred to, by where that is and how deeply: found once, however many
    /// refer to it.
    known: HashMap<(&'a str, u32), Types>,
}

impl<'a> Schemas<'a> {
    /// The types that a schema allows; none if it does not say.
    fn types(&mut self, schema: &'a Value, depth: u32) -> Types {
        const KNOWN: [&str; 7] = [STRING, NULL, BOOLEAN, "integer", "number", "object", "array"];
        let mut types = Types::new();
        if depth > DEPTH_MAX {
            return types;
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
        let list = |key: &str| schema.get(key).and_then(Value::as_array).into_iter().flatten();
        types.extend(list("enum").chain(schema.get("const")).map(kind));
        for member in list("anyOf").chain(list("oneOf")) {
            types.extend(self.types(member, depth + 1));
        }
        for part in list("allOf") {
            let part = self.types(part, depth + 1);
            narrow(&mut types, part);
        }
        if let Some(to) = schema.get("$ref").and_then(Value::as_str) {
            let target = self.referred(to, depth + 1);
            narrow(&mut types, target);
        }
        types
    }

    /// The types of what a reference within the parameters leads to.
    fn referred(&mut self, to: &'a str, depth: u32) -> Types {
        if let Some(known) = self.known.get(&(to, depth)) {
            return known.clone();
        }
        let target = to.strip_prefix('#').and_then(|to| self.root.pointer(to));
        let types = target.map(|target| self.types(target, depth)).unwrap_or_default();
        self.known.insert((to, depth), types.clone());
        types
    }
}

/// Leaves the types that another schema for the same value allows as well, as far as both say.
fn narrow(types: &mut Types, other: Types) {
    if types.is_empty() {
        *types = other;
    } else if !types.is_disjoint(&other) {
        types.retain(|it| other.contains(it));
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

impl Notation {
    /// Matches `<function=NAME>`; returns the name.
    pub(super) fn function(&self, text: &str) -> Prefix<String> {
        let Some(rest) = text.strip_prefix(self.function) else {
            let is_begun = self.function.starts_with(text);
            return if is_begun { Prefix::Unknown } else { Prefix::NoMatch };
        };
        let Some(at) = rest.find(['>', '<', '\n']) else {
            return if rest.len() < NAME_MAX { Prefix::Unknown } else { Prefix::NoMatch };
        };
        let name = unquoted(&rest[..at]);
        let taken = self.function.len() + at;
        match self.name_end {
            _ if name.is_empty() => Prefix::NoMatch,
            Some(end) if rest[at..].starts_with(end) => {
                Prefix::Match(name.to_owned(), taken + end.len_utf8())
            }
            Some(_) => Prefix::NoMatch,
            None if !name.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c)) => {
                Prefix::NoMatch
            }
            None => {
                // Nothing but what follows tells that text behind the mark is a name.
                let next = rest[at..].trim_start();
                if rest.len() - at - next.len() > NAME_MAX {
                    return Prefix::NoMatch;
                }
                let follows = [self.parameter, self.function_end];
                if follows.iter().any(|mark| next.starts_with(mark)) {
                    Prefix::Match(name.to_owned(), taken)
                } else if follows.iter().any(|mark| mark.starts_with(next)) {
                    Prefix::Unknown
                } else {
                    Prefix::NoMatch
                }
            }
        }
    }

    /// Matches `<parameter=NAME>VALUE</parameter>`; returns both as a member of a JSON object. An
    /// earlier call has searched the first `looked` bytes for its end.
    pub(super) fn parameter(
        &self,
        text: &str,
        looked: usize,
        function: &str,
        parameters: &Parameters,
    ) -> Prefix<String> {
        let Some(rest) = text.strip_prefix(self.parameter) else {
            let is_begun = self.parameter.starts_with(text);
            return if is_begun { Prefix::Unknown } else { Prefix::NoMatch };
        };
        // A parameter without an end extends to the next element.
        let next = if self.may_lack_end { self.parameter } else { self.function_end };
        let ends = [self.value_end, next, self.function_end];
        // The end may have begun within those bytes.
        let longest = ends.iter().map(|end| end.len()).max().unwrap_or(0);
        let from = rest.floor_char_boundary(looked.saturating_sub(self.parameter.len() + longest));
        let found = ends.iter().filter_map(|end| Some((from + rest[from..].find(end)?, *end)));
        let Some((at, end)) = found.min() else { return Prefix::Unknown };
        let taken = self.parameter.len() + at + if end == self.value_end { end.len() } else { 0 };
        let Some((name, value)) = rest[..at].split_once(self.parameter_name_end) else {
            return Prefix::Match(String::new(), taken);
        };
        let value = match value.trim_start().strip_prefix(self.value) {
            Some(after) if !self.value.is_empty() => after,
            _ => value,
        };
        let value = if self.is_padded { without_padding(value) } else { value };
        let (name, is_string) = match name.split_once(STRING_ATTRIBUTE) {
            Some((name, told)) if self.tells_strings => (name, unquoted(told) == "true"),
            _ => (name, false),
        };
        let name = unquoted(name);
        let value = match is_string {
            true => value.into(),
            false => parameters.value(function, name, value),
        };
        Prefix::Match(format!("{}: {value}", Value::from(name)), taken)
    }
}

/// A name without white space and quotes around it.
fn unquoted(name: &str) -> &str {
    name.trim().trim_matches(['"', '\'']).trim()
}

fn without_padding(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

//! Calls as elements: `<function=f>`, `<parameter=p>`. Values are text: what a value is, the
//! function's schema tells.
use std::collections::HashMap;

use serde_json::{Map, Value};

pub(super) const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// Bytes of white space before what closes a call.
const SPACE_MAX: usize = 64;

/// The types of functions' parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// By function and parameter.
    strings: HashMap<String, Vec<String>>,
}

impl Parameters {
    /// Of `tools` as a request gives them.
    #[must_use]
    pub fn of(tools: &Value) -> Self {
        let functions = tools.as_array().into_iter().flatten().filter_map(|it| it.get("function"));
        let strings = functions.filter_map(|function| {
            let name = function.get("name")?.as_str()?.to_owned();
            let properties = function.get("parameters").and_then(|it| it.get("properties"));
            let properties = properties.and_then(Value::as_object).into_iter().flatten();
            let strings = properties.filter(|(_, schema)| is_string(schema));
            Some((name, strings.map(|(name, _)| name.clone()).collect()))
        });
        Self { strings: strings.collect() }
    }

    fn is_string(&self, function: &str, parameter: &str) -> bool {
        self.strings.get(function).is_some_and(|names| names.iter().any(|it| it == parameter))
    }
}

/// Whether a schema allows text, and nothing that is written otherwise.
fn is_string(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        _ => schema
            .get("enum")
            .and_then(Value::as_array)
            .is_some_and(|values| values.iter().all(Value::is_string)),
    }
}

/// Where the call at the text's beginning ends, once that is certain. Its end was looked for before in
/// the first `looked` bytes.
pub(super) fn end(text: &str, looked: usize) -> Option<usize> {
    // What ends it may have begun there, and so may what closes it.
    let least = FUNCTION_END.len() + super::format::TOOL_CALL_END.len() + SPACE_MAX;
    let from = text.floor_char_boundary(looked.saturating_sub(least));
    let end = from + text[from..].find(FUNCTION_END)? + FUNCTION_END.len();
    let rest = &text[end..];
    let close = super::format::TOOL_CALL_END;
    let behind = rest.trim_start();
    if rest.len() - behind.len() > SPACE_MAX {
        return Some(end);
    }
    match behind.strip_prefix(close) {
        Some(after) => Some(text.len() - after.len()),
        // It may yet come.
        None if close.starts_with(behind) => None,
        None => Some(end),
    }
}

/// A call's function, and its arguments as a JSON object.
pub(super) fn read(element: &str, parameters: &Parameters) -> Option<(String, String)> {
    let body = &element[element.find(FUNCTION)? + FUNCTION.len()..];
    let body = &body[..body.find(FUNCTION_END)?];
    let (name, mut rest) = body.split_once('>')?;
    let name = name.trim();
    if name.is_empty() {
        return None;
    }
    let mut arguments = Map::new();
    while let Some(at) = rest.find(PARAMETER) {
        let (key, after) = rest[at + PARAMETER.len()..].split_once('>')?;
        // One that is not closed goes on to the next.
        let end = [PARAMETER_END, PARAMETER].iter().filter_map(|mark| after.find(mark)).min();
        let end = end.unwrap_or(after.len());
        let text = &after[..end];
        let text = text.strip_prefix('\n').unwrap_or(text);
        let text = text.strip_suffix('\n').unwrap_or(text);
        let key = key.trim();
        let value = if parameters.is_string(name, key) {
            text.into()
        } else {
            serde_json::from_str(text.trim()).unwrap_or_else(|_| text.into())
        };
        arguments.insert(key.to_owned(), value);
        rest = &after[end..];
    }
    Some((name.to_owned(), Value::Object(arguments).to_string()))
}

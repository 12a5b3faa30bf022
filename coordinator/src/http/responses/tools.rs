//! PURE: the tools of a response's request as chat's functions, and back.
//!
//! Agents offer more than functions: groups of them with a name (`namespace`, one for each server
//! of tools), tools whose input is text (`custom`), and tools that OpenAI's servers run. The model
//! is told of functions alone; a call is reported as the client knows its tool.
use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::params::Limits;
use super::super::tools;
use super::super::turns::wrong;

/// Joins the name of a group to that of its tool. Most groups end in it already.
const JOINT: &str = "__";
/// The one argument of a tool whose input is text.
const INPUT: &str = "input";

/// How a function that the model is told of was offered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Offer {
    /// Its group.
    pub(super) namespace: Option<String>,
    /// Its name there.
    pub(super) name: String,
    /// Its input is text.
    pub(super) is_custom: bool,
}

/// The offers, by the names that the model is told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Offers(HashMap<String, Offer>);

impl Offers {
    /// How the function that the model calls so was offered. Nothing holds a model to the names
    /// that it was told.
    #[must_use]
    pub(super) fn of(&self, told: &str) -> Offer {
        let unknown = || Offer { name: told.to_owned(), ..Offer::default() };
        self.0.get(told).cloned().unwrap_or_else(unknown)
    }

    /// The name that the model is told of the tool that a client calls so; `None` if that is no
    /// tool or one of another kind.
    fn told(&self, tool: &Value) -> Option<String> {
        let is_custom = match tool.get("type")?.as_str()? {
            "function" => false,
            "custom" => true,
            _ => return None,
        };
        let name = tool.get("name")?.as_str()?;
        let namespace = tool.get("namespace").and_then(Value::as_str);
        let told = told_name(namespace, name);
        let is_meant = |offer: &Offer| {
            offer.is_custom == is_custom
                && offer.name == name
                && (namespace.is_none() || offer.namespace.as_deref() == namespace)
        };
        if self.0.get(&told).is_some_and(is_meant) {
            return Some(told);
        }
        // The choice of a tool says its name alone.
        let mut meant = self.0.iter().filter(|(_, offer)| is_meant(offer)).map(|(told, _)| told);
        let only = meant.next().filter(|_| meant.next().is_none());
        only.cloned().or_else(|| (!self.0.contains_key(&told)).then_some(told))
    }
}

/// The name that the model is told of a tool of a group.
#[must_use]
pub(super) fn told_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        None => name.to_owned(),
        Some(namespace) => format!("{}{JOINT}{name}", namespace.trim_end_matches(JOINT)),
    }
}

/// The arguments of a call of a tool whose input is this text.
#[must_use]
pub(super) fn arguments(input: &str) -> Value {
    json!({INPUT: input})
}

/// The text in the arguments of a call, as far as they are as told.
#[must_use]
pub(super) fn input(arguments: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(arguments).ok();
    let input = parsed.as_ref().and_then(|it| it.get(INPUT)?.as_str());
    input.unwrap_or(arguments).to_owned()
}

/// A request's tools.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    /// Chat's `tools`.
    pub(super) told: Value,
    /// Chat's `tool_choice`.
    pub(super) choice: Option<Value>,
    pub(super) offers: Offers,
    /// `tools` as the answer repeats them.
    pub(super) said: Value,
    /// `tool_choice` as the answer repeats it.
    pub(super) choice_said: Value,
}

impl Tools {
    /// Reads `tools` and `tool_choice`.
    ///
    /// # Errors
    /// 400 naming the field and the tool.
    pub(super) fn read(fields: &Fields, limits: &Limits) -> Result<Self, ApiError> {
        let list = match fields.get("tools") {
            None => &[][..],
            Some(Value::Array(list)) => list,
            Some(other) => return Err(Fields::wrong("tools", other, "a list of tools")),
        };
        let (mut offers, mut functions) = (Offers::default(), Vec::with_capacity(list.len()));
        for (index, tool) in list.iter().enumerate() {
            let at = format!("tools[{index}]");
            if tool.get("type").and_then(Value::as_str) != Some("namespace") {
                functions.extend(offered(&at, tool, None, &mut offers)?);
                continue;
            }
            let name = name(&at, tool)?;
            let members = tool.get("tools").and_then(Value::as_array);
            let path = format!("{at}.tools");
            let members = members.ok_or_else(|| wrong(&path, "must be a list of tools"))?;
            for (member, tool) in members.iter().enumerate() {
                let at = format!("{path}[{member}]");
                functions.extend(offered(&at, tool, Some(name), &mut offers)?);
            }
        }
        // Before they are looked through for each that may be called.
        tools::check_count("tools", functions.len(), limits)?;
        let (choice, choice_said) = choice(fields, limits, &offers, &mut functions)?;
        let told =
            |function: &Map<String, Value>| json!({"type": "function", "function": function});
        let said = list.iter().map(|tool| {
            let mut tool = tool.clone();
            if tool["type"] == "function"
                && let Some(fields) = tool.as_object_mut()
            {
                fields.entry("strict").or_insert(false.into());
                fields.entry("parameters").or_insert(Value::Null);
            }
            tool
        });
        let told = functions.iter().map(told).collect();
        Ok(Self { told, choice, offers, said: said.collect(), choice_said })
    }
}

fn name<'a>(at: &str, tool: &'a Value) -> Result<&'a str, ApiError> {
    let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
    name.ok_or_else(|| wrong(&format!("{at}.name"), "must be a string that is not empty"))
}

/// What chat nests under `function`; `None` for a tool that only OpenAI's servers run: a model that
/// is not told of it answers without.
fn offered(
    at: &str,
    tool: &Value,
    namespace: Option<&str>,
    offers: &mut Offers,
) -> Result<Option<Map<String, Value>>, ApiError> {
    let fields = tool.as_object().ok_or_else(|| wrong(at, "must be an object"))?;
    let kind = fields.get("type").and_then(Value::as_str);
    let kind = kind.ok_or_else(|| wrong(&format!("{at}.type"), "must be a string"))?;
    let (mut function, is_custom) = match kind {
        "function" => (function(at, fields)?, false),
        "custom" => (custom(at, fields)?, true),
        _ => return Ok(None),
    };
    let name = name(at, tool)?;
    let told = told_name(namespace, name);
    function.insert("name".to_owned(), told.as_str().into());
    let offer = Offer { namespace: namespace.map(str::to_owned), name: name.to_owned(), is_custom };
    match offers.0.insert(told, offer.clone()) {
        Some(other) if other != offer => {
            Err(wrong(&format!("{at}.name"), "is, with its namespace, that of another tool"))
        }
        _ => Ok(Some(function)),
    }
}

fn function(at: &str, fields: &Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    if let Some(parameters) = fields.get("parameters").filter(|it| !it.is_null()) {
        let path = format!("{at}.parameters");
        let schema = parameters.as_object();
        let schema = schema.ok_or_else(|| wrong(&path, "must be a JSON schema"))?;
        if tools::wrong_type(schema).is_some() {
            return Err(wrong(&format!("{path}.type"), "must be \"object\""));
        }
    }
    // Templates show them in this order.
    let told = ["name", "description", "parameters", "strict"];
    let told = told.iter().filter_map(|name| {
        let value = fields.get(*name).filter(|value| !value.is_null())?;
        Some(((*name).to_owned(), value.clone()))
    });
    Ok(told.collect())
}

/// A tool whose input is text: a function with one argument. Nothing holds the model to the grammar
/// that the input may have, but it is told of it.
fn custom(at: &str, fields: &Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let text = |of: &Map<String, Value>, at: &str, name: &str| match of.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(wrong(&format!("{at}.{name}"), "must be a string")),
    };
    let mut description = text(fields, at, "description")?.unwrap_or_default();
    match fields.get("format") {
        None | Some(Value::Null) => {}
        Some(Value::Object(format)) => {
            let at = format!("{at}.format");
            let (syntax, definition) =
                (text(format, &at, "syntax")?, text(format, &at, "definition")?);
            if let Some(definition) = definition {
                let syntax = syntax.as_deref().unwrap_or_default();
                let said = format!("The input follows this {syntax} grammar:\n{definition}");
                description = format!("{description}\n\n{said}").trim_start().to_owned();
            }
        }
        Some(_) => return Err(wrong(&format!("{at}.format"), "must be an object")),
    }
    let parameters = json!({
        "type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT],
        "additionalProperties": false,
    });
    let told =
        [("name", Value::Null), ("description", description.into()), ("parameters", parameters)];
    Ok(told.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

/// Returns chat's `tool_choice` and the answer's; functions that may not be called are removed.
fn choice(
    fields: &Fields,
    limits: &Limits,
    offers: &Offers,
    functions: &mut Vec<Map<String, Value>>,
) -> Result<(Option<Value>, Value), ApiError> {
    let field = "tool_choice";
    let expected = "\"none\", \"auto\", \"required\", {\"type\": \"function\" or \"custom\", \
                    \"name\": ..} or {\"type\": \"allowed_tools\", \"mode\": .., \"tools\": ..}";
    let Some(value) = fields.get(field) else { return Ok((None, json!("auto"))) };
    let wrong = || Fields::wrong(field, value, expected);
    if value.is_string() {
        return Ok((Some(value.clone()), value.clone()));
    }
    let chosen = match value.get("type").and_then(Value::as_str) {
        Some("function" | "custom") => {
            let name = offers.told(value).ok_or_else(wrong)?;
            json!({"type": "function", "function": {"name": name}})
        }
        Some("allowed_tools") => {
            let mode = value.get("mode").and_then(Value::as_str);
            let mode = mode.filter(|mode| ["auto", "required"].contains(mode)).ok_or_else(wrong)?;
            let allowed = value.get("tools").and_then(Value::as_array).ok_or_else(wrong)?;
            tools::check_count(field, allowed.len(), limits)?;
            let allowed: Option<Vec<String>> = allowed.iter().map(|it| offers.told(it)).collect();
            let allowed = allowed.ok_or_else(wrong)?;
            let unknown = |name: &&String| !functions.iter().any(|tool| tool["name"] == **name);
            if let Some(unknown) = allowed.iter().find(unknown) {
                let message = format!("`{field}` allows {unknown:?}, which is not in `tools`");
                return Err(ApiError::field(field, message));
            }
            functions.retain(|tool| allowed.iter().any(|it| tool["name"] == **it));
            mode.into()
        }
        _ => return Err(wrong()),
    };
    Ok((Some(chosen), value.clone()))
}

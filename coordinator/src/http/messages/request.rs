//! A request of Anthropic's API as chat's: the same things under their names there.
use serde_json::{Map, Value, json};

use super::super::conversation;
use super::super::error::ApiError;
use super::super::fields::{Fields, whole_number};
use super::super::params::Limits;
use super::super::refused::{self, Endpoint};
use super::super::state::AppState;
use super::super::thinking::{self, Thinking};
use super::super::tools;
use super::input;
use crate::text::reply::Reasoning;

/// Fields that chat has too, by the same name and with the same meaning: Anthropic's, then vLLM's.
pub(in crate::http) const SAME: &[&str] = &[
    "model",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "add_special_tokens",
    "allowed_token_ids",
    "cache_salt",
    "chat_template_kwargs",
    "documents",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "request_id",
    "seed",
    "skip_special_tokens",
    "stop_token_ids",
    "structural_tag",
    "structured_outputs",
    "truncate_prompt_tokens",
];

/// Chat's fields that are said in others here.
pub(in crate::http) const MOVED: &[(&str, &str)] = &[
    ("function_call", "tool_choice"),
    ("functions", "tools"),
    ("max_completion_tokens", "max_tokens"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("reasoning_effort", "output_config.effort"),
    ("response_format", "output_config.format"),
    ("stop", "stop_sequences"),
    (thinking::FIELD, "thinking.budget_tokens"),
];

/// Names of chat's that an error may say, and what they are called here.
pub(super) const NAMES: &[(&str, &str)] = &[
    ("stop", "stop_sequences"),
    ("reasoning_effort", "output_config.effort"),
    ("response_format", "output_config.format"),
    ("json_schema.", "output_config.format."),
    ("continue_final_message", "messages"),
];

/// A request, read.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// As chat's.
    pub(super) fields: Fields,
    /// Most tokens that were asked for.
    pub(super) max_tokens: Option<u32>,
}

/// Reads a request.
///
/// # Errors
/// 400 naming the field.
pub(super) fn read(state: &AppState, fields: &Fields) -> Result<Request, ApiError> {
    let limits = &state.limits;
    for (name, here) in MOVED {
        if fields.get(name).is_some() {
            let message = format!("`{name}` is not supported: here it is `{here}`");
            return Err(ApiError::field(name, message));
        }
    }
    if fields.get("thread").is_some() {
        return Err(ApiError::no_threads());
    }
    refused::check(fields, Endpoint::Messages)?;
    let mut chat = input::read(fields, limits)?.asked(fields, SAME);
    let max_tokens = fields.count("max_tokens", 1, u32::MAX)?;
    if let Some(max) = max_tokens {
        chat.insert("max_tokens".to_owned(), max.min(limits.max_model_len).into());
    }
    if let Some(stops) = fields.get("stop_sequences") {
        chat.insert("stop".to_owned(), stops.clone());
    }
    ignored(fields, limits)?;
    output(fields, &mut chat)?;
    tools(fields, &mut chat)?;
    thinking(state, fields, &mut chat)?;
    Ok(Request { fields: fields.said_as(chat), max_tokens })
}

/// Fields that change nothing; what they say must still be something.
fn ignored(fields: &Fields, limits: &Limits) -> Result<(), ApiError> {
    for name in ["service_tier", "inference_geo", "speed"] {
        fields.string(name, limits.user_bytes)?;
    }
    for name in ["metadata", "cache_control", "diagnostics"] {
        object(fields, name)?;
    }
    // Which earlier reasoning is kept is for the template to say.
    let name = "context_management";
    let edits = object(fields, name)?.and_then(|it| it.get("edits"));
    let harmless = |edit: &Value| {
        let kind = edit.get("type").and_then(Value::as_str);
        kind.is_some_and(|kind| kind.starts_with("clear_thinking_"))
    };
    match edits {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Array(edits)) if edits.iter().all(harmless) => Ok(()),
        Some(_) => {
            let message = format!("`{name}.edits`: none but clear_thinking_ are supported");
            Err(ApiError::field(name, message))
        }
    }
}

fn object<'a>(fields: &'a Fields, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => Err(Fields::wrong(name, other, "an object")),
    }
}

/// `output_config`, and `output_format` as its format was called before.
fn output(fields: &Fields, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let name = "output_config";
    let config = object(fields, name)?;
    let part = |key: &str| config.and_then(|it| it.get(key)).filter(|it| !it.is_null());
    if let Some(effort) = part("effort") {
        let effort = match effort.as_str() {
            Some(word @ ("low" | "medium" | "high")) => word,
            // Models here know no more than that.
            Some("xhigh" | "max") => "high",
            _ => {
                let words = "\"low\", \"medium\", \"high\", \"xhigh\" or \"max\"";
                return Err(Fields::wrong("output_config.effort", effort, words));
            }
        };
        chat.insert("reasoning_effort".to_owned(), effort.into());
    }
    let (name, format) = match fields.get("output_format") {
        Some(format) => ("output_format", Some(format)),
        None => ("output_config.format", part("format")),
    };
    let Some(format) = format else { return Ok(()) };
    let is_schema = format.get("type").and_then(Value::as_str) == Some("json_schema");
    let schema = format.get("schema").filter(|it| it.is_object() && is_schema);
    let expected = "an object with the `type` \"json_schema\" and a `schema`";
    let schema = schema.ok_or_else(|| Fields::wrong(name, format, expected))?;
    let schema = json!({"name": "output", "schema": schema});
    chat.insert(
        "response_format".to_owned(),
        json!({"type": "json_schema", "json_schema": schema}),
    );
    Ok(())
}

/// The tools, and whether they are called.
fn tools(fields: &Fields, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let list = match fields.get("tools") {
        None => &[][..],
        Some(Value::Array(list)) => list,
        Some(other) => return Err(Fields::wrong("tools", other, "a list of tools")),
    };
    let functions = list.iter().enumerate().map(|(index, tool)| function(index, tool));
    chat.insert("tools".to_owned(), functions.collect::<Result<Value, _>>()?);
    let field = "tool_choice";
    let Some(choice) = object(fields, field)? else { return Ok(()) };
    let single = "disable_parallel_tool_use";
    match choice.get(single) {
        None | Some(Value::Null) => {}
        Some(Value::Bool(single)) => {
            chat.insert("parallel_tool_calls".to_owned(), (!single).into());
        }
        Some(other) => {
            return Err(Fields::wrong(&format!("{field}.{single}"), other, "true or false"));
        }
    }
    let chosen = match choice.get("type").and_then(Value::as_str) {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => {
            let name = choice.get("name").and_then(Value::as_str);
            let name = name.ok_or_else(|| {
                ApiError::field(field, format!("`{field}.name` must be the name of a tool"))
            })?;
            json!({"type": "function", "function": {"name": name}})
        }
        _ => {
            let value = Value::Object(choice.clone());
            let expected = "an object with the `type` \"auto\", \"any\", \"tool\" or \"none\"";
            return Err(Fields::wrong(field, &value, expected));
        }
    };
    chat.insert(field.to_owned(), chosen);
    Ok(())
}

/// A tool that the client runs, as a function.
fn function(index: usize, tool: &Value) -> Result<Value, ApiError> {
    let wrong = |part: &str, message: &str| {
        ApiError::field("tools", format!("`tools[{index}]{part}` {message}"))
    };
    let fields = tool.as_object().ok_or_else(|| wrong("", "must be an object"))?;
    match fields.get("type").filter(|it| !it.is_null()) {
        None => {}
        Some(Value::String(kind)) if kind == "custom" => {}
        Some(kind) => {
            let message =
                format!("has the type {kind}, which is not supported: tools of the client's are");
            return Err(wrong("", &message));
        }
    }
    if fields.get("name").and_then(Value::as_str).is_none_or(str::is_empty) {
        return Err(wrong(".name", "must be a string that is not empty"));
    }
    let schema = fields.get("input_schema").and_then(Value::as_object);
    let schema = schema.ok_or_else(|| wrong(".input_schema", "must be a JSON schema"))?;
    if tools::wrong_type(schema).is_some() {
        return Err(wrong(".input_schema.type", "must be \"object\""));
    }
    let told = [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ];
    let told = told.iter().filter_map(|(here, there)| {
        let value = fields.get(*here).filter(|value| !value.is_null())?;
        Some(((*there).to_owned(), value.clone()))
    });
    let function: Map<String, Value> = told.collect();
    Ok(json!({"type": "function", "function": function}))
}

/// Whether the model reasons, where its template lets one say so, and whether that is shown.
fn thinking(
    state: &AppState,
    fields: &Fields,
    chat: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let name = "thinking";
    let Some(thinking) = object(fields, name)? else { return Ok(()) };
    let is_wanted = match thinking.get("type").and_then(Value::as_str) {
        Some("enabled") => {
            let part = thinking.get("budget_tokens").unwrap_or(&Value::Null);
            let budget = part.as_u64().or_else(|| whole_number(part)?.try_into().ok());
            let Some(budget) = budget.filter(|budget| *budget > 0) else {
                return Err(Fields::wrong("thinking.budget_tokens", part, "a number above 0"));
            };
            let budget = u32::try_from(budget).unwrap_or(u32::MAX);
            // Clients always name one, also to models whose reasoning cannot be ended.
            if Thinking::of(state, budget).is_some() {
                chat.insert(thinking::FIELD.to_owned(), budget.into());
            }
            // Clients enable it for whatever model they are set to. Where its reasoning is not told
            // from its answer, more of it would only be in the way.
            (state.reasoning != Reasoning::Untold).then_some(true)
        }
        // The model decides, as it does unless it is told otherwise.
        Some("adaptive" | "between_tools") => None,
        Some("disabled") => Some(false),
        _ => {
            let value = Value::Object(thinking.clone());
            let expected = "an object with the `type` \"enabled\", \"adaptive\" or \"disabled\"";
            return Err(Fields::wrong(name, &value, expected));
        }
    };
    let is_hidden = match thinking.get("display") {
        None | Some(Value::Null) => false,
        Some(Value::String(word)) if word == "summarized" => false,
        Some(Value::String(word)) if word == "omitted" => true,
        Some(other) => {
            let words = "\"summarized\" or \"omitted\"";
            return Err(Fields::wrong("thinking.display", other, words));
        }
    };
    // What the client says itself goes before, here and below.
    let is_shown = !is_hidden && is_wanted != Some(false);
    chat.entry("include_reasoning").or_insert(is_shown.into());
    let has_tools = chat.get("tools").and_then(Value::as_array).is_some_and(|it| !it.is_empty());
    let switch = state.text.template.as_ref().and_then(|it| conversation::switch(it, has_tools));
    if let (Some(wanted), Some(switch)) = (is_wanted, switch) {
        let variables = chat.entry("chat_template_kwargs").or_insert_with(|| json!({}));
        if let Some(variables) = variables.as_object_mut() {
            variables.entry(switch).or_insert(wanted.into());
        }
    }
    Ok(())
}

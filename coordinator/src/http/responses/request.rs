//! Converts a response's request to chat's: renames the fields, and collects what the answer
//! repeats of them.
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::limits::EFFORT_BYTES;
use super::super::params::Limits;
use super::super::refused::{self, Endpoint, VERBOSITIES};
use super::super::state::AppState;
use super::input;
use super::tools::{Offers, Tools};

/// Fields that chat also has, with the same name and meaning.
pub(in crate::http) const SAME: &[&str] = &[
    "add_special_tokens",
    "allowed_token_ids",
    "cache_salt",
    "chat_template_kwargs",
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
    "model",
    "parallel_tool_calls",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "request_id",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "structural_tag",
    "structured_outputs",
    "temperature",
    "thinking_token_budget",
    "top_k",
    "top_p",
    "truncate_prompt_tokens",
    "user",
];

/// Chat's fields that have other names here, as in OpenAI's API.
pub(in crate::http) const MOVED: &[(&str, &str)] = &[
    ("function_call", "tool_choice"),
    ("functions", "tools"),
    ("logprobs", "include"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format", "text.format"),
];

/// Chat's names that errors may contain, and their names here.
pub(super) const NAMES: &[(&str, &str)] = &[
    ("messages", "input"),
    ("logprobs", "include"),
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("response_format", "text.format"),
    ("json_schema.", "text.format."),
];

/// Values that `include` may have; all but the first concern tools that are rejected, or are always
/// included.
pub(in crate::http) const INCLUDE: &[&str] = &[
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
];
const LOGPROBS: &str = "message.output_text.logprobs";

/// Maximum entries, key length and value length of `metadata`: OpenAI's bounds.
pub(in crate::http) const METADATA: (usize, usize, usize) = (16, 64, 512);

/// A converted request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The request in chat's fields.
    pub(super) fields: Fields,
    /// How the functions that the model is told of were offered.
    pub(super) offers: Offers,
    /// What the answer repeats.
    pub(super) echo: Map<String, Value>,
}

/// Reads a request.
///
/// # Errors
/// 400 naming the field.
pub(super) fn read(state: &AppState, fields: &Fields) -> Result<Request, ApiError> {
    let limits = &state.limits;
    for (name, now) in MOVED {
        if fields.get(name).is_some() {
            let message = format!("`{name}` is not supported: use `{now}` instead");
            return Err(ApiError::field(name, message));
        }
    }
    refused::check(fields, Endpoint::Responses)?;
    let tools = Tools::read(fields, limits)?;
    let mut chat = input::read(fields, limits)?.asked(fields, SAME);
    let mut echo = Map::new();
    let max = fields.count("max_output_tokens", 1, u32::MAX)?;
    if let Some(max) = max {
        chat.insert("max_completion_tokens".to_owned(), max.min(limits.max_model_len).into());
    }
    ignored(fields, limits)?;
    logprobs(fields, limits, &mut chat)?;
    truncation(fields, &mut chat)?;
    let text = text(fields, &mut chat)?;
    let reasoning = reasoning(fields, &mut chat)?;
    chat.insert("tools".to_owned(), tools.told);
    chat.extend(tools.choice.map(|choice| ("tool_choice".to_owned(), choice)));
    for (name, value) in [
        ("instructions", fields.get("instructions").cloned().into()),
        ("max_output_tokens", max.into()),
        ("max_tool_calls", fields.get("max_tool_calls").cloned().into()),
        ("metadata", metadata(fields)?),
        ("parallel_tool_calls", fields.boolean("parallel_tool_calls", true)?.into()),
        ("prompt_cache_key", fields.get("prompt_cache_key").cloned().into()),
        ("reasoning", reasoning),
        ("safety_identifier", fields.get("safety_identifier").cloned().into()),
        ("text", text),
        ("tool_choice", tools.choice_said),
        ("tools", tools.said),
        ("top_logprobs", chat.get("top_logprobs").cloned().unwrap_or(json!(0))),
        ("truncation", fields.get("truncation").cloned().unwrap_or(json!("disabled"))),
        ("user", fields.get("user").cloned().into()),
    ] {
        echo.insert(name.to_owned(), value);
    }
    Ok(Request { fields: fields.said_as(chat), offers: tools.offers, echo })
}

/// Fields without effect; their values must still be valid.
fn ignored(fields: &Fields, limits: &Limits) -> Result<(), ApiError> {
    for name in ["prompt_cache_key", "prompt_cache_retention", "safety_identifier"] {
        fields.string(name, limits.user_bytes)?;
    }
    // No response is stored, whatever a client wishes: the answer says so.
    fields.boolean("store", true)?;
    // Concerns built-in tools; this server has none.
    fields.count("max_tool_calls", 1, u32::MAX)?;
    let name = "stream_options";
    match fields.get(name) {
        None => Ok(()),
        Some(Value::Object(options))
            if !options.is_empty() && !fields.boolean("stream", false)? =>
        {
            Err(ApiError::field(name, format!("`{name}` is allowed only with `stream`: true")))
        }
        Some(Value::Object(options)) => match options.get("include_obfuscation") {
            None | Some(Value::Null | Value::Bool(false)) => Ok(()),
            Some(Value::Bool(true)) => {
                let message = "`stream_options.include_obfuscation` is not supported";
                Err(ApiError::field(name, message))
            }
            Some(other) => {
                Err(Fields::wrong("stream_options.include_obfuscation", other, "true or false"))
            }
        },
        Some(other) => Err(Fields::wrong(name, other, "an object")),
    }
}

fn logprobs(
    fields: &Fields,
    limits: &Limits,
    chat: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let name = "include";
    let known = |value: &Value| value.as_str().is_some_and(|word| INCLUDE.contains(&word));
    let wanted = match fields.get(name) {
        None => false,
        Some(Value::Array(list)) if list.iter().all(known) => list.iter().any(|it| it == LOGPROBS),
        Some(other) => {
            let expected = format!("a list of values from {}", INCLUDE.join(", "));
            return Err(Fields::wrong(name, other, &expected));
        }
    };
    let name = "top_logprobs";
    let top = fields.count(name, 0, limits.top_logprobs)?.unwrap_or(0);
    if top > 0 && !wanted {
        let message = format!("`{name}` needs `include`: [\"{LOGPROBS}\"]");
        return Err(ApiError::field(name, message));
    }
    if wanted {
        chat.insert("logprobs".to_owned(), true.into());
        chat.insert(name.to_owned(), top.into());
    }
    Ok(())
}

/// `auto` keeps the end of an input that is too long, as in vLLM.
fn truncation(fields: &Fields, chat: &mut Map<String, Value>) -> Result<(), ApiError> {
    let (name, tokens) = ("truncation", "truncate_prompt_tokens");
    match fields.get(name) {
        None => Ok(()),
        Some(Value::String(word)) if word == "disabled" => Ok(()),
        Some(Value::String(word)) if word == "auto" && !chat.contains_key(tokens) => {
            chat.insert(tokens.to_owned(), json!(-1));
            Ok(())
        }
        Some(Value::String(word)) if word == "auto" => {
            Err(ApiError::field(name, format!("`{name}` and `{tokens}` cannot be combined")))
        }
        Some(other) => Err(Fields::wrong(name, other, "\"auto\" or \"disabled\"")),
    }
}

/// Converts `text.format`, which chat calls `response_format` and nests deeper.
fn text(fields: &Fields, chat: &mut Map<String, Value>) -> Result<Value, ApiError> {
    let name = "text";
    let plain = json!({"type": "text"});
    let mut text = match fields.get(name) {
        None => Map::new(),
        Some(Value::Object(text)) => text.clone(),
        Some(other) => return Err(Fields::wrong(name, other, "an object")),
    };
    let name = "text.verbosity";
    match text.get("verbosity") {
        None | Some(Value::Null) => {}
        Some(Value::String(word)) if VERBOSITIES.contains(&word.as_str()) => {}
        Some(_) => return Err(ApiError::field(name, format!("`{name}` is not supported"))),
    }
    let name = "text.format";
    let format = text.entry("format").or_insert(Value::Null);
    if format.is_null() {
        *format = plain;
    }
    let expected = "an object with the `type` \"text\", \"json_object\" or \"json_schema\"";
    let wrong = || Fields::wrong(name, format, expected);
    let asked = match format.get("type").and_then(Value::as_str).ok_or_else(wrong)? {
        "text" => None,
        "json_object" => Some(format.clone()),
        "json_schema" => {
            let mut schema = format.as_object().cloned().unwrap_or_default();
            schema.remove("type");
            Some(json!({"type": "json_schema", "json_schema": schema}))
        }
        _ => return Err(wrong()),
    };
    if let Some(asked) = asked {
        chat.insert("response_format".to_owned(), asked);
    }
    Ok(text.into())
}

/// Converts `reasoning.effort` to chat's `reasoning_effort`; the rest of `reasoning` concerns
/// summaries, which are not made: reasoning is returned as it is.
fn reasoning(fields: &Fields, chat: &mut Map<String, Value>) -> Result<Value, ApiError> {
    let name = "reasoning";
    let reasoning = match fields.get(name) {
        None => return Ok(json!({"effort": null, "summary": null})),
        Some(Value::Object(reasoning)) => reasoning,
        Some(other) => return Err(Fields::wrong(name, other, "an object")),
    };
    let word = |key: &str| match reasoning.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(word)) if word.len() <= EFFORT_BYTES => Ok(Some(word)),
        Some(other) => {
            let name = format!("{name}.{key}");
            Err(Fields::wrong(&name, other, &format!("a string of at most {EFFORT_BYTES} bytes")))
        }
    };
    let effort = word("effort")?;
    word("summary")?;
    if let Some(effort) = effort {
        chat.insert("reasoning_effort".to_owned(), effort.as_str().into());
    }
    Ok(json!({"effort": effort, "summary": null}))
}

fn metadata(fields: &Fields) -> Result<Value, ApiError> {
    let name = "metadata";
    let (entries, key, value) = METADATA;
    match fields.get(name) {
        None => Ok(json!({})),
        Some(Value::Object(map))
            if map.len() <= entries
                && map.keys().all(|it| it.chars().count() <= key)
                && map
                    .values()
                    .all(|it| it.as_str().is_some_and(|text| text.chars().count() <= value)) =>
        {
            Ok(map.clone().into())
        }
        Some(other) => {
            let expected = format!(
                "an object of at most {entries} strings of at most {value} characters, under keys \
                 of at most {key}"
            );
            Err(Fields::wrong(name, other, &expected))
        }
    }
}

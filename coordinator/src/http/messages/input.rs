//! `system` and `messages` of Anthropic's API as the messages of a conversation.
//!
//! There, a turn is a list of blocks, results of tools are a user's, and turns of one side that
//! follow each other are one turn. Templates know a message with reasoning, text and calls, and
//! another for each result.
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::params::Limits;
use super::super::turns::{Turns, left_out, shown_type, string, wrong};

/// What Claude Code puts before its instructions, for whoever bills it. It is another in each
/// conversation: models have no use for it, and prompts that begin with it share nothing that is
/// cached.
const BILLING: &str = "x-anthropic-billing-header:";

/// Reads `system` and `messages`.
///
/// # Errors
/// 400 naming the field, the block and what it must be.
pub(super) fn read(fields: &Fields, limits: &Limits) -> Result<Turns, ApiError> {
    let mut input = Turns::default();
    if let Some(value) = fields.get("system") {
        let text = system("system", value)?;
        if !text.is_empty() {
            input.push("system", text);
        }
    }
    let list = match fields.get("messages") {
        None => return Err(ApiError::field("messages", "`messages` is required")),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(other) => {
            return Err(Fields::wrong("messages", other, "a list of at least one message"));
        }
    };
    limits.check_messages("messages", list.len(), fields.bytes())?;
    for (index, message) in list.iter().enumerate() {
        take(&mut input, &format!("messages[{index}]"), message)?;
    }
    if input.messages.is_empty() {
        return Err(ApiError::field("messages", "`messages` say nothing"));
    }
    if let Some(last) = input.last("assistant") {
        if last.contains_key("tool_calls") {
            let message = "ends with calls of tools; their results must follow, as `tool_result`";
            return Err(wrong(&format!("messages[{}]", list.len() - 1), message));
        }
        input.goes_on = true;
    }
    Ok(input)
}

/// Instructions: a string or blocks of text.
fn system(at: &str, value: &Value) -> Result<String, ApiError> {
    let texts = texts(at, value)?;
    let kept = texts.into_iter().filter(|text| !text.starts_with(BILLING));
    Ok(kept.collect::<Vec<_>>().join("\n"))
}

/// Adds more text to a turn of this role.
fn say(turns: &mut Turns, role: &str, name: &str, text: &str) {
    match turns.last(role) {
        Some(message) => match message.get_mut(name) {
            Some(_) if text.is_empty() => {}
            Some(Value::String(before)) if !before.is_empty() => {
                before.push('\n');
                before.push_str(text);
            }
            _ => {
                message.insert(name.to_owned(), text.into());
            }
        },
        None => turns.messages.push(json!({"role": role, name: text})),
    }
}

fn take(turns: &mut Turns, at: &str, message: &Value) -> Result<(), ApiError> {
    let fields = message.as_object().ok_or_else(|| wrong(at, "must be an object"))?;
    let path = format!("{at}.content");
    let content = fields.get("content").unwrap_or(&Value::Null);
    let role = match fields.get("role").and_then(Value::as_str).unwrap_or_default() {
        "system" => {
            let text = system(&path, content)?;
            // Most templates take instructions at the beginning alone.
            let begins = turns.messages.is_empty() || turns.last("system").is_some();
            if !text.is_empty() {
                say(turns, if begins { "system" } else { "user" }, "content", &text);
            }
            return Ok(());
        }
        role @ ("user" | "assistant") => role,
        _ => {
            let message = "must be one of user, assistant and system";
            return Err(wrong(&format!("{at}.role"), message));
        }
    };
    let blocks = match content {
        Value::String(text) => {
            say(turns, role, "content", text);
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return Err(wrong(&path, "must be a string or a list of blocks")),
    };
    if blocks.is_empty() && turns.last(role).is_none() {
        turns.push(role, "");
    }
    for (index, block) in blocks.iter().enumerate() {
        take_block(turns, &format!("{path}[{index}]"), role, block)?;
    }
    Ok(())
}

fn take_block(turns: &mut Turns, at: &str, role: &str, block: &Value) -> Result<(), ApiError> {
    let fields = block.as_object().ok_or_else(|| wrong(at, "must be an object"))?;
    match (fields.get("type").and_then(Value::as_str), role) {
        (Some("text"), _) => say(turns, role, "content", string(at, fields, "text")?),
        (Some("thinking"), "assistant") => {
            say(turns, role, "reasoning_content", string(at, fields, "thinking")?);
        }
        // Nobody but who wrote it can read it.
        (Some("redacted_thinking"), "assistant") => {}
        (Some("tool_use"), "assistant") => {
            let (id, name) = (string(at, fields, "id")?, string(at, fields, "name")?);
            match fields.get("input") {
                Some(arguments @ Value::Object(_)) => turns.call(id, name, arguments),
                _ => return Err(wrong(&format!("{at}.input"), "must be an object")),
            }
        }
        (Some("tool_result"), "user") => {
            let id = string(at, fields, "tool_use_id")?;
            let content = match fields.get("content") {
                None | Some(Value::Null) => String::new(),
                Some(content) => result(&format!("{at}.content"), content)?,
            };
            turns.result(id, &content);
        }
        (kind, _) => return Err(unsupported(at, kind, role)),
    }
    Ok(())
}

/// A tool's result: its texts. What only other models read is named instead: agents put it there on
/// their own (a picture that they opened), and send it again with each later request.
fn result(at: &str, content: &Value) -> Result<String, ApiError> {
    let Value::Array(blocks) = content else { return Ok(texts(at, content)?.join("\n")) };
    let text = |(index, block): (usize, &Value)| {
        let at = format!("{at}[{index}]");
        let fields = block.as_object().ok_or_else(|| wrong(&at, "must be an object"))?;
        match fields.get("type").and_then(Value::as_str) {
            Some("text") => Ok(string(&at, fields, "text")?.to_owned()),
            Some(kind @ ("image" | "document")) => Ok(left_out(kind)),
            Some("tool_reference") => Ok(string(&at, fields, "tool_name")?.to_owned()),
            kind => Err(unsupported(&at, kind, "tool_result")),
        }
    };
    let texts = blocks.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join("\n"))
}

fn unsupported(at: &str, kind: Option<&str>, role: &str) -> ApiError {
    let known = match role {
        "assistant" => "text, thinking, redacted_thinking and tool_use",
        "user" => "text and tool_result",
        "tool_result" => "text, image, document and tool_reference",
        _ => "text",
    };
    let found = shown_type(kind);
    wrong(at, &format!("has the type {found}, which is not supported here: {known} can be"))
}

/// A string, or the texts of blocks that are nothing else.
fn texts<'a>(at: &str, content: &'a Value) -> Result<Vec<&'a str>, ApiError> {
    let blocks = match content {
        Value::String(text) => return Ok(vec![text]),
        Value::Array(blocks) => blocks,
        _ => return Err(wrong(at, "must be a string or a list of text blocks")),
    };
    let text = |(index, block): (usize, &'a Value)| {
        let at = format!("{at}[{index}]");
        let fields = block.as_object().ok_or_else(|| wrong(&at, "must be an object"))?;
        match fields.get("type").and_then(Value::as_str) {
            Some("text") => string(&at, fields, "text"),
            kind => Err(unsupported(&at, kind, "")),
        }
    };
    blocks.iter().enumerate().map(text).collect()
}

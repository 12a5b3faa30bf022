//! `system` and `messages` of Anthropic's API as the messages of a conversation.
//!
//! There, a turn is a list of blocks, results of tools are a user's, and turns of one side that
//! follow each other are one turn. Templates know a message with reasoning, text and calls, and
//! another for each result.
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::params::Limits;

/// What Claude Code puts before its instructions, for whoever bills it. It is another in each
/// conversation: models have no use for it, and prompts that begin with it share nothing that is
/// cached.
const BILLING: &str = "x-anthropic-billing-header:";

/// The input of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Input {
    /// As chat's messages.
    pub(super) messages: Vec<Value>,
    /// The model goes on with the last one: it is the assistant's.
    pub(super) goes_on: bool,
}

/// Reads `system` and `messages`.
///
/// # Errors
/// 400 naming the field, the block and what it must be.
pub(super) fn read(fields: &Fields, limits: &Limits) -> Result<Input, ApiError> {
    let mut input = Input::default();
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
    limits.check_messages("messages", list.len())?;
    for (index, message) in list.iter().enumerate() {
        input.take(&format!("messages[{index}]"), message)?;
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

impl Input {
    fn push(&mut self, role: &str, content: String) {
        self.messages.push(json!({"role": role, "content": content}));
    }

    /// The last message, if it is of this role.
    fn last(&mut self, role: &str) -> Option<&mut Map<String, Value>> {
        let last = self.messages.last_mut().and_then(Value::as_object_mut)?;
        last.get("role").is_some_and(|it| it == role).then_some(last)
    }

    /// More text of a turn of this role.
    fn say(&mut self, role: &str, name: &str, text: &str) {
        match self.last(role) {
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
            None => self.messages.push(json!({"role": role, name: text})),
        }
    }

    fn take(&mut self, at: &str, message: &Value) -> Result<(), ApiError> {
        let fields = message.as_object().ok_or_else(|| wrong(at, "must be an object"))?;
        let path = format!("{at}.content");
        let content = fields.get("content").unwrap_or(&Value::Null);
        let role = match fields.get("role").and_then(Value::as_str).unwrap_or_default() {
            "system" => {
                let text = system(&path, content)?;
                // Most templates take instructions at the beginning alone.
                let begins = self.messages.is_empty() || self.last("system").is_some();
                if !text.is_empty() {
                    self.say(if begins { "system" } else { "user" }, "content", &text);
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
                self.say(role, "content", text);
                return Ok(());
            }
            Value::Array(blocks) => blocks,
            _ => return Err(wrong(&path, "must be a string or a list of blocks")),
        };
        if blocks.is_empty() && self.last(role).is_none() {
            self.push(role, String::new());
        }
        for (index, block) in blocks.iter().enumerate() {
            self.take_block(&format!("{path}[{index}]"), role, block)?;
        }
        Ok(())
    }

    fn take_block(&mut self, at: &str, role: &str, block: &Value) -> Result<(), ApiError> {
        let fields = block.as_object().ok_or_else(|| wrong(at, "must be an object"))?;
        match (fields.get("type").and_then(Value::as_str), role) {
            (Some("text"), _) => self.say(role, "content", string(at, fields, "text")?),
            (Some("thinking"), "assistant") => {
                self.say(role, "reasoning_content", string(at, fields, "thinking")?);
            }
            // Nobody but who wrote it can read it.
            (Some("redacted_thinking"), "assistant") => {}
            (Some("tool_use"), "assistant") => self.take_call(at, fields)?,
            (Some("tool_result"), "user") => self.take_result(at, fields)?,
            (kind, _) => return Err(unsupported(at, kind, role)),
        }
        Ok(())
    }

    fn take_call(&mut self, at: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
        let (id, name) = (string(at, fields, "id")?, string(at, fields, "name")?);
        let arguments = match fields.get("input") {
            Some(arguments @ Value::Object(_)) => arguments,
            _ => return Err(wrong(&format!("{at}.input"), "must be an object")),
        };
        let function = json!({"name": name, "arguments": arguments});
        let call = json!({"id": id, "type": "function", "function": function});
        match self.last("assistant") {
            Some(message) => {
                let calls = message.entry("tool_calls").or_insert_with(|| json!([]));
                calls.as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
            }
            None => self.messages.push(json!({"role": "assistant", "tool_calls": [call]})),
        }
        Ok(())
    }

    fn take_result(&mut self, at: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
        let id = string(at, fields, "tool_use_id")?;
        let content = match fields.get("content") {
            None | Some(Value::Null) => String::new(),
            Some(content) => texts(&format!("{at}.content"), content)?.join("\n"),
        };
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
        Ok(())
    }
}

/// An error of the messages, or of the instructions, whose sentence goes on after the place.
fn wrong(at: &str, message: &str) -> ApiError {
    let field = if at.starts_with("system") { "system" } else { "messages" };
    ApiError::field(field, format!("`{at}` {message}"))
}

fn unsupported(at: &str, kind: Option<&str>, role: &str) -> ApiError {
    let known = match role {
        "assistant" => "text, thinking, redacted_thinking and tool_use",
        "user" => "text and tool_result",
        _ => "text",
    };
    let found = kind.map_or_else(|| "none".to_owned(), |kind| format!("{kind:?}"));
    wrong(at, &format!("has the type {found}, which is not supported here: {known} can be"))
}

fn string<'a>(at: &str, fields: &'a Map<String, Value>, name: &str) -> Result<&'a str, ApiError> {
    let value = fields.get(name).and_then(Value::as_str);
    value.ok_or_else(|| wrong(&format!("{at}.{name}"), "must be a string"))
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

//! The turns of a conversation in another API's format, being read as chat's messages.
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::Fields;

/// Longest type of a part that an error shows, in bytes.
const TYPE_SHOWN: usize = 64;

/// The messages that a request's turns make.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Turns {
    /// The messages, in chat's format.
    pub(super) messages: Vec<Value>,
    /// Whether the model continues the last one, which is the assistant's.
    pub(super) goes_on: bool,
}

impl Turns {
    /// Adds a message.
    pub(super) fn push(&mut self, role: &str, content: impl Into<Value>) {
        self.messages.push(json!({"role": role, "content": content.into()}));
    }

    /// The last message, if it is of this role.
    pub(super) fn last(&mut self, role: &str) -> Option<&mut Map<String, Value>> {
        let last = self.messages.last_mut().and_then(Value::as_object_mut)?;
        last.get("role").is_some_and(|it| it == role).then_some(last)
    }

    /// Adds a call of a tool: to the assistant's turn, if that is the last one.
    pub(super) fn call(&mut self, id: &str, name: &str, arguments: &Value) {
        let function = json!({"name": name, "arguments": arguments});
        let call = json!({"id": id, "type": "function", "function": function});
        match self.last("assistant") {
            Some(message) => {
                let calls = message.entry("tool_calls").or_insert_with(|| json!([]));
                calls.as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
            }
            None => self.messages.push(json!({"role": "assistant", "tool_calls": [call]})),
        }
    }

    /// Adds a call's result.
    pub(super) fn result(&mut self, id: &str, content: &str) {
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
    }

    /// The fields of the chat request that asks for the same: the messages, and the fields that
    /// both APIs call by these names.
    pub(super) fn asked(self, fields: &Fields, same: &[&str]) -> Map<String, Value> {
        let same = same.iter().filter_map(|name| Some((*name, fields.get(name)?.clone())));
        let mut chat: Map<String, Value> =
            same.map(|(name, value)| (name.to_owned(), value)).collect();
        chat.insert("messages".to_owned(), self.messages.into());
        if self.goes_on {
            chat.insert("add_generation_prompt".to_owned(), false.into());
            chat.insert("continue_final_message".to_owned(), true.into());
        }
        chat
    }
}

/// An error whose sentence begins with the location, a path that begins with the field's name.
pub(super) fn wrong(at: &str, message: &str) -> ApiError {
    let field = at.split(['.', '[']).next().unwrap_or(at);
    ApiError::field(field, format!("`{at}` {message}"))
}

/// Reads the text of the part of content at `at`, which can be nothing else.
///
/// # Errors
/// 400 naming the part and its type.
pub(super) fn part_text<'a>(at: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let kind = part.get("type").and_then(Value::as_str);
    let name = match kind {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        _ => {
            let found = shown_type(kind);
            let message = format!("has the type {found}, which is not supported: only text is");
            return Err(wrong(at, &message));
        }
    };
    let text = part.get(name).and_then(Value::as_str);
    text.ok_or_else(|| wrong(&format!("{at}.{name}"), "must be a string"))
}

/// What a model is told in place of a part of a tool's result that it cannot read.
pub(super) fn left_out(what: &str) -> String {
    format!("[{what} left out: this model reads only text]")
}

/// A part's type as errors show it: it may be as large as a body.
pub(super) fn shown_type(kind: Option<&str>) -> String {
    match kind {
        None => "none".to_owned(),
        Some(kind) if kind.len() <= TYPE_SHOWN => format!("{kind:?}"),
        Some(kind) => format!("{:?}...", &kind[..kind.floor_char_boundary(TYPE_SHOWN)]),
    }
}

/// Reads a string of the object at `at`.
///
/// # Errors
/// 400 naming the location, if there is none.
pub(super) fn string<'a>(
    at: &str,
    fields: &'a Map<String, Value>,
    name: &str,
) -> Result<&'a str, ApiError> {
    let value = fields.get(name).and_then(Value::as_str);
    value.ok_or_else(|| wrong(&format!("{at}.{name}"), "must be a string"))
}

//! Converts the items of a response's input to the messages of a conversation.
//!
//! One turn of the model comes as several items (reasoning, text, calls), but templates expect one
//! message with all of them.
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::params::Limits;
use super::super::turns::{Turns, left_out, part_text, string, wrong};
use super::tools;

/// Reads `instructions` and `input`.
///
/// # Errors
/// 400 naming the field, the item and what it must be.
pub(super) fn read(fields: &Fields, limits: &Limits) -> Result<Turns, ApiError> {
    let mut input = Turns::default();
    if let Some(text) = fields.string("instructions", limits.body_bytes)? {
        input.push("system", text);
    }
    match fields.get("input") {
        None => return Err(ApiError::field("input", "`input` is required")),
        Some(Value::String(text)) => input.push("user", text.as_str()),
        Some(Value::Array(items)) if !items.is_empty() => {
            limits.check_messages("input", items.len(), fields.bytes())?;
            for (index, item) in items.iter().enumerate() {
                take(&mut input, &format!("input[{index}]"), item)?;
            }
            // As in vLLM.
            input.goes_on = items.last().is_some_and(is_open);
        }
        Some(other) => {
            let expected = "a string or a list of at least one item";
            return Err(Fields::wrong("input", other, expected));
        }
    }
    Ok(input)
}

/// Whether an item is an assistant's message whose status is incomplete.
fn is_open(item: &Value) -> bool {
    let is = |name: &str, words: &[&str]| {
        item.get(name).and_then(Value::as_str).is_some_and(|word| words.contains(&word))
    };
    is("role", &["assistant"]) && is("status", &["in_progress", "incomplete"])
}

fn take(turns: &mut Turns, at: &str, item: &Value) -> Result<(), ApiError> {
    let fields = item.as_object().ok_or_else(|| wrong(at, "must be an object"))?;
    match fields.get("type").and_then(Value::as_str) {
        Some("message") => take_message(turns, at, fields),
        None if fields.get("type").is_none_or(Value::is_null) => take_message(turns, at, fields),
        Some("function_call") => take_call(turns, at, fields),
        Some("custom_tool_call") => take_custom_call(turns, at, fields),
        Some("function_call_output" | "custom_tool_call_output") => take_output(turns, at, fields),
        Some("reasoning") => take_reasoning(turns, at, fields),
        Some("item_reference") => {
            let why = "refers to an item that is not stored here: send the item itself (with \
                       Vercel's AI SDK: `openai.chat(..)`, or `store: false` in its options)";
            Err(wrong(at, why))
        }
        Some(other) => {
            let message = format!(
                "has the type {other:?}, which is not supported; supported are message, \
                 function_call, custom_tool_call, their outputs and reasoning"
            );
            Err(wrong(at, &message))
        }
        None => Err(wrong(&format!("{at}.type"), "must be a string")),
    }
}

fn take_message(turns: &mut Turns, at: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
    if !["system", "developer", "user", "assistant"].contains(&role) {
        let path = format!("{at}.role");
        return Err(wrong(&path, "must be one of system, developer, user and assistant"));
    }
    let content = text(&format!("{at}.content"), fields.get("content"))?;
    if role == "assistant" {
        // This is the answer that follows the preceding reasoning.
        let has = |message: &Map<String, Value>, name: &str| message.contains_key(name);
        let last = turns.last("assistant");
        if let Some(last) = last.filter(|it| !has(it, "content") && !has(it, "tool_calls")) {
            last.insert("content".to_owned(), content.into());
            return Ok(());
        }
    }
    turns.push(role, content);
    Ok(())
}

fn take_call(turns: &mut Turns, at: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
    let id = string(at, fields, "call_id")?;
    let arguments = string(at, fields, "arguments")?;
    turns.call(id, &called(at, fields)?, &arguments.into());
    Ok(())
}

fn take_custom_call(
    turns: &mut Turns,
    at: &str,
    fields: &Map<String, Value>,
) -> Result<(), ApiError> {
    let id = string(at, fields, "call_id")?;
    let input = string(at, fields, "input")?;
    turns.call(id, &called(at, fields)?, &tools::arguments(input));
    Ok(())
}

/// The name by which the model knows the tool that was called.
fn called(at: &str, fields: &Map<String, Value>) -> Result<String, ApiError> {
    let name = string(at, fields, "name")?;
    let namespace = match fields.get("namespace") {
        None | Some(Value::Null) => None,
        Some(_) => Some(string(at, fields, "namespace")?),
    };
    Ok(tools::told_name(namespace, name))
}

fn take_output(turns: &mut Turns, at: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
    let id = string(at, fields, "call_id")?;
    turns.result(id, &result(&format!("{at}.output"), fields.get("output"))?);
    Ok(())
}

/// Reads a call's output. What only other models read is named instead: agents put it there on
/// their own (a picture that they opened), and send it again with each later request.
fn result(at: &str, content: Option<&Value>) -> Result<String, ApiError> {
    let Some(Value::Array(parts)) = content else { return text(at, content) };
    let part = |(index, part): (usize, &Value)| match part.get("type").and_then(Value::as_str) {
        Some("input_image") => Ok(left_out("image")),
        Some("input_file") => Ok(left_out("file")),
        _ => part_text(&format!("{at}[{index}]"), part).map(str::to_owned),
    };
    Ok(parts.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// Takes reasoning, which starts a turn of the assistant; the answer and calls follow.
fn take_reasoning(
    turns: &mut Turns,
    at: &str,
    fields: &Map<String, Value>,
) -> Result<(), ApiError> {
    let part = |name: &str| -> Result<String, ApiError> {
        let path = format!("{at}.{name}");
        let list = match fields.get(name) {
            None | Some(Value::Null) => return Ok(String::new()),
            Some(Value::Array(list)) => list,
            Some(_) => return Err(wrong(&path, "must be a list of texts")),
        };
        let texts = list.iter().map(|part| part.get("text").and_then(Value::as_str));
        let texts: Option<Vec<&str>> = texts.collect();
        Ok(texts.ok_or_else(|| wrong(&path, "must be a list of texts"))?.join("\n"))
    };
    let (content, summary) = (part("content")?, part("summary")?);
    let said = if content.is_empty() { summary } else { content };
    let is_secret = fields.get("encrypted_content").is_some_and(|it| !it.is_null());
    if said.is_empty() && is_secret {
        let message = "has only `encrypted_content`, which only the server that wrote it can \
                       read: leave the item out";
        return Err(wrong(at, message));
    }
    if !said.is_empty() {
        turns.messages.push(json!({"role": "assistant", "reasoning_content": said}));
    }
    Ok(())
}

/// Reads content: a string, or parts that are text.
fn text(at: &str, content: Option<&Value>) -> Result<String, ApiError> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        _ => return Err(wrong(at, "must be a string or a list of text parts")),
    };
    let parts =
        parts.iter().enumerate().map(|(index, it)| part_text(&format!("{at}[{index}]"), it));
    Ok(parts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(body: Value) -> Result<Turns, String> {
        let limits = Limits::new(1024);
        let fields = Fields::parse(body.to_string().as_bytes(), &limits).unwrap();
        read(&fields, &limits).map_err(|error| error.to_string())
    }

    #[test]
    fn what_the_model_said_in_one_turn_is_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let told = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let read = input(json!({"instructions": "Be brief.", "input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1",
             "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            call("1"), call("2"),
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
            call("3"),
            {"type": "function_call_output", "call_id": "3", "output": "three"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            call("4"),
            {"type": "message", "role": "developer", "content": [
                {"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        ]}));
        let read = read.unwrap();
        assert!(!read.goes_on);
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "reasoning_content": "hm", "content": "b", "tool_calls": [told("1"), told("2")]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "assistant", "tool_calls": [told("3")]},
            {"role": "tool", "tool_call_id": "3", "content": "three"},
            {"role": "assistant", "reasoning_content": "so", "tool_calls": [told("4")]},
            {"role": "developer", "content": "c\nd"},
        ]);
        assert_eq!(Value::Array(read.messages), expected);
    }

    #[test]
    fn two_answers_are_two_messages_and_an_open_one_is_gone_on_with() {
        let said = |text: &str, status: &str| json!({"role": "assistant", "content": text, "status": status});
        let read =
            input(json!({"input": [said("a", "completed"), said("b", "incomplete")]})).unwrap();
        assert_eq!(read.messages.len(), 2);
        assert!(read.goes_on);
        let read =
            input(json!({"input": [said("a", "incomplete"), said("b", "completed")]})).unwrap();
        assert!(!read.goes_on);
    }

    #[test]
    fn what_is_no_item_is_named() {
        let user = json!({"role": "user", "content": "x"});
        for (bad, says) in [
            (json!(5), "`input[1]` must be an object"),
            (json!({"content": "x"}), "`input[1].role`"),
            (json!({"role": "tool", "content": "x"}), "`input[1].role`"),
            (json!({"type": 5, "role": "user", "content": "x"}), "`input[1].type`"),
            (json!({"type": "item_reference", "id": "msg_1"}), "not stored here"),
            (json!({"type": "web_search_call"}), "\"web_search_call\", which is not supported"),
            (json!({"role": "user"}), "`input[1].content`"),
            (
                json!({"role": "user", "content": [{"type": "input_image"}]}),
                "`input[1].content[0]` has the type \"input_image\"",
            ),
            (
                json!({"role": "user", "content": [{"text": "x"}]}),
                "`input[1].content[0]` has the type none",
            ),
            (
                json!({"role": "user", "content": [{"type": "input_text"}]}),
                "`input[1].content[0].text`",
            ),
            (
                json!({"type": "function_call", "name": "f", "arguments": "{}"}),
                "`input[1].call_id`",
            ),
            (
                json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": {}}),
                "`input[1].arguments`",
            ),
            (json!({"type": "function_call_output", "call_id": "1"}), "`input[1].output`"),
            (json!({"type": "reasoning", "summary": "x"}), "`input[1].summary`"),
            (
                json!({"type": "reasoning", "summary": [], "encrypted_content": "x"}),
                "encrypted_content",
            ),
        ] {
            let error = input(json!({"input": [user, bad]})).unwrap_err();
            assert!(error.contains(says), "{bad}: {error}");
        }
        for (body, says) in [
            (json!({}), "`input` is required"),
            (json!({"input": []}), "at least one item"),
            (json!({"input": 5}), "at least one item"),
            (json!({"input": vec![user; 1025]}), "1025 messages, the limit is 1024"),
            (json!({"input": "x", "instructions": 5}), "`instructions`"),
        ] {
            let error = input(body.clone()).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}

//! The part of a chat request that its template is given: messages, tools, variables.
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, extent};
use super::limits::EFFORT_BYTES;
use super::params::Limits;
use super::turns::part_text;
use crate::text::model::TextModel;
use crate::text::reply::harmony::Opening;
use crate::text::reply::{CallFormat, Reasoning};
use crate::text::template::{ChatTemplate, Conversation, RESERVED, RenderError, harmony, kimi};

/// A variable that has its own field. Clients send it to whatever model they are set to, and a
/// template that does not read it ignores it, so it is no error there.
pub(super) const EFFORT: &str = "reasoning_effort";
/// Its values in harmony: the words that gpt-oss was trained with.
pub(super) const EFFORTS: [&str; 3] = ["low", "medium", "high"];
/// Its value for no reasoning at all: as in vLLM, that turns it off also where a template has a
/// switch for it and reads no effort, and any other value turns it on.
const NO_EFFORT: &str = "none";
/// The roles that every template knows, or refuses.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Longest name of a role.
pub(super) const ROLE_BYTES: usize = 64;
/// The field of variables for the template.
const VARIABLES: &str = "chat_template_kwargs";
/// Those that have a field of their own, and may be written among the variables as well.
const FIELDS_TOO: [&str; 3] = ["documents", "add_generation_prompt", "continue_final_message"];
/// What a template that lets its model reason or not calls that: Qwen3, SmolLM3, Granite.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// Reads a conversation.
///
/// # Errors
/// 400 naming the field, the message and what it must be.
pub fn read(
    fields: &Fields,
    limits: &Limits,
    template: &ChatTemplate,
    tools: Option<&Value>,
) -> Result<Conversation, ApiError> {
    let mut variables = variables(fields)?;
    let continue_final_message =
        flag(fields, &mut variables, "continue_final_message")?.unwrap_or(false);
    let add_generation_prompt =
        flag(fields, &mut variables, "add_generation_prompt")?.unwrap_or(true);
    if continue_final_message && add_generation_prompt {
        return Err(ApiError::field(
            "continue_final_message",
            "`continue_final_message` needs `add_generation_prompt`: false",
        ));
    }
    let is_harmony = template.calls() == Some(CallFormat::Harmony);
    let effort = fields.string(EFFORT, EFFORT_BYTES)?;
    if let Some(value) = effort
        && template.knows(EFFORT, tools.is_some())
    {
        if is_harmony && !EFFORTS.contains(&value) {
            let message =
                format!("`{EFFORT}` must be one of {} with this model", EFFORTS.join(", "));
            return Err(ApiError::field(EFFORT, message));
        }
        variables.insert(EFFORT.to_owned(), value.into());
    }
    if let Some(effort) = effort
        && let Some(switch) = switch(template, tools.is_some())
    {
        // What the client says itself goes before, what the server's options say does not.
        variables.entry(switch).or_insert((effort != NO_EFFORT).into());
    }
    let given = variables.remove("documents");
    let documents = match (objects(fields, "documents", limits.messages)?, given) {
        (None, Some(given)) => {
            let name = format!("{VARIABLES}.documents");
            list_of_objects(&name, &given, limits.messages)?
        }
        (documents, _) => documents,
    };
    if documents.is_some() && !template.knows("documents", tools.is_some()) {
        let message = "`documents` is not supported: the model's chat template does not read it";
        return Err(ApiError::field("documents", message));
    }
    let (mut messages, mut tools) = (messages(fields, limits)?, tools.cloned());
    if is_harmony {
        messages = harmony::messages(messages);
        tools = tools.map(harmony::tools);
    }
    if template.calls() == Some(CallFormat::KimiK2) {
        messages = kimi::messages(messages);
    }
    Ok(Conversation {
        messages,
        tools,
        documents,
        add_generation_prompt,
        continue_final_message,
        variables,
    })
}

/// The variable of a template by which its model reasons or not, if it has one.
pub(super) fn switch(template: &ChatTemplate, has_tools: bool) -> Option<&'static str> {
    SWITCHES.into_iter().find(|switch| template.knows(switch, has_tools))
}

/// A conversation as given to the model.
#[derive(Clone, Debug)]
pub struct Rendered {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Whether the reply begins within the model's reasoning.
    pub begins_reasoning: bool,
    /// Where in a message it begins, if it is in harmony format.
    pub opening: Option<Opening>,
}

/// Renders and tokenizes a conversation, whose prompt must fit `max_tokens` tokens, if given. In
/// harmony, a reply that must be only the answer begins within the answer's message.
///
/// # Errors
/// 400 for what the template rejects and for prompts that cannot fit, 500 for faults of the
/// template.
pub fn encode(
    text: &TextModel,
    conversation: &Conversation,
    add_special_tokens: bool,
    max_tokens: Option<u32>,
    reasoning: Reasoning,
    answers_at_once: bool,
) -> Result<Rendered, ApiError> {
    let template = text.template.as_ref().ok_or_else(no_template)?;
    let mut rendered = template.render(conversation).map_err(|error| match error {
        RenderError::Conversation(message) => ApiError::field("messages", message),
        RenderError::TooLong(message) => ApiError::context_length("messages", message),
        // Only the template knows which values a variable may have.
        RenderError::Template(message) if !conversation.variables.is_empty() => {
            ApiError::field("chat_template_kwargs", message)
        }
        RenderError::Template(message) => {
            tracing::warn!(%message, "the model's chat template failed");
            ApiError::internal(format!("The model's chat template failed: {message}"))
        }
    })?;
    check_roles(&conversation.messages, &rendered)?;
    let mut opening = (reasoning == Reasoning::Harmony).then(|| Opening::after(&rendered));
    if let Some(opening) = &mut opening
        && answers_at_once
    {
        rendered.push_str(opening.to_answer());
        *opening = Opening::after(&rendered);
    }
    check_fits(text, "messages", &rendered, max_tokens)?;
    let tokens = text.encode(&rendered, add_special_tokens);
    let tokens = tokens.map_err(|error| ApiError::field("messages", error))?;
    let begins_reasoning = match conversation.continue_final_message {
        true => reasoning.goes_on_in(&rendered),
        false => reasoning.begins_after(&rendered),
    };
    Ok(Rendered { tokens, begins_reasoning, opening })
}

/// Rejects a text that cannot fit so many tokens without tokenizing it.
///
/// # Errors
/// 400 naming the field.
pub fn check_fits(
    text: &TextModel,
    field: &str,
    prompt: &str,
    max_tokens: Option<u32>,
) -> Result<(), ApiError> {
    let (Some(max), Some(bytes)) = (max_tokens, text.bytes_per_token) else { return Ok(()) };
    let least = prompt.len().div_ceil(bytes);
    if least <= max as usize {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {max} tokens. However, your prompt has at least \
         {least} tokens. Please reduce your prompt."
    );
    Err(ApiError::context_length(field, message))
}

/// The error of a model without a chat template.
#[must_use]
pub fn no_template() -> ApiError {
    ApiError::field(
        "model",
        "this model has no chat template; use /v1/completions, or start the server with \
         --chat-template",
    )
}

/// Takes a switch from its own field, or else from the template's variables, where vLLM's clients
/// write it, too.
fn flag(
    fields: &Fields,
    variables: &mut Map<String, Value>,
    name: &str,
) -> Result<Option<bool>, ApiError> {
    let given = variables.remove(name).unwrap_or_default();
    let given = match given {
        Value::Null => None,
        Value::Bool(value) => Some(value),
        other => return Err(Fields::wrong(&format!("{VARIABLES}.{name}"), &other, "a boolean")),
    };
    Ok(match fields.get(name) {
        None => given,
        Some(_) => Some(fields.boolean(name, false)?),
    })
}

fn variables(fields: &Fields) -> Result<Map<String, Value>, ApiError> {
    let name = VARIABLES;
    let map = match fields.get(name) {
        None => return Ok(Map::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(Fields::wrong(name, other, "an object")),
    };
    let is_reserved =
        |key: &&String| RESERVED.contains(&key.as_str()) && !FIELDS_TOO.contains(&key.as_str());
    match map.keys().find(is_reserved) {
        Some(key) => {
            let message = format!("`{name}.{key}` cannot be given here");
            Err(ApiError::field(name, message))
        }
        None => Ok(map.clone()),
    }
}

/// Reads a list of at most `max` objects; `None` if it is absent or empty.
pub(super) fn objects(fields: &Fields, name: &str, max: usize) -> Result<Option<Value>, ApiError> {
    match fields.get(name) {
        None => Ok(None),
        Some(value) => list_of_objects(name, value, max),
    }
}

fn list_of_objects(name: &str, value: &Value, max: usize) -> Result<Option<Value>, ApiError> {
    match value {
        Value::Null => Ok(None),
        Value::Array(list) if list.is_empty() => Ok(None),
        Value::Array(list) if list.len() <= max && list.iter().all(Value::is_object) => {
            Ok(Some(value.clone()))
        }
        other => Err(Fields::wrong(name, other, &format!("a list of at most {max} objects"))),
    }
}

fn messages(fields: &Fields, limits: &Limits) -> Result<Vec<Value>, ApiError> {
    let name = "messages";
    let list = match fields.get(name) {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(other) => return Err(Fields::wrong(name, other, "a list of at least one message")),
        None => return Err(ApiError::field(name, "`messages` is required")),
    };
    limits.check_messages(name, list.len(), fields.bytes())?;
    // A body's bound does not count what is within its strings.
    let mut values = limits.json_values;
    list.iter().enumerate().map(|(index, value)| message(index, value, &mut values)).collect()
}

/// Reads one message, with all its fields: templates read more than role and content. The arguments
/// of its calls take of the `values` that there may be in those of all.
fn message(index: usize, value: &Value, values: &mut usize) -> Result<Value, ApiError> {
    let wrong = |part: &str, expected: &str| {
        let message = format!("`messages[{index}]{part}` must be {expected}");
        ApiError::field("messages", message)
    };
    let fields = value.as_object().ok_or_else(|| wrong("", "an object"))?;
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
    if !(1..=ROLE_BYTES).contains(&role.len()) {
        let roles = ROLES.join(", ");
        return Err(wrong(
            ".role",
            &format!(
                "a string of 1 to {ROLE_BYTES} bytes: {roles}, or one that the template knows"
            ),
        ));
    }
    let mut thoughts = Vec::new();
    let content = match fields.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (at, part) in parts.iter().enumerate() {
                let place = || format!("messages[{index}].content[{at}]");
                match (part, thought(part)) {
                    (Value::String(text), _) => texts.push(text.as_str()),
                    (_, Some(thought)) if role == "assistant" => thoughts.extend(thought),
                    (_, Some(thought)) => texts.extend(thought),
                    _ => texts.push(part_text(&place(), part)?),
                }
            }
            texts.join("\n")
        }
        None | Some(Value::Null) if role == "assistant" || role == "tool" => String::new(),
        _ => return Err(wrong(".content", "a string or a list of text parts")),
    };
    for name in ["name", "tool_call_id", "reasoning_content", "reasoning", "thinking"] {
        if fields.get(name).is_some_and(|value| !value.is_string() && !value.is_null()) {
            return Err(wrong(&format!(".{name}"), "a string"));
        }
    }
    let mut message = fields.clone();
    // Null counts as absent here, but templates distinguish the two.
    message.retain(|_, value| !value.is_null());
    let role = if role == "developer" { "system" } else { role };
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content.into());
    // It has several names, of which each template knows one; transformers uses this one.
    let names = ["reasoning_content", "thinking", "reasoning"];
    let in_parts = (!thoughts.is_empty()).then(|| thoughts.join("\n").into());
    if let Some(said) = names.iter().find_map(|name| message.get(*name)).cloned().or(in_parts) {
        message.entry("thinking").or_insert_with(|| said.clone());
        message.insert("reasoning_content".to_owned(), said);
    }
    // Templates take an empty list for calls.
    if message.get("tool_calls").and_then(Value::as_array).is_some_and(Vec::is_empty) {
        message.remove("tool_calls");
    }
    if let Some(calls) = message.get_mut("tool_calls") {
        for (at, call) in calls.as_array_mut().into_iter().flatten().enumerate() {
            let part = format!(".tool_calls[{at}]");
            parse_arguments(call, values)
                .map_err(|expected| wrong(&format!("{part}{}", expected.0), expected.1))?;
        }
        if !calls.is_array() {
            return Err(wrong(".tool_calls", "a list"));
        }
    }
    Ok(Value::Object(message))
}

/// The texts of a part of the type `thinking`: some clients return the model's reasoning so, as a
/// string or as parts of text.
fn thought(part: &Value) -> Option<Vec<&str>> {
    if part.get("type").and_then(Value::as_str) != Some("thinking") {
        return None;
    }
    match part.get("thinking")? {
        Value::String(text) => Some(vec![text]),
        Value::Array(parts) => {
            parts.iter().map(|part| part.get("text").and_then(Value::as_str)).collect()
        }
        _ => None,
    }
}

/// Checks that a template has written the messages of roles that only some know: others leave them
/// out, or write nothing of them.
fn check_roles(messages: &[Value], rendered: &str) -> Result<(), ApiError> {
    for message in messages {
        let said = |name| message.get(name).and_then(Value::as_str).unwrap_or_default();
        let (role, content) = (said("role"), said("content").trim());
        if !ROLES.contains(&role) && !rendered.contains(content) {
            let message = format!(
                "`messages` has one of the role {role:?}, which the model's chat template does not \
                 write; it must be one of {}",
                ROLES.join(", ")
            );
            return Err(ApiError::field("messages", message));
        }
    }
    Ok(())
}

/// Parses a call's arguments, JSON in a string, into the object that templates expect. Text of a
/// model that is not a JSON object becomes an empty one: an error would end a conversation that the
/// client cannot repair.
fn parse_arguments(
    call: &mut Value,
    values: &mut usize,
) -> Result<(), (&'static str, &'static str)> {
    let function = call.get_mut("function").and_then(Value::as_object_mut);
    let function = function.ok_or((".function", "an object"))?;
    if !function.get("name").is_some_and(Value::is_string) {
        return Err((".function.name", "a string"));
    }
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(text)) => {
            let few = "JSON of fewer values: those of all calls are limited like a body's";
            let left = values.checked_sub(extent(text.as_bytes()).1);
            *values = left.ok_or((".function.arguments", few))?;
            let parsed = serde_json::from_str(text).ok().filter(Value::is_object);
            parsed.unwrap_or_else(|| Value::Object(Map::new()))
        }
        Some(arguments @ Value::Object(_)) => arguments.clone(),
        Some(_) => return Err((".function.arguments", "a JSON object, in a string")),
    };
    function.insert("arguments".to_owned(), arguments);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_in_the_strings_of_calls_are_bounded_together() {
        let usual = Limits::new(1024);
        let few = Limits { json_values: 12, ..usual.clone() };
        let read = |arguments: &[&str]| {
            let call =
                |text: &&str| json!({"id": "1", "function": {"name": "f", "arguments": text}});
            let calls: Vec<Value> = arguments.iter().map(call).collect();
            let body = json!({"messages": [{"role": "assistant", "tool_calls": calls}]});
            let fields = Fields::parse(body.to_string().as_bytes(), &usual).unwrap();
            messages(&fields, &few).map_err(|error| error.to_string())
        };
        let six = r#"{"a": [1, 2, 3], "b": ""}"#;
        let read_both = read(&[six, six]).unwrap();
        let arguments = &read_both[0]["tool_calls"][1]["function"]["arguments"];
        assert_eq!(*arguments, json!({"a": [1, 2, 3], "b": ""}));
        let error = read(&[six, six, "{}"]).unwrap_err();
        assert!(error.contains("`messages[0].tool_calls[2].function.arguments`"), "{error}");
        assert!(read(&["[[[[[[[[[[[[[", "{}"]).is_err(), "text that is no JSON counts too");
    }
}

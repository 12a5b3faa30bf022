//! PURE: what conversations are made of: messages, their content, tools, the form of answers.
use serde_json::{Value, json};

use super::schema::{
    Properties, any_list, any_object, any_of, boolean, bytes, given, only, or_null, properties,
    string, told, words,
};
use crate::http::conversation::ROLE_BYTES;
use crate::http::structured::NAME_MAX;

/// The roles of chat's messages that may say nothing.
const MAY_BE_EMPTY: &[&str] = &["assistant", "tool"];

/// A function that the model may call.
pub(super) fn function(schema: &str) -> Properties {
    properties(json!({
        "name": {"type": "string", "minLength": 1},
        "description": {},
        schema: any_object(),
        "strict": {},
    }))
}

/// A schema with a name, as OpenAI's `json_schema`.
pub(super) fn named_schema() -> Properties {
    properties(json!({
        "name": bytes(1, NAME_MAX),
        "description": string(),
        "strict": boolean(),
        "schema": any_object(),
    }))
}

pub(super) fn response_format() -> Value {
    let schema = given(&["name", "schema"], named_schema());
    any_of([
        given(&["type"], properties(json!({"type": only("text")}))),
        given(&["type"], properties(json!({"type": only("json_object"), "schema": any_object()}))),
        given(
            &["type", "json_schema"],
            properties(json!({"type": only("json_schema"), "json_schema": schema})),
        ),
        structural_tag(&["type"]),
    ])
}

/// vLLM's and xgrammar's structural tag: one of its two forms.
pub(super) fn structural_tag(required: &[&str]) -> Value {
    let some = json!({"type": "string", "minLength": 1});
    given(
        required,
        properties(json!({
            "type": only("structural_tag"),
            "format": any_object(),
            "structures": {"type": "array", "items": any_object(), "minItems": 1},
            "triggers": {"type": "array", "items": some, "minItems": 1},
        })),
    )
}

/// The same in the Responses API, where a schema's fields stand beside its type.
pub(super) fn text_format() -> Value {
    let mut schema = named_schema();
    schema.insert("type".to_owned(), only("json_schema"));
    any_of([
        given(&["type"], properties(json!({"type": only("text")}))),
        given(&["type"], properties(json!({"type": only("json_object"), "schema": any_object()}))),
        given(&["type", "name", "schema"], schema),
    ])
}

/// A part of a content that is text.
fn text_part(kinds: &[&str]) -> Value {
    let text =
        given(&["type", "text"], properties(json!({"type": words(kinds), "text": string()})));
    let refusal = given(
        &["type", "refusal"],
        properties(json!({"type": only("refusal"), "refusal": string()})),
    );
    any_of([text, refusal])
}

/// A message of chat.
pub(super) fn message() -> Value {
    let part = text_part(&["text", "input_text", "output_text"]);
    let parts = any_list(given(&["text"], properties(json!({"text": string()}))));
    let thought = given(
        &["type", "thinking"],
        properties(json!({"type": only("thinking"), "thinking": any_of([string(), parts])})),
    );
    let content = any_of([string(), any_list(any_of([string(), part, thought]))]);
    let function = given(
        &["name"],
        properties(json!({"name": string(), "arguments": any_of([string(), any_object()])})),
    );
    let call = given(&["function"], properties(json!({"function": function})));
    let calls = any_list(call);
    let of = |required: &[&str], role: Value| {
        let own = json!({
            "role": role, "content": content, "name": string(), "tool_call_id": string(),
            "reasoning_content": string(), "reasoning": string(), "thinking": string(),
            "tool_calls": calls,
        });
        given(required, properties(own))
    };
    let other = told(
        bytes(1, ROLE_BYTES),
        "`system`, `developer`, `user`, or another that the model's chat template writes.",
    );
    any_of([of(&["role"], words(MAY_BE_EMPTY)), of(&["role", "content"], other)])
}

/// How tools are called.
pub(super) fn tool_choice() -> Value {
    let name = given(&["name"], properties(json!({"name": string()})));
    let one = given(&["function"], properties(json!({"type": only("function"), "function": name})));
    let allowed = given(
        &["mode", "tools"],
        properties(json!({
            "mode": words(&["auto", "required"]),
            "tools": {"type": "array", "items": one, "minItems": 1},
        })),
    );
    let some = given(
        &["type", "allowed_tools"],
        properties(json!({"type": only("allowed_tools"), "allowed_tools": allowed})),
    );
    any_of([words(&["none", "auto", "required"]), one, some])
}

/// A tool of a response, or a group of them.
pub(super) fn response_tool() -> Value {
    let one = response_tools();
    let group = given(
        &["type", "name", "tools"],
        properties(json!({
            "type": only("namespace"), "name": {"type": "string", "minLength": 1},
            "tools": any_list(any_of(one.clone())),
        })),
    );
    any_of(one.into_iter().chain([group]).collect::<Vec<_>>())
}

fn response_tools() -> [Value; 3] {
    let mut function = function("parameters");
    function.insert("type".to_owned(), only("function"));
    let format = properties(json!({"syntax": string(), "definition": string()}));
    let custom = properties(json!({
        "type": only("custom"), "name": {"type": "string", "minLength": 1},
        "description": string(), "format": given(&[], format),
    }));
    let other = json!({
        "type": "object", "required": ["type"], "description": "The model is not told of it.",
        "properties": {"type": {
            "type": "string", "not": {"enum": ["function", "custom", "namespace"]},
        }},
    });
    [given(&["type", "name"], function), given(&["type", "name"], custom), other]
}

pub(super) fn response_tool_choice() -> Value {
    let kinds = words(&["function", "custom"]);
    let own = properties(json!({"type": kinds, "name": string(), "namespace": {}}));
    let one = given(&["type", "name"], own);
    let some = given(
        &["type", "mode", "tools"],
        properties(json!({
            "type": only("allowed_tools"), "mode": words(&["auto", "required"]),
            "tools": any_list(one.clone()),
        })),
    );
    any_of([words(&["none", "auto", "required"]), one, some])
}

/// An item of a response's input.
pub(super) fn input_item() -> Value {
    let kinds = &["input_text", "output_text", "text"];
    let content = || any_of([string(), any_list(text_part(kinds))]);
    let message = given(
        &["role", "content"],
        properties(json!({
            "type": only("message"), "content": content(),
            "role": words(&["system", "developer", "user", "assistant"]),
        })),
    );
    let call = given(
        &["type", "call_id", "name", "arguments"],
        properties(json!({
            "type": only("function_call"), "call_id": string(), "name": string(),
            "namespace": string(), "arguments": string(),
        })),
    );
    let custom = given(
        &["type", "call_id", "name", "input"],
        properties(json!({
            "type": only("custom_tool_call"), "call_id": string(), "name": string(),
            "namespace": string(), "input": string(),
        })),
    );
    let left_out = told(
        json!({"type": "object", "required": ["type"],
            "properties": {"type": words(&["input_image", "input_file"])}}),
        "The model is told that it was left out.",
    );
    let output = given(
        &["type", "call_id", "output"],
        properties(json!({
            "type": words(&["function_call_output", "custom_tool_call_output"]),
            "call_id": string(),
            "output": any_of([string(), any_list(any_of([text_part(kinds), left_out]))]),
        })),
    );
    let texts = || any_list(given(&["text"], properties(json!({"text": string()}))));
    let reasoning = given(
        &["type"],
        properties(json!({
            "type": only("reasoning"), "content": texts(), "summary": texts(),
            "encrypted_content": told(json!({}), "Only beside `content` or `summary`."),
        })),
    );
    any_of([message, call, custom, output, reasoning])
}

pub(super) fn text_block() -> Value {
    given(&["type", "text"], properties(json!({"type": only("text"), "text": string()})))
}

/// A turn of Anthropic's API.
pub(super) fn turn() -> Value {
    let texts = || any_of([string(), any_list(text_block())]);
    let of = |role: &str, content: Value| {
        given(&["role", "content"], properties(json!({"role": only(role), "content": content})))
    };
    let block = |kind: &str, required: &[&str], own: Value| {
        let mut own = properties(own);
        own.insert("type".to_owned(), only(kind));
        given(&[&["type"], required].concat(), own)
    };
    let left_out = told(
        json!({"type": "object", "required": ["type"],
            "properties": {"type": words(&["image", "document"])}}),
        "The model is told that it was left out.",
    );
    let tool = block("tool_reference", &["tool_name"], json!({"tool_name": string()}));
    let found = any_of([string(), any_list(any_of([text_block(), left_out, tool]))]);
    let result =
        block("tool_result", &["tool_use_id"], json!({"tool_use_id": string(), "content": found}));
    let call = block(
        "tool_use",
        &["id", "name", "input"],
        json!({"id": string(), "name": string(), "input": any_object()}),
    );
    let thinking = block("thinking", &["thinking"], json!({"thinking": string()}));
    let hidden = block("redacted_thinking", &[], json!({}));
    let users = any_list(any_of([text_block(), result]));
    let models = any_list(any_of([text_block(), thinking, hidden, call]));
    any_of([
        of("user", any_of([string(), users])),
        of("assistant", any_of([string(), models])),
        of("system", texts()),
    ])
}

pub(super) fn messages_tool() -> Value {
    let mut tool = function("input_schema");
    tool.insert("type".to_owned(), only("custom"));
    given(&["name", "input_schema"], tool)
}

pub(super) fn messages_tool_choice() -> Value {
    let single = boolean();
    let free = given(
        &["type"],
        properties(json!({
            "type": words(&["auto", "any", "none"]), "disable_parallel_tool_use": single,
        })),
    );
    let one = given(
        &["type", "name"],
        properties(json!({
            "type": only("tool"), "name": string(), "disable_parallel_tool_use": single,
        })),
    );
    any_of([free, one])
}

/// Whether the model reasons, in Anthropic's API.
pub(super) fn thinking() -> Value {
    let display = or_null(words(&["summarized", "omitted"]));
    let other = json!({
        "type": "object", "required": ["type"],
        "properties": {
            "type": words(&["adaptive", "between_tools", "disabled"]), "display": display,
        },
    });
    let enabled = json!({
        "type": "object", "required": ["type", "budget_tokens"],
        "properties": {
            "type": only("enabled"), "display": display,
            "budget_tokens": {"type": "integer", "minimum": 1, "maximum": u64::MAX},
        },
    });
    any_of([other, enabled])
}

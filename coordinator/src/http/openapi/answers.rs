//! PURE: what is answered: whole, as events of a stream, and as errors.
use serde_json::{Value, json};

use super::schema::{
    Properties, answer, any_list, any_object, any_of, boolean, nothing, only, or_null, properties,
    reference, string, words,
};
use super::tokens::{ids, logprob, logprobs, of_prompt, prompt_logprob, top_logprob};

pub(super) fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

pub(super) fn time() -> Value {
    json!({"type": "integer", "description": "Seconds since 1970."})
}

/// All answers, by name.
pub(super) fn all() -> Properties {
    let mut all = properties(json!({
        "Error": error(),
        "MessagesError": messages_error(),
        "Usage": usage(),
        "Completion": completion(false),
        "CompletionEvent": completion(true),
        "ChatCompletion": chat(),
        "ChatCompletionEvent": chat_event(),
        "ModelResponse": response(),
        "ResponseItem": response_item(),
        "ResponseEvent": response_event(),
        "ResponsePart": response_part(),
        "TokenLogprob": logprob(),
        "TopLogprob": top_logprob(),
        "PromptLogprob": prompt_logprob(),
        "Message": message(),
        "MessageBlock": message_block(),
        "MessageEvent": message_event(),
        "MessageDelta": message_delta(),
        "MessageEnd": answer(stops(), json!({})),
        "MessagesUsage": messages_usage(),
        "ToolInput": any_object(),
        "Embeddings": embeddings(),
        "Ranking": ranking(),
        "Scores": scores(),
        "Classes": classes(),
        "Pooled": pooled(),
        "Model": model(),
    }));
    all.extend(properties(json!({
        "Invocation": any_of(
            ["Completion", "ChatCompletion", "Embeddings", "Classes", "Ranking", "Scores"]
                .map(reference),
        ),
        "InvocationEvent": any_of(["CompletionEvent", "ChatCompletionEvent"].map(reference)),
        "TokenCount": answer(json!({"input_tokens": count()}), json!({})),
        "Models": answer(
            json!({"object": only("list"), "data": any_list(reference("Model"))}),
            json!({}),
        ),
        "Tokens": answer(
            json!({
                "count": count(), "max_model_len": count(), "tokens": any_list(count()),
                "token_strs": or_null(any_list(string())),
            }),
            json!({}),
        ),
        "Text": answer(json!({"prompt": string()}), json!({})),
        "TokenizerInfo": json!({
            "type": "object", "required": ["tokenizer_class"],
            "description": "What the model's tokenizer_config.json has.",
        }),
        "Readiness": answer(json!({"ready": boolean(), "message": string()}), json!({})),
        "Load": answer(json!({"server_load": count()}), json!({})),
        "Version": answer(
            json!({"name": only("tutti"), "version": string(), "protocol": count()}),
            json!({}),
        ),
        "Document": any_object(),
    })));
    all
}

fn error() -> Value {
    let kinds = ["invalid_request_error", "not_found_error", "rate_limit_error", "server_error"];
    let error = answer(
        json!({
            "message": string(), "type": words(&kinds), "param": or_null(string()),
            "code": or_null(string()),
        }),
        json!({}),
    );
    answer(json!({"error": error}), json!({}))
}

fn messages_error() -> Value {
    let kinds = [
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "overloaded_error",
        "api_error",
    ];
    let details =
        answer(json!({"error_code": string(), "unsupported": any_list(string())}), json!({}));
    let error =
        answer(json!({"type": words(&kinds), "message": string()}), json!({"details": details}));
    answer(json!({"type": only("error"), "error": error, "request_id": string()}), json!({}))
}

fn usage() -> Value {
    let cached = answer(json!({"cached_tokens": count()}), json!({}));
    answer(
        json!({
            "prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count(),
            "prompt_tokens_details": cached,
        }),
        // Of chats alone.
        json!({"completion_tokens_details": answer(json!({"reasoning_tokens": count()}), json!({}))}),
    )
}

/// What completions and chat have around their choices, and what they may have besides.
fn envelope(object: &str, choice: Value, is_event: bool, maybe: Value) -> Value {
    let mut always = json!({
        "id": string(), "object": only(object), "created": time(), "model": string(),
        "system_fingerprint": nothing(), "choices": any_list(choice),
    });
    let usage = reference("Usage");
    let mut maybe = properties(maybe);
    if is_event {
        maybe.insert("usage".to_owned(), or_null(usage));
    } else {
        always["usage"] = usage;
    }
    answer(always, Value::Object(maybe))
}

/// Why a choice is over.
fn finish_reason() -> Value {
    or_null(words(&["stop", "length", "tool_calls"]))
}

fn stop_reason() -> Value {
    json!({
        "type": ["integer", "string", "null"],
        "description": "The token or the string, of those that the request names, that ended it.",
    })
}

fn completion(is_event: bool) -> Value {
    let mut maybe = of_prompt(is_event);
    maybe["token_ids"] = ids();
    let choice = answer(
        json!({
            "index": count(), "text": string(), "logprobs": or_null(logprobs()),
            "finish_reason": finish_reason(), "stop_reason": stop_reason(),
        }),
        maybe,
    );
    envelope("text_completion", choice, is_event, json!({}))
}

fn chat_choice(name: &str, content: Value) -> Value {
    let logprobs = answer(
        json!({"content": any_list(reference("TokenLogprob")), "refusal": nothing()}),
        json!({}),
    );
    answer(
        json!({
            "index": count(), name: content, "logprobs": or_null(logprobs),
            "finish_reason": finish_reason(), "stop_reason": stop_reason(),
        }),
        json!({"token_ids": ids()}),
    )
}

fn chat() -> Value {
    let function = answer(json!({"name": string(), "arguments": string()}), json!({}));
    let call =
        answer(json!({"id": string(), "type": only("function"), "function": function}), json!({}));
    let message = answer(
        json!({
            "role": only("assistant"), "content": or_null(string()), "refusal": nothing(),
            "reasoning": or_null(string()), "reasoning_content": or_null(string()),
        }),
        json!({"tool_calls": any_list(call)}),
    );
    envelope("chat.completion", chat_choice("message", message), false, of_prompt(false))
}

fn chat_event() -> Value {
    let function = answer(json!({"arguments": string()}), json!({"name": string()}));
    let call = answer(
        json!({"index": count(), "function": function}),
        json!({"id": string(), "type": only("function")}),
    );
    let delta = answer(
        json!({}),
        json!({
            "role": only("assistant"), "content": string(), "reasoning": string(),
            "reasoning_content": string(), "tool_calls": any_list(call),
        }),
    );
    envelope("chat.completion.chunk", chat_choice("delta", delta), true, of_prompt(true))
}

/// A part of an item's content.
fn response_part() -> Value {
    let reasoning = answer(json!({"type": only("reasoning_text"), "text": string()}), json!({}));
    let text = answer(
        json!({
            "type": only("output_text"), "text": string(), "annotations": any_list(json!({})),
            "logprobs": any_list(reference("TokenLogprob")),
        }),
        json!({}),
    );
    any_of([reasoning, text])
}

fn response_status() -> Value {
    words(&["in_progress", "completed", "incomplete", "failed"])
}

fn response_item() -> Value {
    let of = |kind: &str, own: Value| {
        let mut all = properties(own);
        all.extend(properties(json!({
            "id": string(), "type": only(kind), "status": response_status(),
        })));
        // Only calls of tools of a group have it.
        answer(Value::Object(all), json!({"namespace": string()}))
    };
    let content = any_list(reference("ResponsePart"));
    any_of([
        of("reasoning", json!({"summary": any_list(json!({})), "content": content})),
        of("message", json!({"role": only("assistant"), "content": content})),
        of("function_call", json!({"call_id": string(), "name": string(), "arguments": string()})),
        of("custom_tool_call", json!({"call_id": string(), "name": string(), "input": string()})),
    ])
}

fn response() -> Value {
    let details = |name: &str| answer(json!({name: count()}), json!({}));
    let input = answer(json!({"cached_tokens": count(), "cache_write_tokens": count()}), json!({}));
    let usage = answer(
        json!({
            "input_tokens": count(),
            "input_tokens_details": input,
            "output_tokens": count(), "output_tokens_details": details("reasoning_tokens"),
            "total_tokens": count(),
        }),
        json!({}),
    );
    let error = answer(json!({"code": string(), "message": string()}), json!({}));
    let reason = answer(json!({"reason": only("max_output_tokens")}), json!({}));
    let reasoning = answer(json!({"effort": or_null(string()), "summary": nothing()}), json!({}));
    let mut always = properties(json!({
        "id": string(), "object": only("response"), "created_at": time(), "model": string(),
        "background": only(false), "previous_response_id": nothing(), "service_tier": string(),
        "store": only(false), "temperature": {"type": "number"}, "top_p": {"type": "number"},
        "status": response_status(), "completed_at": or_null(time()), "error": or_null(error),
        "incomplete_details": or_null(reason), "output": any_list(reference("ResponseItem")),
        "usage": or_null(usage),
    }));
    // What the request said is repeated.
    always.extend(properties(json!({
        "instructions": or_null(string()), "max_output_tokens": or_null(count()),
        "max_tool_calls": {}, "metadata": any_object(), "parallel_tool_calls": boolean(),
        "prompt_cache_key": or_null(string()), "reasoning": reasoning,
        "safety_identifier": or_null(string()), "text": any_object(), "tool_choice": {},
        "tools": any_list(any_object()), "top_logprobs": {}, "truncation": string(),
        "user": or_null(string()),
    })));
    answer(Value::Object(always), json!({}))
}

fn response_event() -> Value {
    let of = |kinds: &[&str], own: Value| {
        let mut all = properties(own);
        all.extend(properties(json!({"type": words(kinds), "sequence_number": count()})));
        answer(Value::Object(all), json!({}))
    };
    let whole = [
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ];
    let items = ["response.output_item.added", "response.output_item.done"];
    let parts = ["response.content_part.added", "response.content_part.done"];
    let place = |own: Value, is_part: bool| {
        let mut all = properties(json!({"item_id": string(), "output_index": count()}));
        if is_part {
            all.insert("content_index".to_owned(), count());
        }
        all.extend(properties(own));
        Value::Object(all)
    };
    let logprobs = any_list(reference("TokenLogprob"));
    any_of([
        of(&whole, json!({"response": reference("ModelResponse")})),
        of(&items, json!({"output_index": count(), "item": reference("ResponseItem")})),
        of(&parts, place(json!({"part": reference("ResponsePart")}), true)),
        of(
            &["response.output_text.delta"],
            place(json!({"delta": string(), "logprobs": logprobs}), true),
        ),
        of(
            &["response.output_text.done"],
            place(json!({"text": string(), "logprobs": logprobs}), true),
        ),
        of(&["response.reasoning_text.delta"], place(json!({"delta": string()}), true)),
        of(&["response.reasoning_text.done"], place(json!({"text": string()}), true)),
        of(&["response.function_call_arguments.delta"], place(json!({"delta": string()}), false)),
        of(
            &["response.function_call_arguments.done"],
            place(json!({"name": string(), "arguments": string()}), false),
        ),
        of(&["response.custom_tool_call_input.delta"], place(json!({"delta": string()}), false)),
        of(&["response.custom_tool_call_input.done"], place(json!({"input": string()}), false)),
    ])
}

/// A block of a message, and what one that begins has besides.
fn message_block() -> Value {
    let of = of_kind;
    any_of([
        of("thinking", json!({"thinking": string(), "signature": string()})),
        of("text", json!({"text": string(), "citations": nothing()})),
        of("tool_use", json!({"id": string(), "name": string(), "input": reference("ToolInput")})),
    ])
}

fn messages_usage() -> Value {
    let details = answer(json!({"thinking_tokens": count()}), json!({}));
    answer(
        json!({
            "input_tokens": count(), "cache_creation_input_tokens": count(),
            "cache_read_input_tokens": count(), "output_tokens": count(),
            "output_tokens_details": details,
        }),
        json!({}),
    )
}

fn stops() -> Value {
    let reasons =
        ["end_turn", "tool_use", "stop_sequence", "max_tokens", "model_context_window_exceeded"];
    json!({"stop_reason": or_null(words(&reasons)), "stop_sequence": or_null(string())})
}

fn message() -> Value {
    let mut all = properties(json!({
        "id": string(), "type": only("message"), "role": only("assistant"), "model": string(),
        "content": any_list(reference("MessageBlock")), "usage": reference("MessagesUsage"),
    }));
    all.extend(properties(stops()));
    answer(Value::Object(all), json!({}))
}

/// An object whose `type` tells which it is.
fn of_kind(kind: &str, own: Value) -> Value {
    let mut all = properties(own);
    all.insert("type".to_owned(), only(kind));
    answer(Value::Object(all), json!({}))
}

/// What an event adds to a block.
fn message_delta() -> Value {
    let of = of_kind;
    any_of([
        of("text_delta", json!({"text": string()})),
        of("thinking_delta", json!({"thinking": string()})),
        of("signature_delta", json!({"signature": string()})),
        of("input_json_delta", json!({"partial_json": string()})),
    ])
}

fn message_event() -> Value {
    let of = of_kind;
    let block = reference("MessageBlock");
    any_of([
        of("message_start", json!({"message": reference("Message")})),
        of("content_block_start", json!({"index": count(), "content_block": block})),
        of("content_block_delta", json!({"index": count(), "delta": reference("MessageDelta")})),
        of("content_block_stop", json!({"index": count()})),
        of(
            "message_delta",
            json!({"delta": reference("MessageEnd"), "usage": reference("MessagesUsage")}),
        ),
        of("message_stop", json!({})),
        of("ping", json!({})),
    ])
}

/// What a request for vectors used.
fn vectors_usage() -> Value {
    answer(json!({"prompt_tokens": count(), "total_tokens": count()}), json!({}))
}

fn closeness() -> Value {
    json!({
        "type": "number",
        "description": "A cosine; of a model made for it, what its configuration says, usually \
                        from 0 to 1.",
    })
}

fn ranking() -> Value {
    let document = answer(json!({"text": string()}), json!({}));
    let rank = answer(
        json!({"index": count(), "relevance_score": closeness()}),
        json!({"document": document}),
    );
    answer(
        json!({
            "id": string(), "model": string(), "usage": vectors_usage(),
            "results": any_list(rank),
        }),
        json!({}),
    )
}

fn scores() -> Value {
    let own = json!({"index": count(), "object": only("score"), "score": closeness()});
    entries(answer(own, json!({})))
}

/// A list of entries, in vLLM's form.
fn entries(entry: Value) -> Value {
    answer(
        json!({
            "id": string(), "object": only("list"), "created": time(), "model": string(),
            "data": any_list(entry), "usage": vectors_usage(),
        }),
        json!({}),
    )
}

fn classes() -> Value {
    entries(answer(
        json!({
            "index": count(), "label": or_null(string()), "num_classes": count(),
            "probs": any_list(json!({"type": "number"})),
        }),
        json!({}),
    ))
}

fn pooled() -> Value {
    let own = json!({"index": count(), "object": only("pooling"), "data": vector()});
    entries(answer(own, json!({})))
}

fn vector() -> Value {
    json!({
        "type": ["array", "string"], "items": {"type": "number"},
        "description": "Numbers, or the same as little-endian f32 in base64.",
    })
}

fn embeddings() -> Value {
    let entry = answer(
        json!({"object": only("embedding"), "index": count(), "embedding": vector()}),
        json!({}),
    );
    answer(
        json!({
            "id": string(), "object": only("list"), "data": any_list(entry), "model": string(),
            "usage": vectors_usage(),
        }),
        json!({}),
    )
}

fn model() -> Value {
    answer(
        json!({
            "id": string(), "object": only("model"), "created": time(), "owned_by": string(),
            "root": string(), "parent": or_null(string()), "max_model_len": count(),
        }),
        json!({"task": only("classify"), "num_classes": count()}),
    )
}

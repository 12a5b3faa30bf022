//! `/v1/responses`: its items, its events, its refusals.
use coordinator::engine::EngineError;
use serde_json::{Value, json};
use shared::protocol::GuideSpec;

use crate::rig::{Rig, Script, THOUGHT};

const PATH: &str = "/v1/responses";
const TEXT: &str = "The owl said: \"Good night!\"";

fn tools() -> Value {
    let tool = |name: &str| {
        json!({"type": "function", "name": name, "description": "Says it.", "strict": true,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}},
                       "required": ["city"], "additionalProperties": false}})
    };
    json!([tool("weather"), tool("now")])
}

fn with(mut body: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

async fn events(rig: &Rig, body: &Value) -> Vec<Value> {
    let streamed = rig.client.stream(PATH, &with(body.clone(), &json!({"stream": true}))).await;
    let streamed = streamed.unwrap();
    assert!(!streamed.done, "OpenAI sends no [DONE] here");
    streamed.events
}

/// A response without the fields that always differ.
fn comparable(response: &Value) -> Value {
    let mut response = response.clone();
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = "id".into();
        if item["type"] == "function_call" {
            item["call_id"] = "id".into();
        }
    }
    for name in ["id", "created_at", "completed_at"] {
        response[name] = Value::Null;
    }
    response
}

#[tokio::test]
async fn a_response_has_openais_shape() {
    let rig = Rig::saying(&format!("{TEXT}<|end|>"));
    let body = json!({"model": "demo", "input": "Hello", "instructions": "Be brief.",
        "max_output_tokens": 100, "temperature": 0.7, "top_p": 0.5, "store": true, "user": "me",
        "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s",
        "reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "auto",
        "include": ["reasoning.encrypted_content"], "text": {"verbosity": "medium"}});
    let answer = rig.ask(PATH, &body).await;
    let id = answer["id"].as_str().unwrap().strip_prefix("resp_").unwrap().to_owned();
    let message = json!({"id": format!("msg_{id}_0"), "type": "message", "role": "assistant",
        "status": "completed", "content": [{"type": "output_text", "text": TEXT,
        "annotations": [], "logprobs": []}]});
    assert_eq!(answer["output"], json!([message]));
    for (name, expected) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("model", json!("demo")),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("store", json!(false)),
        ("background", json!(false)),
        ("previous_response_id", Value::Null),
        ("instructions", json!("Be brief.")),
        ("max_output_tokens", json!(100)),
        ("temperature", json!(0.7)),
        ("top_p", json!(0.5)),
        ("metadata", json!({"a": "b"})),
        ("tools", json!([])),
        ("tool_choice", json!("auto")),
        ("user", json!("me")),
        ("parallel_tool_calls", json!(true)),
        ("truncation", json!("disabled")),
        ("text", json!({"format": {"type": "text"}, "verbosity": "medium"})),
        ("reasoning", json!({"effort": "low", "summary": null})),
        ("top_logprobs", json!(0)),
        ("service_tier", json!("default")),
        ("prompt_cache_key", json!("k")),
        ("safety_identifier", json!("s")),
        ("max_tool_calls", Value::Null),
    ] {
        assert_eq!(answer[name], expected, "{name}");
    }
    assert!(answer["created_at"].as_u64() <= answer["completed_at"].as_u64());
    let request = &rig.seen.lock().unwrap().requests[0];
    let (input, output) = (request.prompt.len(), rig.text.encode(TEXT, false).unwrap().len() + 1);
    let usage = json!({"input_tokens": input, "output_tokens": output,
        "total_tokens": input + output,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}});
    assert_eq!(answer["usage"], usage);
    assert_eq!((request.max_tokens, request.sampling[0].temperature), (100, 0.7));
}

#[tokio::test]
async fn the_prompt_is_the_one_of_the_same_chat() {
    let rig = Rig::saying("x");
    let chat = json!({"max_tokens": 1, "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\nd"}]});
    rig.client.post("/v1/chat/completions", &chat).await.unwrap();
    let parts = json!([{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]);
    rig.ask(
        PATH,
        &json!({"max_output_tokens": 1, "instructions": "Be brief.", "input": [
        {"role": "user", "content": "a"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "message", "role": "user", "content": parts}]}),
    )
    .await;
    let seen = rig.seen.lock().unwrap();
    assert_eq!(seen.requests[0].prompt, seen.requests[1].prompt);
}

#[tokio::test]
async fn the_bound_of_the_output_is_a_bound() {
    let rig = Rig::saying(TEXT);
    let answer = rig.ask(PATH, &json!({"input": "Hello", "max_output_tokens": 3})).await;
    assert_eq!((&answer["status"], &answer["completed_at"]), (&json!("incomplete"), &Value::Null));
    assert_eq!(answer["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(answer["output"][0]["status"], "incomplete");
    assert_eq!(answer["usage"]["output_tokens"], 3);
    let told = events(&rig, &json!({"input": "Hello", "max_output_tokens": 3})).await;
    assert_eq!(told.last().unwrap()["type"], "response.incomplete");
    assert_eq!(comparable(&told.last().unwrap()["response"]), comparable(&answer));
    // Limited to the rest of the model's length.
    let answer = rig.ask(PATH, &json!({"input": "Hello", "max_output_tokens": 1_000_000})).await;
    assert_eq!(answer["max_output_tokens"], 1_000_000);
    let seen = rig.seen.lock().unwrap();
    let last = seen.requests.last().unwrap();
    assert_eq!(last.prompt.len() + last.max_tokens as usize, rig.text.max_positions as usize);
}

/// A shorter output will do: the bound is one that many clients always send.
#[tokio::test]
async fn an_input_that_fits_is_not_cut_for_a_longer_output() {
    let rig = Rig::saying("x");
    let ask = async |truncation: &str, input: &str| {
        let body =
            json!({"input": input, "truncation": truncation, "max_output_tokens": 1_000_000});
        rig.ask(PATH, &body).await["usage"]["input_tokens"].as_u64().unwrap()
    };
    let fits = "a ".repeat(300);
    assert_eq!(ask("auto", &fits).await, ask("disabled", &fits).await);
    // A quarter of the model's length is left for the output.
    assert_eq!(ask("auto", &"a ".repeat(4000)).await, 768);
}

#[tokio::test]
async fn a_call_that_a_stop_string_cuts_is_incomplete() {
    let rig = Rig::thinking(THOUGHT);
    for (stop, status) in [("Rome", "incomplete"), ("</tool", "completed")] {
        let body = json!({"input": "x", "tools": tools(), "stop": [stop]});
        let whole = rig.ask(PATH, &body).await;
        let item = whole["output"].as_array().unwrap().last().unwrap();
        let told = (&item["type"], &item["status"], &whole["status"]);
        assert_eq!(told, (&json!("function_call"), &json!(status), &json!("completed")), "{stop}");
        let events = events(&rig, &body).await;
        assert_eq!(comparable(&events.last().unwrap()["response"]), comparable(&whole));
    }
}

#[tokio::test]
async fn items_come_in_the_order_in_which_they_were_said_whole_and_streamed() {
    let rig = Rig::thinking(THOUGHT);
    let body = json!({"input": "x", "tools": tools(), "max_output_tokens": 300});
    let whole = rig.ask(PATH, &body).await;
    let kinds: Vec<&str> =
        whole["output"].as_array().unwrap().iter().map(|it| it["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    let output = &whole["output"];
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Hm, so."}]));
    assert_eq!((&output[0]["summary"], &output[0]["status"]), (&json!([]), &json!("completed")));
    assert_eq!(output[1]["content"][0]["text"], "I look.");
    assert_eq!(
        (&output[2]["name"], &output[2]["arguments"]),
        (&json!("weather"), &json!("{\"city\": \"Rome\"}"))
    );
    assert_eq!((&output[3]["name"], &output[3]["arguments"]), (&json!("now"), &json!("{}")));
    assert_eq!(output[2]["call_id"].as_str().unwrap().len(), 9);
    assert_ne!(output[2]["call_id"], output[3]["call_id"]);
    let thought = whole["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    let all = whole["usage"]["output_tokens"].as_u64().unwrap();
    assert!(thought > 3 && thought < all / 2, "{thought} of {all}");

    let told = events(&rig, &body).await;
    for (number, event) in told.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
    }
    let names: Vec<&str> = told.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let mut distinct = names.clone();
    distinct.dedup();
    let item = |inner: &[&'static str]| {
        let mut all = vec!["response.output_item.added"];
        all.extend(inner);
        all.push("response.output_item.done");
        all
    };
    let call =
        item(&["response.function_call_arguments.delta", "response.function_call_arguments.done"]);
    let expected = [
        vec!["response.created", "response.in_progress"],
        item(&[
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
        ]),
        item(&[
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
        ]),
        call.clone(),
        call,
        vec!["response.completed"],
    ]
    .concat();
    assert_eq!(distinct, expected);
    assert_eq!(comparable(&told.last().unwrap()["response"]), comparable(&whole));
    assert_eq!(told[0]["response"]["status"], "in_progress");
    assert_eq!(
        (&told[0]["response"]["output"], &told[0]["response"]["usage"]),
        (&json!([]), &Value::Null)
    );
    // The deltas add up to the completed item, and to the output in the last event.
    let last = &told.last().unwrap()["response"]["output"];
    for (index, item) in last.as_array().unwrap().iter().enumerate() {
        let of = |kind: &str| {
            told.iter()
                .filter(|event| {
                    event["output_index"] == index
                        && event["type"].as_str().unwrap().ends_with(kind)
                })
                .collect::<Vec<_>>()
        };
        let deltas: String =
            of(".delta").iter().map(|event| event["delta"].as_str().unwrap()).collect();
        let is_call = item["type"] == "function_call";
        let text = if is_call { &item["arguments"] } else { &item["content"][0]["text"] };
        assert_eq!(deltas, text.as_str().unwrap());
        let done = of("output_item.done");
        assert_eq!((done.len(), &done[0]["item"]), (1, item));
        let done = if is_call { of("arguments.done") } else { of("text.done") };
        assert_eq!(done[0][if is_call { "arguments" } else { "text" }], *text);
        assert!(
            told.iter()
                .filter(|event| event["output_index"] == index)
                .filter_map(|event| event.get("item_id"))
                .all(|id| *id == item["id"])
        );
        assert_eq!(of("output_item.added")[0]["item"]["status"], "in_progress");
    }
    let pieces =
        names.iter().filter(|name| **name == "response.function_call_arguments.delta").count();
    assert!(pieces > 5, "arguments come as they are written: {pieces}");
}

#[tokio::test]
async fn events_are_named_as_openais_are() {
    let rig = Rig::saying(TEXT);
    let response = rig.client.open(PATH, &json!({"input": "x", "stream": true})).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    let text = response.text().await.unwrap();
    let mut count = 0;
    for event in text.split_terminator("\n\n") {
        let (name, data) = event.split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name);
        count += 1;
    }
    assert!(count > 9, "{text}");
}

#[tokio::test]
async fn reasoning_may_be_left_out_and_is_counted() {
    let rig = Rig::thinking("<think>a b c d</think>e f<|end|>");
    let answer = rig.ask(PATH, &json!({"input": "x", "include_reasoning": false})).await;
    assert_eq!(answer["output"].as_array().unwrap().len(), 1);
    assert_eq!(answer["output"][0]["content"][0]["text"], "e f");
    assert!(answer["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() >= 4);
}

#[tokio::test]
async fn a_reply_that_says_nothing_is_an_empty_message() {
    let rig = Rig::saying("<|end|>");
    let answer = rig.ask(PATH, &json!({"input": "x"})).await;
    assert_eq!(answer["output"][0]["content"][0]["text"], "");
    let told = events(&rig, &json!({"input": "x"})).await;
    let names: Vec<&str> = told.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert!(
        names.contains(&"response.output_text.done")
            && !names.contains(&"response.output_text.delta")
    );
}

#[tokio::test]
async fn logprobs_line_up_with_the_text() {
    let rig = Rig::saying("Hi é!<|end|>");
    let body =
        json!({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let joined = |list: &Value| -> String {
        let bytes = list.as_array().unwrap().iter().flat_map(|it| it["bytes"].as_array().unwrap());
        let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
        String::from_utf8(bytes).unwrap()
    };
    let whole = rig.ask(PATH, &body).await;
    let part = &whole["output"][0]["content"][0];
    assert_eq!(
        (part["text"].as_str().unwrap(), whole["top_logprobs"].as_u64()),
        ("Hi é!", Some(2))
    );
    assert_eq!(joined(&part["logprobs"]), "Hi é!");
    assert_eq!(part["logprobs"][0]["logprob"], -0.5);
    assert_eq!(part["logprobs"][0]["top_logprobs"].as_array().unwrap().len(), 2);
    for event in events(&rig, &body).await {
        match event["type"].as_str().unwrap() {
            "response.output_text.delta" => assert_eq!(joined(&event["logprobs"]), event["delta"]),
            "response.output_text.done" => assert_eq!(event["logprobs"], part["logprobs"]),
            _ => {}
        }
    }
    assert_eq!(rig.seen.lock().unwrap().requests[0].sampling[0].logprobs, Some(2));
}

#[tokio::test]
async fn what_the_text_must_be_reaches_the_engine() {
    let rig = Rig::thinking("{}");
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "name": "thing", "schema": schema, "strict": true});
    let answer = rig.ask(PATH, &json!({"input": "x", "text": {"format": format}})).await;
    assert_eq!(answer["text"], json!({"format": format}));
    rig.ask(PATH, &json!({"input": "x", "text": {"format": {"type": "json_object"}}})).await;
    rig.ask(PATH, &json!({"input": "x", "structured_outputs": {"choice": ["a", "b"]}})).await;
    for choice in [
        json!("required"),
        json!({"type": "function", "name": "now"}),
        json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}),
    ] {
        let body = json!({"input": "x", "tools": tools(), "tool_choice": choice});
        assert_eq!(rig.ask(PATH, &body).await["tool_choice"], choice);
    }
    let seen = rig.seen.lock().unwrap();
    let specs: Vec<_> = seen.requests.iter().map(|request| request.guide_spec.as_deref()).collect();
    assert!(specs.iter().all(Option::is_some));
    let grammar = |index: usize| match specs[index] {
        Some(GuideSpec::Made(grammar)) => grammar.clone(),
        other => panic!("{other:?}"),
    };
    assert!(grammar(3).contains("weather") && grammar(3).contains("now"));
    for one in [4, 5] {
        assert!(!grammar(one).contains("weather") && grammar(one).contains("now"));
    }
}

#[tokio::test]
async fn a_failure_in_a_stream_is_its_last_event_and_before_it_a_plain_error() {
    let rig = Rig::new(Script { text: TEXT.to_owned(), fail_after: Some(3), ..Script::default() });
    let told = events(&rig, &json!({"input": "x"})).await;
    let last = told.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["sequence_number"], told.len() - 1);
    assert_eq!(
        (&last["response"]["status"], &last["response"]["error"]["code"]),
        (&json!("failed"), &json!("server_error"))
    );
    assert!(!last["response"]["error"]["message"].as_str().unwrap().is_empty());
    let reply = rig.client.post(PATH, &json!({"input": "x"})).await.unwrap();
    assert_eq!(reply.status, 500);
    rig.script(|script| script.refuse = Some(EngineError::ShuttingDown));
    for stream in [false, true] {
        let reply = rig.client.post(PATH, &json!({"input": "x", "stream": stream})).await.unwrap();
        assert_eq!((reply.status, &reply.body["error"]["type"]), (503, &json!("server_error")));
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels() {
    let rig = Rig::new(Script { text: TEXT.to_owned(), hang: true, ..Script::default() });
    let response = rig.client.open(PATH, &json!({"input": "x", "stream": true})).await.unwrap();
    drop(response);
    assert!(rig.cancelled().await);
}

#[tokio::test]
async fn what_is_not_understood_is_refused_by_its_name() {
    let rig = Rig::thinking("x");
    let format = |format: Value| json!({"text": {"format": format}});
    let tool = |tool: Value| json!({"tools": [tool]});
    for (more, param, says) in [
        (json!({"input": null}), "input", "required"),
        (
            json!({"previous_response_id": "resp_1"}),
            "previous_response_id",
            "responses are not stored",
        ),
        (json!({"conversation": "conv_1"}), "conversation", "responses are not stored"),
        (json!({"background": true}), "background", "responses are not stored"),
        (json!({"chat_template": "x"}), "chat_template", "not supported"),
        (json!({"prompt": {"id": "p"}}), "prompt", "not supported"),
        (json!({"messages": []}), "messages", "`input`"),
        (json!({"max_tokens": 5}), "max_tokens", "`max_output_tokens`"),
        (json!({"response_format": {"type": "text"}}), "response_format", "`text.format`"),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "1"),
        (json!({"temperature": 101}), "temperature", "100"),
        (json!({"include": ["thoughts"]}), "include", "message.output_text.logprobs"),
        (json!({"top_logprobs": 2}), "top_logprobs", "`include`"),
        (json!({"truncation": "middle"}), "truncation", "disabled"),
        (json!({"service_tier": "fast"}), "service_tier", "not supported"),
        (json!({"store": "yes"}), "store", "true or false"),
        (json!({"metadata": {"a": 5}}), "metadata", "512"),
        (json!({"metadata": {"a": "x".repeat(513)}}), "metadata", "512"),
        (json!({"user": "x".repeat(4097)}), "user", "4096"),
        (json!({"prompt_cache_key": "x".repeat(4097)}), "prompt_cache_key", "4096"),
        (json!({"reasoning": "low"}), "reasoning", "object"),
        (json!({"reasoning": {"effort": 5}}), "reasoning.effort", "string"),
        (json!({"text": "plain"}), "text", "object"),
        (json!({"text": {"verbosity": "long"}}), "text.verbosity", "not supported"),
        (json!({"stream_options": {"include_obfuscation": false}}), "stream_options", "stream"),
        (
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            "stream_options",
            "not supported",
        ),
        (format(json!({"type": "grammar"})), "text.format", "json_schema"),
        (format(json!({"type": "json_schema", "schema": {}})), "text.format", "`text.format.name`"),
        (
            format(json!({"type": "json_schema", "name": "a", "schema": {"type": "thing"}})),
            "text.format",
            "thing",
        ),
        (tool(json!({"type": "function"})), "tools", "`tools[0].name`"),
        (tool(json!({"type": "function", "function": {"name": "f"}})), "tools", "`tools[0].name`"),
        (
            tool(json!({"type": "function", "name": "f", "parameters": 5})),
            "tools",
            "`tools[0].parameters`",
        ),
        (json!({"tools": 5}), "tools", "list"),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "name": "g"}}),
            "tool_choice",
            "not in `tools`",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "now"}}}),
            "tool_choice",
            "name",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "allowed_tools", "mode": "auto",
            "tools": [{"type": "function", "name": "g"}]}}),
            "tool_choice",
            "not in `tools`",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "web_search_preview"}}),
            "tool_choice",
            "auto",
        ),
        (json!({"tool_choice": "required"}), "tool_choice", "tools"),
        (json!({"input": "long ".repeat(4000)}), "input", "maximum context length"),
    ] {
        let body = with(json!({"input": "x"}), &more);
        let reply = rig.client.post(PATH, &body).await.unwrap();
        let error = &reply.body["error"];
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(param)), "{more}: {error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{more}: {error}");
    }
    let reply = rig.client.post(PATH, &json!({"input": "x", "model": "other"})).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["code"]), (404, &json!("model_not_found")));
    assert!(rig.seen.lock().unwrap().requests.is_empty());
    let truncated =
        json!({"input": "long ".repeat(4000), "truncation": "auto", "max_output_tokens": 4});
    assert_eq!(rig.ask(PATH, &truncated).await["truncation"], "auto");
}

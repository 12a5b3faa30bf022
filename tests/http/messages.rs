//! `/v1/messages`: its blocks, its events, its errors, what it refuses.
use coordinator::engine::EngineError;
use coordinator::http::keys::{ApiKey, ApiKeys, KeyLimits};
use coordinator::http::options::ApiOptions;
use coordinator::text::model::TextModel;
use serde_json::{Value, json};
use shared::protocol::GuideSpec;
use testkit::models::demo;

use crate::rig::{Rig, Script, THOUGHT};

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const TEXT: &str = "The owl said: \"Good night!\"";

fn tools() -> Value {
    let tool = |name: &str| {
        json!({"name": name, "description": "Says it.", "input_schema": {"type": "object",
        "properties": {"city": {"type": "string"}}}, "cache_control": {"type": "ephemeral"}})
    };
    json!([tool("weather"), tool("now")])
}

fn body(more: &Value) -> Value {
    let mut body = json!({"model": "demo", "max_tokens": 200, "messages": [
        {"role": "user", "content": "Hello"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// The names and the data of a stream's events.
async fn events(rig: &Rig, more: &Value) -> Vec<(String, Value)> {
    let mut body = body(more);
    body["stream"] = json!(true);
    let text = rig.client.open(PATH, &body).await.unwrap().text().await.unwrap();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    };
    text.split("\n\n").filter(|it| !it.is_empty()).map(event).collect()
}

/// The message that a client puts together from events, by Anthropic's rules.
fn assembled(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    let mut json = String::new();
    for (name, event) in events {
        assert_eq!(event["type"], **name);
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        match name.as_str() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(content.len(), index, "blocks follow each other");
                content.push(event["content_block"].clone());
                json.clear();
            }
            "content_block_delta" => {
                let block = &mut message["content"][index];
                let delta = &event["delta"];
                let part = |key: &str| delta[key].as_str().unwrap().to_owned();
                let key = match part("type").as_str() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    "input_json_delta" => {
                        json += &part("partial_json");
                        continue;
                    }
                    other => panic!("{other}"),
                };
                block[key] = format!("{}{}", block[key].as_str().unwrap(), part(key)).into();
            }
            "content_block_stop" => {
                if message["content"][index]["type"] == "tool_use" {
                    message["content"][index]["input"] = serde_json::from_str(&json).unwrap();
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

/// A message without what always differs.
fn comparable(message: &Value) -> Value {
    let mut message = message.clone();
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().unwrap() {
        if block["type"] == "tool_use" {
            assert_eq!(block["id"].as_str().unwrap().len(), 9);
            block["id"] = Value::Null;
        }
    }
    message
}

#[tokio::test]
async fn a_message_has_anthropics_shape() {
    let rig = Rig::saying(&format!("{TEXT}<|end|>"));
    let body = body(&json!({"system": [{"type": "text", "text": "Be brief.",
        "cache_control": {"type": "ephemeral"}}], "temperature": 0.7, "top_p": 0.5, "top_k": 7,
        "metadata": {"user_id": "x".repeat(400)}, "service_tier": "auto",
        "thinking": {"type": "adaptive"}, "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}));
    let mut answer = rig.ask(PATH, &body).await;
    assert!(answer["id"].take().as_str().unwrap().starts_with("msg_"));
    let request = &rig.seen.lock().unwrap().requests[0];
    let (input, output) = (request.prompt.len(), rig.text.encode(TEXT, false).unwrap().len() + 1);
    let expected = json!({"id": null, "type": "message", "role": "assistant", "model": "demo",
        "content": [{"type": "text", "text": TEXT, "citations": null}],
        "stop_reason": "end_turn", "stop_sequence": null,
        "usage": {"input_tokens": input, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": output,
            "output_tokens_details": {"thinking_tokens": 0}}});
    assert_eq!(answer, expected);
    let sampling = &request.sampling[0];
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.7, 0.5, 7));
    assert_eq!(request.max_tokens, 200);
}

#[tokio::test]
async fn the_prompt_is_the_one_of_the_same_chat() {
    let rig = Rig::thinking("x");
    let call = json!({"id": "abcdefghi", "type": "function",
        "function": {"name": "now", "arguments": "{\"city\":\"Rome\"}"}});
    let chat = json!({"max_tokens": 1, "messages": [
        {"role": "system", "content": "Be brief.\nBe kind."}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "hm", "content": "c", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon\nsharp"},
        {"role": "user", "content": "d\ne"}], "tools": [
        {"type": "function", "function": {"name": "now", "description": "Says it.",
        "parameters": {"type": "object"}}}]});
    assert_eq!(rig.client.post("/v1/chat/completions", &chat).await.unwrap().status, 200);
    let text = |text: &str| json!({"type": "text", "text": text});
    // An instruction at the beginning of the messages is one of the others.
    let body = json!({"max_tokens": 1,
        "system": [text("x-anthropic-billing-header: cc_version=1; cch=2f;"), text("Be brief.")],
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [text("a"), text("b"), text("")]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "x"}, text("c"),
                {"type": "tool_use", "id": "abcdefghi", "name": "now", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi",
                "content": [text("noon"), text("sharp")], "is_error": false}, text("d")]},
            {"role": "system", "content": "e"}],
        "tools": [{"name": "now", "description": "Says it.", "type": "custom",
            "input_schema": {"type": "object"}}]});
    rig.ask(PATH, &body).await;
    let count = rig.client.post(COUNT, &body).await.unwrap();
    let mut without = body.clone();
    without.as_object_mut().unwrap().remove("max_tokens");
    let same = rig.client.post(COUNT, &without).await.unwrap();
    let seen = rig.seen.lock().unwrap();
    assert_eq!(seen.requests.len(), 2, "what is counted does not reach the engine");
    let shown = |index: usize| rig.text.tokenizer.decode(&seen.requests[index].prompt, false);
    assert_eq!(shown(0).unwrap(), shown(1).unwrap());
    assert_eq!(count.body, json!({"input_tokens": seen.requests[0].prompt.len()}));
    assert_eq!((same.status, same.body), (200, count.body));
}

#[tokio::test]
async fn an_assistants_turn_at_the_end_is_gone_on_with() {
    let rig = Rig::saying("x");
    let turns = |end: Value| json!([{"role": "user", "content": "a"}, end]);
    let end = json!({"role": "assistant", "content": "The answer is"});
    let chat = json!({"max_tokens": 1, "messages": turns(end.clone()),
        "continue_final_message": true, "add_generation_prompt": false});
    rig.client.post("/v1/chat/completions", &chat).await.unwrap();
    rig.ask(PATH, &json!({"max_tokens": 1, "messages": turns(end)})).await;
    {
        let seen = rig.seen.lock().unwrap();
        assert_eq!(seen.requests[0].prompt, seen.requests[1].prompt);
    }
    let calls = json!({"role": "assistant", "content": [
        {"type": "tool_use", "id": "abcdefghi", "name": "now", "input": {}}]});
    let refused = json!({"max_tokens": 1, "messages": turns(calls)});
    let refused = rig.client.post(PATH, &refused).await.unwrap();
    assert_eq!(refused.status, 400);
    let message = refused.body["error"]["message"].as_str().unwrap();
    assert!(message.contains("messages[1]") && message.contains("tool_result"), "{message}");
}

#[tokio::test]
async fn blocks_come_in_the_order_in_which_they_were_said_whole_and_streamed() {
    let rig = Rig::thinking(THOUGHT);
    let more = json!({"tools": tools(), "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let whole = rig.ask(PATH, &body(&more)).await;
    let call = |name: &str, input: Value| json!({"type": "tool_use", "id": null, "name": name, "input": input});
    let expected = json!([
        {"type": "thinking", "thinking": "Hm, so.\n", "signature": "unsigned"},
        {"type": "text", "text": "I look.", "citations": null},
        call("weather", json!({"city": "Rome"})), call("now", json!({})),
    ]);
    let content = comparable(&whole)["content"].clone();
    let trimmed = content[0]["thinking"].as_str().unwrap().trim().to_owned();
    assert_eq!(trimmed, "Hm, so.");
    assert_eq!(content.as_array().unwrap()[1..], expected.as_array().unwrap()[1..]);
    assert_eq!(whole["stop_reason"], "tool_use");
    let thought = whole["usage"]["output_tokens_details"]["thinking_tokens"].as_u64().unwrap();
    assert!(thought > 0 && thought < whole["usage"]["output_tokens"].as_u64().unwrap());

    let events = events(&rig, &more).await;
    assert_eq!(comparable(&assembled(&events)), comparable(&whole));
    // Every block is opened, told of and closed before the next.
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let mut expected = vec!["message_start"];
    (0..4).for_each(|_| expected.extend(block));
    expected.extend(["message_delta", "message_stop"]);
    assert_eq!(names, expected);
    let start = &events[0].1["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 0);
    let signature = json!({"type": "signature_delta", "signature": "unsigned"});
    let of_first: Vec<_> = events.iter().filter(|(_, it)| it["index"] == 0).collect();
    assert_eq!(of_first[of_first.len() - 2].1["delta"], signature);
}

#[tokio::test]
async fn reasoning_is_left_out_where_it_is_not_wanted() {
    let rig = Rig::thinking(THOUGHT);
    let said = json!({"tools": tools()});
    assert_eq!(rig.ask(PATH, &body(&said)).await["content"][0]["type"], "thinking");
    for wish in [json!({"type": "disabled"}), json!({"type": "adaptive", "display": "omitted"})] {
        let answer = rig.ask(PATH, &body(&json!({"tools": tools(), "thinking": wish}))).await;
        assert_eq!(answer["content"][0]["type"], "text", "{wish}");
    }
    // Where it is not told from the answer, a client that enables it changes nothing.
    let plain = Rig::with_template("{{ enable_thinking is defined }}");
    let enabled = json!({"type": "enabled", "budget_tokens": 1024});
    let reply = plain.client.post(PATH, &body(&json!({"thinking": enabled}))).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let request = plain.seen.lock().unwrap().requests.pop().unwrap();
    assert_eq!(plain.text.tokenizer.decode(&request.prompt, false).unwrap(), "False");
}

#[tokio::test]
async fn what_a_tool_found_that_is_no_text_is_named() {
    let rig =
        Rig::with_template("{% for it in messages %}{{ it.role }}:{{ it.content }};{% endfor %}");
    let call = json!({"type": "tool_use", "id": "a", "name": "see", "input": {}});
    let source = json!({"type": "base64", "media_type": "image/png", "data": "aGk="});
    let found = json!([{"type": "image", "source": source}, {"type": "text", "text": "a fox"},
        {"type": "tool_reference", "tool_name": "draw"}, {"type": "document", "source": source}]);
    let result = json!({"type": "tool_result", "tool_use_id": "a", "content": found});
    let more = json!({"messages": [{"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]});
    let reply = rig.client.post(PATH, &body(&more)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let request = rig.seen.lock().unwrap().requests.pop().unwrap();
    let prompt = rig.text.tokenizer.decode(&request.prompt, false).unwrap();
    let image = "[image left out: this model reads only text]";
    let document = "[document left out: this model reads only text]";
    assert_eq!(prompt, format!("user:look;assistant:;tool:{image}\na fox\ndraw\n{document};"));
}

#[tokio::test]
async fn a_template_that_can_is_told_whether_to_reason() {
    let rig = Rig::with_template(
        "{{ 'yes' if enable_thinking is not defined or enable_thinking else 'no' }}",
    );
    let prompt = async |more: Value| {
        let reply = rig.client.post(PATH, &body(&more)).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        let request = rig.seen.lock().unwrap().requests.pop().unwrap();
        rig.text.tokenizer.decode(&request.prompt, false).unwrap()
    };
    assert_eq!(prompt(json!({})).await, "yes");
    assert_eq!(prompt(json!({"thinking": {"type": "adaptive"}})).await, "yes");
    assert_eq!(prompt(json!({"thinking": {"type": "disabled"}})).await, "no");
    let both = json!({"thinking": {"type": "disabled"},
        "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(prompt(both).await, "yes", "what a client says itself goes before");
}

#[tokio::test]
async fn a_message_says_why_it_ends() {
    let rig = Rig::saying("one two three four<|end|>");
    let stop = json!({"stop_sequences": ["zzz", " three"]});
    let answer = rig.ask(PATH, &body(&stop)).await;
    assert_eq!(answer["content"][0]["text"], "one two");
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!(" three"))
    );
    let (name, last) = events(&rig, &stop).await.into_iter().rev().nth(1).unwrap();
    let delta = json!({"stop_reason": "stop_sequence", "stop_sequence": " three"});
    assert_eq!((name.as_str(), &last["delta"]), ("message_delta", &delta));
    let answer = rig.ask(PATH, &body(&json!({"max_tokens": 2}))).await;
    assert_eq!(answer["stop_reason"], "max_tokens");
    // More than the model's length leaves is what it leaves.
    let long = "a ".repeat(2000);
    rig.script(|script| script.text = long);
    let answer = rig.ask(PATH, &body(&json!({"max_tokens": 32000}))).await;
    assert_eq!(answer["stop_reason"], "model_context_window_exceeded");
    let request = rig.seen.lock().unwrap().requests.pop().unwrap();
    assert_eq!(request.prompt.len() + request.max_tokens as usize, 1024);
    rig.script(|script| script.text = "<|end|>".to_owned());
    let answer = rig.ask(PATH, &body(&json!({}))).await;
    assert_eq!(answer["content"], json!([{"type": "text", "text": "", "citations": null}]));
    let events = events(&rig, &json!({})).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(names, expected);
}

#[tokio::test]
async fn an_answer_that_the_operators_bound_cuts_has_reached_its_most_tokens() {
    let mut text = TextModel::load(&demo()).unwrap();
    text.defaults.max_new_tokens = Some(2);
    let rig = Rig::of(Script { text: TEXT.to_owned(), ..Script::default() }, text);
    let answer = rig.ask(PATH, &body(&json!({}))).await;
    let told = (&answer["stop_reason"], &answer["usage"]["output_tokens"]);
    assert_eq!(told, (&json!("max_tokens"), &json!(2)));
}

#[tokio::test]
async fn vllms_fields_do_what_they_do_in_chat() {
    let rig = Rig::saying("One. Two.<|end|>Three.");
    let dot = *rig.text.encode("One.", false).unwrap().last().unwrap();
    for (more, expected) in [
        (json!({"ignore_eos": true}), "One. Two.Three."),
        (json!({"ignore_eos": true, "skip_special_tokens": false}), "One. Two.<|end|>Three."),
        (json!({"stop_token_ids": [dot]}), "One"),
        (json!({"stop_token_ids": [dot], "include_stop_str_in_output": true}), "One."),
    ] {
        let answer = rig.ask(PATH, &body(&more)).await;
        assert_eq!(answer["content"][0]["text"], expected, "{more}");
    }
    rig.ask(PATH, &body(&json!({"guided_choice": ["a", "b"]}))).await;
    assert!(rig.seen.lock().unwrap().requests.pop().unwrap().guide_spec.is_some());
    let rig = Rig::thinking(THOUGHT);
    let hidden = json!({"tools": tools(), "include_reasoning": false});
    assert_eq!(rig.ask(PATH, &body(&hidden)).await["content"][0]["type"], "text");
}

#[tokio::test]
async fn what_is_chosen_of_tools_reaches_the_engine() {
    let rig = Rig::thinking(THOUGHT);
    let guided = async |choice: Value| {
        rig.ask(PATH, &body(&json!({"tools": tools(), "tool_choice": choice}))).await;
        rig.seen.lock().unwrap().requests.pop().unwrap().guide_spec
    };
    assert!(guided(json!({"type": "auto"})).await.is_none());
    let is_made = |spec: &Option<std::sync::Arc<GuideSpec>>| {
        matches!(spec.as_deref(), Some(GuideSpec::Made(_)))
    };
    assert!(is_made(&guided(json!({"type": "any"})).await));
    let one = guided(json!({"type": "tool", "name": "now"})).await;
    let Some(GuideSpec::Made(grammar)) = one.as_deref() else { panic!("{one:?}") };
    assert!(grammar.contains("now") && !grammar.contains("weather"), "{grammar}");
    // Calls that are not looked for are text.
    let answer =
        rig.ask(PATH, &body(&json!({"tools": tools(), "tool_choice": {"type": "none"}}))).await;
    assert_eq!(answer["stop_reason"], "end_turn");
    assert!(answer["content"][1]["text"].as_str().unwrap().contains("<tool_call>"));
    let single = json!({"type": "auto", "disable_parallel_tool_use": true});
    let answer = rig.ask(PATH, &body(&json!({"tools": tools(), "tool_choice": single}))).await;
    assert_eq!(answer["content"].as_array().unwrap().len(), 3);
    let format = json!({"type": "json_schema", "schema": {"type": "object"}});
    rig.ask(PATH, &body(&json!({"output_config": {"format": format, "effort": "max"}}))).await;
    assert!(rig.seen.lock().unwrap().requests.pop().unwrap().guide_spec.is_some());
}

#[tokio::test]
async fn errors_are_told_as_anthropics_are() {
    let rig = Rig::saying("x");
    for (error, status, kind) in [
        (EngineError::QueueFull { queued: 9, max: 9, retry_after_s: 7 }, 529, "overloaded_error"),
        (EngineError::ShuttingDown, 529, "overloaded_error"),
        (EngineError::Corrupted, 500, "api_error"),
    ] {
        rig.script(|script| script.refuse = Some(error.clone()));
        for stream in [false, true] {
            let response = rig.client.open(PATH, &body(&json!({"stream": stream}))).await.unwrap();
            assert_eq!(response.status(), status, "{error}");
            let header = |name: &str| {
                let value = response.headers().get(name)?;
                Some(value.to_str().unwrap().to_owned())
            };
            let (id, again) = (header("request-id").unwrap(), header("retry-after"));
            assert_eq!(header("x-request-id").as_ref(), Some(&id));
            assert_eq!(again.is_some(), status == 529, "{error}");
            let text: Value = response.json().await.unwrap();
            let told = (&text["type"], &text["error"]["type"], &text["request_id"]);
            assert_eq!(told, (&json!("error"), &json!(kind), &json!(id)));
            assert!(text["error"]["message"].is_string());
        }
    }
    rig.script(|script| script.refuse = None);
    let no_model = rig.client.post(PATH, &body(&json!({"model": "claude"}))).await.unwrap();
    assert_eq!(
        (no_model.status, &no_model.body["error"]["type"]),
        (404, &json!("not_found_error"))
    );
    let long = json!({"messages": [{"role": "user", "content": "a b c ".repeat(2000)}]});
    let long = rig.client.post(PATH, &body(&long)).await.unwrap();
    let message = long.body["error"]["message"].as_str().unwrap();
    assert!(long.status == 400 && message.starts_with("prompt is too long"), "{message}");
    let elsewhere = rig.client.post("/v1/messages/batches", &json!({})).await.unwrap();
    assert_eq!((elsewhere.status, &elsewhere.body["type"]), (404, &json!("error")));
    let method = rig.client.get(PATH).await.unwrap();
    assert_eq!((method.status, &method.body["type"]), (405, &json!("error")));
    let other = rig.client.post("/v1/messagesx", &json!({})).await.unwrap();
    assert_eq!((other.status, &other.body["type"]), (404, &Value::Null));
}

#[tokio::test]
async fn a_failure_in_a_stream_is_its_last_event() {
    let script = Script { text: TEXT.to_owned(), fail_after: Some(2), ..Script::default() };
    let rig = Rig::new(script);
    let events = events(&rig, &json!({})).await;
    assert_eq!(events[0].0, "message_start");
    let (name, error) = events.last().unwrap();
    assert_eq!((name.as_str(), &error["error"]["type"]), ("error", &json!("api_error")));
}

#[tokio::test]
async fn silence_is_filled_with_pings_and_a_client_that_leaves_cancels() {
    let script = Script { text: TEXT.to_owned(), hang: true, ..Script::default() };
    let rig = Rig::new(script);
    let mut response = rig.client.open(PATH, &body(&json!({"stream": true}))).await.unwrap();
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("event: ping\ndata: {\"type\": \"ping\"}\n\n") {
        text.extend(response.chunk().await.unwrap().unwrap());
    }
    assert!(text.starts_with(b"event: message_start\n"));
    drop(response);
    assert!(rig.cancelled().await);
}

#[tokio::test]
async fn keys_are_taken_from_either_header() {
    let keys = ApiKeys::new(["secret"]).unwrap();
    let rig = Rig::with_api(&ApiOptions { keys, ..ApiOptions::default() });
    let http = reqwest::Client::new();
    for path in [PATH, COUNT, "/v1/chat/completions"] {
        let url = format!("http://{}{path}", rig.address);
        let ask = async |headers: &[(&str, &str)]| {
            let mut request = http.post(&url).json(&body(&json!({})));
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let response = request.send().await.unwrap();
            (response.status().as_u16(), response.json::<Value>().await.unwrap())
        };
        for good in [
            &[("x-api-key", "secret"), ("anthropic-version", "2023-06-01")][..],
            &[("authorization", "Bearer secret")],
            &[("authorization", "Bearer other"), ("x-api-key", "secret")],
        ] {
            assert_eq!(ask(good).await.0, 200, "{path} {good:?}");
        }
        for bad in [&[][..], &[("x-api-key", "secre")], &[("x-api-key", "")]] {
            let (status, told) = ask(bad).await;
            assert_eq!(status, 401, "{path} {bad:?}");
            if path != "/v1/chat/completions" {
                assert_eq!(told["error"]["type"], "authentication_error");
            }
        }
    }
}

#[tokio::test]
async fn limits_of_keys_are_told_as_anthropics_are() {
    let limits = KeyLimits { per_minute: Some(1), ..KeyLimits::default() };
    let keys = ApiKeys::of([ApiKey::new("secret", limits).unwrap()]);
    let rig = Rig::with_api(&ApiOptions { keys, ..ApiOptions::default() });
    let url = format!("http://{}{PATH}", rig.address);
    let ask = async || {
        let request = reqwest::Client::new().post(&url).header("x-api-key", "secret");
        request.json(&body(&json!({}))).send().await.unwrap()
    };
    assert_eq!(ask().await.status(), 200);
    let refused = ask().await;
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    let told: Value = refused.json().await.unwrap();
    assert_eq!(
        (&told["type"], &told["error"]["type"]),
        (&json!("error"), &json!("rate_limit_error"))
    );
}

/// Clients that would leave the conversation to the server look for these details, and then send
/// all of it: what they leave out must not be missing silently.
#[tokio::test]
async fn no_conversation_is_kept_for_a_client_and_it_is_told_so() {
    let rig = Rig::thinking("x");
    for thread in
        [json!({"type": "create"}), json!({"type": "continue", "previous_message_id": "msg_1"})]
    {
        for path in [PATH, COUNT] {
            let refused = rig.client.post(path, &body(&json!({"thread": thread}))).await.unwrap();
            let error = &refused.body["error"];
            assert_eq!((refused.status, &error["type"]), (400, &json!("invalid_request_error")));
            assert_eq!(error["details"]["error_code"], "thread_unsupported_request", "{error}");
        }
    }
    assert_eq!(rig.ask(PATH, &body(&json!({"thread": null}))).await["type"], "message");
}

#[tokio::test]
async fn what_is_not_understood_is_refused_by_its_name() {
    let rig = Rig::thinking("x");
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let assistant = |block: Value| {
        json!({"messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": [block]}, {"role": "user", "content": "b"}]})
    };
    let tool = |tool: Value| json!({"tools": [tool]});
    for (more, says) in [
        (json!({"max_tokens": null}), "`max_tokens` is required"),
        (json!({"max_tokens": 0}), "`max_tokens` must be an integer from 1"),
        (json!({"messages": null}), "`messages` is required"),
        (json!({"messages": []}), "`messages` must be a list of at least one message"),
        (json!({"messages": [5]}), "`messages[0]` must be an object"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "`messages[0].role`"),
        (json!({"messages": [{"role": "user"}]}), "`messages[0].content`"),
        (
            user(json!([{"type": "image", "source": {}}])),
            "`messages[0].content[0]` has the type \"image\"",
        ),
        (user(json!([{"type": "document"}])), "\"document\", which is not supported"),
        (user(json!([{"type": "tool_use"}])), "\"tool_use\""),
        (user(json!([{"text": "x"}])), "the type none"),
        (user(json!([{"type": "text"}])), "`messages[0].content[0].text` must be a string"),
        (user(json!([{"type": "tool_result"}])), "`messages[0].content[0].tool_use_id`"),
        (
            user(
                json!([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "audio"}]}]),
            ),
            "`messages[0].content[0].content[0]` has the type \"audio\"",
        ),
        (
            assistant(json!({"type": "tool_use", "name": "f", "input": {}})),
            "`messages[1].content[0].id`",
        ),
        (
            assistant(json!({"type": "tool_use", "id": "a", "name": "f", "input": "{}"})),
            ".input` must be an object",
        ),
        (assistant(json!({"type": "thinking"})), "`messages[1].content[0].thinking`"),
        (assistant(json!({"type": "server_tool_use"})), "\"server_tool_use\""),
        (json!({"system": 5}), "`system` must be"),
        (json!({"system": [{"type": "image"}]}), "`system[0]`"),
        (json!({"stop_sequences": [""]}), "`stop_sequences` must be"),
        (json!({"stop": "x"}), "here it is `stop_sequences`"),
        (json!({"response_format": {"type": "json_object"}}), "`output_config.format`"),
        (json!({"output_config": {"effort": "huge"}}), "`output_config.effort`"),
        (json!({"output_config": {"format": {"type": "json_object"}}}), "`output_config.format`"),
        (
            tool(json!({"type": "web_search_20250305", "name": "web_search"})),
            "`tools[0]` has the type \"web_search_20250305\"",
        ),
        (tool(json!({"name": "f"})), "`tools[0].input_schema`"),
        (tool(json!({"name": "", "input_schema": {}})), "`tools[0].name`"),
        (json!({"tool_choice": {"type": "any"}}), "`tool_choice` needs `tools`"),
        (json!({"tool_choice": "auto"}), "`tool_choice` must be an object"),
        (json!({"tools": tools(), "tool_choice": {"type": "tool", "name": "g"}}), "not in `tools`"),
        (
            json!({"tools": tools(), "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}),
            "disable_parallel_tool_use",
        ),
        (json!({"thinking": {"type": "sometimes"}}), "`thinking` must be"),
        (json!({"thinking": {"type": "enabled"}}), "`thinking.budget_tokens`"),
        (json!({"temperature": 101}), "`temperature`"),
        (json!({"mcp_servers": [{"type": "url"}]}), "`mcp_servers` is not supported"),
        (json!({"container": "c"}), "`container` is not supported"),
        (json!({"n": 2}), "`n` is not supported"),
        (json!({"chat_template": "x"}), "`chat_template` is not supported"),
        (json!({"documents": [{"text": "x"}]}), "`documents` is not supported"),
        (json!({"function_call": "auto"}), "here it is `tool_choice`"),
        (json!({"stop_token_ids": [-1]}), "`stop_token_ids` must be"),
        (json!({"top_logprobs": 2}), "`top_logprobs` is not supported"),
        (
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            "`context_management.edits`",
        ),
    ] {
        let refused = rig.client.post(PATH, &body(&more)).await.unwrap();
        let message = refused.body["error"]["message"].as_str().unwrap_or_default();
        assert!(refused.status == 400 && message.contains(says), "{more}: {}", refused.body);
        assert_eq!(refused.body["error"]["type"], "invalid_request_error");
    }
}

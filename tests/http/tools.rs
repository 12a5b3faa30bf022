//! Tool calls and reasoning, parsed from the model's text.
use coordinator::http::options::ApiOptions;
use coordinator::text::reply::{CallFormat, Reasoning, ThinkMarks};
use serde_json::{Value, json};
use shared::protocol::GuideSpec;
use testkit::client::Reply;

use crate::rig::Rig;

const CHAT: &str = "/v1/chat/completions";
const CALLS: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \
    \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call><|end|>";

fn rig(text: &str, calls: Option<CallFormat>, reasoning: bool) -> Rig {
    let reasoning = reasoning.then_some(Reasoning::Marked(ThinkMarks::THINK));
    let rig = Rig::with_api(&ApiOptions { tool_calls: calls, reasoning, ..ApiOptions::default() });
    rig.script(|script| script.text = text.to_owned());
    rig
}

fn request(more: &Value) -> Value {
    let function = |name: &str| {
        json!({"type": "function", "function": {"name": name,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}})
    };
    let mut request = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 200,
        "tools": [function("weather"), function("now")]});
    for (name, value) in more.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

async fn ask(rig: &Rig, more: &Value) -> Value {
    let reply: Reply = rig.client.post(CHAT, &request(more)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["choices"][0].clone()
}

/// The message that a stream's deltas add up to, its finish reason, and the number of events.
async fn streamed(rig: &Rig, more: &Value) -> (Value, Value, usize) {
    let mut body = request(more);
    body["stream"] = json!(true);
    let events = rig.client.stream(CHAT, &body).await.unwrap().events;
    let (mut message, mut reason) = (json!({}), Value::Null);
    let mut calls: Vec<Value> = Vec::new();
    let mut arguments = 0;
    for event in &events {
        let choice = &event["choices"][0];
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
        for (name, value) in choice["delta"].as_object().unwrap() {
            match value {
                Value::String(text) => {
                    let before = message[name].as_str().unwrap_or_default();
                    message[name] = (before.to_owned() + text).into();
                }
                deltas => {
                    for delta in deltas.as_array().unwrap() {
                        let index = delta["index"].as_u64().unwrap() as usize;
                        if index == calls.len() {
                            let mut call = delta.clone();
                            call.as_object_mut().unwrap().remove("index");
                            calls.push(call);
                            continue;
                        }
                        assert_eq!(index, calls.len() - 1);
                        assert!(
                            delta.get("id").is_none() && delta["function"].get("name").is_none()
                        );
                        let written = &mut calls[index]["function"]["arguments"];
                        let more = delta["function"]["arguments"].as_str().unwrap();
                        *written = (written.as_str().unwrap().to_owned() + more).into();
                        arguments += 1;
                    }
                }
            }
        }
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    (message, reason, arguments)
}

fn functions(message: &Value) -> Value {
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    calls.iter().map(|call| call["function"].clone()).collect()
}

#[tokio::test]
async fn calls_are_told_from_the_text_whole_and_streamed() {
    let rig = rig(CALLS, Some(CallFormat::Hermes), false);
    let expected = json!([
        {"name": "weather", "arguments": "{\"city\": \"Rome\", \"days\": 2}"},
        {"name": "now", "arguments": "{}"},
    ]);
    for more in [json!({}), json!({"tool_choice": "auto", "parallel_tool_calls": true})] {
        let choice = ask(&rig, &more).await;
        let message = &choice["message"];
        assert_eq!(
            (&message["content"], &choice["finish_reason"]),
            (&json!("I look."), &json!("tool_calls"))
        );
        assert_eq!(functions(message), expected);
        let ids: Vec<&str> = message["tool_calls"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| it["id"].as_str().unwrap())
            .collect();
        assert!(ids[0] != ids[1] && ids.iter().all(|id| id.len() == 9), "{ids:?}");
        assert!(
            message["tool_calls"].as_array().unwrap().iter().all(|it| it["type"] == "function")
        );
        let (told, reason, pieces) = streamed(&rig, &more).await;
        assert_eq!((&told["content"], &reason), (&json!("I look."), &json!("tool_calls")));
        assert_eq!((functions(&told), &told["role"]), (expected.clone(), &json!("assistant")));
        assert!(pieces > 5, "arguments come as they are written");
    }
    let one = ask(&rig, &json!({"parallel_tool_calls": false})).await;
    assert_eq!(functions(&one["message"]), json!([expected[0]]));
}

#[tokio::test]
async fn a_message_of_calls_alone_has_no_content_and_each_choice_its_own_calls() {
    let rig = rig(&CALLS[8..], Some(CallFormat::Hermes), false);
    let reply = rig.client.post(CHAT, &request(&json!({"n": 2}))).await.unwrap();
    let message = |choice: usize| &reply.body["choices"][choice]["message"];
    assert_eq!(message(0)["content"], Value::Null);
    assert_eq!(functions(message(0)), functions(message(1)));
    assert_ne!(message(0)["tool_calls"][0]["id"], message(1)["tool_calls"][0]["id"]);
    let again = ask(&rig, &json!({})).await;
    assert_ne!(again["message"]["tool_calls"][0]["id"], message(0)["tool_calls"][0]["id"]);
}

#[tokio::test]
async fn where_calls_are_not_asked_for_they_are_text() {
    let rig = rig(CALLS, Some(CallFormat::Hermes), false);
    let text = CALLS.strip_suffix("<|end|>").unwrap();
    // A client's own grammar applies to the whole reply.
    let format = json!({"guided_grammar": "start: \"a\""});
    for more in
        [json!({"tool_choice": "none"}), json!({"tools": null}), json!({"tools": []}), format]
    {
        let choice = ask(&rig, &more).await;
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(text), &json!("stop"))
        );
        assert!(choice["message"].get("tool_calls").is_none());
    }
    // A reply that is cut short has that finish reason before any other.
    let cut = ask(&rig, &json!({"max_tokens": 30})).await;
    assert_eq!(cut["finish_reason"], "length");
    let name = cut["message"]["tool_calls"][0]["function"]["name"].as_str();
    assert!(name.is_none_or(|name| name == "weather"));
}

/// A structural tag constrains the whole reply, and calls in it are the model's own.
#[tokio::test]
async fn calls_within_a_structural_tag_are_calls() {
    let rig = rig(CALLS, Some(CallFormat::Hermes), false);
    let tag = json!({"structural_tag": {"triggers": ["<tool_call>"], "structures": [
        {"begin": "<tool_call>", "schema": {"type": "object"}, "end": "</tool_call>"}]}});
    let choice = ask(&rig, &tag).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    let plain = ask(&rig, &json!({})).await;
    assert_eq!(functions(&choice["message"]), functions(&plain["message"]));
    let seen = rig.seen.lock().unwrap();
    let GuideSpec::Made(grammar) = seen.requests[0].guide_spec.as_deref().unwrap() else {
        panic!("{:?}", seen.requests[0].guide_spec)
    };
    assert!(grammar.starts_with("start: st_root\n"), "{grammar}");
    assert!(seen.requests[1].guide_spec.is_none(), "the model decides");
}

#[tokio::test]
async fn the_template_tells_how_calls_are_written() {
    let rig = Rig::with_template("{{ tools }} <tool_call>{\"name\": ..}</tool_call>");
    rig.script(|script| script.text = CALLS.to_owned());
    assert_eq!(ask(&rig, &json!({})).await["finish_reason"], "tool_calls");
    for (template, text) in [
        (
            "<tool_call>NAME<arg_key>..</arg_key>",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        ),
        (
            "<｜tool▁calls▁begin｜>NAME",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Rome\"}\
             <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("[func_name1(params_name1=..)]", "[weather(city='Rome')]"),
    ] {
        let rig = Rig::with_template(&format!("{{{{ tools }}}} {template}"));
        rig.script(|script| script.text = format!("{text}<|end|>"));
        let expected = json!([{"name": "weather", "arguments": "{\"city\": \"Rome\"}"}]);
        assert_eq!(functions(&ask(&rig, &json!({})).await["message"]), expected, "{text}");
        assert_eq!(functions(&streamed(&rig, &json!({})).await.0), expected, "{text}");
    }
    // The demo model's template does not reveal the call format.
    let unknown = Rig::saying(CALLS);
    let reply = unknown.client.post(CHAT, &request(&json!({}))).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("tools")));
    let message = reply.body["error"]["message"].as_str().unwrap();
    assert!(message.contains("--tool-call-parser"), "{message}");
}

#[tokio::test]
async fn calls_that_must_be_made_are_what_the_grammar_allows() {
    let rig = Rig::saying(&CALLS[8..]);
    let spec = |rig: &Rig| {
        let seen = rig.seen.lock().unwrap();
        match seen.requests.last().unwrap().guide_spec.as_deref() {
            Some(GuideSpec::Made(grammar)) => grammar.clone(),
            other => panic!("{other:?}"),
        }
    };
    // The model's call format is unknown; a forced call uses a fixed one.
    let choice = ask(&rig, &json!({"tool_choice": "required"})).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(functions(&choice["message"]).as_array().unwrap().len(), 2);
    let both = spec(&rig);
    assert!(both.contains("weather") && both.contains("now"), "{both}");
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "now"}}});
    let choice = ask(&rig, &named).await;
    assert_eq!(choice["finish_reason"], "stop", "it was the client's choice");
    let one = spec(&rig);
    // As in vLLM, there is only one type, which need not be named.
    let untyped = json!({"tool_choice": {"function": {"name": "now"}},
        "tools": [{"function": {"name": "now"}}, {"type": null, "function": {"name": "then"}}]});
    ask(&rig, &untyped).await;
    let untyped = spec(&rig);
    assert!(untyped.contains("now") && !untyped.contains("then"), "{untyped}");
    // Without parameters, or with none, as OpenAI says, there are no arguments.
    for parameters in [json!(null), json!({})] {
        let bare = json!({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "now", "parameters": parameters}}]});
        ask(&rig, &bare).await;
        let bare = spec(&rig);
        assert!(bare.contains("\"additionalProperties\":false"), "{bare}");
    }
    assert!(!one.contains("weather") && one.contains("now"), "{one}");
    let allowed = |mode: &str, name: &str| {
        let tools = json!([{"type": "function", "function": {"name": name}}]);
        json!({"tool_choice": {"type": "allowed_tools",
            "allowed_tools": {"mode": mode, "tools": tools}}})
    };
    let choice = ask(&rig, &allowed("required", "now")).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    let few = spec(&rig);
    assert!(!few.contains("weather") && few.contains("now") && few != one, "{few}");
    let refused = [
        ("tool_choice", allowed("required", "other")),
        ("tool_choice", allowed("sometimes", "now")),
        ("tool_choice", json!({"tool_choice": {"type": "allowed_tools"}})),
        (
            "tool_choice",
            json!({"tool_choice": {"type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": []}}}),
        ),
        (
            "tool_choice",
            json!({"tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ),
        ("tool_choice", json!({"tool_choice": "always"})),
        (
            "tool_choice",
            json!({"tool_choice": "sometimes", "response_format": {"type": "json_object"}}),
        ),
        ("min_tokens", json!({"tool_choice": "required", "min_tokens": 5})),
        (
            "tools",
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]}),
        ),
        (
            "tools",
            json!({"tool_choice": "required", "tools": [{"type": "function",
            "function": {"name": "f", "parameters": {"type": "nothing"}}}]}),
        ),
    ];
    for (param, more) in refused {
        let reply = rig.client.post(CHAT, &request(&more)).await.unwrap();
        assert_eq!(
            (reply.status, &reply.body["error"]["param"]),
            (400, &json!(param)),
            "{}",
            reply.body
        );
    }
}

#[tokio::test]
async fn reasoning_is_told_from_the_answer_where_an_operator_says_so() {
    let text = "<think>\nLet me see.\n</think>\n\nBlue.<|end|>";
    let rig = rig(text, None, true);
    let plain = json!({"tools": null});
    let choice = ask(&rig, &plain).await;
    let message = &choice["message"];
    for name in ["reasoning", "reasoning_content"] {
        assert_eq!(message[name], "Let me see.");
    }
    assert_eq!(message["content"], "Blue.");
    let (told, reason, _) = streamed(&rig, &plain).await;
    assert_eq!(
        (&told["reasoning"], &told["reasoning_content"]),
        (&json!("Let me see."), &json!("Let me see."))
    );
    assert_eq!((&told["content"], &reason), (&json!("Blue."), &json!("stop")));
    let hidden = ask(&rig, &json!({"tools": null, "include_reasoning": false})).await;
    assert_eq!(
        hidden["message"],
        json!({"role": "assistant", "content": "Blue.", "refusal": null,
            "reasoning": null, "reasoning_content": null})
    );
    // A constraint on the output applies to what follows the reasoning.
    let format = json!({"tools": null, "response_format": {"type": "json_object"}});
    ask(&rig, &format).await;
    let spec = rig.seen.lock().unwrap().requests.last().unwrap().guide_spec.clone();
    assert!(
        matches!(spec.as_deref(), Some(GuideSpec::Made(grammar)) if grammar.contains("</think>"))
    );
    let without = self::rig(text, None, false);
    let choice = ask(&without, &plain).await;
    assert_eq!(choice["message"]["content"], "<think>\nLet me see.\n</think>\n\nBlue.");
}

#[tokio::test]
async fn special_tokens_are_text_where_that_is_asked_for() {
    let rig = Rig::saying("a <|user|> b");
    for (skip, expected) in [(true, "a  b"), (false, "a <|user|> b")] {
        let choice = ask(&rig, &json!({"tools": null, "skip_special_tokens": skip})).await;
        assert_eq!(choice["message"]["content"], expected);
    }
    // With special tokens in the text, stop strings can match them.
    let stop = json!({"tools": null, "skip_special_tokens": false, "stop": ["<|us"]});
    assert_eq!(ask(&rig, &stop).await["message"]["content"], "a ");
}

/// What a `stop` string has cut is no call to make.
#[tokio::test]
async fn a_call_that_a_stop_string_cuts_is_not_a_reason_to_finish() {
    let rig = rig(CALLS, Some(CallFormat::Hermes), false);
    for (stop, reason) in [("Rome", "stop"), ("\"now", "tool_calls"), ("</tool", "tool_calls")] {
        let choice = ask(&rig, &json!({"stop": [stop]})).await;
        assert_eq!(
            (&choice["finish_reason"], &choice["stop_reason"]),
            (&json!(reason), &json!(stop))
        );
        let name = &choice["message"]["tool_calls"][0]["function"]["name"];
        assert_eq!(name, "weather", "what there was of it is told: {choice}");
        assert_eq!(streamed(&rig, &json!({"stop": [stop]})).await.1, reason);
    }
}

/// Values of this model's own format have no types, so a grammar holds its calls to another one.
#[tokio::test]
async fn calls_beside_a_form_of_the_answer_are_read_in_the_format_of_their_grammar() {
    let rig = rig(&CALLS[8..], Some(CallFormat::Qwen3Coder), false);
    let choice = ask(&rig, &json!({"response_format": {"type": "json_object"}})).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(functions(&choice["message"])[0]["name"], "weather");
}

/// Agents send both a format for the final answer and tools, in every turn.
#[tokio::test]
async fn an_answer_may_have_a_form_beside_tools() {
    let rig = rig(&CALLS[8..], Some(CallFormat::Hermes), false);
    let schema = json!({"type": "object", "properties": {"done": {"type": "boolean"}}});
    let format = json!({"response_format": {"type": "json_schema",
        "json_schema": {"name": "final", "schema": schema}}});
    let spec = |rig: &Rig| rig.seen.lock().unwrap().requests.last().unwrap().guide_spec.clone();
    let choice = ask(&rig, &format).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
    let made = spec(&rig);
    let Some(GuideSpec::Made(grammar)) = made.as_deref() else { panic!("{made:?}") };
    assert!(grammar.contains("calls | answer") && grammar.contains("done"), "{grammar}");
    rig.script(|script| script.text = "{\"done\": true}<|end|>".to_owned());
    let choice = ask(&rig, &format).await;
    assert_eq!(choice["message"]["content"], "{\"done\": true}");
    assert_eq!(choice["finish_reason"], "stop");
    // Forced calls are not an answer yet.
    rig.script(|script| script.text = CALLS[8..].to_owned());
    let mut required = format.clone();
    required["tool_choice"] = json!("required");
    assert_eq!(ask(&rig, &required).await["finish_reason"], "tool_calls");
    let made = spec(&rig);
    assert!(matches!(made.as_deref(), Some(GuideSpec::Made(grammar)) if !grammar.contains("done")));
    let mut none = format;
    none["tool_choice"] = json!("none");
    ask(&rig, &none).await;
    assert!(matches!(spec(&rig).as_deref(), Some(GuideSpec::Json { .. })));
}

/// A constraint on the whole output allows no reasoning before it.
#[tokio::test]
async fn a_clients_own_grammar_is_of_the_whole_output() {
    let rig = rig("no<|end|>", None, true);
    let request = json!({"tools": null, "guided_grammar": "start: \"no\""});
    let choice = ask(&rig, &request).await;
    assert_eq!(
        choice["message"],
        json!({"role": "assistant", "content": "no", "refusal": null,
        "reasoning": null, "reasoning_content": null})
    );
}

/// A tool's schema has the same bounds as any other.
#[tokio::test]
async fn schemas_of_tools_have_bounds_too() {
    let rig = Rig::saying(&CALLS[8..]);
    let patterns: serde_json::Map<String, Value> =
        (0..65).map(|number| (format!("^{number}"), json!({}))).collect();
    let many = json!({"type": "object", "patternProperties": patterns});
    let function = |name: &str, parameters: &Value| {
        json!({"type": "function", "function": {"name": name, "parameters": parameters,
            "strict": true}})
    };
    let refused = async |parameters: &Value| {
        let good = function("good", &json!({"type": "object"}));
        let tools = json!([good, function("bad", parameters)]);
        let more = json!({"tools": tools, "tool_choice": "required"});
        let reply = rig.client.post(CHAT, &request(&more)).await.unwrap();
        assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("tools")));
        reply.body["error"]["message"].as_str().unwrap().to_owned()
    };
    let none = json!({"type": "object", "required": ["a"], "properties": {"a": false}});
    let unknown = json!({"type": "object", "properties": {"a": {"type": "nothing"}}});
    for (parameters, why) in [(many, "the limit is 64"), (none, ""), (unknown, "nothing")] {
        let message = refused(&parameters).await;
        assert!(message.contains("function \"bad\"") && message.contains(why), "{message}");
        assert!(!message.contains("NoExtensionBias"), "{message}");
    }
    for kind in [json!("string"), json!(["array", "null"]), json!(7)] {
        let message = refused(&json!({"type": kind})).await;
        let field = format!("`tools[1].function.parameters.type` must be \"object\", not {kind}");
        assert_eq!(message, field);
    }
    let message = refused(&json!("x")).await;
    assert!(message.contains("`tools[1].function.parameters` must be a JSON schema"), "{message}");
}

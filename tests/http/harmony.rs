//! The harmony format of gpt-oss: replies are messages with channels, marked by special tokens that
//! never show in text.
use std::path::Path;

use coordinator::http::options::ApiOptions;
use coordinator::text::model::TextModel;
use coordinator::text::reply::{CallFormat, Reasoning};
use serde_json::{Value, json};
use shared::protocol::GuideSpec;
use testkit::models::{demo, repository};

use crate::rig::{Rig, Script};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const CALL: &str = "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary\
    <|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather \
    <|constrain|>json<|message|>{\"city\": \"Rome\"}<|call|>never";
const ANSWER: &str = "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final\
    <|message|>2 + 2 = 4 \u{1f98a}<|return|>never";

/// The demo model's text side, with harmony's special tokens and chat template.
fn model(has_tokens: bool) -> TextModel {
    let read = |file: &Path| std::fs::read_to_string(file).unwrap();
    let parse = |file: &str| serde_json::from_str::<Value>(&read(&demo().join(file))).unwrap();
    let (mut tokenizer, mut config) = (parse("tokenizer.json"), parse("config.json"));
    let first = config["vocab_size"].as_u64().unwrap();
    let marks = ["start", "message", "channel", "constrain", "return", "call", "reserved"];
    if has_tokens {
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        added.extend((first..).zip(marks).map(|(id, mark)| {
            json!({"id": id, "content": format!("<|{mark}|>"), "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        }));
        config["vocab_size"] = json!(first + 7);
    }
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("tokenizer.json", &tokenizer.to_string());
    write("config.json", &config.to_string());
    write("chat_template.jinja", &read(&repository().join("tests/models/harmony.jinja")));
    TextModel::load(folder.path()).unwrap()
}

fn rig(text: &str) -> Rig {
    Rig::of(Script { text: text.to_owned(), ..Script::default() }, model(true))
}

fn body(more: &Value) -> Value {
    let function = json!({"name": "weather", "parameters": {"type": "object",
        "properties": {"city": {"type": "string"}}, "required": ["city"]}});
    let mut body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 200,
        "tools": [{"type": "function", "function": function}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

async fn ask(rig: &Rig, more: &Value) -> Value {
    let reply = rig.client.post(CHAT, &body(more)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["choices"][0].clone()
}

/// The deltas of a stream joined per choice: text, fields, and the number of events that had any.
async fn streamed(rig: &Rig, more: &Value) -> Vec<(Value, usize)> {
    let mut body = body(more);
    body["stream"] = json!(true);
    let count = body["n"].as_u64().unwrap_or(1) as usize;
    let mut said = vec![(json!({"arguments": "", "names": []}), 0); count];
    for event in rig.client.stream(CHAT, &body).await.unwrap().events {
        let choice = &event["choices"][0];
        let (said, events) = &mut said[choice["index"].as_u64().unwrap() as usize];
        if !choice["finish_reason"].is_null() {
            said["finish_reason"] = choice["finish_reason"].clone();
        }
        let add = |said: &mut Value, name: &str, text: &Value| {
            let before = said[name].as_str().unwrap_or_default().to_owned();
            said[name] = (before + text.as_str().unwrap_or_default()).into();
        };
        let delta = &choice["delta"];
        for name in ["content", "reasoning", "reasoning_content"] {
            add(said, name, &delta[name]);
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            add(said, "arguments", &function["arguments"]);
            said["names"].as_array_mut().unwrap().extend(function.get("name").cloned());
            *events += 1;
        }
    }
    said
}

fn prompt(rig: &Rig) -> String {
    let seen = rig.seen.lock().unwrap();
    rig.text.tokenizer.decode(&seen.requests.last().unwrap().prompt, false).unwrap()
}

fn guide(rig: &Rig) -> Option<GuideSpec> {
    rig.seen.lock().unwrap().requests.last().unwrap().guide_spec.as_deref().cloned()
}

#[tokio::test]
async fn a_chat_has_reasoning_content_and_calls_whole_and_streamed() {
    let rig = rig(ANSWER);
    let choice = ask(&rig, &json!({})).await;
    assert_eq!(
        choice["message"],
        json!({"role": "assistant", "content": "2 + 2 = 4 \u{1f98a}", "refusal": null,
            "reasoning": "Simple.", "reasoning_content": "Simple."})
    );
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &Value::Null));
    for (said, _) in streamed(&rig, &json!({"n": 3})).await {
        assert_eq!(
            (&said["content"], &said["reasoning"], &said["reasoning_content"]),
            (&json!("2 + 2 = 4 \u{1f98a}"), &json!("Simple."), &json!("Simple."))
        );
        assert_eq!(said["finish_reason"], "stop");
    }
    let hidden = ask(&rig, &json!({"include_reasoning": false})).await;
    assert!(hidden["message"]["reasoning"].is_null());
    rig.script(|script| script.text = CALL.to_owned());
    let choice = ask(&rig, &json!({})).await;
    let (message, call) = (&choice["message"], &choice["message"]["tool_calls"][0]);
    assert_eq!(
        (&message["content"], &message["reasoning"]),
        (&json!("I look."), &json!("Need it."))
    );
    assert_eq!(
        (&call["type"], &call["function"]),
        (&json!("function"), &json!({"name": "weather", "arguments": "{\"city\": \"Rome\"}"}))
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    let (said, events) = streamed(&rig, &json!({})).await.remove(0);
    assert_eq!((&said["content"], &said["reasoning"]), (&json!("I look."), &json!("Need it.")));
    assert_eq!(
        (&said["names"], &said["arguments"]),
        (&json!(["weather"]), &json!("{\"city\": \"Rome\"}"))
    );
    assert!(events > 4, "arguments come as they are written: {events}");
    assert_eq!(said["finish_reason"], "tool_calls");
    // Calls are not parsed: their text belongs to the answer.
    for more in [json!({"tools": null}), json!({"tool_choice": "none"})] {
        let choice = ask(&rig, &more).await;
        assert_eq!(choice["message"]["content"], "I look.\n{\"city\": \"Rome\"}");
        assert_eq!(choice["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn bounds_and_stop_strings_cut_anywhere_and_no_mark_is_shown() {
    let rig = rig(&format!("{CALL} {ANSWER}"));
    let mut whole = (String::new(), String::new());
    for max in (1..200).rev() {
        let choice = ask(&rig, &json!({"max_tokens": max, "ignore_eos": true})).await;
        let text = |name: &str| choice["message"][name].as_str().unwrap_or_default().to_owned();
        let (content, reasoning) = (text("content"), text("reasoning"));
        if whole.0.is_empty() {
            whole = (content.clone(), reasoning.clone());
            assert!(
                whole.0.starts_with("I look.\nnever \n2 + 2 = 4") && whole.1 == "Need it.\nSimple.",
                "{whole:?}"
            );
        }
        // A character that was cut becomes a replacement character.
        let content = content.trim_end_matches('\u{fffd}').to_owned();
        assert!(whole.0.starts_with(&content) && whole.1.starts_with(&reasoning), "{choice}");
        assert!(!choice.to_string().contains("<|"), "{choice}");
    }
    for (stop, content, reasoning) in
        [("look", Some("I "), "Need it."), ("<|end|>", None, "Need it."), ("eed", None, "N")]
    {
        let choice = ask(&rig, &json!({"stop": [stop]})).await;
        assert_eq!(choice["message"]["content"], json!(content), "{stop}");
        assert_eq!(choice["message"]["reasoning"], reasoning, "{stop}");
        assert_eq!(
            (&choice["finish_reason"], &choice["stop_reason"]),
            (&json!("stop"), &json!(stop))
        );
    }
    // Text and special tokens that are no marks.
    rig.script(|script| script.text = "plain <|reserved|>text".to_owned());
    for more in [json!({}), json!({"skip_special_tokens": false})] {
        assert_eq!(ask(&rig, &more).await["message"]["content"], "plain text");
    }
    // Completions return the model's raw text.
    rig.script(|script| script.text = ANSWER.to_owned());
    for (skip, expected) in [
        (true, "analysisSimple.assistantfinal2 + 2 = 4 \u{1f98a}"),
        (false, ANSWER.split("<|return|>").next().unwrap()),
    ] {
        let body = json!({"prompt": "x", "max_tokens": 200, "skip_special_tokens": skip});
        let reply = rig.client.post("/v1/completions", &body).await.unwrap();
        assert_eq!(reply.body["choices"][0]["text"], expected);
    }
}

#[tokio::test]
async fn responses_have_an_item_for_each_message() {
    let rig = rig(CALL);
    let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
    let request = json!({"input": "x", "tools": [tool], "reasoning": {"effort": "high"}});
    let reply = rig.client.post(RESPONSES, &request).await.unwrap();
    let items = reply.body["output"].as_array().unwrap();
    let kinds: Vec<&Value> = items.iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(items[0]["content"], json!([{"type": "reasoning_text", "text": "Need it."}]));
    assert_eq!(items[1]["content"][0]["text"], "I look.");
    assert_eq!(
        (&items[2]["name"], &items[2]["arguments"]),
        (&json!("weather"), &json!("{\"city\": \"Rome\"}"))
    );
    let thought =
        reply.body["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((2..10).contains(&thought), "{thought}");
    assert!(prompt(&rig).contains("Reasoning: high\n"), "{}", prompt(&rig));
    // A continued conversation repeats the earlier turns unchanged.
    let mut input = vec![json!({"role": "user", "content": "x"})];
    input.extend(items.iter().cloned());
    let id = &items[2]["call_id"];
    input.push(json!({"type": "function_call_output", "call_id": id, "output": "sunny"}));
    let before = "<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|channel|>final<|message|>\
        It is.<|end|><|start|>assistant";
    rig.script(|script| script.text = format!("{before}{ANSWER}"));
    let mut streamed = request.clone();
    (streamed["input"], streamed["stream"]) = (input.into(), json!(true));
    let events = rig.client.stream(RESPONSES, &streamed).await.unwrap().events;
    let expected = "<|start|>assistant<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant\
        <|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>\
        commentary json<|message|>{\"city\": \"Rome\"}<|call|><|start|>functions.weather to=assistant\
        <|channel|>commentary<|message|>\"sunny\"<|end|><|start|>assistant";
    assert!(prompt(&rig).ends_with(expected), "{}", prompt(&rig));
    let done = |event: &&Value| event["type"] == "response.output_text.done";
    let texts: Vec<&Value> = events.iter().filter(done).map(|event| &event["text"]).collect();
    assert_eq!(texts, ["So:", "It is.", "2 + 2 = 4 \u{1f98a}"], "messages are not run together");
}

#[tokio::test]
async fn conversations_are_told_as_the_template_wants_them() {
    let rig = rig(ANSWER);
    let call = |id: &str, city: &str| {
        json!({"id": id, "type": "function",
        "function": {"name": "weather", "arguments": format!("{{\"city\": \"{city}\"}}")}})
    };
    let result =
        |id: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "content": content});
    let messages = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it warm?"},
        {"role": "assistant", "content": null, "reasoning": "Compare.", "tool_calls": [call("1", "Rome"), call("2", "Oslo")]},
        result("2", "10"), result("1", "25"), {"role": "developer", "content": "In Celsius."},
    ]);
    ask(&rig, &json!({"messages": messages, "reasoning_effort": "low"})).await;
    let given = prompt(&rig);
    for part in [
        "Reasoning: low\n",
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nIn Celsius.\n\n# Tools",
        "// \ntype weather = (_: {\ncity: string,\n}) => any;",
        "<|channel|>analysis<|message|>Compare.<|end|><|start|>assistant to=functions.weather\
         <|channel|>commentary json<|message|>{\"city\": \"Rome\"}<|call|><|start|>functions.weather \
         to=assistant<|channel|>commentary<|message|>\"25\"<|end|><|start|>assistant to=functions.weather\
         <|channel|>commentary json<|message|>{\"city\": \"Oslo\"}<|call|><|start|>functions.weather \
         to=assistant<|channel|>commentary<|message|>\"10\"<|end|><|start|>assistant",
    ] {
        assert!(given.contains(part), "{part}\n\n{given}");
    }
    let reply =
        rig.client.post(CHAT, &body(&json!({"reasoning_effort": "minimal"}))).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("reasoning_effort")));
    assert!(reply.body["error"]["message"].as_str().unwrap().contains("low, medium, high"));
    let request = json!({"input": "x", "reasoning": {"effort": "none"}});
    let reply = rig.client.post(RESPONSES, &request).await.unwrap();
    assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("reasoning.effort")));
    // The model continues within the answer.
    rig.script(|script| script.text = " a time<|return|>".to_owned());
    let open =
        json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once upon"}]);
    let more =
        json!({"messages": open, "add_generation_prompt": false, "continue_final_message": true});
    let choice = ask(&rig, &more).await;
    assert!(prompt(&rig).ends_with("<|channel|>final<|message|>Once upon"), "{}", prompt(&rig));
    assert_eq!(choice["message"]["content"], " a time");
}

#[tokio::test]
async fn what_the_output_must_be_is_of_its_last_message() {
    let rig = rig(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>\
        {\"a\": 1}<|return|>",
    );
    let made = |rig: &Rig| match guide(rig) {
        Some(GuideSpec::Made(grammar)) => grammar,
        other => panic!("{other:?}"),
    };
    let format = json!({"tools": null, "response_format": {"type": "json_object"}});
    let choice = ask(&rig, &format).await;
    assert_eq!(
        (&choice["message"]["content"], &choice["message"]["reasoning"]),
        (&json!("{\"a\": 1}"), &json!("Hm."))
    );
    assert!(made(&rig).contains("\"final\"") && !made(&rig).contains("calls"), "{}", made(&rig));
    ask(&rig, &json!({"response_format": {"type": "json_object"}})).await;
    assert!(made(&rig).contains("calls | message"), "{}", made(&rig));
    rig.script(|script| script.text = CALL.to_owned());
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})]
    {
        let said = ask(&rig, &json!({"tool_choice": choice})).await;
        assert_eq!(said["message"]["tool_calls"][0]["function"]["name"], "weather");
        let grammar = made(&rig);
        assert!(
            grammar.contains("to=functions.weather") && !grammar.contains("\"final\""),
            "{grammar}"
        );
    }
    // A constraint on the whole output applies to the whole answer, whose beginning is in the
    // prompt.
    rig.script(|script| script.text = "no<|return|>".to_owned());
    for more in [json!({"guided_grammar": "start: \"no\""}), json!({"allowed_token_ids": [5, 6]})] {
        let mut more = more;
        more["tools"] = Value::Null;
        let choice = ask(&rig, &more).await;
        assert_eq!(
            choice["message"],
            json!({"role": "assistant", "content": "no", "refusal": null,
                "reasoning": null, "reasoning_content": null})
        );
        assert!(prompt(&rig).ends_with("<|start|>assistant<|channel|>final<|message|>"));
        assert!(!matches!(guide(&rig), Some(GuideSpec::Made(_))));
    }
}

/// Without special tokens the marks are text; an operator can select or disable the format for any
/// model.
#[tokio::test]
async fn the_form_is_told_by_the_template_or_an_operator() {
    let plain = Rig::of(
        Script { text: CALL.replace("<|call|>never", "<|eos|>"), ..Script::default() },
        model(false),
    );
    let choice = ask(&plain, &json!({})).await;
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("I look."), &json!("tool_calls"))
    );
    for options in [
        ApiOptions { tool_calls: Some(CallFormat::Harmony), ..ApiOptions::default() },
        ApiOptions { reasoning: Some(Reasoning::Harmony), ..ApiOptions::default() },
    ] {
        let rig = Rig::with_api(&options);
        rig.script(|script| {
            script.text = "<|channel|>analysis<|message|>a<|channel|>final<|message|>b".to_owned()
        });
        let message = ask(&rig, &json!({})).await["message"].clone();
        assert_eq!((&message["reasoning"], &message["content"]), (&json!("a"), &json!("b")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_openai_package_reads_it() {
    let Some(python) = std::env::var_os("TUTTI_TEST_PYTHON") else {
        assert!(std::env::var_os("CI").is_none(), "CI must set TUTTI_TEST_PYTHON; run tests/run");
        return;
    };
    let answering = ANSWER.replace("2 + 2 = 4 \u{1f98a}", "{\"sum\": 4}");
    let rigs = [rig(CALL), rig(&answering)];
    let url = |rig: &Rig| format!("http://{}/v1", rig.address);
    let output = std::process::Command::new(&python)
        .arg(repository().join("tests/openai/test_harmony.py"))
        .env("TUTTI_CALLING_URL", url(&rigs[0]))
        .env("TUTTI_ANSWERING_URL", url(&rigs[1]))
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(out.contains("checks passed"), "{out}\n{err}");
}

//! vLLM's fields for clients that work with tokens: ids of tokens, tokens told by their ids,
//! log-probabilities of prompts.
use std::collections::BTreeMap;

use coordinator::http::options::ApiOptions;
use serde_json::{Map, Value, json};

use crate::rig::{Rig, THOUGHT};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
/// Characters of several tokens, an end, and what must not come behind it.
const TEXT: &str = "Caf\u{e9} \u{1f98a} said \"good night\" and left. The end.<|end|>Never.";

fn request(path: &str, more: &Value) -> Value {
    let mut body = json!({"max_tokens": 400, "return_token_ids": true});
    match path {
        COMPLETIONS => body["prompt"] = json!("Hello"),
        _ => body["messages"] = json!([{"role": "user", "content": "Hello"}]),
    }
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// What an answer tells of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    ids: Vec<u32>,
    prompt: Vec<u32>,
    text: String,
}

async fn whole(rig: &Rig, path: &str, more: &Value) -> Vec<Told> {
    let answer = rig.ask(path, &request(path, more)).await;
    let choices: Vec<Told> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| {
            let prompt = if path == CHAT { &answer } else { choice };
            let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
            Told {
                ids: ids(&choice["token_ids"]),
                prompt: ids(&prompt["prompt_token_ids"]),
                text: text.unwrap_or_default().to_owned(),
            }
        })
        .collect();
    let count: usize = choices.iter().map(|choice| choice.ids.len()).sum();
    assert_eq!(answer["usage"]["completion_tokens"], count, "{more}");
    choices
}

/// What a stream's events add up to. Only the first one has the prompt: of each choice in
/// completions, of all in chat.
async fn streamed(rig: &Rig, path: &str, more: &Value) -> Vec<Told> {
    let mut body = request(path, more);
    body["stream"] = json!(true);
    let streamed = rig.client.stream(path, &body).await.unwrap();
    assert!(streamed.done);
    let mut choices = BTreeMap::<u64, Told>::new();
    let mut prompt = None;
    for event in &streamed.events {
        let choice = &event["choices"][0];
        let index = choice["index"].as_u64().unwrap();
        let begins = !choices.contains_key(&index);
        let told = choices.entry(index).or_default();
        if path == CHAT {
            let has_prompt = event.get("prompt_token_ids");
            assert_eq!(has_prompt.is_some(), prompt.is_none(), "{event}");
            prompt = has_prompt.map(ids).or(prompt);
            told.prompt.clone_from(prompt.as_ref().unwrap());
            // The role comes before any token.
            assert_eq!(choice.get("token_ids").is_none(), begins, "{event}");
        } else {
            assert_eq!(choice.get("prompt_token_ids").is_some(), begins, "{event}");
            told.prompt.extend(choice.get("prompt_token_ids").map(ids).unwrap_or_default());
        }
        told.ids.extend(choice.get("token_ids").map(ids).unwrap_or_default());
        let text = choice["text"].as_str().or(choice["delta"]["content"].as_str());
        told.text.push_str(text.unwrap_or_default());
    }
    choices.into_values().collect()
}

#[tokio::test]
async fn all_generated_tokens_are_told_whole_and_in_streams() {
    let rig = Rig::saying(TEXT);
    let all = rig.text.encode(TEXT, false).unwrap();
    let behind = |text: &str| {
        let token = *rig.text.encode(text, false).unwrap().last().unwrap();
        all.iter().position(|it| *it == token).unwrap() + 1
    };
    // Tokens until all their text together has the string.
    let until = |stop: &str| {
        let text = |count: usize| rig.text.tokenizer.decode(&all[..count], true).unwrap();
        (1..=all.len()).find(|count| text(*count).contains(stop)).unwrap()
    };
    let (end, dot) = (behind("<|end|>"), behind("left."));
    let cases = [
        (json!({}), end),
        (json!({"n": 3}), end),
        (json!({"max_tokens": 3}), 3),
        (json!({"ignore_eos": true}), all.len()),
        (json!({"skip_special_tokens": false}), end),
        (json!({"stop": "night\" and"}), until("night\" and")),
        (json!({"stop": ["\u{1f98a} s"], "n": 2}), until("\u{1f98a} s")),
        (json!({"stop": "\u{1f98a}", "include_stop_str_in_output": true}), until("\u{1f98a}")),
        // Text that may begin a stop string is held back to the end.
        (json!({"stop": "The end.!"}), end),
        (json!({"stop_token_ids": [all[dot - 1]]}), dot),
        (json!({"stop_token_ids": [all[dot - 1]], "include_stop_str_in_output": true}), dot),
    ];
    for path in [COMPLETIONS, CHAT] {
        for (more, count) in &cases {
            let told = whole(&rig, path, more).await;
            let n = more["n"].as_u64().unwrap_or(1);
            assert_eq!(told.len() as u64, n);
            for choice in &told {
                assert_eq!(choice.ids, all[..*count], "{path} {more}");
                // What is not part of the text comes after it.
                let text = rig.text.tokenizer.decode(&choice.ids, true).unwrap();
                assert!(text.starts_with(&choice.text), "{path} {more}: {choice:?}");
                let ends = more.get("stop").or(more.get("stop_token_ids")).is_some();
                assert!(ends || text == choice.text, "{path} {more}: {choice:?}");
                let seen = rig.seen.lock().unwrap();
                assert_eq!(choice.prompt, seen.requests.last().unwrap().prompt);
            }
            assert_eq!(streamed(&rig, path, more).await, told, "{path} {more}");
        }
    }
}

#[tokio::test]
async fn each_choice_of_a_completion_has_its_prompts_tokens_echoed_or_not() {
    let rig = Rig::saying(TEXT);
    let hello = rig.text.encode("Hello", true).unwrap();
    let prompts = [hello, vec![10, 11, 12]];
    for more in [
        json!({"prompt": ["Hello", [10, 11, 12]], "n": 2}),
        json!({"prompt": ["Hello", [10, 11, 12]], "n": 2, "echo": true, "logprobs": 1}),
        json!({"prompt": ["Hello", [10, 11, 12]], "n": 2, "echo": true, "max_tokens": 0}),
    ] {
        let told = whole(&rig, COMPLETIONS, &more).await;
        assert_eq!(told.len(), 4);
        let generated = if more["max_tokens"] == 0 { 0 } else { told[0].ids.len() };
        for (index, choice) in told.iter().enumerate() {
            assert_eq!(choice.prompt, prompts[index / 2], "{more}");
            assert_eq!(choice.ids, rig.text.encode(TEXT, false).unwrap()[..generated], "{more}");
            let echo = if index < 2 { "Hello".to_owned() } else { rig.text.decode(&prompts[1]) };
            assert_eq!(choice.text.starts_with(&echo), more["echo"] == true, "{more}");
        }
        assert_eq!(streamed(&rig, COMPLETIONS, &more).await, told, "{more}");
    }
    let cut = json!({"prompt": [10, 11, 12, 13], "truncate_prompt_tokens": 2});
    assert_eq!(whole(&rig, COMPLETIONS, &cut).await[0].prompt, [12, 13]);
}

#[tokio::test]
async fn tokens_of_reasoning_and_calls_are_told_as_they_come() {
    let rig = Rig::thinking(THOUGHT);
    let all = rig.text.encode(THOUGHT, false).unwrap();
    let function = |name: &str| json!({"type": "function", "function": {"name": name}});
    let tools = json!([function("weather"), function("now")]);
    for more in [
        json!({"tools": tools}),
        json!({"tools": tools, "n": 2}),
        json!({"tools": tools, "include_reasoning": false}),
    ] {
        let told = whole(&rig, CHAT, &more).await;
        assert_eq!(told[0].text, "I look.");
        assert!(told.iter().all(|choice| choice.ids == all), "{more}: {told:?}");
        let by_events = streamed(&rig, CHAT, &more).await;
        assert_eq!(by_events, told, "{more}");
    }
    // Nothing waits for text: each token has an event.
    let mut body = request(CHAT, &json!({"tools": tools, "stream": true}));
    let events = rig.client.stream(CHAT, &body).await.unwrap().events;
    let counts = events.iter().map(|event| &event["choices"][0]["token_ids"]);
    let counts: Vec<usize> = counts.filter_map(Value::as_array).map(Vec::len).collect();
    assert_eq!(counts.iter().filter(|count| **count == 1).count(), all.len());
    assert!(counts.iter().all(|count| *count <= 1));
    body["return_token_ids"] = json!(false);
    let fewer = rig.client.stream(CHAT, &body).await.unwrap().events;
    assert!(fewer.len() < all.len(), "text that is held back has no event of its own");
}

#[tokio::test]
async fn nothing_is_told_of_tokens_unless_it_is_asked_for() {
    let rig = Rig::saying(TEXT);
    let names = ["token_ids", "prompt_token_ids", "prompt_logprobs"];
    for path in [COMPLETIONS, CHAT] {
        for asked in [json!(false), Value::Null] {
            let more = json!({"return_token_ids": asked, "prompt_logprobs": null});
            let mut body = request(path, &more);
            let answer = rig.ask(path, &body).await;
            body["stream"] = json!(true);
            let events = rig.client.stream(path, &body).await.unwrap().events;
            for told in events.iter().chain([&answer]) {
                for name in names {
                    assert!(told.get(name).is_none(), "{told}");
                    assert!(told["choices"][0].get(name).is_none(), "{told}");
                }
            }
        }
        let wrong = request(path, &json!({"return_token_ids": "yes"}));
        let reply = rig.client.post(path, &wrong).await.unwrap();
        assert_eq!(
            (reply.status, &reply.body["error"]["param"]),
            (400, &json!("return_token_ids"))
        );
    }
}

/// A choice's log-probabilities: tokens, their alternatives' names, and what does not depend on
/// names.
fn named(choice: &Value) -> (Vec<String>, Vec<Vec<String>>, Value) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let logprobs = &choice["logprobs"];
    let Some(content) = logprobs["content"].as_array() else {
        let tokens = logprobs["tokens"].as_array().unwrap().iter().map(text).collect();
        let top = logprobs["top_logprobs"].as_array().unwrap().iter();
        let top = top.map(|top| top.as_object().unwrap().keys().cloned().collect()).collect();
        return (tokens, top, json!([logprobs["text_offset"], logprobs["token_logprobs"]]));
    };
    let tokens = content.iter().map(|it| text(&it["token"])).collect();
    let top = content.iter().map(|it| it["top_logprobs"].as_array().unwrap());
    let top = top.map(|top| top.iter().map(|it| text(&it["token"])).collect()).collect();
    (tokens, top, content.iter().map(|it| it["bytes"].clone()).collect())
}

#[tokio::test]
async fn log_probabilities_tell_tokens_by_their_ids_where_that_is_wanted() {
    let rig = Rig::saying("Caf\u{e9} \u{1f98a}");
    let all = rig.text.encode("Caf\u{e9} \u{1f98a}", false).unwrap();
    let by_id: Vec<String> = all.iter().map(|id| format!("token_id:{id}")).collect();
    let tops: Vec<Vec<String>> =
        by_id.iter().map(|name| vec![name.clone(), "token_id:33".to_owned()]).collect();
    let operators = Rig::with_api(&ApiOptions { tokens_by_id: true, ..ApiOptions::default() });
    operators.script(|script| script.text = "Caf\u{e9} \u{1f98a}".to_owned());
    for path in [COMPLETIONS, CHAT] {
        let asked = |by_id: Value| {
            let logprobs = if path == CHAT { json!(true) } else { json!(1) };
            let mut more = json!({"logprobs": logprobs, "return_tokens_as_token_ids": by_id});
            if path == CHAT {
                more["top_logprobs"] = json!(1);
            }
            request(path, &more)
        };
        let plain = named(&rig.ask(path, &asked(json!(false))).await["choices"][0]);
        assert!(plain.0[0].starts_with('C') && plain.0.len() == all.len(), "{plain:?}");
        let expected = (by_id.clone(), tops.clone(), plain.2.clone());
        let chosen = rig.ask(path, &asked(json!(true))).await;
        assert_eq!(named(&chosen["choices"][0]), expected);
        let mut body = asked(json!(true));
        body["stream"] = json!(true);
        let events = rig.client.stream(path, &body).await.unwrap().events;
        let told = events.iter().map(|event| &event["choices"][0]);
        let told: Vec<String> =
            told.filter(|it| !it["logprobs"].is_null()).flat_map(|it| named(it).0).collect();
        assert_eq!(told, by_id);
        // An operator may make it the default.
        let default = operators.ask(path, &asked(Value::Null)).await;
        assert_eq!(named(&default["choices"][0]), expected);
        let against = operators.ask(path, &asked(json!(false))).await;
        assert_eq!(named(&against["choices"][0]), plain);
    }
    // OpenAI's newer API knows nothing of it.
    let body = json!({"input": "x", "include": ["message.output_text.logprobs"]});
    let answer = operators.ask("/v1/responses", &body).await;
    let first = &answer["output"][0]["content"][0]["logprobs"][0]["token"];
    assert!(first.as_str().unwrap().starts_with('C'), "{answer}");
}

/// What the scripted engine says of a prompt, with so many alternatives told.
fn expected(rig: &Rig, prompt: &[u32], alternatives: usize) -> Value {
    let entry = |token: &u32| {
        let told = |id: u32, logprob: f64, rank: u32| {
            let text = rig.text.tokenizer.decode(&[id], false).unwrap();
            json!({"logprob": logprob, "rank": rank, "decoded_token": text})
        };
        let mut all = Map::new();
        all.insert(token.to_string(), told(*token, -0.5, token + 2));
        for (rank, (id, logprob)) in (1..).zip([(33, -0.25), (34, -0.375)]).take(alternatives) {
            assert_ne!(id, *token);
            all.insert(id.to_string(), told(id, logprob, rank));
        }
        Value::Object(all)
    };
    [Value::Null].into_iter().chain(prompt[1..].iter().map(entry)).collect()
}

#[tokio::test]
async fn log_probabilities_of_prompts_have_vllms_shape() {
    let rig = Rig::saying("a b");
    let asked = || rig.seen.lock().unwrap().requests.last().unwrap().sampling[0].clone();
    let (one, other) = ([300u32, 301, 302], [303u32]);
    for (alternatives, n) in [(0, 1), (1, 2), (2, 1)] {
        let body = json!({"prompt": [one.to_vec(), other.to_vec()], "n": n, "prompt_logprobs": alternatives});
        let answer = rig.ask(COMPLETIONS, &body).await;
        assert!(answer.get("prompt_logprobs").is_none());
        for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
            let prompt = if index < n { &one[..] } else { &other[..] };
            assert_eq!(choice["prompt_logprobs"], expected(&rig, prompt, alternatives), "{body}");
            assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("a b"), &Value::Null));
        }
        assert_eq!(asked().prompt_logprobs, Some(alternatives as u32));
        let body = json!({"messages": [{"role": "user", "content": "x"}], "n": n,
            "prompt_logprobs": alternatives});
        let answer = rig.ask(CHAT, &body).await;
        let prompt = rig.seen.lock().unwrap().requests.last().unwrap().prompt.clone();
        assert_eq!(answer["prompt_logprobs"], expected(&rig, &prompt, alternatives));
        assert!(answer["choices"][0].get("prompt_logprobs").is_none());
        assert_eq!((asked().prompt_logprobs, asked().logprobs), (Some(alternatives as u32), None));
    }
}

#[tokio::test]
async fn log_probabilities_of_prompts_and_of_echoes_are_told_apart() {
    let rig = Rig::saying("a b");
    let prompt = vec![300, 301, 302];
    let generated = rig.text.encode("a b", false).unwrap().len();
    // (echo, logprobs, prompt_logprobs)
    for (echo, logprobs, own) in
        [(true, 0, 2), (true, 2, 0), (true, 1, 1), (false, 1, 2), (false, 2, 0)]
    {
        let body = json!({"prompt": prompt, "echo": echo, "logprobs": logprobs,
            "prompt_logprobs": own});
        let answer = rig.ask(COMPLETIONS, &body).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["prompt_logprobs"], expected(&rig, &prompt, own), "{body}");
        let told = choice["logprobs"]["top_logprobs"].as_array().unwrap();
        let echoed = if echo { prompt.len() } else { 0 };
        assert_eq!(told.len(), echoed + generated, "{body}");
        for top in told.iter().take(echoed).skip(1) {
            assert_eq!(top.as_object().unwrap().len(), logprobs + 1, "{body}: {top}");
        }
        let most = if echo { own.max(logprobs) } else { own };
        let asked = rig.seen.lock().unwrap().requests.last().unwrap().sampling[0].clone();
        assert_eq!(asked.prompt_logprobs, Some(most as u32), "{body}");
        assert_eq!(asked.logprobs, Some(logprobs as u32), "{body}");
    }
}

#[tokio::test]
async fn log_probabilities_of_prompts_are_bounded() {
    let rig = Rig::saying("x");
    for path in [COMPLETIONS, CHAT] {
        for more in [
            json!({"prompt_logprobs": -1}),
            json!({"prompt_logprobs": 21}),
            json!({"prompt_logprobs": true}),
            json!({"prompt_logprobs": 0, "stream": true}),
            json!({"prompt_logprobs": 5, "stream": true}),
        ] {
            let reply = rig.client.post(path, &request(path, &more)).await.unwrap();
            let param = &reply.body["error"]["param"];
            assert_eq!((reply.status, param), (400, &json!("prompt_logprobs")), "{more}");
        }
    }
    let ask = |n: u32| json!({"prompt": vec![300; 1000], "n": n, "prompt_logprobs": 20});
    let reply = rig.client.post(COMPLETIONS, &ask(50)).await.unwrap();
    let error = &reply.body["error"];
    assert_eq!((reply.status, &error["param"]), (400, &json!("prompt_logprobs")));
    assert!(error["message"].as_str().unwrap().contains("1050000 log-probabilities"), "{error}");
    assert_eq!(rig.client.post(COMPLETIONS, &ask(2)).await.unwrap().status, 200);
}

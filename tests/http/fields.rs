//! No field that would change the answer is ignored, and supported fields behave as in vLLM.
use std::collections::BTreeSet;

use coordinator::http::refused::{self, Endpoint};
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::models::repository;

use crate::rig::Rig;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn body(path: &str) -> Value {
    if path == COMPLETIONS {
        json!({"prompt": "x"})
    } else {
        json!({"messages": [{"role": "user", "content": "x"}]})
    }
}

/// (field, a value that requests something, a neutral value)
fn refused() -> Vec<(&'static str, Value, Value)> {
    vec![
        ("ec_transfer_params", json!({}), json!(null)),
        ("kv_transfer_params", json!({}), json!(null)),
        ("length_penalty", json!(1.5), json!(1)),
        ("logprob_token_ids", json!([1]), json!(null)),
        ("logits_processors", json!(["a"]), json!([])),
        ("priority", json!(1), json!(0)),
        ("return_prompt_text", json!(true), json!(false)),
        ("truncation_side", json!("right"), json!("left")),
        ("use_beam_search", json!(true), json!(false)),
        ("vllm_xargs", json!({"a": 1}), json!({})),
        ("watermarking", json!(true), json!(false)),
    ]
}

#[tokio::test]
async fn known_fields_that_are_not_supported_are_refused_by_name() {
    let rig = Rig::saying("x");
    let completions = [
        ("suffix", json!("a"), json!("")),
        ("prompt_embeds", json!("a"), json!(null)),
        ("spaces_between_special_tokens", json!(null), json!(false)),
    ];
    let chat = [
        ("audio", json!({}), json!(null)),
        ("chat_template", json!("a"), json!(null)),
        ("documents", json!([{"text": "a"}]), json!([])),
        ("echo", json!(true), json!(false)),
        ("functions", json!([{}]), json!([])),
        ("function_call", json!("auto"), json!("none")),
        ("mm_processor_kwargs", json!({"a": 1}), json!({})),
        ("modalities", json!(["text", "audio"]), json!(["text"])),
        ("prediction", json!(null), json!({"type": "content", "content": "a"})),
        ("service_tier", json!("fast"), json!("flex")),
        ("store", json!(null), json!(true)),
        ("tool_choice", json!("required"), json!("auto")),
        ("verbosity", json!("long"), json!("low")),
        ("web_search_options", json!({}), json!(null)),
    ];
    for (path, own) in [(COMPLETIONS, &completions[..]), (CHAT, &chat[..])] {
        for (field, asking, neutral) in refused().iter().chain(own) {
            let mut request = body(path);
            if !asking.is_null() {
                request[*field] = asking.clone();
                let reply = rig.client.post(path, &request).await.unwrap();
                assert_eq!(reply.status, 400, "{path} {field}: {}", reply.body);
                assert_eq!(reply.body["error"]["param"], *field, "{}", reply.body);
                let message = reply.body["error"]["message"].as_str().unwrap();
                assert!(message.starts_with(&format!("`{field}` ")), "{message}");
            }
            for harmless in [neutral, &Value::Null] {
                request[*field] = harmless.clone();
                let reply = rig.client.post(path, &request).await.unwrap();
                assert_eq!(reply.status, 200, "{path} {field} {harmless}: {}", reply.body);
            }
        }
    }
}

#[tokio::test]
async fn fields_that_nobody_knows_and_hints_are_ignored() {
    let rig = Rig::saying("x");
    for path in [COMPLETIONS, CHAT] {
        let mut request = body(path);
        for (field, value) in [
            ("my_own_field", json!({"a": 1})),
            ("metadata", json!({"a": "b"})),
            ("user", json!("me")),
            ("prompt_cache_key", json!("k")),
            ("session_id", json!("s")),
            ("stream_interval", json!(8)),
            ("parallel_tool_calls", json!(true)),
            ("stream_options", json!({})),
            // Chat fields: the template does not read the first, and there is no reasoning for the
            // second to separate.
            ("reasoning_effort", json!("low")),
            ("include_reasoning", json!(false)),
        ] {
            request[field] = value;
        }
        assert_eq!(rig.client.post(path, &request).await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn numbers_may_be_strings_and_integers_may_have_a_fraction_of_zero() {
    let rig = Rig::saying("a b c d e f g h i j");
    let request = json!({"prompt": "x", "max_tokens": 5.0, "temperature": "0.5", "top_k": "7"});
    let answer = rig.client.post(COMPLETIONS, &request).await.unwrap().body;
    assert_eq!(answer["usage"]["completion_tokens"], 5, "{answer}");
    let given = rig.seen.lock().unwrap().requests[0].sampling[0].clone();
    assert_eq!((given.temperature, given.top_k), (0.5, 7));
    // The API's description leaves out that numbers may be strings.
    let plain: &Client = &rig.client;
    let request = json!({"prompt": "x", "max_tokens": 1, "logit_bias": {"7": "-1.5"}});
    assert_eq!(plain.post(COMPLETIONS, &request).await.unwrap().status, 200);
    let given = rig.seen.lock().unwrap().requests[1].sampling[0].clone();
    assert_eq!(given.logit_bias, [(7, -1.5)]);
    // A number above 0 stays above it, where f32 has none so small.
    let tokens = json!([5.0, 6]);
    let request = json!({"prompt": tokens, "max_tokens": 1, "top_p": 5e-324,
        "allowed_token_ids": tokens, "stop_token_ids": [7.0]});
    rig.client.post(COMPLETIONS, &request).await.unwrap();
    {
        let seen = rig.seen.lock().unwrap();
        let given = seen.requests.last().unwrap();
        assert_eq!((&given.prompt[..], given.sampling[0].top_p > 0.0), (&[5, 6][..], true));
        assert!(given.end_tokens.contains(&7));
    }
    for wrong in [json!([5.5]), json!([5, "6"]), json!([5, 1e300]), json!([-1])] {
        let reply = rig.client.post(COMPLETIONS, &json!({"prompt": wrong})).await.unwrap();
        assert_eq!((reply.status, &reply.body["error"]["param"]), (400, &json!("prompt")));
    }
    let text = rig.ask("/detokenize", &json!({"tokens": [300.0]})).await;
    assert_eq!(text, rig.ask("/detokenize", &json!({"tokens": [300]})).await);
    let request = json!({"messages": [{"role": "user", "content": "x"}], "logprobs": false, "top_logprobs": 0});
    assert_eq!(rig.client.post(CHAT, &request).await.unwrap().status, 200);
}

#[tokio::test]
async fn an_empty_name_is_that_of_the_model() {
    let rig = Rig::saying("x");
    for path in [COMPLETIONS, CHAT] {
        let mut request = body(path);
        request["model"] = json!("");
        assert_eq!(rig.ask(path, &request).await["model"], "demo", "{path}");
    }
}

#[tokio::test]
async fn a_stop_token_can_be_part_of_the_text() {
    let rig = Rig::saying("One. Two.<|end|>Three.");
    let token = |text: &str| *rig.text.encode(text, false).unwrap().last().unwrap();
    let (dot, end) = (token("One."), token("<|end|>"));
    // The model's own end token is never text, even if the request names it.
    for (tokens, include, expected) in [
        (json!([dot]), true, "One."),
        (json!([dot]), false, "One"),
        (json!([end]), true, "One. Two."),
    ] {
        let request = json!({"prompt": "x", "max_tokens": 50, "stop_token_ids": tokens,
            "include_stop_str_in_output": include});
        let answer = rig.client.post(COMPLETIONS, &request).await.unwrap().body;
        assert_eq!(answer["choices"][0]["text"], expected, "{request}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn the_stop_string_can_be_part_of_the_text() {
    let rig = Rig::saying("One. Two. Three.");
    for stream in [false, true] {
        let request = json!({"prompt": "x", "max_tokens": 50, "stop": ["Two"], "stream": stream,
            "include_stop_str_in_output": true});
        let text = if stream {
            let events = rig.client.stream(COMPLETIONS, &request).await.unwrap().events;
            events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
        } else {
            let answer = rig.client.post(COMPLETIONS, &request).await.unwrap().body;
            answer["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        assert_eq!(text, "One. Two");
    }
}

#[tokio::test]
async fn special_tokens_are_added_where_that_is_wanted() {
    let rig = Rig::saying("x");
    for (path, with, without) in [(COMPLETIONS, 0, 1), (CHAT, 1, 0)] {
        rig.seen.lock().unwrap().requests.clear();
        for special in [json!(true), json!(false), Value::Null] {
            let mut request = body(path);
            request["add_special_tokens"] = special;
            assert_eq!(rig.client.post(path, &request).await.unwrap().status, 200);
        }
        let seen = rig.seen.lock().unwrap();
        let lengths: Vec<usize> = seen.requests.iter().map(|it| it.prompt.len()).collect();
        assert_eq!(lengths[0], lengths[1] + 1, "{path}: the tokenizer adds <|bos|>");
        assert_eq!(lengths[2], lengths[if path == COMPLETIONS { with } else { without + 1 }]);
    }
}

#[tokio::test]
async fn a_prompt_that_is_too_long_can_lose_its_beginning() {
    let rig = Rig::saying("x");
    let long = "word ".repeat(3000);
    let length = rig.text.max_positions as usize;
    for (keep, tokens) in [(json!(10), 10), (json!(-1), length - 4)] {
        let request = json!({"prompt": long, "max_tokens": 4, "truncate_prompt_tokens": keep});
        let reply = rig.client.post(COMPLETIONS, &request).await.unwrap();
        assert_eq!(reply.body["usage"]["prompt_tokens"], tokens, "{}", reply.body);
        let whole = rig.text.encode(&long, true).unwrap();
        let seen = rig.seen.lock().unwrap();
        assert_eq!(seen.requests.last().unwrap().prompt, whole[whole.len() - tokens..]);
    }
    // A conversation without a bound keeps a quarter of the model's length for its answer.
    let messages = json!([{"role": "user", "content": long}]);
    let request = json!({"messages": messages, "truncate_prompt_tokens": -1});
    let reply = rig.client.post(CHAT, &request).await.unwrap();
    assert_eq!(length, 1024);
    assert_eq!(reply.body["usage"]["prompt_tokens"], 768, "{}", reply.body);
    assert_eq!(rig.seen.lock().unwrap().requests.last().unwrap().max_tokens, 256);
    for wrong in [json!(0), json!(-2), json!(1 << 20)] {
        let request = json!({"prompt": "x", "truncate_prompt_tokens": wrong});
        let reply = rig.client.post(COMPLETIONS, &request).await.unwrap();
        assert_eq!(reply.body["error"]["param"], "truncate_prompt_tokens", "{}", reply.body);
    }
}

#[tokio::test]
async fn a_request_keeps_its_clients_id() {
    let rig = Rig::saying("x");
    let http = reqwest::Client::new();
    let url = format!("http://{}{COMPLETIONS}", rig.address);
    let send = |header: &'static str, request: Value| {
        let sent = http.post(&url).header("x-request-id", header).json(&request).send();
        async move {
            let response = sent.await.unwrap();
            let header = response.headers()["x-request-id"].to_str().unwrap().to_owned();
            (header, response.json::<Value>().await.unwrap())
        }
    };
    let (header, answer) = send("my-id", body(COMPLETIONS)).await;
    assert_eq!((header.as_str(), answer["id"].as_str()), ("my-id", Some("cmpl-my-id")));
    let (_, answer) = send("my-id", json!({"prompt": "x", "request_id": "other"})).await;
    assert_eq!(answer["id"], "cmpl-other");
    let (header, answer) = send("not one", body(COMPLETIONS)).await;
    assert_eq!(answer["id"], format!("cmpl-{header}"), "one is made");
    let (header, answer) = send("bad", json!({"prompt": "x", "request_id": 5})).await;
    assert_eq!((header.as_str(), &answer["error"]["param"]), ("bad", &json!("request_id")));
}

#[test]
fn the_documentation_lists_what_is_refused() {
    let document = std::fs::read_to_string(repository().join("docs/api.md")).unwrap();
    let (_, table) = document.split_once("Refused, unless their value asks for nothing").unwrap();
    let listed = |of: &str| -> BTreeSet<&str> {
        let row = table.lines().find_map(|line| line.strip_prefix(&format!("| {of} | "))).unwrap();
        row.split('`').skip(1).step_by(2).collect()
    };
    let all = listed("all");
    let of_texts = listed("all but completions and chat");
    for (endpoint, of) in [
        (Endpoint::Completions, "completions"),
        (Endpoint::Chat, "chat"),
        (Endpoint::Responses, "responses"),
        (Endpoint::Messages, "messages"),
        (Endpoint::Embeddings, "embeddings"),
        (Endpoint::Rerank, "rerank, score"),
        (Endpoint::Score, "rerank, score"),
        (Endpoint::Classify, "classify"),
        (Endpoint::Pooling, "pooling"),
    ] {
        let own = listed(of);
        let refused: BTreeSet<&str> = refused::names(endpoint).into_iter().collect();
        let gives_text = ["completions", "chat"].contains(&of);
        for name in &of_texts {
            assert_eq!(refused.contains(name), !gives_text, "{of} `{name}`");
        }
        let mut missing: Vec<_> = refused.iter().filter(|it| !all.contains(*it)).collect();
        missing.retain(|name| !of_texts.contains(*name));
        // The Responses API refuses some chat fields under their old names, as that row lists.
        let others = listed("chat");
        for name in missing {
            let known = own.contains(name) || (of == "responses" && others.contains(name));
            assert!(known, "docs/api.md does not list `{name}` as refused by {of}");
        }
        for name in own.iter().filter(|it| !it.contains('.')) {
            assert!(refused.contains(name), "docs/api.md says that {of} refuse `{name}`");
        }
    }
}

#[tokio::test]
async fn priorities_are_for_servers_that_follow_them() {
    let priorities = |rig: &Rig| {
        let seen = rig.seen.lock().unwrap();
        seen.requests.iter().map(|request| request.priority).collect::<Vec<_>>()
    };
    let ask = async |rig: &Rig, priority: Value| {
        let body = json!({"prompt": "x", "max_tokens": 1, "priority": priority});
        rig.client.post("/v1/completions", &body).await.unwrap()
    };
    let plain = Rig::saying("x");
    assert_eq!(ask(&plain, json!(0)).await.status, 200);
    let refused = ask(&plain, json!(-1)).await;
    let message = refused.body["error"]["message"].as_str().unwrap();
    assert!(refused.status == 400 && message.contains("--scheduling-policy priority"), "{message}");
    assert_eq!(priorities(&plain), [0]);
    let following = Rig::with_priorities();
    for priority in [json!(-7), json!("3"), json!(i32::MAX), json!(null)] {
        assert_eq!(ask(&following, priority).await.status, 200);
    }
    assert_eq!(priorities(&following), [-7, 3, i32::MAX, 0]);
    for wrong in [json!(1_u64 << 31), json!(0.5), json!([1]), json!("high")] {
        let refused = ask(&following, wrong).await;
        let error = &refused.body["error"];
        assert_eq!((refused.status, &error["param"]), (400, &json!("priority")), "{error}");
    }
}

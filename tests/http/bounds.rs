//! Every bad request quickly gets a 4xx that names the field, and affects no other request.
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use coordinator::http::params::Limits;
use coordinator::text::model::{TextModel, TextOptions};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use shared::metrics::labels::{LabelValue as _, RejectReason};
use shared::model_config::ConfigOverrides;
use testkit::client::Client;
use testkit::models::demo;

use crate::rig::{Rig, Script};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// What is made from a body may be many times its size, whatever the field.
#[tokio::test]
async fn a_body_has_so_many_values() {
    let rig = Rig::saying("x");
    let values = |count: usize| json!({"prompt": "x", "max_tokens": 1, "ignored": vec![0; count]});
    let most = Limits::new(1024).json_values;
    let reply = rig.client.post(COMPLETIONS, &values(most - 9)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let reply = rig.client.post(COMPLETIONS, &values(most + 1)).await.unwrap();
    let message = reply.body["error"]["message"].as_str().unwrap();
    assert_eq!(reply.status, 400);
    assert!(message.contains(&format!("values, the limit is {most}")), "{message}");
}

/// The tokenizer has a token that its model lacks: what is told is the field, the token and the
/// size of the vocabulary, and nothing reaches the engine, whose ranks could not compute it.
#[tokio::test]
async fn a_text_with_a_token_that_the_model_lacks_is_refused() {
    let whole = TextModel::load(&demo()).unwrap();
    let lacks = *whole.encode("Once", false).unwrap().iter().max().unwrap();
    let overrides = ConfigOverrides::parse(&format!("{{\"vocab_size\": {lacks}}}")).unwrap();
    let options = TextOptions { config_overrides: overrides, ..TextOptions::default() };
    let text = TextModel::load_with(&demo(), &options).unwrap();
    let rig = Rig::of(Script { text: "a".to_owned(), ..Script::default() }, text);
    for (path, field, asked) in [
        (COMPLETIONS, "prompt", json!({"prompt": "Once"})),
        (COMPLETIONS, "prompt", json!({"prompt": ["a", "Once"]})),
        (CHAT, "messages", json!({"messages": [{"role": "user", "content": "Once"}]})),
        (
            "/v1/messages",
            "messages",
            json!({"max_tokens": 1, "messages": [{"role": "user", "content": "Once"}]}),
        ),
        ("/v1/responses", "input", json!({"input": "Once"})),
        ("/v1/embeddings", "input", json!({"input": ["a", "Once"]})),
        ("/v1/embeddings", "input", json!({"input": "Once", "truncate_prompt_tokens": 2})),
        ("/tokenize", "prompt", json!({"prompt": "Once"})),
    ] {
        let reply = rig.client.post(path, &asked).await.unwrap();
        assert_eq!(reply.status, 400, "{path}: {}", reply.body);
        let error = &reply.body["error"];
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("token {lacks} (\"Once\")")), "{path}: {message}");
        assert!(message.contains(&format!("has {lacks} tokens")), "{path}: {message}");
        if path != "/v1/messages" {
            assert_eq!(error["param"], field, "{path}");
        }
    }
    assert!(rig.seen.lock().unwrap().requests.is_empty());
    let reply =
        rig.client.post(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 1})).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
}

/// A refusal counts once, under the reason of the bound that was hit, wherever it is checked.
#[tokio::test]
async fn refusals_count_by_the_bound_that_was_hit() {
    let rig = Rig::saying("x");
    let long = "long ".repeat(rig.text.max_positions as usize);
    let body = vec![b' '; Limits::new(1024).body_bytes + 1];
    let mut told = BTreeMap::<&str, f64>::new();
    for (path, text) in [
        (COMPLETIONS, json!({"prompt": long})),
        (CHAT, json!({"messages": [{"role": "user", "content": long}]})),
        ("/v1/embeddings", json!({"input": long})),
        (COMPLETIONS, json!({"prompt": "x", "max_tokens": rig.text.max_positions})),
    ] {
        let reply = rig.client.post(path, &text).await.unwrap();
        let error = &reply.body["error"];
        assert_eq!(error["code"], "context_length_exceeded", "{path}: {error}");
        *told.entry("too_large").or_default() += 1.0;
    }
    for path in [COMPLETIONS, "/tokenize"] {
        assert_eq!(raw(&rig, &post(path, "application/json", &body)).0, 413, "{path}");
        *told.entry("too_large").or_default() += 1.0;
    }
    assert_eq!(rig.client.post("/tokenize", &json!({"prompt": 7})).await.unwrap().status, 400);
    *told.entry("invalid").or_default() += 1.0;
    let scrape = rig.client.scrape().await.unwrap();
    for reason in RejectReason::ALL {
        let found = scrape.sum("tutti_requests_rejected_total", &[("reason", reason.as_str())]);
        assert_eq!(found, told.get(reason.as_str()).copied().unwrap_or(0.0), "{reason:?}");
    }
}

#[tokio::test]
async fn every_field_is_bounded_and_named() {
    let rig = Rig::saying("x");
    let cases = [
        ("temperature", json!(-0.1)),
        ("temperature", json!(100.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_p", json!(1.01)),
        ("top_k", json!(-2)),
        ("top_k", json!(1.5)),
        ("min_p", json!(-1)),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("n", json!(0)),
        ("n", json!(129)),
        ("n", json!(1e30)),
        ("best_of", json!(2)),
        ("seed", json!(1u64 << 63)),
        ("stop", json!("")),
        ("stop", json!(vec!["a"; 65])),
        ("stop", json!("x".repeat(257))),
        ("stop", json!([1])),
        ("stop_token_ids", json!([2048])),
        ("logit_bias", json!({"2048": 1})),
        ("logit_bias", json!({"1": 101})),
        ("logit_bias", json!([1])),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(u64::MAX)),
        ("min_tokens", json!(-1)),
        ("stream", json!("yes")),
        ("stream_options", json!({"include_usage": true})),
        ("user", json!("u".repeat(4097))),
        ("ignore_eos", json!(1)),
        ("model", json!(7)),
    ];
    for (path, prompt) in [
        (COMPLETIONS, ("prompt", json!("x"))),
        (CHAT, ("messages", json!([{"role": "user", "content": "x"}]))),
    ] {
        for (field, value) in &cases {
            let body = json!({prompt.0: prompt.1, (*field): value});
            let reply = rig.client.post(path, &body).await.unwrap();
            assert_eq!(reply.status, 400, "{field} = {value}: {}", reply.body);
            let error = &reply.body["error"];
            assert_eq!(error["param"], *field, "{field} = {value}: {error}");
            assert_eq!(error["type"], "invalid_request_error");
            assert!(error["message"].as_str().unwrap().contains(field), "{error}");
        }
    }
    assert!(rig.seen.lock().unwrap().requests.is_empty(), "nothing of it reached the engine");
}

#[tokio::test]
async fn prompts_and_messages_are_checked() {
    let rig = Rig::saying("x");
    let prompts = [
        json!(null),
        json!([]),
        json!([[]]),
        json!([2048]),
        json!([-1]),
        json!([1.5]),
        json!({}),
        json!(["a", 1]),
        json!(vec!["a"; 513]),
        json!(true),
    ];
    for prompt in prompts {
        let reply = rig.client.post(COMPLETIONS, &json!({"prompt": prompt})).await.unwrap();
        assert_eq!(reply.status, 400, "{prompt}: {}", reply.body);
        assert_eq!(reply.body["error"]["param"], "prompt", "{prompt}");
    }
    // An empty text is only the beginning-of-text token; without special tokens, it is nothing.
    for prompt in [json!(""), json!([""])] {
        let mut body = json!({"prompt": prompt, "max_tokens": 1});
        let reply = rig.client.post(COMPLETIONS, &body).await.unwrap();
        assert_eq!(reply.body["usage"]["prompt_tokens"], 1, "{}", reply.body);
        body["add_special_tokens"] = json!(false);
        let reply = rig.client.post(COMPLETIONS, &body).await.unwrap();
        assert_eq!(reply.body["error"]["param"], "prompt", "{}", reply.body);
    }
    rig.seen.lock().unwrap().requests.clear();
    let long = json!({"prompt": "word ".repeat(3000), "max_tokens": 1});
    let reply = rig.client.post(COMPLETIONS, &long).await.unwrap();
    assert_eq!(reply.body["error"]["code"], "context_length_exceeded", "{}", reply.body);
    // Clients that always request the maximum recognise this error by its code and these words.
    let chat = json!([{"role": "user", "content": "x"}]);
    for (path, field) in
        [(COMPLETIONS, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")]
    {
        let much = json!({"prompt": "x", "messages": chat, (field): 1_000_000});
        let error = &rig.client.post(path, &much).await.unwrap().body["error"];
        assert_eq!(error["code"], "context_length_exceeded", "{path}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("maximum context length is") && message.contains("1000000"));
        let few = json!({"prompt": "x", "messages": chat, (field): 3, "min_tokens": 4});
        let error = &rig.client.post(path, &few).await.unwrap().body["error"];
        assert_eq!(error["param"], "min_tokens", "{path}: {error}");
    }
    for (prompt, words) in [
        (json!([1, 2048]), ["vocabulary of 2048", "not 2048"]),
        (json!([[1], [-7]]), ["from 0 to 2047", "not -7"]),
        (json!(vec!["a"; 513]), ["513 prompts", "the limit is 512"]),
    ] {
        let error = &rig.client.post(COMPLETIONS, &json!({"prompt": prompt})).await.unwrap().body;
        let message = error["error"]["message"].as_str().unwrap();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
    let both = json!({"prompt": "word", "max_tokens": 1024});
    let reply = rig.client.post(COMPLETIONS, &both).await.unwrap();
    assert_eq!((reply.status, reply.body["error"]["param"].as_str()), (400, Some("max_tokens")));
    let messages = [
        json!(null),
        json!([]),
        json!("hi"),
        json!([1]),
        json!([{"role": "user"}]),
        json!([{"role": "p".repeat(65), "content": "x"}]),
        json!([{"role": "user", "content": 5}]),
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
    ];
    for list in messages {
        let reply = rig.client.post(CHAT, &json!({"messages": list})).await.unwrap();
        assert_eq!(reply.status, 400, "{list}: {}", reply.body);
        assert_eq!(reply.body["error"]["param"], "messages", "{list}");
    }
    // Parts that are no text are told by their place and type.
    for (part, told) in [
        (json!({"type": "image_url", "image_url": {"url": "x"}}), "has the type \"image_url\""),
        (json!({"type": "input_audio", "input_audio": {}}), "has the type \"input_audio\""),
        (json!({"type": "file", "file": {"file_id": "x"}}), "has the type \"file\""),
        (json!({"type": "video_url"}), "has the type \"video_url\", which is not supported"),
        (json!({"type": "x".repeat(10_000)}), "xxx\"..., which is not supported: only text is"),
        (json!({"text": "x"}), "has the type none, which is not supported: only text is"),
        (json!(5), "has the type none"),
        (json!({"type": "text", "text": 5}), "must be a string"),
    ] {
        let said = json!({"role": "system", "content": "x"});
        let asked = json!({"role": "user", "content": ["What is", part]});
        let reply = rig.client.post(CHAT, &json!({"messages": [said, asked]})).await.unwrap();
        let error = &reply.body["error"];
        let message = error["message"].as_str().unwrap();
        assert_eq!((reply.status, &error["param"]), (400, &json!("messages")), "{error}");
        assert!(message.contains("`messages[1].content[1]") && message.contains(told), "{message}");
        assert!(message.len() < 300, "{message}");
    }
    let tools =
        json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]});
    assert_eq!(rig.client.post(CHAT, &tools).await.unwrap().body["error"]["param"], "tools");
}

/// Sends raw bytes; returns the status and the complete answer.
pub(crate) fn raw(rig: &Rig, request: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(rig.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    (status, answer)
}

fn post(path: &str, content_type: &str, body: &[u8]) -> Vec<u8> {
    let headers = format!("connection: close\r\ncontent-type: {content_type}");
    post_with(path, "1.1", &headers, body)
}

fn post_with(path: &str, version: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/{version}\r\nhost: x\r\n{headers}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// They know no chunks, whose lengths they would take for a part of the answer.
/// As docs/api.md says; the library's bounds, which an update may move.
#[test]
fn heads_of_requests_are_bounded() {
    let rig = Rig::saying("x");
    let start = "GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    let many = |count: usize| {
        let more: String = (2..count).map(|number| format!("x-{number}: y\r\n")).collect();
        format!("{start}{more}\r\n")
    };
    let large = |bytes: usize| {
        let rest = "x-large: \r\n\r\n";
        let fill = "y".repeat(bytes - start.len() - rest.len());
        format!("{start}{}", rest.replacen(": ", &format!(": {fill}"), 1))
    };
    let long = |bytes: usize| {
        let path = "y".repeat(bytes - 1);
        format!("GET /{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    };
    for (request, wanted) in [
        (many(96), 200),
        (many(97), 431),
        (large(131_072), 200),
        (large(131_073), 431),
        (long(65_534), 404),
        (long(65_535), 400),
    ] {
        let (status, answer) = raw(&rig, request.as_bytes());
        assert_eq!(status, wanted, "{}", &answer[..answer.len().min(200)]);
        let has_body = !answer.ends_with("\r\n\r\n");
        assert_eq!(has_body, wanted == 404, "{}", &answer[..answer.len().min(200)]);
    }
}

#[test]
fn clients_of_http_1_0_get_streams_without_chunks_that_end_with_the_connection() {
    let rig = Rig::saying("a b c d");
    let prompt = json!({"prompt": "x", "max_tokens": 3, "stream": true}).to_string();
    let input = json!({"input": ["a", "b"]}).to_string();
    for (path, body, begin, end) in [
        (COMPLETIONS, prompt, "data: {", "data: [DONE]\n\n"),
        ("/v1/embeddings", input, "{\"id\"", "}"),
    ] {
        for (version, connection) in [("1.0", "close"), ("1.0", "keep-alive"), ("1.1", "close")] {
            let headers = format!("connection: {connection}\r\ncontent-type: application/json");
            let began = Instant::now();
            let request = post_with(path, version, &headers, body.as_bytes());
            let (status, answer) = raw(&rig, &request);
            let (head, text) = answer.split_once("\r\n\r\n").unwrap();
            let head = head.to_lowercase();
            assert_eq!(status, 200, "{answer}");
            let has_chunks = head.contains("transfer-encoding: chunked");
            assert_eq!(has_chunks, version == "1.1", "{connection}: {answer}");
            let is_whole = text.starts_with(begin) && text.ends_with(end);
            assert_eq!(is_whole, version == "1.0", "{connection}: {answer}");
            assert!(!head.contains("keep-alive"), "{answer}");
            assert!(began.elapsed() < Duration::from_secs(10), "the connection stays open");
        }
    }
    // What has a length needs no end of the connection.
    let headers = "connection: keep-alive\r\ncontent-type: application/json";
    let mut stream = TcpStream::connect(rig.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    for _ in 0..2 {
        stream.write_all(&post_with("/tokenize", "1.0", headers, b"{\"prompt\": \"x\"}")).unwrap();
        let mut answer = [0; 15];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.0 200 OK");
        let mut rest = Vec::new();
        while !rest.ends_with(b"}") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            rest.extend(byte);
        }
    }
}

#[test]
fn bodies_that_are_no_json_object_of_bounded_size() {
    let rig = Rig::saying("x");
    let cases: [(&[u8], u16); 9] = [
        (b"", 400),
        (b"nonsense", 400),
        (b"[1]", 400),
        (b"{\"prompt\": \"\xff\xfe\"}", 400),
        (b"{\"prompt\": \"x\", \"temperature\": NaN}", 400),
        (b"{\"prompt\": \"x\", \"temperature\": 1e400}", 400),
        (b"{\"prompt\": \"x\", \"temperature\": Infinity}", 400),
        (&[b'['; 100_000], 400),
        (&vec![b' '; (16 << 20) + 1], 413),
    ];
    for (body, expected) in cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(40)]);
        let (status, answer) = raw(&rig, &post(COMPLETIONS, "application/json", body));
        assert_eq!(status, expected, "{shown}: {answer}");
        assert!(answer.contains("\"error\""), "{shown}: {answer}");
    }
    for (headers, words) in [
        ("connection: close", "Content-Type is missing; it must be `application/json`"),
        ("connection: close\r\ncontent-type: ", "Content-Type is empty; it must be"),
        ("connection: close\r\ncontent-type: text/plain", "Content-Type is `text/plain`, but must"),
    ] {
        let (status, answer) = raw(&rig, &post_with(COMPLETIONS, "1.1", headers, b"{}"));
        assert!(status == 415 && answer.contains(words), "{headers}: {answer}");
    }
    let (_, answer) = raw(&rig, &post(COMPLETIONS, "application/json", b"{\"a\": 1,\n\"b\"}"));
    assert!(answer.contains("not valid JSON: expected `:` at line 2 column 4"), "{answer}");
    // Many prompts, none too long; together they have more bytes than a single prompt may have.
    let many = json!({"prompt": vec![vec![300; 600]; 500], "max_tokens": 1}).to_string();
    assert!(many.len() > 1 << 20);
    let (status, answer) = raw(&rig, &post(COMPLETIONS, "application/json", many.as_bytes()));
    assert_eq!(status, 200, "{}", &answer[..answer.len().min(400)]);
    let (status, _) = raw(&rig, &post(COMPLETIONS, "text/plain", b"{\"prompt\": \"x\"}"));
    assert_eq!(status, 415);
    let (status, _) =
        raw(&rig, &post(COMPLETIONS, "application/json; charset=utf-8", b"{\"prompt\": \"x\"}"));
    assert_eq!(status, 200);
    let (status, answer) =
        raw(&rig, b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    assert_eq!(status, 405);
    assert!(answer.to_lowercase().contains("allow: post"), "{answer}");
    let (status, answer) =
        raw(&rig, b"GET /v2/nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    assert_eq!(status, 404);
    assert!(answer.contains("Unknown request URL: GET /v2/nothing"), "{answer}");
    // Of what is long, the beginning is repeated.
    let path = format!("/v2/{}", "x".repeat(20_000));
    let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let (status, answer) = raw(&rig, head.as_bytes());
    assert_eq!(status, 404);
    assert!(answer.contains("/v2/xxx") && answer.len() < 2000, "{} bytes", answer.len());
    let unknown = json!({"model": "x".repeat(1000), "prompt": "x"}).to_string();
    let (status, answer) = raw(&rig, &post(COMPLETIONS, "application/json", unknown.as_bytes()));
    assert_eq!(status, 404);
    assert!(answer.contains("`xxx") && answer.contains("xxx...`"), "{answer}");
}

#[test]
fn a_body_that_never_comes_ends_in_bounded_time() {
    let rig = Rig::saying("x");
    let began = Instant::now();
    let head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
        content-type: application/json\r\ncontent-length: 50\r\n\r\n{";
    let (status, answer) = raw(&rig, head);
    assert_eq!(status, 408, "{answer}");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

/// Arbitrary JSON, mostly with known fields.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        Just(json!("demo")),
        Just(json!(1)),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        let key = prop_oneof![
            Just("role".to_owned()),
            Just("content".to_owned()),
            Just("type".to_owned()),
            "[a-z]{0,6}",
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

#[test]
fn no_json_gives_a_5xx_or_hangs() {
    const FIELDS: [&str; 20] = [
        "bad_words",
        "prompt",
        "messages",
        "max_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "echo",
        "seed",
        "temperature",
        "top_p",
        "min_tokens",
        "user",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
    ];
    let rig = Rig::saying("x");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let body = prop::collection::vec((prop::sample::select(FIELDS.to_vec()), any_json()), 0..6);
    let mut runner = TestRunner::new(Config { cases: 400, ..Config::default() });
    runner
        .run(&(body, any::<bool>()), |(fields, chat)| {
            let mut map = json!({"prompt": "x", "messages": [{"role": "user", "content": "x"}]});
            for (field, value) in fields {
                map[field] = value;
            }
            let path = if chat { CHAT } else { COMPLETIONS };
            // A stream is no JSON, which the other client compares with the API's description.
            let plain: &Client = &rig.client;
            let reply = match map["stream"] {
                Value::Bool(true) => runtime.block_on(plain.post(path, &map)),
                _ => runtime.block_on(rig.client.post(path, &map)),
            };
            let reply = reply.unwrap();
            prop_assert!(reply.status < 500, "{}: {} {}", map, reply.status, reply.body);
            Ok(())
        })
        .unwrap();
}

#[tokio::test]
async fn what_every_choice_keeps_of_a_prompt_is_bounded() {
    let rig = Rig::saying("x");
    let prompt = vec![300; 500];
    let ask = |n: u32, logprobs: u32| json!({"prompt": prompt, "n": n, "logprobs": logprobs, "echo": true, "max_tokens": 1});
    // 500 tokens in 128 choices, each with 20 alternatives besides its own token.
    let refused = rig.client.post("/v1/completions", &ask(128, 20)).await.unwrap();
    assert_eq!((refused.status, &refused.body["error"]["param"]), (400, &json!("logprobs")));
    let message = refused.body["error"]["message"].as_str().unwrap();
    assert!(message.contains("1344000") && message.contains("1048576"), "{message}");
    for (n, logprobs) in [(1, 20), (64, 1)] {
        let reply = rig.client.post("/v1/completions", &ask(n, logprobs)).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    // So is what it keeps of its output, unless that is told as it comes: 1,000 tokens in each of
    // 256 choices.
    let mut much = json!({"prompt": [[300], [300]], "n": 128, "logprobs": 20, "max_tokens": 1000});
    let refused = rig.client.post("/v1/completions", &much).await.unwrap();
    assert_eq!((refused.status, &refused.body["error"]["param"]), (400, &json!("logprobs")));
    let message = refused.body["error"]["message"].as_str().unwrap();
    assert!(message.contains("5376000") && message.contains("4194304"), "{message}");
    much["stream"] = json!(true);
    assert_eq!(rig.client.open("/v1/completions", &much).await.unwrap().status(), 200);
    let limits = Limits::new(131_072);
    assert!(limits.check_output_alternatives("top_logprobs", 1 << 20, Some(3)).is_ok());
    assert!(limits.check_output_alternatives("top_logprobs", 4 << 20, None).is_ok());
    assert!(limits.check_output_alternatives("top_logprobs", 1 << 20, Some(4)).is_err());
    assert!(limits.check_prompts(8 * 131_072).is_ok());
    let error = limits.check_prompts(8 * 131_072 + 1).unwrap_err();
    assert!(error.to_string().contains("1048577"), "{error}");
}

//! Server-Sent Events, stop strings, failures, disconnects.
use std::time::{Duration, Instant};

use coordinator::engine::{EngineError, EngineEvent, EventSender, FinishReason, TAKEN_WITHIN};
use serde_json::{Value, json};
use testkit::scrape::Scrape;
use testkit::wait::{PATIENCE, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::rig::{Rig, Script};

const TEXT: &str = "Caf\u{e9} \u{1f98a} said \"good night\" and left. The end.";

fn texts(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
}

#[tokio::test]
async fn a_completion_stream_gives_the_same_text_in_whole_characters() {
    let rig = Rig::saying(TEXT);
    let body = json!({"prompt": "x", "max_tokens": 200, "stream": true, "stream_options": {"include_usage": true}});
    let streamed = rig.client.stream("/v1/completions", &body).await.unwrap();
    assert!(streamed.done);
    assert_eq!(texts(&streamed.events), TEXT);
    let (usage, pieces) = streamed.events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    let tokens = rig.text.encode(TEXT, false).unwrap().len();
    assert_eq!(usage["usage"]["completion_tokens"], tokens);
    let (id, created) = (&streamed.events[0]["id"], &streamed.events[0]["created"]);
    assert!(created.as_u64().is_some_and(|seconds| seconds > 1_700_000_000), "{created}");
    for event in &streamed.events {
        // As in OpenAI's API: the time when the request was accepted, the same in all events.
        assert_eq!((&event["id"], &event["created"]), (id, created));
    }
    for event in pieces {
        assert_eq!(event["usage"], Value::Null);
        assert!(!event["choices"][0]["text"].as_str().unwrap().contains('\u{fffd}'));
    }
    let reasons: Vec<&Value> =
        pieces.iter().map(|event| &event["choices"][0]["finish_reason"]).collect();
    assert_eq!(reasons.last().unwrap().as_str(), Some("length"));
    assert!(reasons[..reasons.len() - 1].iter().all(|reason| reason.is_null()));
}

#[tokio::test]
async fn a_chat_stream_begins_with_the_role_and_ends_with_the_reason() {
    let rig = Rig::saying(TEXT);
    let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": true});
    let streamed = rig.client.stream("/v1/chat/completions", &body).await.unwrap();
    assert!(streamed.done);
    let first = &streamed.events[0]["choices"][0];
    assert_eq!(first["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(streamed.events[0]["object"], "chat.completion.chunk");
    assert!(streamed.events[0].get("usage").is_none(), "no usage unless asked for");
    let content: String = streamed
        .events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(content, TEXT);
    let last = &streamed.events.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"].as_str(), Some("length"));
}

/// Tools that measure inter-token latency would count a separate event as one more token.
#[tokio::test]
async fn the_end_comes_with_the_last_token() {
    let rig = Rig::saying("a b c");
    for (path, prompt) in [
        ("/v1/completions", ("prompt", json!("x"))),
        ("/v1/chat/completions", ("messages", json!([{"role": "user", "content": "x"}]))),
    ] {
        let mut body = json!({"max_tokens": 20, "stream": true, "logprobs": true});
        body[prompt.0] = prompt.1;
        if path == "/v1/completions" {
            body["logprobs"] = json!(1);
        }
        let mut together = 0;
        // Only if both are ready: the reader may be faster than the engine.
        for _ in 0..20 {
            let events = rig.client.stream(path, &body).await.unwrap().events;
            let last = &events.last().unwrap()["choices"][0];
            assert_eq!(last["finish_reason"], "length");
            let text = last["text"].as_str().or(last["delta"]["content"].as_str());
            let texts: String = events
                .iter()
                .map(|event| &event["choices"][0])
                .filter_map(|it| it["text"].as_str().or(it["delta"]["content"].as_str()))
                .collect();
            assert_eq!(texts, "a b c");
            together += usize::from(text == Some(" c") && !last["logprobs"].is_null());
        }
        assert!(together > 0, "{path}");
    }
}

/// guidellm always requests this.
#[tokio::test]
async fn every_event_says_what_was_used_so_far_where_that_is_wanted() {
    let rig = Rig::saying(TEXT);
    let tokens = rig.text.encode(TEXT, false).unwrap().len() as u64;
    for (path, prompt) in [
        ("/v1/completions", ("prompt", json!("x"))),
        ("/v1/chat/completions", ("messages", json!([{"role": "user", "content": "x"}]))),
    ] {
        let options = json!({"include_usage": true, "continuous_usage_stats": true});
        let mut body =
            json!({"max_tokens": 200, "stream": true, "n": 2, "stream_options": options});
        body[prompt.0] = prompt.1;
        let events = rig.client.stream(path, &body).await.unwrap().events;
        let (last, pieces) = events.split_last().unwrap();
        assert_eq!(
            (&last["choices"], &last["usage"]["completion_tokens"]),
            (&json!([]), &json!(2 * tokens))
        );
        let mut before = 0;
        for event in pieces {
            let used = |name: &str| event["usage"][name].as_u64().unwrap();
            assert_eq!(used("prompt_tokens"), last["usage"]["prompt_tokens"].as_u64().unwrap());
            let completion = used("completion_tokens");
            assert!(completion >= before && completion <= 2 * tokens, "{event}");
            assert_eq!(used("total_tokens"), used("prompt_tokens") + completion);
            before = completion;
        }
        assert_eq!(before, 2 * tokens);
        if path == "/v1/chat/completions" {
            assert_eq!(pieces[0]["usage"]["completion_tokens"], 0, "nothing was said yet");
        }
        // As in vLLM, this does nothing without `include_usage`.
        body["stream_options"] = json!({"continuous_usage_stats": true});
        let events = rig.client.stream(path, &body).await.unwrap().events;
        assert!(events.iter().all(|event| event.get("usage").is_none()));
    }
}

/// Reads a stream as `vllm bench serve` does: strips each read, then takes events that end with an
/// empty line, and the rest as soon as it is JSON.
#[derive(Default)]
struct StrippingReader {
    buffer: String,
    messages: Vec<String>,
}

impl StrippingReader {
    fn read(&mut self, bytes: &[u8]) {
        let Some(chunk) =
            std::str::from_utf8(bytes).ok().map(str::trim).filter(|it| !it.is_empty())
        else {
            return;
        };
        self.buffer.push_str(chunk);
        while let Some((message, rest)) = self.buffer.split_once("\n\n") {
            let (message, rest) = (message.trim().to_owned(), rest.to_owned());
            self.messages.extend(Some(message).filter(|it| !it.is_empty()));
            self.buffer = rest;
        }
        let Some(content) = self.buffer.strip_prefix("data: ").map(str::trim) else { return };
        if content == "[DONE]" || serde_json::from_str::<Value>(content).is_ok() {
            self.messages.push(std::mem::take(&mut self.buffer).trim().to_owned());
        }
    }
}

/// What the server sends during silence is to no client part of an event, or one of its own.
#[tokio::test]
async fn a_stream_that_is_silent_for_a_while_is_read_by_those_who_strip_what_they_read() {
    let rig = Rig::new(Script { text: "a b".to_owned(), hang: true, ..Script::default() });
    let body = json!({"prompt": "x", "max_tokens": 2, "stream": true}).to_string();
    let url = format!("http://{}/v1/completions", rig.address);
    let request = reqwest::Client::new().post(url).header("content-type", "application/json");
    let mut response = request.body(body).send().await.unwrap();
    let (mut reader, mut all) = (StrippingReader::default(), Vec::new());
    let mut is_told = false;
    while let Some(read) = response.chunk().await.unwrap() {
        reader.read(&read);
        all.extend_from_slice(&read);
        // The first token, then the filler after it.
        if !is_told && all.ends_with(b"\n\n \n") {
            is_told = true;
            let events = rig.seen.lock().unwrap().events[0].clone();
            events.send(EngineEvent::Token { choice: 0, token: 300, logprobs: None }).unwrap();
            let end = EngineEvent::Finished { choice: 0, reason: FinishReason::Length, cached: 0 };
            events.send(end).unwrap();
        }
    }
    assert!(is_told, "{}", String::from_utf8_lossy(&all));
    let (done, events) = reader.messages.split_last().unwrap();
    assert_eq!((done.as_str(), reader.buffer.as_str()), ("data: [DONE]", ""));
    assert!(events.len() >= 2, "{events:?}");
    for event in events {
        let json = event.strip_prefix("data: ").unwrap_or_else(|| panic!("{event}"));
        assert!(serde_json::from_str::<Value>(json).is_ok(), "{event}");
    }
}

#[tokio::test]
async fn stop_strings_over_token_boundaries_are_never_leaked() {
    let rig = Rig::saying(TEXT);
    for stop in [json!("night\" and"), json!(["nothing", "d nigh"]), json!("\u{1f98a} s")] {
        let first = stop.as_str().unwrap_or_else(|| stop[1].as_str().unwrap());
        let expected = &TEXT[..TEXT.find(first).unwrap()];
        let mut body = json!({"prompt": "x", "max_tokens": 200, "stop": stop});
        let reply = rig.client.post("/v1/completions", &body).await.unwrap().body;
        assert_eq!(reply["choices"][0]["text"], expected);
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
        body["stream"] = json!(true);
        let streamed = rig.client.stream("/v1/completions", &body).await.unwrap();
        assert_eq!(texts(&streamed.events), expected);
    }
}

#[tokio::test]
async fn what_a_request_named_and_ended_a_choice_is_said() {
    let rig = Rig::saying("Bye.<|end|>never seen");
    let token = |text: &str| *rig.text.encode(text, false).unwrap().last().unwrap();
    let (dot, end) = (token("Bye."), token("<|end|>"));
    assert!(rig.text.end_tokens.contains(&end));
    let cases = [
        // The model's own end token, also if the request names it; a bound.
        (json!({}), Value::Null),
        (json!({"stop": "absent", "stop_token_ids": [end]}), Value::Null),
        (json!({"max_tokens": 1}), Value::Null),
        (json!({"stop": ["nothing", "ye"]}), json!("ye")),
        (json!({"stop": ["nothing", "."], "include_stop_str_in_output": true}), json!(".")),
        (json!({"stop_token_ids": [0, dot]}), json!(dot)),
        (json!({"stop_token_ids": [end], "ignore_eos": true}), json!(end)),
    ];
    for (asked, expected) in cases {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let mut body = json!({"max_tokens": 100, "n": 2});
            match path {
                "/v1/completions" => body["prompt"] = json!("x"),
                _ => body["messages"] = json!([{"role": "user", "content": "x"}]),
            }
            for (field, value) in asked.as_object().unwrap() {
                body[field] = value.clone();
            }
            let reply = rig.client.post(path, &body).await.unwrap().body;
            for choice in reply["choices"].as_array().unwrap() {
                assert_eq!(choice.get("stop_reason"), Some(&expected), "{asked}: {reply}");
            }
            body["stream"] = json!(true);
            let streamed = rig.client.stream(path, &body).await.unwrap();
            for index in 0..2 {
                let of_choice = streamed.events.iter().map(|event| &event["choices"][0]);
                let of_choice = of_choice.filter(|choice| choice["index"] == index);
                let reasons: Vec<&Value> =
                    of_choice.map(|choice| choice.get("stop_reason").unwrap()).collect();
                let (last, before) = reasons.split_last().unwrap();
                assert_eq!(*last, &expected, "{asked}");
                assert!(before.iter().all(|reason| reason.is_null()), "{asked}");
            }
        }
    }
}

#[tokio::test]
async fn refusals_have_their_status_and_a_retry_after() {
    let rig = Rig::new(Script::default());
    let full = EngineError::QueueFull { queued: 5, max: 5, retry_after_s: 3 };
    let unavailable = EngineError::Unavailable { message: "no workers".to_owned() };
    let large = EngineError::TooLarge { needed: 9, available: 4 };
    let cases = [
        (full, 429),
        (unavailable, 503),
        (large, 400),
        (EngineError::ShuttingDown, 503),
        (EngineError::Corrupted, 500),
    ];
    for (error, status) in cases {
        rig.script(|script| script.refuse = Some(error.clone()));
        for stream in [true, false] {
            let body = json!({"prompt": "x", "stream": stream});
            let reply = rig.client.post("/v1/completions", &body).await.unwrap();
            assert_eq!(reply.status, status, "{error}, stream = {stream}");
        }
        let response = rig.client.open("/v1/completions", &json!({"prompt": "x"})).await.unwrap();
        let retry = response.headers().get("retry-after").map(|v| v.to_str().unwrap().to_owned());
        assert_eq!(retry.is_some(), [429, 503].contains(&status), "{error}");
        let body: Value = response.json().await.unwrap();
        assert!(body["error"]["message"].is_string());
    }
}

#[tokio::test]
async fn what_the_engine_refuses_names_the_field_at_fault() {
    let rig = Rig::new(Script::default());
    let turn = json!([{"role": "user", "content": "x"}]);
    let (chat, form) = ("/v1/chat/completions", json!({"type": "json_object"}));
    let large = EngineError::TooLarge { needed: 9, available: 4 };
    let dear = EngineError::Guide { message: "too ambiguous".to_owned() };
    for (error, path, body, param) in [
        (&large, "/v1/completions", json!({"prompt": "x"}), "prompt"),
        (&large, "/v1/completions", json!({"prompt": "x", "max_tokens": 5}), "max_tokens"),
        (&large, chat, json!({"messages": turn}), "messages"),
        (&large, chat, json!({"messages": turn, "max_tokens": 5}), "max_tokens"),
        (
            &large,
            chat,
            json!({"messages": turn, "max_completion_tokens": 5}),
            "max_completion_tokens",
        ),
        (&large, "/v1/responses", json!({"input": "x", "max_output_tokens": 5}), "input"),
        (&large, "/v1/embeddings", json!({"input": "x"}), "input"),
        (
            &dear,
            "/v1/completions",
            json!({"prompt": "x", "response_format": form}),
            "response_format",
        ),
        (&dear, chat, json!({"messages": turn, "response_format": form}), "response_format"),
        (&dear, "/v1/responses", json!({"input": "x", "text": {"format": form}}), "text.format"),
    ] {
        rig.script(|script| script.refuse = Some(error.clone()));
        let reply = rig.client.post(path, &body).await.unwrap();
        let told = &reply.body["error"];
        assert_eq!((reply.status, &told["param"]), (400, &json!(param)), "{path} {body}: {told}");
        let message = told["message"].as_str().unwrap();
        let is_named = message.contains(&format!("`{param}`"));
        assert!(is_named || param.contains("format"), "{path} {body}: {message}");
    }
}

#[tokio::test]
async fn a_failure_in_the_middle_ends_the_stream_without_done() {
    let rig = Rig::new(Script { text: TEXT.to_owned(), fail_after: Some(3), ..Script::default() });
    for (path, prompt) in [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")] {
        let mut body = json!({"stream": true, "max_tokens": 50});
        body[prompt] =
            if prompt == "prompt" { json!("x") } else { json!([{"role": "user", "content": "x"}]) };
        let streamed = rig.client.stream(path, &body).await.unwrap();
        assert!(!streamed.done, "{path}");
        let last = streamed.events.last().unwrap();
        assert_eq!(last["error"]["type"], "server_error", "{path}: {last}");
        body["stream"] = json!(false);
        assert_eq!(rig.client.post(path, &body).await.unwrap().status, 500);
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_streaming_or_not() {
    for stream in [true, false] {
        let rig = Rig::new(Script { text: TEXT.to_owned(), hang: true, ..Script::default() });
        let client = rig.client.clone();
        let body = json!({"prompt": "x", "max_tokens": 50, "stream": stream});
        let task = tokio::spawn(async move { client.open("/v1/completions", &body).await });
        let begun = async || (!rig.seen.lock().unwrap().requests.is_empty()).then_some(());
        until("the request is with the engine", begun).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        task.abort();
        drop(task.await);
        assert!(rig.cancelled().await, "stream = {stream}");
    }
}

#[tokio::test]
async fn prompts_of_one_request_share_a_stream_each_whole() {
    let rig = Rig::saying(TEXT);
    let prompts = ["a", "b", "c", "d", "e"];
    let body = json!({"prompt": prompts, "n": 2, "max_tokens": 200, "stream": true});
    let streamed = rig.client.stream("/v1/completions", &body).await.unwrap();
    assert!(streamed.done);
    for index in 0..2 * prompts.len() {
        let own = streamed.events.iter().map(|event| &event["choices"][0]);
        let own: Vec<&Value> = own.filter(|choice| choice["index"] == index).collect();
        let text: String = own.iter().filter_map(|choice| choice["text"].as_str()).collect();
        assert_eq!(text, TEXT, "choice {index}");
        assert_eq!(own.last().unwrap()["finish_reason"], "length");
    }
}

/// The sum of the page's series with these labels.
async fn sum(rig: &Rig, name: &str, labels: &[(&str, &str)]) -> f64 {
    let page = rig.client.get("/metrics").await.unwrap().body;
    Scrape::parse(page.as_str().unwrap()).unwrap().sum(name, labels)
}

/// Number of completion requests counted with this status.
async fn counted(rig: &Rig, status: &str) -> f64 {
    let labels = [("route", "/v1/completions"), ("status", status)];
    sum(rig, "tutti_http_requests_total", &labels).await
}

/// Waits until only the scrape itself is being answered.
async fn idle(rig: &Rig) {
    let is_idle =
        async || (sum(rig, "tutti_http_requests_in_flight", &[]).await <= 1.0).then_some(());
    until("no other request is being answered", is_idle).await;
}

#[tokio::test]
async fn a_stream_is_being_answered_until_its_last_event() {
    let rig = Rig::new(Script { text: TEXT.to_owned(), hang: true, ..Script::default() });
    let body = json!({"prompt": "x", "max_tokens": 50, "stream": true});
    let mut response = rig.client.open("/v1/completions", &body).await.unwrap();
    assert!(response.chunk().await.unwrap().is_some(), "the first event is here");
    assert_eq!(sum(&rig, "tutti_http_requests_in_flight", &[]).await, 2.0);
    assert_eq!(counted(&rig, "200").await, 0.0);
    drop(response);
    assert!(rig.cancelled().await);
    idle(&rig).await;
    assert_eq!((counted(&rig, "499").await, counted(&rig, "200").await), (1.0, 0.0));
    rig.script(|script| script.hang = false);
    assert!(rig.client.stream("/v1/completions", &body).await.unwrap().done);
    let reply = rig.client.post("/v1/completions", &json!({"prompt": "x"})).await.unwrap();
    assert_eq!(reply.status, 200);
    idle(&rig).await;
    assert_eq!((counted(&rig, "499").await, counted(&rig, "200").await), (1.0, 2.0));
}

#[tokio::test]
async fn a_refused_request_is_counted_once_by_who_refuses_it() {
    let rig = Rig::saying(TEXT);
    let bad = rig.client.post("/v1/completions", &json!({"prompt": []})).await.unwrap();
    assert_eq!(bad.status, 400);
    let refuse = EngineError::TooLarge { needed: 9, available: 4 };
    rig.script(|script| script.refuse = Some(refuse));
    let large = rig.client.post("/v1/completions", &json!({"prompt": "x"})).await.unwrap();
    assert_eq!(large.status, 400);
    let rejected = "tutti_requests_rejected_total";
    let invalid = sum(&rig, rejected, &[("reason", "invalid")]).await;
    assert_eq!(invalid, 1.0);
    // Counted by the frontend: an engine does not know which client will retry.
    let full = EngineError::QueueFull { queued: 1, max: 1, retry_after_s: 1 };
    rig.script(|script| script.refuse = Some(full));
    for stream in [false, true] {
        let body = json!({"prompt": "x", "stream": stream});
        assert_eq!(rig.client.post("/v1/completions", &body).await.unwrap().status, 429);
    }
    assert_eq!(sum(&rig, rejected, &[("reason", "queue_full")]).await, 2.0);
}

/// A client that requests long text in many choices. Its receive buffer is small; otherwise the OS
/// would buffer megabytes.
async fn long_stream(rig: &Rig) -> TcpStream {
    // The server applies its socket options to connections that come later.
    assert_eq!(rig.client.get("/live").await.unwrap().status, 200);
    let body = json!({
        "prompt": "x", "max_tokens": 800, "n": 64, "stream": true, "logprobs": 1,
    });
    let body = body.to_string();
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(64 << 10).unwrap();
    let mut stream = socket.connect(rig.address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream
}

fn long_text() -> String {
    "good night and left. ".repeat(200)
}

/// The engine needs this to tell a client that has stopped reading from one that reads slowly.
#[tokio::test]
async fn what_a_client_does_not_read_waits_with_its_request_and_bit_by_bit_it_is_taken() {
    let rig = Rig::saying(&long_text());
    let mut client = long_stream(&rig).await;
    let waiting = || rig.seen.lock().unwrap().events.first().map_or(0, EventSender::waiting);
    // The buffers are full when nothing changes for a while.
    let (mut last, mut same) = (usize::MAX, 0);
    let began = Instant::now();
    while same < 10 {
        assert!(began.elapsed() < PATIENCE, "the buffers never fill: {last} events wait");
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = waiting();
        same = if now == last && now > 0 { same + 1 } else { 0 };
        last = now;
    }
    assert!(last > 20_000, "{last} of some 50,000 events wait");
    // The server sends more as the client reads, even though buffers lie between.
    let mut buffer = vec![0; 16 << 10];
    for _ in 0..10 {
        let (before, mut read) = (waiting(), 0);
        while waiting() == before {
            assert!(read <= 512 << 10, "{read} bytes were read and no event was taken");
            read += client.read(&mut buffer).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_is_given_up_and_one_that_reads_slowly_is_not() {
    let rig = Rig::saying(&long_text());
    let mut slow = long_stream(&rig).await;
    let _stopped = long_stream(&rig).await;
    let (began, mut buffer) = (Instant::now(), vec![0; 16 << 10]);
    while rig.seen.lock().unwrap().cancelled == 0 {
        assert!(began.elapsed() < 3 * TAKEN_WITHIN, "it is waited for");
        assert!(slow.read(&mut buffer).await.is_ok_and(|count| count > 0), "it reads");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(began.elapsed() >= TAKEN_WITHIN / 2, "within {:?}", began.elapsed());
    assert!(slow.read(&mut buffer).await.is_ok_and(|count| count > 0), "it goes on");
    assert_eq!(rig.seen.lock().unwrap().cancelled, 1);
}

//! Completions and chat against golden values, streaming, concurrency, disconnects.
use std::time::Duration;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::models::{demo, goldens};
use testkit::scrape::Scrape;

use crate::{STORY, greedy, text, text_goldens, up};

/// Greedy text without special tokens, as the server returns it.
fn visible(golden: &str) -> String {
    let mut text = golden.to_owned();
    for special in
        ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    {
        text = text.replace(special, "");
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completions_equal_the_goldens_at_tp_1_and_2() {
    for degree in ["1", "2"] {
        let cluster = up(&["--workers", degree, "--tensor-parallel", degree]).await;
        let client = cluster.client().unwrap();
        for golden in text_goldens() {
            let mut body = greedy(golden.prompt_ids.clone(), 32);
            body["ignore_eos"] = json!(true);
            let reply = client.post("/v1/completions", &body).await.unwrap();
            assert_eq!(reply.status, 200, "{}: {}", golden.name, reply.body);
            assert_eq!(
                text(&reply.body),
                visible(&golden.greedy_text),
                "{} at tp {degree}",
                golden.name
            );
            let usage = &reply.body["usage"];
            assert_eq!(usage["prompt_tokens"], golden.prompt_ids.len());
            assert_eq!(usage["completion_tokens"], 32);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_and_prompts_logprobs_equal_the_goldens_and_have_their_ranks() {
    const ALTERNATIVES: usize = 20;
    // As the goldens were computed.
    let exact = ["--workers", "2", "--tensor-parallel", "2", "--dtype", "float32"];
    let cluster = up(&exact).await;
    let client = cluster.client().unwrap();
    let mut far = 0;
    for golden in text_goldens() {
        let mut body = greedy(golden.prompt_ids.clone(), 32);
        for (field, value) in [("ignore_eos", json!(true)), ("return_token_ids", json!(true))] {
            body[field] = value;
        }
        body["prompt_logprobs"] = json!(ALTERNATIVES);
        let reply = client.post("/v1/completions", &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}: {}", golden.name, reply.body);
        let choice = &reply.body["choices"][0];
        assert_eq!(choice["token_ids"], json!(golden.greedy_ids), "{}", golden.name);
        assert_eq!(choice["prompt_token_ids"], json!(golden.prompt_ids), "{}", golden.name);
        let entries = choice["prompt_logprobs"].as_array().unwrap();
        assert_eq!((entries.len(), &entries[0]), (golden.prompt_ids.len(), &Value::Null));
        let tokens = golden.prompt_ids.iter().zip(&golden.prompt_logprobs);
        for (entry, (id, expected)) in entries.iter().zip(tokens).skip(1) {
            let logprob = |entry: &Value| entry["logprob"].as_f64().unwrap();
            let own = &entry[id.to_string()];
            let error = (logprob(own) - expected.unwrap()).abs();
            assert!(error < 1e-3, "{}: {entry}, not {expected:?}", golden.name);
            // Ranks are the order of the log-probabilities.
            let mut order: Vec<(f64, u64, u32)> = entry
                .as_object()
                .unwrap()
                .iter()
                .map(|(id, it)| (-logprob(it), it["rank"].as_u64().unwrap(), id.parse().unwrap()))
                .collect();
            order.sort_by(|a, b| a.partial_cmp(b).unwrap());
            let ranks: Vec<u64> = order.iter().map(|it| it.1).collect();
            let most = ALTERNATIVES as u64;
            assert_eq!(ranks[..ALTERNATIVES], (1..=most).collect::<Vec<_>>(), "{entry}");
            if let Some(rank) = ranks.get(ALTERNATIVES) {
                assert_eq!((order[ALTERNATIVES].2, *rank > most), (*id, true), "{entry}");
                far += 1;
            }
        }
    }
    assert!(far > 0, "some tokens are not among the likely ones");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_equals_the_goldens_and_stops_at_end_tokens() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let mut stopped = 0;
    for golden in goldens(&demo()).iter().filter(|golden| golden.messages.is_some()) {
        let body = json!({"model": "demo", "messages": golden.messages, "max_tokens": 32, "temperature": 0});
        let reply = client.post("/v1/chat/completions", &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}: {}", golden.name, reply.body);
        let choice = &reply.body["choices"][0];
        let content = choice["message"]["content"].as_str().unwrap();
        let full = visible(&golden.greedy_text);
        assert!(full.starts_with(content), "{}: {content:?} of {full:?}", golden.name);
        assert_eq!(reply.body["usage"]["prompt_tokens"], golden.prompt_ids.len());
        match golden.greedy_stop_index {
            Some(index) => {
                stopped += 1;
                assert_eq!(choice["finish_reason"], "stop", "{}", golden.name);
                assert_eq!(reply.body["usage"]["completion_tokens"], index + 1);
            }
            None => assert_eq!(choice["finish_reason"], "length", "{}", golden.name),
        }
    }
    assert!(stopped >= 3, "the goldens must cover end tokens");
}

async fn streamed_text(client: &Client, body: &Value) -> (String, Value) {
    let mut body = body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let streamed = client.stream("/v1/completions", &body).await.unwrap();
    assert!(streamed.done, "a complete stream ends with [DONE]");
    let pieces = streamed.events.iter().filter_map(|event| event["choices"][0]["text"].as_str());
    let usage = streamed.events.last().map(|event| event["usage"].clone()).unwrap_or_default();
    (pieces.collect(), usage)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_concurrent_clients_get_what_each_would_get_alone() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let prompts: Vec<_> = text_goldens().into_iter().map(|golden| golden.prompt_ids).collect();
    let bodies: Vec<Value> = (0..64)
        .map(|i| {
            let mut body = greedy(prompts[i % prompts.len()].clone(), 16 + (i as u32 % 24));
            if i % 3 == 0 {
                body["temperature"] = json!(0.9);
                body["seed"] = json!(i);
            }
            body
        })
        .collect();
    let mut alone = Vec::new();
    for body in &bodies {
        let reply = client.post("/v1/completions", body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        alone.push(text(&reply.body).to_owned());
    }
    let tasks: Vec<_> = bodies
        .iter()
        .cloned()
        .map(|body| {
            let client = client.clone();
            tokio::spawn(async move { streamed_text(&client, &body).await })
        })
        .collect();
    for (i, task) in tasks.into_iter().enumerate() {
        let (together, usage) = task.await.unwrap();
        assert_eq!(together, alone[i], "request {i} in a batch of 64, streamed");
        assert!(usage["completion_tokens"].as_u64().unwrap() >= 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_preemption_changes_no_text() {
    // 24 blocks of 16 tokens hold a fraction of what 12 requests of up to 96 tokens need.
    let small =
        up(&["--workers", "1", "--tensor-parallel", "1", "--kv-cache-memory", "1536KiB"]).await;
    let client = small.client().unwrap();
    let body = |i: usize| {
        let mut body = greedy(STORY, 120);
        body["temperature"] = json!(0.8);
        body["seed"] = json!(i);
        body["ignore_eos"] = json!(true);
        body
    };
    let mut alone = Vec::new();
    for i in 0..12 {
        alone.push(text(&client.post("/v1/completions", &body(i)).await.unwrap().body).to_owned());
    }
    let before = client.scrape().await.unwrap().sum("tutti_preemptions_total", &[]);
    let tasks: Vec<_> = (0..12)
        .map(|i| {
            let client = client.clone();
            let body = body(i);
            tokio::spawn(async move { client.post("/v1/completions", &body).await.unwrap().body })
        })
        .collect();
    for (i, task) in tasks.into_iter().enumerate() {
        assert_eq!(text(&task.await.unwrap()), alone[i], "request {i}");
    }
    let after = client.scrape().await.unwrap().sum("tutti_preemptions_total", &[]);
    assert!(after > before, "the test must force preemptions: {before} -> {after}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_ranks_and_two_replicas_give_the_golden_text_too() {
    for (workers, degree, replicas) in [("4", "4", ["0"].as_slice()), ("2", "1", &["0", "1"])] {
        let cluster = up(&["--workers", workers, "--tensor-parallel", degree]).await;
        let client = cluster.client().unwrap();
        let every = |s: &Scrape| s.sum("tutti_cache_config_info", &[]) == replicas.len() as f64;
        client.scrape_until(Duration::from_secs(10), every).await.unwrap();
        let tasks: Vec<_> = text_goldens()
            .into_iter()
            .map(|golden| {
                let client = client.clone();
                tokio::spawn(async move {
                    let mut body = greedy(golden.prompt_ids.clone(), 32);
                    body["ignore_eos"] = json!(true);
                    let reply = client.post("/v1/completions", &body).await.unwrap();
                    assert_eq!(text(&reply.body), visible(&golden.greedy_text), "{}", golden.name);
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let scrape = client.scrape().await.unwrap();
        for replica in replicas {
            let tokens = scrape.sum("tutti_generation_tokens_total", &[("replica", replica)]);
            assert!(tokens > 0.0, "replica {replica} of {workers} workers did nothing");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnects_return_kv_use_to_zero() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    for stream in [true, false] {
        let mut open = Vec::new();
        for seed in 0..8 {
            let mut body = greedy(STORY, 900);
            body["temperature"] = json!(1.0);
            body["seed"] = json!(seed);
            body["ignore_eos"] = json!(true);
            body["stream"] = json!(stream);
            let client = client.clone();
            open.push(tokio::spawn(async move { client.open("/v1/completions", &body).await }));
        }
        let busy = |s: &Scrape| s.sum("tutti_kv_cache_used_blocks", &[]) > 8.0;
        let scrape = client.scrape_until(Duration::from_secs(10), busy).await.unwrap();
        assert!(busy(&scrape), "requests must be running before they are dropped");
        for task in open {
            // A stream's response is held by the finished task; a plain request is still waiting.
            task.abort();
            drop(task.await);
        }
        let idle = |s: &Scrape| s.sum("tutti_kv_cache_used_blocks", &[]) == 0.0;
        let scrape = client.scrape_until(Duration::from_secs(5), idle).await.unwrap();
        assert!(idle(&scrape), "stream = {stream}: blocks leaked");
        assert_eq!(scrape.sum("tutti_requests_running", &[]), 0.0);
    }
    let reply = client.post("/v1/completions", &greedy(STORY, 4)).await.unwrap();
    assert_eq!(reply.status, 200, "the server goes on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_requests_get_a_4xx_and_disturb_nobody() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let with = |name: &str, value: Value| json!({"model": "demo", "prompt": STORY, name: value});
    let bad = [
        (400, "temperature", with("temperature", json!(-1))),
        (400, "max_tokens", with("max_tokens", json!(1_000_000))),
        (400, "max_tokens", with("max_tokens", json!(-3))),
        (400, "n", with("n", json!(1e30))),
        (400, "prompt", with("prompt", json!([]))),
        (400, "prompt", with("prompt", json!([999_999]))),
        (400, "prompt", with("prompt", json!("a ".repeat(5000)))),
        (404, "model", with("model", json!("nope"))),
        (400, "prompt", json!({"model": "demo"})),
    ];
    let undisturbed = client.post("/v1/completions", &greedy(STORY, 64)).await.unwrap();
    let running = {
        let client = client.clone();
        tokio::spawn(
            async move { client.post("/v1/completions", &greedy(STORY, 64)).await.unwrap() },
        )
    };
    for (status, param, body) in bad {
        let reply = client.post("/v1/completions", &body).await.unwrap();
        let error = &reply.body["error"];
        assert_eq!((reply.status, &error["param"]), (status, &json!(param)), "{body}: {error}");
        assert!(error["message"].is_string(), "{error}");
    }
    assert_eq!(client.post("/v1/completions", &json!([])).await.unwrap().status, 400);
    let running = running.await.unwrap();
    assert_eq!(running.status, 200);
    assert_eq!(running.body["choices"], undisturbed.body["choices"]);
}

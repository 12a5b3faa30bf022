//! `/metrics` equals exactly what the client counted.
use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::scrape::Scrape;

use crate::{STORY, greedy, up};

/// What a client sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counted {
    requests: f64,
    prompt_tokens: f64,
    completion_tokens: f64,
    stopped: f64,
    length: f64,
}

impl Counted {
    fn add(&mut self, reply: &Value) {
        self.requests += 1.0;
        self.prompt_tokens += reply["usage"]["prompt_tokens"].as_f64().unwrap();
        self.completion_tokens += reply["usage"]["completion_tokens"].as_f64().unwrap();
    }

    fn finish(&mut self, reason: &str) {
        match reason {
            "stop" => self.stopped += 1.0,
            "length" => self.length += 1.0,
            other => panic!("unexpected finish reason {other}"),
        }
    }

    fn of(scrape: &Scrape) -> Self {
        let finished =
            |reason| scrape.sum("tutti_request_success_total", &[("finished_reason", reason)]);
        Self {
            requests: scrape.sum("tutti_requests_accepted_total", &[]),
            prompt_tokens: scrape.sum("tutti_prompt_tokens_total", &[]),
            completion_tokens: scrape.sum("tutti_generation_tokens_total", &[]),
            stopped: finished("stop"),
            length: finished("length"),
        }
    }
}

/// Invariants of every single scrape, at any time.
pub(crate) fn check_invariants(scrape: &Scrape) {
    let sum = |name: &str| scrape.sum(name, &[]);
    let in_flight = sum("tutti_requests_in_flight");
    // Zero where swapping is disabled: the series does not exist.
    let swapped = scrape.sum("tutti_requests_swapped", &[]);
    assert_eq!(sum("tutti_requests_running") + sum("tutti_requests_waiting") + swapped, in_flight);
    assert_eq!(
        sum("tutti_request_success_total") + in_flight,
        sum("tutti_requests_accepted_total"),
        "finished by reason + in flight = accepted"
    );
    assert_eq!(sum("tutti_iteration_tokens_count"), sum("tutti_engine_steps_total"));
    for histogram in ["tutti_iteration_tokens", "tutti_time_to_first_token_seconds"] {
        let bucket = scrape.sum(&format!("{histogram}_bucket"), &[("le", "+Inf")]);
        assert_eq!(bucket, sum(&format!("{histogram}_count")), "{histogram}");
    }
}

fn request(i: u32) -> Value {
    let mut body = greedy(STORY, 8 + i % 40);
    body["temperature"] = json!(0.7);
    body["seed"] = json!(i);
    if i % 4 == 1 {
        body["stop"] = json!([" the", "."]);
    }
    body
}

async fn sequential(client: &Client, counted: &mut Counted) {
    for i in 0..12 {
        let reply = client.post("/v1/completions", &request(i)).await.unwrap().body;
        counted.add(&reply);
        counted.finish(reply["choices"][0]["finish_reason"].as_str().unwrap());
    }
}

async fn streaming(client: &Client, counted: &mut Counted) {
    let tasks: Vec<_> = (0..64)
        .map(|i| {
            let client = client.clone();
            let mut body = request(i);
            body["stream"] = json!(true);
            body["stream_options"] = json!({"include_usage": true});
            tokio::spawn(async move { client.stream("/v1/completions", &body).await.unwrap() })
        })
        .collect();
    for task in tasks {
        let events = task.await.unwrap().events;
        counted.add(events.last().unwrap());
        let reasons: Vec<&str> = events
            .iter()
            .filter_map(|event| event["choices"][0]["finish_reason"].as_str())
            .collect();
        assert_eq!(reasons.len(), 1, "one finish reason a stream");
        counted.finish(reasons[0]);
    }
}

async fn counters_for(degree: &str, workers: &str) -> Counted {
    let cluster = up(&["--workers", workers, "--tensor-parallel", degree]).await;
    let client = cluster.client().unwrap();
    let mut counted = Counted::default();
    sequential(&client, &mut counted).await;
    check_invariants(&client.scrape().await.unwrap());
    assert_eq!(Counted::of(&client.scrape().await.unwrap()), counted, "sequential, tp {degree}");

    let watcher = {
        let client = client.clone();
        tokio::spawn(async move {
            let mut last = Counted::default();
            for _ in 0..200 {
                let scrape = client.scrape().await.unwrap();
                check_invariants(&scrape);
                let now = Counted::of(&scrape);
                assert!(now.completion_tokens >= last.completion_tokens, "totals never fall");
                last = now;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    };
    streaming(&client, &mut counted).await;
    watcher.await.unwrap();
    let scrape = client.scrape().await.unwrap();
    check_invariants(&scrape);
    assert_eq!(Counted::of(&scrape), counted, "concurrent streams, tp {degree}");
    let sum = |name: &str| scrape.sum(name, &[]);
    assert_eq!(sum("tutti_time_to_first_token_seconds_count"), counted.requests);
    assert_eq!(sum("tutti_e2e_request_latency_seconds_count"), counted.requests);
    assert_eq!(sum("tutti_request_generation_tokens_sum"), counted.completion_tokens);
    assert_eq!(
        sum("tutti_inter_token_latency_seconds_count"),
        counted.completion_tokens - counted.requests,
        "one observation per gap between tokens"
    );
    assert_eq!(
        sum("tutti_iteration_tokens_sum"),
        counted.prompt_tokens + counted.completion_tokens,
        "every token was computed in exactly one step"
    );
    let (ranks, degree): (f64, f64) = (workers.parse().unwrap(), degree.parse().unwrap());
    assert_eq!(sum("tutti_worker_up"), ranks);
    assert_eq!(sum("tutti_replica_up"), ranks / degree);
    counted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_equal_the_clients_own_and_do_not_depend_on_tp() {
    let tp1 = counters_for("1", "1").await;
    for (degree, workers) in [("2", "2"), ("4", "4"), ("1", "3")] {
        let counted = counters_for(degree, workers).await;
        assert_eq!(tp1, counted, "tp {degree}, {workers} workers");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_and_aborted_requests_are_counted_exactly() {
    let args = ["--max-queued-requests", "3", "--max-num-seqs", "2", "--workers", "1"];
    let cluster = up(&[&args[..], &["--tensor-parallel", "1"]].concat()).await;
    let client = cluster.client().unwrap();
    let mut statuses = BTreeMap::<u16, f64>::new();
    let tasks: Vec<_> = (0..40)
        .map(|i| {
            let client = client.clone();
            let mut body = greedy(STORY, 30);
            if i % 8 == 0 {
                body["temperature"] = json!(-1.0);
            }
            tokio::spawn(async move { client.post("/v1/completions", &body).await.unwrap().status })
        })
        .collect();
    for task in tasks {
        *statuses.entry(task.await.unwrap()).or_default() += 1.0;
    }
    let of = |status: u16| statuses.get(&status).copied().unwrap_or(0.0);
    assert_eq!(of(200) + of(400) + of(429), 40.0, "{statuses:?}");
    assert!(of(200) >= 2.0 && of(429) > 0.0, "{statuses:?}");
    let scrape = client.scrape().await.unwrap();
    check_invariants(&scrape);
    let rejected = |s: &Scrape, why| s.sum("tutti_requests_rejected_total", &[("reason", why)]);
    assert_eq!(scrape.sum("tutti_requests_accepted_total", &[]), of(200));
    assert_eq!(rejected(&scrape, "queue_full"), of(429));
    assert_eq!((rejected(&scrape, "invalid"), of(400)), (5.0, 5.0));
    for (status, count) in &statuses {
        let labels = [("status", &*status.to_string()), ("route", "/v1/completions")];
        assert_eq!(scrape.sum("tutti_http_requests_total", &labels), *count, "{status}");
    }

    // Streams whose clients disconnect midway.
    let before = scrape;
    for i in 0..5 {
        let mut body = greedy(STORY, 900);
        body["ignore_eos"] = json!(true);
        body["stream"] = json!(true);
        let mut response = client.open("/v1/completions", &body).await.unwrap();
        assert!(response.chunk().await.unwrap().is_some());
        drop(response);
        let aborts = |s: &Scrape| {
            s.sum("tutti_request_success_total", &[("finished_reason", "abort")])
                == f64::from(i + 1)
        };
        let scrape = client.scrape_until(Duration::from_secs(10), aborts).await.unwrap();
        assert!(aborts(&scrape), "abort {i}");
        check_invariants(&scrape);
        // Nothing is running: no later step could correct what a cancellation missed.
        assert_eq!(scrape.sum("tutti_requests_in_flight", &[]), 0.0);
        assert_eq!(scrape.sum("tutti_requests_running", &[]), 0.0);
        assert_eq!(scrape.sum("tutti_kv_cache_used_blocks", &[]), 0.0);
        assert_eq!(scrape.sum("tutti_kv_cache_usage_ratio", &[]), 0.0);
    }
    let after = client.scrape().await.unwrap();
    let grown = |name: &str| after.sum(name, &[]) - before.sum(name, &[]);
    assert_eq!(grown("tutti_requests_accepted_total"), 5.0);
    assert_eq!(grown("tutti_request_prompt_tokens_count"), 5.0, "sizes of aborted ones count");
    assert_eq!(grown("tutti_e2e_request_latency_seconds_count"), 0.0, "latencies do not");
    assert_eq!(
        after.sum("tutti_request_generation_tokens_sum", &[]),
        after.sum("tutti_generation_tokens_total", &[]),
        "at rest every token belongs to a request that ended"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_report_their_own_times() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    client.post("/v1/completions", &greedy(STORY, 32)).await.unwrap();
    let both = |s: &Scrape| {
        ["0", "1"].iter().all(|rank| {
            s.sum("tutti_rank_step_seconds_count", &[("rank", rank)]) >= 32.0
                && s.sum("tutti_rank_collective_seconds_sum", &[("rank", rank)]) > 0.0
        })
    };
    let scrape = client.scrape_until(Duration::from_secs(60), both).await.unwrap();
    assert!(scrape.sum("tutti_rank_straggler_gap_seconds_count", &[]) >= 32.0);
    assert!(
        both(&scrape),
        "{:?}",
        scrape.samples().iter().filter(|s| s.name.contains("rank")).collect::<Vec<_>>()
    );
}

//! `/metrics` equals what the client itself counted, exactly.
use std::time::Duration;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::scrape::Scrape;

use crate::{STORY, greedy, up};

/// What a client knows it sent and got.
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

/// Invariants of every single scrape, whatever is going on.
pub(crate) fn check_invariants(scrape: &Scrape) {
    let sum = |name: &str| scrape.sum(name, &[]);
    let in_flight = sum("tutti_requests_in_flight");
    assert_eq!(sum("tutti_requests_running") + sum("tutti_requests_waiting"), in_flight);
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

async fn counters_for(degree: &str) -> Counted {
    let cluster = up(&["--workers", degree, "--tensor-parallel", degree]).await;
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
    let ranks: f64 = degree.parse().unwrap();
    assert_eq!(sum("tutti_worker_up"), ranks);
    counted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_equal_the_clients_own_and_do_not_depend_on_tp() {
    let tp1 = counters_for("1").await;
    let tp2 = counters_for("2").await;
    assert_eq!(tp1, tp2);
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
    let scrape = client.scrape_until(Duration::from_secs(5), both).await.unwrap();
    assert!(scrape.sum("tutti_rank_straggler_gap_seconds_count", &[]) >= 32.0);
    assert!(
        both(&scrape),
        "{:?}",
        scrape.samples().iter().filter(|s| s.name.contains("rank")).collect::<Vec<_>>()
    );
}

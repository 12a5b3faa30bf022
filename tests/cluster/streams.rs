//! Streams through a front end outlive the coordinator that computes them: after a pause, clients
//! get what they would have got anyway.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;

use crate::counters::check_invariants;
use crate::etcd::{Meeting, PATIENCE, sum, until};
use crate::{STORY, greedy};

/// Number of pieces of its answer that each client has when the coordinator ends.
const BEGUN: usize = 6;

/// Lists of log-probabilities and of ids, by name.
type Lists = BTreeMap<String, Vec<Value>>;

/// A stream's content, without anything that depends on timing.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    /// Per choice: text, log-probabilities and ids of tokens, finish reason.
    choices: BTreeMap<u64, (String, Lists, Value)>,
    /// Numbers of prompt and completion tokens.
    tokens: (u64, u64),
}

impl Answer {
    /// Number of tokens whose ids were told, of prompt and choices.
    fn ids(&self) -> (u64, u64) {
        let count = |name: &'static str| {
            let choices = self.choices.values();
            choices.map(move |(_, lists, _)| lists.get(name).map_or(0, Vec::len) as u64)
        };
        (count("prompt_token_ids").max().unwrap_or(0), count("token_ids").sum())
    }

    fn take(&mut self, event: &Value) {
        assert!(event["error"].is_null(), "{event}");
        if let Some(tokens) = event["usage"]["prompt_tokens"].as_u64() {
            self.tokens = (tokens, event["usage"]["completion_tokens"].as_u64().unwrap());
        }
        for choice in event["choices"].as_array().unwrap() {
            let own = self.choices.entry(choice["index"].as_u64().unwrap()).or_default();
            let piece = choice["text"].as_str().or(choice["delta"]["content"].as_str());
            own.0.push_str(piece.unwrap_or_default());
            // Timing decides how many tokens an event has, and whether the last one reports the
            // end.
            for (name, list) in choice["logprobs"].as_object().into_iter().flatten() {
                own.1.entry(name.clone()).or_default().extend(list.as_array().unwrap().clone());
            }
            for (of, name) in
                [(choice, "token_ids"), (choice, "prompt_token_ids"), (event, "prompt_token_ids")]
            {
                let ids = of[name].as_array().into_iter().flatten().cloned();
                own.1.entry(name.to_owned()).or_default().extend(ids);
            }
            if !choice["finish_reason"].is_null() {
                assert!(own.2.is_null(), "it ends once: {event}");
                own.2 = json!([choice["finish_reason"], choice["stop_reason"]]);
            }
        }
    }
}

/// Streams an answer; counts its pieces in `pieces`.
async fn stream(client: Client, (path, body): (String, Value), pieces: Arc<AtomicUsize>) -> Answer {
    let mut response = client.open(&path, &body).await.unwrap();
    assert_eq!(response.status(), 200);
    let (mut answer, mut buffer) = (Answer::default(), Vec::new());
    while let Some(chunk) = response.chunk().await.unwrap() {
        buffer.extend_from_slice(&chunk);
        while let Some(end) = buffer.windows(2).position(|it| it == b"\n\n") {
            let event: Vec<u8> = buffer.drain(..end + 2).collect();
            let event = String::from_utf8(event).unwrap();
            match event.trim_end().strip_prefix("data: ") {
                Some("[DONE]") => return answer,
                Some(event) => {
                    answer.take(&serde_json::from_str(event).unwrap());
                    pieces.fetch_add(1, Ordering::Relaxed);
                }
                None => assert!(event.starts_with(':'), "{event}"),
            }
        }
    }
    panic!("the stream broke off behind {answer:?}");
}

fn completion(change: Value) -> (String, Value) {
    let mut body = json!({"prompt": STORY, "max_tokens": 800, "temperature": 0, "stream": true,
        "ignore_eos": true, "stream_options": {"include_usage": true}, "return_token_ids": true});
    body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    ("/v1/completions".to_owned(), body)
}

/// A stop string that occurs in a text's second half, and not before.
fn late_stop(text: &str) -> &str {
    let from = text.len() / 2;
    let mut stops = (from..text.len()).filter_map(|at| text.get(at..at + 9));
    stops.find(|stop| text.find(*stop).is_some_and(|at| at >= from)).expect("a text of words")
}

/// Requests with everything that must continue from its state: how tokens are chosen, what ends a
/// text, what constrains it, what is reported about it.
async fn requests(client: &Client) -> Vec<(String, Value)> {
    let alone = |request| stream(client.clone(), request, Arc::default());
    let mut stopped = json!({"temperature": 1.0, "seed": 11, "logprobs": 2});
    let text = alone(completion(stopped.clone())).await.choices.remove(&0).unwrap().0;
    stopped["stop"] = json!(late_stop(&text));
    let sampled = json!({"temperature": 0.9, "seed": 7, "n": 2, "top_p": 0.95});
    let of_two = alone(completion(sampled.clone())).await.choices;
    // In the second choice it ends early, while the first one may go on.
    let mut of_two_one_stops = sampled.clone();
    of_two_one_stops["stop"] = json!(of_two[&1].0.get(20..32).unwrap());
    let numbers = json!({"type": "array", "minItems": 90, "maxItems": 90,
        "items": {"type": "integer", "minimum": -500, "maximum": 500}});
    let numbers = json!({"type": "json_schema",
        "json_schema": {"name": "numbers", "schema": numbers}});
    let chat = json!({"messages": [{"role": "user", "content": "Tell me of a rabbit."}],
        "max_tokens": 500, "temperature": 1.0, "seed": 3, "stream": true,
        "stream_options": {"include_usage": true}, "response_format": numbers,
        "return_token_ids": true});
    vec![
        completion(json!({})),
        completion(sampled),
        completion(of_two_one_stops),
        completion(stopped),
        completion(json!({"temperature": 1.0, "seed": 5, "response_format": numbers,
            "ignore_eos": false})),
        completion(json!({"temperature": 1.0, "seed": 9, "frequency_penalty": 0.6,
            "presence_penalty": 0.3, "repetition_penalty": 1.1, "logprobs": 0, "echo": true})),
        ("/v1/chat/completions".to_owned(), chat),
    ]
}

/// Sends everything at once; calls `ends` when each answer has begun and none is over.
async fn disturbed(
    client: &Client,
    requests: &[(String, Value)],
    ends: impl FnOnce(),
) -> Vec<Answer> {
    let mut streams = Vec::new();
    for request in requests {
        let pieces = Arc::<AtomicUsize>::default();
        let task = tokio::spawn(stream(client.clone(), request.clone(), pieces.clone()));
        streams.push((task, pieces));
    }
    until("all answers begin", async || {
        let begun = |pieces: &Arc<AtomicUsize>| pieces.load(Ordering::Relaxed) >= BEGUN;
        streams.iter().all(|(_, pieces)| begun(pieces)).then_some(())
    })
    .await;
    assert!(streams.iter().all(|(task, _)| !task.is_finished()), "one is over already");
    ends();
    let mut answers = Vec::new();
    for (task, _) in streams {
        answers.push(tokio::time::timeout(PATIENCE * 2, task).await.expect("it ends").unwrap());
    }
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_go_on_to_the_bit_when_their_coordinator_dies_or_ends() {
    let Some(meeting) = Meeting::new().await else { return };
    let quick = ["--leader-lease", "2", "--checkpoint-interval", "1", "--drain-timeout", "0"];
    let mut first = meeting.coordinator(&quick).await;
    let _workers = [meeting.worker(0), meeting.worker(1)];
    first.wait_ready().await.unwrap();
    let mut second = meeting.coordinator(&quick).await;
    let frontend = meeting.frontend().await;
    let client = frontend.client().unwrap();
    let requests = requests(&client).await;
    let mut expected = Vec::new();
    for request in &requests {
        let answer = stream(client.clone(), request.clone(), Arc::default()).await;
        assert_eq!(answer.ids(), answer.tokens, "{request:?}");
        expected.push(answer);
    }
    let answers =
        disturbed(&client, &requests, || LocalCluster::signal(first.pid(), "KILL").unwrap()).await;
    for (request, (answer, expected)) in requests.iter().zip(answers.iter().zip(&expected)) {
        assert_eq!(answer, expected, "{request:?}");
    }

    // A coordinator that ends in order also hands over its totals: what it accepted is counted
    // once.
    let leader = second.client().unwrap();
    let idle = async |client: &Client| {
        let now = client.scrape().await.unwrap();
        let now = sum(&now, "tutti_totals_checkpoint_timestamp_seconds");
        let settled = |s: &Scrape| {
            sum(s, "tutti_totals_checkpoint_timestamp_seconds") > now + 2.5
                && sum(s, "tutti_requests_in_flight") == 0.0
        };
        let scrape = client.scrape_until(PATIENCE, settled).await.unwrap();
        assert!(settled(&scrape));
        check_invariants(&scrape);
        scrape
    };
    // Something must be counted, or nothing is written.
    let short = || completion(json!({"max_tokens": 1}));
    stream(client.clone(), short(), Arc::default()).await;
    let before = idle(&leader).await;
    let third = meeting.coordinator(&quick).await;
    let end = || LocalCluster::signal(second.pid(), "TERM").unwrap();
    let answers = disturbed(&client, &requests, end).await;
    for (request, (answer, expected)) in requests.iter().zip(answers.iter().zip(&expected)) {
        assert_eq!(answer, expected, "{request:?}");
    }
    assert!(second.wait_end().unwrap().success(), "{}", second.log());
    let leader = third.client().unwrap();
    let after = idle(&leader).await;
    let more = |name| sum(&after, name) - sum(&before, name);
    let tokens: u64 = expected.iter().map(|answer| answer.tokens.1).sum();
    assert_eq!(more("tutti_generation_tokens_total"), tokens as f64);
    let prompts = expected.iter().map(|it| it.tokens.0 * it.choices.len() as u64).sum::<u64>();
    assert_eq!(more("tutti_prompt_tokens_total"), prompts as f64);
    assert_eq!(more("tutti_time_to_first_token_seconds_count"), requests.len() as f64);
    assert_eq!(more("tutti_requests_accepted_total"), 2.0 * requests.len() as f64);
    assert_eq!(sum(&after, "tutti_requests_rejected_total"), 0.0);
}

/// Requests with usage, as many tokens as are wanted.
fn streamed(tokens: u32) -> Value {
    let mut body = greedy(STORY, tokens);
    body["stream"] = json!(true);
    body["ignore_eos"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// The tokens of prompt and answer that a stream's last event says, at its orderly end.
async fn usage(response: reqwest::Response) -> (f64, f64) {
    let all = String::from_utf8(response.bytes().await.unwrap().to_vec()).unwrap();
    assert!(all.ends_with("data: [DONE]\n\n"), "{all}");
    let mut events = all.lines().filter_map(|line| line.strip_prefix("data: "));
    let last = events.rfind(|event| *event != "[DONE]").unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    let tokens = |which: &str| last["usage"][which].as_f64().unwrap();
    (tokens("prompt_tokens"), tokens("completion_tokens"))
}

/// Nobody takes over if all coordinators are told to end: the leader finishes what runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_whole_when_all_coordinators_are_told_to_end() {
    // A leader waits 1 s until etcd tells that the others end too. Where that took longer, it has
    // left its requests to one that does not come, and the round says nothing.
    for _ in 0..3 {
        let Some(meeting) = Meeting::new().await else { return };
        if all_end_and_streams_end_whole(&meeting).await {
            return;
        }
    }
    panic!("each time the leader left its requests to a coordinator that was told to end too");
}

/// Whether the leader finished what it had; false if it heard too late that nobody stands by.
async fn all_end_and_streams_end_whole(meeting: &Meeting) -> bool {
    let mut leader = meeting.coordinator_of("1", &[]).await;
    let _worker = meeting.worker(0);
    leader.wait_ready().await.unwrap();
    let mut standby = meeting.coordinator_of("1", &[]).await;
    let frontend = meeting.frontend().await;
    let client = leader.client().unwrap();
    let two = |s: &Scrape| s.sum("tutti_membership_members", &[("role", "coordinator")]) == 2.0;
    assert!(two(&client.scrape_until(PATIENCE, two).await.unwrap()));
    let frontend = frontend.client().unwrap();
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = frontend.open("/v1/completions", &streamed(900)).await.unwrap();
        assert!(stream.chunk().await.unwrap().is_some(), "it has begun");
        streams.push(stream);
    }
    for coordinator in [&leader, &standby] {
        LocalCluster::signal(coordinator.pid(), "TERM").unwrap();
    }
    for stream in streams {
        match tokio::time::timeout(PATIENCE, usage(stream)).await {
            Ok(told) => assert_eq!(told.1, 900.0),
            Err(_) if leader.log().contains("front ends take these to the next leader") => {
                return false;
            }
            Err(_) => panic!("a stream does not end:\n{}", leader.log()),
        }
    }
    for coordinator in [&mut leader, &mut standby] {
        assert!(coordinator.wait_end().unwrap().success(), "{}", coordinator.log());
    }
    true
}

/// Streams of a front end that go on under the next leader are no errors, and are counted once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn totals_over_a_leaders_orderly_end_are_the_clients_own() {
    let Some(meeting) = Meeting::new().await else { return };
    // Otherwise they may be over before the leader ends.
    let quick = ["--leader-lease", "2", "--checkpoint-interval", "1", "--drain-timeout", "0"];
    let mut first = meeting.coordinator_of("1", &quick).await;
    let _worker = meeting.worker(0);
    first.wait_ready().await.unwrap();
    let second = meeting.coordinator_of("1", &quick).await;
    let frontend = meeting.frontend().await;
    let frontend = frontend.client().unwrap();
    let mut told = Vec::new();
    for tokens in [5, 9, 30] {
        told.push(usage(frontend.open("/v1/completions", &streamed(tokens)).await.unwrap()).await);
    }
    let mut streams = Vec::new();
    for tokens in [700, 800, 900] {
        let mut stream = frontend.open("/v1/completions", &streamed(tokens)).await.unwrap();
        assert!(stream.chunk().await.unwrap().is_some(), "it has begun");
        streams.push(stream);
    }
    LocalCluster::signal(first.pid(), "INT").unwrap();
    first.wait_end().unwrap();
    for stream in streams {
        told.push(usage(stream).await);
    }
    assert_eq!(told.iter().map(|(_, tokens)| *tokens).sum::<f64>(), 2444.0);
    let leader = second.client().unwrap();
    let finished = |s: &Scrape, reason: &str| {
        s.sum("tutti_request_success_total", &[("finished_reason", reason)])
    };
    let all = |s: &Scrape| finished(s, "length") == 6.0;
    let scrape = leader.scrape_until(PATIENCE, all).await.unwrap();
    check_invariants(&scrape);
    let by_reason = ["length", "stop", "error", "abort"].map(|reason| finished(&scrape, reason));
    assert_eq!(by_reason, [6.0, 0.0, 0.0, 0.0]);
    let handed_over = finished(&scrape, "handed_over");
    assert_eq!(handed_over, 3.0);
    assert_eq!(sum(&scrape, "tutti_requests_accepted_total") - handed_over, 6.0);
    assert_eq!(sum(&scrape, "tutti_requests_in_flight"), 0.0);
    let of = |which: fn(&(f64, f64)) -> f64| told.iter().map(which).sum::<f64>();
    assert_eq!(sum(&scrape, "tutti_generation_tokens_total"), of(|it| it.1));
    assert_eq!(sum(&scrape, "tutti_prompt_tokens_total"), of(|it| it.0));
    // What is observed once for each request that ends.
    for (name, total) in [("prompt", of(|it| it.0)), ("generation", of(|it| it.1))] {
        let name = format!("tutti_request_{name}_tokens");
        assert_eq!(sum(&scrape, &format!("{name}_count")), 6.0, "{name}");
        assert_eq!(sum(&scrape, &format!("{name}_sum")), total, "{name}");
    }
}

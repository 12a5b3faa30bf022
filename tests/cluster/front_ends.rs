//! Separate front-end processes: any number of them serves one cluster, and no total depends on
//! their number.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::{Sample, Scrape};

use crate::counters::check_invariants;
use crate::{STORY, greedy, text, text_goldens};

const PATIENCE: Duration = Duration::from_secs(20);

/// One request of the fixed workload.
fn request(i: u32) -> Value {
    let mut body = greedy(format!("{STORY} {}", "Then".repeat((i % 5) as usize)), 5 + i % 23);
    body["temperature"] = json!(0.7);
    body["seed"] = json!(i);
    if i % 4 == 1 {
        body["stop"] = json!([" the", "."]);
    }
    if i % 6 == 2 {
        body["n"] = json!(2);
    }
    if i % 7 == 3 {
        body["logprobs"] = json!(2);
        body["echo"] = json!(true);
    }
    body
}

/// The reply to a request, without what varies between replies.
async fn ask(client: &Client, i: u32) -> Value {
    let mut body = request(i);
    if i.is_multiple_of(2) {
        let mut reply = client.post("/v1/completions", &body).await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        return json!([reply.body["choices"].take(), reply.body["usage"].take()]);
    }
    body["stream"] = json!(true);
    let events = client.stream("/v1/completions", &body).await.unwrap().events;
    // Choices run in parallel: their pieces arrive in any order.
    let mut texts = BTreeMap::<u64, (String, Value)>::new();
    for event in &events {
        for choice in event["choices"].as_array().unwrap() {
            let entry = texts.entry(choice["index"].as_u64().unwrap()).or_default();
            entry.0.push_str(choice["text"].as_str().unwrap());
            if !choice["finish_reason"].is_null() {
                entry.1 = choice["finish_reason"].clone();
            }
        }
    }
    json!(texts.into_values().collect::<Vec<_>>())
}

/// All counters and histograms that a workload determines, by series. Time-dependent ones (buckets
/// and sums of seconds) are reduced to their counts. Those that depend only on time (idle steps of
/// ranks, scrapes, polling, CPU time), and those with a series per process, are left out.
pub(crate) fn fixed(scrape: &Scrape, page: &str, steps_too: bool) -> BTreeMap<String, f64> {
    let grows = |name: &str| {
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|s| name.strip_suffix(s));
        let is = |name: &str, kind: &str| page.contains(&format!("# TYPE {name} {kind}\n"));
        is(name, "counter") || family.is_some_and(|family| is(family, "histogram"))
    };
    let mut fixed = BTreeMap::new();
    for sample in scrape.samples() {
        let name = sample.name.as_str();
        let by_time = name.starts_with("tutti_rank_")
            || name.starts_with("tutti_scrape_")
            || name.starts_with("tutti_process_")
            || name.starts_with("process_");
        let of_time = name.ends_with("_seconds_sum") || name.ends_with("_seconds_bucket");
        let by_steps = name.starts_with("tutti_engine_steps_total")
            || name.starts_with("tutti_iteration_tokens_bucket")
            || name.starts_with("tutti_iteration_tokens_count");
        let polled = sample.labels.get("route").is_some_and(|route| !route.starts_with("/v1"));
        let by_process = sample.labels.contains_key("process");
        let counts = grows(name) && !by_time && !of_time && !polled && !by_process;
        if counts && (steps_too || !by_steps) {
            fixed.insert(format!("{name}{:?}", sample.labels), sample.value);
        }
    }
    assert!(fixed.len() > 100, "{fixed:?}");
    fixed
}

/// Runs the workload over `frontends` front ends: first one request at a time, then all at once.
/// Returns the answers, and the totals after each run.
async fn workload(frontends: u32) -> (Vec<Value>, [BTreeMap<String, f64>; 2]) {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, frontends).await.unwrap();
    let clients = fleet.frontend_clients().unwrap();
    let of = |i: u32| clients[i as usize % clients.len()].clone();
    let mut answers = Vec::new();
    let mut sent = 0.0;
    let mut totals = Vec::new();
    for phase in 0..2 {
        if phase == 0 {
            for i in 0..32 {
                answers.push(ask(&of(i), i).await);
            }
            sent += 32.0;
        } else {
            let tasks: Vec<_> = (32..128)
                .map(|i| {
                    let client = of(i);
                    tokio::spawn(async move { ask(&client, i).await })
                })
                .collect();
            for task in tasks {
                answers.push(task.await.unwrap());
            }
            sent += 96.0;
        }
        // The front ends' own counts arrive with their next reports.
        let route = [("route", "/v1/completions")];
        let there = |s: &Scrape| s.sum("tutti_http_requests_total", &route) == sent;
        let client = fleet.client().unwrap();
        let scrape = client.scrape_until(PATIENCE, there).await.unwrap();
        assert!(there(&scrape), "{}", scrape.sum("tutti_http_requests_total", &route));
        check_invariants(&scrape);
        assert_eq!(scrape.sum("tutti_frontend_up", &[]), f64::from(frontends));
        assert_eq!(scrape.sum("tutti_requests_accepted_total", &[]), sent);
        assert_eq!(scrape.sum("tutti_reports_refused_total", &[]), 0.0);
        let page = client.metrics_page().await.unwrap();
        totals.push(fixed(&scrape, &page, phase == 0));
    }
    let totals = totals.try_into().unwrap();
    (answers, totals)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn totals_and_answers_are_the_same_for_1_and_16_front_ends() {
    let (answers_of_one, totals_of_one) = workload(1).await;
    let (answers_of_16, totals_of_16) = workload(16).await;
    for (i, (one, sixteen)) in answers_of_one.iter().zip(&answers_of_16).enumerate() {
        assert_eq!(one, sixteen, "request {i}");
    }
    for (phase, (one, sixteen)) in totals_of_one.iter().zip(&totals_of_16).enumerate() {
        let differ: Vec<_> = one
            .keys()
            .chain(sixteen.keys())
            .filter(|series| one.get(*series) != sixteen.get(*series))
            .map(|series| (series, one.get(series), sixteen.get(series)))
            .collect();
        assert!(differ.is_empty(), "phase {phase}: {differ:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_end_serves_the_whole_api_and_its_own_metrics() {
    let fleet = Fleet::start(&["--tensor-parallel", "2"], 2, 1).await.unwrap();
    let client = fleet.frontends[0].client().unwrap();
    for golden in text_goldens() {
        let prompt = golden.text.clone().unwrap();
        if prompt.is_empty() {
            // The API rejects it; that is tested, and counted, below.
            continue;
        }
        let reply = client.post("/v1/completions", &greedy(prompt.clone(), 24)).await.unwrap();
        let own = fleet.client().unwrap().post("/v1/completions", &greedy(prompt, 24)).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(text(&reply.body), text(&own.unwrap().body));
    }
    let models = client.get("/v1/models").await.unwrap().body;
    assert_eq!(models["data"][0]["id"], "demo");
    let bad = client.post("/v1/completions", &json!({"prompt": "a", "n": 999})).await.unwrap();
    assert_eq!((bad.status, &bad.body["error"]["param"]), (400, &json!("n")));
    let own = client.scrape().await.unwrap();
    assert_eq!(own.sum("tutti_frontend_requests_rejected_total", &[]), 1.0);
    assert!(own.has("process_resident_memory_bytes", &[]), "its process's own");
    let names: BTreeSet<&str> = own.samples().iter().map(|sample| sample.name.as_str()).collect();
    let of_the_cluster: Vec<_> =
        names.iter().filter(|name| !name.starts_with("tutti_frontend_")).collect();
    assert!(of_the_cluster.iter().all(|name| name.starts_with("process_")), "{of_the_cluster:?}");
    // The coordinator has the same counts under other names: scraping both counts nothing twice.
    let route = [("route", "/v1/completions")];
    let part = own.sum("tutti_frontend_http_requests_total", &route);
    let all = |s: &Scrape| s.sum("tutti_http_requests_total", &route);
    let both = |s: &Scrape| all(s) == 2.0 * part - 1.0;
    let scrape = fleet.client().unwrap().scrape_until(PATIENCE, both).await.unwrap();
    assert_eq!(all(&scrape), 2.0 * part - 1.0, "as often here as there, but for what was refused");
    let theirs: Vec<_> = scrape.samples().iter().map(|it| it.name.as_str()).collect();
    let twice = names.iter().filter(|it| it.starts_with("tutti_") && theirs.contains(it));
    assert_eq!(twice.count(), 0);
    let rejected = |s: &Scrape| s.sum("tutti_requests_rejected_total", &[("reason", "invalid")]);
    let scrape = fleet.client().unwrap().scrape_until(PATIENCE, |s| rejected(s) == 1.0).await;
    let scrape = scrape.unwrap();
    assert_eq!(rejected(&scrape), 1.0, "counted where it was refused");
    // Repeated reports change nothing.
    let reported = |s: &Scrape| s.sum("tutti_frontend_last_report_timestamp_seconds", &[]);
    let later = |s: &Scrape| reported(s) > reported(&scrape);
    let scrape = fleet.client().unwrap().scrape_until(PATIENCE, later).await.unwrap();
    assert_eq!(rejected(&scrape), 1.0, "once");
}

/// Starts `count` streams that do not end by themselves during the test.
async fn long_streams(client: &Client, count: u32) -> Vec<reqwest::Response> {
    let mut streams = Vec::new();
    for i in 0..count {
        let mut body = greedy(STORY, 900);
        body["stream"] = json!(true);
        body["ignore_eos"] = json!(true);
        body["temperature"] = json!(0.9);
        body["seed"] = json!(i);
        streams.push(client.open("/v1/completions", &body).await.unwrap());
    }
    streams
}

/// Reads a stream to its end; returns its finish reasons, and whether it broke off.
async fn read(response: reqwest::Response) -> (Vec<String>, bool) {
    let mut bytes = response.bytes_stream();
    let mut all = Vec::new();
    let mut broken = false;
    while let Some(chunk) = bytes.next().await {
        match chunk {
            Ok(chunk) => all.extend_from_slice(&chunk),
            Err(_) => {
                broken = true;
                break;
            }
        }
    }
    let page = String::from_utf8_lossy(&all).into_owned();
    let events = page.lines().filter_map(|line| line.strip_prefix("data: "));
    let reasons = events
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter_map(|event| event["choices"][0]["finish_reason"].as_str().map(str::to_owned))
        .collect();
    (reasons, broken || !page.contains("data: [DONE]"))
}

/// The slots of linked front ends.
fn slots(scrape: &Scrape) -> Vec<String> {
    let is_up = |sample: &&Sample| sample.name == "tutti_frontend_up" && sample.value == 1.0;
    let up = scrape.samples().iter().filter(is_up);
    up.filter_map(|sample| sample.labels.get("frontend").cloned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_a_front_end_and_a_worker_leaves_exact_totals() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 2, 3).await.unwrap();
    let coordinator = fleet.client().unwrap();
    let clients = fleet.frontend_clients().unwrap();
    let mut streams = Vec::new();
    for client in &clients {
        streams.push(long_streams(client, 4).await);
    }
    let running = |s: &Scrape| {
        s.sum("tutti_requests_running", &[]) == 12.0
            && s.sum("tutti_generation_tokens_total", &[]) > 100.0
    };
    assert!(running(&coordinator.scrape_until(PATIENCE, running).await.unwrap()));
    let watcher = {
        let client = coordinator.clone();
        tokio::spawn(async move {
            let mut last = BTreeMap::new();
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(4) {
                let page = client.metrics_page().await.unwrap();
                let scrape = Scrape::parse(&page).unwrap();
                check_invariants(&scrape);
                let now = fixed(&scrape, &page, true);
                for (series, value) in &last {
                    let later = now.get(series).copied();
                    assert!(later.is_some_and(|later| later >= *value), "{series} fell");
                }
                last = now;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
    };
    // Killed while running: one front end with its four streams, and one worker with its share of
    // all.
    LocalCluster::signal(fleet.frontends[1].pid(), "KILL").unwrap();
    LocalCluster::signal(fleet.workers[0].pid(), "KILL").unwrap();
    // The worker is not restarted: its share continues on the other replica.
    let mut ended = (0.0, 0.0);
    for (frontend, streams) in streams.into_iter().enumerate() {
        for stream in streams {
            let (reasons, broken) = read(stream).await;
            if frontend == 1 {
                assert!(broken && reasons.is_empty(), "{reasons:?}");
                ended.1 += 1.0;
            } else {
                assert!(!broken && reasons == ["length"], "{frontend}: {reasons:?}");
                ended.0 += 1.0;
            }
        }
    }
    watcher.await.unwrap();
    let idle = |s: &Scrape| s.sum("tutti_requests_in_flight", &[]) == 0.0;
    let scrape = coordinator.scrape_until(PATIENCE, idle).await.unwrap();
    check_invariants(&scrape);
    let finished =
        |reason| scrape.sum("tutti_request_success_total", &[("finished_reason", reason)]);
    assert_eq!((finished("length"), finished("abort")), ended);
    assert_eq!(finished("stop") + finished("error"), 0.0);
    assert_eq!(scrape.sum("tutti_requests_accepted_total", &[]), 12.0);
    assert_eq!(scrape.sum("tutti_time_to_first_token_seconds_count", &[]), 12.0);
    assert_eq!(scrape.sum("tutti_frontend_up", &[]), 2.0);
    let left = slots(&scrape);
    assert_eq!(left.len(), 2);
    let known = scrape.samples().iter().filter(|sample| sample.name == "tutti_frontend_up");
    assert_eq!(known.count(), 3, "the one that was killed is missed");
    assert_eq!(scrape.sum("tutti_kv_cache_used_blocks", &[]), 0.0, "nothing leaked");
    // The same front end gets its old slot again, and its totals continue.
    let mut again = fleet.spawn_frontend("frontend-1").unwrap();
    again.wait_ready().await.unwrap();
    let back = |s: &Scrape| s.sum("tutti_frontend_up", &[]) == 3.0;
    let scrape = coordinator.scrape_until(PATIENCE, back).await.unwrap();
    // Slots are assigned in the order of joining: whichever slot it had, it has it again.
    assert!(slots(&scrape) == ["1", "2", "3"] && slots(&scrape) != left);
    assert_eq!(scrape.sum("tutti_reports_refused_total", &[]), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_end_outlives_its_link_and_its_coordinator() {
    let mut fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 1).await.unwrap();
    let coordinator = fleet.client().unwrap();
    let frontend = fleet.frontends[0].client().unwrap();
    frontend.post("/v1/completions", &greedy(STORY, 5)).await.unwrap();
    // Frozen for longer than a link may be silent, then resumed: its totals continue, and none of
    // its reports is rejected.
    LocalCluster::signal(fleet.frontends[0].pid(), "STOP").unwrap();
    let gone = |s: &Scrape| s.sum("tutti_frontend_up", &[]) == 0.0;
    assert!(gone(&coordinator.scrape_until(PATIENCE, gone).await.unwrap()));
    LocalCluster::signal(fleet.frontends[0].pid(), "CONT").unwrap();
    fleet.frontends[0].wait_ready().await.unwrap();
    frontend.post("/v1/completions", &greedy(STORY, 5)).await.unwrap();
    let answered =
        |s: &Scrape| s.sum("tutti_http_requests_total", &[("route", "/v1/completions")]) == 2.0;
    let scrape = coordinator.scrape_until(PATIENCE, answered).await.unwrap();
    assert!(answered(&scrape) && scrape.sum("tutti_frontend_up", &[]) == 1.0);
    assert_eq!(scrape.sum("tutti_reports_refused_total", &[]), 0.0);

    // Without a coordinator, answers that have begun pause, and new requests wait for the next one.
    let streams = long_streams(&frontend, 1).await;
    LocalCluster::signal(fleet.coordinator.pid(), "KILL").unwrap();
    let streams: Vec<_> = streams.into_iter().map(|stream| tokio::spawn(read(stream))).collect();
    let waiting: Vec<_> = (0..20)
        .map(|_| {
            let frontend = frontend.clone();
            tokio::spawn(async move { frontend.post("/v1/completions", &greedy(STORY, 5)).await })
        })
        .collect();
    let mut impatient = greedy(STORY, 5);
    impatient["max_tokens"] = json!(900);
    let short = Duration::from_millis(300);
    let gone = tokio::time::timeout(short, frontend.post("/v1/completions", &impatient)).await;
    assert!(gone.is_err(), "its client leaves while it waits: {gone:?}");
    assert_eq!(frontend.get("/ready").await.unwrap().status, 503);
    assert_eq!(frontend.get("/live").await.unwrap().status, 200);
    assert!(waiting.iter().all(|request| !request.is_finished()));
    let address = fleet.address().to_owned();
    let listen = ["--listen", "127.0.0.1:0", "--cluster-listen", &address];
    let next = [&["coordinator", "--tensor-parallel", "1"], &listen[..]].concat();
    fleet.coordinator = LocalCluster::spawn(&next).unwrap();
    for request in waiting {
        let reply = request.await.unwrap().unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    for stream in streams {
        assert_eq!(stream.await.unwrap(), (vec!["length".to_owned()], false));
    }
    fleet.coordinator.wait_ready().await.unwrap();
    let served = |s: &Scrape| s.sum("tutti_request_success_total", &[]) == 21.0;
    let scrape = fleet.client().unwrap().scrape_until(PATIENCE, served).await.unwrap();
    assert!(served(&scrape), "each once, and not the one whose client left");
    assert_eq!(scrape.sum("tutti_requests_accepted_total", &[]), 21.0);
    assert_eq!(scrape.sum("tutti_time_to_first_token_seconds_count", &[]), 20.0, "of the new");
    assert_eq!(scrape.sum("tutti_requests_rejected_total", &[]), 0.0);
    // What it answered for the last coordinator does not count again at this one.
    let answered = |s: &Scrape| {
        let labels = [("route", "/v1/completions"), ("status", "200")];
        s.sum("tutti_http_requests_total", &labels)
    };
    let next = fleet.client().unwrap();
    next.scrape_until(PATIENCE, |s| answered(s) >= 21.0).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(answered(&next.scrape().await.unwrap()), 21.0);
}

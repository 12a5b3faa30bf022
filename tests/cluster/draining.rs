//! Processes told to end (SIGTERM, Ctrl-C) finish their requests first.
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;

use crate::{STORY, greedy, text, up};

/// A request that runs for a while: `n` choices of `tokens` tokens.
fn long(n: u32, tokens: u32) -> Value {
    let mut body = greedy(STORY, tokens);
    body["n"] = json!(n);
    body["temperature"] = json!(0.8);
    body["seed"] = json!(11);
    body["ignore_eos"] = json!(true);
    body
}

/// A stream that has begun.
async fn begun(client: &Client, mut body: Value) -> reqwest::Response {
    body["stream"] = json!(true);
    let mut response = client.open("/v1/completions", &body).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.chunk().await.unwrap().is_some());
    response
}

/// The rest of a stream.
async fn rest(mut response: reqwest::Response) -> String {
    let mut all = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        all.extend_from_slice(&chunk);
    }
    String::from_utf8(all).unwrap()
}

/// Asserts that a server that is ending rejects requests on new connections.
async fn refuses(base: &str) {
    let client = Client::new(base).unwrap();
    let began = Instant::now();
    while client.get("/ready").await.unwrap().status != 503 {
        assert!(began.elapsed() < Duration::from_secs(20), "/ready stays 200");
    }
    assert_eq!(client.get("/live").await.unwrap().status, 200);
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let refused = client.open(path, &greedy(STORY, 4)).await.unwrap();
        assert_eq!(refused.status(), 503);
        let header = |name: &str| refused.headers().get(name).map(|it| it.to_str().unwrap());
        assert!(header("retry-after").is_some_and(|it| it.parse::<u32>().is_ok_and(|s| s > 0)));
        assert_eq!(header("connection"), Some("close"), "the client shall go elsewhere");
    }
}

fn ended_well(process: &mut LocalCluster) {
    let status = process.wait_end().unwrap();
    assert_eq!(status.code(), Some(0), "{}", process.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_told_to_end_finishes_what_runs() {
    for signal in ["TERM", "INT"] {
        let mut cluster = up(&[]).await;
        let client = cluster.client().unwrap();
        let whole = {
            let client = client.clone();
            tokio::spawn(async move { client.post("/v1/completions", &long(8, 400)).await })
        };
        let stream = begun(&client, long(2, 900)).await;
        LocalCluster::signal(cluster.pid(), signal).unwrap();
        refuses(cluster.base()).await;
        assert!(rest(stream).await.ends_with("data: [DONE]\n\n"), "it finishes: {signal}");
        let whole = whole.await.unwrap().unwrap();
        assert_eq!(whole.status, 200, "{}", whole.body);
        assert_eq!(whole.body["usage"]["completion_tokens"], 3200);
        let finished = Instant::now();
        ended_well(&mut cluster);
        let took = finished.elapsed();
        assert!(took < Duration::from_secs(6), "nothing is left to wait for: {took:?}");
        assert!(!cluster.log().contains("do not"), "{}", cluster.log());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_finish_in_time_ends_with_an_error() {
    // Ended by the timeout, and by a second signal.
    for (timeout, twice) in [("1", false), ("600", true)] {
        let mut cluster = up(&["--drain-timeout", timeout]).await;
        let client = cluster.client().unwrap();
        let body = long(8, 900);
        let streams = [begun(&client, body.clone()).await, begun(&client, body.clone()).await];
        let workers = cluster.worker_pids();
        // Nothing advances, so nothing can finish.
        LocalCluster::signal(workers[0], "STOP").unwrap();
        let told = Instant::now();
        LocalCluster::signal(cluster.pid(), "TERM").unwrap();
        if twice {
            refuses(cluster.base()).await;
            LocalCluster::signal(cluster.pid(), "TERM").unwrap();
        }
        for stream in streams {
            let rest = rest(stream).await;
            assert!(rest.contains("shutting down") && !rest.contains("[DONE]"), "{rest}");
        }
        let took = told.elapsed();
        assert!(took < Duration::from_secs(20), "{took:?}");
        ended_well(&mut cluster);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn front_ends_finish_too_and_so_do_their_requests_when_the_coordinator_ends() {
    let mut fleet = Fleet::start(&[], 2, 2).await.unwrap();
    let clients = fleet.frontend_clients().unwrap();
    let coordinator = fleet.client().unwrap();
    // A front end ends.
    let stream = begun(&clients[0], long(1, 500)).await;
    LocalCluster::signal(fleet.frontends[0].pid(), "TERM").unwrap();
    refuses(fleet.frontends[0].base()).await;
    assert!(rest(stream).await.ends_with("data: [DONE]\n\n"));
    ended_well(&mut fleet.frontends[0]);
    assert_eq!(coordinator.get("/ready").await.unwrap().status, 200);
    let gone = |s: &testkit::scrape::Scrape| s.sum("tutti_frontend_up", &[]) == 1.0;
    let scrape = coordinator.scrape_until(Duration::from_secs(10), gone).await.unwrap();
    assert!(gone(&scrape));
    assert_eq!(scrape.sum("tutti_generation_tokens_total", &[]), 500.0);

    // The coordinator ends.
    let stream = begun(&clients[1], long(2, 900)).await;
    LocalCluster::signal(fleet.coordinator.pid(), "TERM").unwrap();
    refuses(fleet.coordinator.base()).await;
    let refused = clients[1].post("/v1/completions", &greedy(STORY, 4)).await.unwrap();
    assert_eq!(refused.status, 503, "{}", refused.body);
    let told = Instant::now();
    while clients[1].get("/ready").await.unwrap().status != 503 {
        assert!(told.elapsed() < Duration::from_secs(20), "the front end is told");
    }
    assert!(rest(stream).await.ends_with("data: [DONE]\n\n"));
    ended_well(&mut fleet.coordinator);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_told_to_end_leaves_without_a_failure() {
    let mut fleet = Fleet::start(&["--replicas", "1"], 3, 0).await.unwrap();
    let client = fleet.client().unwrap();
    let undisturbed = client.post("/v1/completions", &long(1, 900)).await.unwrap().body;
    let there = |s: &testkit::scrape::Scrape| s.sum("tutti_worker_up", &[]) == 3.0;
    assert!(there(&client.scrape_until(Duration::from_secs(20), there).await.unwrap()));
    for index in 0..2_u32 {
        let status = client.get("/admin/status").await.unwrap().body;
        let nodes = status["nodes"].as_array().unwrap();
        let of_rank = nodes.iter().find(|node| node["rank"] == json!(index)).unwrap();
        let leaving = of_rank["node"].as_str().unwrap().trim_start_matches("worker-").to_owned();
        let leaving: u32 = leaving.parse().unwrap();
        let running = {
            let client = client.clone();
            tokio::spawn(async move { client.post("/v1/completions", &long(1, 900)).await })
        };
        let generated = client.scrape().await.unwrap().sum("tutti_generation_tokens_total", &[]);
        let begun = |s: &testkit::scrape::Scrape| {
            s.sum("tutti_generation_tokens_total", &[]) > generated + 20.0
        };
        client.scrape_until(Duration::from_secs(10), begun).await.unwrap();
        let process = &mut fleet.workers[leaving as usize];
        LocalCluster::signal(process.pid(), "TERM").unwrap();
        let told = Instant::now();
        ended_well(process);
        let took = told.elapsed();
        assert!(took < Duration::from_secs(20), "it is let go at once: {took:?}");
        let reply = running.await.unwrap().unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(text(&reply.body), text(&undisturbed), "rank {index} left");
        fleet.restart_worker(leaving).unwrap();
        assert!(there(&client.scrape_until(Duration::from_secs(20), there).await.unwrap()));
    }
    let scrape = client.scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_failovers_total", &[]), 0.0, "both ends were planned");
    let log = fleet.coordinator.log();
    assert!(log.contains("says goodbye") && log.contains("has left"), "{log}");
    assert!(!log.contains("broke"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_tutti_up_that_somebody_else_ends_is_started_again() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let before = cluster.worker_pids();
    let running = {
        let client = client.clone();
        tokio::spawn(async move { client.post("/v1/completions", &long(2, 600)).await })
    };
    LocalCluster::signal(before[1], "TERM").unwrap();
    let reply = running.await.unwrap().unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let began = Instant::now();
    loop {
        let now = cluster.worker_pids();
        if now.len() == 2 && !now.contains(&before[1]) {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{before:?} -> {now:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let scrape = client.scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_failovers_total", &[]), 0.0);
}

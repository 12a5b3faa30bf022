//! Requests swapped to host memory, in real processes with more load than the KV cache holds, also
//! when a worker dies meanwhile.
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;
use tokio::task::JoinHandle;

use crate::{greedy, text, up};

const PATIENCE: Duration = Duration::from_secs(120);
const TOKENS: u32 = 450;

/// Different requests, of about 30 blocks each.
fn bodies() -> Vec<Value> {
    let body = |index: u32| {
        let mut body = greedy(format!("Once there were {} little foxes.", index + 2), TOKENS);
        body["ignore_eos"] = json!(true);
        body["temperature"] = json!(0.8);
        body["seed"] = json!(index);
        body["frequency_penalty"] = json!(0.2);
        body
    };
    (0..6).map(body).collect()
}

fn ask_all(client: &Client, bodies: &[Value]) -> Vec<JoinHandle<String>> {
    let ask = |body: &Value| {
        let (client, body) = (client.clone(), body.clone());
        tokio::spawn(async move {
            let reply = client.post("/v1/completions", &body).await.unwrap();
            assert_eq!(reply.status, 200, "{}", reply.body);
            text(&reply.body).to_owned()
        })
    };
    bodies.iter().map(ask).collect()
}

/// Checks what must hold in each scrape.
fn check(scrape: &Scrape) {
    let sum = |name: &str| scrape.sum(name, &[]);
    let (running, waiting) = (sum("tutti_requests_running"), sum("tutti_requests_waiting"));
    let swapped = sum("tutti_requests_swapped");
    assert_eq!(running + waiting + swapped, sum("tutti_requests_in_flight"));
    let used = sum("tutti_host_kv_cache_used_blocks");
    assert!(used <= sum("tutti_host_kv_cache_blocks") && used >= swapped, "{used} blocks");
    let blocks = |way| scrape.sum("tutti_kv_swapped_blocks_total", &[("direction", way)]);
    assert!(blocks("in") <= blocks("out"));
    assert!(sum("tutti_preemptions_swapped_total") <= sum("tutti_preemptions_total"));
    let tokens = sum("tutti_generation_tokens_total")
        + scrape.sum("tutti_prompt_tokens_by_source_total", &[("source", "local_compute")]);
    assert_eq!(sum("tutti_iteration_tokens_sum"), tokens);
}

/// Scrapes until some requests are in host memory.
async fn until_swapped(client: &Client) {
    let began = Instant::now();
    loop {
        let scrape = client.scrape().await.unwrap();
        check(&scrape);
        if scrape.sum("tutti_requests_swapped", &[]) > 0.0 {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "nobody was swapped");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_stay_the_same_and_every_scrape_adds_up() {
    // A block takes 16 KiB per rank in bf16: 64 blocks, and 160 in host memory.
    let sizes = ["--max-model-len", "512", "--kv-cache-memory", "1MiB", "--swap-space", "2560KiB"];
    let cluster = up(&sizes).await;
    let client = cluster.client().unwrap();
    let bodies = bodies();
    let mut alone = Vec::new();
    for body in &bodies {
        alone.extend(ask_all(&client, std::slice::from_ref(body)).pop().unwrap().await);
    }
    let before = client.scrape().await.unwrap();
    check(&before);
    assert_eq!(before.sum("tutti_preemptions_total", &[]), 0.0);
    assert_eq!(before.sum("tutti_host_kv_cache_blocks", &[]), 160.0);
    assert_eq!(before.sum("tutti_requests_swapped", &[]), 0.0);

    let together = ask_all(&client, &bodies);
    until_swapped(&client).await;
    for (reply, alone) in together.into_iter().zip(&alone) {
        assert_eq!(&reply.await.unwrap(), alone);
    }
    let after = client.scrape().await.unwrap();
    check(&after);
    assert!(after.sum("tutti_kv_swapped_blocks_total", &[("direction", "in")]) > 0.0);
    assert_eq!(after.sum("tutti_tokens_recomputed_total", &[]), 0.0, "host memory was enough");
    assert_eq!(after.sum("tutti_host_kv_cache_used_blocks", &[]), 0.0);

    // The contents of host memory are lost with the rank.
    let together = ask_all(&client, &bodies);
    until_swapped(&client).await;
    LocalCluster::signal(cluster.worker_pids()[1], "KILL").unwrap();
    for (reply, alone) in together.into_iter().zip(&alone) {
        assert_eq!(&reply.await.unwrap(), alone);
    }
    let last = client.scrape().await.unwrap();
    check(&last);
    assert!(last.sum("tutti_failovers_total", &[]) >= 1.0);
    assert!(last.sum("tutti_tokens_recomputed_total", &[]) > 0.0);
    assert_eq!(last.sum("tutti_host_kv_cache_used_blocks", &[]), 0.0);
    let generated = last.sum("tutti_generation_tokens_total", &[]);
    assert_eq!(generated, f64::from(3 * 6 * TOKENS), "every token is counted once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_than_the_host_has_is_said_with_figures() {
    let args = ["up", "--listen", "127.0.0.1:0", "--swap-space", "100000"];
    let cluster = LocalCluster::spawn(&args).unwrap();
    let began = Instant::now();
    while !cluster.log().contains("--swap-space is 100000.0 GiB") {
        assert!(began.elapsed() < PATIENCE, "{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(cluster.log().contains("of memory left"), "{}", cluster.log());
}

//! The tensor-parallel degree follows the members without a restart, and running requests continue.
use std::time::Duration;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;

use crate::counters::check_invariants;
use crate::{STORY, greedy, text};

const PATIENCE: Duration = Duration::from_secs(30);

/// A long sampled request: any numerical difference would soon show in its text.
fn long(seed: u32) -> Value {
    let mut body = greedy(STORY, 800);
    body["temperature"] = json!(0.9);
    body["seed"] = json!(seed);
    body["ignore_eos"] = json!(true);
    body
}

fn degree(scrape: &Scrape) -> Option<String> {
    let serving = scrape.samples().iter().find(|sample| sample.name == "tutti_cache_config_info");
    serving.and_then(|sample| sample.labels.get("tensor_parallel").cloned())
}

/// Starts requests, waits until they are running, calls `disturb`, and returns their texts.
async fn disturbed(client: &Client, disturb: impl FnOnce()) -> Vec<String> {
    let before = client.scrape().await.unwrap().sum("tutti_generation_tokens_total", &[]);
    let tasks: Vec<_> = (0..3)
        .map(|seed| {
            let client = client.clone();
            tokio::spawn(async move { client.post("/v1/completions", &long(seed)).await.unwrap() })
        })
        .collect();
    let begun = |s: &Scrape| {
        s.sum("tutti_generation_tokens_total", &[]) > before + 60.0
            && s.sum("tutti_requests_running", &[]) == 3.0
    };
    assert!(begun(&client.scrape_until(PATIENCE, begun).await.unwrap()), "under way");
    disturb();
    let mut texts = Vec::new();
    for task in tasks {
        let reply = task.await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(reply.body["usage"]["completion_tokens"], 800);
        texts.push(text(&reply.body).to_owned());
    }
    texts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_ranks_become_two_and_four_again_under_the_same_requests() {
    let args = ["--tensor-parallel", "4", "--min-tensor-parallel", "1"];
    let mut fleet = Fleet::start(&args, 4, 0).await.unwrap();
    let client = fleet.client().unwrap();
    let undisturbed = disturbed(&client, || {}).await;
    assert_eq!(degree(&client.scrape().await.unwrap()).as_deref(), Some("4"));

    let victims = [fleet.workers[1].pid(), fleet.workers[2].pid()];
    let texts = disturbed(&client, || {
        for victim in victims {
            LocalCluster::signal(victim, "KILL").unwrap();
        }
    })
    .await;
    let scrape = client.scrape().await.unwrap();
    assert_eq!(degree(&scrape).as_deref(), Some("2"));
    assert_eq!(texts, undisturbed, "from four ranks to two");

    let texts = disturbed(&client, || {
        fleet.restart_worker(1).unwrap();
        fleet.restart_worker(2).unwrap();
    })
    .await;
    let four = |s: &Scrape| degree(s).as_deref() == Some("4");
    let scrape = client.scrape_until(PATIENCE, four).await.unwrap();
    assert!(four(&scrape), "{}", fleet.coordinator.log());
    assert_eq!(texts, undisturbed, "and back");
    check_invariants(&scrape);
    assert_eq!(scrape.sum("tutti_generation_tokens_total", &[]), 9.0 * 800.0, "each once");
    assert_eq!(scrape.sum("tutti_requests_accepted_total", &[]), 9.0);
    // After ranks died; going back to four ranks was planned.
    assert!(scrape.sum("tutti_requests_replayed_total", &[]) >= 3.0);
}

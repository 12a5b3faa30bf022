//! Urgent requests go first, whichever front end they arrive at.
use std::time::Duration;

use serde_json::json;
use testkit::client::Client;
use testkit::fleet::Fleet;
use testkit::scrape::Scrape;

use crate::{STORY, greedy};

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_urgent_go_first_whichever_front_end_they_come_by() {
    let one_by_one =
        ["--tensor-parallel", "1", "--max-num-seqs", "1", "--scheduling-policy", "priority"];
    let fleet = Fleet::start(&one_by_one, 1, 1).await.unwrap();
    let client = fleet.coordinator.client().unwrap();
    let ask = |client: &Client, priority: i32, n: u32, tokens: u32| {
        let mut body = greedy(STORY, tokens);
        body["priority"] = json!(priority);
        body["n"] = json!(n);
        body["ignore_eos"] = json!(true);
        let client = client.clone();
        tokio::spawn(async move {
            let reply = client.post("/v1/completions", &body).await.unwrap();
            assert_eq!(reply.status, 200, "{}", reply.body);
            std::time::Instant::now()
        })
    };
    let until = async |name: &str, wanted: f64| {
        let sum = |s: &Scrape| s.sum(name, &[]);
        let scrape = client.scrape_until(PATIENCE, |s| sum(s) == wanted).await.unwrap();
        assert_eq!(sum(&scrape), wanted, "{name}");
    };
    let queued = async |wanted: f64| until("tutti_requests_waiting", wanted).await;
    // The most urgent and longest one, behind which the others queue. These are long enough for a
    // client to tell which of two ends first.
    let first = ask(&client, -9, 8, 900);
    until("tutti_requests_running", 1.0).await;
    let patient = ask(&client, 4, 1, 900);
    queued(1.0).await;
    let urgent = ask(&fleet.frontends[0].client().unwrap(), -4, 1, 900);
    queued(2.0).await;
    let usual = ask(&fleet.frontends[0].client().unwrap(), 0, 1, 900);
    queued(3.0).await;
    let ends = [first, urgent, usual, patient];
    let mut at = Vec::new();
    for end in ends {
        at.push(end.await.unwrap());
    }
    assert!(at.is_sorted(), "first, urgent, usual, patient: {at:?}");
}

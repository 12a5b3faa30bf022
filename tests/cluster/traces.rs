//! Traces of a real cluster: where requests ran, how long they waited, and where they went on when
//! a replica broke.
use std::time::Duration;

use serde_json::{Value, json};
use testkit::collector::{Collector, attribute};
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;
use testkit::wait::until;

use crate::{STORY, greedy};

/// Seconds between two ends of spans.
fn seconds(span: &Value) -> f64 {
    let at = |name: &str| span[name].as_str().unwrap().parse::<u64>().unwrap();
    (at("endTimeUnixNano") - at("startTimeUnixNano")) as f64 / 1e9
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_tells_where_a_request_ran_and_where_it_went_on() {
    let collector = Collector::start().unwrap();
    let url = collector.url();
    let args = ["--tensor-parallel", "1", "--otlp-traces-endpoint", &url];
    let fleet = Fleet::start(&args, 2, 0).await.unwrap();
    let client = fleet.client().unwrap();
    let both = |scrape: &testkit::scrape::Scrape| scrape.sum("tutti_replica_up", &[]) == 2.0;
    let patience = Duration::from_secs(60);
    assert!(both(&client.scrape_until(patience, both).await.unwrap()));

    // Of the coordinator's own client, and undisturbed.
    let prompt = json!({"prompt": STORY, "max_tokens": 8, "temperature": 0, "request_id": "calm"});
    assert_eq!(client.post("/v1/completions", &prompt).await.unwrap().status, 200);
    let named = |name: &'static str| {
        move |span: &Value| {
            attribute(span, "gen_ai.request.id").as_str().is_some_and(|id| id.contains(name))
        }
    };
    let calm = collector.request(named("calm")).await;
    let parts: Vec<&str> = calm[1..].iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(parts, ["queue", "prefill", "decode"]);
    let own = &calm[0];
    assert_eq!(
        (attribute(own, "tutti.ranks"), attribute(own, "tutti.failovers")),
        (json!(1), json!(0))
    );
    assert!(own["events"].is_null() && seconds(&calm[1]) <= seconds(own), "{own}");
    let queued = attribute(own, "gen_ai.latency.time_in_queue").as_f64().unwrap();
    assert!((queued - seconds(&calm[1])).abs() < 1e-6);

    // Through a front end, told by the environment, while the replica that runs it breaks.
    let address = fleet.address();
    let front = ["frontend", "--coordinator", address, "--listen", "127.0.0.1:0", "--node", "f"];
    let base = url.trim_end_matches("/v1/traces");
    let environment = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", base),
        ("OTEL_SERVICE_NAME", "front"),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
    ];
    let mut front = LocalCluster::spawn_with(&[], &front, &environment).unwrap();
    front.wait_ready().await.unwrap();
    let mut body = greedy(STORY, 400);
    body["stream"] = json!(true);
    body["ignore_eos"] = json!(true);
    let mut stream = front.client().unwrap().open("/v1/completions", &body).await.unwrap();
    assert!(stream.chunk().await.unwrap().is_some());
    let (replica, victim) = until("the replica that runs it", async || {
        let scrape = client.scrape().await.ok()?;
        let runs = |replica: &u32| {
            let labels = [("replica", replica.to_string())];
            scrape.sum("tutti_requests_running", &[(labels[0].0, &labels[0].1)]) > 0.0
        };
        let replica = (0..2).find(runs)?;
        let status = client.get("/admin/status").await.ok()?.body;
        let node = status["nodes"].as_array()?.iter().find(|it| it["replica"] == replica)?.clone();
        Some((replica, u32::try_from(node["pid"].as_u64()?).ok()?))
    })
    .await;
    LocalCluster::signal(victim, "KILL").unwrap();
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.contains("[DONE]"), "{text}");
    let all = collector
        .request(|span| {
            !attribute(span, "tutti.failovers").is_null() && attribute(span, "tutti.failovers") != 0
        })
        .await;
    let own = &all[0];
    let events: Vec<(&str, Value)> = own["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|event| (event["name"].as_str().unwrap(), attribute(event, "tutti.replica")))
        .collect();
    let other = 1 - replica;
    assert_eq!(events, [("replica_failed", json!(replica)), ("resumed", json!(other))]);
    assert_eq!(attribute(own, "tutti.replica"), other);
    assert_eq!(attribute(own, "gen_ai.usage.completion_tokens"), 400);
    assert_eq!(own["status"], json!({}), "its client has all of it");
    assert_eq!(all.len(), 4, "{all:?}");
    let resources: Vec<Value> = collector
        .messages()
        .iter()
        .map(|it| attribute(&it.body["resourceSpans"][0]["resource"], "service.name"))
        .collect();
    assert!(resources.contains(&json!("tutti")) && resources.contains(&json!("front")));
}

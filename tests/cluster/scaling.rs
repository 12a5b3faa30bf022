//! Scaling up and down, draining, and what operators see; no request fails.
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use testkit::scrape::Scrape;

use crate::{STORY, greedy, text, up};

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs an operator's command against a server; returns success and the output.
pub(crate) fn operate(server: &str, args: &[&str]) -> (bool, String) {
    let output =
        Command::new(tutti_binary()).args(args).args(["--server", server]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), said)
}

fn status(server: &str) -> Value {
    let (ok, said) = operate(server, &["status", "--json"]);
    assert!(ok, "{said}");
    serde_json::from_str(&said).unwrap()
}

fn nodes(status: &Value) -> Vec<String> {
    let nodes = status["nodes"].as_array().unwrap().iter();
    let mut names: Vec<_> = nodes.map(|n| n["node"].as_str().unwrap().to_owned()).collect();
    names.sort_unstable();
    names
}

/// Sends requests until told to stop; each must succeed with the expected text.
fn load(client: &Client) -> (tokio::sync::watch::Sender<bool>, Vec<tokio::task::JoinHandle<u32>>) {
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let tasks = (0..4)
        .map(|seed| {
            let (client, stopped) = (client.clone(), stopped.clone());
            tokio::spawn(async move {
                let mut body = greedy(STORY, 60);
                body["temperature"] = json!(0.8);
                body["seed"] = json!(seed);
                let mut expected = None;
                let mut answered = 0;
                while !*stopped.borrow() {
                    let reply = client.post("/v1/completions", &body).await.unwrap();
                    assert_eq!(reply.status, 200, "{}", reply.body);
                    let text = text(&reply.body).to_owned();
                    assert_eq!(*expected.get_or_insert(text.clone()), text);
                    answered += 1;
                }
                answered
            })
        })
        .collect();
    (stop, tasks)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_by_scaling_or_draining() {
    let cluster = up(&["--workers", "1", "--tensor-parallel", "1", "--threads", "1"]).await;
    let client = cluster.client().unwrap();
    let server = cluster.base();
    let (stop, tasks) = load(&client);
    let serving = async |wanted: f64| {
        let there = |s: &Scrape| s.sum("tutti_replica_up", &[]) == wanted;
        let scrape = client.scrape_until(PATIENCE, there).await.unwrap();
        assert!(there(&scrape), "{wanted} replicas: {}", cluster.log());
    };
    let (ok, said) = operate(server, &["scale", "--workers", "3"]);
    assert!(ok, "{said}");
    serving(3.0).await;
    assert_eq!(nodes(&status(server)), ["local-0", "local-1", "local-2"]);
    let (ok, said) = operate(server, &["scale", "--replicas", "1"]);
    assert!(ok, "{said}");
    serving(1.0).await;
    let spare = status(server)["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|n| n["state"] == "spare")
        .count();
    assert_eq!(spare, 2);
    // The serving worker leaves, and a spare takes its place.
    let serves = |status: &Value| {
        let all = status["nodes"].as_array().unwrap().clone();
        let alive = all.iter().find(|node| node["state"] == "alive");
        alive.map(|node| node["node"].as_str().unwrap().to_owned())
    };
    let first = serves(&status(server)).unwrap();
    let (ok, said) = operate(server, &["drain", &first]);
    assert!(ok, "{said}");
    let mut now = status(server);
    for _ in 0..200 {
        if !nodes(&now).contains(&first) && serves(&now).is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        now = status(server);
    }
    assert!(!nodes(&now).contains(&first), "it left and is not started again: {now}");
    assert_eq!(now["dead"][0]["node"], json!(first));
    assert!(now["dead"][0]["reason"].as_str().unwrap().ends_with("drained"), "{now}");
    let page = client.metrics_page().await.unwrap();
    let ups = page.lines().filter(|line| line.starts_with("tutti_worker_up{"));
    assert_eq!(ups.count(), 2, "one that was drained is not down:\n{page}");
    let (ok, said) = operate(server, &["scale", "--replicas", "0"]);
    assert!(ok, "{said}");
    serving(2.0).await;
    // Enough requests to cover all of this, however slow the machine is.
    let enough = |s: &Scrape| s.sum("tutti_request_success_total", &[]) > 20.0;
    client.scrape_until(PATIENCE, enough).await.unwrap();
    stop.send(true).unwrap();
    let mut answered = 0;
    for task in tasks {
        answered += task.await.unwrap();
    }
    assert!(answered > 20, "{answered}");
    let scrape = client.scrape().await.unwrap();
    let finished =
        |reason| scrape.sum("tutti_request_success_total", &[("finished_reason", reason)]);
    assert_eq!(finished("stop") + finished("length"), f64::from(answered));
    assert_eq!(finished("error") + finished("abort"), 0.0);
    // Who was drained is not among those counted, and is started when there is to be one more.
    for workers in ["2", "3"] {
        let (ok, said) = operate(server, &["scale", "--workers", workers]);
        assert!(ok, "{said}");
    }
    serving(3.0).await;
    let now = status(server);
    assert_eq!(nodes(&now), ["local-0", "local-1", "local-2"]);
    // Nor is who has not left yet: it is frozen until the number is given.
    let last = &now["nodes"][2];
    let pid = u32::try_from(last["pid"].as_u64().unwrap()).unwrap();
    LocalCluster::signal(pid, "STOP").unwrap();
    let scale = &["scale", "--workers", "3"][..];
    for command in [&["drain", last["node"].as_str().unwrap()][..], scale, scale] {
        let (ok, said) = operate(server, command);
        assert!(ok, "{said}");
    }
    LocalCluster::signal(pid, "CONT").unwrap();
    let is_replaced = |now: &Value| {
        let alive = now["nodes"].as_array().unwrap().iter().filter(|it| it["state"] == "alive");
        alive.clone().count() == 3 && !alive.clone().any(|it| it["pid"] == last["pid"])
    };
    let (mut seen, began) = (status(server), Instant::now());
    // By one process alone.
    while !is_replaced(&seen) || cluster.worker_pids().len() != 3 {
        assert!(began.elapsed() < PATIENCE, "{seen}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        seen = status(server);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_is_shared_with_a_replica_that_comes_later() {
    let alone = ["--workers", "1", "--tensor-parallel", "1", "--threads", "1"];
    let cluster = up(&[&alone[..], &["--max-num-seqs", "2"]].concat()).await;
    let client = cluster.client().unwrap();
    let tasks: Vec<_> = (0..60)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut body = greedy(STORY, 300);
                body["ignore_eos"] = json!(true);
                client.post("/v1/completions", &body).await.unwrap()
            })
        })
        .collect();
    let all = |s: &Scrape| s.sum("tutti_requests_accepted_total", &[]) == 60.0;
    let scrape = client.scrape_until(PATIENCE, all).await.unwrap();
    assert!(all(&scrape), "{}", cluster.log());
    let (ok, said) = operate(cluster.base(), &["scale", "--workers", "2"]);
    assert!(ok, "{said}");
    let mut texts = std::collections::BTreeSet::new();
    for task in tasks {
        let reply = task.await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        texts.insert(text(&reply.body).to_owned());
    }
    assert_eq!(texts.len(), 1, "the same text wherever it was made");
    let scrape = client.scrape().await.unwrap();
    let of = |replica| scrape.sum("tutti_generation_tokens_total", &[("replica", replica)]);
    // All came before there was a second replica.
    assert!(of("1") >= 3000.0, "{} and {}: {}", of("0"), of("1"), cluster.log());
}

/// What is refused changes nothing, and who was scaled down is not missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_workers_leave_all_together_or_not_at_all() {
    let cluster = up(&["--workers", "4", "--tensor-parallel", "2", "--threads", "1"]).await;
    let (server, client) = (cluster.base(), cluster.client().unwrap());
    let state = |wanted: f64, workers: f64| {
        move |s: &Scrape| {
            let of = |name| s.sum(name, &[]);
            of("tutti_replica_up") == wanted
                && of("tutti_replicas_wanted") == wanted
                && of("tutti_worker_up") == workers
        }
    };
    let scrape = client.scrape_until(PATIENCE, state(2.0, 4.0)).await.unwrap();
    assert!(state(2.0, 4.0)(&scrape), "{}", cluster.log());
    let pids = cluster.worker_pids();
    let (ok, said) = operate(server, &["scale", "--workers", "1"]);
    assert!(!ok && said.contains("1 workers are left, but a replica needs 2"), "{said}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(cluster.worker_pids(), pids, "nobody has left");
    assert!(!cluster.log().contains("is drained"), "{}", cluster.log());
    let (ok, said) = operate(server, &["scale", "--workers", "2"]);
    assert!(ok, "{said}");
    let scrape = client.scrape_until(PATIENCE, state(1.0, 2.0)).await.unwrap();
    assert!(state(1.0, 2.0)(&scrape), "{}", operate(server, &["status"]).1);
    assert!(!operate(server, &["status"]).1.contains("waiting"));
    let (ok, said) = operate(server, &["scale", "--workers", "4"]);
    assert!(ok, "{said}");
    let scrape = client.scrape_until(PATIENCE, state(2.0, 4.0)).await.unwrap();
    assert!(state(2.0, 4.0)(&scrape), "{}", operate(server, &["status"]).1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_are_told_what_is_wrong() {
    let cluster = up(&["--workers", "2", "--tensor-parallel", "2"]).await;
    let server = cluster.base();
    let (ok, said) = operate(server, &["drain", "nobody"]);
    assert!(!ok && said.contains("no worker `nobody`"), "{said}");
    let (ok, said) = operate(server, &["drain", "local-1"]);
    assert!(!ok && said.contains("a replica needs 2"), "{said}");
    let (ok, said) = operate(server, &["scale"]);
    assert!(!ok && said.contains("--replicas"), "{said}");
    let (ok, said) = operate(server, &["scale", "--workers", "1"]);
    assert!(!ok && said.contains("a replica needs 2"), "{said}");
    let (ok, table) = operate(server, &["status"]);
    assert!(ok && table.contains("serving") && table.contains("local-1"), "{table}");
    let (ok, said) = operate("http://127.0.0.1:1", &["status"]);
    assert!(!ok && said.contains("127.0.0.1:1"), "{said}");
    // Front ends have no operator API, and other hosts have no access without the secret.
    let client = cluster.client().unwrap();
    let bad = client.post("/admin/scale", &json!({"wrokers": 2})).await.unwrap();
    assert_eq!(bad.status, 400, "{}", bad.body);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_secret_operators_show_that_they_know_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, [b's'; 40]).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let secret = ["--cluster-secret-file", file.to_str().unwrap()];
    let cluster = up(&[&["--workers", "1", "--tensor-parallel", "1"][..], &secret].concat()).await;
    let (ok, said) = operate(cluster.base(), &["status"]);
    assert!(!ok && said.contains("token made from the cluster's secret"), "{said}");
    let (ok, said) = operate(cluster.base(), &[&["status"][..], &secret].concat());
    assert!(ok && said.contains("local-0"), "{said}");
    let client = cluster.client().unwrap();
    assert_eq!(client.get("/admin/status").await.unwrap().status, 401);
    let reply = client.post("/v1/completions", &greedy(STORY, 3)).await.unwrap();
    assert_eq!(reply.status, 200, "the API itself is not the operator's");
}

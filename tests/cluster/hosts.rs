//! The workers of a host, started by one command: `tutti worker --workers N`.
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::fleet::free_port;
use testkit::local_cluster::{LocalCluster, children_of};

use crate::dead_ranks::ask_until;
use crate::scaling::operate;
use crate::{STORY, greedy};

fn alive(status: &Value) -> Vec<(String, u64)> {
    let nodes = status["nodes"].as_array().unwrap().iter();
    let mut alive: Vec<_> = nodes
        .filter(|node| node["state"] == "alive")
        .map(|node| (node["node"].as_str().unwrap().to_owned(), node["pid"].as_u64().unwrap()))
        .collect();
    alive.sort_unstable();
    alive
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_command_starts_the_workers_of_a_host_and_supervises_them() {
    let address = format!("127.0.0.1:{}", free_port());
    let args = ["worker", "--coordinator", &address, "--device", "cpu", "--workers", "3"];
    let mut host =
        LocalCluster::spawn(&[&args[..], &["--node", "host", "--threads", "1"]].concat()).unwrap();
    let coordinator = ["--listen", "127.0.0.1:0", "--cluster-listen", &address];
    let mut coordinator = LocalCluster::spawn(
        &[&["coordinator", "--tensor-parallel", "1"], &coordinator[..]].concat(),
    )
    .unwrap();
    coordinator.wait_ready().await.unwrap();
    let client = coordinator.client().unwrap();
    let names = |status: &Value| alive(status).into_iter().map(|it| it.0).collect::<Vec<_>>();
    let all = |status: &Value| names(status) == ["host-0", "host-1", "host-2"];
    let status = ask_until(&client, "/admin/status", all).await;
    assert!(all(&status), "{status}");

    // A worker that dies comes back under its name.
    let (_, victim) = alive(&status)[1].clone();
    LocalCluster::signal(u32::try_from(victim).unwrap(), "KILL").unwrap();
    let back = |status: &Value| all(status) && alive(status).iter().all(|(_, pid)| *pid != victim);
    let status = ask_until(&client, "/admin/status", back).await;
    assert!(back(&status), "{status}");
    let reply = client.post("/v1/completions", &greedy(STORY, 4)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);

    // A drained worker does not come back, and the others stay.
    let (ok, said) = operate(coordinator.base(), &["drain", "host-0"]);
    assert!(ok, "{said}");
    let began = Instant::now();
    while children_of(host.pid()).len() != 2 {
        assert!(began.elapsed() < Duration::from_secs(20), "{}", host.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let status = client.get("/admin/status").await.unwrap().body;
    assert_eq!(names(&status), ["host-1", "host-2"], "{status}");

    // When told to end, the command has its workers say goodbye.
    let left = children_of(host.pid());
    assert_eq!(left.len(), 2);
    LocalCluster::signal(host.pid(), "TERM").unwrap();
    assert_eq!(host.wait_end().unwrap().code(), Some(0), "{}", host.log());
    let gone = |status: &Value| alive(status).is_empty();
    let status = ask_until(&client, "/admin/status", gone).await;
    let reason = status["dead"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("its parent is gone"), "{status}");
}

/// Only its supervisor can end a stopped process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_does_nothing_any_more_is_killed_and_started_again() {
    let address = format!("127.0.0.1:{}", free_port());
    let args = ["worker", "--coordinator", &address, "--device", "cpu", "--workers", "2"];
    let host =
        LocalCluster::spawn(&[&args[..], &["--node", "host", "--threads", "1"]].concat()).unwrap();
    let coordinator = ["--listen", "127.0.0.1:0", "--cluster-listen", &address];
    let mut coordinator = LocalCluster::spawn(
        &[&["coordinator", "--tensor-parallel", "1"], &coordinator[..]].concat(),
    )
    .unwrap();
    coordinator.wait_ready().await.unwrap();
    let client = coordinator.client().unwrap();
    let both = |status: &Value| alive(status).len() == 2;
    let status = ask_until(&client, "/admin/status", both).await;
    assert!(both(&status), "{status}");
    let before = alive(&status);
    let (_, frozen) = before[1];
    LocalCluster::signal(u32::try_from(frozen).unwrap(), "STOP").unwrap();
    let back = |status: &Value| both(status) && alive(status)[1].1 != frozen;
    let mut status = ask_until(&client, "/admin/status", back).await;
    if !back(&status) {
        // Ten silent seconds are half of the supervisor's patience.
        status = ask_until(&client, "/admin/status", back).await;
    }
    assert!(back(&status), "{status}: {}", host.log());
    assert_eq!(alive(&status)[0], before[0], "the other one was left alone");
    assert!(host.log().contains("the worker's heartbeat stopped"), "{}", host.log());
}

#[test]
fn workers_of_one_host_cannot_share_an_address() {
    let mut host = LocalCluster::spawn(&[
        "worker",
        "--device",
        "cpu",
        "--workers",
        "2",
        "--collective-listen",
        "127.0.0.1:8002",
    ])
    .unwrap();
    assert_eq!(host.wait_end().unwrap().code(), Some(2));
    assert!(host.log().contains("use port 0"), "{}", host.log());
}

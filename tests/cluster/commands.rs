//! Operators' commands to a running coordinator: the next leader knows them.
use serde_json::json;
use testkit::client::Client;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use testkit::scrape::Scrape;

use crate::etcd::{Meeting, PATIENCE, serves, sum, until};
use crate::scaling::operate;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_operators_said_outlives_the_leader() {
    let Some(mut meeting) = Meeting::new().await else { return };
    let three = ["--leader-lease", "2", "--replicas", "3"];
    let mut first = meeting.coordinator_of("1", &three).await;
    let mut workers: Vec<_> = (0..4).map(|index| meeting.worker(index)).collect();
    first.wait_ready().await.unwrap();
    let leader = first.client().unwrap();
    let up = |s: &Scrape| sum(s, "tutti_replica_up");
    let replicas = async |client: &Client, wanted: f64| {
        let scrape = client.scrape_until(PATIENCE, |s| up(s) == wanted).await.unwrap();
        assert_eq!(up(&scrape), wanted);
    };
    replicas(&leader, 3.0).await;
    let status = async |client: &Client| client.get("/admin/status").await.unwrap().body;
    let before = status(&leader).await;
    assert_eq!(
        (&before["max_replicas"], &before["commands"]["scaled"]),
        (&json!(3), &json!(false))
    );
    let second = meeting.coordinator_of("1", &three).await;
    let (ok, said) = operate(first.base(), &["scale", "--replicas", "1"]);
    assert!(ok, "{said}");
    let (ok, said) = operate(first.base(), &["drain", "worker-3"]);
    assert!(ok, "{said}");
    let told = status(&leader).await;
    assert_eq!(told["commands"], json!({"count": 2, "scaled": true, "stored": true}));
    let (_, table) = operate(first.base(), &["status"]);
    assert!(table.contains("at most 1 replicas (by tutti scale)"), "{table}");
    assert!(workers[3].wait_end().unwrap().success());

    LocalCluster::signal(first.pid(), "KILL").unwrap();
    let leader = second.client().unwrap();
    until("the next leader serves", async || serves(&leader).await.then_some(())).await;
    // One that loses its lease on a busy machine leads again, and forms its replicas again.
    let settled = |s: &Scrape| {
        assert!(up(s) <= 1.0, "as the last one was told");
        sum(s, "tutti_worker_up") == 3.0 && up(s) == 1.0
    };
    assert!(settled(&leader.scrape_until(PATIENCE, settled).await.unwrap()));
    let told = status(&leader).await;
    assert_eq!(told["max_replicas"], json!(1));
    assert_eq!(told["commands"], json!({"count": 2, "scaled": true, "stored": true}));

    // Without etcd the command is in force, but reported as not stored; it is stored when etcd is
    // back.
    meeting.etcd.kill();
    let connected = |s: &Scrape| sum(s, "tutti_membership_connected");
    leader.scrape_until(PATIENCE, |s| connected(s) == 0.0).await.unwrap();
    let (ok, said) = operate(second.base(), &["scale", "--replicas", "2"]);
    assert!(!ok && said.contains("in force, but may not be stored"), "{said}");
    replicas(&leader, 2.0).await;
    let (_, table) = operate(second.base(), &["status"]);
    assert!(table.contains("at most 2 replicas (by tutti scale; not stored"), "{table}");
    meeting.etcd.restart().await.unwrap();
    until("it is stored", async || {
        (status(&leader).await["commands"]["stored"] == json!(true)).then_some(())
    })
    .await;
    // After an orderly handover; then with the options that the coordinator was started with.
    let third = meeting.coordinator_of("1", &three).await;
    LocalCluster::signal(second.pid(), "TERM").unwrap();
    let leader = third.client().unwrap();
    until("the third serves", async || serves(&leader).await.then_some(())).await;
    replicas(&leader, 2.0).await;
    let (ok, said) = operate(third.base(), &["scale", "--reset"]);
    assert!(ok, "{said}");
    replicas(&leader, 3.0).await;
    assert_eq!(status(&leader).await["commands"]["scaled"], json!(false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_leads_is_found_through_etcd() {
    let Some(meeting) = Meeting::new().await else { return };
    let soon = ["--leader-lease", "2"];
    let mut first = meeting.coordinator_of("1", &soon).await;
    let _worker = meeting.worker(0);
    first.wait_ready().await.unwrap();
    let second = meeting.coordinator_of("1", &soon).await;
    let endpoint = meeting.etcd.endpoint();
    let run = |args: &[&str]| {
        let args = [args, &["--etcd", &endpoint]].concat();
        let output = std::process::Command::new(tutti_binary()).args(args).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    };
    let leads = |base: &str| {
        let (ok, said) = run(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_str(&said).unwrap_or_default();
        let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
        assert!(ok && !nodes.is_empty(), "{base}: {said}");
        status
    };
    leads(first.base());
    let (ok, said) = run(&["scale", "--replicas", "1"]);
    assert!(ok, "{said}");
    // The leader is gone, and its key still there: the command waits for the next one.
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    let status = leads(second.base());
    assert_eq!(status["max_replicas"], json!(1), "{status}");
    // The worker may still be on its way to the new leader.
    until("the log of a worker of the new leader", async || {
        let (ok, said) = run(&["logs", "worker-0"]);
        (ok && said.contains("joined")).then_some(())
    })
    .await;
    let (ok, said) = run(&["status", "--server", second.base()]);
    assert!(!ok && said.contains("--server") && said.contains("--etcd"), "{said}");
}

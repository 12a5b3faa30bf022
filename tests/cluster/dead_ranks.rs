//! What remains of a dead worker: why it ended, and its last log lines.
use std::time::Duration;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::contract::Contract;
use testkit::fleet::Fleet;
use testkit::local_cluster::LocalCluster;

use crate::scaling::operate;
use crate::{STORY, greedy, up};

/// Asks until `wanted` holds, up to a limit; returns the last answer, which is as `/openapi.json`
/// says.
pub(crate) async fn ask_until(
    client: &Client,
    path: &str,
    wanted: impl Fn(&Value) -> bool,
) -> Value {
    let mut last = client.get(path).await.unwrap();
    for _ in 0..400 {
        if wanted(&last.body) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        last = client.get(path).await.unwrap();
    }
    Contract::of(client).await.unwrap().check("get", path, None, &last);
    last.body
}

fn has_line(list: &Value, part: &str) -> bool {
    list.as_array().is_some_and(|lines| {
        lines.iter().any(|line| line.as_str().is_some_and(|line| line.contains(part)))
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_of_tutti_up_leaves_its_signal_and_its_lines() {
    let cluster = up(&["--workers", "1", "--tensor-parallel", "1", "--threads", "1"]).await;
    let client = cluster.client().unwrap();
    // Log lines are forwarded while the worker lives.
    let logs = "/admin/logs?node=local-0";
    let live = ask_until(&client, logs, |logs| has_line(&logs["lines"], "joined")).await;
    assert!(has_line(&live["lines"], "joined") && live["alive"] == true, "{live}");
    let victim = cluster.worker_pids()[0];
    LocalCluster::signal(victim, "KILL").unwrap();
    let with_exit = |status: &Value| status["dead"][0]["exit"].is_string();
    let status = ask_until(&client, "/admin/status", with_exit).await;
    let dead = &status["dead"][0];
    assert_eq!((&dead["node"], &dead["pid"]), (&json!("local-0"), &json!(victim)), "{status}");
    assert!(dead["exit"].as_str().unwrap().contains("SIGKILL"), "{dead}");
    let reason = dead["reason"].as_str().unwrap();
    assert!(reason.contains("closed") || reason.contains("reset"), "{dead}");
    assert!(dead["lines"].as_u64().unwrap() >= 1 && dead["last_line"].is_string(), "{dead}");
    // The running worker has the name; the dead one is found by its process id, or as the previous
    // one.
    let back = |logs: &Value| logs["alive"] == true && logs["pid"] != json!(victim);
    let now = ask_until(&client, logs, back).await;
    assert!(back(&now), "{now}");
    for which in [format!("&pid={victim}"), "&previous=true".to_owned()] {
        let gone = client.get(&format!("{logs}{which}")).await.unwrap().body;
        assert_eq!((&gone["pid"], &gone["alive"]), (&json!(victim), &json!(false)), "{gone}");
        assert!(
            has_line(&gone["lines"], "joined") && has_line(&gone["stderr"], "joined"),
            "{gone}"
        );
    }
    // The same through the operator's commands.
    let server = cluster.base();
    let (ok, table) = operate(server, &["status", "--dead"]);
    assert!(ok && table.contains("SIGKILL") && table.contains("last line:"), "{table}");
    let (ok, text) = operate(server, &["logs", "local-0", "--previous", "--lines", "2"]);
    assert!(ok && text.contains("SIGKILL"), "{text}");
    let (ok, text) = operate(server, &["logs", "coordinator"]);
    assert!(ok && text.contains("serving"), "{text}");
    let (ok, said) = operate(server, &["logs", "nobody"]);
    assert!(!ok && said.contains("`nobody`"), "{said}");
    let bad = client.get("/admin/logs?nodes=x").await.unwrap();
    assert_eq!(bad.status, 400, "{}", bad.body);
    let reply = client.post("/v1/completions", &greedy(STORY, 4)).await.unwrap();
    assert_eq!(reply.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_told_to_stop_says_why() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 2, 0).await.unwrap();
    let client = fleet.client().unwrap();
    let both = |status: &Value| status["nodes"].as_array().is_some_and(|nodes| nodes.len() == 2);
    ask_until(&client, "/admin/status", both).await;
    LocalCluster::signal(fleet.workers[0].pid(), "TERM").unwrap();
    let is_dead = |status: &Value| status["dead"][0].is_object();
    let status = ask_until(&client, "/admin/status", is_dead).await;
    assert_eq!(status["dead"][0]["node"], "worker-0", "{status}");
    assert_eq!(status["dead"][0]["reason"], "it is told to end");
    assert_eq!(status["dead"][0]["exit"], Value::Null, "nobody here started it");
    let (ok, said) = operate(fleet.coordinator.base(), &["drain", "worker-1"]);
    assert!(!ok, "the last one is needed: {said}");
    let frozen = fleet.workers[1].pid();
    LocalCluster::signal(frozen, "STOP").unwrap();
    let two = |status: &Value| status["dead"][1].is_object();
    let status = ask_until(&client, "/admin/status", two).await;
    LocalCluster::signal(frozen, "CONT").unwrap();
    let reason = status["dead"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("nothing was heard"), "{status}");
    let logs = "/admin/logs?node=worker-1&previous=true";
    let logs = client.get(logs).await.unwrap().body;
    assert!(has_line(&logs["lines"], "joined"), "{logs}");
}

#[test]
fn a_worker_without_a_link_ends_at_once() {
    let mut worker =
        LocalCluster::spawn(&["worker", "--coordinator", "127.0.0.1:1", "--node", "x"]).unwrap();
    for _ in 0..500 {
        if worker.log().contains("cannot join yet") {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    LocalCluster::signal(worker.pid(), "TERM").unwrap();
    let status = worker.wait_end().unwrap();
    assert!(status.success(), "{}", worker.log());
}

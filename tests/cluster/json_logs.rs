//! `--log-format json`: what programs that gather logs read.
use std::path::Path;

use serde_json::Value;
use testkit::local_cluster::LocalCluster;

use crate::etcd::{serves, until};
use crate::scaling::operate;

/// The lines of a file; each must be an object with what all have.
fn lines(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let read = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        for key in ["timestamp", "level", "target", "message", "process", "node"] {
            assert!(line[key].is_string(), "{key}: {line}");
        }
        assert!(line["pid"].is_u64() && line["fields"].is_object(), "{line}");
        line
    };
    whole.lines().map(read).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_line_of_each_process_is_an_object_and_logs_kept_for_operators_are_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("log");
    let script = format!("exec \"$0\" \"$@\" 2>{}", file.display());
    let prefix = ["bash".to_owned(), "-c".to_owned(), script];
    let args = ["up", "--listen", "127.0.0.1:0", "--workers", "1", "--tensor-parallel", "1"];
    let more = ["--device", "cpu", "--threads", "1", "--access-log", "--log-format", "json"];
    let mut cluster = LocalCluster::spawn_in(&prefix, &[&args[..], &more].concat()).unwrap();
    cluster.wait_ready().await.unwrap();
    assert!(serves(&cluster.client().unwrap()).await);
    let found = async |process: &str, wanted: &dyn Fn(&Value) -> bool| {
        let line =
            async || lines(&file).into_iter().find(|it| it["process"] == process && wanted(it));
        until(process, line).await
    };
    let http = found("up", &|it| it["fields"]["path"] == "/v1/completions").await;
    assert_eq!((&http["message"], &http["level"]), (&"http".into(), &"INFO".into()));
    assert_eq!((&http["fields"]["status"], &http["node"]), (&200.into(), &"coordinator".into()));
    let joined = found("worker", &|it| it["message"] == "joined").await;
    assert_eq!(
        (&joined["node"], &joined["fields"]["worker"]),
        (&"local-0".into(), &"local-0".into())
    );
    assert!(joined["target"].as_str().unwrap().starts_with("worker::"), "{joined}");

    let (ok, log) = operate(cluster.base(), &["logs", "local-0"]);
    assert!(ok && log.contains("joined") && !log.contains('{'), "{log}");
    let pid = cluster.worker_pids()[0];
    LocalCluster::signal(pid, "KILL").unwrap();
    let restarts = found("up", &|it| it["message"].as_str().unwrap().contains("restarting")).await;
    assert_eq!(restarts["fields"]["node"], "local-0", "{restarts}");
    let (ok, log) = operate(cluster.base(), &["logs", "local-0", "--pid", &pid.to_string()]);
    assert!(ok && log.contains("joined") && !log.contains('{'), "{log}");
    LocalCluster::signal(cluster.pid(), "TERM").unwrap();
    assert!(cluster.wait_end().unwrap().success(), "{}", cluster.log());
    assert!(lines(&file).len() > 5);
}

#[test]
fn an_error_that_ends_a_process_is_an_object_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("log");
    let script = format!("exec \"$0\" \"$@\" 2>{}", file.display());
    let prefix = ["bash".to_owned(), "-c".to_owned(), script];
    let args = ["coordinator", "--log-format", "json", "--model", "/no/such/folder"];
    let mut process = LocalCluster::spawn_in(&prefix, &args).unwrap();
    assert!(!process.wait_end().unwrap().success());
    let last = lines(&file).pop().unwrap();
    assert_eq!(last["level"], "ERROR");
    assert!(last["message"].as_str().unwrap().contains("/no/such/folder"), "{last}");
}

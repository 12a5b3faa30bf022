//! Killed and frozen workers, bad models, Ctrl-C.
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::local_cluster::{LocalCluster, children_of};
use testkit::models::demo;

use crate::actors::PATIENCE;
use crate::{STORY, greedy, text, up};

/// Names of Tutti's current shared memory objects.
fn shared_memory_objects() -> Vec<String> {
    let entries =
        std::fs::read_dir("/dev/shm").map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    entries
        .into_iter()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("tutti-"))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_comes_back_and_its_requests_go_on_unchanged() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let mut body = greedy(STORY, 900);
    body["temperature"] = json!(0.8);
    body["seed"] = json!(5);
    body["ignore_eos"] = json!(true);
    let undisturbed = client.post("/v1/completions", &body).await.unwrap().body;
    for victim in 0..2 {
        let running = {
            let (client, body) = (client.clone(), body.clone());
            tokio::spawn(async move { client.post("/v1/completions", &body).await.unwrap() })
        };
        let generated = client.scrape().await.unwrap().sum("tutti_generation_tokens_total", &[]);
        let begun = client
            .scrape_until(Duration::from_secs(10), |s| {
                s.sum("tutti_generation_tokens_total", &[]) > generated + 20.0
            })
            .await
            .unwrap();
        assert!(begun.sum("tutti_requests_running", &[]) == 1.0, "it must be running when killed");
        let before = cluster.worker_pids();
        assert_eq!(before.len(), 2);
        LocalCluster::signal(before[victim], "KILL").unwrap();
        let reply = running.await.unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(text(&reply.body), text(&undisturbed), "killed worker {victim}");
        let after = cluster.worker_pids();
        assert!(after.len() == 2 && after != before, "{before:?} -> {after:?}");
        assert_eq!(client.get("/ready").await.unwrap().status, 200);
    }
    let scrape = client.scrape().await.unwrap();
    let sum = |name: &str| scrape.sum(name, &[]);
    let prompt = undisturbed["usage"]["prompt_tokens"].as_f64().unwrap();
    assert_eq!(sum("tutti_generation_tokens_total"), 3.0 * 900.0, "every token is counted once");
    assert_eq!(sum("tutti_prompt_tokens_total"), 3.0 * prompt);
    assert_eq!(sum("tutti_iteration_tokens_sum"), 3.0 * (900.0 + prompt));
    assert_eq!(scrape.sum("tutti_request_success_total", &[("finished_reason", "length")]), 3.0);
    assert!(sum("tutti_tokens_recomputed_total") > 0.0 && sum("tutti_failovers_total") >= 2.0);
    // A survivor may have said that it lost the other before the broken link was seen.
    let replayed = |reason| scrape.sum("tutti_requests_replayed_total", &[("reason", reason)]);
    assert_eq!(replayed("rank_lost") + replayed("rank_failed"), 2.0);
    assert!(scrape.sum("tutti_worker_restarts_total", &[]) >= 2.0);
    assert_eq!(scrape.sum("tutti_worker_up", &[]), 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_worker_is_replaced_within_seconds() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let frozen = cluster.worker_pids()[1];
    LocalCluster::signal(frozen, "STOP").unwrap();
    let began = Instant::now();
    let reply = client.post("/v1/completions", &greedy(STORY, 16)).await.unwrap();
    let waited = began.elapsed();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(waited < Duration::from_secs(15), "{waited:?}");
    assert!(!cluster.worker_pids().contains(&frozen), "the frozen process is gone");
}

/// As `docker pause` does to a container, or Ctrl-Z and `fg` to a program.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_stood_still_goes_on_with_the_same_workers() {
    let cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    let workers = cluster.worker_pids();
    assert_eq!(workers.len(), 2);
    let all = [&[cluster.pid()][..], &workers].concat();
    for pid in &all {
        LocalCluster::signal(*pid, "STOP").unwrap();
    }
    // Longer than a link may be silent.
    tokio::time::sleep(Duration::from_secs(7)).await;
    for pid in &all {
        LocalCluster::signal(*pid, "CONT").unwrap();
    }
    let reply = client.post("/v1/completions", &greedy(STORY, 16)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(cluster.worker_pids(), workers, "{}", cluster.log());
    let scrape = client.scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_worker_restarts_total", &[]), 0.0, "{}", cluster.log());
    assert_eq!(scrape.sum("tutti_worker_up", &[]), 2.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctrl_c_stops_everything_and_leaves_nothing() {
    let mut cluster = up(&[]).await;
    let client = cluster.client().unwrap();
    client.post("/v1/completions", &greedy(STORY, 8)).await.unwrap();
    let workers = cluster.worker_pids();
    assert_eq!(workers.len(), 2);
    LocalCluster::signal(cluster.pid(), "INT").unwrap();
    let status = cluster.wait_end().unwrap();
    assert!(status.success(), "{status}:\n{}", cluster.log());
    for pid in workers {
        assert!(
            !std::path::Path::new(&format!("/proc/{pid}")).exists(),
            "worker {pid} is orphaned"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_do_not_outlive_a_killed_coordinator() {
    let cluster = up(&[]).await;
    let workers = children_of(cluster.pid());
    LocalCluster::signal(cluster.pid(), "KILL").unwrap();
    let began = Instant::now();
    let alive = |pid: &u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
    while workers.iter().any(alive) && began.elapsed() < Duration::from_secs(10) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!workers.iter().any(alive), "workers still run after {:?}", began.elapsed());
}

#[test]
fn no_shared_memory_is_left_behind_once_ranks_are_connected() {
    // Other tests may be forming a replica: an object may exist until its ranks are connected, but
    // none may stay.
    let mut still = shared_memory_objects();
    let began = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = shared_memory_objects();
        still.retain(|name| now.contains(name));
        if still.is_empty() {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{still:?}");
    }
}

fn broken_model(change: impl Fn(&std::path::Path)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    change(folder.path());
    folder
}

/// Checks that a command ends before there are workers, in one line, with this exit code.
fn ends_with(args: &[&str], code: i32, words: &[&str]) {
    let mut cluster = LocalCluster::spawn(args).unwrap();
    let status = cluster.wait_end().unwrap();
    // The pipes may still hold the last lines for a moment after the end.
    std::thread::sleep(Duration::from_millis(200));
    let log = cluster.log();
    assert_eq!(status.code(), Some(code), "{args:?}:\n{log}");
    // Besides, `up` prints the device that it would compute on.
    let lines = log.lines().filter(|line| !line.contains(" INFO "));
    assert_eq!(lines.count(), 1, "{args:?}:\n{log}");
    for word in words {
        assert!(log.contains(word), "{args:?}: expected {word:?} in:\n{log}");
    }
}

fn fails_with(model: &std::path::Path, words: &[&str]) {
    let model = model.to_str().unwrap();
    ends_with(&["up", "--listen", "127.0.0.1:0", "--model", model], 1, words);
    let addresses = ["--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"];
    ends_with(&[&["coordinator", "--model", model][..], &addresses].concat(), 1, words);
}

#[test]
fn a_degree_that_cannot_be_ends_at_once() {
    let demo = demo();
    let model = ["--listen", "127.0.0.1:0", "--model", demo.to_str().unwrap()];
    for role in ["up", "coordinator"] {
        let ends = |code, more: &[&str], words: &[&str]| {
            ends_with(&[&[role][..], &model, more].concat(), code, words);
        };
        ends(1, &["--tensor-parallel", "3"], &["degree 3", "possible degrees: 1, 2, 4"]);
        let words = ["--min-tensor-parallel 4 is above --tensor-parallel 2"];
        ends(2, &["--tensor-parallel", "2", "--min-tensor-parallel", "4"], &words);
    }
}

/// A supervisor starts nothing again that ends with 2.
#[test]
fn sizes_that_cannot_be_are_wrong_options() {
    let demo = demo();
    let model = ["--listen", "127.0.0.1:0", "--model", demo.to_str().unwrap()];
    for role in ["up", "coordinator"] {
        let refused = |more: &[&str], words: &[&str]| {
            ends_with(&[&[role][..], &model, more].concat(), 2, words);
        };
        let step = ["--max-num-seqs", "64", "--max-num-batched-tokens", "8"];
        refused(&step, &["--max-num-batched-tokens (8) is below --max-num-seqs (64)"]);
        let words = ["--max-model-len 99999999 exceeds the model's own limit"];
        refused(&["--max-model-len", "99999999"], &words);
        let stats = ["--log-stats-json", "-", "--log-stats-interval", "0"];
        refused(&stats, &["--log-stats-json", "--log-stats-interval 0"]);
    }
}

#[test]
fn a_broken_model_ends_with_one_clear_error() {
    fails_with(std::path::Path::new("/no/such/model"), &["error:", "/no/such/model"]);
    let truncated = broken_model(|dir| {
        let path = dir.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    });
    fails_with(truncated.path(), &["error:", "model.safetensors"]);
    // A coordinator's host may do without the weights; `up` may not.
    let weightless = broken_model(|dir| {
        std::fs::remove_file(dir.join("model.safetensors")).unwrap();
    });
    let folder = weightless.path().to_str().unwrap();
    let up = ["up", "--listen", "127.0.0.1:0", "--model", folder];
    ends_with(&up, 1, &["error:", "model.safetensors: is missing"]);
    let headless = broken_model(|dir| std::fs::remove_file(dir.join("tokenizer.json")).unwrap());
    fails_with(headless.path(), &["error:", "tokenizer.json"]);
    let unknown = broken_model(|dir| {
        let path = dir.join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, config.replace("LlamaForCausalLM", "MambaForCausalLM")).unwrap();
    });
    fails_with(unknown.path(), &["error:", "MambaForCausalLM"]);
}

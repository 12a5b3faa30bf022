//! Ranks on two GPUs that access each other's memory through CUDA IPC, all on the stand-in: a whole
//! cluster of processes whose kernels wait for each other.
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::NamedTempFile;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;
use testkit::wait::until;

use crate::{fake, nccl, options};

struct Pair {
    cluster: LocalCluster,
    log: NamedTempFile,
}

impl Pair {
    async fn up(args: &[&str], environment: &[(&str, &str)]) -> Self {
        let fake = options(fake());
        let log = NamedTempFile::new().unwrap();
        let mut all = vec!["up", "--listen", "127.0.0.1:0", "--model", "tests/models/llama-gqa"];
        all.extend(["--device", "cuda", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]);
        all.extend(["--workers", "2", "--tensor-parallel", "2"]);
        all.extend(args);
        all.extend(fake.iter().map(String::as_str));
        let path = log.path().to_str().unwrap();
        let mut variables = vec![("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_LOG", path)];
        variables.extend(environment);
        let mut cluster = LocalCluster::spawn_with(&[], &all, &variables).unwrap();
        cluster.wait_ready().await.unwrap();
        Self { cluster, log }
    }

    fn calls(&self, what: &str) -> usize {
        std::fs::read_to_string(self.log.path()).unwrap().matches(what).count()
    }

    async fn complete(&self, tokens: u32) -> Value {
        let client = self.cluster.client().unwrap();
        let reply = client.post("/v1/completions", &request(tokens)).await.unwrap();
        assert_eq!(reply.status, 200, "{}\n{}", reply.body, self.cluster.log());
        assert_eq!(reply.body["usage"]["completion_tokens"], tokens);
        reply.body["choices"][0]["text"].clone()
    }
}

fn request(tokens: u32) -> Value {
    json!({"prompt": [1, 5, 9, 33, 7], "max_tokens": tokens, "temperature": 0.8, "seed": 3,
           "ignore_eos": true})
}

const SEEN: &str = "GPUs see each other's memory: one-shot up to";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_see_each_others_memory() {
    let host = Pair::up(&["--cuda-exchange", "host"], &[]).await;
    let expected = host.complete(24).await;
    assert_eq!(host.calls("ipc"), 0);
    drop(host);
    let pair = Pair::up(&[], &[]).await;
    let began = Instant::now();
    assert_eq!(pair.complete(24).await, expected);
    let log = pair.cluster.log();
    assert!(log.contains(SEEN), "{log}");
    assert_eq!((pair.calls("ipc give"), pair.calls("ipc open")), (2, 2));
    // Steps are graphs, including their exchanges.
    assert!(pair.calls("graph ") > 24, "{}", pair.calls("graph "));
    // Kernels may begin behind an exchange that waits: no other rank needs the room.
    assert!(pair.calls("peers have a GPU each") > 0);
    assert_eq!(pair.calls("peers share a GPU"), 0);
    // The kernels keep the time of exchanges themselves, so it is known of steps in graphs too.
    let client = pair.cluster.client().unwrap();
    let of = |scrape: &Scrape, name: &str| {
        ["0", "1"].map(|rank| scrape.sum(&format!("tutti_rank_{name}"), &[("rank", rank)]))
    };
    let has_come =
        |scrape: &Scrape| of(scrape, "step_seconds_count").iter().all(|steps| *steps >= 24.0);
    let scrape = client.scrape_until(Duration::from_secs(10), has_come).await.unwrap();
    let (times, all) = (of(&scrape, "collective_seconds_sum"), began.elapsed().as_secs_f64());
    // Not necessarily within their steps as the host sees them: it begins one ahead.
    assert!(times.iter().all(|time| 0.0 < *time && *time < all), "{times:?} of {all}");
    assert_eq!(of(&scrape, "collective_seconds_count"), of(&scrape, "step_seconds_count"));
}

/// Where other ranks may need the room, no kernel begins behind an exchange that waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kernels_know_that_others_may_run_beside_them() {
    let pair = Pair::up(&[], &[("FAKE_CUDA_MPS", "1")]).await;
    pair.complete(4).await;
    assert!(pair.cluster.log().contains(SEEN), "{}", pair.cluster.log());
    assert!(pair.calls("peers share a GPU") > 0);
    assert_eq!(pair.calls("peers have a GPU each"), 0);
}

/// A step that cannot be captured ends the epoch, because the ranks' graphs belong together. Each
/// rank remembers the failure after it leaves its group, and captures later steps differently.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_capture_that_fails_is_remembered_by_both_ranks() {
    let same = "--batch-invariant";
    let expected = Pair::up(&[same, "--cuda-exchange", "host"], &[]).await.complete(24).await;
    let pair = Pair::up(&[same], &[("FAKE_CUDA_CAPTURED_OVERLAP", "0")]).await;
    assert_eq!(pair.complete(24).await, expected);
    let log = pair.cluster.log();
    assert!(log.contains("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900)"), "{log}");
    assert!(log.contains("decode steps are slower than they could be"), "{log}");
    // Each rank fails at most once, and both are in a group again afterwards.
    let formed = log.matches(SEEN).count();
    assert!((4..=6).contains(&formed), "{formed}: {log}");
    let before = pair.calls("graph ");
    assert_eq!(pair.complete(24).await, expected);
    assert!(pair.calls("graph ") > before + 24, "{before} {}", pair.calls("graph "));
    assert_eq!(pair.cluster.log().matches(SEEN).count(), formed, "{}", pair.cluster.log());
}

/// So does one that there is no memory for. In the next epoch there may be: the ranks try again,
/// and give up nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graph_that_there_was_no_memory_for_is_made_in_the_next_epoch() {
    let same = "--batch-invariant";
    let expected = Pair::up(&[same, "--cuda-exchange", "host"], &[]).await.complete(24).await;
    let pair = Pair::up(&[same], &[("FAKE_CUDA_FAIL", "cuGraphUpload:1=2")]).await;
    let pids = pair.cluster.worker_pids();
    let before = pair.calls("graph ");
    assert_eq!(pair.complete(24).await, expected);
    assert!(pair.calls("graph ") > before + 24, "{before} {}", pair.calls("graph "));
    let log = pair.cluster.log();
    assert!(log.contains("memory is short"), "{log}");
    assert!(!log.contains("decode steps are slower than they could be"), "{log}");
    // Each rank fails at most once.
    assert!((4..=6).contains(&log.matches(SEEN).count()), "{log}");
    assert_eq!(pair.cluster.worker_pids(), pids, "{log}");
}

/// Before the ranks have agreed, a failure on one makes all of them exchange data another way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_in_the_way_is_said_and_ranks_go_another_way() {
    let nccl = nccl(None);
    let cases = [
        ("FAKE_CUDA_PEER_ACCESS", "0", "cannot reach the memory of rank"),
        ("FAKE_CUDA_FAIL", "cuIpcGetMemHandle:1=801", "give GPU memory to another process"),
        (
            "FAKE_CUDA_FAIL",
            "cuIpcOpenMemHandle_v2:1=217",
            "open another rank's GPU memory: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)",
        ),
        // The driver allows the access, but writes never arrive.
        ("FAKE_CUDA_DEAF", "1", "timed out after"),
    ];
    for (index, (variable, value, words)) in cases.into_iter().enumerate() {
        let other = index >= 2;
        let args: &[&str] = if other { &["--nccl-lib", &nccl] } else { &[] };
        let pair = Pair::up(args, &[(variable, value)]).await;
        pair.complete(4).await;
        let log = pair.cluster.log();
        assert!(log.contains("do not see each other's memory"), "{log}");
        assert!(log.contains(words), "{words} is not in\n{log}");
        let way = if other { "algorithm=\"nccl\"" } else { "algorithm=\"host\"" };
        assert!(log.contains(way), "{way} is not in\n{log}");
    }
}

/// A killed or frozen rank is replaced; the other's kernels end, its process and weights stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_is_gone_is_replaced_and_the_other_stays() {
    // What was generated is computed again as one prompt, which gives the same bits only so.
    let pair = Pair::up(&["--batch-invariant"], &[]).await;
    let expected = pair.complete(80).await;
    for (victim, signal) in [(0, "KILL"), (1, "KILL"), (1, "STOP")] {
        let client = pair.cluster.client().unwrap();
        let before = pair.cluster.worker_pids();
        let generated = client.scrape().await.unwrap().sum("tutti_generation_tokens_total", &[]);
        let running = {
            let client = client.clone();
            tokio::spawn(async move { client.post("/v1/completions", &request(80)).await.unwrap() })
        };
        client
            .scrape_until(Duration::from_secs(60), |scrape| {
                scrape.sum("tutti_generation_tokens_total", &[]) > generated + 5.0
            })
            .await
            .unwrap();
        let began = Instant::now();
        LocalCluster::signal(before[victim], signal).unwrap();
        let reply = running.await.unwrap();
        assert_eq!(reply.status, 200, "{}\n{}", reply.body, pair.cluster.log());
        assert_eq!(reply.body["choices"][0]["text"], expected, "victim {victim}");
        assert!(began.elapsed() < Duration::from_secs(90), "{:?}", began.elapsed());
        let pids = pair.cluster.worker_pids();
        assert!(pids.contains(&before[1 - victim]), "the survivor goes on: {pids:?} {before:?}");
        assert!(!pids.contains(&before[victim]), "{pids:?} {before:?}");
    }
    assert_eq!(pair.cluster.log().matches(SEEN).count(), 8, "{}", pair.cluster.log());
}

/// A rank whose own step takes long is given its time once its peer is gone: it does not hang, and
/// its weights stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_step_may_end_when_the_exchange_is_over() {
    // The first step of the profile, and a later one that is served.
    let slow = ("FAKE_CUDA_SLOW", "tutti_embed:1=7000,tutti_embed:20=9000");
    let args = ["--no-cuda-graphs", "--step-timeout", "120", "--min-step-timeout", "120"];
    let pair = Pair::up(&args, &[slow]).await;
    let client = pair.cluster.client().unwrap();
    let before = pair.cluster.worker_pids();
    let running = tokio::spawn(async move { client.post("/v1/completions", &request(40)).await });
    let begun = async || (pair.calls("slow 9000") == 2).then_some(());
    until("the slow step on both ranks", begun).await;
    // Begun ahead or not, no other step is in the way.
    tokio::time::sleep(Duration::from_millis(300)).await;
    LocalCluster::signal(before[1], "KILL").unwrap();
    let reply = running.await.unwrap().unwrap();
    assert_eq!(reply.status, 200, "{}\n{}", reply.body, pair.cluster.log());
    let (pids, log) = (pair.cluster.worker_pids(), pair.cluster.log());
    assert!(pids.contains(&before[0]), "the survivor goes on: {pids:?} {before:?}\n{log}");
    assert!(!log.contains("it hangs"), "{log}");
}

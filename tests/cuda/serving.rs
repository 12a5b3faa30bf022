//! A whole cluster on stand-ins for GPUs.
use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;
use testkit::wait::until;

use crate::{fake, options, with_fake};

async fn up(args: &[&str], environment: &[(&str, &str)]) -> LocalCluster {
    let fake = options(fake());
    let mut all = vec!["up", "--listen", "127.0.0.1:0", "--model", "tests/models/llama-gqa"];
    all.extend(["--device", "cuda", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]);
    all.extend(args);
    all.extend(fake.iter().map(String::as_str));
    let mut cluster = LocalCluster::spawn_with(&[], &all, environment).unwrap();
    cluster.wait_ready().await.unwrap();
    cluster
}

fn request(tokens: u32) -> serde_json::Value {
    json!({"prompt": [1, 5, 9, 33, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": true})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_gpu_serves_and_says_what_it_is() {
    // By default, one worker per GPU.
    let cluster = up(&[], &[]).await;
    let client = cluster.client().unwrap();
    let reply = client.post("/v1/completions", &request(24)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.body["usage"]["completion_tokens"], 24);
    let log = cluster.log();
    assert!(log.contains("1 GPU (Fake GPU A) workers"), "{log}");
    // 4 GiB, of which 90 % may be used: far more than one sequence needs.
    let scrape = client.scrape().await.unwrap();
    assert!(scrape.sum("tutti_kv_cache_blocks", &[]) >= 8.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gpus_make_one_replica() {
    let alone = up(&["--workers", "1", "--tensor-parallel", "1"], &[]).await;
    let expected = alone.client().unwrap().post("/v1/completions", &request(8)).await.unwrap().body;
    drop(alone);
    let environment = [("FAKE_CUDA_DEVICES", "2")];
    let pair = up(&[], &environment).await;
    let reply = pair.client().unwrap().post("/v1/completions", &request(8)).await.unwrap();
    assert_eq!(reply.body["choices"][0]["text"], expected["choices"][0]["text"]);
}

/// Its process exits with code 71, although the driver's exit handler would wait for the GPU;
/// another one replaces it, and the request continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_fails_ends_its_worker_and_no_request() {
    // In every process, a few steps after the profiling passes and the first captures.
    let environment = [("FAKE_CUDA_FAIL", "cuGraphLaunch:16=719"), ("FAKE_CUDA_EXIT_WAITS", "1")];
    let cluster = up(&["--workers", "1", "--tensor-parallel", "1"], &environment).await;
    let client = cluster.client().unwrap();
    let reply = client.post("/v1/completions", &request(20)).await.unwrap();
    assert_eq!(reply.status, 200, "{}\n{}", reply.body, cluster.log());
    assert_eq!(reply.body["usage"]["completion_tokens"], 20);
    let log = cluster.log();
    assert!(log.contains("CUDA_ERROR_LAUNCH_FAILED"), "{log}");
    assert!(log.contains("exit status: 71"), "{log}");
}

/// Its executor is within a call of the driver that does not return, and the driver's exit handler
/// would not either. Another one replaces it, and the request continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_its_gpu_holds_ends_when_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let stuck = folder.path().join("stuck");
    let environment = [
        ("FAKE_CUDA_FAIL", "cuGraphLaunch:16=-1"),
        ("FAKE_CUDA_ONCE", stuck.to_str().unwrap()),
        ("FAKE_CUDA_EXIT_WAITS", "1"),
    ];
    let cluster = up(&["--workers", "1", "--tensor-parallel", "1"], &environment).await;
    let client = cluster.client().unwrap();
    let reply = tokio::spawn(async move { client.post("/v1/completions", &request(20)).await });
    until("the call that does not return", async || stuck.exists().then_some(())).await;
    let pid = cluster.worker_pids()[0];
    LocalCluster::signal(pid, "TERM").unwrap();
    let gone = async || (!cluster.worker_pids().contains(&pid)).then_some(());
    until("the end of the worker", gone).await;
    let reply = reply.await.unwrap().unwrap();
    assert_eq!(reply.status, 200, "{}\n{}", reply.body, cluster.log());
    assert_eq!(reply.body["usage"]["completion_tokens"], 20);
}

/// The process on it has not failed, but it is told of those that did, and tells the next
/// coordinator.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_is_set_aside_stays_so_at_the_next_coordinator() {
    let (fake, cluster) = (options(fake()), format!("127.0.0.1:{}", free_port()));
    let coordinator = || {
        let listen = ["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", &cluster];
        let model = ["--model", "tests/models/llama-gqa", "--tensor-parallel", "1"];
        let sizes = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64"];
        LocalCluster::spawn(&[&listen[..], &model, &sizes].concat()).unwrap()
    };
    let worker = |environment: &[(&str, &str)]| {
        let mut args = vec!["worker", "--coordinator", &cluster, "--node", "w", "--device", "cuda"];
        args.extend(fake.iter().map(String::as_str));
        LocalCluster::spawn_with(&[], &args, environment).unwrap()
    };
    let is_set_aside = async |at: &LocalCluster| {
        let client = at.client().unwrap();
        let look = async || {
            let status = client.get("/admin/status").await.ok()?.body;
            (status["nodes"][0]["state"] == "set aside").then_some(())
        };
        until("the worker is set aside", look).await;
    };
    let mut first = coordinator();
    first.wait_url().await.unwrap();
    for _ in 0..3 {
        let mut fails = worker(&[("FAKE_CUDA_FAIL", "cuGraphLaunch:16=719")]);
        let client = first.client().unwrap();
        // Again, until it is ready.
        let asks = tokio::spawn(async move {
            while client.post("/v1/completions", &request(40)).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        assert_eq!(fails.wait_end().unwrap().code(), Some(71), "{}", fails.log());
        // Its client leaves: another request is to be in the next one's batch.
        asks.abort();
    }
    let _well = worker(&[]);
    is_set_aside(&first).await;
    // Until it has been told.
    tokio::time::sleep(Duration::from_millis(500)).await;
    drop(first);
    let mut next = coordinator();
    next.wait_url().await.unwrap();
    is_set_aside(&next).await;
}

/// The coordinator says how long steps may take. A GPU that takes longer still costs its process,
/// and not a minute of waiting; the request continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_has_as_long_as_the_coordinator_gives_steps() {
    let folder = tempfile::tempdir().unwrap();
    let once = folder.path().join("slow");
    let environment =
        [("FAKE_CUDA_SLOW", "tutti_embed:20=40000"), ("FAKE_CUDA_ONCE", once.to_str().unwrap())];
    let args = ["--workers", "1", "--tensor-parallel", "1", "--no-cuda-graphs"];
    let limits = ["--step-timeout", "2", "--unavailable-timeout", "120"];
    let cluster = up(&[&args[..], &limits].concat(), &environment).await;
    assert!(!once.exists(), "a step of the profile is slow");
    let client = cluster.client().unwrap();
    let reply = client.post("/v1/completions", &request(40)).await.unwrap();
    let log = cluster.log();
    assert_eq!(reply.status, 200, "{}\n{log}", reply.body);
    assert_eq!(reply.body["usage"]["completion_tokens"], 40);
    assert!(log.contains("did not finish a step in 12s: it hangs"), "{log}");
    assert!(log.contains("exit status: 71"), "{log}");
}

/// Nothing is captured after startup, whatever the load. The text stays the same if a GPU runs so
/// few blocks at a time that each takes several parts of sequences.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn graphs_are_captured_before_the_first_request() {
    // Steps of 1, 2, 4 and 8 rows; with two ranks also those for which they exchange the best of
    // their logits, or a few.
    let pair = ["--workers", "2", "--tensor-parallel", "2"];
    let none = ["--workers", "1", "--tensor-parallel", "1", "--cuda-warmup", "0"];
    let mut texts = Vec::new();
    let cases = [(&none[..4], "1", 4), (&pair[..], "132", 2 * 3 * 4), (&none[..], "132", 0)];
    for (args, multiprocessors, captures) in cases {
        let log = tempfile::NamedTempFile::new().unwrap();
        let path = log.path().to_str().unwrap();
        let mut variables = vec![("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_LOG", path)];
        variables.push(("FAKE_CUDA_MULTIPROCESSORS", multiprocessors));
        // The least of any supported GPU: kernels that need more are not launched.
        variables.push(("FAKE_CUDA_SHARED_MEMORY", "101376"));
        let cluster = up(args, &variables).await;
        let captured = || {
            let text = std::fs::read_to_string(log.path()).unwrap();
            text.lines().filter(|line| line.starts_with("capture ")).count()
        };
        assert_eq!(captured(), captures, "{args:?}\n{}", cluster.log());
        // Nor is a product planned later: what the library loads for it was there when memory was
        // divided.
        let planned = || {
            let text = std::fs::read_to_string(log.path()).unwrap();
            let rows =
                text.lines().filter_map(|line| line.strip_prefix("plan ")?.split(' ').next());
            rows.map(|rows| rows.parse().unwrap()).collect::<BTreeSet<u32>>()
        };
        let most = if captures > 0 { vec![40, 48, 56, 64] } else { vec![64] };
        assert_eq!(planned().into_iter().collect::<Vec<_>>(), most, "{args:?}");
        let client = cluster.client().unwrap();
        let asks = [(1, 0.0, 12), (60, 0.7, 5), (130, 0.0, 20), (64, 0.0, 9), (33, 1.0, 14)].map(
            |(length, temperature, tokens)| {
                let prompt: Vec<u32> = (0..length).map(|at| 5 + at % 300).collect();
                let request = json!({"prompt": prompt, "max_tokens": tokens, "seed": 1,
                    "temperature": temperature, "ignore_eos": true});
                let client = client.clone();
                tokio::spawn(async move { client.post("/v1/completions", &request).await })
            },
        );
        for ask in asks {
            let reply = ask.await.unwrap().unwrap();
            assert_eq!(reply.status, 200, "{}\n{}", reply.body, cluster.log());
        }
        if args[1] == "1" {
            // Alone, so that its prompt is always cut alike; it has more parts than one
            // multiprocessor has blocks.
            let prompt: Vec<u32> = (0..130).map(|at| 301 - at).collect();
            let request = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0});
            texts.push(
                client.post("/v1/completions", &request).await.unwrap().body["choices"].clone(),
            );
        }
        // Without warm-up, steps of some size have occurred twice.
        let after = captured();
        assert!(if captures > 0 { after == captures } else { after > 0 }, "{args:?}: {after}");
    }
    assert_eq!(texts[0], texts[1]);
    assert!(texts[0][0]["text"].is_string(), "{texts:?}");
}

#[test]
fn too_few_gpus_are_said_at_once() {
    let args = ["up", "--device", "cuda", "--workers", "2", "--model", "tests/models/llama-gqa"];
    let (code, _, stderr) = with_fake(&args, &[]);
    assert_eq!(code, 69, "{stderr}");
    assert!(stderr.contains("1 usable GPU(s) for 2 workers"), "{stderr}");
}

//! A whole cluster of processes with ranks on two GPUs that exchange data through NCCL, all
//! stand-ins.
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::NamedTempFile;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;

use crate::{fake, nccl, options, with_fake};

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster of two ranks, and the stand-in's own log.
struct Pair {
    cluster: LocalCluster,
    log: NamedTempFile,
}

impl Pair {
    async fn up(args: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut pair = Self::start(args, environment);
        pair.cluster.wait_ready().await.unwrap();
        pair
    }

    fn start(args: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::of("llama-gqa", "64", args, environment)
    }

    /// A pair that serves a model of `tests/models` in steps of as many tokens.
    fn of(model: &str, tokens: &str, args: &[&str], environment: &[(&str, &str)]) -> Self {
        let (fake, nccl) = (options(fake()), nccl(None));
        let log = NamedTempFile::new().unwrap();
        let model = format!("tests/models/{model}");
        let mut all = vec!["up", "--listen", "127.0.0.1:0", "--model", &model];
        all.extend(["--device", "cuda", "--max-num-seqs", "8"]);
        all.extend(["--max-num-batched-tokens", tokens]);
        all.extend(["--workers", "2", "--tensor-parallel", "2", "--nccl-lib", &nccl]);
        // Faults are placed by call number, so there must be no calls before the first request.
        all.extend(["--cuda-warmup", "0"]);
        all.extend(args);
        all.extend(fake.iter().map(String::as_str));
        let mut variables =
            vec![("FAKE_CUDA_DEVICES", "2"), ("FAKE_NCCL_LOG", log.path().to_str().unwrap())];
        // Everything goes through NCCL, small messages too.
        variables.push(("FAKE_CUDA_PEER_ACCESS", "0"));
        variables.extend(environment);
        let cluster = LocalCluster::spawn_with(&[], &all, &variables).unwrap();
        Self { cluster, log }
    }

    fn nccl_log(&self) -> String {
        std::fs::read_to_string(self.log.path()).unwrap()
    }

    async fn complete(&self, tokens: u32) -> Value {
        self.ask(tokens, request(tokens)).await
    }

    /// The same, but each step begins only when the tokens of the previous one are known.
    async fn complete_in_steps(&self, tokens: u32) -> Value {
        let mut request = request(tokens);
        request["frequency_penalty"] = json!(0.5);
        self.ask(tokens, request).await
    }

    async fn ask(&self, tokens: u32, request: Value) -> Value {
        let client = self.cluster.client().unwrap();
        let reply = client.post("/v1/completions", &request).await.unwrap();
        assert_eq!(reply.status, 200, "{}\n{}", reply.body, self.cluster.log());
        assert_eq!(reply.body["usage"]["completion_tokens"], tokens);
        reply.body["choices"][0]["text"].clone()
    }
}

/// For the stand-in's faults: the `call`-th collective of a rank after those with which ranks try
/// NCCL out (six sums, three gathers).
fn after_trial(rank: u32, call: u32) -> &'static str {
    format!("{rank}:{}", call + 9).leak()
}

fn request(tokens: u32) -> Value {
    json!({"prompt": [1, 5, 9, 33, 7], "max_tokens": tokens, "temperature": 0.8, "seed": 3,
           "ignore_eos": true})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gpus_exchange_by_nccl_within_their_graphs() {
    let host = Pair::up(&["--cuda-exchange", "host"], &[]).await;
    let expected = host.complete(40).await;
    assert!(host.cluster.log().contains("algorithm=\"host\""), "{}", host.cluster.log());
    assert_eq!(host.nccl_log(), "");
    drop(host);
    let pair = Pair::up(&[], &[]).await;
    assert_eq!(pair.complete(40).await, expected);
    let log = pair.cluster.log();
    assert!(log.contains("algorithm=\"nccl\"") && log.contains("NCCL 2.28.9"), "{log}");
    let nccl = pair.nccl_log();
    assert_eq!(nccl.matches(" id").count(), 1, "{nccl}");
    let scrape = pair
        .cluster
        .client()
        .unwrap()
        .scrape_until(Duration::from_secs(10), |scrape| {
            scrape.sum("tutti_rank_collective_bytes_total", &[("rank", "1")]) > 0.0
        })
        .await
        .unwrap();
    let sum =
        |algorithm| scrape.sum("tutti_rank_collective_bytes_total", &[("algorithm", algorithm)]);
    assert!(
        sum("nccl") > 40.0 * 5.0 * 64.0 && sum("host") == 0.0,
        "{} {}",
        sum("nccl"),
        sum("host")
    );
    assert!(nccl.contains("init rank 0 of 2") && nccl.contains("init rank 1 of 2"), "{nccl}");
    assert!(nccl.contains("recorded rank 1"), "{nccl}");
    // For greedy requests, ranks exchange one (token, logit) pair, not their logits.
    assert!(nccl.contains("all_gather 768 recorded") && !nccl.contains("all_gather 8 "), "{nccl}");
    let client = pair.cluster.client().unwrap();
    let mut greedy = request(8);
    greedy["temperature"] = json!(0);
    let reply = client.post("/v1/completions", &greedy).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(pair.nccl_log().contains("all_gather 8 recorded"), "{}", pair.nccl_log());
    // Replayed steps make no calls: 40 steps of 5 collectives each would be 200 calls.
    assert!(nccl.matches("rank 0").count() < 100, "{nccl}");
}

/// Long prompts' sums are exchanged in bf16, and their log-probabilities stay those of f32 but for
/// its rounding; where the same bits are promised, nothing is rounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_sums_are_exchanged_in_bf16() {
    const ROWS: usize = 300;
    // The second adds norms of what it sums, not the sums.
    for (model, hidden, layers) in [("llama-gqa", 64, 2), ("gemma2", 96, 3)] {
        let prompt: Vec<usize> = (0..ROWS).map(|i| 3 + i * 37 % 380).collect();
        let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": true,
                          "logprobs": 1});
        let run = async |args: &[&str]| {
            let mut pair = Pair::of(model, "512", args, &[]);
            pair.cluster.wait_ready().await.unwrap();
            let client = pair.cluster.client().unwrap();
            let reply = client.post("/v1/completions", &body).await.unwrap();
            assert_eq!(reply.status, 200, "{}\n{}", reply.body, pair.cluster.log());
            let found = reply.body["choices"][0]["logprobs"]["token_logprobs"].clone();
            let found: Vec<f64> =
                found.as_array().unwrap().iter().filter_map(Value::as_f64).collect();
            assert_eq!(found.len(), ROWS, "all but the first, and the new one");
            let bytes = |s: &Scrape| {
                let of = [("algorithm", "nccl"), ("rank", "1")];
                s.sum("tutti_rank_collective_bytes_total", &of)
            };
            let scrape = client.scrape_until(PATIENCE, |s| bytes(s) > 0.0).await.unwrap();
            (found, bytes(&scrape) as usize, pair.nccl_log())
        };
        let (expected, exact_bytes, log) = run(&["--batch-invariant"]).await;
        let halved = format!("all_reduce_bf16 {} ", ROWS * hidden * 2);
        assert!(!log.contains(&halved), "{log}");
        let (found, bytes, log) = run(&[]).await;
        assert!(log.contains(&halved), "{log}");
        // Embeddings are summed as they are, and each layer adds two sums.
        assert_eq!(exact_bytes - bytes, 2 * layers * ROWS * hidden * 2);
        assert_ne!(found, expected, "something is rounded");
        let apart =
            || found.iter().zip(&expected).map(|(found, expected)| (found - expected).abs());
        let (most, mean) = (apart().fold(0.0, f64::max), apart().sum::<f64>() / ROWS as f64);
        assert!(most < 0.2 && mean < 0.05, "{model}: {most} at most, {mean} on average");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_rank_is_replaced_and_the_other_keeps_its_weights() {
    // What was generated is computed again as one prompt, which gives the same bits only so.
    let pair = Pair::up(&["--batch-invariant"], &[]).await;
    let expected = pair.complete(120).await;
    for victim in 0..2 {
        let client = pair.cluster.client().unwrap();
        let before = pair.cluster.worker_pids();
        let generated = client.scrape().await.unwrap().sum("tutti_generation_tokens_total", &[]);
        let running = {
            let client = client.clone();
            tokio::spawn(
                async move { client.post("/v1/completions", &request(120)).await.unwrap() },
            )
        };
        client
            .scrape_until(Duration::from_secs(30), |scrape| {
                scrape.sum("tutti_generation_tokens_total", &[]) > generated + 5.0
            })
            .await
            .unwrap();
        LocalCluster::signal(before[victim], "KILL").unwrap();
        let reply = running.await.unwrap();
        assert_eq!(reply.status, 200, "{}\n{}", reply.body, pair.cluster.log());
        assert_eq!(reply.body["choices"][0]["text"], expected, "victim {victim}");
        let survivor = before[1 - victim];
        assert!(pair.cluster.worker_pids().contains(&survivor), "the survivor goes on");
        let nccl = pair.nccl_log();
        assert!(nccl.contains(&format!("{survivor} abort")), "{nccl}");
    }
    let scrape = pair.cluster.client().unwrap().scrape().await.unwrap();
    assert!(scrape.sum("tutti_rank_collective_aborts_total", &[]) >= 1.0, "of a survivor");
    // One id for each epoch.
    assert_eq!(pair.nccl_log().matches(" id").count(), 3, "{}", pair.nccl_log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_rank_is_replaced() {
    let pair = Pair::up(&[], &[]).await;
    let expected = pair.complete(16).await;
    let (survivor, frozen) = (pair.cluster.worker_pids()[0], pair.cluster.worker_pids()[1]);
    LocalCluster::signal(frozen, "STOP").unwrap();
    let began = Instant::now();
    assert_eq!(pair.complete(16).await, expected);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let pids = pair.cluster.worker_pids();
    assert!(pids.contains(&survivor) && !pids.contains(&frozen), "{pids:?}");
}

/// A rank that goes on alone loads another shard while NCCL still releases what it shared with the
/// others: that stays valid as long, and it waits for the memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nccl_releases_late_outlives_the_weights() {
    let (fake, nccl, at) = (options(fake()), nccl(None), format!("127.0.0.1:{}", free_port()));
    let mut args = vec!["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", &at];
    args.extend(["--model", "tests/models/llama-gqa", "--max-num-seqs", "8"]);
    args.extend(["--tensor-parallel", "2", "--min-tensor-parallel", "1"]);
    let mut cluster = LocalCluster::spawn(&args).unwrap();
    let log = NamedTempFile::new().unwrap();
    let worker = |node: &str, device: &str| {
        let mut args = vec!["worker", "--coordinator", &at, "--node", node, "--device", device];
        args.extend(["--nccl-lib", &nccl, "--cuda-exchange", "nccl"]);
        args.extend(fake.iter().map(String::as_str));
        let log = log.path().to_str().unwrap();
        let faults = [("FAKE_NCCL_LOG", log), ("FAKE_NCCL_ABORT_SLOW", "*:1")];
        let variables = [&[("FAKE_CUDA_DEVICES", "2")][..], &faults].concat();
        LocalCluster::spawn_with(&[], &args, &variables).unwrap()
    };
    let (stays, goes) = (worker("w0", "cuda:0"), worker("w1", "cuda:1"));
    cluster.wait_ready().await.unwrap();
    let client = cluster.client().unwrap();
    let complete = async || {
        let reply = client.post("/v1/completions", &request(16)).await.unwrap();
        assert_eq!(reply.status, 200, "{}\n{}\n{}", reply.body, cluster.log(), stays.log());
    };
    complete().await;
    drop(goes);
    complete().await;
    let nccl_log = || std::fs::read_to_string(log.path()).unwrap();
    assert!(nccl_log().contains("abort is slow rank"), "{}", nccl_log());
    // It measures how much memory there is when the communicator no longer holds any.
    assert!(nccl_log().contains("abort rank"), "{}\n{}", nccl_log(), stays.log());
}

/// The next epoch recovers from each of these: weights stay loaded, no process ends, and the text
/// is the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nccl_finds_wrong_ends_the_epoch_and_nothing_else() {
    let expected = Pair::up(&[], &[]).await.complete(16).await;
    // The collectives of the prompt and of two steps are called directly, later ones in graphs.
    let cases = [
        ("FAKE_NCCL_INIT_FAIL", "1:1", "ncclSystemError (2)"),
        ("FAKE_NCCL_INIT_REFUSE", "1:1", "ncclSystemError (2)"),
        ("FAKE_NCCL_CALL_FAIL", after_trial(0, 8), "ncclUnhandledCudaError (1)"),
        // While its graph is captured.
        ("FAKE_NCCL_CALL_FAIL", after_trial(1, 15), "ncclUnhandledCudaError (1)"),
        ("FAKE_NCCL_ASYNC_ERROR", after_trial(1, 60), "ncclRemoteError (6)"),
        ("FAKE_NCCL_LATE", after_trial(1, 60), "NCCL 2.28.9"),
    ];
    for (variable, value, words) in cases {
        let args = ["--cuda-exchange", "nccl"];
        let pair = Pair::up(&args, &[(variable, value)]).await;
        let pids = pair.cluster.worker_pids();
        assert_eq!(pair.complete(16).await, expected, "{variable}");
        let log = pair.cluster.log();
        assert!(log.contains(words), "{variable}: {words} is not in\n{log}");
        if !variable.starts_with("FAKE_NCCL_INIT") {
            assert_eq!(pair.cluster.worker_pids(), pids, "{variable}\n{log}");
        }
        let nccl = pair.nccl_log();
        // Every communicator is freed completely, and not used afterwards.
        assert!(!nccl.contains("died"), "{variable}\n{nccl}");
        if variable.starts_with("FAKE_NCCL_INIT") {
            assert!(nccl.contains("abort rank 1"), "{variable}\n{nccl}");
        }
        if variable == "FAKE_NCCL_LATE" {
            assert_eq!(nccl.matches("late rank 1").count(), 1, "{nccl}");
        }
        // Ranks of one host have to leave it together.
        assert!(!log.contains("left behind"), "{variable}\n{log}");
        // Graphs are recorded all the same.
        assert!(pair.nccl_log().contains("recorded"), "{variable}\n{}", pair.nccl_log());
        let epochs = if variable == "FAKE_NCCL_LATE" { 1 } else { 2 };
        assert_eq!(pair.nccl_log().matches(" id").count(), epochs, "{variable}\n{log}");
    }
}

/// NCCL is installed but cannot connect the ranks: unless it was requested, they serve without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_nccl_does_not_connect_go_another_way() {
    let host = Pair::up(&["--cuda-exchange", "host"], &[]).await.complete(8).await;
    let cases = [
        ("FAKE_NCCL_INIT_REFUSE", "0:1", "ncclSystemError (2)"),
        // The only symptom is that it takes too long.
        ("FAKE_NCCL_INIT_HANG", "1:1", "did not finish an exchange"),
    ];
    for (variable, value, words) in cases {
        let pair = Pair::up(&[], &[(variable, value)]).await;
        assert_eq!(pair.complete(8).await, host, "{variable}");
        let (log, nccl) = (pair.cluster.log(), pair.nccl_log());
        assert_eq!(log.matches("algorithm=\"host\"").count(), 2, "{variable}\n{log}");
        for words in ["NCCL cannot connect the ranks", words] {
            assert!(log.contains(words), "{variable}: {words} is not in\n{log}");
        }
        // One epoch, and no communicator left in it.
        assert_eq!(nccl.matches(" id").count(), 1, "{variable}\n{nccl}");
        let (made, freed) = (nccl.matches("init rank"), nccl.matches("abort rank"));
        assert_eq!(made.count(), freed.count(), "{variable}\n{nccl}");
        assert!(!nccl.contains("died"), "{variable}\n{nccl}");
    }
}

/// From 2.22 on NCCL connects for each of its algorithms only when that is first needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_whose_first_exchange_fails_go_another_way() {
    let pair = Pair::up(&[], &[("FAKE_NCCL_CALL_FAIL", "0:2")]).await;
    let (log, nccl) = (pair.cluster.log(), pair.nccl_log());
    assert_eq!(log.matches("algorithm=\"host\"").count(), 2, "{log}");
    for words in ["NCCL cannot connect the ranks", "ncclUnhandledCudaError (1)"] {
        assert!(log.contains(words), "{words} is not in\n{log}");
    }
    pair.complete(4).await;
    assert_eq!(nccl.matches(" id").count(), 1, "{nccl}");
    assert_eq!(nccl.matches("abort rank").count(), 2, "{nccl}");
    assert!(!nccl.contains("died"), "{nccl}");
}

/// A rank dies while the other one connects to it: that one is not held up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_ends_the_connecting() {
    let mut pair = Pair::start(&["--cuda-exchange", "nccl"], &[("FAKE_NCCL_INIT_HANG", "1:1")]);
    let began = Instant::now();
    let mut pids = Vec::new();
    while pids.len() < 2 {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", pair.cluster.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
        let nccl = pair.nccl_log();
        let begun = nccl.lines().filter(|line| line.contains("init rank"));
        pids = begun.filter_map(|line| line.split(' ').next()?.parse().ok()).collect();
    }
    // The log line of each process shows its rank.
    let first = pair.nccl_log().lines().any(|line| line == format!("{} init rank 0 of 2", pids[0]));
    let (victim, survivor) = if first { (pids[0], pids[1]) } else { (pids[1], pids[0]) };
    LocalCluster::signal(victim, "KILL").unwrap();
    let began = Instant::now();
    pair.cluster.wait_ready().await.unwrap();
    // Ranks would wait for each other for half a minute.
    assert!(began.elapsed() < Duration::from_secs(25), "{:?}", began.elapsed());
    pair.complete(4).await;
    let nccl = pair.nccl_log();
    assert!(nccl.contains(&format!("{survivor} abort rank 1")), "{nccl}");
    assert!(!nccl.contains("died"), "{nccl}");
    assert!(pair.cluster.worker_pids().contains(&survivor), "{}", pair.cluster.log());
}

/// A rank that has waited long enough reports it, and the coordinator's message frees the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collective_that_hangs_is_ended() {
    let expected = Pair::up(&[], &[]).await.complete(16).await;
    let pair = Pair::up(&[], &[("FAKE_NCCL_HANG", after_trial(1, 60))]).await;
    let pids = pair.cluster.worker_pids();
    let began = Instant::now();
    assert_eq!(pair.complete(16).await, expected);
    // By default ranks wait for each other for half a minute.
    let took = began.elapsed();
    assert!(took > Duration::from_secs(25) && took < Duration::from_secs(50), "{took:?}");
    let log = pair.cluster.log();
    assert_eq!(pair.cluster.worker_pids(), pids, "{log}");
    assert!(log.contains("did not finish an exchange"), "{log}");
    assert_eq!(pair.nccl_log().matches(" id").count(), 2, "{log}");
}

/// When one rank finds an error, the other leaves too, whatever it is doing. The stand-in checks
/// that its communicator is then aborted correctly and not used any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_ends_calls_under_way_and_no_process() {
    // Both ranks then reach the same call.
    let expected = Pair::up(&[], &[]).await.complete_in_steps(16).await;
    // The third step's collectives are captured.
    let cases = [
        // Within a call that waits for the other rank.
        ("FAKE_NCCL_BLOCK", after_trial(1, 8), after_trial(0, 8), "blocked rank 1"),
        ("FAKE_NCCL_BLOCK", after_trial(1, 14), after_trial(0, 14), "blocked rank 1"),
        // A call that NCCL continues in the background.
        ("FAKE_NCCL_SLOW", after_trial(1, 8), after_trial(0, 8), "slow rank 1"),
        ("FAKE_NCCL_SLOW", after_trial(1, 14), after_trial(0, 14), "slow rank 1"),
    ];
    for (variable, value, fails, words) in cases {
        let faults = [(variable, value), ("FAKE_NCCL_CALL_FAIL", fails)];
        let pair = Pair::up(&[], &faults).await;
        let pids = pair.cluster.worker_pids();
        let began = Instant::now();
        assert_eq!(pair.complete_in_steps(16).await, expected, "{variable}");
        // Less than the time that ranks wait for each other.
        assert!(began.elapsed() < Duration::from_secs(25), "{}", pair.nccl_log());
        let (log, nccl) = (pair.cluster.log(), pair.nccl_log());
        assert!(nccl.contains(words) && !nccl.contains("died"), "{variable}\n{nccl}");
        assert_eq!(pair.cluster.worker_pids(), pids, "{variable} {value}\n{log}");
        assert_eq!(nccl.matches("abort rank").count(), 2, "{variable} {value}\n{nccl}");
    }
}

/// The GPU is idle, so both ranks go on: the one whose abort hangs, and the one that waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_that_hangs_costs_no_process() {
    let faults = [("FAKE_NCCL_CALL_FAIL", after_trial(0, 8)), ("FAKE_NCCL_ABORT_HANG", "1:1")];
    let pair = Pair::up(&[], &faults).await;
    let before = pair.cluster.worker_pids();
    let text = pair.complete(8).await;
    let log = pair.cluster.log();
    assert_eq!(log.matches("it is left behind, with its memory").count(), 2, "{log}");
    assert_eq!(pair.cluster.worker_pids(), before, "{log}");
    let nccl = pair.nccl_log();
    assert!(nccl.contains("abort hangs rank 1") && !nccl.contains("abort rank"), "{nccl}");
    assert_eq!(nccl.matches(" id").count(), 2, "{nccl}");
    assert_eq!(Pair::up(&[], &[]).await.complete(8).await, text);
}

/// Graphs are given up where NCCL records nothing in them, like those that the driver refuses:
/// otherwise every epoch would end at its first graph.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_whose_exchanges_are_not_captured_do_without_graphs() {
    let expected = Pair::up(&[], &[]).await.complete(16).await;
    let pair = Pair::up(&[], &[("FAKE_NCCL_CAPTURE_FAIL", "1")]).await;
    let pids = pair.cluster.worker_pids();
    assert_eq!(pair.complete(16).await, expected);
    let (log, nccl) = (pair.cluster.log(), pair.nccl_log());
    assert_eq!(pair.cluster.worker_pids(), pids, "{log}");
    // Once with kernels that begin early, and once without.
    assert_eq!(nccl.matches("not captured rank 1").count(), 2, "{nccl}");
    assert_eq!(nccl.matches(" id").count(), 3, "{nccl}");
    assert!(log.contains("algorithm=\"nccl\""), "{log}");
}

/// NCCL takes that from the environment before what communicators are made with.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_never_wait_for_other_ranks_whatever_the_environment_says() {
    let pair = Pair::up(&[], &[("NCCL_COMM_BLOCKING", "1")]).await;
    pair.complete(4).await;
    let nccl = pair.nccl_log();
    assert!(nccl.contains("init rank 1 of 2") && !nccl.contains("waits in a call"), "{nccl}");
}

/// A GPU that never becomes idle: its worker reports it and exits, although any call that waits for
/// the GPU, such as freeing its memory, would never return.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_hangs_costs_its_process_and_nothing_else() {
    // In the second request: the replacement process does not get that far.
    let faults =
        [("FAKE_NCCL_STUCK", after_trial(1, 130)), ("FAKE_NCCL_ASYNC_ERROR", after_trial(0, 130))];
    let pair = Pair::up(&[], &faults).await;
    let before = pair.cluster.worker_pids();
    let expected = pair.complete(16).await;
    assert_eq!(pair.cluster.worker_pids(), before, "{}", pair.cluster.log());
    assert_eq!(pair.complete(16).await, expected);
    let log = pair.cluster.log();
    assert!(log.contains("after its exchange with other ranks was aborted: it hangs"), "{log}");
    let after = pair.cluster.worker_pids();
    assert_eq!(before.iter().filter(|pid| after.contains(pid)).count(), 1, "{log}");
}

#[test]
fn an_nccl_that_cannot_be_used_is_said_in_a_line() {
    let line = |nccl: &str, environment: &[(&str, &str)]| {
        let (code, stdout, stderr) = with_fake(&["devices", "--nccl-lib", nccl], environment);
        assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
        stdout.lines().find(|line| line.contains("NCCL")).unwrap_or_default().to_owned()
    };
    assert!(line(&nccl(None), &[]).ends_with("2.28.9"));
    let old = line(&nccl(None), &[("FAKE_NCCL_VERSION", "22105")]);
    assert!(old.contains("version 2.21.5, this program needs 2.22.3 or later"), "{old}");
    let lacking = line(&nccl(Some("ncclCommAbort")), &[]);
    assert!(lacking.contains("it lacks ncclCommAbort"), "{lacking}");
    let absent = line("/nowhere/libnccl.so.2", &[]);
    assert!(absent.contains("/nowhere/libnccl.so.2"), "{absent}");
}

/// Without NCCL ranks use host memory and say why; a worker that insists on NCCL gets an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_nccl_ranks_go_through_host_memory() {
    let pair = Pair::up(&[], &[("FAKE_NCCL_VERSION", "22105")]).await;
    let text = pair.complete(8).await;
    let log = pair.cluster.log();
    assert!(log.contains("algorithm=\"host\"") && log.contains("version 2.21.5"), "{log}");
    assert_eq!(pair.nccl_log(), "");
    drop(pair);
    assert_eq!(Pair::up(&[], &[]).await.complete(8).await, text);
    let (fake, nccl) = (options(fake()), nccl(None));
    let mut all = vec!["up", "--listen", "127.0.0.1:0", "--model", "tests/models/llama-gqa"];
    all.extend(["--device", "cuda", "--workers", "2", "--tensor-parallel", "2"]);
    all.extend(["--nccl-lib", &nccl, "--cuda-exchange", "nccl"]);
    all.extend(fake.iter().map(String::as_str));
    let variables = [("FAKE_CUDA_DEVICES", "2"), ("FAKE_NCCL_VERSION", "22105")];
    let cluster = LocalCluster::spawn_with(&[], &all, &variables).unwrap();
    let began = Instant::now();
    let words = "--cuda-exchange nccl: rank 0 has no NCCL that can be used";
    while !cluster.log().contains(words) {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", cluster.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

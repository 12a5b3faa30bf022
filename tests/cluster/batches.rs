//! `tutti run-batch`: files of requests, and what may come between.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;

use crate::{STORY, secrets, up};

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder with a batch, whose requests answer with sampled text of a fixed seed.
struct Batch {
    folder: tempfile::TempDir,
    bodies: BTreeMap<String, Value>,
}

impl Batch {
    fn new(count: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let body = |seed: usize| {
            json!({"model": "demo", "prompt": STORY, "max_tokens": 60, "ignore_eos": true,
                   "temperature": 1, "seed": seed})
        };
        let bodies = (0..count).map(|seed| (format!("story \"{seed}\""), body(seed))).collect();
        let batch = Self { folder, bodies };
        let mut lines = String::new();
        for (id, body) in &batch.bodies {
            let request = json!({"custom_id": id, "method": "POST", "url": "/v1/completions",
                                 "body": body});
            writeln!(lines, "{request}").unwrap();
        }
        std::fs::write(batch.input(), lines).unwrap();
        batch
    }

    fn input(&self) -> PathBuf {
        self.folder.path().join("batch.jsonl")
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("answers.jsonl")
    }

    fn add(&self, id: &str, url: &str, body: &Value) {
        let mut lines = std::fs::read_to_string(self.input()).unwrap();
        writeln!(lines, "{}", json!({"custom_id": id, "url": url, "body": body})).unwrap();
        std::fs::write(self.input(), lines).unwrap();
    }

    /// Calls `act` with the arguments of `tutti run-batch`.
    fn with_args<T>(&self, more: &[&str], act: impl FnOnce(&[&str]) -> T) -> T {
        let (input, output) = (self.input(), self.output());
        let (input, output) = (input.to_str().unwrap(), output.to_str().unwrap());
        act(&[&["run-batch", "-i", input, "-o", output], more].concat())
    }

    /// Starts it.
    fn start(&self, more: &[&str]) -> LocalCluster {
        self.with_args(more, |args| LocalCluster::spawn(args).unwrap())
    }

    /// Runs it to its end; returns its exit code and its output.
    fn run(&self, more: &[&str]) -> (Option<i32>, String) {
        self.with_args(more, secrets::run)
    }

    fn lines(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.output()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    async fn until_lines(&self, count: usize) {
        let began = Instant::now();
        while self.lines().len() < count {
            assert!(began.elapsed() < PATIENCE, "{} lines", self.lines().len());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The answers by id, each of which is there once.
    fn answers(&self) -> BTreeMap<String, Value> {
        let mut answers = BTreeMap::new();
        for line in self.lines() {
            let line: Value = serde_json::from_str(&line).unwrap();
            let id = line["custom_id"].as_str().unwrap().to_owned();
            assert_eq!(line["error"], Value::Null, "{line}");
            let again = answers.insert(id, line["response"].clone());
            assert!(again.is_none(), "answered twice: {line}");
        }
        answers
    }

    /// Asks for each answer again, and compares.
    async fn check(&self, client: &Client) {
        let answers = self.answers();
        assert!(answers.len() >= self.bodies.len());
        for (id, body) in &self.bodies {
            let answer = &answers[id];
            assert_eq!(answer["status_code"], 200, "{answer}");
            let own = answer["body"]["id"].as_str().and_then(|own| own.strip_prefix("cmpl-"));
            assert_eq!(answer["request_id"].as_str(), own, "{answer}");
            let expected = client.post("/v1/completions", body).await.unwrap().body;
            for field in ["choices", "usage"] {
                assert_eq!(answer["body"][field], expected[field], "{id}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_answered_as_its_requests_are_and_goes_on_after_it_was_killed() {
    let cluster = up(&["--max-num-seqs", "4", "--api-key", "the-key"]).await;
    let batch = Batch::new(60);
    batch.add("bad", "/v1/completions", &json!({"prompt": STORY, "temperature": 900}));
    batch.add(
        "chat",
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    );
    batch.add("vector", "/v1/embeddings", &json!({"input": STORY}));
    let server = ["--server", cluster.base(), "--concurrency", "3"];
    let run = batch.start(&[&server[..], &["--api-key", "the-key"]].concat());
    batch.until_lines(5).await;
    LocalCluster::signal(run.pid(), "KILL").unwrap();
    drop(run);
    // It may have come far meanwhile. As if it had been killed earlier, and while it wrote.
    let mut begun = batch.lines();
    begun.truncate(20);
    let torn = begun.join("\n") + "\n" + &begun[0][..begun[0].len() / 2];
    std::fs::write(batch.output(), torn).unwrap();

    let (code, said) = batch.run(&server);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("give --resume"), "{said}");
    // That is no answer to anything.
    let (code, said) = batch.run(&[&server[..], &["--resume"]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("wants another --api-key"), "{said}");
    assert_eq!(batch.lines(), begun, "the line that was cut off is gone");

    let (code, said) = batch.run(&[&server[..], &["--resume", "--api-key", "the-key"]].concat());
    assert_eq!(code, Some(0), "{said}");
    let counts = format!(
        "{0} of {0} requests: {1} answered, 1 refused, 0 failed",
        63 - begun.len(),
        62 - begun.len()
    );
    assert!(said.contains(&counts), "{counts}: {said}");
    let answers = batch.answers();
    assert_eq!(answers.len(), 63);
    assert_eq!(answers["bad"]["status_code"], 400);
    assert_eq!(answers["bad"]["body"]["error"]["param"], "temperature");
    assert_eq!(answers["chat"]["body"]["object"], "chat.completion");
    assert!(answers["vector"]["body"]["data"][0]["embedding"].is_array());
    batch.check(&Client::with_key(cluster.base(), "the-key").unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_waits_for_a_coordinator_that_is_killed_and_started_again() {
    let (address, listen) =
        (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
    let coordinator = || {
        LocalCluster::spawn(&[
            "coordinator",
            "--listen",
            &listen,
            "--cluster-listen",
            &address,
            "--tensor-parallel",
            "1",
            "--max-num-seqs",
            "4",
        ])
        .unwrap()
    };
    let _worker =
        LocalCluster::spawn(&["worker", "--coordinator", &address, "--threads", "1"]).unwrap();
    let batch = Batch::new(60);
    // Before anybody listens there.
    let run = ["--server", &listen, "--concurrency", "3", "--retry-for"];
    let mut patient = batch.start(&[&run[..], &["120"]].concat());
    let first = coordinator();
    batch.until_lines(10).await;
    drop(first);
    let mut second = coordinator();
    second.wait_ready().await.unwrap();
    assert_eq!(patient.wait_end().unwrap().code(), Some(0), "{}", patient.log());
    assert_eq!(batch.answers().len(), 60);
    batch.check(&second.client().unwrap()).await;

    drop(second);
    std::fs::remove_file(batch.output()).unwrap();
    let (code, said) = batch.run(&[&run[..], &["0"]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("60 requests have no answer yet"), "{said}");
    let line: Value = serde_json::from_str(&batch.lines()[0]).unwrap();
    assert_eq!((&line["response"], &line["error"]["code"]), (&Value::Null, &json!("unreached")));
}

/// The queue has room for one, and the first server is not there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_waits_for_a_busy_server_and_goes_on_at_the_next_one() {
    let cluster = up(&["--max-num-seqs", "1", "--max-queued-requests", "1"]).await;
    let batch = Batch::new(6);
    let servers = format!("127.0.0.1:{},{}", free_port(), cluster.base());
    let (code, said) = batch.run(&["--server", &servers, "--concurrency", "6"]);
    assert_eq!(code, Some(0), "{said}");
    let client = cluster.client().unwrap();
    let refused = client.scrape().await.unwrap().sum("tutti_requests_rejected_total", &[]);
    assert!(refused > 0.0, "it was never busy");
    assert_eq!(batch.answers().len(), 6);
    batch.check(&client).await;
}

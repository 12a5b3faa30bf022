//! The reader of a process's output may stall: the process keeps running.
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use testkit::client::Client;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use testkit::models::repository;
use testkit::scrape::Scrape;

use crate::{STORY, greedy};

const PATIENCE: Duration = Duration::from_secs(60);

/// Killed on drop; its workers end with it.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pipe_that_nobody_reads_stops_nothing() {
    let one = ["--workers", "1", "--tensor-parallel", "1", "--threads", "1"];
    let mut child = Command::new(tutti_binary())
        .args(["up", "--listen", "127.0.0.1:0", "--access-log", "--log-level", "trace"])
        .args(one)
        .current_dir(repository())
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let mut tutti = Killed(child);
    let mut lines = BufReader::new(stdout).lines();
    let base = tokio::task::spawn_blocking(move || {
        let mut lines = lines.by_ref().map_while(Result::ok);
        lines.find_map(|line| line.strip_prefix("ready: ").map(str::to_owned))
    });
    let base = tokio::time::timeout(PATIENCE, base).await.expect("it is ready").unwrap().unwrap();
    let client = Client::new(&base).unwrap();
    let dropped = |s: &Scrape| s.sum("tutti_log_lines_dropped_total", &[]);
    let began = Instant::now();
    // The pipe holds 64 KiB, the queue 1 MiB.
    loop {
        for _ in 0..50 {
            assert_eq!(client.get("/v1/models").await.unwrap().status, 200);
        }
        if dropped(&client.scrape().await.unwrap()) > 0.0 {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "no line is dropped: the pipe is not full");
    }
    // The worker's log goes through the same pipe.
    let reply = client.post("/v1/completions", &greedy(STORY, 8)).await.unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);

    // The process ends although its last lines cannot be written.
    LocalCluster::signal(tutti.0.id(), "TERM").unwrap();
    let told = Instant::now();
    while tutti.0.try_wait().unwrap().is_none() {
        assert!(told.elapsed() < PATIENCE, "it does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut text = Vec::new();
    let reading = tokio::task::spawn_blocking(move || {
        let mut stderr = stderr;
        stderr.read_to_end(&mut text).map(|_| text)
    });
    let text = tokio::time::timeout(PATIENCE, reading).await.unwrap().unwrap().unwrap();
    assert!(text.len() >= 4096, "what was written before is there: {} bytes", text.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_line_is_written_before_the_end() {
    let output = Command::new(tutti_binary())
        .args(["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"])
        .args(["--model", "/no/such/model"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.lines().last().unwrap().starts_with("error: "), "{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
}

//! Secrets that change while everything runs: the cluster's is replaced by another, an API key is
//! taken back.
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reqwest::Client as Http;
use testkit::fleet::free_port;
use testkit::load::Load;
use testkit::local_cluster::LocalCluster;
use testkit::scrape::Scrape;

use crate::scaling::operate;
use crate::secrets::{run, secret_file};

/// A file is in use two looks after its change, 5 s each.
const IN_USE_WITHIN: Duration = Duration::from_secs(40);
const PATIENCE: Duration = Duration::from_secs(60);

/// How often a process has said that its secrets have changed.
fn changes(process: &LocalCluster) -> usize {
    process.log().matches("cluster secrets have changed and are in use").count()
}

/// Writes each process's file, in this order, and waits until all have read theirs.
async fn tell(all: &[(&LocalCluster, &Path)], text: &str) {
    let before: Vec<usize> = all.iter().map(|(process, _)| changes(process)).collect();
    for (_, file) in all {
        let name = file.file_name().unwrap().to_str().unwrap();
        secret_file(file.parent().unwrap(), name, text.as_bytes(), 0o600);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let began = Instant::now();
    while all.iter().zip(&before).any(|((process, _), before)| changes(process) == *before) {
        assert!(began.elapsed() < IN_USE_WITHIN, "a file was not read again");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Each process has a file of its own, as on hosts of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clusters_secret_is_replaced_under_load_and_no_request_notices() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = ("o".repeat(44), "n".repeat(44));
    let file = |name: &str, text: &str| -> PathBuf {
        secret_file(folder.path(), name, text.as_bytes(), 0o600)
    };
    let files: Vec<PathBuf> =
        ["coordinator", "worker-0", "worker-1", "frontend"].map(|it| file(it, &old)).into();
    let path = |index: usize| files[index].to_str().unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let spawn = |args: &[&str], secret: &str| {
        LocalCluster::spawn(&[args, &["--cluster-secret-file", secret]].concat()).unwrap()
    };
    let listen = ["--listen", "127.0.0.1:0"];
    let lead = ["coordinator", "--tensor-parallel", "1", "--cluster-listen", &address];
    let mut coordinator = spawn(&[&lead[..], &listen].concat(), path(0));
    let join = ["worker", "--coordinator", &address, "--threads", "1", "--node"];
    let worker =
        |index: usize| spawn(&[&join[..], &[&format!("worker-{index}")]].concat(), path(index + 1));
    let (mut first, second) = (worker(0), worker(1));
    coordinator.wait_ready().await.unwrap();
    let mut frontend =
        spawn(&[&["frontend", "--coordinator", &address], &listen[..]].concat(), path(3));
    frontend.wait_ready().await.unwrap();
    let client = coordinator.client().unwrap();
    let up = |workers: f64| move |s: &Scrape| s.sum("tutti_replica_up", &[]) == workers;
    assert!(up(2.0)(&client.scrape_until(PATIENCE, up(2.0)).await.unwrap()));
    let servers = [client.clone(), frontend.client().unwrap()];
    let load = Load::start(&servers, 2, 64, Duration::from_millis(250)).await.unwrap();
    let (old_file, new_file) = (file("old", &old), file("new", &new));
    let (old_file, new_file) = (old_file.to_str().unwrap(), new_file.to_str().unwrap());
    let status =
        |secret: &str| operate(coordinator.base(), &["status", "--cluster-secret-file", secret]).0;
    let stranger = |secret: &str| {
        let refused = ["stranger", "--cluster-secret-file", secret];
        run(&[&join[..], &refused].concat())
    };
    assert!(status(old_file) && !status(new_file));
    let process: [&LocalCluster; 4] = [&coordinator, &first, &second, &frontend];
    let at = |order: [usize; 4]| order.map(|it| (process[it], files[it].as_path()));

    tell(&at([0, 1, 2, 3]), &format!("{old}\n{new}\n")).await;
    let (code, said) = stranger(new_file);
    assert_eq!(code, Some(1), "nobody proves itself by the new one yet: {said}");
    // The coordinator first: whoever dials knows both.
    tell(&at([0, 3, 2, 1]), &format!("{new}\n{old}\n")).await;
    let (code, said) = stranger(old_file);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("another cluster secret"), "{said}");
    assert!(status(old_file) && status(new_file), "an operator may have either");
    tell(&at([2, 0, 1, 3]), &format!("{new}\n")).await;
    assert!(!status(old_file) && status(new_file));

    // Links that are made from now on.
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    first.wait_end().unwrap();
    assert!(up(1.0)(&client.scrape_until(PATIENCE, up(1.0)).await.unwrap()));
    let _again = worker(0);
    assert!(up(2.0)(&client.scrape_until(PATIENCE, up(2.0)).await.unwrap()));
    let seen = load.stop().await;
    assert!(seen.failures.is_empty(), "{:?}", seen.failures);
    assert!(seen.good > 10, "{}", seen.good);
    let scrape = client.scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_failovers_total", &[]), 1.0, "that of the killed worker");
    drop(second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_key_that_is_taken_out_of_the_file_is_refused_within_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let keys = secret_file(folder.path(), "keys", b"stays\nleaves\n", 0o600);
    let one = ["--workers", "1", "--tensor-parallel", "1", "--threads", "1"];
    let file = ["--api-key-file", keys.to_str().unwrap()];
    let cluster = LocalCluster::up(&[&one[..], &file].concat()).await.unwrap();
    let asks = async |key: &str| {
        let request = Http::new().get(format!("{}/v1/models", cluster.base()));
        request.bearer_auth(key).send().await.unwrap().status().as_u16()
    };
    assert_eq!((asks("stays").await, asks("leaves").await), (200, 200));
    secret_file(folder.path(), "keys", b"stays\ncomes\n", 0o600);
    let changed = Instant::now();
    while asks("leaves").await != 401 {
        assert!(changed.elapsed() < IN_USE_WITHIN, "it is let in still");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!((asks("stays").await, asks("comes").await), (200, 200));
}

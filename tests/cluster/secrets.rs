//! The cluster secret: processes that have it can join, others are told so and exit. Without a
//! secret, no address is opened that other hosts can reach.
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::fleet::free_port;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use testkit::models::repository;

use crate::{STORY, greedy, text};

pub(crate) fn secret_file(folder: &Path, name: &str, content: &[u8], mode: u32) -> PathBuf {
    let file = folder.join(name);
    std::fs::write(&file, content).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    file
}

/// Runs `tutti ARGS` to its end; returns the exit code and the output.
pub(crate) fn run(args: &[&str]) -> (Option<i32>, String) {
    let output =
        Command::new(tutti_binary()).args(args).current_dir(repository()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    (output.status.code(), said)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_who_knows_the_secret_joins() {
    let folder = tempfile::tempdir().unwrap();
    let right = secret_file(folder.path(), "right", &[b'r'; 44], 0o600);
    let wrong = secret_file(folder.path(), "wrong", &[b'w'; 44], 0o600);
    let (right, wrong) = (right.to_str().unwrap(), wrong.to_str().unwrap());
    let address = format!("127.0.0.1:{}", free_port());
    let spawn = |args: &[&str]| LocalCluster::spawn(args).unwrap();
    let mut coordinator = spawn(&[
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--cluster-listen",
        &address,
        "--tensor-parallel",
        "1",
        "--cluster-secret-file",
        right,
    ]);
    let join = ["worker", "--coordinator", &address, "--node"];
    let _worker = spawn(&[&join[..], &["good", "--cluster-secret-file", right]].concat());
    coordinator.wait_ready().await.unwrap();
    let mut frontend = spawn(&[
        "frontend",
        "--coordinator",
        &address,
        "--listen",
        "127.0.0.1:0",
        "--cluster-secret-file",
        right,
    ]);
    frontend.wait_ready().await.unwrap();
    let client = frontend.client().unwrap();
    let reply = client.post("/v1/completions", &greedy(STORY, 8)).await.unwrap();
    assert_eq!(reply.status, 200);
    assert!(!text(&reply.body).is_empty());

    let (code, said) = run(&[&join[..], &["bad", "--cluster-secret-file", wrong]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("another cluster secret"), "{said}");
    let (code, said) = run(&[&join[..], &["none"]].concat());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("--cluster-secret-file"), "{said}");
    let (code, said) = run(&["frontend", "--coordinator", &address, "--listen", "127.0.0.1:0"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("--cluster-secret-file"), "{said}");
    // The HTTP port in place of the cluster's, with a secret and without.
    let http = coordinator.base().trim_start_matches("http://").to_owned();
    for secret in [&[][..], &["--cluster-secret-file", right]] {
        let lost = ["worker", "--coordinator", &http, "--node", "lost"];
        let (code, said) = run(&[&lost[..], secret].concat());
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("that is an HTTP port"), "{said}");
    }
    let scrape = coordinator.client().unwrap().scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_worker_up", &[]), 1.0, "strangers have no slot");
    assert_eq!(scrape.sum("tutti_frontend_up", &[]), 1.0);
    let refused = scrape.sum("tutti_handshakes_refused_total", &[("reason", "authentication")]);
    assert!(refused >= 3.0, "{refused} handshakes refused");
    assert_eq!(scrape.sum("tutti_handshakes_refused_total", &[]), refused);

    // A coordinator without a secret tells so to a worker that has one.
    let open = format!("127.0.0.1:{}", free_port());
    let mut plain = spawn(&["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", &open]);
    for _ in 0..200 {
        if !plain.log().contains("waiting for") {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
    let (code, said) = run(&["worker", "--coordinator", &open, "--cluster-secret-file", right]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("runs without --cluster-secret-file"), "{said}");
    LocalCluster::signal(plain.pid(), "TERM").unwrap();
    plain.wait_end().unwrap();
}

#[test]
fn addresses_that_others_reach_need_a_secret() {
    let reachable = ["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", "0.0.0.0:0"];
    let (code, said) = run(&reachable);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("--cluster-secret-file") && said.contains("0.0.0.0:0"), "{said}");
    assert!(said.contains("--insecure-no-auth"), "{said}");

    let folder = tempfile::tempdir().unwrap();
    for (name, content, mode, part) in [
        ("open", &[b'x'; 44][..], 0o644, "chmod 600"),
        ("short", b"secret", 0o600, "at least 32"),
        ("missing", b"", 0o600, "No such file"),
    ] {
        let file = secret_file(folder.path(), name, content, mode);
        if name == "missing" {
            std::fs::remove_file(&file).unwrap();
        }
        let file = file.to_str().unwrap();
        let (code, said) = run(&[&reachable[..], &["--cluster-secret-file", file]].concat());
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(part) && said.contains(file), "{said}");
    }
}

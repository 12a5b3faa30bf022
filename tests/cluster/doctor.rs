//! `tutti doctor`: its findings and remedies, and that it changes nothing.
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use serde_json::Value;
use testkit::adapters::AdapterSpec;
use testkit::certificates::Certificates;
use testkit::etcd::Etcd;
use testkit::fleet::{Fleet, free_port};
use testkit::local_cluster::tutti_binary;
use testkit::models::{demo, repository};

#[test]
fn what_cannot_be_printed_is_a_failure() {
    for args in [&["options"][..], &["metrics"], &["devices"], &["--help"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = Command::new(tutti_binary()).args(args).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("cannot write to stdout"), "{args:?}: {said}");
    }
}

/// Runs `tutti doctor --json ARGS`; returns the exit code and the findings.
fn doctor(args: &[&str]) -> (Option<i32>, Value) {
    let output = Command::new(tutti_binary())
        .args(["doctor", "--json"])
        .args(args)
        .current_dir(repository())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = serde_json::from_str(&said).unwrap_or_else(|error| {
        panic!("{error}: {said}{}", String::from_utf8_lossy(&output.stderr))
    });
    (output.status.code(), found)
}

/// The level, finding and remedy of one check.
fn finding(found: &Value, check: &str) -> (String, String, String) {
    let all = found["checks"].as_array().unwrap();
    let one = all.iter().find(|one| one["check"] == check);
    let one = one.unwrap_or_else(|| panic!("no check {check} in {found}"));
    let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
    (text("level"), text("found"), text("fix"))
}

/// Small enough for any machine that runs the tests.
const SMALL: [&str; 4] = ["--kv-cache-memory", "1MiB", "--tensor-parallel", "1"];

fn ports() -> [String; 4] {
    let address = || format!("127.0.0.1:{}", free_port());
    ["--listen".to_owned(), address(), "--cluster-listen".to_owned(), address()]
}

#[test]
fn a_host_that_can_serve_is_told_so() {
    let ports = ports();
    let ports: Vec<&str> = ports.iter().map(String::as_str).collect();
    let (code, found) = doctor(&[&ports[..], &SMALL].concat());
    assert_eq!(code, Some(0), "{found}");
    assert_eq!(found["ok"], true);
    for check in ["secret", "http port", "cluster port", "model", "tokenizer", "memory"] {
        assert_eq!(finding(&found, check).0, "ok", "{found}");
    }
    for check in ["shared memory", "open files", "gpu driver"] {
        assert_ne!(finding(&found, check).0, "fail", "{found}");
    }
    let output = Command::new(tutti_binary())
        .args(["doctor"])
        .args([&ports[..], &SMALL].concat())
        .current_dir(repository())
        .output()
        .unwrap();
    let table = String::from_utf8_lossy(&output.stdout);
    assert_eq!(table.lines().count(), found["checks"].as_array().unwrap().len(), "{table}");
}

#[test]
fn what_is_wrong_here_is_named_with_its_remedy() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let weights = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 100]).unwrap();
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, [b's'; 40]).unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
    let etcd = format!("http://127.0.0.1:{}", free_port());
    let model = folder.path().to_str().unwrap();
    let (code, found) = doctor(
        &[
            &["--listen", &taken, "--model", model, "--etcd", &etcd][..],
            &["--cluster-secret-file", secret.to_str().unwrap()],
            &SMALL,
        ]
        .concat(),
    );
    drop(listener);
    assert_eq!(code, Some(1), "{found}");
    assert_eq!(found["ok"], false);
    for (check, what, fix) in [
        ("secret", "chmod 600", "the same file on every node"),
        ("http port", &taken[..], "--listen"),
        ("model", "truncated", "copy the folder again"),
        ("tokenizer", "tokenizer.json: is missing", "tokenizer.json"),
        ("etcd", &etcd[..], "start etcd"),
    ] {
        let (level, said, remedy) = finding(&found, check);
        assert_eq!(level, "fail", "{check}: {found}");
        assert!(said.contains(what) && remedy.contains(fix), "{check}: {said} | {remedy}");
    }
    let adapter = tempfile::tempdir().unwrap();
    let named = format!("sql={}", adapter.path().display());
    let lora = ["--tensor-parallel", "1", "--lora-modules", &named];
    let (_, found) = doctor(&lora);
    let (level, said, _) = finding(&found, "adapters");
    assert!(level == "fail" && said.contains("adapter_config.json"), "{said}");
    AdapterSpec::whole(8, 1).write(&demo(), adapter.path()).unwrap();
    let (_, found) = doctor(&lora);
    let (level, said, _) = finding(&found, "adapters");
    assert!(level == "ok" && said.starts_with("1 adapter(s), "), "{said}");
    // 3 ranks do not divide the demo model; the finding names the possible degrees.
    let (_, found) = doctor(&["--tensor-parallel", "3"]);
    let (level, said, fix) = finding(&found, "model");
    assert!(level == "fail" && said.contains("possible degrees"), "{said}");
    assert!(fix.contains("--tensor-parallel"), "{fix}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_is_asked_and_notices_no_new_member() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, byte: u8| {
        let file = folder.path().join(name);
        std::fs::write(&file, [byte; 44]).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right", b'r'), file("wrong", b'w'));
    // No workers join: with a secret, none of the test's own could.
    let address = format!("127.0.0.1:{}", free_port());
    let listen = format!("127.0.0.1:{}", free_port());
    let server = format!("http://{listen}");
    let mut args = vec!["coordinator", "--listen", &listen, "--cluster-listen", &address];
    args.extend(["--cluster-secret-file", &right]);
    let coordinator = testkit::local_cluster::LocalCluster::spawn(&args).unwrap();
    for _ in 0..500 {
        if coordinator.log().contains("waiting for") {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let node = ["--coordinator", &address, "--server", &server];
    let with = |secret: &str| doctor(&[&node[..], &["--cluster-secret-file", secret]].concat());
    let (code, found) = with(&right);
    assert_eq!(code, Some(0), "{found}");
    for check in ["coordinator", "clock", "version"] {
        assert_eq!(finding(&found, check).0, "ok", "{found}");
    }
    let (code, found) = with(&wrong);
    let (level, said, fix) = finding(&found, "coordinator");
    assert_eq!((code, &level[..]), (Some(1), "fail"), "{found}");
    assert!(said.contains("another cluster secret") && fix.contains("copy"), "{said} | {fix}");
    let (_, found) = doctor(&node);
    let (level, said, fix) = finding(&found, "coordinator");
    assert!(level == "fail" && said.contains("this cluster has a secret"), "{found}");
    assert!(fix.contains("--cluster-secret-file"), "{fix}");
    // The wrong port, then no server at all.
    for secret in [&[][..], &["--cluster-secret-file", &right]] {
        let node = ["--coordinator", &listen, "--server", &server, "--max-num-seqs", "3"];
        let (_, found) = doctor(&[&node[..], secret].concat());
        let (level, said, fix) = finding(&found, "coordinator");
        assert!(level == "fail" && said.contains("that is an HTTP port"), "{found}");
        assert!(fix.contains("--cluster-listen"), "{fix}");
    }
    let (_, found) = doctor(&["--coordinator", "127.0.0.1:1"]);
    let (level, said, _) = finding(&found, "coordinator");
    assert!(level == "fail" && said.contains("cannot be reached"), "{said}");
    assert_eq!(finding(&found, "clock").0, "warn", "{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_without_a_secret_takes_no_doctor_for_a_worker() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let node = ["--coordinator", fleet.address(), "--server", fleet.coordinator.base()];
    let (code, found) = doctor(&node);
    assert_eq!(code, Some(0), "{found}");
    let said = finding(&found, "coordinator").1;
    assert!(said.contains("requires no secret"), "{said}");
    let scrape = fleet.client().unwrap().scrape().await.unwrap();
    assert_eq!(scrape.sum("tutti_worker_up", &[]), 1.0);
}

#[test]
fn a_server_that_is_no_etcd_is_told_apart_from_one_that_is_ill() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    });
    let (_, found) = doctor(&["--etcd", &format!("http://{address}")]);
    let (level, said, fix) = finding(&found, "etcd");
    assert!(level == "fail" && said.contains("not as etcd does"), "{said}");
    assert!(fix.contains("another server's"), "{fix}");
}

#[test]
fn an_etcd_that_is_not_well_is_believed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]);
        let body = "{\"health\":\"false\",\"reason\":\"RAFT NO LEADER\"}";
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        let _ = stream.write_all((head + body).as_bytes());
    });
    let (_, found) = doctor(&["--etcd", &format!("http://{address}")]);
    let (level, said, _) = finding(&found, "etcd");
    assert!(level == "fail" && said.contains("RAFT NO LEADER"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_with_users_is_asked_as_the_node_would_ask_it() {
    let folder = tempfile::tempdir().unwrap();
    let Some(etcd) = Etcd::start(folder.path()).await.unwrap() else { return };
    let endpoint = etcd.endpoint();
    let (_, found) = doctor(&["--etcd", &endpoint]);
    assert_eq!(finding(&found, "etcd").0, "ok", "{found}");
    let mut client = etcd_client::Client::connect([&endpoint], None).await.unwrap();
    for user in ["root", "tutti", "worker"] {
        client.user_add(user, "password", None).await.unwrap();
        client.role_add(user).await.unwrap();
        client.user_grant_role(user, user).await.unwrap();
    }
    for prefix in ["/tutti/", "/tutti:totals/", "/tutti:actors/"] {
        let permission = etcd_client::Permission::read_write(prefix).with_prefix();
        client.role_grant_permission("tutti", permission).await.unwrap();
    }
    let (all, own) = ("/tutti/", "/tutti/workers/");
    for permission in [etcd_client::Permission::read(all), etcd_client::Permission::write(own)] {
        client.role_grant_permission("worker", permission.with_prefix()).await.unwrap();
    }
    client.auth_enable().await.unwrap();
    let password = |name: &str, text: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (password("right", "password\n"), password("wrong", "passwort"));
    let with = |args: &[&str]| {
        let (_, found) = doctor(&[&["--etcd", &endpoint], args].concat());
        finding(&found, "etcd")
    };
    let user = ["--etcd-user", "tutti", "--etcd-password-file"];
    let (level, said, _) = with(&[&user[..], &[&right]].concat());
    assert!(level == "ok" && said.contains("as tutti"), "{said}");
    // It has all that it needs, if it is no coordinator.
    let (level, said, fix) = with(&["--etcd-user", "worker", "--etcd-password-file", &right]);
    assert!(level == "warn" && said.contains("as worker for a worker;"), "{said}");
    assert!(fix.contains("coordinator"), "{fix}");
    let elsewhere = ["--cluster-name", "other"];
    for refused in
        [&[&user[..], &[&wrong]].concat()[..], &[&user[..], &[&right], &elsewhere].concat(), &[]]
    {
        let (level, said, fix) = with(refused);
        assert!(level == "fail" && fix.contains("--etcd-user"), "{refused:?}: {said} | {fix}");
        assert!(!said.contains("passwor") || said.contains("invalid"), "{said}");
    }
    let root = [("root", "password")].map(|(user, word)| (user.to_owned(), word.to_owned()));
    let [(user, word)] = root;
    let options = etcd_client::ConnectOptions::new().with_user(user, word);
    let mut client = etcd_client::Client::connect([&endpoint], Some(options)).await.unwrap();
    let all = etcd_client::GetOptions::new().with_prefix().with_count_only();
    assert_eq!(client.get("/", Some(all)).await.unwrap().count(), 0, "it wrote something");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_with_tls_is_asked_over_it() {
    let folder = tempfile::tempdir().unwrap();
    let Some(certificates) = Certificates::make(folder.path()).unwrap() else { return };
    let Some(etcd) = Etcd::start_secure(folder.path(), &certificates).await.unwrap() else {
        return;
    };
    let elsewhere = tempfile::tempdir().unwrap();
    let other = Certificates::make(elsewhere.path()).unwrap().unwrap();
    let path = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let (certificate, key) = certificates.pair("client");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (certificate, key) = (path(certificate), path(key));
    let (authority, stranger) = (path(certificates.authority()), path(other.authority()));
    let endpoint = etcd.endpoint();
    let with = |args: &[&str]| {
        let (_, found) = doctor(&[&["--etcd", &endpoint], args].concat());
        finding(&found, "etcd")
    };
    let own = ["--etcd-cert", &certificate, "--etcd-key", &key];
    let (level, said, _) = with(&[&["--etcd-ca", &authority][..], &own].concat());
    assert!(level == "ok" && said.contains("over TLS"), "{said}");
    for refused in
        [&["--etcd-ca", &authority][..], &[&["--etcd-ca", &stranger][..], &own].concat(), &own, &[]]
    {
        let (level, said, fix) = with(refused);
        assert_eq!(level, "fail", "{refused:?}: {said}");
        assert!(said.contains("--etcd-ca") || fix.contains("--etcd-ca"), "{said} | {fix}");
    }
}

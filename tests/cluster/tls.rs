//! HTTPS with real processes: coordinators, front ends, and the operators' commands.
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::certificates::{Certificates, openssl};
use testkit::fleet::free_port;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use testkit::models::repository;

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a program to its end; returns the exit code and the output.
fn run(program: &mut Command) -> (Option<i32>, String) {
    let output = program.current_dir(repository()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), said)
}

fn tutti(args: &[&str]) -> (Option<i32>, String) {
    run(Command::new(tutti_binary()).args(args))
}

fn curl(args: &[&str]) -> (Option<i32>, String) {
    run(Command::new("curl").args(["--silent", "--noproxy", "*", "--max-time", "60"]).args(args))
}

/// Waits until a server answers `/ready` with 200 to these `curl` arguments.
fn ready(server: &LocalCluster, trust: &[&str]) {
    let began = Instant::now();
    let url = format!("{}/ready", server.base());
    while curl(&[&["--fail", &url], trust].concat()).0 != Some(0) {
        assert!(began.elapsed() < PATIENCE, "not ready: {}", server.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn coordinators_front_ends_and_operators_speak_https() {
    let folder = tempfile::tempdir().unwrap();
    let Some(made) = Certificates::make(folder.path()).unwrap() else { return };
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let ((certificate, key), ca) = (made.pair("server"), text(made.authority()));
    let (certificate, key) = (text(certificate), text(key));
    let (cluster, alone) =
        (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
    // From a configuration file, with the same effect as the command line.
    let config = folder.path().join("tutti.toml");
    let lines = format!("tls-certificate = '{certificate}'\ntls-key = '{key}'\n");
    std::fs::write(&config, lines).unwrap();
    let config = text(config);
    let mut coordinator = LocalCluster::spawn(&[
        "up",
        "--listen",
        "127.0.0.1:0",
        "--cluster-listen",
        &cluster,
        "--metrics-listen",
        &alone,
        "--workers",
        "1",
        "--tensor-parallel",
        "1",
        "--config",
        &config,
    ])
    .unwrap();
    coordinator.wait_url().await.unwrap();
    assert!(coordinator.base().starts_with("https://"), "{}", coordinator.log());
    ready(&coordinator, &["--cacert", &ca]);
    let mut front = LocalCluster::spawn(&[
        "frontend",
        "--listen",
        "127.0.0.1:0",
        "--coordinator",
        &cluster,
        "--tls-certificate",
        &certificate,
        "--ssl-keyfile",
        &key,
    ])
    .unwrap();
    front.wait_url().await.unwrap();
    ready(&front, &["--cacert", &ca]);
    let (code, page) = curl(&["--cacert", &ca, &format!("https://{alone}/metrics")]);
    assert!(code == Some(0) && page.contains("tutti_"), "{page}");

    // Operators need the signing authority; without it, the error says so.
    let server = coordinator.base();
    let (code, said) = tutti(&["status", "--json", "--server", server, "--tls-ca", &ca]);
    assert_eq!(code, Some(0), "{said}");
    let status: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(status["ready"], Value::Bool(true));
    let (code, said) = tutti(&["scale", "--replicas", "1", "--server", server, "--tls-ca", &ca]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = tutti(&["status", "--server", server]);
    assert!(code != Some(0) && said.contains(server) && said.contains("ertificate"), "{said}");
    let plain = server.replacen("https", "http", 1);
    let (code, said) = tutti(&["status", "--server", &plain]);
    assert!(code == Some(1) && said.lines().count() == 1, "{said}");
    assert!(said.contains(&format!("try {server}")), "{said}");
    let (_, said) =
        tutti(&["doctor", "--coordinator", &cluster, "--server", server, "--tls-ca", &ca]);
    assert!(said.contains("agrees with the coordinator's"), "{said}");
    let (_, said) = tutti(&["doctor", "--config", &config, "--listen", "127.0.0.1:0"]);
    assert!(said.contains("ok    certificate") && said.contains("belong together"), "{said}");

    if let Some(python) = std::env::var_os("TUTTI_TEST_PYTHON") {
        for server in [&coordinator, &front] {
            let (code, said) = run(Command::new(&python)
                .arg(repository().join("tests/openai/test_openai_client.py"))
                .env("TUTTI_BASE_URL", format!("{}/v1", server.base()))
                .env("SSL_CERT_FILE", &ca)
                .env("NO_PROXY", "127.0.0.1"));
            assert!(code == Some(0) && said.contains("checks passed"), "{said}");
        }
    }
    // Failed handshakes of strangers do not fill the server's log.
    let log = coordinator.log();
    assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authority_in_a_servers_place_is_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    if Certificates::make(folder.path()).unwrap().is_none() {
        return;
    }
    openssl(
        folder.path(),
        "req -x509 -newkey rsa:2048 -nodes -keyout own.key -out own.pem -days 2 -subj /CN=localhost \
         -addext subjectAltName=IP:127.0.0.1",
    )
    .unwrap();
    let file = |name: &str| folder.path().join(name);
    std::fs::set_permissions(file("own.key"), std::fs::Permissions::from_mode(0o600)).unwrap();
    let (certificate, key) = (file("own.pem"), file("own.key"));
    let (certificate, key) = (certificate.to_str().unwrap(), key.to_str().unwrap());
    let pair = ["--tls-certificate", certificate, "--tls-key", key];
    let listen = ["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"];
    let mut coordinator = LocalCluster::spawn(&[&listen[..], &pair].concat()).unwrap();
    coordinator.wait_url().await.unwrap();
    let server = coordinator.base();
    let (code, said) = tutti(&["status", "--server", server, "--tls-ca", certificate]);
    assert!(code == Some(1) && said.contains("CA:FALSE"), "{said}");
    let (_, said) = tutti(&[&["doctor", "--listen", "127.0.0.1:0"][..], &pair].concat());
    assert!(said.contains("warn  certificate") && said.contains("CA:TRUE"), "{said}");
}

#[test]
fn what_cannot_be_served_is_said_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let Some(made) = Certificates::make(folder.path()).unwrap() else { return };
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let (certificate, key) = made.pair("server");
    let (certificate, key, other) = (text(certificate), text(key), text(made.pair("client").1));
    let refused = |args: &[&str], words: &[&str]| {
        for role in [&["coordinator", "--listen", "127.0.0.1:0"][..], &["up"], &["frontend"]] {
            let (code, said) = tutti(&[role, args].concat());
            assert_eq!(code, Some(2), "{said}");
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
    };
    refused(&["--tls-certificate", &certificate], &["--tls-key", "give both"]);
    refused(&["--tls-key", &key], &["--tls-certificate", "give both"]);
    refused(&["--tls-client-ca", &certificate], &["--tls-client-ca needs HTTPS"]);
    let pair = ["--tls-certificate", &certificate, "--tls-key", &other];
    refused(&pair, &["--tls-key", "client.key", "not the key of", "server.pem"]);
    let pair = ["--tls-certificate", &certificate, "--tls-key", "/no/such/key"];
    refused(&pair, &["--tls-key /no/such/key", "No such file"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_show_certificates_to_a_server_that_wants_them() {
    let folder = tempfile::tempdir().unwrap();
    let Some(made) = Certificates::make(folder.path()).unwrap() else { return };
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let ca = text(made.authority());
    let [server, client] = ["server", "client"].map(|name| made.pair(name));
    let (certificate, key) = (text(server.0), text(server.1));
    let mut coordinator = LocalCluster::spawn(&[
        "coordinator",
        "--listen",
        "127.0.0.1:0",
        "--cluster-listen",
        "127.0.0.1:0",
        "--tls-certificate",
        &certificate,
        "--tls-key",
        &key,
        "--tls-client-ca",
        &ca,
    ])
    .unwrap();
    coordinator.wait_url().await.unwrap();
    let base = coordinator.base();
    let (code, said) = tutti(&["status", "--server", base, "--tls-ca", &ca]);
    assert_eq!(code, Some(1), "{said}");
    let (certificate, key) = (text(client.0), text(client.1));
    let shown = ["--tls-client-certificate", &certificate, "--tls-client-key", &key];
    let asked = ["status", "--server", base, "--tls-ca", &ca];
    let (code, said) = tutti(&[&asked[..], &shown].concat());
    assert!(code == Some(0) && said.contains("not ready"), "{said}");
}

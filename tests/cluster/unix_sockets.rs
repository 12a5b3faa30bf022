//! HTTP on a Unix socket, asked by `curl`: its file, who may use it, and who counts as an operator.
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;

use crate::secrets::{run, secret_file};
use crate::text;

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `curl ARGS` for a path of the server on this socket: the status, and the body.
fn curl(socket: &str, path: &str, args: &[&str]) -> (u16, String) {
    let output = Command::new("curl")
        .args(["--silent", "--max-time", "60", "--write-out", "\n%{http_code}"])
        .args(["--unix-socket", socket])
        .args(args)
        .arg(format!("http://localhost{path}"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (body, status) = text.rsplit_once('\n').unwrap();
    (status.parse().unwrap(), body.to_owned())
}

fn json_of(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// Waits until a path has this status.
fn until(server: &LocalCluster, socket: &str, path: &str, status: u16) {
    let began = Instant::now();
    while curl(socket, path, &[]).0 != status {
        assert!(began.elapsed() < PATIENCE, "{path} is not {status}: {}", server.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A coordinator without workers, which serves on a socket.
fn coordinator(socket: &str, more: &[&str]) -> LocalCluster {
    let args = ["coordinator", "--cluster-listen", "127.0.0.1:0", "--uds", socket];
    LocalCluster::spawn(&[&args[..], more].concat()).unwrap()
}

fn is_socket(path: &str) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_is_served_on_a_socket_until_its_server_ends() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("http.sock").to_str().unwrap().to_owned();
    let args = ["--workers", "1", "--tensor-parallel", "1", "--kv-cache-memory", "16MiB"];
    let api = ["--uds", &socket, "--api-key", "sesame", "--access-log", "--root-path", "/llm"];
    let mut cluster = LocalCluster::spawn(&[&["up"][..], &args, &api].concat()).unwrap();
    cluster.wait_url().await.unwrap();
    assert_eq!(cluster.base(), format!("unix:{socket}"));
    until(&cluster, &socket, "/ready", 200);
    for path in ["/live", "/health", "/metrics", "/llm/live"] {
        assert_eq!(curl(&socket, path, &[]).0, 200, "{path}");
    }
    assert_eq!(curl(&socket, "/v1/models", &[]).0, 401);
    assert_eq!(curl(&socket, "/llm/v1/models", &[]).0, 401);
    let post = |path: &str, body: &Value| {
        let (key, kind) = ("authorization: Bearer sesame", "content-type: application/json");
        curl(&socket, path, &["--header", key, "--header", kind, "--data", &body.to_string()])
    };
    let asked = json!({"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0});
    let (status, answer) = post("/v1/completions", &asked);
    assert_eq!(status, 200, "{answer}");
    let (status, shown) = post("/llm/v1/completions", &asked);
    assert_eq!((status, text(&json_of(&shown))), (200, text(&json_of(&answer))));
    let streamed = json!({"prompt": "Once", "max_tokens": 4, "stream": true});
    let (status, events) = post("/v1/completions", &streamed);
    assert!(status == 200 && events.trim_end().ends_with("data: [DONE]"), "{events}");
    // Who asks has no address.
    let line = |log: &str| {
        let found = log.lines().find(|it| it.contains("/v1/models") && it.contains("status=401"));
        found.map(str::to_owned)
    };
    let began = Instant::now();
    while line(&cluster.log()).is_none() {
        assert!(began.elapsed() < PATIENCE, "{}", cluster.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!line(&cluster.log()).unwrap().contains("peer="));
    LocalCluster::signal(cluster.pid(), "TERM").unwrap();
    assert!(cluster.wait_end().unwrap().success(), "{}", cluster.log());
    assert!(!Path::new(&socket).exists());
    assert!(!cluster.log().contains("ERROR"), "{}", cluster.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_that_was_left_is_replaced_and_what_others_have_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("http.sock").to_str().unwrap().to_owned();
    let mut first = coordinator(&socket, &[]);
    first.wait_url().await.unwrap();
    assert_eq!(curl(&socket, "/live", &[]).0, 200);
    let refused = |words: &str| {
        let (code, said) =
            run(&["coordinator", "--cluster-listen", "127.0.0.1:0", "--uds", &socket]);
        assert!(code == Some(1) && said.contains(words), "{code:?}: {said}");
        assert!(said.contains(&format!("unix:{socket} (--uds)")), "{said}");
        let (_, said) = run(&["doctor", "--uds", &socket, "--cluster-listen", "127.0.0.1:0"]);
        assert!(said.contains("fail  http socket") && said.contains(words), "{said}");
    };
    refused("another process listens there");
    assert_eq!(curl(&socket, "/live", &[]).0, 200);
    // A process that is killed leaves its file.
    LocalCluster::signal(first.pid(), "KILL").unwrap();
    first.wait_end().unwrap();
    assert!(is_socket(&socket));
    let mut second = coordinator(&socket, &[]);
    second.wait_url().await.unwrap();
    assert_eq!(curl(&socket, "/live", &[]).0, 200);
    // Another server took its place meanwhile.
    std::fs::remove_file(&socket).unwrap();
    let _third = UnixListener::bind(&socket).unwrap();
    LocalCluster::signal(second.pid(), "TERM").unwrap();
    assert!(second.wait_end().unwrap().success(), "{}", second.log());
    assert!(is_socket(&socket));
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "mine").unwrap();
    refused("not a socket");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "mine");
}

#[test]
fn what_makes_no_sense_is_refused_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("http.sock").to_str().unwrap().to_owned();
    let long = folder.path().join("x".repeat(107)).to_str().unwrap().to_owned();
    for role in ["up", "coordinator", "frontend"] {
        for (more, words) in [
            (["--tls-certificate", "/c.pem"], "--uds and --tls-certificate cannot be combined"),
            (["--max-connections-per-address", "9"], "has no address"),
            (["--listen", "127.0.0.1:0"], "cannot be used with"),
            (["--root-path", "/v1"], "--root-path"),
        ] {
            let (code, said) = run(&[&[role, "--uds", &socket][..], &more].concat());
            assert!(code == Some(2) && said.contains(words), "{role}: {said}");
        }
        let (code, said) = run(&[role, "--uds", &long]);
        assert!(code == Some(2) && said.contains("1 to 107 bytes"), "{role}: {said}");
    }
    assert!(!Path::new(&socket).exists());
    let (code, said) = run(&["status", "--server", &format!("unix:{socket}")]);
    assert!(code == Some(2) && said.contains("commands reach no Unix socket"), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_use_it_is_up_to_the_umask_and_operators_have_the_secret() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("http.sock").to_str().unwrap().to_owned();
    for (umask, mode) in [("0022", 0o755), ("0007", 0o770)] {
        let shell = format!("umask {umask}; exec \"$0\" \"$@\"");
        let prefix = ["sh", "-c", &shell].map(str::to_owned);
        let args = ["coordinator", "--cluster-listen", "127.0.0.1:0", "--uds", &socket];
        let mut server = LocalCluster::spawn_in(&prefix, &args).unwrap();
        server.wait_url().await.unwrap();
        let found = std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
        assert_eq!(found, mode, "{umask}: {found:o}");
        // Behind the socket may be a proxy that asks for anybody.
        let (status, body) = curl(&socket, "/admin/status", &[]);
        assert_eq!(status, 403, "{body}");
        let message = json_of(&body)["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("Unix socket"), "{message}");
        assert!(message.contains("--cluster-secret-file"), "{message}");
        LocalCluster::signal(server.pid(), "TERM").unwrap();
        assert!(server.wait_end().unwrap().success(), "{}", server.log());
    }
    let secret = secret_file(folder.path(), "secret", &[b's'; 44], 0o600);
    let mut server = coordinator(&socket, &["--cluster-secret-file", secret.to_str().unwrap()]);
    server.wait_url().await.unwrap();
    assert_eq!(curl(&socket, "/admin/status", &[]).0, 401, "a token makes an operator");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_end_serves_on_its_socket_before_and_after_it_has_a_coordinator() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("http.sock").to_str().unwrap().to_owned();
    let cluster = format!("127.0.0.1:{}", free_port());
    let api = ["--root-path", "/llm", "--enable-tokenizer-info-endpoint"];
    let args = ["frontend", "--coordinator", &cluster, "--uds", &socket];
    let mut front = LocalCluster::spawn(&[&args[..], &api].concat()).unwrap();
    until(&front, &socket, "/live", 200);
    for (path, status) in [("/llm/live", 200), ("/llm/ready", 503), ("/llm/v1/models", 503)] {
        assert_eq!(curl(&socket, path, &[]).0, status, "{path}");
    }
    // The coordinator keeps an address, for operators; it does not describe the tokenizer.
    let up = ["--workers", "1", "--tensor-parallel", "1", "--cluster-listen", &cluster];
    let coordinator = LocalCluster::up(&up).await.unwrap();
    until(&front, &socket, "/llm/ready", 200);
    let (status, info) = curl(&socket, "/llm/tokenizer_info", &[]);
    assert_eq!((status, &json_of(&info)["model_max_length"]), (200, &json!(1024)));
    let other = coordinator.client().unwrap().get("/tokenizer_info").await.unwrap();
    assert_eq!(other.status, 404);
    let (code, said) = run(&["status", "--server", coordinator.base()]);
    assert!(code == Some(0) && said.contains("frontend"), "{said}");
    LocalCluster::signal(front.pid(), "TERM").unwrap();
    assert!(front.wait_end().unwrap().success(), "{}", front.log());
    assert!(!Path::new(&socket).exists());
}

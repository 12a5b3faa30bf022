//! Options of the HTTP API, with real processes: keys, templates, the access log, and who counts as
//! an operator.
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use testkit::fleet::free_port;
use testkit::local_cluster::LocalCluster;

use crate::secrets::run;

/// A GET with headers: status and JSON.
async fn get(base: &str, path: &str, headers: &[(&str, &str)]) -> (u16, Value) {
    let mut request = reqwest::Client::new().get(format!("{base}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_templates_and_the_access_log_are_for_coordinators_and_front_ends_alike() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let keys = write("keys", "# of the team\nfirst-key # Anna's\nsecond-key\n");
    std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(0o600)).unwrap();
    let template = write("template.jinja", "{{ messages[0].content }}!");
    let cluster = format!("127.0.0.1:{}", free_port());
    let api = ["--api-key-file", &keys, "--chat-template", &template, "--access-log"];
    let up = ["--workers", "1", "--tensor-parallel", "1", "--cluster-listen", &cluster];
    let coordinator = LocalCluster::up(&[&up[..], &api].concat()).await.unwrap();
    let join = ["frontend", "--coordinator", &cluster, "--listen", "127.0.0.1:0"];
    let (code, said) = run(&join);
    assert_eq!(code, Some(1), "another template gives other prompts: {said}");
    assert!(said.contains("--chat-template"), "{said}");
    let mut front = LocalCluster::spawn_with(
        &[],
        &[&join[..], &["--chat-template", &template]].concat(),
        &[("TUTTI_API_KEY", "third-key")],
    )
    .unwrap();
    front.wait_ready().await.unwrap();
    let asked = [
        (&coordinator, "second-key", 200),
        (&coordinator, "third-key", 401),
        (&front, "third-key", 200),
    ];
    for (server, key, status) in asked {
        assert_eq!(get(server.base(), "/v1/models", &[]).await.0, 401);
        let bearer = format!("Bearer {key}");
        let request = reqwest::Client::new().post(format!("{}/tokenize", server.base()));
        let request = request.header("authorization", &bearer).header("x-request-id", "find-me");
        let body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        let response = request.json(&body).send().await.unwrap();
        assert_eq!(response.status(), status, "{key}");
        if status == 200 {
            let tokens: Value = response.json().await.unwrap();
            let request = reqwest::Client::new().post(format!("{}/detokenize", server.base()));
            let request = request.header("authorization", &bearer);
            let text = request.json(&json!({"tokens": tokens["tokens"]})).send().await.unwrap();
            assert_eq!(text.json::<Value>().await.unwrap()["prompt"], "Hi!", "the chosen template");
        }
    }
    let logged = |log: &str| {
        log.lines().any(|line| {
            ["find-me", "peer=127.0.0.1:", "key=2 ", "/tokenize", "status=200", "duration_ms="]
                .iter()
                .all(|it| line.contains(it))
        })
    };
    for _ in 0..1500 {
        if logged(&coordinator.log()) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(logged(&coordinator.log()), "{}", coordinator.log());
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let request = reqwest::Client::new().post(format!("{}/v1/completions", coordinator.base()));
    let request = request.header("traceparent", format!("00-{trace}-b7ad6b7169203331-01"));
    let body = json!({"prompt": [[10, 11, 12], [13]], "n": 2, "max_tokens": 3, "ignore_eos": true});
    let answer = request.bearer_auth("first-key").json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let usage = answer.json::<Value>().await.unwrap()["usage"].clone();
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(4), &json!(12)));
    let counted = |log: &str| {
        let of_trace = format!("trace_id={trace} parent_id=b7ad6b7169203331");
        log.lines().any(|line| {
            line.contains("prompt_tokens=4 output_tokens=12") && line.contains(&of_trace)
        })
    };
    for _ in 0..1500 {
        if counted(&coordinator.log()) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(counted(&coordinator.log()), "{}", coordinator.log());
    let plain = coordinator.log();
    let plain = plain.lines().find(|line| line.contains("find-me")).unwrap();
    assert!(!plain.contains("tokens=") && !plain.contains("trace_id"), "{plain}");
    assert!(!front.log().contains("find-me"), "only where it is wanted");
    for key in ["first-key", "second-key", "third-key"] {
        assert!(!coordinator.log().contains(key) && !front.log().contains(key), "{key} is shown");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_secret_nobody_is_an_operator_through_a_proxy_or_a_browser() {
    let cluster = LocalCluster::up(&["--workers", "1", "--tensor-parallel", "1"]).await.unwrap();
    assert_eq!(get(cluster.base(), "/admin/status", &[]).await.0, 200);
    for header in [
        ("x-forwarded-for", "10.1.1.1"),
        ("forwarded", "for=10.1.1.1"),
        ("via", "1.1 x"),
        ("host", "evil.example"),
        ("origin", "https://evil.example"),
    ] {
        let (status, body) = get(cluster.base(), "/admin/status", &[header]).await;
        assert_eq!(status, 403, "{header:?}");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("--cluster-secret-file"), "{message}");
    }
    let wrong =
        cluster.client().unwrap().post("/admin/scale", &json!({"wrokers": 2})).await.unwrap();
    assert_eq!(wrong.status, 400);
    assert!(wrong.body["error"]["message"].as_str().unwrap().contains("wrokers"), "{}", wrong.body);
    let server = cluster.base().trim_start_matches("http://");
    let (code, said) = run(&["scale", "--replicas", "3", "--server", server]);
    assert_eq!((code, said.trim()), (Some(0), "at most 3 replicas from now on"));
    let (code, said) = run(&["status", "--server", server]);
    assert!(code == Some(0) && said.contains("at most 3 replicas"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_no_operator_is_told_so_before_a_word_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, [b's'; 44]).unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let secret = secret.to_str().unwrap();
    let alone = ["coordinator", "--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"];
    let mut coordinator =
        LocalCluster::spawn(&[&alone[..], &["--cluster-secret-file", secret]].concat()).unwrap();
    coordinator.wait_url().await.unwrap();
    let address = coordinator.base().trim_start_matches("http://").to_owned();
    for path in ["/admin/scale", "/admin/drain", "/reset_prefix_cache"] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer no\r\n\
             content-type: application/json\r\ncontent-length: 20\r\n\r\n"
        );
        let answer = tokio::task::spawn_blocking({
            let address = address.clone();
            move || {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                // Shorter than the time limit for a body: this body never arrives.
                stream.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
                stream.write_all(head.as_bytes()).unwrap();
                let mut status = [0; 12];
                stream.read_exact(&mut status).map(|()| status)
            }
        });
        let status = answer.await.unwrap().unwrap();
        assert_eq!(&status, b"HTTP/1.1 401", "{path}");
    }
    // An operator is let in, and told what is wrong.
    let operator = ["--cluster-secret-file", secret, "--server", coordinator.base()];
    let (code, said) = run(&[&["scale", "--replicas", "2"][..], &operator].concat());
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = run(&[&["drain", "nobody"][..], &operator].concat());
    assert!(code == Some(1) && said.contains("nobody"), "{said}");
}

//! What processes answer to probes before they serve, while they do, and when they cannot.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use testkit::client::Client;
use testkit::fleet::free_port;
use testkit::local_cluster::{LocalCluster, children_of};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::etcd::{not_ready, serves, until};

fn local(port: u16) -> (String, Client) {
    let address = format!("127.0.0.1:{port}");
    let client = Client::new(&format!("http://{address}")).unwrap();
    (address, client)
}

fn coordinator(address: &str, degree: &str) -> LocalCluster {
    let (any, all) = ("127.0.0.1:0", ["coordinator", "--tensor-parallel", degree]);
    let listen = ["--listen", any, "--cluster-listen", address];
    LocalCluster::spawn(&[&all[..], &listen].concat()).unwrap()
}

fn worker(address: &str, more: &[&str]) -> LocalCluster {
    let args = ["worker", "--coordinator", address, "--device", "cpu", "--threads", "1"];
    LocalCluster::spawn(&[&args[..], more].concat()).unwrap()
}

async fn status(client: &Client, path: &str) -> Option<u16> {
    client.get(path).await.ok().map(|reply| reply.status)
}

async fn is_ready(client: &Client, what: &str) {
    let ready = async || {
        let reply = client.get("/ready").await.ok()?;
        let says = reply.body["message"].as_str().is_some_and(|it| it.contains(what));
        (reply.status == 200 && says).then_some(())
    };
    until(what, ready).await;
}

async fn is_not(client: &Client, what: &str) {
    until(what, async || not_ready(client).await.filter(|it| it.contains(what)).map(drop)).await;
}

/// Asks on a connection of its own; what went wrong, if anything did.
async fn ask_alone(address: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(address).await.map_err(failed)?;
    let request = "GET /live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.map_err(failed)?;
    if answer.starts_with("HTTP/1.1 200") { Ok(()) } else { Err(format!("answered {answer:?}")) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_end_without_a_coordinator_lives_and_says_what_it_waits_for() {
    let address = format!("127.0.0.1:{}", free_port());
    let ((listen, api), (metrics_listen, probes)) = (local(free_port()), local(free_port()));
    let args = ["frontend", "--coordinator", &address, "--listen", &listen];
    let mut frontend =
        LocalCluster::spawn(&[&args[..], &["--metrics-listen", &metrics_listen]].concat()).unwrap();
    for client in [&api, &probes] {
        until("it lives", async || (status(client, "/live").await == Some(200)).then_some(()))
            .await;
        is_not(client, &address).await;
        let page = client.metrics_page().await.unwrap();
        assert!(page.contains("process_resident_memory_bytes"), "{page}");
    }
    let body = json!({"messages": [{"role": "user", "content": "a"}]});
    let refused = api.post("/v1/chat/completions", &body).await.unwrap();
    assert_eq!(refused.status, 503);
    let message = refused.body["error"]["message"].as_str().unwrap();
    assert_eq!(message, "this front end does not serve yet", "clients need not know its peers");
    assert_eq!(status(&probes, "/v1/models").await, Some(404), "probes and scrapes alone");

    // Whoever connects while it begins to serve is answered.
    let (stop, address_of_api) = (Arc::new(AtomicBool::new(false)), listen.clone());
    let told = stop.clone();
    let asks = tokio::spawn(async move {
        let mut asked = 0;
        while !told.load(Ordering::Relaxed) {
            ask_alone(&address_of_api).await?;
            asked += 1;
        }
        Ok::<u32, String>(asked)
    });
    let _coordinator = coordinator(&address, "1");
    let _worker = worker(&address, &[]);
    frontend.wait_ready().await.unwrap();
    is_ready(&probes, "").await;
    assert!(serves(&api).await);
    stop.store(true, Ordering::Relaxed);
    let asked = asks.await.unwrap();
    assert!(asked.as_ref().is_ok_and(|asked| *asked > 10), "{asked:?}");

    // What it says on both addresses is the same from now on, too.
    LocalCluster::signal(frontend.pid(), "TERM").unwrap();
    assert!(frontend.wait_end().unwrap().success(), "{}", frontend.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_is_ready_when_it_serves_or_is_free_to() {
    let address = format!("127.0.0.1:{}", free_port());
    let ((first_listen, first), (second_listen, second)) = (local(free_port()), local(free_port()));
    let one = worker(&address, &["--node", "a", "--health-listen", &first_listen]);
    until("it lives", async || (status(&first, "/live").await == Some(200)).then_some(())).await;
    is_not(&first, "not linked").await;
    let mut coordinator = coordinator(&address, "2");
    coordinator.wait_url().await.unwrap();
    is_ready(&first, "spare").await;
    let _two = worker(&address, &["--node", "b", "--health-listen", &second_listen]);
    is_ready(&first, "serves as a rank").await;
    is_ready(&second, "serves as a rank").await;
    assert!(serves(&coordinator.client().unwrap()).await);
    // The other rank is gone, and its replica with it.
    LocalCluster::signal(one.pid(), "KILL").unwrap();
    is_not(&second, "waits to be told").await;
    drop(coordinator);
    is_not(&second, "not linked").await;
    assert_eq!(status(&second, "/live").await, Some(200));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_workers_are_ready_together() {
    let address = format!("127.0.0.1:{}", free_port());
    let (listen, client) = local(free_port());
    let more = ["--workers", "2", "--node", "host", "--health-listen", &listen];
    let host = worker(&address, &more);
    is_not(&client, "0 of 2").await;
    assert_eq!(status(&client, "/live").await, Some(200));
    let _coordinator = coordinator(&address, "1");
    is_ready(&client, "2 workers").await;
    let frozen = children_of(host.pid())[0];
    LocalCluster::signal(frozen, "STOP").unwrap();
    is_not(&client, "1 of 2").await;
    LocalCluster::signal(frozen, "CONT").unwrap();
    is_ready(&client, "2 workers").await;
}

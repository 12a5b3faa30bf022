//! Connections to the coordinator that stay silent, and processes of another version.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use shared::actor::link::Connection;
use shared::protocol::PROTOCOL_VERSION;
use shared::wire::frame::FrameKind;
use testkit::fleet::Fleet;
use testkit::local_cluster::{LocalCluster, tutti_binary};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

async fn connect(from: [u8; 4], to: &str) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    socket.connect(to.parse().unwrap()).await
}

/// Pings the coordinator from this address, to see whether it answers.
async fn ping(from: [u8; 4], to: &str) -> Result<(), String> {
    let stream = connect(from, to).await.map_err(|error| error.to_string())?;
    let mut connection = Connection::new(stream).map_err(|error| error.to_string())?;
    connection.send(FrameKind::Ping, &[]).await.map_err(|error| error.to_string())?;
    let frame = connection.receive(PATIENCE).await.map_err(|error| error.to_string())?;
    assert_eq!(frame.kind, FrameKind::Pong);
    Ok(())
}

/// Listens at an address whose dialler seems, to the process at `to`, to be of another version: so
/// the answer is one in that version.
async fn from_another_version(to: String, version: u16) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut dialler, _)) = listener.accept().await {
            let mut coordinator = TcpStream::connect(&to).await.unwrap();
            let mut begins = [0; 6];
            if dialler.read_exact(&mut begins).await.is_ok() {
                begins[4..].copy_from_slice(&version.to_le_bytes());
                coordinator.write_all(&begins).await.unwrap();
                let _ = copy_bidirectional(&mut dialler, &mut coordinator).await;
            }
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_of_another_version_is_refused_and_everybody_says_so() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let theirs = PROTOCOL_VERSION + 1;
    let old = from_another_version(fleet.address().to_owned(), theirs).await;
    for role in [&["worker", "--threads", "1"][..], &["frontend", "--listen", "127.0.0.1:0"]] {
        let mut other = LocalCluster::spawn(&[role, &["--coordinator", &old]].concat()).unwrap();
        assert_eq!(other.wait_end().unwrap().code(), Some(1), "{}", other.log());
        let log = other.log();
        let says = format!("the peer speaks protocol {theirs}, this side {PROTOCOL_VERSION}");
        assert!(log.contains(&says), "{log}");
    }
    let client = fleet.client().unwrap();
    let status = client.get("/admin/status").await.unwrap().body;
    let [refused] = status["refused"].as_array().unwrap().as_slice() else { panic!("{status}") };
    let reason = refused["reason"].as_str().unwrap();
    assert!(reason.contains(&format!("the peer speaks protocol {theirs}")), "{reason}");
    assert_eq!((&refused["address"], &refused["times"]), (&"127.0.0.1".into(), &Value::from(2)));
    let status = ["status", "--server", fleet.coordinator.base()];
    let shown = std::process::Command::new(tutti_binary()).args(status).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let line = shown.lines().find(|line| line.starts_with("127.0.0.1 ")).unwrap_or(&shown);
    assert!(line.contains(reason) && shown.contains("\nREFUSED "), "{shown}");
    let said = fleet.coordinator.log();
    assert!(said.contains("a connection was not accepted") && said.contains(reason), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_say_nothing_keep_nobody_else_out() {
    let fleet = Fleet::start(&["--tensor-parallel", "1"], 1, 0).await.unwrap();
    let address = fleet.address().to_owned();
    let over = Arc::new(AtomicBool::new(false));
    // Each opens a new connection whenever its old one is closed, so that all places it can have
    // are always taken.
    let strangers: Vec<_> = (0..200)
        .map(|_| {
            let (address, over) = (address.clone(), over.clone());
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    if let Ok(stream) = connect([127, 0, 0, 1], &address).await {
                        let _ = stream.readable().await;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    for _ in 0..20 {
        assert_eq!(ping([127, 0, 0, 2], &address).await, Ok(()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Many peers at one address that do speak are all let in, some at the second attempt.
    let began = Instant::now();
    let many: Vec<_> = (0..300)
        .map(|_| {
            let address = address.clone();
            tokio::spawn(async move {
                while ping([127, 0, 0, 3], &address).await.is_err() {
                    assert!(began.elapsed() < PATIENCE, "not let in");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            })
        })
        .collect();
    for one in many {
        one.await.unwrap();
    }
    over.store(true, Ordering::Relaxed);
    strangers.iter().for_each(tokio::task::JoinHandle::abort);
    let said = fleet.coordinator.log();
    let complaints = said.lines().filter(|line| line.contains("a connection was not accepted"));
    assert!(complaints.count() < 60, "the log is not theirs to fill: {said}");
}

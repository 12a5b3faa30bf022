//! Unauthenticated connections to the coordinator that stay silent.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shared::actor::link::Connection;
use shared::wire::frame::FrameKind;
use testkit::fleet::Fleet;
use tokio::net::{TcpSocket, TcpStream};

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

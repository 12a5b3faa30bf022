//! Links over real loopback connections whose other end misbehaves.
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::actor::liveness::LivenessConfig;
use crate::clock::SystemClock;
use crate::wire::frame::FrameEncoder;

/// Time limit that is generous enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

fn liveness(dead_after: Duration) -> LivenessConfig {
    let ping_interval = dead_after / 10;
    LivenessConfig { ping_interval, suspect_after: dead_after / 2, dead_after }
}

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (dialled, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (dialled.unwrap(), accepted.unwrap().0)
}

fn link(stream: TcpStream, config: LivenessConfig) -> (LinkHandle, UnboundedReceiver<LinkEvent>) {
    let (sender, events) = unbounded_channel();
    let sink = move |event| sender.send(event).is_ok();
    let connection = Connection::new(stream).unwrap();
    (connection.start(config, Arc::new(SystemClock::start()), sink), events)
}

async fn closed(events: &mut UnboundedReceiver<LinkEvent>) -> CloseReason {
    let closed = async {
        loop {
            match events.recv().await.unwrap() {
                LinkEvent::Closed { reason } => return reason,
                _ => continue,
            }
        }
    };
    tokio::time::timeout(PATIENCE, closed).await.expect("the link ends")
}

/// Reads until the connection ends; returns the number of bytes received.
async fn drain(stream: &mut TcpStream) -> usize {
    let mut chunk = vec![0; MIB];
    let mut all = 0;
    let drained = async {
        while let Ok(n @ 1..) = stream.read(&mut chunk).await {
            all += n;
        }
    };
    tokio::time::timeout(PATIENCE, drained).await.expect("the connection is let go of");
    all
}

#[tokio::test]
async fn a_closed_link_lets_go_of_a_peer_that_reads_nothing() {
    let (a, mut peer) = sockets().await;
    let (a, mut events) = link(a, LivenessConfig::default());
    let body: Arc<Vec<u8>> = Arc::from(vec![0; MIB]);
    for _ in 0..200 {
        a.tell(FrameKind::Step, 0, body.clone()).unwrap();
    }
    // The link writes until the socket's buffers are full.
    tokio::time::sleep(Duration::from_millis(200)).await;
    a.close();
    assert!(matches!(closed(&mut events).await, CloseReason::Local));
    assert_eq!(a.tell(FrameKind::Step, 0, body.clone()), Err(SendError::Closed));
    // The handle still exists, but the queued frames are gone.
    let came = drain(&mut peer).await;
    assert!(came < 100 * MIB, "{came} bytes were written to a peer that was let go of");
    assert_eq!(Arc::strong_count(&body), 1, "nothing is kept for it");
}

#[tokio::test]
async fn nobody_waits_for_room_in_a_link_whose_peer_is_silent() {
    let (a, mut peer) = sockets().await;
    let (a, mut events) = link(a, liveness(Duration::from_millis(400)));
    let body: Arc<Vec<u8>> = Arc::from(vec![0; MIB]);
    let filled = async {
        loop {
            if let Err(error) = a.tell_when_room(FrameKind::Step, 0, body.clone()).await {
                return error;
            }
        }
    };
    let error = tokio::time::timeout(PATIENCE, filled).await.expect("told when the link ends");
    assert_eq!(error, SendError::Closed);
    assert!(matches!(closed(&mut events).await, CloseReason::Silent { .. }));
    drain(&mut peer).await;
}

#[tokio::test]
async fn what_is_queued_is_written_when_the_last_handle_goes() {
    let (a, mut peer) = sockets().await;
    let (a, _events) = link(a, LivenessConfig::default());
    for _ in 0..100 {
        a.tell(FrameKind::Step, 0, Arc::from(vec![0; MIB])).unwrap();
    }
    drop(a);
    assert!(drain(&mut peer).await >= 100 * MIB);
}

#[tokio::test]
async fn a_peer_whose_frame_takes_long_is_alive() {
    let (a, mut peer) = sockets().await;
    let config = liveness(Duration::from_millis(2400));
    let (_a, mut events) = link(a, config);
    let (mut frame, body) = (Vec::new(), vec![7; MIB]);
    FrameEncoder::default().encode(FrameKind::Step, 3, &body, &mut frame).unwrap();
    let sending = async {
        // Sending takes one and a half times the silence that ends a link.
        for piece in frame.chunks(frame.len() / 18) {
            peer.write_all(piece).await.unwrap();
            tokio::time::sleep(config.dead_after / 12).await;
        }
    };
    let (event, ()) = tokio::join!(events.recv(), sending);
    match event.unwrap() {
        LinkEvent::Frame(frame) => assert_eq!((frame.epoch, frame.body.len()), (3, MIB)),
        other => panic!("{other:?}"),
    }
}

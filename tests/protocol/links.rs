//! Real connections on loopback.
use std::sync::Arc;
use std::time::Duration;

use shared::actor::link::{CloseReason, Connection, LinkEvent, LinkHandle, QUEUE_MAX, SendError};
use shared::actor::liveness::LivenessConfig;
use shared::clock::SystemClock;
use shared::wire::frame::{Frame, FrameError, FrameKind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

fn quick() -> LivenessConfig {
    LivenessConfig {
        ping_interval: Duration::from_millis(40),
        suspect_after: Duration::from_millis(160),
        dead_after: Duration::from_millis(400),
    }
}

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (dialled, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (dialled.unwrap(), accepted.unwrap().0)
}

fn link(stream: TcpStream) -> (LinkHandle, UnboundedReceiver<LinkEvent>) {
    let (sender, events) = unbounded_channel();
    let sink = move |event| sender.send(event).is_ok();
    let connection = Connection::new(stream).unwrap();
    (connection.start(quick(), Arc::new(SystemClock::start()), sink), events)
}

async fn next(events: &mut UnboundedReceiver<LinkEvent>) -> LinkEvent {
    tokio::time::timeout(Duration::from_secs(5), events.recv()).await.unwrap().unwrap()
}

async fn closed(events: &mut UnboundedReceiver<LinkEvent>) -> CloseReason {
    loop {
        if let LinkEvent::Closed { reason } = next(events).await {
            return reason;
        }
    }
}

#[tokio::test]
async fn frames_arrive_in_order_and_quiet_links_stay_alive() {
    let (a, b) = sockets().await;
    let ((a, _a_events), (_b, mut b_events)) = (link(a), link(b));
    tokio::time::sleep(Duration::from_millis(700)).await;
    let bodies: Vec<Arc<Vec<u8>>> = (0..50u8).map(|i| Arc::from(vec![i; 3000])).collect();
    for body in &bodies {
        a.tell(FrameKind::Step, 7, body.clone()).unwrap();
    }
    for body in &bodies {
        let LinkEvent::Frame(frame) = next(&mut b_events).await else { panic!("expected a frame") };
        let expected = Frame { kind: FrameKind::Step, epoch: 7, body: body.to_vec() };
        assert_eq!(frame, expected);
    }
}

#[tokio::test]
async fn a_peer_that_closes_is_reported_at_once() {
    let (a, b) = sockets().await;
    // Silence would be noticed much later than this test waits.
    let (sender, mut events) = unbounded_channel();
    let config = LivenessConfig { dead_after: Duration::from_secs(60), ..quick() };
    let clock = Arc::new(SystemClock::start());
    let connection = Connection::new(a).unwrap();
    let _a = connection.start(config, clock, move |event| sender.send(event).is_ok());
    drop(b);
    assert!(matches!(closed(&mut events).await, CloseReason::PeerClosed | CloseReason::Io(_)));
}

#[tokio::test]
async fn dropping_every_handle_closes_the_connection() {
    let (a, b) = sockets().await;
    let (a, _a_events) = link(a);
    let (_b, mut events) = link(b);
    drop(a);
    assert!(matches!(closed(&mut events).await, CloseReason::PeerClosed | CloseReason::Io(_)));
}

#[tokio::test]
async fn a_silent_peer_is_suspect_then_dead() {
    let (a, mut silent) = sockets().await;
    let (_a, mut events) = link(a);
    let reader = tokio::spawn(async move {
        let mut chunk = [0; 1024];
        while silent.read(&mut chunk).await.is_ok_and(|n| n > 0) {}
    });
    assert!(matches!(next(&mut events).await, LinkEvent::Suspect));
    let reason = closed(&mut events).await;
    assert!(matches!(reason, CloseReason::Silent { silent } if silent >= quick().dead_after));
    reader.abort();
}

#[tokio::test]
async fn a_peer_that_does_not_read_ends_the_link_and_memory_is_bounded() {
    let (a, _not_read) = sockets().await;
    let (a, mut events) = link(a);
    let body: Arc<Vec<u8>> = Arc::from(vec![0; 1 << 20]);
    let mut accepted = 0;
    let refused = loop {
        match a.tell(FrameKind::Step, 0, body.clone()) {
            Ok(()) => accepted += 1,
            Err(error) => break error,
        }
        assert!(accepted <= QUEUE_MAX + 64, "the queue has no bound");
        if accepted.is_multiple_of(16) {
            tokio::task::yield_now().await;
        }
    };
    assert_eq!(refused, SendError::Full);
    assert!(matches!(closed(&mut events).await, CloseReason::QueueFull));
}

#[tokio::test]
async fn an_owner_that_takes_no_more_frames_ends_the_link() {
    let (a, b) = sockets().await;
    let (a, _a_events) = link(a);
    let (sender, mut events) = unbounded_channel();
    let mut room = 3;
    let sink = move |event| {
        let closed = matches!(event, LinkEvent::Closed { .. });
        room -= i32::from(!closed);
        let _ = sender.send(event);
        closed || room > 0
    };
    let clock = Arc::new(SystemClock::start());
    let _b = Connection::new(b).unwrap().start(quick(), clock, sink);
    for _ in 0..5 {
        a.tell(FrameKind::Control, 0, Arc::from(vec![1])).unwrap();
    }
    assert!(matches!(closed(&mut events).await, CloseReason::OwnerBusy));
}

#[tokio::test]
async fn garbage_ends_the_link_with_its_reason() {
    let (a, mut stranger) = sockets().await;
    let (_a, mut events) = link(a);
    stranger.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.unwrap();
    let reason = closed(&mut events).await;
    assert!(matches!(reason, CloseReason::Frame(FrameError::HttpClient)), "{reason}");
}

#[tokio::test]
async fn a_body_over_its_bound_is_refused_before_it_is_queued() {
    let (a, _b) = sockets().await;
    let (a, _events) = link(a);
    let body: Arc<Vec<u8>> = Arc::from(vec![0; (1 << 20) + 1]);
    let refused = a.tell(FrameKind::Control, 0, body).unwrap_err();
    assert!(matches!(refused, SendError::TooLarge(_)), "{refused}");
}

#[tokio::test]
async fn a_handshake_that_never_comes_ends_in_time() {
    let (a, _silent) = sockets().await;
    let mut connection = Connection::new(a).unwrap();
    let receiving = connection.receive(Duration::from_millis(200));
    let reason = tokio::time::timeout(Duration::from_secs(20), receiving).await.unwrap();
    let reason = reason.unwrap_err();
    assert!(matches!(reason, CloseReason::Silent { .. }), "{reason}");
}

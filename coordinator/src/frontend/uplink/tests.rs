//! A front end whose coordinator stops reading but still answers pings.
use shared::actor::ActorRuntime;
use shared::clock::SystemClock;
use shared::ids::Incarnation;
use shared::metrics::application::Metrics;
use shared::protocol::FrontendId;
use shared::sampling::SamplingParams;
use tokio::net::TcpListener;

use super::*;
use crate::engine::EngineHandle;
use crate::http::options::ApiOptions;

/// Time limit for what must happen, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn serving() -> Serving {
    Serving {
        model: "m".to_owned(),
        served_model_name: "m".to_owned(),
        model_aliases: Vec::new(),
        adapters: Vec::new(),
        max_model_len: 1 << 20,
        text_fingerprint: 1,
        priorities: false,
    }
}

fn request(id: u64) -> GenerateRequest {
    GenerateRequest::new(
        RequestId(id), // About 800 KB on the wire.
        vec![70_000; 200_000],
        vec![SamplingParams::greedy()],
        1,
    )
}

/// Welcomes one front end, then reads nothing more from it, and pings.
async fn coordinator_that_reads_nothing(listener: TcpListener) {
    let mut connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
    connection.receive(PATIENCE).await.unwrap();
    let welcome =
        FrontendWelcome { frontend: FrontendId(1), stats_interval_ms: 500, serving: serving() };
    connection.send(FrameKind::Welcome, &codec::encode(&welcome).unwrap()).await.unwrap();
    loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        if connection.send(FrameKind::Ping, &[]).await.is_err() {
            return;
        }
    }
}

fn hello() -> FrontendHello {
    FrontendHello {
        node: "f".to_owned(),
        incarnation: Incarnation(1),
        pid: 1,
        version: "0".to_owned(),
        slot: None,
    }
}

fn options(address: &str) -> (Arc<dyn Clock>, FrontendOptions) {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let options = FrontendOptions {
        coordinator: address.into(),
        node: "f".to_owned(),
        listen: ([127, 0, 0, 1], 0).into(),
        model: None,
        http_threads: 1,
        nvml: None,
        secret: None,
        api: ApiOptions::default(),
        run: 1,
        application: Metrics::new(),
        actors: ActorRuntime::spoke("f", 1 << 40, clock.clone()),
    };
    (clock, options)
}

#[tokio::test]
async fn a_front_end_stops_though_its_coordinator_takes_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(coordinator_that_reads_nothing(listener));
    let (clock, options) = options(&address);
    let hello = hello();
    let to = options.coordinator.current().unwrap();
    let (connection, welcome) =
        join(&address, None, FrameKind::FrontendHello, &hello).await.unwrap();
    let (engine, commands) = EngineHandle::channel();
    let uplink = Uplink::new(options, hello, serving(), clock, FrontendStats::new(), commands);
    let readiness = uplink.readiness();
    let (stop, stopped) = oneshot::channel();
    let running = tokio::spawn(uplink.run(to, connection, welcome, stopped));
    // More than a queue, a socket's buffers and the write in progress hold together.
    let mut asked = Vec::new();
    for id in 0..400 {
        asked.push(engine.submit(request(id)).unwrap());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(!readiness().ready);
    stop.send(()).unwrap();
    let end = tokio::time::timeout(PATIENCE, running).await.expect("it stops").unwrap();
    assert!(end.is_none(), "{end:?}");
}

/// A client whose own cancellation did not fit into the command queue.
#[tokio::test]
async fn a_request_without_its_client_is_cancelled_with_its_next_event_or_soon() {
    let (clock, options) = options("127.0.0.1:1");
    let (engine, commands) = EngineHandle::channel();
    let mut uplink =
        Uplink::new(options, hello(), serving(), clock, FrontendStats::new(), commands);
    for id in 0..3 {
        drop(engine.submit(request(id)).unwrap());
    }
    let stays = engine.submit(request(3)).unwrap();
    while let Ok(command) = uplink.commands.try_recv() {
        if matches!(command, EngineCommand::Submit { .. }) {
            assert!(uplink.message(command).is_some());
        }
    }
    let token = |id| (RequestId(id), EngineEvent::Token { choice: 0, token: 1, logprobs: None });
    uplink.take(ToFrontend::Events(vec![token(1), token(3)]));
    assert_eq!(uplink.gone, [RequestId(1)]);
    uplink.find_gone();
    uplink.gone.sort_unstable();
    assert_eq!(uplink.gone, [0, 1, 2].map(RequestId));
    uplink.find_gone();
    assert_eq!((uplink.gone.len(), uplink.live.len()), (3, 1), "each once");
    drop(stays);
}

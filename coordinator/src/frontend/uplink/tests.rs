//! A front end whose coordinator stops reading and says all the same that it is there.
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

/// For what has to happen at all, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn serving() -> Serving {
    Serving {
        model: "m".to_owned(),
        served_model_name: "m".to_owned(),
        max_model_len: 1 << 20,
        text_fingerprint: 1,
        priorities: false,
    }
}

fn request(id: u64) -> GenerateRequest {
    GenerateRequest {
        id: RequestId(id),
        // Some 800 KB on the wire.
        prompt: vec![70_000; 200_000],
        sampling: vec![SamplingParams::greedy()],
        stop_checks: Vec::new(),
        guides: Vec::new(),
        guide_spec: None,
        max_tokens: 1,
        open_ended: false,
        priority: 0,
        cache_salt: 0,
        end_tokens: Vec::new(),
        stops: Arc::from([]),
        keep_special: false,
        arrived: Duration::ZERO,
        response_id: Arc::from("r"),
    }
}

/// Takes one front end in, reads nothing of it any more, and pings.
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

#[tokio::test]
async fn a_front_end_stops_though_its_coordinator_takes_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(coordinator_that_reads_nothing(listener));
    let clock = Arc::new(SystemClock::start());
    let options = FrontendOptions {
        coordinator: address.as_str().into(),
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
    let hello = FrontendHello {
        node: "f".to_owned(),
        incarnation: Incarnation(1),
        pid: 1,
        version: "0".to_owned(),
        slot: None,
    };
    let to = options.coordinator.current().unwrap();
    let (connection, welcome) =
        join(&address, None, FrameKind::FrontendHello, &hello).await.unwrap();
    let (engine, commands) = EngineHandle::channel();
    let uplink = Uplink::new(options, hello, serving(), clock, FrontendStats::new(), commands);
    let readiness = uplink.readiness();
    let (stop, stopped) = oneshot::channel();
    let running = tokio::spawn(uplink.run(to, connection, welcome, stopped));
    // More than a queue, a socket's buffers and what is being written hold together.
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

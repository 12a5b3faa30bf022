//! A front end whose coordinator stops reading but still answers pings.
use shared::actor::ActorRuntime;
use shared::actor::link::Connection;
use shared::actor::link::join::join;
use shared::clock::{ManualClock, SystemClock};
use shared::ids::{Incarnation, RequestId};
use shared::metrics::application::{GaugeMerge, Metrics};
use shared::metrics::catalogue::{HTTP_REQUESTS, OBSERVATIONS_REFUSED};
use shared::metrics::{Merged, decode_snapshot};
use shared::protocol::{EngineEvent, FrontendId, FrontendWelcome};
use shared::sampling::SamplingParams;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::engine::{EngineHandle, GenerateRequest};
use crate::http::listener::Endpoint;
use crate::http::options::ApiOptions;

/// Time limit of each expectation, for a busy machine.
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

/// Welcomes one front end, then reads nothing more and sends pings.
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
        listen: Endpoint::Tcp(([127, 0, 0, 1], 0).into()),
        metrics_listen: None,
        model: None,
        hub: Err("none".to_owned()),
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
    let running = tokio::spawn(uplink.run((to, connection, welcome), stopped));
    // More than queue, socket buffers and the write in progress hold together.
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

/// Something else answers at the coordinator's address for a while.
#[tokio::test]
async fn a_front_end_that_was_welcomed_dials_on_whoever_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (clock, options) = options(&listener.local_addr().unwrap().to_string());
    let to = options.coordinator.current().unwrap();
    let mut dialler = Dialler::new(&options, clock);
    let answers = tokio::spawn(async move {
        for _ in 0..3 {
            let mut stream = listener.accept().await.unwrap().0;
            let _ = stream.read(&mut [0; 4096]).await;
            stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(4)).await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await;
        }
        coordinator_that_reads_nothing(listener).await;
    });
    let first = tokio::time::timeout(PATIENCE, dialler.dial(&hello(), None)).await.unwrap();
    assert!(matches!(first, Err(FrontendError::Refused(_))), "{:?}", first.map(|_| ()));
    let again = tokio::time::timeout(PATIENCE, dialler.dial(&hello(), Some(to))).await.unwrap();
    assert!(again.is_ok(), "{:?}", again.map(|_| ()));
    answers.abort();
}

/// Regression test: commands came so often that a timer recreated for each of them never fired.
#[tokio::test]
async fn what_is_held_for_too_long_ends_though_commands_keep_coming() {
    // Nobody listens there.
    let (_, options) = options("127.0.0.1:1");
    let clock = Arc::new(ManualClock::default());
    let (engine, commands) = EngineHandle::channel();
    let to = options.coordinator.current().unwrap();
    let mut uplink =
        Uplink::new(options, hello(), serving(), clock.clone(), FrontendStats::new(), commands);
    let dialling = tokio::spawn(async move { uplink.dial(to).await.is_ok() });
    let small = |id| {
        let greedy = vec![SamplingParams::greedy()];
        engine.submit(GenerateRequest::new(RequestId(id), vec![1], greedy, 1)).unwrap()
    };
    let mut first = small(0);
    tokio::time::sleep(Duration::from_millis(200)).await;
    clock.advance(HELD_FOR_THE_ONE);
    let keep_coming = async {
        for id in 1.. {
            drop(small(id));
            tokio::time::sleep(LOOK / 10).await;
        }
    };
    let within = tokio::time::timeout(PATIENCE, first.next());
    let event =
        tokio::select! { event = within => event.expect("it ends"), () = keep_coming => None };
    assert!(
        matches!(event, Some(EngineEvent::Failed(EngineError::Unavailable { .. }))),
        "{event:?}"
    );
    dialling.abort();
}

/// Welcomes one front end, and reads slowly until it has read so many requests. Returns, for each
/// message read, whether it was a request.
async fn coordinator_that_reads_slowly(listener: TcpListener, requests: usize) -> Vec<bool> {
    let mut connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
    connection.receive(PATIENCE).await.unwrap();
    let welcome =
        FrontendWelcome { frontend: FrontendId(1), stats_interval_ms: 10, serving: serving() };
    connection.send(FrameKind::Welcome, &codec::encode(&welcome).unwrap()).await.unwrap();
    let mut read = Vec::new();
    while read.iter().filter(|is_request| **is_request).count() < requests {
        let frame = connection.receive(PATIENCE).await.unwrap();
        if matches!(frame.kind, FrameKind::Request | FrameKind::Control) {
            read.push(frame.kind == FrameKind::Request);
        }
        if read.len().is_multiple_of(16) {
            connection.send(FrameKind::Ping, &[]).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    read
}

/// Many requests may be held while there is no coordinator.
#[tokio::test]
async fn reports_go_between_the_requests_that_were_held() {
    const REQUESTS: u64 = 700;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let reading = tokio::spawn(coordinator_that_reads_slowly(listener, REQUESTS as usize));
    let (clock, options) = options(&address);
    let to = options.coordinator.current().unwrap();
    let (connection, welcome) =
        join(&address, None, FrameKind::FrontendHello, &hello()).await.unwrap();
    let (engine, commands) = EngineHandle::channel();
    let mut uplink =
        Uplink::new(options, hello(), serving(), clock, FrontendStats::new(), commands);
    let mut asked = Vec::new();
    for id in 0..REQUESTS {
        // About 40 KB each: more than the link takes at once.
        let greedy = vec![SamplingParams::greedy()];
        let request = GenerateRequest::new(RequestId(id), vec![70_000; 8_000], greedy, 1);
        asked.push(engine.submit(request).unwrap());
        let command = uplink.commands.try_recv().unwrap();
        uplink.requests.command(Duration::ZERO, command);
    }
    let (stop, stopped) = oneshot::channel();
    let running = tokio::spawn(uplink.run((to, connection, welcome), stopped));
    let read = tokio::time::timeout(PATIENCE, reading).await.expect("it reads all").unwrap();
    let reports = read.iter().filter(|is_request| !**is_request).count();
    assert!(reports >= 3, "{reports} reports among {REQUESTS} requests");
    stop.send(()).unwrap();
    running.await.unwrap();
}

#[tokio::test]
async fn a_report_without_room_for_the_application_has_everything_else() {
    let (clock, options) = options("127.0.0.1:1");
    let tags = (0..8).map(|tag| format!("tag_{tag}_{}", "x".repeat(122))).collect::<Vec<_>>();
    let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
    for at in 0..256 {
        let (name, help) = (format!("m{at:0>127}"), "h".repeat(200));
        let gauge = options.application.gauge(&name, &help, &tags, GaugeMerge::Sum).unwrap();
        gauge.set(1.0, &["t"; 8]).unwrap();
    }
    let (_engine, commands) = EngineHandle::channel();
    let mut uplink =
        Uplink::new(options, hello(), serving(), clock, FrontendStats::new(), commands);
    let Some(FromFrontend::Stats(report)) = uplink.report() else { panic!("no report") };
    let snapshot = decode_snapshot(&report.snapshot).unwrap();
    assert!(snapshot.application.is_empty());
    let merged = Merged::of(&snapshot);
    let completions = merged.counter(HTTP_REQUESTS, ["POST", "/v1/completions", "200"]);
    assert_eq!(completions, Some(0));
    assert_eq!(merged.counter(OBSERVATIONS_REFUSED, ["too_large"]), Some(1));
}

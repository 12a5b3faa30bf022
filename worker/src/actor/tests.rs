//! What ends a worker that has no link.
use std::net::{Ipv4Addr, SocketAddr};

use actix::Actor as _;
use shared::actor::link::Connection;
use shared::clock::SystemClock;
use shared::ids::Incarnation;
use shared::protocol::{
    DeviceKind, Form, FromWorker, NodeResources, Rejoin, SequenceOutput, StepPlan, StepResult,
    StepTimings, Welcome, WorkerStats,
};
use shared::wire::frame::FrameKind;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::executor::Outbox;
use crate::rank::{AbortSlot, FormError, FormObserver, Rank, RankReady, StepSource};

/// A rank whose construction fails.
struct Defective;

impl Rank for Defective {
    fn form(
        &mut self,
        _: &Form,
        _: &AbortSlot,
        _: &mut dyn FormObserver,
    ) -> Result<RankReady, FormError> {
        Err(FormError { message: String::new(), permanent: true })
    }

    fn start(&mut self, _: u32, _: u32) -> Result<(), String> {
        Ok(())
    }

    fn step(
        &mut self,
        _: &StepPlan,
        _: &mut dyn StepSource,
        _: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, String> {
        Ok(StepTimings::default())
    }

    fn digest(&self) -> u32 {
        0
    }

    fn release(&mut self) {}
}

struct Nowhere;

impl Outbox for Nowhere {
    fn send(&mut self, _: u64, _: FromWorker) {}

    fn step_finished(&mut self, _: &StepPlan, _: &StepResult) -> WorkerStats {
        WorkerStats::default()
    }

    fn loaded(&mut self, _: &Form, _: &shared::protocol::Formed) {}

    fn report(&mut self) -> WorkerStats {
        WorkerStats::default()
    }
}

fn config(coordinator: &str) -> WorkerConfig {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
    let hello = Hello {
        node: "w".to_owned(),
        incarnation: Incarnation(1),
        host: "h".to_owned(),
        pid: 1,
        device: DeviceKind::Cpu,
        threads: 1,
        offer: NodeResources::default(),
        collective_addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
        version: String::new(),
        build: "b".to_owned(),
        gpu: String::new(),
        fetched: 0,
        rejoin: Rejoin::default(),
    };
    WorkerConfig {
        coordinator: coordinator.into(),
        hello,
        liveness: LivenessConfig::default(),
        clock: clock.clone(),
        secret: None,
        log: SharedLog::default(),
        actors: ActorRuntime::spoke("w", 1 << 40, clock),
        hub: Err("none".to_owned()),
        drain_timeout: Duration::from_secs(1),
    }
}

/// Answers one dial as a web server would.
async fn answers_as_a_web_server(listener: &TcpListener) {
    let mut stream = listener.accept().await.unwrap().0;
    let _ = stream.read(&mut [0; 4096]).await;
    stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(4)).await.unwrap();
    let _ = stream.read(&mut [0; 4096]).await;
}

#[test]
fn a_worker_that_was_welcomed_dials_on_whoever_answers() {
    actix::System::new().block_on(async {
        let patience = Duration::from_secs(30);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let starts = || {
            let executor = Executor::spawn(|| Defective, Nowhere).unwrap();
            let (end, ended) = oneshot::channel();
            (WorkerActor::new(config(&address), executor, Uplink::default(), end).start(), ended)
        };
        let (_worker, mut ended) = starts();
        let story = async {
            let welcomes = async || {
                let mut connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
                let hello = connection.receive(patience).await.unwrap();
                let welcome = Welcome { worker: WorkerId(3), stats_interval_ms: 0 };
                let welcome = codec::encode(&welcome).unwrap();
                connection.send(FrameKind::Welcome, &welcome).await.unwrap();
                hello.body
            };
            welcomes().await;
            answers_as_a_web_server(&listener).await;
            answers_as_a_web_server(&listener).await;
            let hello: Hello = codec::decode_message(&welcomes().await).unwrap();
            assert_eq!(hello.rejoin.slot, Some(WorkerId(3)));
        };
        tokio::select! {
            end = &mut ended => panic!("{end:?}"),
            () = story => {}
            () = tokio::time::sleep(patience) => panic!("it does not dial again"),
        }
        // One that never was may have been given a wrong address.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let executor = Executor::spawn(|| Defective, Nowhere).unwrap();
        let (end, ended) = oneshot::channel();
        let _other = WorkerActor::new(config(&address), executor, Uplink::default(), end).start();
        let (_, end) = tokio::join!(answers_as_a_web_server(&listener), ended);
        assert!(matches!(end, Ok(WorkerEnd::Refused { .. })), "{end:?}");
    });
}

/// Supervisors start a process again that failed, and none that was told to end for good.
#[test]
fn a_worker_that_is_told_to_end_knows_whether_it_is_still_wanted() {
    actix::System::new().block_on(async {
        let patience = Duration::from_secs(30);
        for again in [true, false] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let executor = Executor::spawn(|| Defective, Nowhere).unwrap();
            let (end, ended) = oneshot::channel();
            let config = config(&address);
            let _worker = WorkerActor::new(config, executor, Uplink::default(), end).start();
            let mut connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
            connection.receive(patience).await.unwrap();
            let welcome = Welcome { worker: WorkerId(3), stats_interval_ms: 0 };
            let welcome = codec::encode(&welcome).unwrap();
            connection.send(FrameKind::Welcome, &welcome).await.unwrap();
            let shutdown = ToWorker::Shutdown { reason: "it does not answer".to_owned(), again };
            let shutdown = codec::encode(&shutdown).unwrap();
            connection.send(FrameKind::Control, &shutdown).await.unwrap();
            let end = tokio::time::timeout(patience, ended).await.expect("it ends").unwrap();
            assert_eq!(matches!(end, WorkerEnd::Failed { .. }), again, "{end:?}");
        }
    });
}

#[test]
fn a_worker_whose_executor_panicked_ends() {
    actix::System::new().block_on(async {
        let make = || -> Defective { panic!("as a defect would") };
        let executor = Executor::spawn(make, Nowhere).unwrap();
        let (end, ended) = oneshot::channel();
        // Nobody listens there, so it dials for ever.
        let config = config("127.0.0.1:1");
        let _worker = WorkerActor::new(config, executor, Uplink::default(), end).start();
        let end = tokio::time::timeout(Duration::from_secs(30), ended).await;
        let end = end.expect("it ends").unwrap();
        let WorkerEnd::Failed { message } = end else { panic!("{end:?}") };
        assert!(message.contains("executor thread"), "{message}");
    });
}

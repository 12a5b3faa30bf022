//! What ends a worker that has no link.
use std::net::{Ipv4Addr, SocketAddr};

use actix::Actor as _;
use shared::clock::SystemClock;
use shared::ids::Incarnation;
use shared::protocol::{
    DeviceKind, Form, FromWorker, NodeResources, Rejoin, SequenceOutput, StepPlan, StepResult,
    StepTimings, WorkerStats,
};

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

    fn step_finished(&mut self, _: &StepResult) -> WorkerStats {
        WorkerStats::default()
    }

    fn loaded(&mut self, _: &Form, _: &shared::protocol::Formed) {}

    fn report(&mut self) -> WorkerStats {
        WorkerStats::default()
    }
}

#[test]
fn a_worker_whose_executor_panicked_ends() {
    actix::System::new().block_on(async {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
        let make = || -> Defective { panic!("as a defect would") };
        let executor = Executor::spawn(make, Nowhere).unwrap();
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
        let config = WorkerConfig {
            // Nobody listens there, so it dials for ever.
            coordinator: "127.0.0.1:1".into(),
            hello,
            liveness: LivenessConfig::default(),
            clock: clock.clone(),
            secret: None,
            log: SharedLog::default(),
            actors: ActorRuntime::spoke("w", 1 << 40, clock),
            hub: Err("none".to_owned()),
            drain_timeout: Duration::from_secs(1),
        };
        let (end, ended) = oneshot::channel();
        let _worker = WorkerActor::new(config, executor, Uplink::default(), end).start();
        let end = tokio::time::timeout(Duration::from_secs(30), ended).await;
        let end = end.expect("it ends").unwrap();
        let WorkerEnd::Failed { message } = end else { panic!("{end:?}") };
        assert!(message.contains("executor thread"), "{message}");
    });
}

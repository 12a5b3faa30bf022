//! The actix shell of one replica: its mailbox, its timer, its ranks' links.
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use actix::{Actor, AsyncContext as _, Context, Handler, Message, Recipient};
use shared::clock::Clock;
use shared::ids::{Epoch, ReplicaId, RequestId, WorkerId};
use shared::protocol::{StepPlan, StepResult, ToWorker};
use tokio::sync::mpsc;

use super::driver::{ReplicaDriver, Verdict};
use crate::engine::{EngineError, EngineEvent, GenerateRequest};
use crate::links::WorkerLink;

/// How often waits and lost clients are looked at.
const TICK: Duration = Duration::from_millis(50);
/// An idle replica runs an empty step this often, so that readiness means something.
const CANARY_INTERVAL: Duration = Duration::from_secs(1);

/// What others may know of a replica without asking it.
#[derive(Debug, Default)]
pub struct ReplicaLoad {
    /// Requests accepted and not finished.
    pub in_flight: AtomicU32,
    /// When all ranks last finished a step, in milliseconds of the process's clock; 0 is never.
    pub last_step_ms: std::sync::atomic::AtomicU64,
}

/// Drives one replica.
#[derive(Debug)]
pub struct ReplicaActor {
    id: ReplicaId,
    driver: ReplicaDriver,
    clock: Arc<dyn Clock>,
    ranks: Vec<WorkerLink>,
    epoch: Option<Epoch>,
    plan: StepPlan,
    load: Arc<ReplicaLoad>,
    /// Told when the epoch must end.
    cluster: Recipient<EpochFailed>,
    /// Results of the oldest step that ranks other than 0 have yet to acknowledge.
    acknowledged: Vec<u64>,
    last_planned: Duration,
}

/// Run a request.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Submit {
    /// The request.
    pub request: Box<GenerateRequest>,
    /// Where its events go.
    pub events: mpsc::Sender<EngineEvent>,
}

/// Free what a request holds, if it is here.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Cancel(pub RequestId);

/// The replica's ranks are formed.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Ready {
    /// The epoch.
    pub epoch: Epoch,
    /// KV blocks on every rank.
    pub num_blocks: u32,
    /// Links to the ranks, in rank order.
    pub ranks: Vec<WorkerLink>,
}

/// The epoch is over.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Lost {
    /// Which.
    pub epoch: Epoch,
}

/// A rank finished a step.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct StepDone {
    /// Which worker.
    pub worker: WorkerId,
    /// What it reports.
    pub result: StepResult,
}

/// Fail everything and take nothing more.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct FailAll(pub EngineError);

/// Tells the cluster that an epoch must end.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct EpochFailed {
    /// Of which replica.
    pub replica: ReplicaId,
    /// Which epoch.
    pub epoch: Epoch,
    /// Why.
    pub reason: String,
}

//! What the core wants done; its shell does it.
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::membership::DesiredState;
use shared::protocol::{AdapterError, ToWorker};

use super::Ticket;
use crate::scheduler::EpochEnd;

/// How groups of ranks fail, of which nobody can tell whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// They do not come to be.
    Formations,
    /// Their steps hang.
    Steps,
}

/// An action for the shell.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a message to a worker.
    Send {
        /// The recipient.
        worker: WorkerId,
        /// Its epoch.
        epoch: Epoch,
        /// The message.
        message: ToWorker,
    },
    /// A replica can serve.
    ReplicaReady {
        /// The replica.
        replica: ReplicaId,
        /// Its epoch.
        epoch: Epoch,
        /// Its workers, in rank order.
        ranks: Vec<WorkerId>,
        /// KV blocks on every rank.
        num_blocks: u32,
        /// Blocks in host memory, likewise.
        host_blocks: u32,
        /// Maximum number of tokens in one step.
        step_tokens: u32,
    },
    /// A replica that was ready cannot serve any more.
    ReplicaBroken {
        /// The replica.
        replica: ReplicaId,
        /// The epoch that ended.
        epoch: Epoch,
        /// Whether it was planned.
        end: EpochEnd,
        /// Why.
        reason: String,
    },
    /// A replica is given up for good; it is not ready at this point.
    ReplicaRemoved {
        /// The replica.
        replica: ReplicaId,
    },
    /// A worker computes much slower than the others of its replica; or it no longer does, or has
    /// no rank any more, or nothing has been seen of it for long.
    WorkerPace {
        /// The worker.
        worker: WorkerId,
        /// Whether it is slow.
        slow: bool,
    },
    /// A worker did not answer for this long while it was formed.
    AnswerTimedOut {
        /// The worker.
        worker: WorkerId,
        /// For how long, at least.
        lasts: Duration,
    },
    /// A worker's groups fail again and again: it is a spare now, and another has its rank.
    RankReplaced {
        /// Which.
        worker: WorkerId,
        /// Who takes its place.
        to: WorkerId,
        /// How they fail.
        failing: Failing,
    },
    /// A replica's groups fail again and again, whichever ranks it has: it goes on with fewer.
    FewerRanks {
        /// The replica.
        replica: ReplicaId,
        /// Those that it goes on without.
        workers: Vec<WorkerId>,
        /// With how many.
        left: usize,
        /// How they fail.
        failing: Failing,
    },
    /// A worker's device failed again and again; it gets no rank for a while.
    Quarantined {
        /// The worker.
        worker: WorkerId,
        /// For how long.
        lasts: Duration,
    },
    /// Other adapters are served than before.
    Adapters,
    /// An operator's command about an adapter is carried out, or cannot be.
    AdapterChanged {
        /// Which command.
        ticket: Ticket,
        /// Why not.
        outcome: Result<(), AdapterError>,
    },
    /// Operators want this now: store it for the next leader.
    StoreDesired(DesiredState),
    /// Retrying cannot help (a corrupt model, an impossible degree).
    Unservable {
        /// The replica.
        replica: ReplicaId,
        /// Why, in one sentence.
        reason: String,
    },
}

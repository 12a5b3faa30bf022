//! What the core wants done: its shell sends, starts and tells.
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, WorkerId};
use shared::membership::Desired;
use shared::protocol::ToWorker;

use crate::scheduler::EpochEnd;

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a message to a worker.
    Send {
        /// To whom.
        worker: WorkerId,
        /// In which epoch.
        epoch: Epoch,
        /// What.
        message: ToWorker,
    },
    /// A replica can serve.
    ReplicaReady {
        /// Which.
        replica: ReplicaId,
        /// Its epoch.
        epoch: Epoch,
        /// Its workers, in rank order.
        ranks: Vec<WorkerId>,
        /// KV blocks every rank has.
        num_blocks: u32,
        /// Those in host memory.
        host_blocks: u32,
    },
    /// A replica that was ready cannot serve any more.
    ReplicaBroken {
        /// Which.
        replica: ReplicaId,
        /// The epoch that ended.
        epoch: Epoch,
        /// Whether it was wanted.
        end: EpochEnd,
        /// Why.
        reason: String,
    },
    /// A replica is given up for good; it is not ready at this point.
    ReplicaRemoved {
        /// Which.
        replica: ReplicaId,
    },
    /// A worker computes much slower than the others of its replica, or does so no more.
    Pace {
        /// Which.
        worker: WorkerId,
        /// Whether it is slow.
        slow: bool,
    },
    /// A worker has not answered for so long when it was formed.
    Silent {
        /// Which.
        worker: WorkerId,
        /// How long at least.
        lasts: Duration,
    },
    /// A worker's formations come to nothing: it is a spare now, and another has its rank.
    GivesWay {
        /// Which.
        worker: WorkerId,
        /// Who takes its place.
        to: WorkerId,
    },
    /// A worker's device failed again and again, and it gets no rank for so long.
    SetAside {
        /// Which.
        worker: WorkerId,
        /// How long.
        lasts: Duration,
    },
    /// Operators want this now: to be left to the next leader.
    Desire(Desired),
    /// Trying again cannot help (a corrupt model, an impossible degree).
    Unservable {
        /// Which replica.
        replica: ReplicaId,
        /// Why, in one sentence.
        reason: String,
    },
}

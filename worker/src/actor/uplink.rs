//! The sending side of the link to the coordinator.
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use shared::actor::link::SendError;
use shared::actor::peer::{PeerAddr, TellError};
use shared::ids::{Epoch, WorkerId};
use shared::protocol::{FromWorker, HeldShard};

use crate::health::WorkerHealth;

/// A link, with its number at the executor.
type NumberedLink = (u64, PeerAddr<FromWorker>);

/// The sending side of the link, shared by the actor and the executor; empty without a link.
#[derive(Clone, Debug, Default)]
pub struct Uplink {
    inner: Arc<Mutex<Option<NumberedLink>>>,
    worker: Arc<AtomicU32>,
    /// Whether the coordinator wants stats.
    measures: Arc<AtomicBool>,
    /// The weights that the executor holds.
    shard: Arc<Mutex<Option<HeldShard>>>,
    health: WorkerHealth,
}

impl Uplink {
    /// One whose link and messages are recorded there, too.
    #[must_use]
    pub fn recording(health: WorkerHealth) -> Self {
        Self { health, ..Self::default() }
    }

    /// Where the link and what goes over it are recorded.
    pub(crate) fn health(&self) -> &WorkerHealth {
        &self.health
    }

    /// Sends a message of `epoch`; without a link it is dropped, since its epoch has ended.
    pub fn tell(&self, epoch: Epoch, message: &FromWorker) {
        self.tell_if(|_| true, epoch, message);
    }

    /// Sends a message of `epoch`, which began over `link`, over that link only: another
    /// coordinator may use the same epoch numbers.
    pub fn tell_over(&self, link: u64, epoch: Epoch, message: &FromWorker) {
        self.tell_if(|present| present == link, epoch, message);
    }

    fn tell_if(&self, wanted: impl Fn(u64) -> bool, epoch: Epoch, message: &FromWorker) {
        let uplink = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some((_, uplink)) = uplink.filter(|(link, _)| wanted(*link)) else { return };
        match uplink.tell(epoch, message) {
            // As without a link, of whose end the log knows.
            Ok(()) | Err(TellError::Link(SendError::Closed)) => {}
            Err(error) => tracing::warn!(%error, "message to the coordinator lost"),
        }
    }

    /// Returns the slot that this worker has at its current or last coordinator.
    #[must_use]
    pub fn worker(&self) -> WorkerId {
        WorkerId(self.worker.load(Ordering::Relaxed))
    }

    /// Records the slot that a coordinator assigned.
    pub(crate) fn joined(&self, worker: WorkerId) {
        self.worker.store(worker.0, Ordering::Relaxed);
    }

    /// Sets whether the coordinator wants stats.
    pub(crate) fn set_measures(&self, measures: bool) {
        self.measures.store(measures, Ordering::Relaxed);
    }

    /// Whether the coordinator wants stats.
    #[must_use]
    pub fn measures(&self) -> bool {
        self.measures.load(Ordering::Relaxed)
    }

    /// Records the weights that the executor holds now.
    pub fn holds(&self, shard: HeldShard) {
        *self.shard.lock().unwrap_or_else(PoisonError::into_inner) = Some(shard);
    }

    /// Returns the weights that the executor holds.
    pub(super) fn held(&self) -> Option<HeldShard> {
        self.shard.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the current link, if any.
    pub(super) fn set(&self, link: Option<NumberedLink>) {
        *self.inner.lock().unwrap_or_else(PoisonError::into_inner) = link;
    }
}

//! The way to the coordinator, as those who send know it.
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use shared::actor::peer::PeerAddr;
use shared::ids::{Epoch, WorkerId};
use shared::protocol::{FromWorker, HeldShard};

/// A link, by the number that the executor knows it by.
type NumberedLink = (u64, PeerAddr<FromWorker>);

/// The way to the coordinator, shared by the actor and the executor: absent while there is no link.
#[derive(Clone, Debug, Default)]
pub struct Uplink {
    inner: Arc<Mutex<Option<NumberedLink>>>,
    worker: Arc<AtomicU32>,
    /// Whether the coordinator wants stats.
    measures: Arc<AtomicBool>,
    /// The weights that the executor holds.
    shard: Arc<Mutex<Option<HeldShard>>>,
}

impl Uplink {
    /// Sends a message of `epoch`; without a link it is dropped, since its epoch is over.
    pub fn tell(&self, epoch: Epoch, message: &FromWorker) {
        self.tell_if(|_| true, epoch, message);
    }

    /// Sends a message of `epoch`, which began over `link`: over no other, since another
    /// coordinator counts its epochs anew.
    pub fn tell_over(&self, link: u64, epoch: Epoch, message: &FromWorker) {
        self.tell_if(|present| present == link, epoch, message);
    }

    fn tell_if(&self, wanted: impl Fn(u64) -> bool, epoch: Epoch, message: &FromWorker) {
        let uplink = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some((_, uplink)) = uplink.filter(|(link, _)| wanted(*link)) else { return };
        if let Err(error) = uplink.tell(epoch, message) {
            tracing::warn!(%error, "message to the coordinator lost");
        }
    }

    /// The slot this worker has at its present or last coordinator.
    #[must_use]
    pub fn worker(&self) -> WorkerId {
        WorkerId(self.worker.load(Ordering::Relaxed))
    }

    /// A coordinator gave this worker a slot.
    pub(crate) fn joined(&self, worker: WorkerId) {
        self.worker.store(worker.0, Ordering::Relaxed);
    }

    /// Whether the coordinator wants stats, from now on.
    pub(super) fn set_measures(&self, measures: bool) {
        self.measures.store(measures, Ordering::Relaxed);
    }

    /// Whether the coordinator wants stats.
    #[must_use]
    pub fn measures(&self) -> bool {
        self.measures.load(Ordering::Relaxed)
    }

    /// The executor holds these weights now.
    pub fn holds(&self, shard: HeldShard) {
        *self.shard.lock().unwrap_or_else(PoisonError::into_inner) = Some(shard);
    }

    /// The weights that the executor holds.
    pub(super) fn held(&self) -> Option<HeldShard> {
        self.shard.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The present link, or none.
    pub(super) fn set(&self, link: Option<NumberedLink>) {
        *self.inner.lock().unwrap_or_else(PoisonError::into_inner) = link;
    }
}

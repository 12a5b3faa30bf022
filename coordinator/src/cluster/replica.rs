//! PURE: the life of one replica.
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, WorkerId};

use super::Member;

/// First wait before a broken replica is formed again; doubles with each failure in a row.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest such wait.
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// A replica that served this long starts counting failures anew.
const STABLE_AFTER: Duration = Duration::from_secs(30);

/// A replica that misses ranks waits this long for theirs to return before it gives the others to
/// another one, or takes another one's.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where a replica is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaPhase {
    /// Ranks are missing, or the backoff after a failure runs.
    Waiting,
    /// Ranks load weights and connect their collective.
    Forming,
    /// Ranks allocate their KV caches.
    Starting,
    /// Steps can run.
    Serving,
}

impl ReplicaPhase {
    /// The name operators see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Forming => "forming",
            Self::Starting => "starting",
            Self::Serving => "serving",
        }
    }
}

/// One replica, for status displays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Which.
    pub id: ReplicaId,
    /// Its present or last epoch.
    pub epoch: Epoch,
    /// Where it is in its life.
    pub phase: ReplicaPhase,
    /// Its workers in rank order; `None` where one is missing.
    pub ranks: Vec<Option<WorkerId>>,
    /// Why it last broke.
    pub last_failure: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    worker: Option<WorkerId>,
    /// Who held the slot last: preferred when it is back, since it may still hold the weights.
    last: WorkerId,
    kv_blocks: Option<u32>,
    started: bool,
    bytes_done: u64,
    bytes_total: u64,
}

#[derive(Debug)]
pub(super) struct Replica {
    slots: Vec<Slot>,
    epoch: Epoch,
    phase: ReplicaPhase,
    not_before: Duration,
    failures: u32,
    served_since: Duration,
    /// Since when it has missed ranks.
    vacant_since: Option<Duration>,
    last_failure: Option<String>,
}

impl Replica {
    /// A complete group that may be formed at once.
    pub(super) fn new(ranks: Vec<WorkerId>) -> Self {
        let slot = |worker| Slot {
            worker: Some(worker),
            last: worker,
            kv_blocks: None,
            started: false,
            bytes_done: 0,
            bytes_total: 0,
        };
        Self {
            slots: ranks.into_iter().map(slot).collect(),
            epoch: Epoch(0),
            phase: ReplicaPhase::Waiting,
            not_before: Duration::ZERO,
            failures: 0,
            served_since: Duration::ZERO,
            vacant_since: None,
            last_failure: None,
        }
    }

    pub(super) fn status(&self, id: ReplicaId) -> ReplicaStatus {
        ReplicaStatus {
            id,
            epoch: self.epoch,
            phase: self.phase,
            ranks: self.slots.iter().map(|slot| slot.worker).collect(),
            last_failure: self.last_failure.clone(),
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether an epoch is under way.
    pub(super) fn is_live(&self) -> bool {
        self.phase != ReplicaPhase::Waiting
    }

    pub(super) fn is_serving(&self) -> bool {
        self.phase == ReplicaPhase::Serving
    }

    pub(super) fn has(&self, worker: WorkerId) -> bool {
        self.slots.iter().any(|slot| slot.worker == Some(worker))
    }

    /// Present workers in rank order.
    pub(super) fn ranks(&self) -> Vec<WorkerId> {
        self.slots.iter().filter_map(|slot| slot.worker).collect()
    }

    pub(super) fn vacate(&mut self, now: Duration, worker: WorkerId) {
        self.vacant_since.get_or_insert(now);
        for slot in self.slots.iter_mut().filter(|slot| slot.worker == Some(worker)) {
            slot.worker = None;
        }
    }

    /// Takes workers from `free` into vacant ranks: a returning one into its own rank, then any.
    pub(super) fn fill(&mut self, free: &mut Vec<&Member>) {
        let mut take = |slot: &mut Slot, wanted: Option<WorkerId>| {
            let index = free.iter().position(|m| wanted.is_none_or(|wanted| m.worker == wanted));
            if let Some(index) = index {
                let worker = free.remove(index).worker;
                slot.worker = Some(worker);
                slot.last = worker;
            }
        };
        for slot in self.slots.iter_mut().filter(|slot| slot.worker.is_none()) {
            let last = slot.last;
            take(slot, Some(last));
        }
        for slot in self.slots.iter_mut().filter(|slot| slot.worker.is_none()) {
            take(slot, None);
        }
        if self.missing() == 0 {
            self.vacant_since = None;
        }
    }

    /// Ranks without a worker.
    pub(super) fn missing(&self) -> usize {
        self.slots.iter().filter(|slot| slot.worker.is_none()).count()
    }

    /// Whether it has waited long enough for missing ranks to return.
    pub(super) fn is_out_of_patience(&self, now: Duration) -> bool {
        !self.is_live()
            && self.vacant_since.is_some_and(|since| now.saturating_sub(since) >= PATIENCE)
    }

    /// Lets its last worker go.
    pub(super) fn give_up(&mut self) -> Option<WorkerId> {
        self.slots.iter_mut().rev().find_map(|slot| slot.worker.take())
    }

    pub(super) fn may_form(&self, now: Duration) -> bool {
        !self.is_live()
            && now >= self.not_before
            && self.slots.iter().all(|slot| slot.worker.is_some())
    }

    pub(super) fn form(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.phase = ReplicaPhase::Forming;
        for slot in &mut self.slots {
            slot.kv_blocks = None;
            slot.started = false;
            slot.bytes_done = 0;
            slot.bytes_total = 0;
        }
    }

    pub(super) fn progress(&mut self, worker: WorkerId, bytes_done: u64, bytes_total: u64) {
        if let Some(slot) = self.slot(worker) {
            slot.bytes_done = bytes_done;
            slot.bytes_total = bytes_total;
        }
    }

    pub(super) fn load_progress(&self) -> (u64, u64) {
        self.slots
            .iter()
            .fold((0, 0), |sum, slot| (sum.0 + slot.bytes_done, sum.1 + slot.bytes_total))
    }

    /// Returns the block count to start with once every rank is formed: the least that any has.
    pub(super) fn formed(&mut self, worker: WorkerId, kv_blocks: u32) -> Option<u32> {
        if self.phase != ReplicaPhase::Forming {
            return None;
        }
        if let Some(slot) = self.slot(worker) {
            slot.kv_blocks = Some(kv_blocks);
        }
        let num_blocks = self.num_blocks()?;
        self.phase = ReplicaPhase::Starting;
        Some(num_blocks)
    }

    /// Returns the block count once every rank has started.
    pub(super) fn started(&mut self, now: Duration, worker: WorkerId) -> Option<u32> {
        if self.phase != ReplicaPhase::Starting {
            return None;
        }
        if let Some(slot) = self.slot(worker) {
            slot.started = true;
        }
        if !self.slots.iter().all(|slot| slot.started) {
            return None;
        }
        self.phase = ReplicaPhase::Serving;
        self.served_since = now;
        self.num_blocks()
    }

    pub(super) fn broke(&mut self, now: Duration, reason: &str) {
        if self.is_serving() && now.saturating_sub(self.served_since) >= STABLE_AFTER {
            self.failures = 0;
        }
        let backoff = BACKOFF_MIN.saturating_mul(1 << self.failures.min(10)).min(BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        self.not_before = now + backoff;
        self.phase = ReplicaPhase::Waiting;
        self.last_failure = Some(reason.to_owned());
    }

    fn num_blocks(&self) -> Option<u32> {
        self.slots.iter().map(|slot| slot.kv_blocks).min().flatten()
    }

    fn slot(&mut self, worker: WorkerId) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.worker == Some(worker))
    }
}

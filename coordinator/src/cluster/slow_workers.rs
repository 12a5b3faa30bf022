//! PURE: workers that compute much slower than the others of their replica.
//!
//! What was last seen of a worker counts as long as its process lives: others are taken before it.
//! Metrics tell of it only while it is seen of the rank that it has. Nothing more is seen of a
//! worker whose rank a spare has taken over, nor of any while a replica is idle, whose steps say
//! nothing.
use std::collections::BTreeMap;
use std::time::Duration;

use shared::ids::WorkerId;

/// A rank that is slow is seen to be every few seconds, while its replica computes; if its steps
/// take longer, every three steps.
const TOLD_FOR: Duration = Duration::from_secs(120);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct SlowWorkers {
    /// When each was last seen to be slow, while metrics tell of it.
    seen: BTreeMap<WorkerId, Option<Duration>>,
}

impl SlowWorkers {
    /// A rank was slow of late, or kept pace. Returns whether metrics are to tell something else.
    pub(super) fn seen(&mut self, now: Duration, worker: WorkerId, slow: bool) -> bool {
        if slow {
            self.seen.insert(worker, Some(now)).flatten().is_none()
        } else {
            self.forget(worker)
        }
    }

    /// Nothing is known of a worker any more. Returns whether metrics are to tell something else.
    pub(super) fn forget(&mut self, worker: WorkerId) -> bool {
        self.seen.remove(&worker).flatten().is_some()
    }

    /// Whether a worker was slow when last seen.
    pub(super) fn contains(&self, worker: WorkerId) -> bool {
        self.seen.contains_key(&worker)
    }

    /// All that were slow when last seen.
    pub(super) fn workers(&self) -> Vec<WorkerId> {
        self.seen.keys().copied().collect()
    }

    /// Returns those of which metrics are to tell no more: they have no rank, or were not seen for
    /// long.
    pub(super) fn told_no_more(
        &mut self,
        now: Duration,
        has_rank: impl Fn(WorkerId) -> bool,
    ) -> Vec<WorkerId> {
        let mut ended = Vec::new();
        for (worker, seen) in &mut self.seen {
            let Some(at) = *seen else { continue };
            if now >= at.saturating_add(TOLD_FOR) || !has_rank(*worker) {
                *seen = None;
                ended.push(*worker);
            }
        }
        ended
    }

    /// Returns when metrics are to tell no more of those that are not seen again.
    pub(super) fn ends(&self) -> impl Iterator<Item = Duration> {
        self.seen.values().flatten().map(|at| at.saturating_add(TOLD_FOR))
    }
}

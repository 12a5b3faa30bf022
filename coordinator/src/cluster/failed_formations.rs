//! PURE: how often workers were ranks of formations that came to nothing, since they served last.
//!
//! Ranks that do not reach each other are of no use to one another, though the coordinator reaches
//! each of them. Whose fault it is nobody can tell: a cable, a firewall, one host or two. So one
//! gives way to a spare that has failed less often; if that was not it, another does.
use std::collections::BTreeMap;

use shared::ids::WorkerId;

/// A rank gives way after so many such formations: one may be an accident.
const FAILURES: u32 = 2;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct FailedFormations {
    failures: BTreeMap<WorkerId, u32>,
}

impl FailedFormations {
    /// A formation of these ranks has come to nothing.
    pub(super) fn failed(&mut self, ranks: &[WorkerId]) {
        for rank in ranks {
            let failures = self.failures.entry(*rank).or_default();
            *failures = failures.saturating_add(1);
        }
    }

    /// How often it failed.
    pub(super) fn failures(&self, worker: WorkerId) -> u32 {
        self.failures.get(&worker).copied().unwrap_or(0)
    }

    /// Whether it failed too often to be taken where there are others.
    pub(super) fn failed_often(&self, worker: WorkerId) -> bool {
        self.failures(worker) >= FAILURES
    }

    /// Which of a replica's ranks gives way: the one that failed most often, of equals the last,
    /// for rank 0's process has more to begin with.
    pub(super) fn to_replace(&self, ranks: &[WorkerId]) -> Option<WorkerId> {
        let worst = ranks.iter().copied().max_by_key(|worker| self.failures(*worker));
        worst.filter(|worker| self.failed_often(*worker))
    }

    /// It serves, or its process is gone: what was is forgotten.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.failures.remove(&worker);
    }

    /// What was is forgotten.
    pub(super) fn forget_all(&mut self) {
        self.failures.clear();
    }
}

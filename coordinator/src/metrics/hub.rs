//! Own observations and all reports behind one door.
use std::sync::{Mutex, MutexGuard, PoisonError};

use shared::ids::{Incarnation, WorkerId};
use shared::metrics::labels::ReportRefusal;
use shared::metrics::{Applied, Limits, Merged, Merger, Refused, Source, decode_snapshot};
use shared::protocol::WorkerStats;

use super::observe::Observer;

/// Gathers the cluster's metrics. Shared by the actors that receive reports and whoever publishes.
///
/// Its two locks (the observer's cells, the merger) are never held together.
#[derive(Debug)]
pub struct Hub {
    observer: Observer,
    merger: Mutex<Merger>,
    incarnation: Incarnation,
}

impl Hub {
    /// A hub of the coordinator process `incarnation` that has seen nothing.
    #[must_use]
    pub fn new(incarnation: Incarnation, limits: Limits) -> Self {
        Self { observer: Observer::new(), merger: Mutex::new(Merger::new(limits)), incarnation }
    }

    /// Where this process records.
    #[must_use]
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Takes a worker's report. Empty ones (a worker that had nothing to add to a step result) are
    /// stale by definition.
    ///
    /// # Errors
    /// Returns [`Refused`], already counted, when the report cannot be merged.
    pub fn report(
        &self,
        worker: WorkerId,
        incarnation: Incarnation,
        stats: &WorkerStats,
    ) -> Result<Applied, Refused> {
        if stats.snapshot.is_empty() {
            return Ok(Applied::Stale);
        }
        // Decoded before the lock is taken: the work grows with the report.
        let snapshot = decode_snapshot(&stats.snapshot);
        let mut merger = self.merger();
        match snapshot {
            Ok(snapshot) => {
                merger.apply(Source::Worker(worker), incarnation, stats.sequence, snapshot)
            }
            Err(_) => Err(merger.refuse(ReportRefusal::Malformed, None)),
        }
    }

    /// A worker's process is gone: its totals stay, its gauges vanish.
    pub fn retire(&self, worker: WorkerId, incarnation: Incarnation) {
        self.merger().retire(Source::Worker(worker), incarnation);
    }

    /// All totals now.
    #[must_use]
    pub fn merged(&self) -> Merged {
        // Two scrapes at once may arrive here in either order: like any source's reports, the
        // newer one wins.
        let (sequence, own) = self.observer.report();
        let mut merger = self.merger();
        if let Err(refused) = merger.apply(Source::Coordinator, self.incarnation, sequence, own) {
            // Counted and published as a refusal; the last good totals stay.
            tracing::error!(%refused, "the coordinator's own metrics are inconsistent");
        }
        merger.merged()
    }

    fn merger(&self) -> MutexGuard<'_, Merger> {
        self.merger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

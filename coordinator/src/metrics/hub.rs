//! Own observations and all reports behind one door.
use std::sync::{Mutex, MutexGuard, PoisonError};

use shared::ids::{Incarnation, WorkerId};
use shared::metrics::labels::ReportRefusal;
use shared::metrics::{
    Applied, Limits, Merged, Merger, PartialSnapshot, Refused, Source, decode_snapshot,
};
use shared::protocol::WorkerStats;

use super::observe::Observer;

/// Gathers the cluster's metrics. Shared by the actors that receive reports and whoever publishes.
#[derive(Debug)]
pub struct Hub {
    observer: Observer,
    merger: Mutex<Reports>,
}

#[derive(Debug)]
struct Reports {
    merger: Merger,
    /// This process's own reports.
    incarnation: Incarnation,
    sequence: u64,
}

impl Hub {
    /// A hub of the coordinator process `incarnation` that has seen nothing.
    #[must_use]
    pub fn new(incarnation: Incarnation, limits: Limits) -> Self {
        let reports = Reports { merger: Merger::new(limits), incarnation, sequence: 0 };
        Self { observer: Observer::new(), merger: Mutex::new(reports) }
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
        let merger = &mut self.reports().merger;
        match snapshot {
            Ok(snapshot) => {
                merger.apply(Source::Worker(worker), incarnation, stats.sequence, snapshot)
            }
            Err(_) => Err(merger.refuse(ReportRefusal::Malformed, None)),
        }
    }

    /// A worker's process is gone: its totals stay, its gauges vanish.
    pub fn retire(&self, worker: WorkerId, incarnation: Incarnation) {
        self.reports().merger.retire(Source::Worker(worker), incarnation);
    }

    /// All totals now.
    #[must_use]
    pub fn merged(&self) -> Merged {
        let mut reports = self.reports();
        // Taken under the lock, so that a later call never sees less than an earlier one.
        let own: PartialSnapshot = self.observer.snapshot();
        reports.sequence += 1;
        let Reports { merger, incarnation, sequence } = &mut *reports;
        if let Err(refused) = merger.apply(Source::Coordinator, *incarnation, *sequence, own) {
            // Counted and published as a refusal; the last good totals stay.
            tracing::error!(%refused, "the coordinator's own metrics are inconsistent");
        }
        merger.merged()
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.merger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

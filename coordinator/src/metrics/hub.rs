//! Gathers own observations and all reports.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use shared::clock::since_1970;
use shared::ids::Incarnation;
use shared::metrics::application::Metrics;
use shared::metrics::labels::ReportRefusal;
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::metrics::{
    Exemplars, Limits, LocalStats, Merged, Merger, ReportOutcome, ReportRefused, SharedStats,
    Source, decode_snapshot,
};
use shared::protocol::{FrontendId, WorkerStats};

use super::frontend::FrontendStats;
use super::observe::Observer;
use crate::checkpoint::PageSnapshot;

/// Gathers the cluster's metrics. Shared by the actors that receive reports and by whoever
/// publishes.
///
/// Lock order: while `refreshing` is held, the other locks (the cells of observer and front end,
/// the merger) are taken one at a time; otherwise no two are held together.
#[derive(Debug)]
pub struct Hub {
    observer: Observer,
    frontend: FrontendStats,
    merger: Mutex<Merger>,
    /// Held while this process's own totals are read and merged.
    refreshing: Mutex<()>,
    registry: prometheus::Registry,
    process: SharedStats,
    /// Counts of this process's named actors.
    actors: OnceLock<SharedStats>,
    membership: SharedStats,
    application: Metrics,
    incarnation: Incarnation,
    restorations: AtomicU64,
}

impl Hub {
    /// Makes an empty hub of the coordinator process `incarnation`.
    #[must_use]
    pub fn new(incarnation: Incarnation, limits: Limits) -> Self {
        Self {
            observer: Observer::new(),
            frontend: FrontendStats::new(),
            merger: Mutex::new(Merger::new(limits)),
            refreshing: Mutex::new(()),
            registry: process_registry(),
            process: SharedStats::default(),
            actors: OnceLock::new(),
            membership: SharedStats::of(LocalStats::uncounted()),
            application: Metrics::new(),
            incarnation,
            restorations: AtomicU64::new(0),
        }
    }

    /// The `prometheus` crate's registry of this process, published with everything else: its own
    /// `process_*` series, and a place for libraries that use that crate. Counters, gauges and
    /// histograms are shown.
    #[must_use]
    pub fn registry(&self) -> &prometheus::Registry {
        &self.registry
    }

    /// Makes a hub that measures nothing but HTTP: to find out what measuring costs.
    #[must_use]
    pub fn disabled(incarnation: Incarnation, limits: Limits) -> Self {
        Self { observer: Observer::disabled(), ..Self::new(incarnation, limits) }
    }

    /// Cells of this process's other threads.
    #[must_use]
    pub fn process(&self) -> &SharedStats {
        &self.process
    }

    /// Publishes the counts of this process's named actors, too. Only the first call has an effect.
    pub fn with_actors(&self, actors: SharedStats) {
        let _ = self.actors.set(actors);
    }

    /// Cells of the membership, in a process that has one. They are not part of the merged totals:
    /// each process reports for itself what it knows of the others at present.
    #[must_use]
    pub fn membership(&self) -> &SharedStats {
        &self.membership
    }

    /// The application's metrics in this process.
    #[must_use]
    pub fn application(&self) -> &Metrics {
        &self.application
    }

    /// Cells of this process's own front end.
    #[must_use]
    pub fn frontend(&self) -> &FrontendStats {
        &self.frontend
    }

    /// The observer of this process.
    #[must_use]
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Takes the report of a worker or front end. An empty one (a worker had nothing to add to a
    /// step result) is stale by definition.
    ///
    /// # Errors
    /// [`ReportRefused`], already counted, if the report cannot be merged.
    pub fn report(
        &self,
        source: Source,
        incarnation: Incarnation,
        stats: &WorkerStats,
    ) -> Result<ReportOutcome, ReportRefused> {
        if stats.snapshot.is_empty() {
            return Ok(ReportOutcome::Stale);
        }
        // Decoded before taking the lock: the work grows with the report.
        let snapshot = decode_snapshot(&stats.snapshot);
        let mut merger = self.merger();
        let applied = match snapshot {
            Ok(snapshot) => merger.apply(source, incarnation, stats.sequence, snapshot),
            Err(_) => Err(merger.refuse(ReportRefusal::Malformed, None)),
        };
        for line in merger.take_warnings() {
            tracing::warn!("{line}");
        }
        applied
    }

    /// Like [`Hub::report`], and notes when the report arrived.
    ///
    /// # Errors
    /// Like [`Hub::report`].
    pub fn take(
        &self,
        source: Source,
        incarnation: Incarnation,
        stats: &WorkerStats,
    ) -> Result<(), ReportRefused> {
        self.report(source, incarnation, stats)?;
        let mut recording = self.observer.record();
        match source {
            Source::Worker(worker) => recording.worker_reported(worker, since_1970()),
            Source::Frontend(frontend) => recording.frontend_reported(frontend, since_1970()),
            Source::Coordinator => {}
        }
        Ok(())
    }

    /// A process joins that has counted for an earlier coordinator; see [`Merger::has_history`].
    pub fn has_history(&self, source: Source, incarnation: Incarnation) {
        self.merger().has_history(source, incarnation);
    }

    /// The link to a process is gone: its gauges vanish until it reports again.
    pub fn lost(&self, source: Source, incarnation: Incarnation) {
        self.merger().lost(source, incarnation);
    }

    /// A process is gone for good: its totals stay, its gauges vanish.
    pub fn retire(&self, source: Source, incarnation: Incarnation) {
        self.merger().retire(source, incarnation);
    }

    /// Whether a front end in its own process is known to be gone for good.
    #[must_use]
    pub fn is_retired_frontend(&self, incarnation: Incarnation) -> bool {
        // Whichever slot it had.
        self.merger().is_retired(Source::Frontend(FrontendId(1)), incarnation)
    }

    /// Front ends whose links are lost and whose totals are not closed, those of earlier
    /// coordinators included.
    #[must_use]
    pub fn lost_frontends(&self) -> Vec<(FrontendId, Incarnation)> {
        let of = |(source, run)| match source {
            Source::Frontend(frontend) => Some((frontend, run)),
            Source::Coordinator | Source::Worker(_) => None,
        };
        self.merger().lost_sources().filter_map(of).collect()
    }

    /// Exemplars: requests worth looking at for their latencies.
    #[must_use]
    pub fn exemplars(&self) -> Exemplars {
        self.observer.exemplars()
    }

    /// The totals at present.
    #[must_use]
    pub fn merged(&self) -> Merged {
        self.refreshed().merged()
    }

    /// Everything that a page shows at present.
    #[must_use]
    pub fn page_snapshot(&self) -> PageSnapshot {
        PageSnapshot { merged: self.merged(), exemplars: self.exemplars() }
    }

    /// What the next coordinator continues from.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.refreshed().checkpoint()
    }

    /// Both, taken at the same moment.
    #[must_use]
    pub fn snapshot_and_checkpoint(&self) -> (PageSnapshot, Checkpoint) {
        let (merged, checkpoint) = {
            let merger = self.refreshed();
            (merger.merged(), merger.checkpoint())
        };
        (PageSnapshot { merged, exemplars: self.exemplars() }, checkpoint)
    }

    /// Continues from what an earlier coordinator counted. Returns the number of series that are
    /// unknown here.
    pub fn restore(&self, checkpoint: Checkpoint) -> usize {
        let unknown = self.merger().restore(checkpoint);
        self.restorations.fetch_add(1, Ordering::Relaxed);
        unknown
    }

    /// Number of times that totals counted by others were restored: they belong to no interval
    /// here.
    #[must_use]
    pub fn restorations(&self) -> u64 {
        self.restorations.load(Ordering::Relaxed)
    }

    /// Locks the merger after merging this process's own present totals.
    fn refreshed(&self) -> MutexGuard<'_, Merger> {
        // The parts of a report are read one after another. Without the lock, each of two
        // concurrent scrapes could read the newer value of some parts, and the report with the
        // larger number would have totals that fell.
        let _drawn_and_merged = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        let (sequence, mut snapshot) = self.observer.report();
        snapshot.add(self.process.snapshot());
        if let Some(actors) = self.actors.get() {
            snapshot.add(actors.snapshot());
        }
        snapshot.application = self.application.snapshot();
        let own = [
            (Source::Coordinator, (sequence, snapshot)),
            (Source::Frontend(FrontendId(0)), self.frontend.report()),
        ];
        let mut merger = self.merger();
        for (source, (sequence, snapshot)) in own {
            if let Err(refused) = merger.apply(source, self.incarnation, sequence, snapshot) {
                // Counted and published as a refusal; the last good totals remain.
                tracing::error!(%refused, "the coordinator's own metrics are inconsistent");
            }
        }
        merger
    }

    fn merger(&self) -> MutexGuard<'_, Merger> {
        self.merger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The series that the `prometheus` crate has about this process.
pub(crate) fn process_registry() -> prometheus::Registry {
    let registry = prometheus::Registry::new();
    #[cfg(target_os = "linux")]
    {
        use prometheus::process_collector::ProcessCollector;
        if let Err(error) = registry.register(Box::new(ProcessCollector::for_self())) {
            tracing::warn!(%error, "the process's own series are missing");
        }
    }
    registry
}

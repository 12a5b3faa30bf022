//! Own observations and all reports behind one door.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use shared::clock::since_1970;
use shared::ids::Incarnation;
use shared::metrics::application::Metrics;
use shared::metrics::labels::ReportRefusal;
use shared::metrics::merger::checkpoint::Checkpoint;
use shared::metrics::{
    Applied, Exemplars, Limits, LocalStats, Merged, Merger, Refused, SharedStats, Source,
    decode_snapshot,
};
use shared::protocol::{FrontendId, WorkerStats};

use super::frontend::FrontendStats;
use super::observe::Observer;
use crate::checkpoint::Moment;

/// Gathers the cluster's metrics. Shared by the actors that receive reports and whoever publishes.
///
/// While `refreshing` is held the others (the cells of observer and front end, the merger) are
/// taken, one at a time; otherwise no two are held together.
#[derive(Debug)]
pub struct Hub {
    observer: Observer,
    frontend: FrontendStats,
    merger: Mutex<Merger>,
    /// Held while this process's own totals are drawn and merged.
    refreshing: Mutex<()>,
    registry: prometheus::Registry,
    process: SharedStats,
    /// What the process's named actors count.
    actors: OnceLock<SharedStats>,
    membership: SharedStats,
    application: Metrics,
    incarnation: Incarnation,
    restorations: AtomicU64,
}

impl Hub {
    /// A hub of the coordinator process `incarnation` that has seen nothing.
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

    /// The process's registry of the `prometheus` crate, published with everything else: its own
    /// `process_*` series, and a place for libraries that count with that crate.
    #[must_use]
    pub fn registry(&self) -> &prometheus::Registry {
        &self.registry
    }

    /// A hub that measures nothing but HTTP: to find out what measuring costs.
    #[must_use]
    pub fn off(incarnation: Incarnation, limits: Limits) -> Self {
        Self { observer: Observer::off(), ..Self::new(incarnation, limits) }
    }

    /// Where other threads of this process record.
    #[must_use]
    pub fn process(&self) -> &SharedStats {
        &self.process
    }

    /// Publishes what this process's named actors count, too. The first one given counts.
    pub fn with_actors(&self, actors: SharedStats) {
        let _ = self.actors.set(actors);
    }

    /// Where the membership is recorded, in a process that has one. It is no part of the merged
    /// totals: each process says for itself, and of the present, what it knows of the others.
    #[must_use]
    pub fn membership(&self) -> &SharedStats {
        &self.membership
    }

    /// What the application counts in this process.
    #[must_use]
    pub fn application(&self) -> &Metrics {
        &self.application
    }

    /// Where this process's own front end records.
    #[must_use]
    pub fn frontend(&self) -> &FrontendStats {
        &self.frontend
    }

    /// Where this process records.
    #[must_use]
    pub fn observer(&self) -> &Observer {
        &self.observer
    }

    /// Takes the report of a worker or front end. Empty ones (a worker that had nothing to add to
    /// a step result) are stale by definition.
    ///
    /// # Errors
    /// Returns [`Refused`], already counted, when the report cannot be merged.
    pub fn report(
        &self,
        source: Source,
        incarnation: Incarnation,
        stats: &WorkerStats,
    ) -> Result<Applied, Refused> {
        if stats.snapshot.is_empty() {
            return Ok(Applied::Stale);
        }
        // Decoded before the lock is taken: the work grows with the report.
        let snapshot = decode_snapshot(&stats.snapshot);
        let mut merger = self.merger();
        let applied = match snapshot {
            Ok(snapshot) => merger.apply(source, incarnation, stats.sequence, snapshot),
            Err(_) => Err(merger.refuse(ReportRefusal::Malformed, None)),
        };
        for line in merger.take_unsaid() {
            tracing::warn!("{line}");
        }
        applied
    }

    /// As [`Hub::report`], and notes when the report came.
    ///
    /// # Errors
    /// As there.
    pub fn take(
        &self,
        source: Source,
        incarnation: Incarnation,
        stats: &WorkerStats,
    ) -> Result<(), Refused> {
        self.report(source, incarnation, stats)?;
        let mut recording = self.observer.record();
        match source {
            Source::Worker(worker) => recording.worker_reported(worker, since_1970()),
            Source::Frontend(frontend) => recording.frontend_reported(frontend, since_1970()),
            Source::Coordinator => {}
        }
        Ok(())
    }

    /// The link to a process is gone: its gauges vanish until it reports again.
    pub fn lost(&self, source: Source, incarnation: Incarnation) {
        self.merger().lost(source, incarnation);
    }

    /// A process is gone for good: its totals stay, its gauges vanish.
    pub fn retire(&self, source: Source, incarnation: Incarnation) {
        self.merger().retire(source, incarnation);
    }

    /// Requests to look at, by what they took.
    #[must_use]
    pub fn exemplars(&self) -> Exemplars {
        self.observer.exemplars()
    }

    /// All totals now.
    #[must_use]
    pub fn merged(&self) -> Merged {
        self.refreshed().merged()
    }

    /// All that a page shows now.
    #[must_use]
    pub fn moment(&self) -> Moment {
        Moment { merged: self.merged(), exemplars: self.exemplars() }
    }

    /// What the coordinator after this one goes on from.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.refreshed().checkpoint()
    }

    /// Both, of the same moment.
    #[must_use]
    pub fn moment_and_checkpoint(&self) -> (Moment, Checkpoint) {
        let (merged, checkpoint) = {
            let merger = self.refreshed();
            (merger.merged(), merger.checkpoint())
        };
        (Moment { merged, exemplars: self.exemplars() }, checkpoint)
    }

    /// Goes on from what an earlier coordinator counted. Returns how many series are not known
    /// here.
    pub fn restore(&self, checkpoint: Checkpoint) -> usize {
        let unknown = self.merger().restore(checkpoint);
        self.restorations.fetch_add(1, Ordering::Relaxed);
        unknown
    }

    /// How often totals have come in that others counted before: they are of no interval here.
    #[must_use]
    pub fn restorations(&self) -> u64 {
        self.restorations.load(Ordering::Relaxed)
    }

    /// The merger, with this process's own totals of this moment.
    fn refreshed(&self) -> MutexGuard<'_, Merger> {
        // The parts of a report are drawn one after the other: of two scrapes at once each could
        // have the newer one of some, and the report with the larger number would have totals that
        // fell.
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
                // Counted and published as a refusal; the last good totals stay.
                tracing::error!(%refused, "the coordinator's own metrics are inconsistent");
            }
        }
        merger
    }

    fn merger(&self) -> MutexGuard<'_, Merger> {
        self.merger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The series that the `prometheus` crate has of this process.
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

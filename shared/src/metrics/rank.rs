//! The series of one rank of a replica, as a worker's executor thread records them.
//!
//! When a worker becomes another rank or joins another replica, it takes new handles: its old
//! totals stay under their labels, its old gauges vanish.
use std::time::Duration;

use super::application::Metrics;
use super::catalogue::{
    RANK_COLLECTIVE, RANK_COLLECTIVE_ABORTS, RANK_COLLECTIVE_BYTES, RANK_DRAFT, RANK_FORWARD,
    RANK_IDLE, RANK_LOAD, RANK_MASKS, RANK_SAMPLE, RANK_STEP, RANK_WEIGHTS,
};
use super::local::{Counter, Gauge, Histogram, LocalStats, SharedStats};
use super::report::{SnapshotError, encode_report};
use crate::ids::{ReplicaId, WorkerId};
use crate::protocol::{StepTimings, WorkerStats};

/// A worker's cells.
#[derive(Debug)]
pub struct RankStats {
    stats: LocalStats,
    worker: WorkerId,
    rank: Option<Handles>,
    /// Measurements of the process's other threads.
    process: SharedStats,
    /// Counts of its named actors.
    actors: SharedStats,
    application: Metrics,
    sequence: u64,
}

#[derive(Debug)]
struct Handles {
    rank: u32,
    /// Values of the labels rank, replica and worker.
    labels: [String; 3],
    step: Histogram,
    forward: Histogram,
    collective: Histogram,
    /// Whether the duration of exchanges is known.
    is_timed: bool,
    broken_off: Counter,
    /// Bytes exchanged, by algorithm; filled as algorithms are used.
    exchanged: Vec<(&'static str, Counter)>,
    sample: Histogram,
    masks: Histogram,
    /// Resolved when something is drafted.
    draft: Option<Histogram>,
    idle: Histogram,
    weights: Gauge,
    load: Gauge,
}

impl RankStats {
    /// Creates the cells of the worker in slot `worker`, for one process run.
    #[must_use]
    pub fn new(worker: WorkerId) -> Self {
        Self {
            stats: LocalStats::new(),
            worker,
            rank: None,
            process: SharedStats::default(),
            actors: SharedStats::default(),
            application: Metrics::new(),
            sequence: 0,
        }
    }

    /// Adds the measurements of the process's other threads and the application's metrics.
    #[must_use]
    pub fn with_process(self, process: SharedStats, application: Metrics) -> Self {
        Self { process, application, ..self }
    }

    /// Adds the counts of the process's named actors.
    #[must_use]
    pub fn with_actors(self, actors: SharedStats) -> Self {
        Self { actors, ..self }
    }

    /// Records that the worker became rank `rank` of `replica`.
    pub fn formed(&mut self, replica: ReplicaId, rank: u32, weight_bytes: u64, load: Duration) {
        self.left();
        let values = [rank.to_string(), replica.0.to_string(), self.worker.0.to_string()];
        let labels = [values[0].as_str(), values[1].as_str(), values[2].as_str()];
        let stats = &mut self.stats;
        let handles = Handles {
            rank,
            labels: [const { String::new() }; 3],
            step: stats.histogram(RANK_STEP, labels),
            forward: stats.histogram(RANK_FORWARD, labels),
            collective: stats.histogram(RANK_COLLECTIVE, labels),
            is_timed: true,
            broken_off: stats.counter(RANK_COLLECTIVE_ABORTS, labels),
            exchanged: Vec::new(),
            sample: stats.histogram(RANK_SAMPLE, labels),
            masks: stats.histogram(RANK_MASKS, labels),
            draft: None,
            idle: stats.histogram(RANK_IDLE, labels),
            weights: stats.gauge(RANK_WEIGHTS, labels),
            load: stats.gauge(RANK_LOAD, labels),
        };
        let handles = Handles { labels: values, ..handles };
        stats.set(handles.weights, weight_bytes as f64);
        stats.set(handles.load, load.as_secs_f64());
        self.rank = Some(handles);
    }

    /// Records that the worker is no longer a rank of a replica.
    pub fn left(&mut self) {
        self.released();
        self.rank = None;
    }

    /// Records that the epoch is over, perhaps for good: gauges about the rank vanish until it is
    /// formed again. What remains to be counted still counts for this rank.
    pub fn released(&mut self) {
        if let Some(rank) = &self.rank {
            self.stats.clear(rank.weights);
            self.stats.clear(rank.load);
        }
    }

    /// Records one step. Before [`RankStats::formed`] there is no rank to count it for.
    pub fn step(&mut self, timings: &StepTimings) {
        let Some(rank) = &mut self.rank else { return };
        let micros = Duration::from_micros;
        self.stats.observe_duration(rank.step, micros(timings.step_us));
        self.stats.observe_duration(rank.forward, micros(timings.forward_us));
        if rank.is_timed {
            self.stats.observe_duration(rank.collective, micros(timings.collective_us));
        }
        self.stats.observe_duration(rank.idle, micros(timings.idle_us));
        if rank.rank == 0 || timings.sample_us > 0 {
            self.stats.observe_duration(rank.sample, micros(timings.sample_us));
        }
        if let Some(masks_us) = timings.masks_us {
            self.stats.observe_duration(rank.masks, micros(masks_us));
        }
        if let Some(draft_us) = timings.draft_us {
            let [number, replica, worker] = &rank.labels;
            let labels = [number.as_str(), replica.as_str(), worker.as_str()];
            let draft = rank.draft.get_or_insert_with(|| self.stats.histogram(RANK_DRAFT, labels));
            self.stats.observe_duration(*draft, micros(draft_us));
        }
    }

    /// Records that the rank gave `bytes` to exchanges with other ranks, using `algorithm`.
    pub fn exchanged(&mut self, algorithm: &'static str, bytes: u64) {
        let Some(rank) = &mut self.rank else { return };
        let known = rank.exchanged.iter().find(|(known, _)| *known == algorithm);
        let counter = match known {
            Some((_, counter)) => *counter,
            None => {
                let [number, replica, worker] = &rank.labels;
                let labels = [algorithm, number.as_str(), replica.as_str(), worker.as_str()];
                let counter = self.stats.counter(RANK_COLLECTIVE_BYTES, labels);
                rank.exchanged.push((algorithm, counter));
                counter
            }
        };
        self.stats.add(counter, bytes);
    }

    /// Records that `count` exchanges with other ranks were broken off.
    pub fn broken_off(&mut self, count: u64) {
        if let Some(rank) = &self.rank {
            self.stats.add(rank.broken_off, count);
        }
    }

    /// Sets whether the timings of steps tell how long exchanges took.
    pub fn times_exchanges(&mut self, does: bool) {
        if let Some(rank) = &mut self.rank {
            rank.is_timed = does;
        }
    }

    /// Returns the worker's cells.
    pub fn local(&mut self) -> &mut LocalStats {
        &mut self.stats
    }

    /// Makes the next report, without the application's metrics if these make it too large. Takes
    /// microseconds and allocates: once per interval, not per step.
    ///
    /// # Errors
    /// Returns [`SnapshotError::TooLarge`] if this worker itself has too many series.
    pub fn report(&mut self) -> Result<WorkerStats, SnapshotError> {
        let mut snapshot = self.stats.snapshot();
        snapshot.add(self.process.snapshot());
        snapshot.add(self.actors.snapshot());
        let snapshot = encode_report(snapshot, &self.application)?;
        self.sequence += 1;
        Ok(WorkerStats { sequence: self.sequence, snapshot })
    }
}

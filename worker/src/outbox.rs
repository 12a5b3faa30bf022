//! Where the executor's output goes: messages to the uplink, measurements into the worker's stats.
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use shared::host::HostThread;
use shared::ids::{Epoch, WorkerId};
use shared::metrics::application::Metrics;
use shared::metrics::{RankStats, SharedStats};
use shared::protocol::{Form, Formed, FromWorker, HeldShard, StepPlan, StepResult, WorkerStats};
use tokio::sync::oneshot;

use crate::actor::Uplink;
use crate::executor::Outbox;
use crate::rank::ExchangeStats;

/// Minimum interval between stats in step results. Nothing is lost in between: they are totals.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of other coordinators' slots whose stats are kept.
const EARLIER_MAX: usize = 16;

/// The executor's outbox to the coordinator; see the module's documentation.
#[derive(Debug)]
pub struct LinkOutbox {
    uplink: Uplink,
    actors: SharedStats,
    application: Metrics,
    nvml: Option<PathBuf>,
    host: Option<HostThread>,
    stats: Option<(WorkerId, RankStats)>,
    /// The process's resource use, under the current slot's name.
    process: SharedStats,
    /// Stats of both kinds under slots that other coordinators assigned.
    earlier: BTreeMap<WorkerId, (RankStats, SharedStats)>,
    last_report: Option<Instant>,
    lost: Option<oneshot::Sender<String>>,
}

impl LinkOutbox {
    /// Creates an outbox that sends through `uplink`; it also reports the resource use of the
    /// process and its host, and the application's metrics.
    #[must_use]
    pub fn new(uplink: Uplink, application: Metrics, nvml: Option<PathBuf>) -> Self {
        Self {
            uplink,
            actors: SharedStats::default(),
            application,
            nvml,
            host: None,
            stats: None,
            process: SharedStats::default(),
            earlier: BTreeMap::new(),
            last_report: None,
            lost: None,
        }
    }

    /// Also reports what the process's named actors count.
    #[must_use]
    pub fn with_actors(self, actors: SharedStats) -> Self {
        Self { actors, ..self }
    }

    /// Notifies `lost` when the device no longer works.
    #[must_use]
    pub fn with_device_watch(self, lost: oneshot::Sender<String>) -> Self {
        Self { lost: Some(lost), ..self }
    }

    /// Returns the stats for the slot that the coordinator assigned.
    fn stats(&mut self) -> &mut RankStats {
        let worker = self.uplink.worker();
        // Another slot means another coordinator. If a slot comes back, its coordinator knows the
        // old totals, so they must continue, not start again.
        let current = match self.stats.take() {
            Some((known, mut stats)) if known != worker => {
                stats.left();
                let process = std::mem::take(&mut self.process);
                if self.earlier.len() < EARLIER_MAX {
                    self.earlier.insert(known, (stats, process));
                }
                None
            }
            current => current,
        };
        let stats = current.unwrap_or_else(|| {
            let earlier = self.earlier.remove(&worker);
            let (stats, process) = earlier.unwrap_or_else(|| {
                let (process, application) = (SharedStats::default(), self.application.clone());
                let stats = RankStats::new(worker).with_process(process.clone(), application);
                (stats.with_actors(self.actors.clone()), process)
            });
            let (name, nvml) = (worker.to_string(), self.nvml.clone());
            let before = self.host.take();
            self.host = Some(HostThread::start_after(before, &name, nvml, process.clone()));
            self.process = process;
            (worker, stats)
        });
        &mut self.stats.insert(stats).1
    }
}

impl Outbox for LinkOutbox {
    fn send(&mut self, link: u64, message: FromWorker) {
        let epoch = match &message {
            FromWorker::Progress(progress) => progress.epoch,
            FromWorker::GroupId(id) => id.epoch,
            FromWorker::Formed(formed) => formed.epoch,
            FromWorker::FormFailed(failed) => failed.epoch,
            FromWorker::Started(started) => started.epoch,
            FromWorker::Step(result) => result.epoch,
            FromWorker::StepFailed(failed) => failed.epoch,
            FromWorker::Adapter(done) => done.epoch,
            FromWorker::Stats(_) | FromWorker::Logs(_) | FromWorker::Goodbye { .. } => Epoch(0),
        };
        self.uplink.health().told(link, &message);
        self.uplink.tell_over(link, epoch, &message);
    }

    fn step_finished(&mut self, plan: &StepPlan, result: &StepResult) -> WorkerStats {
        self.uplink.health().stepped(result.epoch);
        if !self.uplink.measures() {
            return WorkerStats::default();
        }
        // An idle replica's steps only show that its ranks are alive. They compute nothing, so that
        // their times would make those of other steps look shorter; nor are they counted as steps.
        if !plan.sequences.is_empty() {
            self.stats().step(&result.timings);
        }
        if self.last_report.is_some_and(|last| last.elapsed() < REPORT_INTERVAL) {
            return WorkerStats::default();
        }
        self.report()
    }

    fn exchanged(&mut self, exchanged: ExchangeStats) {
        if !self.uplink.measures() {
            return;
        }
        let stats = self.stats();
        for (way, bytes) in exchanged.bytes.iter() {
            stats.exchanged(way, bytes);
        }
        stats.broken_off(exchanged.unfinished);
        stats.times_exchanges(exchanged.is_timed);
    }

    fn loaded(&mut self, form: &Form, formed: &Formed) {
        self.uplink.holds(HeldShard {
            model: form.model.clone(),
            identity: formed.identity,
            rank: form.rank,
            world_size: form.world_size,
        });
        let load = Duration::from_secs_f64(formed.load_seconds.max(0.0));
        self.stats().formed(form.replica, form.rank, formed.weight_bytes, load);
    }

    fn released(&mut self) {
        if let Some((_, stats)) = &mut self.stats {
            stats.released();
        }
    }

    fn device_lost(&mut self, reason: &str) {
        if let Some(lost) = self.lost.take() {
            let _ = lost.send(reason.to_owned());
        }
    }

    fn report(&mut self) -> WorkerStats {
        self.last_report = Some(Instant::now());
        let report = self.stats().report();
        if let Some(line) = self.application.take_warning() {
            tracing::warn!("{line}");
        }
        report.unwrap_or_else(|error| {
            tracing::error!(%error, "stats cannot be reported");
            WorkerStats::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use shared::host::HostSampler;
    use shared::ids::{ReplicaId, SeqId, StepId};
    use shared::metrics::catalogue::{
        PROCESS_CPU, PROCESS_MEMORY, RANK_COLLECTIVE_ABORTS, RANK_STEP, RANK_WEIGHTS,
    };
    use shared::metrics::{Limits, LocalStats, Merged, Merger, Source, decode_snapshot};
    use shared::protocol::{Drafts, SequenceStep, StepTimings};

    use super::*;

    #[test]
    fn totals_go_on_under_a_slot_that_is_given_again() {
        let uplink = Uplink::default();
        let mut outbox = LinkOutbox::new(uplink.clone(), Metrics::new(), None);
        let mut merger = Merger::new(Limits::default());
        let run = shared::ids::Incarnation(1);
        for (slot, steps) in [(0, 3), (1, 2), (0, 1)] {
            uplink.joined(WorkerId(slot));
            outbox.stats().formed(ReplicaId(0), 0, 1, Duration::ZERO);
            for _ in 0..steps {
                outbox.stats().step(&StepTimings::default());
                let report = outbox.report();
                let snapshot = decode_snapshot(&report.snapshot).unwrap();
                let source = Source::Worker(WorkerId(slot));
                merger.apply(source, run, report.sequence, snapshot).unwrap();
                // Meanwhile the process is sampled, under its name.
                std::thread::sleep(Duration::from_millis(30));
            }
        }
        assert_eq!(merger.merged().histogram_sum(RANK_STEP).count(), 6);
    }

    #[test]
    fn steps_that_compute_nothing_are_not_timed() {
        let uplink = Uplink::default();
        let mut outbox = LinkOutbox::new(uplink.clone(), Metrics::new(), None);
        uplink.joined(WorkerId(0));
        uplink.set_measures(true);
        outbox.stats().formed(ReplicaId(0), 0, 1, Duration::ZERO);
        let share = SequenceStep {
            seq: SeqId(1),
            start: 0,
            count: 1,
            new_blocks: Vec::new(),
            sample: true,
            masked: false,
            drafts: Drafts::none(),
        };
        let result = StepResult {
            epoch: Epoch(1),
            step: StepId(1),
            outputs: Vec::new(),
            drafted: Vec::new(),
            digest: 0,
            timings: StepTimings::default(),
            stats: WorkerStats::default(),
        };
        for (sequences, timed) in [(vec![], 0), (vec![share], 1), (vec![], 1)] {
            let plan = StepPlan { sequences, ..StepPlan::default() };
            outbox.step_finished(&plan, &result);
            let report = outbox.report();
            let merged = Merged::of(&decode_snapshot(&report.snapshot).unwrap());
            assert_eq!(merged.histogram_sum(RANK_STEP).count(), timed);
        }
    }

    #[test]
    fn cpu_time_is_counted_under_one_slot_alone() {
        let uplink = Uplink::default();
        let mut outbox = LinkOutbox::new(uplink.clone(), Metrics::new(), None);
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(300) {
            let _ = std::hint::black_box(began);
        }
        let mut counted = 0;
        for slot in [0, 1] {
            uplink.joined(WorkerId(slot));
            outbox.stats().step(&StepTimings::default());
            let began = Instant::now();
            let sampled = loop {
                let sampled = Merged::of(&outbox.process.snapshot());
                if sampled.gauge_sum(PROCESS_MEMORY) > 0.0 {
                    break sampled;
                }
                assert!(began.elapsed() < Duration::from_secs(60), "nothing is sampled");
                std::thread::sleep(Duration::from_millis(1));
            };
            counted += sampled.counter_sum(PROCESS_CPU);
        }
        let mut all = LocalStats::new();
        HostSampler::new("worker-2", None).sample(&mut all);
        let all = Merged::of(&all.snapshot()).counter_sum(PROCESS_CPU);
        assert!(counted > 0 && counted <= all, "{counted} of {all} ns");
    }

    #[test]
    fn what_describes_a_rank_vanishes_with_its_epoch_and_what_it_counted_stays() {
        let uplink = Uplink::default();
        let mut outbox = LinkOutbox::new(uplink.clone(), Metrics::new(), None);
        let mut merger = Merger::new(Limits::default());
        uplink.joined(WorkerId(0));
        let mut seen = |outbox: &mut LinkOutbox| {
            let report = outbox.report();
            let snapshot = decode_snapshot(&report.snapshot).unwrap();
            let run = shared::ids::Incarnation(1);
            merger.apply(Source::Worker(WorkerId(0)), run, report.sequence, snapshot).unwrap();
            let merged = merger.merged();
            let weights = merged.family(RANK_WEIGHTS.series()).map_or(0, |family| family.len());
            (weights, merged.counter_sum(RANK_COLLECTIVE_ABORTS))
        };
        outbox.stats().formed(ReplicaId(3), 0, 7, Duration::ZERO);
        assert_eq!(seen(&mut outbox), (1, 0));
        outbox.released();
        outbox.stats().broken_off(2);
        assert_eq!(seen(&mut outbox), (0, 2));
        outbox.stats().formed(ReplicaId(1), 0, 7, Duration::ZERO);
        assert_eq!(seen(&mut outbox), (1, 2));
    }
}

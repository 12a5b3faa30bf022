//! What a replica does with its ranks' reports on a step, which counts once all ranks agree.
use std::sync::Arc;
use std::time::Duration;

use coordinator::engine::{EngineEvent, EventSender, GenerateRequest};
use coordinator::metrics::{Hub, Observer};
use coordinator::replica::core::{Outbound, ReplicaCore, ReplicaLoad};
use coordinator::replica::driver::{DriverLimits, ReplicaDriver};
use coordinator::scheduler::{EpochEnd, Scheduler, SchedulerConfig};
use shared::ids::{Epoch, Incarnation, ReplicaId, RequestId, StepId, WorkerId};
use shared::metrics::catalogue::{FENCED_FRAMES, RANK_DISAGREEMENTS, RANK_STRAGGLER_GAP};
use shared::protocol::{SequenceOutput, StepPlan, StepResult, StepTimings, ToWorker, WorkerStats};
use tokio::sync::mpsc;

use crate::rig::sizes;
use shared::metrics::labels::{FailoverReason, FencedReason};

#[derive(Default)]
pub(crate) struct SentMessages {
    pub(crate) plans: Vec<StepPlan>,
    /// Steps whose masks were sent.
    pub(crate) masks: Vec<StepId>,
    pub(crate) ends: Vec<String>,
    /// Of the last end: ranks that have not finished a step that takes too long.
    pub(crate) hung: Vec<WorkerId>,
}

impl Outbound for SentMessages {
    fn send(&mut self, _epoch: Epoch, message: &ToWorker) -> Result<(), String> {
        match message {
            ToWorker::Step(plan) => self.plans.push(plan.clone()),
            ToWorker::Masks(masks) => self.masks.push(masks.step),
            _ => {}
        }
        Ok(())
    }

    fn end_epoch(
        &mut self,
        _epoch: Epoch,
        _cause: FailoverReason,
        reason: String,
        hung: Vec<WorkerId>,
    ) {
        self.ends.push(reason);
        self.hung = hung;
    }

    fn report_pace(&mut self, _epoch: Epoch, _worker: WorkerId, _slow: bool, _times: f64) {}
}

impl SentMessages {
    /// Returns a plan if the ranks have everything for it, including masks.
    pub(crate) fn runnable(&self, at: usize) -> Option<StepPlan> {
        let has_all = |plan: &&StepPlan| {
            self.masks.contains(&plan.step) || !plan.sequences.iter().any(|entry| entry.masked)
        };
        self.plans.get(at).filter(has_all).cloned()
    }
}

pub(crate) const WORKERS: [WorkerId; 2] = [WorkerId(4), WorkerId(1)];

pub(crate) fn limits() -> DriverLimits {
    DriverLimits {
        step_timeout: Duration::from_secs(9),
        step_floor: Duration::from_secs(9),
        unavailable_timeout: Duration::from_secs(9),
        max_queue_wait: None,
    }
}

pub(crate) fn core(observer: &Observer) -> ReplicaCore {
    core_of(observer, limits(), Arc::default())
}

/// Creates a core with these limits; `load` is what others see of it.
pub(crate) fn core_of(
    observer: &Observer,
    limits: DriverLimits,
    load: Arc<ReplicaLoad>,
) -> ReplicaCore {
    core_with(config(), observer, limits, load)
}

pub(crate) fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_model_len: 64,
        max_num_batched_tokens: 64,
        max_queued_requests: 4,
        ..sizes()
    }
}

/// Creates a core whose scheduler has these limits.
pub(crate) fn core_with(
    config: SchedulerConfig,
    observer: &Observer,
    limits: DriverLimits,
    load: Arc<ReplicaLoad>,
) -> ReplicaCore {
    let scheduler = Scheduler::new(config).unwrap();
    let id = ReplicaId(0);
    let driver = ReplicaDriver::new(Duration::ZERO, id, scheduler, observer.clone(), limits);
    ReplicaCore::new(driver, load)
}

pub(crate) fn result(plan: &StepPlan, digest: u32) -> StepResult {
    let sampled = plan.sequences.iter().filter(|entry| entry.sample);
    let outputs = sampled.map(|entry| SequenceOutput {
        seq: entry.seq,
        position: entry.start + entry.count,
        token: Some(7),
        logprobs: None,
        prompt_logprobs: Vec::new(),
        prompt_start: 0,
        corrupted: false,
        embedding: Vec::new(),
    });
    let (timings, stats) = (StepTimings::default(), WorkerStats::default());
    let (epoch, step, outputs) = (plan.epoch, plan.step, outputs.collect());
    StepResult { epoch, step, outputs, drafted: Vec::new(), digest, timings, stats }
}

pub(crate) fn request() -> GenerateRequest {
    GenerateRequest::new(
        RequestId(1),
        vec![1, 2, 3],
        vec![shared::sampling::SamplingParams::default()],
        30,
    )
}

#[test]
fn a_step_counts_once_all_ranks_agree_on_the_one_before() {
    for disagrees in [false, true] {
        let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
        let mut core = core(hub.observer());
        let mut sent = SentMessages::default();
        let (events, mut tokens) = mpsc::channel(64);
        let now = Duration::from_millis(1);
        core.submit(now, request(), EventSender::Local(events), &mut sent);
        core.epoch_formed(now, Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
        let accepted = |tokens: &mut mpsc::Receiver<EngineEvent>| {
            let mut count = 0;
            while let Ok(EngineEvent::Token { .. }) = tokens.try_recv() {
                count += 1;
            }
            count
        };
        // The next step's share begins at a token of this one, which only the workers know.
        let (first, second) = (sent.plans[0].clone(), sent.plans[1].clone());
        core.step_done(now, WORKERS[0], result(&first, 5), &mut sent);
        assert_eq!(accepted(&mut tokens), 1, "nothing came before");
        core.step_done(now, WORKERS[0], result(&second, 6), &mut sent);
        assert_eq!(accepted(&mut tokens), 0, "the other rank may have something else");
        let digest = if disagrees { 55 } else { 5 };
        core.step_done(now, WORKERS[1], result(&first, digest), &mut sent);
        let counted = hub.merged().counter_sum(RANK_DISAGREEMENTS);
        assert_eq!(counted, u64::from(disagrees));
        if disagrees {
            assert_eq!(sent.ends, ["ranks disagree on step-1: worker-1"]);
            assert_eq!(accepted(&mut tokens), 0);
            // Nothing more of this epoch counts.
            core.step_done(now, WORKERS[1], result(&second, 6), &mut sent);
            assert_eq!((accepted(&mut tokens), sent.ends.len()), (0, 1));
            // The next epoch continues from what was accepted.
            assert!(core.epoch_ended(now, Epoch(3), EpochEnd::Failed(FailoverReason::StepOverdue)));
            core.epoch_formed(now, Epoch(4), 8, 0, WORKERS.to_vec(), &mut sent);
            let again = sent.plans.iter().find(|plan| plan.epoch == Epoch(4)).unwrap();
            assert_eq!(again.admitted.iter().map(|it| it.tokens.len()).max(), Some(4));
        } else {
            assert!(sent.ends.is_empty());
            assert_eq!(accepted(&mut tokens), 1);
        }
    }
}

/// A rank answers the steps that it was sent, one after another. Anything else ends the epoch,
/// once.
#[test]
fn a_rank_that_answers_what_it_was_not_sent_ends_the_epoch() {
    let now = Duration::from_millis(1);
    // Two steps were sent: one rank answers a third, one an unknown one, one skips the first.
    for (rank, step) in [(0, 3), (1, 3), (0, u64::MAX), (1, u64::MAX), (0, 2), (1, 2)] {
        let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
        let mut core = core(hub.observer());
        let mut sent = SentMessages::default();
        let (events, mut tokens) = mpsc::channel(64);
        core.submit(now, request(), EventSender::Local(events), &mut sent);
        core.epoch_formed(now, Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
        assert_eq!(sent.plans.len(), 2);
        let wrong = StepPlan { step: StepId(step), ..sent.plans[1].clone() };
        for _ in 0..3 {
            core.step_done(now, WORKERS[rank], result(&wrong, 5), &mut sent);
        }
        let who = WORKERS[rank];
        assert_eq!(sent.ends, [format!("{who} answered step-{step} after step-0")]);
        for who in WORKERS {
            core.step_done(now, who, result(&sent.plans[0].clone(), 5), &mut sent);
        }
        assert!(tokens.try_recv().is_err(), "nothing more of it counts");
        assert_eq!(sent.ends.len(), 1);
    }
}

#[test]
fn ranks_are_not_compared_by_steps_that_compute_nothing() {
    let now = Duration::from_millis(1);
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let mut core = core(hub.observer());
    let mut sent = SentMessages::default();
    let (events, _tokens) = mpsc::channel(64);
    core.epoch_formed(now, Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
    // It comes while the ranks' first sign of life is awaited.
    core.submit(now, request(), EventSender::Local(events), &mut sent);
    let mut computed = Vec::new();
    for at in 0..3 {
        let plan = sent.plans[at].clone();
        for who in WORKERS {
            core.step_done(now, who, result(&plan, 5), &mut sent);
        }
        computed.push(!plan.sequences.is_empty());
        let steps = computed.iter().filter(|computes| **computes).count();
        assert_eq!(hub.merged().histogram_sum(RANK_STRAGGLER_GAP).count(), steps as u64);
    }
    assert_eq!(computed, [false, true, true]);
}

#[test]
fn what_a_rank_says_again_counts_once() {
    let now = Duration::from_millis(1);
    let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
    let mut core = core(hub.observer());
    let mut sent = SentMessages::default();
    let (events, mut tokens) = mpsc::channel(64);
    core.submit(now, request(), EventSender::Local(events), &mut sent);
    core.epoch_formed(now, Epoch(3), 8, 0, WORKERS.to_vec(), &mut sent);
    for step in 0..2 {
        let plan = sent.plans[step].clone();
        for who in [0, 0, 1, 0, 1, 1] {
            core.step_done(now, WORKERS[who], result(&plan, 5), &mut sent);
        }
    }
    let mut count = 0;
    while let Ok(EngineEvent::Token { .. }) = tokens.try_recv() {
        count += 1;
    }
    assert_eq!((count, sent.ends.len()), (2, 0));
    let merged = hub.merged();
    assert_eq!(merged.counter_sum(FENCED_FRAMES), 8);
    assert_eq!(merged.counter_sum_of(FENCED_FRAMES, FencedReason::Repeated), 8);
}

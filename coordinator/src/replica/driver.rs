//! Drives one replica's scheduler and carries out its effects: plans go to the ranks, tokens to the
//! requests' channels, events to the metrics.
//!
//! It has no socket and no clock; the shell passes the time in and sends the plans.
//!
//! - `deliver`: carries out what the scheduler decided
//! - `leaving`: requests that nobody waits for, and requests that hold up everybody
//! - `moving`: requests that continue at another replica
//! - `notes`: what happens to requests that are traced
mod deliver;
mod leaving;
mod moving;
mod notes;

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Duration;

pub use moving::MovedRequest;
use shared::ids::{Epoch, ReplicaId, RequestId, SeqId, StepId};
use shared::metrics::labels::FencedReason;
use shared::mix::IdMap;
use shared::protocol::{RequestNote, StepMasks, StepPlan, StepResult};

use self::notes::Notes;
use super::completions::Completions;
use super::deadlines::{Deadlines, OverdueStep, StepSize};
use crate::engine::{
    EngineError, EngineEvent, EventSender, GenerateRequest, ReaderProgress, StopCheck,
};
use crate::metrics::Observer;
use crate::metrics::observe::{RequestSummary, RequestTrack};
use crate::scheduler::{ApplyError, AwaitedMask, Effect, EpochEnd, Scheduler};

/// How long the driver waits for what.
#[derive(Clone, Copy, Debug)]
pub struct DriverLimits {
    /// A step that takes longer ends its epoch.
    pub step_timeout: Duration,
    /// A step may take so long at least, however short such steps usually are; with the time-out
    /// itself, that alone counts.
    pub step_floor: Duration,
    /// Requests fail when no epoch has been under way for this long.
    pub unavailable_timeout: Duration,
    /// Requests fail when they have waited for their first step for this long, if there is a bound.
    pub max_queue_wait: Option<Duration>,
}

/// A request that this replica has accepted and not ended.
#[derive(Debug)]
struct LiveRequest {
    events: EventSender,
    reading: ReaderProgress,
    track: RequestTrack,
    summary: RequestSummary,
    /// Whether any choice ended by length: the whole request then counts as such.
    by_length: bool,
    /// Since when no epoch has been under way at its replica; meaningless while one is.
    waits_since: Duration,
    /// When it was submitted, if it has not been in a step, here or at an earlier coordinator. Its
    /// client may have waited for longer: other texts of the same request go before it.
    unscheduled_since: Option<Duration>,
    /// Whether it has been in a step of this coordinator.
    has_run: bool,
    /// Set if it is traced.
    notes: Option<Notes>,
}

impl LiveRequest {
    /// Whether its client is gone, or has long stopped reading.
    fn is_gone(&mut self, now: Duration) -> bool {
        let waiting = self.events.waiting();
        self.events.is_closed() || self.reading.is_stuck(now, waiting)
    }
}

/// A step in flight.
#[derive(Clone, Copy, Debug)]
struct RunningStep {
    /// Since when it could run: those behind the oldest wait for it.
    since: Duration,
    size: Option<StepSize>,
}

/// Time between two looks counts as so much at most: when this process is stopped, or its whole
/// host, results wait to be read that have come meanwhile.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// One replica's scheduler and everything that hangs off its effects.
#[derive(Debug)]
pub struct ReplicaDriver {
    id: ReplicaId,
    /// Number of ranks of the epoch.
    ranks: u32,
    scheduler: Scheduler,
    observer: Observer,
    limits: DriverLimits,
    live: IdMap<RequestId, LiveRequest>,
    /// Stop checks of sequences whose requests have stop strings.
    stop_checks: IdMap<SeqId, Box<dyn StopCheck>>,
    effects: Vec<Effect>,
    /// Requests whose client is gone, found while events were delivered.
    gone: Vec<RequestId>,
    /// When the clients of all requests were last looked at.
    looked_for_gone: Duration,
    /// No request can have waited too long for its first step before this.
    overdue_from: Duration,
    /// For how long each pending mask has been waited for, and when that was last updated.
    masks_late: IdMap<AwaitedMask, Duration>,
    looked_for_masks: Duration,
    /// The steps in flight, oldest first.
    in_flight: VecDeque<RunningStep>,
    /// How long the oldest has run, as far as that says something about its ranks.
    waited: Duration,
    /// When that was last looked at.
    looked: Duration,
    deadlines: Deadlines,
    epoch: Option<Epoch>,
    /// Since when no epoch has been under way.
    unavailable_since: Duration,
    completions: Completions,
}

impl ReplicaDriver {
    /// Makes a replica without an epoch.
    #[must_use]
    pub fn new(
        now: Duration,
        id: ReplicaId,
        scheduler: Scheduler,
        observer: Observer,
        limits: DriverLimits,
    ) -> Self {
        Self {
            id,
            ranks: 0,
            scheduler,
            observer,
            limits,
            live: IdMap::default(),
            stop_checks: IdMap::default(),
            effects: Vec::new(),
            gone: Vec::new(),
            looked_for_gone: now,
            overdue_from: Duration::MAX,
            masks_late: IdMap::default(),
            looked_for_masks: now,
            in_flight: VecDeque::new(),
            waited: Duration::ZERO,
            looked: now,
            deadlines: Deadlines::new(limits.step_floor, limits.step_timeout),
            epoch: None,
            unavailable_since: now,
            completions: Completions::default(),
        }
    }

    /// Sets the waker that is woken when masks may be ready.
    pub fn wake_with(&mut self, waker: Waker) {
        self.scheduler.wake_with(waker);
    }

    /// Forgets the prefixes that its KV cache holds.
    pub fn forget_prefixes(&mut self) {
        self.scheduler.forget_prefixes();
    }

    /// Number of requests accepted and not ended.
    #[must_use]
    pub fn num_requests(&self) -> usize {
        self.live.len()
    }

    /// Number of requests that could go to another replica.
    #[must_use]
    pub fn num_shareable(&self) -> u32 {
        self.scheduler.num_shareable()
    }

    /// Number of their sequences that have not ended.
    #[must_use]
    pub fn num_sequences(&self) -> u32 {
        self.scheduler.num_sequences()
    }

    /// Number of blocks of its KV cache that a request that comes now may have.
    #[must_use]
    pub fn num_free_blocks(&self) -> u32 {
        u32::try_from(self.scheduler.free_to_admit()).unwrap_or(u32::MAX)
    }

    /// Whether a step is sent and not answered.
    #[must_use]
    pub fn is_stepping(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Until when the oldest step in flight may take.
    #[must_use]
    pub fn steps_until(&self) -> Option<Duration> {
        self.in_flight.front().map(|step| step.since.saturating_add(self.limits.step_timeout))
    }

    /// The last step planned in this epoch.
    #[must_use]
    pub fn last_step(&self) -> StepId {
        self.scheduler.last_step()
    }

    /// The oldest step in flight, or else the last one.
    #[must_use]
    pub fn oldest_step(&self) -> StepId {
        let newer = self.in_flight.len().saturating_sub(1) as u64;
        StepId(self.last_step().0.saturating_sub(newer))
    }

    /// Takes a request, or reports at once why not.
    pub fn submit(&mut self, now: Duration, mut request: GenerateRequest, events: EventSender) {
        let id = request.id;
        let stop_checks = std::mem::take(&mut request.stop_checks);
        let n = request.n();
        let summary = RequestSummary {
            prompt_tokens: request.prompt.len() as u64,
            n,
            max_tokens: request.max_tokens,
            cached_tokens: 0,
        };
        let (arrived, response_id) = (request.arrived, request.response_id.clone());
        let is_guided = request.is_guided();
        let has_budget = request.thinking.is_some();
        let (guide_spec, adapter) = (request.guide_spec.take(), request.adapter.clone());
        let pools = request.sampling.first().is_some_and(|it| it.pooling.is_some());
        let (resumed, notes) = (request.resumed.clone(), Notes::of(request.traced));
        let has_begun = resumed.as_ref().is_some_and(|resumed| resumed.has_begun());
        match self.scheduler.submit(request) {
            Ok(seqs) => {
                let mut recording = self.observer.record();
                let track = recording.accepted(arrived, n, &response_id);
                let mut track = track.with_adapter(adapter).pooling(pools);
                if is_guided {
                    recording.guided(guide_spec.as_deref(), has_budget);
                }
                if let Some(resumed) = &resumed {
                    track.resume(resumed);
                }
                recording.routed(&mut track, self.id);
                drop(recording);
                self.stop_checks.extend(seqs.iter().copied().zip(stop_checks));
                let waits_since = self.unavailable_since;
                let reading = ReaderProgress::new(now);
                let live = LiveRequest {
                    events,
                    reading,
                    track,
                    summary,
                    by_length: false,
                    waits_since,
                    unscheduled_since: (!has_begun).then_some(now),
                    has_run: false,
                    notes,
                };
                self.note_wait(live.unscheduled_since);
                self.live.insert(id, live);
                if let Some(resumed) = resumed {
                    let ends = resumed.choices.iter().map(|choice| choice.end);
                    self.scheduler.end_resumed(id, seqs.into_iter().zip(ends), &mut self.effects);
                    self.deliver(now);
                }
            }
            Err(mut error) => {
                if resumed.is_some() {
                    error = moving::outgrown(&error);
                }
                if let EngineError::QueueFull { retry_after_s, .. } = &mut error {
                    *retry_after_s = self.retry_after_s(now, id);
                }
                self.observer.refused(&events, &error);
                // The receiver may be gone already; nothing is lost then.
                let _ = events.send(EngineEvent::Failed(error));
            }
        }
    }

    /// Returns the seconds after which a request that does not run may retry.
    fn retry_after_s(&self, now: Duration, id: RequestId) -> u32 {
        let waiting = u64::from(self.scheduler.gauges().waiting);
        self.completions.retry_after_s(now, waiting, id)
    }

    /// Frees everything a request holds: at once if it has run here, at the next tick if it waits
    /// for its first step here. Unknown requests are ignored.
    pub fn cancel(&mut self, now: Duration, id: RequestId) {
        let Some(live) = self.live.get(&id) else { return };
        if !live.has_run {
            // Removing one takes a pass over the queue; one pass removes all of them together.
            self.gone.push(id);
            return;
        }
        self.scheduler.cancel(id, &mut self.effects);
        self.deliver(now);
    }

    /// Bounds the tokens of each step, see [`Scheduler::limit_steps`].
    pub fn limit_steps(&mut self, tokens: u32) {
        self.scheduler.limit_steps(tokens);
    }

    /// Sets how many ranks the next epoch has, for those who ask where a request runs; call it
    /// before [`ReplicaDriver::ready`].
    pub fn set_ranks(&mut self, ranks: u32) {
        self.ranks = ranks;
    }

    /// The ranks are formed: steps can run. Returns requests that their KV cache can never hold;
    /// another replica's may.
    pub fn ready(
        &mut self,
        now: Duration,
        epoch: Epoch,
        num_blocks: u32,
        host_blocks: u32,
    ) -> Vec<MovedRequest> {
        self.epoch = Some(epoch);
        self.in_flight.clear();
        self.deadlines.begin();
        let handed =
            self.scheduler.replica_ready(epoch, num_blocks, host_blocks, &mut self.effects);
        let moved = self.take_out(handed);
        let mut recording = self.observer.record();
        if let Some(speculation) = self.scheduler.speculation() {
            recording.speculates(self.id, speculation.num_speculative_tokens);
        }
        for live in self.live.values_mut() {
            recording.routed(&mut live.track, self.id);
        }
        drop(recording);
        self.deliver(now);
        moved
    }

    /// The epoch is over; its requests wait for the next one, keeping their accepted tokens.
    pub fn lost(&mut self, now: Duration, end: EpochEnd) {
        if self.epoch.take().is_none() {
            return;
        }
        self.unavailable_since = now;
        self.in_flight.clear();
        self.scheduler.replica_lost(end, &mut self.effects);
        let mut recording = self.observer.record();
        let failure = match end {
            EpochEnd::Failed(reason) => Some(reason),
            EpochEnd::Planned => None,
        };
        match failure {
            Some(reason) => recording.failover(self.id, reason),
            None => recording.replica_gone(self.id),
        }
        for live in self.live.values_mut() {
            recording.interrupted(&mut live.track, failure);
            if live.has_run {
                let failed = failure.is_some();
                live.note(RequestNote::Interrupted { replica: self.id, failed });
            }
            live.waits_since = now;
        }
        drop(recording);
        self.deliver(now);
    }

    /// No epoch will follow.
    pub fn removed(&self) {
        self.observer.record().replica_removed(self.id);
    }

    /// Fills `plan` with the next step, if one should be sent now.
    pub fn next_plan(&mut self, now: Duration, plan: &mut StepPlan) -> bool {
        let planned = self.scheduler.plan(plan, &mut self.effects);
        if planned {
            self.record_sent(now, plan);
        }
        if !self.effects.is_empty() {
            self.deliver(now);
        }
        planned
    }

    fn record_sent(&mut self, now: Duration, plan: &StepPlan) {
        if self.in_flight.is_empty() {
            self.waited = Duration::ZERO;
        }
        self.in_flight.push_back(RunningStep { since: now, size: Deadlines::size(plan) });
    }

    /// Fills `masks` with those of a step that waits for them, if all are known.
    pub fn next_masks(&mut self, now: Duration, masks: &mut StepMasks) -> bool {
        let known = self.scheduler.masks(masks, &mut self.effects);
        if !self.effects.is_empty() {
            self.deliver(now);
        }
        known
    }

    /// Fills `plan` with a step that computes nothing: a sign of life from every rank.
    pub fn canary(&mut self, now: Duration, plan: &mut StepPlan) -> bool {
        let planned = self.scheduler.canary(plan);
        if planned {
            self.record_sent(now, plan);
        }
        planned
    }

    /// Takes rank 0's result of a step.
    pub fn apply(&mut self, now: Duration, result: StepResult) {
        let stop_checks = &mut self.stop_checks;
        let mut stopped =
            |seq: SeqId, token| stop_checks.get_mut(&seq).is_some_and(|check| check.push(token));
        let StepResult { epoch, step, outputs, drafted, .. } = result;
        let effects = &mut self.effects;
        match self.scheduler.apply(epoch, step, outputs, &drafted, &mut stopped, effects) {
            Ok(()) => {
                if let Some(RunningStep { since, size }) = self.in_flight.pop_front() {
                    let took = now.saturating_sub(since).min(self.waited + LOOK_MAX);
                    if let Some(size) = size {
                        self.deadlines.done(size, took);
                    }
                }
                self.waited = Duration::ZERO;
                if let Some(next) = self.in_flight.front_mut() {
                    next.since = now;
                }
            }
            Err(error) => {
                tracing::debug!(replica = %self.id, %error, "a result was fenced");
                self.fenced(match error {
                    ApplyError::StaleEpoch { .. } => FencedReason::StaleEpoch,
                    ApplyError::UnexpectedStep { .. } => FencedReason::Repeated,
                });
            }
        }
        self.deliver(now);
    }

    /// A result arrived that does not count.
    pub fn fenced(&mut self, reason: FencedReason) {
        self.observer.record().fenced_frame(reason);
    }

    /// The ranks of a step did not report the same tokens.
    pub fn ranks_disagreed(&mut self) {
        self.observer.record().ranks_disagreed(self.id);
    }

    /// A step took too long.
    pub fn step_overdue(&mut self) {
        self.observer.record().step_overdue(self.id);
    }

    /// The slowest rank of a step computed this much longer than the fastest.
    pub fn straggler_gap(&mut self, gap: Duration) {
        self.observer.record().straggler_gap(self.id, gap);
    }

    /// Time passes: gives up what waited too long, finds clients that are gone. Returns for how
    /// long the oldest step in flight has run, when that is too long. `heard` is whether all ranks
    /// are heard of: the silence of one has a limit of its own.
    pub fn tick(&mut self, now: Duration, heard: bool) -> Option<OverdueStep> {
        self.find_gone(now);
        self.drop_gone(now);
        self.drop_late_masks(now);
        self.drop_overdue(now);
        if self.epoch.is_some() {
            return self.overdue(now, heard);
        }
        let timeout = self.limits.unavailable_timeout;
        let waited = |live: &LiveRequest| now.saturating_sub(live.waits_since);
        let tired = self.live.iter().filter(|(_, live)| waited(live) >= timeout);
        let ids: Vec<RequestId> = tired.map(|(id, _)| *id).collect();
        if !ids.is_empty() {
            let message = format!("no replica has served for {} s", timeout.as_secs());
            self.fail(now, ids, &EngineError::Unavailable { message });
        }
        None
    }

    fn overdue(&mut self, now: Duration, heard: bool) -> Option<OverdueStep> {
        let passed = now.saturating_sub(std::mem::replace(&mut self.looked, now));
        let RunningStep { since, size } = *self.in_flight.front()?;
        let all = now.saturating_sub(since);
        if all >= self.limits.step_timeout {
            return Some(OverdueStep { waited: all, usual: None });
        }
        // Who waits for masks is not slow.
        if heard && self.scheduler.masks_awaited().is_empty() {
            self.waited = (self.waited + passed.min(LOOK_MAX)).min(all);
        }
        self.deadlines.judge(now, size?, self.waited)
    }

    /// Fails every request: the replica is not coming back, or the server shuts down.
    pub fn fail_all(&mut self, now: Duration, error: &EngineError) {
        let ids = self.live.keys().copied().collect();
        self.fail(now, ids, error);
    }

    fn fail(&mut self, now: Duration, mut ids: Vec<RequestId>, error: &EngineError) {
        ids.sort_unstable();
        self.scheduler.fail_all(ids, error, &mut self.effects);
        self.deliver(now);
    }
}

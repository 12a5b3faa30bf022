//! The life of a request: where it is, and how long each phase took.
//!
//! A [`RequestTrack`] travels with the request. It knows which gauge the request is counted in, so
//! that no event can make running, waiting and in flight disagree.
use std::sync::Arc;
use std::thread::{panicking, yield_now};
use std::time::Duration;

use shared::ids::ReplicaId;
use shared::metrics::LocalStats;
use shared::metrics::labels::{
    ExpiryReason, FailoverReason, FinishedReason, GuideKind, RejectReason, WaitingReason,
};
use shared::protocol::GuideSpec;

use super::{Cells, Observer, Recording, UpDownGauge, WAITING_AT_REPLICA};
use crate::adapters::AdapterUse;
use crate::engine::{EngineError, EventSender, Resumed};

/// How often a dropped request tries to be counted.
const DROP_TRIES: u32 = 1000;

/// One accepted request. End it with [`Recording::finished`], [`Recording::aborted`],
/// [`Recording::failed`] or [`Recording::handed_over`]. Dropped without, it counts as failed, like
/// the requests of a replica whose actor panics.
#[derive(Debug)]
#[must_use = "a request that is dropped counts as failed"]
pub struct RequestTrack {
    /// Counts it as in flight; `None` once it has ended.
    observer: Option<Observer>,
    place: RequestGauge,
    /// The adapter it is computed with.
    adapter: AdapterUse,
    /// Whether its output is an embedding.
    pools: bool,
    /// Whether it continues what another coordinator accepted, which observed its beginning.
    resumed: bool,
    response_id: Arc<str>,
    arrived: Duration,
    first_scheduled: Option<Duration>,
    first_token: Option<Duration>,
    last_token: Option<Duration>,
    tokens: u64,
    /// Number of preemptions of its sequences.
    preemptions: u64,
    /// By choice.
    choices: Vec<ChoiceTrack>,
}

/// One choice of a request.
#[derive(Clone, Copy, Debug, Default)]
struct ChoiceTrack {
    /// When its last token was accepted.
    last_token: Option<Duration>,
    tokens: u64,
}

/// Which gauge a request is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestGauge {
    NoReplica,
    Waiting(ReplicaId, WaitingAt),
    Running(ReplicaId),
    Swapped(ReplicaId),
}

/// Position in [`WAITING_AT_REPLICA`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitingAt {
    Capacity,
    Preempted,
}

const _: () = assert!(
    matches!(WAITING_AT_REPLICA[WaitingAt::Capacity as usize], WaitingReason::Capacity)
        && matches!(WAITING_AT_REPLICA[WaitingAt::Preempted as usize], WaitingReason::Preempted)
);

/// What is known of a request at its end, besides its track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSummary {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// The parameter `n`.
    pub n: u32,
    /// The parameter `max_tokens`.
    pub max_tokens: u32,
    /// Prompt tokens that the KV cache had, over all complete choices.
    pub cached_tokens: u64,
}

impl RequestSummary {
    /// Prompt tokens that were computed for a complete request.
    fn prefill_computed(&self) -> u64 {
        self.prompt_tokens.saturating_mul(u64::from(self.n)).saturating_sub(self.cached_tokens)
    }
}

impl RequestTrack {
    /// Sets the adapter it is computed with.
    pub fn with_adapter(mut self, adapter: AdapterUse) -> Self {
        self.adapter = adapter;
        self
    }

    /// Sets whether it asks for an embedding rather than text.
    pub fn pooling(mut self, pools: bool) -> Self {
        self.pools = pools;
        self
    }

    /// Notes tokens that another coordinator accepted and counted.
    pub fn resume(&mut self, resumed: &Resumed) {
        // Nobody has observed its first token otherwise.
        self.resumed = resumed.has_begun();
        let going_on = resumed.choices.iter().map(|choice| choice.tokens.len() as u64);
        let over = |choice: &usize| resumed.over.iter().any(|(over, _)| *over as usize == *choice);
        let left = (0..self.choices.len()).filter(|choice| !over(choice)).zip(going_on);
        let over = resumed.over.iter().map(|(choice, tokens)| (*choice as usize, *tokens as u64));
        for (choice, tokens) in left.chain(over).collect::<Vec<_>>() {
            self.tokens += tokens;
            if let Some(choice) = self.choices.get_mut(choice) {
                choice.tokens = tokens;
            }
        }
    }

    /// Notes that one of its sequences was preempted.
    pub(super) fn preempted(&mut self) {
        self.preemptions += 1;
    }
}

impl Drop for RequestTrack {
    fn drop(&mut self) {
        let Some(observer) = self.observer.take() else { return };
        // Others record for microseconds. This thread itself may be recording, and would wait for
        // itself; then the request stays in flight.
        let tries = if panicking() { 1 } else { DROP_TRIES };
        for _ in 0..tries {
            if let Some(mut recording) = observer.try_record() {
                if let Some(cells) = recording.cells.take().as_deref_mut() {
                    // Its owner knew the rest, and is gone.
                    let n = u32::try_from(self.choices.len()).unwrap_or(u32::MAX);
                    let (prompt_tokens, max_tokens, cached_tokens) = (0, 0, 0);
                    let summary = RequestSummary { prompt_tokens, n, max_tokens, cached_tokens };
                    cells.end(self, FinishedReason::Error, summary);
                }
                return;
            }
            yield_now();
        }
    }
}

impl Observer {
    /// Counts a request that is not accepted, if that is what its client is finally told. So this
    /// excludes full queues, and the end of this coordinator for a front end in another process,
    /// which submits the request again; front ends count what they give up.
    pub fn refused(&self, events: &EventSender, error: &EngineError) {
        let reason = RejectReason::from(error);
        let is_sent_again = events.is_remote() && reason == RejectReason::ShuttingDown;
        if reason != RejectReason::QueueFull && !is_sent_again {
            self.record().rejected(reason);
        }
    }
}

impl Recording<'_> {
    /// A request was accepted into the queue. It arrived at `arrived`, has `n` choices, and its
    /// client knows it as `response_id`; no replica holds it yet.
    pub fn accepted(&mut self, arrived: Duration, n: u32, response_id: &Arc<str>) -> RequestTrack {
        if let Some(Cells { stats, fixed, waiting_for_replica, .. }) = self.cells.as_deref_mut() {
            stats.add(fixed.accepted, 1);
            fixed.in_flight.up(stats);
            waiting_for_replica.up(stats);
        }
        RequestTrack {
            observer: Some(self.observer.clone()),
            place: RequestGauge::NoReplica,
            adapter: AdapterUse::default(),
            pools: false,
            resumed: false,
            response_id: response_id.clone(),
            arrived,
            first_scheduled: None,
            first_token: None,
            last_token: None,
            tokens: 0,
            preemptions: 0,
            choices: vec![ChoiceTrack::default(); n as usize],
        }
    }

    /// The output of an accepted request is constrained by `spec`; without one, its reasoning is
    /// bounded, or else it has bad words alone.
    pub fn guided(&mut self, spec: Option<&GuideSpec>, has_budget: bool) {
        let Some(Cells { stats, fixed, .. }) = self.cells.as_deref_mut() else { return };
        let kind = match spec {
            Some(GuideSpec::Json { .. }) => GuideKind::Json,
            Some(GuideSpec::Regex(_)) => GuideKind::Regex,
            Some(GuideSpec::Choice(_)) => GuideKind::Choice,
            Some(GuideSpec::Lark(_) | GuideSpec::Made(_)) => GuideKind::Grammar,
            Some(GuideSpec::Tokens(_)) => GuideKind::Tokens,
            None if has_budget => GuideKind::Thinking,
            None => GuideKind::BadWords,
        };
        stats.add(fixed.guided.get(kind), 1);
    }

    /// A request was not accepted.
    pub fn rejected(&mut self, reason: RejectReason) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        let Cells { stats, fixed, .. } = cells;
        let counter = fixed.rejected.get(reason);
        stats.add(counter, 1);
    }

    /// So many accepted requests are given up because their time has expired.
    pub fn expired(&mut self, reason: ExpiryReason, requests: u64) {
        let Some(Cells { stats, fixed, .. }) = self.cells.as_deref_mut() else { return };
        stats.add(fixed.expired.get(reason), requests);
    }

    /// A replica was chosen; the request is in its queue.
    pub fn routed(&mut self, track: &mut RequestTrack, replica: ReplicaId) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.move_to(track, RequestGauge::Waiting(replica, WaitingAt::Capacity));
    }

    /// The request entered its replica's batch, for the first time or again.
    pub fn scheduled(&mut self, track: &mut RequestTrack, replica: ReplicaId, now: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        if track.first_scheduled.is_none() {
            track.first_scheduled = Some(now);
            // Observed now, not at the end: a request waited even if its client leaves later.
            if !track.pools && !track.resumed {
                let waited = now.saturating_sub(track.arrived);
                let Cells { stats, fixed, .. } = &mut *cells;
                stats.observe_exemplar(fixed.queue, waited, 1, &track.response_id, now);
            }
        }
        cells.move_to(track, RequestGauge::Running(replica));
    }

    /// The request lost its blocks, which held `tokens` computed tokens, and is back in its
    /// replica's queue.
    pub fn preempted(&mut self, track: &mut RequestTrack, replica: ReplicaId, tokens: u64) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.move_to(track, RequestGauge::Waiting(replica, WaitingAt::Preempted));
        track.preempted();
        let (cells, stats) = cells.replica(replica);
        stats.add(cells.preemptions, 1);
        stats.add(cells.preempted_tokens, tokens);
    }

    /// The request's replica pauses, because it failed or, without `failure`, as planned: the
    /// request waits to be continued, there or elsewhere. It counts as replayed if its replica
    /// failed, unless it had not been scheduled yet and so loses nothing.
    pub fn interrupted(&mut self, track: &mut RequestTrack, failure: Option<FailoverReason>) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.move_to(track, RequestGauge::NoReplica);
        if let Some(reason) = failure
            && track.first_scheduled.is_some()
        {
            let Cells { stats, fixed, .. } = cells;
            stats.add(fixed.replayed.get(reason), 1);
        }
    }

    /// `count` tokens of one choice were accepted at `now`. The request's first token yields its
    /// time to first token; every other token of a choice closes a gap, and tokens that arrive
    /// together share theirs equally.
    pub fn tokens(&mut self, track: &mut RequestTrack, choice: u32, count: u32, now: Duration) {
        let Some(cells) = self.cells.as_deref_mut() else { return };
        if count == 0 {
            return;
        }
        let Cells { stats, fixed, .. } = cells;
        if track.first_token.is_none() {
            track.first_token = Some(now);
            if !track.resumed {
                let waited = now.saturating_sub(track.arrived);
                stats.observe_exemplar(fixed.ttft, waited, 1, &track.response_id, now);
            }
        }
        track.last_token = Some(now);
        track.tokens += u64::from(count);
        let Some(choice) = track.choices.get_mut(choice as usize) else { return };
        choice.tokens += u64::from(count);
        let before = choice.last_token.replace(now);
        // A choice's first token follows the prompt rather than a token, so it closes no gap.
        let gaps = if before.is_some() { count } else { count - 1 };
        let span = now.saturating_sub(before.unwrap_or(now));
        if gaps == 1 {
            self.record_gap(span, &track.response_id, now);
        } else if gaps > 1 {
            let gap = span.as_secs_f64() / f64::from(gaps);
            stats.observe_n(fixed.inter_token, gap, u64::from(gaps));
        }
    }

    /// All choices are complete. `reason` is length if any of them ended by length.
    pub fn finished(
        &mut self,
        mut track: RequestTrack,
        reason: FinishedReason,
        summary: RequestSummary,
        now: Duration,
    ) {
        track.observer = None;
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.end(&track, reason, summary);
        if matches!(reason, FinishedReason::Stop | FinishedReason::Length) {
            let Cells { stats, fixed, .. } = &mut *cells;
            stats.observe_count(fixed.prefill_computed, summary.prefill_computed());
            cells.latencies(&track, now);
        }
    }

    /// The client left or cancelled. Its latencies are not observed: they tell when it lost
    /// patience, not how fast we are.
    pub fn aborted(&mut self, mut track: RequestTrack, summary: RequestSummary) {
        track.observer = None;
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.end(&track, FinishedReason::Abort, summary);
    }

    /// This coordinator ends, and the next one goes on with the request. What is observed of a
    /// request when it ends is observed there.
    pub fn handed_over(&mut self, mut track: RequestTrack) {
        track.observer = None;
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.leave(&track, FinishedReason::HandedOver);
    }

    /// The request was given up. Its latencies are not observed.
    pub fn failed(&mut self, mut track: RequestTrack, summary: RequestSummary) {
        track.observer = None;
        let Some(cells) = self.cells.as_deref_mut() else { return };
        cells.end(&track, FinishedReason::Error, summary);
    }
}

impl Cells {
    pub(super) fn move_to(&mut self, track: &mut RequestTrack, place: RequestGauge) {
        let (level, stats) = self.level(track.place);
        level.down(stats);
        if let Some((level, stats)) = self.adapter_level(track) {
            level.down(stats);
        }
        let (level, stats) = self.level(place);
        level.up(stats);
        track.place = place;
        if let Some((level, stats)) = self.adapter_level(track) {
            level.up(stats);
        }
    }

    /// Returns the level that counts a request by adapter, while a replica holds it.
    fn adapter_level(
        &mut self,
        track: &RequestTrack,
    ) -> Option<(&mut UpDownGauge, &mut LocalStats)> {
        let (replica, runs) = match track.place {
            RequestGauge::NoReplica => return None,
            RequestGauge::Waiting(replica, _) | RequestGauge::Swapped(replica) => (replica, false),
            RequestGauge::Running(replica) => (replica, true),
        };
        let name = track.adapter.name()?;
        let (cells, stats) = self.replica(replica);
        let levels = cells.adapters.get_mut(name)?;
        Some((if runs { &mut levels.running } else { &mut levels.waiting }, stats))
    }

    fn level(&mut self, place: RequestGauge) -> (&mut UpDownGauge, &mut LocalStats) {
        match place {
            RequestGauge::NoReplica => (&mut self.waiting_for_replica, &mut self.stats),
            RequestGauge::Waiting(replica, at) => {
                let (cells, stats) = self.replica(replica);
                (&mut cells.waiting[at as usize], stats)
            }
            RequestGauge::Running(replica) => {
                let (cells, stats) = self.replica(replica);
                (&mut cells.running, stats)
            }
            RequestGauge::Swapped(replica) => {
                let (cells, stats) = self.replica(replica);
                (&mut cells.swapped, stats)
            }
        }
    }

    /// It is in flight no more.
    fn leave(&mut self, track: &RequestTrack, reason: FinishedReason) {
        let (level, stats) = self.level(track.place);
        level.down(stats);
        if let Some((level, stats)) = self.adapter_level(track) {
            level.down(stats);
        }
        let Self { stats, fixed, .. } = self;
        fixed.in_flight.down(stats);
        let counter = fixed.finished.get(reason);
        stats.add(counter, 1);
    }

    fn end(&mut self, track: &RequestTrack, reason: FinishedReason, summary: RequestSummary) {
        self.leave(track, reason);
        let Self { stats, fixed, .. } = self;
        stats.observe_count(fixed.prompt_tokens, summary.prompt_tokens);
        stats.observe_count(fixed.generation_tokens, track.tokens);
        let longest = track.choices.iter().map(|choice| choice.tokens).max().unwrap_or(0);
        stats.observe_count(fixed.max_generation_tokens, longest);
        stats.observe_count(fixed.preempted, track.preemptions);
        stats.observe_count(fixed.n, u64::from(summary.n));
        // The API accepts no best_of other than n.
        stats.observe_count(fixed.best_of, u64::from(summary.n));
        stats.observe_count(fixed.max_tokens, u64::from(summary.max_tokens));
    }

    fn latencies(&mut self, track: &RequestTrack, now: Duration) {
        let Self { stats, fixed, .. } = self;
        let mut observe = |histogram, from: Duration, to: Duration| {
            let took = to.saturating_sub(from);
            stats.observe_exemplar(histogram, took, 1, &track.response_id, now);
        };
        // It has no token to wait for: mixed with those of texts, its times would be meaningless.
        if track.pools {
            return observe(fixed.pooling, track.arrived, now);
        }
        observe(fixed.e2e, track.arrived, now);
        if track.resumed {
            // Another coordinator observed when its phases began and ended.
            return;
        }
        let Some(scheduled) = track.first_scheduled else { return };
        let (Some(first), Some(last)) = (track.first_token, track.last_token) else { return };
        observe(fixed.prefill, scheduled, first);
        observe(fixed.decode, first, last);
        observe(fixed.inference, scheduled, last);
        // Choices run side by side: this is the mean number of tokens after a choice's first.
        let choices = track.choices.iter().filter(|choice| choice.tokens > 0).count() as u64;
        let after_first = track.tokens.saturating_sub(choices);
        if after_first > 0 && choices > 0 {
            let per_choice = after_first as f64 / choices as f64;
            let mean = last.saturating_sub(first).as_secs_f64() / per_choice;
            let mean = Duration::try_from_secs_f64(mean).unwrap_or_default();
            let id = &track.response_id;
            stats.observe_exemplar(fixed.time_per_output_token, mean, 1, id, now);
        }
    }
}

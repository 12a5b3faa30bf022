//! Carries out what the scheduler decided: tokens go to the requests' channels, events to the
//! metrics.
use std::time::Duration;

use shared::ids::{ReplicaId, RequestId, SeqId};
use shared::metrics::labels::FinishedReason;
use shared::mix::IdMap;
use shared::protocol::RequestNote;

use super::{LiveRequest, ReplicaDriver};
use crate::engine::{EngineError, EngineEvent, FinishReason, ReceiverGone, StopCheck};
use crate::metrics::Recording;
use crate::metrics::observe::StepTokens;
use crate::replica::completions::Completions;
use crate::scheduler::{Effect, RequestPlace, StepSummary};

impl ReplicaDriver {
    /// Carries out what the scheduler decided. Everything is counted under one lock, so that a
    /// scrape sees a step whole or not at all.
    pub(super) fn deliver(&mut self, now: Duration) {
        let Self { id, ranks, observer, live, stop_checks, gone, completions, .. } = self;
        let recording = observer.record();
        let (id, ranks) = (*id, *ranks);
        let mut delivery =
            Delivery { id, ranks, now, recording, live, stop_checks, gone, completions };
        let mut effects = self.effects.drain(..).peekable();
        // Tokens that a choice got at once: the time since the previous one covers all of them.
        let mut together = 0;
        while let Some(effect) = effects.next() {
            let count = match &effect {
                Effect::Token { request, choice, .. } => {
                    together += 1;
                    let next = effects.peek();
                    let is_last = !next.is_some_and(|next| next.is_token_of(*request, *choice));
                    if is_last { std::mem::take(&mut together) } else { 0 }
                }
                _ => 0,
            };
            delivery.take(effect, count);
        }
        if self.epoch.is_some() {
            let (gauges, mut recording) = (self.scheduler.gauges(), delivery.recording);
            recording.kv_blocks(id, gauges.blocks_used, gauges.blocks_total);
            recording.host_kv_blocks(id, gauges.host_used);
        }
    }
}

/// Where effects go.
struct Delivery<'a> {
    id: ReplicaId,
    /// Number of its ranks.
    ranks: u32,
    now: Duration,
    recording: Recording<'a>,
    live: &'a mut IdMap<RequestId, LiveRequest>,
    stop_checks: &'a mut IdMap<SeqId, Box<dyn StopCheck>>,
    gone: &'a mut Vec<RequestId>,
    completions: &'a mut Completions,
}

impl Delivery<'_> {
    /// Carries out one effect. For a token, `count` is the number of tokens that the choice got at
    /// once, given with the last of them; 0 with the others.
    fn take(&mut self, effect: Effect, count: u32) {
        match effect {
            Effect::FirstScheduled { request } | Effect::Resumed { request } => {
                self.scheduled(request);
            }
            Effect::Preempted { request, place, swapped, tokens } => {
                self.preempted(request, place, swapped, tokens);
            }
            Effect::SwappedIn { blocks, .. } => self.recording.swapped_in(self.id, blocks),
            Effect::Rests { request, place } => self.placed(request, place),
            Effect::PromptLogprobs { request, logprobs } => {
                self.send(request, EngineEvent::PromptLogprobs(logprobs));
            }
            Effect::Embedding { request, embedding } => {
                self.send(request, EngineEvent::Embedding(embedding));
            }
            Effect::Token { request, choice, token, logprobs } => {
                self.token(request, EngineEvent::Token { choice, token, logprobs }, choice, count);
            }
            Effect::Finished { request, seq, choice, reason, cached, last } => {
                self.stop_checks.remove(&seq);
                self.finished(request, choice, (reason, cached), last);
                if last {
                    self.ended(request);
                }
            }
            Effect::Dropped { request, seqs, error } => self.dropped(request, seqs, error),
            Effect::Drafted { request, tokens, accepted, emitted } => {
                if let Some(live) = self.live.get_mut(&request) {
                    live.drafted(tokens, accepted);
                }
                self.recording.drafted(self.id, tokens, accepted, emitted);
            }
            Effect::StepDone(tokens) => self.recording.step(self.id, step_tokens(tokens)),
        }
    }

    fn scheduled(&mut self, request: RequestId) {
        if let Some(live) = self.live.get_mut(&request) {
            live.unscheduled_since = None;
            live.has_run = true;
            self.completions.began(self.now);
            self.recording.scheduled(&mut live.track, self.id, self.now);
            live.note(RequestNote::Scheduled { replica: self.id, ranks: self.ranks });
        }
    }

    fn preempted(
        &mut self,
        request: RequestId,
        place: RequestPlace,
        swapped: Option<u32>,
        tokens: u32,
    ) {
        if let Some(live) = self.live.get_mut(&request) {
            match swapped {
                Some(blocks) => self.recording.swapped_out(&mut live.track, self.id, blocks),
                None => self.recording.preempted(&mut live.track, self.id, u64::from(tokens)),
            }
            live.note(RequestNote::Preempted { replica: self.id });
        }
        self.placed(request, place);
    }

    /// Counts a request at its present place.
    fn placed(&mut self, request: RequestId, place: RequestPlace) {
        let Some(live) = self.live.get_mut(&request) else { return };
        let (track, id) = (&mut live.track, self.id);
        match place {
            RequestPlace::Running => self.recording.scheduled(track, id, self.now),
            RequestPlace::Swapped => self.recording.left_batch(track, id, true),
            RequestPlace::Waiting => self.recording.left_batch(track, id, false),
        }
    }

    fn token(&mut self, request: RequestId, event: EngineEvent, choice: u32, count: u32) {
        if let Some(live) = self.live.get_mut(&request) {
            self.recording.tokens(&mut live.track, choice, count, self.now);
        }
        self.send(request, event);
    }

    /// A choice has ended.
    fn finished(
        &mut self,
        request: RequestId,
        choice: u32,
        (reason, cached): (FinishReason, u32),
        last: bool,
    ) {
        if let Some(live) = self.live.get_mut(&request) {
            live.by_length |= reason == FinishReason::Length;
            live.summary.cached_tokens += u64::from(cached);
            if last {
                live.note_end();
            }
        }
        self.send(request, EngineEvent::Finished { choice, reason, cached });
    }

    /// All choices have ended.
    fn ended(&mut self, request: RequestId) {
        if let Some(live) = self.live.remove(&request) {
            self.completions.ended(self.now);
            let reason = if live.by_length { FinishedReason::Length } else { FinishedReason::Stop };
            self.recording.finished(live.track, reason, live.summary, self.now);
        }
    }

    fn dropped(&mut self, request: RequestId, seqs: Vec<SeqId>, error: Option<EngineError>) {
        for seq in seqs {
            self.stop_checks.remove(&seq);
        }
        if let Some(live) = self.live.remove(&request) {
            // Requests that leave the queue say nothing about the pace at which it is served.
            if live.has_run {
                self.completions.ended(self.now);
            }
            dropped(&mut self.recording, live, error);
        }
    }

    fn send(&mut self, request: RequestId, event: EngineEvent) {
        let Some(live) = self.live.get_mut(&request) else { return };
        // Closed: the client left; full: it stopped reading long ago.
        match live.events.send(event) {
            Ok(()) => live.reading.sent(),
            Err(ReceiverGone) => self.gone.push(request),
        }
    }
}

/// Counts a request that is not continued, and tells its client why; without an error the client is
/// gone.
pub(super) fn dropped(
    recording: &mut Recording<'_>,
    mut live: LiveRequest,
    error: Option<EngineError>,
) {
    match error {
        None => recording.aborted(live.track, live.summary),
        Some(error) => {
            live.note_end();
            // A front end in another process asks the next coordinator for the rest.
            if error == EngineError::ShuttingDown && live.events.is_remote() {
                recording.handed_over(live.track);
            } else {
                recording.failed(live.track, live.summary);
            }
            let _ = live.events.send(EngineEvent::Failed(error));
        }
    }
}

fn step_tokens(summary: StepSummary) -> StepTokens {
    StepTokens {
        prompt_computed: u64::from(summary.prompt),
        prompt_cached: u64::from(summary.cached),
        looked_up: u64::from(summary.looked_up),
        found: u64::from(summary.found),
        generated: u64::from(summary.generated),
        recomputed: u64::from(summary.recomputed),
        wasted: u64::from(summary.wasted),
    }
}

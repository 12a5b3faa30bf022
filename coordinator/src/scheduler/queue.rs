//! PURE: how much may wait, how requests come, and how they leave.
//!
//! Only requests that have never run count against the queue's bound: those preempted, or moved
//! here from a broken replica or another coordinator, were let in before. Requests that end leave
//! the queue in one pass, however many they are: a pass for each of 100,000 sequences would hold
//! everything up for minutes.
use std::sync::Arc;

use shared::ids::{RequestId, SeqId};

use super::sequence::{Request, Sequence};
use super::{Effect, Scheduler, states};
use crate::engine::{EngineError, GenerateRequest};

/// Number of choices that may wait, per request that may.
const CHOICES_PER_REQUEST: u32 = 2;
/// Number of prompt tokens that may wait, per request that may, counted for every choice, since
/// each gets its own copy once it runs: 4 bytes each. With the usual bound of 16,384 requests they
/// take 256 MiB.
const TOKENS_PER_REQUEST: u32 = 4 << 10;
/// Fewest requests from which these two bounds are computed: even a few requests may have many
/// choices or long prompts.
const SHARES_MIN: u32 = 8 << 10;

/// Queue capacity taken by one request, or by all that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueLoad {
    requests: u32,
    sequences: u32,
    /// Prompt tokens, counted for every choice.
    tokens: u64,
}

impl QueueLoad {
    /// Load of a request with so many prompt tokens and choices.
    pub(super) fn of(prompt: usize, choices: usize) -> Self {
        let sequences = u32::try_from(choices).unwrap_or(u32::MAX);
        Self { requests: 1, sequences, tokens: (prompt as u64).saturating_mul(choices as u64) }
    }

    /// Checks that one more request fits. A request alone always does.
    ///
    /// # Errors
    /// [`EngineError::QueueFull`] with the bound that was reached.
    pub(super) fn check(&self, more: Self, max_requests: u32) -> Result<(), EngineError> {
        // When to retry depends on the time, which the caller knows.
        let full = |queued, max| Err(EngineError::QueueFull { queued, max, retry_after_s: 1 });
        if self.requests >= max_requests {
            return full(self.requests, max_requests);
        }
        if self.requests == 0 {
            return Ok(());
        }
        let shares = max_requests.max(SHARES_MIN);
        let max = shares.saturating_mul(CHOICES_PER_REQUEST);
        if self.sequences.saturating_add(more.sequences) > max {
            return full(self.sequences, max);
        }
        let max = shares.saturating_mul(TOKENS_PER_REQUEST);
        if self.tokens.saturating_add(more.tokens) > u64::from(max) {
            return full(u32::try_from(self.tokens).unwrap_or(u32::MAX), max);
        }
        Ok(())
    }

    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.sequences = self.sequences.saturating_add(other.sequences);
        self.tokens = self.tokens.saturating_add(other.tokens);
    }

    pub(super) fn subtract(&mut self, other: Self) {
        self.requests = self.requests.saturating_sub(other.requests);
        self.sequences = self.sequences.saturating_sub(other.sequences);
        self.tokens = self.tokens.saturating_sub(other.tokens);
    }
}

impl Scheduler {
    /// Takes a request. Returns its sequences, one per choice. Call [`Scheduler::end_resumed`] next
    /// if the request is resumed.
    ///
    /// # Errors
    /// [`EngineError::QueueFull`], [`EngineError::TooLarge`], [`EngineError::Unavailable`] if a
    /// request with the same number runs, [`EngineError::Broke`] if it has a token that the model
    /// lacks; nothing has changed then.
    pub fn submit(&mut self, mut request: GenerateRequest) -> Result<Vec<SeqId>, EngineError> {
        if self.requests.contains_key(&request.id) {
            let message = format!("request number {} is already running", request.id.0);
            return Err(EngineError::Unavailable { message });
        }
        if let Some(token) = self.unknown_token(&request) {
            let vocab = self.config.vocab_size;
            let message = format!("a prompt has token {token} of a vocabulary of {vocab}");
            return Err(EngineError::Broke { message });
        }
        let queued = QueueLoad::of(request.prompt.len(), request.sampling.len());
        let goes_on = request.resumed.is_some();
        if !goes_on {
            self.queued.check(queued, self.config.max_queued_requests)?;
        }
        let num_prompt = request.prompt.len() as u32;
        // An open-ended request that outgrows the cache ends there.
        let needed = match request.open_ended {
            true => num_prompt + request.max_tokens.min(1),
            false => request.tokens_needed(),
        };
        let needed = self.blocks_needed(needed);
        let available = match self.epoch {
            Some(_) => self.blocks.total(),
            None => self.config.blocks_for(self.config.max_model_len),
        };
        let too_long = num_prompt + request.max_tokens.min(1) > self.config.max_model_len;
        if !too_long && needed > available && needed <= self.blocks_most {
            // It may have as much again, with more ranks for example.
            let message = format!(
                "none has room in its KV cache now for the {needed} blocks that this request may \
                 need (one has {available}, and had {})",
                self.blocks_most
            );
            return Err(EngineError::Unavailable { message });
        }
        if too_long || needed > available {
            return Err(EngineError::TooLarge { needed, available });
        }
        let prompt: Arc<[u32]> = std::mem::take(&mut request.prompt).into();
        let mut guides = std::mem::take(&mut request.guides).into_iter();
        let choices = std::mem::take(&mut request.sampling);
        let accepted = request.resumed.take().into_iter().flat_map(|resumed| resumed.choices);
        let mut accepted = accepted.map(|choice| choice.tokens);
        let mut live = Vec::with_capacity(choices.len());
        let mut ids = Vec::with_capacity(choices.len());
        for sampling in choices {
            let id = SeqId(self.next_seq);
            self.next_seq += 1;
            let guide = guides.next();
            let tokens = (prompt.clone(), accepted.next().unwrap_or_default());
            let mut sequence = Sequence::new(id, &request, sampling, tokens, guide);
            if self.epoch.is_some() {
                sequence.fit(self.room());
            }
            let slot = self.store(sequence);
            if goes_on {
                self.wait_resumed(slot);
            } else {
                self.wait_last(slot);
            }
            live.push(slot);
            ids.push(id);
        }
        let (end_tokens, scheduled) = (request.end_tokens, goes_on);
        let (admitted, swapped, ran_in) = (0, 0, None);
        let owner = Request { live, end_tokens, admitted, swapped, scheduled, ran_in, queued };
        self.own(request.id, owner);
        Ok(ids)
    }

    /// A token of a request that is none of the model's. Ranks would end their epoch for it, one
    /// replica after the other.
    fn unknown_token(&self, request: &GenerateRequest) -> Option<u32> {
        let accepted = request.resumed.iter().flat_map(|resumed| &resumed.choices);
        let logs = accepted.map(|choice| &choice.tokens).chain([&request.prompt]);
        logs.flatten().copied().find(|token| *token >= self.config.vocab_size)
    }

    /// Ends a request whose client is gone. Unknown requests are ignored.
    pub fn cancel(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        self.end_request(request, None, effects);
    }

    /// Ends requests whose clients are gone. Unknown ones are ignored.
    pub fn cancel_all(
        &mut self,
        requests: impl IntoIterator<Item = RequestId>,
        effects: &mut Vec<Effect>,
    ) {
        self.end_requests(requests.into_iter().map(|id| (id, None)).collect(), effects);
    }

    /// Ends requests with an error. Unknown ones are ignored.
    pub fn fail_all(
        &mut self,
        requests: impl IntoIterator<Item = RequestId>,
        error: &EngineError,
        effects: &mut Vec<Effect>,
    ) {
        self.fail_each(requests.into_iter().map(|id| (id, error.clone())), effects);
    }

    /// Like [`Scheduler::fail_all`], each with its own error.
    pub fn fail_each(
        &mut self,
        ends: impl IntoIterator<Item = (RequestId, EngineError)>,
        effects: &mut Vec<Effect>,
    ) {
        let ends = ends.into_iter().map(|(id, error)| (id, Some(error)));
        self.end_requests(ends.collect(), effects);
    }

    pub(super) fn end_request(
        &mut self,
        request: RequestId,
        error: Option<EngineError>,
        effects: &mut Vec<Effect>,
    ) {
        self.end_requests(vec![(request, error)], effects);
    }

    pub(super) fn end_requests(
        &mut self,
        requests: Vec<(RequestId, Option<EngineError>)>,
        effects: &mut Vec<Effect>,
    ) {
        let mut waited = false;
        for (request, error) in requests {
            let Some(owner) = self.requests.get_mut(&request) else { continue };
            let live = std::mem::take(&mut owner.live);
            let mut seqs = Vec::with_capacity(live.len());
            for slot in live {
                let Some((seq, waits)) = self.detach(slot) else { continue };
                waited |= waits;
                seqs.push(seq.id);
            }
            self.forget_request(request);
            effects.push(Effect::Dropped { request, seqs, error });
        }
        if waited {
            self.close_gaps();
        }
    }

    /// Removes the places of sequences that have ended from the queue. No freed slot may have been
    /// reused since.
    pub(super) fn close_gaps(&mut self) {
        let sequences = &self.sequences;
        self.waiting.retain(|slot| sequences[*slot].is_some());
    }

    /// Removes a sequence from everything but the queue; returns whether it is queued.
    pub(super) fn detach(&mut self, slot: usize) -> Option<(Sequence, bool)> {
        let mut seq = self.sequences[slot].take()?;
        self.free_slots.push(slot);
        states::leave(&mut self.states, &mut seq);
        if seq.known {
            self.forget.push(seq.id);
        }
        if let Some(swapped) = seq.swapped.take() {
            self.drop_swapped(&seq, swapped);
            return Some((seq, true));
        }
        let runs = seq.admission.is_some();
        if runs {
            self.no_longer_running(slot, seq.urgency());
            self.blocks.give_back(&mut seq.blocks);
            self.count(seq.request, |owner| owner.admitted -= 1);
        }
        Some((seq, !runs))
    }

    /// Registers a request.
    pub(super) fn own(&mut self, id: RequestId, owner: Request) {
        if !owner.scheduled {
            self.queued.add(owner.queued);
        }
        self.requests.insert(id, owner);
    }

    /// Unregisters a request.
    pub(super) fn forget_request(&mut self, id: RequestId) -> Option<Request> {
        let owner = self.requests.remove(&id)?;
        if !owner.scheduled {
            self.queued.subtract(owner.queued);
        }
        if self.has_run_here(&owner) {
            self.num_run_here -= 1;
        }
        Some(owner)
    }
}

#[cfg(test)]
mod tests;

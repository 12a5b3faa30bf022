//! PURE: what a step's answer changes: accepted tokens, finished sequences.
use std::iter::Copied;
use std::{slice, vec};

use shared::ids::{Epoch, SeqId, StepId};
use shared::protocol::{Drafts, SequenceOutput, TokenLogprobs};

use super::drafts::{DraftVerification, drafts_of};
use super::sequence::Sequence;
use super::{Effect, Scheduler, StepSummary, keep_full, plan, states};
use crate::engine::{EngineError, FinishReason, GuideEnd, Guided};

/// An answer that does not belong to the oldest step in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// It belongs to another epoch.
    #[error("{got} is not the present epoch")]
    StaleEpoch {
        /// The answer's epoch.
        got: Epoch,
    },
    /// It belongs to another step.
    #[error("{got} is not the oldest step in flight")]
    UnexpectedStep {
        /// The answer's step.
        got: StepId,
    },
}

/// An answer, consumed entry by entry.
struct Answer<'a> {
    outputs: vec::IntoIter<SequenceOutput>,
    /// Number of tokens a draft model drafted, for each entry that asked.
    drafted: Copied<slice::Iter<'a, u32>>,
    /// The step's masks were not sent.
    owes_masks: bool,
}

impl Answer<'_> {
    /// Returns the next output if it belongs to this sequence.
    fn next_of(&mut self, seq: SeqId) -> Option<SequenceOutput> {
        let is_of = self.outputs.as_slice().first().is_some_and(|output| output.seq == seq);
        if is_of { self.outputs.next() } else { None }
    }

    /// Returns what a draft model drafted for the next sequence that asked.
    fn drafts_of(&mut self, seq: SeqId) -> Option<Vec<u32>> {
        drafts_of(self.drafted.next(), seq, self.outputs.as_slice())
    }
}

/// Token counts of one entry or of a whole answer.
#[derive(Clone, Copy, Debug, Default)]
struct TokenCounts {
    generated: u32,
    recomputed: u32,
    wasted: u32,
}

/// Takes the drafts that this answer verifies. `drafted` is what a draft model drafted. Returns
/// `None` if that is missing or longer than asked for: then it is unknown what the outputs follow.
fn take_drafts(seq: &mut Sequence, drafted: Option<Vec<u32>>) -> Option<Vec<u32>> {
    match std::mem::replace(&mut seq.drafts, Drafts::none()) {
        Drafts::Known(tokens) => Some(tokens),
        Drafts::UpTo(most) => drafted.filter(|drafted| drafted.len() <= most as usize),
    }
}

/// Returns how an accepted token ends its sequence, if it does. `is_end`: it is an end token;
/// `stops`: it completes a stop string; both are false where the sequence may not end yet. `guided`
/// asks the guide and is called only if neither holds. `full`: there is no room for another token.
///
/// # Errors
/// If the guide cannot go on.
pub fn end_of(
    token: u32,
    is_end: bool,
    stops: bool,
    guided: impl FnOnce() -> Option<Result<Guided, GuideEnd>>,
    full: bool,
) -> Result<Option<FinishReason>, GuideEnd> {
    if is_end {
        return Ok(Some(FinishReason::EndToken(token)));
    } else if stops {
        return Ok(Some(FinishReason::StopString));
    }
    match guided() {
        Some(Ok(Guided::IsOver)) => Ok(Some(FinishReason::Complete)),
        _ if full => Ok(Some(FinishReason::Length)),
        Some(Err(end)) => Err(end),
        Some(Ok(Guided::GoesOn)) | None => Ok(None),
    }
}

/// Called with every accepted token; returns whether it completes a stop string.
pub type StopCallback<'a> = &'a mut dyn FnMut(SeqId, u32) -> bool;

impl Scheduler {
    /// Takes the answer to the oldest step in flight. `drafted` has the number of tokens drafted
    /// for each sequence that a draft model was asked to draft for.
    ///
    /// # Errors
    /// [`ApplyError`]; nothing has changed then.
    pub fn apply(
        &mut self,
        epoch: Epoch,
        step: StepId,
        outputs: Vec<SequenceOutput>,
        drafted: &[u32],
        stopped: StopCallback<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), ApplyError> {
        if self.epoch != Some(epoch) {
            return Err(ApplyError::StaleEpoch { got: epoch });
        }
        let answered = match self.in_flight.pop_front() {
            Some(front) if front.step == step => front,
            Some(front) => {
                self.in_flight.push_front(front);
                return Err(ApplyError::UnexpectedStep { got: step });
            }
            None => return Err(ApplyError::UnexpectedStep { got: step }),
        };
        let mut answer = Answer {
            outputs: outputs.into_iter(),
            drafted: drafted.iter().copied(),
            owes_masks: answered.owes_masks,
        };
        let mut all =
            TokenCounts { recomputed: answered.recomputed_tokens, ..TokenCounts::default() };
        for entry in &answered.entries {
            let one = self.take_entry(entry, &mut answer, stopped, effects);
            all.generated += one.generated;
            all.recomputed += one.recomputed;
            all.wasted += one.wasted;
        }
        if answered.sequences > 0 {
            effects.push(Effect::StepDone(StepSummary {
                prompt: answered.prompt_tokens,
                cached: answered.cached_tokens,
                looked_up: answered.looked_up,
                found: answered.found,
                generated: all.generated,
                recomputed: all.recomputed,
                wasted: all.wasted,
                sequences: answered.sequences,
            }));
        }
        self.spare.push(answered);
        Ok(())
    }

    /// Takes an answer's outputs for one entry.
    fn take_entry(
        &mut self,
        entry: &plan::Entry,
        answer: &mut Answer<'_>,
        stopped: StopCallback<'_>,
        effects: &mut Vec<Effect>,
    ) -> TokenCounts {
        let drafted = if entry.asks { answer.drafts_of(entry.seq) } else { None };
        let mut output = answer.next_of(entry.seq);
        let (mut verification, mut outcome) =
            (DraftVerification::default(), TokenCounts::default());
        if let Some(seq) = self.current(entry) {
            seq.pending = seq.pending.saturating_sub(u32::from(entry.samples));
            if entry.fresh {
                seq.progressed = true;
                seq.suspicion = 0;
            }
            let drafts = if entry.verifies { take_drafts(seq, drafted) } else { Some(Vec::new()) };
            // It was sampled before its mask was known.
            let is_rushed = entry.masked && answer.owes_masks;
            let (token, request) = (output.as_ref().and_then(|output| output.token), seq.request);
            match drafts.filter(|_| !is_rushed) {
                Some(drafts) => {
                    verification.drafts = drafts;
                    verification.of = Some((request, effects.len()));
                    if self.accept(entry.slot, output.take(), entry.samples, stopped, effects) {
                        verification.count_token(token);
                    }
                }
                None => self.end_request(request, Some(EngineError::Corrupted), effects),
            }
        }
        // There is more than one where drafts were verified; those after the sequence's end are
        // ignored.
        while let Some(output) = output.take().or_else(|| answer.next_of(entry.seq)) {
            let token = output.token;
            if self.current(entry).is_none() {
                outcome.wasted += u32::from(token.is_some());
            } else if self.accept_next(entry, output, &verification, stopped, effects) {
                outcome.recomputed += u32::from(verification.repeats(entry));
                verification.count_token(token);
            }
        }
        outcome.generated = verification.emitted;
        self.verified(entry, verification, effects);
        outcome
    }

    /// Takes one sequence's output; returns whether a token was accepted.
    pub(super) fn accept(
        &mut self,
        slot: usize,
        output: Option<SequenceOutput>,
        samples: bool,
        stopped: StopCallback<'_>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(seq) = &mut self.sequences[slot] else { return false };
        let request = seq.request;
        let Some(mut output) = output else {
            // Either nothing was asked for or a rank withheld the output: only the latter is an
            // error.
            if samples {
                self.end_request(request, Some(EngineError::Corrupted), effects);
            } else {
                self.finish_prefill_only(slot, effects);
            }
            return false;
        };
        if output.corrupted {
            // No other sequence may reuse these blocks.
            self.blocks.forget(&seq.blocks);
            self.blocks.forget(seq.swapped.as_ref().map_or(&[], |swapped| &swapped.was));
            states::forget_own(&mut self.states, seq);
        }
        if output.corrupted || (samples && output.position as usize != seq.tokens.len()) {
            self.end_request(request, Some(EngineError::Corrupted), effects);
            return false;
        }
        if !seq.prompt_logprobs_done {
            // The prompt's first token has none. A missing one would shift all that follow.
            let due = seq.prompt_logprobs.len() + 1;
            let fits = output.prompt_logprobs.is_empty() || output.prompt_start as usize == due;
            seq.prompt_logprobs.append(&mut output.prompt_logprobs);
            let (have, all) = (seq.prompt_logprobs.len() + 1, seq.num_prompt as usize);
            if !fits || have > all || samples && have < all {
                self.end_request(request, Some(EngineError::Corrupted), effects);
                return false;
            }
            if have == all {
                seq.prompt_logprobs_done = true;
                seq.sampling.prompt_logprobs = None;
                let logprobs = std::mem::take(&mut seq.prompt_logprobs);
                effects.push(Effect::PromptLogprobs { request, logprobs });
            }
        }
        if !output.embedding.is_empty() && seq.sampling.pooling.is_some() {
            let embedding = std::mem::take(&mut output.embedding);
            effects.push(Effect::Embedding { request, embedding });
            self.finish(slot, FinishReason::Complete, effects);
            return false;
        }
        match output.token {
            Some(token) if samples => {
                self.accept_token(slot, token, output.logprobs, stopped, effects);
                true
            }
            _ => {
                self.finish_prefill_only(slot, effects);
                false
            }
        }
    }

    fn accept_token(
        &mut self,
        slot: usize,
        token: u32,
        logprobs: Option<TokenLogprobs>,
        stopped: StopCallback<'_>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(seq) = &mut self.sequences[slot] else { return };
        seq.tokens.push(token);
        keep_full((&mut self.blocks, &mut self.states), seq, &self.config);
        let (id, request, choice) = (seq.id, seq.request, seq.sampling.choice);
        let num_output = seq.num_output();
        let may_end = num_output >= seq.sampling.min_tokens;
        let full =
            num_output >= seq.output_max() || seq.tokens.len() as u32 >= self.config.max_model_len;
        let Some(owner) = self.requests.get(&request) else { return };
        let ends = may_end && owner.end_tokens.contains(&token);
        effects.push(Effect::Token { request, choice, token, logprobs });
        // The callback sees every token, even one that ends the sequence for another reason.
        let stops = stopped(id, token) && may_end;
        let guided = || seq.guide.as_mut().map(|guide| guide.accept(token));
        match end_of(token, ends, stops, guided, full) {
            Ok(Some(reason)) => self.finish(slot, reason, effects),
            Ok(None) => {}
            Err(end) => self.end_request(request, Some(end.into()), effects),
        }
    }

    /// Ends a sequence that asked for no tokens once its prompt is computed.
    fn finish_prefill_only(&mut self, slot: usize, effects: &mut Vec<Effect>) {
        let Some(seq) = &self.sequences[slot] else { return };
        let (request, pools) = (seq.request, seq.sampling.pooling.is_some());
        let done = seq.max_tokens == 0 && seq.computed >= seq.num_prompt;
        let in_flight = |entry: &plan::Entry| entry.slot == slot;
        if !done || self.in_flight.iter().any(|step| step.entries.iter().any(in_flight)) {
            return;
        }
        if pools {
            // The embedding comes with the last share of the prompt: a rank withheld it.
            return self.end_request(request, Some(EngineError::Corrupted), effects);
        }
        self.finish(slot, FinishReason::Length, effects);
    }
}

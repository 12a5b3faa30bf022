//! One step ahead: a step is begun while the previous one runs, and its tokens are fetched when the
//! device has them. The device feeds its own last tokens in, so it never waits for its host. The
//! host feeds everything else, which it knows: prompts, and tokens of sequences that are not in the
//! previous step.
//!
//! Masks come after their plan, because they depend on the previous token. A step with masks is
//! begun ahead like others, up to its logits. When its turn has come, the previous token is
//! reported, and its masks are waited for while the device computes. Then it is sampled, and only
//! then is the next step begun, so every rank makes its calls in the same order.
//!
//! Steps that need their host in between are not begun ahead: drafts are compared with tokens, and
//! embeddings and prompt log-probabilities are fetched in the middle of their step.
//!
//! Until a token is fetched, its sequence holds a placeholder, which is counted but never read.
use std::time::{Duration, Instant};

use kernels::Backend;
use kernels::backend::NOT_FED;
use shared::ids::{SeqId, StepId};
use shared::protocol::{NewSequence, SequenceOutput, SequenceStep, StepPlan};

use super::sequence::prompt_targets;
use super::{Engine, EngineError, masks, sampled_output};
use crate::rank::StepSource;

/// Maximum number of steps in flight.
const QUEUED_MAX: usize = 2;
/// How long to spin for a step before sleeping between polls.
const SPIN: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);
/// After this long, the backend's own patience decides.
const POLL: Duration = Duration::from_secs(10);

/// A step that the device has, and whose tokens, if it samples any, have not been fetched.
#[derive(Debug)]
pub(super) struct QueuedStep {
    step: StepId,
    /// Computed up to its logits, which are sampled when its masks have come.
    pub(super) awaits_masks: bool,
    /// Its sequences that get a token, in the order of the sampled rows.
    entries: Vec<Entry>,
}

/// A sequence that gets a token.
#[derive(Debug)]
pub(super) struct Entry {
    seq: SeqId,
    /// Index of its token in the sequence.
    place: usize,
    /// Position reported with it.
    position: u32,
    wants_logprobs: bool,
}

/// Finds sequences among those of a step. Most plans list theirs in the order of the previous one,
/// so the search begins after the last one found.
#[derive(Debug)]
struct EntryCursor<'a> {
    entries: &'a [Entry],
    next: usize,
}

impl<'a> EntryCursor<'a> {
    fn new(queued: Option<&'a QueuedStep>) -> Self {
        Self { entries: queued.map_or(&[], |queued| &queued.entries), next: 0 }
    }

    /// The row that is sampled for a sequence, if any.
    fn row(&mut self, seq: SeqId) -> Option<usize> {
        let (before, behind) = self.entries.split_at(self.next);
        let is_own = |entry: &Entry| entry.seq == seq;
        let found = behind.iter().position(is_own).map(|at| self.next + at);
        let found = found.or_else(|| before.iter().position(is_own))?;
        self.next = found + 1;
        Some(found)
    }
}

impl<B: Backend> Engine<B> {
    /// Whether the plan's step was begun ahead; any other step is an error then.
    pub(super) fn is_begun(&self, plan: &StepPlan) -> Result<bool, EngineError> {
        let Some(queued) = self.queued.front() else { return Ok(false) };
        if queued.step == plan.step {
            return Ok(true);
        }
        let message = format!("step {} was begun and comes first", queued.step.0);
        Err(EngineError::Plan { step: plan.step.0, message })
    }

    /// Whether the plan's tokens can be fetched later.
    pub(super) fn can_queue(&self, plan: &StepPlan) -> bool {
        let can_queue = |entry: &SequenceStep| {
            let (num_prompt, scores, is_pooled) = match self.sequences.get(&entry.seq) {
                Some(seq) => (seq.num_prompt, seq.prompt_logprobs.is_some(), seq.pooling.is_some()),
                // A plan that is looked at ahead may admit sequences that are not held yet.
                None => match plan.admitted.iter().find(|new| new.seq == entry.seq) {
                    Some(NewSequence { num_prompt, sampling, .. }) => (
                        *num_prompt,
                        sampling.prompt_logprobs.is_some(),
                        sampling.pooling.is_some(),
                    ),
                    None => return false,
                },
            };
            let reports = scores && prompt_targets(entry, num_prompt).is_some();
            entry.drafts.is_empty() && !is_pooled && !reports
        };
        self.backend.queues_samples()
            && !plan.sequences.is_empty()
            && plan.sequences.iter().all(can_queue)
    }

    /// Hands a prepared step to the device.
    pub(super) fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.compute(plan, &mut Vec::new(), true)?;
        let mut entries = self.step.entries.pop().unwrap_or_default();
        for step in plan.sequences.iter().filter(|step| step.sample) {
            let Some(seq) = self.sequences.get_mut(&step.seq) else { continue };
            let (place, wants_logprobs) = (seq.tokens.len(), seq.params.logprobs.is_some());
            seq.tokens.push(0);
            let position = step.start + step.count;
            entries.push(Entry { seq: step.seq, place, position, wants_logprobs });
        }
        let awaits_masks = masks::are_in(plan);
        self.queued.push_back(QueuedStep { step: plan.step, awaits_masks, entries });
        Ok(())
    }

    /// Whether every token that the plan computes is known or is sampled by the last step begun.
    fn follows(&self, plan: &StepPlan) -> bool {
        let Some(last) = self.queued.back() else { return false };
        if self.queued.len() >= QUEUED_MAX || last.awaits_masks {
            return false;
        }
        // The pending token would go to the new sequence with the same id.
        let is_awaited = |seq: SeqId| last.entries.iter().any(|entry| entry.seq == seq);
        if plan.admitted.iter().any(|new| is_awaited(new.seq)) {
            return false;
        }
        let mut walk = EntryCursor::new(Some(last));
        let is_there = |entry: &SequenceStep| {
            let found = walk.row(entry.seq);
            // Of a step in flight, only the sampled tokens are missing.
            let is_fed = found.is_none_or(|at| last.entries[at].place == entry.start as usize);
            // Few sequences end in one step.
            is_fed && !plan.finished.contains(&entry.seq)
        };
        plan.sequences.iter().all(is_there) && self.can_queue(plan)
    }

    /// Begins the next step behind the running one.
    fn begin_ahead(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.admit(plan)?;
        self.check(plan)?;
        self.lay_out(plan);
        let mut walk = EntryCursor::new(self.queued.back());
        let feed = &mut self.step.feed;
        for entry in &plan.sequences {
            let row = walk.row(entry.seq).map_or(NOT_FED, |row| row as u32);
            feed.extend(std::iter::repeat_n(row, entry.count as usize));
        }
        if feed.iter().all(|row| *row == NOT_FED) {
            feed.clear();
        }
        self.begun_ahead += 1;
        self.begin(plan)
    }

    /// Waits for the oldest step, and begins the next one if it arrives and can be begun.
    pub(super) fn finish(
        &mut self,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<(), EngineError> {
        let began = Instant::now();
        // A step that samples nothing is not waited for: later steps are ordered after it.
        let samples = self.queued.front().is_some_and(|queued| !queued.entries.is_empty());
        // A step that does not follow now will not follow before this one is finished.
        let mut looked_at = None;
        // Look at least once: the device may be faster than its host.
        loop {
            if let Some(next) = source.peek()
                && looked_at.replace((next.epoch, next.step)) != Some((next.epoch, next.step))
                && self.follows(next)
            {
                self.begin_ahead(next)?;
            }
            let waited = began.elapsed();
            if !samples || self.backend.is_sampled()? || waited > POLL {
                break;
            }
            if waited > SPIN {
                std::thread::sleep(NAP);
            } else {
                std::hint::spin_loop();
            }
        }
        if samples {
            self.backend.take_sampled(&mut self.step.sampled)?;
        }
        let Some(QueuedStep { mut entries, .. }) = self.queued.pop_front() else { return Ok(()) };
        let reports = self.backend.rank() == 0;
        for (entry, sampled) in entries.iter().zip(self.step.sampled.drain(..)) {
            // The next step may already have forgotten the sequence.
            if let Some(seq) = self.sequences.get_mut(&entry.seq)
                && let Some(token) = seq.tokens.get_mut(entry.place)
            {
                *token = sampled.token;
            }
            self.digest = self.digest.with(entry.seq, entry.place as u32, sampled.token);
            if reports {
                let Entry { seq, position, wants_logprobs, .. } = *entry;
                outputs.push(sampled_output(seq, position, sampled, wants_logprobs));
            }
        }
        entries.clear();
        self.step.entries.push(entries);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_found_in_any_order() {
        let entry = |seq| Entry { seq: SeqId(seq), place: 0, position: 0, wants_logprobs: false };
        let entries = [7, 3, 9, 4].map(entry).into();
        let queued = QueuedStep { step: StepId(1), awaits_masks: false, entries };
        let mut walk = EntryCursor::new(Some(&queued));
        let rows = [7, 3, 5, 9, 7, 4, 4, 9].map(|seq| walk.row(SeqId(seq)));
        let expected = [Some(0), Some(1), None, Some(2), Some(0), Some(3), Some(3), Some(2)];
        assert_eq!(rows, expected);
        assert_eq!(EntryCursor::new(None).row(SeqId(7)), None);
    }
}

//! PURE: requests that continue from what a lost coordinator accepted. They have run before, so
//! they do not count against the queue's bound and wait before those of equal priority that have
//! not.
use shared::ids::{RequestId, SeqId};

use super::{Effect, Scheduler};
use crate::engine::FinishReason;

impl Scheduler {
    /// Ends those sequences of a resumed request that are complete with what was accepted, and
    /// those that have outgrown the KV cache.
    pub fn end_resumed(
        &mut self,
        request: RequestId,
        ends: impl IntoIterator<Item = (SeqId, Option<FinishReason>)>,
        effects: &mut Vec<Effect>,
    ) {
        // Only this request's sequences are checked: all others in the queue, possibly thousands,
        // have been checked before.
        let room = self.epoch.map(|_| self.room());
        let mut waited = false;
        for (id, reason) in ends {
            let Some(owner) = self.requests.get(&request) else { break };
            let is_it =
                |slot: &&usize| self.sequences[**slot].as_ref().is_some_and(|seq| seq.id == id);
            let Some(slot) = owner.live.iter().find(is_it).copied() else { continue };
            let sequence = self.sequences[slot].as_ref();
            let has_outgrown = sequence.zip(room).is_some_and(|(seq, room)| seq.has_outgrown(room));
            if let Some(reason) = reason.or(has_outgrown.then_some(FinishReason::Length)) {
                waited |= self.finish_queued(slot, reason, effects);
            }
        }
        if waited {
            self.close_gaps();
        }
    }

    /// Queues a sequence behind the last one of equal priority that has run before. Searches from
    /// the end: on a new leader hardly any have not run, and thousands may have.
    pub(super) fn wait_resumed(&mut self, slot: usize) {
        let priority = self.priority(slot);
        let from = self.waiting.partition_point(|waiting| self.priority(*waiting) < priority);
        let to = self.waiting.partition_point(|waiting| self.priority(*waiting) <= priority);
        let at = (from..to).rev().find(|at| self.waits_having_run(*at));
        let at = at.map_or(from, |last| last + 1);
        self.waiting.insert(at, slot);
    }

    /// Queues a sequence between those of equal priority that have run before and those that have
    /// not. Searches by halves: thousands may come to a queue of thousands that have not run. Where
    /// some that have not run are before others that have, it may come between those.
    pub(super) fn wait_shared(&mut self, slot: usize) {
        let priority = self.priority(slot);
        let mut from = self.waiting.partition_point(|waiting| self.priority(*waiting) < priority);
        let mut to = self.waiting.partition_point(|waiting| self.priority(*waiting) <= priority);
        while from < to {
            let middle = from.midpoint(to);
            match self.waits_having_run(middle) {
                true => from = middle + 1,
                false => to = middle,
            }
        }
        self.waiting.insert(from, slot);
    }

    /// Whether what waits at this place has run before. A request that is being queued is not
    /// registered yet, which counts as run: its choices stay in order.
    fn waits_having_run(&self, at: usize) -> bool {
        let sequence = self.waiting.get(at).and_then(|slot| self.sequences[*slot].as_ref());
        let owner = sequence.and_then(|sequence| self.requests.get(&sequence.request));
        owner.is_none_or(|owner| owner.scheduled)
    }
}

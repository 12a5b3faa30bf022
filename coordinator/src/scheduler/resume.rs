//! PURE: requests that go on from what a coordinator that is gone accepted of them. They have run
//! before: they take nothing of the queue's bound, and wait before all equals that have not.
use shared::ids::{RequestId, SeqId};

use super::{Effect, Scheduler};
use crate::engine::FinishReason;

impl Scheduler {
    /// Ends those sequences of a resumed request that what was accepted of them completes, and
    /// those that have outgrown the KV cache.
    pub fn end_resumed(
        &mut self,
        request: RequestId,
        ends: impl IntoIterator<Item = (SeqId, Option<FinishReason>)>,
        effects: &mut Vec<Effect>,
    ) {
        for (id, reason) in ends {
            let Some(reason) = reason else { continue };
            let Some(owner) = self.requests.get(&request) else { return };
            let is_it =
                |slot: &&usize| self.sequences[**slot].as_ref().is_some_and(|seq| seq.id == id);
            if let Some(slot) = owner.live.iter().find(is_it).copied() {
                self.finish(slot, reason, effects);
            }
        }
        self.end_outgrown(effects);
    }

    /// Queues a sequence behind its equals that have run before, and before those that have not.
    pub(super) fn wait_resumed(&mut self, slot: usize) {
        let priority = self.priority(slot);
        let from = self.waiting.partition_point(|waiting| self.priority(*waiting) < priority);
        let is_fresh = |waiting: &usize| {
            let Some(sequence) = &self.sequences[*waiting] else { return false };
            let owner = self.requests.get(&sequence.request);
            sequence.priority > priority || owner.is_some_and(|owner| !owner.scheduled)
        };
        let equals = self.waiting.iter().skip(from);
        let at = from + equals.take_while(|waiting| !is_fresh(waiting)).count();
        self.waiting.insert(at, slot);
    }
}

//! PURE: the order of running and waiting sequences, and where requests are.
use shared::ids::RequestId;

use super::effect::RequestPlace;
use super::sequence::{Request, Sequence, Urgency};
use super::{Effect, Scheduler, states};

impl Scheduler {
    /// Puts an admitted sequence on the list of running ones.
    pub(super) fn run(&mut self, slot: usize) {
        let urgency = |slot: &usize| self.sequences[*slot].as_ref().map(Sequence::urgency);
        let own = urgency(&slot);
        let at = self.running.partition_point(|running| urgency(running) <= own);
        self.running.insert(at, slot);
    }

    /// Takes a sequence, which may be gone, off the list of running ones.
    pub(super) fn no_longer_running(&mut self, slot: usize, urgency: Urgency) {
        let before = |running: &usize| {
            let other = self.sequences[*running].as_ref().map(Sequence::urgency);
            *running != slot && other < Some(urgency)
        };
        let at = self.running.partition_point(before);
        if self.running.get(at) == Some(&slot) {
            self.running.remove(at);
        }
    }

    /// Queues a sequence behind those of equal priority.
    pub(super) fn wait_last(&mut self, slot: usize) {
        let priority = self.priority(slot);
        let at = self.waiting.partition_point(|waiting| self.priority(*waiting) <= priority);
        self.waiting.insert(at, slot);
    }

    /// Queues a sequence before those of equal priority.
    pub(super) fn wait_first(&mut self, slot: usize) {
        let priority = self.priority(slot);
        let at = self.waiting.partition_point(|waiting| self.priority(*waiting) < priority);
        self.waiting.insert(at, slot);
    }

    pub(super) fn priority(&self, slot: usize) -> i32 {
        self.sequences[slot].as_ref().map_or(0, |seq| seq.priority)
    }

    /// Returns an admitted sequence to the queue, before those of equal priority.
    pub(super) fn unadmit(&mut self, slot: usize) {
        if let Some(seq) = &self.sequences[slot] {
            self.no_longer_running(slot, seq.urgency());
        }
        let Some(seq) = &mut self.sequences[slot] else { return };
        let request = seq.request;
        self.blocks.give_back(&mut seq.blocks);
        states::leave(&mut self.states, seq);
        if seq.known {
            self.forget.push(seq.id);
        }
        seq.reset();
        self.wait_first(slot);
        self.count(request, |owner| owner.admitted -= 1);
    }

    /// Changes a request's counts of sequences, and updates the counts of requests by place.
    pub(super) fn count(&mut self, request: RequestId, change: impl FnOnce(&mut Request)) {
        let Some(owner) = self.requests.get_mut(&request) else { return };
        let before = owner.place();
        change(owner);
        let now = owner.place();
        for (place, count) in [
            (RequestPlace::Running, &mut self.num_running_requests),
            (RequestPlace::Swapped, &mut self.num_swapped_requests),
        ] {
            *count = *count + u32::from(now == place) - u32::from(before == place);
        }
    }

    /// Reports that a request runs, once the first of its sequences is admitted.
    pub(super) fn resumed(&mut self, request: RequestId, effects: &mut Vec<Effect>) {
        if let Some(owner) = self.requests.get_mut(&request)
            && owner.admitted == 1
        {
            if owner.ran_in != self.epoch {
                owner.ran_in = self.epoch;
                self.num_run_here += 1;
            }
            if std::mem::replace(&mut owner.scheduled, true) {
                effects.push(Effect::Resumed { request });
            } else {
                self.queued.subtract(owner.queued);
                effects.push(Effect::FirstScheduled { request });
            }
        }
    }

    pub(super) fn store(&mut self, sequence: Sequence) -> usize {
        match self.free_slots.pop() {
            Some(slot) => {
                self.sequences[slot] = Some(sequence);
                slot
            }
            None => {
                self.sequences.push(Some(sequence));
                self.sequences.len() - 1
            }
        }
    }
}

//! PURE: shorter prompts beside a long one. A prompt that could take all that is left of a step
//! leaves up to half of that to prompts behind it that have less to compute, shortest first, so
//! that a short question does not wait for a long document. The long one takes at most twice as
//! many steps; prompts of equal length are computed one after another. KV blocks are not shared
//! like this: nobody passes a sequence that waits for blocks, or takes those that a running one
//! still needs.
use super::admission::AdmissionDecision;
use super::plan::PlanBuilder;
use super::sequence::Sequence;
use super::{Scheduler, weight};

/// A prompt behind a longer one. The order is the one in which they are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Prompt {
    /// Lower is earlier.
    priority: i32,
    /// Tokens left to compute; those that may be in the KV cache are included.
    wanted: u32,
    /// Whether it is in the queue.
    waits: bool,
    /// Its place there, or among the running ones.
    place: usize,
    slot: usize,
}

impl Scheduler {
    /// Returns how many of its `wanted` tokens a running sequence computes in this step; 0 if the
    /// report has no room for the log-probabilities of its prompt. Before the first that could take
    /// all that is left, shorter ones are planned: as long as there are the blocks that all running
    /// ones lack, so that it is not the oldest that finds none.
    pub(super) fn share_step(
        &mut self,
        slot: usize,
        wanted: u32,
        builder: &mut PlanBuilder<'_>,
    ) -> u32 {
        if wanted > builder.budget && !builder.is_shared {
            builder.is_shared = true;
            let own = builder.budget.div_ceil(2);
            builder.budget -= own;
            // It keeps its part of the report, too.
            let scores = self.sequences[slot].as_ref().map_or(0, |seq| {
                weight::scores(seq, weight::scored_max(seq, own, builder.step.scores))
            });
            builder.step.scores += scores;
            if builder.budget > 0 && self.lacking() <= u64::from(self.blocks.num_free()) {
                self.plan_shorter(slot, wanted, builder);
            }
            builder.budget += own;
            builder.step.scores -= scores;
        }
        let count = self.up_to_end(slot, wanted.min(builder.budget));
        let seq = self.sequences[slot].as_ref();
        seq.map_or(0, |seq| weight::scored_max(seq, count, builder.step.scores))
    }

    /// Plans prompts to which a running sequence with `wanted` tokens to compute leaves some of the
    /// step, as far as the budget goes.
    fn plan_shorter(&mut self, slot: usize, wanted: u32, builder: &mut PlanBuilder<'_>) {
        builder.frame.masks = self.masks_of_running();
        let mut queue_is_open = self.queue_may_be_passed(builder);
        let mut shorter = std::mem::take(&mut self.shorter);
        self.find_shorter(slot, wanted, queue_is_open, &mut shorter);
        for prompt in shorter.drain(..) {
            if builder.budget == 0 {
                break;
            }
            if !prompt.waits {
                self.plan_behind(prompt.slot, builder);
            } else if queue_is_open {
                queue_is_open = self.admit_shorter(prompt.slot, builder);
            }
        }
        self.shorter = shorter;
    }

    /// Finds the prompts behind a running one with `wanted` tokens to compute that have less, and
    /// waiting ones that are more urgent.
    fn find_shorter(
        &self,
        slot: usize,
        wanted: u32,
        queue_is_open: bool,
        shorter: &mut Vec<Prompt>,
    ) {
        let own = (self.priority(slot), wanted);
        let running = self.running.iter().skip_while(|running| **running != slot).skip(1);
        self.add_shorter(own, running, false, shorter);
        let (behind, most) = (shorter.len(), self.config.max_num_seqs as usize);
        if queue_is_open {
            // Whoever is swapped comes back before others behind it.
            let is_swapped = |slot: usize| {
                self.sequences[slot].as_ref().is_some_and(|seq| seq.swapped.is_some())
            };
            let queue = self.waiting.iter().take_while(|slot| !is_swapped(**slot));
            self.add_shorter(own, queue, true, shorter);
            if shorter.len() - behind > most {
                shorter[behind..].select_nth_unstable(most);
                shorter.truncate(behind + most);
            }
        }
        shorter.sort_unstable();
    }

    /// Adds those of some sequences that are more urgent than `own`, a priority and the tokens that
    /// are left, or as urgent and shorter.
    fn add_shorter<'a>(
        &self,
        own: (i32, u32),
        slots: impl Iterator<Item = &'a usize>,
        waits: bool,
        shorter: &mut Vec<Prompt>,
    ) {
        for (place, slot) in slots.copied().enumerate() {
            let Some(seq) = &self.sequences[slot] else { continue };
            let wanted = seq.num_wanted(self.config.max_model_len);
            // Running sequences that need one token are in the plan already.
            let is_prompt =
                wanted > u32::from(!waits) && !seq.waits_for_token(self.config.max_model_len);
            if is_prompt && (seq.priority, wanted) < own {
                let priority = seq.priority;
                shorter.push(Prompt { priority, wanted, waits, place, slot });
            }
        }
    }

    /// Whether sequences in the queue may pass its head. One that waits for blocks, or for a
    /// suspect to be told from others, would wait for ever if others kept taking what it waits for.
    fn queue_may_be_passed(&self, builder: &PlanBuilder<'_>) -> bool {
        let Some(head) = self.waiting.front() else { return false };
        let Some(seq) = &self.sequences[*head] else { return false };
        let may_come = matches!(self.decide_admission(seq, builder), AdmissionDecision::Admit);
        let free = self.free_beside(seq.priority, seq.tokens.len() as u32);
        may_come && seq.swapped.is_none() && self.blocks_of(seq, 0) <= free
    }

    /// Blocks of a waiting sequence once it has been in so many steps as one that decodes, with
    /// room for one more token in any case, whatever is cached.
    fn blocks_of(&self, seq: &Sequence, steps: u32) -> u64 {
        let next = self.config.blocks_for(seq.tokens.len() as u32 + 1);
        u64::from(self.config.blocks_for(seq.len_after(steps, &self.config)).max(next))
    }

    /// Whether a sequence that passes the queue's head leaves it the blocks that it needs, also if
    /// it decodes while the head's prompt is computed.
    pub(super) fn leaves_blocks(&self, head: usize, seq: &Sequence) -> bool {
        let Some(head) = &self.sequences[head] else { return true };
        let tokens = (head.tokens.len() as u32).saturating_add(seq.tokens.len() as u32);
        let steps = self.steps_for(head.priority, tokens);
        let kept = self.lacking_for(head.priority, steps);
        let free = u64::from(self.blocks.num_free()).saturating_sub(kept);
        self.blocks_of(head, 0) + self.blocks_of(seq, steps) <= free
    }

    /// Plans a running sequence, unless it was preempted just now.
    fn plan_behind(&mut self, slot: usize, builder: &mut PlanBuilder<'_>) {
        let seq = self.sequences[slot].as_ref();
        if seq.is_some_and(|seq| seq.admission.is_some() && seq.swapped.is_none()) {
            self.plan_next(slot, builder);
        }
    }

    /// Plans a sequence from the queue, if the queue's head keeps a place and the blocks that it
    /// needs. Returns false when others in the queue have to wait.
    fn admit_shorter(&mut self, slot: usize, builder: &mut PlanBuilder<'_>) -> bool {
        let Some(head) = self.waiting.front().copied() else { return false };
        let Some(seq) = &self.sequences[slot] else { return true };
        let may_come = matches!(self.decide_admission(seq, builder), AdmissionDecision::Admit);
        let is_first = slot == head && self.running.len() < self.config.max_num_seqs as usize;
        if !may_come || !(is_first || slot != head && self.may_pass(head, slot)) {
            return false;
        }
        let takes = self.frame_use(seq);
        let Some(at) = self.waiting.iter().position(|waiting| *waiting == slot) else {
            return true;
        };
        if self.must_wait(slot) {
            return false;
        }
        if self.finds_more_soon() {
            return true;
        }
        builder.frame.add(takes);
        self.admit_found(at, slot, builder)
    }
}

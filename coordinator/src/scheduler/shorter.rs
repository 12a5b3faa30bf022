//! PURE: shorter prompts beside a long one. A prompt that could take all that is left of a step
//! leaves up to half of that to prompts behind it that have less to compute, shortest first, so
//! that a short question does not wait for a long document. The long one takes at most twice as
//! many steps; prompts of equal length are computed one after another. KV blocks are not shared
//! like this: nobody passes a sequence that waits for blocks, or takes those that a running one
//! still needs.
use super::Scheduler;
use super::admission::AdmissionDecision;
use super::plan::PlanBuilder;

/// A prompt behind a longer one. The order is the one in which they are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Prompt {
    /// Lower is earlier.
    priority: i32,
    /// Tokens left to compute; those that may be in the KV cache are included.
    wanted: u32,
    /// Its place among the running ones, then in the queue.
    place: usize,
    slot: usize,
}

impl Scheduler {
    /// Returns how many of its `wanted` tokens a running sequence computes in this step. Before the
    /// first that could take all that is left, shorter ones are planned.
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
            self.plan_shorter(slot, wanted, builder);
            builder.budget += own;
        }
        wanted.min(builder.budget)
    }

    /// Plans prompts to which a running sequence with `wanted` tokens to compute leaves some of the
    /// step, as far as the budget goes.
    fn plan_shorter(&mut self, slot: usize, wanted: u32, builder: &mut PlanBuilder<'_>) {
        builder.frame.masks = self.masks_of_running();
        let mut shorter = std::mem::take(&mut self.shorter);
        self.find_shorter(slot, wanted, &mut shorter, builder);
        for prompt in shorter.drain(..) {
            if builder.budget == 0 || !self.plan_one(prompt.slot, builder) {
                break;
            }
        }
        self.shorter = shorter;
    }

    /// Finds the prompts behind a running one with `wanted` tokens to compute that have less, and
    /// waiting ones that are more urgent.
    fn find_shorter(
        &mut self,
        slot: usize,
        wanted: u32,
        shorter: &mut Vec<Prompt>,
        builder: &PlanBuilder<'_>,
    ) {
        let may_be_passed = self.queue_may_be_passed(builder);
        let own = (self.priority(slot), wanted);
        let running = self.running.iter().skip_while(|running| **running != slot).skip(1);
        let queue = self.waiting.iter().take(if may_be_passed { usize::MAX } else { 0 });
        for (place, slot) in running.chain(queue).copied().enumerate() {
            let Some(seq) = &self.sequences[slot] else { continue };
            if seq.priority > own.0 {
                continue;
            }
            let wanted = seq.num_wanted(self.config.max_model_len);
            // Running sequences that need one token are in the plan already.
            let is_prompt = wanted > u32::from(seq.admission.is_some())
                && seq.swapped.is_none()
                && !seq.waits_for_token(self.config.max_model_len);
            if is_prompt && (seq.priority, wanted) < own {
                shorter.push(Prompt { priority: seq.priority, wanted, place, slot });
            }
        }
        let most = self.config.max_num_seqs as usize;
        if shorter.len() > most {
            shorter.select_nth_unstable(most);
            shorter.truncate(most);
        }
        shorter.sort_unstable();
    }

    /// Whether sequences in the queue may pass its head. One that waits for blocks, or for a
    /// suspect to be told from others, would wait for ever if others kept taking what it waits for.
    fn queue_may_be_passed(&mut self, builder: &PlanBuilder<'_>) -> bool {
        let has_place = self.running.len() < self.config.max_num_seqs as usize;
        let Some(head) = self.waiting.front().copied().filter(|_| has_place) else { return false };
        let Some(seq) = &self.sequences[head] else { return false };
        let may_come = matches!(self.decide_admission(seq, builder), AdmissionDecision::Admit);
        // It is looked up only if it has no room without what may be found.
        let blocks = u64::from(self.config.blocks_for(seq.tokens.len() as u32 + 1));
        let is_next = may_come && seq.swapped.is_none();
        is_next && (blocks <= self.free_to_admit() || !self.must_wait(head))
    }

    /// Plans a running sequence, or one from the queue. Returns false when others behind it have to
    /// wait.
    fn plan_one(&mut self, slot: usize, builder: &mut PlanBuilder<'_>) -> bool {
        let Some(at) = self.waiting.iter().position(|waiting| *waiting == slot) else {
            self.plan_next(slot, builder);
            return true;
        };
        let has_place = self.running.len() < self.config.max_num_seqs as usize;
        let seq = self.sequences[slot].as_ref().filter(|seq| has_place && seq.swapped.is_none());
        let Some(seq) = seq else { return false };
        if !matches!(self.decide_admission(seq, builder), AdmissionDecision::Admit) {
            return false;
        }
        let takes = self.frame_use(seq);
        builder.frame.add(takes);
        self.admit(at, slot, builder)
    }
}

//! PURE: plans the next step.
use shared::ids::{SeqId, StepId};
use shared::protocol::{Drafts, SequenceStep, StepPlan};

use super::admission::FrameUse;
use super::effect::RequestPlace;
use super::sequence::{Request, Sequence};
use super::{Effect, Scheduler, keep_full, weight};

/// A step sent and not answered.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    pub(super) step: StepId,
    pub(super) entries: Vec<Entry>,
    pub(super) sequences: u32,
    /// Upper bound on the bytes of its plan that swapping in takes.
    pub(super) swap_in_bytes: usize,
    /// Number of embeddings it completes.
    pub(super) embeddings: u32,
    /// Upper bound on the bytes of its results that log-probabilities of prompts take.
    pub(super) scores: usize,
    /// Tokens of the step, by kind.
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) recomputed_tokens: u32,
    /// Prompt tokens looked up in the KV cache by sequences new to it, and found there. None of
    /// prompts that have to be computed as a whole.
    pub(super) looked_up: u32,
    pub(super) found: u32,
    /// It has masked entries whose masks are not sent yet.
    pub(super) owes_masks: bool,
}

impl InFlight {
    /// Empties it, keeping its memory.
    fn cleared(mut self) -> Self {
        self.entries.clear();
        Self { entries: self.entries, ..Self::default() }
    }
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) slot: usize,
    pub(super) seq: SeqId,
    pub(super) admission: u64,
    /// Position of the first token it computes.
    pub(super) start: u32,
    /// Position after the last one, drafts not counted.
    pub(super) end: u32,
    pub(super) samples: bool,
    /// Its token must be one that the sequence's guide allows.
    pub(super) masked: bool,
    /// It verifies the sequence's drafts. Earlier parts of the prompt may still be in flight.
    pub(super) verifies: bool,
    /// Its drafts come from a draft model: the answer says how many there were.
    pub(super) asks: bool,
    /// It computes more of the sequence than was ever computed before.
    pub(super) fresh: bool,
    /// It counts what the KV cache had of the sequence's prompt.
    pub(super) looks_up: bool,
    /// The sequence's `computed_max` before this share, restored if the step is lost with its
    /// epoch.
    pub(super) computed_max: u32,
}

impl Entry {
    /// Whether the sequence is still the one that was planned.
    pub(super) fn is_of(&self, seq: &Sequence) -> bool {
        seq.id == self.seq && seq.admission == Some(self.admission)
    }
}

/// A step that is being planned.
pub(super) struct PlanBuilder<'a> {
    pub(super) plan: &'a mut StepPlan,
    pub(super) step: InFlight,
    /// Tokens left for the step.
    pub(super) budget: u32,
    /// Whether shorter prompts have had their part of it.
    pub(super) is_shared: bool,
    /// What the step's frames hold of it.
    pub(super) frame: FrameUse,
    pub(super) effects: &'a mut Vec<Effect>,
}

impl Scheduler {
    /// Fills `plan` with the next step and returns true, if there is work and room for another step
    /// in flight.
    pub fn plan(&mut self, plan: &mut StepPlan, effects: &mut Vec<Effect>) -> bool {
        let Some(epoch) = self.epoch else { return false };
        if self.in_flight.len() >= self.config.max_steps_in_flight as usize {
            return false;
        }
        self.select_drafters();
        if !self.tokens_are_ready() {
            return false;
        }
        clear(plan);
        debug_assert!(!self.running.is_empty() || self.states.is_at_rest(), "{:?}", self.states);
        self.states.begin_step();
        let step = self.spare.pop().unwrap_or_default().cleared();
        let budget = self.step_tokens;
        let frame = FrameUse::default();
        let mut builder = PlanBuilder { plan, step, budget, is_shared: false, frame, effects };
        // Sequences that need one token go first, most urgent first; the rest of the budget goes to
        // prompts under way, then to the queue, as far as those that decode allow. A prompt that
        // would take all leaves some to shorter ones.
        let for_prompts = self.prompt_tokens_max();
        self.plan_running(&mut builder, true);
        let held = builder.budget.saturating_sub(for_prompts);
        builder.budget -= held;
        self.plan_running(&mut builder, false);
        self.plan_waiting(&mut builder);
        builder.budget += held;
        self.plan_drafts(&mut builder);
        let PlanBuilder { plan, mut step, .. } = builder;
        let is_planned = !plan.sequences.is_empty();
        if is_planned {
            plan.epoch = epoch;
            step.sequences = plan.sequences.len() as u32;
            self.send(plan, step);
        } else {
            self.spare.push(step);
        }
        is_planned
    }

    /// Fills `plan` with a step that computes nothing but that all ranks must answer. It may exceed
    /// `max_steps_in_flight` by one.
    pub fn canary(&mut self, plan: &mut StepPlan) -> bool {
        let Some(epoch) = self.epoch else { return false };
        clear(plan);
        plan.epoch = epoch;
        let step = self.spare.pop().unwrap_or_default().cleared();
        self.send(plan, step);
        true
    }

    fn send(&mut self, plan: &mut StepPlan, mut step: InFlight) {
        self.last_step.0 += 1;
        step.step = self.last_step;
        plan.step = self.last_step;
        plan.finished.append(&mut self.forget);
        self.send_swaps(plan);
        self.in_flight.push_back(step);
    }

    /// Returns the admitted sequences, most urgent first.
    pub(super) fn running(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter_map(|slot| self.sequences[*slot].as_ref())
    }

    /// Maximum number of prompt tokens in the next step.
    pub(super) fn prompt_tokens_max(&self) -> u32 {
        let max_model_len = self.config.max_model_len;
        // One whose output is computed again wants more than a token, and samples none.
        let decodes =
            |seq: &Sequence| seq.computed >= seq.num_prompt && seq.num_wanted(max_model_len) == 1;
        if self.running().any(decodes) { self.mixed_prefill_tokens } else { u32::MAX }
    }

    /// Whether a step can be planned although some tokens are not known yet. While drafting
    /// sequences wait for tokens of a step in flight, the others are planned ahead of them if they
    /// are the majority; the drafting ones are then in every other step.
    fn tokens_are_ready(&self) -> bool {
        let (mut waiting, mut wanting) = (0, 0);
        for seq in self.running() {
            wanting += usize::from(seq.num_wanted(self.config.max_model_len) > 0);
            waiting += usize::from(seq.waits_for_token(self.config.max_model_len));
        }
        waiting == 0 || 2 * waiting < wanting
    }

    /// Plans admitted sequences, either those in decode or those in prefill.
    fn plan_running(&mut self, builder: &mut PlanBuilder<'_>, decode: bool) {
        let mut index = 0;
        while let Some(slot) = self.running.get(index).copied() {
            index += 1;
            if builder.budget == 0 {
                return;
            }
            let Some(seq) = &self.sequences[slot] else { continue };
            let wanted = seq.num_wanted(self.config.max_model_len);
            if (wanted == 1) == decode {
                // A sequence preempted to make room comes after this one or is this one, so `index`
                // stays valid; nor is it in this plan.
                self.plan_next(slot, builder);
            }
        }
    }

    /// Plans what an admitted sequence needs next, as far as it can be computed.
    pub(super) fn plan_next(&mut self, slot: usize, builder: &mut PlanBuilder<'_>) {
        let Some(seq) = &self.sequences[slot] else { return };
        let wanted = seq.num_wanted(self.config.max_model_len);
        if wanted == 0 || seq.waits_for_token(self.config.max_model_len) {
            return;
        }
        // What comes beside a longer one is planned out of turn.
        if builder.is_shared && builder.plan.sequences.iter().any(|planned| planned.seq == seq.id) {
            return;
        }
        let count = self.share_step(slot, wanted, builder);
        let Some(seq) = &self.sequences[slot] else { return };
        let has_room = count > 0 && self.has_report_room(seq, count, &builder.step);
        if has_room && self.make_room(slot, count, builder) {
            self.plan_sequence(slot, count, builder);
        }
    }

    /// Frees the blocks that `count` more tokens of `slot` need by preempting the least urgent
    /// sequence (of equal priority, the last admitted) as often as necessary. Returns false if that
    /// was `slot` itself, or is in this plan already: then it is preempted when it needs a block
    /// itself.
    pub(super) fn make_room(
        &mut self,
        slot: usize,
        count: u32,
        builder: &mut PlanBuilder<'_>,
    ) -> bool {
        let Some(seq) = &self.sequences[slot] else { return false };
        // It may have more already: those of drafts that were not accepted.
        let needed = self.config.blocks_for(seq.computed + count);
        let needed = needed.saturating_sub(seq.blocks.len() as u32);
        while self.blocks.num_free() < needed {
            let Some(victim) = self.running.last().copied() else { return false };
            let id = self.sequences[victim].as_ref().map(|seq| seq.id);
            if builder.plan.sequences.iter().any(|planned| Some(planned.seq) == id) {
                return false;
            }
            self.preempt(victim, builder);
            if victim == slot {
                return false;
            }
        }
        true
    }

    fn preempt(&mut self, victim: usize, builder: &mut PlanBuilder<'_>) {
        let Some(seq) = &self.sequences[victim] else { return };
        let (id, request, tokens) = (seq.id, seq.request, seq.computed);
        // This very plan may have admitted it, before its first share.
        builder.plan.admitted.retain(|new| new.seq != id);
        builder.plan.begin_with.retain(|kept| kept.seq != id);
        let blocks = seq.blocks.len() as u32;
        let swapped = self.swap_out(victim).then_some(blocks);
        if swapped.is_none() {
            self.unadmit(victim);
        }
        let place = self.requests.get(&request).map_or(RequestPlace::Waiting, Request::place);
        let tokens = if swapped.is_some() { 0 } else { tokens };
        builder.effects.push(Effect::Preempted { request, place, swapped, tokens });
    }

    /// Whether a step's report has room for this share, or for its beginning if it can be cut: the
    /// embeddings that a step completes are reported together, as are log-probabilities of prompts.
    pub(super) fn has_report_room(&self, seq: &Sequence, count: u32, step: &InFlight) -> bool {
        let completes = seq.embeds_at(seq.computed + count);
        let embeds = !completes || step.embeddings < weight::embeddings_max(&self.config);
        embeds && (count == 0 || weight::scored_max(seq, count, step.scores) > 0)
    }

    /// Plans the next `count` tokens of a sequence, which [`Scheduler::make_room`] made room for.
    pub(super) fn plan_sequence(&mut self, slot: usize, count: u32, builder: &mut PlanBuilder<'_>) {
        builder.budget -= count;
        let PlanBuilder { plan, step, .. } = builder;
        let Some(seq) = &mut self.sequences[slot] else { return };
        let (start, end) = (seq.computed, seq.computed + count);
        while (seq.blocks.len() as u32) < self.config.blocks_for(end) {
            // `make_room` made sure that there are enough.
            let Some(block) = self.blocks.take(|lost| self.states.forget(lost)) else { break };
            seq.blocks.push(block);
        }
        let samples = seq.samples_at(end);
        let guide = seq.guide.as_ref().filter(|_| samples);
        let masked = guide.is_some_and(|guide| !guide.leaves_open(seq.pending));
        step.owes_masks |= masked;
        step.embeddings += u32::from(seq.embeds_at(end));
        step.scores += weight::scores(seq, count);
        // Tokens computed for the first time, in all and of the prompt.
        let fresh = end.saturating_sub(seq.computed_max.max(start));
        let fresh_prompt = end.min(seq.num_prompt).saturating_sub(seq.computed_max.max(start));
        step.prompt_tokens += fresh_prompt;
        step.recomputed_tokens += count - fresh;
        let looks_up = !seq.known && !seq.looked_up && self.config.prefix_caching;
        if !seq.known {
            // Tokens found count as cached, unless they had been computed before and lost.
            let found = start.min(seq.num_prompt);
            step.cached_tokens += found.saturating_sub(seq.computed_max);
            if looks_up {
                step.looked_up += if seq.may_be_cached() { seq.num_prompt } else { 0 };
                step.found += found;
                seq.looked_up = true;
                seq.cached = found;
            }
        }
        let computed_max = seq.computed_max;
        seq.computed = end;
        seq.computed_max = seq.computed_max.max(end);
        seq.pending += u32::from(samples);
        plan.sequences.push(SequenceStep {
            seq: seq.id,
            start,
            count,
            new_blocks: seq.blocks[seq.blocks_sent as usize..].to_vec(),
            sample: samples,
            masked,
            drafts: Drafts::none(),
        });
        seq.blocks_sent = seq.blocks.len() as u32;
        seq.known = true;
        let admission = seq.admission.unwrap_or_default();
        let (seq_id, fresh) = (seq.id, fresh > 0);
        keep_full((&mut self.blocks, &mut self.states), seq, &self.config);
        let seq = seq_id;
        step.entries.push(Entry {
            slot,
            seq,
            admission,
            start,
            end,
            samples,
            masked,
            verifies: false,
            asks: false,
            fresh,
            looks_up,
            computed_max,
        });
        plan.keep.extend(self.keep_state(slot));
    }
}

fn clear(plan: &mut StepPlan) {
    plan.finished.clear();
    plan.swap_out.clear();
    plan.swap_in.clear();
    plan.admitted.clear();
    plan.begin_with.clear();
    plan.sequences.clear();
    plan.keep.clear();
}

//! PURE: plans the next step.
use shared::ids::{RequestId, SeqId, StepId};
use shared::protocol::{Drafts, NewSequence, SequenceStep, StepPlan};
use shared::sampling::Pooling;

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
    /// Tokens of the step, by kind.
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) recomputed_tokens: u32,
    /// Prompt tokens looked up in the KV cache by sequences new to it, and found there.
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
    /// The sequence is looked up in the KV cache for the first time.
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
    pub(super) effects: &'a mut Vec<Effect>,
}

/// Bytes of a plan's frame taken by admitted sequences, and bytes taken by masks.
#[derive(Clone, Copy)]
struct FrameUse {
    admitted: usize,
    masks: usize,
}

/// What happens to the next waiting sequence.
enum AdmissionDecision {
    Admit,
    /// It waits for room for masks; sequences that need none may pass it.
    Skip,
    Wait,
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
        let step = self.spare.pop().unwrap_or_default().cleared();
        let budget = self.step_tokens;
        let mut builder = PlanBuilder { plan, step, budget, effects };
        // Sequences that need one token go first, most urgent first; the rest of the budget goes to
        // prompts under way, then to the queue.
        self.plan_running(&mut builder, true);
        self.plan_running(&mut builder, false);
        self.plan_waiting(&mut builder);
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
            if wanted == 0 || (wanted == 1) != decode {
                continue;
            }
            if seq.waits_for_token(self.config.max_model_len) {
                continue;
            }
            let count = wanted.min(builder.budget);
            if !self.has_report_room(seq, count, &builder.step) {
                continue;
            }
            // A sequence preempted to make room comes after this one or is this one, so `index`
            // stays valid; nor is it in this plan.
            if self.make_room(slot, count, builder) {
                self.plan_sequence(slot, count, builder);
            }
        }
    }

    /// Admits from the queue while sequences, budget, blocks and the plan's frame last. Tokens
    /// found in the KV cache cost no budget, but their sequence is in the plan all the same. No
    /// sequence is overtaken, except guided ones that wait for room for masks: by those that need
    /// none.
    fn plan_waiting(&mut self, builder: &mut PlanBuilder<'_>) {
        if self.waiting.is_empty() {
            return;
        }
        let masks = self.running().filter_map(mask_bytes).sum();
        let mut taken = FrameUse { admitted: 0, masks };
        let mut masks_are_full = false;
        while let Some((at, slot)) = self.next_waiting(masks_are_full) {
            if builder.budget == 0 || self.running.len() >= self.config.max_num_seqs as usize {
                return;
            }
            let Some(seq) = &self.sequences[slot] else {
                self.waiting.remove(at);
                continue;
            };
            let is_swapped = seq.swapped.is_some();
            let takes = FrameUse {
                // A single one always fits: `SchedulerConfig::validate`.
                admitted: if is_swapped { 0 } else { weight::of(seq, &self.config) },
                masks: mask_bytes(seq).unwrap_or(0),
            };
            match self.decide_admission(seq, builder, taken, takes) {
                AdmissionDecision::Admit => {}
                AdmissionDecision::Skip => {
                    masks_are_full = true;
                    continue;
                }
                AdmissionDecision::Wait => return,
            }
            taken.admitted += takes.admitted;
            taken.masks += takes.masks;
            let comes = match is_swapped {
                true => self.swap_in(at, slot, builder),
                false => self.admit(at, slot, builder),
            };
            if !comes {
                return;
            }
        }
    }

    /// Decides whether a waiting sequence may be in this step, as far as bytes, reports and blame
    /// go. `taken` is what the step and the running sequences have of frames, `takes` what it would
    /// add.
    fn decide_admission(
        &self,
        seq: &Sequence,
        builder: &PlanBuilder<'_>,
        taken: FrameUse,
        takes: FrameUse,
    ) -> AdmissionDecision {
        let whole = (seq.tokens.len() as u32).saturating_sub(seq.computed);
        if !self.has_report_room(seq, whole, &builder.step) {
            return AdmissionDecision::Wait;
        }
        let is_first = builder.plan.admitted.is_empty();
        let full = taken.admitted + takes.admitted > weight::ADMITTED_MAX && !is_first;
        let masks = taken.masks + takes.masks;
        if !full && takes.masks > 0 && taken.masks > 0 && masks > weight::MASKS_MAX {
            return AdmissionDecision::Skip;
        }
        if full || self.would_hide_culprit(seq.request) {
            return AdmissionDecision::Wait;
        }
        AdmissionDecision::Admit
    }

    /// Admits the sequence at place `at` of the queue and plans its first share. Returns false when
    /// others behind it have to wait.
    fn admit(&mut self, at: usize, slot: usize, builder: &mut PlanBuilder<'_>) -> bool {
        if self.must_wait(slot) {
            return false;
        }
        self.waiting.remove(at);
        self.share_found(slot);
        let Some(seq) = &mut self.sequences[slot] else { return true };
        let (length, request) = (seq.tokens.len() as u32, seq.request);
        seq.computed = seq.kept * self.config.block_size;
        let count = (length - seq.computed).min(builder.budget);
        seq.admission = Some(self.next_admission);
        seq.progressed = false;
        self.next_admission += 1;
        builder.plan.admitted.push(NewSequence {
            seq: seq.id,
            tokens: seq.tokens.to_vec(),
            num_prompt: seq.num_prompt,
            adapter: seq.adapter,
            sampling: seq.sampling.clone(),
        });
        self.run(slot);
        self.count(request, |owner| owner.admitted += 1);
        self.resumed(request, builder.effects);
        if !self.make_room(slot, count, builder) {
            return false;
        }
        self.plan_sequence(slot, count, builder);
        true
    }

    /// Starts a sequence's block table with the blocks found for it.
    pub(super) fn share_found(&mut self, slot: usize) {
        let Some(seq) = &mut self.sequences[slot] else { return };
        for found in self.found.drain(..) {
            self.blocks.share(found.block);
            seq.blocks.push(found.block);
            seq.prefix = found.prefix;
            seq.kept += 1;
        }
    }

    /// Returns the queue position and slot of the next sequence to admit; where masks have no room,
    /// the first that is not guided.
    fn next_waiting(&self, masks_are_full: bool) -> Option<(usize, usize)> {
        let waits = |slot: usize| {
            let seq = self.sequences[slot].as_ref();
            seq.is_none_or(|seq| seq.guide.is_none() || !masks_are_full)
        };
        let mut queue = self.waiting.iter().copied().enumerate();
        queue.find(|(_, slot)| waits(*slot))
    }

    /// Whether a waiting sequence finds too few free blocks; if not, `found` has its cached blocks.
    fn must_wait(&mut self, slot: usize) -> bool {
        let known = self.is_known_to_wait(slot);
        if known && !cfg!(debug_assertions) {
            return true;
        }
        self.look_up(slot);
        let Some(seq) = &self.sequences[slot] else { return false };
        // With room for one more token, so that its first output does not get it preempted.
        let wanted = self.config.blocks_for(seq.tokens.len() as u32 + 1) - self.found.len() as u32;
        let found_free = self.found.iter().filter(|found| found.is_free).count() as u32;
        let waits = self.is_short_of(slot, wanted + found_free);
        debug_assert!(waits || !known, "{wanted} and {found_free}, {:?}", self.waits_for);
        waits
    }

    /// Whether a waiting sequence was short of blocks, and still must be: it is looked up again
    /// only when enough may have changed. A long prompt at the head of the queue waits for many
    /// steps and has thousands of blocks.
    pub(super) fn is_known_to_wait(&self, slot: usize) -> bool {
        let Some(seq) = &self.sequences[slot] else { return false };
        let key = (seq.id, seq.tokens.len() as u32);
        let known = self.waits_for.filter(|waits| (waits.seq, waits.length) == key);
        // Each gain saves at most one block.
        let blocks = known.map(|it| it.blocks.saturating_sub(self.blocks.gains() - it.gains));
        !self.running.is_empty() && blocks.is_some_and(|blocks| blocks > self.free_to_admit())
    }

    /// Whether a waiting sequence that needs so many free blocks has to wait, which is noted. One
    /// that nothing runs beside is admitted in any case.
    pub(super) fn is_short_of(&mut self, slot: usize, blocks: u32) -> bool {
        let Some(seq) = &self.sequences[slot] else { return false };
        let (seq, length, blocks) = (seq.id, seq.tokens.len() as u32, u64::from(blocks));
        let waits = !self.running.is_empty() && blocks > self.free_to_admit();
        let gains = self.blocks.gains();
        self.waits_for = waits.then_some(super::BlockWait { seq, length, blocks, gains });
        waits
    }

    /// Free blocks for sequences that wait. Each running one keeps a block for its next tokens:
    /// otherwise those that run would soon preempt who came last, and what it computed is lost.
    #[must_use]
    pub fn free_to_admit(&self) -> u64 {
        u64::from(self.blocks.num_free()).saturating_sub(self.running.len() as u64)
    }

    /// Finds the cached blocks of a waiting sequence. At least one token is left to compute, for
    /// its logits or its embedding. Log-probabilities of a prompt, and embeddings pooled over more
    /// than one token, need all of it.
    pub(super) fn look_up(&mut self, slot: usize) {
        self.found.clear();
        let Some(seq) = &self.sequences[slot] else { return };
        let needs_all = seq.sampling.pooling.is_some_and(Pooling::needs_all);
        if !self.config.prefix_caching || !seq.prompt_logprobs_done || needs_all {
            return;
        }
        let size = self.config.block_size as usize;
        let mut prefix = seq.prefix;
        for tokens in seq.tokens[..seq.tokens.len() - 1].chunks_exact(size) {
            let Some(found) = self.blocks.find(prefix, tokens) else { return };
            prefix = found.prefix;
            self.found.push(found);
        }
    }

    /// Frees the blocks that `count` more tokens of `slot` need by preempting the least urgent
    /// sequence (of equal priority, the last admitted) as often as necessary. Returns false if that
    /// was `slot` itself, or is in this plan already: then it is preempted when it needs a block
    /// itself.
    fn make_room(&mut self, slot: usize, count: u32, builder: &mut PlanBuilder<'_>) -> bool {
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
        let blocks = seq.blocks.len() as u32;
        let swapped = self.swap_out(victim).then_some(blocks);
        if swapped.is_none() {
            self.unadmit(victim);
        }
        let place = self.requests.get(&request).map_or(RequestPlace::Waiting, Request::place);
        let tokens = if swapped.is_some() { 0 } else { tokens };
        builder.effects.push(Effect::Preempted { request, place, swapped, tokens });
    }

    /// Whether a step's report has room for this share: the embeddings that a step completes are
    /// reported together.
    fn has_report_room(&self, seq: &Sequence, count: u32, step: &InFlight) -> bool {
        let completes = seq.embeds_at(seq.computed + count);
        !completes || step.embeddings < weight::embeddings_max(&self.config)
    }

    /// Whether this request in the batch would leave open who ends an epoch: a suspect does not run
    /// with others that have made no progress since their admission. If the epoch ends again, it
    /// was the suspect.
    fn would_hide_culprit(&self, request: RequestId) -> bool {
        let sequence = |slot: &usize| self.sequences[*slot].as_ref();
        let mut others = self.running().filter(|seq| seq.request != request && !seq.progressed);
        let mut own = self.requests.get(&request).into_iter().flat_map(|owner| &owner.live);
        let suspect = own.any(|slot| sequence(slot).is_some_and(|seq| seq.suspicion > 0));
        others.any(|other| suspect || other.suspicion > 0)
    }

    /// Plans the next `count` tokens of a sequence, which [`Scheduler::make_room`] made room for.
    pub(super) fn plan_sequence(&mut self, slot: usize, count: u32, builder: &mut PlanBuilder<'_>) {
        builder.budget -= count;
        let PlanBuilder { plan, step, .. } = builder;
        let Some(seq) = &mut self.sequences[slot] else { return };
        let (start, end) = (seq.computed, seq.computed + count);
        while (seq.blocks.len() as u32) < self.config.blocks_for(end) {
            // `make_room` made sure that there are enough.
            let Some(block) = self.blocks.take() else { break };
            seq.blocks.push(block);
        }
        let samples = seq.samples_at(end);
        let guide = seq.guide.as_ref().filter(|_| samples);
        let masked = guide.is_some_and(|guide| !guide.leaves_open(seq.pending));
        step.owes_masks |= masked;
        step.embeddings += u32::from(seq.embeds_at(end));
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
                step.looked_up += seq.num_prompt;
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
        keep_full(&mut self.blocks, seq, &self.config);
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
    }
}

/// Upper bound on the bytes of a sequence's mask, if it is guided.
fn mask_bytes(seq: &Sequence) -> Option<usize> {
    seq.guide.as_ref().map(|guide| guide.mask_bytes_max())
}

fn clear(plan: &mut StepPlan) {
    plan.finished.clear();
    plan.swap_out.clear();
    plan.swap_in.clear();
    plan.admitted.clear();
    plan.sequences.clear();
}

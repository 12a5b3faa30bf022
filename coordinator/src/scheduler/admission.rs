//! PURE: which waiting sequences come into a step, and whether there is room for them.
use shared::ids::RequestId;
use shared::protocol::NewSequence;

use super::plan::PlanBuilder;
use super::sequence::Sequence;
use super::{BlockWait, Scheduler, weight};

/// Most sequences of a plan that others pass since they find more in the next step: each is looked
/// up in every plan.
const PASSED_MAX: u32 = 8;

/// Bytes of a plan's frame taken by admitted sequences, and bytes taken by masks.
#[derive(Clone, Copy, Default)]
pub(super) struct FrameUse {
    admitted: usize,
    pub(super) masks: usize,
}

impl FrameUse {
    pub(super) fn add(&mut self, other: Self) {
        self.admitted += other.admitted;
        self.masks += other.masks;
    }
}

/// Sequences that others pass, since they find more in the next step.
#[derive(Clone, Copy, Default)]
struct Passed {
    first: Option<usize>,
    count: u32,
    /// The request of the last one.
    last: Option<RequestId>,
}

/// What happens to the next waiting sequence.
pub(super) enum AdmissionDecision {
    Admit,
    /// It waits for room for masks; sequences that need none may pass it.
    Skip,
    Wait,
}

impl Scheduler {
    /// Admits from the queue while sequences, budget, blocks and the plan's frame last. Tokens
    /// found in the KV cache cost no budget, but their sequence is in the plan all the same. Here
    /// no sequence is overtaken, with two exceptions: guided ones that wait for room for masks, by
    /// those that need none; and those that find more in the next step, by those that leave the
    /// first of them its place and its blocks.
    pub(super) fn plan_waiting(&mut self, builder: &mut PlanBuilder<'_>) {
        if self.waiting.is_empty() {
            return;
        }
        builder.frame.masks = self.masks_of_running();
        let mut masks_are_full = false;
        // Those before this place stay in the queue.
        let mut from = 0;
        let mut passed = Passed::default();
        while let Some((at, slot)) = self.next_waiting(from, masks_are_full) {
            if builder.budget == 0 || self.running.len() >= self.config.max_num_seqs as usize {
                return;
            }
            let Some(seq) = &self.sequences[slot] else {
                self.waiting.remove(at);
                continue;
            };
            match self.decide_admission(seq, builder) {
                AdmissionDecision::Admit => {}
                AdmissionDecision::Skip => {
                    masks_are_full = true;
                    continue;
                }
                AdmissionDecision::Wait => return,
            }
            let (request, is_swapped) = (seq.request, seq.swapped.is_some());
            let takes = self.frame_use(seq);
            if !is_swapped {
                // Another choice of the one before waits for the same.
                if passed.last == Some(request) {
                    from = at + 1;
                    continue;
                }
                if self.must_wait(slot) {
                    return;
                }
                if self.finds_more_soon() {
                    if passed.count == PASSED_MAX {
                        return;
                    }
                    passed.count += 1;
                    passed.last = Some(request);
                    passed.first = passed.first.or(Some(slot));
                    from = at + 1;
                    continue;
                }
            }
            if passed.first.is_some_and(|first| is_swapped || !self.may_pass(first, slot)) {
                return;
            }
            builder.frame.add(takes);
            let comes = match is_swapped {
                true => self.swap_in(at, slot, builder),
                false => self.admit_found(at, slot, builder),
            };
            if !comes {
                return;
            }
        }
    }

    /// Whether a sequence that passes another one leaves it a place in the batch, and its blocks.
    pub(super) fn may_pass(&self, passed: usize, slot: usize) -> bool {
        let Some(seq) = &self.sequences[slot] else { return true };
        let places = self.config.max_num_seqs as usize - 1;
        self.running.len() < places && self.leaves_blocks(passed, seq)
    }

    /// Decides whether a waiting sequence may be in this step, as far as bytes, reports and blame
    /// go.
    pub(super) fn decide_admission(
        &self,
        seq: &Sequence,
        builder: &PlanBuilder<'_>,
    ) -> AdmissionDecision {
        let whole = (seq.tokens.len() as u32).saturating_sub(seq.computed);
        if !self.has_report_room(seq, whole, &builder.step) {
            return AdmissionDecision::Wait;
        }
        let (taken, takes) = (builder.frame, self.frame_use(seq));
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

    /// What a waiting sequence would add to a step's frames. A single one always fits:
    /// `SchedulerConfig::validate`.
    pub(super) fn frame_use(&self, seq: &Sequence) -> FrameUse {
        let is_swapped = seq.swapped.is_some();
        FrameUse {
            admitted: if is_swapped { 0 } else { weight::of(seq, &self.config) },
            masks: mask_bytes(seq).unwrap_or(0),
        }
    }

    /// Admits the sequence at place `at` of the queue, which was looked up, and plans its first
    /// share. Returns false when others behind it have to wait.
    pub(super) fn admit_found(
        &mut self,
        at: usize,
        slot: usize,
        builder: &mut PlanBuilder<'_>,
    ) -> bool {
        self.waiting.remove(at);
        self.share_found(slot);
        builder.plan.begin_with.extend(self.decide_ends(slot));
        let Some(seq) = &mut self.sequences[slot] else { return true };
        let (length, request) = (seq.tokens.len() as u32, seq.request);
        seq.computed = seq.kept * self.config.block_size;
        let wanted = length - seq.computed;
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
        let count = self.share_step(slot, wanted, builder);
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

    /// Returns the queue position, `from` or behind, and slot of the next sequence to admit; where
    /// masks have no room, the first that is not guided.
    fn next_waiting(&self, from: usize, masks_are_full: bool) -> Option<(usize, usize)> {
        let waits = |slot: usize| {
            let seq = self.sequences[slot].as_ref();
            seq.is_none_or(|seq| seq.guide.is_none() || !masks_are_full)
        };
        let mut queue = self.waiting.iter().copied().enumerate().skip(from);
        queue.find(|(_, slot)| waits(*slot))
    }

    /// Whether a waiting sequence finds too few free blocks; if not, `found` has its cached blocks.
    pub(super) fn must_wait(&mut self, slot: usize) -> bool {
        let known = self.is_known_to_wait(slot);
        if known && !cfg!(debug_assertions) {
            return true;
        }
        self.look_up(slot);
        let Some(seq) = &self.sequences[slot] else { return false };
        let (length, num_found) = (seq.tokens.len() as u32, self.found.len() as u32);
        // With room for one more token, so that its first output does not get it preempted.
        let wanted = self.config.blocks_for(length + 1) - num_found;
        let found_free = self.found.iter().filter(|found| found.is_free).count() as u32;
        let uncomputed = length - num_found * self.config.block_size;
        let waits = self.is_short_of(slot, wanted + found_free, uncomputed);
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
        let gains = self.states.gains();
        let known = known.filter(|known| known.states.is_none_or(|states| states == gains));
        let Some(known) = known.filter(|_| !self.running.is_empty()) else { return false };
        // Each gain saves at most one block, with the tokens in it.
        let gains = self.blocks.gains() - known.gains;
        let saved = u32::try_from(gains).unwrap_or(u32::MAX);
        let saved = saved.saturating_mul(self.config.block_size);
        let uncomputed = known.uncomputed.saturating_sub(saved);
        known.blocks.saturating_sub(gains) > self.free_beside(seq.priority, uncomputed)
    }

    /// Whether a waiting sequence that needs so many free blocks and has so many tokens to compute
    /// has to wait, which is noted. One that nothing runs beside is admitted in any case.
    pub(super) fn is_short_of(&mut self, slot: usize, blocks: u32, uncomputed: u32) -> bool {
        let Some(seq) = &self.sequences[slot] else { return false };
        let free = self.free_beside(seq.priority, uncomputed);
        let (seq, length, blocks) = (seq.id, seq.tokens.len() as u32, u64::from(blocks));
        let waits = !self.running.is_empty() && blocks > free;
        let gains = self.blocks.gains();
        let is_cut = self.found_blocks > self.found.len() as u32;
        let states = is_cut.then_some(self.states.gains());
        let wait = BlockWait { seq, length, blocks, uncomputed, gains, states };
        self.waits_for = waits.then_some(wait);
        waits
    }

    /// Free blocks for a prompt that comes now: one that needs no more, its first output included,
    /// does not wait for blocks, whatever its priority. Some that need more may be, too.
    #[must_use]
    pub fn free_to_admit(&self) -> u64 {
        let free = u64::from(self.blocks.num_free());
        let mut most = free.saturating_sub(self.lacking());
        while most > 0 {
            let tokens = most.saturating_mul(u64::from(self.config.block_size)) - 1;
            let tokens = tokens.min(u64::from(self.config.max_model_len)) as u32;
            // Beside a prompt of that length so much is left, and beside a shorter one no less. If
            // that is little, shorter ones are asked about.
            let fits = self.free_beside(i32::MAX, tokens).min(most);
            if 2 * fits >= most {
                return fits;
            }
            most /= 2;
        }
        0
    }

    /// Free blocks for a waiting sequence of this priority with so many tokens to compute. Each
    /// running one keeps what it lacks until these are computed: otherwise those that run would
    /// preempt who came last when most of its prompt is there, and that is lost.
    pub(super) fn free_beside(&self, priority: i32, tokens: u32) -> u64 {
        let lacking = self.lacking_for(priority, self.steps_for(priority, tokens));
        u64::from(self.blocks.num_free()).saturating_sub(lacking)
    }

    /// Number of steps that so many tokens of a waiting sequence of this priority take, with those
    /// of prompts under way that are as urgent: they go first, or need their blocks for longer.
    pub(super) fn steps_for(&self, priority: i32, tokens: u32) -> u32 {
        let (mut tokens, mut decodes) = (tokens, 0_u32);
        for seq in self.running() {
            match seq.num_wanted(self.config.max_model_len) {
                0..=1 => decodes += 1,
                wanted if seq.priority <= priority => tokens = tokens.saturating_add(wanted),
                _ => {}
            }
        }
        let each = self.step_tokens.saturating_sub(decodes).min(self.mixed_prefill_tokens);
        tokens.div_ceil(each.max(1))
    }

    /// Blocks that the running sequences keep of those that are free, while a prompt of this
    /// priority is computed in so many steps: those that they need for the tokens that they have
    /// and for those that they may get in these steps, and a block each at least. Less urgent ones
    /// keep what they need next alone: they are preempted before that prompt is.
    pub(super) fn lacking_for(&self, priority: i32, steps: u32) -> u64 {
        let lacks = |seq: &Sequence| {
            let steps = if seq.priority <= priority { steps } else { 0 };
            let whole = self.config.blocks_for(seq.len_after(steps, &self.config));
            u64::from(whole.saturating_sub(seq.blocks.len() as u32).max(1))
        };
        self.running().map(lacks).sum()
    }

    /// Blocks that the running sequences keep of those that are free for the tokens that they have
    /// and the next one, and a block each at least.
    pub(super) fn lacking(&self) -> u64 {
        self.lacking_for(i32::MIN, 0)
    }

    /// Finds the cached blocks of a waiting sequence. At least one token is left to compute, for
    /// its logits or its embedding.
    pub(super) fn look_up(&mut self, slot: usize) {
        self.find_blocks(slot);
        self.cut_to_state();
    }

    fn find_blocks(&mut self, slot: usize) {
        self.found.clear();
        let Some(seq) = &self.sequences[slot] else { return };
        if !self.config.prefix_caching || !seq.may_be_cached() {
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

    /// Upper bound on the bytes of masks of the admitted sequences.
    pub(super) fn masks_of_running(&self) -> usize {
        self.running().filter_map(mask_bytes).sum()
    }
}

/// Upper bound on the bytes of a sequence's mask, if it is guided.
fn mask_bytes(seq: &Sequence) -> Option<usize> {
    seq.guide.as_ref().map(|guide| guide.mask_bytes_max())
}

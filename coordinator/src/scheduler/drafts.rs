//! PURE: which sequences draft tokens in the next step, and what becomes of their drafts.
use shared::ids::{RequestId, SeqId};
use shared::protocol::{Drafts, SequenceOutput};

use super::plan::{Entry, PlanBuilder};
use super::sequence::Sequence;
use super::speculate::{NgramConfig, NgramDrafter};
use super::speculation::{Method, Speculation, TOKENS_MAX};
use super::{Effect, Scheduler, SchedulerConfig, StopCallback};
use crate::engine::EngineError;

/// Maximum bytes of all sequences' indices together. A sequence whose index does not fit drafts
/// nothing until others are done.
const INDICES_MAX: usize = 256 << 20;

/// Shortest draft worth waiting for, if drafts may be that long. A draft of one token yields two
/// tokens at best in two steps, since its sequence is not planned ahead: no gain.
const WORTH_WAITING: u32 = 2;

/// Progress in verifying one sequence's drafts.
#[derive(Debug, Default)]
pub(super) struct DraftVerification {
    /// The drafted tokens.
    pub(super) drafts: Vec<u32>,
    /// Tokens taken so far, and how many of them were drafted.
    pub(super) emitted: u32,
    accepted: u32,
    /// The sequence's request, and where in the effects its tokens begin.
    pub(super) of: Option<(RequestId, usize)>,
}

/// Stands for a wrong draft, whose token is not known here.
const WRONG: u32 = u32::MAX;

/// Returns what a draft model drafted for a sequence, as far as the answer tells. Right drafts
/// equal the tokens sampled in their places, which are all outputs but the last; of wrong ones only
/// the number is known. `None` if there is no plausible number.
pub(super) fn drafts_of(
    drafted: Option<u32>,
    seq: SeqId,
    outputs: &[SequenceOutput],
) -> Option<Vec<u32>> {
    // No draft is asked to be longer.
    let drafted = drafted.filter(|drafted| *drafted <= TOKENS_MAX)? as usize;
    let own = outputs.iter().take_while(|output| output.seq == seq);
    let mut tokens: Vec<u32> = own.filter_map(|output| output.token).collect();
    tokens.pop();
    tokens.resize(drafted, WRONG);
    Some(tokens)
}

impl DraftVerification {
    /// Counts one more token taken.
    pub(super) fn count_token(&mut self, token: Option<u32>) {
        let drafted = self.drafts.get(self.emitted as usize).copied();
        self.accepted += u32::from(drafted.is_some() && drafted == token);
        self.emitted += 1;
    }

    /// Whether another token may be taken: all drafts before it were right.
    fn may_continue(&self) -> bool {
        self.emitted > 0 && self.accepted == self.emitted
    }

    /// Whether the input token of the next output had been computed before.
    pub(super) fn repeats(&self, entry: &Entry) -> bool {
        entry.start + self.emitted < entry.computed_max
    }
}

/// What a step will leave for drafts, estimated in advance.
#[derive(Clone, Copy)]
struct DraftRoom {
    rows: u32,
    tokens: u32,
    blocks: u32,
}

impl DraftRoom {
    /// Takes the room for a sequence's next draft; returns whether that draft is worth waiting for.
    fn take(&mut self, seq: &Sequence, most: u32, config: &SchedulerConfig) -> bool {
        // The draft follows the tokens in flight.
        let len = seq.len_ahead();
        let own = config.blocks_for(len).max(seq.blocks.len() as u32);
        let places = own.saturating_add(self.blocks).saturating_mul(config.block_size) - len;
        let taken = seq.drafts_most(config.max_model_len).saturating_sub(seq.pending);
        let taken = taken.min(most).min(self.rows).min(self.tokens).min(places);
        if taken < most.min(WORTH_WAITING) {
            return false;
        }
        self.rows -= taken;
        self.tokens -= taken;
        self.blocks -= config.blocks_for(len + taken).saturating_sub(own);
        true
    }
}

impl Sequence {
    /// Maximum length of a draft: the sequence gets one token more than are accepted.
    fn drafts_most(&self, max_model_len: u32) -> u32 {
        let left = self.output_max().saturating_sub(self.num_output());
        left.min(max_model_len.saturating_sub(self.tokens.len() as u32)).saturating_sub(1)
    }

    /// Whether it may draft so many tokens: neither if a guide may constrain them nor at its end.
    fn may_draft(&self, max_model_len: u32, most: u32) -> bool {
        let ahead = self.pending.saturating_add(most);
        let guide = self.guide.as_ref();
        let is_free = guide.is_none_or(|guide| guide.leaves_open(ahead));
        is_free && self.drafts_most(max_model_len) > 0
    }

    /// Length of its next draft; 0 while more than its last token remains to be planned.
    fn draft_length(&self, config: &Speculation) -> u32 {
        let (len, most) = (self.tokens.len() as u32, config.num_speculative_tokens);
        if self.computed + 1 < len {
            return 0;
        }
        match config.method {
            Method::Ngram(_) => {
                let is_ready = |drafter: &NgramDrafter| {
                    drafter.behind(&self.tokens) == 0 && drafter.is_ready()
                };
                if self.drafter.as_deref().is_some_and(is_ready) { most } else { 0 }
            }
            // Not before its first token is being sampled: the draft model's own prefill must not
            // delay it.
            Method::DraftModel if self.len_ahead() > self.num_prompt => self.pace.length(len, most),
            Method::DraftModel => 0,
        }
    }
}

impl Scheduler {
    /// Decides which admitted sequences are about to draft, as far as their tokens are known, most
    /// urgent first. A sequence that drafts must wait for its last token, so only those do whose
    /// drafts will find room.
    pub(super) fn select_drafters(&mut self) {
        let Some(config) = self.config.speculation else { return };
        let max_model_len = self.config.max_model_len;
        let most = config.disable_by_batch_size.unwrap_or(u32::MAX);
        let is_off = self.running.len() > most as usize;
        if let (false, Method::Ngram(lookup)) = (is_off, &config.method) {
            self.enter_tokens(lookup, config.num_speculative_tokens);
        }
        let room = self.room_for_drafts();
        // `now` is this step's room, for sequences whose last token is known; `next` is the next
        // step's, for those that wait for it. So no sequence waits for room that another takes.
        let (mut now, mut next) = (room, room);
        for slot in &self.running {
            let Some(seq) = &mut self.sequences[*slot] else { continue };
            let could = !is_off && seq.may_draft(max_model_len, config.num_speculative_tokens);
            let length = if could { seq.draft_length(&config) } else { 0 };
            let room = if seq.pending == 0 { &mut now } else { &mut next };
            seq.wants_draft = length > 0 && room.take(seq, length, &self.config);
        }
    }

    /// Returns what a step has left once all admitted sequences, and those about to be admitted,
    /// have what they need.
    fn room_for_drafts(&self) -> DraftRoom {
        let running = self.running.len() as u32;
        let mut rows = self.config.max_num_seqs.saturating_sub(running);
        let (mut tokens, mut prompts) = (self.step_tokens, 0_u32);
        for seq in self.running() {
            match seq.num_wanted(self.config.max_model_len) {
                wanted @ 0..=1 => tokens = tokens.saturating_sub(wanted),
                wanted => prompts = prompts.saturating_add(wanted),
            }
        }
        let mut free = self.blocks.num_free();
        for slot in &self.waiting {
            let Some(seq) = &self.sequences[*slot] else { continue };
            let len = seq.tokens.len() as u32;
            let blocks = self.config.blocks_for(len + 1);
            if rows == 0 || blocks > free || self.is_known_to_wait(*slot) {
                break;
            }
            rows -= 1;
            prompts = prompts.saturating_add(len - seq.computed.min(len));
            free -= blocks;
        }
        let tokens = tokens.saturating_sub(prompts.min(self.prompt_tokens_max()));
        DraftRoom { rows, tokens, blocks: self.blocks_for_drafts() }
    }

    /// Number of blocks that drafts may take: what each admitted sequence needs next is left, with
    /// the rest of a prompt under way, and none is taken while a sequence waits. Blocks of wrong
    /// drafts stay with their sequence, which will need them.
    fn blocks_for_drafts(&self) -> u32 {
        if !self.waiting.is_empty() {
            return 0;
        }
        let kept = u32::try_from(self.lacking()).unwrap_or(u32::MAX);
        self.blocks.num_free().saturating_sub(kept)
    }

    /// Enters new tokens into the indices, up to a bound for all of them: first the tokens of the
    /// last answers, so that drafting sequences go on, then the backlog of the most urgent.
    fn enter_tokens(&mut self, config: &NgramConfig, draft_max: u32) {
        let max_model_len = self.config.max_model_len;
        let mut budget = config.entered_max(self.config.max_num_seqs);
        let drafters = self.running().filter_map(|seq| seq.drafter.as_deref());
        let mut bytes: usize = drafters.map(NgramDrafter::bytes).sum();
        for are_last in [true, false] {
            for slot in &self.running {
                let Some(seq) = &mut self.sequences[*slot] else { continue };
                if budget == 0 {
                    return;
                }
                if !seq.may_draft(max_model_len, draft_max) {
                    continue;
                }
                let behind = seq.drafter.as_ref().map(|drafter| drafter.behind(&seq.tokens));
                let is_last = behind.is_some_and(|count| count <= draft_max as usize + 1);
                if is_last != are_last {
                    continue;
                }
                let room = seq.num_prompt.saturating_add(seq.output_max()).min(max_model_len);
                if behind.is_none() {
                    let more = NgramDrafter::bytes_of(config, room as usize);
                    if bytes.saturating_add(more) > INDICES_MAX {
                        continue;
                    }
                    bytes += more;
                    seq.drafter = Some(Box::new(NgramDrafter::new(config, room as usize)));
                }
                let Some(drafter) = &mut seq.drafter else { continue };
                drafter.enter(&seq.tokens, seq.num_prompt as usize, &mut budget);
            }
        }
    }

    /// Adds drafts to an otherwise complete plan, from the budget, rows and blocks that it leaves.
    /// Each draft is a decode row of its own. A step's sequences and drafts are at most
    /// `max_num_seqs` together, sampled or not: that is what ranks have room for.
    pub(super) fn plan_drafts(&mut self, builder: &mut PlanBuilder<'_>) {
        let PlanBuilder { plan, step, budget, .. } = builder;
        let Some(config) = &self.config.speculation else { return };
        let size = self.config.block_size;
        let shares = step.entries.len() as u32;
        let mut left = (*budget).min(self.config.max_num_seqs.saturating_sub(shares));
        let mut spare = self.blocks_for_drafts();
        for (entry, planned) in step.entries.iter_mut().zip(&mut plan.sequences) {
            let Some(seq) = &mut self.sequences[entry.slot] else { continue };
            let len = seq.tokens.len() as u32;
            // Drafts only follow a last token that is known and is all that the share computes.
            if !seq.wants_draft || planned.count != 1 || planned.start + 1 != len {
                continue;
            }
            let blocks = (seq.blocks.len() as u32).saturating_add(spare);
            let room = blocks.saturating_mul(size).saturating_sub(len);
            let most = seq.drafts_most(self.config.max_model_len);
            let most = most.min(seq.draft_length(config)).min(left).min(room);
            match config.method {
                Method::Ngram(_) => {
                    let Some(drafter) = &seq.drafter else { continue };
                    let mut tokens = Vec::new();
                    drafter.draft(&seq.tokens, most as usize, &mut tokens);
                    seq.drafts = Drafts::Known(tokens);
                }
                Method::DraftModel if most > 0 => seq.drafts = Drafts::UpTo(most),
                Method::DraftModel => continue,
            }
            let drafted = seq.drafts.len() as u32;
            entry.verifies = drafted > 0;
            entry.asks = seq.drafts.asked().is_some();
            while (seq.blocks.len() as u32) < self.config.blocks_for(len + drafted) {
                let Some(block) = self.blocks.take(|lost| self.states.forget(lost)) else { break };
                spare = spare.saturating_sub(1);
                seq.blocks.push(block);
                planned.new_blocks.push(block);
            }
            seq.blocks_sent = seq.blocks.len() as u32;
            planned.count += drafted;
            planned.drafts.clone_from(&seq.drafts);
            left -= drafted;
        }
    }

    /// Returns the sequence of a step's entry, if it is still the one that was planned.
    pub(super) fn current(&mut self, entry: &Entry) -> Option<&mut Sequence> {
        let seq = self.sequences[entry.slot].as_mut();
        seq.filter(|seq| entry.is_of(seq))
    }

    /// Takes a token that was sampled after a draft; returns whether it was accepted. After a wrong
    /// or missing draft no token can have been computed.
    pub(super) fn accept_next(
        &mut self,
        entry: &Entry,
        output: SequenceOutput,
        verification: &DraftVerification,
        stopped: StopCallback<'_>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(seq) = self.current(entry) else { return false };
        if !verification.may_continue() || output.token.is_none() {
            let request = seq.request;
            self.end_request(request, Some(EngineError::Corrupted), effects);
            return false;
        }
        // The draft before it was right, so its K and V stay.
        seq.computed += 1;
        seq.computed_max = seq.computed_max.max(seq.computed);
        self.accept(entry.slot, Some(output), true, stopped, effects)
    }

    /// Records how the drafts turned out, once an entry's whole answer is taken.
    pub(super) fn verified(
        &mut self,
        entry: &Entry,
        verification: DraftVerification,
        effects: &mut Vec<Effect>,
    ) {
        let DraftVerification { drafts, emitted, accepted, of } = verification;
        let tokens = drafts.len() as u32;
        if let Some((request, at)) = of
            && tokens > 0
        {
            // Before the end of the request, which may be among its tokens.
            let at = at.min(effects.len());
            effects.insert(at, Effect::Drafted { request, tokens, accepted, emitted });
        }
        let most = self.config.speculation.map_or(0, |config| config.num_speculative_tokens);
        if let Some(seq) = self.current(entry).filter(|_| entry.asks) {
            seq.pace.verified((tokens, accepted), most, seq.tokens.len() as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::{Epoch, RequestId};
    use shared::protocol::StepPlan;
    use shared::sampling::SamplingParams;

    use super::*;
    use crate::engine::GenerateRequest;

    fn lookup(lengths: u32) -> NgramConfig {
        NgramConfig { prompt_lookup_max: 1 + lengths, prompt_lookup_min: 2 }
    }

    fn scheduler(max_num_seqs: u32, lengths: u32) -> Scheduler {
        let speculation = Speculation {
            num_speculative_tokens: 4,
            method: Method::Ngram(lookup(lengths)),
            disable_by_batch_size: None,
        };
        let config = SchedulerConfig {
            prefix_states: None,
            hidden_size: 64,
            vocab_size: u32::MAX,
            block_size: 16,
            max_model_len: 1 << 17,
            max_num_seqs,
            max_num_batched_tokens: 1 << 17,
            max_mixed_prefill_tokens: None,
            max_queued_requests: 100,
            max_steps_in_flight: 2,
            prefix_caching: false,
            speculation: Some(speculation),
        };
        let mut scheduler = Scheduler::new(config).unwrap();
        scheduler.replica_ready(Epoch(1), 1 << 17, 0, &mut Vec::new());
        scheduler
    }

    fn submit(scheduler: &mut Scheduler, id: u64, prompt: u32, max_tokens: u32) {
        let request = GenerateRequest::new(
            RequestId(id),
            (0..prompt).map(|at| at % 5).collect(),
            vec![SamplingParams::greedy()],
            max_tokens,
        );
        scheduler.submit(request).unwrap();
    }

    /// Number of tokens in each admitted sequence's index, most urgent first.
    fn entered(scheduler: &Scheduler) -> Vec<usize> {
        let entered = |seq: &Sequence| {
            let drafter = seq.drafter.as_ref();
            drafter.map_or(0, |drafter| seq.tokens.len() - drafter.behind(&seq.tokens))
        };
        scheduler.running().map(entered).collect()
    }

    #[test]
    fn all_indices_share_what_one_plan_enters() {
        let mut scheduler = scheduler(64, 4);
        for id in 0..64 {
            submit(&mut scheduler, id, 1000, 30);
        }
        assert!(scheduler.plan(&mut StepPlan::default(), &mut Vec::new()));
        for plan in 1..4 {
            scheduler.select_drafters();
            let entered = entered(&scheduler);
            assert_eq!(entered.len(), 64);
            assert_eq!(entered.iter().sum::<usize>(), 512 * plan, "{entered:?}");
            assert!(entered.is_sorted_by(|before, after| before >= after), "{entered:?}");
        }
        // A sequence that lacks only its last token goes before more urgent ones.
        let slot = scheduler.running[63];
        let seq = scheduler.sequences[slot].as_mut().unwrap();
        let mut drafter = Box::new(NgramDrafter::new(&lookup(4), 1030));
        drafter.enter(&seq.tokens, 1000, &mut 1000);
        seq.drafter = Some(drafter);
        seq.tokens.push(0);
        scheduler.select_drafters();
        let entered = entered(&scheduler);
        assert_eq!((entered[63], entered[..63].iter().sum()), (1001, 512 * 4 - 1));
    }

    #[test]
    fn who_finds_no_room_for_an_index_drafts_when_others_are_done() {
        let mut scheduler = scheduler(32, 15);
        for id in 0..20 {
            submit(&mut scheduler, id, 10, 100_000);
        }
        assert!(scheduler.plan(&mut StepPlan::default(), &mut Vec::new()));
        for _ in 0..5 {
            scheduler.select_drafters();
        }
        // 15 MiB each (15 lengths of 2^18 places of 4 bytes), of 256 MiB.
        let mut expected = [[10; 17].as_slice(), &[0; 3]].concat();
        assert_eq!(entered(&scheduler), expected);
        scheduler.cancel(RequestId(4), &mut Vec::new());
        scheduler.select_drafters();
        expected.pop();
        assert_eq!(entered(&scheduler), expected);
    }
}

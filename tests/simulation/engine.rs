//! One rank's engine: applies plans exactly as the protocol says and refuses any other.
//!
//! Its KV cache holds the model's state at each place, so a read detects a block that two sequences
//! wrongly share, or that was not written in this epoch.
use std::collections::BTreeMap;

use shared::ids::SeqId;
use shared::protocol::{
    EngineConfig, SequenceOutput, SequenceStep, StepPlan, SwapPair, TokenDigest, TokenMask,
};
use shared::sampling::{Pooling, SamplingParams};

use crate::adapters::{HeldAdapters, contents_held};
use crate::model::{POISON, VOCABULARY, before, choose, embedding, extend};
use crate::switches::Switches;

/// Same as in the real engine: sequences held per sequence that a step can run.
const HELD_PER_RUNNING: usize = 4;

#[derive(Debug)]
struct Known {
    tokens: Vec<u32>,
    sampling: SamplingParams,
    adapter: u32,
    /// What that adapter contains.
    contents: u64,
    blocks: Vec<u32>,
    /// The state after each computed token, as this sequence wrote it.
    states: Vec<u64>,
    /// Its blocks in host memory, while they are there.
    host: Option<Vec<u32>>,
    /// Number of places that it has written to, including those of rejected drafts.
    written: usize,
    /// The kept state of linear attention that it begins with.
    begins_with: Option<u64>,
}

/// Inputs to the choice of a sequence's next token, besides the model.
#[derive(Debug)]
pub(crate) struct Chooser {
    pub(crate) last: u32,
    pub(crate) seed: u64,
    pub(crate) choice: u32,
    pub(crate) allowed: Option<TokenMask>,
}

#[derive(Debug, Default)]
pub(crate) struct RankEngine {
    config: Option<EngineConfig>,
    cache: Vec<u64>,
    num_blocks: u32,
    /// Like `cache`, in host memory.
    host: Vec<u64>,
    /// The model's state that each place for kept ones holds, if any.
    kept: Vec<Option<u64>>,
    known: BTreeMap<SeqId, Known>,
    last_step: u64,
    /// Whether it has learned tokens other than those sampled.
    pub(crate) has_other_tokens: bool,
    /// Drafts for each sequence that asked for some in the current step.
    drafted: BTreeMap<SeqId, Vec<u32>>,
    /// Guards that are taken away; see [`crate::switches`].
    pub(crate) believes_drafts: bool,
    pub(crate) keeps_rejected: bool,
    pub(crate) drafts_alone: bool,
}

/// An entry's drafts: those it brings, or those drafted for it.
fn drafts_of<'a>(drafted: &'a BTreeMap<SeqId, Vec<u32>>, entry: &'a SequenceStep) -> &'a [u32] {
    match entry.drafts.asked() {
        Some(_) => drafted.get(&entry.seq).map_or(&[], Vec::as_slice),
        None => entry.drafts.known(),
    }
}

impl RankEngine {
    pub(crate) fn start(&mut self, config: EngineConfig, num_blocks: u32, host_blocks: u32) {
        self.release();
        self.host = vec![0; (host_blocks * config.block_size) as usize];
        self.cache = vec![0; (num_blocks * config.block_size) as usize];
        self.kept = vec![None; config.prefix_states as usize];
        self.config = Some(config);
        self.num_blocks = num_blocks;
    }

    /// Whether there is a cache of this size already.
    pub(crate) fn fits(&self, num_blocks: u32) -> bool {
        self.config.is_some() && self.num_blocks == num_blocks
    }

    /// Drops the cache and all sequences.
    pub(crate) fn release(&mut self) {
        *self = Self::default();
    }

    /// Computes a plan with these adapters: one share of the logits for each sampled row, in
    /// order.
    pub(crate) fn run(
        &mut self,
        plan: &StepPlan,
        adapters: &HeldAdapters,
        switches: &Switches,
    ) -> Result<Vec<u64>, String> {
        let Some(config) = self.config.clone() else { return Err("no KV cache".to_owned()) };
        if plan.step.0 != self.last_step + 1 {
            return Err(format!("{} after step-{}", plan.step, self.last_step));
        }
        self.last_step = plan.step.0;
        let before = switches.swap_out_comes_late.then(|| plan.swap_out.clone());
        self.forget(plan);
        self.swap(plan, config.block_size as usize, switches)?;
        self.admit(plan, adapters, &config)?;
        self.begin_with_kept(plan)?;
        if switches.states_are_kept_early {
            self.keep_states(plan)?;
        }
        if switches.adapters_are_mixed_up
            && let Some(last) = plan.admitted.last()
        {
            let (adapter, contents) = (last.adapter, contents_held(adapters, last.adapter)?);
            let one_adapter =
                |known: &mut Known| (known.adapter, known.contents) = (adapter, contents);
            self.known.values_mut().filter(|known| known.states.is_empty()).for_each(one_adapter);
        }
        self.draft(plan)?;
        let tokens: u32 = plan.sequences.iter().map(|entry| entry.count).sum();
        let rows: usize = plan.sequences.iter().map(|entry| 1 + entry.drafts.len()).sum();
        if tokens > config.max_num_batched_tokens || rows > config.max_num_seqs as usize {
            return Err(format!("{tokens} tokens of {} sequences", plan.sequences.len()));
        }
        let mut shares = Vec::new();
        let mut seen = Vec::new();
        for entry in &plan.sequences {
            if seen.contains(&entry.seq) {
                return Err(format!("{} occurs twice", entry.seq));
            }
            seen.push(entry.seq);
            if let Some(known) = self.known.get(&entry.seq) {
                contents_held(adapters, known.adapter)
                    .map_err(|why| format!("{}: {why}", entry.seq))?;
            }
            self.compute(entry, &config).map_err(|why| format!("{}: {why}", entry.seq))?;
            if entry.sample
                && let Some(known) = self.known.get(&entry.seq)
            {
                let drafts = drafts_of(&self.drafted, entry).len();
                shares.extend(&known.states[known.states.len() - drafts - 1..]);
            }
        }
        if !switches.states_are_kept_early {
            self.keep_states(plan)?;
        }
        for pair in before.iter().flatten().flat_map(|swap| &swap.blocks) {
            self.copy_out(*pair, config.block_size as usize);
        }
        Ok(shares)
    }

    /// Drafts as rank 0's draft model would, and shares the result: mostly the right tokens,
    /// sometimes others, sometimes fewer than allowed.
    fn draft(&mut self, plan: &StepPlan) -> Result<(), String> {
        self.drafted.clear();
        for entry in &plan.sequences {
            let Some(most) = entry.drafts.asked() else { continue };
            let known = self.known.get(&entry.seq);
            let known = known.ok_or_else(|| format!("{} is not known, and drafts", entry.seq))?;
            let begun = before(known.contents);
            let mut state = known.tokens.iter().fold(begun, |state, token| extend(state, *token));
            let mut last = known.tokens.last().copied().unwrap_or_default();
            let drawn = state >> 13;
            let count =
                if drawn.is_multiple_of(5) { drawn / 5 % u64::from(most) } else { most.into() };
            let SamplingParams { seed, choice, .. } = known.sampling;
            let drafts = (0..count).map(|at| {
                let right = choose(state, last, (seed, choice), None);
                let errs = (drawn >> (at % 24)).is_multiple_of(6) || self.drafts_alone;
                last = if errs { (right + 1) % VOCABULARY } else { right };
                state = extend(state, last);
                last
            });
            let drafts = drafts.collect();
            self.drafted.insert(entry.seq, drafts);
        }
        Ok(())
    }

    /// Returns how many tokens were drafted for each sequence that asked, in the plan's order.
    pub(crate) fn told(&self, plan: &StepPlan) -> Vec<u32> {
        let asked = plan.sequences.iter().filter(|entry| entry.drafts.asked().is_some());
        asked.map(|entry| drafts_of(&self.drafted, entry).len() as u32).collect()
    }

    fn forget(&mut self, plan: &StepPlan) {
        for seq in &plan.finished {
            self.known.remove(seq);
        }
    }

    /// Copies the plan's blocks, out before in.
    fn swap(&mut self, plan: &StepPlan, size: usize, switches: &Switches) -> Result<(), String> {
        for swap in &plan.swap_out {
            let why = |what: &str| format!("{}: {what}", swap.seq);
            let known = self.known.get_mut(&swap.seq).ok_or_else(|| why("is not known"))?;
            if known.host.is_some() {
                return Err(why("is swapped out twice"));
            }
            if !known.blocks.drain(..).eq(swap.blocks.iter().map(|pair| pair.device.0)) {
                return Err(why("does not leave with its own table"));
            }
            known.host = Some(swap.blocks.iter().map(|pair| pair.host.0).collect());
            for pair in &swap.blocks {
                let taken = |known: &&Known| {
                    known.host.as_ref().is_some_and(|host| host.contains(&pair.host.0))
                };
                if pair.host.0 as usize >= self.host.len() / size
                    || self.known.values().filter(taken).count() > 1
                {
                    return Err(why("is given a block of host memory that is another's"));
                }
                if !switches.swap_out_comes_late {
                    self.copy_out(*pair, size);
                }
            }
        }
        for swap in &plan.swap_in {
            let why = |what: &str| format!("{}: {what}", swap.seq);
            let known = self.known.get_mut(&swap.seq).ok_or_else(|| why("is not known"))?;
            let held = known.host.take().ok_or_else(|| why("is swapped in, and was not out"))?;
            if !held.ends_with(&swap.blocks.iter().map(|pair| pair.host.0).collect::<Vec<_>>()) {
                return Err(why("does not come back from where it is"));
            }
            for (index, pair) in swap.blocks.iter().enumerate() {
                let other =
                    (index + usize::from(switches.swap_pairs_are_mixed_up)) % swap.blocks.len();
                let from = swap.blocks[other].host.0 as usize * size;
                if !switches.swap_in_is_skipped {
                    let to = pair.device.0 as usize * size;
                    self.cache[to..to + size].copy_from_slice(&self.host[from..from + size]);
                }
            }
        }
        Ok(())
    }

    fn copy_out(&mut self, pair: SwapPair, size: usize) {
        let (from, to) = (pair.device.0 as usize * size, pair.host.0 as usize * size);
        self.host[to..to + size].copy_from_slice(&self.cache[from..from + size]);
    }

    fn admit(
        &mut self,
        plan: &StepPlan,
        adapters: &HeldAdapters,
        config: &EngineConfig,
    ) -> Result<(), String> {
        for new in &plan.admitted {
            if new.tokens.is_empty() || new.tokens.len() > config.max_model_len as usize {
                return Err(format!("{} has {} tokens", new.seq, new.tokens.len()));
            }
            let contents = contents_held(adapters, new.adapter);
            let contents = contents.map_err(|why| format!("{}: {why}", new.seq))?;
            let known = Known {
                tokens: new.tokens.clone(),
                sampling: new.sampling.clone(),
                adapter: new.adapter,
                contents,
                blocks: Vec::new(),
                states: Vec::new(),
                host: None,
                written: 0,
                begins_with: None,
            };
            if self.known.insert(new.seq, known).is_some() {
                return Err(format!("{} is admitted twice", new.seq));
            }
        }
        let on_host = self.host.len() / config.block_size as usize;
        if self.known.len() > config.max_num_seqs as usize * HELD_PER_RUNNING + on_host {
            return Err(format!("{} sequences are held", self.known.len()));
        }
        Ok(())
    }

    /// Gives new sequences their kept states.
    fn begin_with_kept(&mut self, plan: &StepPlan) -> Result<(), String> {
        for kept in &plan.begin_with {
            let why = |what: &str| format!("{}: begins with {}: {what}", kept.seq, kept.place);
            let place = self.kept.get(kept.place.0 as usize).ok_or_else(|| why("no such place"))?;
            let is_new = plan.admitted.iter().any(|new| new.seq == kept.seq);
            let known = self.known.get_mut(&kept.seq).filter(|_| is_new);
            let known = known.ok_or_else(|| why("it is not new"))?;
            if !plan.sequences.iter().any(|entry| entry.seq == kept.seq) {
                return Err(why("it is not computed"));
            }
            known.begins_with = Some(place.ok_or_else(|| why("nothing is kept there"))?);
        }
        Ok(())
    }

    /// Keeps states of the step's sequences.
    fn keep_states(&mut self, plan: &StepPlan) -> Result<(), String> {
        for kept in &plan.keep {
            let why = |what: &str| format!("{}: kept in {}: {what}", kept.seq, kept.place);
            let known = self.known.get(&kept.seq).ok_or_else(|| why("it is not known"))?;
            let place = self.kept.get_mut(kept.place.0 as usize);
            *place.ok_or_else(|| why("no such place"))? = known.states.last().copied();
        }
        Ok(())
    }

    fn compute(&mut self, entry: &SequenceStep, config: &EngineConfig) -> Result<(), String> {
        let known = self.known.get_mut(&entry.seq).ok_or("is not known")?;
        let drafts = drafts_of(&self.drafted, entry);
        let mut count = entry.count;
        if !entry.drafts.is_empty() {
            let (drafts, start) = (entry.drafts.len(), entry.start);
            let is_last = start as usize + 1 == known.tokens.len();
            if count as usize != drafts + 1 || !entry.sample || entry.masked || !is_last {
                return Err(format!("{drafts} drafts in {count} tokens from {start}"));
            }
        }
        if entry.drafts.asked().is_some() {
            count = 1 + drafts.len() as u32;
        }
        known.tokens.extend(drafts);
        let (start, end) = (entry.start as usize, (entry.start + count) as usize);
        if known.host.is_some() {
            return Err("is in host memory".to_owned());
        }
        // The first share may begin after what the cache already holds.
        let size = config.block_size as usize;
        if known.states.is_empty() && start > 0 && start < known.tokens.len() {
            if known.sampling.pooling.is_some_and(Pooling::needs_all) {
                return Err(format!("begins at {start}, and needs all its tokens"));
            }
            let prefix = entry.new_blocks.get(..start / size).unwrap_or_default();
            if start % size != 0 || prefix.len() * size != start {
                return Err(format!("begins at {start} with {} blocks", entry.new_blocks.len()));
            }
            let mut state = before(known.contents);
            for (at, token) in known.tokens[..start].iter().enumerate() {
                state = extend(state, *token);
                let held = self.cache.get(prefix[at / size].0 as usize * size + at % size);
                if held != Some(&state) {
                    return Err(format!("begins behind {start} tokens that are not in the cache"));
                }
                known.states.push(state);
            }
            let begun = known.begins_with.take();
            if config.prefix_states > 0 && begun != Some(state) {
                return Err(format!("begins at {start} with another state: {begun:?}"));
            }
        }
        if known.begins_with.is_some() {
            return Err(format!("begins at {start}, and with a state"));
        }
        if start != known.states.len() || entry.count == 0 || end > known.tokens.len() {
            let (computed, len) = (known.states.len(), known.tokens.len());
            return Err(format!("{start}..{end} after {computed} of {len}"));
        }
        if entry.sample && end != known.tokens.len() {
            return Err(format!("samples at {end} of {}", known.tokens.len()));
        }
        for block in &entry.new_blocks {
            if block.0 >= self.num_blocks || known.blocks.contains(&block.0) {
                return Err(format!("is given {block}"));
            }
            known.blocks.push(block.0);
        }
        if known.blocks.len() * size < end {
            return Err(format!("has {} blocks for {end} tokens", known.blocks.len()));
        }
        let place = |at: usize| known.blocks[at / size] as usize * size + at % size;
        // Attention reads every block: its last place shows whether it is still this sequence's.
        let ends_of_blocks = (size - 1..start).step_by(size).chain(start.checked_sub(1));
        for at in ends_of_blocks {
            if self.cache[place(at)] != known.states[at] {
                return Err(format!("reads position {at}, which is not its own any more"));
            }
        }
        let mut state = known.states.last().copied().unwrap_or(before(known.contents));
        for at in start..end {
            state = extend(state, known.tokens[at]);
            if at >= known.written || !self.keeps_rejected {
                self.cache[place(at)] = state;
            }
            known.states.push(state);
        }
        known.written = known.written.max(end);
        Ok(())
    }

    /// Whether a step of this plan computes the token that ends the process.
    pub(crate) fn is_poisoned(&self, plan: &StepPlan) -> bool {
        let tokens = |entry: &SequenceStep| {
            let admitted = plan.admitted.iter().find(|new| new.seq == entry.seq);
            let known = || self.known.get(&entry.seq).map(|known| &known.tokens);
            let tokens = admitted.map(|new| &new.tokens).or_else(known)?;
            tokens.get(entry.start as usize..)?.get(..entry.count as usize)
        };
        plan.sequences.iter().any(|entry| tokens(entry).is_some_and(|it| it.contains(&POISON)))
    }

    /// Returns how the sampled rows choose, in order, once they are computed; `masks` are those of
    /// the masked rows, as far as known.
    pub(crate) fn choosers(&self, plan: &StepPlan, masks: &[Option<TokenMask>]) -> Vec<Chooser> {
        let mut masks = masks.iter();
        let sampled = plan.sequences.iter().filter(|entry| entry.sample);
        sampled
            .filter_map(|entry| Some((entry, self.known.get(&entry.seq)?)))
            .flat_map(|(entry, known)| {
                let SamplingParams { seed, choice, .. } = known.sampling;
                let drafts = drafts_of(&self.drafted, entry).len();
                let rows = &known.tokens[known.states.len() - drafts - 1..];
                let mask = if entry.masked { masks.next() } else { None };
                let allowed = mask.and_then(Option::as_ref);
                rows.iter().map(move |last| Chooser {
                    last: *last,
                    seed,
                    choice,
                    allowed: allowed.cloned(),
                })
            })
            .collect()
    }

    /// Learns tokens, which should be those that were sampled. Returns rank 0's outputs, and the
    /// digest of what was learned.
    pub(crate) fn sampled(
        &mut self,
        plan: &StepPlan,
        tokens: &[u32],
        learned: &[u32],
    ) -> (Vec<SequenceOutput>, u32) {
        let mut outputs = Vec::new();
        let mut digest = TokenDigest::of(plan.step);
        self.has_other_tokens |= tokens != learned;
        let (mut tokens, mut learned) = (tokens, learned);
        for entry in &plan.sequences {
            outputs.extend(self.embedded(entry));
            if !entry.sample {
                continue;
            }
            let drafts = drafts_of(&self.drafted, entry);
            let rows = 1 + drafts.len();
            let (all, mine);
            (all, tokens) = tokens.split_at(rows.min(tokens.len()));
            (mine, learned) = learned.split_at(rows.min(learned.len()));
            // Of the tokens sampled after drafts, those count that agree with the drafts, and one
            // more.
            let counting = |of: &[u32]| {
                let agrees = of.iter().zip(drafts).take_while(|(it, draft)| it == draft);
                if self.believes_drafts { rows } else { agrees.count() + 1 }
            };
            let (told, mine) = (&all[..counting(all)], &mine[..counting(mine)]);
            let first = entry.start + entry.count - entry.drafts.len() as u32;
            if let Some(known) = self.known.get_mut(&entry.seq) {
                known.tokens.truncate(first as usize);
                known.states.truncate(first as usize - 1 + mine.len());
                for learned in mine {
                    digest = digest.with(entry.seq, known.tokens.len() as u32, *learned);
                    known.tokens.push(*learned);
                }
            }
            outputs.extend((first..).zip(told).map(|(position, token)| SequenceOutput {
                seq: entry.seq,
                position,
                token: Some(*token),
                logprobs: None,
                prompt_logprobs: Vec::new(),
                prompt_start: 0,
                corrupted: false,
                embedding: Vec::new(),
            }));
        }
        (outputs, digest.value())
    }

    /// The output of a prompt whose embedding is complete with this share.
    fn embedded(&self, entry: &SequenceStep) -> Option<SequenceOutput> {
        let known = self.known.get(&entry.seq)?;
        known.sampling.pooling?;
        let end = entry.start + entry.count;
        let state = known.states.last().filter(|_| end as usize == known.tokens.len())?;
        Some(SequenceOutput {
            seq: entry.seq,
            position: end,
            token: None,
            logprobs: None,
            prompt_logprobs: Vec::new(),
            prompt_start: 0,
            corrupted: false,
            embedding: embedding(*state),
        })
    }
}

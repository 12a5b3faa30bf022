//! A worker that applies plans exactly as the protocol says, and refuses any other.
use std::collections::{BTreeMap, BTreeSet};

use coordinator::scheduler::{Method, SchedulerConfig};
use shared::ids::SeqId;
use shared::protocol::{SequenceOutput, SequenceStep, StepPlan, TokenLogprobs, TokenMask};
use shared::sampling::SamplingParams;
use shared::wire::frame::BODY_MAX;

use crate::guided::VOCABULARY;

/// Returns the token that follows `tokens`: it depends on seed, choice and all previous tokens, and
/// is one of those allowed.
#[expect(clippy::manual_rotate, reason = "a call for each token in a test's build")]
pub(crate) fn next_token(
    sampling: &SamplingParams,
    tokens: &[u32],
    allowed: Option<&TokenMask>,
) -> u32 {
    let mut hash = sampling.seed ^ (u64::from(sampling.choice) << 40) ^ tokens.len() as u64;
    // Texts of 30,000 tokens are hashed for each token. Iterators would be calls, too.
    let mut at = 0;
    while at < tokens.len() {
        hash = (hash ^ u64::from(tokens[at])).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = hash << 23 | hash >> 41;
        at += 1;
    }
    // Every third text repeats itself, with an occasional interruption.
    if sampling.seed.is_multiple_of(3) && !(hash >> 11).is_multiple_of(16) {
        let next = tokens.last().map_or(0, |last| (last + 1) % 5);
        if allowed.is_none_or(|mask| mask.allows(next)) {
            return next;
        }
    }
    let all = 0..VOCABULARY;
    let allowed: Vec<u32> =
        all.filter(|token| allowed.is_none_or(|mask| mask.allows(*token))).collect();
    allowed[(hash >> 33) as usize % allowed.len()]
}

/// Returns the adapter of a request with this seed: half of the large seeds have one of two.
pub(crate) fn adapter_of(seed: u64) -> u32 {
    if seed >> 20 & 1 == 1 { 1 + (seed >> 21 & 1) as u32 } else { 0 }
}

#[derive(Debug)]
struct Known {
    tokens: Vec<u32>,
    adapter: u32,
    num_prompt: u32,
    sampling: SamplingParams,
    blocks: Vec<u32>,
    computed: u32,
    /// Its blocks in host memory while it is swapped out.
    host: Option<Vec<u32>>,
    /// The kept state that it begins with.
    begins_with: Option<u64>,
}

/// The state of a replica's ranks.
#[derive(Debug)]
pub(crate) struct FakeWorker {
    config: SchedulerConfig,
    num_blocks: u32,
    known: BTreeMap<SeqId, Known>,
    /// What each place of the KV cache holds: a hash of the token there and all before it.
    cache: Vec<u64>,
    /// Like `cache`, in host memory; and which of its blocks are in use.
    host: Vec<u64>,
    host_held: Vec<bool>,
    /// What each kept state has seen: a hash as in `cache`.
    kept: Vec<u64>,
    last_step: u64,
    /// Numbers of blocks copied out and in.
    pub(crate) swapped: (u32, u32),
    /// What its draft model knows.
    pub(crate) skill: Skill,
    /// Number of tokens drafted for each share of the last plan that asked for some.
    pub(crate) drafted: Vec<u32>,
}

/// How well a draft model predicts tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Skill {
    /// Mostly right; sometimes it drafts fewer tokens than it may, or none.
    #[default]
    Some,
    /// Always right.
    All,
    /// Never right.
    Nothing,
    /// It never catches up.
    Behind,
}

impl Skill {
    /// Returns its drafts for a sequence with these tokens.
    fn drafts(self, sampling: &SamplingParams, tokens: &[u32], most: u32) -> Vec<u32> {
        let mut text = tokens.to_vec();
        let hash = tokens.iter().fold(sampling.seed, |hash, token| extend(hash, *token)) >> 20;
        let count = match self {
            Self::Some if hash.is_multiple_of(7) => most * (hash / 7 % 3) as u32 / 3,
            Self::Behind => 0,
            Self::Some | Self::All | Self::Nothing => most,
        };
        for at in 0..count {
            let right = next_token(sampling, &text, None);
            let errs = match self {
                Self::Some => (hash >> (at % 16)).is_multiple_of(5),
                Self::Nothing => true,
                Self::All | Self::Behind => false,
            };
            text.push(if errs { (right + 1) % VOCABULARY } else { right });
        }
        text.split_off(tokens.len())
    }
}

/// Returns what the cache holds after `before` and one more token.
fn extend(before: u64, token: u32) -> u64 {
    (before ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) | 1
}

/// Returns what a state holds that has seen these tokens.
fn seen(adapter: u32, tokens: &[u32]) -> u64 {
    tokens.iter().fold(u64::from(adapter), |holds, token| extend(holds, *token))
}

impl FakeWorker {
    pub(crate) fn new(config: SchedulerConfig, num_blocks: u32, host_blocks: u32) -> Self {
        let cache = vec![0; (num_blocks * config.block_size) as usize];
        let host = vec![0; (host_blocks * config.block_size) as usize];
        let host_held = vec![false; host_blocks as usize];
        let known = BTreeMap::new();
        let kept = vec![0; config.prefix_states.unwrap_or(0) as usize];
        Self {
            config,
            num_blocks,
            known,
            cache,
            host,
            host_held,
            kept,
            last_step: 0,
            swapped: (0, 0),
            skill: Skill::default(),
            drafted: Vec::new(),
        }
    }

    /// Copies the plan's blocks, out before in.
    fn swap(&mut self, plan: &StepPlan) {
        let size = self.config.block_size as usize;
        let place = |block: u32| block as usize * size..(block as usize + 1) * size;
        for swap in &plan.swap_out {
            let known = self.known.get_mut(&swap.seq).expect("a swapped sequence is known");
            assert!(known.host.is_none(), "{} is swapped out twice", swap.seq);
            assert!(!swap.blocks.is_empty(), "{} has nothing to be swapped", swap.seq);
            let table: Vec<u32> = swap.blocks.iter().map(|pair| pair.device.0).collect();
            assert_eq!(table, known.blocks, "{} goes with its whole table", swap.seq);
            for pair in &swap.blocks {
                let held = &mut self.host_held[pair.host.0 as usize];
                assert!(!std::mem::replace(held, true), "{} belongs to another", pair.host);
                let content = self.cache[place(pair.device.0)].to_vec();
                self.host[place(pair.host.0)].copy_from_slice(&content);
            }
            self.swapped.0 += swap.blocks.len() as u32;
            known.host = Some(swap.blocks.iter().map(|pair| pair.host.0).collect());
            known.blocks.clear();
        }
        for swap in &plan.swap_in {
            let known = self.known.get_mut(&swap.seq).expect("a swapped sequence is known");
            let held = known.host.take().expect("it was swapped out");
            let entry = plan.sequences.iter().find(|entry| entry.seq == swap.seq);
            let table = &entry.expect("it is run").new_blocks;
            let found = held.len() - swap.blocks.len();
            assert!(found == 0 || self.config.prefix_caching);
            for (at, pair) in (found..).zip(&swap.blocks) {
                assert_eq!((pair.host.0, pair.device), (held[at], table[at]), "{}", swap.seq);
                let content = self.host[place(pair.host.0)].to_vec();
                self.cache[place(pair.device.0)].copy_from_slice(&content);
            }
            self.swapped.1 += swap.blocks.len() as u32;
            held.iter().for_each(|block| self.host_held[*block as usize] = false);
        }
    }

    /// Runs a plan, with these masks for its masked sequences; panics if it cannot be run
    /// (`plan_is_runnable`).
    pub(crate) fn run(
        &mut self,
        plan: &StepPlan,
        masks: &[Option<TokenMask>],
    ) -> Vec<SequenceOutput> {
        let mut masks = masks.iter();
        assert_eq!(plan.step.0, self.last_step + 1, "steps_are_consecutive");
        self.last_step = plan.step.0;
        for seq in &plan.finished {
            let host = self.known.remove(seq).and_then(|known| known.host);
            host.iter().flatten().for_each(|block| self.host_held[*block as usize] = false);
        }
        self.swap(plan);
        for new in &plan.admitted {
            let known = Known {
                tokens: new.tokens.clone(),
                adapter: new.adapter,
                num_prompt: new.num_prompt,
                sampling: new.sampling.clone(),
                blocks: Vec::new(),
                computed: 0,
                host: None,
                begins_with: None,
            };
            assert_eq!(new.adapter, adapter_of(new.sampling.seed), "{} keeps its adapter", new.seq);
            let old = self.known.insert(new.seq, known);
            assert!(old.is_none(), "{} is admitted twice without being forgotten", new.seq);
        }
        for kept in &plan.begin_with {
            assert!(plan.admitted.iter().any(|new| new.seq == kept.seq), "{} is new", kept.seq);
            let known = self.known.get_mut(&kept.seq).unwrap();
            known.begins_with = Some(self.kept[kept.place.0 as usize]);
            assert!(plan.sequences.iter().any(|it| it.seq == kept.seq), "{} is run", kept.seq);
        }
        // Ranks have states of linear attention for so many.
        let here = self.known.values().filter(|known| known.host.is_none()).count();
        assert!(here <= self.config.max_num_seqs as usize, "{here} sequences are held");
        self.budget_respected(plan);
        let mut outputs = Vec::new();
        self.drafted.clear();
        for entry in &plan.sequences {
            let known = self.known.get_mut(&entry.seq).expect("a planned sequence is known");
            let mut drafted = entry.clone();
            if let Some(most) = entry.drafts.asked() {
                let method = self.config.speculation.map(|config| config.method);
                assert_eq!(method, Some(Method::DraftModel), "who asks has a draft model");
                assert_eq!(entry.count, most + 1, "there is room for all of them");
                assert!(most > 0 && known.tokens.len() > known.num_prompt as usize);
                let room = (known.blocks.len() + entry.new_blocks.len()) as u32;
                assert!(room * self.config.block_size >= entry.start + entry.count);
                assert!(entry.start + entry.count <= self.config.max_model_len);
                let drafts = self.skill.drafts(&known.sampling, &known.tokens, most);
                self.drafted.push(drafts.len() as u32);
                drafted.count = 1 + drafts.len() as u32;
                drafted.drafts = drafts.into();
            }
            let entry = &drafted;
            // The first share may begin after what the cache already holds.
            assert!(known.host.is_none(), "{} is in host memory", entry.seq);
            let prefix = &known.tokens[..entry.start as usize];
            match known.begins_with.take() {
                Some(kept) => assert_eq!(kept, seen(known.adapter, prefix), "{}", entry.seq),
                None if self.config.prefix_states.is_some() && known.computed == 0 => {
                    assert_eq!(entry.start, 0, "{} begins without a state", entry.seq);
                }
                None => {}
            }
            if known.computed == 0 && entry.start > 0 {
                assert!(self.config.prefix_caching && entry.start % self.config.block_size == 0);
                assert!(known.sampling.prompt_logprobs.is_none());
                assert!(known.sampling.pooling.is_none_or(|it| !it.needs_all()));
                known.computed = entry.start;
            }
            assert_eq!(entry.start, known.computed, "{} goes on where it ended", entry.seq);
            let end = entry.start + entry.count;
            if !entry.drafts.is_empty() {
                assert_eq!(entry.start as usize + 1, known.tokens.len(), "drafts_at_the_end");
                assert_eq!(entry.count as usize, 1 + entry.drafts.len());
                assert!(entry.sample && !entry.masked && self.config.speculation.is_some());
                known.tokens.extend(entry.drafts.known());
            }
            assert!(entry.count > 0 && end as usize <= known.tokens.len(), "{entry:?}");
            known.blocks.extend(entry.new_blocks.iter().map(|block| block.0));
            let room = known.blocks.len() as u32 * self.config.block_size;
            assert!(room >= end, "{} has blocks for {room} of {end} tokens", entry.seq);
            known.computed = end;
            let size = self.config.block_size as usize;
            let mut holds = u64::from(known.adapter);
            for (at, token) in known.tokens[..end as usize].iter().enumerate() {
                holds = extend(holds, *token);
                if at >= entry.start as usize {
                    self.cache[known.blocks[at / size] as usize * size + at % size] = holds;
                }
            }
            assert!(!entry.sample || end as usize == known.tokens.len(), "samples at the end only");
            assert!(end <= self.config.max_model_len);
            assert!(entry.sample || !entry.masked, "a mask is for what is sampled");
            let mask = if entry.masked { masks.next().expect("a mask for each") } else { &None };
            outputs.extend(output(known, entry, mask.as_ref()));
            outputs.extend(verified(known, entry));
        }
        assert_eq!(masks.next(), None, "a mask for each masked one");
        let places: BTreeSet<u32> = plan.keep.iter().map(|kept| kept.place.0).collect();
        assert_eq!(places.len(), plan.keep.len(), "a place is written once in a step");
        for kept in &plan.keep {
            let entry = plan.sequences.iter().find(|entry| entry.seq == kept.seq);
            let entry = entry.expect("what is kept is computed");
            let end = (entry.start + entry.count) as usize;
            assert_eq!(end % self.config.block_size as usize, 0, "{}", kept.seq);
            let known = &self.known[&kept.seq];
            self.kept[kept.place.0 as usize] = seen(known.adapter, &known.tokens[..end]);
        }
        self.cache_holds_what_it_shall();
        let embeddings = outputs.iter().filter(|output| !output.embedding.is_empty()).count();
        let bytes = embeddings * (4 * self.config.hidden_size as usize + 64);
        assert!(embeddings < 2 || bytes <= BODY_MAX as usize / 4, "{embeddings} embeddings");
        // Numbers take up to 5 bytes, lengths up to 9.
        let scores = |output: &SequenceOutput| {
            let alternatives = self.known[&output.seq].sampling.prompt_logprobs.unwrap_or(0);
            output.prompt_logprobs.len() * (23 + 9 * alternatives as usize)
        };
        let bytes: usize = outputs.iter().map(scores).sum();
        assert!(bytes <= BODY_MAX as usize / 8 * 3, "{bytes} bytes of log-probabilities");
        outputs
    }

    fn budget_respected(&self, plan: &StepPlan) {
        let tokens: u32 = plan.sequences.iter().map(|entry| entry.count).sum();
        assert!(tokens <= self.config.max_num_batched_tokens, "{tokens} tokens in a step");
        assert!(plan.sequences.len() <= self.config.max_num_seqs as usize);
        let rows: usize = plan.sequences.iter().map(|entry| 1 + entry.drafts.len()).sum();
        assert!(rows <= self.config.max_num_seqs as usize, "{rows} sequences and drafts");
        let seqs: BTreeSet<SeqId> = plan.sequences.iter().map(|entry| entry.seq).collect();
        assert_eq!(seqs.len(), plan.sequences.len(), "a sequence occurs once");
    }

    /// Checks that every sequence that the worker still knows finds its own values in the cache:
    /// blocks may be shared only if they hold the same.
    fn cache_holds_what_it_shall(&self) {
        let size = self.config.block_size as usize;
        for (seq, known) in self.known.iter().filter(|(_, known)| known.host.is_none()) {
            let mut holds = u64::from(known.adapter);
            for (at, token) in known.tokens[..known.computed as usize].iter().enumerate() {
                let block = known.blocks[at / size];
                assert!(block < self.num_blocks, "{seq} has block {block} of {}", self.num_blocks);
                holds = extend(holds, *token);
                let place = block as usize * size + at % size;
                assert_eq!(self.cache[place], holds, "{seq}: position {at} in block {block}");
            }
        }
    }
}

/// Returns the tokens of a share with drafts that count: up to the first that differs from its
/// draft.
fn verified(known: &mut Known, entry: &SequenceStep) -> Vec<SequenceOutput> {
    if entry.drafts.is_empty() {
        return Vec::new();
    }
    let tokens = std::mem::take(&mut known.tokens);
    let first = entry.start as usize + 1;
    known.tokens.extend(&tokens[..first]);
    let mut outputs = Vec::new();
    for row in 0..=entry.drafts.len() {
        let token = next_token(&known.sampling, &tokens[..first + row], None);
        known.tokens.push(token);
        outputs.push(SequenceOutput {
            seq: entry.seq,
            position: (first + row) as u32,
            token: Some(token),
            logprobs: None,
            prompt_logprobs: Vec::new(),
            prompt_start: 0,
            corrupted: false,
            embedding: Vec::new(),
        });
        if entry.drafts.known().get(row) != Some(&token) {
            break;
        }
    }
    known.computed = entry.start + outputs.len() as u32;
    outputs
}

fn output(
    known: &mut Known,
    entry: &SequenceStep,
    allowed: Option<&TokenMask>,
) -> Option<SequenceOutput> {
    if !entry.drafts.is_empty() {
        return None;
    }
    let (seq, start, sample) = (entry.seq, entry.start, entry.sample);
    let end = known.computed;
    let wants = known.sampling.prompt_logprobs.is_some();
    let last = end.min(known.num_prompt.saturating_sub(1));
    let logprobs = |position: u32| TokenLogprobs {
        token: known.tokens[position as usize + 1],
        logprob: -1.0,
        rank: 1,
        top: Vec::new(),
    };
    let prompt_logprobs: Vec<TokenLogprobs> =
        if wants { (start..last).map(logprobs).collect() } else { Vec::new() };
    let pooling = known.sampling.pooling.filter(|_| end as usize == known.tokens.len());
    let embedding = pooling.map(|_| embedding(&known.tokens)).unwrap_or_default();
    if !sample && prompt_logprobs.is_empty() && embedding.is_empty() {
        return None;
    }
    let token = sample.then(|| next_token(&known.sampling, &known.tokens, allowed));
    known.tokens.extend(token);
    Some(SequenceOutput {
        seq,
        position: end,
        token,
        logprobs: None,
        prompt_logprobs,
        prompt_start: start + 1,
        corrupted: false,
        embedding,
    })
}

/// The simulated embedding of these tokens.
pub(crate) fn embedding(tokens: &[u32]) -> Vec<f32> {
    let holds = tokens.iter().fold(0, |holds, token| extend(holds, *token));
    vec![(holds % 65_536) as f32, tokens.len() as f32]
}

//! Runs step plans on one rank: keeps the sequences' tokens and block tables, computes the batch,
//! samples, on rank 0, which tells the others, or on every rank.
//!
//! A plan is checked whole before anything is computed: a plan that does not fit this rank's state
//! is an error of the coordinator or of the link, and ends the epoch instead of corrupting a cache.
mod ahead;
mod masks;
mod pool;
mod profile;
mod sequence;
mod swap;
mod verify;

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kernels::backend::{Batch, NOT_ASSIGNED, SeqRows, StepInputs};
use kernels::sampling::{SampleRow, Sampled};
use kernels::{Backend, KernelError};
use shared::ids::{SeqId, StepId};
use shared::protocol::{
    EngineConfig, SequenceOutput, SequenceStep, StepPlan, StepTimings, TokenDigest, TokenLogprobs,
};

use self::ahead::Queued;
use self::masks::Masks;
pub use self::profile::Warmed;
use self::sequence::Sequence;
use self::swap::HostBlocks;
use crate::model::decoder::Decoder;
use crate::model::lora;
use crate::rank::{NoSteps, StepSource};

/// A plan cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The plan does not fit what this rank knows.
    #[error("step {step}: {message}")]
    Plan {
        /// The step.
        step: u64,
        /// What does not fit.
        message: String,
    },
    /// The device or the other ranks failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Sequences held for each that a step can run: those of the step, those waiting within a chunked
/// prefill, and those that finished too late to leave with the last plan. Those in host memory are
/// held besides, each with a block there at least.
const HELD_PER_RUNNING: usize = 4;
/// How often a step is run again: a device that cannot record it as it would tries another way, and
/// then does not record it.
const AGAIN: u32 = 2;

/// One rank's engine.
pub struct Engine<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    config: EngineConfig,
    cache: Option<B::KvCache>,
    num_blocks: u32,
    host: Option<HostBlocks<B>>,
    sequences: HashMap<SeqId, Sequence>,
    step: StepBuffers,
    masks: Masks,
    /// Of the last step's tokens.
    digest: TokenDigest,
    /// Steps whose tokens are on their way, the oldest first.
    queued: VecDeque<Queued>,
    begun_ahead: u64,
}

/// What a step needs, kept from step to step.
#[derive(Debug, Default)]
struct StepBuffers {
    ids: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    seqs: Vec<SeqRows>,
    block_tables: Vec<u32>,
    /// The first row of each entry of the plan.
    entry_rows: Vec<u32>,
    /// Rows of the logits that are sampled, and which entry of the plan each is of.
    sample_rows: Vec<u32>,
    sample_entries: Vec<usize>,
    /// Rows of the step before whose tokens are this one's; empty when all of its own are known.
    feed: Vec<u32>,
    /// Which adapter each row has; empty when none has one.
    adapters: Vec<u32>,
    /// Empty between steps: kept for its memory.
    sampling: Vec<SampleRow<'static>>,
    sampled: Vec<Sampled>,
    tokens: Vec<u32>,
    /// Rows and next tokens of one chunk of prompt log-probabilities.
    prompt_rows: Vec<u32>,
    targets: Vec<u32>,
    /// Rows that an embedding is made of.
    hidden: Vec<f32>,
}

impl<B: Backend> std::fmt::Debug for Engine<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("decoder", &self.decoder)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Engine<B> {
    /// An engine without a cache: [`Engine::start`] makes one.
    #[must_use]
    pub fn new(backend: B, decoder: Decoder<B>, config: EngineConfig) -> Self {
        Self {
            backend,
            decoder,
            config,
            cache: None,
            num_blocks: 0,
            host: None,
            sequences: HashMap::new(),
            step: StepBuffers::default(),
            masks: Masks::default(),
            digest: TokenDigest::of(StepId(0)),
            queued: VecDeque::new(),
            begun_ahead: 0,
        }
    }

    /// The digest of the last step's tokens, as this rank has them.
    #[must_use]
    pub fn digest(&self) -> u32 {
        self.digest.value()
    }

    /// Bytes that a KV block takes.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        let shape = self.decoder.kv_shape(self.config.block_size as usize, 1);
        self.backend.kv_block_bytes(&shape).max(1)
    }

    /// KV blocks that fit in `bytes`, and that could be used at most.
    #[must_use]
    pub fn kv_blocks(&self, bytes: u64) -> u32 {
        let fit = bytes / self.block_bytes();
        let longest = self.config.max_model_len.div_ceil(self.config.block_size);
        let useful = u64::from(longest) * u64::from(self.config.max_num_seqs);
        u32::try_from(fit.min(useful)).unwrap_or(u32::MAX)
    }

    /// Bytes of weights held.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.decoder.weight_bytes()
    }

    /// Steps begun while the one before was still running, so far.
    #[must_use]
    pub fn begun_ahead(&self) -> u64 {
        self.begun_ahead
    }

    /// The sizes.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The backend: for a new epoch's collective.
    pub fn backend(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Changes the sizes for a new epoch with the same weights.
    pub fn reconfigure(&mut self, config: EngineConfig) {
        self.release();
        self.config = config;
    }

    /// Makes an empty KV cache and nothing to swap to; all sequences are forgotten.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn start(&mut self, num_blocks: u32) -> Result<(), KernelError> {
        self.start_with(num_blocks, 0)
    }

    /// Makes an empty KV cache, and `host_blocks` blocks in host memory to swap to; all sequences are
    /// forgotten.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn start_with(&mut self, num_blocks: u32, host_blocks: u32) -> Result<(), KernelError> {
        self.release();
        let shape = self.decoder.kv_shape(self.config.block_size as usize, num_blocks as usize);
        self.make_host_blocks(host_blocks)?;
        self.cache = Some(self.backend.new_kv_cache(shape)?);
        self.num_blocks = num_blocks;
        Ok(())
    }

    /// Drops the cache and all sequences; keeps the weights, and the host memory swapped to.
    pub fn release(&mut self) {
        self.cache = None;
        if let Some(host) = &mut self.host {
            host.clear();
        }
        self.num_blocks = 0;
        self.sequences.clear();
        self.queued.clear();
    }

    /// Runs one step. On rank 0 one output is appended per sequence that samples, reports prompt
    /// log-probabilities or has its embedding, in the plan's order.
    ///
    /// # Errors
    /// [`EngineError`]; the epoch is over then.
    pub fn step(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, EngineError> {
        self.step_with(plan, &mut NoSteps, outputs)
    }

    /// As [`Engine::step`]; while it waits for the device it looks for the next step in `source`,
    /// and begins that too if it can be.
    ///
    /// # Errors
    /// As there.
    pub fn step_with(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, EngineError> {
        let began = Instant::now();
        self.digest = TokenDigest::of(plan.step);
        let _ = self.backend.take_collective_time();
        let (mut sampling, mut waited) = (Duration::ZERO, None);
        if !self.is_begun(plan)? {
            self.admit(plan)?;
            self.prepare(plan)?;
            if self.can_queue(plan) {
                self.begin(plan)?;
            }
        }
        if let Some(queued) = self.queued.front_mut() {
            if std::mem::take(&mut queued.awaits_masks) {
                waited = Some(self.sample_masked(plan, source, true)?.0);
            }
            self.finish(source, outputs)?;
        } else if self.step.ids.is_empty() {
            // Nothing to compute: a sign of life, for which the ranks meet.
            self.backend.broadcast_tokens(&mut [0])?;
        } else {
            let reports = plan.sequences.iter().any(|entry| self.reports_prompt(entry));
            sampling = self.compute(plan, outputs, false)?;
            if masks::are_in(plan) && self.samples() {
                let (masks, own) = self.sample_masked(plan, source, false)?;
                (waited, sampling) = (Some(masks), own);
            }
            let pools = self.pool(plan, outputs)?;
            self.share(plan, outputs)?;
            if reports || pools {
                let place = |seq| plan.sequences.iter().position(|entry| entry.seq == seq);
                outputs.sort_by_cached_key(|output| place(output.seq));
            }
        }
        let collective = self.backend.take_collective_time();
        // What others are waited for is no work of this rank.
        let others = collective + sampling + waited.unwrap_or_default();
        let forward = began.elapsed().saturating_sub(others);
        Ok(StepTimings {
            forward_us: micros(forward),
            collective_us: micros(collective),
            sample_us: micros(sampling),
            masks_us: waited.map(micros),
            ..StepTimings::default()
        })
    }

    /// Forgets, swaps and learns sequences.
    fn admit(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        let on_host = self.host.as_ref().map_or(0, HostBlocks::count);
        let held_max = self.config.max_num_seqs as usize * HELD_PER_RUNNING + on_host;
        for seq in &plan.finished {
            let forgotten = self.sequences.remove(seq).and_then(|seq| seq.host);
            if let (Some(blocks), Some(host)) = (forgotten, &mut self.host) {
                host.free(&blocks);
            }
        }
        self.swap(plan)?;
        for new in &plan.admitted {
            let fault = |message: String| EngineError::Plan { step: plan.step.0, message };
            let max = self.config.max_model_len as usize;
            if new.tokens.is_empty() || new.tokens.len() > max {
                let len = new.tokens.len();
                return Err(fault(format!("{} has {len} tokens, the bound is {max}", new.seq)));
            }
            let adapters = self.decoder.num_adapters();
            if new.adapter > adapters {
                let (seq, adapter) = (new.seq, new.adapter);
                return Err(fault(format!("{seq} has adapter {adapter} of {adapters}")));
            }
            if new.num_prompt as usize > new.tokens.len() {
                return Err(fault(format!("{} has fewer tokens than its prompt", new.seq)));
            }
            new.sampling
                .check(self.decoder.config().vocab_size as u32)
                .map_err(|message| fault(format!("{}: {message}", new.seq)))?;
            if self.sequences.len() >= held_max {
                return Err(fault(format!("{held_max} sequences are held, the bound is reached")));
            }
            if self.sequences.insert(new.seq, Sequence::new(new, max)).is_some() {
                return Err(fault(format!("{} is admitted twice", new.seq)));
            }
        }
        Ok(())
    }

    /// Checks the plan and lays out its batch.
    fn prepare(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        let fault = |message: String| EngineError::Plan { step: plan.step.0, message };
        let step = &mut self.step;
        step.clear();
        if self.cache.is_none() && !plan.sequences.is_empty() {
            return Err(fault("there is no KV cache yet".to_owned()));
        }
        let vocab = self.decoder.config().vocab_size as u32;
        if plan.sequences.len() > self.config.max_num_seqs as usize {
            let (len, max) = (plan.sequences.len(), self.config.max_num_seqs);
            return Err(fault(format!("{len} sequences, the bound is {max}")));
        }
        for (index, entry) in plan.sequences.iter().enumerate() {
            let seq = self
                .sequences
                .get_mut(&entry.seq)
                .ok_or_else(|| fault(format!("{} is not known", entry.seq)))?;
            if seq.last_step.replace(plan.step) == Some(plan.step) {
                return Err(fault(format!("{} occurs twice", entry.seq)));
            }
            seq.check(entry, &self.config, self.num_blocks)
                .and_then(|()| masks::check(entry))
                .and_then(|()| match entry.drafts.is_empty() {
                    true => Ok(()),
                    false => verify::check(seq, entry, vocab),
                })
                .map_err(|message| fault(format!("{} {message}", entry.seq)))?;
            seq.blocks.extend(entry.new_blocks.iter().map(|block| block.0));
            seq.tokens.extend_from_slice(&entry.drafts);
            let (start, end) = (entry.start as usize, (entry.start + entry.count) as usize);
            let tokens = &seq.tokens[start..end];
            if let Some(token) = tokens.iter().find(|token| **token >= vocab) {
                return Err(fault(format!("{} has token {token} of {vocab}", entry.seq)));
            }
            let row_start = step.ids.len() as u32;
            step.entry_rows.push(row_start);
            if self.decoder.num_adapters() > 0 {
                let rows = step.adapters.len() + entry.count as usize;
                step.adapters.resize(rows, lora::row_of(seq.adapter));
            }
            let table_start = step.block_tables.len() as u32;
            step.block_tables.extend_from_slice(&seq.blocks);
            if !entry.drafts.is_empty() {
                step.lay_out_drafts(entry, index, seq, table_start, &self.config);
                continue;
            }
            step.ids.extend_from_slice(tokens);
            step.positions.extend(entry.start..entry.start + entry.count);
            let positions = entry.start..entry.start + entry.count;
            step.slots.extend(positions.map(|position| seq.slot(position, self.config.block_size)));
            step.seqs.push(SeqRows {
                row_start,
                num_rows: entry.count,
                context_len: entry.start + entry.count,
                table_start,
                table_len: seq.blocks.len() as u32,
            });
            seq.computed = Some(entry.start + entry.count);
            if entry.sample {
                step.sample_rows.push(row_start + entry.count - 1);
                step.sample_entries.push(index);
            }
        }
        if step.adapters.iter().all(|row| *row == NOT_ASSIGNED) {
            step.adapters.clear();
        }
        let max = self.config.max_num_batched_tokens as usize;
        if step.ids.len() > max {
            return Err(fault(format!("{} tokens, the bound is {max}", step.ids.len())));
        }
        // Each draft is a row of decode of its own; no other share has more rows to sample than one.
        let (rows, max) = (step.seqs.len(), self.config.max_num_seqs as usize);
        if rows > max {
            return Err(fault(format!("{rows} sequences and drafts, the bound is {max}")));
        }
        Ok(())
    }

    /// Computes the batch and samples the logits where they are, or leaves that queued; returns how
    /// long sampling took. Where some rows have masks, a step that this rank samples is left open:
    /// [`Engine::sample_masked`] is to follow.
    fn compute(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
        queue: bool,
    ) -> Result<Duration, EngineError> {
        for _ in 0..AGAIN {
            match self.try_compute(plan, outputs, queue) {
                // Ranks that do different things again would wait for each other.
                Err(EngineError::Kernel(KernelError::Again(reason)))
                    if !self.backend.samples_everywhere() =>
                {
                    tracing::warn!(reason, "a step is run again");
                }
                result => return result,
            }
        }
        self.try_compute(plan, outputs, queue)
    }

    fn try_compute(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
        queue: bool,
    ) -> Result<Duration, EngineError> {
        let is_plain = !plan.sequences.iter().any(|entry| self.reports_prompt(entry));
        let samples = self.samples();
        let Self { backend, decoder, sequences, step, cache, .. } = self;
        let cache = cache.as_mut().ok_or_else(|| EngineError::Plan {
            step: plan.step.0,
            message: "there is no KV cache yet".to_owned(),
        })?;
        let masked = masks::are_in(plan);
        let mut rows: Vec<SampleRow<'_>> = std::mem::take(&mut step.sampling);
        if samples {
            for (row, index) in step.sample_entries.iter().enumerate() {
                if let Some(seq) = sequences.get(&plan.sequences[*index].seq) {
                    rows.push(seq.sample_row(step.known(row), None));
                }
            }
        }
        let batch = Batch {
            positions: &step.positions,
            slots: &step.slots,
            seqs: &step.seqs,
            block_tables: &step.block_tables,
        };
        backend.begin_step(&StepInputs {
            ids: &step.ids,
            batch,
            attention: decoder.attention(),
            windows: decoder.windows(),
            sample_rows: &step.sample_rows,
            sampling: &rows,
            feed: &step.feed,
            adapters: &step.adapters,
            masked,
            is_plain,
        })?;
        decoder.forward(backend, cache, &step.ids, &batch, &step.adapters)?;
        if !is_plain {
            let max = self.config.max_num_seqs;
            prompt_logprobs(backend, decoder, sequences, step, plan, max, outputs)?;
        }
        let mut sampling = Duration::ZERO;
        if !step.sample_rows.is_empty() {
            let vocab = decoder.config().vocab_size;
            let logits = decoder.logits(backend, &step.sample_rows)?;
            if masked {
                // With the masks, when they have come.
            } else if queue {
                backend.queue_sample(logits, vocab, &rows)?;
            } else if samples {
                let began = Instant::now();
                backend.sample(logits, vocab, 0, &rows, &mut step.sampled)?;
                sampling = began.elapsed();
            }
        }
        if masked && samples {
            backend.launch_step()?;
        } else {
            backend.end_step()?;
        }
        step.sampling = recycle(rows);
        Ok(sampling)
    }

    /// Tells all ranks what was sampled.
    fn share(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<(), EngineError> {
        let Self { backend, sequences, step, digest, .. } = self;
        if step.sample_rows.is_empty() {
            return Ok(());
        }
        step.tokens.clear();
        step.tokens.resize(step.sample_rows.len(), 0);
        let rank = backend.rank();
        for (token, sampled) in step.tokens.iter_mut().zip(&step.sampled) {
            *token = sampled.token;
        }
        if !backend.samples_everywhere() {
            backend.broadcast_tokens(&mut step.tokens)?;
        }
        let mut sampled = step.sampled.drain(..);
        let mut row = 0;
        while let Some(index) = step.sample_entries.get(row) {
            let entry = &plan.sequences[*index];
            let tokens = &step.tokens[row..=row + entry.drafts.len()];
            let mut sampled = sampled.by_ref().take(tokens.len());
            row += tokens.len();
            let Some(seq) = sequences.get_mut(&entry.seq) else { continue };
            let wants_logprobs = seq.params.logprobs.is_some();
            if !entry.drafts.is_empty() {
                let counting = seq.verify(entry, tokens, digest);
                if rank == 0 {
                    verify::report(entry, sampled.by_ref().take(counting), wants_logprobs, outputs);
                }
                sampled.for_each(drop);
                continue;
            }
            *digest = digest.with(entry.seq, seq.tokens.len() as u32, tokens[0]);
            seq.tokens.push(tokens[0]);
            if rank == 0
                && let Some(sampled) = sampled.next()
            {
                merge_output(outputs, entry, sampled, wants_logprobs);
            }
        }
        Ok(())
    }

    /// Whether log-probabilities of prompt tokens are due from this part of a sequence.
    fn reports_prompt(&self, entry: &SequenceStep) -> bool {
        self.sequences
            .get(&entry.seq)
            .is_some_and(|seq| seq.prompt_logprobs.is_some() && seq.prompt_targets(entry).is_some())
    }
}

/// Reports log-probabilities of prompt tokens, for sequences that want them.
fn prompt_logprobs<B: Backend>(
    backend: &mut B,
    decoder: &mut Decoder<B>,
    sequences: &HashMap<SeqId, Sequence>,
    step: &mut StepBuffers,
    plan: &StepPlan,
    rows_max: u32,
    outputs: &mut Vec<SequenceOutput>,
) -> Result<(), EngineError> {
    let vocab = decoder.config().vocab_size;
    for (index, entry) in plan.sequences.iter().enumerate() {
        let Some(seq) = sequences.get(&entry.seq) else { continue };
        let Some(top_n) = seq.prompt_logprobs else { continue };
        let Some(targets) = seq.prompt_targets(entry) else { continue };
        let last = targets.end - 1;
        let mut report = Vec::with_capacity((last - entry.start) as usize);
        let mut corrupted = false;
        let row_start = step.entry_rows[index];
        let mut from = entry.start;
        while from < last {
            let to = last.min(from + rows_max);
            step.targets.clear();
            step.targets.extend_from_slice(&seq.tokens[from as usize + 1..to as usize + 1]);
            let rows = &mut step.prompt_rows;
            rows.clear();
            rows.extend((from..to).map(|position| row_start + position - entry.start));
            let logits = decoder.logits(backend, rows)?;
            if backend.rank() == 0 {
                let sampled = &mut step.sampled;
                backend.logprobs(logits, vocab, 0, &step.targets, top_n, sampled)?;
                corrupted |= sampled.iter().any(|scored| scored.corrupted);
                report.extend(sampled.drain(..).map(token_logprobs));
            }
            from = to;
        }
        if backend.rank() == 0 {
            outputs.push(SequenceOutput {
                seq: entry.seq,
                position: entry.start + entry.count,
                token: None,
                logprobs: None,
                prompt_logprobs: report,
                prompt_start: entry.start + 1,
                corrupted,
                embedding: Vec::new(),
            });
        }
    }
    Ok(())
}

/// Adds a sampled token to the output that prompt log-probabilities began, or begins one.
fn merge_output(
    outputs: &mut Vec<SequenceOutput>,
    entry: &SequenceStep,
    sampled: Sampled,
    wants_logprobs: bool,
) {
    let (token, corrupted) = (sampled.token, sampled.corrupted);
    let logprobs = wants_logprobs.then(|| token_logprobs(sampled));
    let position = entry.start + entry.count;
    if let Some(begun) = outputs.iter_mut().find(|output| output.seq == entry.seq) {
        begun.token = Some(token);
        begun.logprobs = logprobs;
        begun.corrupted |= corrupted;
        return;
    }
    outputs.push(SequenceOutput {
        seq: entry.seq,
        position,
        token: Some(token),
        logprobs,
        prompt_logprobs: Vec::new(),
        prompt_start: 0,
        corrupted,
        embedding: Vec::new(),
    });
}

fn token_logprobs(sampled: Sampled) -> TokenLogprobs {
    TokenLogprobs {
        token: sampled.token,
        logprob: sampled.logprob,
        rank: sampled.rank,
        top: sampled.top,
    }
}

/// An empty vector with the same memory, free of the borrows that the old contents had.
#[allow(clippy::unnecessary_filter_map, reason = "a filter cannot change the lifetime")]
fn recycle(mut rows: Vec<SampleRow<'_>>) -> Vec<SampleRow<'static>> {
    rows.clear();
    // Collecting a vector's own iterator reuses its allocation.
    rows.into_iter().filter_map(|_| None).collect()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl StepBuffers {
    /// Tokens that a sampled row is computed behind, itself included.
    fn known(&self, row: usize) -> usize {
        self.positions[self.sample_rows[row] as usize] as usize + 1
    }

    fn clear(&mut self) {
        self.ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.seqs.clear();
        self.block_tables.clear();
        self.entry_rows.clear();
        self.sample_rows.clear();
        self.sample_entries.clear();
        self.feed.clear();
        self.adapters.clear();
    }
}

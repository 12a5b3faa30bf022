//! Runs step plans on one rank: keeps the sequences' tokens and block tables, computes the batch
//! and samples, either on rank 0, which tells the others, or on every rank.
//!
//! A plan is checked completely before anything is computed: one that does not fit this rank's
//! state is an error of the coordinator or the link, and ends the epoch rather than corrupt a
//! cache.
//!
//! - `layout`: checks a plan and lays out its batch in rows
//! - `sequence`: the state of one sequence on a rank
//! - `ahead`: begins a step while the previous one runs
//! - `report`: a step's results
//! - `masks`: structured output
//! - `draft`, `verify`: drafts by a small model; verification of drafts
//! - `swap`: sequences in host memory
//! - `states`: states of linear attention
//! - `pool`: embeddings
//! - `profile`: warm-up steps on made-up tokens
mod ahead;
mod draft;
mod layout;
mod masks;
mod pool;
mod profile;
mod report;
mod sequence;
mod states;
mod swap;
mod verify;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kernels::backend::{Batch, StepInputs};
use kernels::sampling::SampleRow;
use kernels::{Backend, KernelError};
use shared::ids::{SeqId, StepId};
use shared::mix::IdMap;
use shared::protocol::{
    EngineConfig, Quantization, SequenceOutput, StepPlan, StepTimings, TokenDigest,
};

use self::ahead::QueuedStep;
pub use self::draft::Draft;
use self::layout::StepBuffers;
use self::masks::Masks;
pub use self::profile::WarmUp;
use self::report::{merge_output, prompt_logprobs, sampled_output};
use self::sequence::Sequence;
use self::states::StateSlots;
use self::swap::HostBlocks;
use crate::model::config::ModelConfig;
use crate::model::decoder::Decoder;
use crate::model::lora::Adapters;
use crate::model::shard::Shard;
use crate::rank::StepSource;

/// Why a plan cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The plan does not fit this rank's state.
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

/// Sequences held per sequence that a step can run: those of the step, those waiting within a
/// chunked prefill, and those that finished too late to leave with the last plan. Sequences in host
/// memory are held in addition; each has at least one block there.
const HELD_PER_RUNNING: usize = 4;
/// How often a step is retried: a device that cannot record it tries another way, and then runs it
/// unrecorded.
const AGAIN: u32 = 2;

/// One rank's engine.
pub struct Engine<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    config: EngineConfig,
    cache: Option<B::KvCache>,
    num_blocks: u32,
    host: Option<HostBlocks<B>>,
    sequences: IdMap<SeqId, Sequence>,
    /// States of linear attention, if the model has it.
    states: StateSlots,
    step: StepBuffers,
    masks: Masks,
    /// The draft model, on rank 0 if there is one.
    draft: Option<Draft<B>>,
    /// Number of tokens drafted per sequence in the last step, and the time it took.
    drafted: Vec<u32>,
    drafting: Option<Duration>,
    /// Digest of the last step's tokens.
    digest: TokenDigest,
    /// Steps whose tokens have not been fetched, oldest first.
    queued: VecDeque<QueuedStep>,
    begun_ahead: u64,
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
    /// Creates an engine without a cache; [`Engine::start`] allocates it.
    #[must_use]
    pub fn new(backend: B, decoder: Decoder<B>, config: EngineConfig) -> Self {
        Self {
            backend,
            decoder,
            config,
            cache: None,
            num_blocks: 0,
            host: None,
            sequences: IdMap::default(),
            states: StateSlots::default(),
            step: StepBuffers::default(),
            masks: Masks::default(),
            draft: None,
            drafted: Vec::new(),
            drafting: None,
            digest: TokenDigest::of(StepId(0)),
            queued: VecDeque::new(),
            begun_ahead: 0,
        }
    }

    /// Adds a draft model, on rank 0.
    #[must_use]
    pub fn with_draft(self, draft: Option<Draft<B>>) -> Self {
        Self { draft, ..self }
    }

    /// Returns the number of tokens drafted for each sequence of the last step that asked for
    /// drafts, on rank 0.
    #[must_use]
    pub fn drafted(&self) -> &[u32] {
        &self.drafted
    }

    /// Returns the digest of the last step's tokens on this rank.
    #[must_use]
    pub fn digest(&self) -> u32 {
        self.digest.value()
    }

    /// Returns the size of a KV block in bytes, including the draft model's part.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        let draft = self.draft.as_ref();
        let drafts = draft.map_or(0, |it| it.block_bytes(&self.backend, &self.config));
        self.host_block_bytes() + drafts
    }

    /// Returns the size of a KV block in host memory, in bytes.
    #[must_use]
    pub fn host_block_bytes(&self) -> u64 {
        let shape = self.decoder.kv_shape(&self.config, 1);
        self.backend.kv_block_bytes(&shape).max(1)
    }

    /// Returns the number of KV blocks that fit in `bytes`, at most as many as can be used.
    #[must_use]
    pub fn kv_blocks(&self, bytes: u64) -> u32 {
        let fit = bytes / self.block_bytes();
        let longest = self.config.max_model_len.div_ceil(self.config.block_size);
        let useful = u64::from(longest) * u64::from(self.config.max_num_seqs);
        u32::try_from(fit.min(useful)).unwrap_or(u32::MAX)
    }

    /// Returns the size of the weights, in bytes.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.decoder.weight_bytes() + self.draft.as_ref().map_or(0, Draft::weight_bytes)
    }

    /// Returns the model and, on rank 0, the draft model if there is one, as [`Decoder::model`].
    pub fn models(&self) -> impl Iterator<Item = (&ModelConfig, &Shard)> {
        [self.decoder.model()].into_iter().chain(self.draft.as_ref().map(Draft::model))
    }

    /// As [`Decoder::step_bytes`], including the draft model.
    #[must_use]
    pub fn step_bytes(
        &self,
        sizes: &EngineConfig,
        quantization: Quantization,
        widens: bool,
    ) -> (u64, u64) {
        let (activations, sequence) = self.decoder.step_bytes(sizes, quantization, widens);
        let draft = self.draft.as_ref();
        let (drafting, drafted) = draft.map_or((0, 0), |draft| draft.step_bytes(sizes, widens));
        (activations + drafting, sequence + drafted)
    }

    /// Returns the number of steps begun while the previous one was still running, so far.
    #[must_use]
    pub fn begun_ahead(&self) -> u64 {
        self.begun_ahead
    }

    /// Returns the engine's limits.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Returns the number of the model's layers.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.decoder.config().num_layers
    }

    /// Returns the backend, to set a new epoch's collective.
    pub fn backend(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Returns the draft model's own backend, if it has one.
    pub fn draft_backend(&mut self) -> Option<&mut B> {
        self.draft.as_mut().and_then(Draft::own_backend)
    }

    /// Returns the backend and the adapters, if there is room for any, and what their matrices
    /// depend on.
    pub fn adapting(&mut self) -> Option<(&mut B, &mut Adapters<B>, &ModelConfig, &Shard)> {
        let Self { backend, decoder, .. } = self;
        let (adapters, config, shard) = decoder.adapting()?;
        Some((backend, adapters, config, shard))
    }

    /// Changes the limits for a new epoch with the same weights.
    pub fn reconfigure(&mut self, config: EngineConfig) {
        self.release();
        self.config = config;
    }

    /// The same with the same weights, for steps of another size; without a cache.
    ///
    /// # Errors
    /// [`KernelError`].
    pub fn resized(mut self, config: EngineConfig) -> Result<Self, KernelError> {
        self.release();
        let Self { mut backend, decoder, draft, .. } = self;
        backend.release_scratch()?;
        let decoder = decoder.resized(&mut backend, &config)?;
        let draft = draft.map(|draft| draft.resized(&mut backend, &config)).transpose()?;
        Ok(Self { backend, decoder, draft, config, ..self })
    }

    /// Allocates an empty KV cache, and `host_blocks` blocks in host memory to swap to; all
    /// sequences are forgotten.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn start(&mut self, num_blocks: u32, host_blocks: u32) -> Result<(), KernelError> {
        self.release();
        let shape = self.decoder.kv_shape(&self.config, num_blocks);
        self.make_host_blocks(host_blocks)?;
        self.cache = Some(self.backend.new_kv_cache(shape)?);
        if let Some(draft) = &mut self.draft {
            draft.start(&mut self.backend, &self.config, num_blocks)?;
        }
        self.num_blocks = num_blocks;
        if self.decoder.config().delta.is_some() {
            self.states.reset(self.config.max_num_seqs, self.config.prefix_states);
        }
        // What it took to get here belongs to no step.
        let _ = self.backend.take_collective_time();
        Ok(())
    }

    /// Drops the cache and all sequences; keeps the weights and the host memory for swapping.
    pub fn release(&mut self) {
        self.cache = None;
        if let Some(draft) = &mut self.draft {
            draft.release();
        }
        if let Some(host) = &mut self.host {
            host.clear();
        }
        self.num_blocks = 0;
        self.sequences.clear();
        self.queued.clear();
    }

    /// Runs one step. On rank 0 it appends one output per sequence that samples, reports prompt
    /// log-probabilities or has its embedding, in the plan's order. While it waits for the device
    /// it looks for the next step in `source` and begins it if possible.
    ///
    /// # Errors
    /// [`EngineError`]; the epoch has then ended.
    pub fn step(
        &mut self,
        plan: &StepPlan,
        source: &mut dyn StepSource,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, EngineError> {
        let began = Instant::now();
        self.digest = TokenDigest::of(plan.step);
        self.drafted.clear();
        self.drafting = None;
        let (mut sampling, mut waited) = (Duration::ZERO, None);
        // The plan to compute: with what the draft model drafted.
        let mut plan = Cow::Borrowed(plan);
        if !self.is_begun(&plan)? {
            self.admit(&plan)?;
            self.check(&plan)?;
            if let Some(drafted) = self.draft(&plan)? {
                plan = Cow::Owned(drafted);
            }
            self.lay_out(&plan);
            if self.can_queue(&plan) {
                self.begin(&plan)?;
            }
        }
        let plan = &*plan;
        if let Some(queued) = self.queued.front_mut() {
            if std::mem::take(&mut queued.awaits_masks) {
                waited = Some(self.sample_masked(plan, source, true)?.0);
            }
            self.finish(source, outputs)?;
        } else if self.step.ids.is_empty() {
            // Nothing to compute: a sign of life, for which all ranks meet.
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
        if !self.decoder.has_head() {
            // Whoever answers requests refuses these, unless it has not seen the weights.
            let sampled = outputs.iter_mut().filter(|output| output.embedding.is_empty());
            sampled.for_each(|output| output.corrupted = true);
        }
        let collective = self.backend.take_collective_time();
        // Time spent waiting for others is not this rank's work.
        let drafting = self.drafting.unwrap_or_default();
        let others = collective + sampling + waited.unwrap_or_default() + drafting;
        let forward = began.elapsed().saturating_sub(others);
        Ok(StepTimings {
            forward_us: micros(forward),
            collective_us: micros(collective),
            sample_us: micros(sampling),
            masks_us: waited.map(micros),
            draft_us: self.drafting.map(micros),
            ..StepTimings::default()
        })
    }

    /// Computes the batch and samples the logits in place, or queues the sampling; returns how long
    /// sampling took. If some rows have masks, a step that this rank samples is left open:
    /// [`Engine::sample_masked`] must follow.
    fn compute(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
        queue: bool,
    ) -> Result<Duration, EngineError> {
        for _ in 0..AGAIN {
            match self.try_compute(plan, outputs, queue) {
                // Ranks that retry different things would wait for each other.
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
        decoder.copy_states(backend, &step.begin_with)?;
        backend.begin_step(&StepInputs {
            ids: &step.ids,
            batch,
            attention: decoder.attention(),
            windows: decoder.windows(),
            sample_rows: &step.sample_rows,
            sampling: &rows,
            feed: &step.feed,
            states: &step.states,
            adapters: &step.adapters,
            masked,
            is_plain,
        })?;
        decoder.forward(backend, cache, &step.ids, &batch, &step.states, &step.adapters)?;
        if !is_plain {
            let max = self.config.max_num_seqs;
            prompt_logprobs(backend, decoder, sequences, step, plan, max, outputs)?;
        }
        let mut sampling = Duration::ZERO;
        if !step.sample_rows.is_empty() {
            let vocab = decoder.config().vocab_size;
            let logits = decoder.logits(backend, &step.sample_rows)?;
            if masked {
                // Sampled with the masks, when they have come.
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
            decoder.copy_states(backend, &step.keep)?;
        }
        step.sampling = recycle(rows);
        Ok(sampling)
    }

    /// Tells all ranks the sampled tokens.
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
                let position = entry.start + entry.count;
                let output = sampled_output(entry.seq, position, sampled, wants_logprobs);
                // Searching for the output that its prompt began would take long in large steps.
                match seq.reports_prompt(entry) {
                    true => merge_output(outputs, output),
                    false => outputs.push(output),
                }
            }
        }
        Ok(())
    }
}

/// Returns an empty vector with the same allocation, free of the borrows of its old contents.
#[allow(clippy::unnecessary_filter_map, reason = "a filter cannot change the lifetime")]
fn recycle(mut rows: Vec<SampleRow<'_>>) -> Vec<SampleRow<'static>> {
    rows.clear();
    // Collecting a vector's own iterator reuses its allocation.
    rows.into_iter().filter_map(|_| None).collect()
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

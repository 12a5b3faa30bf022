//! The step engine of one rank: a [`StepPlan`] in, sampled tokens out.
//!
//! Owns the sequences' state (tokens, block tables, sampling parameters), the KV cache and the
//! order of work within a step. It decides nothing: which sequence runs, in which blocks, is the
//! plan. No socket, thread or timer; time comes from the [`Clock`] it is given. All ranks run the
//! same plan; rank 0 samples and the others learn the tokens, so that every rank can be one step
//! ahead of the coordinator.
mod rows;
mod sequence;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kernels::Backend;
use kernels::sampling::{SampleRow, Sampled};
use shared::clock::Clock;
use shared::ids::{SeqId, StepId};
use shared::protocol::{
    EngineConfig, NewSequence, SequenceOutput, SequenceStep, StepPlan, StepTimings, TokenLogprobs,
};

use self::rows::Rows;
use self::sequence::Sequence;
use crate::error::EngineError;
use crate::kv_cache::{blocks_max, blocks_that_fit};
use crate::model::{Decoder, Model};

const BLOCK_SIZE_MAX: u32 = 1 << 12;
const MAX_NUM_SEQS_MAX: u32 = 1 << 16;
const MAX_NUM_BATCHED_TOKENS_MAX: u32 = 1 << 20;
/// Sequences held per sequence that one step can run: those of this step, and as many that wait
/// within a chunked prefill or were finished too late to leave with the last plan.
const HELD_PER_RUNNING: u32 = 4;

/// One rank's engine.
pub struct Engine<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    config: EngineConfig,
    clock: Arc<dyn Clock>,
    cache: Option<Cache<B>>,
    sequences: HashMap<SeqId, Sequence>,
    last_step: Option<StepId>,
    scratch: Scratch,
}

struct Cache<B: Backend> {
    blocks: B::KvCache,
    num_blocks: u32,
}

/// Kept between steps for its memory alone.
#[derive(Debug, Default)]
struct Scratch {
    rows: Rows,
    /// Rows of one chunk of prompt log-probabilities.
    prompt_rows: Vec<u32>,
    sample_rows: Vec<SampleRow<'static>>,
    sampled: Vec<Sampled>,
    tokens: Vec<u32>,
}

impl<B: Backend> Engine<B> {
    /// Allocates everything but the KV cache.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] naming the size, [`EngineError::Kernel`] when the device is out
    /// of memory.
    pub fn new(
        mut backend: B,
        model: Model<B>,
        config: EngineConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, EngineError> {
        let positions = model.config.max_positions as u64;
        within("block_size", config.block_size, u64::from(BLOCK_SIZE_MAX))?;
        within("max_model_len", config.max_model_len, positions)?;
        within("max_num_seqs", config.max_num_seqs, u64::from(MAX_NUM_SEQS_MAX))?;
        let tokens_max = u64::from(MAX_NUM_BATCHED_TOKENS_MAX);
        within("max_num_batched_tokens", config.max_num_batched_tokens, tokens_max)?;
        let (tokens, seqs) = (config.max_num_batched_tokens as usize, config.max_num_seqs as usize);
        let decoder =
            Decoder::new(&mut backend, model, tokens, seqs, config.max_model_len as usize)?;
        let scratch = Scratch { rows: Rows::with_capacity(tokens, seqs), ..Scratch::default() };
        Ok(Self {
            backend,
            decoder,
            config,
            clock,
            cache: None,
            sequences: HashMap::with_capacity(seqs),
            last_step: None,
            scratch,
        })
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Model<B> {
        self.decoder.model()
    }

    /// The device.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Frees the KV cache and the buffers, and keeps the weights on the device.
    #[must_use]
    pub fn into_parts(self) -> (B, Model<B>) {
        (self.backend, self.decoder.into_model())
    }

    /// How many KV blocks fit in `kv_cache_bytes` on this rank.
    #[must_use]
    pub fn kv_blocks_capacity(&self) -> u32 {
        let shape = self.model().kv_shape(self.config.block_size as usize, 1);
        let block_bytes = self.backend.kv_block_bytes(&shape);
        blocks_that_fit(self.config.kv_cache_bytes, block_bytes, self.config.block_size)
    }

    /// Allocates the KV cache and forgets every sequence. The next plan may have any step id.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] for no block or more than a slot index can name,
    /// [`EngineError::Kernel`] when the device is out of memory.
    pub fn start(&mut self, num_blocks: u32) -> Result<(), EngineError> {
        let block_size = self.config.block_size;
        within("num_blocks", num_blocks, u64::from(blocks_max(block_size)))?;
        // The old cache goes first: two do not fit.
        self.cache = None;
        self.sequences.clear();
        self.last_step = None;
        let shape = self.model().kv_shape(block_size as usize, num_blocks as usize);
        let blocks = self.backend.new_kv_cache(shape)?;
        self.cache = Some(Cache { blocks, num_blocks });
        Ok(())
    }

    /// Runs one step. On rank 0 `outputs` is cleared and filled, on others cleared. The timings have
    /// `forward_us`, `collective_us` and `sample_us`; the rest is the caller's.
    ///
    /// # Errors
    /// [`EngineError`] for a plan that does not fit what is here, or a failed device or collective.
    /// The engine must then be started again: it may have applied part of the plan.
    pub fn step(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, EngineError> {
        outputs.clear();
        let num_blocks = self.cache.as_ref().ok_or(EngineError::NotStarted)?.num_blocks;
        if let Some(last) = self.last_step {
            let expected = StepId(last.0.wrapping_add(1));
            if plan.step != expected {
                return Err(EngineError::OutOfOrder { found: plan.step, expected });
            }
        }
        self.last_step = Some(plan.step);

        for seq in &plan.finished {
            // A sequence that was never run here is no mistake: it is gone either way.
            self.sequences.remove(seq);
        }
        for new in &plan.admitted {
            self.admit(new)?;
        }
        self.collect_rows(plan, num_blocks)?;
        if plan.sequences.is_empty() {
            return Ok(StepTimings::default());
        }
        self.run(plan, outputs)
    }

    fn admit(&mut self, new: &NewSequence) -> Result<(), EngineError> {
        let held = self.sequences.len() as u64 + 1;
        let held_max = self.config.max_num_seqs * HELD_PER_RUNNING;
        if held > u64::from(held_max) {
            let (field, max) = ("number of sequences held", u64::from(held_max));
            return Err(EngineError::OutOfBounds { field, value: held, min: 0, max });
        }
        let vocab_size = self.model().config.vocab_size;
        let sequence = Sequence::admit(new, vocab_size, self.config.max_model_len)
            .map_err(|problem| EngineError::Sequence { seq: new.seq, problem })?;
        match self.sequences.insert(new.seq, sequence) {
            None => Ok(()),
            Some(_) => Err(EngineError::AlreadyAdmitted(new.seq)),
        }
    }

    /// Checks the whole batch before the device sees any of it.
    fn collect_rows(&mut self, plan: &StepPlan, num_blocks: u32) -> Result<(), EngineError> {
        let EngineConfig {
            block_size, max_model_len, max_num_seqs, max_num_batched_tokens, ..
        } = self.config;
        let bounded = |field, value: u64, max: u32| match value <= u64::from(max) {
            true => Ok(()),
            false => Err(EngineError::OutOfBounds { field, value, min: 0, max: u64::from(max) }),
        };
        let count = plan.sequences.iter().map(|run| u64::from(run.count)).sum();
        bounded("number of sequences in a step", plan.sequences.len() as u64, max_num_seqs)?;
        bounded("number of tokens in a step", count, max_num_batched_tokens)?;

        self.scratch.rows.clear();
        for run in &plan.sequences {
            let seq = run.seq;
            let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
            if !sequence.enter(plan.step) {
                return Err(EngineError::DuplicateSequence(seq));
            }
            sequence
                .table
                .append(&run.new_blocks, num_blocks)
                .map_err(|block| format!("{block} is not below num_blocks, {num_blocks}"))
                .and_then(|()| sequence.advance(run, block_size, max_model_len))
                .map_err(|problem| EngineError::Sequence { seq, problem })?;
            self.scratch.rows.push(sequence, run, block_size);
        }
        Ok(())
    }

    /// The arithmetic of a step whose rows are collected.
    fn run(
        &mut self,
        plan: &StepPlan,
        outputs: &mut Vec<SequenceOutput>,
    ) -> Result<StepTimings, EngineError> {
        let started = self.clock.now();
        let cache = self.cache.as_mut().ok_or(EngineError::NotStarted)?;
        let rows = &self.scratch.rows;
        self.decoder.forward(&mut self.backend, &mut cache.blocks, &rows.tokens, &rows.batch())?;

        let mut sample_time = Duration::ZERO;
        for (index, run) in plan.sequences.iter().enumerate() {
            let mut output = new_output(run);
            sample_time += self.score_prompt(index, run, &mut output)?;
            if self.backend.rank() == 0 && (run.sample || !output.prompt_logprobs.is_empty()) {
                outputs.push(output);
            }
        }
        if !self.scratch.rows.sampled.is_empty() {
            sample_time += self.sample(plan)?;
            self.take_samples(plan, outputs);
        }

        let collective_time = self.backend.take_collective_time();
        let total = self.clock.now().saturating_sub(started);
        Ok(StepTimings {
            forward_us: micros(total.saturating_sub(collective_time + sample_time)),
            collective_us: micros(collective_time),
            sample_us: micros(sample_time),
            ..StepTimings::default()
        })
    }

    /// Log-probabilities of the prompt tokens that the sequence's rows predict, when asked for: in
    /// chunks, since there is room for the logits of `max_num_seqs` rows.
    fn score_prompt(
        &mut self,
        index: usize,
        run: &SequenceStep,
        output: &mut SequenceOutput,
    ) -> Result<Duration, EngineError> {
        let Some(sequence) = self.sequences.get(&run.seq) else { return Ok(Duration::ZERO) };
        let top_n = sequence.prompt_logprobs.unwrap_or(0);
        let mut row = self.scratch.rows.seqs[index].row_start;
        let mut time = Duration::ZERO;
        let Scratch { prompt_rows, sampled, .. } = &mut self.scratch;
        for targets in sequence.prompt_targets(run).chunks(self.config.max_num_seqs as usize) {
            let end = row + targets.len() as u32;
            prompt_rows.clear();
            prompt_rows.extend(row..end);
            row = end;
            self.decoder.compute_logits(&mut self.backend, prompt_rows)?;
            if self.backend.rank() != 0 {
                continue;
            }
            let vocab = self.decoder.model().config.vocab_size;
            let started = self.clock.now();
            let logits = self.decoder.logits();
            self.backend.logprobs(logits, vocab, 0, targets, top_n, sampled)?;
            time += self.clock.now().saturating_sub(started);
            output.corrupted |= sampled.iter().any(|scored| scored.corrupted);
            output.prompt_logprobs.extend(sampled.drain(..).map(token_logprobs));
        }
        Ok(time)
    }

    /// Samples on rank 0 and tells all ranks the tokens.
    fn sample(&mut self, plan: &StepPlan) -> Result<Duration, EngineError> {
        let Scratch { rows, sample_rows, sampled, tokens, .. } = &mut self.scratch;
        self.decoder.compute_logits(&mut self.backend, &rows.sampled)?;
        let mut time = Duration::ZERO;
        tokens.clear();
        tokens.resize(rows.sampled.len(), 0);
        if self.backend.rank() == 0 {
            let vocab = self.decoder.model().config.vocab_size;
            let started = self.clock.now();
            let mut borrowed: Vec<SampleRow<'_>> = std::mem::take(sample_rows);
            borrowed.extend(
                plan.sequences
                    .iter()
                    .filter(|run| run.sample)
                    .filter_map(|run| self.sequences.get(&run.seq))
                    .map(Sequence::sample_row),
            );
            let result = self.backend.sample(self.decoder.logits(), vocab, 0, &borrowed, sampled);
            *sample_rows = recycle(borrowed);
            result?;
            for (token, sampled) in tokens.iter_mut().zip(sampled.iter()) {
                *token = sampled.token;
            }
            time = self.clock.now().saturating_sub(started);
        }
        if self.backend.world_size() > 1 {
            self.backend.broadcast_tokens(tokens)?;
        }
        Ok(time)
    }

    /// Appends the sampled tokens to their sequences and, on rank 0, to the outputs.
    fn take_samples(&mut self, plan: &StepPlan, outputs: &mut [SequenceOutput]) {
        let Scratch { sampled, tokens, .. } = &mut self.scratch;
        let runs = plan.sequences.iter().filter(|run| run.sample);
        for (run, &token) in runs.clone().zip(tokens.iter()) {
            if let Some(sequence) = self.sequences.get_mut(&run.seq) {
                sequence.tokens.push(token);
            }
        }
        if self.backend.rank() != 0 {
            return;
        }
        // Both in the plan's order; outputs may have some more, which only report their prompts.
        let mut outputs = outputs.iter_mut();
        for (run, sampled) in runs.zip(sampled.drain(..)) {
            let Some(output) = outputs.find(|output| output.seq == run.seq) else { return };
            output.corrupted |= sampled.corrupted;
            output.token = Some(sampled.token);
            let wants = self.sequences.get(&run.seq).is_some_and(Sequence::wants_logprobs);
            output.logprobs = wants.then(|| token_logprobs(sampled));
        }
    }
}

impl<B: Backend> fmt::Debug for Engine<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("model", self.model())
            .field("config", &self.config)
            .field("num_blocks", &self.cache.as_ref().map(|cache| cache.num_blocks))
            .field("sequences", &self.sequences.len())
            .field("last_step", &self.last_step)
            .finish_non_exhaustive()
    }
}

fn within(field: &'static str, value: u32, max: u64) -> Result<(), EngineError> {
    if (1..=max).contains(&u64::from(value)) {
        return Ok(());
    }
    Err(EngineError::OutOfBounds { field, value: u64::from(value), min: 1, max })
}

fn new_output(run: &SequenceStep) -> SequenceOutput {
    SequenceOutput {
        seq: run.seq,
        position: run.start + run.count,
        token: None,
        logprobs: None,
        prompt_logprobs: Vec::new(),
        prompt_start: run.start + 1,
        corrupted: false,
    }
}

fn token_logprobs(sampled: Sampled) -> TokenLogprobs {
    let Sampled { token, logprob, rank, top, corrupted: _ } = sampled;
    TokenLogprobs { token, logprob, rank, top }
}

/// An empty vector with the same memory, free of the borrows that the old contents had.
#[allow(clippy::unnecessary_filter_map, reason = "a filter cannot change the lifetime")]
fn recycle(mut rows: Vec<SampleRow<'_>>) -> Vec<SampleRow<'static>> {
    rows.clear();
    // Collecting a vector's own iterator reuses its allocation.
    rows.into_iter().filter_map(|_| None).collect()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

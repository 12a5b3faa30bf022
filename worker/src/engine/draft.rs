//! Drafts by a small model, which rank 0 holds whole. If a plan asks for drafts, rank 0 drafts
//! before the step is computed and tells the other ranks; then they are verified like any drafts.
//!
//! The model keeps its own K and V in as many blocks as the KV cache has, with the same block
//! tables. So whatever happens to blocks (shared, given away, swapped) needs nothing here:
//! [`ValidPositions`] knows which positions hold its own K and V. What it has missed of a sequence
//! it computes when it is to draft for it (a prompt's first token does not wait for that), within a
//! step's limit of rows; until it has caught up with a sequence, it drafts nothing for it.
//!
//! A draft is sampled like the token in its place will be, with the same random draw, from the
//! draft model's own probabilities: so drafts of sampled text are right as often as the two models
//! agree.
mod valid_positions;

use std::ops::Range;
use std::time::Instant;

use kernels::backend::{Batch, SeqRows, StepInputs};
use kernels::sampling::{SampleParams, SampleRow, Sampled};
use kernels::{Backend, KernelError};
use shared::ids::SeqId;
use shared::mix::IdMap;
use shared::protocol::{Drafts, EngineConfig, Quantization, StepPlan};

use self::valid_positions::ValidPositions;
use super::sequence::Sequence;
use super::{AGAIN, Engine, EngineError, recycle};
use crate::model::config::ModelConfig;
use crate::model::decoder::Decoder;
use crate::model::shard::Shard;

/// Marks a place without a drafted token.
const NOT_DRAFTED: u32 = u32::MAX;

/// A draft model.
pub struct Draft<B: Backend> {
    /// Its own backend, if the device's backends serve one model each; otherwise it uses the
    /// backend, and so the threads, of the model it drafts for.
    backend: Option<B>,
    decoder: Decoder<B>,
    cache: Option<B::KvCache>,
    /// Maximum sequence length that it can compute.
    positions: u32,
    valid_positions: ValidPositions,
    rows: Rows,
    sampled: Vec<Sampled>,
}

/// Batch of one pass.
#[derive(Debug, Default)]
struct Rows {
    ids: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    seqs: Vec<SeqRows>,
    /// Block tables of all sequences that draft, for all passes of a step.
    block_tables: Vec<u32>,
    sample_rows: Vec<u32>,
    /// Empty between passes; kept for its allocation.
    sampling: Vec<SampleRow<'static>>,
}

/// A sequence for which tokens are drafted.
#[derive(Debug)]
struct DraftedSequence {
    seq: SeqId,
    /// Position of its last token.
    start: u32,
    /// Maximum number of tokens to draft.
    most: u32,
    /// Index of its drafts in the output.
    at: usize,
    /// Its block table in [`Rows`].
    table: Range<usize>,
    /// Whether its last token is computed, and all drafts but the last.
    has_caught_up: bool,
    /// Its parameters without log-probabilities, if it reports some: nobody reads those of drafts.
    quiet: Option<SampleParams>,
    drafted: u32,
}

impl<B: Backend> std::fmt::Debug for Draft<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Draft")
            .field("decoder", &self.decoder)
            .field("positions", &self.positions)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Draft<B> {
    /// Creates a draft model for positions below `positions`, on its own backend or that of the
    /// model it drafts for.
    #[must_use]
    pub fn new(backend: Option<B>, decoder: Decoder<B>, positions: u32) -> Self {
        Self {
            backend,
            decoder,
            cache: None,
            positions,
            valid_positions: ValidPositions::default(),
            rows: Rows::default(),
            sampled: Vec::new(),
        }
    }

    /// The same with room for other steps.
    pub(super) fn resized(self, shared: &mut B, sizes: &EngineConfig) -> Result<Self, KernelError> {
        let Self { mut backend, decoder, positions, .. } = self;
        if let Some(own) = &mut backend {
            own.release_scratch()?;
        }
        let decoder = decoder.resized(backend.as_mut().unwrap_or(shared), sizes)?;
        Ok(Self::new(backend, decoder, positions))
    }

    /// Size of its part of a KV block, in bytes.
    pub(super) fn block_bytes(&self, shared: &B, sizes: &EngineConfig) -> u64 {
        let backend = self.backend.as_ref().unwrap_or(shared);
        backend.kv_block_bytes(&self.decoder.kv_shape(sizes, 1))
    }

    /// Size of its weights, in bytes.
    pub(super) fn weight_bytes(&self) -> u64 {
        self.decoder.weight_bytes()
    }

    /// As [`Decoder::step_bytes`]; its weights are as in its checkpoint.
    pub(super) fn step_bytes(&self, sizes: &EngineConfig, widens: bool) -> (u64, u64) {
        self.decoder.step_bytes(sizes, Quantization::None, widens)
    }

    /// As [`Decoder::model`].
    pub(super) fn model(&self) -> (&ModelConfig, &Shard) {
        self.decoder.model()
    }

    /// Its own backend, if it has one.
    pub(super) fn own_backend(&mut self) -> Option<&mut B> {
        self.backend.as_mut()
    }

    /// Its own backend, if it has one, with its decoder and cache.
    pub(super) fn own_parts(&mut self) -> Option<(&mut B, &mut Decoder<B>, &mut B::KvCache)> {
        Some((self.backend.as_mut()?, &mut self.decoder, self.cache.as_mut()?))
    }

    /// The backend and decoder for its steps.
    pub(super) fn parts<'a>(&'a mut self, shared: &'a mut B) -> (&'a mut B, &'a mut Decoder<B>) {
        (self.backend.as_mut().unwrap_or(shared), &mut self.decoder)
    }

    /// Maximum sequence length that it can compute.
    pub(super) fn positions(&self) -> u32 {
        self.positions
    }

    /// Allocates an empty cache.
    pub(super) fn start(
        &mut self,
        shared: &mut B,
        sizes: &EngineConfig,
        num_blocks: u32,
    ) -> Result<(), KernelError> {
        let shape = self.decoder.kv_shape(sizes, num_blocks);
        let backend = self.backend.as_mut().unwrap_or(shared);
        self.cache = Some(backend.new_kv_cache(shape)?);
        self.valid_positions = ValidPositions::new(sizes.block_size, num_blocks);
        Ok(())
    }

    /// Drops the cache.
    pub(super) fn release(&mut self) {
        self.cache = None;
        self.valid_positions = ValidPositions::default();
    }

    /// Invalidates these positions of a sequence with this block table, which get other tokens.
    pub(super) fn overwrite(&mut self, table: &[u32], positions: Range<u32>) {
        self.valid_positions.overwrite(table, positions);
    }

    /// Invalidates these blocks, which hold something else now.
    pub(super) fn replace(&mut self, blocks: impl Iterator<Item = u32>) {
        blocks.for_each(|block| self.valid_positions.replace(block));
    }

    /// Drafts what the plan asks for: each sequence in turn has as many places in `out` as tokens
    /// were asked for.
    fn run(
        &mut self,
        shared: &mut B,
        sequences: &mut IdMap<SeqId, Sequence>,
        config: &EngineConfig,
        plan: &StepPlan,
        out: &mut [u32],
    ) -> Result<(), KernelError> {
        let mut all = self.sequences_to_draft(sequences, plan);
        self.lay_out(sequences, config, &mut all);
        let mut result = Ok(());
        while !self.rows.ids.is_empty() && result.is_ok() {
            result = self.pass(shared, sequences, &all);
            if result.is_ok() {
                self.take(sequences, config, &mut all, out);
            }
        }
        for drafting in &all {
            if let Some(seq) = sequences.get_mut(&drafting.seq) {
                seq.tokens.truncate(drafting.start as usize + 1);
            }
        }
        result
    }

    /// Lists the sequences to draft for, those that miss the least first, so that one that misses
    /// much does not keep others from drafting.
    fn sequences_to_draft(
        &mut self,
        sequences: &IdMap<SeqId, Sequence>,
        plan: &StepPlan,
    ) -> Vec<DraftedSequence> {
        let tables = &mut self.rows.block_tables;
        tables.clear();
        let (mut all, mut at) = (Vec::new(), 0);
        for entry in &plan.sequences {
            let Some(asked) = entry.drafts.asked() else { continue };
            let most = asked.min(self.positions.saturating_sub(entry.start));
            if let Some(seq) = sequences.get(&entry.seq).filter(|_| most > 0) {
                let first = tables.len();
                tables.extend_from_slice(&seq.blocks);
                all.push(DraftedSequence {
                    seq: entry.seq,
                    start: entry.start,
                    most,
                    at,
                    table: first..tables.len(),
                    has_caught_up: false,
                    quiet: seq.params.logprobs.is_some().then(|| {
                        let params = seq.params.clone();
                        SampleParams { logprobs: None, ..params }
                    }),
                    drafted: 0,
                });
            }
            at += asked as usize;
        }
        let (valid_positions, tables) = (&self.valid_positions, &self.rows.block_tables);
        all.sort_by_key(|it| {
            it.start - valid_positions.missing(&tables[it.table.clone()], it.start)
        });
        all
    }

    /// Lays out the first pass: what the sequences have missed, up to their last tokens.
    fn lay_out(
        &mut self,
        sequences: &IdMap<SeqId, Sequence>,
        config: &EngineConfig,
        all: &mut [DraftedSequence],
    ) {
        self.rows.clear();
        let mut budget = config.max_num_batched_tokens;
        for drafting in all {
            let Some(seq) = sequences.get(&drafting.seq) else { continue };
            let table = &self.rows.block_tables[drafting.table.clone()];
            // The first of several sequences that share a block writes it; the others read, in this
            // same pass, what it writes. No other sequence has the last token's position.
            let room = (config.max_num_seqs as usize).saturating_sub(self.rows.seqs.len());
            let runs = self.valid_positions.take(table, drafting.start + 1, budget, room);
            for run in runs {
                budget -= run.end - run.start;
                drafting.has_caught_up = run.end > drafting.start;
                self.rows.push(seq, drafting, run, config.block_size);
            }
        }
    }

    /// Computes and samples the batch that is laid out.
    fn pass(
        &mut self,
        shared: &mut B,
        sequences: &IdMap<SeqId, Sequence>,
        all: &[DraftedSequence],
    ) -> Result<(), KernelError> {
        for _ in 0..AGAIN {
            match self.try_pass(shared, sequences, all) {
                Err(KernelError::Again(reason)) => {
                    tracing::warn!(reason, "drafts are computed again");
                }
                result => return result,
            }
        }
        self.try_pass(shared, sequences, all)
    }

    fn try_pass(
        &mut self,
        shared: &mut B,
        sequences: &IdMap<SeqId, Sequence>,
        all: &[DraftedSequence],
    ) -> Result<(), KernelError> {
        let Self { backend, decoder, cache, rows, sampled, .. } = self;
        let backend = backend.as_mut().unwrap_or(shared);
        let cache = cache.as_mut().ok_or_else(|| KernelError::Shape {
            op: "draft",
            message: "there is no KV cache yet".to_owned(),
        })?;
        let mut sampling: Vec<SampleRow<'_>> = std::mem::take(&mut rows.sampling);
        for drafting in all.iter().filter(|it| it.samples_more()) {
            if let Some(seq) = sequences.get(&drafting.seq) {
                let row = seq.sample_row(seq.tokens.len(), None);
                let params = drafting.quiet.as_ref().unwrap_or(row.params);
                sampling.push(SampleRow { params, ..row });
            }
        }
        let batch = Batch {
            positions: &rows.positions,
            slots: &rows.slots,
            seqs: &rows.seqs,
            block_tables: &rows.block_tables,
        };
        backend.begin_step(&StepInputs {
            ids: &rows.ids,
            batch,
            attention: decoder.attention(),
            windows: decoder.windows(),
            sample_rows: &rows.sample_rows,
            sampling: &sampling,
            feed: &[],
            states: &[],
            adapters: &[],
            masked: false,
            is_plain: true,
        })?;
        decoder.forward(backend, cache, &rows.ids, &batch, &[], &[])?;
        sampled.clear();
        if !sampling.is_empty() {
            let vocab = decoder.config().vocab_size;
            let logits = decoder.logits(backend, &rows.sample_rows)?;
            backend.sample(logits, vocab, 0, &sampling, sampled)?;
        }
        backend.end_step()?;
        rows.sampling = recycle(sampling);
        Ok(())
    }

    /// Takes the sampled tokens, and lays out the next pass.
    fn take(
        &mut self,
        sequences: &mut IdMap<SeqId, Sequence>,
        config: &EngineConfig,
        all: &mut [DraftedSequence],
        out: &mut [u32],
    ) {
        self.rows.clear();
        let mut sampled = self.sampled.iter();
        for drafting in all.iter_mut().filter(|it| it.samples_more()) {
            let Some(seq) = sequences.get_mut(&drafting.seq) else { continue };
            let Some(sampled) = sampled.next() else { return };
            if sampled.corrupted {
                // It has no valid logits: it stops drafting.
                drafting.most = drafting.drafted;
                continue;
            }
            seq.tokens.push(sampled.token);
            out[drafting.at + drafting.drafted as usize] = sampled.token;
            drafting.drafted += 1;
            if drafting.samples_more() {
                let position = drafting.start + drafting.drafted;
                let table = &self.rows.block_tables[drafting.table.clone()];
                self.valid_positions.write(table, position..position + 1);
                self.rows.push(seq, drafting, position..position + 1, config.block_size);
            }
        }
    }
}

impl DraftedSequence {
    /// Whether the pass that is laid out samples another token for it.
    fn samples_more(&self) -> bool {
        self.has_caught_up && self.drafted < self.most
    }
}

impl Rows {
    /// Clears the layout, except the block tables.
    fn clear(&mut self) {
        self.ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.seqs.clear();
        self.sample_rows.clear();
    }

    /// Adds these positions of a sequence; samples after the last one if it has caught up.
    fn push(
        &mut self,
        seq: &Sequence,
        drafting: &DraftedSequence,
        positions: Range<u32>,
        size: u32,
    ) {
        let row_start = self.ids.len() as u32;
        let num_rows = positions.end - positions.start;
        self.ids.extend_from_slice(&seq.tokens[positions.start as usize..positions.end as usize]);
        self.positions.extend(positions.clone());
        self.slots.extend(positions.clone().map(|position| seq.slot(position, size)));
        self.seqs.push(SeqRows {
            row_start,
            num_rows,
            context_len: positions.end,
            table_start: drafting.table.start as u32,
            table_len: drafting.table.len() as u32,
        });
        if drafting.has_caught_up {
            self.sample_rows.push(row_start + num_rows - 1);
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Returns the plan with its drafts filled in, if it asks for any. Rank 0 drafts.
    pub(super) fn draft(&mut self, plan: &StepPlan) -> Result<Option<StepPlan>, EngineError> {
        let asked = plan.sequences.iter().filter_map(|entry| entry.drafts.asked());
        let asked: usize = asked.map(|most| most as usize).sum();
        if asked == 0 {
            return Ok(None);
        }
        let mut tokens = vec![NOT_DRAFTED; asked];
        let drafts = self.backend.rank() == 0;
        if drafts {
            let began = Instant::now();
            let Self { backend, draft, sequences, config, .. } = self;
            let draft = draft.as_mut().ok_or_else(|| EngineError::Plan {
                step: plan.step.0,
                message: "drafts are asked for, but there is no draft model".to_owned(),
            })?;
            draft.run(backend, sequences, config, plan, &mut tokens)?;
            self.drafting = Some(began.elapsed());
        }
        self.backend.broadcast_tokens(&mut tokens)?;
        let vocab = self.decoder.config().vocab_size as u32;
        let mut sequences = plan.sequences.clone();
        let mut rest = tokens.as_slice();
        for entry in &mut sequences {
            let Some(most) = entry.drafts.asked() else { continue };
            let (own, others) = rest.split_at(rest.len().min(most as usize));
            rest = others;
            let known = own.iter().copied().take_while(|token| *token < vocab);
            let known: Vec<u32> = known.collect();
            entry.count = 1 + known.len() as u32;
            if drafts {
                self.drafted.push(known.len() as u32);
            }
            entry.drafts = Drafts::Known(known);
        }
        let (epoch, step) = (plan.epoch, plan.step);
        Ok(Some(StepPlan { epoch, step, sequences, ..StepPlan::default() }))
    }
}

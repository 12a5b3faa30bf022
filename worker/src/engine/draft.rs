//! Drafts by a small model: rank 0 holds it whole, and asks nobody. Where a plan says so, it drafts
//! before its step is computed, and tells the other ranks; then the drafts are verified as any are.
//!
//! It keeps K and V of its own in as many blocks as the KV cache has, by the same block tables, so
//! that whatever becomes of blocks (shared, given away, swapped) needs nothing here: [`Written`]
//! knows what of them is its own. What it has not computed of a sequence it computes when it is to
//! draft for it (a prompt's first token waits for nothing), no more rows in a step than a step may
//! have; a sequence that it has not caught up with drafts nothing.
//!
//! A draft is sampled as the token in its place will be, by the same draw from its own
//! probabilities: so a sampled text's drafts are right as often as the two models would say the
//! same.
mod written;

use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

use kernels::backend::{Batch, SeqRows, StepInputs};
use kernels::sampling::{SampleParams, SampleRow, Sampled};
use kernels::{Backend, KernelError};
use shared::ids::SeqId;
use shared::protocol::{Drafts, EngineConfig, StepPlan};

use self::written::Written;
use super::sequence::Sequence;
use super::{AGAIN, Engine, EngineError, recycle};
use crate::model::decoder::Decoder;

/// Where no token was drafted.
const NOT_DRAFTED: u32 = u32::MAX;

/// A model that drafts.
pub struct Draft<B: Backend> {
    /// Its own, where a device's backend is made for one model; else that of the model it drafts
    /// for, whose threads it shares.
    backend: Option<B>,
    decoder: Decoder<B>,
    cache: Option<B::KvCache>,
    /// Positions that it can compute.
    positions: u32,
    written: Written,
    rows: Rows,
    sampled: Vec<Sampled>,
}

/// One pass' batch.
#[derive(Debug, Default)]
struct Rows {
    ids: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    seqs: Vec<SeqRows>,
    /// Of all that draft, for all passes of a step.
    block_tables: Vec<u32>,
    sample_rows: Vec<u32>,
    /// Empty between passes: kept for its memory.
    sampling: Vec<SampleRow<'static>>,
}

/// A sequence that is drafted for.
#[derive(Debug)]
struct Drafting {
    seq: SeqId,
    /// The position of its last token.
    start: u32,
    /// Tokens that may be drafted.
    most: u32,
    /// Where they go.
    at: usize,
    /// Its block table in [`Rows`].
    table: Range<usize>,
    /// Its last token is computed, and what was drafted but for the last.
    has_caught_up: bool,
    /// Its parameters, where it reports log-probabilities: nobody reads those of drafts.
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
    /// A model that drafts up to its position `positions`, on a backend of its own or that of the
    /// model it drafts for.
    #[must_use]
    pub fn new(backend: Option<B>, decoder: Decoder<B>, positions: u32) -> Self {
        Self {
            backend,
            decoder,
            cache: None,
            positions,
            written: Written::default(),
            rows: Rows::default(),
            sampled: Vec::new(),
        }
    }

    /// Bytes that it keeps for a KV block.
    pub(super) fn block_bytes(&self, shared: &B, block_size: usize) -> u64 {
        let backend = self.backend.as_ref().unwrap_or(shared);
        backend.kv_block_bytes(&self.decoder.kv_shape(block_size, 1))
    }

    /// Bytes of weights held.
    pub(super) fn weight_bytes(&self) -> u64 {
        self.decoder.weight_bytes()
    }

    /// Its own backend, if it has one.
    pub(super) fn own_backend(&mut self) -> Option<&mut B> {
        self.backend.as_mut()
    }

    /// Its own backend, if it has one, with what it computes there.
    pub(super) fn own_parts(&mut self) -> Option<(&mut B, &mut Decoder<B>, &mut B::KvCache)> {
        Some((self.backend.as_mut()?, &mut self.decoder, self.cache.as_mut()?))
    }

    /// What its steps are computed by.
    pub(super) fn parts<'a>(&'a mut self, shared: &'a mut B) -> (&'a mut B, &'a mut Decoder<B>) {
        (self.backend.as_mut().unwrap_or(shared), &mut self.decoder)
    }

    /// The longest sequence that it computes.
    pub(super) fn positions(&self) -> u32 {
        self.positions
    }

    /// Makes an empty cache.
    pub(super) fn start(
        &mut self,
        shared: &mut B,
        block_size: u32,
        num_blocks: u32,
    ) -> Result<(), KernelError> {
        let shape = self.decoder.kv_shape(block_size as usize, num_blocks as usize);
        let backend = self.backend.as_mut().unwrap_or(shared);
        self.cache = Some(backend.new_kv_cache(shape)?);
        self.written = Written::new(block_size, num_blocks);
        Ok(())
    }

    /// Drops the cache.
    pub(super) fn release(&mut self) {
        self.cache = None;
        self.written = Written::default();
    }

    /// Other tokens come to these positions of a sequence with this block table.
    pub(super) fn overwrite(&mut self, table: &[u32], positions: Range<u32>) {
        self.written.overwrite(table, positions);
    }

    /// These blocks hold something else.
    pub(super) fn replace(&mut self, blocks: impl Iterator<Item = u32>) {
        blocks.for_each(|block| self.written.replace(block));
    }

    /// Drafts what the plan asks for: for each sequence in turn as many places of `out` as tokens
    /// were asked for.
    fn run(
        &mut self,
        shared: &mut B,
        sequences: &mut HashMap<SeqId, Sequence>,
        config: &EngineConfig,
        plan: &StepPlan,
        out: &mut [u32],
    ) -> Result<(), KernelError> {
        let mut all = self.asked(sequences, plan);
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

    /// The sequences that are to be drafted for, those that miss least first: one that misses much
    /// keeps nobody from drafting.
    fn asked(&mut self, sequences: &HashMap<SeqId, Sequence>, plan: &StepPlan) -> Vec<Drafting> {
        let tables = &mut self.rows.block_tables;
        tables.clear();
        let (mut all, mut at) = (Vec::new(), 0);
        for entry in &plan.sequences {
            let Some(asked) = entry.drafts.asked() else { continue };
            let most = asked.min(self.positions.saturating_sub(entry.start));
            if let Some(seq) = sequences.get(&entry.seq).filter(|_| most > 0) {
                let first = tables.len();
                tables.extend_from_slice(&seq.blocks);
                all.push(Drafting {
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
        let (written, tables) = (&self.written, &self.rows.block_tables);
        all.sort_by_key(|it| it.start - written.missing(&tables[it.table.clone()], it.start));
        all
    }

    /// Lays out the first pass: what is missing of the sequences, up to their last tokens.
    fn lay_out(
        &mut self,
        sequences: &HashMap<SeqId, Sequence>,
        config: &EngineConfig,
        all: &mut [Drafting],
    ) {
        self.rows.clear();
        let mut budget = config.max_num_batched_tokens;
        for drafting in all {
            let Some(seq) = sequences.get(&drafting.seq) else { continue };
            let table = &self.rows.block_tables[drafting.table.clone()];
            // Blocks that several have are written by the first of them; the others read, in this
            // very pass, what that one has written. The last token's position is nobody else's.
            let room = (config.max_num_seqs as usize).saturating_sub(self.rows.seqs.len());
            let runs = self.written.take(table, drafting.start + 1, budget, room);
            for run in runs {
                budget -= run.end - run.start;
                drafting.has_caught_up = run.end > drafting.start;
                self.rows.push(seq, drafting, run, config.block_size);
            }
        }
    }

    /// Computes and samples what is laid out.
    fn pass(
        &mut self,
        shared: &mut B,
        sequences: &HashMap<SeqId, Sequence>,
        all: &[Drafting],
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
        sequences: &HashMap<SeqId, Sequence>,
        all: &[Drafting],
    ) -> Result<(), KernelError> {
        let Self { backend, decoder, cache, rows, sampled, .. } = self;
        let backend = backend.as_mut().unwrap_or(shared);
        let cache = cache.as_mut().ok_or_else(|| KernelError::Shape {
            op: "draft",
            message: "there is no KV cache yet".to_owned(),
        })?;
        let mut sampling: Vec<SampleRow<'_>> = std::mem::take(&mut rows.sampling);
        for drafting in all.iter().filter(|it| it.goes_on()) {
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
            adapters: &[],
            masked: false,
            is_plain: true,
        })?;
        decoder.forward(backend, cache, &rows.ids, &batch, &[])?;
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

    /// Takes what was sampled, and lays out the next pass.
    fn take(
        &mut self,
        sequences: &mut HashMap<SeqId, Sequence>,
        config: &EngineConfig,
        all: &mut [Drafting],
        out: &mut [u32],
    ) {
        self.rows.clear();
        let mut sampled = self.sampled.iter();
        for drafting in all.iter_mut().filter(|it| it.goes_on()) {
            let Some(seq) = sequences.get_mut(&drafting.seq) else { continue };
            let Some(sampled) = sampled.next() else { return };
            if sampled.corrupted {
                // It has nothing to say.
                drafting.most = drafting.drafted;
                continue;
            }
            seq.tokens.push(sampled.token);
            out[drafting.at + drafting.drafted as usize] = sampled.token;
            drafting.drafted += 1;
            if drafting.goes_on() {
                let position = drafting.start + drafting.drafted;
                let table = &self.rows.block_tables[drafting.table.clone()];
                self.written.write(table, position..position + 1);
                self.rows.push(seq, drafting, position..position + 1, config.block_size);
            }
        }
    }
}

impl Drafting {
    /// Whether the pass that is laid out samples another token.
    fn goes_on(&self) -> bool {
        self.has_caught_up && self.drafted < self.most
    }
}

impl Rows {
    /// Nothing is laid out; tables stay.
    fn clear(&mut self) {
        self.ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.seqs.clear();
        self.sample_rows.clear();
    }

    /// Adds these positions of a sequence, whose last is sampled behind if it has caught up.
    fn push(&mut self, seq: &Sequence, drafting: &Drafting, positions: Range<u32>, size: u32) {
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
    /// The plan with what was drafted for it, if anything was to be. Rank 0 drafts.
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

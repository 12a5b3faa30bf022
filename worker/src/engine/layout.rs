//! Checks a plan completely before anything is computed, and lays out its batch in rows.
use kernels::Backend;
use kernels::backend::{NOT_ASSIGNED, SeqRows};
use kernels::sampling::{SampleRow, Sampled};
use shared::protocol::{KeptState, StepPlan};

use super::ahead::Entry;
use super::sequence::Sequence;
use super::swap::HostBlocks;
use super::{Engine, EngineError, HELD_PER_RUNNING, masks, verify};

/// Buffers of a step, reused from step to step.
#[derive(Debug, Default)]
pub(super) struct StepBuffers {
    pub(super) ids: Vec<u32>,
    pub(super) positions: Vec<u32>,
    pub(super) slots: Vec<u32>,
    pub(super) seqs: Vec<SeqRows>,
    /// State of each sequence; empty if the model has no linear attention.
    pub(super) states: Vec<u32>,
    /// States to copy before the step and after it: (from, to).
    pub(super) begin_with: Vec<(u32, u32)>,
    pub(super) keep: Vec<(u32, u32)>,
    pub(super) block_tables: Vec<u32>,
    /// First row of each entry of the plan.
    pub(super) entry_rows: Vec<u32>,
    /// Sampled rows of the batch, and the plan's entry that each belongs to.
    pub(super) sample_rows: Vec<u32>,
    pub(super) sample_entries: Vec<usize>,
    /// Rows of the previous step whose tokens this step needs; empty if all its tokens are known.
    pub(super) feed: Vec<u32>,
    /// Adapter of each row; empty if no row has one.
    pub(super) adapters: Vec<u32>,
    /// Empty between steps; kept for its allocation.
    pub(super) sampling: Vec<SampleRow<'static>>,
    pub(super) sampled: Vec<Sampled>,
    /// Empty lists of sequences that get a token; kept for their allocations.
    pub(super) entries: Vec<Vec<Entry>>,
    pub(super) tokens: Vec<u32>,
    /// Rows and next tokens of one chunk of prompt log-probabilities.
    pub(super) prompt_rows: Vec<u32>,
    pub(super) targets: Vec<u32>,
    /// Rows from which an embedding is made.
    pub(super) hidden: Vec<f32>,
}

impl StepBuffers {
    /// Number of tokens up to and including a sampled row's.
    pub(super) fn known(&self, row: usize) -> usize {
        self.positions[self.sample_rows[row] as usize] as usize + 1
    }

    fn clear(&mut self) {
        self.ids.clear();
        self.positions.clear();
        self.slots.clear();
        self.seqs.clear();
        self.states.clear();
        self.begin_with.clear();
        self.keep.clear();
        self.block_tables.clear();
        self.entry_rows.clear();
        self.sample_rows.clear();
        self.sample_entries.clear();
        self.feed.clear();
        self.adapters.clear();
    }
}

impl<B: Backend> Engine<B> {
    /// Forgets, swaps and admits sequences.
    pub(super) fn admit(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        let on_host = self.host.as_ref().map_or(0, HostBlocks::count);
        let held_max = self.config.max_num_seqs as usize * HELD_PER_RUNNING + on_host;
        for seq in &plan.finished {
            let Some(Sequence { host: blocks, state, .. }) = self.sequences.remove(seq) else {
                continue;
            };
            if let (Some(blocks), Some(host)) = (blocks, &mut self.host) {
                host.free(&blocks);
            }
            if let Some(state) = state {
                self.states.give_back(state);
            }
        }
        self.swap(plan)?;
        for new in &plan.admitted {
            let fault = |message: String| EngineError::Plan { step: plan.step.0, message };
            let max = self.config.max_model_len as usize;
            if new.tokens.is_empty() || new.tokens.len() > max {
                let len = new.tokens.len();
                return Err(fault(format!("{} has {len} tokens, the limit is {max}", new.seq)));
            }
            if self.decoder.adapter_row(new.adapter).is_none() {
                return Err(fault(format!("{} has adapter {}, not loaded", new.seq, new.adapter)));
            }
            if new.num_prompt as usize > new.tokens.len() {
                return Err(fault(format!("{} has fewer tokens than its prompt", new.seq)));
            }
            new.sampling
                .check(self.decoder.config().vocab_size as u32)
                .map_err(|message| fault(format!("{}: {message}", new.seq)))?;
            if self.sequences.len() >= held_max {
                return Err(fault(format!("{held_max} sequences are held, the limit is reached")));
            }
            let mut sequence = Sequence::new(new, max);
            if self.decoder.config().delta.is_some() {
                let fault = |message| fault(format!("{} {message}", new.seq));
                sequence.begins_with = self.states.begins_with(plan, new.seq).map_err(fault)?;
                sequence.state = Some(self.states.take().map_err(fault)?);
            }
            if self.sequences.insert(new.seq, sequence).is_some() {
                return Err(fault(format!("{} is admitted twice", new.seq)));
            }
        }
        let is_new = |kept: &&KeptState| plan.admitted.iter().any(|new| new.seq == kept.seq);
        if let Some(kept) = plan.begin_with.iter().find(|kept| !is_new(kept)) {
            let message = format!("{} is not new, but is to begin with a state", kept.seq);
            return Err(EngineError::Plan { step: plan.step.0, message });
        }
        Ok(())
    }

    /// Checks the plan, and gives its sequences their blocks.
    pub(super) fn check(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        let fault = |message: String| EngineError::Plan { step: plan.step.0, message };
        if self.cache.is_none() && !plan.sequences.is_empty() {
            return Err(fault("there is no KV cache yet".to_owned()));
        }
        let vocab = self.decoder.config().vocab_size as u32;
        if plan.sequences.len() > self.config.max_num_seqs as usize {
            let (len, max) = (plan.sequences.len(), self.config.max_num_seqs);
            return Err(fault(format!("{len} sequences, the limit is {max}")));
        }
        if self.decoder.config().delta.is_some() {
            self.states.check(&plan.keep, &plan.sequences).map_err(fault)?;
        }
        let (mut tokens, mut rows) = (0, 0);
        for entry in &plan.sequences {
            let seq = self
                .sequences
                .get_mut(&entry.seq)
                .ok_or_else(|| fault(format!("{} is not known", entry.seq)))?;
            if seq.last_step.replace(plan.step) == Some(plan.step) {
                return Err(fault(format!("{} occurs twice", entry.seq)));
            }
            if self.decoder.adapter_row(seq.adapter).is_none() {
                return Err(fault(format!("{} has adapter {}, dropped", entry.seq, seq.adapter)));
            }
            seq.check(entry, &self.config, self.num_blocks)
                .and_then(|()| masks::check(entry))
                .and_then(|()| match entry.drafts.is_empty() {
                    true => Ok(()),
                    false => verify::check(seq, entry, vocab),
                })
                .map_err(|message| fault(format!("{} {message}", entry.seq)))?;
            seq.blocks.extend(entry.new_blocks.iter().map(|block| block.0));
            if let Some(draft) = &mut self.draft {
                // This also drops what it computed for rejected drafts: the token in the place of
                // the first one is computed now.
                draft.overwrite(&seq.blocks, entry.start..entry.start + entry.count);
            }
            let (start, end) = (entry.start as usize, (entry.start + entry.count) as usize);
            let known = &seq.tokens[start..end.min(seq.tokens.len())];
            if let Some(token) = known.iter().find(|token| **token >= vocab) {
                return Err(fault(format!("{} has token {token} of {vocab}", entry.seq)));
            }
            tokens += entry.count as usize;
            rows += 1 + entry.drafts.len();
        }
        let max = self.config.max_num_batched_tokens as usize;
        if tokens > max {
            return Err(fault(format!("{tokens} tokens, the limit is {max}")));
        }
        // Each draft is a decode row of its own; other shares sample at most one row.
        let max = self.config.max_num_seqs as usize;
        if rows > max {
            return Err(fault(format!("{rows} sequences and drafts, the limit is {max}")));
        }
        Ok(())
    }

    /// Lays out the batch of a checked plan whose drafts are known.
    pub(super) fn lay_out(&mut self, plan: &StepPlan) {
        let step = &mut self.step;
        step.clear();
        for (index, entry) in plan.sequences.iter().enumerate() {
            // Always found: the plan was checked.
            let Some(seq) = self.sequences.get_mut(&entry.seq) else { continue };
            seq.tokens.extend_from_slice(entry.drafts.known());
            let (start, end) = (entry.start as usize, (entry.start + entry.count) as usize);
            let tokens = &seq.tokens[start..end];
            let row_start = step.ids.len() as u32;
            step.entry_rows.push(row_start);
            if self.decoder.num_adapters() > 0 {
                let rows = step.adapters.len() + entry.count as usize;
                let row = self.decoder.adapter_row(seq.adapter).unwrap_or(NOT_ASSIGNED);
                step.adapters.resize(rows, row);
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
            step.states.extend(seq.state);
            if let (Some(own), Some(kept)) = (seq.state, seq.begins_with.take()) {
                step.begin_with.push((kept, own));
            }
            seq.computed = Some(entry.start + entry.count);
            if entry.sample {
                step.sample_rows.push(row_start + entry.count - 1);
                step.sample_entries.push(index);
            }
        }
        for kept in &plan.keep {
            let seq = self.sequences.get(&kept.seq);
            let own = seq.and_then(|seq| Some((seq.state?, seq.computed?)));
            let Some((own, seen)) = own else { continue };
            step.keep.extend(self.states.keep(kept.place, seen).map(|place| (own, place)));
        }
        if step.adapters.iter().all(|row| *row == NOT_ASSIGNED) {
            step.adapters.clear();
        }
    }
}

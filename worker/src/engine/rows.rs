//! One step's rows as the kernels want them: kept from step to step, so that a step allocates
//! nothing once they have grown.
use kernels::backend::{Batch, SeqRows};
use shared::protocol::SequenceStep;

use super::sequence::Sequence;

/// The batch being built.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Token of every row.
    pub(super) tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    /// The sequences, in the plan's order.
    pub(super) seqs: Vec<SeqRows>,
    block_tables: Vec<u32>,
    /// The last row of every sequence that samples.
    pub(super) sampled: Vec<u32>,
}

impl Rows {
    /// Room for steps of these sizes.
    pub(super) fn with_capacity(max_num_batched_tokens: usize, max_num_seqs: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(max_num_batched_tokens),
            positions: Vec::with_capacity(max_num_batched_tokens),
            slots: Vec::with_capacity(max_num_batched_tokens),
            seqs: Vec::with_capacity(max_num_seqs),
            block_tables: Vec::new(),
            sampled: Vec::with_capacity(max_num_seqs),
        }
    }

    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.seqs.clear();
        self.block_tables.clear();
        self.sampled.clear();
    }

    /// Adds a sequence that [`Sequence::advance`] has checked.
    pub(super) fn push(&mut self, sequence: &Sequence, run: &SequenceStep, block_size: u32) {
        let end = run.start + run.count;
        self.seqs.push(SeqRows {
            row_start: self.tokens.len() as u32,
            num_rows: run.count,
            context_len: end,
            table_start: self.block_tables.len() as u32,
            table_len: sequence.table.blocks().len() as u32,
        });
        self.tokens.extend_from_slice(&sequence.tokens[run.start as usize..end as usize]);
        self.positions.extend(run.start..end);
        self.slots.extend(
            (run.start..end).filter_map(|position| sequence.table.slot(position, block_size)),
        );
        self.block_tables.extend_from_slice(sequence.table.blocks());
        if run.sample {
            self.sampled.push(self.tokens.len() as u32 - 1);
        }
    }

    pub(super) fn batch(&self) -> Batch<'_> {
        Batch {
            positions: &self.positions,
            slots: &self.slots,
            seqs: &self.seqs,
            block_tables: &self.block_tables,
        }
    }
}

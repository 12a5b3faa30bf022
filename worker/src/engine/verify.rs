//! Verification of drafts: a sequence's last token and the drafts after it are computed as separate
//! rows, each over the cache up to itself, so that every row is bit for bit what a step for its
//! token alone would compute. A token is sampled after each row. These tokens count up to and
//! including the first that differs from the draft in its place; later steps overwrite what was
//! written for the drafts after it.
use kernels::backend::SeqRows;
use kernels::sampling::Sampled;
use shared::protocol::{EngineConfig, SequenceOutput, SequenceStep, TokenDigest};

use super::layout::StepBuffers;
use super::report::sampled_output;
use super::sequence::Sequence;

/// Checks a share with drafts, in addition to the checks of any share.
pub(super) fn check(seq: &Sequence, entry: &SequenceStep, vocab: u32) -> Result<(), String> {
    let drafts = entry.drafts.len();
    if entry.count as usize != drafts + 1 {
        let count = entry.count;
        return Err(format!("has {drafts} drafts, but {count} tokens to compute"));
    }
    if !entry.sample || entry.masked {
        return Err("has drafts, but is not to be sampled freely".to_owned());
    }
    if entry.start as usize + 1 != seq.tokens.len() {
        let (start, known) = (entry.start, seq.tokens.len());
        return Err(format!("has drafts after position {start}, but {known} tokens"));
    }
    match entry.drafts.known().iter().find(|token| **token >= vocab) {
        Some(token) => Err(format!("has draft {token} of {vocab}")),
        None => Ok(()),
    }
}

impl StepBuffers {
    /// Lays out a share with drafts: decode rows that share a block table.
    pub(super) fn lay_out_drafts(
        &mut self,
        entry: &SequenceStep,
        index: usize,
        seq: &Sequence,
        table_start: u32,
        config: &EngineConfig,
    ) {
        for (row, position) in (entry.start..entry.start + entry.count).enumerate() {
            let row_start = self.ids.len() as u32;
            self.ids.push(seq.tokens[entry.start as usize + row]);
            self.positions.push(position);
            self.slots.push(seq.slot(position, config.block_size));
            self.seqs.push(SeqRows {
                row_start,
                num_rows: 1,
                context_len: position + 1,
                table_start,
                table_len: seq.blocks.len() as u32,
            });
            self.sample_rows.push(row_start);
            self.sample_entries.push(index);
        }
    }
}

impl Sequence {
    /// Returns how many of `tokens`, which were sampled after each row of a share, count.
    fn counting(&self, entry: &SequenceStep, tokens: &[u32]) -> usize {
        let agreeing =
            tokens.iter().zip(entry.drafts.known()).take_while(|(token, draft)| token == draft);
        agreeing.count() + 1
    }

    /// Replaces the drafts by the sampled `tokens` that count; returns their number.
    pub(super) fn verify(
        &mut self,
        entry: &SequenceStep,
        tokens: &[u32],
        digest: &mut TokenDigest,
    ) -> usize {
        let counting = self.counting(entry, tokens).min(tokens.len());
        self.tokens.truncate(entry.start as usize + 1);
        for token in &tokens[..counting] {
            *digest = digest.with(entry.seq, self.tokens.len() as u32, *token);
            self.tokens.push(*token);
        }
        self.computed = Some(entry.start + counting as u32);
        counting
    }
}

/// Reports the sampled tokens that count.
pub(super) fn report(
    entry: &SequenceStep,
    sampled: impl Iterator<Item = Sampled>,
    wants_logprobs: bool,
    outputs: &mut Vec<SequenceOutput>,
) {
    for (position, sampled) in (entry.start + 1..).zip(sampled) {
        outputs.push(sampled_output(entry.seq, position, sampled, wants_logprobs));
    }
}

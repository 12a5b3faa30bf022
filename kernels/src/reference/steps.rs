//! Sampling, by the sampler that is its definition.
use super::{ReferenceBackend, ReferenceBuffer, below, sampler};
use crate::backend::{Buffer as _, StepOps};
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};

impl StepOps for ReferenceBackend {
    fn sample(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check_logits("sample", logits, vocab, first_row, rows.len())?;
        rows.iter().try_for_each(|row| row.check_mask(vocab))?;
        out.clear();
        out.extend(rows.iter().enumerate().map(|(i, row)| {
            let logits = &logits.row(first_row + i)[..vocab];
            sampler::sample(logits, row)
        }));
        Ok(())
    }

    fn logprobs(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check_logits("logprobs", logits, vocab, first_row, targets.len())?;
        for &target in targets {
            below("logprobs", "target", target as usize, vocab)?;
        }
        out.clear();
        out.extend(targets.iter().enumerate().map(|(i, &target)| {
            let logits = &logits.row(first_row + i)[..vocab];
            sampler::score(logits, target, top_n)
        }));
        Ok(())
    }
}

fn check_logits(
    op: &'static str,
    logits: &ReferenceBuffer,
    vocab: usize,
    first_row: usize,
    rows: usize,
) -> Result<(), KernelError> {
    below(op, "vocab", vocab, logits.width() + 1)?;
    below(op, "first_row + rows", first_row.saturating_add(rows), logits.rows() + 1)
}

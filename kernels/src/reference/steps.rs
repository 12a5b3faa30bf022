//! Sampling, with the reference sampler.
use super::{ReferenceBackend, sampler};
use crate::backend::StepOps;
use crate::check;
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
        check::logits("sample", logits, vocab, first_row, rows.len())?;
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
        check::logits("logprobs", logits, vocab, first_row, targets.len())?;
        check::below_bound("logprobs", "target", targets, vocab)?;
        out.clear();
        out.extend(targets.iter().enumerate().map(|(i, &target)| {
            let logits = &logits.row(first_row + i)[..vocab];
            sampler::score(logits, target, top_n)
        }));
        Ok(())
    }
}

//! Sampling, rows in parallel. Steps need no framing on CPUs.
use super::memory::Disjoint;
use super::sample::Sampler;
use super::{CpuBackend, CpuBuffer};
use crate::backend::StepOps;
use crate::check;
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};

impl StepOps for CpuBackend {
    fn sample(
        &mut self,
        logits: &CpuBuffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check::logits("sample", logits, vocab, first_row, rows.len())?;
        rows.iter().try_for_each(|row| row.check_mask(vocab))?;
        self.each_row(rows.len(), out, &|sampler, i| {
            sampler.sample(&logits.row(first_row + i)[..vocab], &rows[i])
        })
    }

    fn logprobs(
        &mut self,
        logits: &CpuBuffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError> {
        check::logits("logprobs", logits, vocab, first_row, targets.len())?;
        check::below_bound("logprobs", "target", targets, vocab)?;
        self.each_row(targets.len(), out, &|sampler, i| {
            sampler.score(&logits.row(first_row + i)[..vocab], targets[i], top_n)
        })
    }
}

impl CpuBackend {
    /// Fills `out` with the results of `operation` for rows `0..count`, rows in parallel.
    fn each_row(
        &mut self,
        count: usize,
        out: &mut Vec<Sampled>,
        operation: &(dyn Fn(&mut Sampler, usize) -> Sampled + Sync),
    ) -> Result<(), KernelError> {
        out.clear();
        out.resize_with(count, Sampled::default);
        let workers = Disjoint::new(&mut self.workers);
        let out = Disjoint::new(out);
        self.pool.run_ranges(count, 1, &|range, worker| {
            // SAFETY: no two running tasks have the same worker.
            let sampler = &mut unsafe { workers.slice(worker, 1) }[0].sampler;
            for i in range {
                // SAFETY: every row belongs to one task.
                let slot = &mut unsafe { out.slice(i, 1) }[0];
                *slot = operation(sampler, i);
            }
        })
    }
}

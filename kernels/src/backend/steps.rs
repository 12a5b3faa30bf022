//! A step's beginning and end, and the tokens that come of it.
use super::{StepInputs, Tensors};
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};

/// Steps as a whole, and sampling: see [`crate::backend`].
pub trait StepOps: Tensors {
    /// A step begins. What an earlier one left unfinished is dropped.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Device`].
    fn begin_step(&mut self, step: &StepInputs<'_>) -> Result<(), KernelError> {
        let _ = step;
        Ok(())
    }

    /// Hands what was called of the open step to the device, which computes it while its host waits
    /// for masks ([`StepInputs::masked`]).
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn launch_step(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// The step that began last is complete: all of its work has at least been handed to the
    /// device, in order.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn end_step(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Leaves the open step's logits where they are, where that does: `sample` and `queue_sample`
    /// are then given this rank's own, whose first `count` columns are the tokens from `first_id`
    /// on, a part of the vocabulary that is not empty on any rank. False when they have to be
    /// gathered.
    fn keeps_logits_apart(&mut self, first_id: u32, count: usize) -> bool {
        let _ = (first_id, count);
        false
    }

    /// Samples row `first_row + i` of `logits` as `rows[i]` says; only the first `vocab` columns
    /// count (the rest is padding). Clears and fills `out`. A mask is always one of the whole
    /// vocabulary, also where logits are kept apart.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn sample(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError>;

    /// Whether [`Self::queue_sample`] and what belongs to it can be called.
    fn queues_samples(&self) -> bool {
        false
    }

    /// As `sample` for all rows, but the results stay on the device until `take_sampled`. Of a row
    /// that is fed ([`StepInputs::feed`]), the last token of [`SampleRow::output`] is the one that
    /// it is fed with, whatever stands there.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Unsupported`].
    fn queue_sample(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        rows: &[SampleRow<'_>],
    ) -> Result<(), KernelError> {
        let _ = (logits, vocab, rows);
        Err(KernelError::Unsupported("samples cannot be queued here".to_owned()))
    }

    /// Whether `take_sampled` would not have to wait; true when nothing is queued.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn is_sampled(&mut self) -> Result<bool, KernelError> {
        Ok(true)
    }

    /// Waits for what was queued first and not taken yet. Clears and fills `out`.
    ///
    /// # Errors
    /// [`KernelError::Device`]; [`KernelError::Shape`] when nothing is queued.
    fn take_sampled(&mut self, out: &mut Vec<Sampled>) -> Result<(), KernelError> {
        out.clear();
        Err(KernelError::Shape { op: "take_sampled", message: "nothing is queued".to_owned() })
    }

    /// Log-probability and rank of `targets[i]` in row `first_row + i` of `logits`, and the `top_n`
    /// most likely tokens there. Clears and fills `out`; `token` is the target.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn logprobs(
        &mut self,
        logits: &Self::Buffer,
        vocab: usize,
        first_row: usize,
        targets: &[u32],
        top_n: u32,
        out: &mut Vec<Sampled>,
    ) -> Result<(), KernelError>;
}

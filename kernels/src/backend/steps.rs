//! Beginning and end of a step, and token sampling.
use super::{StepInputs, Tensors};
use crate::error::KernelError;
use crate::sampling::{SampleRow, Sampled};

/// Step framing and sampling: see [`crate::backend`].
pub trait StepOps: Tensors {
    /// Begins a step. Drops whatever an earlier step left unfinished.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Device`].
    fn begin_step(&mut self, step: &StepInputs<'_>) -> Result<(), KernelError> {
        let _ = step;
        Ok(())
    }

    /// Hands the calls made so far in the open step to the device, which computes them while the
    /// host waits for masks ([`StepInputs::masked`]).
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn launch_step(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Completes the open step: all of its work has at least been handed to the device, in order.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn end_step(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Leaves the open step's logits on their ranks if the backend can: `sample` and `queue_sample`
    /// are then given this rank's own logits, whose first `count` columns are the tokens from
    /// `first_id` on, a part of the whole vocabulary of `vocab` that is not empty on any rank.
    /// Returns false if the logits have to be gathered.
    fn keeps_logits_apart(&mut self, first_id: u32, count: usize, vocab: usize) -> bool {
        let _ = (first_id, count, vocab);
        false
    }

    /// Samples row `first_row + i` of `logits` according to `rows[i]`; only the first `vocab`
    /// columns count (the rest is padding). Clears and fills `out`. A mask always covers the whole
    /// vocabulary, even if the logits are kept on their ranks.
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

    /// Whether [`Self::queue_sample`] and [`Self::take_sampled`] are supported.
    fn queues_samples(&self) -> bool {
        false
    }

    /// As `sample` for all rows, but the results stay on the device until `take_sampled`. For a row
    /// that is fed ([`StepInputs::feed`]), the last token of [`SampleRow::output`] is a placeholder
    /// for the token that it is fed with.
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

    /// Whether `take_sampled` would return without waiting; true if nothing is queued.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    fn is_sampled(&mut self) -> Result<bool, KernelError> {
        Ok(true)
    }

    /// Waits for the oldest queued results and takes them. Clears and fills `out`.
    ///
    /// # Errors
    /// [`KernelError::Device`]; [`KernelError::Shape`] if nothing is queued.
    fn take_sampled(&mut self, out: &mut Vec<Sampled>) -> Result<(), KernelError> {
        out.clear();
        Err(KernelError::Shape { op: "take_sampled", message: "nothing is queued".to_owned() })
    }

    /// Log-probability and rank of `targets[i]` in row `first_row + i` of `logits`, and the row's
    /// `top_n` most likely tokens. Clears and fills `out`; `token` is the target.
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

//! What ranks exchange.
use super::RowOps;
use crate::collective::Tally;
use crate::error::KernelError;

/// Sums and logits of all ranks.
pub trait ExchangeOps: RowOps {
    /// Sums `data` over all ranks, as a binary tree over the ranks in order: `(0 + 1) + (2 + 3)`.
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn all_reduce(&mut self, data: &mut Self::Buffer) -> Result<(), KernelError>;

    /// [`Self::all_reduce`] of `delta`, then [`RowOps::add_rmsnorm`] with it, to the same bits;
    /// what `delta` holds then is undefined.
    ///
    /// # Errors
    /// As those two.
    fn all_reduce_add_rmsnorm(
        &mut self,
        delta: &mut Self::Buffer,
        residual: &mut Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        self.all_reduce(delta)?;
        self.add_rmsnorm(residual, Some(delta), weight, eps, out)
    }

    /// Collects `local: [rows, vocab_local]` of all ranks (equal widths) into rank 0's
    /// `full: [rows, world_size * vocab_local]`; other ranks' `full` is untouched, unless
    /// [`Self::samples_everywhere`].
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn gather_logits(
        &mut self,
        local: &Self::Buffer,
        full: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Whether [`Self::samples_everywhere`] may become true: then every rank's buffers have room
    /// for what rank 0's have.
    fn may_sample_everywhere(&self) -> bool {
        false
    }

    /// Whether `gather_logits` gathers on every rank, so that each samples for itself, and finds
    /// what the others find.
    fn samples_everywhere(&self) -> bool {
        false
    }

    /// Overwrites `tokens` on every rank by rank 0's.
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError>;

    /// Time spent in collectives since the last call, and resets it; zero where
    /// [`Self::samples_everywhere`], since devices that exchange data by themselves do not tell.
    fn take_collective_time(&mut self) -> std::time::Duration;

    /// Bytes given to collectives since the last call, and resets them.
    fn take_exchanged(&mut self) -> Tally {
        Tally::default()
    }
}

//! Exchanges between ranks.
use super::RowOps;
use crate::collective::ByteCounters;
use crate::error::KernelError;

/// All-reduce, gathering of logits, and broadcast.
pub trait ExchangeOps: RowOps {
    /// Sums `data` over all ranks, as a binary tree over the ranks in order: `(0 + 1) + (2 + 3)`.
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn all_reduce(&mut self, data: &mut Self::Buffer) -> Result<(), KernelError>;

    /// [`Self::all_reduce`] of what is added to the residual stream. Devices may round each rank's
    /// part and the sums to bf16, where they would otherwise wait for links: a model's own weights
    /// and activations are no more precise.
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn all_reduce_delta(&mut self, delta: &mut Self::Buffer) -> Result<(), KernelError> {
        self.all_reduce(delta)
    }

    /// [`Self::all_reduce_delta`], then [`RowOps::add_rmsnorm`] with it, bit for bit. The contents
    /// of `delta` are undefined afterwards.
    ///
    /// # Errors
    /// As those two operations.
    fn all_reduce_add_rmsnorm(
        &mut self,
        delta: &mut Self::Buffer,
        residual: &mut Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        self.all_reduce_delta(delta)?;
        self.add_rmsnorm(residual, Some(delta), weight, eps, out)
    }

    /// Collects `local: [rows, vocab_local]` of all ranks (equal widths) into rank 0's
    /// `full: [rows, world_size * vocab_local]`. Leaves `full` of the other ranks untouched, unless
    /// [`Self::samples_everywhere`].
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn gather_logits(
        &mut self,
        local: &Self::Buffer,
        full: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Whether [`Self::samples_everywhere`] can become true. If so, every rank's buffers need the
    /// same capacity as rank 0's.
    fn may_sample_everywhere(&self) -> bool {
        false
    }

    /// Whether `gather_logits` gathers on every rank, so that each rank samples for itself, with
    /// the same result as the others.
    fn samples_everywhere(&self) -> bool {
        false
    }

    /// Overwrites `tokens` on every rank with rank 0's.
    ///
    /// # Errors
    /// [`KernelError::Collective`].
    fn broadcast_tokens(&mut self, tokens: &mut [u32]) -> Result<(), KernelError>;

    /// Looks whether the collective was aborted, between two layers of a step: a rank alone, or one
    /// that computes for long, exchanges nothing meanwhile. Devices that compute in the background
    /// look while they are waited for instead.
    ///
    /// # Errors
    /// [`KernelError::Collective`] if so.
    fn check_abort(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Whether the time spent in collectives is known: devices that exchange data by themselves may
    /// not report it.
    fn times_collectives(&self) -> bool {
        true
    }

    /// Returns the time spent in collectives since the last call, and resets it; zero unless
    /// [`Self::times_collectives`]. Where devices exchange data by themselves, a step's time may
    /// come with the next one's.
    fn take_collective_time(&mut self) -> std::time::Duration;

    /// Returns the bytes exchanged in collectives since the last call, and resets them.
    fn take_exchanged(&mut self) -> ByteCounters {
        ByteCounters::default()
    }
}

//! Operations on rows of activations.
use super::{LayerNorm, Tensors};
use crate::error::KernelError;

/// Embedding, sums and norms.
pub trait RowOps: Tensors {
    /// `out[i] = table[ids[i] - first_id] * scale`, or zeros if that row is on another rank.
    /// `table: [vocab_local, hidden]`, `out: [ids.len(), hidden]` (sets its rows).
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn embed(
        &mut self,
        table: &Self::Matrix,
        ids: &[u32],
        first_id: u32,
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `residual += delta` (if given), then `out = residual / rms(residual) * weight`.
    /// All `[rows, hidden]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add_rmsnorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: Option<&Self::Buffer>,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `residual += delta` (if given), then a LayerNorm: `out = (residual - mean(residual)) /
    /// sqrt(variance(residual) + eps) * weight + bias`. All `[rows, hidden]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add_layernorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: Option<&Self::Buffer>,
        norm: LayerNorm<'_, Self::Vector>,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `residual += delta / rms(delta) * delta_weight`, then
    /// `out = residual / rms(residual) * weight`: normalises the addend too. All `[rows, hidden]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add_normed_rmsnorm(
        &mut self,
        residual: &mut Self::Buffer,
        delta: &Self::Buffer,
        delta_weight: &Self::Vector,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `residual += delta / rms(delta) * weight` (if given), then `out = residual`. All of one
    /// shape, `[rows, hidden]` or another.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add_normed(
        &mut self,
        residual: &mut Self::Buffer,
        added: Option<(&Self::Buffer, &Self::Vector)>,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `sum += other`. Both `[rows, width]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn add(&mut self, sum: &mut Self::Buffer, other: &Self::Buffer) -> Result<(), KernelError>;
}

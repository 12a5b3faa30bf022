//! Attention and its KV cache.
#[cfg(doc)]
use super::AttentionShape;
use super::{AttentionAt, QkvInput, Tensors};
use crate::error::KernelError;

/// Attention over a paged cache whose blocks can be swapped to host memory.
pub trait AttentionOps: Tensors {
    /// `qkv = x W^T + bias + addend`; RMSNorm per head of q and k if the model has it; RoPE on q
    /// and k; k and v written to the cache's layer at the batch's slots; q to
    /// `q_out: [rows, num_heads * head_dim]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn qkv_rope_write(
        &mut self,
        input: QkvInput<'_, Self::Buffer, Self::Matrix, Self::Vector>,
        at: AttentionAt<'_>,
        cache: &mut Self::KvCache,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Causal attention of every row over its sequence's cached K and V, scaled by
    /// `1 / sqrt(head_dim)`, then capped ([`AttentionShape::softcap`]).
    /// `q, out: [rows, num_heads * head_dim]`. `sinks: [num_heads]`: attention sinks, one unscaled
    /// logit per head that joins the softmax's denominator and has no V (gpt-oss).
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn paged_attention(
        &mut self,
        q: &Self::Buffer,
        sinks: Option<&Self::Vector>,
        at: AttentionAt<'_>,
        cache: &Self::KvCache,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Copies blocks of the cache (K and V of all layers) to host memory: (block, host block)
    /// pairs, no host block twice. Not allowed within a step. Later calls that write to those
    /// blocks of the cache are ordered after the copy.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a block does not exist or is written twice;
    /// [`KernelError::Device`].
    fn swap_out(
        &mut self,
        cache: &Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError>;

    /// Copies blocks from host memory to the cache: (block, host block) pairs, no block twice. Not
    /// allowed within a step. All later calls see the copied blocks.
    ///
    /// # Errors
    /// As [`Self::swap_out`].
    fn swap_in(
        &mut self,
        cache: &mut Self::KvCache,
        host: &mut Self::HostKv,
        pairs: &[(u32, u32)],
    ) -> Result<(), KernelError>;
}

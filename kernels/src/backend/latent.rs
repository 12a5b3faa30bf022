//! Multi-head latent attention (DeepSeek V2 and V3). The cache holds one vector per token for all
//! heads: a latent, from which each head's K and V could be computed, and a rotated part of K that
//! heads share. It is never widened: the matrix that makes a head's K of the latent is applied to
//! the head's q instead, and the one that makes its V, to what attention returns. So attention has
//! one KV head, whose V is the first part of its K ([`KvShape::latent`]).
//!
//! A layer calls [`LatentOps::latent_write`], [`LatentOps::heads_product`] for q,
//! [`AttentionOps::paged_attention`], and [`LatentOps::heads_product`] for its results.
use super::{AttentionAt, RopeTable, Tensors};
#[cfg(doc)]
use super::{AttentionOps, KvShape};
use crate::error::KernelError;

/// What a layer has projected, and what it is finished with.
#[derive(Debug)]
pub struct LatentInput<'a, B, V> {
    /// `[rows, num_heads * (plain + rotated)]`: of each head, the part without positions, then the
    /// part to rotate.
    pub q: &'a B,
    /// `[rows, latent + rotated]`; undefined afterwards. A [`Tensors::new_buffer`], as `q`.
    pub kv: &'a mut B,
    /// RMSNorm of the latent, `[latent]`.
    pub norm: &'a V,
    /// RoPE tables, for `rotated` elements.
    pub rope: &'a RopeTable<V>,
    /// Factor of q.
    pub scale: f32,
}

/// Attention over latents.
pub trait LatentOps: Tensors {
    /// The latent of `kv` is normalised and its other elements are rotated; together they are
    /// written to the cache's layer at the batch's slots. The parts of q without positions go to
    /// `plain: [rows, num_heads * plain]`. The others are rotated and, times `scale`, become the
    /// last elements of each head of `q_out: [rows, num_heads * head_dim]`, whose first elements,
    /// `latent` of each head, are undefined. Sets the rows of both, which are
    /// [`Tensors::new_input_buffer`]s.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn latent_write(
        &mut self,
        input: LatentInput<'_, Self::Buffer, Self::Vector>,
        at: AttentionAt<'_>,
        cache: &mut Self::KvCache,
        plain: &mut Self::Buffer,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// A product for each head: `out[r, h] = scale * x[r, h] W[h]^T`, with `x: [rows, heads * in]`
    /// and `weight`: a matrix `[n, in]` per head, in bf16. They are the first `n` elements of each
    /// head of `out: [rows, heads * at least n]`; its other elements stay. Both are
    /// [`Tensors::new_input_buffer`]s; sets the rows of `out`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn heads_product(
        &mut self,
        x: &Self::Buffer,
        weight: &Self::Stack,
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
}

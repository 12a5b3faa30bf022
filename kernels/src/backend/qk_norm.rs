//! The norm of q and k over the heads of all ranks (OLMo 2), where other models normalise each head
//! by itself or not at all. It takes the place of [`AttentionOps::qkv_rope_write`]: the projection
//! is a product like any other, and between the steps below, ranks add up their sums.
#[cfg(doc)]
use super::AttentionOps;
use super::{AttentionAt, RopeTable, Tensors};
use crate::error::KernelError;

/// What a rank has of the q and k that are normalised together. Mamba 2 has its results so, as q
/// without a k, whose columns are none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// Columns of q on this rank, and those of k, which follow them.
    pub columns: [usize; 2],
    /// Number of equal sections of q's columns, and of k's; each divides `parts`.
    pub sections: [usize; 2],
    /// Number of parts in which this rank's squares are added up: a power of two. Part `i` has
    /// section `i * sections / parts`. So a section of k counts as often as it would on more ranks,
    /// where several have the same KV head.
    pub parts: usize,
    /// Number of squares of q, and of k, in the sums of all ranks.
    pub counts: [usize; 2],
    /// Epsilon of the norms.
    pub eps: f32,
}

impl QkNorm {
    /// Upper limit of `parts`.
    pub const PARTS_MAX: usize = 64;
}

/// q and k normalised over all heads. In all of these, `qkv: [rows, width]` is a
/// [`Tensors::new_buffer`] with the projected q, k and v one after the other.
pub trait QkNormOps: Tensors {
    /// `out[r] = [sum of the squares of row r's q, and of its k]`, added up over the parts as a
    /// binary tree. `out: [rows, 2]`, a [`Tensors::new_buffer`] (sets its rows).
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn qk_squares(
        &mut self,
        qkv: &Self::Buffer,
        norm: &QkNorm,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `q *= weight / sqrt(squares[0] / counts[0] + eps)`, and the same for k with `squares[1]` and
    /// `counts[1]`. `squares: [rows, 2]`; `weight: [columns of q and k]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn qk_scale(
        &mut self,
        qkv: &mut Self::Buffer,
        norm: &QkNorm,
        squares: &Self::Buffer,
        weight: &Self::Vector,
    ) -> Result<(), KernelError>;

    /// The end of [`AttentionOps::qkv_rope_write`]: RoPE on q and k; k and v written to the cache's
    /// layer at the batch's slots; q to `q_out: [rows, num_heads * head_dim]`. The contents of
    /// `qkv` are undefined afterwards.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    fn rope_write(
        &mut self,
        qkv: &mut Self::Buffer,
        rope: &RopeTable<Self::Vector>,
        at: AttentionAt<'_>,
        cache: &mut Self::KvCache,
        q_out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
}

//! Multi-head latent attention.
use super::experts::StackSizes;
use super::{Vector, attention, ensure, shape_error, vector, width};
use crate::backend::{AttentionAt, AttentionShape, Buffer, KvShape, LatentInput, RopeTable};
use crate::error::KernelError;

/// How the elements of q are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Elements of a head without positions.
    pub(crate) plain: usize,
    /// Elements of a head that are rotated.
    pub(crate) rotated: usize,
    /// Elements of a latent.
    pub(crate) latent: usize,
}

impl Parts {
    fn of(op: &'static str, shape: &AttentionShape, q: &impl Buffer) -> Result<Self, KernelError> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = *shape;
        let Some(latent) = shape.latent else {
            return Err(shape_error(op, "V is not a part of K".to_owned()));
        };
        ensure!(op, num_kv_heads == 1, "{num_kv_heads} KV heads have latents, not 1");
        let rotated = head_dim.saturating_sub(latent);
        ensure!(
            op,
            latent > 0 && rotated > 0 && rotated.is_multiple_of(2),
            "{latent} of {head_dim} elements are latent, the others must be an even number"
        );
        let (found, least) = (q.width(), num_heads * rotated);
        ensure!(
            op,
            found > least && found.is_multiple_of(num_heads),
            "q.width is {found}: {num_heads} heads, of which {rotated} elements are rotated"
        );
        Ok(Self { plain: found / num_heads - rotated, rotated, latent })
    }
}

/// Limits for [`attention::places`]: the number of positions in the tables and of slots in the
/// cache.
pub(crate) fn bounds<V: Vector>(rope: &RopeTable<V>, parts: Parts, kv: &KvShape) -> (usize, usize) {
    (rope.cos.len() / (parts.rotated / 2), kv.num_blocks * kv.block_size)
}

/// Everything but [`attention::places`].
pub(crate) fn write<B: Buffer, V: Vector>(
    input: &LatentInput<'_, B, V>,
    at: AttentionAt<'_>,
    kv_shape: &KvShape,
    plain: &B,
    q_out: &B,
) -> Result<Parts, KernelError> {
    let op = "latent_write";
    let LatentInput { q, kv, norm, rope, .. } = input;
    attention::heads(op, at.shape, kv_shape, at.layer)?;
    let AttentionShape { num_heads, head_dim, .. } = *at.shape;
    let parts = Parts::of(op, at.shape, *q)?;
    width(op, "kv", &**kv, head_dim)?;
    let (rows, found) = (q.rows(), kv.rows());
    ensure!(op, rows == found, "q has {rows} rows, kv has {found}");
    vector(op, "norm", Some(*norm), parts.latent)?;
    width(op, "plain", plain, num_heads * parts.plain)?;
    width(op, "q_out", q_out, num_heads * head_dim)?;
    attention::rotated(op, rows, at.batch, rope)?;
    ensure!(op, rope.q_scale.is_none(), "q with latents has no factors by position");
    Ok(parts)
}

/// Checks a product per head, and returns the width of a head in `out`.
pub(crate) fn heads_product<B: Buffer>(
    x: &B,
    (heads, rows, cols): StackSizes,
    out: &B,
) -> Result<usize, KernelError> {
    let op = "heads_product";
    width(op, "x", x, heads * cols)?;
    let found = out.width();
    ensure!(
        op,
        heads > 0 && found.is_multiple_of(heads) && found / heads >= rows,
        "out.width is {found}: {heads} heads of at least {rows} elements are wanted"
    );
    Ok(found / heads)
}

//! Argument checks, before any memory is accessed. A failed check is a bug in the caller; it
//! returns an error, does not panic, and nothing has been written.
use super::{CpuBuffer, CpuKvCache, CpuMatrix, CpuVector};
use crate::backend::{AttentionShape, Batch, Buffer, QkvWeights, RopeTable};
use crate::check::{ensure, heads, sequences};
use crate::error::KernelError;

/// Checks `out = x weight^T + bias`; `out` has width `out_width`.
pub(crate) fn product(
    op: &'static str,
    x: &CpuBuffer,
    weight: &CpuMatrix,
    bias: Option<&CpuVector>,
    out_width: usize,
    out: &CpuBuffer,
) -> Result<(), KernelError> {
    ensure!(op, x.width() == weight.cols(), "x.width is {}, not {}", x.width(), weight.cols());
    ensure!(op, out.width() == out_width, "out.width is {}, not {out_width}", out.width());
    if let Some(bias) = bias {
        let rows = weight.rows();
        ensure!(op, bias.len() == rows, "bias has {} elements, not {rows}", bias.len());
    }
    Ok(())
}

/// Checks the number of elements of an optional vector.
pub(crate) fn vector(
    op: &'static str,
    name: &str,
    vector: Option<&CpuVector>,
    wanted: usize,
) -> Result<(), KernelError> {
    let found = vector.map_or(wanted, |vector| vector.len());
    ensure!(op, found == wanted, "{name} has {found} elements, not {wanted}");
    Ok(())
}

/// Checks an optional `addend: [rows, width]`.
pub(crate) fn addend(
    op: &'static str,
    addend: Option<&CpuBuffer>,
    rows: usize,
    width: usize,
) -> Result<(), KernelError> {
    let found = addend.map_or((rows, width), |addend| (addend.rows(), addend.width()));
    ensure!(op, found == (rows, width), "addend is {found:?}, not {:?}", (rows, width));
    Ok(())
}

pub(crate) fn columns(
    op: &'static str,
    x: &CpuBuffer,
    first: usize,
    weight: &CpuMatrix,
    bias: Option<&CpuVector>,
    out: &CpuBuffer,
) -> Result<(), KernelError> {
    let (width, cols, rows) = (x.width(), weight.cols(), weight.rows());
    let end = first.saturating_add(cols);
    ensure!(op, end <= width, "columns {first}..{end} of x, whose width is {width}");
    ensure!(op, out.width() == rows, "out.width is {}, not {rows}", out.width());
    if let Some(bias) = bias {
        ensure!(op, bias.len() == rows, "bias has {} elements, not {rows}", bias.len());
    }
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "the operation's own arguments")]
pub(crate) fn qkv(
    x: &CpuBuffer,
    weights: &QkvWeights<CpuMatrix, CpuVector>,
    rope: &RopeTable<CpuVector>,
    shape: &AttentionShape,
    batch: &Batch<'_>,
    cache: &CpuKvCache,
    layer: usize,
    q_out: &CpuBuffer,
) -> Result<(), KernelError> {
    let op = "qkv_rope_write";
    heads(op, shape, cache.shape(), layer)?;
    let head_dim = shape.head_dim;
    let out = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim;
    let rows = weights.weight.rows();
    ensure!(op, rows == out, "weight has {rows} rows, not {out}");
    let (cols, width) = (weights.weight.cols(), x.width());
    ensure!(op, width == cols, "x.width is {width}, not {cols}");
    let vectors = [
        ("bias", &weights.bias, out),
        ("q_norm", &weights.q_norm, head_dim),
        ("k_norm", &weights.k_norm, head_dim),
    ];
    for (name, vector, len) in vectors {
        let found = vector.as_ref().map_or(len, |vector| vector.len());
        ensure!(op, found == len, "{name} has {found} elements, not {len}");
    }
    let q_width = shape.num_heads * head_dim;
    ensure!(op, q_out.width() == q_width, "q_out.width is {}, not {q_width}", q_out.width());
    let rows = x.rows();
    ensure!(
        op,
        batch.positions.len() == rows && batch.slots.len() == rows,
        "x has {rows} rows, the batch {} positions and {} slots",
        batch.positions.len(),
        batch.slots.len()
    );
    let (cos, sin) = (rope.cos.len(), rope.sin.len());
    ensure!(op, cos == sin, "the RoPE tables have {cos} and {sin} elements");
    let positions = cos / (head_dim / 2);
    let last = batch.positions.iter().max().map_or(0, |&position| position as usize + 1);
    ensure!(op, last <= positions, "position {} of {positions} is named", last - 1);
    let slots = cache.shape().num_blocks * cache.shape().block_size;
    let last = batch.slots.iter().max().map_or(0, |&slot| slot as usize + 1);
    ensure!(op, last <= slots, "slot {} of {slots} is named", last - 1);
    Ok(())
}

pub(crate) fn attention(
    q: &CpuBuffer,
    shape: &AttentionShape,
    batch: &Batch<'_>,
    cache: &CpuKvCache,
    layer: usize,
    out: &CpuBuffer,
) -> Result<(), KernelError> {
    let op = "paged_attention";
    heads(op, shape, cache.shape(), layer)?;
    let width = shape.num_heads * shape.head_dim;
    ensure!(op, q.width() == width, "q.width is {}, not {width}", q.width());
    ensure!(op, out.width() == width, "out.width is {}, not {width}", out.width());
    sequences(op, batch, q.rows(), cache.shape().block_size, cache.shape().num_blocks)
}

/// Rows `first..first + count` of logits.
pub(crate) fn logits(
    op: &'static str,
    logits: &CpuBuffer,
    vocab: usize,
    first: usize,
    count: usize,
) -> Result<(), KernelError> {
    let (rows, width) = (logits.rows(), logits.width());
    ensure!(op, vocab >= 1 && vocab <= width, "vocab is {vocab}, the logits have {width} columns");
    ensure!(
        op,
        first <= rows && count <= rows - first,
        "rows {first}..{} of {rows} are named",
        first.saturating_add(count)
    );
    Ok(())
}

//! Heads, sequences and the cache.
use super::{Matrix, Vector, below_bound, ensure, shape, shape_error, vector, width};
use crate::backend::{
    AttentionAt, AttentionShape, Batch, Buffer, KvShape, QkvInput, RopeTable, SeqRows,
};
use crate::error::KernelError;

/// Checks that the heads are valid and that the cache has them and the layer.
pub(super) fn heads(
    op: &'static str,
    shape: &AttentionShape,
    kv: &KvShape,
    layer: usize,
) -> Result<(), KernelError> {
    let (heads, kv_heads) = (shape.num_heads, shape.num_kv_heads);
    ensure!(
        op,
        kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads),
        "num_heads is {heads}, not a multiple of num_kv_heads {kv_heads}"
    );
    let head_dim = shape.head_dim;
    ensure!(op, head_dim > 0 && head_dim.is_multiple_of(2), "head_dim is {head_dim}, not even");
    ensure!(op, shape.sliding_window != Some(0), "sliding_window is 0");
    softcap(op, shape.softcap)?;
    ensure!(
        op,
        (kv.num_kv_heads, kv.head_dim) == (kv_heads, shape.head_dim),
        "the cache has {} heads of {}, not {kv_heads} of {}",
        kv.num_kv_heads,
        kv.head_dim,
        shape.head_dim
    );
    let (of_cache, wanted) = (kv.latent, shape.latent);
    ensure!(op, of_cache == wanted, "the cache has latents of {of_cache:?}, not {wanted:?}");
    let least = wanted.is_none_or(|latent| latent > 0 && latent < head_dim);
    ensure!(op, least, "{wanted:?} of {head_dim} elements are latent");
    ensure!(op, layer < kv.num_layers, "layer is {layer} of {}", kv.num_layers);
    ensure!(op, kv.block_size > 0, "block_size is 0");
    Ok(())
}

/// Checks that V is not a part of K.
fn separate(op: &'static str, shape: &AttentionShape) -> Result<(), KernelError> {
    ensure!(op, shape.latent.is_none(), "V is a part of K, which latent_write writes");
    Ok(())
}

/// Checks a cap of scores or logits.
pub(crate) fn softcap(op: &'static str, cap: Option<f32>) -> Result<(), KernelError> {
    let is_valid = cap.is_none_or(|cap| cap.is_finite() && cap > 0.0);
    ensure!(op, is_valid, "softcap is {cap:?}, not finite and above 0");
    Ok(())
}

/// Checks that the sequences cover all rows in order and that their tables name blocks of the
/// cache.
pub(crate) fn sequences(
    op: &'static str,
    batch: &Batch<'_>,
    num_rows: usize,
    block_size: usize,
    num_blocks: usize,
) -> Result<(), KernelError> {
    rows(op, batch.seqs, num_rows)?;
    for (i, seq) in batch.seqs.iter().enumerate() {
        let context = seq.context_len as usize;
        let (table, len) = (seq.table_start as usize, seq.table_len as usize);
        ensure!(
            op,
            len * block_size >= context,
            "sequence {i} has {len} blocks for a context of {context}"
        );
        let Some(blocks) = batch.block_tables.get(table..).and_then(|blocks| blocks.get(..len))
        else {
            let found = batch.block_tables.len();
            return Err(shape_error(
                op,
                format!("sequence {i} has blocks {table}..{} of {found}", table + len),
            ));
        };
        let (last, most) = (blocks.iter().max().copied().unwrap_or(0), num_blocks);
        ensure!(op, (last as usize) < most, "sequence {i} names block {last} of {most}");
    }
    Ok(())
}

/// Checks that the sequences cover all rows in order.
pub(super) fn rows(op: &'static str, seqs: &[SeqRows], num_rows: usize) -> Result<(), KernelError> {
    let mut rows = 0;
    for (i, seq) in seqs.iter().enumerate() {
        let start = seq.row_start as usize;
        ensure!(op, start == rows, "sequence {i} begins at row {start}, not {rows}");
        let (own, context) = (seq.num_rows as usize, seq.context_len as usize);
        ensure!(
            op,
            own >= 1 && own <= context,
            "sequence {i} has {own} rows and a context of {context}"
        );
        rows += own;
    }
    ensure!(op, rows == num_rows, "the step has {num_rows} rows, the sequences {rows}");
    Ok(())
}

/// Limits for [`places`]: the number of positions in the tables and of slots in the cache.
pub(crate) fn bounds<V: Vector>(
    rope: &RopeTable<V>,
    shape: &AttentionShape,
    kv: &KvShape,
) -> (usize, usize) {
    let rotated = rope.cos.len() / (shape.head_dim / 2).max(1);
    let positions = rope.q_scale.as_ref().map_or(rotated, |scale| rotated.min(scale.len()));
    (positions, kv.num_blocks * kv.block_size)
}

/// Checks that all positions and slots exist.
pub(crate) fn places(
    op: &'static str,
    batch: &Batch<'_>,
    (positions, slots): (usize, usize),
) -> Result<(), KernelError> {
    below_bound(op, "position", batch.positions, positions)?;
    below_bound(op, "slot", batch.slots, slots)
}

/// Everything but [`places`], which needs to be checked only once per step, not in every layer.
pub(crate) fn qkv<B: Buffer, M: Matrix, V: Vector>(
    input: &QkvInput<'_, B, M, V>,
    at: AttentionAt<'_>,
    kv: &KvShape,
    q_out: &B,
) -> Result<(), KernelError> {
    let op = "qkv_rope_write";
    let (QkvInput { x, weights, addend, rope }, batch) = (input, at.batch);
    heads(op, at.shape, kv, at.layer)?;
    separate(op, at.shape)?;
    let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = *at.shape;
    let rows = weights.weight.rows();
    let wanted = (num_heads + 2 * num_kv_heads) * head_dim;
    ensure!(op, rows == wanted, "weight has {rows} rows, not {wanted}");
    let q_width = num_heads * head_dim;
    width(op, "x", *x, weights.weight.cols())?;
    width(op, "q_out", q_out, q_width)?;
    vector(op, "bias", weights.bias.as_ref(), wanted)?;
    vector(op, "q_norm", weights.q_norm.as_ref(), head_dim)?;
    vector(op, "k_norm", weights.k_norm.as_ref(), head_dim)?;
    shape(op, "addend", *addend, (x.rows(), wanted))?;
    rotated(op, x.rows(), batch, rope)
}

/// Checks the rows to rotate.
pub(super) fn rotated<V: Vector>(
    op: &'static str,
    rows: usize,
    batch: &Batch<'_>,
    rope: &RopeTable<V>,
) -> Result<(), KernelError> {
    let (positions, slots) = (batch.positions.len(), batch.slots.len());
    ensure!(
        op,
        positions == rows && slots == rows,
        "x has {rows} rows, the batch {positions} positions and {slots} slots"
    );
    let (cos, sin) = (rope.cos.len(), rope.sin.len());
    ensure!(op, cos == sin, "the RoPE tables have {cos} and {sin} elements");
    Ok(())
}

/// As [`qkv`], for what is already projected.
pub(crate) fn projected<B: Buffer, V: Vector>(
    op: &'static str,
    (projected, rope): (&B, &RopeTable<V>),
    at: AttentionAt<'_>,
    kv: &KvShape,
    q_out: &B,
) -> Result<(), KernelError> {
    heads(op, at.shape, kv, at.layer)?;
    separate(op, at.shape)?;
    let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = *at.shape;
    width(op, "qkv", projected, (num_heads + 2 * num_kv_heads) * head_dim)?;
    width(op, "q_out", q_out, num_heads * head_dim)?;
    rotated(op, projected.rows(), at.batch, rope)
}

/// Everything but [`sequences`], which needs to be checked only once per step, not in every layer.
pub(crate) fn attention<B: Buffer>(
    q: &B,
    sinks: Option<&impl Vector>,
    AttentionAt { shape, layer, .. }: AttentionAt<'_>,
    kv: &KvShape,
    out: &B,
) -> Result<(), KernelError> {
    let op = "paged_attention";
    heads(op, shape, kv, layer)?;
    width(op, "q", q, shape.num_heads * shape.head_dim)?;
    width(op, "out", out, shape.num_heads * shape.value_dim())?;
    vector(op, "sinks", sinks, shape.num_heads)
}

/// Checks (block, host block) pairs to copy out, or in.
pub(crate) fn swap(
    op: &'static str,
    cache: &KvShape,
    host: &KvShape,
    pairs: &[(u32, u32)],
    out: bool,
) -> Result<(), KernelError> {
    let alike = KvShape { num_blocks: cache.num_blocks, ..*host };
    ensure!(op, alike == *cache, "the cache is {cache:?}, host memory has {host:?}");
    for (block, host_block) in pairs {
        let (blocks, host_blocks) = (cache.num_blocks, host.num_blocks);
        ensure!(op, (*block as usize) < blocks, "block is {block} of {blocks}");
        ensure!(
            op,
            (*host_block as usize) < host_blocks,
            "host block is {host_block} of {host_blocks}"
        );
    }
    let (count, most) = (pairs.len(), host.num_blocks);
    ensure!(op, count <= most, "{count} pairs, host memory has {most} blocks");
    // All blocks are copied at once, so none may be written twice.
    let target = |(block, host): &(u32, u32)| if out { *host } else { *block };
    let mut targets: Vec<u32> = pairs.iter().map(target).collect();
    targets.sort_unstable();
    let twice = targets.windows(2).find(|pair| pair[0] == pair[1]);
    match twice {
        Some(pair) => Err(shape_error(op, format!("block {} is written twice", pair[0]))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::KvStorage;

    #[test]
    fn a_swap_is_within_both_and_writes_nothing_twice() {
        let shape = |num_blocks| KvShape {
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 8,
            latent: None,
            block_size: 4,
            num_blocks,
            storage: KvStorage::AsTaken,
        };
        let (cache, host) = (shape(4), shape(3));
        let said = |pairs: &[(u32, u32)], out| {
            swap("swap", &cache, &host, pairs, out).map_err(|error| error.to_string())
        };
        assert_eq!(said(&[(3, 0), (0, 2)], true), Ok(()));
        assert_eq!(said(&[], false), Ok(()));
        assert_eq!(said(&[(4, 0)], true).unwrap_err(), "swap: block is 4 of 4");
        assert_eq!(said(&[(0, 3)], false).unwrap_err(), "swap: host block is 3 of 3");
        let twice = [(1, 2), (3, 2)];
        assert_eq!(said(&twice, true).unwrap_err(), "swap: block 2 is written twice");
        assert_eq!(said(&twice, false), Ok(()), "one block to two places");
        let most = [(0, 0), (1, 1), (2, 2), (3, 0)];
        assert!(said(&most, false).unwrap_err().contains("4 pairs, host memory has 3"));
        let other = KvShape { head_dim: 16, ..host };
        let unlike = swap("swap", &cache, &other, &[], true).unwrap_err().to_string();
        assert!(unlike.contains("head_dim: 16"), "{unlike}");
    }
}

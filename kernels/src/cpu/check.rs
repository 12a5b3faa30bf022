//! Argument checks, before any memory is accessed. A failed check is a bug in the caller; it
//! returns an error, does not panic, and nothing has been written.
use super::{CpuBuffer, CpuKvCache, CpuMatrix, CpuVector};
use crate::backend::{AttentionShape, Batch, Buffer, KvShape, QkvWeights, RopeTable};
use crate::error::KernelError;

pub(crate) fn shape_error(op: &'static str, message: String) -> KernelError {
    KernelError::Shape { op, message }
}

/// `ensure!(op, condition, "what is wrong")`
macro_rules! ensure {
    ($op:expr, $condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::cpu::check::shape_error($op, format!($($message)+)));
        }
    };
}
pub(crate) use ensure;

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

fn heads(
    op: &'static str,
    shape: &AttentionShape,
    cache: &CpuKvCache,
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
    let kv = cache.shape();
    ensure!(
        op,
        (kv.num_kv_heads, kv.head_dim) == (kv_heads, shape.head_dim),
        "the cache has {} heads of {}, not {kv_heads} of {}",
        kv.num_kv_heads,
        kv.head_dim,
        shape.head_dim
    );
    ensure!(op, layer < kv.num_layers, "layer is {layer} of {}", kv.num_layers);
    ensure!(op, kv.block_size > 0, "block_size is 0");
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
    heads(op, shape, cache, layer)?;
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
    heads(op, shape, cache, layer)?;
    let width = shape.num_heads * shape.head_dim;
    ensure!(op, q.width() == width, "q.width is {}, not {width}", q.width());
    ensure!(op, out.width() == width, "out.width is {}, not {width}", out.width());
    sequences(op, batch, q.rows(), cache.shape().block_size, cache.shape().num_blocks)
}

/// Checks that the sequences cover all rows in order, and that their block tables name existing
/// blocks.
pub(crate) fn sequences(
    op: &'static str,
    batch: &Batch<'_>,
    num_rows: usize,
    block_size: usize,
    num_blocks: usize,
) -> Result<(), KernelError> {
    let mut rows = 0;
    for (i, seq) in batch.seqs.iter().enumerate() {
        let start = seq.row_start as usize;
        ensure!(op, start == rows, "sequence {i} begins at row {start}, not {rows}");
        let (own, context) = (seq.num_rows as usize, seq.context_len as usize);
        ensure!(
            op,
            own >= 1 && own <= context,
            "sequence {i} has {own} rows and a context of {context}"
        );
        rows += own;
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
    ensure!(op, rows == num_rows, "q has {num_rows} rows, the sequences {rows}");
    Ok(())
}

/// Checks that `first..first + count` are rows of the logits.
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

/// Checks pairs (block, host block) to be swapped out (`out`) or in.
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
    // All pairs are copied concurrently: no target may occur twice.
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

    #[test]
    fn a_swap_is_within_both_and_writes_nothing_twice() {
        let shape = |num_blocks| KvShape {
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 8,
            block_size: 4,
            num_blocks,
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

//! PURE: calls of the kernels of `kernels/cuda/qkv.cu` and `attention_*.cu`.
use super::{
    ATTENTION_ANY, Args, Call, DECODE, DECODE_REDUCE, DevicePtr, Entry, PREFILL, QKV_FINISH, call,
    prefill_shared, words,
};
use crate::backend::AttentionShape;

/// Head dimensions with attention kernels of their own.
pub const HEAD_DIMS: [usize; 6] = [16, 32, 64, 96, 128, 256];
/// The largest head dimension that any kernel takes.
pub const HEAD_DIM_MAX: usize = 256;
/// Into how many parts a sequence's tokens are split at most: a constant, so that the sum of a row
/// is made alike in every batch.
pub const SPLITS_MAX: u32 = 64;
/// Grids of decode attention are rounded up to one of these, so that few graphs are captured.
const SPLITS: [u32; 10] = [1, 2, 3, 5, 9, 17, 25, 33, 49, 64];

/// What `tutti_qkv_finish` reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct QkvFinish {
    /// f32 [rows, (num_heads + 2 * num_kv_heads) * head_dim]
    pub qkv: DevicePtr,
    /// f32, as wide.
    pub bias: Option<DevicePtr>,
    /// `f32 [head_dim]`
    pub q_norm: Option<DevicePtr>,
    /// `f32 [head_dim]`
    pub k_norm: Option<DevicePtr>,
    /// f32 [positions, head_dim / 2]
    pub cos: DevicePtr,
    /// f32 [positions, head_dim / 2]
    pub sin: DevicePtr,
    /// `u32 [rows]`
    pub positions: DevicePtr,
    /// `u32 [rows]`
    pub slots: DevicePtr,
    /// bf16 [rows, num_heads * head_dim]
    pub q_out: DevicePtr,
    /// The layer's keys and values.
    pub cache: LayerCache,
}

/// Keys and values of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerCache {
    /// bf16 [num_blocks, num_kv_heads, block_size, head_dim]
    pub keys: DevicePtr,
    /// As the keys.
    pub values: DevicePtr,
    /// Logarithm of the block size.
    pub block_shift: u32,
}

/// `tutti_qkv_finish`
#[must_use]
pub fn qkv_finish(io: &QkvFinish, shape: &AttentionShape, rows: usize, live: DevicePtr) -> Call {
    let heads = shape.num_heads + 2 * shape.num_kv_heads;
    let args = Args::new()
        .ptr(io.qkv)
        .maybe(io.bias)
        .maybe(io.q_norm)
        .maybe(io.k_norm)
        .ptr(io.cos)
        .ptr(io.sin)
        .ptr(io.positions)
        .ptr(io.slots)
        .ptr(io.q_out)
        .ptr(io.cache.keys)
        .ptr(io.cache.values);
    let args = words(args, [shape.num_heads, shape.num_kv_heads, shape.head_dim])
        .u32(io.cache.block_shift)
        .f32(shape.norm_eps)
        .ptr(live);
    call(QKV_FINISH, (rows, heads.div_ceil(8), 1), 256, args)
}

/// What attention reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionIo {
    /// bf16 [rows, num_heads * head_dim]
    pub q: DevicePtr,
    /// The layer's keys and values.
    pub cache: LayerCache,
    /// TuttiSeq [..]
    pub seqs: DevicePtr,
    /// u32 [..]
    pub block_tables: DevicePtr,
    /// As q.
    pub out: DevicePtr,
}

fn window(shape: &AttentionShape) -> u32 {
    shape.sliding_window.unwrap_or(0)
}

fn scale(shape: &AttentionShape) -> f32 {
    1.0 / (shape.head_dim as f32).sqrt()
}

/// Which of the kernels by head dimension.
fn by_head_dim(first: Entry, shape: &AttentionShape) -> Option<Entry> {
    let which = HEAD_DIMS.iter().position(|dim| *dim == shape.head_dim)?;
    Some(Entry(first.0 + which))
}

/// `tutti_prefill_attention_*`; none when this head dimension has no kernel.
#[must_use]
pub fn prefill_attention(
    io: &AttentionIo,
    shape: &AttentionShape,
    tiles: DevicePtr,
    count: usize,
    live: DevicePtr,
) -> Option<Call> {
    let entry = by_head_dim(PREFILL, shape)?;
    let args = Args::new()
        .ptr(io.q)
        .ptr(io.cache.keys)
        .ptr(io.cache.values)
        .ptr(io.seqs)
        .ptr(tiles)
        .ptr(io.block_tables)
        .ptr(io.out);
    let args = words(args, [shape.num_heads, shape.num_kv_heads])
        .u32(io.cache.block_shift)
        .u32(window(shape))
        .f32(scale(shape))
        .ptr(live);
    let mut call = call(entry, (count, shape.num_kv_heads, 1), 128, args);
    call.launch.shared = prefill_shared(shape.head_dim);
    Some(call)
}

/// Where decode attention keeps what it adds up.
#[derive(Clone, Copy, Debug)]
pub struct Partials {
    /// f32 [n, num_heads, SPLITS_MAX, head_dim]
    pub out: DevicePtr,
    /// f32 [n, num_heads, SPLITS_MAX, 2]
    pub ml: DevicePtr,
}

impl Partials {
    /// Elements of `out` and of `ml` for `n` sequences.
    #[must_use]
    pub fn elements(shape: &AttentionShape, n: usize) -> (usize, usize) {
        let splits = n * shape.num_heads * SPLITS_MAX as usize;
        (splits * shape.head_dim, splits * 2)
    }
}

/// The grid's splits for sequences of at most `context` tokens.
#[must_use]
pub fn splits(context: u32) -> u32 {
    // As in kernels.h: parts of 64 tokens at least, one more where a window cuts the first.
    let most = (context.div_ceil(64) + 1).min(SPLITS_MAX);
    SPLITS.into_iter().find(|splits| *splits >= most).unwrap_or(SPLITS_MAX)
}

/// `tutti_decode_attention_*` and `tutti_decode_reduce`; none as above.
#[must_use]
pub fn decode_attention(
    io: &AttentionIo,
    shape: &AttentionShape,
    (items, count): (DevicePtr, usize),
    partials: Partials,
    splits: u32,
    live: DevicePtr,
) -> Option<[Call; 2]> {
    let entry = by_head_dim(DECODE, shape)?;
    let args = Args::new()
        .ptr(io.q)
        .ptr(io.cache.keys)
        .ptr(io.cache.values)
        .ptr(io.seqs)
        .ptr(items)
        .ptr(io.block_tables)
        .ptr(partials.out)
        .ptr(partials.ml);
    let args = words(args, [shape.num_heads, shape.num_kv_heads])
        .u32(io.cache.block_shift)
        .u32(window(shape))
        .u32(SPLITS_MAX)
        .f32(scale(shape))
        .ptr(live);
    let group = shape.num_heads / shape.num_kv_heads;
    let blocks = shape.num_kv_heads * group.div_ceil(16);
    let attention = call(entry, (splits as usize, blocks, count), 128, args);
    let args = Args::new().ptr(partials.out).ptr(partials.ml).ptr(io.seqs).ptr(items).ptr(io.out);
    let args =
        words(args, [shape.num_heads, shape.head_dim]).u32(window(shape)).u32(SPLITS_MAX).ptr(live);
    Some([attention, call(DECODE_REDUCE, (shape.num_heads, count, 1), 128, args)])
}

/// `tutti_attention_any`
#[must_use]
pub fn attention_any(
    io: &AttentionIo,
    shape: &AttentionShape,
    num_seqs: DevicePtr,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new()
        .ptr(io.q)
        .ptr(io.cache.keys)
        .ptr(io.cache.values)
        .ptr(io.seqs)
        .ptr(num_seqs)
        .ptr(io.block_tables)
        .ptr(io.out);
    let args = words(args, [shape.num_heads, shape.num_kv_heads, shape.head_dim])
        .u32(io.cache.block_shift)
        .u32(window(shape))
        .f32(scale(shape))
        .ptr(live);
    call(ATTENTION_ANY, (rows, shape.num_heads.div_ceil(4), 1), 128, args)
}

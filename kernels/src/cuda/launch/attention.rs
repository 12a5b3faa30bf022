//! PURE: calls of the kernels of `kernels/cuda/qkv.cu` and `attention_*.cu`.
use super::{
    ATTENTION_ANY, Args, Call, DECODE, DECODE_REDUCE, DevicePtr, Entry, PREFILL, QKV_FINISH, call,
    prefill_shared, words,
};
use crate::backend::AttentionShape;
use crate::cuda::parts::{SPLITS_MAX, least_split};

/// Head dimensions with attention kernels of their own.
pub const HEAD_DIMS: [usize; 6] = [16, 32, 64, 96, 128, 256];
/// The largest head dimension that any kernel takes.
pub const HEAD_DIM_MAX: usize = 256;
/// Blocks of decode attention that a multiprocessor runs at once, by head dimension.
const DECODE_BLOCKS: [usize; HEAD_DIMS.len()] = [5, 5, 4, 3, 3, 2];

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
    /// `f32 [num_heads]`
    pub sinks: Option<DevicePtr>,
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
        .maybe(io.sinks)
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

/// What decode attention is to compute.
#[derive(Clone, Copy, Debug)]
pub struct DecodeWork {
    /// u32 [..]: every part of every sequence of one row.
    pub parts: DevicePtr,
    /// How many of them there may be.
    pub parts_most: usize,
    /// A word: how many there are.
    pub live_parts: DevicePtr,
    /// `u32 [items]`: sequences of one row.
    pub items: DevicePtr,
    /// How many of them there may be.
    pub items_most: usize,
    /// A word: how many there are; null: as many as there may be.
    pub live_items: DevicePtr,
}

/// `tutti_decode_attention_*`, by as many blocks as so many multiprocessors run at once, and
/// `tutti_decode_reduce`; none as above.
#[must_use]
pub fn decode_attention(
    io: &AttentionIo,
    shape: &AttentionShape,
    work: &DecodeWork,
    partials: Partials,
    multiprocessors: u32,
) -> Option<[Call; 2]> {
    let entry = by_head_dim(DECODE, shape)?;
    let least = least_split(work.items_most);
    let args = Args::new()
        .ptr(io.q)
        .ptr(io.cache.keys)
        .ptr(io.cache.values)
        .ptr(io.seqs)
        .ptr(work.parts)
        .ptr(io.block_tables)
        .ptr(partials.out)
        .ptr(partials.ml)
        .ptr(io.out);
    let args = words(args, [shape.num_heads, shape.num_kv_heads])
        .u32(io.cache.block_shift)
        .u32(window(shape))
        .u32(SPLITS_MAX)
        .u32(least)
        .f32(scale(shape))
        .maybe(io.sinks)
        .ptr(work.live_parts);
    let group = shape.num_heads / shape.num_kv_heads;
    let blocks = shape.num_kv_heads * group.div_ceil(16);
    let at_once = multiprocessors as usize * DECODE_BLOCKS[entry.0 - DECODE.0];
    let across = (at_once / blocks).clamp(1, work.parts_most.max(1));
    let attention = call(entry, (across, blocks, 1), 128, args);
    let args = Args::new().ptr(partials.out).ptr(partials.ml).ptr(io.seqs).ptr(work.items);
    let args = words(args.ptr(io.out), [shape.num_heads, shape.head_dim]);
    let args = args.u32(window(shape)).u32(SPLITS_MAX).u32(least).ptr(work.live_items);
    Some([attention, call(DECODE_REDUCE, (shape.num_heads, work.items_most, 1), 128, args)])
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
        .maybe(io.sinks)
        .ptr(live);
    call(ATTENTION_ANY, (rows, shape.num_heads.div_ceil(4), 1), 128, args)
}

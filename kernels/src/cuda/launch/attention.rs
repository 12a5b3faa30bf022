//! PURE: calls of the kernels of `kernels/cuda/qkv.cu` and `attention_*.cu`.
use super::{
    ATTENTION_ANY, ATTENTION_ANY_FP8, Args, Call, DECODE, DECODE_FP8, DECODE_REDUCE, DevicePtr,
    Entry, PREFILL, PREFILL_FP8, QKV_FINISH, QKV_FINISH_FP8, call, prefill_shared, words,
};
use crate::backend::{AttentionShape, KvStorage};
use crate::cuda::parts::{least_split, most_splits};

/// Head dimensions that have attention kernels of their own.
pub const HEAD_DIMS: [usize; 6] = [16, 32, 64, 96, 128, 256];
/// Those that have such kernels for caches in FP8.
pub const FP8_HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];
/// Largest head dimension that any kernel supports.
pub const HEAD_DIM_MAX: usize = 256;
/// Resident blocks of decode attention per multiprocessor, by head dimension.
const DECODE_BLOCKS: [usize; HEAD_DIMS.len()] = [5, 5, 4, 3, 3, 2];
const FP8_DECODE_BLOCKS: [usize; FP8_HEAD_DIMS.len()] = [4, 3, 3, 2];

/// Operands of `tutti_qkv_finish`.
#[derive(Clone, Copy, Debug)]
pub struct QkvFinish {
    /// f32 [rows, (num_heads + 2 * num_kv_heads) * head_dim]
    pub qkv: DevicePtr,
    /// f32, as wide as `qkv`.
    pub bias: Option<DevicePtr>,
    /// `f32 [head_dim]`
    pub q_norm: Option<DevicePtr>,
    /// `f32 [head_dim]`
    pub k_norm: Option<DevicePtr>,
    /// f32 [positions, head_dim / 2]
    pub cos: DevicePtr,
    /// f32 [positions, head_dim / 2]
    pub sin: DevicePtr,
    /// `f32 [positions]`
    pub q_scale: Option<DevicePtr>,
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
    /// bf16 or FP8 [num_blocks, num_kv_heads, block_size, head_dim]
    pub keys: DevicePtr,
    /// As the keys.
    pub values: DevicePtr,
    /// Logarithm of the block size.
    pub block_shift: u32,
    /// How elements are stored: [`KvStorage::AsTaken`] is bf16.
    pub storage: KvStorage,
}

impl LayerCache {
    /// The one of two kernels that is for this storage.
    pub(super) fn pick(&self, bf16: Entry, fp8: Entry) -> Entry {
        match self.storage {
            KvStorage::AsTaken => bf16,
            KvStorage::Fp8 => fp8,
        }
    }

    /// Selects the kernel of one of two families by head dimension, and its index.
    fn by_head_dim(
        &self,
        bf16: Entry,
        fp8: Entry,
        shape: &AttentionShape,
    ) -> Option<(Entry, usize)> {
        let dims: &[usize] = match self.storage {
            KvStorage::AsTaken => &HEAD_DIMS,
            KvStorage::Fp8 => &FP8_HEAD_DIMS,
        };
        let which = dims.iter().position(|dim| *dim == shape.head_dim)?;
        Some((Entry(self.pick(bf16, fp8).0 + which), which))
    }
}

/// `tutti_qkv_finish`, `tutti_qkv_finish_fp8`
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
        .maybe(io.q_scale)
        .ptr(io.positions)
        .ptr(io.slots)
        .ptr(io.q_out)
        .ptr(io.cache.keys)
        .ptr(io.cache.values);
    let args = words(args, [shape.num_heads, shape.num_kv_heads, shape.head_dim])
        .u32(io.cache.block_shift)
        .f32(shape.norm_eps)
        .ptr(live);
    let entry = io.cache.pick(QKV_FINISH, QKV_FINISH_FP8);
    call(entry, (rows, heads.div_ceil(8), 1), 256, args)
}

/// Operands of attention.
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
    /// As q, with [`AttentionShape::value_dim`] elements per head.
    pub out: DevicePtr,
    /// `f32 [num_heads]`
    pub sinks: Option<DevicePtr>,
}

pub(super) fn window(shape: &AttentionShape) -> u32 {
    shape.sliding_window.unwrap_or(0)
}

pub(super) fn scale(shape: &AttentionShape) -> f32 {
    1.0 / (shape.head_dim as f32).sqrt()
}

/// `tutti_prefill_attention_*`; `None` if this head dimension has no kernel.
#[must_use]
pub fn prefill_attention(
    io: &AttentionIo,
    shape: &AttentionShape,
    tiles: DevicePtr,
    count: usize,
    live: DevicePtr,
) -> Option<Call> {
    let (entry, _) = io.cache.by_head_dim(PREFILL, PREFILL_FP8, shape)?;
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
        .f32(shape.softcap.unwrap_or(0.0))
        .maybe(io.sinks)
        .ptr(live);
    let mut call = call(entry, (count, shape.num_kv_heads, 1), 128, args);
    call.launch.shared = prefill_shared(shape.head_dim, io.cache.storage);
    Some(call)
}

/// Blocks that a part takes: each has up to 16 query heads of a KV head.
fn blocks_of_part(shape: &AttentionShape) -> usize {
    let kv_heads = shape.num_kv_heads.max(1);
    kv_heads * (shape.num_heads / kv_heads).div_ceil(16)
}

/// Maximum number of parts of a sequence. Those of latents have four times the partial results of
/// ordinary heads, so they are fewer.
#[must_use]
pub fn splits_of(shape: &AttentionShape) -> u32 {
    most_splits(if shape.latent.is_some() { usize::MAX } else { blocks_of_part(shape) })
}

/// Partial results of decode attention.
#[derive(Clone, Copy, Debug)]
pub struct Partials {
    /// f32 [n, num_heads, [`splits_of`], head_dim]
    pub out: DevicePtr,
    /// f32 [n, num_heads, [`splits_of`], 2]
    pub ml: DevicePtr,
}

impl Partials {
    /// Number of elements of `out` and of `ml` for `n` sequences.
    #[must_use]
    pub fn elements(shape: &AttentionShape, n: usize) -> (usize, usize) {
        let splits = n * shape.num_heads * splits_of(shape) as usize;
        (splits * shape.value_dim(), splits * 2)
    }
}

/// Sequences and parts that decode attention computes.
#[derive(Clone, Copy, Debug)]
pub struct DecodeWork {
    /// u32 [..]: every part of every sequence of one row.
    pub parts: DevicePtr,
    /// Maximum number of parts.
    pub parts_most: usize,
    /// Address of a word with the number of parts.
    pub live_parts: DevicePtr,
    /// `u32 [items]`: sequences of one row.
    pub items: DevicePtr,
    /// Maximum number of these sequences.
    pub items_most: usize,
    /// Address of a word with their number; null if it is the maximum.
    pub live_items: DevicePtr,
}

/// `tutti_decode_attention_*`, with as many blocks as `multiprocessors` run at once, and
/// `tutti_decode_reduce`; `None` if this head dimension has no kernel.
#[must_use]
pub fn decode_attention(
    io: &AttentionIo,
    shape: &AttentionShape,
    work: &DecodeWork,
    partials: Partials,
    multiprocessors: u32,
) -> Option<[Call; 2]> {
    let (entry, which) = io.cache.by_head_dim(DECODE, DECODE_FP8, shape)?;
    let resident = match io.cache.storage {
        KvStorage::AsTaken => DECODE_BLOCKS[which],
        KvStorage::Fp8 => FP8_DECODE_BLOCKS[which],
    };
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
        .u32(splits_of(shape))
        .u32(least)
        .f32(scale(shape))
        .f32(shape.softcap.unwrap_or(0.0))
        .maybe(io.sinks)
        .ptr(work.live_parts);
    let blocks = blocks_of_part(shape);
    let at_once = multiprocessors as usize * resident;
    let across = (at_once / blocks).clamp(1, work.parts_most.max(1));
    let attention = call(entry, (across, blocks, 1), 128, args);
    Some([attention, decode_reduce(io, shape, work, partials, least)])
}

/// `tutti_decode_reduce`
pub(super) fn decode_reduce(
    io: &AttentionIo,
    shape: &AttentionShape,
    work: &DecodeWork,
    partials: Partials,
    least: u32,
) -> Call {
    let args = Args::new().ptr(partials.out).ptr(partials.ml).ptr(io.seqs).ptr(work.items);
    let args = words(args.ptr(io.out), [shape.num_heads, shape.value_dim()]);
    let args = args.u32(window(shape)).u32(splits_of(shape)).u32(least).ptr(work.live_items);
    call(DECODE_REDUCE, (shape.num_heads, work.items_most, 1), 128, args)
}

/// `tutti_attention_any`, `tutti_attention_any_fp8`
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
        .f32(shape.softcap.unwrap_or(0.0))
        .maybe(io.sinks)
        .ptr(live);
    let entry = io.cache.pick(ATTENTION_ANY, ATTENTION_ANY_FP8);
    call(entry, (rows, shape.num_heads.div_ceil(4), 1), 128, args)
}

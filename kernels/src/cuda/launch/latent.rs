//! PURE: calls of the kernels of `kernels/cuda/latent.cu`.
use super::attention::decode_reduce;
use super::entries::*;
use super::{
    Args, AttentionIo, Call, DecodeWork, DevicePtr, LayerCache, Partials, Rows, call, words,
};
use crate::backend::AttentionShape;
use crate::cuda::parts::least_split;

/// Largest latent, and largest width of what a token has in the cache.
pub const LATENT_MOST: (usize, usize) = (512, 576);
/// `TUTTI_LATENT_SHARED`
pub(super) const SHARED: u32 = 3 * 16 * 2 * (LATENT_MOST.1 as u32 + 8);
/// Resident blocks of decode attention per multiprocessor.
const DECODE_BLOCKS: usize = 2;
/// Largest numbers of rows of the variants of `tutti_heads_product_*`.
const HEADS_PRODUCT_ROWS: [usize; 2] = [8, 32];

/// Operands of `tutti_latent_finish`.
#[derive(Clone, Copy, Debug)]
pub struct LatentFinish {
    /// f32 [rows, num_heads, plain + rotated]
    pub q: DevicePtr,
    /// f32 [rows, latent + rotated]
    pub kv: DevicePtr,
    /// f32 `[latent]`
    pub norm: DevicePtr,
    /// f32 [positions, rotated / 2]
    pub cos: DevicePtr,
    /// f32 [positions, rotated / 2]
    pub sin: DevicePtr,
    /// u32 `[rows]`
    pub positions: DevicePtr,
    /// u32 `[rows]`
    pub slots: DevicePtr,
    /// bf16 [rows, num_heads, plain]
    pub plain_out: DevicePtr,
    /// bf16 [rows, num_heads, latent + rotated]
    pub q_out: DevicePtr,
    /// The layer's vectors.
    pub cache: LayerCache,
}

/// `tutti_latent_finish`, `tutti_latent_finish_fp8`, with the elements of a head without
/// positions, of a latent, and those that are rotated.
#[must_use]
pub fn latent_finish(
    io: &LatentFinish,
    shape: &AttentionShape,
    [plain, latent, rotated]: [usize; 3],
    scale: f32,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new()
        .ptr(io.q)
        .ptr(io.kv)
        .ptr(io.norm)
        .ptr(io.cos)
        .ptr(io.sin)
        .ptr(io.positions)
        .ptr(io.slots)
        .ptr(io.plain_out)
        .ptr(io.q_out)
        .ptr(io.cache.keys);
    let args = words(args, [shape.num_heads, plain, latent, rotated]);
    let args = args.f32(shape.norm_eps).f32(scale).ptr(live);
    let entry = io.cache.pick(LATENT_FINISH, LATENT_FINISH_FP8);
    call(entry, (rows, (shape.num_heads + 1).div_ceil(8), 1), 256, args)
}

/// `tutti_heads_product_*`: (rows, heads, outputs and inputs of each head's matrix), and the number
/// of elements from one head to the next in `out`.
#[must_use]
pub fn heads_product(
    x: Rows,
    w: Rows,
    out: Rows,
    (rows, heads, n, k): (usize, usize, usize, usize),
    head_stride: usize,
    scale: f32,
    live: DevicePtr,
) -> Call {
    let which = usize::from(rows > HEADS_PRODUCT_ROWS[0]);
    let args = Args::new().ptr(x.ptr).ptr(w.ptr).ptr(out.ptr);
    let args = words(args, [rows, n, k, x.stride, w.stride, out.stride, head_stride]);
    let grid = (rows.div_ceil(HEADS_PRODUCT_ROWS[which]), n.div_ceil(128), heads);
    call(Entry(HEADS_PRODUCT.0 + which), grid, 256, args.f32(scale).ptr(live))
}

/// `tutti_latent_attention`, `tutti_latent_attention_fp8`, for the number of sequences at an
/// address, and not for those with one row if that is true.
#[must_use]
pub fn latent_attention(
    io: &AttentionIo,
    shape: &AttentionShape,
    (num_seqs, skips_single): (DevicePtr, bool),
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new()
        .ptr(io.q)
        .ptr(io.cache.keys)
        .ptr(io.seqs)
        .ptr(num_seqs)
        .ptr(io.block_tables)
        .ptr(io.out);
    let latent = shape.value_dim();
    let args = words(args, [shape.num_heads, latent, shape.head_dim.saturating_sub(latent)])
        .u32(io.cache.block_shift)
        .u32(super::attention::window(shape))
        .f32(super::attention::scale(shape))
        .u32(u32::from(skips_single))
        .ptr(live);
    let entry = io.cache.pick(LATENT_ATTENTION, LATENT_ATTENTION_FP8);
    let mut call = call(entry, (rows, shape.num_heads.div_ceil(16), 1), 256, args);
    call.launch.shared = SHARED;
    call
}

/// `tutti_latent_decode`, `tutti_latent_decode_fp8`, with as many blocks as `multiprocessors` run
/// at once, and `tutti_decode_reduce`.
#[must_use]
pub fn latent_decode(
    io: &AttentionIo,
    shape: &AttentionShape,
    work: &DecodeWork,
    partials: Partials,
    multiprocessors: u32,
) -> [Call; 2] {
    let latent = shape.value_dim();
    let least = least_split(work.items_most);
    let args = Args::new()
        .ptr(io.q)
        .ptr(io.cache.keys)
        .ptr(io.seqs)
        .ptr(work.parts)
        .ptr(io.block_tables)
        .ptr(partials.out)
        .ptr(partials.ml)
        .ptr(io.out);
    let args = words(args, [shape.num_heads, latent, shape.head_dim.saturating_sub(latent)])
        .u32(io.cache.block_shift)
        .u32(super::attention::window(shape))
        .u32(super::attention::splits_of(shape))
        .u32(least)
        .f32(super::attention::scale(shape))
        .ptr(work.live_parts);
    let blocks = shape.num_heads.div_ceil(16);
    let at_once = multiprocessors as usize * DECODE_BLOCKS;
    let across = (at_once / blocks).clamp(1, work.parts_most.max(1));
    let entry = io.cache.pick(LATENT_DECODE, LATENT_DECODE_FP8);
    let mut attention = call(entry, (across, blocks, 1), 256, args);
    attention.launch.shared = SHARED;
    [attention, decode_reduce(io, shape, work, partials, least)]
}

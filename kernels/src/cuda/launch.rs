//! PURE: every kernel's name, grid and arguments, as `kernels/cuda/kernels.h` lists them.
//!
//! Sizes are passed to the kernels as 32-bit words; callers have checked that they fit.
//!
//! - `entries`: names
//! - `rows`: rows of activations, and blocks of the cache
//! - `products`: products with weights
//! - `norms`: norms that few models have
//! - `attention`: QKV and attention
//! - `latent`: multi-head latent attention
//! - `delta`: linear attention
//! - `experts`: mixtures of experts
//! - `sample`: sampling
//! - `ranks`: exchanges between GPUs
use super::memory::DevicePtr;
use super::module::{Args, Launch};

mod attention;
mod delta;
mod entries;
pub mod experts;
mod latent;
mod norms;
mod products;
mod ranks;
mod rows;
mod sample;

pub use attention::{
    AttentionIo, DecodeWork, FP8_HEAD_DIMS, HEAD_DIM_MAX, HEAD_DIMS, LayerCache, Partials,
    QkvFinish, attention_any, decode_attention, prefill_attention, qkv_finish, splits_of,
};
pub use delta::{DeltaIo, delta_attention, gate};
use entries::*;
pub use entries::{Entry, NAMES};
pub use latent::{
    LATENT_MOST, LatentFinish, heads_product, latent_attention, latent_decode, latent_finish,
};
pub use norms::{add_layernorm, qk_scale, qk_squares};
use products::{SKINNY, by_rows};
pub use products::{Weight, skinny, skinny_gate_up, widen_fp8, widen_int4, widen_int8};
pub(super) use ranks::peer_sum_add_rmsnorm;
pub use ranks::{PEER_BLOCKS, PEER_SLOT, narrow_rows, peer_gather, peer_sum, tree_sum, widen_rows};
pub use rows::{
    READ_BLOCK, READ_RESULT, activate, activate_mul, add, add_bias, add_normed, add_normed_rmsnorm,
    add_rmsnorm, add_rmsnorm_bf16, blocks_in, blocks_out, cap, copy_columns, embed, gather_rows,
    interleave_ranks, late, read, scale_add_bias,
};
pub use sample::{SampleIo, argmax, argmax_merge, best_keys, draw_best, logprobs, sample};

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Kernel to launch.
    pub entry: Entry,
    /// Grid, block and shared memory.
    pub launch: Launch,
    /// Arguments of the kernel.
    pub args: Args,
}

fn call(entry: Entry, grid: (usize, usize, usize), block: u32, args: Args) -> Call {
    let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let grid = (word(grid.0), word(grid.1), word(grid.2));
    Call { entry, launch: Launch { grid, block: (block, 1, 1), shared: 0 }, args }
}

/// Rows along x, since there can be more than a grid has along y; elements along y.
fn wide(entry: Entry, width: usize, rows: usize, args: Args) -> Call {
    call(entry, (rows, width.div_ceil(1024), 1), 256, args)
}

/// A norm of each row, with what all of them take last.
fn norm(
    entry: Entry,
    args: Args,
    out: Rows,
    (width, eps): (usize, f32),
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = words(args.ptr(out.ptr), [width, out.stride]).f32(eps).ptr(live);
    call(entry, (rows, 1, 1), 512, args)
}

fn word(args: Args, n: usize) -> Args {
    args.u32(u32::try_from(n).unwrap_or(u32::MAX))
}

fn words<const N: usize>(args: Args, all: [usize; N]) -> Args {
    all.into_iter().fold(args, word)
}

/// Rows of 16-bit or f32 elements on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Address of the first row.
    pub ptr: DevicePtr,
    /// Number of elements from one row to the next.
    pub stride: usize,
}

#[cfg(test)]
mod tests;

//! PURE: calls of the kernels that exchange data between ranks.
use super::super::group::FusedNorm;
use super::{
    Args, Call, DevicePtr, Entry, NARROW_ROWS, PEER_GATHER, PEER_SUM, PEER_SUM_ADD_RMSNORM,
    PEER_SUM_TWO_SHOT, TREE_SUM, WIDEN_ROWS, call, wide, word, words,
};

/// Largest grid of an exchange between GPUs: all of its blocks run at once, next to those of
/// another rank on the same GPU, and leave room for the kernels before them.
pub const PEER_BLOCKS: usize = 32;
/// Number of f32 elements that a block sends to a rank at a time.
pub const PEER_SLOT: usize = 16_384;

/// Launches blocks that exchange `count` elements with other ranks, 4 per thread or more.
fn peers(entry: Entry, count: usize, args: Args) -> Call {
    call(entry, (count.div_ceil(2048).clamp(1, PEER_BLOCKS), 1, 1), 512, args)
}

/// `tutti_peer_sum` and `tutti_peer_sum_two_shot`
#[must_use]
pub fn peer_sum(table: DevicePtr, data: DevicePtr, count: usize, two_shot: bool) -> Call {
    let entry = if two_shot { PEER_SUM_TWO_SHOT } else { PEER_SUM };
    peers(entry, count, Args::new().ptr(table).ptr(data).u64(count as u64))
}

/// `tutti_peer_gather`
#[must_use]
pub fn peer_gather(table: DevicePtr, local: DevicePtr, all: DevicePtr, count: usize) -> Call {
    peers(PEER_GATHER, count, Args::new().ptr(table).ptr(local).ptr(all).u64(count as u64))
}

/// `tutti_peer_sum_add_rmsnorm`
#[must_use]
pub(in crate::cuda) fn peer_sum_add_rmsnorm(table: DevicePtr, io: &FusedNorm) -> Call {
    let args = Args::new().ptr(table).ptr(io.data).ptr(io.residual).ptr(io.weight).ptr(io.out.ptr);
    let args = words(args, [io.width, io.out.stride]).f32(io.eps);
    let args = word(args, io.rows).ptr(io.live);
    call(PEER_SUM_ADD_RMSNORM, (io.rows.min(PEER_BLOCKS), 1, 1), 512, args)
}

/// `tutti_tree_sum`: over `ranks` arrays of `rows` rows, one after the other.
#[must_use]
pub fn tree_sum(
    parts: DevicePtr,
    out: DevicePtr,
    (ranks, rows, width): (usize, usize, usize),
    live: DevicePtr,
) -> Call {
    let args = word(Args::new().ptr(parts).ptr(out), ranks).u64((rows * width) as u64);
    wide(TREE_SUM, width, rows, word(args, width).ptr(live))
}

/// `tutti_narrow_rows`
#[must_use]
pub fn narrow_rows(
    from: DevicePtr,
    to: DevicePtr,
    (rows, width): (usize, usize),
    live: DevicePtr,
) -> Call {
    wide(NARROW_ROWS, width, rows, word(Args::new().ptr(from).ptr(to), width).ptr(live))
}

/// `tutti_widen_rows`
#[must_use]
pub fn widen_rows(
    from: DevicePtr,
    to: DevicePtr,
    (rows, width): (usize, usize),
    live: DevicePtr,
) -> Call {
    wide(WIDEN_ROWS, width, rows, word(Args::new().ptr(from).ptr(to), width).ptr(live))
}

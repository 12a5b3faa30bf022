//! PURE: calls of the kernels of `kernels/cuda/experts.cu`.
use super::{
    ASSIGNED_ROWS, ASSIGNED_ROWS_BF16, Args, Call, DevicePtr, EXPERTS_DOWN, EXPERTS_DOWN_FP8,
    EXPERTS_DOWN_INT8, EXPERTS_GATE_UP, EXPERTS_GATE_UP_FP8, EXPERTS_GATE_UP_INT8, EXPERTS_SUM,
    GROUP_EXPERTS, ROUTE, Rows, SKINNY, Weight, by_rows, call, wide, words,
};
use crate::backend::{ExpertActivation, Routing, Scores};

/// Slots of some rows, grouped by expert.
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    /// u32: slots in the order of the tiles.
    pub slots: DevicePtr,
    /// `TuttiExpertTile`
    pub tiles: DevicePtr,
    /// u32: number of tiles.
    pub num_tiles: DevicePtr,
    /// Maximum number of tiles.
    pub tiles_most: usize,
    /// Maximum number of slots per tile: one of `SKINNY`.
    pub tile_slots: usize,
}

/// Suitable number of slots per tile for this many rows: twice the mean number per expert.
#[must_use]
pub fn tile_slots(rows: usize, routing: &Routing) -> usize {
    let mean = (2 * rows * routing.top_k).div_ceil(routing.num_experts);
    // No expert has more slots than there are rows.
    by_rows(ROUTE, mean.min(rows)).1
}

/// Maximum number of tiles that `slots` slots form, with `tile_slots` in each.
#[must_use]
pub fn tiles_most(slots: usize, tile_slots: usize, num_experts: usize) -> usize {
    slots.min(slots / tile_slots + num_experts)
}

/// `tutti_route`; `bias` only with [`Scores::Sigmoid`].
#[must_use]
pub fn route(
    (logits, bias): (DevicePtr, Option<DevicePtr>),
    (experts, weights): (DevicePtr, DevicePtr),
    routing: &Routing,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let Routing { normalise, scores, scale, shared, gated, groups, kept_groups, .. } = *routing;
    let (num_experts, chosen) = routing.chosen();
    let flags = [(normalise, 1), (scores == Scores::Sigmoid, 2), (gated, 4)];
    let flags = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum();
    let args = Args::new().ptr(logits).maybe(bias).ptr(experts).ptr(weights);
    let args = words(args, [num_experts, chosen, shared, groups, kept_groups]);
    call(ROUTE, (rows, 1, 1), 32, args.u32(flags).f32(scale).ptr(live))
}

/// `tutti_group_experts`: `grouped` is the place of the first chunk; the others follow at distances
/// of `tiles_stride` tiles and one count.
#[must_use]
pub fn group(
    experts: DevicePtr,
    grouped: &Grouped,
    routing: &Routing,
    (rows, chunk_rows, tiles_stride): (usize, usize, usize),
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(experts).ptr(grouped.slots).ptr(grouped.tiles);
    let sizes =
        [rows, routing.top_k, routing.num_experts, chunk_rows, grouped.tile_slots, tiles_stride];
    let args = words(args.ptr(grouped.num_tiles), sizes).ptr(live);
    call(GROUP_EXPERTS, (rows.div_ceil(chunk_rows), 1, 1), 1024, args)
}

/// The kernel for these tiles among those of its kind, its number of slots, and the number of
/// blocks that divide a tile.
fn variant(first: super::Entry, w: Weight, grouped: &Grouped) -> (super::Entry, usize, usize) {
    let count = w.kernels();
    let which = SKINNY[..count].iter().position(|slots| *slots >= grouped.tile_slots);
    let which = which.unwrap_or(count - 1);
    (super::Entry(first.0 + which), SKINNY[which], grouped.tile_slots.div_ceil(SKINNY[which]))
}

/// `tutti_experts_gate_up_*`: W `[num_experts, 2, inner, k]`, with the bias in the same order.
#[must_use]
pub fn gate_up(
    x: Rows,
    (w, bias): (impl Into<Weight>, Option<DevicePtr>),
    activation: ExpertActivation,
    out: Rows,
    grouped: &Grouped,
    (top_k, inner, k): (usize, usize, usize),
) -> Call {
    let w = w.into();
    let (first, args) = w.choose([EXPERTS_GATE_UP, EXPERTS_GATE_UP_INT8, EXPERTS_GATE_UP_FP8], x);
    let args = args.ptr(out.ptr).ptr(grouped.slots).ptr(grouped.tiles).ptr(grouped.num_tiles);
    let (alpha, limit, shift) = match activation {
        ExpertActivation::Silu => (1.0, f32::INFINITY, 0.0),
        ExpertActivation::Clamped { alpha, limit } => (alpha, limit, 1.0),
    };
    let args = words(args, [top_k, inner, k, x.stride, w.at.stride, out.stride]);
    let args = w.shift(args.maybe(bias).f32(alpha).f32(limit).f32(shift));
    let (entry, _, parts) = variant(first, w, grouped);
    call(entry, (grouped.tiles_most, inner.div_ceil(16), parts), 256, args)
}

/// `tutti_experts_down_*`: W `[num_experts, n, k]`, its bias `[num_experts, n]`; `out` starts at
/// `first_slot`.
#[must_use]
pub fn down(
    x: Rows,
    (w, bias): (impl Into<Weight>, Option<DevicePtr>),
    out: Rows,
    grouped: &Grouped,
    (first_slot, n, k): (usize, usize, usize),
) -> Call {
    let w = w.into();
    let (first, args) = w.choose([EXPERTS_DOWN, EXPERTS_DOWN_INT8, EXPERTS_DOWN_FP8], x);
    let args = args.ptr(out.ptr).ptr(grouped.slots).ptr(grouped.tiles).ptr(grouped.num_tiles);
    let args = words(args, [first_slot, n, k, x.stride, w.at.stride, out.stride]).maybe(bias);
    let (entry, slots, parts) = variant(first, w, grouped);
    let features = if slots <= 16 { 16 } else { 32 };
    call(entry, (grouped.tiles_most, n.div_ceil(features), parts), 256, w.shift(args))
}

/// `tutti_experts_sum`: `rows` rows, starting at `first_row` of those that `live` counts.
#[must_use]
pub fn sum(
    parts: DevicePtr,
    weights: DevicePtr,
    out: DevicePtr,
    (rows, top_k, width): (usize, usize, usize),
    (first_row, live): (usize, DevicePtr),
) -> Call {
    let args = words(Args::new().ptr(parts).ptr(weights).ptr(out), [top_k, width, first_row]);
    wide(EXPERTS_SUM, width, rows, args.ptr(live))
}

/// `tutti_assigned_rows`: as [`sum`], for rows with assigned matrices.
#[must_use]
pub fn assigned_rows(
    (parts, experts): (DevicePtr, DevicePtr),
    out: DevicePtr,
    (rows, width): (usize, usize),
    (first_row, live): (usize, DevicePtr),
) -> Call {
    let args = words(Args::new().ptr(parts).ptr(experts).ptr(out), [width, first_row]);
    wide(ASSIGNED_ROWS, width, rows, args.ptr(live))
}

/// `tutti_assigned_rows_bf16`
#[must_use]
pub fn assigned_rows_bf16(
    (parts, experts): (DevicePtr, DevicePtr),
    out: Rows,
    (rows, width): (usize, usize),
    (first_row, live): (usize, DevicePtr),
) -> Call {
    let args = Args::new().ptr(parts).ptr(experts).ptr(out.ptr);
    let args = words(args, [width, out.stride, first_row]);
    wide(ASSIGNED_ROWS_BF16, width, rows, args.ptr(live))
}

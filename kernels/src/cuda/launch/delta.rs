//! PURE: calls of the kernels of `kernels/cuda/delta.cu`.
use super::entries::*;
use super::{Args, Call, DevicePtr, Rows, call, wide, word, words};
use crate::backend::{DeltaShape, Rule};

/// Largest `key_dim` of the variants of `tutti_delta_update_*`.
const KEY_DIMS: [usize; 3] = [32, 128, 256];
/// `TUTTI_DELTA_COLUMNS`
const COLUMNS: usize = 32;
/// `TUTTI_DELTA_KEPT`
const KEPT: usize = 1024;
/// From this many rows on a block mixes several, whose tokens are then read once.
const MANY_ROWS: usize = 1024;
const ROWS_EACH: usize = 8;

/// Operands of linear attention in a layer.
#[derive(Clone, Copy, Debug)]
pub struct DeltaIo {
    /// f32 [rows, channels + value width]
    pub qkvz: DevicePtr,
    /// f32 [rows, [`DeltaShape::gates_width`]]
    pub ba: DevicePtr,
    /// f32 [channels, kernel]
    pub conv: DevicePtr,
    /// f32 `[channels]`, or null.
    pub conv_bias: DevicePtr,
    /// f32 `[value heads]`
    pub decay: DevicePtr,
    /// f32 `[value heads]`
    pub dt_bias: DevicePtr,
    /// f32 `[value heads]`, or null.
    pub skip: DevicePtr,
    /// f32 `[value dim]`, or null.
    pub norm: DevicePtr,
    /// The layer's states, f32 [slots, elements of one].
    pub slots: DevicePtr,
    /// `TuttiSeq [seqs]`
    pub seqs: DevicePtr,
    /// u32 `[seqs]`: the slot of each.
    pub states: DevicePtr,
    /// Address of the number of sequences.
    pub num_seqs: DevicePtr,
    /// Scratch: f32 [rows, channels]
    pub mixed: DevicePtr,
    /// Scratch: f32 [rows, value heads, 4]
    pub gates: DevicePtr,
    /// bf16 [rows, value width]; in Mamba 2 f32, contiguous.
    pub out: Rows,
}

impl DeltaIo {
    /// Number of f32 of `mixed` and of `gates`.
    #[must_use]
    pub const fn scratch(shape: &DeltaShape, rows: usize) -> (usize, usize) {
        (rows * shape.channels(), rows * shape.value_heads * 4)
    }
}

/// `tutti_delta_mix`, `tutti_delta_update_*` and `tutti_delta_finish`, for so many rows and
/// sequences.
#[must_use]
pub fn delta_attention(
    io: &DeltaIo,
    shape: &DeltaShape,
    eps: f32,
    (rows, live): (usize, DevicePtr),
    seqs: usize,
) -> [Call; 3] {
    let DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, kernel } = *shape;
    let adds = usize::from(rule == Rule::Mamba2);
    let sizes = [key_heads, value_heads, key_dim, value_dim, kernel, adds];
    let channels = shape.channels();
    let each = if rows < MANY_ROWS { 1 } else { ROWS_EACH };
    let args = Args::new()
        .ptr(io.qkvz)
        .ptr(io.ba)
        .ptr(io.conv)
        .ptr(io.conv_bias)
        .ptr(io.decay)
        .ptr(io.dt_bias)
        .ptr(io.skip)
        .ptr(io.slots)
        .ptr(io.seqs)
        .ptr(io.states)
        .ptr(io.num_seqs)
        .ptr(io.mixed)
        .ptr(io.gates);
    // Without prompts: see `kernels.h`. Graphs, too, are made for as many sequences as rows.
    let releases = usize::from(rows == seqs);
    let args = words(words(args, sizes), [rows, each, releases]).ptr(live);
    let heads = (key_heads + value_heads).div_ceil(8);
    let mix = call(DELTA_MIX, (rows.div_ceil(each), heads, 1), 256, args);

    let args = Args::new().ptr(io.qkvz).ptr(io.gates).ptr(io.seqs).ptr(io.states);
    let args = words(args.ptr(io.mixed).ptr(io.slots), sizes).ptr(io.num_seqs);
    let which = KEY_DIMS.iter().take_while(|most| **most < key_dim).count();
    let blocks = value_heads * value_dim.div_ceil(COLUMNS) + channels.div_ceil(KEPT);
    let entry = Entry(DELTA_UPDATE.0 + which.min(KEY_DIMS.len() - 1));
    let update = call(entry, (blocks, seqs, 1), 256, args);

    let (none, to) = (DevicePtr::default(), io.out.ptr);
    let [out, gated] = if adds == 0 { [to, none] } else { [none, to] };
    let args = Args::new().ptr(io.qkvz).ptr(io.mixed).ptr(io.norm).ptr(out).ptr(gated);
    let args = words(args, [value_heads, value_dim, channels, io.out.stride]).f32(eps).ptr(live);
    let finish = call(DELTA_FINISH, (rows, value_heads.div_ceil(8), 1), 256, args);
    [mix, update, finish]
}

/// `tutti_gate`
#[must_use]
pub fn gate(from: DevicePtr, x: Rows, width: usize, rows: usize, live: DevicePtr) -> Call {
    let args = word(word(Args::new().ptr(from).ptr(x.ptr), width), x.stride).ptr(live);
    wide(GATE, width, rows, args)
}

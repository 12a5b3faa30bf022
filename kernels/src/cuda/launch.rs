//! PURE: every kernel's name, grid and arguments, as `kernels/cuda/kernels.h` lists them.
//!
//! Sizes reach the kernels as 32-bit words; the callers have checked that they fit.
//!
//! - `attention`: QKV and attention
//! - `experts`: mixtures of experts
//! - `sample`: sampling
//! - `ranks`: exchanges between GPUs
use super::memory::DevicePtr;
use super::module::{Args, Launch};
use crate::backend::Activation;

mod attention;
pub mod experts;
mod ranks;
mod sample;

pub use attention::{
    AttentionIo, DecodeWork, HEAD_DIM_MAX, HEAD_DIMS, LayerCache, Partials, QkvFinish,
    attention_any, decode_attention, prefill_attention, qkv_finish,
};
pub(super) use ranks::peer_sum_add_rmsnorm;
pub use ranks::{PEER_BLOCKS, PEER_SLOT, peer_gather, peer_sum, tree_sum};
pub use sample::{SampleIo, argmax, argmax_merge, logprobs, sample};

/// Rows of one grid.y of the products of few rows.
const SKINNY: [usize; 4] = [8, 16, 32, 64];

/// A kernel, by its place in [`NAMES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(pub usize);

macro_rules! entries {
    ($($constant:ident: $name:literal,)*) => {
        /// Every kernel that is launched.
        pub const NAMES: &[&str] = &[$($name),*];
        entries!(@ 0usize; $($constant,)*);
    };
    (@ $index:expr; $constant:ident, $($rest:ident,)*) => {
        #[allow(dead_code, reason = "kernels of a family are found by their first")]
        const $constant: Entry = Entry($index);
        entries!(@ $index + 1; $($rest,)*);
    };
    (@ $index:expr;) => {};
}

entries! {
    EMBED: "tutti_embed",
    ADD_RMSNORM: "tutti_add_rmsnorm",
    ADD_NORMED_RMSNORM: "tutti_add_normed_rmsnorm",
    ACTIVATE_MUL: "tutti_activate_mul_f32",
    ADD_BIAS: "tutti_add_bias",
    SCALE_ADD_BIAS: "tutti_scale_add_bias",
    WIDEN_INT8: "tutti_widen_int8",
    WIDEN_INT4: "tutti_widen_int4",
    ADD: "tutti_add",
    GATHER_ROWS: "tutti_gather_rows",
    COPY_COLUMNS: "tutti_copy_columns",
    READ: "tutti_read",
    QKV_FINISH: "tutti_qkv_finish",
    PREFILL: "tutti_prefill_attention_16",
    PREFILL_32: "tutti_prefill_attention_32",
    PREFILL_64: "tutti_prefill_attention_64",
    PREFILL_96: "tutti_prefill_attention_96",
    PREFILL_128: "tutti_prefill_attention_128",
    PREFILL_256: "tutti_prefill_attention_256",
    DECODE: "tutti_decode_attention_16",
    DECODE_32: "tutti_decode_attention_32",
    DECODE_64: "tutti_decode_attention_64",
    DECODE_96: "tutti_decode_attention_96",
    DECODE_128: "tutti_decode_attention_128",
    DECODE_256: "tutti_decode_attention_256",
    DECODE_REDUCE: "tutti_decode_reduce",
    ATTENTION_ANY: "tutti_attention_any",
    SKINNY_8: "tutti_skinny_8",
    SKINNY_16: "tutti_skinny_16",
    SKINNY_32: "tutti_skinny_32",
    SKINNY_64: "tutti_skinny_64",
    SKINNY_INT8: "tutti_skinny_int8_8",
    SKINNY_INT8_16: "tutti_skinny_int8_16",
    SKINNY_INT8_32: "tutti_skinny_int8_32",
    SKINNY_INT8_64: "tutti_skinny_int8_64",
    SKINNY_INT4: "tutti_skinny_int4_8",
    SKINNY_INT4_16: "tutti_skinny_int4_16",
    SKINNY_INT4_32: "tutti_skinny_int4_32",
    GATE_UP_8: "tutti_skinny_gate_up_8",
    GATE_UP_16: "tutti_skinny_gate_up_16",
    GATE_UP_32: "tutti_skinny_gate_up_32",
    GATE_UP_64: "tutti_skinny_gate_up_64",
    GATE_UP_INT8: "tutti_skinny_gate_up_int8_8",
    GATE_UP_INT8_16: "tutti_skinny_gate_up_int8_16",
    GATE_UP_INT8_32: "tutti_skinny_gate_up_int8_32",
    GATE_UP_INT8_64: "tutti_skinny_gate_up_int8_64",
    GATE_UP_INT4: "tutti_skinny_gate_up_int4_8",
    GATE_UP_INT4_16: "tutti_skinny_gate_up_int4_16",
    GATE_UP_INT4_32: "tutti_skinny_gate_up_int4_32",
    ROUTE: "tutti_route",
    GROUP_EXPERTS: "tutti_group_experts",
    EXPERTS_GATE_UP: "tutti_experts_gate_up_8",
    EXPERTS_GATE_UP_16: "tutti_experts_gate_up_16",
    EXPERTS_GATE_UP_32: "tutti_experts_gate_up_32",
    EXPERTS_GATE_UP_64: "tutti_experts_gate_up_64",
    EXPERTS_GATE_UP_INT8: "tutti_experts_gate_up_int8_8",
    EXPERTS_GATE_UP_INT8_16: "tutti_experts_gate_up_int8_16",
    EXPERTS_GATE_UP_INT8_32: "tutti_experts_gate_up_int8_32",
    EXPERTS_GATE_UP_INT8_64: "tutti_experts_gate_up_int8_64",
    EXPERTS_DOWN: "tutti_experts_down_8",
    EXPERTS_DOWN_16: "tutti_experts_down_16",
    EXPERTS_DOWN_32: "tutti_experts_down_32",
    EXPERTS_DOWN_64: "tutti_experts_down_64",
    EXPERTS_DOWN_INT8: "tutti_experts_down_int8_8",
    EXPERTS_DOWN_INT8_16: "tutti_experts_down_int8_16",
    EXPERTS_DOWN_INT8_32: "tutti_experts_down_int8_32",
    EXPERTS_DOWN_INT8_64: "tutti_experts_down_int8_64",
    EXPERTS_SUM: "tutti_experts_sum",
    ASSIGNED_ROWS: "tutti_assigned_rows",
    ASSIGNED_ROWS_BF16: "tutti_assigned_rows_bf16",
    SAMPLE: "tutti_sample",
    LOGPROBS: "tutti_logprobs",
    ARGMAX: "tutti_argmax",
    INTERLEAVE: "tutti_interleave_ranks",
    PEER_SUM: "tutti_peer_sum",
    PEER_SUM_TWO_SHOT: "tutti_peer_sum_two_shot",
    PEER_SUM_ADD_RMSNORM: "tutti_peer_sum_add_rmsnorm",
    PEER_GATHER: "tutti_peer_gather",
    ARGMAX_MERGE: "tutti_argmax_merge",
    TREE_SUM: "tutti_tree_sum",
    BLOCKS_OUT: "tutti_blocks_out",
    BLOCKS_IN: "tutti_blocks_in",
}

impl Entry {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self.0]
    }

    /// The dynamic shared memory that it may be launched with.
    #[must_use]
    pub fn shared(self) -> u32 {
        match self.0.checked_sub(PREFILL.0).and_then(|which| HEAD_DIMS.get(which)) {
            Some(head_dim) => prefill_shared(*head_dim),
            None => 0,
        }
    }
}

fn prefill_shared(head_dim: usize) -> u32 {
    320 * 2 * head_dim as u32
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What.
    pub entry: Entry,
    /// How.
    pub launch: Launch,
    /// With what.
    pub args: Args,
}

fn call(entry: Entry, grid: (usize, usize, usize), block: u32, args: Args) -> Call {
    let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let grid = (word(grid.0), word(grid.1), word(grid.2));
    Call { entry, launch: Launch { grid, block: (block, 1, 1), shared: 0 }, args }
}

/// Rows across, since there may be more than a grid is high; elements down.
fn wide(entry: Entry, width: usize, rows: usize, args: Args) -> Call {
    call(entry, (rows, width.div_ceil(1024), 1), 256, args)
}

fn word(args: Args, n: usize) -> Args {
    args.u32(u32::try_from(n).unwrap_or(u32::MAX))
}

fn words<const N: usize>(args: Args, all: [usize; N]) -> Args {
    all.into_iter().fold(args, word)
}

/// Rows of 16 bits or f32 somewhere on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The first.
    pub ptr: DevicePtr,
    /// Elements from one to the next.
    pub stride: usize,
}

/// A weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    /// Its rows: bf16, int8 plus 128, or 4 bits, strides in weights.
    pub at: Rows,
    /// f32: what the sums of int8 rows are multiplied by.
    pub scales: Option<DevicePtr>,
    /// Of 4 bits: words of scale and zero, each of two to the power of that many inputs.
    pub groups: Option<(DevicePtr, u32)>,
}

impl From<Rows> for Weight {
    fn from(at: Rows) -> Self {
        Self { at, scales: None, groups: None }
    }
}

impl Weight {
    /// Whether it is bf16.
    #[must_use]
    pub fn is_bf16(&self) -> bool {
        self.scales.is_none() && self.groups.is_none()
    }

    /// One of two kernels, and the arguments that it takes of the weights behind x.
    fn choose(self, bf16: Entry, int8: Entry, x: Rows) -> (Entry, Args) {
        let args = Args::new().ptr(x.ptr).ptr(self.at.ptr);
        match self.scales {
            None => (bf16, args),
            Some(scales) => (int8, args.ptr(scales)),
        }
    }

    /// The same of three kernels.
    fn choose_any(self, bf16: Entry, int8: Entry, int4: Entry, x: Rows) -> (Entry, Args) {
        match self.groups {
            None => self.choose(bf16, int8, x),
            Some((groups, _)) => (int4, Args::new().ptr(x.ptr).ptr(self.at.ptr).ptr(groups)),
        }
    }

    /// How many kernels there are by rows: of 4 bits none for 64.
    fn kernels(self) -> usize {
        if self.groups.is_some() { SKINNY.len() - 1 } else { SKINNY.len() }
    }

    /// The argument that kernels of 4 bits take besides.
    fn shift(self, args: Args) -> Args {
        match self.groups {
            None => args,
            Some((_, shift)) => args.u32(shift),
        }
    }
}

/// `tutti_embed`; `rows` items are launched.
#[must_use]
pub fn embed(
    ids: DevicePtr,
    (table, table_rows): (DevicePtr, usize),
    out: Rows,
    width: usize,
    first_id: u32,
    scale: f32,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(ids).ptr(table).ptr(out.ptr);
    let args = words(args, [width, out.stride]).u32(first_id);
    call(EMBED, (rows, 1, 1), 256, word(args, table_rows).f32(scale).ptr(live))
}

/// `tutti_add_rmsnorm`
#[must_use]
pub fn add_rmsnorm(
    (residual, delta): (DevicePtr, Option<DevicePtr>),
    weight: DevicePtr,
    out: Rows,
    width: usize,
    eps: f32,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(residual).maybe(delta).ptr(weight).ptr(out.ptr);
    let args = words(args, [width, out.stride]).f32(eps).ptr(live);
    call(ADD_RMSNORM, (rows, 1, 1), 512, args)
}

/// `tutti_add_normed_rmsnorm`: of (what is added, its weight).
#[must_use]
pub fn add_normed_rmsnorm(
    residual: DevicePtr,
    (delta, delta_weight): (DevicePtr, DevicePtr),
    weight: DevicePtr,
    out: Rows,
    width: usize,
    eps: f32,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(residual).ptr(delta).ptr(delta_weight).ptr(weight).ptr(out.ptr);
    let args = words(args, [width, out.stride]).f32(eps).ptr(live);
    call(ADD_NORMED_RMSNORM, (rows, 1, 1), 512, args)
}

/// `tutti_activate_mul_f32`
#[must_use]
pub fn activate_mul(
    input: DevicePtr,
    bias: Option<DevicePtr>,
    out: Rows,
    inner: usize,
    activation: Activation,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(input).maybe(bias).ptr(out.ptr);
    let args = words(args, [inner, out.stride]).u32(gelu(activation)).ptr(live);
    wide(ACTIVATE_MUL, inner, rows, args)
}

/// As kernels are told of it.
fn gelu(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
    }
}

/// `tutti_add_bias`
#[must_use]
pub fn add_bias(
    data: DevicePtr,
    bias: DevicePtr,
    width: usize,
    rows: usize,
    live: DevicePtr,
) -> Call {
    wide(ADD_BIAS, width, rows, word(Args::new().ptr(data).ptr(bias), width).ptr(live))
}

/// `tutti_scale_add_bias`
#[must_use]
pub fn scale_add_bias(
    data: DevicePtr,
    scales: DevicePtr,
    bias: Option<DevicePtr>,
    width: usize,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(data).ptr(scales).maybe(bias);
    wide(SCALE_ADD_BIAS, width, rows, word(args, width).ptr(live))
}

/// `tutti_widen_int8`: `w` and `out` are of one stride.
#[must_use]
pub fn widen_int8(w: Rows, out: DevicePtr, rows: usize) -> Call {
    let args = word(Args::new().ptr(w.ptr).ptr(out), w.stride);
    call(WIDEN_INT8, (rows, w.stride.div_ceil(4096), 1), 256, args)
}

/// `tutti_widen_int4`: `w` and `out` are of one stride, in weights.
#[must_use]
pub fn widen_int4(
    w: Rows,
    (groups, shift): (DevicePtr, u32),
    out: DevicePtr,
    rows: usize,
    k: usize,
) -> Call {
    let args = words(Args::new().ptr(w.ptr).ptr(groups).ptr(out), [w.stride, k]).u32(shift);
    call(WIDEN_INT4, (rows, w.stride.div_ceil(8192), 1), 256, args)
}

/// `tutti_add`
#[must_use]
pub fn add(sum: DevicePtr, other: DevicePtr, width: usize, rows: usize, live: DevicePtr) -> Call {
    wide(ADD, width, rows, word(Args::new().ptr(sum).ptr(other), width).ptr(live))
}

/// `tutti_gather_rows`
#[must_use]
pub fn gather_rows(
    from: Rows,
    index: DevicePtr,
    to: Rows,
    width: usize,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(from.ptr).ptr(index).ptr(to.ptr);
    wide(GATHER_ROWS, width, rows, words(args, [width, from.stride, to.stride]).ptr(live))
}

/// `tutti_copy_columns`
#[must_use]
pub fn copy_columns(
    from: Rows,
    to: Rows,
    first: usize,
    width: usize,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(from.ptr).ptr(to.ptr);
    wide(COPY_COLUMNS, width, rows, words(args, [first, width, from.stride, to.stride]).ptr(live))
}

/// `tutti_interleave_ranks`: `rows` rows of `ranks` ranks, each `width` wide.
#[must_use]
pub fn interleave_ranks(
    gathered: DevicePtr,
    full: Rows,
    (ranks, rows, width): (usize, usize, usize),
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(gathered).ptr(full.ptr);
    let args = words(args, [rows, width, full.stride]).ptr(live);
    call(INTERLEAVE, (rows, width.div_ceil(1024), ranks), 256, args)
}

/// `tutti_blocks_out`: of (blocks, planes, elements of a block, elements from plane to plane).
#[must_use]
pub fn blocks_out(
    cache: DevicePtr,
    names: DevicePtr,
    staging: DevicePtr,
    sizes: (usize, usize, usize, usize),
) -> Call {
    blocks(BLOCKS_OUT, cache, names, staging, sizes)
}

/// `tutti_blocks_in`: likewise.
#[must_use]
pub fn blocks_in(
    cache: DevicePtr,
    names: DevicePtr,
    staging: DevicePtr,
    sizes: (usize, usize, usize, usize),
) -> Call {
    blocks(BLOCKS_IN, cache, names, staging, sizes)
}

fn blocks(
    entry: Entry,
    cache: DevicePtr,
    names: DevicePtr,
    staging: DevicePtr,
    (count, planes, elements, stride): (usize, usize, usize, usize),
) -> Call {
    let args = Args::new().ptr(cache).ptr(names).ptr(staging).u64(stride as u64);
    let args = word(args, elements).ptr(DevicePtr::default());
    call(entry, (count, planes, 1), 256, args)
}

/// Bytes that a block of [`read`] reads; it writes [`READ_RESULT`].
pub const READ_BLOCK: usize = 32 << 10;
/// See [`READ_BLOCK`].
pub const READ_RESULT: usize = 32;

/// `tutti_read`: of `bytes` the whole 16s.
#[must_use]
pub fn read(from: DevicePtr, to: DevicePtr, bytes: usize) -> Call {
    let args = word(Args::new().ptr(from).ptr(to), bytes / 16);
    call(READ, (bytes.div_ceil(READ_BLOCK), 1, 1), 256, args)
}

/// Which of the kernels by rows: the smallest that holds them all.
fn by_rows(first: Entry, rows: usize) -> (Entry, usize) {
    by_rows_of(SKINNY.len(), first, rows)
}

/// The same of the first `count` of them.
fn by_rows_of(count: usize, first: Entry, rows: usize) -> (Entry, usize) {
    let which = SKINNY[..count].iter().position(|most| *most >= rows).unwrap_or(count - 1);
    (Entry(first.0 + which), SKINNY[which])
}

/// `tutti_skinny_*`: `out = x W^T + bias`, W `[n, k]`.
#[must_use]
pub fn skinny(
    (x, index): (Rows, Option<DevicePtr>),
    w: impl Into<Weight>,
    bias: Option<DevicePtr>,
    out: Rows,
    (rows, n, k): (usize, usize, usize),
    live: DevicePtr,
) -> Call {
    let w = w.into();
    let (first, args) = w.choose_any(SKINNY_8, SKINNY_INT8, SKINNY_INT4, x);
    let (entry, number) = by_rows_of(w.kernels(), first, rows);
    let features = if number <= 16 { 16 } else { 32 };
    let args = args.maybe(bias).ptr(out.ptr).maybe(index);
    let args = w.shift(words(args, [rows, n, k, x.stride, w.at.stride, out.stride])).ptr(live);
    call(entry, (n.div_ceil(features), rows.div_ceil(number), 1), 256, args)
}

/// `tutti_skinny_gate_up_*`: W `[2 * inner, k]`.
#[must_use]
pub fn skinny_gate_up(
    x: Rows,
    w: impl Into<Weight>,
    bias: Option<DevicePtr>,
    out: Rows,
    (rows, inner, k): (usize, usize, usize),
    activation: Activation,
    live: DevicePtr,
) -> Call {
    let w = w.into();
    let (first, args) = w.choose_any(GATE_UP_8, GATE_UP_INT8, GATE_UP_INT4, x);
    let (entry, number) = by_rows_of(w.kernels(), first, rows);
    let args = args.maybe(bias).ptr(out.ptr);
    let args = words(args, [rows, inner, k, x.stride, w.at.stride, out.stride]);
    let args = w.shift(args.u32(gelu(activation))).ptr(live);
    call(entry, (inner.div_ceil(16), rows.div_ceil(number), 1), 256, args)
}

#[cfg(test)]
mod tests;

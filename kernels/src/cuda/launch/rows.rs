//! PURE: calls of the kernels on rows of activations and on blocks of the cache.
use std::time::Duration;

use super::entries::*;
use super::products::gelu;
use super::{Call, Rows, call, norm, wide, word, words};
use crate::backend::{Activation, PlainActivation};
use crate::cuda::memory::DevicePtr;
use crate::cuda::module::Args;

/// `tutti_embed`, launched for `rows` rows.
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
    let args = Args::new().ptr(residual).maybe(delta).ptr(weight);
    norm(ADD_RMSNORM, args, out, (width, eps), rows, live)
}

/// `tutti_add_rmsnorm_bf16`
#[must_use]
pub fn add_rmsnorm_bf16(
    (residual, delta): (DevicePtr, DevicePtr),
    weight: DevicePtr,
    out: Rows,
    width: usize,
    eps: f32,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(residual).ptr(delta).ptr(weight);
    norm(ADD_RMSNORM_BF16, args, out, (width, eps), rows, live)
}

/// `tutti_add_normed_rmsnorm`, with (addend, its weight).
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
    let args = Args::new().ptr(residual).ptr(delta).ptr(delta_weight).ptr(weight);
    norm(ADD_NORMED_RMSNORM, args, out, (width, eps), rows, live)
}

/// `tutti_add_normed`, with (addend, its weight).
#[must_use]
pub fn add_normed(
    residual: DevicePtr,
    added: Option<(DevicePtr, DevicePtr)>,
    out: Rows,
    width: usize,
    eps: f32,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let (delta, weight) = added.unzip();
    let args = Args::new().ptr(residual).maybe(delta).maybe(weight);
    norm(ADD_NORMED, args, out, (width, eps), rows, live)
}

/// `tutti_cap`
#[must_use]
pub fn cap(data: DevicePtr, cap: f32, width: usize, rows: usize, live: DevicePtr) -> Call {
    wide(CAP, width, rows, word(Args::new().ptr(data).f32(cap), width).ptr(live))
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

/// `tutti_activate_f32`
#[must_use]
pub fn activate(
    input: DevicePtr,
    out: Rows,
    inner: usize,
    activation: PlainActivation,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let squared_relu = u32::from(activation == PlainActivation::SquaredRelu);
    let args = words(Args::new().ptr(input).ptr(out.ptr), [inner, out.stride]);
    wide(ACTIVATE, inner, rows, args.u32(squared_relu).ptr(live))
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

/// `tutti_blocks_out`, with (blocks, planes, elements per block, elements from plane to plane).
#[must_use]
pub fn blocks_out(
    cache: DevicePtr,
    names: DevicePtr,
    staging: DevicePtr,
    sizes: (usize, usize, usize, usize),
) -> Call {
    blocks(BLOCKS_OUT, cache, names, staging, sizes)
}

/// `tutti_blocks_in`, with the same arguments.
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

/// Bytes that a block of [`read`] reads; it writes [`READ_RESULT`] bytes.
pub const READ_BLOCK: usize = 32 << 10;
/// See [`READ_BLOCK`].
pub const READ_RESULT: usize = 32;

/// `tutti_read`: the whole 16-byte words among `bytes`.
#[must_use]
pub fn read(from: DevicePtr, to: DevicePtr, bytes: usize) -> Call {
    let args = word(Args::new().ptr(from).ptr(to), bytes / 16);
    call(READ, (bytes.div_ceil(READ_BLOCK), 1, 1), 256, args)
}

/// `tutti_late`: few blocks, so that those of the kernels behind it find room beside them.
#[must_use]
pub fn late(from: DevicePtr, to: DevicePtr, words: usize, delay: Duration) -> Call {
    let delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
    let args = Args::new().ptr(from).ptr(to).u64(words as u64).u64(delay);
    call(LATE, (16, 1, 1), 256, args)
}

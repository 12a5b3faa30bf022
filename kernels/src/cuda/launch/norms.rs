//! PURE: calls of the kernels of `kernels/cuda/norms.cu`.
use super::entries::*;
use super::{Call, Rows, call, norm, wide, words};
use crate::backend::QkNorm;
use crate::cuda::memory::DevicePtr;
use crate::cuda::module::Args;

/// `tutti_add_layernorm`, with (weight, bias).
#[must_use]
pub fn add_layernorm(
    (residual, delta): (DevicePtr, Option<DevicePtr>),
    (weight, bias): (DevicePtr, DevicePtr),
    out: Rows,
    width: usize,
    eps: f32,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(residual).maybe(delta).ptr(weight).ptr(bias);
    norm(ADD_LAYERNORM, args, out, (width, eps), rows, live)
}

/// `tutti_qk_squares`
#[must_use]
pub fn qk_squares(qkv: Rows, norm: &QkNorm, out: DevicePtr, rows: usize, live: DevicePtr) -> Call {
    let ([q, k], [q_sections, k_sections]) = (norm.columns, norm.sections);
    let args = Args::new().ptr(qkv.ptr).ptr(out);
    let args = words(args, [q, k, qkv.stride, q_sections, k_sections, norm.parts]);
    call(QK_SQUARES, (rows, 1, 1), 256, args.ptr(live))
}

/// `tutti_qk_scale`
#[must_use]
pub fn qk_scale(
    qkv: Rows,
    norm: &QkNorm,
    squares: DevicePtr,
    weight: DevicePtr,
    rows: usize,
    live: DevicePtr,
) -> Call {
    let ([q, k], [q_count, k_count]) = (norm.columns, norm.counts);
    let args = Args::new().ptr(qkv.ptr).ptr(squares).ptr(weight);
    let args = words(args, [q, k, qkv.stride, q_count, k_count]).f32(norm.eps).ptr(live);
    wide(QK_SCALE, q + k, rows, args)
}

//! PURE: products with weights, by this project's own kernels.
use super::entries::*;
use super::{Call, Rows, call, word, words};
use crate::backend::Activation;
use crate::cuda::memory::DevicePtr;
use crate::cuda::module::Args;

/// Rows per block of the products of few rows (the step of grid.y).
pub(super) const SKINNY: [usize; 4] = [8, 16, 32, 64];

/// A weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    /// Rows in bf16, int8 plus 128, FP8, or 4 bits; strides in weights.
    pub at: Rows,
    /// f32: factors of the sums of int8 rows.
    pub scales: Option<DevicePtr>,
    /// For 4 bits: words of scale and zero, and the logarithm of the number of inputs per word.
    pub groups: Option<(DevicePtr, u32)>,
    /// For FP8: scales, and the logarithm of the number of inputs per scale.
    pub fp8: Option<(DevicePtr, u32)>,
}

impl From<Rows> for Weight {
    fn from(at: Rows) -> Self {
        Self { at, scales: None, groups: None, fp8: None }
    }
}

impl Weight {
    /// Whether it is bf16.
    #[must_use]
    pub fn is_bf16(&self) -> bool {
        self.scales.is_none() && self.groups.is_none() && self.fp8.is_none()
    }

    /// Selects one of three kernels, with its arguments up to the weights.
    pub(super) fn choose(self, [bf16, int8, fp8]: [Entry; 3], x: Rows) -> (Entry, Args) {
        let args = Args::new().ptr(x.ptr).ptr(self.at.ptr);
        match (self.scales, self.fp8) {
            (None, None) => (bf16, args),
            (Some(scales), _) => (int8, args.ptr(scales)),
            (None, Some((scales, _))) => (fp8, args.ptr(scales)),
        }
    }

    /// As [`Self::choose`], among four kernels.
    pub(super) fn choose_any(self, others: [Entry; 3], int4: Entry, x: Rows) -> (Entry, Args) {
        match self.groups {
            None => self.choose(others, x),
            Some((groups, _)) => (int4, Args::new().ptr(x.ptr).ptr(self.at.ptr).ptr(groups)),
        }
    }

    /// Number of kernels by rows; those with groups of inputs have none for 64 rows.
    pub(super) fn kernels(self) -> usize {
        if self.groups.or(self.fp8).is_some() { SKINNY.len() - 1 } else { SKINNY.len() }
    }

    /// Adds the argument that only kernels with groups take.
    pub(super) fn shift(self, args: Args) -> Args {
        match self.groups.or(self.fp8) {
            None => args,
            Some((_, shift)) => args.u32(shift),
        }
    }
}

/// The activation, as passed to kernels.
pub(super) fn gelu(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
    }
}

/// `tutti_widen_int8`: `w` and `out` have the same stride.
#[must_use]
pub fn widen_int8(w: Rows, out: DevicePtr, rows: usize) -> Call {
    let args = word(Args::new().ptr(w.ptr).ptr(out), w.stride);
    call(WIDEN_INT8, (rows, w.stride.div_ceil(4096), 1), 256, args)
}

/// `tutti_widen_fp8`: `w` and `out` have the same stride.
#[must_use]
pub fn widen_fp8(
    w: Rows,
    (scales, shift): (DevicePtr, u32),
    out: DevicePtr,
    rows: usize,
    k: usize,
) -> Call {
    let args = words(Args::new().ptr(w.ptr).ptr(scales).ptr(out), [w.stride, k]).u32(shift);
    call(WIDEN_FP8, (rows, w.stride.div_ceil(4096), 1), 256, args)
}

/// `tutti_widen_int4`: `w` and `out` have the same stride, in weights.
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

/// Selects a kernel by rows: the smallest that holds them all.
pub(super) fn by_rows(first: Entry, rows: usize) -> (Entry, usize) {
    by_rows_of(SKINNY.len(), first, rows)
}

/// As [`by_rows`], among the first `count` kernels.
pub(super) fn by_rows_of(count: usize, first: Entry, rows: usize) -> (Entry, usize) {
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
    let (first, args) = w.choose_any([SKINNY_8, SKINNY_INT8, SKINNY_FP8], SKINNY_INT4, x);
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
    let (first, args) = w.choose_any([GATE_UP_8, GATE_UP_INT8, GATE_UP_FP8], GATE_UP_INT4, x);
    let (entry, number) = by_rows_of(w.kernels(), first, rows);
    let args = args.maybe(bias).ptr(out.ptr);
    let args = words(args, [rows, inner, k, x.stride, w.at.stride, out.stride]);
    let args = w.shift(args.u32(gelu(activation))).ptr(live);
    call(entry, (inner.div_ceil(16), rows.div_ceil(number), 1), 256, args)
}

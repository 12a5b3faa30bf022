//! PURE: calls of the kernels of `kernels/cuda/sample.cu`.
use super::{
    ARGMAX, ARGMAX_MERGE, Args, BEST_KEYS, Call, DRAW_BEST, DevicePtr, LOGPROBS, Rows, SAMPLE,
    call, words,
};

/// Operands of `tutti_sample`.
#[derive(Clone, Copy, Debug)]
pub struct SampleIo {
    /// f32 rows.
    pub logits: Rows,
    /// `TuttiSampleParams [rows]`
    pub params: DevicePtr,
    /// TuttiIdValue [..]
    pub biases: Option<DevicePtr>,
    /// u32 [..]
    pub ids: Option<DevicePtr>,
    /// u32 [..], if rows have masks.
    pub masks: Option<DevicePtr>,
    /// f32 and u32 [rows, vocab], if rows are edited.
    pub scratch: Option<(DevicePtr, DevicePtr)>,
    /// `TuttiSampled [rows]`
    pub out: DevicePtr,
    /// u32 and f32 [rows, top_stride]
    pub top: Option<(DevicePtr, DevicePtr)>,
    /// Length of the longest list of most likely tokens.
    pub top_stride: usize,
}

/// `tutti_sample`
#[must_use]
pub fn sample(io: &SampleIo, vocab: usize, rows: usize, live: Option<DevicePtr>) -> Call {
    let args = Args::new()
        .ptr(io.logits.ptr)
        .ptr(io.params)
        .maybe(io.biases)
        .maybe(io.ids)
        .maybe(io.masks)
        .maybe(io.scratch.map(|both| both.0))
        .maybe(io.scratch.map(|both| both.1))
        .ptr(io.out)
        .maybe(io.top.map(|both| both.0))
        .maybe(io.top.map(|both| both.1));
    let args = words(args, [io.logits.stride, vocab, io.top_stride]).maybe(live);
    call(SAMPLE, (rows, 1, 1), 1024, args)
}

/// `tutti_logprobs`
#[must_use]
pub fn logprobs(
    logits: Rows,
    targets: DevicePtr,
    out: DevicePtr,
    top: Option<(DevicePtr, DevicePtr)>,
    (vocab, top_n, rows): (usize, u32, usize),
) -> Call {
    let args = Args::new()
        .ptr(logits.ptr)
        .ptr(targets)
        .ptr(out)
        .maybe(top.map(|both| both.0))
        .maybe(top.map(|both| both.1));
    let args = words(args, [logits.stride, vocab]).u32(top_n).u32(top_n).maybe(None);
    call(LOGPROBS, (rows, 1, 1), 1024, args)
}

/// `tutti_argmax`; token ids start at `first_id`. `masked`: the rows' parameters and the address of
/// their masks.
#[must_use]
pub fn argmax(
    logits: Rows,
    masked: Option<(DevicePtr, DevicePtr)>,
    out: DevicePtr,
    (vocab, first_id): (usize, u32),
    rows: usize,
    live: Option<DevicePtr>,
) -> Call {
    let args = Args::new()
        .ptr(logits.ptr)
        .maybe(masked.map(|both| both.0))
        .maybe(masked.map(|both| both.1))
        .ptr(out);
    let args = words(args, [logits.stride, vocab]).u32(first_id).maybe(live);
    call(ARGMAX, (rows, 1, 1), 1024, args)
}

/// `tutti_argmax_merge`
#[must_use]
pub fn argmax_merge(
    found: DevicePtr,
    out: DevicePtr,
    (ranks, rows): (usize, usize),
    live: DevicePtr,
) -> Call {
    let args = words(Args::new().ptr(found).ptr(out), [ranks, rows]).ptr(live);
    call(ARGMAX_MERGE, (rows.div_ceil(256), 1, 1), 256, args)
}

/// `tutti_best_keys`: `most` of each row; token ids start at `first_id`. `masked` as above.
#[must_use]
pub fn best_keys(
    logits: Rows,
    (params, masks): (DevicePtr, DevicePtr),
    out: DevicePtr,
    (vocab, first_id, most): (usize, u32, u32),
    rows: usize,
    live: DevicePtr,
) -> Call {
    let args = Args::new().ptr(logits.ptr).ptr(params).ptr(masks).ptr(out);
    let args = words(args, [logits.stride, vocab]).u32(first_id).u32(most).ptr(live);
    call(BEST_KEYS, (rows, 1, 1), 1024, args)
}

/// `tutti_draw_best`: from `most` keys of each of `ranks` ranks for each row.
#[must_use]
pub fn draw_best(
    keys: DevicePtr,
    params: DevicePtr,
    out: DevicePtr,
    (ranks, rows, most): (usize, usize, u32),
    live: DevicePtr,
) -> Call {
    let args = words(Args::new().ptr(keys).ptr(params).ptr(out), [ranks, rows]);
    call(DRAW_BEST, (rows, 1, 1), 1024, args.u32(most).ptr(live))
}

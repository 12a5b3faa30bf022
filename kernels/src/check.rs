//! Argument checks, shared by all backends and made before memory is touched. A failed check is a
//! bug in the caller and returns an error instead of panicking; nothing has been written by then.
//!
//! - here: rows, products, logits
//! - `attention`: heads, sequences, the cache
//! - `delta`: linear attention
//! - `experts`: mixtures of experts
//! - `latent`: multi-head latent attention
//! - `qk_norm`: the norm of q and k over all heads
pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod experts;
pub(crate) mod latent;
pub(crate) mod qk_norm;

use std::ops::Range;

use crate::backend::{Buffer, HostMatrix, LayerNorm};
use crate::error::KernelError;

pub(crate) fn shape_error(op: &'static str, message: String) -> KernelError {
    KernelError::Shape { op, message }
}

/// `ensure!(op, condition, "what is wrong")`
macro_rules! ensure {
    ($op:expr, $condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::check::shape_error($op, format!($($message)+)));
        }
    };
}
pub(crate) use ensure;

/// Shape of a weight matrix `[rows, cols]`.
pub(crate) trait Matrix {
    fn rows(&self) -> usize;
    fn cols(&self) -> usize;
}

/// Length of a vector.
pub(crate) trait Vector {
    fn len(&self) -> usize;
}

/// Checks the width of a buffer.
pub(crate) fn width(
    op: &'static str,
    name: &str,
    buffer: &impl Buffer,
    wanted: usize,
) -> Result<(), KernelError> {
    let found = buffer.width();
    ensure!(op, found == wanted, "{name}.width is {found}, not {wanted}");
    Ok(())
}

/// Copies ranges of rows to `out`, from a buffer whose `values` are on the host.
pub(crate) fn read_rows(
    buffer: &impl Buffer,
    values: &[f32],
    rows: &[Range<usize>],
    out: &mut Vec<f32>,
) -> Result<(), KernelError> {
    let (len, width) = (buffer.rows(), buffer.width());
    out.clear();
    for rows in rows {
        ensure!("read_rows", rows.end <= len, "rows {rows:?} are read, {len} are in use");
        out.extend_from_slice(&values[rows.start * width..rows.end * width]);
    }
    Ok(())
}

/// Returns the common shape of a stack's matrices, `(rows, cols)`.
pub(crate) fn stack(matrices: &[HostMatrix<'_>]) -> Result<(usize, usize), KernelError> {
    let shape = |matrix: &HostMatrix<'_>| (matrix.rows, matrix.cols);
    let wanted = matrices.first().map_or((0, 0), shape);
    for found in matrices.iter().map(shape) {
        ensure!("load_stack", found == wanted, "matrices are {wanted:?} and {found:?}");
    }
    Ok(wanted)
}

/// Checks a matrix that is to replace matrix `index` of a stack with these sizes.
pub(crate) fn replacement(
    (count, rows, cols): experts::StackSizes,
    index: usize,
    matrix: &HostMatrix<'_>,
) -> Result<(), KernelError> {
    let op = "replace_in_stack";
    ensure!(op, index < count, "matrix {index} of {count}");
    let found = (matrix.rows, matrix.cols);
    ensure!(
        op,
        found == (rows, cols),
        "the matrix is {found:?}, those of the stack {rows} x {cols}"
    );
    matrix.check(op, cols)
}

/// Checks that a buffer, if there is one, is `[rows, width]`.
pub(crate) fn shape(
    op: &'static str,
    name: &str,
    buffer: Option<&impl Buffer>,
    wanted: (usize, usize),
) -> Result<(), KernelError> {
    let found = buffer.map_or(wanted, |buffer| (buffer.rows(), buffer.width()));
    ensure!(op, found == wanted, "{name} is {found:?}, not {wanted:?}");
    Ok(())
}

/// Checks the number of elements of a vector, if there is one.
pub(crate) fn vector(
    op: &'static str,
    name: &str,
    vector: Option<&impl Vector>,
    wanted: usize,
) -> Result<(), KernelError> {
    let found = vector.map_or(wanted, Vector::len);
    ensure!(op, found == wanted, "{name} has {found} elements, not {wanted}");
    Ok(())
}

/// Checks that all `numbers` are below `bound`.
pub(crate) fn below_bound(
    op: &'static str,
    what: &str,
    numbers: &[u32],
    bound: usize,
) -> Result<(), KernelError> {
    let most = numbers.iter().max().map_or(0, |&number| number as usize + 1);
    ensure!(op, most <= bound, "{what} {} of {bound} is named", most - 1);
    Ok(())
}

/// Checks `residual += delta`, with `delta` normalised if it has a weight; `out = norm(residual)`.
pub(crate) fn norm<B: Buffer, V: Vector>(
    op: &'static str,
    residual: &B,
    (delta, delta_weight): (Option<&B>, Option<&V>),
    weight: &V,
    out: &B,
) -> Result<(), KernelError> {
    let (rows, columns) = (residual.rows(), residual.width());
    vector(op, "weight", Some(weight), columns)?;
    vector(op, "delta_weight", delta_weight, columns)?;
    width(op, "out", out, columns)?;
    shape(op, "delta", delta, (rows, columns))
}

/// Checks `residual += delta`; `out = layernorm(residual)`.
pub(crate) fn layernorm<B: Buffer, V: Vector>(
    op: &'static str,
    residual: &B,
    delta: Option<&B>,
    layer: &LayerNorm<'_, V>,
    out: &B,
) -> Result<(), KernelError> {
    vector(op, "bias", Some(layer.bias), residual.width())?;
    norm(op, residual, (delta, None), layer.weight, out)
}

/// Checks `residual += norm(delta)`, with (delta, its weight); `out = residual`.
pub(crate) fn add_normed<B: Buffer, V: Vector>(
    op: &'static str,
    residual: &B,
    added: Option<(&B, &V)>,
    out: &B,
) -> Result<(), KernelError> {
    let (delta, weight) = added.unzip();
    let columns = residual.width();
    vector(op, "weight", weight, columns)?;
    width(op, "out", out, columns)?;
    shape(op, "delta", delta, (residual.rows(), columns))
}

/// Checks `out = x weight^T + bias`; `out` has `out_width` columns.
pub(crate) fn product<B: Buffer>(
    op: &'static str,
    x: &B,
    weight: &impl Matrix,
    bias: Option<&impl Vector>,
    out_width: usize,
    out: &B,
) -> Result<(), KernelError> {
    width(op, "x", x, weight.cols())?;
    width(op, "out", out, out_width)?;
    vector(op, "bias", bias, weight.rows())
}

/// Checks columns `first..first + cols` of x and returns their end.
pub(crate) fn columns(
    op: &'static str,
    x: &impl Buffer,
    first: usize,
    cols: usize,
) -> Result<usize, KernelError> {
    let (end, width) = (first.saturating_add(cols), x.width());
    ensure!(op, end <= width, "columns {first}..{end} of x, whose width is {width}");
    Ok(end)
}

/// Checks gate and up, stacked vertically in `weight`, and returns the width of each.
pub(crate) fn gate_up<B: Buffer>(
    x: &B,
    weight: &impl Matrix,
    bias: Option<&impl Vector>,
    addend: Option<&B>,
    out: &B,
) -> Result<usize, KernelError> {
    let (op, rows) = ("gate_up", weight.rows());
    ensure!(op, rows.is_multiple_of(2), "weight has {rows} rows, an odd number");
    product(op, x, weight, bias, rows / 2, out)?;
    shape(op, "addend", addend, (x.rows(), rows))?;
    Ok(rows / 2)
}

/// Checks `out = activation(x weight^T + bias + addend)`.
pub(crate) fn activated<B: Buffer>(
    x: &B,
    weight: &impl Matrix,
    bias: Option<&impl Vector>,
    addend: Option<&B>,
    out: &B,
) -> Result<(), KernelError> {
    let (op, rows) = ("activated", weight.rows());
    product(op, x, weight, bias, rows, out)?;
    shape(op, "addend", addend, (x.rows(), rows))
}

/// Checks rows `first..first + count` of logits.
pub(crate) fn logits(
    op: &'static str,
    logits: &impl Buffer,
    vocab: usize,
    first: usize,
    count: usize,
) -> Result<(), KernelError> {
    let (rows, width) = (logits.rows(), logits.width());
    ensure!(op, vocab >= 1 && vocab <= width, "vocab is {vocab}, the logits have {width} columns");
    ensure!(
        op,
        first <= rows && count <= rows - first,
        "rows {first}..{} of {rows} are named",
        first.saturating_add(count)
    );
    Ok(())
}

/// Checks that `full` has room for the columns of all ranks.
pub(crate) fn gathered<B: Buffer>(local: &B, full: &B, world: usize) -> Result<(), KernelError> {
    let (wide, width) = (full.width(), local.width());
    ensure!("gather_logits", wide == world * width, "full.width is {wide}, not {world} x {width}");
    Ok(())
}

//! The norm of q and k over all heads.
use super::{Vector, ensure, shape, vector};
use crate::backend::{Buffer, QkNorm};
use crate::error::KernelError;

fn columns(op: &'static str, qkv: &impl Buffer, norm: &QkNorm) -> Result<(), KernelError> {
    let ([q, k], width) = (norm.columns, qkv.width());
    let end = q.saturating_add(k);
    ensure!(op, end <= width, "q and k have {q} and {k} columns, qkv has {width}");
    ensure!(op, !norm.counts.contains(&0), "counts are {:?}, not above 0", norm.counts);
    Ok(())
}

/// Checks the parts of the sums and where they go.
pub(crate) fn squares<B: Buffer>(qkv: &B, norm: &QkNorm, out: &B) -> Result<(), KernelError> {
    let op = "qk_squares";
    columns(op, qkv, norm)?;
    let (parts, most) = (norm.parts, QkNorm::PARTS_MAX);
    ensure!(
        op,
        parts.is_power_of_two() && parts <= most,
        "{parts} parts, not a power of two up to {most}"
    );
    for (columns, sections) in norm.columns.into_iter().zip(norm.sections) {
        ensure!(
            op,
            sections > 0 && parts.is_multiple_of(sections) && columns.is_multiple_of(sections),
            "{columns} columns and {parts} parts cannot have {sections} sections"
        );
    }
    super::width(op, "out", out, 2)
}

/// Checks what scales q and k.
pub(crate) fn scale<B: Buffer, V: Vector>(
    qkv: &B,
    norm: &QkNorm,
    squares: &B,
    weight: &V,
) -> Result<(), KernelError> {
    let op = "qk_scale";
    columns(op, qkv, norm)?;
    vector(op, "weight", Some(weight), norm.columns.iter().sum())?;
    shape(op, "squares", Some(squares), (qkv.rows(), 2))
}

//! From the rows of a model file to packed panels: rounds or quantises rows and lays them side by
//! side.

use super::super::memory::{AlignedVec, Disjoint};
use super::bytes::Bytes;
use super::int4::Int4;
use super::{Format, PANEL, Packed, Shape};
use crate::backend::HostMatrix;
use crate::error::KernelError;
use crate::pool::Pool;

/// Packs matrices. Each is the vertical concatenation of its `parts`, which are checked.
pub(super) fn pack_all<'p, 'd: 'p>(
    pool: &mut Pool,
    format: Format,
    shape: Shape,
    parts: &(dyn Fn(usize) -> &'p [HostMatrix<'d>] + Sync),
) -> Result<Packed, KernelError> {
    let panels = shape.rows.div_ceil(PANEL);
    let panel_pairs = shape.cols.div_ceil(2).saturating_mul(PANEL);
    let all = panels.saturating_mul(shape.count);
    let pairs = all.saturating_mul(panel_pairs);
    // The rows of a panel, each with its lane.
    let rows = |index: usize| {
        let (matrix, first) = (index / panels, index % panels * PANEL);
        (0..PANEL.min(shape.rows - first))
            .filter_map(move |lane| Some((lane, find(parts(matrix), first + lane)?)))
    };
    match format {
        Format::Bf16 => {
            let mut words = AlignedVec::<u32>::zeroed(pairs, "a weight matrix")?;
            let disjoint = Disjoint::new(&mut words);
            pool.run_ranges(all, 1, &|range, _| {
                let mut room = (Vec::new(), Vec::new());
                for index in range {
                    // SAFETY: every panel belongs to one task.
                    let panel = unsafe { disjoint.slice(index * panel_pairs, panel_pairs) };
                    for (lane, (part, row)) in rows(index) {
                        pack_row(part, row, lane, &mut room, panel);
                    }
                }
            })?;
            Ok(Packed::Bf16(words))
        }
        Format::Int8 => Ok(Packed::Bytes(Bytes::pack(pool, shape, None, parts)?)),
        Format::Fp8(groups) => Ok(Packed::Bytes(Bytes::pack(pool, shape, Some(groups), parts)?)),
        Format::Int4(groups) => Ok(Packed::Int4(Int4::pack(pool, shape, groups, parts)?)),
    }
}

/// The part that contains row `row` of the concatenation, and the row's index within it.
pub(super) fn find<'p, 'd>(
    parts: &'p [HostMatrix<'d>],
    mut row: usize,
) -> Option<(&'p HostMatrix<'d>, usize)> {
    for part in parts {
        if row < part.rows {
            return Some((part, row));
        }
        row -= part.rows;
    }
    None
}

/// Writes row `row` of a part, in bf16, to lane `lane` of its panel.
fn pack_row(
    part: &HostMatrix<'_>,
    row: usize,
    lane: usize,
    (wide, rounded): &mut (Vec<f32>, Vec<u16>),
    panel: &mut [u32],
) {
    if let Some(halves) = part.row_of_bf16(row) {
        return interleave(halves, lane, panel, u16::from_le_bytes);
    }
    rounded.resize(part.cols, 0);
    part.row_bf16(row, wide, rounded);
    interleave(rounded, lane, panel, |bits| bits);
}

fn interleave<T: Copy>(elements: &[T], lane: usize, panel: &mut [u32], convert: impl Fn(T) -> u16) {
    for (pair, words) in elements.chunks(2).zip(panel.chunks_exact_mut(PANEL)) {
        let even = u32::from(convert(pair[0]));
        let odd = pair.get(1).map_or(0, |&element| u32::from(convert(element)));
        words[lane] = even | odd << 16;
    }
}

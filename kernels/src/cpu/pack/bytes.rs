//! Packed weights of 8 bits: int8, with one scale per output; or FP8, with one per output and group
//! of inputs.
//!
//! The even input's byte precedes the odd one's. FP8 has the bytes of [`fp8`], which vectors are
//! quick to convert.
use std::ops::Range;

use super::super::fp8;
use super::super::memory::{AlignedVec, Disjoint};
use super::panels::part;
use super::rows::Parts;
use super::{PANEL, Shape};
use crate::error::KernelError;
use crate::pool::Pool;
use crate::weights::Fp8Groups;

/// One pair of inputs for the 64 outputs of a panel: four vectors of 16 pairs of bytes.
pub(crate) type ByteRow = [[i8; 32]; 4];

/// The packed weights of one or more matrices.
#[derive(Debug)]
pub(super) struct Bytes {
    values: AlignedVec<i8>,
    /// `PANEL` per group.
    scales: AlignedVec<f32>,
    /// `None` for int8.
    groups: Option<Fp8Groups>,
}

/// The bytes and scales of some panels.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteElements<'a> {
    pub(super) values: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) groups: Option<Fp8Groups>,
}

impl Bytes {
    pub(super) fn elements(&self) -> ByteElements<'_> {
        ByteElements { values: &self.values, scales: &self.scales, groups: self.groups }
    }

    /// Packs matrices: in FP8 with these groups, or quantised to int8. Each matrix is the vertical
    /// concatenation of its `parts`, which are checked and, for FP8, have these groups.
    pub(super) fn pack(
        pool: &mut Pool,
        shape: Shape,
        groups: Option<Fp8Groups>,
        parts: &Parts<'_, '_>,
    ) -> Result<Self, KernelError> {
        let panels = shape.rows.div_ceil(PANEL);
        let panel_bytes = shape.cols.div_ceil(2).saturating_mul(2 * PANEL);
        let count = groups.map_or(1, |groups| groups.count);
        let all = panels.saturating_mul(shape.count);
        let what = "a weight matrix in 8 bits";
        let mut values = AlignedVec::<i8>::zeroed(all.saturating_mul(panel_bytes), what)?;
        let room = all.saturating_mul(count).saturating_mul(PANEL);
        let mut scales = AlignedVec::<f32>::zeroed(room, what)?;
        let (to_values, to_scales) = (Disjoint::new(&mut values), Disjoint::new(&mut scales));
        pool.run_ranges(all, 1, &|range, _| {
            let (mut wide, mut bytes) = (Vec::new(), vec![0; shape.cols]);
            for index in range {
                let (matrix, first) = (index / panels, index % panels * PANEL);
                // SAFETY: every panel belongs to one task.
                let panel = unsafe { to_values.slice(index * panel_bytes, panel_bytes) };
                // SAFETY: as above.
                let scales = unsafe { to_scales.slice(index * count * PANEL, count * PANEL) };
                for lane in 0..PANEL.min(shape.rows - first) {
                    let Some((part, row)) = parts.find(matrix, first + lane) else { continue };
                    match &groups {
                        None => scales[lane] = part.row_int8(row, &mut wide, &mut bytes),
                        Some(groups) => {
                            let own = part.fp8_row(row, groups, |group, scale| {
                                scales[group * PANEL + lane] = scale;
                            });
                            for (to, &byte) in bytes.iter_mut().zip(own) {
                                *to = fp8::encode_byte(byte).cast_signed();
                            }
                        }
                    }
                    let places = panel.chunks_exact_mut(2 * PANEL);
                    for (pair, place) in bytes.chunks(2).zip(places) {
                        place[2 * lane..][..pair.len()].copy_from_slice(pair);
                    }
                }
            }
        })?;
        Ok(Self { values, scales, groups })
    }
}

impl<'a> ByteElements<'a> {
    /// The elements of the panels `range` out of `panels`.
    pub(super) fn part(self, range: Range<usize>, panels: usize) -> Self {
        let Self { values, scales, groups } = self;
        Self {
            values: part(values, range.clone(), panels),
            scales: part(scales, range, panels),
            groups,
        }
    }

    /// Groups of inputs whose sums are scaled one by one, if there are several.
    pub(super) fn several_groups(&self) -> Option<Fp8Groups> {
        self.groups.filter(|groups| groups.count > 1)
    }

    /// Bytes of one panel of `cols` inputs.
    pub(super) fn panel_bytes(&self, cols: usize) -> usize {
        let scales = self.several_groups().map_or(0, |groups| 4 * groups.count);
        (cols.next_multiple_of(2) + scales) * PANEL
    }

    /// Factors of the sums of a group of a panel.
    pub(super) fn group_scales(&self, panel: usize, group: usize) -> Option<&'a [f32; PANEL]> {
        let count = self.groups.map_or(1, |groups| groups.count);
        self.scales.as_chunks().0.get(panel * count + group)
    }

    /// The pairs of a panel that begin at element `start` of all, `len` of them.
    pub(super) fn rows(&self, start: usize, len: usize) -> &'a [ByteRow] {
        let values = &self.values[2 * start..2 * (start + len * PANEL)];
        values.as_chunks::<32>().0.as_chunks::<4>().0
    }

    /// Widens row `row` to f32 (`cols` elements).
    pub(super) fn unpack_row(&self, row: usize, cols: usize, out: &mut [f32]) {
        let (panel, lane) = (row / PANEL, row % PANEL);
        let base = panel * cols.div_ceil(2) * PANEL + lane;
        let values = self.values[2 * base..].as_chunks::<2>().0.iter().step_by(PANEL);
        for (pair, values) in out[..cols].chunks_mut(2).zip(values) {
            for (out, &value) in pair.iter_mut().zip(values) {
                *out = match self.groups {
                    None => f32::from(value),
                    Some(_) => fp8::decode(value.cast_unsigned()),
                };
            }
        }
        let count = self.groups.map_or(1, |groups| groups.count);
        for group in 0..count {
            let inputs = self.groups.map_or(0..cols, |groups| groups.inputs(group, cols));
            let scale = self.group_scales(panel, group).map_or(f32::NAN, |scales| scales[lane]);
            out[inputs].iter_mut().for_each(|x| *x *= scale);
        }
    }
}

//! Blocks of a panel's inputs that are multiplied at a time; 8-bit weights whose inputs do not all
//! share a scale have one for each group of inputs.
//!
//! The sums of a group are complete before they are scaled: the sum times the scale is added to the
//! output, group by group in ascending order. That product and that addition are rounded separately
//! on all instruction sets. So a row gets the same bits alone and in a batch.
use std::ops::Range;

use super::super::isa::multiversion;
use super::super::pack::{PANEL, Panels};
use super::Acc;

/// Some pairs of a panel's inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) pairs: Range<usize>,
    /// The group that they are, if groups are scaled one by one.
    pub(super) group: Option<usize>,
}

/// The blocks of each panel in order: groups, or otherwise at most `most` pairs.
pub(super) fn blocks(weight: &Panels<'_>, most: usize) -> impl Iterator<Item = Block> + use<> {
    let (pairs, cols, groups) = (weight.num_pairs(), weight.cols(), weight.groups());
    let most = most.max(1);
    let count = groups.map_or(pairs.div_ceil(most), |groups| groups.count);
    (0..count).map(move |index| match groups {
        None => {
            let start = index * most;
            Block { pairs: start..start.saturating_add(most).min(pairs), group: None }
        }
        Some(groups) => {
            let inputs = groups.inputs(index, cols);
            Block { pairs: inputs.start / 2..inputs.end.div_ceil(2), group: Some(index) }
        }
    })
}

multiversion! {
    /// `out (+)= sums * scales`, for the first `out.len()` outputs of the panel; overwrites `out`
    /// if `first`.
    pub(super) fn add_scaled(sums: &Acc, scales: &[f32; PANEL], out: &mut [f32], first: bool) = add_scaled_body
}

#[inline(always)]
fn add_scaled_body<const FMA: bool>(
    sums: &Acc,
    scales: &[f32; PANEL],
    out: &mut [f32],
    first: bool,
) {
    if first {
        out.fill(0.0);
    }
    if let Ok(out) = <&mut [f32; PANEL]>::try_from(&mut *out) {
        for ((to, sum), scale) in out.iter_mut().zip(sums.as_flattened()).zip(scales) {
            *to += sum * scale;
        }
        return;
    }
    for ((to, sum), scale) in out.iter_mut().zip(sums.as_flattened()).zip(scales) {
        *to += sum * scale;
    }
}

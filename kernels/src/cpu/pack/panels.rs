//! Panels of packed matrices, as kernels read them.
use std::ops::Range;

use super::PANEL;
use super::bytes::{ByteElements, ByteRow};
use super::int4::{Int4Elements, Int4Panel};
use crate::weights::Fp8Groups;

/// One pair of inputs for the 64 outputs of a panel, in bf16: four vectors of 16 words.
pub(crate) type PairRow = [[u32; 16]; 4];

/// A range of pairs of a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PairRows<'a> {
    Bf16(&'a [PairRow]),
    Int8(&'a [ByteRow]),
    Fp8(&'a [ByteRow]),
}

impl<'a> PairRows<'a> {
    /// The pairs, if they are bf16.
    pub(crate) fn bf16(self) -> Option<&'a [PairRow]> {
        match self {
            Self::Bf16(rows) => Some(rows),
            Self::Int8(_) | Self::Fp8(_) => None,
        }
    }

    /// The pairs, if they are int8.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn int8(self) -> Option<&'a [ByteRow]> {
        match self {
            Self::Int8(rows) => Some(rows),
            Self::Bf16(_) | Self::Fp8(_) => None,
        }
    }

    /// The pairs, if they are FP8.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn fp8(self) -> Option<&'a [ByteRow]> {
        match self {
            Self::Fp8(rows) => Some(rows),
            Self::Bf16(_) | Self::Int8(_) => None,
        }
    }
}

/// A packed matrix, or a range of its panels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panels<'a> {
    pub(super) elements: Elements<'a>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Elements<'a> {
    Bf16(&'a [u32]),
    Bytes(ByteElements<'a>),
    Int4(Int4Elements<'a>),
}

impl<'a> Elements<'a> {
    /// The elements of the panels `range` out of `panels`.
    pub(super) fn part(self, range: Range<usize>, panels: usize) -> Self {
        match self {
            Self::Bf16(words) => Self::Bf16(part(words, range, panels)),
            Self::Bytes(elements) => Self::Bytes(elements.part(range, panels)),
            Self::Int4(elements) => Self::Int4(elements.part(range, panels)),
        }
    }
}

/// The part of `all` that belongs to the panels `range` out of `panels`.
pub(super) fn part<T>(all: &[T], range: Range<usize>, panels: usize) -> &[T] {
    let len = all.len() / panels;
    &all[range.start * len..range.end * len]
}

impl<'a> Panels<'a> {
    /// Number of output features.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn num_panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Number of pairs of inputs; the last is padded if `cols` is odd.
    pub(crate) fn num_pairs(&self) -> usize {
        self.cols.div_ceil(2)
    }

    /// Bytes per panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        match self.elements {
            Elements::Bf16(_) => self.num_pairs() * 4 * PANEL,
            Elements::Bytes(elements) => elements.panel_bytes(self.cols),
            Elements::Int4(elements) => elements.panel_bytes(self.cols),
        }
    }

    /// Factors of whole sums, `PANEL` per panel: of 8-bit weights, if all inputs share a scale.
    pub(crate) fn scales(&self) -> Option<&'a [f32]> {
        match self.elements {
            Elements::Bytes(elements) if elements.several_groups().is_none() => {
                Some(elements.scales)
            }
            _ => None,
        }
    }

    /// Groups of inputs, if there are several, whose sums are scaled one by one: of 8-bit weights.
    pub(crate) fn groups(&self) -> Option<Fp8Groups> {
        match self.elements {
            Elements::Bytes(elements) => elements.several_groups(),
            _ => None,
        }
    }

    /// Factors of the sums of a group of a panel.
    pub(crate) fn group_scales(&self, panel: usize, group: usize) -> Option<&'a [f32; PANEL]> {
        match self.elements {
            Elements::Bytes(elements) => elements.group_scales(panel, group),
            _ => None,
        }
    }

    /// Number of input features.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Whether the weights have 8 bits.
    pub(crate) fn is_bytes(&self) -> bool {
        matches!(self.elements, Elements::Bytes(_))
    }

    /// Whether the weights are bf16.
    pub(crate) fn is_bf16(&self) -> bool {
        matches!(self.elements, Elements::Bf16(_))
    }

    /// Whether the weights have 4 bits.
    pub(crate) fn is_int4(&self) -> bool {
        matches!(self.elements, Elements::Int4(_))
    }

    /// A panel of 4-bit weights.
    pub(crate) fn int4_panel(&self, panel: usize) -> Option<Int4Panel<'a>> {
        match self.elements {
            Elements::Int4(elements) => Some(elements.panel(panel, self.cols)),
            Elements::Bf16(_) | Elements::Bytes(_) => None,
        }
    }

    /// The pairs `range` of a panel; empty for 4-bit weights.
    pub(crate) fn panel(&self, panel: usize, pairs: Range<usize>) -> PairRows<'a> {
        let start = (panel * self.num_pairs() + pairs.start) * PANEL;
        match self.elements {
            Elements::Bf16(words) => {
                let words = &words[start..start + pairs.len() * PANEL];
                PairRows::Bf16(words.as_chunks::<16>().0.as_chunks::<4>().0)
            }
            Elements::Bytes(elements) => {
                let rows = elements.rows(start, pairs.len());
                if elements.groups.is_some() { PairRows::Fp8(rows) } else { PairRows::Int8(rows) }
            }
            Elements::Int4(_) => PairRows::Bf16(&[]),
        }
    }

    /// The first and the second half of the outputs; each is a whole number of panels.
    pub(crate) fn halves(&self) -> [Self; 2] {
        [0..1, 1..2].map(|half| Self {
            elements: self.elements.part(half, 2),
            rows: self.rows / 2,
            cols: self.cols,
        })
    }
}

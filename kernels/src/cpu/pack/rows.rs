//! From the rows of a model file to packed panels: rounds or quantises rows and lays them side by
//! side.

use super::super::memory::{AlignedVec, Disjoint};
use super::bytes::Bytes;
use super::int4::Int4;
use super::{Format, PANEL, Packed, Shape};
use crate::backend::HostMatrix;
use crate::error::KernelError;
use crate::pool::Pool;

/// The parts of matrices, each of which is the vertical concatenation of its own. Where rotary
/// embeddings are interleaved, nearly every row is a part, so none is looked for from the first on.
#[derive(Debug)]
pub(super) struct Parts<'p, 'd> {
    /// For each matrix its parts, and at which row of the concatenation each of them ends.
    matrices: Vec<(&'p [HostMatrix<'d>], Vec<usize>)>,
}

impl<'p, 'd: 'p> Parts<'p, 'd> {
    pub(super) fn new(matrices: impl IntoIterator<Item = &'p [HostMatrix<'d>]>) -> Self {
        let ends = |parts: &[HostMatrix<'_>]| -> Vec<usize> {
            let mut end = 0usize;
            let ends = parts.iter().map(|part| {
                end = end.saturating_add(part.rows);
                end
            });
            ends.collect()
        };
        Self { matrices: matrices.into_iter().map(|parts| (parts, ends(parts))).collect() }
    }

    /// The part that contains row `row` of a matrix, and the row's index within it.
    pub(super) fn find(&self, matrix: usize, row: usize) -> Option<(&'p HostMatrix<'d>, usize)> {
        let (parts, ends) = self.matrices.get(matrix)?;
        // By halves. Empty parts end where they begin.
        let index = ends.partition_point(|end| *end <= row);
        let start = if index == 0 { 0 } else { ends[index - 1] };
        parts.get(index).map(|part| (part, row - start))
    }
}

/// Packs matrices, whose parts are checked.
pub(super) fn pack_all(
    pool: &mut Pool,
    format: Format,
    shape: Shape,
    parts: &Parts<'_, '_>,
) -> Result<Packed, KernelError> {
    let panels = shape.rows.div_ceil(PANEL);
    let panel_pairs = shape.cols.div_ceil(2).saturating_mul(PANEL);
    let all = panels.saturating_mul(shape.count);
    let pairs = all.saturating_mul(panel_pairs);
    // The rows of a panel, each with its lane.
    let rows = |index: usize| {
        let (matrix, first) = (index / panels, index % panels * PANEL);
        (0..PANEL.min(shape.rows - first))
            .filter_map(move |lane| Some((lane, parts.find(matrix, first + lane)?)))
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

#[cfg(test)]
mod tests {
    use super::super::CpuMatrix;
    use super::*;
    use crate::backend::DType;
    use crate::weights::{BlockScales, Fp8Groups, Groups, Int4Groups, Packing, Scales};

    const ROWS: usize = 200;
    const COLS: usize = 32;
    /// Inputs that share a scale.
    const GROUP: usize = 16;

    /// The row of a checkpoint that is row `row` of the matrix, as with interleaved embeddings.
    fn source(row: usize) -> usize {
        row * 7 % ROWS
    }

    /// One part per row, with empty ones between them.
    fn one_by_one<'a>(whole: &HostMatrix<'a>) -> Vec<HostMatrix<'a>> {
        let row_bytes = COLS * whole.dtype.bytes();
        let part = |row: usize, rows: usize| HostMatrix {
            // Packed ones have no data of their own.
            data: whole.data.get(row * row_bytes..).unwrap_or_default(),
            rows,
            scales: whole.scales.map(|scales| scales.behind(row)),
            ..*whole
        };
        let parts = (0..ROWS).flat_map(|row| [part(0, 0), part(source(row), 1)]);
        parts.chain([part(0, 0)]).collect()
    }

    #[test]
    fn a_part_per_row_packs_like_one_part() {
        let numbers = |len: usize| (0..len).map(|i| ((i * 37 + i / 7) % 113) as f32 - 50.0);
        let bf16: Vec<u8> = numbers(ROWS * COLS)
            .flat_map(|x| half::bf16::from_f32(x).to_bits().to_le_bytes())
            .collect();
        // No NaN among them.
        let fp8: Vec<u8> = (0..ROWS * COLS).map(|i| ((i * 37 + i / 7) % 0x70) as u8).collect();
        let scales: Vec<u8> =
            (0..ROWS * COLS / GROUP).flat_map(|i| (0.25 + (i % 31) as f32).to_le_bytes()).collect();
        let words: Vec<u8> = (0..ROWS * COLS / 2).map(|i| (i * 41 % 251) as u8).collect();
        let zeros: Vec<u8> = (0..ROWS / 2 * (COLS / GROUP)).map(|i| (i * 29 % 241) as u8).collect();
        let plain = HostMatrix {
            data: &bf16,
            dtype: DType::Bf16,
            rows: ROWS,
            cols: COLS,
            col_start: 0,
            row_stride: COLS,
            scales: None,
        };
        let blocks = BlockScales {
            data: &scales,
            dtype: DType::F32,
            block: (1, GROUP),
            row_stride: COLS / GROUP,
            first_row: 0,
        };
        let eight = HostMatrix {
            data: &fp8,
            dtype: DType::F8E4M3,
            scales: Some(Scales::Blocks(blocks)),
            ..plain
        };
        let integers = crate::weights::Packed {
            packing: Packing::Compressed,
            bits: 4,
            rows: ROWS,
            cols: COLS,
            words: &words,
            zeros: Some(&zeros),
            scales: &scales,
            scale_type: DType::F32,
            num_groups: COLS / GROUP,
            groups: Groups::Even(GROUP),
            first_row: 0,
        };
        let four = HostMatrix {
            data: &[],
            dtype: DType::Packed,
            scales: Some(Scales::Packed(integers)),
            ..plain
        };
        let count = COLS / GROUP;
        let groups = Fp8Groups { first_len: GROUP, len: GROUP, count };
        let int4_groups =
            Int4Groups { first: 0, first_len: GROUP, len: GROUP, count, is_float: false };
        let mut pool = Pool::new(2).unwrap();
        for (format, whole) in [
            (Format::Bf16, plain),
            (Format::Int8, plain),
            (Format::Fp8(groups), eight),
            (Format::Int4(int4_groups), four),
        ] {
            let packed = CpuMatrix::pack(&mut pool, format, &[whole]).unwrap();
            let parts = one_by_one(&whole);
            let in_parts = CpuMatrix::pack(&mut pool, format, &parts).unwrap();
            let (mut want, mut got) = ([f32::NAN; COLS], [0.0; COLS]);
            for row in 0..ROWS {
                packed.unpack_row(source(row), &mut want);
                in_parts.unpack_row(row, &mut got);
                assert!(want.iter().all(|x| x.is_finite()), "{format:?} {row}");
                assert_eq!(got, want, "{format:?} {row}");
            }
        }
    }

    #[test]
    fn rows_are_found_in_their_parts() {
        let part = |rows| HostMatrix {
            data: &[],
            dtype: DType::F32,
            rows,
            cols: 1,
            col_start: 0,
            row_stride: 1,
            scales: None,
        };
        let first: Vec<HostMatrix<'_>> = [0, 3, 0, 0, 1, 2, 0].map(part).into();
        let second = [part(2)];
        let parts = Parts::new([&first[..], &second[..], &second[..0]]);
        let found = |matrix: usize, row: usize| {
            let (found, row) = parts.find(matrix, row)?;
            Some((found.rows, row))
        };
        let all: Vec<_> = (0..6).filter_map(|row| found(0, row)).collect();
        assert_eq!(all, [(3, 0), (3, 1), (3, 2), (1, 0), (2, 0), (2, 1)]);
        assert_eq!(found(0, 6), None);
        assert_eq!([0, 1, 2].map(|row| found(1, row)), [Some((2, 0)), Some((2, 1)), None]);
        assert_eq!((found(2, 0), found(3, 0)), (None, None));
    }
}

//! Weights as stored in model files: rectangles of tensors, and their rows in the types that
//! backends keep.
//!
//! Owns what every backend must read the same way: which weights stay in 4 bits or in FP8, how
//! other quantised checkpoints become bf16, and how weights are quantised to int8 while loading.
//! Quantisation is symmetric: the f32 scale of an output feature is its largest absolute weight
//! divided by 127, and every weight is divided by the scale and rounded to the nearest integer,
//! ties to even. The scale is that of the file's whole row, even if a rank takes only a part of it,
//! so it is the same at every tensor-parallel degree.
//!
//! - `dtype`: element types
//! - `blocks`: one scale per block
//! - `fp8`: weights that stay in FP8
//! - `packed`: integers packed in words, and 4-bit MXFP4
//! - `columns`: matrices stored column by column
//! - `compact`: forms of fewer bits than bf16 in which matrices can stay
use half::bf16;

use crate::error::KernelError;

mod blocks;
mod columns;
mod compact;
mod dtype;
mod fp8;
mod packed;

pub use blocks::BlockScales;
pub use columns::Columns;
pub use compact::Compact;
pub use dtype::{DType, widen};
pub(crate) use fp8::GROUP_MOST;
pub use fp8::{Fp8Groups, fp8_groups};
pub(crate) use packed::{E2M1, int4_integers, int4_row};
pub use packed::{Groups, Int4Groups, Packed, Packing, int4_groups};

/// How the elements of a tensor become numbers, if they are not stored as plain rows of numbers.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// Elements are multiplied by one number per block.
    Blocks(BlockScales<'a>),
    /// Elements are integers packed in words; the matrix's `data` is empty.
    Packed(Packed<'a>),
    /// Elements are numbers stored column by column; the matrix's `data` is empty.
    Columns(Columns<'a>),
}

impl Scales<'_> {
    /// Returns the scales of a matrix that begins `rows` rows further down in the tensor.
    #[must_use]
    pub fn behind(mut self, rows: usize) -> Self {
        match &mut self {
            Self::Blocks(BlockScales { first_row, .. })
            | Self::Packed(Packed { first_row, .. })
            | Self::Columns(Columns { first_row, .. }) => {
                *first_row = first_row.saturating_add(rows);
            }
        }
        self
    }
}

/// A rectangle of a weight matrix in a (memory-mapped) model file: rows `0..rows`, columns
/// `col_start..col_start + cols` of rows that are `row_stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct HostMatrix<'a> {
    /// Bytes, starting at column 0 of the first row.
    pub data: &'a [u8],
    /// Element type.
    pub dtype: DType,
    /// Number of output features taken.
    pub rows: usize,
    /// Number of input features taken.
    pub cols: usize,
    /// First column taken.
    pub col_start: usize,
    /// Number of elements from one row to the next.
    pub row_stride: usize,
    /// How the file's elements are quantised, if they are.
    pub scales: Option<Scales<'a>>,
}

impl HostMatrix<'_> {
    /// Checks that the matrix has `cols` columns, all within its data, and scales for them.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn check(&self, op: &'static str, cols: usize) -> Result<(), KernelError> {
        let fault = |message: String| Err(KernelError::Shape { op, message });
        if self.cols != cols {
            let found = self.cols;
            return fault(format!("parts have {cols} and {found} columns, they must be equal"));
        }
        if self.rows == 0 {
            return Ok(());
        }
        let Self { dtype, rows, col_start, row_stride, .. } = *self;
        let end = col_start.checked_add(cols).filter(|end| *end <= row_stride);
        if let Some(Scales::Packed(packed)) = &self.scales {
            if end.is_none() || row_stride != packed.cols || dtype != DType::Packed {
                let (found, all) = (packed.cols, row_stride);
                return fault(format!(
                    "{cols} columns from column {col_start} of {all}, the tensor has {found}"
                ));
            }
            return packed.check(op);
        }
        if let Some(Scales::Columns(columns)) = &self.scales {
            if end.is_none() || row_stride != columns.cols || dtype != DType::Packed {
                let (found, all) = (columns.cols, row_stride);
                return fault(format!(
                    "{cols} columns from column {col_start} of {all}, the tensor has {found}"
                ));
            }
            return columns.check(op, rows);
        }
        let needed = end.and_then(|end| {
            (rows - 1).checked_mul(row_stride)?.checked_add(end)?.checked_mul(dtype.bytes())
        });
        if needed.is_none_or(|needed| needed > self.data.len()) {
            let found = self.data.len();
            return fault(format!(
                "{rows} rows of {cols} {dtype:?} columns from column {col_start} at stride \
                 {row_stride} do not fit in {found} bytes"
            ));
        }
        if let Some(Scales::Blocks(scales)) = &self.scales {
            let last = scales.index(rows - 1, row_stride.saturating_sub(1));
            let needed =
                last.and_then(|last| last.checked_add(1)?.checked_mul(scales.dtype.bytes()));
            if needed.is_none_or(|needed| needed > scales.data.len()) {
                let (block, found) = (scales.block, scales.data.len());
                return fault(format!("{found} bytes of scales of {block:?} are too few"));
            }
        }
        Ok(())
    }

    /// Row `row` in f32, from column `first` of the file's row: the file's numbers, multiplied by
    /// their scales in f32 if they are quantised.
    fn widen_row(&self, row: usize, first: usize, out: &mut [f32]) {
        if let Some(Scales::Packed(packed)) = &self.scales {
            return packed.row_f32(row, first, out);
        }
        if let Some(Scales::Columns(columns)) = &self.scales {
            return columns.row_f32(row, first, out);
        }
        let size = self.dtype.bytes();
        let bytes = &self.data[(row * self.row_stride + first) * size..][..out.len() * size];
        widen(self.dtype, bytes, out);
        let Some(Scales::Blocks(scales)) = &self.scales else { return };
        let mut col = first;
        let mut rest = out;
        while !rest.is_empty() {
            // Up to where the block ends.
            let width = scales.block.1.max(1);
            let (own, others) = rest.split_at_mut((width - col % width).min(rest.len()));
            let scale = scales.index(row, col).map_or(f32::NAN, |index| scales.at(index));
            own.iter_mut().for_each(|x| *x *= scale);
            col += own.len();
            rest = others;
        }
    }

    /// Row `row` in f32, the columns taken (`cols` elements).
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        self.widen_row(row, self.col_start, out);
    }

    /// Row `row` in bf16, the columns taken (`cols` elements): bf16 files bit for bit, others
    /// rounded to nearest, ties to even. `room` is scratch space to reuse from row to row.
    pub fn row_bf16(&self, row: usize, room: &mut Vec<f32>, out: &mut [u16]) {
        if let Some(halves) = self.row_of_bf16(row) {
            out.iter_mut().zip(halves).for_each(|(to, &from)| *to = u16::from_le_bytes(from));
            return;
        }
        room.resize(out.len(), 0.0);
        self.row_f32(row, room);
        for (to, &from) in out.iter_mut().zip(room.iter()) {
            *to = bf16::from_f32(from).to_bits();
        }
    }

    /// Row `row` as stored in the file, the columns taken, if it is bf16 without scales.
    pub(crate) fn row_of_bf16(&self, row: usize) -> Option<&[[u8; 2]]> {
        if self.dtype != DType::Bf16 || self.scales.is_some() {
            return None;
        }
        let start = (row * self.row_stride + self.col_start) * 2;
        Some(self.data[start..start + self.cols * 2].as_chunks().0)
    }

    /// Row `row` in int8, the columns taken (`cols` elements); returns the scale of the file's
    /// whole row. int8 files with one scale per row are taken as they are. A row with a NaN or an
    /// infinity gets a scale that is not finite either, so that its results are not numbers.
    pub fn row_int8(&self, row: usize, room: &mut Vec<f32>, out: &mut [i8]) -> f32 {
        if let (DType::I8, Some(Scales::Blocks(scales))) = (self.dtype, &self.scales)
            && scales.block.1 >= self.row_stride
        {
            let bytes = &self.data[row * self.row_stride + self.col_start..][..out.len()];
            out.iter_mut().zip(bytes).for_each(|(to, &from)| *to = from.cast_signed());
            return scales.index(row, 0).map_or(f32::NAN, |index| scales.at(index));
        }
        let scale = self.row_most(row, room) / 127.0;
        room.resize(out.len(), 0.0);
        self.row_f32(row, room);
        for (to, &from) in out.iter_mut().zip(room.iter()) {
            *to = round(from / scale);
        }
        scale
    }

    /// The largest absolute value of the file's whole row, scaled. Values are compared as bits,
    /// which puts NaN last.
    fn row_most(&self, row: usize, room: &mut Vec<f32>) -> f32 {
        if let (DType::Bf16, None) = (self.dtype, &self.scales) {
            let bytes = &self.data[row * self.row_stride * 2..][..self.row_stride * 2];
            // Compared as signed integers, which all instruction sets have a maximum for.
            let magnitude = |&bits: &[u8; 2]| i16::from_le_bytes(bits) & i16::MAX;
            let most = bytes.as_chunks().0.iter().map(magnitude).fold(0, i16::max);
            return bf16::from_bits(most.cast_unsigned()).to_f32();
        }
        room.resize(self.row_stride, 0.0);
        self.widen_row(row, 0, room);
        f32::from_bits(room.iter().map(|x| x.to_bits() & !SIGN).max().unwrap_or(0))
    }
}

const SIGN: u32 = 1 << 31;

/// The nearest integer in -127..=127, ties to even; 0 for NaN.
fn round(x: f32) -> i8 {
    // In a sum with this constant, the last bit has a weight of one, and the hardware rounds below
    // it.
    const ONES: f32 = 12_582_912.0;
    let sum = x.clamp(-127.0, 127.0) + ONES;
    sum.to_bits().wrapping_sub(ONES.to_bits()) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(data: &[u8], dtype: DType, rows: usize, cols: usize) -> HostMatrix<'_> {
        HostMatrix { data, dtype, rows, cols, col_start: 0, row_stride: cols, scales: None }
    }

    #[test]
    fn int8_is_the_nearest_with_ties_to_even() {
        let values = [127.0f32, -0.5, 0.5, 1.5, 2.5, -126.5, 3.49];
        let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut out = [99; 7];
        let scale = matrix(&data, DType::F32, 1, 7).row_int8(0, &mut Vec::new(), &mut out);
        assert_eq!((scale, out), (1.0, [127, 0, 0, 2, 2, -126, 3]));
        for x in -1270..=1270 {
            let x = x as f32 / 10.0;
            assert_eq!(f32::from(round(x)), x.round_ties_even(), "{x}");
        }
    }

    #[test]
    fn a_part_of_a_row_has_the_scale_of_the_whole_row() {
        let values = [-254.0f32, 2.0, 4.0, 6.0];
        let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let whole = matrix(&data, DType::F32, 1, 4);
        let mut out = [0; 2];
        let part = HostMatrix { cols: 2, col_start: 2, ..whole };
        assert_eq!(part.row_int8(0, &mut Vec::new(), &mut out), 2.0);
        assert_eq!(out, [2, 3]);
    }

    #[test]
    fn bf16_files_are_quantised_as_the_same_numbers_in_f32() {
        let mut values: Vec<bf16> =
            (0..400u32).map(|i| bf16::from_f32((i * 7919 % 997) as f32 * 0.013 - 6.5)).collect();
        values[250] = bf16::from_f32(-91.5);
        for odd in [None, Some(bf16::NAN), Some(bf16::NEG_INFINITY)] {
            // In columns that are not taken.
            values[301] = odd.unwrap_or(values[301]);
            let narrow: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let wide: Vec<u8> = values.iter().flat_map(|x| x.to_f32().to_le_bytes()).collect();
            for row in 0..4 {
                let quantise = |data, dtype| {
                    let part =
                        HostMatrix { cols: 40, col_start: 17, ..matrix(data, dtype, 4, 100) };
                    let mut out = [99; 40];
                    let scale = part.row_int8(row, &mut Vec::new(), &mut out);
                    (scale.to_bits(), out)
                };
                assert_eq!(quantise(&narrow, DType::Bf16), quantise(&wide, DType::F32), "{row}");
            }
        }
    }

    #[test]
    fn what_is_no_number_shows_and_zeros_are_zeros() {
        for (values, is_good) in [
            ([0.0f32, 0.0, -0.0], true),
            ([1e-45, 0.0, 1e-44], true),
            ([1.0, f32::NAN, 2.0], false),
            ([1.0, 2.0, f32::NEG_INFINITY], false),
        ] {
            let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let mut out = [99; 3];
            let scale = matrix(&data, DType::F32, 1, 3).row_int8(0, &mut Vec::new(), &mut out);
            assert_eq!(scale.is_finite(), is_good, "{values:?}");
            if is_good {
                for (q, x) in out.iter().zip(values) {
                    assert!((f32::from(*q) * scale - x).abs() <= 1e-43);
                }
            }
        }
    }

    #[test]
    fn blocks_of_scales_are_found_from_any_rectangle() {
        // A tensor of 5 x 7 in blocks of 2 x 3; scales are [3, 3].
        let data: Vec<u8> = (0..35).map(|i| 0x38 + i % 8).collect();
        let factors: Vec<f32> = (1..=9).map(|i| i as f32).collect();
        let bytes: Vec<u8> = factors.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (row_start, col_start) = (1, 2);
        let scales = BlockScales {
            data: &bytes,
            dtype: DType::F32,
            block: (2, 3),
            row_stride: 3,
            first_row: row_start,
        };
        let part = HostMatrix {
            data: &data[row_start * 7..],
            dtype: DType::F8E4M3,
            rows: 4,
            cols: 5,
            col_start,
            row_stride: 7,
            scales: Some(Scales::Blocks(scales)),
        };
        part.check("test", 5).unwrap();
        let mut out = [0.0; 5];
        for row in 0..4 {
            part.row_f32(row, &mut out);
            for (col, got) in out.iter().enumerate() {
                let (r, c) = (row + row_start, col + col_start);
                let want = (1.0 + ((r * 7 + c) % 8) as f32 / 8.0) * factors[r / 2 * 3 + c / 3];
                assert_eq!(*got, want, "{row} {col}");
            }
        }
        let few = Scales::Blocks(BlockScales { data: &bytes[..35], ..scales });
        assert!(HostMatrix { scales: Some(few), ..part }.check("test", 5).is_err());
    }

    #[test]
    fn int8_files_are_taken_as_they_are() {
        let data = [128u8, 1, 255, 127, 5, 6];
        let bytes: Vec<u8> = [0.5f32, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let scales = BlockScales {
            data: &bytes,
            dtype: DType::F32,
            block: (1, usize::MAX),
            row_stride: 1,
            first_row: 0,
        };
        let file =
            HostMatrix { scales: Some(Scales::Blocks(scales)), ..matrix(&data, DType::I8, 2, 3) };
        file.check("test", 3).unwrap();
        let mut out = [0; 3];
        assert_eq!(file.row_int8(0, &mut Vec::new(), &mut out), 0.5);
        assert_eq!(out, [-128, 1, -1]);
        assert_eq!(file.row_int8(1, &mut Vec::new(), &mut out), 3.0);
        let mut words = [0; 3];
        file.row_bf16(1, &mut Vec::new(), &mut words);
        assert_eq!(
            words.map(|x| bf16::from_bits(x).to_f32()),
            [381.0, 15.0, 18.0].map(|x| bf16::from_f32(x).to_f32())
        );
    }

    #[test]
    fn rectangles_that_do_not_fit_are_refused() {
        let data = [0; 22];
        let part = HostMatrix {
            rows: 3,
            cols: 3,
            col_start: 1,
            row_stride: 4,
            ..matrix(&data, DType::Bf16, 3, 3)
        };
        assert!(part.check("test", 3).is_err());
        let enough = HostMatrix { data: &[0; 24], ..part };
        enough.check("test", 3).unwrap();
        assert!(enough.check("test", 4).is_err());
        assert!(HostMatrix { data: &[0; 64], col_start: 2, ..part }.check("test", 3).is_err());
        assert!(HostMatrix { rows: usize::MAX, ..part }.check("test", 3).is_err());
    }
}

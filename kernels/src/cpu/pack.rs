//! The packed weight layout, the same for all instruction sets.
//!
//! A matrix `[out, in]` is cut into panels of 64 outputs. For every pair of inputs `(2i, 2i + 1)`,
//! a panel holds the weights of its 64 outputs side by side. Outputs and inputs are padded with
//! zeros. A kernel reads a panel once, from front to back.
//!
//! - bf16: the even input is in the low half of a 32-bit word, as `vdpbf16ps` expects it; a shift
//!   and a mask widen it to f32. Weights of bf16 files are kept bit for bit, others are rounded to
//!   the nearest bf16 (ties to even).
//! - int8 and FP8, if the file has it: a byte per weight (`bytes`).
//! - 4 bits, if the file has them: four pairs at a time (`int4`).
//!
//! `panels`: what kernels read of it; `rows`: from files' rows to panels.
use super::memory::AlignedVec;
use crate::backend::HostMatrix;
use crate::check::{self, shape_error};
use crate::error::KernelError;
use crate::pool::Pool;
use crate::weights::{Compact, Fp8Groups, Int4Groups};

mod bytes;
mod int4;
mod panels;
mod rows;

pub(crate) use bytes::ByteRow;
use bytes::Bytes;
use int4::Int4;
pub(crate) use int4::{Int4Group, Int4Panel, Int4Row, MIDDLE};
use panels::Elements;
pub(crate) use panels::{PairRow, PairRows, Panels};
use rows::{Parts, pack_all};

/// Outputs per panel.
pub(crate) const PANEL: usize = 64;

/// Packed elements of one or more matrices.
#[derive(Debug)]
enum Packed {
    Bf16(AlignedVec<u32>),
    Bytes(Bytes),
    Int4(Int4),
}

impl Packed {
    fn elements(&self) -> Elements<'_> {
        match self {
            Self::Bf16(words) => Elements::Bf16(words),
            Self::Bytes(bytes) => Elements::Bytes(bytes.elements()),
            Self::Int4(int4) => Elements::Int4(int4.elements()),
        }
    }
}

/// The format in which a matrix is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Bf16,
    Int8,
    Fp8(Fp8Groups),
    Int4(Int4Groups),
}

impl Format {
    /// Returns the format that preserves the matrices as in their files.
    pub(crate) fn of(matrices: &[HostMatrix<'_>]) -> Self {
        match Compact::of(matrices) {
            Some(Compact::Int4(groups)) => Self::Int4(groups),
            Some(Compact::Fp8(groups)) => Self::Fp8(groups),
            None => Self::Bf16,
        }
    }
}

/// A weight matrix `[out, in]`, packed for the CPU.
#[derive(Debug)]
pub struct CpuMatrix {
    packed: Packed,
    rows: usize,
    cols: usize,
}

impl CpuMatrix {
    /// Number of output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of input features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All panels.
    pub(crate) fn panels(&self) -> Panels<'_> {
        Panels { elements: self.packed.elements(), rows: self.rows, cols: self.cols }
    }

    /// Copies row `row`, widened to f32, to `out` (`cols` elements).
    pub(crate) fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let base = row / PANEL * self.cols.div_ceil(2) * PANEL + row % PANEL;
        let pairs = out[..self.cols].chunks_mut(2);
        match &self.packed {
            Packed::Bf16(words) => {
                for (pair, &word) in pairs.zip(words[base..].iter().step_by(PANEL)) {
                    pair[0] = f32::from_bits(word << 16);
                    if let Some(odd) = pair.get_mut(1) {
                        *odd = f32::from_bits(word & 0xFFFF_0000);
                    }
                }
            }
            Packed::Bytes(bytes) => bytes.elements().unpack_row(row, self.cols, out),
            Packed::Int4(int4) => {
                int4.elements().unpack_row(row, self.cols, &mut out[..self.cols]);
            }
        }
    }

    /// Packs the vertical concatenation of `parts`.
    pub(crate) fn pack(
        pool: &mut Pool,
        format: Format,
        parts: &[HostMatrix<'_>],
    ) -> Result<Self, KernelError> {
        let cols = parts.first().map_or(0, |part| part.cols);
        let mut rows = 0usize;
        for part in parts {
            part.check("load_matrix", cols)?;
            rows = rows.saturating_add(part.rows);
        }
        let shape = Shape { count: 1, rows, cols };
        shape.check("load_matrix")?;
        let packed = pack_all(pool, format, shape, &Parts::new([parts]))?;
        Ok(Self { packed, rows, cols })
    }
}

/// Weight matrices `[out, in]` of one shape, each packed separately.
#[derive(Debug)]
pub struct CpuStack {
    packed: Packed,
    shape: Shape,
}

impl CpuStack {
    /// Packs each of `matrices`.
    pub(crate) fn pack(
        pool: &mut Pool,
        format: Format,
        matrices: &[HostMatrix<'_>],
    ) -> Result<Self, KernelError> {
        let op = "load_stack";
        let (rows, cols) = check::stack(matrices)?;
        for matrix in matrices {
            matrix.check(op, cols)?;
        }
        let shape = Shape { count: matrices.len(), rows, cols };
        shape.check(op)?;
        let parts = Parts::new(matrices.iter().map(std::slice::from_ref));
        let packed = pack_all(pool, format, shape, &parts)?;
        Ok(Self { packed, shape })
    }

    /// Replaces matrix `index`.
    pub(crate) fn replace(
        &mut self,
        pool: &mut Pool,
        index: usize,
        matrix: &HostMatrix<'_>,
    ) -> Result<(), KernelError> {
        let Shape { count, rows, cols } = self.shape;
        check::replacement((count, rows, cols), index, matrix)?;
        let shape = Shape { count: 1, ..self.shape };
        let parts = Parts::new([std::slice::from_ref(matrix)]);
        let made = pack_all(pool, Format::Bf16, shape, &parts)?;
        match (&mut self.packed, made) {
            (Packed::Bf16(all), Packed::Bf16(made)) => {
                let len = all.len() / count;
                all[index * len..][..len].copy_from_slice(&made);
                Ok(())
            }
            _ => Err(KernelError::Unsupported("only stacks in bf16 change".to_owned())),
        }
    }

    /// Number of matrices.
    pub(crate) fn count(&self) -> usize {
        self.shape.count
    }

    /// Number of output features of each.
    pub(crate) fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Number of input features of each.
    pub(crate) fn cols(&self) -> usize {
        self.shape.cols
    }

    /// Matrix `index`.
    pub(crate) fn matrix(&self, index: usize) -> Panels<'_> {
        let Shape { count, rows, cols } = self.shape;
        let elements = self.packed.elements().part(index..index + 1, count);
        Panels { elements, rows, cols }
    }
}

/// A number of matrices of one shape.
#[derive(Clone, Copy, Debug)]
struct Shape {
    count: usize,
    rows: usize,
    cols: usize,
}

impl Shape {
    fn check(self, op: &'static str) -> Result<(), KernelError> {
        let Self { rows, cols, .. } = self;
        if rows == 0 || cols == 0 {
            let message = format!("the matrix is {rows} x {cols}, both must be at least 1");
            return Err(shape_error(op, message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::backend::DType;

    /// A matrix of a single row.
    fn whole(data: &[u8], dtype: DType, cols: usize) -> HostMatrix<'_> {
        let rows = 1;
        HostMatrix { data, dtype, rows, cols, col_start: 0, row_stride: cols, scales: None }
    }

    #[test]
    fn rows_come_back_as_they_went_in() {
        let mut pool = Pool::new(1).unwrap();
        for (rows, cols) in [(1, 1), (3, 5), (64, 8), (70, 7), (130, 66)] {
            let value = |r: usize, c: usize| bf16::from_f32((r * 131 + c) as f32 * 0.37 - 9.0);
            // A window of columns of a wider file.
            let stride = cols + 3;
            let mut data = Vec::new();
            for r in 0..rows {
                for c in 0..stride {
                    data.extend(value(r, c).to_le_bytes());
                }
            }
            let part = |first: usize, rows: usize| HostMatrix {
                data: &data[first * stride * 2..],
                dtype: DType::Bf16,
                rows,
                cols,
                col_start: 2,
                row_stride: stride,
                scales: None,
            };
            let split = rows / 2;
            let packed = CpuMatrix::pack(
                &mut pool,
                Format::Bf16,
                &[part(0, split), part(split, rows - split)],
            )
            .unwrap();
            let mut out = vec![f32::NAN; cols];
            for r in 0..rows {
                packed.unpack_row(r, &mut out);
                for (c, &x) in out.iter().enumerate() {
                    assert_eq!(x, value(r, c + 2).to_f32());
                }
            }
        }
    }

    #[test]
    fn int8_rows_are_their_scale_times_integers() {
        let mut pool = Pool::new(2).unwrap();
        for (rows, cols) in [(1, 1), (3, 5), (70, 7), (130, 66)] {
            let value = |r: usize, c: usize| ((r * 131 + c * 71) % 255) as f32 - 127.0;
            let scale = |r: usize| [0.5, 2.0, 0.125][r % 3];
            let mut data = Vec::new();
            for r in 0..rows {
                // The value that determines the scale is in a column that is not taken.
                data.extend((127.0f32 * scale(r)).to_le_bytes());
                data.extend((0..cols).flat_map(|c| (value(r, c) * scale(r)).to_le_bytes()));
            }
            let part = HostMatrix {
                data: &data,
                dtype: DType::F32,
                rows,
                cols,
                col_start: 1,
                row_stride: cols + 1,
                scales: None,
            };
            let packed = CpuMatrix::pack(&mut pool, Format::Int8, &[part]).unwrap();
            let mut out = vec![f32::NAN; cols];
            for r in 0..rows {
                packed.unpack_row(r, &mut out);
                let want: Vec<f32> = (0..cols).map(|c| value(r, c) * scale(r)).collect();
                assert_eq!(out, want, "row {r} of {rows} x {cols}");
            }
        }
    }

    #[test]
    fn wider_types_are_rounded() {
        let mut pool = Pool::new(1).unwrap();
        let values = [1.0f32, 1.003, -0.1, 3.0e-8];
        let wide: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let half: Vec<u8> = values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        for (data, dtype) in [(&wide, DType::F32), (&half, DType::F16)] {
            let part = whole(data, dtype, 4);
            let packed = CpuMatrix::pack(&mut pool, Format::Bf16, &[part]).unwrap();
            let mut out = [0.0; 4];
            packed.unpack_row(0, &mut out);
            for (&got, &want) in out.iter().zip(&values) {
                let bound = if dtype == DType::F32 {
                    want.abs() / 256.0
                } else {
                    want.abs() / 128.0 + 1e-7
                };
                assert!((got - want).abs() <= bound, "{dtype:?} {got} {want}");
            }
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let mut pool = Pool::new(1).unwrap();
        let data = vec![0u8; 2 * 11];
        let part = HostMatrix {
            data: &data,
            dtype: DType::Bf16,
            rows: 2,
            cols: 4,
            col_start: 2,
            row_stride: 6,
            scales: None,
        };
        for bad in [part, HostMatrix { cols: 0, ..part }, HostMatrix { rows: usize::MAX, ..part }] {
            assert!(CpuMatrix::pack(&mut pool, Format::Bf16, &[bad]).is_err());
        }
        assert!(CpuMatrix::pack(&mut pool, Format::Bf16, &[]).is_err());
        let one = HostMatrix { rows: 1, ..part };
        assert!(
            CpuMatrix::pack(&mut pool, Format::Bf16, &[one, HostMatrix { cols: 3, ..one }])
                .is_err()
        );
    }
}

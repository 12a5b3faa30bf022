//! The packed weight layout, one for all instruction sets, and its making from a model file.
//!
//! A matrix `[out, in]` is cut into panels of 64 outputs. A panel holds, for every pair of inputs
//! `(2i, 2i + 1)`, the 64 outputs' pairs of bf16 weights side by side, the even input in the low
//! half of a 32-bit word: what `vdpbf16ps` takes, and what a shift and a mask widen to f32. Outputs
//! and inputs are padded with zeros. A kernel reads a panel from front to back, once.
//!
//! bf16 files are kept bit by bit; f16 and f32 files are rounded to the nearest bf16 (ties to even).
use std::ops::Range;

use half::{bf16, f16};

use super::check::shape_error;
use super::memory::{AlignedVec, Disjoint};
use super::pool::Pool;
use crate::backend::{DType, HostMatrix};
use crate::error::KernelError;

/// Outputs per panel.
pub(crate) const PANEL: usize = 64;

/// One pair of inputs for the 64 outputs of a panel, as four vectors of 16 words.
pub(crate) type PairRow = [[u32; 16]; 4];

/// A packed matrix, or a part of one that begins and ends with a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panels<'a> {
    words: &'a [u32],
    rows: usize,
    cols: usize,
}

impl<'a> Panels<'a> {
    /// Output features.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn num_panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Pairs of inputs, the last one padded where `cols` is odd.
    pub(crate) fn num_pairs(&self) -> usize {
        self.cols.div_ceil(2)
    }

    /// The pairs `range` of a panel.
    pub(crate) fn panel(&self, panel: usize, pairs: Range<usize>) -> &'a [PairRow] {
        let start = (panel * self.num_pairs() + pairs.start) * PANEL;
        let words = &self.words[start..start + pairs.len() * PANEL];
        words.as_chunks::<16>().0.as_chunks::<4>().0
    }

    /// The first and the second half of its outputs, each a whole number of panels.
    pub(crate) fn halves(&self) -> [Self; 2] {
        let (first, second) = self.words.split_at(self.words.len() / 2);
        [first, second].map(|words| Self { words, rows: self.rows / 2, cols: self.cols })
    }
}

/// A weight matrix `[out, in]`, packed for the CPU.
#[derive(Debug)]
pub struct CpuMatrix {
    words: AlignedVec<u32>,
    rows: usize,
    cols: usize,
}

impl CpuMatrix {
    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    fn num_pairs(&self) -> usize {
        self.cols.div_ceil(2)
    }

    /// Its panels.
    pub(crate) fn panels(&self) -> Panels<'_> {
        Panels { words: &self.words, rows: self.rows, cols: self.cols }
    }

    /// Copies row `row` to `out` (`cols` elements).
    pub(crate) fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let pairs = self.num_pairs();
        let base = row / PANEL * pairs * PANEL + row % PANEL;
        let words = self.words[base..].iter().step_by(PANEL);
        for (pair, &word) in out[..self.cols].chunks_mut(2).zip(words) {
            pair[0] = f32::from_bits(word << 16);
            if let Some(odd) = pair.get_mut(1) {
                *odd = f32::from_bits(word & 0xFFFF_0000);
            }
        }
    }

    /// Packs the vertical concatenation of `parts`.
    pub(crate) fn pack(pool: &mut Pool, parts: &[HostMatrix<'_>]) -> Result<Self, KernelError> {
        let cols = parts.first().map_or(0, |part| part.cols);
        let mut rows = 0usize;
        for part in parts {
            check_part("load_matrix", part, cols)?;
            rows = rows.saturating_add(part.rows);
        }
        check_size("load_matrix", rows, cols)?;
        let words = pack_all(pool, 1, rows, cols, &|_| parts)?;
        Ok(Self { words, rows, cols })
    }
}

/// Weight matrices `[out, in]` of one shape, each packed as a matrix of its own.
#[derive(Debug)]
pub struct CpuStack {
    words: AlignedVec<u32>,
    count: usize,
    rows: usize,
    cols: usize,
}

impl CpuStack {
    /// Packs each of `matrices`.
    pub(crate) fn pack(pool: &mut Pool, matrices: &[HostMatrix<'_>]) -> Result<Self, KernelError> {
        let op = "load_stack";
        let (rows, cols) = matrices.first().map_or((0, 0), |matrix| (matrix.rows, matrix.cols));
        for matrix in matrices {
            check_part(op, matrix, cols)?;
            if matrix.rows != rows {
                let message = format!("matrices have {rows} and {} rows", matrix.rows);
                return Err(shape_error(op, message));
            }
        }
        check_size(op, rows, cols)?;
        let count = matrices.len();
        let words = pack_all(pool, count, rows, cols, &|i| std::slice::from_ref(&matrices[i]))?;
        Ok(Self { words, count, rows, cols })
    }

    /// How many matrices.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Output features of each.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Input features of each.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// One of them.
    pub(crate) fn matrix(&self, index: usize) -> Panels<'_> {
        let len = self.words.len() / self.count;
        let words = &self.words[index * len..][..len];
        Panels { words, rows: self.rows, cols: self.cols }
    }
}

/// Packs `count` matrices, each the vertical concatenation of its `parts`, which are checked.
fn pack_all<'p, 'd: 'p>(
    pool: &mut Pool,
    count: usize,
    rows: usize,
    cols: usize,
    parts: &(dyn Fn(usize) -> &'p [HostMatrix<'d>] + Sync),
) -> Result<AlignedVec<u32>, KernelError> {
    let panels = rows.div_ceil(PANEL);
    let panel_words = cols.div_ceil(2).saturating_mul(PANEL);
    let all = panels.saturating_mul(count);
    let mut words = AlignedVec::<u32>::zeroed(all.saturating_mul(panel_words), "a weight matrix")?;
    let disjoint = Disjoint::new(&mut words);
    pool.run_ranges(all, 1, &|range, _| {
        for index in range {
            // SAFETY: every panel belongs to one task.
            let panel_words = unsafe { disjoint.slice(index * panel_words, panel_words) };
            let (matrix, first) = (index / panels, index % panels * PANEL);
            for lane in 0..PANEL.min(rows - first) {
                pack_row(parts(matrix), first + lane, lane, panel_words);
            }
        }
    })?;
    Ok(words)
}

fn check_size(op: &'static str, rows: usize, cols: usize) -> Result<(), KernelError> {
    if rows == 0 || cols == 0 {
        let message = format!("the matrix is {rows} x {cols}, both must be at least 1");
        return Err(shape_error(op, message));
    }
    Ok(())
}

fn check_part(op: &'static str, part: &HostMatrix<'_>, cols: usize) -> Result<(), KernelError> {
    if part.cols != cols {
        return Err(shape_error(
            op,
            format!("parts have {cols} and {} columns, they must be equal", part.cols),
        ));
    }
    if part.rows == 0 {
        return Ok(());
    }
    let needed = (part.rows - 1).checked_mul(part.row_stride).and_then(|n| {
        n.checked_add(part.col_start)?.checked_add(cols)?.checked_mul(part.dtype.bytes())
    });
    if needed.is_none_or(|needed| needed > part.data.len()) {
        return Err(shape_error(
            op,
            format!(
                "{} rows of {} {:?} columns from column {} at stride {} do not fit in {} bytes",
                part.rows,
                cols,
                part.dtype,
                part.col_start,
                part.row_stride,
                part.data.len()
            ),
        ));
    }
    Ok(())
}

/// Writes row `row` of the concatenation to lane `lane` of its panel.
fn pack_row(parts: &[HostMatrix<'_>], mut row: usize, lane: usize, panel: &mut [u32]) {
    for part in parts {
        if row >= part.rows {
            row -= part.rows;
            continue;
        }
        let size = part.dtype.bytes();
        let start = (row * part.row_stride + part.col_start) * size;
        let bytes = &part.data[start..start + part.cols * size];
        match part.dtype {
            DType::Bf16 => interleave(bytes.as_chunks().0, lane, panel, u16::from_le_bytes),
            DType::F16 => interleave(bytes.as_chunks().0, lane, panel, |b| {
                bf16::from_f32(f16::from_le_bytes(b).to_f32()).to_bits()
            }),
            DType::F32 => interleave(bytes.as_chunks().0, lane, panel, |b| {
                bf16::from_f32(f32::from_le_bytes(b)).to_bits()
            }),
        }
        return;
    }
}

fn interleave<const SIZE: usize>(
    elements: &[[u8; SIZE]],
    lane: usize,
    panel: &mut [u32],
    convert: impl Fn([u8; SIZE]) -> u16,
) {
    for (pair, words) in elements.chunks(2).zip(panel.chunks_exact_mut(PANEL)) {
        let even = u32::from(convert(pair[0]));
        let odd = pair.get(1).map_or(0, |&bytes| u32::from(convert(bytes)));
        words[lane] = even | odd << 16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_as_they_went_in() {
        let mut pool = Pool::new(1).unwrap();
        for (rows, cols) in [(1, 1), (3, 5), (64, 8), (70, 7), (130, 66)] {
            let value = |r: usize, c: usize| bf16::from_f32((r * 131 + c) as f32 * 0.37 - 9.0);
            // A column window of a wider file.
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
            };
            let split = rows / 2;
            let packed =
                CpuMatrix::pack(&mut pool, &[part(0, split), part(split, rows - split)]).unwrap();
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
    fn wider_types_are_rounded() {
        let mut pool = Pool::new(1).unwrap();
        let values = [1.0f32, 1.003, -0.1, 3.0e-8];
        let wide: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let half: Vec<u8> = values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect();
        for (data, dtype) in [(&wide, DType::F32), (&half, DType::F16)] {
            let part = HostMatrix { data, dtype, rows: 1, cols: 4, col_start: 0, row_stride: 4 };
            let packed = CpuMatrix::pack(&mut pool, &[part]).unwrap();
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
        };
        for bad in [part, HostMatrix { cols: 0, ..part }, HostMatrix { rows: usize::MAX, ..part }] {
            assert!(CpuMatrix::pack(&mut pool, &[bad]).is_err());
        }
        assert!(CpuMatrix::pack(&mut pool, &[]).is_err());
        let one = HostMatrix { rows: 1, ..part };
        assert!(CpuMatrix::pack(&mut pool, &[one, HostMatrix { cols: 3, ..one }]).is_err());
    }
}

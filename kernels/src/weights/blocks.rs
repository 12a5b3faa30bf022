//! PURE: block scales of FP8 and int8 checkpoints.
use super::dtype::{DType, widen};

/// Scales of a quantised tensor: its elements are multiplied by one number per block.
#[derive(Clone, Copy, Debug)]
pub struct BlockScales<'a> {
    /// Bytes of the scales, row-major.
    pub data: &'a [u8],
    /// Element type of the scales: bf16, f16 or f32.
    pub dtype: DType,
    /// Rows and columns that share a scale; `usize::MAX` for all of them.
    pub block: (usize, usize),
    /// Number of scales from one row of blocks to the next.
    pub row_stride: usize,
    /// Row of the tensor that is row 0 of the matrix.
    pub first_row: usize,
}

impl BlockScales<'_> {
    /// Index of an element's scale; `row` counts from row 0 of the matrix, `col` from column 0 of
    /// the tensor.
    pub(super) fn index(&self, row: usize, col: usize) -> Option<usize> {
        let block_row = row.checked_add(self.first_row)? / self.block.0.max(1);
        block_row.checked_mul(self.row_stride)?.checked_add(col / self.block.1.max(1))
    }

    /// The scale at an index, NaN if there is none.
    pub(super) fn at(&self, index: usize) -> f32 {
        let size = self.dtype.bytes();
        let bytes = index.checked_mul(size).and_then(|start| self.data.get(start..)?.get(..size));
        let mut one = [f32::NAN];
        if let Some(bytes) = bytes {
            widen(self.dtype, bytes, &mut one);
        }
        one[0]
    }
}

//! PURE: scales of blocks: FP8 and int8 checkpoints.
use super::dtype::{DType, widen};

/// What the elements of a quantised tensor are multiplied by: one number for each block of it.
#[derive(Clone, Copy, Debug)]
pub struct BlockScales<'a> {
    /// Bytes of the scales, row-major.
    pub data: &'a [u8],
    /// Their type: bf16, f16 or f32.
    pub dtype: DType,
    /// Rows and columns of the tensor that share a scale; `usize::MAX` for all of them.
    pub block: (usize, usize),
    /// Scales from one row of blocks to the next.
    pub row_stride: usize,
    /// The tensor's row that is row 0 of the matrix.
    pub first_row: usize,
}

impl BlockScales<'_> {
    /// The place of the scale of an element; `row` counts from the matrix's row 0, `col` from the
    /// tensor's column 0.
    pub(super) fn index(&self, row: usize, col: usize) -> Option<usize> {
        let block_row = row.checked_add(self.first_row)? / self.block.0.max(1);
        block_row.checked_mul(self.row_stride)?.checked_add(col / self.block.1.max(1))
    }

    /// The scale at a place, NaN where there is none.
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

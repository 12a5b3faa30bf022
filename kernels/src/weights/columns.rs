//! Weights that a file stores column by column, as for products with inputs from the left.
use super::{DType, widen};
use crate::error::KernelError;

/// A tensor `[in, out]`, some of whose outputs form a matrix `[out, in]`.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// Bytes, starting with all outputs of the first input.
    pub data: &'a [u8],
    /// Element type: bf16, f16 or f32.
    pub dtype: DType,
    /// Number of inputs.
    pub cols: usize,
    /// Number of outputs of the tensor, which are adjacent for each input.
    pub outputs: usize,
    /// Output that is row 0 of the matrix.
    pub first_row: usize,
    /// Number of outputs from one row of the matrix to the next.
    pub step: usize,
}

impl Columns<'_> {
    /// Checks that the tensor has `rows` such rows.
    pub(super) fn check(&self, op: &'static str, rows: usize) -> Result<(), KernelError> {
        let Self { dtype, cols, outputs, first_row, step, .. } = *self;
        let end = rows
            .checked_sub(1)
            .and_then(|last| last.checked_mul(step)?.checked_add(first_row)?.checked_add(1));
        let bytes = cols.checked_mul(outputs).and_then(|all| all.checked_mul(dtype.bytes()));
        let is_there = end.is_some_and(|end| end <= outputs);
        if is_there && bytes.is_some_and(|bytes| bytes <= self.data.len()) {
            return Ok(());
        }
        let found = self.data.len();
        let message = format!(
            "{rows} outputs from {first_row} of {outputs}, {step} apart, of {cols} {dtype:?} inputs \
             do not fit in {found} bytes"
        );
        Err(KernelError::Shape { op, message })
    }

    /// Row `row` of the matrix in f32, from input `first` on.
    pub(super) fn row_f32(&self, row: usize, first: usize, out: &mut [f32]) {
        let size = self.dtype.bytes();
        let output = self.first_row + row * self.step;
        for (input, to) in (first..).zip(out) {
            let start = (input * self.outputs + output) * size;
            widen(self.dtype, &self.data[start..start + size], std::slice::from_mut(to));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HostMatrix, Scales};
    use super::*;

    #[test]
    fn every_step_of_any_rectangle_is_where_it_belongs() {
        let (inputs, outputs) = (5, 8);
        let data: Vec<u8> =
            (0..inputs * outputs).flat_map(|i: usize| (i as f32).to_le_bytes()).collect();
        let columns = |first_row, step| Columns {
            data: &data,
            dtype: DType::F32,
            cols: inputs,
            outputs,
            first_row,
            step,
        };
        let matrix = |columns: Columns<'static>, rows, col_start, cols| HostMatrix {
            data: &[],
            dtype: DType::Packed,
            rows,
            cols,
            col_start,
            row_stride: inputs,
            scales: Some(Scales::Columns(columns)),
        };
        let leaked: &'static [u8] = Box::leak(data.clone().into_boxed_slice());
        for (first_row, step, rows) in [(0, 1, 8), (0, 2, 4), (1, 2, 4), (3, 2, 2), (7, 9, 1)] {
            for (col_start, cols) in [(0, 5), (2, 3), (4, 1)] {
                let own = Columns { data: leaked, ..columns(first_row, step) };
                let part = matrix(own, rows, col_start, cols);
                part.check("test", cols).unwrap();
                let mut found = vec![f32::NAN; cols];
                for row in 0..rows {
                    part.row_f32(row, &mut found);
                    let want =
                        |col: usize| ((col_start + col) * outputs + first_row + row * step) as f32;
                    assert_eq!(found, (0..cols).map(want).collect::<Vec<_>>());
                }
                // The scale of int8 is that of the whole row.
                let scale = part.row_int8(0, &mut Vec::new(), &mut vec![0; cols]);
                assert_eq!(scale, ((inputs - 1) * outputs + first_row) as f32 / 127.0);
            }
        }
        let good = Columns { data: leaked, ..columns(1, 2) };
        assert!(matrix(good, 4, 0, 5).check("test", 5).is_ok());
        for (bad, rows) in [
            (good, 5),
            (Columns { data: &leaked[1..], ..good }, 4),
            (Columns { outputs: usize::MAX, ..good }, 4),
            (Columns { step: usize::MAX, ..good }, 4),
            (Columns { first_row: usize::MAX, ..good }, 4),
            (Columns { cols: 6, ..good }, 4),
        ] {
            assert!(matrix(bad, rows, 0, 5).check("test", 5).is_err(), "{bad:?}");
        }
    }
}

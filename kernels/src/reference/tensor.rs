//! Storage of the reference backend: activations, weights and the KV cache, all f32 and row-major.
use half::bf16;

use crate::backend::{Buffer, HostMatrix, KvShape, KvStorage};
use crate::check::ensure;
use crate::error::KernelError;
use crate::fp8;
use crate::weights::Compact;

/// Activations `[rows, width]`.
#[derive(Debug)]
pub struct ReferenceBuffer {
    values: Vec<f32>,
    rows: usize,
    rows_max: usize,
    width: usize,
}

impl ReferenceBuffer {
    pub(super) fn new(rows_max: usize, width: usize) -> Result<Self, KernelError> {
        let values = zeroed("a buffer", &[rows_max, width])?;
        Ok(Self { values, rows: rows_max, rows_max, width })
    }

    /// One row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }

    /// One row, mutable.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.width..][..self.width]
    }

    /// All rows in use.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values[..self.rows * self.width]
    }

    /// All rows in use, mutable.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.rows * self.width]
    }
}

impl Buffer for ReferenceBuffer {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.width
    }

    fn set_rows(&mut self, rows: usize) -> Result<(), KernelError> {
        ensure!("set_rows", rows <= self.rows_max, "rows is {rows}, room is for {}", self.rows_max);
        self.rows = rows;
        Ok(())
    }
}

/// Weights `[rows, cols]` = `[out, in]`.
#[derive(Debug)]
pub struct ReferenceMatrix {
    values: Vec<f32>,
    rows: usize,
    cols: usize,
}

impl ReferenceMatrix {
    /// Reads the vertical concatenation of `parts`; `read` fills in the elements of each row.
    fn read(
        parts: &[HostMatrix<'_>],
        mut read: impl FnMut(&HostMatrix<'_>, usize, &mut [f32]),
    ) -> Result<Self, KernelError> {
        let op = "load_matrix";
        let cols = parts.first().map_or(0, |part| part.cols);
        for part in parts {
            part.check(op, cols)?;
        }
        let rows = parts.iter().fold(0usize, |rows, part| rows.saturating_add(part.rows));
        let mut values = zeroed("a weight matrix", &[rows, cols])?;
        let all = parts.iter().flat_map(|part| (0..part.rows).map(move |row| (part, row)));
        for ((part, row), out) in all.zip(values.chunks_exact_mut(cols.max(1))) {
            read(part, row, out);
        }
        Ok(Self { values, rows, cols })
    }

    /// Widens weights to f32. Quantised files are rounded to bf16 first, as in every backend,
    /// except weights that stay as they are.
    pub(super) fn widen(parts: &[HostMatrix<'_>]) -> Result<Self, KernelError> {
        match Compact::of(parts) {
            Some(_) => Self::read(parts, |part, row, out| part.row_f32(row, out)),
            None => Self::rounded(parts),
        }
    }

    /// As [`Self::widen`], with all that is quantised rounded to bf16.
    pub(super) fn rounded(parts: &[HostMatrix<'_>]) -> Result<Self, KernelError> {
        Self::read(parts, |part, row, out| {
            part.row_f32(row, out);
            if part.scales.is_some() {
                out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
        })
    }

    /// Quantises weights to int8 and widens them to f32.
    pub(super) fn quantise(parts: &[HostMatrix<'_>]) -> Result<Self, KernelError> {
        let (mut room, mut values) = (Vec::new(), Vec::new());
        Self::read(parts, |part, row, out| {
            values.resize(out.len(), 0);
            let scale = part.row_int8(row, &mut room, &mut values);
            for (to, &value) in out.iter_mut().zip(&values) {
                *to = f32::from(value) * scale;
            }
        })
    }

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

    /// The weights of one output feature.
    #[must_use]
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }
}

/// K and V of every layer: `[num_layers][slots, num_kv_heads * head_dim]`, a slot being
/// `block * block_size + offset`. V has no elements of its own if it is a part of K. Always f32; a
/// cache in FP8 holds values that FP8 has.
#[derive(Debug)]
pub struct ReferenceKvCache {
    keys: Vec<f32>,
    values: Vec<f32>,
    shape: KvShape,
}

impl ReferenceKvCache {
    pub(super) fn new(shape: KvShape) -> Result<Self, KernelError> {
        let sizes = [
            shape.num_layers,
            shape.num_blocks,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
        ];
        let what = "the KV cache";
        let values = match shape.latent {
            None => zeroed(what, &sizes)?,
            Some(_) => Vec::new(),
        };
        Ok(Self { keys: zeroed(what, &sizes)?, values, shape })
    }

    /// The cache's dimensions.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    pub(super) fn num_slots(&self) -> usize {
        self.shape.num_blocks * self.shape.block_size
    }

    fn width(&self) -> usize {
        self.shape.num_kv_heads * self.shape.head_dim
    }

    fn start(&self, layer: usize, slot: usize) -> usize {
        (layer * self.num_slots() + slot) * self.width()
    }

    /// Stores K and V of all heads at one slot, rounded to what the cache holds. V is empty if it
    /// is a part of K.
    pub(super) fn store(&mut self, layer: usize, slot: usize, k: &[f32], v: &[f32]) {
        let (start, width) = (self.start(layer, slot), self.width());
        for (to, from) in [(&mut self.keys, k), (&mut self.values, v)] {
            if from.is_empty() {
                continue;
            }
            let to = &mut to[start..][..width];
            to.copy_from_slice(from);
            if self.shape.storage == KvStorage::Fp8 {
                to.iter_mut().for_each(|x| *x = fp8::rounded(*x));
            }
        }
    }

    /// Overwrites block `to` with block `from` of another cache, in all layers.
    pub(super) fn copy_block(&mut self, other: &Self, from: u32, to: u32) {
        let size = self.shape.block_size;
        let len = size * self.width();
        for layer in 0..self.shape.num_layers {
            let source = other.start(layer, from as usize * size);
            let target = self.start(layer, to as usize * size);
            self.keys[target..][..len].copy_from_slice(&other.keys[source..][..len]);
            if self.shape.latent.is_none() {
                self.values[target..][..len].copy_from_slice(&other.values[source..][..len]);
            }
        }
    }

    /// K of one head at one slot.
    pub(super) fn key(&self, layer: usize, slot: usize, head: usize) -> &[f32] {
        let start = self.start(layer, slot) + head * self.shape.head_dim;
        &self.keys[start..][..self.shape.head_dim]
    }

    /// V of one head at one slot.
    pub(super) fn value(&self, layer: usize, slot: usize, head: usize) -> &[f32] {
        if let Some(latent) = self.shape.latent {
            return &self.key(layer, slot, head)[..latent];
        }
        let start = self.start(layer, slot) + head * self.shape.head_dim;
        &self.values[start..][..self.shape.head_dim]
    }
}

pub(super) fn zeroed(what: &'static str, sizes: &[usize]) -> Result<Vec<f32>, KernelError> {
    let mut values = Vec::new();
    let len = reserve(&mut values, what, sizes)?;
    values.resize(len, 0.0);
    Ok(values)
}

/// Reserves capacity for exactly the product of `sizes`, and returns the product.
fn reserve(
    values: &mut Vec<f32>,
    what: &'static str,
    sizes: &[usize],
) -> Result<usize, KernelError> {
    let len = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    let bytes = len.map_or(u64::MAX, |len| len.saturating_mul(size_of::<f32>()) as u64);
    len.filter(|&len| values.try_reserve_exact(len).is_ok())
        .ok_or(KernelError::OutOfMemory { what, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::DType;

    #[test]
    fn a_matrix_is_the_named_rectangles_one_below_the_other() {
        // [2, 3] in bf16 and [1, 4] in f32; columns 1..3 of both.
        let first: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect();
        let second: Vec<u8> =
            [7.0f32, 8.0, 9.0, 10.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let part = |data, dtype, rows, row_stride| HostMatrix {
            data,
            dtype,
            rows,
            cols: 2,
            col_start: 1,
            row_stride,
            scales: None,
        };
        let matrix = ReferenceMatrix::widen(&[
            part(&first, DType::Bf16, 2, 3),
            part(&second, DType::F32, 1, 4),
        ])
        .unwrap();
        assert_eq!(matrix.values, [2.0, 3.0, 5.0, 6.0, 8.0, 9.0]);
        assert_eq!((matrix.rows(), matrix.cols()), (3, 2));
    }

    #[test]
    fn data_that_is_too_short_is_an_error() {
        let data = [0u8; 10];
        let part = HostMatrix {
            data: &data,
            dtype: DType::Bf16,
            rows: 2,
            cols: 3,
            col_start: 0,
            row_stride: 3,
            scales: None,
        };
        let error = ReferenceMatrix::widen(&[part]).unwrap_err().to_string();
        assert!(
            error.contains("2 rows of 3 Bf16 columns") && error.contains("in 10 bytes"),
            "{error}"
        );
    }

    #[test]
    fn impossible_sizes_are_out_of_memory() {
        let error = ReferenceBuffer::new(usize::MAX, 2).unwrap_err();
        assert!(matches!(error, KernelError::OutOfMemory { .. }));
    }
}

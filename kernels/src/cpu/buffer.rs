//! Activations and vectors in host memory.
use std::ops::Deref;

use super::memory::AlignedVec;
use crate::backend::Buffer;
use crate::check::ensure;
use crate::error::KernelError;

/// Activations `[rows, width]` in f32, row-major; memory for a maximum number of rows.
#[derive(Debug)]
pub struct CpuBuffer {
    data: AlignedVec<f32>,
    rows: usize,
    rows_max: usize,
    width: usize,
}

impl CpuBuffer {
    pub(crate) fn new(rows_max: usize, width: usize) -> Result<Self, KernelError> {
        let data = AlignedVec::zeroed(rows_max.saturating_mul(width), "activations")?;
        Ok(Self { data, rows: rows_max, rows_max, width })
    }

    /// The rows in use, `[rows, width]`.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.data[..self.rows * self.width]
    }

    /// The rows in use, `[rows, width]`.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.rows * self.width]
    }

    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.values()[row * self.width..][..self.width]
    }
}

impl Buffer for CpuBuffer {
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

/// A vector in f32.
#[derive(Debug)]
pub struct CpuVector(AlignedVec<f32>);

impl CpuVector {
    pub(crate) fn new(values: &[f32]) -> Result<Self, KernelError> {
        let mut data = AlignedVec::zeroed(values.len(), "a vector")?;
        data.copy_from_slice(values);
        Ok(Self(data))
    }
}

impl Deref for CpuVector {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

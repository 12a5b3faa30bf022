//! Buffers, caches and weights of the reference backend, all widened to f32 in host memory.
use std::ops::Range;

use super::{
    ReferenceBackend, ReferenceBuffer, ReferenceKvCache, ReferenceMatrix, ReferenceRoutes,
};
use crate::backend::{Choices, HostMatrix, Inspect, KvShape, Tensors};
use crate::check;
use crate::error::KernelError;
use crate::weights::Compact;

impl Tensors for ReferenceBackend {
    type Buffer = ReferenceBuffer;
    type Matrix = ReferenceMatrix;
    type Stack = Vec<ReferenceMatrix>;
    type Routes = ReferenceRoutes;
    type Vector = Vec<f32>;
    type KvCache = ReferenceKvCache;
    type HostKv = ReferenceKvCache;

    fn describe(&self) -> String {
        "cpu reference float32, 1 thread".to_owned()
    }

    fn rank(&self) -> u32 {
        self.collective.rank()
    }

    fn world_size(&self) -> u32 {
        self.collective.world_size()
    }

    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<Self::Buffer, KernelError> {
        ReferenceBuffer::new(rows_max, width)
    }

    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError> {
        ReferenceMatrix::widen(parts)
    }

    fn keeps(&self, _: &Compact, _: bool) -> bool {
        true
    }

    fn load_bf16_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError> {
        ReferenceMatrix::rounded(parts)
    }

    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError> {
        ReferenceMatrix::quantise(parts)
    }

    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError> {
        stack(matrices, ReferenceMatrix::widen)
    }

    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError> {
        stack(matrices, ReferenceMatrix::quantise)
    }

    fn replace_in_stack(
        &mut self,
        stack: &mut Self::Stack,
        index: usize,
        matrix: &HostMatrix<'_>,
    ) -> Result<(), KernelError> {
        let (rows, cols) = stack.first().map_or((0, 0), |it| (it.rows(), it.cols()));
        check::replacement((stack.len(), rows, cols), index, matrix)?;
        stack[index] = ReferenceMatrix::widen(std::slice::from_ref(matrix))?;
        Ok(())
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, KernelError> {
        Ok(values.to_vec())
    }

    fn columns(&self, matrix: &Self::Matrix) -> usize {
        matrix.cols()
    }

    fn new_kv_cache(&mut self, shape: KvShape) -> Result<Self::KvCache, KernelError> {
        ReferenceKvCache::new(shape)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        let elements = shape.num_layers * shape.block_size * shape.num_kv_heads * shape.head_dim;
        let planes = if shape.latent.is_some() { 1 } else { 2 };
        planes * (elements * size_of::<f32>()) as u64
    }

    fn new_host_kv(&mut self, shape: KvShape) -> Result<Self::HostKv, KernelError> {
        ReferenceKvCache::new(shape)
    }

    fn read_rows(
        &mut self,
        buffer: &ReferenceBuffer,
        rows: &[Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        check::read_rows(buffer, buffer.values(), rows, out)
    }
}

impl Inspect for ReferenceBackend {
    fn read_buffer(&mut self, buffer: &Self::Buffer) -> Result<Vec<f32>, KernelError> {
        Ok(buffer.values().to_vec())
    }

    fn read_routes(&mut self, routes: &Self::Routes) -> Result<Choices, KernelError> {
        let all = || routes.chosen.iter().flatten();
        Ok((all().map(|chosen| chosen.0 as u32).collect(), all().map(|chosen| chosen.1).collect()))
    }
}

/// Loads each of `matrices`, which must have the same shape.
fn stack(
    matrices: &[HostMatrix<'_>],
    load: impl Fn(&[HostMatrix<'_>]) -> Result<ReferenceMatrix, KernelError>,
) -> Result<Vec<ReferenceMatrix>, KernelError> {
    check::stack(matrices)?;
    matrices.iter().map(|matrix| load(std::slice::from_ref(matrix))).collect()
}

impl check::Matrix for ReferenceMatrix {
    fn rows(&self) -> usize {
        self.rows()
    }

    fn cols(&self) -> usize {
        self.cols()
    }
}

impl check::Vector for Vec<f32> {
    fn len(&self) -> usize {
        self.len()
    }
}

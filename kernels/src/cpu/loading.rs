//! Buffers, caches and weights of the backend, and their loading.
use std::ops::Range;

use super::pack::Format;
use super::{CpuBackend, CpuBuffer, CpuKvCache, CpuMatrix, CpuRoutes, CpuStack, CpuVector, kv};
use crate::backend::{Choices, HostMatrix, Inspect, KvShape, Tensors};
use crate::check;
use crate::error::KernelError;
use crate::weights::Compact;

impl Tensors for CpuBackend {
    type Buffer = CpuBuffer;
    type Matrix = CpuMatrix;
    type Stack = CpuStack;
    type Routes = CpuRoutes;
    type Vector = CpuVector;
    type KvCache = CpuKvCache;
    type HostKv = CpuKvCache;

    fn describe(&self) -> String {
        let threads = self.pool.num_threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("cpu {} {}, {threads} thread{plural}", self.isa, self.precision)
    }

    fn rank(&self) -> u32 {
        self.collective.rank()
    }

    fn world_size(&self) -> u32 {
        self.collective.world_size()
    }

    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<CpuBuffer, KernelError> {
        CpuBuffer::new(rows_max, width)
    }

    fn release_scratch(&mut self) -> Result<(), KernelError> {
        self.acts.free()?;
        self.wide.free()?;
        self.workers.iter_mut().try_for_each(|worker| worker.attention.free())
    }

    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CpuMatrix, KernelError> {
        CpuMatrix::pack(&mut self.pool, Format::of(parts), parts)
    }

    fn keeps(&self, _: &Compact, _: bool) -> bool {
        true
    }

    fn load_bf16_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CpuMatrix, KernelError> {
        CpuMatrix::pack(&mut self.pool, Format::Bf16, parts)
    }

    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CpuMatrix, KernelError> {
        CpuMatrix::pack(&mut self.pool, Format::Int8, parts)
    }

    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CpuStack, KernelError> {
        CpuStack::pack(&mut self.pool, Format::of(matrices), matrices)
    }

    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CpuStack, KernelError> {
        CpuStack::pack(&mut self.pool, Format::Int8, matrices)
    }

    fn replace_in_stack(
        &mut self,
        stack: &mut CpuStack,
        index: usize,
        matrix: &HostMatrix<'_>,
    ) -> Result<(), KernelError> {
        stack.replace(&mut self.pool, index, matrix)
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CpuVector, KernelError> {
        CpuVector::new(values)
    }

    fn columns(&self, matrix: &CpuMatrix) -> usize {
        matrix.cols()
    }

    fn new_kv_cache(&mut self, shape: KvShape) -> Result<CpuKvCache, KernelError> {
        CpuKvCache::new(shape, self.precision)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        kv::block_bytes(shape, self.precision)
    }

    fn new_host_kv(&mut self, shape: KvShape) -> Result<CpuKvCache, KernelError> {
        CpuKvCache::new(shape, self.precision)
    }

    fn read_rows(
        &mut self,
        buffer: &CpuBuffer,
        rows: &[Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        check::read_rows(buffer, buffer.values(), rows, out)
    }
}

impl Inspect for CpuBackend {
    fn read_buffer(&mut self, buffer: &CpuBuffer) -> Result<Vec<f32>, KernelError> {
        Ok(buffer.values().to_vec())
    }

    fn read_routes(&mut self, routes: &CpuRoutes) -> Result<Choices, KernelError> {
        Ok(routes.choices())
    }
}

impl check::Matrix for CpuMatrix {
    fn rows(&self) -> usize {
        self.rows()
    }

    fn cols(&self) -> usize {
        self.cols()
    }
}

impl check::Vector for CpuVector {
    fn len(&self) -> usize {
        (**self).len()
    }
}

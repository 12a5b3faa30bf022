//! Buffers, caches and weights of a GPU, and their loading.
use std::ops::Range;
use std::rc::Rc;

use super::backend::CudaBackend;
use super::context::{Context, version_text};
use super::device::Device;
use super::experts::{CudaRoutes, CudaStack};
use super::stream::Stream;
use super::swap::CudaHostKv;
use super::tensors::{
    CudaBuffer, CudaKvCache, CudaMatrix, CudaVector, Element, Uploader, fp8_shift, int4_shift,
    kv_block_bytes,
};
use crate::backend::{Choices, HostMatrix, Inspect, KvShape, Tensors};
use crate::check;
use crate::error::KernelError;
use crate::weights::Compact;

/// One of the load methods of [`Uploader`].
type Load =
    fn(&mut Uploader, &Rc<Context>, &Stream, &[HostMatrix<'_>]) -> Result<CudaMatrix, KernelError>;

impl Tensors for CudaBackend {
    type Buffer = CudaBuffer;
    type Matrix = CudaMatrix;
    type Stack = CudaStack;
    type Routes = CudaRoutes;
    type Vector = CudaVector;
    type KvCache = CudaKvCache;
    type HostKv = CudaHostKv;

    fn describe(&self) -> String {
        let info = self.device.context.info();
        let (major, minor) = info.capability;
        let driver = version_text(self.device.context.driver().version());
        let products = match &self.device.matmul {
            Ok(matmul) => format!("cuBLASLt {}", matmul.version()),
            Err(error) => error.to_string(),
        };
        format!(
            "cuda {} {} (sm_{major}{minor}), driver {driver}, {products}, {}",
            info.ordinal,
            info.name,
            self.step.graphs_text()
        )
    }

    fn rank(&self) -> u32 {
        self.collective.rank()
    }

    fn world_size(&self) -> u32 {
        self.collective.world_size()
    }

    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<CudaBuffer, KernelError> {
        self.step.buffer_made(rows_max);
        CudaBuffer::new(&self.device.context, &self.device.stream, Element::F32, rows_max, width)
    }

    fn new_input_buffer(
        &mut self,
        rows_max: usize,
        width: usize,
    ) -> Result<CudaBuffer, KernelError> {
        self.step.buffer_made(rows_max);
        CudaBuffer::new(&self.device.context, &self.device.stream, Element::Bf16, rows_max, width)
    }

    fn release_scratch(&mut self) -> Result<(), KernelError> {
        if self.step.is_open() {
            let message = "a step is open".to_owned();
            return Err(KernelError::Shape { op: "release_scratch", message });
        }
        self.device.stream.synchronize()?;
        self.free_scratch();
        Ok(())
    }

    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CudaMatrix, KernelError> {
        self.load_with(parts, Uploader::load_as_is)
    }

    fn keeps(&self, form: &Compact, is_stack: bool) -> bool {
        match form {
            Compact::Int4(groups) => !is_stack && int4_shift(groups).is_some(),
            Compact::Fp8(groups) => fp8_shift(groups).is_some(),
        }
    }

    fn load_bf16_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CudaMatrix, KernelError> {
        self.load_with(parts, Uploader::load)
    }

    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<CudaMatrix, KernelError> {
        self.load_with(parts, Uploader::load_int8)
    }

    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CudaStack, KernelError> {
        self.load_stack_with(matrices, Uploader::load_fp8)
    }

    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<CudaStack, KernelError> {
        self.load_stack_with(matrices, Uploader::load_int8)
    }

    fn replace_in_stack(
        &mut self,
        stack: &mut CudaStack,
        index: usize,
        matrix: &HostMatrix<'_>,
    ) -> Result<(), KernelError> {
        check::replacement(stack.sizes(), index, matrix)?;
        if self.step.is_open() {
            let message = "a step is open".to_owned();
            return Err(KernelError::Shape { op: "replace_in_stack", message });
        }
        let Device { context, stream, .. } = &self.device;
        let mut uploader = match self.uploader.take() {
            Some(uploader) => uploader,
            None => Uploader::new(context)?,
        };
        let replaced = uploader.replace(stream, &stack.all, index * matrix.rows, matrix);
        self.uploader = Some(uploader);
        replaced
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CudaVector, KernelError> {
        CudaVector::new(&self.device.context, &self.device.stream, values)
    }

    fn columns(&self, matrix: &CudaMatrix) -> usize {
        matrix.cols()
    }

    fn new_kv_cache(&mut self, shape: KvShape) -> Result<CudaKvCache, KernelError> {
        self.step.forget_graphs();
        self.settle()?;
        self.sampling.forget();
        CudaKvCache::new(&self.device.context, &self.device.stream, shape)
    }

    fn kv_block_bytes(&self, shape: &KvShape) -> u64 {
        kv_block_bytes(shape)
    }

    fn new_host_kv(&mut self, shape: KvShape) -> Result<CudaHostKv, KernelError> {
        CudaHostKv::new(&self.device.context, &self.device.stream, shape)
    }

    fn read_rows(
        &mut self,
        buffer: &CudaBuffer,
        rows: &[Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError> {
        self.download_rows(buffer, rows, out)
    }
}

impl Inspect for CudaBackend {
    fn read_buffer(&mut self, buffer: &CudaBuffer) -> Result<Vec<f32>, KernelError> {
        self.download(buffer)
    }

    fn read_routes(&mut self, routes: &CudaRoutes) -> Result<Choices, KernelError> {
        self.download_routes(routes)
    }
}

impl CudaBackend {
    /// Loads a matrix with one of the uploader's methods.
    fn load_with(
        &mut self,
        parts: &[HostMatrix<'_>],
        load: Load,
    ) -> Result<CudaMatrix, KernelError> {
        let Device { context, stream, .. } = &self.device;
        let mut uploader = match self.uploader.take() {
            Some(uploader) => uploader,
            None => Uploader::new(context)?,
        };
        let matrix = load(&mut uploader, context, stream, parts);
        self.uploader = Some(uploader);
        matrix
    }

    /// Loads matrices of one shape likewise.
    fn load_stack_with(
        &mut self,
        matrices: &[HostMatrix<'_>],
        load: Load,
    ) -> Result<CudaStack, KernelError> {
        check::stack(matrices)?;
        Ok(CudaStack { all: self.load_with(matrices, load)?, count: matrices.len() })
    }
}

impl check::Matrix for CudaMatrix {
    fn rows(&self) -> usize {
        self.rows()
    }

    fn cols(&self) -> usize {
        self.cols()
    }
}

impl check::Vector for CudaVector {
    fn len(&self) -> usize {
        self.len()
    }
}

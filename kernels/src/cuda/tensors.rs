//! Activations, weights and vectors on the GPU.
//!
//! - `kv`: the KV cache
//! - `uploader`: upload of weights; `fp8`, `int4`: those in FP8 and with 4 bits
use std::rc::Rc;

use super::context::Context;
use super::launch::{Rows, Weight};
use super::memory::{DeviceMemory, DevicePtr};
use super::stream::Stream;
use crate::backend::Buffer;
use crate::error::KernelError;

mod fp8;
mod int4;
mod kv;
mod uploader;

pub(super) use fp8::shift as fp8_shift;
pub(super) use int4::shift as int4_shift;
pub use kv::{CudaKvCache, kv_block_bytes};
pub(super) use uploader::Uploader;

/// Number of bf16 elements in 16 bytes: rows begin at multiples of it.
const ALIGN: usize = 8;
/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Inputs of products.
    Bf16,
    /// Everything else.
    F32,
}

impl Element {
    /// Size in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Activations. f32 rows are contiguous; bf16 rows begin at multiples of 16 bytes.
#[derive(Debug)]
pub struct CudaBuffer {
    memory: DeviceMemory,
    element: Element,
    rows: usize,
    rows_max: usize,
    width: usize,
    stride: usize,
}

impl CudaBuffer {
    pub(super) fn new(
        context: &Rc<Context>,
        stream: &Stream,
        element: Element,
        rows_max: usize,
        width: usize,
    ) -> Result<Self, KernelError> {
        let stride = match element {
            Element::Bf16 => width.next_multiple_of(ALIGN),
            Element::F32 => width,
        };
        let bytes = rows_max.saturating_mul(stride).saturating_mul(element.bytes());
        let memory = DeviceMemory::zeroed(context, stream, bytes, "activations")?;
        Ok(Self { memory, element, rows: 0, rows_max, width, stride })
    }

    /// Element type.
    #[must_use]
    pub fn element(&self) -> Element {
        self.element
    }

    /// Maximum number of rows.
    #[must_use]
    pub fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// Address and stride of the rows.
    #[must_use]
    pub fn at(&self) -> Rows {
        Rows { ptr: self.memory.ptr(), stride: self.stride }
    }

    /// Address and stride of the rows, if they have the element type that `op` takes.
    pub(super) fn of(
        &self,
        element: Element,
        op: &'static str,
        name: &str,
    ) -> Result<Rows, KernelError> {
        if self.element == element {
            return Ok(self.at());
        }
        let message = format!("{name} is of {:?}, not of {element:?}", self.element);
        Err(KernelError::Shape { op, message })
    }

    /// The memory of the buffer.
    pub(super) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Fills all of the memory with `byte`; 0xff gives NaN in both types.
    ///
    /// # Errors
    /// [`KernelError::Device`].
    pub(super) fn poison(&self, stream: &Stream, byte: u8) -> Result<(), KernelError> {
        self.memory.fill(stream, byte)
    }
}

impl Buffer for CudaBuffer {
    fn rows(&self) -> usize {
        self.rows
    }

    fn width(&self) -> usize {
        self.width
    }

    fn set_rows(&mut self, rows: usize) -> Result<(), KernelError> {
        if rows > self.rows_max {
            let message = format!("{rows} rows, there is room for {}", self.rows_max);
            return Err(KernelError::Shape { op: "set_rows", message });
        }
        self.rows = rows;
        Ok(())
    }
}

/// A weight matrix, `[rows, cols]`, with rows at multiples of 16 bytes: bf16, int8 with 128 added,
/// FP8, or 4 bits.
#[derive(Debug)]
pub struct CudaMatrix {
    memory: DeviceMemory,
    /// f32, one per row, for int8.
    scales: Option<DeviceMemory>,
    /// For 4 bits: the groups, and their size: see [`Weight`].
    groups: Option<(DeviceMemory, u32)>,
    /// For FP8: the scales, and their number of inputs: see [`Weight`].
    fp8: Option<(DeviceMemory, u32)>,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl CudaMatrix {
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

    /// Address and stride of the rows.
    #[must_use]
    pub fn at(&self) -> Rows {
        Rows { ptr: self.memory.ptr(), stride: self.stride }
    }

    /// The operand of products.
    #[must_use]
    pub fn weight(&self) -> Weight {
        Weight {
            at: self.at(),
            scales: self.scales.as_ref().map(DeviceMemory::ptr),
            groups: self.groups.as_ref().map(|(memory, shift)| (memory.ptr(), *shift)),
            fp8: self.fp8.as_ref().map(|(memory, shift)| (memory.ptr(), *shift)),
        }
    }
}

/// A vector in f32.
#[derive(Debug)]
pub struct CudaVector {
    memory: DeviceMemory,
    len: usize,
}

impl CudaVector {
    pub(super) fn new(
        context: &Rc<Context>,
        stream: &Stream,
        values: &[f32],
    ) -> Result<Self, KernelError> {
        let memory = DeviceMemory::new(context, size_of_val(values), "a vector of weights")?;
        memory.upload(stream, 0, values)?;
        Ok(Self { memory, len: values.len() })
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the vector.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.memory.ptr()
    }
}

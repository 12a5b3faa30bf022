//! What a device holds (activations, weights, caches), and copies to and from it.
use super::{HostMatrix, KvShape};
use crate::error::KernelError;
use crate::weights::Compact;

/// Activations `[rows, width]` with capacity for more rows.
pub trait Buffer {
    /// Rows in use.
    fn rows(&self) -> usize;
    /// Elements per row.
    fn width(&self) -> usize;
    /// Uses the first `rows` rows. Contents of newly used rows are undefined.
    ///
    /// # Errors
    /// If `rows` exceeds the capacity given at creation.
    fn set_rows(&mut self, rows: usize) -> Result<(), KernelError>;
}

/// What a device holds, in its own types.
pub trait Tensors {
    /// Activations.
    type Buffer: Buffer;
    /// A weight matrix `[out, in]`, in the device's packed layout.
    type Matrix;
    /// Weight matrices `[out, in]` of one shape, stored one after the other: a layer's experts.
    type Stack;
    /// The experts of each row of a step, and their weights.
    type Routes;
    /// A vector in f32: norm weights, biases, RoPE tables.
    type Vector;
    /// A paged KV cache.
    type KvCache;
    /// KV blocks in host memory.
    type HostKv;

    /// Describes the hardware, for the log: `cpu avx512_bf16, 2 threads`.
    fn describe(&self) -> String;

    /// Number of this rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn world_size(&self) -> u32;

    /// Allocates a zeroed buffer of `rows_max` x `width`.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<Self::Buffer, KernelError>;

    /// Allocates a buffer for the inputs of matrix products; a device can keep its elements in the
    /// type that its products take.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_input_buffer(
        &mut self,
        rows_max: usize,
        width: usize,
    ) -> Result<Self::Buffer, KernelError> {
        self.new_buffer(rows_max, width)
    }

    /// Frees the scratch memory that grew with the steps so far, and forgets the sizes of all
    /// buffers made so far: others are about to take their place. No step may be open.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Device`].
    fn release_scratch(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Packs the vertical concatenation of `parts` (equal `cols`). Weights of 4 bits and in FP8
    /// stay as they are if [`Compact::of`] and [`Self::keeps`] allow it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a part's data is too short or widths differ.
    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError>;

    /// Whether the device keeps a matrix in this form, or a stack of matrices if that is asked for.
    /// Products then take its numbers (integers minus their zeros) exactly, sum them in f32 for
    /// each group of inputs that shares a scale, and multiply the groups' sums by their scales.
    /// Otherwise weights become bf16.
    fn keeps(&self, form: &Compact, is_stack: bool) -> bool;

    /// As [`Self::load_matrix`], with what is quantised in bf16: for embeddings and routers, which
    /// are small, or of which single rows are read.
    ///
    /// # Errors
    /// As [`Self::load_matrix`].
    fn load_bf16_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError>;

    /// As [`Self::load_matrix`], quantised to int8 while loading ([`HostMatrix::row_int8`]):
    /// products take activations as usual and the weights' integers exactly, and multiply each sum
    /// by its output's scale.
    ///
    /// # Errors
    /// As [`Self::load_matrix`].
    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError>;

    /// Packs each of `matrices`, which must have the same shape, as [`Self::load_matrix`] does.
    ///
    /// # Errors
    /// As [`Self::load_matrix`], and if shapes differ; [`KernelError::Unsupported`].
    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError>;

    /// As [`Self::load_stack`], quantised as in [`Self::load_int8_matrix`].
    ///
    /// # Errors
    /// As [`Self::load_stack`].
    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError>;

    /// Replaces matrix `index` of a stack that [`Self::load_stack`] made of 16- or 32-bit floats.
    /// The stack stays where it is, so recorded steps remain good. Operations begun before still
    /// use the old matrix, those begun later the new one; no step may be open.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if there is no such matrix or it has another shape;
    /// [`KernelError::Unsupported`] for other stacks; [`KernelError::OutOfMemory`],
    /// [`KernelError::Device`].
    fn replace_in_stack(
        &mut self,
        stack: &mut Self::Stack,
        index: usize,
        matrix: &HostMatrix<'_>,
    ) -> Result<(), KernelError>;

    /// Uploads a vector.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, KernelError>;

    /// Number of inputs of a matrix.
    fn columns(&self, matrix: &Self::Matrix) -> usize;

    /// Allocates a zeroed KV cache.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_kv_cache(&mut self, shape: KvShape) -> Result<Self::KvCache, KernelError>;

    /// Bytes of one block over all layers, K and V together.
    fn kv_block_bytes(&self, shape: &KvShape) -> u64;

    /// Allocates `shape.num_blocks` KV blocks in host memory.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_host_kv(&mut self, shape: KvShape) -> Result<Self::HostKv, KernelError>;

    /// Copies ranges of a buffer's rows to `out`, one after the other. Clears `out` first.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a row is not in use; [`KernelError::OutOfMemory`],
    /// [`KernelError::Device`].
    fn read_rows(
        &mut self,
        buffer: &Self::Buffer,
        rows: &[std::ops::Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError>;
}

//! What a device holds: activations, weights, caches; how they come to it and back.
use super::{HostMatrix, KvShape};
use crate::error::KernelError;
use crate::weights::Int4Groups;

/// Activations `[rows, width]` with room for more rows.
pub trait Buffer {
    /// Rows in use.
    fn rows(&self) -> usize;
    /// Elements per row.
    fn width(&self) -> usize;
    /// Uses the first `rows` rows. Contents of newly used rows are undefined.
    ///
    /// # Errors
    /// When `rows` exceeds the capacity given at creation.
    fn set_rows(&mut self, rows: usize) -> Result<(), KernelError>;
}

/// What a device holds. Activations, weights and caches are of its own types.
pub trait Tensors {
    /// Activations.
    type Buffer: Buffer;
    /// A weight matrix `[out, in]`, in the device's packed layout.
    type Matrix;
    /// Weight matrices `[out, in]` of one shape, one behind the other: a layer's experts.
    type Stack;
    /// Which experts each row of a step goes to, and with what weights.
    type Routes;
    /// A vector in f32: norm weights, biases, RoPE tables.
    type Vector;
    /// A paged KV cache.
    type KvCache;
    /// KV blocks in host memory.
    type HostKv;

    /// What it runs on, for the log: `cpu avx512_bf16, 2 threads`.
    fn describe(&self) -> String;

    /// This rank.
    fn rank(&self) -> u32;

    /// Ranks.
    fn world_size(&self) -> u32;

    /// Makes a buffer of `rows_max` x `width`, zeroed.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_buffer(&mut self, rows_max: usize, width: usize) -> Result<Self::Buffer, KernelError>;

    /// Makes a buffer for the inputs of matrix products: a device may keep its elements in the type
    /// that its products take.
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

    /// Packs the vertical concatenation of `parts` (equal `cols`); integers of 4 bits as they are
    /// where [`Self::keeps_int4`] and [`crate::weights::int4_groups`] say so.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a part's data is too short or widths differ.
    fn load_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError>;

    /// Whether it keeps a matrix of 4 bits in such groups, or a stack of them, in 4 bits: products
    /// take the integers less their zeros exactly, add them up in f32 for each group of inputs, and
    /// the groups' sums times their scales. Else weights become bf16.
    fn keeps_int4(&self, groups: &Int4Groups, is_stack: bool) -> bool {
        let _ = (groups, is_stack);
        false
    }

    /// As [`Self::load_matrix`], quantised to int8 on the way ([`HostMatrix::row_int8`]):
    /// products take activations as they do otherwise, weights' integers exactly, and multiply each
    /// sum by its output's scale.
    ///
    /// # Errors
    /// As there.
    fn load_int8_matrix(&mut self, parts: &[HostMatrix<'_>]) -> Result<Self::Matrix, KernelError>;

    /// Packs each of `matrices`, which have one shape, as [`Self::load_matrix`] does.
    ///
    /// # Errors
    /// As there, and when shapes differ; [`KernelError::Unsupported`].
    fn load_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError>;

    /// As [`Self::load_stack`], quantised as [`Self::load_int8_matrix`] does it.
    ///
    /// # Errors
    /// As there.
    fn load_int8_stack(&mut self, matrices: &[HostMatrix<'_>]) -> Result<Self::Stack, KernelError>;

    /// Uploads a vector.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, KernelError>;

    /// The inputs that a matrix takes.
    fn columns(&self, matrix: &Self::Matrix) -> usize;

    /// Makes a zeroed KV cache.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_kv_cache(&mut self, shape: KvShape) -> Result<Self::KvCache, KernelError>;

    /// Bytes that one block takes over all layers, K and V together.
    fn kv_block_bytes(&self, shape: &KvShape) -> u64;

    /// Makes room for `shape.num_blocks` KV blocks in host memory.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    fn new_host_kv(&mut self, shape: KvShape) -> Result<Self::HostKv, KernelError>;

    /// Copies some rows of a buffer to `out`, one range behind the other. `out` is cleared first.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when a row is not in use; [`KernelError::OutOfMemory`],
    /// [`KernelError::Device`].
    fn read_rows(
        &mut self,
        buffer: &Self::Buffer,
        rows: &[std::ops::Range<usize>],
        out: &mut Vec<f32>,
    ) -> Result<(), KernelError>;
}

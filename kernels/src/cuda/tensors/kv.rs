//! The paged KV cache.
use std::rc::Rc;

use super::super::context::Context;
use super::super::launch::LayerCache;
use super::super::memory::{DeviceMemory, DevicePtr};
use super::super::stream::Stream;
use crate::backend::KvShape;
use crate::error::KernelError;

/// A paged KV cache: K and V of each layer, bf16
/// `[num_blocks, num_kv_heads, block_size, head_dim]`.
#[derive(Debug)]
pub struct CudaKvCache {
    memory: DeviceMemory,
    shape: KvShape,
    block_shift: u32,
}

impl CudaKvCache {
    pub(in crate::cuda) fn new(
        context: &Rc<Context>,
        stream: &Stream,
        shape: KvShape,
    ) -> Result<Self, KernelError> {
        if !shape.block_size.is_power_of_two() {
            return Err(KernelError::Unsupported(format!(
                "a block size of {} tokens: GPUs need a power of two",
                shape.block_size
            )));
        }
        let bytes = kv_block_bytes(&shape).saturating_mul(shape.num_blocks as u64);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let memory = DeviceMemory::zeroed(context, stream, bytes, "the KV cache")?;
        Ok(Self { memory, shape, block_shift: shape.block_size.trailing_zeros() })
    }

    /// The shape that it was made for.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Address of the cache.
    pub(in crate::cuda) fn ptr(&self) -> DevicePtr {
        self.memory.ptr()
    }

    /// Number of elements of a block in one plane (the K or the V of a layer), and of a plane.
    pub(in crate::cuda) fn block_and_plane(&self) -> (usize, usize) {
        let KvShape { num_kv_heads, head_dim, block_size, num_blocks, .. } = self.shape;
        let block = num_kv_heads * head_dim * block_size;
        (block, block * num_blocks)
    }

    /// Keys and values of a layer, which must exist.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerCache {
        let KvShape { num_kv_heads, head_dim, block_size, num_blocks, .. } = self.shape;
        let plane = num_kv_heads * head_dim * block_size * num_blocks * 2;
        let keys = self.memory.ptr().offset(2 * layer * plane);
        LayerCache { keys, values: keys.offset(plane), block_shift: self.block_shift }
    }
}

/// Bytes of one block over all layers, K and V together.
#[must_use]
pub fn kv_block_bytes(shape: &KvShape) -> u64 {
    [shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size]
        .into_iter()
        .fold(2 * 2, |bytes: u64, n| bytes.saturating_mul(n as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_keys_and_values_of_all_layers() {
        let shape = KvShape {
            num_layers: 32,
            num_kv_heads: 8,
            head_dim: 128,
            block_size: 16,
            num_blocks: 9,
        };
        // 128 KiB per token, as for Llama 3.1 8B.
        assert_eq!(kv_block_bytes(&shape), 16 * 128 * 1024);
    }
}

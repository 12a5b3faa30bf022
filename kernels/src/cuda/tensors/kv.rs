//! The paged KV cache.
use std::rc::Rc;

use super::super::context::Context;
use super::super::launch::LayerCache;
use super::super::memory::{DeviceMemory, DevicePtr};
use super::super::stream::Stream;
use crate::backend::{KvShape, KvStorage};
use crate::error::KernelError;

/// A paged KV cache: K and V of each layer, bf16 or FP8
/// `[num_blocks, num_kv_heads, block_size, head_dim]`. V is not there if it is a part of K.
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
        Self::check(&shape).map_err(KernelError::Unsupported)?;
        let bytes = kv_block_bytes(&shape).saturating_mul(shape.num_blocks as u64);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let memory = DeviceMemory::zeroed(context, stream, bytes, "the KV cache")?;
        Ok(Self { memory, shape, block_shift: shape.block_size.trailing_zeros() })
    }

    /// Checks that GPUs take these sizes.
    pub(in crate::cuda) fn check(shape: &KvShape) -> Result<(), String> {
        let KvShape { num_kv_heads, head_dim, block_size, .. } = *shape;
        if !block_size.is_power_of_two() {
            return Err(format!("a block size of {block_size} tokens: GPUs need a power of two"));
        }
        // Blocks are copied in pieces of 16 bytes.
        let block = plane_block_bytes(shape);
        if !block.is_multiple_of(16) {
            return Err(format!(
                "a KV cache with {block} bytes of K in a block ({num_kv_heads} heads of {head_dim} \
                 elements, {block_size} tokens): GPUs need a multiple of 16"
            ));
        }
        Ok(())
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

    /// Number of planes: the K, and the V, of all layers.
    pub(in crate::cuda) fn planes(&self) -> usize {
        planes(&self.shape) * self.shape.num_layers
    }

    /// Size of a block in one plane (the K or the V of a layer), and of a plane, in units of 2
    /// bytes.
    pub(in crate::cuda) fn block_and_plane(&self) -> (usize, usize) {
        let block = plane_block_bytes(&self.shape) / 2;
        (block, block * self.shape.num_blocks)
    }

    /// Keys and values of a layer, which must exist.
    #[must_use]
    pub fn layer(&self, layer: usize) -> LayerCache {
        let plane = plane_block_bytes(&self.shape) * self.shape.num_blocks;
        let planes = planes(&self.shape);
        let keys = self.memory.ptr().offset(planes * layer * plane);
        LayerCache {
            keys,
            values: keys.offset((planes - 1) * plane),
            block_shift: self.block_shift,
            storage: self.shape.storage,
        }
    }
}

fn element_bytes(shape: &KvShape) -> usize {
    match shape.storage {
        KvStorage::AsTaken => 2,
        KvStorage::Fp8 => 1,
    }
}

/// Planes of a layer.
fn planes(shape: &KvShape) -> usize {
    if shape.latent.is_some() { 1 } else { 2 }
}

/// Bytes of one block in one plane. Does not overflow for a cache that could be allocated.
fn plane_block_bytes(shape: &KvShape) -> usize {
    [shape.num_kv_heads, shape.head_dim, shape.block_size]
        .into_iter()
        .fold(element_bytes(shape), usize::saturating_mul)
}

/// Bytes of one block over all layers, K and V together.
#[must_use]
pub fn kv_block_bytes(shape: &KvShape) -> u64 {
    [shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.block_size]
        .into_iter()
        .fold((planes(shape) * element_bytes(shape)) as u64, |bytes, n| {
            bytes.saturating_mul(n as u64)
        })
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
            latent: None,
            block_size: 16,
            num_blocks: 9,
            storage: KvStorage::AsTaken,
        };
        // 128 KiB per token, as for Llama 3.1 8B.
        assert_eq!(kv_block_bytes(&shape), 16 * 128 * 1024);
        // DeepSeek V3: 1,152 bytes per token and layer.
        let latent = KvShape { num_kv_heads: 1, head_dim: 576, latent: Some(512), ..shape };
        assert_eq!(kv_block_bytes(&latent), 16 * 32 * 1152);
        let fp8 = KvShape { storage: KvStorage::Fp8, ..shape };
        assert_eq!(kv_block_bytes(&fp8), 16 * 64 * 1024);
    }
}

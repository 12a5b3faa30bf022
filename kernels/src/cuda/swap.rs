//! KV blocks in pinned host memory, which kernels access over the bus. A block is copied out before
//! a later call overwrites it, since both are on one stream.
use super::context::Context;
use super::device::Device;
use super::launch;
use super::memory::Pinned;
use super::stream::{Event, Stream};
use super::tensors::{CudaKvCache, kv_block_bytes};
use crate::backend::KvShape;
use crate::check::attention as check;
use crate::error::KernelError;
use std::mem::MaybeUninit;
use std::rc::Rc;
use std::time::Duration;

/// KV blocks in host memory: bf16 or FP8
/// `[num_blocks, planes, num_kv_heads, block_size, head_dim]`, so that a block is
/// contiguous, and so are adjacent blocks.
#[derive(Debug)]
pub struct CudaHostKv {
    /// In units of 2 bytes, whatever they hold; only kernels read or write it.
    data: Pinned<MaybeUninit<u16>>,
    shape: KvShape,
    /// Cache blocks named by the copies in flight, and events for when they have been read: one for
    /// copies out, one for copies in, which may be queued behind those.
    names: [(Pinned<u32>, Event); 2],
    /// Time limit for these copies, in the latest step.
    patience: Duration,
}

impl Drop for CudaHostKv {
    fn drop(&mut self) {
        self.names.iter().for_each(|(_, read)| read.settle(self.patience));
    }
}

/// Consecutive host blocks.
struct BlockRun {
    /// Index of the first pair.
    start: usize,
    len: usize,
    /// First host block.
    host: usize,
}

fn runs(pairs: &[(u32, u32)]) -> Vec<BlockRun> {
    let mut runs: Vec<BlockRun> = Vec::new();
    for (start, (_, host)) in pairs.iter().enumerate() {
        let host = *host as usize;
        match runs.last_mut() {
            Some(run) if run.host + run.len == host => run.len += 1,
            _ => runs.push(BlockRun { start, len: 1, host }),
        }
    }
    runs
}

impl CudaHostKv {
    pub(super) fn new(
        context: &Rc<Context>,
        stream: &Stream,
        shape: KvShape,
    ) -> Result<Self, KernelError> {
        let elements = (kv_block_bytes(&shape) / 2).saturating_mul(shape.num_blocks as u64);
        let elements = usize::try_from(elements).unwrap_or(usize::MAX);
        let data = Pinned::unfilled(context, elements, "pinned memory for swapped KV blocks")?;
        let names = || -> Result<_, KernelError> {
            let what = "pinned memory for names of blocks";
            let names = Pinned::new(context, shape.num_blocks, what)?;
            let read = Event::new(context, false)?;
            read.record(stream)?;
            Ok((names, read))
        };
        let names = [names()?, names()?];
        Ok(Self { data, shape, names, patience: stream.patience() })
    }

    /// The shape that it was made for.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Copies blocks from the cache, or back to it: (block, host block) pairs.
    pub(super) fn copy(
        &mut self,
        device: &Device,
        cache: &CudaKvCache,
        pairs: &[(u32, u32)],
        out: bool,
    ) -> Result<(), KernelError> {
        let op = if out { "swap_out" } else { "swap_in" };
        check::swap(op, cache.shape(), &self.shape, pairs, out)?;
        let (names, read) = &mut self.names[usize::from(out)];
        // Kernels of an earlier step may still read the list. It is never longer than the pool.
        self.patience = device.stream.patience();
        read.wait(self.patience)?;
        for (name, (block, _)) in names.as_mut_slice().iter_mut().zip(pairs) {
            *name = *block;
        }
        let planes = cache.planes();
        let (elements, stride) = cache.block_and_plane();
        let launched = runs(pairs).into_iter().try_for_each(|BlockRun { start, len, host }| {
            let names = names.device_ptr(start);
            let staging = self.data.device_ptr(host * planes * elements);
            let sizes = (len, planes, elements, stride);
            let call = if out {
                launch::blocks_out(cache.ptr(), names, staging, sizes)
            } else {
                launch::blocks_in(cache.ptr(), names, staging, sizes)
            };
            // SAFETY: names and host blocks were checked; everything is alive until the stream has
            // passed the copies, which `drop` waits for.
            unsafe { device.launch(call) }
        });
        // Also after a launch that failed: earlier ones are in flight.
        read.record(&device.stream)?;
        launched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_host_memory_travel_together() {
        let runs = runs(&[(9, 3), (2, 4), (7, 5), (1, 7), (5, 6)]);
        let found: Vec<_> = runs.iter().map(|run| (run.start, run.len, run.host)).collect();
        assert_eq!(found, [(0, 3, 3), (3, 1, 7), (4, 1, 6)]);
    }
}

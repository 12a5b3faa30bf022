//! Sequences that move from the KV cache to host memory and back; the rank remembers them
//! meanwhile.
//!
//! A plan names every block. This rank knows what it has, and refuses copies that cannot be right:
//! a block table that differs, host blocks that hold something else.
use kernels::backend::KvShape;
use kernels::{Backend, KernelError};
use shared::protocol::{StepPlan, Swap};

use super::{Engine, EngineError};

/// KV blocks in host memory, and which of them are in use.
#[derive(Debug)]
pub(super) struct HostBlocks<B: Backend> {
    kv: B::HostKv,
    shape: KvShape,
    held: Vec<bool>,
}

impl<B: Backend> HostBlocks<B> {
    /// Creates unused blocks of this shape.
    fn new(kv: B::HostKv, shape: KvShape) -> Self {
        Self { kv, shape, held: vec![false; shape.num_blocks] }
    }

    /// Marks all blocks as unused.
    pub(super) fn clear(&mut self) {
        self.held.fill(false);
    }

    /// Number of blocks.
    pub(super) fn count(&self) -> usize {
        self.held.len()
    }

    /// Marks blocks as unused.
    pub(super) fn free(&mut self, blocks: &[u32]) {
        for block in blocks {
            if let Some(held) = self.held.get_mut(*block as usize) {
                *held = false;
            }
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Whether `count` blocks in host memory already exist, from an earlier epoch.
    pub fn has_host_blocks(&self, count: u32) -> bool {
        let shape = self.host_shape(count);
        self.host.as_ref().is_some_and(|host| host.shape == shape)
    }

    /// Makes sure that there are `count` empty blocks in host memory to swap to. Those of an
    /// earlier epoch are kept if the number is the same: pinning memory takes long.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`]; there are none then.
    pub fn make_host_blocks(&mut self, count: u32) -> Result<(), KernelError> {
        if self.has_host_blocks(count) {
            return Ok(());
        }
        // Free the old ones first, to make room.
        self.drop_host_blocks();
        if count > 0 {
            let shape = self.host_shape(count);
            self.host = Some(HostBlocks::new(self.backend.new_host_kv(shape)?, shape));
        }
        Ok(())
    }

    /// Frees the host memory for swapping.
    pub fn drop_host_blocks(&mut self) {
        self.host = None;
    }

    fn host_shape(&self, count: u32) -> KvShape {
        self.decoder.kv_shape(&self.config, count)
    }

    /// Copies the plan's blocks, out before in, before its batch is computed.
    pub(super) fn swap(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        if plan.swap_out.is_empty() && plan.swap_in.is_empty() {
            return Ok(());
        }
        let fault = |message: String| EngineError::Plan { step: plan.step.0, message };
        let mut pairs = Vec::new();
        for swap in &plan.swap_out {
            self.swap_one_out(swap, &mut pairs)
                .map_err(|why| fault(format!("{} {why}", swap.seq)))?;
        }
        let none = || fault("swaps, but there is no host memory for it".to_owned());
        let (Some(cache), Some(host)) = (&mut self.cache, &mut self.host) else {
            return Err(none());
        };
        self.backend.swap_out(cache, &mut host.kv, &pairs)?;
        pairs.clear();
        for swap in &plan.swap_in {
            self.swap_one_in(plan, swap, &mut pairs)
                .map_err(|why| fault(format!("{} {why}", swap.seq)))?;
        }
        let (Some(cache), Some(host)) = (&mut self.cache, &mut self.host) else {
            return Err(none());
        };
        self.backend.swap_in(cache, &mut host.kv, &pairs)?;
        if let Some(draft) = &mut self.draft {
            // The draft model's K and V were not swapped.
            draft.replace(pairs.iter().map(|(device, _)| *device));
        }
        Ok(())
    }

    fn swap_one_out(&mut self, swap: &Swap, pairs: &mut Vec<(u32, u32)>) -> Result<(), String> {
        let seq = self.sequences.get_mut(&swap.seq).ok_or("is not known")?;
        let host = self.host.as_mut().ok_or("is swapped, but there is no host memory for it")?;
        if seq.host.is_some() {
            return Err("is swapped out, but already was".to_owned());
        }
        if !swap.blocks.iter().map(|pair| pair.device.0).eq(seq.blocks.iter().copied()) {
            let (count, own) = (swap.blocks.len(), seq.blocks.len());
            return Err(format!("is swapped out of {count} blocks, which are not its {own}"));
        }
        for pair in &swap.blocks {
            let count = host.count();
            let held = host.held.get_mut(pair.host.0 as usize);
            let held = held.ok_or_else(|| format!("is given {} of {count}", pair.host))?;
            if std::mem::replace(held, true) {
                return Err(format!("is given {}, which holds another sequence", pair.host));
            }
            pairs.push((pair.device.0, pair.host.0));
        }
        seq.host = Some(swap.blocks.iter().map(|pair| pair.host.0).collect());
        seq.blocks.clear();
        Ok(())
    }

    fn swap_one_in(
        &mut self,
        plan: &StepPlan,
        swap: &Swap,
        pairs: &mut Vec<(u32, u32)>,
    ) -> Result<(), String> {
        let seq = self.sequences.get_mut(&swap.seq).ok_or("is not known")?;
        let held = seq.host.take().ok_or("is swapped in, but was not out")?;
        let entry = plan.sequences.iter().find(|entry| entry.seq == swap.seq);
        let table = &entry.ok_or("is swapped in, but not run")?.new_blocks;
        let behind = held.len().checked_sub(swap.blocks.len());
        let behind = behind.ok_or("is swapped in from more blocks than it has")?;
        for (at, pair) in (behind..).zip(&swap.blocks) {
            let (host, device) = (pair.host, pair.device);
            if held[at] != host.0 || table.get(at) != Some(&device) {
                return Err(format!("is swapped in from {host} to {device}, not block {at} of it"));
            }
            if device.0 >= self.num_blocks {
                return Err(format!("is given {device} of {}", self.num_blocks));
            }
            pairs.push((device.0, host.0));
        }
        if let Some(host) = &mut self.host {
            host.free(&held);
        }
        Ok(())
    }
}

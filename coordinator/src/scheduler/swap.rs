//! PURE: sequences that leave the KV cache for host memory, and come back.
//!
//! When KV blocks run out, a sequence returns to the queue. If host memory has room for its KV
//! blocks, they are copied there instead of being lost. It stays the same sequence with the
//! same admission: workers remember it, its tokens in flight count when they arrive, and nothing is
//! recomputed. Like any preempted sequence it waits before those of equal priority, so it is back
//! before any waiting one that is not more urgent.
//!
//! Host blocks follow the order of plans, like KV blocks: what a plan reads from host memory is
//! free for the next plan, because a plan's copies out come before its copies in.
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use shared::ids::{BlockId, HostBlockId};
use shared::protocol::{StepPlan, Swap, SwapPair};

use super::plan::PlanBuilder;
use super::sequence::Sequence;
use super::{Effect, Scheduler, weight};

/// The blocks in host memory. Every rank has the same ones.
#[derive(Clone, Debug, Default)]
pub(super) struct HostPool {
    /// Lowest first: neighbours are copied together.
    free: BinaryHeap<Reverse<u32>>,
    total: u32,
}

impl HostPool {
    /// Creates a pool whose `total` blocks are all free.
    pub(super) fn new(total: u32) -> Self {
        Self { free: (0..total).map(Reverse).collect(), total }
    }

    /// Total number of blocks.
    pub(super) fn total(&self) -> u32 {
        self.total
    }

    /// Number of blocks in use.
    pub(super) fn num_used(&self) -> u32 {
        self.total - self.free.len() as u32
    }

    /// Takes `count` blocks, or none if there are fewer.
    fn take(&mut self, count: usize) -> Option<Vec<HostBlockId>> {
        if self.free.len() < count {
            return None;
        }
        let block = |_| self.free.pop().map(|Reverse(block)| HostBlockId(block));
        (0..count).map(block).collect()
    }

    fn give_back(&mut self, blocks: impl IntoIterator<Item = HostBlockId>) {
        self.free.extend(blocks.into_iter().map(|block| Reverse(block.0)));
    }
}

/// What a sequence has while it is swapped.
#[derive(Debug)]
pub(super) struct SwappedBlocks {
    /// Its host blocks, in the order of its block table.
    host: Vec<HostBlockId>,
    /// The KV blocks it had, in case they turn out to be corrupted.
    pub(super) was: Vec<BlockId>,
}

impl Scheduler {
    /// Moves an admitted sequence to host memory, if it is worth it and there is room.
    pub(super) fn swap_out(&mut self, slot: usize) -> bool {
        let Some(seq) = &mut self.sequences[slot] else { return false };
        let others = self.outgoing.iter().map(|swap| weight::swap(swap.blocks.len())).sum();
        // A sequence that the workers have not begun has nothing to keep.
        if !seq.known || !weight::may_swap(others, seq.blocks.len()) {
            return false;
        }
        let Some(host) = self.host.take(seq.blocks.len()) else { return false };
        let pairs = seq.blocks.iter().zip(&host);
        let blocks = pairs.map(|(device, host)| SwapPair { device: *device, host: *host });
        self.outgoing.push(Swap { seq: seq.id, blocks: blocks.collect() });
        let (request, urgency) = (seq.request, seq.urgency());
        seq.swapped = Some(SwappedBlocks { host, was: seq.blocks.clone() });
        self.blocks.give_back(&mut seq.blocks);
        seq.forget_blocks();
        // Only sequences in the batch have an index.
        seq.drafter = None;
        seq.wants_draft = false;
        self.no_longer_running(slot, urgency);
        self.wait_first(slot);
        self.count(request, |owner| {
            owner.admitted -= 1;
            owner.swapped += 1;
        });
        true
    }

    /// Brings the sequence at place `at` of the queue back and plans its next share. Returns false
    /// when it has to wait.
    pub(super) fn swap_in(
        &mut self,
        at: usize,
        slot: usize,
        builder: &mut PlanBuilder<'_>,
    ) -> bool {
        let Some(seq) = &self.sequences[slot] else { return false };
        let Some(swapped) = &seq.swapped else { return false };
        let wanted = seq.num_wanted(self.config.max_model_len);
        let count = weight::scored_max(seq, wanted.min(builder.budget), builder.step.scores);
        // Its last token is in flight, or drafts whose outcome is unknown.
        let waits = count == 0 || seq.waits_for_token(self.config.max_model_len);
        let host_blocks = swapped.host.len();
        if waits || !weight::may_swap(builder.step.swap_in_bytes, host_blocks) {
            return false;
        }
        // It may have more blocks than it needs: those of drafts that were not accepted.
        let table = self.config.blocks_for(seq.computed + count).max(host_blocks as u32);
        // As at admission.
        let ahead = self.config.blocks_for(seq.len_ahead() + 1).max(table);
        // Others may have computed more of the same tokens, but what the workers know of this
        // sequence ends at `computed`.
        let full = (seq.computed / self.config.block_size) as usize;
        let known = self.is_known_to_wait(slot);
        if known && !cfg!(debug_assertions) {
            return false;
        }
        self.look_up(slot);
        self.found.truncate(full);
        let num_found = self.found.len() as u32;
        let found_free = self.found.iter().filter(|found| found.is_free).count() as u32;
        let short = self.is_short_of(slot, ahead - num_found + found_free, wanted);
        debug_assert!(short || !known, "{ahead}, {num_found}, {found_free}: {:?}", self.waits_for);
        if short || table - num_found + found_free > self.blocks.num_free() {
            return false;
        }
        let Some(seq) = &mut self.sequences[slot] else { return false };
        let Some(swapped) = seq.swapped.take() else { return false };
        self.share_found(slot);
        let Some(seq) = &mut self.sequences[slot] else { return false };
        builder.step.swap_in_bytes += weight::swap(swapped.host.len());
        let mut pairs = Vec::with_capacity(swapped.host.len() - num_found as usize);
        for host in swapped.host.iter().skip(num_found as usize) {
            // There are enough: see above.
            let Some(device) = self.blocks.take(|lost| self.states.forget(lost)) else { break };
            seq.blocks.push(device);
            pairs.push(SwapPair { device, host: *host });
        }
        let (seq, request, blocks) = (seq.id, seq.request, pairs.len() as u32);
        builder.plan.swap_in.push(Swap { seq, blocks: pairs });
        self.left.extend(swapped.host);
        self.waiting.remove(at);
        self.run(slot);
        self.count(request, |owner| {
            owner.swapped -= 1;
            owner.admitted += 1;
        });
        builder.effects.push(Effect::SwappedIn { request, blocks });
        self.resumed(request, builder.effects);
        self.plan_sequence(slot, count, builder);
        true
    }

    /// Adds the pending copies to a plan being sent; host blocks that it reads are free for the
    /// next.
    pub(super) fn send_swaps(&mut self, plan: &mut StepPlan) {
        plan.swap_out.append(&mut self.outgoing);
        self.host.give_back(self.left.drain(..));
    }

    /// Forgets a swapped sequence that was removed from everything else.
    pub(super) fn drop_swapped(&mut self, seq: &Sequence, swapped: SwappedBlocks) {
        self.host.give_back(swapped.host);
        // It may not have been sent yet.
        self.outgoing.retain(|swap| swap.seq != seq.id);
        self.count(seq.request, |owner| owner.swapped -= 1);
    }

    /// Drops host memory at the end of an epoch: swapped sequences are recomputed.
    pub(super) fn lose_swapped(&mut self) {
        self.outgoing.clear();
        self.left.clear();
        self.host = HostPool::default();
        for index in 0..self.waiting.len() {
            let Some(seq) = &mut self.sequences[self.waiting[index]] else { continue };
            if seq.swapped.is_some() {
                let request = seq.request;
                seq.reset();
                self.count(request, |owner| owner.swapped -= 1);
            }
        }
    }
}

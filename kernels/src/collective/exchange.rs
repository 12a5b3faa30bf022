//! The operations of a collective in terms of a single one, in which each rank shows its data to
//! all.
//!
//! A transport moves words (`u32`, or the bits of `f32`) in rounds of at most
//! [`Transport::round_max`] words. Sums are computed here, in the same order on every rank, so that
//! all ranks hold bitwise equal results with any transport.
use std::sync::Arc;

use super::{AbortHandle, Collective};
use crate::error::CollectiveError;

/// Purpose of a round. Ranks whose rounds differ get an error instead of mixed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Op {
    AllReduce = 1,
    Gather = 2,
    AllGather = 3,
    Broadcast = 4,
    Barrier = 5,
}

impl Op {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Gather => "gather",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
        }
    }
}

/// Moves words between ranks, one round at a time.
pub(super) trait Transport: Send + std::fmt::Debug {
    fn rank(&self) -> u32;
    fn world_size(&self) -> u32;
    /// Maximum number of words per round.
    fn round_max(&self) -> usize;
    /// Shows `mine` to all ranks, then calls `see(rank, words)` for every rank in order, including
    /// this one. The words of all ranks have the same length.
    fn round(
        &mut self,
        op: Op,
        mine: &[u32],
        see: &mut dyn FnMut(usize, &[u32]),
    ) -> Result<(), CollectiveError>;
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;
    fn is_aborted(&self) -> bool;
}

/// A collective on top of a transport.
#[derive(Debug)]
pub(super) struct Exchange<T> {
    transport: T,
    /// This rank's words in the current round.
    words: Vec<u32>,
    tree: Tree,
}

/// Sums the ranks' data as a binary tree over the ranks in order: `(0 + 1) + (2 + 3)`. The result
/// is therefore the same if one rank holds the sum of two.
#[derive(Debug, Default)]
struct Tree {
    /// Subtrees, larger ones first; entries from `len` on are reusable memory.
    levels: Vec<Vec<f32>>,
    len: usize,
    /// Number of ranks added so far.
    ranks: usize,
}

impl Tree {
    fn clear(&mut self) {
        (self.len, self.ranks) = (0, 0);
    }

    fn push(&mut self, values: impl Iterator<Item = f32>) {
        if self.len == self.levels.len() {
            self.levels.push(Vec::new());
        }
        self.levels[self.len].clear();
        self.levels[self.len].extend(values);
        self.len += 1;
        // As in binary counting: each trailing 1 bit of the number so far completes a subtree.
        let mut bits = self.ranks;
        while bits & 1 == 1 {
            self.merge();
            bits >>= 1;
        }
        self.ranks += 1;
    }

    /// Adds the last subtree to the one before it.
    fn merge(&mut self) {
        let (before, last) = self.levels.split_at_mut(self.len - 1);
        if let (Some(sum), Some(last)) = (before.last_mut(), last.first()) {
            for (sum, value) in sum.iter_mut().zip(last) {
                *sum += value;
            }
        }
        self.len -= 1;
    }

    fn finish(&mut self, to: &mut [f32]) {
        while self.len > 1 {
            self.merge();
        }
        if let Some(sum) = self.levels.first() {
            to.copy_from_slice(sum);
        }
    }
}

impl<T: Transport> Exchange<T> {
    pub(super) fn new(transport: T) -> Self {
        Self { transport, words: Vec::new(), tree: Tree::default() }
    }

    fn show(&mut self, data: &[f32]) {
        self.words.clear();
        self.words.extend(data.iter().map(|value| value.to_bits()));
    }

    fn collect(
        &mut self,
        op: Op,
        local: &[f32],
        mut global: Option<&mut [f32]>,
    ) -> Result<(), CollectiveError> {
        let ranks = self.transport.world_size() as usize;
        if let Some(global) = &global
            && global.len() != local.len() * ranks
        {
            // Other ranks may already be in this operation, or about to enter it.
            self.transport.abort_handle().abort();
            return Err(CollectiveError::Setup(format!(
                "{}: room for {} elements, {} are gathered",
                op.name(),
                global.len(),
                local.len() * ranks
            )));
        }
        let round_max = self.transport.round_max();
        for (index, chunk) in local.chunks(round_max).enumerate() {
            self.show(chunk);
            let start = index * round_max;
            self.transport.round(op, &self.words, &mut |rank, words| {
                if let Some(global) = global.as_deref_mut() {
                    let at = rank * local.len() + start;
                    for (to, from) in global[at..].iter_mut().zip(words) {
                        *to = f32::from_bits(*from);
                    }
                }
            })?;
        }
        Ok(())
    }
}

impl<T: Transport> Collective for Exchange<T> {
    fn rank(&self) -> u32 {
        self.transport.rank()
    }

    fn world_size(&self) -> u32 {
        self.transport.world_size()
    }

    fn all_reduce_sum(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        let round_max = self.transport.round_max();
        let Self { transport, words, tree } = self;
        for chunk in data.chunks_mut(round_max) {
            words.clear();
            words.extend(chunk.iter().map(|value| value.to_bits()));
            tree.clear();
            transport.round(Op::AllReduce, words, &mut |_, words| {
                tree.push(words.iter().map(|word| f32::from_bits(*word)));
            })?;
            tree.finish(chunk);
        }
        Ok(())
    }

    fn gather(
        &mut self,
        local: &[f32],
        global: &mut [f32],
        root: u32,
    ) -> Result<(), CollectiveError> {
        let here = root == self.rank();
        self.collect(Op::Gather, local, here.then_some(global))
    }

    fn all_gather(&mut self, local: &[f32], global: &mut [f32]) -> Result<(), CollectiveError> {
        self.collect(Op::AllGather, local, Some(global))
    }

    fn broadcast(&mut self, data: &mut [u32], root: u32) -> Result<(), CollectiveError> {
        let round_max = self.transport.round_max();
        for chunk in data.chunks_mut(round_max) {
            self.words.clear();
            self.words.extend_from_slice(chunk);
            self.transport.round(Op::Broadcast, &self.words, &mut |rank, words| {
                if rank == root as usize {
                    chunk.copy_from_slice(words);
                }
            })?;
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.transport.round(Op::Barrier, &[], &mut |_, _| {})
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.transport.abort_handle()
    }

    fn is_aborted(&self) -> bool {
        self.transport.is_aborted()
    }
}

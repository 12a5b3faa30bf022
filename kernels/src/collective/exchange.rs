//! The operations of a collective in terms of one: every rank shows its data to every other.
//!
//! A transport moves words (`u32`, the bits of an `f32` where they are numbers) in rounds of at most
//! [`Transport::round_max`] words; sums are made here, in rank order, on every rank, so that all
//! hold bitwise equal results whatever the transport.
use std::sync::Arc;

use super::{AbortHandle, Collective};
use crate::error::CollectiveError;

/// What a round is for; ranks whose rounds differ are told so instead of mixing their data.
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
    /// Most words of one round.
    fn round_max(&self) -> usize;
    /// Shows `mine` to all ranks, then calls `see(rank, words)` for every rank in order, this one
    /// included. All ranks' words have the same length.
    fn round(
        &mut self,
        op: Op,
        mine: &[u32],
        see: &mut dyn FnMut(usize, &[u32]),
    ) -> Result<(), CollectiveError>;
    fn abort_handle(&self) -> Arc<dyn AbortHandle>;
}

/// A collective over a transport.
#[derive(Debug)]
pub(super) struct Exchange<T> {
    transport: T,
    /// This rank's words of the round.
    words: Vec<u32>,
}

impl<T: Transport> Exchange<T> {
    pub(super) fn new(transport: T) -> Self {
        Self { transport, words: Vec::new() }
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
        for chunk in data.chunks_mut(round_max) {
            self.show(chunk);
            self.transport.round(Op::AllReduce, &self.words, &mut |rank, words| {
                if rank == 0 {
                    for (sum, word) in chunk.iter_mut().zip(words) {
                        *sum = f32::from_bits(*word);
                    }
                } else {
                    for (sum, word) in chunk.iter_mut().zip(words) {
                        *sum += f32::from_bits(*word);
                    }
                }
            })?;
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
}

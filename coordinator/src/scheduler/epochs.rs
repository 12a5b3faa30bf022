//! PURE: an epoch begins when the replica's ranks are formed, and ends. Accepted tokens outlive it.
use shared::ids::{Epoch, RequestId, StepId};
use shared::metrics::labels::FailoverReason;
use shared::mix::IdSet;

use super::blocks::BlockPool;
use super::states::KeptStates;
use super::swap::HostPool;
use super::{Effect, HandedOver, Scheduler};
use crate::engine::{EngineError, FinishReason};

/// A request fails after so many epochs in a row that ended before a step with it was answered. In
/// all but the first of them, it was the only one without progress.
pub const SUSPICION_MAX: u32 = 3;

/// Why an epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpochEnd {
    /// Something broke, maybe because of what was computed.
    Failed(FailoverReason),
    /// The cluster ended it: a drain, another degree, fewer replicas.
    Planned,
}

impl Scheduler {
    /// Begins an epoch: the ranks are formed with `num_blocks` empty KV blocks and `host_blocks` in
    /// host memory, and know no sequence. Returns requests that this cache can never hold, or whose
    /// open-ended sequences have outgrown it: another replica may have room.
    pub fn replica_ready(
        &mut self,
        epoch: Epoch,
        num_blocks: u32,
        host_blocks: u32,
        effects: &mut Vec<Effect>,
    ) -> Vec<HandedOver> {
        if self.epoch.is_some() {
            self.replica_lost(EpochEnd::Planned, effects);
        }
        self.epoch = Some(epoch);
        self.last_step = StepId(0);
        self.blocks = BlockPool::new(num_blocks, self.config.block_size);
        self.states = KeptStates::new(self.config.prefix_states.unwrap_or(0));
        self.blocks_most = self.blocks_most.max(num_blocks);
        self.waits_for = None;
        self.host = HostPool::new(host_blocks);
        let room = self.room();
        for slot in &self.waiting {
            if let Some(sequence) = &mut self.sequences[*slot] {
                sequence.fit(room);
            }
        }
        let too_large: IdSet<RequestId> = self
            .waiting
            .iter()
            .filter_map(|slot| self.sequences[*slot].as_ref())
            .filter(|seq| self.blocks_needed(seq.tokens_needed()) > num_blocks)
            .map(|seq| seq.request)
            .collect();
        if too_large.is_empty() { Vec::new() } else { self.hand_over_those(&too_large) }
    }

    /// Ends the epoch. Accepted tokens stay; all sequences wait again, oldest first. A request that
    /// was the only one without progress when [`SUSPICION_MAX`] epochs in a row ended is taken for
    /// the cause: it fails, so that the others can go on.
    pub fn replica_lost(&mut self, end: EpochEnd, effects: &mut Vec<Effect>) {
        self.epoch = None;
        self.num_run_here = 0;
        // Nobody counts what the steps in flight computed, so computing it again is no
        // recomputation. Newest first, back to the state before the oldest.
        while let Some(step) = self.in_flight.pop_back() {
            for entry in step.entries.iter().rev() {
                if let Some(seq) = &mut self.sequences[entry.slot]
                    && seq.id == entry.seq
                {
                    seq.computed_max = entry.computed_max;
                    seq.looked_up &= !entry.looks_up;
                }
            }
            self.spare.push(step);
        }
        let mut guilty: Vec<(RequestId, u32)> = Vec::new();
        while let Some(slot) = self.running.last().copied() {
            if matches!(end, EpochEnd::Failed(_))
                && let Some(seq) = &mut self.sequences[slot]
            {
                seq.suspicion += u32::from(!seq.progressed);
                if seq.suspicion >= SUSPICION_MAX {
                    guilty.push((seq.request, seq.suspicion));
                }
            }
            self.unadmit(slot);
        }
        self.lose_swapped();
        for (request, epochs) in guilty {
            self.end_request(request, Some(EngineError::Quarantined { epochs }), effects);
        }
        // Workers that come back know no sequence and bring a new cache.
        self.forget.clear();
        self.masks_awaited.clear();
        self.blocks = BlockPool::default();
        self.states = KeptStates::default();
    }

    /// Ends open-ended sequences that are longer than the KV cache they came to: no other has room.
    pub fn end_outgrown(&mut self, effects: &mut Vec<Effect>) {
        if self.epoch.is_none() {
            return;
        }
        let room = self.room();
        let outgrown = |slot: &usize| {
            self.sequences[*slot].as_ref().is_some_and(|sequence| sequence.has_outgrown(room))
        };
        let slots: Vec<usize> = self.waiting.iter().copied().filter(outgrown).collect();
        let mut waited = false;
        for slot in slots {
            waited |= self.finish_queued(slot, FinishReason::Length, effects);
        }
        if waited {
            self.close_gaps();
        }
    }
}

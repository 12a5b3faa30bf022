//! PURE: requests that continue at another replica, with everything accepted so far.
use std::collections::VecDeque;

use shared::ids::{RequestId, SeqId};
use shared::mix::{IdMap, IdSet};

use super::Scheduler;
use super::sequence::{Request, Sequence};
use crate::engine::EngineError;

/// A request that does not fit where it was to continue, and why.
pub type RefusedRequest = Box<(HandedOver, EngineError)>;

/// A request on its way to another replica's scheduler, with everything accepted so far.
#[derive(Debug)]
pub struct HandedOver {
    pub(super) id: RequestId,
    pub(super) owner: Request,
    pub(super) sequences: Vec<Sequence>,
    pub(super) shared: bool,
}

impl HandedOver {
    /// Whether it comes from a replica that keeps running: it queues behind those that have waited
    /// as it has.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// The request's id.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Most tokens that a KV cache must have room for, over all its sequences.
    #[must_use]
    pub fn tokens_needed(&self) -> u32 {
        self.sequences.iter().map(Sequence::tokens_needed).max().unwrap_or(0)
    }

    /// Most tokens that a KV cache should have room for, over all its sequences.
    #[must_use]
    pub fn tokens_wanted(&self) -> u32 {
        self.sequences.iter().map(Sequence::tokens_wanted).max().unwrap_or(0)
    }

    /// Tokens that must be free in a KV cache for its first step there.
    #[must_use]
    pub fn tokens_to_begin(&self) -> u32 {
        let longest = self.sequences.iter().map(|sequence| sequence.tokens.len()).max();
        u32::try_from(longest.unwrap_or(0)).unwrap_or(u32::MAX).saturating_add(1)
    }

    /// Whether it can end with what it has where a KV cache has no more room: its client set no
    /// bound, and something was accepted.
    #[must_use]
    pub fn may_end_by_length(&self) -> bool {
        self.sequences.iter().any(|sequence| sequence.open_ended && sequence.num_output() > 0)
    }

    /// How many places in a batch it takes.
    #[must_use]
    pub fn num_sequences(&self) -> u32 {
        u32::try_from(self.sequences.len()).unwrap_or(u32::MAX)
    }

    /// Its unfinished sequences, by their old ids.
    pub fn sequences(&self) -> impl Iterator<Item = SeqId> + '_ {
        self.sequences.iter().map(|sequence| sequence.id)
    }
}

impl Scheduler {
    /// Gives up all requests, oldest first, for another replica to continue. Only between two
    /// epochs, when no worker has anything of them.
    pub fn hand_over(&mut self) -> Vec<HandedOver> {
        if self.epoch.is_some() {
            return Vec::new();
        }
        let sequences = self.sequences.iter().flatten();
        let all = sequences.map(|sequence| sequence.request).collect();
        self.hand_over_those(&all)
    }

    /// Whether a request of this scheduler has been in a step of the present epoch.
    pub(super) fn has_run_here(&self, owner: &Request) -> bool {
        self.epoch.is_some() && owner.ran_in == self.epoch
    }

    /// Gives up to `most` of the requests that have not run in this epoch to a replica with fewer,
    /// whose KV cache has room for `room` tokens. They are chosen evenly along the queue, so that
    /// those that stay and those that go are both served in order of arrival.
    ///
    /// Those that ran elsewhere before go, too: this KV cache has nothing of them, and where a
    /// replica broke or another coordinator leads, nothing else may wait here. Those without a
    /// bound go where they would find as much room as they should, or as they have here.
    pub fn share(&mut self, most: u32, room: u32) -> Vec<HandedOver> {
        let has_run =
            |id: RequestId| self.requests.get(&id).is_none_or(|owner| self.has_run_here(owner));
        let here = self.blocks.total().saturating_mul(self.config.block_size);
        let mut fresh: Vec<RequestId> = Vec::new();
        for slot in &self.waiting {
            let Some(sequence) = &self.sequences[*slot] else { continue };
            let id = sequence.request;
            let wanted = sequence.tokens_wanted();
            let wanted = if sequence.open_ended { wanted.min(here) } else { wanted };
            let fits = wanted <= room;
            if fits && fresh.last() != Some(&id) && !has_run(id) {
                fresh.push(id);
            }
        }
        let (all, most) = (fresh.len(), (most as usize).min(fresh.len()));
        let goes = (0..most).map(|i| fresh[(i * all) / most]).collect();
        let mut handed = self.hand_over_those(&goes);
        handed.iter_mut().for_each(|request| request.shared = true);
        handed
    }

    /// Gives up those of `requests` that wait.
    pub(super) fn hand_over_those(&mut self, requests: &IdSet<RequestId>) -> Vec<HandedOver> {
        let mut handed: Vec<HandedOver> = Vec::new();
        // Index of each request in `handed`: a linear search would take minutes for a long queue.
        let mut places: IdMap<RequestId, usize> = IdMap::default();
        let leaves = |slot: &usize| {
            self.sequences[*slot].as_ref().is_none_or(|it| requests.contains(&it.request))
        };
        let (leaving, staying): (VecDeque<usize>, _) =
            self.waiting.iter().copied().partition(leaves);
        self.waiting = staying;
        for slot in leaving {
            let Some(sequence) = self.sequences[slot].take() else { continue };
            self.free_slots.push(slot);
            let id = sequence.request;
            match places.get(&id).and_then(|place| handed.get_mut(*place)) {
                Some(held) => held.sequences.push(sequence),
                None => {
                    let Some(owner) = self.forget_request(id) else { continue };
                    places.insert(id, handed.len());
                    let sequences = vec![sequence];
                    handed.push(HandedOver { id, owner, sequences, shared: false });
                }
            }
        }
        handed
    }

    /// Takes over another replica's request. It queues before those of equal priority, since it is
    /// older. A shared one queues behind those that have run before, as it has, or like a new one,
    /// since others may have waited longer. Returns the old and new ids of its sequences. Call
    /// [`Scheduler::end_outgrown`] next.
    ///
    /// # Errors
    /// The request, if it does not fit here.
    pub fn adopt(&mut self, handed: HandedOver) -> Result<Vec<(SeqId, SeqId)>, RefusedRequest> {
        let room = self.room();
        let goes_on = handed.sequences.iter().filter(|sequence| !sequence.has_outgrown(room));
        let needed = goes_on.map(Sequence::tokens_needed).max().unwrap_or(0);
        let needed = self.blocks_needed(needed);
        if self.epoch.is_some() && needed > self.blocks.total() {
            let available = self.blocks.total();
            return Err(Box::new((handed, EngineError::TooLarge { needed, available })));
        }
        let HandedOver { id, mut owner, mut sequences, shared } = handed;
        if self.epoch.is_some() {
            sequences.iter_mut().for_each(|sequence| sequence.fit(room));
        }
        owner.live.clear();
        owner.ran_in = None;
        let mut names = Vec::with_capacity(sequences.len());
        // Those put in front are put there last to first.
        if !shared {
            sequences.reverse();
        }
        for mut sequence in sequences {
            let here = SeqId(self.next_seq);
            self.next_seq += 1;
            names.push((sequence.id, here));
            sequence.id = here;
            let slot = self.store(sequence);
            match (shared, owner.scheduled) {
                (false, _) => self.wait_first(slot),
                (true, true) => self.wait_shared(slot),
                (true, false) => self.wait_last(slot),
            }
            owner.live.push(slot);
        }
        self.own(id, owner);
        Ok(names)
    }
}

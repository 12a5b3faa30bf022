//! PURE: requests on their way from a replica that cannot continue them to one that can.
use std::collections::{BTreeMap, BTreeSet};

use shared::ids::{ReplicaId, RequestId};

use super::candidates::{Candidate, Demand};
use crate::replica::driver::MovedRequest;

/// What a replica gives up from its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueShare {
    /// Maximum number of requests.
    pub most: u32,
    /// Maximum number of tokens that each should find room for: the other replica has no more.
    pub room: u32,
}

/// Where requests go.
#[derive(Debug, Default)]
pub struct Placements {
    /// By new replica, in their order.
    pub by_replica: Vec<(ReplicaId, Vec<MovedRequest>)>,
    /// Cancelled while they were on their way.
    pub cancelled: Vec<MovedRequest>,
    /// There is no replica at all.
    pub unplaced: Vec<MovedRequest>,
    /// No replica has room now or soon; with the room of the largest one.
    pub outgrown: Vec<(MovedRequest, u32)>,
}

/// Requests on their way.
#[derive(Debug, Default)]
pub struct Migrations {
    /// How many requests to give up each replica has not answered yet.
    due: BTreeMap<ReplicaId, u32>,
    /// Requests cancelled meanwhile: a replica without the request cannot cancel it.
    cancelled: BTreeSet<RequestId>,
}

impl Migrations {
    /// A replica was asked for its requests; it answers once, with none if it can continue.
    pub fn expect(&mut self, replica: ReplicaId) {
        *self.due.entry(replica).or_default() += 1;
    }

    /// Whether it has not answered yet.
    #[must_use]
    pub fn is_due(&self, replica: ReplicaId) -> bool {
        self.due.contains_key(&replica)
    }

    /// A replica's actor crashed: it will not answer any more.
    pub fn gone(&mut self, replica: ReplicaId) {
        self.due.remove(&replica);
        self.forget_cancelled();
    }

    fn forget_cancelled(&mut self) {
        if self.due.is_empty() {
            self.cancelled.clear();
        }
    }

    /// A request was cancelled; every replica is told as well.
    pub fn cancelled(&mut self, id: RequestId) {
        if !self.due.is_empty() {
            self.cancelled.insert(id);
        }
    }

    /// Places the requests that a replica answered with: on serving replicas with room, first those
    /// with room for all that they want, then those where they run at once (another one than that
    /// which has just shared them), then by queue and load; on doubtful ones only if no other has
    /// room. Requests without room on any serving replica wait where there may be room soon,
    /// preferably where they were.
    pub fn place(
        &mut self,
        from: ReplicaId,
        requests: Vec<MovedRequest>,
        candidates: impl Iterator<Item = Candidate>,
    ) -> Placements {
        if let Some(due) = self.due.get_mut(&from) {
            *due -= 1;
            if *due == 0 {
                self.due.remove(&from);
            }
        }
        let candidates: Vec<Candidate> = candidates.collect();
        let mut serving: BTreeMap<ReplicaId, (Candidate, Vec<MovedRequest>)> = candidates
            .iter()
            .filter(|candidate| candidate.serving)
            .map(|candidate| (candidate.replica, (*candidate, Vec::new())))
            .collect();
        let mut placed = Placements::default();
        let mut waiting: BTreeMap<ReplicaId, Vec<MovedRequest>> = BTreeMap::new();
        let largest = candidates.iter().map(|candidate| candidate.room).max().unwrap_or(0);
        for request in requests {
            if self.cancelled.contains(&request.id()) {
                placed.cancelled.push(request);
                continue;
            }
            let demand = Demand::from(&request);
            let (needed, shared) = (demand.needed, request.is_shared());
            let fits = serving.values_mut().filter(|(candidate, _)| candidate.room >= needed);
            let best = fits.min_by_key(|(candidate, _)| {
                let is_small = candidate.room < demand.wanted;
                let (waits, queue, load) = candidate.rank(&demand);
                let was_there = shared && candidate.replica == from && !waits;
                (candidate.doubtful, is_small, waits, was_there, queue, load)
            });
            if let Some((candidate, requests)) = best {
                candidate.take(&demand);
                requests.push(request);
                continue;
            }
            // Where it was, it may soon fit again.
            let waits = candidates
                .iter()
                .filter(|candidate| !candidate.serving && candidate.room >= needed);
            let waits =
                waits.min_by_key(|candidate| (candidate.replica != from, candidate.replica));
            match waits {
                Some(candidate) => waiting.entry(candidate.replica).or_default().push(request),
                None if candidates.is_empty() => placed.unplaced.push(request),
                None => placed.outgrown.push((request, largest)),
            }
        }
        placed.by_replica.extend(serving.into_iter().map(|(id, (_, requests))| (id, requests)));
        placed.by_replica.retain(|(_, requests)| !requests.is_empty());
        placed.by_replica.extend(waiting);
        self.forget_cancelled();
        placed
    }
}

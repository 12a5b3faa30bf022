//! PURE: which replica gets which request: new ones, those that a replica gives up, and those that
//! wait in one's queue while another could run them.
//!
//! What happens to replicas and requests goes in, [`ToReplica`] comes out: messages that the shell
//! delivers in order. Of a replica in operation this knows only what it publishes ([`ReplicaLoad`])
//! and what it answers.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use shared::ids::{Epoch, ReplicaId, RequestId, WorkerId};

use super::affinity::Affinity;
use super::candidates::{Candidate, Demand, heard, with_room};
use super::migration::{Migrations, Placements, QueueShare};
use super::sharing::shares;
use crate::engine::{EventSender, GenerateRequest};
use crate::replica::core::ReplicaLoad;
use crate::replica::driver::MovedRequest;
use crate::scheduler::EpochEnd;

/// A message to a replica.
#[derive(Debug)]
pub enum ToReplica {
    /// Run a request.
    Submit {
        /// The request.
        request: Box<GenerateRequest>,
        /// Where its events go.
        events: EventSender,
    },
    /// A request's client is gone, wherever the request is.
    Cancel(RequestId),
    /// Continue another replica's requests. A replica that does not run yet is started first.
    Adopt {
        /// Which one's.
        from: ReplicaId,
        /// The requests.
        requests: Vec<MovedRequest>,
    },
    /// Give up all requests unless an epoch is under way. It answers in any case.
    GiveUp,
    /// Give up some of those that wait. It answers.
    Share(QueueShare),
    /// The epoch is over: give up all requests. It answers.
    EpochEnded {
        /// Which.
        epoch: Epoch,
        /// Whether it was planned.
        end: EpochEnd,
    },
    /// Give up all requests, answer, and end.
    Retire,
}

/// Messages in the order in which they are delivered.
pub type Messages = Vec<(ReplicaId, ToReplica)>;

/// Given-up requests that go nowhere.
#[derive(Debug, Default)]
pub struct NotPlaced {
    /// Cancelled while they were on their way.
    pub cancelled: Vec<MovedRequest>,
    /// There is no replica at all.
    pub unplaced: Vec<MovedRequest>,
    /// No replica has room now or soon; with the room of the largest one.
    pub outgrown: Vec<(MovedRequest, u32)>,
}

/// A replica that runs, though it may not serve.
#[derive(Debug)]
struct Running {
    load: Arc<ReplicaLoad>,
    /// The epoch under way, and its ranks.
    serving: Option<(Epoch, Vec<WorkerId>)>,
    /// Tokens its KV cache has room for, or had when it last served.
    room: Option<u32>,
    /// Requests that it has not taken yet, so that its load does not show them.
    coming: VecDeque<Demand>,
    /// How many requests it was sent so far, as it counts those that it takes.
    sent: u32,
    /// How many could be given up when queues were last compared.
    shareable: u32,
    /// What it was asked for and has not answered, if the answer says something about its queue:
    /// room, and how many could be given up then.
    asked: VecDeque<(u32, u32)>,
    /// Nothing in its queue fits into so much room.
    fits_not: u32,
}

impl Running {
    /// Whether one of its ranks is in `suspects`.
    fn is_doubtful(&self, suspects: &BTreeSet<WorkerId>) -> bool {
        let ranks = self.serving.as_ref().map_or(&[][..], |(_, ranks)| ranks);
        !suspects.is_empty() && ranks.iter().any(|worker| suspects.contains(worker))
    }

    fn holds(&self, worker: WorkerId) -> bool {
        self.serving.as_ref().is_some_and(|(_, ranks)| ranks.contains(&worker))
    }

    /// Another request is on its way to it.
    fn sends(&mut self, demand: Demand) {
        self.coming.push_back(demand);
        self.sent = self.sent.wrapping_add(1);
        self.queue_changes();
    }

    /// Whatever was learned about its queue may be wrong from now on.
    fn queue_changes(&mut self) {
        self.asked.clear();
        self.fits_not = 0;
    }

    /// Forgets what it has taken by now.
    fn catch_up(&mut self) {
        let taken = self.load.taken.load(Ordering::Relaxed);
        let coming = self.sent.wrapping_sub(taken);
        // It may have been sent some before its start was known here.
        let coming = if coming > u32::MAX / 2 { 0 } else { coming as usize };
        self.sent = taken.wrapping_add(coming as u32);
        while self.coming.len() > coming {
            self.coming.pop_front();
        }
    }

    /// How many of its requests wait and could be given up: those that a step has left waiting, and
    /// those that have waited since the last comparison of queues, however long a step takes.
    fn queued(&self) -> u32 {
        let load = |of: &AtomicU32| of.load(Ordering::Relaxed);
        load(&self.load.queued).max(self.shareable.min(load(&self.load.shareable)))
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Dispatch {
    max_num_seqs: u32,
    block_size: u32,
    running: BTreeMap<ReplicaId, Running>,
    /// Workers not heard from for a while whose links are not given up yet.
    suspects: BTreeSet<WorkerId>,
    affinity: Affinity,
    migrations: Migrations,
}

impl Dispatch {
    /// No replica runs yet; each will run at most `max_num_seqs` sequences at a time, with a KV
    /// cache in blocks of `block_size` tokens.
    #[must_use]
    pub fn new(max_num_seqs: u32, block_size: u32) -> Self {
        Self {
            max_num_seqs,
            block_size,
            running: BTreeMap::new(),
            suspects: BTreeSet::new(),
            affinity: Affinity::new(max_num_seqs),
            migrations: Migrations::default(),
        }
    }

    /// A replica runs from now on, and publishes its load here.
    pub fn started(&mut self, id: ReplicaId, load: Arc<ReplicaLoad>) {
        let running = Running {
            load,
            serving: None,
            room: None,
            coming: VecDeque::new(),
            sent: 0,
            shareable: 0,
            asked: VecDeque::new(),
            fits_not: 0,
        };
        self.running.insert(id, running);
    }

    /// A running replica was told that its ranks are formed, and that its KV cache has room for
    /// `room` tokens; it answers with requests that have no room there. What waits where none
    /// serves can continue at this one.
    pub fn ready(
        &mut self,
        id: ReplicaId,
        epoch: Epoch,
        ranks: Vec<WorkerId>,
        room: u32,
        messages: &mut Messages,
    ) {
        let Some(running) = self.running.get_mut(&id) else { return };
        running.serving = Some((epoch, ranks));
        running.room = Some(room);
        running.shareable = 0;
        running.queue_changes();
        running.load.doubtful.store(running.is_doubtful(&self.suspects), Ordering::Relaxed);
        self.migrations.expect(id);
        self.update_room();
        for (id, _) in self.running.iter().filter(|(_, running)| running.serving.is_none()) {
            messages.push((*id, ToReplica::GiveUp));
            self.migrations.expect(*id);
        }
    }

    /// A replica's epoch is over.
    pub fn broke(&mut self, id: ReplicaId, epoch: Epoch, end: EpochEnd, messages: &mut Messages) {
        let Some(running) = self.running.get_mut(&id) else { return };
        running.serving = None;
        running.queue_changes();
        running.load.last_step_ms.store(0, Ordering::Relaxed);
        self.affinity.forget(id);
        messages.push((id, ToReplica::EpochEnded { epoch, end }));
        self.migrations.expect(id);
    }

    /// A replica is given up.
    pub fn removed(&mut self, id: ReplicaId, messages: &mut Messages) {
        if self.running.remove(&id).is_some() {
            self.affinity.forget(id);
            self.update_room();
            messages.push((id, ToReplica::Retire));
            self.migrations.expect(id);
        }
    }

    /// What is worth remembering of prompts depends on what all caches hold.
    fn update_room(&mut self) {
        let rooms = self.running.values().filter_map(|running| running.room);
        self.affinity.set_room(rooms.map(u64::from).sum());
    }

    /// A replica ended by a defect, with its requests. Returns the epoch in which it served.
    pub fn crashed(&mut self, id: ReplicaId) -> Option<Epoch> {
        self.affinity.forget(id);
        self.migrations.gone(id);
        let running = self.running.remove(&id)?;
        self.update_room();
        running.serving.map(|(epoch, _)| epoch)
    }

    /// A worker has been silent for a while.
    pub fn silent(&mut self, worker: WorkerId) {
        self.suspects.insert(worker);
        self.update_doubts();
    }

    /// A silent worker is heard again, or its link is over.
    pub fn not_silent(&mut self, worker: WorkerId) {
        self.suspects.remove(&worker);
        self.update_doubts();
    }

    /// Marks the replicas that have a silent rank, for readiness checks.
    fn update_doubts(&self) {
        for running in self.running.values() {
            let doubtful = running.is_doubtful(&self.suspects);
            running.load.doubtful.store(doubtful, Ordering::Relaxed);
        }
    }

    /// A request arrives.
    ///
    /// # Errors
    /// Where its events go, if no replica runs.
    pub fn submit(
        &mut self,
        request: Box<GenerateRequest>,
        events: EventSender,
        messages: &mut Messages,
    ) -> Result<(), EventSender> {
        let demand = Demand::from(&*request);
        let candidates = heard(with_room(self.candidates(), &demand));
        let (prompt, salt) = (&request.prompt, request.affinity_salt());
        let chosen = self.affinity.route(prompt, salt, &candidates, &demand);
        let Some(id) = chosen else { return Err(events) };
        if let Some(running) = self.running.get_mut(&id) {
            running.sends(demand);
        }
        messages.push((id, ToReplica::Submit { request, events }));
        Ok(())
    }

    /// A request's client is gone.
    pub fn cancel(&mut self, id: RequestId, messages: &mut Messages) {
        self.migrations.cancelled(id);
        messages.extend(self.running.keys().map(|replica| (*replica, ToReplica::Cancel(id))));
    }

    /// A replica answers with requests that it gives up. They go to one that can continue them, or
    /// that may soon: any of `known`, even if it does not run yet.
    pub fn place(
        &mut self,
        from: ReplicaId,
        requests: Vec<MovedRequest>,
        known: impl IntoIterator<Item = ReplicaId>,
        messages: &mut Messages,
    ) -> NotPlaced {
        self.heard_from(from, &requests);
        self.running.values_mut().for_each(Running::catch_up);
        let known = known.into_iter();
        let candidates: Vec<Candidate> =
            known.map(|id| self.candidate(id).unwrap_or_else(|| Candidate::unknown(id))).collect();
        let placed = self.migrations.place_or_end(from, requests, &candidates);
        let Placements { by_replica, cancelled, unplaced, outgrown } = placed;
        for (id, requests) in by_replica {
            if let Some(running) = self.running.get_mut(&id) {
                requests.iter().for_each(|request| running.sends(Demand::from(request)));
            }
            messages.push((id, ToReplica::Adopt { from, requests }));
        }
        NotPlaced { cancelled, unplaced, outgrown }
    }

    /// Notes what the answer to [`ToReplica::Share`] says about what stays in the queue: nothing
    /// that would have fitted, unless some have left it meanwhile.
    fn heard_from(&mut self, from: ReplicaId, requests: &[MovedRequest]) {
        let Some(running) = self.running.get_mut(&from) else { return };
        let Some((room, shareable)) = running.asked.pop_front() else { return };
        let left = running.load.shareable.load(Ordering::Relaxed) < shareable;
        if requests.is_empty() && !left {
            running.fits_not = running.fits_not.max(room);
        }
    }

    /// Compares queues: requests are bound to a replica on arrival, and all of a broken one go
    /// where one serves. So replicas are asked for some that wait, if they may run elsewhere.
    pub fn share_queues(&mut self, messages: &mut Messages) {
        let candidates = heard(self.candidates());
        let gives = |from: ReplicaId, room: u32| {
            let fits_not = self.running.get(&from).map_or(u32::MAX, |running| running.fits_not);
            room > fits_not && !self.migrations.is_due(from)
        };
        let shares = shares(candidates, gives);
        for running in self.running.values_mut() {
            running.shareable = running.load.shareable.load(Ordering::Relaxed);
        }
        for (from, share) in shares {
            if let Some(running) = self.running.get_mut(&from) {
                running.asked.push_back((share.room, running.shareable));
            }
            messages.push((from, ToReplica::Share(share)));
            self.migrations.expect(from);
        }
    }

    /// All caches are empty.
    pub fn forget_prefixes(&mut self) {
        self.affinity.forget_all();
    }

    fn candidates(&mut self) -> Vec<Candidate> {
        self.running.values_mut().for_each(Running::catch_up);
        self.running.keys().filter_map(|id| self.candidate(*id)).collect()
    }

    fn candidate(&self, id: ReplicaId) -> Option<Candidate> {
        let running = self.running.get(&id)?;
        let load = |of: &AtomicU32| of.load(Ordering::Relaxed);
        let sequences = load(&running.load.sequences);
        let free_tokens = load(&running.load.free_blocks).saturating_mul(self.block_size);
        let serving = running.serving.is_some();
        let mut candidate = Candidate {
            replica: id,
            serving,
            requests: load(&running.load.in_flight),
            load: sequences,
            queued: running.queued(),
            free_seqs: self.max_num_seqs.saturating_sub(sequences),
            free_tokens: if serving { free_tokens } else { u32::MAX },
            room: running.room.unwrap_or(u32::MAX),
            doubtful: running.is_doubtful(&self.suspects),
        };
        running.coming.iter().for_each(|demand| candidate.take(demand));
        Some(candidate)
    }

    /// The epoch in which a replica serves.
    #[must_use]
    pub fn epoch(&self, id: ReplicaId) -> Option<Epoch> {
        Some(self.running.get(&id)?.serving.as_ref()?.0)
    }

    /// Tokens that a replica's KV cache has room for, or had when it last served.
    #[must_use]
    pub fn room(&self, id: ReplicaId) -> Option<u32> {
        self.running.get(&id)?.room
    }

    /// What a running replica publishes.
    #[must_use]
    pub fn load(&self, id: ReplicaId) -> Option<&Arc<ReplicaLoad>> {
        Some(&self.running.get(&id)?.load)
    }

    /// Loads of the replicas that serve.
    pub fn serving(&self) -> impl Iterator<Item = &Arc<ReplicaLoad>> {
        let serves = |running: &&Running| running.serving.is_some();
        self.running.values().filter(serves).map(|running| &running.load)
    }

    /// Returns the serving replica that a worker is a rank of, most likely `last`.
    #[must_use]
    pub fn replica_of(&self, worker: WorkerId, last: Option<ReplicaId>) -> Option<ReplicaId> {
        let holds = |id: &ReplicaId| self.running.get(id).is_some_and(|it| it.holds(worker));
        last.filter(holds).or_else(|| self.running.keys().copied().find(holds))
    }
}

#[cfg(test)]
mod tests;

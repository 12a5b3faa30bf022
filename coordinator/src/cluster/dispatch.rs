//! PURE: which replica gets which request: new ones, those that a replica gives up, and those that
//! wait in one's queue while another could run them.
//!
//! What happens to replicas and requests goes in, [`ToReplica`] comes out: messages that the shell
//! delivers in order. Of a replica in operation this knows only what it publishes ([`ReplicaLoad`])
//! and what it answers.
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use shared::ids::{Epoch, ReplicaId, RequestId, WorkerId};

use super::affinity::Affinity;
use super::migration::{
    Candidate, Migrations, Placements, QueueShare, heard, queue_share, with_room,
};
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
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Dispatch {
    max_num_seqs: u32,
    running: BTreeMap<ReplicaId, Running>,
    /// Workers not heard from for a while whose links are not given up yet.
    suspects: BTreeSet<WorkerId>,
    affinity: Affinity,
    migrations: Migrations,
}

impl Dispatch {
    /// No replica runs yet; each will run at most `max_num_seqs` sequences at a time.
    #[must_use]
    pub fn new(max_num_seqs: u32) -> Self {
        Self {
            max_num_seqs,
            running: BTreeMap::new(),
            suspects: BTreeSet::new(),
            affinity: Affinity::new(max_num_seqs),
            migrations: Migrations::default(),
        }
    }

    /// A replica runs from now on, and publishes its load here.
    pub fn started(&mut self, id: ReplicaId, load: Arc<ReplicaLoad>) {
        self.running.insert(id, Running { load, serving: None, room: None });
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
        running.load.doubtful.store(running.is_doubtful(&self.suspects), Ordering::Relaxed);
        self.migrations.expect(id);
        for (id, _) in self.running.iter().filter(|(_, running)| running.serving.is_none()) {
            messages.push((*id, ToReplica::GiveUp));
            self.migrations.expect(*id);
        }
    }

    /// A replica's epoch is over.
    pub fn broke(&mut self, id: ReplicaId, epoch: Epoch, end: EpochEnd, messages: &mut Messages) {
        let Some(running) = self.running.get_mut(&id) else { return };
        running.serving = None;
        running.load.last_step_ms.store(0, Ordering::Relaxed);
        self.affinity.forget(id);
        messages.push((id, ToReplica::EpochEnded { epoch, end }));
        self.migrations.expect(id);
    }

    /// A replica is given up.
    pub fn removed(&mut self, id: ReplicaId, messages: &mut Messages) {
        if self.running.remove(&id).is_some() {
            self.affinity.forget(id);
            messages.push((id, ToReplica::Retire));
            self.migrations.expect(id);
        }
    }

    /// A replica ended by a defect, with its requests. Returns the epoch in which it served.
    pub fn crashed(&mut self, id: ReplicaId) -> Option<Epoch> {
        self.affinity.forget(id);
        self.migrations.gone(id);
        let (epoch, _) = self.running.remove(&id)?.serving?;
        Some(epoch)
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
        let candidates = self.running.keys().filter_map(|id| self.candidate(*id));
        let candidates = heard(with_room(candidates, request.tokens_needed()));
        let chosen = self.affinity.route(&request.prompt, request.affinity_salt(), &candidates);
        let Some(id) = chosen else { return Err(events) };
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
        let known = known.into_iter();
        let candidates: Vec<Candidate> =
            known.map(|id| self.candidate(id).unwrap_or_else(|| Candidate::unknown(id))).collect();
        let placed = self.migrations.place(from, requests, candidates.into_iter());
        let Placements { by_replica, cancelled, unplaced, outgrown } = placed;
        let adopt = |(id, requests)| (id, ToReplica::Adopt { from, requests });
        messages.extend(by_replica.into_iter().map(adopt));
        NotPlaced { cancelled, unplaced, outgrown }
    }

    /// Balances queues: requests are bound to a replica on arrival, and all of a broken one go
    /// where one serves. So a replica is asked for some that wait, if another has fewer.
    pub fn share_queues(&mut self, messages: &mut Messages) {
        let candidates = self.running.keys().filter_map(|id| self.candidate(*id));
        let candidates = heard(candidates.collect());
        if let Some((from, queue_share)) = queue_share(&candidates) {
            messages.push((from, ToReplica::Share(queue_share)));
            self.migrations.expect(from);
        }
    }

    /// All caches are empty.
    pub fn forget_prefixes(&mut self) {
        self.affinity.forget_all();
    }

    fn candidate(&self, id: ReplicaId) -> Option<Candidate> {
        let running = self.running.get(&id)?;
        let sequences = running.load.sequences.load(Ordering::Relaxed);
        Some(Candidate {
            replica: id,
            serving: running.serving.is_some(),
            load: running.load.in_flight.load(Ordering::Relaxed),
            shareable: running.load.shareable.load(Ordering::Relaxed),
            free_seqs: self.max_num_seqs.saturating_sub(sequences),
            room: running.room.unwrap_or(u32::MAX),
            doubtful: running.is_doubtful(&self.suspects),
        })
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

//! PURE: from the members there are to the replicas there shall be.
//!
//! One pass, in this order: too many replicas are removed; vacant ranks are filled with spares, a
//! returning worker into its own rank first; a replica whose ranks stay away is given to others or
//! goes on at a smaller degree; one at a smaller degree grows again when spares allow; spares become
//! new replicas; what is complete and due is formed.
use std::time::Duration;

use shared::ids::{ReplicaId, WorkerId};
use shared::protocol::ToWorker;

use super::replica::Replica;
use super::{Cluster, Effect, Member, place};
use crate::scheduler::EpochEnd;

impl Cluster {
    /// How many replicas there shall be at most; as many as the members allow without a bound.
    pub fn set_max_replicas(&mut self, now: Duration, max: Option<u32>, effects: &mut Vec<Effect>) {
        self.config.max_replicas = max;
        self.reconcile(now, effects);
    }

    /// How many replicas there shall be at most.
    #[must_use]
    pub fn max_replicas(&self) -> Option<u32> {
        self.config.max_replicas
    }

    /// A worker shall leave: its replica goes on without it, then it is told to end.
    ///
    /// # Errors
    /// When no replica could be kept without it, or there is no such worker.
    pub fn drain(
        &mut self,
        now: Duration,
        worker: WorkerId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), String> {
        let Some(member) = self.members.get(&worker) else {
            return Err(format!("{worker} is not a member"));
        };
        let node = member.node.clone();
        let others = self.members.values().filter(|m| !m.draining && m.worker != worker).count();
        let least = self.config.degrees.last().copied().unwrap_or(1) as usize;
        if others < least {
            return Err(format!(
                "without {node} {others} workers are left, and a replica needs {least}"
            ));
        }
        if let Some(member) = self.members.get_mut(&worker) {
            member.draining = true;
        }
        if let Some(id) = self.replica_of(worker) {
            let reason = format!("{worker} ({node}) is drained");
            self.break_replica(now, id, EpochEnd::Planned, &reason, effects);
            if let Some(replica) = self.replicas.get_mut(&id) {
                replica.vacate(now, worker);
                replica.form_at_once();
            }
        }
        let message = ToWorker::Shutdown { reason: "drained".to_owned() };
        effects.push(Effect::Send { worker, epoch: self.epoch, message });
        self.reconcile(now, effects);
        Ok(())
    }

    /// See the module's documentation.
    pub(super) fn reconcile(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        self.remove_surplus(now, effects);
        self.fill_vacancies();
        self.shrink(now, effects);
        self.grow(now, effects);
        self.add_replicas(now);
        let due: Vec<ReplicaId> = self
            .replicas
            .iter()
            .filter(|(_, replica)| replica.may_form(now))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.form(id, effects);
        }
    }

    /// Members that hold no rank and may take one.
    fn free(&self) -> Vec<&Member> {
        let holds = |member: &Member| self.replicas.values().any(|r| r.has(member.worker));
        self.members.values().filter(|member| !member.draining && !holds(member)).collect()
    }

    fn remove_surplus(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let max = self.config.max_replicas.map_or(usize::MAX, |max| max as usize);
        while self.replicas.len() > max {
            // One that does not serve first, then the youngest.
            let surplus = self
                .replicas
                .iter()
                .max_by_key(|(id, replica)| (!replica.is_serving(), **id))
                .map(|(id, _)| *id);
            let Some(id) = surplus else { return };
            self.remove(now, id, "fewer replicas are wanted", effects);
        }
    }

    fn remove(&mut self, now: Duration, id: ReplicaId, reason: &str, effects: &mut Vec<Effect>) {
        self.break_replica(now, id, EpochEnd::Planned, reason, effects);
        self.replicas.remove(&id);
        effects.push(Effect::ReplicaRemoved { replica: id });
    }

    fn fill_vacancies(&mut self) {
        let free: Vec<Member> = self.free().into_iter().cloned().collect();
        let mut free: Vec<&Member> = free.iter().collect();
        for replica in self.replicas.values_mut().filter(|replica| !replica.is_live()) {
            replica.fill(&mut free);
        }
    }

    /// Replicas whose ranks have been missing for longer than a restart takes.
    fn shrink(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let grace = self.config.reshard_after;
        let waits = |replica: &Replica| replica.incomplete_for(now).is_some_and(|t| t >= grace);
        loop {
            let waiting: Vec<ReplicaId> =
                self.replicas.iter().filter(|(_, r)| waits(r)).map(|(id, _)| *id).collect();
            let Some((id, present)) = waiting
                .iter()
                .filter_map(|id| Some((*id, self.replicas.get(id)?.ranks().len())))
                .max_by_key(|(id, present)| (*present, std::cmp::Reverse(*id)))
            else {
                return;
            };
            let fits = |degree: &&u32| **degree as usize <= present;
            if let Some(degree) = self.config.degrees.iter().find(fits).copied() {
                if let Some(replica) = self.replicas.get_mut(&id) {
                    replica.resize(now, degree as usize);
                    replica.form_at_once();
                }
                self.fill_vacancies();
                continue;
            }
            // Not one of those that wait can be formed by itself: the youngest gives its workers
            // to the others.
            let (Some(youngest), true) = (waiting.last().copied(), waiting.len() > 1) else {
                return;
            };
            self.remove(now, youngest, "its workers complete other replicas", effects);
            self.fill_vacancies();
        }
    }

    /// Replicas at a smaller degree take spares as soon as those make a larger degree whole.
    fn grow(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let ids: Vec<ReplicaId> = self.replicas.keys().copied().collect();
        for id in ids {
            let free = self.free().len();
            let Some(replica) = self.replicas.get(&id) else { continue };
            let (degree, present) = (replica.degree(), replica.ranks().len());
            let larger = self
                .config
                .degrees
                .iter()
                .map(|degree| *degree as usize)
                .find(|larger| *larger > degree && *larger <= present + free);
            let Some(larger) = larger else { continue };
            let reason = format!("it grows to {larger} ranks");
            self.break_replica(now, id, EpochEnd::Planned, &reason, effects);
            if let Some(replica) = self.replicas.get_mut(&id) {
                replica.resize(now, larger);
                replica.form_at_once();
            }
            self.fill_vacancies();
        }
    }

    fn add_replicas(&mut self, now: Duration) {
        let max = self.config.max_replicas.map_or(usize::MAX, |max| max as usize);
        let room = max.saturating_sub(self.replicas.len());
        if self.is_settling(now) {
            return;
        }
        let mut groups = self.place(self.config.tensor_parallel as usize);
        if groups.is_empty() && self.replicas.is_empty() && self.short_for(now) {
            // Better a small replica than none.
            let free = self.free();
            let fits = |degree: &&u32| **degree as usize <= free.len();
            let degree = self.config.degrees.iter().find(fits).copied();
            groups = degree.map(|degree| self.place(degree as usize)).unwrap_or_default();
            groups.truncate(1);
        }
        let next = self.next_replica;
        for (id, group) in (next..).zip(groups.into_iter().take(room)) {
            self.replicas.insert(ReplicaId(id), Replica::new(group));
            self.next_replica = id + 1;
        }
        if !self.replicas.is_empty() {
            self.short_since = None;
        }
    }

    fn place(&self, degree: usize) -> Vec<Vec<WorkerId>> {
        let held = |worker| {
            let held = self.held.get(&worker)?;
            let fits = held.model == self.config.model && held.world_size as usize == degree;
            fits.then_some(held.rank as usize)
        };
        place(&self.free(), degree, held)
    }

    /// Whether workers that were there before this coordinator may still be on their way: which
    /// ranks are given to whom is better decided when all are here.
    fn is_settling(&mut self, now: Duration) -> bool {
        let here = |node: &String| self.members.values().any(|member| member.node == *node);
        if self.expected.iter().all(here) {
            self.expected.clear();
            return false;
        }
        // From the first one's arrival on, for before it there is nothing to decide.
        let since = match (self.settling_since, self.members.is_empty()) {
            (Some(since), _) => since,
            (None, true) => return true,
            (None, false) => *self.settling_since.insert(now),
        };
        let over = now.saturating_sub(since) >= self.config.reshard_after;
        if over {
            self.expected.clear();
        }
        !over
    }

    /// Whether there have been too few workers for a whole replica for longer than joining takes.
    fn short_for(&mut self, now: Duration) -> bool {
        if self.free().is_empty() {
            self.short_since = None;
            return false;
        }
        let since = *self.short_since.get_or_insert(now);
        now.saturating_sub(since) >= self.config.reshard_after
    }
}

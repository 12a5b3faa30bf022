//! PURE: makes the replicas match the members.
//!
//! One pass, in this order: formations that went silent are given up; surplus replicas are removed;
//! vacant ranks are filled with spares, a returning worker into its own rank first; a replica whose
//! ranks stay away is dissolved into others or continues at a smaller degree, and one whose ranks
//! operators drained, or left on purpose long ago, is dissolved if there are others; slow ranks are
//! replaced by spares; a replica at a smaller degree grows again when spares allow; spares become
//! new replicas; replicas that are complete and due are formed.
use std::collections::BTreeSet;
use std::time::Duration;

use shared::ids::{ReplicaId, WorkerId};
use shared::protocol::ToWorker;

use super::absence::EXPECTED_FOR;
use super::placement::joins;
use super::replica::Replica;
use super::{Cluster, Effect, Member, PlacementRules, place};
use crate::scheduler::EpochEnd;
use shared::metrics::labels::FailoverReason;

impl Cluster {
    /// Sets the maximum number of replicas, for an operator. 0: as many as the members allow;
    /// absent: the number that this coordinator was started with.
    pub fn scale(&mut self, now: Duration, replicas: Option<u32>, effects: &mut Vec<Effect>) {
        self.desired.scale(replicas);
        self.release_held();
        self.quarantine.forgive(now);
        self.failed_formations.forget_all(now);
        self.hung_steps.forget_all(now);
        effects.push(Effect::StoreDesired(self.desired.clone()));
        self.reconcile(now, effects);
    }

    /// Releases held replicas: members or the desired state changed, so that a permanent failure
    /// may be gone.
    pub(super) fn release_held(&mut self) {
        let held = self.replicas.iter().filter(|(_, replica)| replica.is_held());
        let held: Vec<ReplicaId> = held.map(|(id, _)| id).collect();
        for id in held {
            self.replicas.change(id, Replica::release);
        }
    }

    /// Which workers go together.
    #[must_use]
    pub fn placement(&self) -> &PlacementRules {
        &self.config.placement
    }

    /// Maximum number of replicas; as many as the members allow if absent.
    #[must_use]
    pub fn max_replicas(&self) -> Option<u32> {
        match self.desired.replicas {
            Some(said) => Some(said).filter(|said| *said > 0),
            None => self.config.max_replicas,
        }
    }

    /// Drains workers, in this order: their replicas continue without them, then they are told to
    /// end.
    ///
    /// # Errors
    /// If no replica could be kept without them, or there is no such worker; then all stay.
    pub fn drain(
        &mut self,
        now: Duration,
        workers: &[WorkerId],
        effects: &mut Vec<Effect>,
    ) -> Result<(), String> {
        let found = |worker: &WorkerId| {
            self.members.get(worker).ok_or_else(|| format!("{worker} is not a member"))
        };
        let leaving: Result<Vec<&Member>, String> = workers.iter().map(found).collect();
        let leaving = leaving?;
        let rests = |m: &Member| self.quarantine.is_resting(m.device());
        let able = |m: &Member| self.config.placement.lacks(m).is_none() && !rests(m);
        let any_able = leaving.iter().any(|member| able(member));
        let stays = |m: &&Member| !m.draining && !workers.contains(&m.worker) && able(m);
        let others = self.members.values().filter(stays).count();
        let least = self.config.degrees.last().copied().unwrap_or(1) as usize;
        let named = |m: &&Member| (m.worker, m.node.clone(), m.incarnation);
        let leaving: Vec<_> = leaving.iter().map(named).collect();
        if any_able && others < least {
            let nodes: Vec<&str> = leaving.iter().map(|(_, node, _)| node.as_str()).collect();
            let nodes = nodes.join(", ");
            return Err(format!(
                "without {nodes}, {others} workers are left, but a replica needs {least}"
            ));
        }
        // None of them takes the place of another.
        for worker in workers {
            if let Some(member) = self.members.get_mut(worker) {
                member.draining = true;
            }
        }
        for (worker, node, incarnation) in leaving {
            self.desired.drain(&node, incarnation.0);
            effects.push(Effect::StoreDesired(self.desired.clone()));
            self.dismiss_worker(now, worker, &format!("{node} is drained"), false, effects);
        }
        Ok(())
    }

    /// Makes its replica continue without the worker and tells that to end; `again`: to be started
    /// again, even if it hangs.
    pub(super) fn dismiss_worker(
        &mut self,
        now: Duration,
        worker: WorkerId,
        reason: &str,
        again: bool,
        effects: &mut Vec<Effect>,
    ) {
        let mut drained = false;
        if let Some(member) = self.members.get_mut(&worker) {
            member.draining = true;
            drained = self.desired.drains(&member.node, member.incarnation.0);
            self.dismissed.insert(worker, (member.incarnation, reason.to_owned(), again));
        }
        if let Some(id) = self.replicas.of(worker) {
            self.break_replica(now, id, EpochEnd::Planned, reason, effects);
            self.replicas.change(id, |replica| {
                if drained {
                    replica.drain(now, worker);
                } else if again {
                    replica.vacate(now, worker);
                } else {
                    replica.leave(now, worker);
                }
                replica.form_at_once();
                replica.do_not_wait();
            });
        }
        let message = ToWorker::Shutdown { reason: reason.to_owned(), again };
        effects.push(Effect::Send { worker, epoch: self.epoch, message });
        self.reconcile(now, effects);
    }

    /// See the module's documentation.
    pub(super) fn reconcile(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        self.seen = self.replicas.revision();
        self.quarantine.advance(now);
        self.failed_formations.advance(now);
        self.hung_steps.advance(now);
        self.give_up_formations(now, effects);
        self.remove_surplus(now, effects);
        self.fill_vacancies();
        self.shrink(now, effects);
        self.remove_drained(now, effects);
        self.remove_abandoned(now, effects);
        self.replace_slow_ranks(now, effects);
        self.grow(now, effects);
        self.add_replicas(now);
        let due: Vec<ReplicaId> = self
            .replicas
            .iter()
            .filter(|(_, replica)| replica.may_form(now))
            .map(|(id, _)| id)
            .collect();
        for id in due {
            self.form(now, id, effects);
        }
        self.settle_loads(now, effects);
        let has_rank = |worker| self.replicas.of(worker).is_some();
        for worker in self.slow.told_no_more(now, has_rank) {
            effects.push(Effect::WorkerPace { worker, slow: false });
        }
        self.due = self.next_due(now);
    }

    /// Whether a pass may find something to do: the last one changed something, something has
    /// happened since, or a wait is over. A pass looks only at members, replicas and waits that are
    /// over, so until then it would find nothing.
    pub(super) fn is_due(&self, now: Duration) -> bool {
        self.seen != self.replicas.revision() || self.due.is_some_and(|due| now >= due)
    }

    /// Returns when the next pending wait is over.
    fn next_due(&self, now: Duration) -> Option<Duration> {
        let grace = self.config.reshard_after;
        let patience = self.config.form_timeout;
        let replicas = self.replicas.iter().flat_map(|(_, replica)| replica.waits(grace, patience));
        let joining = [self.settling_since, self.short_since].into_iter().flatten();
        replicas
            .chain(joining.map(|since| since.saturating_add(grace)))
            .chain(self.pending_answers.deadlines(patience))
            .chain(self.quarantine.ends())
            .chain(self.slow.ends())
            .chain(self.failed_formations.ends())
            .chain(self.hung_steps.ends())
            .chain(self.loads_due())
            .filter(|due| *due > now)
            .min()
    }

    /// Members that hold no rank and may take one.
    pub(super) fn free(&self) -> Vec<&Member> {
        let able = |member: &Member| self.config.placement.lacks(member).is_none();
        let holds = |member: &Member| self.replicas.of(member.worker).is_some();
        let rests = |member: &Member| self.quarantine.is_resting(member.device());
        let free = |it: &&Member| !it.draining && !holds(it) && able(it) && !rests(it);
        let mut free: Vec<&Member> = self.members.values().filter(free).collect();
        // In slot order, doubtful ones last.
        free.sort_by_key(|member| self.is_doubtful(member.worker));
        free
    }

    /// Whether others are taken before this worker: it is slow, did not answer when it was formed,
    /// its formations come to nothing, or its steps hang.
    pub(super) fn is_doubtful(&self, worker: WorkerId) -> bool {
        self.slow.contains(worker)
            || self.pending_answers.has_strikes(worker)
            || self.failed_formations.failed_often(worker)
            || self.hung_steps.failed_often(worker)
    }

    /// Whether a free worker that is not doubtful may join a replica.
    fn has_spare_for(&self, id: ReplicaId) -> bool {
        let group = self.members_of(id);
        self.free().iter().any(|it| !self.is_doubtful(it.worker) && joins(it, &group))
    }

    /// Returns those of a replica's ranks that are present.
    pub(super) fn members_of(&self, id: ReplicaId) -> Vec<Member> {
        let ranks = self.replicas.get(id).map(Replica::ranks).unwrap_or_default();
        ranks.iter().filter_map(|worker| self.members.get(worker).cloned()).collect()
    }

    /// Ends formations that do not advance. A rank that does not answer is replaced. One that does
    /// not answer again is told to end, since a new process may succeed; so is one whose step hung,
    /// if there is no other for its place.
    fn give_up_formations(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.has_stood_still(now) {
            return;
        }
        let patience = self.config.form_timeout;
        let forming: Vec<ReplicaId> =
            self.replicas.iter().filter(|(_, it)| it.is_forming()).map(|(id, _)| id).collect();
        for id in forming {
            let Some(replica) = self.replicas.get(id) else { continue };
            let since = replica.forming_since();
            let stands_still = since.is_some_and(|since| now >= since.saturating_add(patience));
            let owes = replica.unanswered();
            let is_silent = |worker: &WorkerId| {
                self.pending_answers.deadline(*worker, patience).is_some_and(|end| now >= end)
            };
            let silent: Vec<WorkerId> = owes.iter().copied().filter(is_silent).collect();
            // A rank that is at work but does not answer has lost its answer: only a new epoch
            // helps.
            let guilty = if stands_still && silent.is_empty() { owes } else { silent };
            if guilty.is_empty() {
                continue;
            }
            let names: Vec<String> = guilty.iter().map(ToString::to_string).collect();
            let waited =
                guilty.iter().map(|worker| self.pending_answers.patience(*worker, patience));
            let seconds = waited.min().unwrap_or(patience).as_secs();
            let reason = format!("nothing was heard from {} for {seconds} s", names.join(", "));
            let end = EpochEnd::Failed(FailoverReason::RankSilent);
            self.break_replica(now, id, end, &reason, effects);
            let mut again = Vec::new();
            for worker in guilty {
                let lasts = self.pending_answers.patience(worker, patience);
                effects.push(Effect::AnswerTimedOut { worker, lasts });
                let spare = self.has_spare_for(id);
                let hangs = self.pending_answers.is_hung(worker);
                if self.pending_answers.strike(worker) || hangs && !spare {
                    again.push(worker);
                } else if spare {
                    self.replicas.change(id, |replica| {
                        replica.dismiss(now, worker);
                        replica.form_at_once();
                    });
                    self.fill_vacancies();
                }
            }
            // Last: this may form the replica again, and then no one may be dismissed from it.
            for worker in again {
                let reason = format!(
                    "{} does not answer while its replica is formed",
                    self.display_name(worker)
                );
                self.dismiss_worker(now, worker, &reason, true, effects);
            }
        }
    }

    /// Replaces slow ranks with spares that are not known to be slow, if there are any.
    fn replace_slow_ranks(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        for worker in self.slow.workers() {
            let serving = |id: &ReplicaId| self.replicas.get(*id).is_some_and(Replica::is_serving);
            let Some(id) = self.replicas.of(worker).filter(serving) else { continue };
            if !self.has_spare_for(id) {
                continue;
            }
            let reason = format!("{} is slow and is replaced", self.display_name(worker));
            self.break_replica(now, id, EpochEnd::Planned, &reason, effects);
            self.replicas.change(id, |replica| {
                replica.dismiss(now, worker);
                replica.form_at_once();
            });
            self.fill_vacancies();
        }
    }

    fn remove_surplus(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let max = self.max_replicas().map_or(usize::MAX, |max| max as usize);
        while self.replicas.len() > max {
            // One that does not serve first, then the youngest.
            let surplus = self
                .replicas
                .iter()
                .max_by_key(|(_, replica)| (!replica.is_serving(), replica.creation_order()))
                .map(|(id, _)| id);
            let Some(id) = surplus else { return };
            self.remove(now, id, "fewer replicas are wanted", effects);
        }
    }

    fn remove(&mut self, now: Duration, id: ReplicaId, reason: &str, effects: &mut Vec<Effect>) {
        self.break_replica(now, id, EpochEnd::Planned, reason, effects);
        self.replicas.remove(id);
        effects.push(Effect::ReplicaRemoved { replica: id });
    }

    fn fill_vacancies(&mut self) {
        let gap = |(_, replica): &(ReplicaId, &Replica)| !replica.is_live() && replica.has_gap();
        let gaps: Vec<ReplicaId> = self.replicas.iter().filter(gap).map(|(id, _)| id).collect();
        if gaps.is_empty() {
            return;
        }
        let free: Vec<Member> = self.free().into_iter().cloned().collect();
        self.fill(&gaps, &free);
    }

    /// Moves some of these workers into the vacant ranks of some replicas.
    fn fill(&mut self, gaps: &[ReplicaId], free: &[Member]) {
        // Doubtful ones only if no other is left, however near they are.
        for doubtful in [false, true] {
            let mut free: Vec<&Member> =
                free.iter().filter(|it| self.is_doubtful(it.worker) == doubtful).collect();
            for id in gaps {
                if self.replicas.get(*id).is_none_or(|it| !it.has_gap()) {
                    continue;
                }
                if free.is_empty() {
                    break;
                }
                let present = self.members_of(*id);
                let rules = &self.config.placement;
                self.replicas.change(*id, |replica| replica.fill(&mut free, &present, rules));
            }
        }
    }

    /// Shrinks replicas whose ranks have been missing for longer than a restart takes.
    fn shrink(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let grace = self.config.reshard_after;
        let waits = |replica: &Replica| replica.incomplete_for(now).is_some_and(|t| t >= grace);
        loop {
            let waiting: Vec<ReplicaId> =
                self.replicas.iter().filter(|(_, r)| waits(r)).map(|(id, _)| id).collect();
            let Some((id, present)) = waiting
                .iter()
                .filter_map(|id| Some((*id, self.replicas.get(*id)?.ranks().len())))
                .max_by_key(|(id, present)| (*present, std::cmp::Reverse(*id)))
            else {
                return;
            };
            let fits = |degree: &&u32| **degree as usize <= present;
            if let Some(degree) = self.config.degrees.iter().find(fits).copied() {
                self.replicas.change(id, |replica| {
                    replica.resize(now, degree as usize);
                    replica.form_at_once();
                });
                self.fill_vacancies();
                continue;
            }
            // None of the waiting replicas can be formed by itself: the youngest gives its workers
            // to the others.
            let born = |id: &&ReplicaId| self.replicas.get(**id).map(Replica::creation_order);
            let (Some(youngest), true) =
                (waiting.iter().max_by_key(born).copied(), waiting.len() > 1)
            else {
                return;
            };
            self.remove(now, youngest, "its workers complete other replicas", effects);
            self.fill_vacancies();
        }
    }

    /// Removes replicas that lack ranks which operators drained, and that neither spares nor a
    /// smaller degree could repair: nobody waits for those, so such a replica is not wanted any
    /// more. Another one is made when enough workers are there again. The last one stays, as the
    /// one that is missing.
    fn remove_drained(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        while self.replicas.len() > 1 {
            let lacking = self.replicas.iter().filter(|(_, replica)| replica.lacks_drained());
            let youngest = lacking.max_by_key(|(_, replica)| replica.creation_order());
            let Some((id, _)) = youngest else { return };
            self.remove(now, id, "its workers were drained", effects);
            self.fill_vacancies();
        }
    }

    /// Removes replicas that lack nobody but ranks which left on purpose and were not back for as
    /// long as any worker is expected: an autoscaler that takes workers away says no more than
    /// that. Another one is made when enough workers are there again. The last one stays, as the
    /// one that is missing.
    fn remove_abandoned(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let long = |since: Duration| now.saturating_sub(since) >= EXPECTED_FOR;
        while self.replicas.len() > 1 {
            let is_over = |replica: &Replica| replica.abandoned_since().is_some_and(long);
            let lacking = self.replicas.iter().filter(|(_, replica)| is_over(replica));
            let youngest = lacking.max_by_key(|(_, replica)| replica.creation_order());
            let Some((id, _)) = youngest else { return };
            self.remove(now, id, "its workers left and did not come back", effects);
            self.fill_vacancies();
        }
    }

    /// Grows replicas at a smaller degree as soon as spares complete a larger one.
    fn grow(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let largest = self.config.degrees.iter().max().map_or(0, |degree| *degree as usize);
        let small = |(_, replica): &(ReplicaId, &Replica)| replica.degree() < largest;
        let ids: Vec<ReplicaId> = self.replicas.iter().filter(small).map(|(id, _)| id).collect();
        if ids.is_empty() {
            return;
        }
        let mut free = self.free_to_grow();
        for id in ids {
            let Some(replica) = self.replicas.get(id) else { continue };
            let (degree, present) = (replica.degree(), replica.ranks().len());
            if free.is_empty() {
                return;
            }
            let group = self.members_of(id);
            let alike = free.iter().filter(|it| joins(it, &group)).cloned();
            let alike: Vec<Member> = alike.collect();
            let larger = self
                .config
                .degrees
                .iter()
                .map(|degree| *degree as usize)
                .find(|larger| *larger > degree && *larger <= present + alike.len());
            let Some(larger) = larger else { continue };
            let reason = format!("it grows to {larger} ranks");
            self.break_replica(now, id, EpochEnd::Planned, &reason, effects);
            self.replicas.change(id, |replica| {
                replica.resize(now, larger);
                replica.form_at_once();
            });
            // With no one else: the ranks that it went on without are free, too.
            self.fill(&[id], &alike);
            free = self.free_to_grow();
        }
    }

    /// Free workers with which groups have not failed again and again of late.
    fn free_to_grow(&self) -> Vec<Member> {
        self.free().into_iter().filter(|it| !self.rests(it.worker)).cloned().collect()
    }

    fn add_replicas(&mut self, now: Duration) {
        let max = self.max_replicas().map_or(usize::MAX, |max| max as usize);
        let room = max.saturating_sub(self.replicas.len());
        if self.is_settling(now) {
            return;
        }
        if room == 0 && !self.replicas.is_empty() {
            self.short_since = None;
            return;
        }
        let degree = self.config.tensor_parallel as usize;
        let free = self.free().len();
        let rules = &self.config.placement;
        let most = rules.affordable(free, degree, free / degree.max(1), self.replicas.len());
        let mut groups = if most == 0 { Vec::new() } else { self.place(degree) };
        groups.truncate(most);
        if groups.is_empty() && self.replicas.is_empty() && self.is_short_of_workers(now) {
            // A small replica is better than none.
            let degrees = self.config.degrees.iter().map(|degree| *degree as usize);
            let mut placed = degrees.map(|degree| self.place(degree));
            groups = placed.find(|groups| !groups.is_empty()).unwrap_or_default();
            groups.truncate(1);
        }
        // The number of a removed replica is used again: its totals continue, and scaling down and
        // up does not create new series forever. Late messages about the old one carry its epoch.
        let taken: BTreeSet<u32> = self.replicas.iter().map(|(id, _)| id.0).collect();
        let vacant = (0u32..).filter(|id| !taken.contains(id));
        for (id, group) in vacant.zip(groups.into_iter().take(room)) {
            self.replicas.insert(ReplicaId(id), Replica::new(group));
        }
        if !self.replicas.is_empty() {
            self.short_since = None;
        }
    }

    fn place(&self, degree: usize) -> Vec<Vec<WorkerId>> {
        let held = |worker| {
            let held = self.held.get(&worker)?;
            let config = &self.config;
            let fits = held.model == config.model
                && config.identity.is_none_or(|identity| identity == held.identity)
                && held.world_size as usize == degree;
            fits.then_some(held.rank as usize)
        };
        // Doubtful workers complete what is left over.
        let placement = &self.config.placement;
        let free = self.free();
        let (slow, quick): (Vec<&Member>, Vec<&Member>) =
            free.into_iter().partition(|member| self.is_doubtful(member.worker));
        let mut groups = place(&quick, degree, placement, held);
        if !slow.is_empty() {
            let placed = |it: &&Member| groups.iter().any(|group| group.contains(&it.worker));
            let mut rest: Vec<&Member> = quick.into_iter().filter(|it| !placed(it)).collect();
            rest.extend(slow);
            groups.extend(place(&rest, degree, placement, held));
        }
        groups
    }

    /// Whether workers that were there before this coordinator may still be on their way: ranks are
    /// better assigned when all are here.
    fn is_settling(&mut self, now: Duration) -> bool {
        let here = |node: &String| self.members.values().any(|member| member.node == *node);
        if self.expected.iter().all(here) {
            self.expected.clear();
            return false;
        }
        // From the first arrival on: before it there is nothing to decide.
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
    fn is_short_of_workers(&mut self, now: Duration) -> bool {
        if self.free().is_empty() {
            self.short_since = None;
            return false;
        }
        let since = *self.short_since.get_or_insert(now);
        now.saturating_sub(since) >= self.config.reshard_after
    }
}

//! PURE: how often workers were ranks of groups that failed in one way: formations that came to
//! nothing, or steps that hung.
//!
//! Ranks that do not reach each other are of no use to one another, though the coordinator reaches
//! each of them; and where one rank hangs in a step, the others hang waiting for it. Whose fault it
//! is nobody can tell: a cable, a firewall, one host or two. So one gives way to a spare that has
//! failed less often; if that was not it, another does. Where no spare is better, the group goes on
//! with fewer ranks, if it may, and those that it goes on without rest: for a while, as long as a
//! device that fails would, they are no reason for it to grow again.
//!
//! Each worker is told its own record, and brings it to the next coordinator, which would otherwise
//! find out for itself, one failed group after the other.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shared::ids::{Incarnation, ReplicaId, WorkerId};
use shared::protocol::{FailedGroups, ToWorker, Trouble};

use super::placement::joins;
use super::quarantine::{BROUGHT_RESTS_MAX, FORGOTTEN, REST_MAX, rest_after};
use super::replica::Replica;
use super::{Cluster, Effect, Failing, Member};
use crate::scheduler::SUSPICION_MAX;

/// Maximum number of workers remembered while they are gone.
const GONE_MAX: usize = 256;

/// When failures count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// A rank gives way to a spare after so many failures: fewer may be an accident.
    pub(super) replaced_after: u32,
    /// Its group goes on with fewer ranks after so many.
    pub(super) smaller_after: u32,
    /// Failures that are further apart than this are not in a row.
    pub(super) within: Duration,
    /// What was is forgotten after a rank has served for so long, and for as long as its last rest.
    /// Zero: as soon as it serves.
    pub(super) forgotten_after: Duration,
}

/// Formations fail in seconds, but weights may load for hours before; whether a rank has served in
/// between is all that counts.
pub(super) const FORMATIONS: Patience = Patience {
    replaced_after: 2,
    smaller_after: 3,
    within: Duration::MAX,
    forgotten_after: Duration::ZERO,
};
/// More steps must hang than a request with which every step hangs can bring about before it is
/// failed for that, even if its client sends it once more.
pub(super) const HUNG_MAX: u32 = 2 * SUSPICION_MAX + 1;
/// A rank serves before each step that hangs.
pub(super) const STEPS: Patience = Patience {
    replaced_after: HUNG_MAX,
    smaller_after: HUNG_MAX,
    within: Duration::from_secs(600),
    forgotten_after: Duration::from_secs(3600),
};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct FailingRanks {
    patience: Patience,
    ranks: BTreeMap<WorkerId, Record>,
    /// When an operator had everything forgotten: workers that were away then do not know it.
    forgotten: Option<Duration>,
}

/// What a worker was last told of how groups with it, or its device, failed: failures, rests, the
/// last failure.
pub(super) type ToldGroups = (u32, u32, Duration);
/// The same of all that fails, in the order of [`Trouble`].
pub(super) type ToldTrouble = [ToldGroups; 3];

#[derive(Debug, Default)]
struct Record {
    /// In a row.
    failures: u32,
    last: Duration,
    /// How long before the beginning of time the last one was, at a coordinator that is younger.
    before: Duration,
    /// How often it has rested; each rest is longer than the one before.
    rests: u32,
    until: Option<Duration>,
    /// How long it has served since the last failure, up to the present epoch.
    served: Duration,
    /// Since when it serves.
    serves_since: Option<Duration>,
    /// The process that it was, and when its link ended.
    gone: Option<(Incarnation, Duration)>,
}

impl Record {
    /// When it is forgotten if it serves until then.
    fn forgotten_at(&self, patience: Patience) -> Option<Duration> {
        let rested = self.rests.checked_sub(1).map_or(Duration::ZERO, rest_after);
        let long = patience.forgotten_after.max(rested);
        Some(self.serves_since?.saturating_add(long.saturating_sub(self.served)))
    }

    /// How long ago it failed.
    fn ago(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last).saturating_add(self.before)
    }
}

impl FailingRanks {
    pub(super) fn new(patience: Patience) -> Self {
        Self { patience, ranks: BTreeMap::new(), forgotten: None }
    }

    /// A group of these ranks has failed.
    pub(super) fn failed(&mut self, now: Duration, ranks: &[WorkerId]) {
        self.advance(now);
        for rank in ranks {
            let record = self.ranks.entry(*rank).or_default();
            // One that a group once had to go on without has no such grace.
            let apart = record.ago(now) > self.patience.within;
            if apart && record.rests == 0 {
                record.failures = 0;
            }
            record.failures = record.failures.saturating_add(1);
            (record.last, record.before) = (now, Duration::ZERO);
            record.served = Duration::ZERO;
            record.serves_since = record.serves_since.map(|_| now);
        }
    }

    /// It serves from now on.
    pub(super) fn serves(&mut self, now: Duration, worker: WorkerId) {
        if self.patience.forgotten_after.is_zero() {
            self.ranks.remove(&worker);
        } else if let Some(record) = self.ranks.get_mut(&worker) {
            record.serves_since.get_or_insert(now);
        }
    }

    /// It no longer serves.
    pub(super) fn ends_serving(&mut self, now: Duration, worker: WorkerId) {
        if let Some(record) = self.ranks.get_mut(&worker)
            && let Some(since) = record.serves_since.take()
        {
            record.served = record.served.saturating_add(now.saturating_sub(since));
        }
    }

    /// Its link ended; its process may be back over another one, with what is the matter with it.
    pub(super) fn left(&mut self, now: Duration, worker: WorkerId, incarnation: Incarnation) {
        let Some(record) = self.ranks.get_mut(&worker) else { return };
        record.gone = Some((incarnation, now));
        let gone = self.ranks.iter().filter_map(|(id, record)| Some((record.gone?.1, *id)));
        if gone.clone().count() > GONE_MAX
            && let Some((_, longest)) = gone.min()
        {
            self.ranks.remove(&longest);
        }
    }

    /// It is here: of another process nothing is known.
    pub(super) fn joined(&mut self, worker: WorkerId, incarnation: Incarnation) {
        let Some(record) = self.ranks.get_mut(&worker) else { return };
        if record.gone.take().is_some_and(|(of, _)| of != incarnation) {
            self.ranks.remove(&worker);
        }
    }

    /// What is known of a worker, as it is told.
    fn noted(&self, now: Duration, worker: WorkerId) -> FailedGroups {
        let Some(record) = self.ranks.get(&worker) else { return FailedGroups::default() };
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        FailedGroups {
            failures: record.failures,
            last_ms: ms(record.ago(now)),
            rests: record.rests,
            rests_ms: record.until.map_or(0, |until| ms(until.saturating_sub(now))),
        }
    }

    /// What is known of a worker, as it is compared with what the worker was told.
    fn to_tell(&self, worker: WorkerId) -> ToldGroups {
        let of = |record: &Record| (record.failures, record.rests, record.last);
        self.ranks.get(&worker).map(of).unwrap_or_default()
    }

    /// A worker brings what an earlier coordinator knew of it. What is known here is newer. It is
    /// believed as far as it harms nobody else: groups go by the worst of their ranks.
    fn brought(&mut self, now: Duration, worker: WorkerId, noted: FailedGroups) {
        let FailedGroups { failures, last_ms, rests, rests_ms } = noted;
        let ago = Duration::from_millis(last_ms);
        let is_old = match rests {
            0 => failures == 0 || ago > self.patience.within,
            _ => rests_ms == 0 && ago > FORGOTTEN,
        };
        let last = now.saturating_sub(ago);
        if is_old || self.forgotten.is_some_and(|forgotten| last <= forgotten) {
            return;
        }
        let failures = failures.min(self.patience.smaller_after);
        let rests = rests.min(BROUGHT_RESTS_MAX);
        let left = Duration::from_millis(rests_ms).min(REST_MAX);
        let until = (!left.is_zero()).then(|| now.saturating_add(left));
        let before = ago.saturating_sub(now);
        let record = Record { failures, last, before, rests, until, ..Record::default() };
        self.ranks.entry(worker).or_insert(record);
    }

    /// How often it failed, in a row.
    pub(super) fn failures(&self, worker: WorkerId) -> u32 {
        self.ranks.get(&worker).map_or(0, |record| record.failures)
    }

    /// Whether it failed too often to be taken where there are others.
    pub(super) fn failed_often(&self, worker: WorkerId) -> bool {
        self.failures(worker) >= self.patience.replaced_after
    }

    /// Which of these ranks gives way to a spare: the one that failed most often, of equals the
    /// last, for rank 0's process has more to begin with.
    pub(super) fn to_replace(&self, ranks: &[WorkerId]) -> Option<WorkerId> {
        let worst = ranks.iter().copied().max_by_key(|worker| self.failures(*worker));
        worst.filter(|worker| self.failed_often(*worker))
    }

    /// Which `degree` of these ranks go on without the others: those that failed least often, of
    /// equals the first. `None` if they have not failed often enough for that.
    pub(super) fn to_keep(&self, ranks: &[WorkerId], degree: usize) -> Option<Vec<WorkerId>> {
        let most = ranks.iter().map(|worker| self.failures(*worker)).max()?;
        if most < self.patience.smaller_after {
            return None;
        }
        let mut kept = ranks.to_vec();
        kept.sort_by_key(|worker| self.failures(*worker));
        kept.truncate(degree);
        Some(kept)
    }

    /// A group goes on without these, or with others in their place, from now on.
    pub(super) fn rest(&mut self, now: Duration, dropped: &[WorkerId]) {
        let of = |worker| self.ranks.get(worker).map_or(0, |record: &Record| record.rests);
        let rests = dropped.iter().map(of).max().unwrap_or(0);
        let until = now.saturating_add(rest_after(rests));
        for worker in dropped {
            let record = self.ranks.entry(*worker).or_default();
            record.rests = rests.saturating_add(1);
            record.until = Some(until);
        }
    }

    /// Whether no group grows because of it.
    pub(super) fn is_resting(&self, worker: WorkerId) -> bool {
        self.ranks.get(&worker).is_some_and(|record| record.until.is_some())
    }

    /// Time passes.
    pub(super) fn advance(&mut self, now: Duration) {
        let patience = self.patience;
        self.ranks.retain(|_, record| record.forgotten_at(patience).is_none_or(|end| now < end));
        for record in self.ranks.values_mut() {
            record.until = record.until.filter(|until| now < *until);
        }
    }

    /// Returns when rests end, and when what was is forgotten.
    pub(super) fn ends(&self) -> impl Iterator<Item = Duration> {
        let ends = |record: &Record| [record.until, record.forgotten_at(self.patience)];
        self.ranks.values().flat_map(ends).flatten()
    }

    /// What was is forgotten.
    pub(super) fn forget_all(&mut self, now: Duration) {
        self.ranks.clear();
        self.forgotten = Some(now);
    }
}

impl Cluster {
    /// A worker that is about to join brings what an earlier coordinator knew of it.
    pub fn trouble_brought(&mut self, now: Duration, member: &Member, trouble: Trouble) {
        let (worker, incarnation) = (member.worker, member.incarnation);
        self.quarantine.brought(now, member.device(), trouble.device);
        self.failed_formations.joined(worker, incarnation);
        self.hung_steps.joined(worker, incarnation);
        self.failed_formations.brought(now, worker, trouble.formations);
        self.hung_steps.brought(now, worker, trouble.steps);
    }

    /// Tells workers what is known of them, where that has changed.
    pub(super) fn tell_trouble(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let of = [&self.failed_formations, &self.hung_steps];
        // Nearly always no device has failed, and there may be many members.
        let members = (!self.quarantine.is_empty()).then(|| self.members.values());
        let failed = members.into_iter().flatten();
        let failed = failed.filter(|it| self.quarantine.has(it.device()));
        let known = of.into_iter().flat_map(|it| it.ranks.keys()).chain(self.told.keys());
        let known = known.chain(failed.map(|it| &it.worker));
        let known: BTreeSet<WorkerId> =
            known.filter(|it| self.members.contains_key(it)).copied().collect();
        self.told.retain(|worker, _| known.contains(worker));
        for worker in known {
            let device = self.members.get(&worker).map_or("", Member::device);
            let [formations, steps] = of.map(|it| it.to_tell(worker));
            let to_tell = [formations, steps, self.quarantine.to_tell(device)];
            if self.told.get(&worker).copied().unwrap_or_default() == to_tell {
                continue;
            }
            if to_tell == ToldTrouble::default() {
                self.told.remove(&worker);
            } else {
                self.told.insert(worker, to_tell);
            }
            let [formations, steps] = of.map(|it| it.noted(now, worker));
            let device = self.quarantine.noted(now, device);
            let message = ToWorker::Remember(Trouble { formations, steps, device });
            effects.push(Effect::Send { worker, epoch: self.epoch, message });
        }
    }

    fn failing(&self, failing: Failing) -> &FailingRanks {
        match failing {
            Failing::Formations => &self.failed_formations,
            Failing::Steps => &self.hung_steps,
        }
    }

    fn failing_mut(&mut self, failing: Failing) -> &mut FailingRanks {
        match failing {
            Failing::Formations => &mut self.failed_formations,
            Failing::Steps => &mut self.hung_steps,
        }
    }

    /// A replica's groups fail in this way: one of its ranks gives way to the spare that failed
    /// least often, if there is one that failed less often than it and answers. Otherwise the
    /// replica goes on with fewer ranks, if it may. One that fails in the other way is no better;
    /// but where there is no smaller degree, a rank with which the group forms, though steps hang,
    /// is better than one with which it does not.
    pub(super) fn gives_way(
        &mut self,
        now: Duration,
        id: ReplicaId,
        failing: Failing,
        effects: &mut Vec<Effect>,
    ) {
        let ranks = self.replicas.get(id).map(Replica::ranks).unwrap_or_default();
        let Some(worker) = self.failing(failing).to_replace(&ranks) else { return };
        let failures = |worker| self.failing(failing).failures(worker);
        let mut group = self.members_of(id);
        group.retain(|member| member.worker != worker);
        let answers = |it: &Member| !self.pending_answers.has_strikes(it.worker);
        let fewer = |it: &Member| failures(it.worker) < failures(worker);
        let better = |it: &&Member| answers(it) && fewer(it) && joins(it, &group);
        let other = match failing {
            Failing::Formations => &self.hung_steps,
            Failing::Steps => &self.failed_formations,
        };
        let fails = |it: &Member| other.is_resting(it.worker) || other.failed_often(it.worker);
        let any = matches!(failing, Failing::Formations) && self.smaller_degree(id).is_none();
        let free = self.free().into_iter().filter(better);
        let free = free.filter(|it| any || !fails(it));
        let best = free.min_by_key(|it| (fails(it), failures(it.worker)));
        let Some(best) = best.cloned() else {
            return self.goes_on_with_fewer(now, id, failing, effects);
        };
        let rules = &self.config.placement;
        self.replicas.change(id, |replica| {
            replica.dismiss(now, worker);
            replica.fill(&mut vec![&best], &group, rules);
        });
        self.failing_mut(failing).rest(now, &[worker]);
        effects.push(Effect::RankReplaced { worker, to: best.worker, failing });
    }

    /// The next smaller degree than a replica's.
    fn smaller_degree(&self, id: ReplicaId) -> Option<usize> {
        let present = self.replicas.get(id)?.degree();
        let degrees = self.config.degrees.iter().map(|degree| *degree as usize);
        degrees.filter(|degree| *degree < present).max()
    }

    /// Replaces a complete group that fails by those of its ranks that failed least often: as many
    /// as the next smaller degree takes.
    fn goes_on_with_fewer(
        &mut self,
        now: Duration,
        id: ReplicaId,
        failing: Failing,
        effects: &mut Vec<Effect>,
    ) {
        let Some(replica) = self.replicas.get(id).filter(|replica| !replica.has_gap()) else {
            return;
        };
        let ranks = replica.ranks();
        let of = self.failing(failing);
        let Some(kept) = self.smaller_degree(id).and_then(|degree| of.to_keep(&ranks, degree))
        else {
            return;
        };
        let left = kept.len();
        let workers: Vec<WorkerId> =
            ranks.into_iter().filter(|worker| !kept.contains(worker)).collect();
        // Neither with them nor with those that have been tried before would it do better soon.
        let tried = self.free().into_iter().map(|it| it.worker).filter(|it| of.failed_often(*it));
        let resting: Vec<WorkerId> = tried.chain(workers.iter().copied()).collect();
        self.failing_mut(failing).rest(now, &resting);
        self.replicas.change(id, |replica| {
            workers.iter().for_each(|worker| replica.dismiss(now, *worker));
            replica.resize(now, left);
        });
        effects.push(Effect::FewerRanks { replica: id, workers, left, failing });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const W: WorkerId = WorkerId(0);

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn groups(failures: u32, ago: u64, rests: u32, rests_for: u64) -> FailedGroups {
        let (last_ms, rests_ms) = (ago * 1000, rests_for * 1000);
        FailedGroups { failures, last_ms, rests, rests_ms }
    }

    #[test]
    fn what_happened_before_a_coordinator_began_is_as_old_as_it_was() {
        let mut ranks = FailingRanks::new(STEPS);
        ranks.brought(secs(1), W, groups(3, 590, 0, 0));
        assert_eq!(ranks.noted(secs(6), W), groups(3, 595, 0, 0));
        ranks.failed(secs(5), &[W]);
        assert_eq!(ranks.noted(secs(6), W), groups(4, 1, 0, 0));
        let mut ranks = FailingRanks::new(STEPS);
        ranks.brought(secs(1), W, groups(3, 590, 0, 0));
        ranks.failed(secs(20), &[W]);
        assert_eq!(ranks.failures(W), 1, "not in a row");
    }

    #[test]
    fn what_an_operator_had_forgotten_does_not_come_back() {
        let mut ranks = FailingRanks::new(FORMATIONS);
        ranks.failed(secs(10), &[W]);
        ranks.forget_all(secs(20));
        ranks.brought(secs(30), W, groups(3, 20, 1, 580));
        assert!(ranks.failures(W) == 0 && !ranks.is_resting(W));
        ranks.brought(secs(50), W, groups(3, 20, 1, 580));
        assert!(ranks.failures(W) == 3 && ranks.is_resting(W), "it is newer");
    }

    #[test]
    fn no_worker_claims_more_than_concerns_it_alone() {
        let mut ranks = FailingRanks::new(FORMATIONS);
        ranks.brought(secs(1), W, groups(u32::MAX, 5, u32::MAX, u64::MAX / 1000));
        let told = ranks.noted(secs(1), W);
        assert_eq!((told.failures, told.rests), (FORMATIONS.smaller_after, BROUGHT_RESTS_MAX));
        assert_eq!(told.rests_ms, u64::try_from(REST_MAX.as_millis()).unwrap());
        let mut ranks = FailingRanks::new(FORMATIONS);
        ranks.brought(secs(1), W, groups(3, FORGOTTEN.as_secs() + 1, 2, 0));
        assert_eq!(ranks.failures(W), 0, "long ago");
    }

    #[test]
    fn a_new_failure_is_told_though_the_counts_are_the_same() {
        let mut ranks = FailingRanks::new(STEPS);
        ranks.failed(secs(1), &[W]);
        let told = ranks.to_tell(W);
        assert_eq!(ranks.to_tell(W), told);
        ranks.failed(secs(700), &[W]);
        assert!(ranks.failures(W) == 1 && ranks.to_tell(W) != told);
    }
}

//! How long steps take, as the coordinator could know: a step that takes much longer than all that
//! were no smaller must not go on, and no other may be ended.
use std::collections::BTreeMap;
use std::time::Duration;

use shared::ids::{Epoch, ReplicaId, StepId, WorkerId};
use shared::protocol::{StepPlan, StepResult, ToWorker};

use crate::network::LinkId;
use crate::scenario::{S, Time};
use crate::world::World;

/// As `replica::deadlines`.
const SAMPLES_MIN: usize = 16;
const FACTOR: u64 = 10;
const RAISE: u32 = 4;
/// From when a step is too late until its epoch has ended.
const NOTICED_WITHIN: Time = 2 * S;

/// What a step has to compute.
#[derive(Clone, Copy)]
struct Work {
    tokens: u64,
    pairs: u64,
    /// It says nothing of others: a draft model may have much to catch up with, or masks are waited
    /// for.
    odd: bool,
}

impl Work {
    fn of(plan: &StepPlan) -> Self {
        let counts = plan.sequences.iter().map(|it| (u64::from(it.count), u64::from(it.start)));
        Self {
            tokens: counts.clone().map(|(count, _)| count).sum(),
            pairs: counts.map(|(count, start)| count * (start + count)).sum(),
            odd: plan.sequences.iter().any(|it| it.masked || it.drafts.asked().is_some()),
        }
    }

    fn covers(&self, other: &Self) -> bool {
        !self.odd && self.tokens >= other.tokens && self.pairs >= other.pairs
    }
}

/// The steps of one epoch.
#[derive(Clone, Default)]
struct Steps {
    /// Those under way: when they were sent, and whose ranks have not finished them.
    sent: BTreeMap<StepId, (Time, Work, Vec<WorkerId>)>,
    done: Vec<Work>,
    longest: Time,
    /// Since when steps have been under way and no rank has finished one.
    still_since: Option<Time>,
}

/// What is known of a coordinator's steps.
#[derive(Clone, Default)]
pub(crate) struct Paces {
    steps: BTreeMap<Epoch, Steps>,
    /// Steps of each replica that were said to take too long.
    overdue: BTreeMap<ReplicaId, u32>,
}

impl World {
    /// A replica sends a step.
    pub(crate) fn note_sent(&mut self, replica: ReplicaId, message: &ToWorker) {
        let ToWorker::Step(plan) = message else { return };
        let Some(running) = self.coordinator.replicas.get(&replica) else { return };
        let ranks = running.links.iter().map(|(worker, _)| *worker).collect();
        let steps = self.coordinator.paces.steps.entry(plan.epoch).or_default();
        steps.sent.entry(plan.step).or_insert((self.now, Work::of(plan), ranks));
    }

    /// A rank's result reaches its replica.
    pub(crate) fn note_done(&mut self, worker: WorkerId, result: &StepResult) {
        let Some(steps) = self.coordinator.paces.steps.get_mut(&result.epoch) else { return };
        steps.still_since = None;
        let Some((sent, _, ranks)) = steps.sent.get_mut(&result.step) else { return };
        // Also if another rank never reports it: the replica goes by rank 0's result.
        steps.longest = steps.longest.max(self.now - *sent);
        ranks.retain(|rank| *rank != worker);
        if ranks.is_empty()
            && let Some((_, work, _)) = steps.sent.remove(&result.step)
        {
            steps.done.push(work);
        }
    }

    /// A step has ended its epoch. At least one rank was disturbed meanwhile, or was slow where it
    /// is known how long steps take.
    pub(crate) fn check_overdue(
        &mut self,
        replica: ReplicaId,
        ranks: &[(WorkerId, LinkId, bool)],
        reason: &str,
    ) {
        let learned = reason.contains("such steps take");
        let timeout = self.scenario.limits.step_timeout.as_micros() as Time;
        let disturbed = |(worker, link, _): &(WorkerId, LinkId, bool)| {
            let slot = self.links[*link].slot;
            self.disturbed[slot] + timeout >= self.now || learned && self.was_slow(*worker, timeout)
        };
        if !ranks.iter().any(disturbed) {
            return self.fail(format!("every step was in time, and yet: {reason}"));
        }
        if learned {
            self.report.overdue += 1;
            let before = *self.coordinator.paces.overdue.entry(replica).or_default();
            self.coordinator.paces.overdue.insert(replica, before + 1);
            let least = self.least(before).as_secs();
            let said = reason.split(' ').find_map(|word| word.parse::<u64>().ok());
            if said.is_none_or(|said| said < least) {
                self.fail(format!("a step has {least} s at least, and yet: {reason}"));
            }
        }
    }

    /// What a step is given at least, after so many that were too late.
    fn least(&self, overdue: u32) -> Duration {
        let limits = &self.scenario.limits;
        let least = limits.step_floor.saturating_mul(RAISE.saturating_pow(overdue));
        least.min(limits.step_timeout)
    }

    /// A step does not go on for long that takes much longer than steps do.
    pub(crate) fn check_paces(&mut self) {
        if !self.is_awake() {
            self.coordinator.paces.steps.values_mut().for_each(|steps| steps.still_since = None);
            return;
        }
        let timeout = self.scenario.limits.step_timeout.as_micros() as Time;
        let (dispatch, ids) = (&self.coordinator.dispatch, self.coordinator.replicas.keys());
        let serving: Vec<(ReplicaId, Epoch)> =
            ids.filter_map(|id| Some((*id, dispatch.epoch(*id)?))).collect();
        let lives = |epoch: &Epoch| serving.iter().any(|(_, it)| it == epoch);
        self.coordinator.paces.steps.retain(|epoch, _| lives(epoch));
        for (replica, epoch) in serving {
            let before = self.coordinator.paces.overdue.get(&replica).copied().unwrap_or_default();
            let least = self.least(before).as_micros() as Time;
            let (now, silent) = (self.now, self.coordinator.is_doubtful(replica));
            let Some(steps) = self.coordinator.paces.steps.get_mut(&epoch) else { continue };
            if steps.sent.is_empty() {
                continue;
            }
            if silent {
                // The silence of a rank has a limit of its own.
                steps.still_since = None;
                continue;
            }
            let since = *steps.still_since.get_or_insert(now);
            // Which of them is waited for is the replica's business.
            let known = steps.sent.values().all(|(_, work, _)| {
                !work.odd && steps.done.iter().filter(|it| it.covers(work)).count() >= SAMPLES_MIN
            });
            let (longest, limit) = (steps.longest, least.max(FACTOR * steps.longest));
            if known && limit < timeout && now > since + limit + NOTICED_WITHIN {
                let seconds = (now - since) / S;
                return self.fail(format!(
                    "{epoch} serves, and no rank has done a step for {seconds} s: none took over \
                     {longest} us"
                ));
            }
        }
    }
}

//! PURE: turns the set of live workers into replicas (tensor-parallel groups) and drives each
//! replica's life: waiting -> forming -> starting -> serving -> broken -> waiting.
//!
//! Events and the time go in, [`Effect`]s come out. Every formation has its own epoch, larger than
//! all before it. Messages of another epoch than the replica's present one are ignored, so a worker
//! that returns from a pause disturbs nothing. Only [`actor`], the shell around the core, knows
//! sockets, clocks and actors.
//!
//! - [`config`]: what a cluster is made with; [`effect`]: what the core wants done
//! - `reconcile`: from the members there are to the replicas there shall be; [`placement`]: which
//!   workers go together
//! - `formation`: how an epoch comes to be; `replica`, `replicas`: a replica's life, and who is
//!   whose rank; `pending_answers`: who was told something and has not answered;
//!   `failing_ranks`: whose formations come to nothing, or whose steps hang
//! - `adapters`: LoRA adapters, loaded and unloaded while replicas serve
//! - `quarantine`: devices that fail again and again; `slow_workers`: workers that hold others up
//! - [`roster`], `slots`: identities of workers; [`absence`]: workers expected back; [`records`]:
//!   logs and ends of worker processes
//! - [`dispatch`]: which replica gets which request; [`affinity`]: where a prompt's beginning was
//!   computed; [`candidates`]: which replica is the best; [`migration`], [`sharing`]: requests
//!   between replicas (`outgrown`: those that no cache has room for)
//! - [`view`], [`status`]: what others and operators see
pub mod absence;
pub mod actor;
mod adapters;
pub mod affinity;
pub mod candidates;
pub mod config;
pub mod dispatch;
pub mod effect;
mod failing_ranks;
mod formation;
pub mod migration;
mod outgrown;
mod pending_answers;
pub mod placement;
mod quarantine;
mod reconcile;
pub mod records;
mod replica;
mod replicas;
pub mod roster;
pub mod sharing;
mod slots;
mod slow_workers;
pub mod status;
pub mod view;

use shared::metrics::labels::FailoverReason;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use adapters::Ticket;
pub use config::{ClusterConfig, Member};
pub use effect::{Effect, Failing};
pub use placement::{PlacementRules, place};
pub use replica::{ReplicaPhase, ReplicaStatus};
use shared::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
use shared::membership::DesiredState;
use shared::protocol::{HeldShard, LoadProgress, ToWorker};

use self::adapters::Adapters;
use self::failing_ranks::{FORMATIONS, FailingRanks, STEPS, ToldTrouble};
use self::pending_answers::{PendingAnswers, hung_patience};
use self::quarantine::Quarantine;
use self::replica::Replica;
use self::replicas::Replicas;
use self::slow_workers::SlowWorkers;
use crate::scheduler::EpochEnd;

/// Time between two ticks counts as so much at most for those that are waited for: when this
/// process was stopped, or its whole host, what has come meanwhile still waits to be read.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The cluster as the coordinator sees it.
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    members: BTreeMap<WorkerId, Member>,
    replicas: Replicas,
    /// Since when there have been workers, but too few for a replica.
    short_since: Option<Duration>,
    epoch: Epoch,
    /// Processes told to end, why, and whether they are to be started again. Kept because a link
    /// may break before the process hears it.
    dismissed: BTreeMap<WorkerId, (Incarnation, String, bool)>,
    /// Workers that computed much slower than the others of their replica when last seen.
    slow: SlowWorkers,
    /// Ranks told to form that have not answered.
    pending_answers: PendingAnswers,
    failed_formations: FailingRanks,
    hung_steps: FailingRanks,
    /// What workers were told of failures.
    told: BTreeMap<WorkerId, ToldTrouble>,
    /// Devices that fail again and again.
    quarantine: Quarantine,
    /// Weights that workers brought from another coordinator.
    held: BTreeMap<WorkerId, HeldShard>,
    /// Nodes of workers that are about to join.
    expected: BTreeSet<String>,
    /// What operators asked for, of this coordinator and of earlier leaders.
    desired: DesiredState,
    adapters: Adapters,
    /// Since when some workers have been here while others were expected.
    settling_since: Option<Duration>,
    /// The replicas' revision at the start of the last pass.
    seen: u64,
    /// When a pass may find something to do although nothing has happened.
    due: Option<Duration>,
    /// The last tick.
    looked: Option<Duration>,
}

impl Cluster {
    /// Makes an empty cluster.
    #[must_use]
    pub fn new(config: ClusterConfig) -> Self {
        Self {
            adapters: Adapters::new(&config.lora, config.run),
            config,
            held: BTreeMap::new(),
            dismissed: BTreeMap::new(),
            slow: SlowWorkers::default(),
            pending_answers: PendingAnswers::default(),
            failed_formations: FailingRanks::new(FORMATIONS),
            hung_steps: FailingRanks::new(STEPS),
            told: BTreeMap::new(),
            quarantine: Quarantine::default(),
            expected: BTreeSet::new(),
            desired: DesiredState::default(),
            settling_since: None,
            members: BTreeMap::new(),
            replicas: Replicas::default(),
            short_since: None,
            epoch: Epoch(0),
            seen: 0,
            due: None,
            looked: None,
        }
    }

    /// Announces that these nodes' workers belonged to another coordinator and are about to join.
    /// The first replicas are formed when all are here, or have stayed away for as long as ranks
    /// may.
    pub fn expect(&mut self, nodes: BTreeSet<String>) {
        self.expected = nodes;
        self.due = Some(Duration::ZERO);
    }

    /// Adopts what operators told the last leader. Call it before any worker joins. Returns how
    /// many of the adapters that they loaded find no room here.
    pub fn adopt_desired(&mut self, desired: DesiredState) -> usize {
        let over = self.adapters.adopt_desired(&desired);
        self.desired = desired;
        over
    }

    /// What operators asked for, of this coordinator and of earlier leaders.
    #[must_use]
    pub fn desired(&self) -> &DesiredState {
        &self.desired
    }

    /// Notes which weights, if any, a worker that is about to join already holds.
    pub fn set_held_weights(&mut self, worker: WorkerId, shard: Option<HeldShard>) {
        match shard {
            Some(shard) => self.held.insert(worker, shard),
            None => self.held.remove(&worker),
        };
        self.due = Some(Duration::ZERO);
    }

    /// The live members.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// Returns a live member.
    #[must_use]
    pub fn member(&self, worker: WorkerId) -> Option<&Member> {
        self.members.get(&worker)
    }

    /// Name by which operators know a worker.
    fn display_name(&self, worker: WorkerId) -> String {
        self.members.get(&worker).map_or_else(|| worker.to_string(), |member| member.node.clone())
    }

    /// The replicas and their phases.
    pub fn replicas(&self) -> impl Iterator<Item = ReplicaStatus> + '_ {
        self.replicas.iter().map(|(id, replica)| replica.status(id))
    }

    /// Sum of the loading ranks' progress: (bytes done, bytes total).
    #[must_use]
    pub fn load_progress(&self) -> (u64, u64) {
        self.replicas.iter().fold((0, 0), |sum, (_, replica)| {
            let (done, total) = replica.load_progress();
            (sum.0 + done, sum.1 + total)
        })
    }

    /// A worker completed its handshake. This ends an older incarnation in the same slot.
    pub fn worker_joined(&mut self, now: Duration, member: Member, effects: &mut Vec<Effect>) {
        if let Some(old) = self.members.get(&member.worker)
            && old.incarnation != member.incarnation
        {
            let (worker, incarnation) = (old.worker, old.incarnation);
            self.worker_left(now, worker, incarnation, "it restarted", effects);
        }
        let (worker, incarnation) = (member.worker, member.incarnation);
        self.failed_formations.joined(worker, incarnation);
        self.hung_steps.joined(worker, incarnation);
        let told = self.dismissed.get(&worker).filter(|(told, ..)| *told == incarnation);
        let told = told.map(|(_, reason, again)| (reason.clone(), *again)).or_else(|| {
            // An earlier leader was told to drain it but did not inform the worker.
            let drained = self.desired.drains(&member.node, incarnation.0);
            drained.then(|| (format!("{} is drained", member.node), false))
        });
        self.members.insert(worker, member);
        self.release_held();
        match told {
            Some((reason, again)) => self.dismiss_worker(now, worker, &reason, again, effects),
            None => {
                self.dismissed.remove(&worker);
                self.reconcile(now, effects);
            }
        }
    }

    /// A worker's link ended or it said goodbye. Ignored unless it was the present incarnation.
    pub fn worker_left(
        &mut self,
        now: Duration,
        worker: WorkerId,
        incarnation: Incarnation,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        if self.members.get(&worker).is_none_or(|member| member.incarnation != incarnation) {
            return;
        }
        let node = self.members.remove(&worker).map(|member| member.node).unwrap_or_default();
        self.pending_answers.left(worker);
        // Another process of it knows nothing of its device.
        self.told.remove(&worker);
        self.failed_formations.left(now, worker, incarnation);
        self.hung_steps.left(now, worker, incarnation);
        self.release_held();
        if self.slow.forget(worker) {
            effects.push(Effect::WorkerPace { worker, slow: false });
        }
        if let Some(id) = self.replicas.of(worker) {
            let reason = format!("{node}: {reason}");
            let end = EpochEnd::Failed(FailoverReason::RankLost);
            self.break_replica(now, id, end, &reason, effects);
            self.replicas.change(id, |replica| replica.vacate(now, worker));
        }
        self.reconcile(now, effects);
    }

    /// A worker is about to end: its replica continues without it at once, and it is let go.
    pub fn worker_leaves(
        &mut self,
        now: Duration,
        worker: WorkerId,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let Some(member) = self.members.get(&worker).filter(|member| !member.draining) else {
            return;
        };
        let reason = format!("{}: {reason}", member.node);
        self.dismiss_worker(now, worker, &reason, false, effects);
    }

    /// A worker reports that its device failed; the process is about to end.
    pub fn device_failed(&mut self, now: Duration, worker: WorkerId, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.get(&worker) else { return };
        if let Some(lasts) = self.quarantine.failed(now, member.device()) {
            effects.push(Effect::Quarantined { worker, lasts });
        }
    }

    /// Whether a worker gets no rank because its device failed again and again.
    #[must_use]
    pub fn is_aside(&self, worker: WorkerId) -> bool {
        self.members.get(&worker).is_some_and(|member| self.quarantine.is_resting(member.device()))
    }

    /// Whether no replica grows because this worker is free: groups with it have failed again and
    /// again of late.
    #[must_use]
    pub fn rests(&self, worker: WorkerId) -> bool {
        self.failed_formations.is_resting(worker) || self.hung_steps.is_resting(worker)
    }

    /// Why other workers are taken before this one, in words.
    #[must_use]
    pub fn doubt(&self, worker: WorkerId) -> Option<String> {
        if self.hung_steps.failed_often(worker) {
            let times = self.hung_steps.failures(worker);
            return Some(format!("steps hung {times} times in a row while it was a rank"));
        }
        if self.failed_formations.failed_often(worker) {
            let times = self.failed_formations.failures(worker);
            return Some(format!("{times} formations in a row came to nothing with it"));
        }
        if self.pending_answers.has_strikes(worker) {
            return Some("it did not answer when its replica was formed".to_owned());
        }
        let slow = "it computed much slower than the others of its replica";
        self.slow.contains(worker).then(|| slow.to_owned())
    }

    /// A rank reports the progress of loading its weights.
    pub fn load_progressed(&mut self, now: Duration, worker: WorkerId, progress: LoadProgress) {
        let LoadProgress { epoch, adapter, bytes_done, bytes_total } = progress;
        self.pending_answers.heard(now, worker);
        // Even for a formation that is over: the next one waits until this load ends.
        if let Some(id) = self.replicas.of(worker) {
            self.replicas.change(id, |replica| replica.advanced(now));
        }
        let loading = self.replicas.in_epoch(worker, epoch, |replica| {
            if replica.is_forming() && adapter == 0 {
                replica.progress(worker, bytes_done, bytes_total);
            }
            replica.owes(worker)
        });
        if loading == Some(true) {
            self.load_heard(now, adapter);
        }
    }

    /// A rank's executor sent something that is no answer: it is at work.
    pub fn executor_heard(&mut self, now: Duration, worker: WorkerId) {
        self.pending_answers.heard(now, worker);
    }

    /// A step of this epoch takes too long that these ranks have not finished.
    pub fn ranks_hang(&mut self, now: Duration, id: ReplicaId, epoch: Epoch, workers: &[WorkerId]) {
        // Of an epoch that is over, they have been told something else since, and may have said all
        // that they have to say.
        let serves = |replica: &Replica| replica.epoch() == epoch && replica.is_serving();
        if !self.replicas.get(id).is_some_and(serves) {
            return;
        }
        let there = workers.iter().copied().filter(|worker| self.members.contains_key(worker));
        let hang: Vec<WorkerId> = there.collect();
        if hang.is_empty() {
            return;
        }
        self.mark_hung(&hang);
        self.hung_steps.failed(now, &hang);
        self.replicas.change(id, Replica::step_hung);
    }

    /// Some of these ranks hang. The others are heard as soon as they are told to leave.
    fn mark_hung(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            let is_on_gpu = self.members.get(worker).is_some_and(|it| !it.gpu.is_empty());
            let patience = hung_patience(is_on_gpu, self.config.step_timeout);
            self.pending_answers.mark_hung(*worker, patience);
        }
    }

    /// A rank reports that a step failed; the replica last finished one at `last_step`, if any in
    /// this epoch. If that is long ago, and the rank says that it has waited for another one in
    /// vain, that one's step hangs.
    pub fn step_failed(
        &mut self,
        now: Duration,
        worker: WorkerId,
        id: ReplicaId,
        epoch: Epoch,
        last_step: Option<Duration>,
        waited_in_vain: bool,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let long = self.config.collective_timeout / 2;
        if waited_in_vain
            && let Some(replica) = self.replicas.get(id)
            && replica.epoch() == epoch
            && replica.is_serving()
            && !replica.has_hung()
            && now.saturating_sub(replica.served_since().max(last_step.unwrap_or_default())) >= long
        {
            let mut ranks = replica.ranks();
            self.hung_steps.failed(now, &ranks);
            self.replicas.change(id, Replica::step_hung);
            ranks.retain(|rank| *rank != worker);
            self.mark_hung(&ranks);
        }
        let cause = match waited_in_vain {
            true => FailoverReason::StepOverdue,
            false => FailoverReason::RankFailed,
        };
        self.epoch_failed(now, id, epoch, cause, reason, effects);
    }

    /// A step failed, hung or returned wrong results: the epoch is over.
    pub fn epoch_failed(
        &mut self,
        now: Duration,
        id: ReplicaId,
        epoch: Epoch,
        cause: FailoverReason,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let Some(replica) = self.replicas.get(id).filter(|replica| replica.epoch() == epoch) else {
            return;
        };
        let hung = replica.is_serving() && replica.has_hung();
        self.break_replica(now, id, EpochEnd::Failed(cause), reason, effects);
        if hung {
            self.gives_way(now, id, Failing::Steps, effects);
        }
        self.reconcile(now, effects);
    }

    /// A rank has computed much slower than the others of its replica for a while, or has kept pace
    /// for as long. A spare takes the place of a slow rank, which becomes the last choice as a
    /// spare.
    pub fn rank_pace(
        &mut self,
        now: Duration,
        id: ReplicaId,
        epoch: Epoch,
        worker: WorkerId,
        slow: bool,
        effects: &mut Vec<Effect>,
    ) {
        let present = self.replicas.get(id).map(|replica| replica.epoch());
        if present != Some(epoch) || self.replicas.of(worker) != Some(id) {
            return;
        }
        if self.slow.seen(now, worker, slow) {
            effects.push(Effect::WorkerPace { worker, slow });
        }
        self.reconcile(now, effects);
    }

    /// A rank has answered the last thing it was told, or an earlier one.
    fn answered(&mut self, now: Duration, worker: WorkerId, the_last: bool) {
        if the_last {
            self.pending_answers.answered(worker);
        } else {
            self.pending_answers.heard(now, worker);
        }
    }

    /// Time passes: runs a pass if one is due.
    pub fn tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let passed = now.saturating_sub(self.looked.replace(now).unwrap_or(now));
        if let Some(deaf) = passed.checked_sub(LOOK_MAX).filter(|deaf| !deaf.is_zero()) {
            self.pending_answers.stood_still(now, deaf);
            // Passes before this one have given up nobody.
            self.due = Some(now);
        }
        if self.is_due(now) {
            self.reconcile(now, effects);
        }
        self.tell_trouble(now, effects);
    }

    /// Whether this process has stood still, and the next tick is to find out for how long.
    fn has_stood_still(&self, now: Duration) -> bool {
        self.looked.is_some_and(|looked| now.saturating_sub(looked) > LOOK_MAX)
    }

    /// Ends the replica's epoch: the survivors leave their collective and keep their weights.
    fn break_replica(
        &mut self,
        now: Duration,
        id: ReplicaId,
        end: EpochEnd,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let Some(replica) = self.replicas.get(id).filter(|replica| replica.is_live()) else {
            return;
        };
        let (epoch, was_ready, ranks) = (replica.epoch(), replica.is_serving(), replica.ranks());
        self.breaks(id);
        self.replicas.change(id, |replica| replica.broke(now, reason));
        for worker in ranks {
            self.hung_steps.ends_serving(now, worker);
            self.pending_answers.pause(now, worker);
            if self.members.contains_key(&worker) {
                effects.push(Effect::Send { worker, epoch, message: ToWorker::Abort { epoch } });
            }
        }
        if was_ready {
            let reason = reason.to_owned();
            effects.push(Effect::ReplicaBroken { replica: id, epoch, end, reason });
        }
    }
}

#[cfg(test)]
mod tests;

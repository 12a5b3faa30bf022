//! PURE: turns the set of live workers into replicas (tensor-parallel groups) and drives each
//! replica's life: waiting -> forming -> starting -> serving -> broken -> waiting.
//!
//! Events and the time go in, [`Effect`]s come out. Every formation has an epoch of its own, larger
//! than all before it; messages that carry another epoch than the replica's present one are ignored,
//! so a worker that returns from a pause cannot disturb anything. Nothing of that knows sockets,
//! clocks or actors but [`actor`], the shell around it.
//!
//! - [`config`]: what a cluster is made with; [`effect`]: what the core wants done
//! - `reconcile`: from the members there are to the replicas there shall be; [`placement`]: which
//!   workers go together
//! - `formation`: how an epoch comes to be; `replica`, `replicas`: a replica's life, and who is whose
//!   rank; `silence`: who was told something and has not answered
//! - `quarantine`: devices that fail again and again
//! - [`roster`], `slots`: who is who; [`absence`]: who is expected back; [`records`]: logs and ends
//! - [`affinity`]: which replica a request goes to; [`orphanage`]: requests between replicas
//! - [`view`], [`status`]: what others and operators see
pub mod absence;
pub mod actor;
pub mod affinity;
pub mod orphanage;
pub mod placement;
mod quarantine;
mod reconcile;
pub mod records;
mod replica;
mod replicas;
pub mod roster;
mod silence;
mod slots;
pub mod status;
pub mod view;

use core::net::SocketAddr;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use placement::{PlacementRules, place};
pub use replica::{ReplicaPhase, ReplicaStatus};
use shared::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
use shared::membership::Desired;
use shared::protocol::{
    CollectiveSpec, Dtype, EngineConfig, Form, FormFailed, Formed, GROUP_ID_MAX, GroupId,
    HeldShard, LoadProgress, Lora, NodeResources, Quantization, Start, Started, ToWorker,
};
use shared::wire::auth::Secret;

use self::quarantine::Quarantine;
use self::replicas::Replicas;
use self::silence::Silence;
use crate::scheduler::EpochEnd;

/// What the operator asked for.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Ranks per replica, at least 1.
    pub tensor_parallel: u32,
    /// Degrees that a replica may have, largest first; the first is `tensor_parallel`. Smaller ones
    /// are taken when ranks stay away.
    pub degrees: Vec<u32>,
    /// How long ranks may stay away before a smaller degree is taken: longer than a restart takes.
    pub reshard_after: Duration,
    /// Most replicas; as many as the members allow when absent.
    pub max_replicas: Option<u32>,
    /// The model folder, as every worker sees it.
    pub model: String,
    /// How matrix products are computed, the same on every rank of every replica.
    pub dtype: Dtype,
    /// Devices that fail again and again.
    quarantine: Quarantine,
    /// How weights are kept, likewise.
    pub quantization: Quantization,
    /// Sizes sent to every rank.
    pub engine: EngineConfig,
    /// Deadline of collective set-up and operations.
    pub collective_timeout: Duration,
    /// A formation of which nothing is heard for so long has failed: longer than collectives wait,
    /// and than the largest matrix takes to load.
    pub form_timeout: Duration,
    /// The adapters beside the model.
    pub lora: Lora,
    /// Whether workers shall measure anything.
    pub worker_stats: bool,
    /// Makes greetings of TCP collectives that cannot be guessed: drawn at random per run.
    pub collective_key: Secret,
    /// Which workers go together.
    pub placement: PlacementRules,
    /// Makes names of shared memory objects unique on a host: drawn at random per coordinator run.
    pub run: u64,
}

/// A live worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
            quarantine: Quarantine::default(),
    /// The slot, stable over restarts of the same node name.
    pub worker: WorkerId,
    /// The process run.
    pub incarnation: Incarnation,
    /// The node's name.
    pub node: String,
    /// Identifies the host.
    pub host: String,
    /// Where the worker's TCP collective listens.
    pub collective_addr: SocketAddr,
    /// It is leaving and takes no rank.
    pub draining: bool,
    /// What its node offers.
    pub offer: NodeResources,
}

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Send a message to a worker.
    Send {
        /// To whom.
        worker: WorkerId,
        /// In which epoch.
        epoch: Epoch,
        /// What.
        message: ToWorker,
    },
    /// A replica can serve.
    ReplicaReady {
        /// Which.
        replica: ReplicaId,
        /// Its epoch.
        epoch: Epoch,
        /// Its workers, in rank order.
        ranks: Vec<WorkerId>,
        /// KV blocks every rank has.
        num_blocks: u32,
        /// Those in host memory.
        host_blocks: u32,
    },
    /// A replica that was ready cannot serve any more.
    ReplicaBroken {
        /// Which.
        replica: ReplicaId,
        /// The epoch that ended.
        epoch: Epoch,
        /// Whether it was wanted.
        end: EpochEnd,
        /// Why.
        reason: String,
    },
    /// A replica is given up for good; it is not ready at this point.
    ReplicaRemoved {
        /// Which.
        replica: ReplicaId,
    },
    /// A worker computes much slower than the others of its replica, or does so no more.
    Pace {
        /// Which.
        worker: WorkerId,
        /// Whether it is slow.
        slow: bool,
    },
    /// A worker has not answered for so long when it was formed.
    Silent {
        /// Which.
        worker: WorkerId,
        /// How long at least.
        lasts: Duration,
    },
    /// Operators want this now: to be left to the next leader.
    Desire(Desired),
    /// Trying again cannot help (a corrupt model, an impossible degree).
    Unservable {
        /// Which replica.
        replica: ReplicaId,
        /// Why, in one sentence.
        reason: String,
    },
}

/// The cluster as the coordinator sees it.
#[derive(Debug)]
pub struct Cluster {
    config: ClusterConfig,
    members: BTreeMap<WorkerId, Member>,
    replicas: Replicas,
    /// Since when there have been workers, and too few for a replica.
    short_since: Option<Duration>,
    epoch: Epoch,
    /// Processes that were told to end, and why: a link that broke before they heard it changes
    /// nothing.
    let_go: BTreeMap<WorkerId, (Incarnation, String)>,
    /// Workers that computed much slower than the others of their replica when last seen to.
    slow: BTreeSet<WorkerId>,
    /// Who was told to form and has not answered.
    silence: Silence,
    /// The weights that workers brought from another coordinator.
    held: BTreeMap<WorkerId, HeldShard>,
    /// Nodes of workers that are about to join.
    expected: BTreeSet<String>,
    /// What operators said, to this coordinator and to those that led before.
    desired: Desired,
    /// Since when somebody has been here while others were expected.
    settling_since: Option<Duration>,
    /// The replicas' revision at the beginning of the last pass.
    seen: u64,
    /// When a pass may find something to do though nothing has happened.
    due: Option<Duration>,
}

impl Cluster {
    /// Makes an empty cluster.
    #[must_use]
    pub fn new(config: ClusterConfig) -> Self {
        Self {
            config,
            held: BTreeMap::new(),
            let_go: BTreeMap::new(),
            slow: BTreeSet::new(),
            silence: Silence::default(),
            expected: BTreeSet::new(),
            desired: Desired::default(),
            settling_since: None,
            members: BTreeMap::new(),
            replicas: Replicas::default(),
            short_since: None,
            epoch: Epoch(0),
            seen: 0,
            due: None,
        }
    }

    /// The workers of these nodes were another coordinator's and are about to join: the first
    /// replicas are formed when they are here, or have stayed away for as long as ranks may.
    pub fn expect(&mut self, nodes: BTreeSet<String>) {
        self.expected = nodes;
        self.due = Some(Duration::ZERO);
    }

    /// What operators told the last leader; to be said before anybody joins.
    pub fn go_by(&mut self, desired: Desired) {
        self.desired = desired;
    }

    /// What operators said, to this coordinator and to those that led before.
    #[must_use]
    pub fn desired(&self) -> &Desired {
        &self.desired
    }

    /// A worker that is about to join holds these weights already, or none.
    pub fn holds(&mut self, worker: WorkerId, shard: Option<HeldShard>) {
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

    /// A live member.
    #[must_use]
    pub fn member(&self, worker: WorkerId) -> Option<&Member> {
        self.members.get(&worker)
    }

    /// The replicas and where they are in their lives.
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

    /// A worker completed its handshake. An older incarnation of the same slot is gone by that.
    pub fn worker_joined(&mut self, now: Duration, member: Member, effects: &mut Vec<Effect>) {
        if let Some(old) = self.members.get(&member.worker)
            && old.incarnation != member.incarnation
        {
            let (worker, incarnation) = (old.worker, old.incarnation);
            self.worker_left(now, worker, incarnation, "it restarted", effects);
        }
        let (worker, incarnation) = (member.worker, member.incarnation);
        let told = self.let_go.get(&worker).filter(|(told, _)| *told == incarnation);
        let told = told.map(|(_, reason)| reason.clone()).or_else(|| {
            // The leader before this one was told so, and the worker has not heard it.
            let drained = self.desired.drains(&member.node, incarnation.0);
            drained.then(|| format!("{worker} ({}) is drained", member.node))
        });
        self.members.insert(worker, member);
        self.release_held();
        match told {
            Some(reason) => self.let_go(now, worker, &reason, effects),
            None => {
                self.let_go.remove(&worker);
                self.reconcile(now, effects);
            }
        }
    }

    /// A worker's link ended or it said goodbye. Ignored unless it is the present incarnation.
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
        self.silence.left(worker);
        self.release_held();
        if self.slow.remove(&worker) {
            effects.push(Effect::Pace { worker, slow: false });
        }
        if let Some(id) = self.replicas.of(worker) {
            let reason = format!("{worker} ({node}): {reason}");
            self.break_replica(now, id, EpochEnd::Failed, &reason, effects);
            self.replicas.change(id, |replica| replica.vacate(now, worker));
        }
        self.reconcile(now, effects);
    }

    /// A worker is about to end: its replica goes on without it at once, and it is let go.
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
        let reason = format!("{worker} ({}): {reason}", member.node);
        self.let_go(now, worker, &reason, false, effects);
    }

    /// A worker says that its device computes no more; its end is on the way.
    pub fn device_failed(&mut self, now: Duration, worker: WorkerId, effects: &mut Vec<Effect>) {
        let Some(member) = self.members.get(&worker) else { return };
        if let Some(lasts) = self.quarantine.failed(now, member.device()) {
            effects.push(Effect::SetAside { worker, lasts });
        }
    }

    /// Whether a worker gets no rank, as its device failed again and again.
    #[must_use]
    pub fn is_aside(&self, worker: WorkerId) -> bool {
        self.members.get(&worker).is_some_and(|member| self.quarantine.rests(member.device()))
    }

    /// A rank reports how far its weights are loaded.
    pub fn load_progressed(&mut self, now: Duration, worker: WorkerId, progress: LoadProgress) {
        let LoadProgress { epoch, bytes_done, bytes_total } = progress;
        self.silence.heard(now, worker);
        // Also of a formation that is over: what comes next waits behind it.
        if let Some(id) = self.replicas.of(worker) {
            self.replicas.change(id, |replica| replica.advanced(now));
        }
        self.replicas.in_epoch(worker, epoch, |replica| {
            replica.progress(worker, bytes_done, bytes_total);
        });
    }

    /// A rank's executor has said something that answers nothing: it is at work.
    pub fn executor_heard(&mut self, now: Duration, worker: WorkerId) {
        self.silence.heard(now, worker);
    }

    /// Rank 0 says what the other ranks' GPUs find its own by.
    pub fn group_id(
        &mut self,
        now: Duration,
        worker: WorkerId,
        id: GroupId,
        effects: &mut Vec<Effect>,
    ) {
        let epoch = id.epoch;
        self.silence.heard(now, worker);
        if id.bytes.len() > GROUP_ID_MAX {
            return;
        }
        let to = self.replicas.in_epoch(worker, epoch, |replica| {
            replica.advanced(now);
            replica.relay(worker)
        });
        let send = |worker| Effect::Send { worker, epoch, message: ToWorker::GroupId(id.clone()) };
        effects.extend(to.into_iter().flatten().map(send));
    }

    /// A rank holds its weights and its collective is up.
    pub fn worker_formed(
        &mut self,
        now: Duration,
        worker: WorkerId,
        formed: Formed,
        effects: &mut Vec<Effect>,
    ) {
        let epoch = formed.epoch;
        let complete = self.replicas.in_epoch(worker, epoch, |replica| {
            replica.advanced(now);
            (replica.formed(worker, &formed), replica.ranks())
        });
        self.answered(now, worker, complete.is_some());
        let Some((Some((num_blocks, host_blocks)), ranks)) = complete else { return };
        for rank in &ranks {
            self.silence.told(now, *rank);
        }
        effects.extend(ranks.into_iter().map(|worker| Effect::Send {
            worker,
            epoch,
            message: ToWorker::Start(Start { epoch, num_blocks, host_blocks }),
        }));
    }

    /// A rank could not be formed.
    pub fn form_failed(
        &mut self,
        now: Duration,
        worker: WorkerId,
        failure: &FormFailed,
        effects: &mut Vec<Effect>,
    ) {
        let Some(id) = self.replicas.of(worker) else { return };
        let is_present = self.replicas.in_epoch(worker, failure.epoch, |_| ()).is_some();
        self.answered(now, worker, is_present);
        let reason = failure.message.clone();
        if !is_present {
            // Another rank's word that it lost this one may come before the reason why.
            let broke = |it: &replica::Replica| !it.is_live() && it.epoch() == failure.epoch;
            if failure.permanent && self.replicas.get(id).is_some_and(broke) {
                let why = format!("{worker}: {reason}");
                self.replicas.change(id, |replica| replica.fails_for_good(now, why));
                effects.push(Effect::Unservable { replica: id, reason });
            }
            return;
        }
        self.break_replica(now, id, EpochEnd::Failed, &format!("{worker}: {reason}"), effects);
        if failure.permanent {
            self.replicas.change(id, |replica| replica.hold(now));
            effects.push(Effect::Unservable { replica: id, reason });
        }
    }

    /// A rank's KV cache is allocated.
    pub fn worker_started(
        &mut self,
        now: Duration,
        worker: WorkerId,
        started: Started,
        effects: &mut Vec<Effect>,
    ) {
        let Some(id) = self.replicas.of(worker) else { return };
        let epoch = started.epoch;
        let complete = self.replicas.in_epoch(worker, epoch, |replica| {
            replica.advanced(now);
            (replica.started(now, worker), replica.ranks())
        });
        self.answered(now, worker, complete.is_some());
        if let Some((Some((num_blocks, host_blocks)), ranks)) = complete {
            for rank in &ranks {
                self.silence.serves(*rank);
            }
            let ready = Effect::ReplicaReady { replica: id, epoch, ranks, num_blocks, host_blocks };
            effects.push(ready);
        }
    }

    /// A step failed, hung or came back wrong: the epoch is over.
    pub fn epoch_failed(
        &mut self,
        now: Duration,
        id: ReplicaId,
        epoch: Epoch,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        if self.replicas.get(id).is_some_and(|replica| replica.epoch() == epoch) {
            self.break_replica(now, id, EpochEnd::Failed, reason, effects);
            self.reconcile(now, effects);
        }
    }

    /// A rank has computed much slower than the others of its replica for a while, or has kept pace
    /// for as long. A spare takes the place of a slow one, which becomes the spare that is used last.
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
        let changed = if slow { self.slow.insert(worker) } else { self.slow.remove(&worker) };
        if changed {
            effects.push(Effect::Pace { worker, slow });
        }
        self.reconcile(now, effects);
    }

    /// A rank has answered what it was told last, or something before that.
    fn answered(&mut self, now: Duration, worker: WorkerId, the_last: bool) {
        if the_last {
            self.silence.answered(worker);
        } else {
            self.silence.heard(now, worker);
        }
    }

    /// Time passes: retries what is due.
    pub fn tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if self.is_due(now) {
            self.reconcile(now, effects);
        }
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
        self.replicas.change(id, |replica| replica.broke(now, reason));
        for worker in ranks {
            self.silence.pause(now, worker);
            if self.members.contains_key(&worker) {
                effects.push(Effect::Send { worker, epoch, message: ToWorker::Abort { epoch } });
            }
        }
        if was_ready {
            let reason = reason.to_owned();
            effects.push(Effect::ReplicaBroken { replica: id, epoch, end, reason });
        }
    }

    fn form(&mut self, now: Duration, id: ReplicaId, effects: &mut Vec<Effect>) {
        self.epoch.0 += 1;
        let epoch = self.epoch;
        let ranks = self.replicas.change(id, |replica| {
            replica.form(now, epoch);
            replica.ranks()
        });
        let Some(ranks) = ranks else { return };
        for rank in &ranks {
            self.silence.told(now, *rank);
        }
        let world_size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let members: Vec<&Member> =
            ranks.iter().filter_map(|worker| self.members.get(worker)).collect();
        let collective = collective_for(&members, &self.config, epoch);
        for (rank, worker) in (0u32..).zip(ranks) {
            let message = ToWorker::Form(Form {
                epoch,
                replica: id,
                rank,
                world_size,
                reduction_ranks: self.config.tensor_parallel,
                collective: collective.clone(),
                collective_timeout_ms: self.config.collective_timeout.as_millis() as u64,
                model: self.config.model.clone(),
                dtype: self.config.dtype,
                quantization: self.config.quantization,
                lora: self.config.lora.clone(),
                engine: self.config.engine.clone(),
            });
            effects.push(Effect::Send { worker, epoch, message });
        }
    }
}

/// Shared memory when all ranks are on one host, TCP otherwise.
fn collective_for(members: &[&Member], config: &ClusterConfig, epoch: Epoch) -> CollectiveSpec {
    match members {
        [] | [_] => CollectiveSpec::None,
        [first, rest @ ..] if rest.iter().all(|member| member.host == first.host) => {
            CollectiveSpec::SharedMemory { name: format!("tutti-{:016x}-{}", config.run, epoch.0) }
        }
        _ => CollectiveSpec::Tcp {
            ranks: members.iter().map(|member| member.collective_addr).collect(),
            // Who learns one epoch's knows nothing of another's.
            token: config
                .collective_key
                .number(&format!("collective {:016x} {}", config.run, epoch.0)),
        },
    }
}

#[cfg(test)]
mod tests;

//! The actix shell of the cluster core: carries out its effects and runs the replicas. Incoming
//! messages are handled in the modules.
//!
//! - `workers`: workers and their links
//! - `adapters`: LoRA adapters that operators load and unload
//! - `requests`: requests on their way
//! - `operator`: commands and questions of operators
//! - `names`: the cluster's actors by name
mod adapters;
mod names;
mod operator;
mod requests;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use actix::{Actor, Addr, AsyncContext as _, Context, Handler, Message};
use shared::actor::ActorRuntime;
use shared::actor::exchange::PeerId;
use shared::actor::link::LinkHandle;
use shared::clock::Clock;
use shared::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
use shared::membership::{DesiredState, DesiredStateSender};
use shared::protocol::{EngineConfig, ToFetch, ToWorker};
use tokio::sync::watch;

use self::adapters::Adapting;
pub use self::adapters::{ChangeAdapters, HasLeavingAdapters};
use self::names::AffectedActors;
pub use self::names::Supervised;
pub use self::operator::{Drain, GetLogs, GetStatus, ProcessEnded, ResetPrefixCache, Scale};
pub use self::requests::Command;
pub use self::workers::{Admit, JoinRefusal, Joined, NotJoined};
use super::absence::{Absences, EXPECTED_FOR};
use super::affinity::Affinity;
use super::migration::{Candidate, Migrations};
use super::records::Records;
use super::roster::{LinkNumber, Roster};
use super::view::{ClusterView, UnresponsiveNodes};
use super::{Cluster, ClusterConfig, Effect, Failing};
use crate::adapters::ServedAdapters;
use crate::engine::EngineError;
use crate::links::WorkerLink;
use crate::metrics::Hub;
use crate::metrics::observe::ReplicaConfig;
use crate::replica::actor::{
    EpochEnded, EpochFailed, EpochFormed, FailAll, GiveUpRequests, RankPace, ReplicaActor,
    ReplicaLoad, Retire,
};
use crate::scheduler::{ConfigError, EpochEnd};

/// Interval of the core's ticks.
const TICK: Duration = Duration::from_millis(50);
/// Interval at which actors are counted.
const COUNT: Duration = Duration::from_secs(1);
/// Interval at which replicas' queues are compared.
const SHARE: Duration = Duration::from_millis(500);

struct Connected {
    incarnation: Incarnation,
    number: LinkNumber,
    /// The link's id among named actors.
    peer: PeerId,
    node: String,
    host: String,
    pid: u32,
    link: LinkHandle,
    addr: WorkerLink,
    /// The replica it was a rank of when last asked; a cache.
    replica: Option<ReplicaId>,
}

struct RunningReplica {
    addr: Addr<ReplicaActor>,
    load: Arc<ReplicaLoad>,
    serving: Option<(Epoch, Vec<WorkerId>)>,
    /// Tokens its KV cache has room for, or had when it last served.
    room: Option<u32>,
}

impl RunningReplica {
    fn candidate(&self, replica: ReplicaId, doubtful: bool) -> Candidate {
        Candidate {
            replica,
            serving: self.serving.is_some(),
            load: self.load.in_flight.load(Ordering::Relaxed),
            room: self.room.unwrap_or(u32::MAX),
            doubtful,
        }
    }

    /// Whether one of its ranks is in `suspects`.
    fn is_doubtful(&self, suspects: &BTreeSet<WorkerId>) -> bool {
        let ranks = self.serving.as_ref().map_or(&[][..], |(_, ranks)| ranks);
        !suspects.is_empty() && ranks.iter().any(|worker| suspects.contains(worker))
    }
}

/// Makes the actor of a replica that the core created.
pub type ReplicaFactory = Box<
    dyn Fn(ReplicaId, Addr<ClusterActor>, Arc<ReplicaLoad>) -> Result<ReplicaActor, ConfigError>,
>;

/// See the module's documentation. Lives as long as the coordinator.
pub struct ClusterActor {
    core: Cluster,
    clock: Arc<dyn Clock>,
    roster: Roster,
    connected: BTreeMap<WorkerId, Connected>,
    replicas: BTreeMap<ReplicaId, RunningReplica>,
    make_replica: ReplicaFactory,
    hub: Arc<Hub>,
    engine: EngineConfig,
    view: watch::Sender<ClusterView>,
    /// Why no replica's actor can be made.
    broken_config: Option<String>,
    /// Workers whose links were given up for silence, until they are back.
    frozen: UnresponsiveNodes,
    tensor_parallel: u32,
    worker_stats: bool,
    /// What workers must have before they join.
    to_fetch: ToFetch,
    stopping: bool,
    migrations: Migrations,
    /// Log lines and ends of worker processes.
    records: Records,
    /// Workers that are gone and may be back.
    absences: Absences,
    /// Named actors of the whole cluster.
    actors: ActorRuntime,
    /// Nodes whose worker process is restarted when it ends, and how often in a row.
    supervised: BTreeMap<String, u32>,
    /// How often each worker came back as another process.
    restarts: BTreeMap<WorkerId, u32>,
    /// How often each replica broke while it served, planned pauses excluded.
    broken: BTreeMap<ReplicaId, u32>,
    affinity: Affinity,
    /// Workers not heard from for a while whose links are not given up yet.
    suspects: BTreeSet<WorkerId>,
    /// Whether the view has unpublished changes that are not urgent.
    unpublished: bool,
    /// Where operators' commands are left for the next leader, if there can be one.
    desires: Option<DesiredStateSender>,
    /// The adapters that requests may name, and who waits for changes of them.
    adapters: Adapting,
}

impl std::fmt::Debug for ClusterActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterActor").field("core", &self.core).finish_non_exhaustive()
    }
}

impl ClusterActor {
    /// Makes a cluster without workers; its view is published through `view`.
    #[must_use]
    pub fn new(
        config: ClusterConfig,
        clock: Arc<dyn Clock>,
        hub: Arc<Hub>,
        make_replica: ReplicaFactory,
        view: watch::Sender<ClusterView>,
        actors: ActorRuntime,
    ) -> Self {
        let (tensor_parallel, engine) = (config.tensor_parallel, config.engine.clone());
        let max_num_seqs = config.engine.max_num_seqs;
        let (worker_stats, to_fetch) =
            (config.worker_stats, config.to_fetch(&config.lora.adapters));
        Self {
            core: Cluster::new(config),
            clock,
            roster: Roster::default(),
            connected: BTreeMap::new(),
            replicas: BTreeMap::new(),
            make_replica,
            hub,
            engine,
            view,
            broken_config: None,
            frozen: UnresponsiveNodes::new(),
            tensor_parallel,
            worker_stats,
            to_fetch,
            stopping: false,
            migrations: Migrations::default(),
            records: Records::default(),
            absences: Absences::default(),
            actors,
            supervised: BTreeMap::new(),
            restarts: BTreeMap::new(),
            broken: BTreeMap::new(),
            affinity: Affinity::new(max_num_seqs),
            suspects: BTreeSet::new(),
            unpublished: false,
            desires: None,
            adapters: Adapting::default(),
        }
    }

    /// Keeps the list of adapters that requests may name up to date, from now on.
    #[must_use]
    pub fn serving_adapters(mut self, served: ServedAdapters) -> Self {
        self.adapters.serve(served);
        self.adapters_changed();
        self
    }

    /// Expects workers that are about to join, see [`Cluster::expect`].
    #[must_use]
    pub fn expecting(mut self, nodes: BTreeSet<String>) -> Self {
        self.core.expect(nodes);
        self
    }

    /// With several coordinators: adopts what operators told the last leader, and leaves what they
    /// say to the next one.
    #[must_use]
    pub fn desiring(mut self, desired: Option<DesiredState>, desires: DesiredStateSender) -> Self {
        if let Some(desired) = desired {
            // Written again so that an etcd that lost its data has it, too.
            desires.send_replace(Some(desired.clone()));
            let over = self.core.adopt_desired(desired);
            if over > 0 {
                tracing::error!(
                    adapters = over,
                    "operators loaded more adapters than --max-loras has room for here: the last \
                     ones are not served"
                );
            }
        }
        self.desires = Some(desires);
        self
    }

    /// Carries out the core's effects, then publishes the view; without effects, the next tick
    /// publishes it.
    fn carry_out(&mut self, ctx: &mut Context<Self>, effects: Vec<Effect>) {
        if effects.is_empty() {
            self.unpublished = true;
            return;
        }
        let affected = AffectedActors::of(&effects);
        for effect in effects {
            match effect {
                Effect::Send { worker, epoch, message } => self.send(worker, epoch, &message),
                Effect::ReplicaReady {
                    replica,
                    epoch,
                    ranks,
                    num_blocks,
                    host_blocks,
                    step_tokens,
                } => {
                    let sizes = (num_blocks, host_blocks, step_tokens);
                    self.replica_ready(ctx, replica, epoch, ranks, sizes);
                }
                Effect::ReplicaBroken { replica, epoch, end, reason } => {
                    if end == EpochEnd::Failed {
                        *self.broken.entry(replica).or_default() += 1;
                    }
                    if self.stopping || end == EpochEnd::Planned {
                        tracing::info!(%replica, %epoch, %reason, "the replica pauses");
                    } else {
                        tracing::warn!(%replica, %epoch, %reason, "the replica broke");
                    }
                    if let Some(running) = self.replicas.get_mut(&replica) {
                        running.serving = None;
                        self.affinity.forget(replica);
                        running.load.last_step_ms.store(0, Ordering::Relaxed);
                        running.addr.do_send(EpochEnded { epoch, end });
                        self.migrations.expect(replica);
                    }
                }
                Effect::ReplicaRemoved { replica } => {
                    tracing::info!(%replica, "the replica is given up");
                    self.hub.observer().record().replica_removed(replica);
                    self.replica_died(replica);
                    self.broken.remove(&replica);
                    if let Some(running) = self.replicas.remove(&replica) {
                        // Its requests arrive by themselves; the actor ends with its last address.
                        running.addr.do_send(Retire);
                        self.migrations.expect(replica);
                    }
                }
                Effect::WorkerPace { worker, slow } => {
                    self.hub.observer().record().rank_slow(worker, slow);
                }
                Effect::AnswerTimedOut { worker, lasts } => {
                    let (node, seconds) = (self.node_of(worker), lasts.as_secs());
                    tracing::warn!(
                        worker = node,
                        slot = worker.0,
                        seconds,
                        "the worker did not answer while its replica was formed"
                    );
                }
                Effect::RankReplaced { worker, to, failing } => {
                    tracing::warn!(
                        worker = self.node_of(worker),
                        slot = worker.0,
                        to = self.node_of(to),
                        "{}: a spare takes the worker's rank",
                        complaint(failing)
                    );
                }
                Effect::FewerRanks { replica, workers, left, failing } => {
                    let without: Vec<&str> = workers.iter().map(|it| self.node_of(*it)).collect();
                    tracing::warn!(
                        %replica,
                        ranks = left,
                        ?without,
                        "{}: it goes on with fewer ranks; `tutti scale` tries all again at once",
                        complaint(failing)
                    );
                }
                Effect::Quarantined { worker, lasts } => {
                    let member = self.core.member(worker);
                    let node = member.map_or("", |member| member.node.as_str());
                    let device = member.map_or("", |member| member.device());
                    tracing::error!(
                        worker = node,
                        slot = worker.0,
                        device,
                        ?lasts,
                        "the device failed repeatedly: its worker gets no rank for a while; `tutti \
                         scale` tries it again at once"
                    );
                }
                Effect::Adapters => self.adapters_changed(),
                Effect::AdapterChanged { ticket, outcome } => self.adapter_changed(ticket, outcome),
                Effect::StoreDesired(desired) => {
                    if let Some(desires) = &self.desires {
                        desires.send_replace(Some(desired));
                    }
                }
                Effect::Unservable { replica, reason } => {
                    tracing::error!(
                        %replica, %reason,
                        "the replica cannot be formed; trying again when workers or replicas \
                         change, otherwise after a minute or more"
                    );
                }
            }
        }
        self.report_affected(&affected);
        self.publish();
    }

    fn send(&self, worker: WorkerId, epoch: Epoch, message: &ToWorker) {
        if let Some(connected) = self.connected.get(&worker)
            && let Err(error) = connected.addr.tell(epoch, message)
        {
            tracing::warn!(worker = connected.node, slot = worker.0, %error, "message to the worker lost");
        }
    }

    fn replica_ready(
        &mut self,
        ctx: &mut Context<Self>,
        id: ReplicaId,
        epoch: Epoch,
        ranks: Vec<WorkerId>,
        (num_blocks, host_blocks, step_tokens): (u32, u32, u32),
    ) {
        let links: Vec<WorkerLink> = ranks
            .iter()
            .filter_map(|worker| self.connected.get(worker))
            .map(|connected| connected.addr.clone())
            .collect();
        if links.len() != ranks.len() {
            // A rank left just now; its end is on the way.
            return;
        }
        tracing::info!(
            replica = %id, %epoch, ranks = ranks.len(), kv_blocks = num_blocks, host_blocks,
            step_tokens, "serving"
        );
        let tokens = u64::from(num_blocks) * u64::from(self.engine.block_size);
        let max = self.engine.max_model_len;
        if tokens < u64::from(max) {
            tracing::warn!(
                replica = %id,
                "the KV cache holds {tokens} tokens, but --max-model-len is {max}: requests for \
                 more are refused, those without max_tokens end there; give more \
                 --kv-cache-memory, or set --max-model-len {tokens}"
            );
        }
        let tensor_parallel = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let engine = EngineConfig { max_num_batched_tokens: step_tokens, ..self.engine.clone() };
        let config = ReplicaConfig { engine, num_blocks, host_blocks, tensor_parallel };
        self.hub.observer().record().replica_ready(id, &config);
        self.start_replica(ctx, id);
        let Some(running) = self.replicas.get_mut(&id) else { return };
        running.addr.do_send(EpochFormed {
            epoch,
            num_blocks,
            host_blocks,
            step_tokens,
            ranks: links,
            workers: ranks.clone(),
        });
        self.migrations.expect(id);
        running.serving = Some((epoch, ranks));
        running.load.doubtful.store(running.is_doubtful(&self.suspects), Ordering::Relaxed);
        running.room = Some(u32::try_from(tokens).unwrap_or(u32::MAX));
        // Requests waiting at replicas that cannot continue can continue here.
        for (id, running) in &self.replicas {
            if running.serving.is_none() {
                running.addr.do_send(GiveUpRequests);
                self.migrations.expect(*id);
            }
        }
    }

    /// Starts a replica's actor, unless it is running.
    fn start_replica(&mut self, ctx: &mut Context<Self>, id: ReplicaId) {
        if self.replicas.contains_key(&id) {
            return;
        }
        let load = Arc::new(ReplicaLoad::default());
        match (self.make_replica)(id, ctx.address(), load.clone()) {
            Ok(actor) => {
                let addr = actor.start();
                self.replicas.insert(id, RunningReplica { addr, load, serving: None, room: None });
                self.broken_config = None;
            }
            Err(error) => self.broken_config = Some(error.to_string()),
        }
    }

    /// Notices actors that panicked. Their requests are gone, and the clients see them end. Their
    /// ranks are formed again for a new actor.
    fn detect_crashed_replicas(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let gone: Vec<ReplicaId> = self
            .replicas
            .iter()
            .filter(|(_, running)| !running.addr.connected())
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            tracing::error!(replica = %id, "the replica's actor ended; restarting it");
            self.affinity.forget(id);
            self.migrations.gone(id);
            let serving = self.replicas.remove(&id).and_then(|running| running.serving);
            if let Some((epoch, _)) = serving {
                self.core.epoch_failed(now, id, epoch, "its actor has ended", effects);
            }
        }
    }

    fn count_set_aside(&self) {
        let mut recording = self.hub.observer().record();
        for worker in self.connected.keys() {
            recording.device_set_aside(*worker, self.core.is_aside(*worker));
        }
    }

    fn publish(&mut self) {
        self.unpublished = false;
        let workers: Vec<(WorkerId, String, u32)> = self
            .connected
            .iter()
            .map(|(id, connected)| (*id, connected.node.clone(), connected.pid))
            .collect();
        let view = ClusterView {
            workers,
            replicas: self.core.replicas().collect(),
            serving: self
                .replicas
                .values()
                .filter(|running| running.serving.is_some())
                .map(|running| running.load.clone())
                .collect(),
            load: self.core.load_progress(),
            broken: self.broken_config.clone(),
            frozen: self.frozen.clone(),
        };
        self.view.send_replace(view);
    }
}

impl Actor for ClusterActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(4096);
        ctx.run_interval(TICK, |actor, ctx| {
            let (now, mut effects) = (actor.clock.now(), Vec::new());
            for worker in actor.absences.given_up(now) {
                let node = actor.node_of(worker);
                tracing::info!(
                    worker = node,
                    slot = worker.0,
                    "the worker is not expected back: its series end, its totals stay"
                );
                actor.hub.observer().record().worker_gone(worker);
                actor.worker_given_up(worker);
                if let Some(node) = actor.roster.node_of(worker) {
                    actor.frozen.remove(node);
                }
                actor.roster.given_up(worker);
            }
            actor.detect_crashed_replicas(now, &mut effects);
            actor.hub.observer().record().forget_frontends(now, EXPECTED_FOR);
            actor.core.tick(now, &mut effects);
            if !effects.is_empty() {
                actor.carry_out(ctx, effects);
            }
            // Only now is it known who uses the adapters that this tick took off the list.
            let mut freed = Vec::new();
            actor.free_adapters(now, &mut freed);
            if !freed.is_empty() {
                actor.carry_out(ctx, freed);
            }
            if actor.unpublished {
                actor.publish();
            }
        });
        // Actors of applications change independently of the cluster.
        ctx.run_interval(COUNT, |actor, _| {
            actor.report_actors();
            actor.count_set_aside();
        });
        ctx.run_interval(SHARE, |actor, _| actor.share_queues());
        self.publish();
    }
}

/// What is wrong with a replica's groups, and where to look.
fn complaint(failing: Failing) -> &'static str {
    match failing {
        Failing::Formations => {
            "the replica's formations come to nothing (look whether its ranks reach each other)"
        }
        Failing::Steps => "the replica's steps hang again and again",
    }
}

/// Stop: fail all requests and tell the workers to end.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Stop {
    /// Why, for the workers' logs.
    pub reason: String,
    /// Whether workers end, too; otherwise those on other hosts keep dialling.
    pub workers_too: bool,
}

impl Handler<EpochFailed> for ClusterActor {
    type Result = ();

    fn handle(&mut self, failed: EpochFailed, ctx: &mut Self::Context) {
        let mut effects = Vec::new();
        let EpochFailed { replica, epoch, reason, hung } = failed;
        let now = self.clock.now();
        self.core.ranks_hang(now, replica, epoch, &hung);
        self.core.epoch_failed(now, replica, epoch, &reason, &mut effects);
        self.carry_out(ctx, effects);
    }
}

impl Handler<RankPace> for ClusterActor {
    type Result = ();

    fn handle(&mut self, pace: RankPace, ctx: &mut Self::Context) {
        let RankPace { replica, epoch, worker, slow, times } = pace;
        let (node, slot) = (self.node_of(worker), worker.0);
        if slow {
            tracing::warn!(
                worker = node, slot, %replica,
                "the worker takes {times:.1} times as long as the others"
            );
        } else {
            tracing::debug!(worker = node, slot, %replica, "the worker keeps up again");
        }
        let mut effects = Vec::new();
        self.core.rank_pace(self.clock.now(), replica, epoch, worker, slow, &mut effects);
        self.carry_out(ctx, effects);
    }
}

impl Handler<Stop> for ClusterActor {
    type Result = ();

    fn handle(&mut self, stop: Stop, _ctx: &mut Self::Context) {
        self.stopping = true;
        for running in self.replicas.values() {
            running.addr.do_send(FailAll(EngineError::ShuttingDown));
        }
        if stop.workers_too {
            let message = ToWorker::Shutdown { reason: stop.reason, again: false };
            for connected in self.connected.values() {
                let _ = connected.addr.tell(Epoch(0), &message);
            }
        }
    }
}

#[cfg(test)]
mod tests;

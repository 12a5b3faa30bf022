//! The actix shell of the cluster core: carries out its effects and runs the replicas. Incoming
//! messages are handled in the modules.
//!
//! - `effects`: what the core wants done
//! - `workers`: workers and their links
//! - `adapters`: LoRA adapters that operators load and unload
//! - `requests`: requests on their way
//! - `operator`: commands and questions of operators
//! - `names`: the cluster's actors by name
mod adapters;
mod effects;
mod names;
mod operator;
mod requests;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
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
pub use self::names::Supervised;
pub use self::operator::{Drain, GetLogs, GetStatus, ProcessEnded, ResetPrefixCache, Scale};
pub use self::requests::Command;
pub use self::workers::{Admit, JoinRefusal, Joined, NotJoined};
use super::absence::{Absences, EXPECTED_FOR};
use super::dispatch::Dispatch;
use super::records::Records;
use super::roster::{LinkNumber, Roster};
use super::view::{ClusterView, UnresponsiveNodes};
use super::{Cluster, ClusterConfig};
use crate::adapters::ServedAdapters;
use crate::engine::EngineError;
use crate::links::WorkerLink;
use crate::metrics::Hub;
use crate::replica::actor::{EpochFailed, FailAll, RankPace, ReplicaActor, ReplicaLoad};
use crate::scheduler::ConfigError;

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
    /// The replicas that run.
    replicas: BTreeMap<ReplicaId, Addr<ReplicaActor>>,
    /// Which of them gets which request.
    dispatch: Dispatch,
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
        let dispatch = Dispatch::new(config.engine.max_num_seqs, config.engine.block_size);
        let (worker_stats, to_fetch) =
            (config.worker_stats, config.to_fetch(&config.lora.adapters));
        Self {
            core: Cluster::new(config),
            clock,
            roster: Roster::default(),
            connected: BTreeMap::new(),
            replicas: BTreeMap::new(),
            dispatch,
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
            records: Records::default(),
            absences: Absences::default(),
            actors,
            supervised: BTreeMap::new(),
            restarts: BTreeMap::new(),
            broken: BTreeMap::new(),
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
        let is_leaving = |connected: &&Connected| {
            self.core.desired().drains(&connected.node, connected.incarnation.0)
        };
        let leaving = self.connected.values().filter(is_leaving);
        let view = ClusterView {
            workers,
            leaving: leaving.map(|it| (it.node.clone(), it.pid)).collect(),
            replicas: self.core.replicas().collect(),
            serving: self.dispatch.serving().cloned().collect(),
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
        ctx.run_interval(SHARE, |actor, ctx| actor.share_queues(ctx));
        self.publish();
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
        let EpochFailed { replica, epoch, cause, reason, hung } = failed;
        let now = self.clock.now();
        self.core.ranks_hang(now, replica, epoch, &hung);
        self.core.epoch_failed(now, replica, epoch, cause, &reason, &mut effects);
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
        for replica in self.replicas.values() {
            replica.do_send(FailAll(EngineError::ShuttingDown));
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

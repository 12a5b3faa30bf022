//! The actix shell of the cluster core: workers' links come in, the core's effects go out, requests
//! are routed to replicas.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix::{Actor, Addr, AsyncContext as _, Context, Handler, Message};
use shared::actor::link::{Connection, LinkEvent, LinkHandle};
use shared::actor::liveness::LivenessConfig;
use shared::actor::remote::RemoteAddr;
use shared::clock::Clock;
use shared::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
use shared::metrics::Source;
use shared::metrics::labels::ActorState;
use shared::protocol::{
    EngineConfig, FromWorker, Hello, StepResult, ToWorker, Welcome, WorkerStats,
};
use shared::wire::codec;
use shared::wire::frame::Frame;
use tokio::sync::watch;

use super::affinity::Affinity;
use super::orphanage::{Home, Orphanage};
use super::roster::{Admission, Joining, LinkNumber, Roster};
use super::status;
use super::view::{self, ClusterView};
use super::{Cluster, ClusterConfig, Effect, Member, ReplicaPhase};
use crate::engine::{EngineCommand, EngineError, EngineEvent, GenerateRequest};
use crate::links::WorkerLink;
use crate::metrics::Hub;
use crate::metrics::observe::ReplicaConfig;
use crate::replica::actor::{
    Adopt, Cancel, EpochFailed, FailAll, GiveUp, Lost, Orphans, Ready, ReplicaActor, ReplicaLoad,
    Retire, StepDone, Submit,
};
use crate::replica::driver::{Moved, reject_reason};
use crate::scheduler::{ConfigError, EpochEnd};

/// How often time passes for the core.
const TICK: Duration = Duration::from_millis(50);
/// Interval of idle workers' stats reports.
const STATS_INTERVAL: Duration = Duration::from_secs(1);

/// How many of those that are gone are remembered.
const DEAD_MAX: usize = 64;

struct Connected {
    incarnation: Incarnation,
    number: LinkNumber,
    node: String,
    host: String,
    pid: u32,
    link: LinkHandle,
    addr: WorkerLink,
}

struct RunningReplica {
    addr: Addr<ReplicaActor>,
    load: Arc<ReplicaLoad>,
    serving: Option<(Epoch, Vec<WorkerId>)>,
}

/// Makes a replica's actor when the core makes a replica.
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
    unservable: Option<String>,
    frozen: Option<(String, u32)>,
    tensor_parallel: u32,
    worker_stats: bool,
    stopping: bool,
    orphanage: Orphanage,
    affinity: Affinity,
    /// Workers that are gone, oldest first.
    dead: VecDeque<status::Dead>,
}

impl std::fmt::Debug for ClusterActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterActor").field("core", &self.core).finish_non_exhaustive()
    }
}

impl ClusterActor {
    /// A cluster without workers; its view is published through `view`.
    #[must_use]
    pub fn new(
        config: ClusterConfig,
        clock: Arc<dyn Clock>,
        hub: Arc<Hub>,
        make_replica: ReplicaFactory,
        view: watch::Sender<ClusterView>,
    ) -> Self {
        let (tensor_parallel, engine) = (config.tensor_parallel, config.engine.clone());
        let worker_stats = config.worker_stats;
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
            unservable: None,
            frozen: None,
            tensor_parallel,
            worker_stats,
            stopping: false,
            orphanage: Orphanage::default(),
            affinity: Affinity::default(),
            dead: VecDeque::new(),
        }
    }

    /// With workers that are about to join, as [`Cluster::expect`] says.
    #[must_use]
    pub fn expecting(mut self, nodes: BTreeSet<String>) -> Self {
        self.core.expect(nodes);
        self
    }

    /// Carries out the core's effects, then publishes the view.
    fn carry_out(&mut self, ctx: &mut Context<Self>, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { worker, epoch, message } => self.send(worker, epoch, &message),
                Effect::ReplicaReady { replica, epoch, ranks, num_blocks } => {
                    self.replica_ready(ctx, replica, epoch, ranks, num_blocks);
                }
                Effect::ReplicaBroken { replica, epoch, end, reason } => {
                    if self.stopping || end == EpochEnd::Planned {
                        tracing::info!(%replica, %epoch, %reason, "the replica pauses");
                    } else {
                        tracing::warn!(%replica, %epoch, %reason, "the replica broke");
                    }
                    if let Some(running) = self.replicas.get_mut(&replica) {
                        running.serving = None;
                        self.affinity.forget(replica);
                        running.load.last_step_ms.store(0, Ordering::Relaxed);
                        running.addr.do_send(Lost { epoch, end });
                        self.orphanage.expect();
                    }
                }
                Effect::ReplicaRemoved { replica } => {
                    tracing::info!(%replica, "the replica is given up");
                    self.hub.observer().record().replica_removed(replica);
                    if let Some(running) = self.replicas.remove(&replica) {
                        // Its requests come as orphans; the actor ends with its last address.
                        running.addr.do_send(Retire);
                        self.orphanage.expect();
                    }
                }
                Effect::Unservable { replica, reason } => {
                    tracing::error!(%replica, %reason, "the replica cannot be formed");
                    self.unservable = Some(reason);
                }
            }
        }
        self.publish();
    }

    fn send(&self, worker: WorkerId, epoch: Epoch, message: &ToWorker) {
        if let Some(connected) = self.connected.get(&worker)
            && let Err(error) = connected.addr.tell(epoch, message)
        {
            tracing::warn!(%worker, %error, "message to the worker lost");
        }
    }

    fn replica_ready(
        &mut self,
        ctx: &mut Context<Self>,
        id: ReplicaId,
        epoch: Epoch,
        ranks: Vec<WorkerId>,
        num_blocks: u32,
    ) {
        let links: Vec<WorkerLink> = ranks
            .iter()
            .filter_map(|worker| self.connected.get(worker))
            .map(|connected| connected.addr.clone())
            .collect();
        if links.len() != ranks.len() {
            // A rank left in this very moment; its end is on the way.
            return;
        }
        tracing::info!(replica = %id, %epoch, ranks = ranks.len(), kv_blocks = num_blocks, "serving");
        self.unservable = None;
        let tensor_parallel = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
        let config = ReplicaConfig { engine: self.engine.clone(), num_blocks, tensor_parallel };
        self.hub.observer().record().replica_ready(id, &config);
        self.start_replica(ctx, id);
        let Some(running) = self.replicas.get_mut(&id) else { return };
        running.addr.do_send(Ready { epoch, num_blocks, ranks: links, workers: ranks.clone() });
        running.serving = Some((epoch, ranks));
        // What waits at replicas that cannot go on can go on here.
        for running in self.replicas.values().filter(|running| running.serving.is_none()) {
            running.addr.do_send(GiveUp);
            self.orphanage.expect();
        }
    }

    /// Starts a replica's actor, unless it runs.
    fn start_replica(&mut self, ctx: &mut Context<Self>, id: ReplicaId) {
        if self.replicas.contains_key(&id) {
            return;
        }
        let load = Arc::new(ReplicaLoad::default());
        match (self.make_replica)(id, ctx.address(), load.clone()) {
            Ok(actor) => {
                let addr = actor.start();
                self.replicas.insert(id, RunningReplica { addr, load, serving: None });
            }
            Err(error) => self.unservable = Some(error.to_string()),
        }
    }

    /// Requests of a replica that cannot go on with them: to those that can, or to one that may
    /// soon, even if it never has served.
    fn place_orphans(&mut self, ctx: &mut Context<Self>, Orphans { from, requests }: Orphans) {
        let homes = self.core.replicas().filter(|_| !self.stopping).map(|replica| {
            let running = self.replicas.get(&replica.id);
            let load = |it: &RunningReplica| it.load.in_flight.load(Ordering::Relaxed);
            Home {
                replica: replica.id,
                serving: running.is_some_and(|running| running.serving.is_some()),
                load: running.map_or(0, load),
            }
        });
        let placed = self.orphanage.place(from, requests, homes);
        for request in placed.cancelled {
            request.end(self.hub.observer(), None);
        }
        self.refuse_all(placed.homeless);
        for (id, requests) in placed.homes {
            if id != from {
                tracing::info!(from = %from, to = %id, requests = requests.len(), "go on elsewhere");
            }
            self.start_replica(ctx, id);
            match self.replicas.get(&id) {
                Some(running) => running.addr.do_send(Adopt(requests)),
                None => self.refuse_all(requests),
            }
        }
    }

    fn refuse_all(&self, requests: Vec<Moved>) {
        for request in requests {
            let error = match self.stopping {
                true => EngineError::ShuttingDown,
                false => EngineError::Unavailable { message: self.not_ready() },
            };
            request.end(self.hub.observer(), Some(error));
        }
    }

    fn publish(&mut self) {
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
            unservable: self.unservable.clone(),
            frozen: self.frozen.clone(),
        };
        self.count_actors();
        self.view.send_replace(view);
    }

    fn route(&mut self, request: &GenerateRequest) -> Option<&RunningReplica> {
        let homes = self.replicas.iter().map(|(id, running)| Home {
            replica: *id,
            serving: running.serving.is_some(),
            load: running.load.in_flight.load(Ordering::Relaxed),
        });
        let id = self.affinity.route(&request.prompt, request.cache_salt, homes)?;
        self.replicas.get(&id)
    }

    fn submit(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Submit { request, events } => {
                let error = if self.stopping {
                    EngineError::ShuttingDown
                } else if let Some(running) = self.route(&request) {
                    return running.addr.do_send(Submit { request, events });
                } else {
                    EngineError::Unavailable { message: self.not_ready() }
                };
                self.hub.observer().record().rejected(reject_reason(&error));
                let _ = events.send(EngineEvent::Failed(error));
            }
            EngineCommand::Cancel { id } => {
                self.orphanage.cancelled(id);
                for running in self.replicas.values() {
                    running.addr.do_send(Cancel(id));
                }
            }
        }
    }

    fn not_ready(&self) -> String {
        view::not_ready(&self.view.borrow(), self.tensor_parallel)
    }

    fn take(&mut self, ctx: &mut Context<Self>, worker: WorkerId, frame: &Frame) {
        let message = match codec::decode_message::<FromWorker>(&frame.body) {
            Ok(message) => message,
            Err(error) => {
                tracing::error!(%worker, %error, "the worker sent what cannot be read");
                if let Some(connected) = self.connected.get(&worker) {
                    connected.link.close();
                }
                return;
            }
        };
        let now = self.clock.now();
        let mut effects = Vec::new();
        match message {
            FromWorker::Step(result) => return self.step_done(worker, result),
            FromWorker::Stats(stats) => {
                return self.report(worker, &stats);
            }
            FromWorker::Progress(progress) => self.core.load_progressed(worker, progress),
            FromWorker::Formed(formed) => self.core.worker_formed(worker, formed, &mut effects),
            FromWorker::FormFailed(failure) => {
                tracing::warn!(%worker, reason = %failure.message, "cannot be formed");
                self.core.form_failed(now, worker, &failure, &mut effects);
            }
            FromWorker::Started(started) => {
                self.core.worker_started(now, worker, started, &mut effects);
            }
            FromWorker::StepFailed(failed) => {
                if let Some(replica) = self.replica_of(worker) {
                    let reason = format!("{worker}, {}: {}", failed.step, failed.message);
                    self.core.epoch_failed(now, replica, failed.epoch, &reason, &mut effects);
                }
            }
            FromWorker::Goodbye { reason } => {
                tracing::info!(%worker, %reason, "the worker says goodbye");
                if let Some(connected) = self.connected.get(&worker) {
                    connected.link.close();
                }
            }
        }
        self.carry_out(ctx, effects);
    }

    fn report(&self, worker: WorkerId, stats: &WorkerStats) {
        let Some(connected) = self.connected.get(&worker) else { return };
        if stats.snapshot.is_empty() {
            return;
        }
        match self.hub.report(Source::Worker(worker), connected.incarnation, stats) {
            Ok(_) => {
                let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                self.hub.observer().record().worker_reported(worker, since_1970);
            }
            Err(refused) => tracing::warn!(%worker, %refused, "stats report"),
        }
    }

    /// Actors of the cluster by state, as `/metrics` shows them.
    fn count_actors(&self) {
        let mut recording = self.hub.observer().record();
        let missing = self.roster.num_known().saturating_sub(self.connected.len());
        let replicas = |phase: fn(ReplicaPhase) -> bool| {
            self.core.replicas().filter(|replica| phase(replica.phase)).count() as u64
        };
        let alive = replicas(|phase| phase == ReplicaPhase::Serving) + self.connected.len() as u64;
        let starting =
            replicas(|phase| matches!(phase, ReplicaPhase::Forming | ReplicaPhase::Starting));
        recording.actors(ActorState::Alive, alive);
        recording.actors(ActorState::Starting, starting);
        recording.actors(ActorState::Pending, replicas(|phase| phase == ReplicaPhase::Waiting));
        recording.actors(ActorState::Dead, missing as u64);
    }

    fn replica_of(&self, worker: WorkerId) -> Option<ReplicaId> {
        let holds = |running: &RunningReplica| {
            running.serving.as_ref().is_some_and(|(_, ranks)| ranks.contains(&worker))
        };
        self.replicas.iter().find(|(_, running)| holds(running)).map(|(id, _)| *id)
    }

    fn step_done(&mut self, worker: WorkerId, result: StepResult) {
        self.report(worker, &result.stats);
        let replica = self.replica_of(worker).and_then(|id| self.replicas.get(&id));
        match replica {
            Some(running) => running.addr.do_send(StepDone { worker, result }),
            None => self.hub.observer().record().fenced_frames(1),
        }
    }

    fn worker_gone(
        &mut self,
        ctx: &mut Context<Self>,
        worker: WorkerId,
        number: LinkNumber,
        reason: &str,
    ) {
        if !self.roster.is_present(worker, number) {
            return;
        }
        self.roster.left(worker);
        let Some(connected) = self.connected.remove(&worker) else { return };
        let incarnation = connected.incarnation;
        if self.stopping {
            tracing::debug!(%worker, node = connected.node, %reason, "the worker is gone");
        } else {
            tracing::warn!(%worker, node = connected.node, %reason, "the worker is gone");
        }
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.dead.push_back(status::Dead {
            node: connected.node.clone(),
            slot: worker.0,
            pid: connected.pid,
            reason: reason.to_owned(),
            at,
        });
        if self.dead.len() > DEAD_MAX {
            self.dead.pop_front();
        }
        self.hub.lost(Source::Worker(worker), incarnation);
        self.hub.observer().record().worker_up(worker, false);
        let mut effects = Vec::new();
        self.core.worker_left(self.clock.now(), worker, incarnation, reason, &mut effects);
        self.carry_out(ctx, effects);
    }
}

impl Actor for ClusterActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(4096);
        ctx.run_interval(TICK, |actor, ctx| {
            let mut effects = Vec::new();
            actor.core.tick(actor.clock.now(), &mut effects);
            if effects.is_empty() {
                return;
            }
            actor.carry_out(ctx, effects);
        });
        self.publish();
    }
}

/// May this worker join? Answered before its link is started.
#[derive(Debug, Message)]
#[rtype(result = "Result<Welcome, Refusal>")]
pub struct Admit(pub Hello);

/// Why a worker may not join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Now; it may dial again.
    NotYet(String),
    /// Ever.
    Never(String),
}

/// A worker has been welcomed.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Joined {
    /// Who it says it is.
    pub hello: Hello,
    /// Its slot.
    pub worker: WorkerId,
    /// Its connection.
    pub connection: Connection,
}

#[derive(Debug, Message)]
#[rtype(result = "()")]
struct FromLink {
    worker: WorkerId,
    number: LinkNumber,
    event: LinkEvent,
}

/// A request or cancellation from the front end.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Command(pub EngineCommand);

/// Stop: fail what runs, tell the workers to end.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Stop {
    /// Why, for the workers' logs.
    pub reason: String,
    /// Whether workers shall end too; those of other hosts go on dialling otherwise.
    pub workers_too: bool,
}

impl Handler<Admit> for ClusterActor {
    type Result = Result<Welcome, Refusal>;

    fn handle(&mut self, Admit(hello): Admit, _ctx: &mut Self::Context) -> Self::Result {
        if self.stopping {
            return Err(Refusal::NotYet("the coordinator is shutting down".to_owned()));
        }
        let node = &hello.node;
        let worker = match self.roster.admit(node, hello.incarnation, hello.rejoin.slot) {
            Admission::Slot(worker) => worker,
            Admission::Taken => {
                return Err(Refusal::NotYet(format!("another process is linked as node {node}")));
            }
            Admission::Retired => {
                let reason = format!("several other processes were node {node} since");
                return Err(Refusal::Never(format!("{reason}: start the worker again")));
            }
        };
        let interval = if self.worker_stats { STATS_INTERVAL } else { Duration::ZERO };
        Ok(Welcome { worker, stats_interval_ms: interval.as_millis() as u64 })
    }
}

impl Handler<Joined> for ClusterActor {
    type Result = ();

    fn handle(&mut self, joined: Joined, ctx: &mut Self::Context) {
        let Joined { hello, worker, connection } = joined;
        let incarnation = hello.incarnation;
        // Between its admission and now another process may have joined in its place.
        let admission = self.roster.admit(&hello.node, incarnation, hello.rejoin.slot);
        if admission != Admission::Slot(worker) {
            return;
        }
        if let Some(old) = self.connected.get(&worker) {
            let (old_number, old_link) = (old.number, old.link.clone());
            self.worker_gone(ctx, worker, old_number, "it joined again");
            old_link.close();
        }
        let Joining { link: number, restarted, retired } = self.roster.joined(worker, incarnation);
        let addr = ctx.address();
        let sink = move |event| {
            let last = matches!(event, LinkEvent::Closed { .. });
            let message = FromLink { worker, number, event };
            if last {
                addr.do_send(message);
                return true;
            }
            addr.try_send(message).is_ok()
        };
        let link = connection.start(LivenessConfig::default(), self.clock.clone(), sink);
        tracing::info!(%worker, node = hello.node, pid = hello.pid, "joined");
        let node = hello.node.clone();
        let addr = RemoteAddr::new(link.clone());
        let host = hello.host.clone();
        let connected = Connected { incarnation, number, node, host, pid: hello.pid, link, addr };
        self.connected.insert(worker, connected);
        let mut recording = self.hub.observer().record();
        recording.worker_up(worker, true);
        recording.worker_info(worker, &hello.node, &hello.version);
        if restarted {
            recording.worker_restarted(worker);
        }
        drop(recording);
        if let Some(retired) = retired {
            self.hub.retire(Source::Worker(worker), retired);
        }
        let member = Member {
            worker,
            incarnation,
            node: hello.node,
            host: hello.host,
            collective_addr: hello.collective_addr,
            draining: false,
        };
        self.core.holds(worker, hello.rejoin.shard);
        let mut effects = Vec::new();
        self.core.worker_joined(self.clock.now(), member, &mut effects);
        self.carry_out(ctx, effects);
    }
}

impl Handler<FromLink> for ClusterActor {
    type Result = ();

    fn handle(&mut self, message: FromLink, ctx: &mut Self::Context) {
        let FromLink { worker, number, event } = message;
        if !self.roster.is_present(worker, number) {
            return;
        }
        match event {
            LinkEvent::Frame(frame) => self.take(ctx, worker, &frame),
            LinkEvent::Suspect => tracing::warn!(%worker, "the worker is silent"),
            LinkEvent::Alive => tracing::info!(%worker, "the worker is heard again"),
            LinkEvent::Closed { reason } => {
                if matches!(reason, shared::actor::link::CloseReason::Silent { .. })
                    && let Some(connected) = self.connected.get(&worker)
                {
                    self.frozen = Some((connected.node.clone(), connected.pid));
                }
                self.worker_gone(ctx, worker, number, &reason.to_string());
            }
        }
    }
}

impl Handler<Command> for ClusterActor {
    type Result = ();

    fn handle(&mut self, Command(command): Command, _ctx: &mut Self::Context) {
        self.submit(command);
    }
}

impl Handler<EpochFailed> for ClusterActor {
    type Result = ();

    fn handle(&mut self, failed: EpochFailed, ctx: &mut Self::Context) {
        let mut effects = Vec::new();
        let EpochFailed { replica, epoch, reason } = failed;
        self.core.epoch_failed(self.clock.now(), replica, epoch, &reason, &mut effects);
        self.carry_out(ctx, effects);
    }
}

/// Who is there and what it does; front ends and readiness are added by others.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "status::Status")]
pub struct GetStatus;

/// At most so many replicas from now on; without a bound when absent.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct SetReplicas(pub Option<u32>);

/// A node shall leave; the error says why it cannot.
#[derive(Clone, Debug, Message)]
#[rtype(result = "Result<(), String>")]
pub struct Drain(pub String);

impl Handler<GetStatus> for ClusterActor {
    type Result = actix::MessageResult<GetStatus>;

    fn handle(&mut self, _: GetStatus, _ctx: &mut Self::Context) -> Self::Result {
        let replicas: Vec<_> = self.core.replicas().collect();
        let place = |worker: WorkerId| {
            replicas.iter().find_map(|replica| {
                let rank = replica.ranks.iter().position(|rank| *rank == Some(worker))?;
                Some((replica.id.0, rank as u32))
            })
        };
        let draining = |worker: WorkerId| {
            self.core.members().any(|member| member.worker == worker && member.draining)
        };
        let nodes = self.connected.iter().map(|(worker, connected)| {
            let place = place(*worker);
            let state = match place {
                _ if draining(*worker) => "draining",
                Some(_) => "alive",
                None => "spare",
            };
            status::Node {
                node: connected.node.clone(),
                role: "worker".to_owned(),
                slot: worker.0,
                pid: connected.pid,
                host: connected.host.clone(),
                state: state.to_owned(),
                replica: place.map(|(replica, _)| replica),
                rank: place.map(|(_, rank)| rank),
            }
        });
        let load = |id: ReplicaId| {
            self.replicas.get(&id).map_or(0, |r| r.load.in_flight.load(Ordering::Relaxed))
        };
        actix::MessageResult(status::Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tensor_parallel: self.tensor_parallel,
            max_replicas: self.core.max_replicas(),
            nodes: nodes.collect(),
            replicas: replicas
                .iter()
                .map(|replica| status::Replica {
                    id: replica.id.0,
                    state: replica.phase.as_str().to_owned(),
                    epoch: replica.epoch.0,
                    ranks: replica.ranks.iter().map(|rank| rank.map(|rank| rank.0)).collect(),
                    requests: load(replica.id),
                    last_failure: replica.last_failure.clone(),
                })
                .collect(),
            dead: self.dead.iter().rev().cloned().collect(),
            ..status::Status::default()
        })
    }
}

impl Handler<SetReplicas> for ClusterActor {
    type Result = ();

    fn handle(&mut self, SetReplicas(max): SetReplicas, ctx: &mut Self::Context) {
        let mut effects = Vec::new();
        self.core.set_max_replicas(self.clock.now(), max, &mut effects);
        self.carry_out(ctx, effects);
    }
}

impl Handler<Drain> for ClusterActor {
    type Result = Result<(), String>;

    fn handle(&mut self, Drain(node): Drain, ctx: &mut Self::Context) -> Self::Result {
        let found = self.connected.iter().find(|(_, connected)| connected.node == node);
        let Some((worker, _)) = found else {
            return Err(format!("there is no worker `{node}`"));
        };
        let mut effects = Vec::new();
        let result = self.core.drain(self.clock.now(), *worker, &mut effects);
        self.carry_out(ctx, effects);
        result
    }
}

impl Handler<Orphans> for ClusterActor {
    type Result = ();

    fn handle(&mut self, orphans: Orphans, ctx: &mut Self::Context) {
        self.place_orphans(ctx, orphans);
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
            let message = ToWorker::Shutdown { reason: stop.reason };
            for connected in self.connected.values() {
                let _ = connected.addr.tell(Epoch(0), &message);
            }
        }
    }
}

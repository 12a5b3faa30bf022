//! The actix shell of the cluster core: workers' links come in, the core's effects go out, requests
//! are routed to replicas.
mod names;
mod operator;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix::{Actor, Addr, AsyncContext as _, Context, Handler, Message};
use shared::actor::ActorRuntime;
use shared::actor::exchange::PeerId;
use shared::actor::link::{Connection, LinkEvent, LinkHandle};
use shared::actor::liveness::LivenessConfig;
use shared::actor::peer::PeerAddr;
use shared::clock::Clock;
use shared::ids::{Epoch, Incarnation, ReplicaId, WorkerId};
use shared::metrics::Source;
use shared::protocol::{
    EngineConfig, FromWorker, Hello, StepResult, ToWorker, Welcome, WorkerStats,
};
use shared::wire::codec;
use shared::wire::frame::{Frame, FrameKind};
use tokio::sync::watch;

pub use self::names::Supervised;
pub use self::operator::{Drain, GetLogs, GetStatus, ProcessEnded, SetReplicas};
use super::absence::Absences;
use super::affinity::Affinity;
use super::orphanage::{Home, Orphanage};
use super::records::Records;
use super::roster::{Admission, Joining, LinkNumber, Roster};
use super::view::{self, ClusterView};
use super::{Cluster, ClusterConfig, Effect, Member};
use crate::engine::{EngineCommand, EngineError, EngineEvent, GenerateRequest};
use crate::links::WorkerLink;
use crate::metrics::Hub;
use crate::metrics::observe::ReplicaConfig;
use crate::replica::actor::{
    Adopt, Cancel, EpochFailed, FailAll, GiveUp, Lost, Orphans, RankPace, Ready, ReplicaActor,
    ReplicaLoad, Retire, StepDone, Submit,
};
use crate::replica::driver::{Moved, reject_reason};
use crate::scheduler::{ConfigError, EpochEnd};

/// How often time passes for the core.
const TICK: Duration = Duration::from_millis(50);
/// How often actors are counted.
const COUNT: Duration = Duration::from_secs(1);
/// Interval of idle workers' stats reports.
const STATS_INTERVAL: Duration = Duration::from_secs(1);

struct Connected {
    incarnation: Incarnation,
    number: LinkNumber,
    /// The link, as named actors know it.
    peer: PeerId,
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
    /// Log lines and ends of worker processes.
    records: Records,
    /// Workers that are gone and may be back.
    absences: Absences,
    /// Named actors of the whole cluster.
    actors: ActorRuntime,
    /// Nodes whose worker process is started again when it ends, and how often in a row.
    supervised: BTreeMap<String, u32>,
    /// How often each worker came back as another process.
    restarts: BTreeMap<WorkerId, u32>,
    /// How often each replica broke while it served.
    broken: BTreeMap<ReplicaId, u32>,
    affinity: Affinity,
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
        actors: ActorRuntime,
    ) -> Self {
        let (tensor_parallel, engine) = (config.tensor_parallel, config.engine.clone());
        let max_num_seqs = config.engine.max_num_seqs;
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
            records: Records::default(),
            absences: Absences::default(),
            actors,
            supervised: BTreeMap::new(),
            restarts: BTreeMap::new(),
            broken: BTreeMap::new(),
            affinity: Affinity::new(max_num_seqs),
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
        let changed = !effects.is_empty();
        for effect in effects {
            match effect {
                Effect::Send { worker, epoch, message } => self.send(worker, epoch, &message),
                Effect::ReplicaReady { replica, epoch, ranks, num_blocks } => {
                    self.replica_ready(ctx, replica, epoch, ranks, num_blocks);
                }
                Effect::ReplicaBroken { replica, epoch, end, reason } => {
                    *self.broken.entry(replica).or_default() += 1;
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
                    self.replica_died(replica);
                    self.broken.remove(&replica);
                    if let Some(running) = self.replicas.remove(&replica) {
                        // Its requests come as orphans; the actor ends with its last address.
                        running.addr.do_send(Retire);
                        self.orphanage.expect();
                    }
                }
                Effect::Pace { worker, slow } => {
                    self.hub.observer().record().rank_slow(worker, slow);
                }
                Effect::Unservable { replica, reason } => {
                    tracing::error!(%replica, %reason, "the replica cannot be formed");
                    self.unservable = Some(reason);
                }
            }
        }
        if changed {
            self.name_actors();
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
        let mut goodbye = None;
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
            FromWorker::Logs(lines) => return self.records.logged(worker, &lines),
            FromWorker::Goodbye { reason, failed } => {
                tracing::info!(%worker, %reason, "the worker says goodbye");
                self.records.said_goodbye(worker, &reason);
                if !failed {
                    self.core.worker_leaves(now, worker, &reason, &mut effects);
                }
                goodbye = self.connected.get(&worker).map(|connected| connected.link.clone());
            }
        }
        self.carry_out(ctx, effects);
        if let Some(link) = goodbye {
            // The answer: its replica does not count on it any more.
            link.close();
        }
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
        let leaves = |member: &Member| member.worker == worker && member.draining;
        if self.stopping {
            tracing::debug!(%worker, node = connected.node, %reason, "the worker is gone");
        } else if self.core.members().any(leaves) {
            tracing::info!(%worker, node = connected.node, "the worker has left");
        } else {
            tracing::warn!(%worker, node = connected.node, %reason, "the worker is gone");
        }
        self.records.left(worker, reason, since_1970());
        self.hub.lost(Source::Worker(worker), incarnation);
        let drained = self.core.member(worker).is_some_and(|member| member.draining);
        let now = self.clock.now();
        self.actors.peer_lost(connected.peer, reason);
        self.worker_died(worker, &connected.node, drained, reason);
        let mut effects = Vec::new();
        self.core.worker_left(now, worker, incarnation, reason, &mut effects);
        self.carry_out(ctx, effects);
        // After what the core had to say of it.
        if drained {
            // It is not expected back: nothing of it is up or down any more.
            self.hub.observer().record().worker_gone(worker);
        } else {
            self.hub.observer().record().worker_up(worker, false);
            self.absences.left(now, worker);
        }
    }
}

impl Actor for ClusterActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(4096);
        ctx.run_interval(TICK, |actor, ctx| {
            let (now, mut effects) = (actor.clock.now(), Vec::new());
            for worker in actor.absences.given_up(now) {
                tracing::info!(%worker, "not expected back: its series end, its totals stay");
                actor.hub.observer().record().worker_gone(worker);
                actor.worker_given_up(worker);
            }
            actor.core.tick(now, &mut effects);
            if effects.is_empty() {
                return;
            }
            actor.carry_out(ctx, effects);
        });
        // Actors of applications change without a change of the cluster.
        ctx.run_interval(COUNT, |actor, _| actor.name_actors());
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
        let addr = PeerAddr::new(link.clone());
        let host = hello.host.clone();
        let peer = self.actors.peer_up(&node, link.clone());
        let pid = hello.pid;
        let connected = Connected { incarnation, number, peer, node, host, pid, link, addr };
        self.connected.insert(worker, connected);
        self.records.joined(worker, &hello.node, hello.pid);
        self.absences.back(worker);
        let mut recording = self.hub.observer().record();
        recording.worker_up(worker, true);
        recording.worker_info(worker, &hello.node, &hello.version);
        if restarted {
            recording.worker_restarted(worker);
            *self.restarts.entry(worker).or_default() += 1;
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
            offer: hello.offer,
        };
        if let Some((resource, needed, offered)) = self.core.placement().lacks(&member) {
            let node = &member.node;
            tracing::warn!(%worker, node, resource, needed, offered, "too little to be a rank");
        }
        self.core.holds(worker, hello.rejoin.shard);
        let mut effects = Vec::new();
        self.core.worker_joined(self.clock.now(), member, &mut effects);
        self.name_actors();
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
            LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                let Some(connected) = self.connected.get(&worker) else { return };
                if let Err(error) = self.actors.frame(connected.peer, &frame.body) {
                    tracing::error!(%worker, %error, "sent an actor frame that cannot be read");
                    connected.link.close();
                }
            }
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

impl Handler<RankPace> for ClusterActor {
    type Result = ();

    fn handle(&mut self, pace: RankPace, ctx: &mut Self::Context) {
        let RankPace { replica, epoch, worker, slow, times } = pace;
        let node = self.connected.get(&worker).map_or("", |connected| connected.node.as_str());
        if slow {
            tracing::warn!(%worker, node, %replica, "the worker computes {times:.1} times as long as the others");
        } else {
            tracing::debug!(%worker, node, %replica, "the worker keeps pace");
        }
        let mut effects = Vec::new();
        self.core.rank_pace(self.clock.now(), replica, epoch, worker, slow, &mut effects);
        self.carry_out(ctx, effects);
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

/// Seconds since 1970.
fn since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

//! Workers and their links: who may join, what they send, and how they leave.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use actix::{Addr, AsyncContext as _, Context, Handler, Message};
use shared::actor::link::{CloseReason, Connection, LinkEvent};
use shared::actor::liveness::LivenessConfig;
use shared::actor::peer::PeerAddr;
use shared::clock::since_1970;
use shared::ids::{ReplicaId, WorkerId};
use shared::metrics::Source;
use shared::protocol::{ExitReason, FromWorker, Hello, StepResult, ToFetch, Welcome, WorkerStats};
use shared::wire::codec;
use shared::wire::frame::{Frame, FrameKind};

use super::super::Member;
use super::super::roster::{Admission, JoinOutcome, LinkNumber};
use super::{ClusterActor, Connected};
use crate::links::link_end;
use crate::replica::actor::StepDone;
use shared::metrics::labels::FencedReason;

/// Interval of idle workers' stats reports.
const STATS_INTERVAL: Duration = Duration::from_secs(1);

/// How long a drained worker that stands still is listed for its supervisor, which kills it. It is
/// not expected back, so nothing else takes it off the list.
const FROZEN_TOLD_FOR: Duration = Duration::from_secs(10);

/// Maximum number of unhandled events of one link. A worker has at most two steps to answer and
/// rarely anything else to say; one with so many more events is cut off.
const EVENTS_MAX: usize = 256;

/// Asks whether this worker may join. Answered before its link is started.
#[derive(Debug, Message)]
#[rtype(result = "Result<Welcome, JoinRefusal>")]
pub struct Admit(pub Hello);

/// Why a worker may not join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinRefusal {
    /// Not now; it may dial again.
    NotYet(String),
    /// Never.
    Never(String),
    /// Before it has these files; it dials again with them.
    Fetch(ToFetch),
}

/// An admitted worker did not get its welcome, or is gone.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct NotJoined {
    /// Its node's name.
    pub node: String,
    /// The slot it was given.
    pub worker: WorkerId,
}

/// A worker has been welcomed.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Joined {
    /// Its handshake.
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
    slot: InboxSlot,
}

/// Inbox of one link: no link takes the room of another.
struct Inbox {
    addr: Addr<ClusterActor>,
    worker: WorkerId,
    number: LinkNumber,
    /// Number of events that wait.
    slots_used: Arc<AtomicUsize>,
}

impl Inbox {
    /// Hands an event to the actor; returns false when too many wait already.
    fn put(&self, event: LinkEvent) -> bool {
        let slot = InboxSlot(self.slots_used.clone());
        let frame = matches!(event, LinkEvent::Frame(_));
        if slot.0.fetch_add(1, Ordering::Relaxed) >= EVENTS_MAX && frame {
            return false;
        }
        let (worker, number) = (self.worker, self.number);
        // Bypasses the mailbox's own bound, which all senders share.
        self.addr.do_send(FromLink { worker, number, event, slot });
        true
    }
}

/// An event's place in its link's inbox, freed when the event is handled.
#[derive(Debug)]
struct InboxSlot(Arc<AtomicUsize>);

impl Drop for InboxSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ClusterActor {
    /// Name by which operators know a worker.
    pub(super) fn node_of(&self, worker: WorkerId) -> &str {
        self.roster.node_of(worker).unwrap_or("unknown")
    }

    fn take(&mut self, ctx: &mut Context<Self>, worker: WorkerId, frame: &Frame) {
        let message = match codec::decode_message::<FromWorker>(&frame.body) {
            Ok(message) => message,
            Err(error) => {
                tracing::error!(
                    worker = self.node_of(worker), slot = worker.0, %error,
                    "the worker sent a message that cannot be read"
                );
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
            FromWorker::Step(result) => {
                self.core.executor_heard(now, worker);
                return self.step_done(worker, result);
            }
            FromWorker::Stats(stats) => {
                self.core.executor_heard(now, worker);
                return self.report(worker, &stats);
            }
            FromWorker::Progress(progress) => {
                self.core.load_progressed(now, worker, progress);
                // There are many, and they only move a progress bar: the next tick shows it.
                self.unpublished = true;
                return;
            }
            FromWorker::GroupId(id) => self.core.group_id(now, worker, id, &mut effects),
            FromWorker::Formed(formed) => {
                self.core.worker_formed(now, worker, formed, &mut effects);
            }
            FromWorker::FormFailed(failure) => {
                tracing::warn!(
                    worker = self.node_of(worker), slot = worker.0, reason = %failure.message,
                    "cannot be formed"
                );
                self.core.form_failed(now, worker, &failure, &mut effects);
            }
            FromWorker::Started(started) => {
                self.core.worker_started(now, worker, started, &mut effects);
            }
            FromWorker::Adapter(done) => {
                if let Err(reason) = &done.outcome {
                    let node = self.node_of(worker);
                    tracing::warn!(worker = node, slot = worker.0, reason, "no adapter loaded");
                }
                self.core.adapter_done(now, worker, done, &mut effects);
            }
            FromWorker::StepFailed(failed) => {
                self.core.executor_heard(now, worker);
                if let Some(replica) = self.replica_of(worker) {
                    let reason =
                        format!("{}, {}: {}", self.node_of(worker), failed.step, failed.message);
                    let last_step = self.dispatch.load(replica).and_then(|load| load.last_step());
                    let (epoch, in_vain) = (failed.epoch, failed.waited_in_vain());
                    let (core, to) = (&mut self.core, &mut effects);
                    core.step_failed(now, worker, replica, epoch, last_step, in_vain, &reason, to);
                }
            }
            FromWorker::Logs(lines) => return self.records.logged(worker, &lines),
            FromWorker::Goodbye { reason, exit } => {
                let node = self.node_of(worker);
                tracing::info!(worker = node, slot = worker.0, %reason, "the worker says goodbye");
                self.records.said_goodbye(worker, &reason);
                match exit {
                    ExitReason::OnPurpose => {
                        self.core.worker_leaves(now, worker, &reason, &mut effects);
                    }
                    ExitReason::DeviceLost => self.core.device_failed(now, worker, &mut effects),
                    ExitReason::Failed => {}
                }
                goodbye = self.connected.get(&worker).map(|connected| connected.link.clone());
            }
        }
        self.carry_out(ctx, effects);
        if let Some(link) = goodbye {
            // This is the answer: its replica no longer counts on it.
            link.close();
        }
    }

    fn report(&self, worker: WorkerId, stats: &WorkerStats) {
        let Some(connected) = self.connected.get(&worker) else { return };
        if stats.snapshot.is_empty() {
            return;
        }
        if let Err(refused) = self.hub.take(Source::Worker(worker), connected.incarnation, stats) {
            tracing::warn!(worker = connected.node, slot = worker.0, %refused, "stats report");
        }
    }

    fn replica_of(&mut self, worker: WorkerId) -> Option<ReplicaId> {
        let connected = self.connected.get_mut(&worker)?;
        connected.replica = self.dispatch.replica_of(worker, connected.replica);
        connected.replica
    }

    fn step_done(&mut self, worker: WorkerId, result: StepResult) {
        self.report(worker, &result.stats);
        let replica = self.replica_of(worker).and_then(|id| self.replicas.get(&id));
        match replica {
            Some(replica) => replica.do_send(StepDone { worker, result }),
            None => self.hub.observer().record().fenced_frame(FencedReason::NoRank),
        }
    }

    pub(super) fn worker_gone(
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
        self.dispatch.not_silent(worker);
        let Some(connected) = self.connected.remove(&worker) else { return };
        let incarnation = connected.incarnation;
        let leaves = |member: &Member| member.worker == worker && member.draining;
        if self.stopping {
            tracing::debug!(worker = connected.node, slot = worker.0, %reason, "the worker is gone");
        } else if self.core.members().any(leaves) {
            tracing::info!(worker = connected.node, slot = worker.0, "the worker has left");
        } else {
            tracing::warn!(worker = connected.node, slot = worker.0, %reason, "the worker is gone");
        }
        self.records.left(worker, reason, since_1970().as_secs());
        self.hub.lost(Source::Worker(worker), incarnation);
        let drained = self.core.member(worker).is_some_and(|member| member.draining);
        let now = self.clock.now();
        self.actors.peer_lost(connected.peer, reason);
        self.worker_died(worker, &connected.node, drained, reason);
        let mut effects = Vec::new();
        self.core.worker_left(now, worker, incarnation, reason, &mut effects);
        self.carry_out(ctx, effects);
        // After what the core had to report about it.
        if drained {
            // It is not expected back, so it is neither up nor down.
            self.hub.observer().record().worker_gone(worker);
            self.roster.given_up(worker);
            let (node, pid) = (connected.node, connected.pid);
            ctx.run_later(FROZEN_TOLD_FOR, move |actor, _| {
                if actor.frozen.get(&node) == Some(&pid) {
                    actor.frozen.remove(&node);
                    actor.unpublished = true;
                }
            });
        } else {
            self.hub.observer().record().worker_up(worker, false);
            self.absences.left(now, worker);
        }
    }
}

impl Handler<Admit> for ClusterActor {
    type Result = Result<Welcome, JoinRefusal>;

    fn handle(&mut self, Admit(hello): Admit, _ctx: &mut Self::Context) -> Self::Result {
        if self.stopping {
            return Err(JoinRefusal::NotYet("the coordinator is shutting down".to_owned()));
        }
        let node = &hello.node;
        if hello.fetched != self.to_fetch.fingerprint() && self.to_fetch.fingerprint() != 0 {
            tracing::info!(worker = node, "the worker looks for the model's files first");
            return Err(JoinRefusal::Fetch(self.to_fetch.clone()));
        }
        let worker = match self.roster.admit(node, hello.incarnation, hello.rejoin.slot) {
            Admission::Slot(worker) => worker,
            Admission::Taken => {
                return Err(JoinRefusal::NotYet(format!(
                    "another process is linked as node {node}"
                )));
            }
            Admission::Retired => {
                let reason = format!("several other processes have been node {node} since");
                return Err(JoinRefusal::Never(format!("{reason}: start the worker again")));
            }
        };
        for (worker, run) in self.roster.take_freed() {
            self.hub.retire(Source::Worker(worker), run);
            self.restarts.remove(&worker);
        }
        let interval = if self.worker_stats { STATS_INTERVAL } else { Duration::ZERO };
        Ok(Welcome { worker, stats_interval_ms: interval.as_millis() as u64 })
    }
}

impl Handler<NotJoined> for ClusterActor {
    type Result = ();

    fn handle(&mut self, NotJoined { node, worker }: NotJoined, _ctx: &mut Self::Context) {
        self.roster.not_joined(&node, worker);
    }
}

impl Handler<Joined> for ClusterActor {
    type Result = ();

    fn handle(&mut self, joined: Joined, ctx: &mut Self::Context) {
        let Joined { hello, worker, connection } = joined;
        let incarnation = hello.incarnation;
        // Another process may have joined in its place since its admission.
        let admission = self.roster.admit(&hello.node, incarnation, hello.rejoin.slot);
        if admission != Admission::Slot(worker) {
            return;
        }
        if let Some(old) = self.connected.get(&worker) {
            let (old_number, old_link) = (old.number, old.link.clone());
            self.worker_gone(ctx, worker, old_number, "it joined again");
            old_link.close();
        }
        let JoinOutcome { link: number, restarted, retired } =
            self.roster.joined(worker, incarnation);
        let actors = self.actors.clone();
        let peer = actors.reserve_peer();
        let to = Inbox { addr: ctx.address(), worker, number, slots_used: Arc::default() };
        let link = connection.start_with(LivenessConfig::default(), self.clock.clone(), |link| {
            actors.peer_up_as(peer, &hello.node, link.clone());
            move |event| match event {
                // At once: frames of applications take no room from steps.
                LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                    actors.frame(peer, &frame.body)
                }
                event => to.put(event),
            }
        });
        tracing::info!(worker = hello.node, slot = worker.0, pid = hello.pid, "joined");
        let node = hello.node.clone();
        let addr = PeerAddr::new(link.clone());
        let host = hello.host.clone();
        let pid = hello.pid;
        let connected =
            Connected { incarnation, number, peer, node, host, pid, link, addr, replica: None };
        self.connected.insert(worker, connected);
        self.records.joined(worker, &hello.node, hello.pid, incarnation);
        self.absences.back(worker);
        self.frozen.remove(&hello.node);
        if hello.rejoin.slot.is_some() {
            self.hub.has_history(Source::Worker(worker), incarnation);
        }
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
            gpu: hello.gpu,
            build: hello.build,
        };
        if let Some((resource, needed, offered)) = self.core.placement().lacks(&member) {
            tracing::warn!(
                worker = member.node,
                slot = worker.0,
                resource,
                needed,
                offered,
                "the worker has too few resources to be a rank"
            );
        }
        if let Some(other) = self.core.members().find(|other| other.build != member.build) {
            let (node, build) = (&member.node, &member.build);
            let (other_node, other_build) = (&other.node, &other.build);
            tracing::warn!(
                worker = node,
                slot = worker.0,
                build,
                other_node,
                other_build,
                "workers run several builds; all ranks of a replica must run the same one"
            );
        }
        let now = self.clock.now();
        self.core.set_held_weights(worker, hello.rejoin.shard);
        self.core.trouble_brought(now, &member, hello.rejoin.trouble);
        let mut effects = Vec::new();
        self.report_member(&member);
        self.core.worker_joined(now, member, &mut effects);
        // At once: without a value until the next count, an alert would end and begin again.
        self.hub.observer().record().device_set_aside(worker, self.core.is_aside(worker));
        self.carry_out(ctx, effects);
    }
}

impl Handler<FromLink> for ClusterActor {
    type Result = ();

    fn handle(&mut self, message: FromLink, ctx: &mut Self::Context) {
        let FromLink { worker, number, event, slot: _place } = message;
        if !self.roster.is_present(worker, number) {
            return;
        }
        match event {
            LinkEvent::Frame(frame) => self.take(ctx, worker, &frame),
            LinkEvent::Suspect => {
                tracing::warn!(
                    worker = self.node_of(worker),
                    slot = worker.0,
                    "the worker is silent"
                );
                self.dispatch.silent(worker);
            }
            LinkEvent::Alive => {
                let node = self.node_of(worker);
                tracing::info!(worker = node, slot = worker.0, "the worker answers again");
                self.dispatch.not_silent(worker);
            }
            LinkEvent::Closed { reason } => {
                self.hub.observer().record().link_ended(link_end(&reason));
                if matches!(reason, CloseReason::Silent { .. })
                    && let Some(connected) = self.connected.get(&worker)
                {
                    self.frozen.insert(connected.node.clone(), connected.pid);
                }
                self.worker_gone(ctx, worker, number, &reason.to_string());
            }
        }
    }
}

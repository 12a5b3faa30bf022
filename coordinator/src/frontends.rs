//! The coordinator's side of front ends in their own processes: their links, requests and reports.
//!
//! A link's reader task puts requests into the engine's queue; one task per front end gathers the
//! events of its requests and sends many per frame. Neither waits for the other: when the engine's
//! queue is full, the client gets a 429 (unless its answer has begun); a front end that does not
//! read its events loses its link; and the requests of a lost link are cancelled.
//!
//! - `events`: events on their way to a front end
//! - `link`: the receiving side of a front end's link
//! - `preparation`: requests that wait for a grammar, or for accepted tokens to be replayed
//! - `request`: converts a front end's request to the engine's
//! - `resume`: PURE: replays what was accepted of a request to its stop checks and guides
//! - `slots`: PURE: which front end has which slot
mod events;
mod link;
mod preparation;
mod request;
mod resume;
mod slots;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use shared::actor::ActorRuntime;
use shared::actor::exchange::PeerId;
use shared::actor::link::{Connection, LinkHandle};
use shared::actor::liveness::LivenessConfig;
use shared::actor::peer::PeerAddr;
use shared::clock::Clock;
use shared::ids::{Incarnation, RequestId};
use shared::metrics::Source;
use shared::protocol::actors::{ActorLife, ActorReport};
use shared::protocol::{
    AdapterCommand, EngineEvent, FrontendHello, FrontendId, FrontendWelcome, Serving, ToFrontend,
    WorkerStats,
};
use tokio::sync::mpsc;

pub use self::events::RemoteEvents;
use self::events::{LinkRequests, LinkState};
use self::link::Receiver;
use self::slots::{Absence, AdmittedFrontend, Replaced, Slots};
use crate::adapters::{AdapterChanges, ServedAdapters};
use crate::cluster::actor::JoinRefusal;
use crate::engine::{
    EngineCommand, EngineError, EventSender, GenerateRequest, retry_after_seconds,
};
use crate::http::gate::Gate;
use crate::http::params::Limits;
use crate::http::state::ReadinessCheck;
use crate::metrics::Hub;
use crate::text::model::TextModel;

/// Maximum number of a front end's events waiting to be sent: several steps of 10,000 streams.
const EVENTS_MAX: usize = 1 << 17;
/// Interval of a front end's stats reports.
const STATS_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which [`Frontends::flush`] checks the queues.
const FLUSH_POLL: Duration = Duration::from_millis(5);
/// Interval at which absent front ends are looked for.
const ABSENCE_POLL: Duration = Duration::from_secs(10);

/// Accepts front ends. Lives as long as the coordinator.
pub struct Frontends {
    actors: ActorRuntime,
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
    commands: mpsc::Sender<EngineCommand>,
    text: Arc<TextModel>,
    serving: Serving,
    adapters: ServedAdapters,
    /// Carries out changes of adapters.
    changes: AdapterChanges,
    limits: Limits,
    readiness: ReadinessCheck,
    gate: Gate,
    slots: Mutex<Slots<LinkedFrontend>>,
    /// The next link's number; number 0 is this process's own front end.
    links: AtomicU64,
}

/// An open link.
#[derive(Debug)]
struct LinkedFrontend {
    /// Unique among all links ever made.
    number: u64,
    /// Its number in the actor runtime.
    peer: PeerId,
    pid: u32,
    handle: LinkHandle,
    /// Queue of events to send.
    queue: mpsc::Sender<(RequestId, EngineEvent)>,
}

impl std::fmt::Debug for Frontends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frontends").field("serving", &self.serving).finish_non_exhaustive()
    }
}

impl Frontends {
    /// Starts without front ends. Their requests go to `commands` if `gate` admits them.
    #[must_use]
    pub fn new(
        hub: Arc<Hub>,
        clock: Arc<dyn Clock>,
        commands: mpsc::Sender<EngineCommand>,
        text: Arc<TextModel>,
        serving: Serving,
        (adapters, changes): (ServedAdapters, AdapterChanges),
        readiness: ReadinessCheck,
        actors: ActorRuntime,
        gate: Gate,
    ) -> Self {
        Self {
            actors,
            hub,
            clock,
            commands,
            text,
            limits: Limits::new(serving.max_model_len),
            serving,
            adapters,
            changes,
            readiness,
            gate,
            slots: Mutex::default(),
            links: AtomicU64::new(1),
        }
    }

    /// Linked front ends: name, slot, process id.
    #[must_use]
    pub fn linked(&self) -> Vec<(String, FrontendId, u32)> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.linked().map(|(node, id, link)| (node.to_owned(), id, link.pid)).collect()
    }

    /// Waits up to `patience` until all queued events have left this process.
    pub async fn flush(&self, patience: Duration) {
        let waiting = || {
            let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            let links = || slots.linked().map(|(_, _, link)| link);
            let waits = |link: &LinkedFrontend| link.queue.capacity() < EVENTS_MAX;
            (links().count(), links().any(|link| waits(link) || link.handle.has_queued()))
        };
        let flushed = async {
            while waiting().1 {
                tokio::time::sleep(FLUSH_POLL).await;
            }
        };
        let _ = tokio::time::timeout(patience, flushed).await;
        if waiting().0 > 0 {
            // The last frame taken from a queue may still be on its way to the socket.
            tokio::time::sleep(FLUSH_POLL * 4).await;
        }
    }

    /// Answers a hello.
    ///
    /// # Errors
    /// Why this front end is rejected, as a sentence for its log.
    pub fn admit(&self, hello: &FrontendHello) -> Result<FrontendWelcome, JoinRefusal> {
        // Perhaps an earlier coordinator closed its totals.
        if self.hub.is_retired_frontend(hello.incarnation) {
            return Err(slots::closed());
        }
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let admitted = slots.admit(self.clock.now(), &hello.node, hello.incarnation, hello.slot);
        drop(slots);
        let AdmittedFrontend { frontend, freed } = admitted?;
        if let Some(closed) = freed {
            self.hub.retire(Source::Frontend(frontend), closed);
        }
        Ok(FrontendWelcome {
            frontend,
            stats_interval_ms: STATS_INTERVAL.as_millis() as u64,
            serving: Serving { adapters: self.adapters.all(), ..self.serving.clone() },
        })
    }

    /// Carries out a front end's command about an adapter. The front end learns of the new list
    /// before it learns of the outcome.
    fn change_adapter(
        self: &Arc<Self>,
        id: FrontendId,
        link_number: u64,
        ask: u64,
        command: AdapterCommand,
    ) {
        let frontends = self.clone();
        // The link's reader is no task of actix, so `actix::spawn` would panic here.
        tokio::spawn(async move {
            let outcome = frontends.changes.ask(command).await;
            let link = {
                let slots = frontends.slots.lock().unwrap_or_else(PoisonError::into_inner);
                let is_it = |(_, of, link): &(&str, FrontendId, &LinkedFrontend)| {
                    *of == id && link.number == link_number
                };
                slots.linked().find(is_it).map(|(_, _, link)| link.handle.clone())
            };
            let Some(link) = link.map(PeerAddr::new) else { return };
            let list = ToFrontend::Adapters(frontends.adapters.all());
            for message in [list, ToFrontend::AdapterChanged(ask, outcome)] {
                if let Err(error) = link.tell_when_room(&message).await {
                    tracing::warn!(%error, "a front end does not learn of its adapters");
                }
            }
        });
    }

    /// An admitted front end went away before it got its welcome.
    pub fn not_joined(&self, node: &str) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).not_joined(node);
    }

    /// The hub that counts failed handshakes.
    pub(crate) fn hub(&self) -> &Hub {
        &self.hub
    }

    /// Starts the link of a front end that has got its welcome.
    pub fn joined(self: &Arc<Self>, hello: &FrontendHello, id: FrontendId, connection: Connection) {
        let (queue, incoming) = mpsc::channel(EVENTS_MAX);
        let open = LinkState::new();
        let incarnation = hello.incarnation;
        let link_number = self.links.fetch_add(1, Ordering::Relaxed);
        let peer = self.actors.reserve_peer();
        let requests = LinkRequests::new(queue.clone(), open.clone());
        let receiver = Receiver::new(self.clone(), hello, id, link_number, requests, peer);
        let sink = move |event| receiver.take(event);
        // Before the first report can come.
        if hello.slot.is_some() {
            self.hub.has_history(Source::Frontend(id), incarnation);
        }
        // The link's end is reported under this lock, so not before the link has its slot.
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let link = connection.start(LivenessConfig::default(), self.clock.clone(), sink);
        let (number, pid, handle) = (link_number, hello.pid, link.clone());
        let linked = LinkedFrontend { number, peer, pid, handle, queue };
        let joined = slots.joined(&hello.node, id, incarnation, linked);
        drop(slots);
        match joined {
            Ok(Replaced { run, link: old }) => {
                if let Some(run) = run {
                    self.hub.retire(Source::Frontend(id), run);
                }
                if let Some(old) = old {
                    // Now, not when its end is noticed: until then actors that are reported over
                    // the new link would be taken for another process's.
                    self.actors.peer_lost(old.peer, "it joined again");
                    old.handle.close();
                }
            }
            // Since its admission, another process has joined in its place.
            Err(late) => {
                late.handle.close();
                self.hub.lost(Source::Frontend(id), incarnation);
                return;
            }
        }
        tracing::info!(frontend = %id, node = hello.node, pid = hello.pid, "joined");
        self.hub.observer().record().frontend_up(id);
        self.actors.peer_up_as(peer, &hello.node, link.clone());
        self.name(&hello.node, id, ActorLife::Alive, None);
        let addr = PeerAddr::new(link);
        actix::spawn(events::send(incoming, addr.clone(), open.clone()));
        let told = (self.readiness.clone(), self.adapters.clone());
        actix::spawn(events::send_state(told, addr, open));
    }

    /// Reports the front end as an actor, `frontend/NODE`.
    fn name(&self, node: &str, id: FrontendId, life: ActorLife, reason: Option<&str>) {
        let name = format!("frontend/{node}");
        let report = ActorReport {
            name: name.clone(),
            kind: "frontend".to_owned(),
            generation: u64::from(id.0),
            life,
            restarts: 0,
            max_restarts: None,
            reason: reason.map(str::to_owned),
        };
        if let Err(error) = self.actors.report(node, report) {
            tracing::debug!(%error, name, "not among the actors");
        }
        if life == ActorLife::Dead {
            self.actors.forget(&name);
        }
    }

    /// The link ended; returns whether it was the slot's current one.
    fn left(
        &self,
        id: FrontendId,
        incarnation: Incarnation,
        link_number: u64,
        reason: &str,
    ) -> bool {
        tracing::info!(frontend = %id, %reason, "the front end is gone");
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // A process's old link may end after its next one has started.
        let ended = slots.left(self.clock.now(), id, |link| link.number == link_number);
        drop(slots);
        match ended {
            None => return false,
            Some(Absence::Lost) => self.hub.lost(Source::Frontend(id), incarnation),
            Some(Absence::Over) => self.hub.retire(Source::Frontend(id), incarnation),
        }
        self.hub.observer().record().frontend_down(id, self.clock.now());
        true
    }

    /// A front end said goodbye over this link: its last report came before.
    fn leaves(&self, id: FrontendId, link_number: u64) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.leaves(id, |link| link.number == link_number);
        drop(slots);
        self.hub.observer().record().frontend_leaves(id);
    }

    /// Closes the totals of front ends that are not expected back, and frees their slots.
    fn give_up_absent(&self) {
        let lost = self.hub.lost_frontends();
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let over = slots.give_up(self.clock.now(), &lost);
        drop(slots);
        for (id, run) in over {
            tracing::info!(frontend = %id, "the front end is not expected back: its totals stay");
            self.hub.retire(Source::Frontend(id), run);
        }
    }

    /// Does so from time to time, as long as anybody else has these front ends.
    pub async fn watch_absences(frontends: Weak<Self>) {
        loop {
            tokio::time::sleep(ABSENCE_POLL).await;
            let Some(frontends) = frontends.upgrade() else { return };
            frontends.give_up_absent();
        }
    }

    fn report(&self, id: FrontendId, incarnation: Incarnation, stats: &WorkerStats) {
        if let Err(refused) = self.hub.take(Source::Frontend(id), incarnation, stats) {
            tracing::warn!(frontend = %id, %refused, "stats report");
        }
    }

    /// Passes a request to the engine.
    fn submit_to_engine(&self, request: Box<GenerateRequest>, events: RemoteEvents) {
        let retry_after_s = retry_after_seconds(request.id);
        let command = EngineCommand::Submit { request, events: EventSender::Remote(events) };
        if let Err(mpsc::error::TrySendError::Full(command)) = self.commands.try_send(command)
            && let EngineCommand::Submit { events, .. } = command
        {
            let max = crate::engine::COMMAND_QUEUE_MAX as u32;
            self.refuse(&events, EngineError::QueueFull { queued: max, max, retry_after_s });
        }
    }

    /// Passes a request to the engine as soon as its queue has room.
    async fn submit_when_room(&self, request: Box<GenerateRequest>, events: RemoteEvents) {
        let command = EngineCommand::Submit { request, events: EventSender::Remote(events) };
        // If nobody takes it any more, dropping it reports its end.
        let _ = self.commands.send(command).await;
    }

    /// Tells a front end that its request is rejected, and counts that.
    fn refuse(&self, events: &EventSender, error: EngineError) {
        self.hub.observer().refused(events, &error);
        let _ = events.send(EngineEvent::Failed(error));
    }
}

#[cfg(test)]
mod tests;

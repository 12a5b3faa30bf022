//! The actor side of one process: its links, the mailboxes of its own actors, its pending waits.
//!
//! One lock guards the pure [`Exchange`](super::exchange::Exchange) and
//! [`Registry`](super::registry::Registry) and the tables that turn their effects into sends;
//! nothing blocks while it is held. A lost message is counted, and whoever waits for its outcome is
//! told.
//!
//! - `state`: what the lock guards, and sending
//! - `deadlines`: the thread that enforces the deadlines of asks and watches
//! - `waiting`: who waits for an outcome or a death
mod deadlines;
mod state;
mod waiting;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use self::state::{Mailbox, Peer, State, Watch};
pub(super) use self::waiting::Dispatched;
pub use self::waiting::{DeathWatch, NotWatched};
use super::exchange::{Effect, Origin, Outgoing, PeerId};
use super::link::LinkHandle;
use super::named::Envelope;
use super::registry::{Home, Known, Notice, RegistryError, WATCHES_MAX, Watching};
use super::remote::{ActorMessage, RemoteAddr};
use crate::clock::Clock;
use crate::metrics::catalogue::{ACTOR_MESSAGES, ACTOR_MESSAGES_REFUSED, ACTOR_RESTARTS};
use crate::metrics::labels::MessageRefusal;
use crate::metrics::local::PerValue;
use crate::metrics::{Counter, SharedStats};
use crate::protocol::actors::{ActorFrame, ActorLife, ActorReport, AskError, Wants};
use crate::wire::codec;

/// The outcome of a message, for its mailbox and its sender.
pub(super) type Outcome = Result<Vec<u8>, AskError>;

/// Whether a process forwards messages for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The coordinator: it forwards.
    Hub,
    /// Any other process; its only link leads to the hub.
    Spoke,
}

/// The actor side of one process; see the module's documentation. Clones share it.
#[derive(Clone)]
pub struct ActorRuntime {
    inner: Arc<Inner>,
}

struct Inner {
    role: Role,
    clock: Arc<dyn Clock>,
    stats: SharedStats,
    counters: Counters,
    state: Mutex<State>,
}

struct Counters {
    messages: Counter,
    restarts: Counter,
    refused: PerValue<Counter>,
}

impl fmt::Debug for ActorRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActorRuntime").field("role", &self.inner.role).finish_non_exhaustive()
    }
}

impl ActorRuntime {
    /// The coordinator's runtime. `run` differs for each process run.
    #[must_use]
    pub fn hub(node: &str, run: u64, clock: Arc<dyn Clock>) -> Self {
        Self::new(Role::Hub, node, run, clock)
    }

    /// The runtime of any other process.
    #[must_use]
    pub fn spoke(node: &str, run: u64, clock: Arc<dyn Clock>) -> Self {
        Self::new(Role::Spoke, node, run, clock)
    }

    fn new(role: Role, node: &str, run: u64, clock: Arc<dyn Clock>) -> Self {
        let stats = SharedStats::default();
        let counters = stats.with(|stats| Counters {
            messages: stats.counter(ACTOR_MESSAGES, []),
            restarts: stats.counter(ACTOR_RESTARTS, []),
            refused: PerValue::new::<MessageRefusal>(|reason| {
                stats.counter(ACTOR_MESSAGES_REFUSED, [reason])
            }),
        });
        let state = State::new(node, run);
        Self { inner: Arc::new(Inner { role, clock, stats, counters, state: Mutex::new(state) }) }
    }

    /// The counters of this runtime.
    #[must_use]
    pub fn stats(&self) -> &SharedStats {
        &self.inner.stats
    }

    /// The address of a named actor anywhere in the cluster, whether or not it exists.
    #[must_use]
    pub fn addr<M: ActorMessage>(&self, name: &str) -> RemoteAddr<M> {
        RemoteAddr::new(self.clone(), name)
    }

    /// Resolves once, when the actor `name` is dead; at once if it is dead already or does not
    /// exist. While the coordinator cannot be reached, it waits until it can. Resolves to an error
    /// when the actor cannot be watched, which says nothing about its life.
    ///
    /// A coordinator that has just taken over waits [`RETURN_GRACE`](super::registry::RETURN_GRACE)
    /// for actors that it does not know yet: a living actor that has not reported to it is not
    /// dead.
    #[must_use]
    pub fn watch(&self, name: &str) -> DeathWatch {
        let (told, dead) = oneshot::channel();
        let now = self.inner.clock.now();
        let mut state = self.state();
        let id = state.number();
        state.watches.insert(id, Watch { name: name.to_owned(), generation: None, told });
        if self.inner.role == Role::Hub || state.registry.find(name).is_some() {
            match state.registry.watch(now, (Home::Here, id), name, None) {
                Ok(Watching::Alive { .. }) => {}
                Ok(Watching::Awaited) => self.tick_from_now_on(&mut state),
                Ok(Watching::Over { reason }) => state.tell(id, Ok(reason)),
                Err(error) => state.tell(id, Err(NotWatched(error.to_string()))),
            }
        } else if state.watches.len() > WATCHES_MAX {
            let error = RegistryError::Full(WATCHES_MAX);
            state.tell(id, Err(NotWatched(error.to_string())));
        } else if let Some(peer) = state.hub() {
            let frame = ActorFrame::Watch { id, name: name.to_owned(), generation: None };
            let _ = state.send(peer, &frame);
        }
        drop(state);
        DeathWatch { runtime: Arc::downgrade(&self.inner), id, dead }
    }

    /// This hub has taken over from another: that hub's processes are about to link to this one.
    pub fn settle(&self) {
        let now = self.inner.clock.now();
        self.state().registry.settle(now);
    }

    /// All actors known here: the whole cluster's at the hub, this process's elsewhere.
    #[must_use]
    pub fn list(&self) -> Vec<Known> {
        self.state().registry.list().cloned().collect()
    }

    /// The number of known actors in each state.
    #[must_use]
    pub fn lives(&self) -> [(ActorLife, u64); 6] {
        let mut lives = [
            ActorLife::Pending,
            ActorLife::Starting,
            ActorLife::Alive,
            ActorLife::Draining,
            ActorLife::Restarting,
            ActorLife::Dead,
        ]
        .map(|life| (life, 0));
        for known in self.state().registry.list() {
            for (life, count) in &mut lives {
                *count += u64::from(known.report.life == *life);
            }
        }
        lives
    }

    /// Reports an actor that belongs to the cluster itself (a worker, a replica); called at the
    /// hub.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub fn report(&self, node: &str, report: ActorReport) -> Result<(), RegistryError> {
        let mut notices = Vec::new();
        let mut state = self.state();
        let taken = state.registry.report(Home::Here, node, report, &mut notices);
        self.notify(&mut state, notices);
        taken
    }

    /// Registers a linked process. Pass the link's actor frames to [`ActorRuntime::frame`], and its
    /// end to [`ActorRuntime::peer_lost`].
    #[must_use]
    pub fn peer_up(&self, node: &str, link: LinkHandle) -> PeerId {
        let peer = self.reserve_peer();
        self.peer_up_as(peer, node, link);
        peer
    }

    /// Reserves the number of a future link, for owners whose receiving side needs it first.
    #[must_use]
    pub fn reserve_peer(&self) -> PeerId {
        PeerId(self.state().number())
    }

    /// As [`ActorRuntime::peer_up`], with a reserved number.
    pub fn peer_up_as(&self, peer: PeerId, node: &str, link: LinkHandle) {
        let mut state = self.state();
        state.peers.insert(peer, Peer { node: node.to_owned(), link });
        if self.inner.role == Role::Spoke {
            let reports: Vec<ActorReport> =
                state.registry.list().map(|known| known.report.clone()).collect();
            for report in reports {
                let _ = state.send(peer, &ActorFrame::Report(report));
            }
            let watches: Vec<ActorFrame> = state
                .watches
                .iter()
                .filter(|(_, watch)| state.registry.find(&watch.name).is_none())
                .map(|(id, watch)| ActorFrame::Watch {
                    id: *id,
                    name: watch.name.clone(),
                    generation: watch.generation,
                })
                .collect();
            for frame in watches {
                let _ = state.send(peer, &frame);
            }
        }
    }

    /// Forgets an actor of the cluster itself, whose death was reported before.
    pub fn forget(&self, name: &str) {
        self.state().registry.forget(name);
    }

    /// A link has ended.
    pub fn peer_lost(&self, peer: PeerId, reason: &str) {
        let (mut effects, mut notices) = (Vec::new(), Vec::new());
        let mut state = self.state();
        let Some(lost) = state.peers.remove(&peer) else { return };
        state.exchange.peer_lost(peer, &lost.node, &mut effects);
        let reason = format!("the link to {} is gone: {reason}", lost.node);
        state.registry.peer_lost(peer, &reason, &mut notices);
        self.notify(&mut state, notices);
        self.carry_out(&mut state, effects);
    }

    /// Takes an actor frame of a linked process; false when it cannot be decoded: close the link.
    #[must_use]
    pub fn frame(&self, peer: PeerId, body: &[u8]) -> bool {
        let frame = match codec::decode_message::<ActorFrame>(body) {
            Ok(frame) => frame,
            Err(error) => {
                let node = self.state().peers.get(&peer).map(|peer| peer.node.clone());
                let node = node.unwrap_or_default();
                tracing::error!(node, %error, "sent an actor frame that cannot be read");
                return false;
            }
        };
        let now = self.inner.clock.now();
        let (mut effects, mut notices) = (Vec::new(), Vec::new());
        let mut state = self.state();
        let Some(node) = state.peers.get(&peer).map(|peer| peer.node.clone()) else {
            return true;
        };
        let hub = self.inner.role == Role::Hub;
        let home = Home::Peer(peer);
        match frame {
            ActorFrame::Report(report) if hub => {
                let (name, generation) = (report.name.clone(), report.generation);
                if let Err(error) = state.registry.report(home, &node, report, &mut notices) {
                    let reason = error.to_string();
                    let _ = state.send(peer, &ActorFrame::Refused { name, generation, reason });
                }
            }
            ActorFrame::Watch { id, name, generation } if hub => {
                let answer = match state.registry.watch(now, (home, id), &name, generation) {
                    Ok(Watching::Alive { generation }) => {
                        Some(ActorFrame::Watching { id, generation })
                    }
                    Ok(Watching::Awaited) => {
                        self.tick_from_now_on(&mut state);
                        None
                    }
                    Ok(Watching::Over { reason }) => Some(ActorFrame::Died { id, reason }),
                    Err(error) => Some(ActorFrame::NotWatched { id, reason: error.to_string() }),
                };
                if let Some(answer) = answer {
                    let _ = state.send(peer, &answer);
                }
            }
            ActorFrame::Unwatch { id } if hub => state.registry.unwatch((home, id)),
            ActorFrame::Deliver { id, to, wants, within_ms, body } => {
                // A spoke forwards nothing: two processes could otherwise send a message back and
                // forth.
                let route = state.route(&to, self.inner.role, !hub);
                let within = Duration::from_millis(within_ms.into());
                let message = Outgoing { to, wants, within, body };
                let origin = Origin::Peer(peer, id);
                state.exchange.send(now, origin, route, message, &mut effects);
            }
            ActorFrame::Answer { id, outcome } => {
                state.exchange.answered(Some(peer), id, outcome, &mut effects);
            }
            ActorFrame::Watching { id, generation } if !hub => {
                if let Some(watch) = state.watches.get_mut(&id) {
                    watch.generation = Some(generation);
                }
            }
            ActorFrame::Died { id, reason } if !hub => state.tell(id, Ok(reason)),
            ActorFrame::NotWatched { id, reason } if !hub => {
                state.tell(id, Err(NotWatched(reason)));
            }
            ActorFrame::Refused { name, generation, reason } if !hub => {
                tracing::error!(actor = name, reason, "the coordinator does not take this actor");
                let same = |mailbox: &Mailbox| mailbox.generation == generation;
                if state.mailboxes.get(&name).is_some_and(same) {
                    // Dropping its mailbox ends its task.
                    state.mailboxes.remove(&name);
                }
            }
            other => tracing::debug!(node, frame = ?other, "not for this side"),
        }
        self.notify(&mut state, notices);
        self.carry_out(&mut state, effects);
        if state.exchange.outstanding() > 0 {
            self.tick_from_now_on(&mut state);
        }
        true
    }

    /// Sends a message; the returned receiver gets its outcome, or already holds an error where the
    /// message certainly cannot arrive.
    pub(super) fn dispatch(&self, message: Outgoing) -> Dispatched {
        let now = self.inner.clock.now();
        let wants = message.wants;
        let (sender, outcome) = oneshot::channel();
        let mut effects = Vec::new();
        let mut state = self.state();
        let route = state.route(&message.to, self.inner.role, false);
        let waiter = if wants == Wants::Nothing { 0 } else { state.number() };
        if waiter != 0 {
            state.waiters.insert(waiter, sender);
            self.tick_from_now_on(&mut state);
        }
        state.exchange.send(now, Origin::Here(waiter), route, message, &mut effects);
        let lost = self.carry_out(&mut state, effects);
        Dispatched { runtime: Arc::downgrade(&self.inner), waiter, outcome, lost }
    }

    /// Registers an actor of this process, which takes messages from now on.
    pub(super) fn admit(
        &self,
        mut report: ActorReport,
        sender: mpsc::Sender<Envelope>,
    ) -> Result<u64, RegistryError> {
        super::registry::check_name(&report.name)?;
        if report.name.contains('/') {
            return Err(RegistryError::Reserved);
        }
        let mut state = self.state();
        if state.mailboxes.contains_key(&report.name) {
            return Err(RegistryError::Taken(state.node.clone()));
        }
        let generation = state.number();
        report.generation = generation;
        let name = report.name.clone();
        self.tell_of(&mut state, report)?;
        state.mailboxes.insert(name, Mailbox { generation, sender });
        Ok(generation)
    }

    /// Reports a change in the life of an actor of this process.
    pub(super) fn became(&self, report: ActorReport) {
        let mut state = self.state();
        if report.life == ActorLife::Dead {
            let same = |mailbox: &Mailbox| mailbox.generation == report.generation;
            if state.mailboxes.get(&report.name).is_some_and(same) {
                state.mailboxes.remove(&report.name);
            }
        }
        let _ = self.tell_of(&mut state, report);
    }

    fn tell_of(&self, state: &mut State, report: ActorReport) -> Result<(), RegistryError> {
        let (mut notices, node) = (Vec::new(), state.node.clone());
        state.registry.report(Home::Here, &node, report.clone(), &mut notices)?;
        self.notify(state, notices);
        if self.inner.role == Role::Spoke
            && let Some(peer) = state.hub()
        {
            let _ = state.send(peer, &ActorFrame::Report(report));
        }
        Ok(())
    }

    /// Stops an actor of this process: it handles the messages in its mailbox, then ends.
    pub fn stop(&self, name: &str) {
        self.state().mailboxes.remove(name);
    }

    pub(super) fn restarted(&self) {
        self.inner.stats.with(|stats| stats.add(self.inner.counters.restarts, 1));
    }

    /// An actor of this process has handled, or rejected, a message whose outcome someone waits
    /// for.
    pub(super) fn answer(&self, id: u64, outcome: Outcome) {
        let mut effects = Vec::new();
        let mut state = self.state();
        state.exchange.answered(None, id, outcome, &mut effects);
        self.carry_out(&mut state, effects);
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.inner.clock
    }

    pub(super) fn downgrade(&self) -> WeakRuntime {
        WeakRuntime(Arc::downgrade(&self.inner))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self, state: &mut State, notices: Vec<Notice>) {
        for Notice { watcher: (home, id), reason } in notices {
            match home {
                Home::Here => state.tell(id, Ok(reason)),
                Home::Peer(peer) => {
                    let _ = state.send(peer, &ActorFrame::Died { id, reason });
                }
            }
        }
        for ((home, id), generation) in state.registry.take_found() {
            if let Home::Peer(peer) = home {
                let _ = state.send(peer, &ActorFrame::Watching { id, generation });
            }
        }
    }

    /// Carries out effects. Returns why a message that nobody waits for was lost, if one was.
    fn carry_out(&self, state: &mut State, effects: Vec<Effect>) -> Option<AskError> {
        let mut queue = VecDeque::from(effects);
        let mut lost = None;
        while let Some(effect) = queue.pop_front() {
            let mut more = Vec::new();
            match effect {
                Effect::Send { peer, frame } => {
                    let Err(error) = state.send(peer, &frame) else { continue };
                    match frame {
                        ActorFrame::Deliver { id: 0, .. } => queue.push_back(Effect::Lost(error)),
                        ActorFrame::Deliver { id, .. } => {
                            state.exchange.answered(Some(peer), id, Err(error), &mut more);
                        }
                        ActorFrame::Answer { id, outcome: Ok(_) } => {
                            // The asker is told why there is no reply.
                            self.count(&error);
                            let frame = ActorFrame::Answer { id, outcome: Err(error) };
                            more.push(Effect::Send { peer, frame });
                        }
                        // The link is gone, and the peer knows that itself.
                        _ => self.count(&error),
                    }
                }
                Effect::Deliver { to, id, wants, body } => {
                    let envelope = Envelope::new(self.downgrade(), id, wants, body);
                    match state.put(&to, envelope) {
                        Ok(()) => {
                            self.inner
                                .stats
                                .with(|stats| stats.add(self.inner.counters.messages, 1));
                            if wants == Wants::Delivery {
                                state.exchange.answered(None, id, Ok(Vec::new()), &mut more);
                            }
                        }
                        Err(error) if id == 0 => queue.push_back(Effect::Lost(error)),
                        Err(error) => {
                            state.exchange.answered(None, id, Err(error), &mut more);
                        }
                    }
                }
                Effect::Resolve { waiter, outcome } => {
                    if let Err(error) = &outcome {
                        self.count(error);
                    }
                    if let Some(sender) = state.waiters.remove(&waiter) {
                        let _ = sender.send(outcome);
                    }
                }
                Effect::Lost(error) => {
                    self.count(&error);
                    lost = Some(error);
                }
            }
            queue.extend(more);
        }
        lost
    }

    fn count(&self, error: &AskError) {
        let reason = match error {
            AskError::NoSuchActor(_) => MessageRefusal::NoSuchActor,
            AskError::MailboxFull(_) => MessageRefusal::MailboxFull,
            AskError::TooManyAsks(_) => MessageRefusal::TooManyAsks,
            AskError::LinkLost(_) => MessageRefusal::LinkLost,
            AskError::Deadline(_) => MessageRefusal::Deadline,
            AskError::Failed(_) => MessageRefusal::Failed,
            AskError::Malformed(_) => MessageRefusal::Malformed,
            AskError::TooLarge(_) => MessageRefusal::TooLarge,
        };
        self.inner.stats.with(|stats| stats.add(self.inner.counters.refused.get(reason), 1));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(ticker) = &state.ticker {
            ticker.unpark();
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inner")
    }
}

/// A weak reference to a runtime.
#[derive(Clone)]
pub(super) struct WeakRuntime(Weak<Inner>);

impl WeakRuntime {
    pub(super) fn upgrade(&self) -> Option<ActorRuntime> {
        self.0.upgrade().map(|inner| ActorRuntime { inner })
    }
}

impl fmt::Debug for WeakRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakRuntime")
    }
}

#[cfg(test)]
mod tests;

//! The actor side of one process: its links, its own actors' mailboxes, and its pending waits.
//!
//! One lock guards the pure [`Exchange`](super::exchange::Exchange) and
//! [`Registry`](super::registry::Registry) and the tables that turn their effects into sends;
//! nothing blocks while it is held. A lost message is counted, and whoever waits for its outcome is
//! told.
//!
//! - `state`: what the lock guards, and sending
//! - `links`: linked processes and their frames
//! - `effects`: carries out what the pure cores decided
//! - `keeping`: created actors as etcd keeps them; at the hub
//! - `placing`: created actors: who starts them, and those that this process was told to start
//! - `leaving`: a process that is about to leave lets its actors finish
//! - `deadlines`: the thread that enforces the deadlines of asks and watches
//! - `waiting`: handles for those who wait for an outcome or a death
mod deadlines;
mod effects;
mod keeping;
mod leaving;
mod links;
mod placing;
mod state;
mod waiting;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::{mpsc, oneshot};

pub use self::placing::{ClassHost, CreatedActor};
use self::state::{Mailbox, State, Watch};
pub(super) use self::waiting::Dispatched;
pub use self::waiting::{DeathWatch, NotWatched};
use super::exchange::{Origin, Outgoing};
use super::named::Envelope;
use super::placement::is_reserved;
use super::registry::{Home, Known, RegistryError, WATCHES_MAX, Watcher, Watching, truncate};
use super::remote::{ActorMessage, RemoteAddr};
use crate::clock::Clock;
use crate::metrics::catalogue::{ACTOR_MESSAGES, ACTOR_MESSAGES_REFUSED, ACTOR_RESTARTS};
use crate::metrics::labels::MessageRefusal;
use crate::metrics::local::PerValue;
use crate::metrics::{Counter, SharedStats};
use crate::protocol::actors::creation::Instance;
use crate::protocol::actors::{ActorFrame, ActorLife, ActorReport, AskError, REASON_MAX, Wants};

/// Outcome of a message, for its mailbox and its sender.
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
    /// Creates the coordinator's runtime. `run` differs for each process run.
    #[must_use]
    pub fn hub(node: &str, run: u64, clock: Arc<dyn Clock>) -> Self {
        Self::new(Role::Hub, node, run, clock)
    }

    /// Creates the runtime of any other process.
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

    /// Returns the address of a named actor anywhere in the cluster, whether or not it exists.
    #[must_use]
    pub fn addr<M: ActorMessage>(&self, name: &str) -> RemoteAddr<M> {
        RemoteAddr::new(self.clone(), name)
    }

    /// Resolves once, when the actor `name` is dead; at once if it is already dead or does not
    /// exist. While the coordinator cannot be reached, it waits until it can. Resolves to an error
    /// if the actor cannot be watched, which says nothing about its life.
    ///
    /// A coordinator that has just taken over waits [`RETURN_GRACE`](super::registry::RETURN_GRACE)
    /// for actors that it does not know yet: a living actor that has not reported to it is not
    /// dead.
    #[must_use]
    pub fn watch(&self, name: &str) -> DeathWatch {
        let (told, dead) = oneshot::channel();
        let mut state = self.state();
        let id = state.number();
        state.watches.insert(id, Watch { name: name.to_owned(), generation: None, told });
        if self.inner.role == Role::Hub || state.registry.find(name).is_some() {
            match self.begin_watch(&mut state, (Home::Here, id), name, None) {
                Ok(Watching::Alive { .. } | Watching::Awaited) => {}
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

    /// Begins a watch of an actor that is known here or, for a limited time, awaited.
    fn begin_watch(
        &self,
        state: &mut State,
        watcher: Watcher,
        name: &str,
        generation: Option<u64>,
    ) -> Result<Watching, RegistryError> {
        let watching = state.registry.watch(self.inner.clock.now(), watcher, name, generation);
        if matches!(watching, Ok(Watching::Awaited)) {
            self.tick_from_now_on(state);
        }
        watching
    }

    /// Tells a hub that took over from another that the other's processes are about to link to it.
    pub fn settle(&self) {
        let now = self.inner.clock.now();
        let mut state = self.state();
        state.registry.settle(now);
        state.placement.settle(now);
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

    /// Forgets an actor of the cluster itself whose death was reported before.
    pub fn forget(&self, name: &str) {
        self.state().registry.forget(name);
    }

    /// Sends a message; the returned receiver gets its outcome, or already holds an error if the
    /// message certainly cannot arrive.
    pub(super) fn dispatch(&self, message: Outgoing) -> Dispatched {
        let now = self.inner.clock.now();
        let wants = message.wants;
        let (sender, outcome) = oneshot::channel();
        let mut effects = Vec::new();
        let mut state = self.state();
        let route = state.route(now, &message.to, self.inner.role, false);
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
        kill: oneshot::Sender<String>,
    ) -> Result<u64, RegistryError> {
        super::registry::check_name(&report.name)?;
        if report.name.contains('/') {
            return Err(RegistryError::Reserved);
        }
        let mut state = self.state();
        if state.mailboxes.contains_key(&report.name) {
            return Err(RegistryError::Taken(state.node.clone()));
        }
        if state.leaving && !is_reserved(&report.name) {
            return Err(RegistryError::Leaving);
        }
        let generation = state.number();
        report.generation = generation;
        let name = report.name.clone();
        self.tell_of(&mut state, report)?;
        let instance = Instance { generation, incarnation: 0 };
        if !is_reserved(&name) {
            state.spawned.insert(generation, name.clone());
        }
        state.mailboxes.insert(name, Mailbox { instance, sender, kill: Some(kill) });
        Ok(generation)
    }

    /// Reports a change in the life of an actor of this process.
    pub(super) fn became(&self, mut report: ActorReport) {
        if let Some(reason) = &mut report.reason {
            truncate(reason, REASON_MAX);
        }
        let mut state = self.state();
        if report.life == ActorLife::Dead {
            state.spawned.remove(&report.generation);
            let same = |mailbox: &Mailbox| {
                mailbox.instance == Instance { generation: report.generation, incarnation: 0 }
            };
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

    /// Passes on the outcome of a message that an actor of this process has handled or rejected.
    pub(super) fn answer(&self, id: u64, mut outcome: Outcome) {
        if let Err(AskError::Failed(reason) | AskError::Malformed(reason)) = &mut outcome {
            truncate(reason, REASON_MAX);
        }
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

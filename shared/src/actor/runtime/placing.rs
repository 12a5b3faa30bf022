//! Created actors: at the hub, what the [`placement`](crate::actor::placement) core decides; in
//! every process, the actors that it was told to start.
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::state::{Hosted, Mailbox, State};
use super::{ActorRuntime, Role};
use crate::actor::exchange::{self, PeerId};
use crate::actor::hosting::{self, ActorClass, ActorContext, Controller, HUNG_MAX, Start};
use crate::actor::placement::room::{Amounts, Host};
use crate::actor::placement::{Effect, Wanted, is_reserved};
use crate::actor::registry::{Home, RegistryError, truncate};
use crate::protocol::NodeResources;
use crate::protocol::actors::creation::{
    Begin, Creation, EndHow, Hosting, Instance, Placed, PlacementError, PlacementReply,
    PlacementRequest, check_class,
};
use crate::protocol::actors::{ActorFrame, ActorLife, AskError, REASON_MAX};
use crate::wire::codec;

/// A created actor, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatedActor {
    /// Its name.
    pub name: String,
    /// What it takes, in words.
    pub needs: String,
    /// Which start of it this is.
    pub incarnation: u32,
}

/// A process that hosts classes, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassHost {
    /// Its node.
    pub node: String,
    /// The classes.
    pub classes: Vec<String>,
    /// Number of created actors in it.
    pub actors: usize,
    /// What they take, in words.
    pub used: String,
    /// What is left, in words.
    pub free: String,
    /// Whether it gets no more, because its node drains.
    pub draining: bool,
}

impl ActorRuntime {
    /// From now on this process can be told to start actors of class `C`.
    ///
    /// # Errors
    /// What is wrong with the class's name, or that there are too many classes.
    pub fn host<C: ActorClass>(&self) -> Result<(), RegistryError> {
        check_class(C::CLASS).map_err(|_| RegistryError::BadName)?;
        let mut state = self.state();
        let most = crate::protocol::actors::creation::CLASSES_MAX;
        if state.classes.len() >= most && !state.classes.contains_key(C::CLASS) {
            return Err(RegistryError::Full(most));
        }
        state.classes.insert(C::CLASS.to_owned(), hosting::factory::<C>());
        self.tell_hosting(&mut state);
        Ok(())
    }

    /// What this process has for created actors, all together, and its labels. It replaces what a
    /// worker offers by itself: its host's cores and memory, and its operator's labels and
    /// resources, but no GPU, since its rank has that.
    ///
    /// # Errors
    /// The bound that is broken, in one sentence.
    pub fn offer(&self, offer: NodeResources) -> Result<(), String> {
        offer.check()?;
        let mut state = self.state();
        state.offer = Some(offer);
        self.tell_hosting(&mut state);
        Ok(())
    }

    /// Same as [`ActorRuntime::offer`], unless the program has made an offer.
    pub fn offer_by_default(&self, offer: NodeResources) {
        let mut state = self.state();
        if state.offer.is_none() && offer.check().is_ok() {
            state.offer = Some(offer);
            self.tell_hosting(&mut state);
        }
    }

    pub(super) fn tell_hosting(&self, state: &mut State) {
        if state.classes.is_empty() {
            return;
        }
        let classes =
            if state.leaving { Vec::new() } else { state.classes.keys().cloned().collect() };
        let hosting = Hosting { classes, offer: state.offer.clone().unwrap_or_default() };
        match self.inner.role {
            Role::Hub => {
                let (mut effects, node) = (Vec::new(), state.node.clone());
                let now = self.inner.clock.now();
                state.placement.hosting(now, Home::Here, &node, hosting, &mut effects);
                self.decided(state, effects);
            }
            Role::Spoke => {
                if let Some(peer) = state.hub() {
                    let _ = state.send(peer, &ActorFrame::Hosting(hosting));
                }
            }
        }
    }

    /// Tells a new hub which created actors run here, then what else could.
    pub(super) fn tell_placed(&self, state: &mut State, peer: PeerId) {
        let placed = |(instance, hosted): (&Instance, &Hosted)| Placed {
            name: hosted.begin.creation.name.clone(),
            instance: *instance,
            life: hosted.life,
            reason: hosted.reason.clone(),
            known: Some((hosted.begin.creation.clone(), hosted.begin.restarted)),
        };
        let all: Vec<Placed> = state.hosted.iter().map(placed).collect();
        for placed in all {
            let _ = state.send(peer, &ActorFrame::Placed(Box::new(placed)));
        }
        state.hosted.retain(|_, hosted| hosted.life != ActorLife::Dead);
        self.tell_hosting(state);
    }

    /// A linked process is to leave, or stays after all; called at the hub.
    pub fn drains(&self, peer: PeerId, leaves: bool) {
        let (mut effects, now) = (Vec::new(), self.inner.clock.now());
        let mut state = self.state();
        if !state.peers.contains_key(&peer) {
            // Its link has just ended, with all that was remembered of it.
            return;
        }
        state.placement.drains(now, Home::Peer(peer), leaves, &mut effects);
        self.decided(&mut state, effects);
    }

    /// Created actors that are not dead; known at the hub.
    #[must_use]
    pub fn created(&self) -> Vec<CreatedActor> {
        let state = self.state();
        let names = state.registry.list().map(|known| known.report.name.clone());
        let created = |name: String| {
            let created = state.placement.created(&name)?;
            let needs = Amounts::needed(&created.creation.needs).to_string();
            Some(CreatedActor { name, needs, incarnation: created.instance.incarnation })
        };
        names.filter_map(created).collect()
    }

    /// Processes that host classes; known at the hub.
    #[must_use]
    pub fn class_hosts(&self) -> Vec<ClassHost> {
        let state = self.state();
        let host = |host: &Host| ClassHost {
            node: host.node.clone(),
            classes: host.hosting.classes.clone(),
            actors: host.actors(),
            used: host.used().to_string(),
            free: host.free().to_string(),
            draining: host.draining,
        };
        state.placement.hosts().map(host).collect()
    }

    /// Draws the generation of a new actor.
    pub(in crate::actor) fn draw(&self) -> u64 {
        self.state().number()
    }

    /// A request for the hub; its answer goes to ask `id`.
    pub(super) fn requested(&self, state: &mut State, id: u64, body: &[u8]) {
        if id == 0 {
            // It was told rather than asked: there is nobody to answer.
            return;
        }
        let now = self.inner.clock.now();
        let request = match codec::decode_message::<PlacementRequest>(body) {
            Ok(request) => request,
            Err(error) => {
                let mut effects = Vec::new();
                let error = AskError::Malformed(error.to_string());
                state.exchange.answered(None, id, Err(error), &mut effects);
                self.carry_out(state, effects);
                return;
            }
        };
        let mut effects = Vec::new();
        match request {
            PlacementRequest::Create { creation, generation, again, or_get, within_ms } => {
                let within = Duration::from_millis(within_ms.into()).min(exchange::DEADLINE_MAX);
                let name = &creation.name;
                let taken = state.placement.created(name).is_none();
                let taken = state.registry.living(name).filter(|_| taken).map(str::to_owned);
                if taken.is_none()
                    && state.placement.created(name).is_none()
                    && let Err(error) = state.registry.room()
                {
                    let error = PlacementError::Full(error.to_string());
                    effects.push(Effect::Answer { asker: id, outcome: Err(error) });
                    return self.decided(state, effects);
                }
                let wanted = Wanted { asker: id, creation, generation, again, or_get, within };
                state.placement.create(now, wanted, taken.as_deref(), &mut effects);
            }
            PlacementRequest::Kill { name, restart } => {
                if let Err(error) = self.kills(state, now, id, &name, restart, &mut effects) {
                    effects.push(Effect::Answer { asker: id, outcome: Err(error) });
                }
            }
            PlacementRequest::Find { name } => {
                let outcome = match state.registry.living(&name) {
                    Some(node) => Ok(PlacementReply { node: node.to_owned() }),
                    None if state.placement.settles(now) => Err(PlacementError::Settling),
                    None => Err(PlacementError::NoSuchActor(name)),
                };
                effects.push(Effect::Answer { asker: id, outcome });
            }
        }
        self.decided(state, effects);
    }

    fn kills(
        &self,
        state: &mut State,
        now: Duration,
        asker: u64,
        name: &str,
        restart: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), PlacementError> {
        if is_reserved(name) {
            return Err(PlacementError::NotYours(name.to_owned()));
        }
        let killed = state.placement.kill(now, asker, name, restart, effects);
        if killed.is_ok() {
            return killed;
        }
        // One that a program spawned itself.
        let Some((home, generation)) = state.registry.at(name) else {
            return match state.placement.settles(now) {
                true => Err(PlacementError::Settling),
                false => killed,
            };
        };
        let node = state.registry.living(name).unwrap_or_default().to_owned();
        let instance = Instance { generation, incarnation: 0 };
        let (name, reason) = (name.to_owned(), "it was killed".to_owned());
        effects.push(Effect::End { home, name, instance, how: EndHow::Kill, reason });
        effects.push(Effect::Answer { asker, outcome: Ok(PlacementReply { node }) });
        Ok(())
    }

    /// Carries out what the placement core decided.
    pub(super) fn decided(&self, state: &mut State, effects: Vec<Effect>) {
        let mut queue = VecDeque::from(effects);
        while let Some(effect) = queue.pop_front() {
            let mut more = Vec::new();
            match effect {
                Effect::Begin { home: Home::Here, begin } => {
                    if let Some(placed) = self.begins(state, *begin) {
                        self.placed_here(state, placed, &mut more);
                    }
                }
                Effect::Begin { home: Home::Peer(peer), begin } => {
                    let _ = state.send(peer, &ActorFrame::Begin(begin));
                }
                Effect::End { home: Home::Here, name, instance, how, reason } => {
                    if let Some(placed) = ends(state, name, instance, how, reason) {
                        self.placed_here(state, placed, &mut more);
                    }
                }
                Effect::End { home: Home::Peer(peer), name, instance, how, reason } => {
                    let _ = state.send(peer, &ActorFrame::End { name, instance, how, reason });
                }
                Effect::Answer { asker, outcome } => {
                    let reply = codec::encode(&outcome)
                        .map_err(|error| AskError::Malformed(error.to_string()));
                    let mut answers = Vec::new();
                    state.exchange.answered(None, asker, reply, &mut answers);
                    self.carry_out(state, answers);
                }
                Effect::Publish { home, node, report } => {
                    let mut notices = Vec::new();
                    if let Err(error) = state.registry.place(home, &node, report, &mut notices) {
                        tracing::error!(%error, "a created actor is not among the actors");
                    }
                    self.notify(state, notices);
                }
                Effect::Restarted => self.restarted(),
            }
            queue.extend(more);
        }
        state.ring_keeper();
        if state.placement.awaits(self.inner.clock.now()) {
            self.tick_from_now_on(state);
        }
    }

    fn placed_here(&self, state: &mut State, placed: Placed, effects: &mut Vec<Effect>) {
        let (node, now) = (state.node.clone(), self.inner.clock.now());
        let taken = state.is_taken(&placed.name);
        state.placement.placed(now, Home::Here, &node, placed, taken, effects);
    }

    /// Starts an actor in this process; returns what the hub is told if it cannot.
    pub(super) fn begins(&self, state: &mut State, begin: Begin) -> Option<Placed> {
        let (name, instance) = (begin.creation.name.clone(), begin.instance);
        match self.started(state, begin) {
            Ok(()) => None,
            Err((life, reason)) => {
                tracing::warn!(actor = name, reason, "an actor cannot be started here");
                Some(Placed { life, ..dead(name, instance, reason) })
            }
        }
    }

    /// If it fails: `Pending` when another process may take the actor, or this one later; `Dead`
    /// when the actor cannot be started at all.
    fn started(&self, state: &mut State, begin: Begin) -> Result<(), (ActorLife, String)> {
        let not_taken = |reason: String| (ActorLife::Pending, reason);
        let Begin { instance, restarted, creation } = &begin;
        let Creation { name, class, mailbox, .. } = creation;
        let unknown = || not_taken(format!("this process does not host the class `{class}`"));
        let factory = state.classes.get(class).cloned().ok_or_else(unknown)?;
        if state.leaving {
            return Err(not_taken("its process leaves".to_owned()));
        }
        let own = |mailbox: &Mailbox| mailbox.instance.generation != instance.generation;
        if state.mailboxes.get(name).is_some_and(own) {
            let reason = "another actor of its process has its name";
            return Err((ActorLife::Dead, reason.to_owned()));
        }
        if state.controller.is_none() {
            let started = Controller::start();
            let started = started
                .map_err(|error| not_taken(format!("no thread to run actors with: {error}")))?;
            state.controller = Some(started);
        }
        let Some(controller) = &state.controller else { return Ok(()) };
        let threads = controller.threads().load(Ordering::Relaxed);
        if threads >= state.hosted.len() + HUNG_MAX {
            let hung = threads - state.hosted.len();
            return Err(not_taken(format!(
                "{hung} threads of its process hang in handlers, the limit is {HUNG_MAX}"
            )));
        }
        let (sender, receiver) = mpsc::channel((*mailbox).max(1) as usize);
        let (kill, killed) = oneshot::channel();
        let start = Start {
            runtime: self.downgrade(),
            begin: begin.clone(),
            factory,
            context: ActorContext {
                runtime: self.clone(),
                name: name.clone(),
                node: state.node.clone(),
                restarts: restarted.total,
            },
            mailbox: receiver,
            killed,
            threads: controller.threads().clone(),
        };
        controller.handle().spawn(hosting::run(start));
        let mailbox = Mailbox { instance: *instance, sender, kill: None };
        state.mailboxes.insert(name.clone(), mailbox);
        let hosted = Hosted { life: ActorLife::Starting, reason: None, kill: Some(kill), begin };
        state.hosted.insert(hosted.begin.instance, hosted);
        Ok(())
    }

    /// A created actor of this process is now in this state.
    pub(in crate::actor) fn placed_became(
        &self,
        name: &str,
        instance: Instance,
        life: ActorLife,
        mut reason: Option<String>,
    ) {
        // A frame has a bound: without the news, the hub would take it for alive.
        if let Some(reason) = &mut reason {
            truncate(reason, REASON_MAX);
        }
        let mut state = self.state();
        let state = &mut *state;
        if life == ActorLife::Dead {
            tracing::info!(actor = name, reason, "a created actor ended");
            if state.mailboxes.get(name).is_some_and(|mailbox| mailbox.instance == instance) {
                state.mailboxes.remove(name);
            }
        }
        self.hosted_became(state, name.to_owned(), instance, life, reason);
    }

    /// Records the state of a created actor of this process, and tells the hub.
    pub(super) fn hosted_became(
        &self,
        state: &mut State,
        name: String,
        instance: Instance,
        life: ActorLife,
        reason: Option<String>,
    ) {
        let Some(hosted) = state.hosted.get_mut(&instance) else { return };
        // One that finishes its messages goes on doing so.
        let life = match (hosted.life, life) {
            (ActorLife::Draining, ActorLife::Alive) => ActorLife::Draining,
            (_, life) => life,
        };
        (hosted.life, hosted.reason) = (life, reason.clone());
        let placed = Placed { name, instance, life, reason, known: None };
        let told = match (self.inner.role, state.hub()) {
            (Role::Hub, _) => {
                let mut effects = Vec::new();
                self.placed_here(state, placed, &mut effects);
                self.decided(state, effects);
                true
            }
            (Role::Spoke, Some(peer)) => {
                state.send(peer, &ActorFrame::Placed(Box::new(placed))).is_ok()
            }
            (Role::Spoke, None) => false,
        };
        // Otherwise the next hub is told.
        if told && life == ActorLife::Dead {
            state.hosted.remove(&instance);
        }
    }
}

fn dead(name: String, instance: Instance, mut reason: String) -> Placed {
    truncate(&mut reason, REASON_MAX);
    Placed { name, instance, life: ActorLife::Dead, reason: Some(reason), known: None }
}

/// Ends an actor of this process; returns its end if it is not here.
pub(super) fn ends(
    state: &mut State,
    name: String,
    instance: Instance,
    how: EndHow,
    reason: String,
) -> Option<Placed> {
    let is_it = |mailbox: &Mailbox| mailbox.instance == instance;
    let is_open = state.mailboxes.get(&name).is_some_and(is_it);
    if instance.incarnation == 0 {
        if is_open
            && let Some(mailbox) = state.mailboxes.remove(&name)
            && let (EndHow::Kill, Some(kill)) = (how, mailbox.kill)
        {
            let _ = kill.send(reason);
        }
        return None;
    }
    if is_open {
        // No more messages; those that it has are handled, unless it is killed.
        state.mailboxes.remove(&name);
    }
    let Some(hosted) = state.hosted.get_mut(&instance) else {
        return Some(dead(name, instance, "it is not there".to_owned()));
    };
    match how {
        EndHow::Kill => {
            if let Some(kill) = hosted.kill.take() {
                let _ = kill.send(reason);
            }
        }
        EndHow::Finish if hosted.life != ActorLife::Dead => hosted.life = ActorLife::Draining,
        EndHow::Finish => {}
    }
    None
}

//! What hosting processes report about the actors that they were told to start.
use std::cmp::Ordering;
use std::time::Duration;

use super::room::Host;
use super::{Actor, Asker, Effect, LOST_GRACE, Phase, Placement, is_reserved, supervisor};
use crate::actor::registry::{Home, check_name, truncate};
use crate::protocol::actors::creation::{
    Creation, EndHow, Instance, Placed, PlacementError, Restarted,
};
use crate::protocol::actors::{ActorLife, REASON_MAX};

/// After this many refusals in a row the wait for the next try, each time twice as long, grows no
/// more: it is then 32 times [`LOST_GRACE`].
const REFUSALS_MAX: u32 = 5;

impl Placement {
    /// Takes a process's report. `taken`: a living actor that was not created has the name.
    pub fn placed(
        &mut self,
        now: Duration,
        home: Home,
        node: &str,
        placed: Placed,
        taken: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Placed { name, instance, life, reason, known } = placed;
        let mut reason = reason.unwrap_or_else(|| "it ended".to_owned());
        truncate(&mut reason, REASON_MAX);
        if matches!(life, ActorLife::Dead | ActorLife::Pending) {
            if let Some(host) = self.hosts.get_mut(&home)
                && host.release(instance)
            {
                self.rooms += 1;
            }
            let waits = life == ActorLife::Pending
                && self.not_taken(now, home, &name, instance, &reason, effects);
            if !waits {
                self.ended(now, home, &name, instance, &reason, known, taken, effects);
            }
        } else {
            self.account(home, node, &name, instance, known.as_ref());
            self.lives(now, home, node, &name, instance, life, known, taken, effects);
        }
        self.place(now, effects);
    }

    /// A process could not take an actor that it was told to start: the actor waits for a place
    /// again, rather in another process, for longer each time. False: it has ended instead.
    fn not_taken(
        &mut self,
        now: Duration,
        home: Home,
        name: &str,
        instance: Instance,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(actor) = self.actors.get_mut(name) else { return false };
        if actor.instance() != instance || actor.phase != Phase::Starting(home) {
            return false;
        }
        let wait = LOST_GRACE * (1 << actor.refusals.min(REFUSALS_MAX));
        actor.refusals = actor.refusals.saturating_add(1);
        actor.phase = Phase::Pending { not_before: now + wait };
        actor.reason = Some(reason.to_owned());
        actor.avoid = Some(home);
        self.keep(name);
        self.publish(name, effects);
        true
    }

    /// Counts what a living actor takes, even if it is about to be ended.
    fn account(
        &mut self,
        home: Home,
        node: &str,
        name: &str,
        instance: Instance,
        known: Option<&(Creation, Restarted)>,
    ) {
        let mine = self.actors.get(name).filter(|it| it.generation == instance.generation);
        let needs = known.map(|(creation, _)| &creation.needs);
        let needs = needs.or(mine.map(|actor| &actor.creation.needs)).cloned().unwrap_or_default();
        // Over a new link these reports come before what the process hosts.
        let host = self.hosts.entry(home).or_insert_with(|| Host::new(node));
        host.take(instance, &needs);
    }

    #[allow(clippy::too_many_arguments, reason = "one report, taken apart")]
    fn ended(
        &mut self,
        now: Duration,
        home: Home,
        name: &str,
        instance: Instance,
        reason: &str,
        known: Option<(Creation, Restarted)>,
        taken: bool,
        effects: &mut Vec<Effect>,
    ) {
        let settled = self.after_settling();
        let Some(actor) = self.actors.get_mut(name) else {
            if taken {
                return;
            }
            // It died while no coordinator was there to start it again.
            let Some((creation, restarted)) = known else { return };
            if let Some(actor) = self.adopted(name, instance, creation, restarted) {
                actor.lived = true;
                self.failed(now, name, Some(home), reason, effects);
                self.keep(name);
            }
            return;
        };
        if let Some((_, restarted)) = known
            && actor.generation == instance.generation
            && actor.incarnation < instance.incarnation
            && actor.home().is_none()
        {
            // Another coordinator has started it since, and that start is over, too.
            actor.supervisor = supervisor(&actor.creation, actor.generation, restarted);
            actor.supervisor.began(now);
            actor.incarnation = instance.incarnation;
            actor.phase = Phase::Lost { until: settled };
            self.failed(now, name, Some(home), reason, effects);
            self.keep(name);
            return;
        }
        let is_there = actor.home().is_none_or(|at| at == home);
        if actor.instance() != instance || !is_there {
            return;
        }
        match actor.phase {
            // Its end was counted when it was told to end, or when its link was lost.
            Phase::Pending { .. } => {}
            // A process that leaves without that may be back.
            Phase::Moving(_)
                if actor.creation.at.node.is_some()
                    && !actor.creation.at.soft
                    && self.drained.contains(&home) =>
            {
                self.bury(name, "its node drains, and it may be on no other", effects);
            }
            Phase::Moving(_) => {
                actor.phase = Phase::Pending { not_before: now };
                self.keep(name);
                self.publish(name, effects);
            }
            Phase::Starting(_) if !actor.lived => self.bury(name, reason, effects),
            Phase::Starting(_) | Phase::Alive(_) | Phase::Lost { .. } => {
                self.failed(now, name, Some(home), reason, effects);
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one report, taken apart")]
    fn lives(
        &mut self,
        now: Duration,
        home: Home,
        node: &str,
        name: &str,
        instance: Instance,
        life: ActorLife,
        known: Option<(Creation, Restarted)>,
        taken: bool,
        effects: &mut Vec<Effect>,
    ) {
        let refuse = |reason: &str, effects: &mut Vec<Effect>| {
            let (name, reason, how) = (name.to_owned(), reason.to_owned(), EndHow::Kill);
            effects.push(Effect::End { home, name, instance, how, reason });
        };
        if taken {
            return refuse("another actor has its name", effects);
        }
        // One that was wanted but never started gives way to one that lives.
        let mut waiting = Vec::new();
        let other = self.actors.get(name).filter(|it| it.generation != instance.generation);
        if let Some(other) = other {
            if other.incarnation > 0 {
                return refuse("another actor has its name", effects);
            }
            let adopts = known.as_ref().map(|(it, _)| it);
            let adopts = adopts.filter(|it| self.may_adopt(name, instance, it));
            let Some(adopts) = adopts else {
                return refuse("another actor has its name", effects);
            };
            waiting = self.gives_way(name, &adopts.class, node, effects);
        }
        let Some(actor) = self.actors.get_mut(name) else {
            let Some((creation, restarted)) = known else {
                return refuse("nobody knows it any more", effects);
            };
            let Some(actor) = self.adopted(name, instance, creation, restarted) else {
                return refuse("it has ended, or there are too many created actors", effects);
            };
            actor.getters = waiting;
            self.begun(now, name);
            return self.is_at(now, home, node, name, life, effects);
        };
        match (instance.incarnation.cmp(&actor.incarnation), actor.home()) {
            (Ordering::Less, _) => refuse("it was started again elsewhere", effects),
            // A process's new link can be there before its old one has ended.
            (Ordering::Equal, Some(at))
                if at != home && self.hosts.get(&at).is_none_or(|it| it.node != node) =>
            {
                refuse("it was started elsewhere, too", effects);
            }
            // Told to end, it may still have said that it lives.
            (Ordering::Equal, None) if actor.supervisor_ended() => {
                refuse("it is started again", effects);
            }
            (Ordering::Equal, _) => self.is_at(now, home, node, name, life, effects),
            (Ordering::Greater, _) => {
                // Another coordinator has started it since.
                self.ends(name, EndHow::Kill, "it was started again elsewhere", effects);
                if let Some(actor) = self.actors.get_mut(name) {
                    if let Some((_, restarted)) = known {
                        actor.supervisor = supervisor(&actor.creation, actor.generation, restarted);
                    }
                    actor.incarnation = instance.incarnation;
                    actor.phase = Phase::Starting(home);
                }
                self.is_at(now, home, node, name, life, effects);
            }
        }
    }

    /// A creation that has not begun ends, because an actor of another creation has the name.
    /// Returns those for whom that one will do, if its class is the same.
    pub(super) fn gives_way(
        &mut self,
        name: &str,
        class: &str,
        node: &str,
        effects: &mut Vec<Effect>,
    ) -> Vec<Asker> {
        let Some(pending) = self.actors.get_mut(name) else { return Vec::new() };
        let mut waiting = Vec::new();
        if pending.creation.class == class {
            waiting = std::mem::take(&mut pending.getters);
            if pending.or_get {
                waiting.extend(pending.creator.take());
            }
        }
        for (asker, _) in pending.askers() {
            let outcome = Err(PlacementError::NameTaken(node.to_owned()));
            effects.push(Effect::Answer { asker, outcome });
        }
        self.bury(name, "an actor of this name lives already", effects);
        waiting
    }

    /// Whether an actor that another coordinator created can be taken over.
    pub(super) fn may_adopt(&self, name: &str, instance: Instance, creation: &Creation) -> bool {
        let right = creation.name == name && check_name(name).is_ok() && !is_reserved(name);
        right
            && creation.check().is_ok()
            && !self.gone_set.contains(&instance.generation)
            && self.room_for(creation).is_ok()
    }

    /// Takes over an actor that another coordinator created.
    fn adopted(
        &mut self,
        name: &str,
        instance: Instance,
        creation: Creation,
        restarted: Restarted,
    ) -> Option<&mut Actor> {
        if !self.may_adopt(name, instance, &creation) {
            return None;
        }
        let phase = Phase::Lost { until: self.after_settling() };
        let mut actor = self.actor(creation, instance.generation, restarted, phase);
        actor.incarnation = instance.incarnation;
        self.actors.insert(name.to_owned(), actor);
        self.actors.get_mut(name)
    }

    /// An actor's current start is at `home`.
    fn is_at(
        &mut self,
        now: Duration,
        home: Home,
        node: &str,
        name: &str,
        life: ActorLife,
        effects: &mut Vec<Effect>,
    ) {
        let draining = self.hosts.get(&home).is_some_and(|host| host.draining);
        let leaves = draining || self.drained.contains(&home);
        self.keep(name);
        let Some(actor) = self.actors.get_mut(name) else { return };
        node.clone_into(&mut actor.node);
        if let Phase::Moving(at) = actor.phase {
            actor.phase = Phase::Moving(home);
            if at != home && life != ActorLife::Draining {
                // What it was told over the old link may not have arrived.
                self.moves(name, effects);
            }
            return;
        }
        if life == ActorLife::Alive {
            if !matches!(actor.phase, Phase::Alive(_)) {
                actor.supervisor.began(now);
            }
            (actor.phase, actor.lived, actor.refusals) = (Phase::Alive(home), true, 0);
            self.confirms(name, effects);
        } else if life == ActorLife::Draining {
            actor.phase = Phase::Moving(home);
        } else {
            actor.phase = Phase::Starting(home);
        }
        self.publish(name, effects);
        if leaves && !matches!(life, ActorLife::Draining) {
            self.moves(name, effects);
        }
    }
}

impl Actor {
    /// Whether its last start has been given up: a report that it lives is out of date.
    fn supervisor_ended(&self) -> bool {
        matches!(self.phase, Phase::Pending { .. })
    }
}

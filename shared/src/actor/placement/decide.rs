//! What becomes of an actor that ended, is lost, waits for too long, is killed, or whose node
//! drains.
use std::time::Duration;

use super::room;
use super::{DRAINED_MAX, Effect, GONE_MAX, LOST_GRACE, Phase, Placement, RETURN_GRACE, report_of};
use crate::actor::registry::Home;
use crate::actor::supervise::Decision;
use crate::protocol::actors::ActorReport;
use crate::protocol::actors::creation::{EndHow, PlacementError, PlacementReply};

impl Placement {
    /// The link to a process is gone. The actors in it may be back in a moment, or are started
    /// elsewhere.
    pub fn lost(&mut self, now: Duration, home: Home, reason: &str, effects: &mut Vec<Effect>) {
        self.drained.retain(|drained| *drained != home);
        if self.hosts.remove(&home).is_none() {
            return;
        }
        self.rooms += 1;
        let there = self.actors.iter().filter(|(_, actor)| actor.home() == Some(home));
        let there: Vec<String> = there.map(|(name, _)| name.clone()).collect();
        for name in there {
            let Some(actor) = self.actors.get_mut(&name) else { continue };
            if matches!(actor.phase, Phase::Starting(_)) {
                actor.supervisor.began(now);
            }
            actor.phase = match actor.phase {
                Phase::Moving(_) => Phase::Pending { not_before: now },
                _ => Phase::Lost { until: now + LOST_GRACE },
            };
            actor.reason = Some(reason.to_owned());
            self.keep(&name);
            self.publish(&name, effects);
        }
        self.place(now, effects);
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let is_over = |phase: Phase| matches!(phase, Phase::Lost { until } if until <= now);
        let over = self.actors.iter().filter(|(_, actor)| is_over(actor.phase));
        let over: Vec<String> = over.map(|(name, _)| name.clone()).collect();
        for name in over {
            let reason = self.actors.get(&name).and_then(|actor| actor.reason.clone());
            self.failed(now, &name, None, &reason.unwrap_or_default(), effects);
        }
        self.place(now, effects);
        self.tick_keeping(now, effects);
        self.call_off(now, effects);
    }

    /// Answers the askers whose time is over; an actor whose creator gave up is not started.
    fn call_off(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let late = |asker: &(u64, Duration)| asker.1 <= now;
        let names = self
            .actors
            .iter()
            .filter(|(_, actor)| actor.creator.iter().chain(&actor.getters).any(late));
        let names: Vec<String> = names.map(|(name, _)| name.clone()).collect();
        for name in names {
            if self.confirms_late(&name, effects) {
                continue;
            }
            let error = self.why_not(now, &name);
            let Some(actor) = self.actors.get_mut(&name) else { continue };
            for (asker, _) in actor.getters.extract_if(.., |asker| late(asker)) {
                effects.push(Effect::Answer { asker, outcome: Err(error.clone()) });
            }
            let Some((asker, _)) = actor.creator.take_if(|asker| late(asker)) else { continue };
            effects.push(Effect::Answer { asker, outcome: Err(error.clone()) });
            self.ends(&name, EndHow::Kill, "its creation was called off", effects);
            self.bury(&name, &error.to_string(), effects);
        }
    }

    /// Why an actor is not alive now.
    fn why_not(&self, now: Duration, name: &str) -> PlacementError {
        let Some(actor) = self.actors.get(name) else {
            return PlacementError::NoSuchActor(name.to_owned());
        };
        let reason = actor.reason.clone();
        match actor.phase {
            Phase::Pending { not_before } if not_before > now && actor.incarnation == 0 => {
                PlacementError::Settling
            }
            Phase::Pending { not_before } if not_before <= now => {
                let free = room::choose(&self.hosts, &actor.creation, actor.avoid);
                free.err().unwrap_or(PlacementError::Settling)
            }
            Phase::Starting(_) => {
                let node = &actor.node;
                PlacementError::NotStarted(format!("it is still being started on {node}"))
            }
            Phase::Alive(_) => {
                PlacementError::NotStarted("another coordinator has taken over".to_owned())
            }
            _ => PlacementError::NotStarted(reason.unwrap_or_else(|| "it failed".to_owned())),
        }
    }

    /// Ends an actor from outside, for `asker`, who is answered when the next coordinator would not
    /// start it again.
    ///
    /// # Errors
    /// [`PlacementError::NoSuchActor`]: none was created under this name.
    pub fn kill(
        &mut self,
        now: Duration,
        asker: u64,
        name: &str,
        restart: bool,
        effects: &mut Vec<Effect>,
    ) -> Result<(), PlacementError> {
        let Some(actor) = self.actors.get(name) else {
            return Err(PlacementError::NoSuchActor(name.to_owned()));
        };
        let (node, generation) = (actor.node.clone(), actor.generation);
        let waits = matches!(actor.phase, Phase::Pending { .. });
        let reason = "it was killed";
        self.ends(name, EndHow::Kill, reason, effects);
        if !restart {
            self.bury(name, reason, effects);
        } else if !waits {
            self.failed(now, name, None, reason, effects);
        }
        self.place(now, effects);
        let reply = PlacementReply { node };
        if restart || !self.keeping.awaits_end(now, name, generation, asker, &reply) {
            effects.push(Effect::Answer { asker, outcome: Ok(reply) });
        }
        Ok(())
    }

    /// A linked process is to leave, or stays after all: its actors finish the messages that they
    /// hold and are placed elsewhere. Forgotten with its link.
    pub fn drains(&mut self, now: Duration, home: Home, leaves: bool, effects: &mut Vec<Effect>) {
        if self.drained.contains(&home) == leaves {
            return;
        }
        if leaves {
            self.drained.push_back(home);
        } else {
            self.drained.retain(|drained| *drained != home);
        }
        while self.drained.len() > DRAINED_MAX {
            self.drained.pop_front();
        }
        if let Some(host) = self.hosts.get_mut(&home) {
            host.draining = leaves;
        }
        // Fewer places, but others wait for other reasons now.
        self.rooms += 1;
        if leaves {
            let names = self.actors.iter().filter(|(_, actor)| actor.home() == Some(home));
            let names: Vec<String> = names.map(|(name, _)| name.clone()).collect();
            for name in names {
                self.moves(&name, effects);
            }
        }
        self.place(now, effects);
    }

    /// An actor finishes its messages, and is then placed again.
    pub(super) fn moves(&mut self, name: &str, effects: &mut Vec<Effect>) {
        self.ends(name, EndHow::Finish, "its node drains", effects);
        if let Some(actor) = self.actors.get_mut(name)
            && let Some(home) = actor.home()
        {
            actor.phase = Phase::Moving(home);
            actor.reason = Some("its node drains".to_owned());
        }
        self.publish(name, effects);
    }

    /// An actor ended without being told to, or is lost: it is started again, or is dead.
    pub(super) fn failed(
        &mut self,
        now: Duration,
        name: &str,
        at: Option<Home>,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let Some(actor) = self.actors.get_mut(name) else { return };
        if matches!(actor.phase, Phase::Starting(_)) {
            // However long it took to be made, that is no life.
            actor.supervisor.began(now);
        }
        // Until then it, or a later start of it, may still be reported from elsewhere.
        let until = match actor.phase {
            Phase::Lost { until } => until,
            _ => now,
        };
        match actor.supervisor.on_exit(now) {
            Decision::RestartAfter(wait) => {
                actor.phase = Phase::Pending { not_before: until.max(now + wait) };
                actor.reason = Some(reason.to_owned());
                actor.avoid = at;
                effects.push(Effect::Restarted);
                self.publish(name, effects);
            }
            Decision::GiveUp { .. } if actor.creation.max_restarts == Some(0) => {
                self.bury(name, reason, effects);
            }
            Decision::GiveUp { reason: often } => {
                self.bury(name, &format!("{reason}; {often}"), effects);
            }
        }
    }

    /// Tells an actor's process to end it.
    pub(super) fn ends(
        &mut self,
        name: &str,
        how: EndHow,
        reason: &str,
        effects: &mut Vec<Effect>,
    ) {
        let Some(actor) = self.actors.get(name) else { return };
        if let Some(home) = actor.home() {
            let (name, reason) = (name.to_owned(), reason.to_owned());
            let instance = actor.instance();
            effects.push(Effect::End { home, name, instance, how, reason });
        }
    }

    /// An actor is dead: whoever waits for it is told, and its name is free.
    pub(super) fn bury(&mut self, name: &str, reason: &str, effects: &mut Vec<Effect>) {
        let Some(mut actor) = self.actors.remove(name) else { return };
        self.bytes = self.bytes.saturating_sub(actor.creation.size());
        self.keeping.ended(name);
        for (asker, _) in actor.askers() {
            let outcome = Err(PlacementError::NotStarted(reason.to_owned()));
            effects.push(Effect::Answer { asker, outcome });
        }
        if self.gone_set.insert(actor.generation) {
            self.gone.push_back(actor.generation);
        }
        if self.gone.len() > GONE_MAX
            && let Some(forgotten) = self.gone.pop_front()
        {
            self.gone_set.remove(&forgotten);
        }
        let report = ActorReport { reason: Some(reason.to_owned()), ..report_of(name, &actor) };
        effects.push(Effect::Publish { home: Home::Here, node: actor.node, report });
    }

    /// When an actor that died under another coordinator may be started again: not before every
    /// process has had the time to say that it runs it.
    pub(super) fn after_settling(&self) -> Duration {
        self.settles.max(RETURN_GRACE)
    }
}

//! What etcd keeps of created actors, so that the next coordinator can start those again whose
//! process died together with this one.
//!
//! An actor that may be started again is kept from its first start until it is dead. Whoever writes
//! to etcd asks for what is to be written ([`Placement::next_to_keep`]), writes it as the leader,
//! and says what came of it ([`Placement::written`]). What is written is always the present state,
//! so nothing queues up however long etcd is away. A creation is confirmed when etcd has it, and a
//! kill when etcd has the actor no more; but neither waits for longer than [`KEEP_PATIENCE`], and
//! they do not wait at all while etcd is known to be away.
//!
//! The next coordinator takes what was kept ([`Placement::resume`]) before processes report to it,
//! and waits for their reports as it does for a link that may be back in a moment.
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Actor, Effect, LOST_GRACE, Phase, Placement};
use crate::actor::exchange::ASKS_MAX;
use crate::protocol::actors::creation::{Creation, Instance, PlacementReply, Restarted};

/// How long a creation or a kill waits for etcd before it is confirmed without. As long as etcd may
/// take for one answer.
pub const KEEP_PATIENCE: Duration = Duration::from_secs(3);
/// Maximum number of actors that are written at once.
const WRITES_MAX: usize = 32;
/// Maximum size of what is written at once, in bytes; well below etcd's bound on a request.
const WRITE_BYTES_MAX: usize = 512 << 10;

/// An actor as etcd keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What it was created with.
    pub creation: Creation,
    /// How far it has come.
    pub start: KeptStart,
}

/// How often an actor has been started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptStart {
    /// Its last start.
    pub instance: Instance,
    /// How often it was started again, up to that start or, if it `waits`, up to the next.
    pub restarted: Restarted,
    /// Whether it runs nowhere and waits for a place.
    pub waits: bool,
}

/// A write to etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The actor's name.
    pub name: String,
    /// What to write.
    pub change: Change,
}

/// What is to be written of an actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It lives.
    Put {
        /// What it was created with; absent if etcd has that already.
        creation: Option<Box<Creation>>,
        /// How far it has come.
        start: KeptStart,
    },
    /// It is dead, or its name belongs to another that is not kept.
    Delete,
}

/// What came of the last writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// etcd has them.
    Stored,
    /// etcd does not answer, or refuses them.
    Failed,
    /// This process does not lead any more.
    Fenced,
}

/// What is known of etcd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Etcd {
    #[default]
    Answers,
    /// Nothing waits for it until it answers again.
    Away,
    /// Another coordinator may lead: nothing is confirmed without etcd.
    Fences,
}

/// Whoever killed an actor, and is answered when etcd has it no more.
#[derive(Debug)]
struct Killer {
    asker: u64,
    name: String,
    generation: u64,
    until: Duration,
    reply: PlacementReply,
}

/// What etcd has, and what it should have.
#[derive(Debug, Default)]
pub(super) struct Keeping {
    /// Whether there is an etcd.
    enabled: bool,
    etcd: Etcd,
    /// Names that etcd may have something of: what, where that is certain.
    there: BTreeMap<String, Option<KeptStart>>,
    /// Names of which etcd may not have the present state.
    due: BTreeSet<String>,
    /// What is being written; nothing: that the actor is no more.
    on_the_way: Vec<(String, Option<KeptStart>)>,
    killers: Vec<Killer>,
}

impl Keeping {
    /// An actor is dead.
    pub(super) fn ended(&mut self, name: &str) {
        if self.there.contains_key(name) {
            self.due.insert(name.to_owned());
        } else {
            self.due.remove(name);
        }
    }

    /// Whether `asker`, who killed an actor, is answered later.
    pub(super) fn awaits_end(
        &mut self,
        now: Duration,
        name: &str,
        generation: u64,
        asker: u64,
        reply: &PlacementReply,
    ) -> bool {
        let awaits = self.etcd != Etcd::Away
            && self.there.contains_key(name)
            && self.killers.len() < ASKS_MAX;
        if awaits {
            let (name, until, reply) = (name.to_owned(), now + KEEP_PATIENCE, reply.clone());
            self.killers.push(Killer { asker, name, generation, until, reply });
        }
        awaits
    }

    /// Whether somebody waits for etcd beside those who wait for an actor.
    pub(super) fn is_awaited(&self) -> bool {
        !self.killers.is_empty()
    }

    /// Whether a living actor's restarts in a row will be forgotten in a while.
    pub(super) fn counts_life_of(&self, actor: &Actor) -> bool {
        self.enabled && actor.is_kept() && actor.supervisor.in_a_row() > 0
    }
}

impl Actor {
    /// Whether it is to outlive the loss of its process together with the coordinator: not before
    /// its first start, since its creator asks again, and not if it may not be started again.
    fn is_kept(&self) -> bool {
        self.incarnation > 0 && self.creation.max_restarts != Some(0)
    }

    fn kept_start(&self) -> KeptStart {
        let waits = matches!(self.phase, Phase::Pending { .. });
        KeptStart { instance: self.instance(), restarted: self.restarted(), waits }
    }
}

impl Placement {
    /// From now on actors are kept in etcd.
    pub fn keep_from_now_on(&mut self) {
        self.keeping.enabled = true;
    }

    /// Etcd may have lost what it had, and has actors of these names, which may not be what was
    /// written: all is written again. Called while nothing is being written.
    pub fn keep_anew(&mut self, names: Vec<String>) {
        let kept = self.actors.iter().filter(|(_, actor)| actor.is_kept());
        self.keeping.due = kept.map(|(name, _)| name.clone()).chain(names.clone()).collect();
        self.keeping.there = names.into_iter().map(|name| (name, None)).collect();
    }

    /// Whether [`Self::next_to_keep`] may have something.
    #[must_use]
    pub fn has_to_keep(&self) -> bool {
        self.keeping.enabled && self.keeping.on_the_way.is_empty() && !self.keeping.due.is_empty()
    }

    /// Returns what is to be written next, all of it in one transaction, if anything. Then comes
    /// [`Self::written`].
    pub fn next_to_keep(&mut self) -> Vec<Write> {
        let mut writes = Vec::new();
        if !self.has_to_keep() {
            return writes;
        }
        let Keeping { there, due, on_the_way, .. } = &mut self.keeping;
        // First what may be there already: so no more can be there, or on its way, than actors
        // lived at one time and one batch of writes.
        let (old, new): (Vec<String>, Vec<String>) =
            due.iter().cloned().partition(|name| there.contains_key(name));
        let mut bytes = 0;
        for name in old.into_iter().chain(new) {
            let actor = self.actors.get(&name).filter(|actor| actor.is_kept());
            let start = actor.map(Actor::kept_start);
            let change = match (actor, start, there.get(&name)) {
                (Some(_), Some(start), Some(Some(has))) if *has == start => None,
                (Some(_), Some(start), Some(Some(has)))
                    if has.instance.generation == start.instance.generation =>
                {
                    Some(Change::Put { creation: None, start })
                }
                (Some(actor), Some(start), _) => {
                    let creation = Some(Box::new(actor.creation.clone()));
                    Some(Change::Put { creation, start })
                }
                (_, _, Some(_)) => Some(Change::Delete),
                (_, _, None) => None,
            };
            let Some(change) = change else {
                due.remove(&name);
                continue;
            };
            if let Change::Put { creation: Some(creation), .. } = &change {
                bytes += creation.size();
            }
            if !writes.is_empty() && (writes.len() >= WRITES_MAX || bytes > WRITE_BYTES_MAX) {
                break;
            }
            due.remove(&name);
            there.insert(name.clone(), None);
            on_the_way.push((name.clone(), start));
            writes.push(Write { name, change });
        }
        writes
    }

    /// Takes what came of the writes that were asked for last.
    pub fn written(&mut self, outcome: Written, effects: &mut Vec<Effect>) {
        let on_the_way = std::mem::take(&mut self.keeping.on_the_way);
        match outcome {
            Written::Stored => self.keeping.etcd = Etcd::Answers,
            Written::Fenced => self.keeping.etcd = Etcd::Fences,
            // Who leads is not known any more.
            Written::Failed if self.keeping.etcd == Etcd::Fences => {
                self.keeping.etcd = Etcd::Answers;
            }
            Written::Failed => {}
        }
        if outcome != Written::Stored {
            self.keeping.due.extend(on_the_way.into_iter().map(|(name, _)| name));
            return;
        }
        for (name, start) in on_the_way {
            let generation = start.map(|start| start.instance.generation);
            match start {
                Some(start) => drop(self.keeping.there.insert(name.clone(), Some(start))),
                None => drop(self.keeping.there.remove(&name)),
            }
            let ended = |it: &mut Killer| it.name == name && Some(it.generation) != generation;
            for Killer { asker, reply, .. } in self.keeping.killers.extract_if(.., ended) {
                effects.push(Effect::Answer { asker, outcome: Ok(reply) });
            }
            if let Some(actor) = self.actors.get_mut(&name)
                && Some(actor.generation) == generation
            {
                actor.unkept = None;
                self.confirms(&name, effects);
            }
        }
    }

    /// An actor is started, or found running: if etcd has nothing of it yet, nobody is told that it
    /// was created before etcd has.
    pub(super) fn begun(&mut self, now: Duration, name: &str) {
        self.keep(name);
        let there = self.keeping.there.get(name).copied().flatten();
        let waits = self.keeping.enabled && self.keeping.etcd != Etcd::Away;
        if let Some(actor) = self.actors.get_mut(name).filter(|actor| waits && actor.is_kept())
            && there.is_none_or(|it| it.instance.generation != actor.generation)
        {
            actor.unkept = Some(now + KEEP_PATIENCE);
        }
    }

    /// Etcd may not have what is now known of an actor.
    pub(super) fn keep(&mut self, name: &str) {
        if self.keeping.enabled && self.actors.get(name).is_some_and(Actor::is_kept) {
            self.keeping.due.insert(name.to_owned());
        }
    }

    /// Answers those who wait for an actor, if it is alive and they need not wait for etcd.
    pub(super) fn confirms(&mut self, name: &str, effects: &mut Vec<Effect>) {
        let Some(actor) = self.actors.get_mut(name) else { return };
        if !matches!(actor.phase, Phase::Alive(_)) || actor.unkept.is_some() {
            return;
        }
        let node = actor.node.clone();
        for (asker, _) in actor.askers() {
            let outcome = Ok(PlacementReply { node: node.clone() });
            effects.push(Effect::Answer { asker, outcome });
        }
    }

    /// Somebody waits no longer for an actor that is alive: it is created, whatever etcd has. False
    /// if it is not alive, or another coordinator may have taken over.
    pub(super) fn confirms_late(&mut self, name: &str, effects: &mut Vec<Effect>) -> bool {
        let Some(actor) = self.actors.get_mut(name) else { return false };
        let confirms = matches!(actor.phase, Phase::Alive(_)) && self.keeping.etcd != Etcd::Fences;
        if confirms {
            actor.unkept = None;
            self.confirms(name, effects);
        }
        confirms
    }

    /// Does what is due: nobody waits for an etcd that does not answer, and what has lived for a
    /// while is kept with all its restarts.
    pub(super) fn tick_keeping(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        if !self.keeping.enabled {
            return;
        }
        let late = |until: Duration| until <= now;
        let forgets = |(name, actor): (&String, &mut Actor)| {
            let lives = matches!(actor.phase, Phase::Alive(_)) && actor.is_kept();
            (lives && actor.supervisor.forgets(now)).then(|| name.clone())
        };
        let forgotten: Vec<String> = self.actors.iter_mut().filter_map(forgets).collect();
        self.keeping.due.extend(forgotten);
        let is_late = self.keeping.killers.iter().any(|killer| late(killer.until))
            || self.actors.values().any(|actor| actor.unkept.is_some_and(late));
        if !is_late || self.keeping.etcd == Etcd::Fences {
            return;
        }
        self.keeping.etcd = Etcd::Away;
        for Killer { asker, reply, .. } in std::mem::take(&mut self.keeping.killers) {
            effects.push(Effect::Answer { asker, outcome: Ok(reply) });
        }
        let waits = self.actors.iter().filter(|(_, actor)| actor.unkept.is_some());
        let waits: Vec<String> = waits.map(|(name, _)| name.clone()).collect();
        for name in waits {
            if let Some(actor) = self.actors.get_mut(&name) {
                actor.unkept = None;
            }
            self.confirms(&name, effects);
        }
    }

    /// Takes an actor that an earlier coordinator kept: unless a process reports it in time, it is
    /// started again. `taken`: a living actor that was not created has its name. False: it is not
    /// taken, and etcd will not keep it.
    pub fn resume(
        &mut self,
        now: Duration,
        kept: Kept,
        taken: bool,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Kept { creation, start } = kept;
        let (name, instance) = (creation.name.clone(), start.instance);
        self.keeping.there.insert(name.clone(), Some(start));
        // In case it is not taken, or is further than this.
        self.keeping.due.insert(name.clone());
        let known = self.actors.get(&name).map(|actor| (actor.generation, actor.incarnation));
        if let Some((generation, 1..)) = known {
            // Reported before this was read, or its name was given to another.
            return generation == instance.generation;
        }
        if taken || !self.may_adopt(&name, instance, &creation) {
            return false;
        }
        let mut waiting = (None, Vec::new());
        if known.is_some_and(|(generation, _)| generation == instance.generation) {
            // Its creator had no answer, and has asked again.
            if let Some(actor) = self.actors.remove(&name) {
                self.bytes = self.bytes.saturating_sub(actor.creation.size());
                waiting = (actor.creator, actor.getters);
            }
        } else {
            waiting.1 = self.gives_way(&name, &creation.class, "no node yet", effects);
        }
        let until = self.after_settling().max(now + LOST_GRACE);
        let phase = match start.waits {
            true => Phase::Pending { not_before: until },
            false => Phase::Lost { until },
        };
        let mut actor = self.actor(creation, instance.generation, start.restarted, phase);
        actor.supervisor.began(now);
        actor.incarnation = instance.incarnation;
        actor.lived = true;
        (actor.creator, actor.getters) = waiting;
        actor.reason = Some("no process has reported it to this coordinator".to_owned());
        self.actors.insert(name.clone(), actor);
        self.publish(&name, effects);
        true
    }
}

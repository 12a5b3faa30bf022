//! PURE: the cluster's named actors, where they live and in what state, and who wants to know of
//! their deaths.
//!
//! A name belongs to one actor as long as that lives. A watch ends with one notice: at the actor's
//! death, at once when it is dead already or when another has its name now.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::exchange::PeerId;
use crate::protocol::actors::{ACTOR_NAME_MAX, ActorLife, ActorReport, REASON_MAX};

/// Most actors that live at a time.
pub const ACTORS_MAX: usize = 16_384;
/// Most watches at a time.
pub const WATCHES_MAX: usize = 16_384;
/// So many dead ones are remembered.
const DEAD_MAX: usize = 256;

/// Where an actor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Home {
    /// In this process.
    Here,
    /// At the other end of a link.
    Peer(PeerId),
}

/// Who watches: the process, and its number for the watch.
pub type Watcher = (Home, u64);

/// A known actor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// What its process says.
    pub report: ActorReport,
    /// Its process's node name.
    pub node: String,
    /// Where it lives; of a dead one, where it lived.
    pub home: Home,
    /// Restarts under this name, of all generations.
    pub restarts: u32,
}

/// A watcher is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Who.
    pub watcher: Watcher,
    /// Why the actor is dead.
    pub reason: String,
}

/// A report or a watch is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The name cannot be one.
    #[error("an actor's name has 1 to {ACTOR_NAME_MAX} bytes and no control characters")]
    BadName,
    /// Names with a slash are the cluster's own.
    #[error("names with a slash are for the cluster's own actors")]
    Reserved,
    /// Another actor has it.
    #[error("the name is taken by an actor of {0}")]
    Taken(String),
    /// There are too many.
    #[error("there are {0} already, the bound")]
    Full(usize),
}

/// What a watch begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watching {
    /// The actor lives.
    Alive {
        /// Its generation.
        generation: u64,
    },
    /// It is dead, or was never there: this is the watch's one notice.
    Over {
        /// Why.
        reason: String,
    },
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Registry {
    actors: BTreeMap<String, Known>,
    /// Names of dead actors, longest dead first.
    dead: VecDeque<String>,
    watches: BTreeMap<Watcher, String>,
    /// Who watches each name; nobody is not listed.
    watchers: BTreeMap<String, BTreeSet<Watcher>>,
}

impl Registry {
    /// An actor's process tells of it. Of reports of one actor the newest counts; links keep their
    /// order.
    ///
    /// # Errors
    /// [`RegistryError`]; nothing changes then.
    pub fn report(
        &mut self,
        home: Home,
        node: &str,
        mut report: ActorReport,
        notices: &mut Vec<Notice>,
    ) -> Result<(), RegistryError> {
        check_name(&report.name)?;
        if home != Home::Here && report.name.contains('/') {
            return Err(RegistryError::Reserved);
        }
        if let Some(reason) = &mut report.reason {
            truncate(reason, REASON_MAX);
        }
        truncate(&mut report.kind, ACTOR_NAME_MAX);
        if self.actors.get(&report.name).is_some_and(|old| old.report == report && old.home == home)
        {
            return Ok(());
        }
        let name = report.name.clone();
        let mut restarts = report.restarts;
        match self.actors.get(&name) {
            None if report.life == ActorLife::Dead => return Ok(()),
            None => self.room()?,
            Some(old)
                if old.report.generation != report.generation && report.life == ActorLife::Dead =>
            {
                // Of one that had the name before.
                return Ok(());
            }
            Some(old) if old.report.generation == report.generation => {
                if old.report.life == ActorLife::Dead && report.life == ActorLife::Dead {
                    return Ok(());
                }
                if old.report.life == ActorLife::Dead {
                    // Its link was lost and is back: it was thought dead.
                    self.room()?;
                } else if old.home != home && home != Home::Here {
                    return Err(RegistryError::Taken(old.node.clone()));
                }
                let more = report.restarts.saturating_sub(old.report.restarts);
                restarts = old.restarts.saturating_add(more);
            }
            Some(old) if old.report.life == ActorLife::Dead => {
                self.room()?;
                restarts = old.restarts.saturating_add(1).saturating_add(report.restarts);
            }
            // Its own process has given the name to another.
            Some(old) if old.home == home => {
                restarts = old.restarts.saturating_add(1).saturating_add(report.restarts);
                let reason = "another actor of its process has its name now";
                self.tell_watchers(&name, reason, notices);
            }
            Some(old) => return Err(RegistryError::Taken(old.node.clone())),
        }
        self.dead.retain(|dead| *dead != name);
        let died = report.life == ActorLife::Dead;
        let reason = report.reason.clone().unwrap_or_else(|| "it ended".to_owned());
        self.actors.insert(name.clone(), Known { report, node: node.to_owned(), home, restarts });
        if died {
            self.buried(&name, &reason, notices);
        }
        Ok(())
    }

    /// A link is gone, and with it the actors and watches at its other end.
    pub fn peer_lost(&mut self, peer: PeerId, reason: &str, notices: &mut Vec<Notice>) {
        let home = Home::Peer(peer);
        let watching: Vec<Watcher> =
            self.watches.range((home, 0)..=(home, u64::MAX)).map(|(watcher, _)| *watcher).collect();
        for watcher in watching {
            self.unwatch(watcher);
        }
        let mut lost = Vec::new();
        for (name, actor) in &mut self.actors {
            if actor.home == home && actor.report.life != ActorLife::Dead {
                actor.report.life = ActorLife::Dead;
                actor.report.reason = Some(reason.to_owned());
                lost.push(name.clone());
            }
        }
        for name in lost {
            self.buried(&name, reason, notices);
        }
    }

    /// Someone wants to know of an actor's death; `generation` names the one it means, where it
    /// knows.
    ///
    /// # Errors
    /// [`RegistryError::Full`].
    pub fn watch(
        &mut self,
        watcher: Watcher,
        name: &str,
        generation: Option<u64>,
    ) -> Result<Watching, RegistryError> {
        let Some(actor) = self.actors.get(name) else {
            return Ok(Watching::Over { reason: "there is no such actor".to_owned() });
        };
        if actor.report.life == ActorLife::Dead {
            let reason = actor.report.reason.clone();
            return Ok(Watching::Over { reason: reason.unwrap_or_else(|| "it ended".to_owned()) });
        }
        let present = actor.report.generation;
        if generation.is_some_and(|meant| meant != present) {
            let reason = "another actor has its name now".to_owned();
            return Ok(Watching::Over { reason });
        }
        if self.watches.len() >= WATCHES_MAX && !self.watches.contains_key(&watcher) {
            return Err(RegistryError::Full(WATCHES_MAX));
        }
        self.unwatch(watcher);
        self.watches.insert(watcher, name.to_owned());
        self.watchers.entry(name.to_owned()).or_default().insert(watcher);
        Ok(Watching::Alive { generation: present })
    }

    /// It does not want to know any more.
    pub fn unwatch(&mut self, watcher: Watcher) {
        let Some(name) = self.watches.remove(&watcher) else { return };
        if let Some(watchers) = self.watchers.get_mut(&name) {
            watchers.remove(&watcher);
            if watchers.is_empty() {
                self.watchers.remove(&name);
            }
        }
    }

    /// Where a living actor is.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Home> {
        let known = self.actors.get(name)?;
        (known.report.life != ActorLife::Dead).then_some(known.home)
    }

    /// Nothing is known of a dead actor any more.
    pub fn forget(&mut self, name: &str) {
        if self.actors.get(name).is_some_and(|known| known.report.life == ActorLife::Dead) {
            self.actors.remove(name);
            self.dead.retain(|dead| dead != name);
        }
    }

    /// All known actors by name, those that died lately included.
    pub fn list(&self) -> impl Iterator<Item = &Known> {
        self.actors.values()
    }

    /// Watches under way.
    #[must_use]
    pub fn watches(&self) -> usize {
        self.watches.len()
    }

    fn room(&self) -> Result<(), RegistryError> {
        let alive = self.actors.len() - self.dead.len();
        if alive >= ACTORS_MAX { Err(RegistryError::Full(ACTORS_MAX)) } else { Ok(()) }
    }

    fn buried(&mut self, name: &str, reason: &str, notices: &mut Vec<Notice>) {
        self.tell_watchers(name, reason, notices);
        self.dead.push_back(name.to_owned());
        if self.dead.len() > DEAD_MAX
            && let Some(forgotten) = self.dead.pop_front()
        {
            self.actors.remove(&forgotten);
        }
    }

    fn tell_watchers(&mut self, name: &str, reason: &str, notices: &mut Vec<Notice>) {
        for watcher in self.watchers.remove(name).unwrap_or_default() {
            self.watches.remove(&watcher);
            notices.push(Notice { watcher, reason: reason.to_owned() });
        }
    }
}

/// Is this a name for an actor?
///
/// # Errors
/// [`RegistryError::BadName`].
pub fn check_name(name: &str) -> Result<(), RegistryError> {
    let good = !name.is_empty() && name.len() <= ACTOR_NAME_MAX && !name.contains(char::is_control);
    if good { Ok(()) } else { Err(RegistryError::BadName) }
}

fn truncate(text: &mut String, max: usize) {
    if text.len() > max {
        let end = (0..=max).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests;

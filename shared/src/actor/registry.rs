//! PURE: the cluster's named actors: where they live, in what state, and who watches for their
//! deaths.
//!
//! A name belongs to one actor while that actor lives. A watch ends with exactly one notice: when
//! the actor dies, or at once if it is already dead or another actor now has its name. A new hub
//! does not know the actors of processes that have not linked to it yet; a watch of an actor that
//! lived under the previous hub therefore waits up to [`RETURN_GRACE`] for that actor.
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::exchange::PeerId;
use crate::protocol::actors::{ACTOR_NAME_MAX, ActorLife, ActorReport, REASON_MAX};

/// Maximum number of living actors.
pub const ACTORS_MAX: usize = 16_384;
/// Maximum number of watches.
pub const WATCHES_MAX: usize = 16_384;
/// How long the hub waits for an actor that lived under another hub. Longer than links take to come
/// back, and longer than a dead process's etcd lease, during which it may still be expected.
pub const RETURN_GRACE: Duration = Duration::from_secs(15);
/// Number of dead actors that are remembered.
const DEAD_MAX: usize = 256;

/// Where an actor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Home {
    /// In this process.
    Here,
    /// At the other end of a link.
    Peer(PeerId),
}

/// A watching process, and its id for the watch.
pub type Watcher = (Home, u64);

/// An actor that the registry knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Latest report from its process.
    pub report: ActorReport,
    /// Node name of its process.
    pub node: String,
    /// Where it lives, or lived if it is dead.
    pub home: Home,
    /// Restarts under this name, over all generations.
    pub restarts: u32,
}

/// A watcher to be told of a death.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The watcher.
    pub watcher: Watcher,
    /// Why the actor is dead.
    pub reason: String,
}

/// Why a report or a watch is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The name is not valid.
    #[error("an actor's name has 1 to {ACTOR_NAME_MAX} bytes and no control characters")]
    BadName,
    /// Names with a slash are reserved for the cluster itself.
    #[error("names with a slash are for the cluster's own actors")]
    Reserved,
    /// Another actor has the name.
    #[error("the name is taken by an actor of {0}")]
    Taken(String),
    /// A limit is reached.
    #[error("there are {0} already, which is the limit")]
    Full(usize),
    /// This process is about to leave.
    #[error("this process is about to leave and starts no more actors")]
    Leaving,
}

/// First answer to a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watching {
    /// The actor lives.
    Alive {
        /// The actor's generation.
        generation: u64,
    },
    /// The actor is not known here and may come back: the outcome follows later.
    Awaited,
    /// The actor is dead or never existed: this is the watch's one notice.
    Over {
        /// Why.
        reason: String,
    },
}

/// The registry; see the module's documentation.
#[derive(Debug, Default)]
pub struct Registry {
    actors: BTreeMap<String, Known>,
    /// Names of dead actors, oldest death first.
    dead: VecDeque<String>,
    watches: BTreeMap<Watcher, String>,
    /// Watchers of each name; names without any are not listed.
    watchers: BTreeMap<String, BTreeSet<Watcher>>,
    /// Watches of actors that have not appeared yet.
    awaited: BTreeMap<Watcher, Awaited>,
    /// Watches whose actor has appeared, with its generation; the watchers are still to be told.
    found: Vec<(Watcher, u64)>,
    /// Until this time, an unknown actor may belong to a process that has not linked again.
    settles: Duration,
}

/// Of an actor that gave none for its end.
const NO_REASON: &str = "it ended";

/// A watch that waits for its actor; see [`Registry::watch`].
#[derive(Clone, Copy, Debug)]
struct Awaited {
    /// Generation that the watcher means, if it knows it.
    generation: Option<u64>,
    until: Duration,
}

impl Registry {
    /// Takes a report from an actor's process. Links preserve order, so an actor's latest report
    /// wins.
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
            None if report.life == ActorLife::Dead => {
                // It died while its process had no link: some watchers may be waiting for this
                // news.
                let reason = report.reason.as_deref().unwrap_or(NO_REASON);
                self.ends_awaited(&name, report.generation, reason, notices);
                return Ok(());
            }
            None => self.room()?,
            Some(old)
                if old.report.generation != report.generation && report.life == ActorLife::Dead =>
            {
                // A late report on an earlier actor of this name.
                return Ok(());
            }
            Some(old) if old.report.generation == report.generation => {
                if old.report.life == ActorLife::Dead && report.life == ActorLife::Dead {
                    return Ok(());
                }
                if old.report.life == ActorLife::Dead {
                    // The lost link made it count as dead; the link is back.
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
            // The same process has given the name to another actor.
            Some(old) if old.home == home => {
                restarts = old.restarts.saturating_add(1).saturating_add(report.restarts);
                let reason = "another actor of its process has its name now";
                self.tell_watchers(&name, reason, notices);
            }
            Some(old) => return Err(RegistryError::Taken(old.node.clone())),
        }
        self.put(Known { report, node: node.to_owned(), home, restarts }, notices);
        Ok(())
    }

    /// Takes what the placement core says about an actor that it created. Its reports replace each
    /// other, wherever the actor lives.
    ///
    /// # Errors
    /// [`RegistryError`]; nothing changes then.
    pub fn place(
        &mut self,
        home: Home,
        node: &str,
        mut report: ActorReport,
        notices: &mut Vec<Notice>,
    ) -> Result<(), RegistryError> {
        check_name(&report.name)?;
        if let Some(reason) = &mut report.reason {
            truncate(reason, REASON_MAX);
        }
        let (died, generation) = (report.life == ActorLife::Dead, report.generation);
        match self.actors.get(&report.name) {
            Some(old) if old.report.life == ActorLife::Dead && died => return Ok(()),
            Some(old) if old.report.life != ActorLife::Dead => {
                if old.report.generation != generation {
                    let reason = "another actor has its name now";
                    self.tell_watchers(&report.name, reason, notices);
                }
            }
            _ if died => {
                let reason = report.reason.as_deref().unwrap_or(NO_REASON);
                self.ends_awaited(&report.name, generation, reason, notices);
                return Ok(());
            }
            _ => self.room()?,
        }
        let restarts = report.restarts;
        self.put(Known { report, node: node.to_owned(), home, restarts }, notices);
        Ok(())
    }

    /// Keeps what is known of an actor now, and tells those whom it concerns.
    fn put(&mut self, known: Known, notices: &mut Vec<Notice>) {
        let ActorReport { name, life, generation, reason, .. } = known.report.clone();
        self.dead.retain(|dead| *dead != name);
        self.actors.insert(name.clone(), known);
        if life == ActorLife::Dead {
            self.buried(&name, reason.as_deref().unwrap_or(NO_REASON), notices);
        } else {
            self.appeared(&name, generation, notices);
        }
    }

    /// For [`RETURN_GRACE`] from `now`, processes of the previous hub may still link to this one.
    pub fn settle(&mut self, now: Duration) {
        self.settles = now + RETURN_GRACE;
    }

    /// Ends the watches whose actors did not come back in time.
    pub fn tick(&mut self, now: Duration, notices: &mut Vec<Notice>) {
        let over =
            |(watcher, awaited): (&Watcher, &Awaited)| (awaited.until <= now).then_some(*watcher);
        let over: Vec<Watcher> = self.awaited.iter().filter_map(over).collect();
        for watcher in over {
            self.unwatch(watcher);
            let reason = "there is no such actor; if it lived, it did not come back".to_owned();
            notices.push(Notice { watcher, reason });
        }
    }

    /// Whether [`tick`](Self::tick) has something to wait for.
    #[must_use]
    pub fn awaits(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Takes the watches whose actor has appeared, with its generation.
    pub fn take_found(&mut self) -> Vec<(Watcher, u64)> {
        std::mem::take(&mut self.found)
    }

    /// Resolves the watches waiting for an actor that has appeared, and ends those that meant
    /// another generation of its name.
    fn appeared(&mut self, name: &str, generation: u64, notices: &mut Vec<Notice>) {
        if self.awaited.is_empty() {
            return;
        }
        let watchers = self.watchers.get(name).into_iter().flatten().copied();
        let watchers: Vec<Watcher> = watchers.collect();
        for watcher in watchers {
            match self.awaited.remove(&watcher) {
                None => {}
                Some(it) if it.generation.is_some_and(|meant| meant != generation) => {
                    self.unwatch(watcher);
                    let reason = "another actor has its name now".to_owned();
                    notices.push(Notice { watcher, reason });
                }
                Some(_) => self.found.push((watcher, generation)),
            }
        }
    }

    /// Ends the watches waiting for an actor that died before it appeared here.
    fn ends_awaited(
        &mut self,
        name: &str,
        generation: u64,
        reason: &str,
        notices: &mut Vec<Notice>,
    ) {
        let means = |watcher: &Watcher| {
            self.awaited.get(watcher).is_some_and(|it| it.generation == Some(generation))
        };
        let watchers = self.watchers.get(name).into_iter().flatten();
        let watchers: Vec<Watcher> = watchers.filter(|it| means(it)).copied().collect();
        for watcher in watchers {
            self.unwatch(watcher);
            notices.push(Notice { watcher, reason: reason.to_owned() });
        }
    }

    /// Handles the loss of a link, and with it of the actors and watches at its other end.
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

    /// Watches for an actor's death. `generation` is the actor meant, if the watcher knows it: it
    /// was told that this one was alive, and the actor may reappear under this hub.
    ///
    /// # Errors
    /// [`RegistryError::Full`].
    pub fn watch(
        &mut self,
        now: Duration,
        watcher: Watcher,
        name: &str,
        generation: Option<u64>,
    ) -> Result<Watching, RegistryError> {
        let Some(actor) = self.actors.get(name) else {
            let until = if generation.is_some() { now + RETURN_GRACE } else { self.settles };
            if until <= now {
                return Ok(Watching::Over { reason: "there is no such actor".to_owned() });
            }
            self.begin(watcher, name)?;
            self.awaited.insert(watcher, Awaited { generation, until });
            return Ok(Watching::Awaited);
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
        self.begin(watcher, name)?;
        Ok(Watching::Alive { generation: present })
    }

    fn begin(&mut self, watcher: Watcher, name: &str) -> Result<(), RegistryError> {
        if self.watches.len() >= WATCHES_MAX && !self.watches.contains_key(&watcher) {
            return Err(RegistryError::Full(WATCHES_MAX));
        }
        self.unwatch(watcher);
        self.watches.insert(watcher, name.to_owned());
        self.watchers.entry(name.to_owned()).or_default().insert(watcher);
        Ok(())
    }

    /// Ends a watch without a notice.
    pub fn unwatch(&mut self, watcher: Watcher) {
        self.awaited.remove(&watcher);
        let Some(name) = self.watches.remove(&watcher) else { return };
        if let Some(watchers) = self.watchers.get_mut(&name) {
            watchers.remove(&watcher);
            if watchers.is_empty() {
                self.watchers.remove(&name);
            }
        }
    }

    /// Where the actor `name` lives, if it is alive.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Home> {
        let known = self.actors.get(name)?;
        (known.report.life != ActorLife::Dead).then_some(known.home)
    }

    /// The node of the actor `name`, if it is alive.
    #[must_use]
    pub fn living(&self, name: &str) -> Option<&str> {
        let known = self.actors.get(name)?;
        (known.report.life != ActorLife::Dead).then_some(known.node.as_str())
    }

    /// Where the actor `name` lives and which one it is, if it is alive.
    #[must_use]
    pub fn at(&self, name: &str) -> Option<(Home, u64)> {
        let known = self.actors.get(name)?;
        let at = (known.home, known.report.generation);
        (known.report.life != ActorLife::Dead).then_some(at)
    }

    /// Forgets a dead actor.
    pub fn forget(&mut self, name: &str) {
        if self.actors.get(name).is_some_and(|known| known.report.life == ActorLife::Dead) {
            self.actors.remove(name);
            self.dead.retain(|dead| dead != name);
        }
    }

    /// All known actors by name, including recently dead ones.
    pub fn list(&self) -> impl Iterator<Item = &Known> {
        self.actors.values()
    }

    /// Number of watches.
    #[must_use]
    pub fn watches(&self) -> usize {
        self.watches.len()
    }

    /// Whether there is room for one more living actor.
    ///
    /// # Errors
    /// [`RegistryError::Full`].
    pub fn room(&self) -> Result<(), RegistryError> {
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
            self.awaited.remove(&watcher);
            notices.push(Notice { watcher, reason: reason.to_owned() });
        }
    }
}

/// Checks that `name` is a valid actor name.
///
/// # Errors
/// [`RegistryError::BadName`].
pub fn check_name(name: &str) -> Result<(), RegistryError> {
    let good = !name.is_empty() && name.len() <= ACTOR_NAME_MAX && !name.contains(char::is_control);
    if good { Ok(()) } else { Err(RegistryError::BadName) }
}

/// Shortens a text to at most `max` bytes.
pub(super) fn truncate(text: &mut String, max: usize) {
    if text.len() > max {
        let end = (0..=max).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests;

//! PURE: actors created by class: which process hosts each of them, and what happens when it fails
//! or its process is gone.
//!
//! The coordinator decides, and the hosting processes do what it says. What they run outlives a
//! coordinator: over a new link they report it, with all that is needed to start it again, and the
//! next coordinator adopts it. Two starts of one actor are told apart by their incarnation; the
//! higher one counts, and the other is ended.
//!
//! An actor is pending, starting, alive, moving (its node drains), or lost (the link to its node is
//! gone, and may be back in a moment). When it is dead it is forgotten here, and the
//! [registry](super::registry) remembers it for a while.
//!
//! - `decide`: what becomes of an actor that ended, is lost, waits or is killed
//! - [`keep`]: what etcd keeps of actors for the next coordinator
//! - `report`: what hosting processes report
//! - [`room`]: PURE: what processes have left, and which of them takes an actor
mod decide;
pub mod keep;
mod report;
pub mod room;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use self::keep::Keeping;
use self::room::Host;
use super::exchange::ASKS_MAX;
use super::registry::{Home, RETURN_GRACE, check_name};
use super::supervise::{RestartPolicy, Supervisor};
use crate::protocol::actors::creation::{
    Begin, Creation, EndHow, Hosting, Instance, PlacementError, PlacementReply, Restarted,
};
use crate::protocol::actors::{ActorLife, ActorReport};

/// Maximum number of created actors that are not dead.
pub const CREATED_MAX: usize = 4096;
/// Maximum size of all of them together, arguments included, in bytes.
pub const CREATED_BYTES_MAX: usize = 64 << 20;
/// How long an actor whose node's link is gone may be back, before it is started elsewhere. Longer
/// than a process takes to dial again.
pub const LOST_GRACE: Duration = Duration::from_secs(1);
/// Number of ended actors that are remembered, lest a process that was away bring them back.
const GONE_MAX: usize = 4096;
/// Number of drained processes that are remembered; the oldest are forgotten first.
const DRAINED_MAX: usize = 1024;

/// What the shell must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Have a process start an actor.
    Begin {
        /// The process.
        home: Home,
        /// What to start.
        begin: Box<Begin>,
    },
    /// Have a process end an actor; it then reports that it is dead.
    End {
        /// The process.
        home: Home,
        /// The actor's name.
        name: String,
        /// Which start.
        instance: Instance,
        /// At once or not.
        how: EndHow,
        /// Why.
        reason: String,
    },
    /// Answer a request.
    Answer {
        /// Its number.
        asker: u64,
        /// The answer.
        outcome: Result<PlacementReply, PlacementError>,
    },
    /// Tell the registry what an actor is now.
    Publish {
        /// Where messages for it go; [`Home::Here`] while it takes none.
        home: Home,
        /// The node where it is, or was last.
        node: String,
        /// The state.
        report: ActorReport,
    },
    /// An actor is to be started again: counted.
    Restarted,
}

/// A request to create an actor.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The request's number.
    pub asker: u64,
    /// The actor.
    pub creation: Creation,
    /// Its generation.
    pub generation: u64,
    /// Whether an earlier coordinator may have had the request.
    pub again: bool,
    /// Whether a living actor of this name and class will do.
    pub or_get: bool,
    /// The creation is called off after this time.
    pub within: Duration,
}

/// Whether a name is for the cluster's own actors, such as `worker/NODE` and `log:NODE`.
pub(super) fn is_reserved(name: &str) -> bool {
    name.contains('/') || name.starts_with("log:")
}

/// A request that waits for an actor to be alive, until a deadline.
type Asker = (u64, Duration);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Wants a place, but not before this time.
    Pending {
        not_before: Duration,
    },
    Starting(Home),
    Alive(Home),
    /// Finishes its messages, because its node drains; then it is placed again.
    Moving(Home),
    /// The link to its node is gone.
    Lost {
        until: Duration,
    },
}

#[derive(Debug)]
struct Actor {
    creation: Creation,
    generation: u64,
    /// The last start; 0 before the first.
    incarnation: u32,
    phase: Phase,
    supervisor: Supervisor,
    /// Whether it was ever alive.
    lived: bool,
    node: String,
    reason: Option<String>,
    /// Where it failed last.
    avoid: Option<Home>,
    /// How often in a row a process could not take it.
    refusals: u32,
    /// Whoever asked for its creation.
    creator: Option<Asker>,
    /// Whether another living actor of its name and class will do for its creator.
    or_get: bool,
    /// Others who wait for it.
    getters: Vec<Asker>,
    /// Nobody is told that it was created before etcd has it, or until this time.
    unkept: Option<Duration>,
    /// Those that came first are placed first.
    order: u64,
    /// The state of rooms in which there was no place for it.
    refused: Option<u64>,
}

impl Actor {
    fn instance(&self) -> Instance {
        Instance { generation: self.generation, incarnation: self.incarnation }
    }

    fn home(&self) -> Option<Home> {
        match self.phase {
            Phase::Starting(home) | Phase::Alive(home) | Phase::Moving(home) => Some(home),
            Phase::Pending { .. } | Phase::Lost { .. } => None,
        }
    }

    fn life(&self) -> ActorLife {
        match self.phase {
            Phase::Pending { .. } if self.incarnation == 0 => ActorLife::Pending,
            Phase::Pending { .. } | Phase::Lost { .. } => ActorLife::Restarting,
            Phase::Starting(_) => ActorLife::Starting,
            Phase::Alive(_) => ActorLife::Alive,
            Phase::Moving(_) => ActorLife::Draining,
        }
    }

    fn restarted(&self) -> Restarted {
        let total = u32::try_from(self.supervisor.restarts()).unwrap_or(u32::MAX);
        Restarted { total, in_a_row: self.supervisor.in_a_row() }
    }

    fn askers(&mut self) -> impl Iterator<Item = Asker> {
        self.creator.take().into_iter().chain(std::mem::take(&mut self.getters))
    }
}

/// A created actor, for operators.
#[derive(Clone, Debug)]
pub struct Created<'a> {
    /// The actor.
    pub creation: &'a Creation,
    /// Which start of it this is.
    pub instance: Instance,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Placement {
    hosts: BTreeMap<Home, Host>,
    actors: BTreeMap<String, Actor>,
    bytes: usize,
    order: u64,
    /// Changes whenever there may be more room than before.
    rooms: u64,
    /// Generations of actors that have ended, oldest first.
    gone: VecDeque<u64>,
    gone_set: BTreeSet<u64>,
    /// Linked processes that are to leave, in the order in which they were told. By link, since a
    /// node's name belongs to one process of each role.
    drained: VecDeque<Home>,
    /// Until this time, processes of an earlier coordinator may still link to this one.
    settles: Duration,
    keeping: Keeping,
}

impl Placement {
    /// This coordinator has taken over: for [`RETURN_GRACE`] from `now`, processes of the last one
    /// may still link and report what they run, so names that are not known here may be in use.
    pub fn settle(&mut self, now: Duration) {
        self.settles = now + RETURN_GRACE;
    }

    /// Whether names that are not known here may still turn up.
    #[must_use]
    pub fn settles(&self, now: Duration) -> bool {
        now < self.settles
    }

    /// Takes a request to create an actor. `taken` names the node of a living actor of that name
    /// that was not created here.
    pub fn create(
        &mut self,
        now: Duration,
        wanted: Wanted,
        taken: Option<&str>,
        effects: &mut Vec<Effect>,
    ) {
        let asker = wanted.asker;
        if let Err(error) = self.take(now, wanted, taken, effects) {
            effects.push(Effect::Answer { asker, outcome: Err(error) });
        }
        self.place(now, effects);
    }

    fn take(
        &mut self,
        now: Duration,
        wanted: Wanted,
        taken: Option<&str>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), PlacementError> {
        let Wanted { asker, creation, generation, again, or_get, within } = wanted;
        let until = now + within;
        check_name(&creation.name).map_err(|error| PlacementError::Invalid(error.to_string()))?;
        if is_reserved(&creation.name) {
            let reason = "names with a slash, or that begin with `log:`, are for the cluster's own \
                          actors";
            return Err(PlacementError::Invalid(reason.to_owned()));
        }
        creation.check().map_err(PlacementError::Invalid)?;
        if let Some(actor) = self.actors.get_mut(&creation.name) {
            let same = actor.generation == generation;
            let will_do = or_get && actor.creation.class == creation.class;
            if !same && !will_do {
                let node = if actor.node.is_empty() { "no node yet" } else { &actor.node };
                return Err(PlacementError::NameTaken(node.to_owned()));
            }
            if matches!(actor.phase, Phase::Alive(_)) && actor.unkept.is_none() {
                let outcome = Ok(PlacementReply { node: actor.node.clone() });
                effects.push(Effect::Answer { asker, outcome });
            } else if same {
                // Its creator, who has had no answer: another coordinator may have begun it.
                actor.creator = Some((asker, until));
            } else if actor.getters.len() >= ASKS_MAX {
                let waiting = format!("{ASKS_MAX} requests wait for it, which is the limit");
                return Err(PlacementError::Full(waiting));
            } else {
                actor.getters.push((asker, until));
            }
            return Ok(());
        }
        if let Some(node) = taken {
            return Err(PlacementError::NameTaken(node.to_owned()));
        }
        if self.gone_set.contains(&generation) {
            return Err(PlacementError::NotStarted("it has ended already".to_owned()));
        }
        self.room_for(&creation)?;
        // An earlier coordinator may have created it: its process then says so.
        let not_before = if again { self.settles.max(RETURN_GRACE) } else { self.settles };
        let phase = Phase::Pending { not_before };
        let name = creation.name.clone();
        let mut actor = self.actor(creation, generation, Restarted::default(), phase);
        actor.creator = Some((asker, until));
        actor.or_get = or_get;
        self.actors.insert(name.clone(), actor);
        self.publish(&name, effects);
        Ok(())
    }

    fn room_for(&self, creation: &Creation) -> Result<(), PlacementError> {
        if self.actors.len() >= CREATED_MAX {
            return Err(PlacementError::Full(format!(
                "there are {CREATED_MAX} created actors, which is the limit"
            )));
        }
        if self.bytes + creation.size() > CREATED_BYTES_MAX {
            let mib = CREATED_BYTES_MAX >> 20;
            return Err(PlacementError::Full(format!(
                "created actors take {mib} MiB at the coordinator, which is the limit"
            )));
        }
        Ok(())
    }

    fn actor(
        &mut self,
        creation: Creation,
        generation: u64,
        restarted: Restarted,
        phase: Phase,
    ) -> Actor {
        self.order += 1;
        self.bytes += creation.size();
        Actor {
            supervisor: supervisor(&creation, generation, restarted),
            creation,
            generation,
            incarnation: 0,
            phase,
            lived: false,
            node: String::new(),
            reason: None,
            avoid: None,
            refusals: 0,
            creator: None,
            or_get: false,
            getters: Vec::new(),
            unkept: None,
            order: self.order,
            refused: None,
        }
    }

    /// A linked process hosts these classes, in place of what it said before.
    pub fn hosting(
        &mut self,
        now: Duration,
        home: Home,
        node: &str,
        hosting: Hosting,
        effects: &mut Vec<Effect>,
    ) {
        let draining = self.drained.contains(&home);
        let same = |host: &Host| host.hosting == hosting && host.draining == draining;
        if self.hosts.get(&home).is_some_and(same) {
            return;
        }
        let host = self.hosts.entry(home).or_insert_with(|| Host::new(node));
        host.offers(hosting);
        host.draining = draining;
        self.rooms += 1;
        // What no process could take need not wait longer: this one may.
        for actor in self.actors.values_mut().filter(|actor| actor.refusals > 0) {
            if let Phase::Pending { not_before } = &mut actor.phase {
                *not_before = now.max(self.settles).min(*not_before);
            }
        }
        self.place(now, effects);
    }

    /// Linked processes that host classes, or run actors.
    pub fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.hosts.values()
    }

    /// A created actor that is not dead.
    #[must_use]
    pub fn created(&self, name: &str) -> Option<Created<'_>> {
        let actor = self.actors.get(name)?;
        Some(Created { creation: &actor.creation, instance: actor.instance() })
    }

    /// Whether an actor of this name is to be started, or may be back in a moment: it can be asked
    /// again later.
    #[must_use]
    pub fn is_away(&self, name: &str) -> bool {
        self.actors.contains_key(name)
    }

    /// Whether [`tick`](Self::tick) has something to wait for.
    #[must_use]
    pub fn awaits(&self, now: Duration) -> bool {
        let waits = self.actors.values().any(|actor| {
            let waits = match actor.phase {
                Phase::Lost { .. } => true,
                // Also one that became due after places were looked for last.
                Phase::Pending { not_before } => {
                    not_before > now || actor.refused != Some(self.rooms)
                }
                Phase::Alive(_) => self.keeping.counts_life_of(actor),
                _ => false,
            };
            waits || actor.creator.is_some() || !actor.getters.is_empty()
        });
        waits || self.keeping.is_awaited()
    }

    /// Starts what is due and has room, in the order in which it was wanted.
    fn place(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        let rooms = self.rooms;
        let due = |(name, actor): (&String, &Actor)| match actor.phase {
            Phase::Pending { not_before } if not_before <= now && actor.refused != Some(rooms) => {
                Some((actor.order, name.clone()))
            }
            _ => None,
        };
        let mut waiting: Vec<(u64, String)> = self.actors.iter().filter_map(due).collect();
        waiting.sort_unstable();
        for (_, name) in waiting {
            let Some(actor) = self.actors.get_mut(&name) else { continue };
            match room::choose(&self.hosts, &actor.creation, actor.avoid) {
                Ok(home) => {
                    let Some(host) = self.hosts.get_mut(&home) else { continue };
                    actor.refused = None;
                    actor.incarnation = actor.incarnation.saturating_add(1);
                    actor.phase = Phase::Starting(home);
                    actor.node.clone_from(&host.node);
                    host.take(actor.instance(), &actor.creation.needs);
                    let (instance, restarted) = (actor.instance(), actor.restarted());
                    let begin = Begin { instance, restarted, creation: actor.creation.clone() };
                    effects.push(Effect::Begin { home, begin: Box::new(begin) });
                    self.publish(&name, effects);
                    self.begun(now, &name);
                }
                Err(error) => {
                    actor.refused = Some(rooms);
                    let reason = Some(format!("it waits for a place: {error}"));
                    if actor.reason != reason {
                        actor.reason = reason;
                        self.publish(&name, effects);
                    }
                }
            }
        }
    }

    fn publish(&self, name: &str, effects: &mut Vec<Effect>) {
        let Some(actor) = self.actors.get(name) else { return };
        let life = actor.life();
        let (alive, moves) = (life == ActorLife::Alive, life == ActorLife::Draining);
        effects.push(Effect::Publish {
            home: actor.home().filter(|_| !moves).unwrap_or(Home::Here),
            node: actor.node.clone(),
            report: ActorReport {
                life,
                reason: actor.reason.clone().filter(|_| !alive),
                ..report_of(name, actor)
            },
        });
    }
}

fn supervisor(creation: &Creation, generation: u64, restarted: Restarted) -> Supervisor {
    let max_restarts = creation.max_restarts.unwrap_or(u32::MAX);
    let policy = RestartPolicy { max_restarts, ..RestartPolicy::default() };
    Supervisor::resumed(policy, generation, restarted.in_a_row, restarted.total.into())
}

/// The unchanging part of an actor's report.
fn report_of(name: &str, actor: &Actor) -> ActorReport {
    ActorReport {
        name: name.to_owned(),
        kind: actor.creation.class.clone(),
        generation: actor.generation,
        life: ActorLife::Dead,
        restarts: actor.restarted().total,
        max_restarts: actor.creation.max_restarts,
        reason: None,
    }
}

#[cfg(test)]
mod tests;

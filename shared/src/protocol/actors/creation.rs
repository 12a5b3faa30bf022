//! Actors that are created by class: what is asked of the coordinator, and what it tells the
//! processes that host them.
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ACTOR_NAME_MAX, ActorLife};
use crate::protocol::control::RESOURCE_NAME_MAX;
use crate::protocol::{NodeResources, RESOURCES_MAX};

/// The name that takes [`PlacementRequest`]s: the coordinator itself.
pub const PLACER: &str = "cluster/actors";
/// Maximum length of an encoded argument, in bytes.
pub const ARGUMENT_MAX: usize = 64 << 10;
/// Maximum number of classes that a process hosts.
pub const CLASSES_MAX: usize = 64;
/// Largest mailbox of a created actor, in messages.
pub const MAILBOX_MAX: u32 = 4096;
/// Largest amount of a resource that can be asked for; sums of amounts do not overflow.
pub const AMOUNT_MAX: u64 = 1 << 48;

/// What an actor takes of its process's resources while it lives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// Thousandths of a core.
    pub cpus: u64,
    /// Thousandths of a GPU.
    pub gpus: u64,
    /// Bytes of memory.
    pub memory: u64,
    /// Operator-defined resources, in whole units.
    pub custom: BTreeMap<String, u64>,
}

impl Needs {
    /// Nothing: it fits everywhere.
    #[must_use]
    pub fn nothing() -> Self {
        Self::default()
    }

    /// Takes this many cores; a part of one is rounded up to a thousandth.
    #[must_use]
    pub fn cpus(self, cores: f64) -> Self {
        Self { cpus: thousandths(cores), ..self }
    }

    /// Takes this many GPUs; a part of one is rounded up to a thousandth.
    #[must_use]
    pub fn gpus(self, gpus: f64) -> Self {
        Self { gpus: thousandths(gpus), ..self }
    }

    /// Takes this much memory, in bytes.
    #[must_use]
    pub fn memory(self, bytes: u64) -> Self {
        Self { memory: bytes, ..self }
    }

    /// Takes this much of a resource that operators defined.
    #[must_use]
    pub fn custom(mut self, name: &str, units: u64) -> Self {
        self.custom.insert(name.to_owned(), units);
        self
    }
}

/// Casts saturate, and what is not a number becomes 0.
fn thousandths(amount: f64) -> u64 {
    (amount * 1000.0).ceil() as u64
}

/// Which processes an actor may be placed in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Where {
    /// On this node.
    pub node: Option<String>,
    /// On any other if that node cannot take it.
    pub soft: bool,
    /// On nodes that have all these labels.
    pub labels: BTreeMap<String, String>,
    /// On the node that has the most room, rather than filling one after another.
    pub spread: bool,
}

impl Where {
    /// Anywhere; nodes are filled one after another.
    #[must_use]
    pub fn pack() -> Self {
        Self::default()
    }

    /// Anywhere; the node with the most room comes first.
    #[must_use]
    pub fn spread() -> Self {
        Self { spread: true, ..Self::default() }
    }

    /// Only on this node.
    #[must_use]
    pub fn node(name: &str) -> Self {
        Self { node: Some(name.to_owned()), ..Self::default() }
    }

    /// On this node if it has room, otherwise on any other.
    #[must_use]
    pub fn rather(name: &str) -> Self {
        Self { soft: true, ..Self::node(name) }
    }

    /// Only on nodes with this label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }
}

/// An actor to be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Creation {
    /// Its name.
    pub name: String,
    /// Its class, as hosting processes registered it.
    pub class: String,
    /// The argument of its factory, encoded; at most [`ARGUMENT_MAX`] bytes.
    #[serde(with = "crate::wire::bytes")]
    pub argument: Vec<u8>,
    /// What it takes.
    pub needs: Needs,
    /// Where it may be placed.
    pub at: Where,
    /// How often in a row it is started again; absent: without limit.
    pub max_restarts: Option<u32>,
    /// Capacity of its mailbox in messages, 1 to [`MAILBOX_MAX`].
    pub mailbox: u32,
    /// How long its factory may take, in milliseconds.
    pub start_limit_ms: u32,
    /// How long a message may take before the actor counts as failed, in milliseconds; 0: any time.
    pub message_limit_ms: u32,
}

impl Creation {
    /// Checks the bounds of all but the name.
    ///
    /// # Errors
    /// The bound that is broken, in one sentence.
    pub fn check(&self) -> Result<(), String> {
        check_class(&self.class)?;
        if self.argument.len() > ARGUMENT_MAX {
            let len = self.argument.len();
            return Err(format!("the argument has {len} bytes, the limit is {ARGUMENT_MAX}"));
        }
        let Needs { cpus, gpus, memory, custom } = &self.needs;
        let amounts = [("cpus", cpus), ("gpus", gpus), ("memory", memory)].into_iter();
        let custom = custom.iter().map(|(name, units)| (name.as_str(), units));
        for (name, amount) in amounts.chain(custom) {
            if *amount > AMOUNT_MAX {
                return Err(format!("it needs {amount} of {name}, the limit is {AMOUNT_MAX}"));
            }
        }
        let Where { node, labels, .. } = &self.at;
        for (what, count) in [("labels", labels.len()), ("resources", self.needs.custom.len())] {
            if count > RESOURCES_MAX {
                return Err(format!("it asks for {count} {what}, the limit is {RESOURCES_MAX}"));
            }
        }
        let texts = labels.iter().flat_map(|(key, value)| [key, value]);
        if let Some(long) =
            texts.chain(self.needs.custom.keys()).find(|it| it.len() > RESOURCE_NAME_MAX)
        {
            let len = long.len();
            return Err(format!(
                "a label or resource of {len} bytes, the limit is {RESOURCE_NAME_MAX}"
            ));
        }
        if let Some(node) = node.as_ref().filter(|node| node.len() > ACTOR_NAME_MAX) {
            let len = node.len();
            return Err(format!("the node's name has {len} bytes, the limit is {ACTOR_NAME_MAX}"));
        }
        if !(1..=MAILBOX_MAX).contains(&self.mailbox) {
            let mailbox = self.mailbox;
            return Err(format!("a mailbox of {mailbox} messages, it must be 1 to {MAILBOX_MAX}"));
        }
        Ok(())
    }

    /// About how much memory it takes at the coordinator, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.argument.len() + 1024
    }
}

/// Checks the name of a class.
///
/// # Errors
/// What is wrong, in one sentence.
pub fn check_class(class: &str) -> Result<(), String> {
    if class.is_empty() || class.len() > ACTOR_NAME_MAX || class.contains(char::is_control) {
        return Err(format!(
            "a class's name has 1 to {ACTOR_NAME_MAX} bytes and no control characters"
        ));
    }
    Ok(())
}

/// What a process hosts; replaces what it said before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hosting {
    /// Classes that it can create actors of.
    pub classes: Vec<String>,
    /// Resources for all its created actors together, and its labels.
    pub offer: NodeResources,
}

impl Hosting {
    /// Checks the bounds.
    ///
    /// # Errors
    /// The bound that is broken, in one sentence.
    pub fn check(&self) -> Result<(), String> {
        if self.classes.len() > CLASSES_MAX {
            let count = self.classes.len();
            return Err(format!("{count} classes, the limit is {CLASSES_MAX}"));
        }
        self.classes.iter().try_for_each(|class| check_class(class))?;
        self.offer.check()
    }
}

/// Which start of which actor: an actor keeps its generation for life, and every start has a
/// higher incarnation than the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Instance {
    /// The actor.
    pub generation: u64,
    /// Which of its starts, from 1 on; 0 for actors that programs spawned themselves.
    pub incarnation: u32,
}

/// How often an actor has been started again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarted {
    /// In total.
    pub total: u32,
    /// Since it last lived for a while.
    pub in_a_row: u32,
}

/// Tells a process to start an actor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// The start.
    pub instance: Instance,
    /// Starts before this one; the process keeps them for the next coordinator.
    pub restarted: Restarted,
    /// The actor.
    pub creation: Creation,
}

/// What a process reports about an actor that it was told to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placed {
    /// The actor's name.
    pub name: String,
    /// The start.
    pub instance: Instance,
    /// `Starting`, `Alive`, `Draining` (it finishes its messages), `Dead`, or `Pending`: the
    /// process could not start it, and another may.
    pub life: ActorLife,
    /// Why it is dead.
    pub reason: Option<String>,
    /// Over a new link: all that the coordinator would need to start it again.
    pub known: Option<(Creation, Restarted)>,
}

/// How an actor is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndHow {
    /// After the messages in its mailbox.
    Finish,
    /// At once.
    Kill,
}

/// What any process may ask of the coordinator, as a message to [`PLACER`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementRequest {
    /// Create an actor; answered when it is alive.
    Create {
        /// The actor.
        creation: Creation,
        /// Its generation, drawn by the asker: a request that is sent again creates nothing twice.
        generation: u64,
        /// Whether the asker may have sent this request before, over another link.
        again: bool,
        /// Whether a living actor of this name and class will do.
        or_get: bool,
        /// The creation is called off after this time, in milliseconds.
        within_ms: u32,
    },
    /// End an actor.
    Kill {
        /// Its name.
        name: String,
        /// Whether it may be started again.
        restart: bool,
    },
    /// Find a living actor.
    Find {
        /// Its name.
        name: String,
    },
}

/// The coordinator's answer to a [`PlacementRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementReply {
    /// The node where the actor is, or was.
    pub node: String,
}

/// Why an actor is not created, killed or found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum PlacementError {
    /// No linked process hosts the class.
    #[error("no process hosts the class `{0}`")]
    NoHost(String),
    /// Some do, but not on nodes that it may be placed on.
    #[error("it may be placed {asked}; the class is hosted by {hosts}")]
    NoMatch {
        /// Where it may be placed.
        asked: String,
        /// The nodes that host the class.
        hosts: String,
    },
    /// None of them has room.
    #[error("it needs {asked}; free are {free}")]
    NoRoom {
        /// What it needs.
        asked: String,
        /// What nodes that could take it have left.
        free: String,
    },
    /// Another actor has the name.
    #[error("the name is taken by an actor of {0}")]
    NameTaken(String),
    /// It has a bound.
    #[error("{0}")]
    Invalid(String),
    /// A limit of the cluster is reached.
    #[error("{0}")]
    Full(String),
    /// It could not be started, or ended before it could be used.
    #[error("it was not started: {0}")]
    NotStarted(String),
    /// The coordinator has just taken over, and an actor of this name may still report to it.
    #[error(
        "the coordinator has just taken over and waits for actors of this name: ask again in a \
         few seconds"
    )]
    Settling,
    /// There is no such actor.
    #[error("there is no actor `{0}`")]
    NoSuchActor(String),
    /// It belongs to the cluster itself.
    #[error("`{0}` is one of the cluster's own actors: use tutti drain or tutti scale")]
    NotYours(String),
}

//! Messages between named actors of any two processes. The coordinator is the hub of the star: what
//! is for an actor of another process goes through it.
use serde::{Deserialize, Serialize};

/// Longest name of an actor, in bytes.
pub const ACTOR_NAME_MAX: usize = 128;
/// Longest reason that is passed on, in bytes.
pub const REASON_MAX: usize = 1024;

/// One frame of kind `actor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ActorFrame {
    /// What became of an actor of the sender's process; the first report makes it known.
    Report(ActorReport),
    /// The hub does not take a report.
    Refused {
        /// The actor's name.
        name: String,
        /// Its generation.
        generation: u64,
        /// Why, in one sentence.
        reason: String,
    },
    /// A message for an actor.
    Deliver {
        /// The sender's number for it; 0 when nothing is expected back.
        id: u64,
        /// The actor's name.
        to: String,
        /// What is expected back.
        wants: Wants,
        /// How long the sender waits, in milliseconds.
        within_ms: u32,
        /// The message, encoded.
        #[serde(with = "crate::wire::bytes")]
        body: Vec<u8>,
    },
    /// What became of it.
    Answer {
        /// The number it came with.
        id: u64,
        /// The reply, empty for a delivery; or why there is none.
        #[serde(with = "crate::wire::bytes::or_error")]
        outcome: Result<Vec<u8>, AskError>,
    },
    /// Tell me of this actor's death.
    Watch {
        /// The watcher's number for it.
        id: u64,
        /// The actor's name.
        name: String,
        /// The one that was watched before the link broke.
        generation: Option<u64>,
    },
    /// It is alive, and this is its generation.
    Watching {
        /// The watcher's number.
        id: u64,
        /// The actor's generation.
        generation: u64,
    },
    /// Tell me no more.
    Unwatch {
        /// The watcher's number.
        id: u64,
    },
    /// It is dead. Said once for each watch.
    Died {
        /// The watcher's number.
        id: u64,
        /// Why, in one sentence.
        reason: String,
    },
    /// It is not watched, which says nothing of its life. Last, as the number goes over the wire.
    NotWatched {
        /// The watcher's number.
        id: u64,
        /// Why, in one sentence.
        reason: String,
    },
}

/// What a sender expects back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wants {
    /// Nothing.
    Nothing,
    /// That the actor's mailbox took it.
    Delivery,
    /// The actor's reply.
    Reply,
}

/// Where an actor is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActorLife {
    /// Not placed yet.
    Pending,
    /// Coming up.
    Starting,
    /// Takes messages.
    Alive,
    /// Finishing what it holds.
    Draining,
    /// Waiting to be started again.
    Restarting,
    /// Gone for good.
    Dead,
}

impl ActorLife {
    /// The name operators see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Starting => "starting",
            Self::Alive => "alive",
            Self::Draining => "draining",
            Self::Restarting => "restarting",
            Self::Dead => "dead",
        }
    }
}

/// An actor, as its own process tells of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActorReport {
    /// Its name, unique in the cluster while it lives.
    pub name: String,
    /// What it is, for operators.
    pub kind: String,
    /// Differs for each actor that ever had the name; the same over restarts of one.
    pub generation: u64,
    /// Where it is in its life.
    pub life: ActorLife,
    /// How often it was started again.
    pub restarts: u32,
    /// How often in a row it may be; absent when that is nobody's to say.
    pub max_restarts: Option<u32>,
    /// Why it is restarting or dead.
    pub reason: Option<String>,
}

/// Why there is no reply. A message is never lost in silence: who asks gets its reply or one of
/// these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum AskError {
    /// Nobody has this name.
    #[error("there is no actor `{0}`")]
    NoSuchActor(String),
    /// The actor does not keep up; its mailbox has a bound.
    #[error("the mailbox of `{0}` is full")]
    MailboxFull(String),
    /// Too many asks are under way.
    #[error("{0} asks are under way, the bound")]
    TooManyAsks(u32),
    /// The way there broke. The message may have been handled.
    #[error("the link to {0} is gone")]
    LinkLost(String),
    /// No reply came in time. The message may be handled later.
    #[error("no reply within {0} ms")]
    Deadline(u32),
    /// The actor failed over this message, or before it.
    #[error("the actor failed: {0}")]
    Failed(String),
    /// The message has no wire form, or the actor does not understand it.
    #[error("not a message that this actor takes: {0}")]
    Malformed(String),
    /// The message is too large for a frame.
    #[error("a message of {0} bytes is over the bound of a frame")]
    TooLarge(u64),
}

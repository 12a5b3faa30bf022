//! Messages between named actors of any two processes. The coordinator is the hub of the star: it
//! forwards messages between other processes.
//!
//! - [`creation`]: actors that are created by class
pub mod creation;

use serde::{Deserialize, Serialize};

use self::creation::{Begin, EndHow, Hosting, Instance, Placed};

/// Maximum length of an actor's name, in bytes.
pub const ACTOR_NAME_MAX: usize = 128;
/// Maximum length of a forwarded reason, in bytes.
pub const REASON_MAX: usize = 1024;

/// The content of one frame of kind `actor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ActorFrame {
    /// The new state of an actor of the sender's process; the first report registers it.
    Report(ActorReport),
    /// The hub rejects a report.
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
        /// The sender's id for the message; 0 if it expects nothing back.
        id: u64,
        /// The actor's name.
        to: String,
        /// What the sender expects back.
        wants: Wants,
        /// How long the sender waits, in milliseconds.
        within_ms: u32,
        /// The message, encoded.
        #[serde(with = "crate::wire::bytes")]
        body: Vec<u8>,
    },
    /// The outcome of a message.
    Answer {
        /// The id that the message had.
        id: u64,
        /// The reply (empty for a delivery), or why there is none.
        #[serde(with = "crate::wire::bytes::or_error")]
        outcome: Result<Vec<u8>, AskError>,
    },
    /// Asks for one notice when this actor dies.
    Watch {
        /// The watcher's id for the watch.
        id: u64,
        /// The actor's name.
        name: String,
        /// The actor's generation, if it was watched before the link broke.
        generation: Option<u64>,
    },
    /// The watched actor is alive, with this generation.
    Watching {
        /// The watcher's id.
        id: u64,
        /// The actor's generation.
        generation: u64,
    },
    /// Ends a watch.
    Unwatch {
        /// The watcher's id.
        id: u64,
    },
    /// The watched actor is dead. Sent once per watch.
    Died {
        /// The watcher's id.
        id: u64,
        /// Why, in one sentence.
        reason: String,
    },
    /// The actor cannot be watched, which says nothing about its life.
    NotWatched {
        /// The watcher's id.
        id: u64,
        /// Why, in one sentence.
        reason: String,
    },
    /// What the sender's process hosts. Over a new link it follows the reports on the actors that
    /// it was told to start, so that their resources are known to be taken.
    Hosting(Hosting),
    /// The hub tells a process to start an actor.
    Begin(Box<Begin>),
    /// The state of an actor that the sender was told to start.
    Placed(Box<Placed>),
    /// The hub tells a process to end an actor. New variants go to the end, because variants are
    /// encoded by index.
    End {
        /// The actor's name.
        name: String,
        /// Which start of it.
        instance: Instance,
        /// At once or not.
        how: EndHow,
        /// Why, in one sentence.
        reason: String,
    },
}

/// What a sender expects back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wants {
    /// Nothing.
    Nothing,
    /// Confirmation that the message is in the actor's mailbox.
    Delivery,
    /// The actor's reply.
    Reply,
}

/// The state of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActorLife {
    /// Not placed yet.
    Pending,
    /// Being started.
    Starting,
    /// Takes messages.
    Alive,
    /// Finishing the messages that it holds.
    Draining,
    /// Waiting to be restarted.
    Restarting,
    /// Gone for good.
    Dead,
}

impl ActorLife {
    /// Returns the name shown to operators.
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

/// An actor's state, as reported by its own process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActorReport {
    /// Its name, unique in the cluster while it lives.
    pub name: String,
    /// Its kind, shown to operators.
    pub kind: String,
    /// Differs for each actor that ever had the name; stays the same across an actor's restarts.
    pub generation: u64,
    /// Its state.
    pub life: ActorLife,
    /// Number of restarts.
    pub restarts: u32,
    /// Maximum number of restarts in a row; absent where no such limit is known.
    pub max_restarts: Option<u32>,
    /// Why it is restarting or dead.
    pub reason: Option<String>,
}

/// Why there is no reply. No message is lost silently: the asker gets its reply or one of these.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum AskError {
    /// No actor has this name.
    #[error("there is no actor `{0}`")]
    NoSuchActor(String),
    /// The actor does not keep up: its bounded mailbox is full.
    #[error("the mailbox of `{0}` is full")]
    MailboxFull(String),
    /// Too many asks are pending.
    #[error("{0} asks are in progress, which is the limit")]
    TooManyAsks(u32),
    /// A link on the path broke. The message may have been handled.
    #[error("the link to {0} is gone")]
    LinkLost(String),
    /// No reply came in time. The message may be handled later.
    #[error("no reply within {0} ms")]
    Deadline(u32),
    /// The actor failed on this message or before it.
    #[error("the actor failed: {0}")]
    Failed(String),
    /// The message cannot be encoded, or the actor cannot decode it.
    #[error("not a message that this actor takes: {0}")]
    Malformed(String),
    /// The message is too large for a frame.
    #[error("a message of {0} bytes exceeds the limit of a frame")]
    TooLarge(u64),
    /// The actor is not running at the moment: it is about to be started, or may be in a process
    /// that has not linked again. Nothing was delivered.
    #[error("`{0}` is not there at the moment")]
    Unavailable(String),
}

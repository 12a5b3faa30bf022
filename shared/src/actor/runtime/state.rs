//! What a process's runtime knows, guarded by its one lock, and how it sends. Nothing here blocks.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::Thread;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};

use super::waiting::Watched;
use super::{Outcome, Role};
use crate::actor::exchange::{ASKS_PER_PEER, Exchange, PeerId, Route};
use crate::actor::hosting::{Controller, Factory};
use crate::actor::link::{ACTOR_QUEUE_MAX, LinkHandle, Queued, SendError};
use crate::actor::named::Envelope;
use crate::actor::placement::{CREATED_MAX, Placement};
use crate::actor::registry::{ACTORS_MAX, Home, Registry, WATCHES_MAX};
use crate::protocol::NodeResources;
use crate::protocol::actors::creation::{Begin, Instance, PLACER};
use crate::protocol::actors::{ActorFrame, ActorLife, AskError};
use crate::wire::codec;
use crate::wire::frame::FrameKind;

/// When this many frames or bytes are queued on a link, messages between actors are not sent on it.
const MESSAGES_BEHIND: Queued = Queued { frames: 128, bytes: 64 << 20 };
/// When this many bytes are queued on a link, replies are replaced by errors.
const REPLIES_BEHIND: usize = 128 << 20;
/// What a process may have to send at one moment must fit the queue: the reports of all its actors
/// and watches, or the failure of everything its peer waits for; at the hub, also the starts and
/// ends of created actors.
const _: () = assert!(
    ACTORS_MAX + 2 * WATCHES_MAX + ASKS_PER_PEER + 2 * CREATED_MAX + MESSAGES_BEHIND.frames
        < ACTOR_QUEUE_MAX
);

pub(super) struct State {
    pub(super) node: String,
    pub(super) exchange: Exchange,
    pub(super) registry: Registry,
    /// Created actors of the whole cluster; used at the hub alone.
    pub(super) placement: Placement,
    /// Rings when there is something to write to etcd about them.
    pub(super) keeper: Option<Arc<Notify>>,
    /// Classes that this process hosts.
    pub(super) classes: BTreeMap<String, Factory>,
    /// What this process has for created actors.
    pub(super) offer: Option<NodeResources>,
    /// Created actors that run in this process, or ended while there was no hub to tell.
    pub(super) hosted: BTreeMap<Instance, Hosted>,
    /// Runs them, once there was one.
    pub(super) controller: Option<Controller>,
    pub(super) peers: BTreeMap<PeerId, Peer>,
    pub(super) mailboxes: BTreeMap<String, Mailbox>,
    /// Actors that the program spawned and that are not dead, by generation; not the cluster's own.
    pub(super) spawned: BTreeMap<u64, String>,
    /// Whether this process is about to leave: its actors end, and it takes no more.
    pub(super) leaving: bool,
    pub(super) waiters: BTreeMap<u64, oneshot::Sender<Outcome>>,
    pub(super) watches: BTreeMap<u64, Watch>,
    /// The last number assigned to a waiter, watch, link or generation.
    pub(super) last: u64,
    /// Whether deadlines are being checked.
    pub(super) ticks: bool,
    /// The thread that checks them; parked while there are no asks.
    pub(super) ticker: Option<Thread>,
}

pub(super) struct Peer {
    pub(super) node: String,
    pub(super) link: LinkHandle,
}

pub(super) struct Mailbox {
    pub(super) instance: Instance,
    pub(super) sender: mpsc::Sender<Envelope>,
    /// Ends an actor that a program spawned.
    pub(super) kill: Option<oneshot::Sender<String>>,
}

/// A created actor in this process.
pub(super) struct Hosted {
    /// What it was started with.
    pub(super) begin: Begin,
    pub(super) life: ActorLife,
    pub(super) reason: Option<String>,
    /// Ends it at once, for the reason given.
    pub(super) kill: Option<oneshot::Sender<String>>,
}

pub(super) struct Watch {
    pub(super) name: String,
    pub(super) generation: Option<u64>,
    pub(super) told: oneshot::Sender<Watched>,
}

impl Watch {
    /// The frame that asks the hub for this watch.
    pub(super) fn frame(&self, id: u64) -> ActorFrame {
        ActorFrame::Watch { id, name: self.name.clone(), generation: self.generation }
    }
}

impl State {
    /// The state of the process named `node`; `run` differs for each process run.
    pub(super) fn new(node: &str, run: u64) -> Self {
        Self {
            node: node.to_owned(),
            exchange: Exchange::default(),
            registry: Registry::default(),
            placement: Placement::default(),
            keeper: None,
            classes: BTreeMap::new(),
            offer: None,
            hosted: BTreeMap::new(),
            controller: None,
            peers: BTreeMap::new(),
            mailboxes: BTreeMap::new(),
            spawned: BTreeMap::new(),
            leaving: false,
            waiters: BTreeMap::new(),
            watches: BTreeMap::new(),
            // Generations from two runs of a process must differ.
            last: run >> 1,
            ticks: false,
            ticker: None,
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn hub(&self) -> Option<PeerId> {
        self.peers.last_key_value().map(|(peer, _)| *peer)
    }

    /// Where a message goes; with `here_alone` it is not passed on.
    pub(super) fn route(&self, now: Duration, name: &str, role: Role, here_alone: bool) -> Route {
        let is_placer = role == Role::Hub && name == PLACER;
        if is_placer || self.mailboxes.contains_key(name) {
            return Route::Here;
        }
        let nobody = || Route::Nowhere(AskError::NoSuchActor(name.to_owned()));
        let away = |name: &str| Route::Nowhere(AskError::Unavailable(name.to_owned()));
        match (role, self.registry.find(name)) {
            (Role::Hub, Some(Home::Peer(peer))) => Route::Peer(peer),
            (Role::Hub, _) if self.placement.is_away(name) => away(name),
            (Role::Hub, None) if self.placement.settles(now) => away(name),
            (Role::Spoke, None) if !here_alone => match self.hub() {
                Some(peer) => Route::Peer(peer),
                None => away("the coordinator"),
            },
            // It was here when the hub passed the message on; the next one finds out more.
            (Role::Spoke, None) => away(name),
            _ => nobody(),
        }
    }

    /// Whether a living actor that was not created has this name.
    pub(super) fn is_taken(&self, name: &str) -> bool {
        self.placement.created(name).is_none() && self.registry.find(name).is_some()
    }

    pub(super) fn put(&self, name: &str, envelope: Envelope) -> Result<(), AskError> {
        let Some(mailbox) = self.mailboxes.get(name) else {
            envelope.forget();
            return Err(AskError::NoSuchActor(name.to_owned()));
        };
        mailbox.sender.try_send(envelope).map_err(|error| match error {
            mpsc::error::TrySendError::Full(envelope) => {
                envelope.forget();
                AskError::MailboxFull(name.to_owned())
            }
            mpsc::error::TrySendError::Closed(envelope) => {
                envelope.forget();
                AskError::Unavailable(name.to_owned())
            }
        })
    }

    pub(super) fn send(&self, peer: PeerId, frame: &ActorFrame) -> Result<(), AskError> {
        let Some(peer) = self.peers.get(&peer) else {
            return Err(AskError::LinkLost("a process".to_owned()));
        };
        let body = codec::encode(frame).map_err(|error| AskError::Malformed(error.to_string()))?;
        let full = || AskError::MailboxFull(format!("the link to {}", peer.node));
        let queued = peer.link.queued_of_actors();
        let (refused, len) = match frame {
            // Leave room for control frames: application messages are refused first.
            ActorFrame::Deliver { body, .. } => {
                let Queued { frames, bytes } = MESSAGES_BEHIND;
                (queued.frames >= frames || queued.bytes >= bytes, body.len())
            }
            ActorFrame::Answer { outcome: Ok(body), .. } => {
                (queued.bytes >= REPLIES_BEHIND, body.len())
            }
            _ => (false, 0),
        };
        if refused {
            return Err(full());
        }
        peer.link.tell(FrameKind::Actor, 0, body.into()).map_err(|error| match error {
            SendError::TooLarge(_) => AskError::TooLarge(len as u64),
            SendError::Closed => AskError::LinkLost(peer.node.clone()),
            SendError::Full => full(),
        })
    }

    /// Tells whoever writes to etcd that there is something to write, if there is.
    pub(super) fn ring_keeper(&self) {
        if let Some(keeper) = self.keeper.as_ref().filter(|_| self.placement.has_to_keep()) {
            keeper.notify_one();
        }
    }

    pub(super) fn tell(&mut self, watch: u64, outcome: Watched) {
        if let Some(watch) = self.watches.remove(&watch) {
            let _ = watch.told.send(outcome);
        }
    }
}

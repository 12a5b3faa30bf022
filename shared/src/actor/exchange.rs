//! PURE: pending asks (requests that expect a reply). Each is resolved exactly once: by its reply,
//! by the loss of a link on its path, or by its deadline.
//!
//! A process asks on its own behalf, and the hub forwards other processes' asks; both kinds are a
//! pending ask with an origin. Ids are local to this process: a peer's id is translated, never
//! trusted.
use std::collections::BTreeMap;
use std::time::Duration;

use crate::protocol::actors::{ActorFrame, AskError, Wants};

/// Maximum number of pending asks, over all origins.
pub const ASKS_MAX: usize = 4096;
/// Maximum number of pending asks per peer, so that no peer can take all places.
pub const ASKS_PER_PEER: usize = 1024;
/// Longest wait for a reply.
pub const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// A link of this process; ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u64);

/// Who waits for the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A waiter in this process, by the number that the shell assigned.
    Here(u64),
    /// A peer, and the peer's own id of the ask.
    Peer(PeerId, u64),
}

/// Where a message goes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// A mailbox of this process.
    Here,
    /// Over a link.
    Peer(PeerId),
    /// Nowhere, for this reason.
    Nowhere(AskError),
}

/// What the shell must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send a frame.
    Send {
        /// Link to send it over.
        peer: PeerId,
        /// Frame to send.
        frame: ActorFrame,
    },
    /// Put a message into a mailbox of this process.
    Deliver {
        /// The actor.
        to: String,
        /// The argument for [`Exchange::answered`]; 0 when nobody waits.
        id: u64,
        /// What the sender expects back.
        wants: Wants,
        /// The message.
        body: Vec<u8>,
    },
    /// Deliver an outcome to a waiter in this process.
    Resolve {
        /// The waiter's number, as the shell assigned it.
        waiter: u64,
        /// Its outcome.
        outcome: Result<Vec<u8>, AskError>,
    },
    /// A message that nobody waits for was lost; the shell counts it.
    Lost(AskError),
}

/// A message to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// The actor's name.
    pub to: String,
    /// What the sender expects back.
    pub wants: Wants,
    /// How long its sender waits.
    pub within: Duration,
    /// The message.
    pub body: Vec<u8>,
}

#[derive(Debug)]
struct Ask {
    origin: Origin,
    /// Link on which the answer arrives; `None` for an actor of this process.
    via: Option<PeerId>,
    due: Duration,
    within: Duration,
}

/// The table of pending asks; see the module's documentation.
#[derive(Debug, Default)]
pub struct Exchange {
    asks: BTreeMap<u64, Ask>,
    /// Pending asks per waiting peer; never holds a zero.
    of_peers: BTreeMap<PeerId, usize>,
    last: u64,
}

impl Exchange {
    /// Sends a message from this process (`origin` is `Here`) or forwards a peer's.
    pub fn send(
        &mut self,
        now: Duration,
        origin: Origin,
        route: Route,
        message: Outgoing,
        effects: &mut Vec<Effect>,
    ) {
        let Outgoing { to, wants, within, body } = message;
        let within = within.min(DEADLINE_MAX);
        let refused = match &route {
            Route::Nowhere(error) => Some(error.clone()),
            _ if wants == Wants::Nothing => None,
            _ => self.no_room(origin),
        };
        if let Some(error) = refused {
            match wants {
                Wants::Nothing => effects.push(Effect::Lost(error)),
                _ => effects.push(outcome(origin, Err(error))),
            }
            return;
        }
        let via = match route {
            Route::Peer(peer) => Some(peer),
            _ => None,
        };
        let mut id = 0;
        if wants != Wants::Nothing {
            self.last += 1;
            id = self.last;
            self.asks.insert(id, Ask { origin, via, due: now + within, within });
            if let Origin::Peer(peer, _) = origin {
                *self.of_peers.entry(peer).or_default() += 1;
            }
        }
        effects.push(match via {
            None => Effect::Deliver { to, id, wants, body },
            Some(peer) => {
                let within_ms = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
                Effect::Send { peer, frame: ActorFrame::Deliver { id, to, wants, within_ms, body } }
            }
        });
    }

    fn no_room(&self, origin: Origin) -> Option<AskError> {
        let of_peer = match origin {
            Origin::Here(_) => 0,
            Origin::Peer(peer, _) => self.of_peers.get(&peer).copied().unwrap_or(0),
        };
        let over = |count: usize, max: usize| {
            (count >= max).then_some(AskError::TooManyAsks(u32::try_from(max).unwrap_or(u32::MAX)))
        };
        over(of_peer, ASKS_PER_PEER).or_else(|| over(self.asks.len(), ASKS_MAX))
    }

    /// Resolves ask `id` with the answer of a local actor (`via` is `None`) or of the peer that
    /// hosts the actor. Returns false and changes nothing if the ask is not pending or was sent
    /// another way.
    pub fn answered(
        &mut self,
        via: Option<PeerId>,
        id: u64,
        result: Result<Vec<u8>, AskError>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        if self.asks.get(&id).is_none_or(|ask| ask.via != via) {
            return false;
        }
        if let Some(ask) = self.asks.remove(&id) {
            uncount(&mut self.of_peers, ask.origin);
            effects.push(outcome(ask.origin, result));
        }
        true
    }

    /// Drops the ask of `waiter`, who no longer waits for it.
    pub fn abandoned(&mut self, waiter: u64) {
        self.asks.retain(|_, ask| ask.origin != Origin::Here(waiter));
    }

    /// Handles a lost link: asks sent over it fail with `LinkLost`, asks from it are dropped.
    pub fn peer_lost(&mut self, peer: PeerId, node: &str, effects: &mut Vec<Effect>) {
        self.asks.retain(|_, ask| !matches!(ask.origin, Origin::Peer(p, _) if p == peer));
        self.of_peers.remove(&peer);
        self.resolve_where(
            |ask| ask.via == Some(peer),
            |_| AskError::LinkLost(node.to_owned()),
            effects,
        );
    }

    /// Fails the asks whose deadline has passed.
    pub fn tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        self.resolve_where(
            |ask| ask.due <= now,
            |ask| AskError::Deadline(u32::try_from(ask.within.as_millis()).unwrap_or(u32::MAX)),
            effects,
        );
    }

    /// Number of pending asks.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.asks.len()
    }

    fn resolve_where(
        &mut self,
        which: impl Fn(&Ask) -> bool,
        error: impl Fn(&Ask) -> AskError,
        effects: &mut Vec<Effect>,
    ) {
        let of_peers = &mut self.of_peers;
        self.asks.retain(|_, ask| {
            let over = which(ask);
            if over {
                uncount(of_peers, ask.origin);
                effects.push(outcome(ask.origin, Err(error(ask))));
            }
            !over
        });
    }
}

fn uncount(of_peers: &mut BTreeMap<PeerId, usize>, origin: Origin) {
    if let Origin::Peer(peer, _) = origin
        && let Some(count) = of_peers.get_mut(&peer)
    {
        *count -= 1;
        if *count == 0 {
            of_peers.remove(&peer);
        }
    }
}

fn outcome(origin: Origin, outcome: Result<Vec<u8>, AskError>) -> Effect {
    match origin {
        Origin::Here(waiter) => Effect::Resolve { waiter, outcome },
        Origin::Peer(peer, id) => Effect::Send { peer, frame: ActorFrame::Answer { id, outcome } },
    }
}

#[cfg(test)]
mod tests;

//! PURE: asks under way, each resolved exactly once: by its reply, by the end of a link on its way,
//! or by its deadline.
//!
//! A process asks for itself, and the hub passes on what others ask; both are an outstanding ask
//! with an origin. Ids are this process's own: an id of a peer is translated, never trusted.
use std::collections::BTreeMap;
use std::time::Duration;

use crate::protocol::actors::{ActorFrame, AskError, Wants};

/// Asks under way at a time, all origins together.
pub const ASKS_MAX: usize = 4096;
/// Asks under way at a time of one peer: none can take all places.
pub const ASKS_PER_PEER: usize = 1024;
/// Longest wait for a reply.
pub const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// A link of this process; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u64);

/// Who waits for an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Someone in this process, by the number the shell gave.
    Here(u64),
    /// A peer, by its own number.
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

/// What the shell has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Send a frame.
    Send {
        /// Over which link.
        peer: PeerId,
        /// What.
        frame: ActorFrame,
    },
    /// Put a message into a mailbox of this process.
    Deliver {
        /// The actor.
        to: String,
        /// What [`Exchange::answered`] is to be called with; 0 when nobody waits.
        id: u64,
        /// What is expected back.
        wants: Wants,
        /// The message.
        body: Vec<u8>,
    },
    /// Someone in this process waits no longer.
    Resolve {
        /// The number the shell gave.
        waiter: u64,
        /// Its outcome.
        outcome: Result<Vec<u8>, AskError>,
    },
    /// A message was lost that nobody waits for: counted.
    Lost(AskError),
}

/// A message on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// The actor's name.
    pub to: String,
    /// What is expected back.
    pub wants: Wants,
    /// How long its sender waits.
    pub within: Duration,
    /// The message.
    pub body: Vec<u8>,
}

#[derive(Debug)]
struct Ask {
    origin: Origin,
    /// The link that the answer comes over; `None` from this process.
    via: Option<PeerId>,
    due: Duration,
    within: Duration,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Exchange {
    asks: BTreeMap<u64, Ask>,
    /// How many of them each peer waits for; no zeros.
    of_peers: BTreeMap<PeerId, usize>,
    last: u64,
}

impl Exchange {
    /// A message leaves, or comes in to be passed on.
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

    /// An actor of this process, or the peer that has it, answers. What is not under way any more,
    /// or not by this way, changes nothing; returns whether it was.
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

    /// Nobody in this process waits for it any more.
    pub fn abandoned(&mut self, waiter: u64) {
        self.asks.retain(|_, ask| ask.origin != Origin::Here(waiter));
    }

    /// A link is gone: what waited for it fails, what it waited for is nobody's.
    pub fn peer_lost(&mut self, peer: PeerId, node: &str, effects: &mut Vec<Effect>) {
        self.asks.retain(|_, ask| !matches!(ask.origin, Origin::Peer(p, _) if p == peer));
        self.of_peers.remove(&peer);
        self.resolve_where(
            |ask| ask.via == Some(peer),
            |_| AskError::LinkLost(node.to_owned()),
            effects,
        );
    }

    /// Time passes.
    pub fn tick(&mut self, now: Duration, effects: &mut Vec<Effect>) {
        self.resolve_where(
            |ask| ask.due <= now,
            |ask| AskError::Deadline(u32::try_from(ask.within.as_millis()).unwrap_or(u32::MAX)),
            effects,
        );
    }

    /// Asks under way.
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

/// One ask of this origin is over.
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

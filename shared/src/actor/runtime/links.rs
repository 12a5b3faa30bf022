//! Linked processes: how they come and go, and how their frames are handled.
use std::time::Duration;

use super::placing::ends;
use super::state::{Mailbox, Peer, State, Watch};
use super::{ActorRuntime, NotWatched, Role};
use crate::actor::exchange::{Origin, Outgoing, PeerId};
use crate::actor::link::LinkHandle;
use crate::actor::registry::{Home, Notice, Watching};
use crate::protocol::actors::creation::Instance;
use crate::protocol::actors::{ActorFrame, ActorReport};
use crate::wire::codec;

impl ActorRuntime {
    /// Registers a linked process. Pass the link's actor frames to [`ActorRuntime::frame`], and its
    /// end to [`ActorRuntime::peer_lost`].
    #[must_use]
    pub fn peer_up(&self, node: &str, link: LinkHandle) -> PeerId {
        let peer = self.reserve_peer();
        self.peer_up_as(peer, node, link);
        peer
    }

    /// Reserves the id of a future link, for owners whose receiving side needs it first.
    #[must_use]
    pub fn reserve_peer(&self) -> PeerId {
        PeerId(self.state().number())
    }

    /// Same as [`ActorRuntime::peer_up`], with a reserved id.
    pub fn peer_up_as(&self, peer: PeerId, node: &str, link: LinkHandle) {
        let mut state = self.state();
        state.peers.insert(peer, Peer { node: node.to_owned(), link });
        if self.inner.role == Role::Spoke {
            let reports: Vec<ActorReport> =
                state.registry.list().map(|known| known.report.clone()).collect();
            for report in reports {
                let _ = state.send(peer, &ActorFrame::Report(report));
            }
            let elsewhere =
                |(_, watch): &(&u64, &Watch)| state.registry.find(&watch.name).is_none();
            let watches = state.watches.iter().filter(elsewhere);
            let watches: Vec<ActorFrame> = watches.map(|(id, watch)| watch.frame(*id)).collect();
            for frame in watches {
                let _ = state.send(peer, &frame);
            }
            self.tell_placed(&mut state, peer);
        }
    }

    /// Unregisters a process whose link has ended.
    pub fn peer_lost(&self, peer: PeerId, reason: &str) {
        let (mut effects, mut notices) = (Vec::new(), Vec::new());
        let mut state = self.state();
        let Some(lost) = state.peers.remove(&peer) else { return };
        state.exchange.peer_lost(peer, &lost.node, &mut effects);
        let reason = format!("the link to {} is gone: {reason}", lost.node);
        // First the created actors there, which are not dead yet.
        let (mut decided, now) = (Vec::new(), self.inner.clock.now());
        state.placement.lost(now, Home::Peer(peer), &reason, &mut decided);
        self.decided(&mut state, decided);
        state.registry.peer_lost(peer, &reason, &mut notices);
        self.notify(&mut state, notices);
        self.carry_out(&mut state, effects);
    }

    /// Handles a linked process's actor frame. False: it cannot be decoded, so close the link.
    #[must_use]
    pub fn frame(&self, peer: PeerId, body: &[u8]) -> bool {
        let frame = match codec::decode_message::<ActorFrame>(body) {
            Ok(frame) => frame,
            Err(error) => {
                let node = self.state().peers.get(&peer).map(|peer| peer.node.clone());
                let node = node.unwrap_or_default();
                tracing::error!(node, %error, "sent an actor frame that cannot be read");
                return false;
            }
        };
        let (mut effects, mut notices) = (Vec::new(), Vec::new());
        let mut state = self.state();
        let Some(node) = state.peers.get(&peer).map(|peer| peer.node.clone()) else {
            return true;
        };
        match frame {
            ActorFrame::Deliver { id, to, wants, within_ms, body } => {
                // A spoke forwards nothing; otherwise two processes could send a message back and
                // forth.
                let is_spoke = self.inner.role == Role::Spoke;
                let route = state.route(self.inner.clock.now(), &to, self.inner.role, is_spoke);
                let within = Duration::from_millis(within_ms.into());
                let message = Outgoing { to, wants, within, body };
                let (now, origin) = (self.inner.clock.now(), Origin::Peer(peer, id));
                state.exchange.send(now, origin, route, message, &mut effects);
            }
            ActorFrame::Answer { id, outcome } => {
                state.exchange.answered(Some(peer), id, outcome, &mut effects);
            }
            frame => match self.inner.role {
                Role::Hub => self.told_by_spoke(&mut state, peer, &node, frame, &mut notices),
                Role::Spoke => self.told_by_hub(&mut state, peer, &node, frame),
            },
        }
        self.notify(&mut state, notices);
        self.carry_out(&mut state, effects);
        if state.exchange.outstanding() > 0 {
            self.tick_from_now_on(&mut state);
        }
        true
    }

    /// Handles what a process tells the hub about its actors and asks about others.
    fn told_by_spoke(
        &self,
        state: &mut State,
        peer: PeerId,
        node: &str,
        frame: ActorFrame,
        notices: &mut Vec<Notice>,
    ) {
        let home = Home::Peer(peer);
        let answer = match frame {
            ActorFrame::Report(report) => {
                let (name, generation) = (report.name.clone(), report.generation);
                match state.registry.report(home, node, report, notices) {
                    Ok(()) => return,
                    Err(error) => {
                        ActorFrame::Refused { name, generation, reason: error.to_string() }
                    }
                }
            }
            ActorFrame::Watch { id, name, generation } => {
                match self.begin_watch(state, (home, id), &name, generation) {
                    Ok(Watching::Alive { generation }) => ActorFrame::Watching { id, generation },
                    Ok(Watching::Awaited) => return,
                    Ok(Watching::Over { reason }) => ActorFrame::Died { id, reason },
                    Err(error) => ActorFrame::NotWatched { id, reason: error.to_string() },
                }
            }
            ActorFrame::Unwatch { id } => return state.registry.unwatch((home, id)),
            ActorFrame::Hosting(hosting) => {
                return match hosting.check() {
                    Ok(()) => {
                        let (mut effects, now) = (Vec::new(), self.inner.clock.now());
                        state.placement.hosting(now, home, node, hosting, &mut effects);
                        self.decided(state, effects);
                    }
                    Err(error) => tracing::error!(node, error, "its classes are not taken"),
                };
            }
            ActorFrame::Placed(placed) => {
                let (mut effects, now) = (Vec::new(), self.inner.clock.now());
                let taken = state.is_taken(&placed.name);
                state.placement.placed(now, home, node, *placed, taken, &mut effects);
                return self.decided(state, effects);
            }
            other => return tracing::debug!(node, frame = ?other, "not for this side"),
        };
        let _ = state.send(peer, &answer);
    }

    /// Handles what the hub tells a process about actors elsewhere and about its own.
    fn told_by_hub(&self, state: &mut State, peer: PeerId, node: &str, frame: ActorFrame) {
        match frame {
            ActorFrame::Watching { id, generation } => {
                if let Some(watch) = state.watches.get_mut(&id) {
                    watch.generation = Some(generation);
                }
            }
            ActorFrame::Died { id, reason } => state.tell(id, Ok(reason)),
            ActorFrame::NotWatched { id, reason } => state.tell(id, Err(NotWatched(reason))),
            ActorFrame::Refused { name, generation, reason } => {
                tracing::error!(actor = name, reason, "the coordinator does not take this actor");
                let instance = Instance { generation, incarnation: 0 };
                let same = |mailbox: &Mailbox| mailbox.instance == instance;
                if state.mailboxes.get(&name).is_some_and(same) {
                    // Dropping the actor's mailbox ends its task.
                    state.mailboxes.remove(&name);
                }
            }
            ActorFrame::Begin(begin) => {
                if let Some(placed) = self.begins(state, *begin) {
                    let _ = state.send(peer, &ActorFrame::Placed(Box::new(placed)));
                }
            }
            ActorFrame::End { name, instance, how, reason } => {
                tracing::info!(actor = name, ?how, reason, "told to end an actor");
                if let Some(placed) = ends(state, name, instance, how, reason) {
                    let _ = state.send(peer, &ActorFrame::Placed(Box::new(placed)));
                }
            }
            other => tracing::debug!(node, frame = ?other, "not for this side"),
        }
    }
}

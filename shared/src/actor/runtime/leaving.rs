//! A process that is about to leave lets its own actors finish what they have.
use std::time::Duration;

use super::placing::ends;
use super::state::{Peer, State};
use super::{ActorRuntime, Role};
use crate::actor::exchange::PeerId;
use crate::actor::placement::is_reserved;
use crate::protocol::actors::ActorLife;
use crate::protocol::actors::creation::{EndHow, Instance};

/// Interval between looks at whether all have finished.
const LOOK: Duration = Duration::from_millis(10);

impl ActorRuntime {
    /// Ends this process's actors in order, because it is about to leave. They take no new
    /// messages, handle those that they have, and their replies are sent. Created actors are then
    /// placed in another process, which is no restart of them; this one is given no more.
    ///
    /// Resolves when that is done, or after `patience`, to whether it is done.
    pub async fn finish(&self, patience: Duration) -> bool {
        self.leave();
        // The hub's links are for others as well: with no actors of its own it waits for none.
        if self.inner.role == Role::Hub && self.unfinished().is_empty() {
            return true;
        }
        let looked = async {
            while !self.unfinished().is_empty() {
                tokio::time::sleep(LOOK).await;
            }
            // What they said is on its way once each link's queue has been empty. All of the hub's
            // may never be at the same time, for others talk over them.
            let mut unsent: Vec<_> = self.state().peers.keys().copied().collect();
            while self.remain_unsent(&mut unsent) {
                tokio::time::sleep(LOOK).await;
            }
        };
        let finished = tokio::time::timeout(patience, looked).await.is_ok();
        if !finished {
            let busy = self.unfinished();
            tracing::warn!(
                ?busy,
                ?patience,
                "actors that are still at work end with their process"
            );
        }
        finished
    }

    /// Closes the actors' mailboxes, and says so to the hub.
    fn leave(&self) {
        let mut state = self.state();
        let state = &mut *state;
        if std::mem::replace(&mut state.leaving, true) {
            return;
        }
        // First, so that nothing that ends is placed here again.
        self.tell_hosting(state);
        state.mailboxes.retain(|name, mailbox| mailbox.kill.is_none() || is_reserved(name));
        let lives = |life| !matches!(life, ActorLife::Dead | ActorLife::Draining);
        let created = state.hosted.iter().filter(|(_, hosted)| lives(hosted.life));
        let created: Vec<(Instance, String)> =
            created.map(|(instance, it)| (*instance, it.begin.creation.name.clone())).collect();
        for (instance, name) in created {
            let reason = "its process leaves".to_owned();
            let _ = ends(state, name.clone(), instance, EndHow::Finish, reason.clone());
            self.hosted_became(state, name, instance, ActorLife::Draining, Some(reason));
        }
    }

    /// Leaves those links whose actors' frames wait; whether there are any.
    fn remain_unsent(&self, links: &mut Vec<PeerId>) -> bool {
        let state = self.state();
        let waits = |peer: &Peer| peer.link.queued_of_actors().frames > 0;
        links.retain(|link| state.peers.get(link).is_some_and(waits));
        !links.is_empty()
    }

    fn unfinished(&self) -> Vec<String> {
        self.state().unfinished().map(str::to_owned).collect()
    }
}

impl State {
    /// The actors of this process that are not dead, except the cluster's own.
    fn unfinished(&self) -> impl Iterator<Item = &str> {
        let lives = self.hosted.values().filter(|hosted| hosted.life != ActorLife::Dead);
        let created = lives.map(|hosted| hosted.begin.creation.name.as_str());
        created.chain(self.spawned.values().map(String::as_str))
    }
}

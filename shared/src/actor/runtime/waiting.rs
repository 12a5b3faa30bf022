//! Waits for a message's outcome or an actor's death. Dropping the handle ends the wait.
use std::pin::Pin;
use std::sync::{PoisonError, Weak};
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use super::{Inner, Outcome, Role};
use crate::actor::registry::Home;
use crate::protocol::actors::{ActorFrame, AskError};

/// A sent message, as a handle to its outcome. Dropping it ends the wait.
pub(in crate::actor) struct Dispatched {
    pub(super) runtime: Weak<Inner>,
    pub(super) waiter: u64,
    pub(super) outcome: oneshot::Receiver<Outcome>,
    /// Why the message was lost, if that is known already and nobody waits for its outcome.
    pub(in crate::actor) lost: Option<AskError>,
}

impl Dispatched {
    pub(in crate::actor) async fn outcome(mut self) -> Outcome {
        let gone = || Err(AskError::Failed("its runtime is gone".to_owned()));
        (&mut self.outcome).await.unwrap_or_else(|_| gone())
    }
}

impl Drop for Dispatched {
    fn drop(&mut self) {
        if self.waiter == 0 {
            return;
        }
        if let Some(inner) = self.runtime.upgrade() {
            let mut state = inner.state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.waiters.remove(&self.waiter).is_some() {
                state.exchange.abandoned(self.waiter);
            }
        }
    }
}

/// Error of a watch that cannot be kept: there are too many watches, or this process's runtime is
/// gone. It says nothing about the actor's life.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is not watched: {0}")]
pub struct NotWatched(pub(super) String);

/// Result of a watch: why the actor is dead.
pub(super) type Watched = Result<String, NotWatched>;

/// Resolves once, with the reason, when the watched actor is dead; resolves to an error if nobody
/// will report that. Dropping it ends the watch.
#[derive(Debug)]
pub struct DeathWatch {
    pub(super) runtime: Weak<Inner>,
    pub(super) id: u64,
    pub(super) dead: oneshot::Receiver<Watched>,
}

impl Future for DeathWatch {
    type Output = Result<String, NotWatched>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let gone = || Err(NotWatched("its runtime is gone".to_owned()));
        Pin::new(&mut self.dead).poll(context).map(|told| told.unwrap_or_else(|_| gone()))
    }
}

impl Drop for DeathWatch {
    fn drop(&mut self) {
        let Some(inner) = self.runtime.upgrade() else { return };
        let mut state = inner.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.watches.remove(&self.id).is_none() {
            return;
        }
        state.registry.unwatch((Home::Here, self.id));
        if inner.role == Role::Spoke
            && let Some(peer) = state.hub()
        {
            let _ = state.send(peer, &ActorFrame::Unwatch { id: self.id });
        }
    }
}

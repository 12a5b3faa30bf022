//! The typed address of a named actor, wherever it lives.
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::exchange::Outgoing;
use super::runtime::ActorRuntime;
use crate::protocol::actors::{AskError, Wants};
use crate::wire::codec;

/// A message for a named actor. Both sides must have the same type behind it.
pub trait ActorMessage: Serialize + DeserializeOwned + Send + 'static {
    /// What is replied to it.
    type Reply: Serialize + DeserializeOwned + Send + 'static;
}

/// The address of a named actor that takes messages of type `M`. It says nothing of whether the
/// actor is there: that is found out with each message.
pub struct RemoteAddr<M> {
    runtime: ActorRuntime,
    name: String,
    takes: PhantomData<fn(M)>,
}

impl<M> Clone for RemoteAddr<M> {
    fn clone(&self) -> Self {
        Self { runtime: self.runtime.clone(), name: self.name.clone(), takes: PhantomData }
    }
}

impl<M> fmt::Debug for RemoteAddr<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RemoteAddr").field(&self.name).finish()
    }
}

impl<M: ActorMessage> RemoteAddr<M> {
    pub(super) fn new(runtime: ActorRuntime, name: &str) -> Self {
        Self { runtime, name: name.to_owned(), takes: PhantomData }
    }

    /// The actor's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a message and waits for nothing. What goes wrong in this process is said here; what
    /// goes wrong beyond a link is counted there and not told: those who must know use
    /// [`RemoteAddr::deliver`] or [`RemoteAddr::ask`].
    ///
    /// # Errors
    /// [`AskError`]: no such actor, a full mailbox, no link.
    pub fn tell(&self, message: &M) -> Result<(), AskError> {
        let sent = self.runtime.dispatch(self.outgoing(message, Wants::Nothing, Duration::ZERO)?);
        sent.lost.clone().map_or(Ok(()), Err)
    }

    /// Sends a message and waits until the actor's mailbox has it, wherever that is.
    ///
    /// # Errors
    /// [`AskError`], at the deadline at the latest.
    pub async fn deliver(&self, message: &M, deadline: Duration) -> Result<(), AskError> {
        let outgoing = self.outgoing(message, Wants::Delivery, deadline)?;
        self.runtime.dispatch(outgoing).outcome().await.map(drop)
    }

    /// Sends a message and waits for the reply. On the current tokio runtime.
    ///
    /// # Errors
    /// [`AskError`], at the deadline at the latest: a lost link, a full mailbox or a failed actor
    /// are told as soon as they are known.
    pub async fn ask(&self, message: &M, deadline: Duration) -> Result<M::Reply, AskError> {
        let outgoing = self.outgoing(message, Wants::Reply, deadline)?;
        let reply = self.runtime.dispatch(outgoing).outcome().await?;
        codec::decode_message(&reply).map_err(|error| AskError::Malformed(error.to_string()))
    }

    fn outgoing(&self, message: &M, wants: Wants, within: Duration) -> Result<Outgoing, AskError> {
        let body =
            codec::encode(message).map_err(|error| AskError::Malformed(error.to_string()))?;
        Ok(Outgoing { to: self.name.clone(), wants, within, body })
    }
}

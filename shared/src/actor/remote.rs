//! The typed address of a named actor, wherever it lives.
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::exchange::{DEADLINE_MAX, Outgoing};
use super::runtime::ActorRuntime;
use crate::protocol::actors::{AskError, Wants};
use crate::wire::codec;

/// Bounds of the pause before an actor is asked again.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A message for a named actor. Both sides must use the same Rust type.
pub trait ActorMessage: Serialize + DeserializeOwned + Send + 'static {
    /// The type of its reply.
    type Reply: Serialize + DeserializeOwned + Send + 'static;
}

/// The address of a named actor that takes messages of type `M`. The actor need not exist: each
/// message finds out.
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

    /// Sends a message and waits for nothing. Failures in this process are returned; failures
    /// beyond a link are only counted there. Senders that must know the outcome use
    /// [`RemoteAddr::deliver`] or [`RemoteAddr::ask`].
    ///
    /// # Errors
    /// [`AskError`]: no such actor, a full mailbox, no link.
    pub fn tell(&self, message: &M) -> Result<(), AskError> {
        let sent = self.runtime.dispatch(self.outgoing(message, Wants::Nothing, Duration::ZERO)?);
        sent.lost.clone().map_or(Ok(()), Err)
    }

    /// Sends a message and waits until it is in the actor's mailbox, whichever process that is in.
    ///
    /// # Errors
    /// [`AskError`], at the latest at the deadline.
    pub async fn deliver(&self, message: &M, deadline: Duration) -> Result<(), AskError> {
        let outgoing = self.outgoing(message, Wants::Delivery, deadline)?;
        self.runtime.dispatch(outgoing).outcome().await.map(drop)
    }

    /// Sends a message and waits for the reply, on the current tokio runtime.
    ///
    /// # Errors
    /// [`AskError`], at the latest at the deadline; a lost link, a full mailbox or a failed actor
    /// are reported as soon as they are known.
    pub async fn ask(&self, message: &M, deadline: Duration) -> Result<M::Reply, AskError> {
        let outgoing = self.outgoing(message, Wants::Reply, deadline)?;
        let reply = self.runtime.dispatch(outgoing).outcome().await?;
        codec::decode_message(&reply).map_err(|error| AskError::Malformed(error.to_string()))
    }

    /// Asks again until there is a reply or the deadline has passed: without limit while nothing
    /// was delivered (there is no such actor, it is being started, its mailbox is full, there is no
    /// link), and up to `retries` times after the actor failed or a link was lost. The actor may
    /// then have handled the message before, so messages that are sent again must bear being
    /// handled twice. Must be called on a tokio runtime with time enabled.
    ///
    /// A coordinator that has just begun may not know the actor yet, so one that is dead for good
    /// is asked until the deadline, too: [`ActorRuntime::watch`] tells of its death at once.
    ///
    /// # Errors
    /// The last [`AskError`].
    pub async fn ask_again(
        &self,
        message: &M,
        deadline: Duration,
        retries: u32,
    ) -> Result<M::Reply, AskError> {
        // As for each ask.
        let deadline = deadline.min(DEADLINE_MAX);
        let until = self.runtime.clock().now().saturating_add(deadline);
        let mut retries = retries;
        let mut pause = PAUSE_MIN;
        loop {
            let left = until.saturating_sub(self.runtime.clock().now());
            let error = match self.ask(message, left).await {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            };
            let delivered = match &error {
                AskError::NoSuchActor(_)
                | AskError::Unavailable(_)
                | AskError::MailboxFull(_)
                | AskError::TooManyAsks(_) => false,
                AskError::LinkLost(_) | AskError::Failed(_) if retries > 0 => true,
                _ => return Err(error),
            };
            retries -= u32::from(delivered);
            if self.runtime.clock().now() + pause >= until {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    fn outgoing(&self, message: &M, wants: Wants, within: Duration) -> Result<Outgoing, AskError> {
        let body =
            codec::encode(message).map_err(|error| AskError::Malformed(error.to_string()))?;
        Ok(Outgoing { to: self.name.clone(), wants, within, body })
    }
}

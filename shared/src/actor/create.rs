//! Creating, finding and killing actors anywhere in the cluster.
use std::time::Duration;

use serde::Serialize;

use super::exchange::DEADLINE_MAX;
use super::hosting::ActorClass;
use super::registry::truncate;
use super::remote::{ActorMessage, RemoteAddr};
use super::runtime::ActorRuntime;
use crate::protocol::actors::creation::{
    Creation, Needs, PLACER, PlacementError, PlacementReply, PlacementRequest, Where,
};
use crate::protocol::actors::{ACTOR_NAME_MAX, AskError};
use crate::wire::codec;

/// How much longer than the coordinator its asker waits: it answers at its own deadline.
const MARGIN: Duration = Duration::from_secs(2);
/// Pause before a request is sent again, when the coordinator could not be reached.
const PAUSE: Duration = Duration::from_millis(100);

impl ActorMessage for PlacementRequest {
    type Reply = Result<PlacementReply, PlacementError>;
}

/// How an actor is created.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Its name, unique in the cluster; absent: one is made up.
    pub name: Option<String>,
    /// What it takes of its node's resources.
    pub needs: Needs,
    /// Where it may be placed.
    pub at: Where,
    /// How often in a row it is started again after it failed or lost its process; `None`: without
    /// limit. The count begins anew when it has lived for 30 s.
    pub max_restarts: Option<u32>,
    /// Capacity of its mailbox, in messages.
    pub mailbox: u32,
    /// How long making it may take, each time.
    pub start_limit: Duration,
    /// How long it may take over a message before it counts as failed.
    pub message_limit: Option<Duration>,
    /// Whether a living actor of this name and class will do.
    pub or_get: bool,
    /// How long to wait for a process that hosts its class and has room, and for its start; at most
    /// an hour.
    pub within: Duration,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            name: None,
            needs: Needs::nothing(),
            at: Where::pack(),
            max_restarts: Some(0),
            mailbox: 64,
            start_limit: Duration::from_secs(60),
            message_limit: None,
            or_get: false,
            within: Duration::from_secs(30),
        }
    }
}

impl CreateOptions {
    /// The default options, with a name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: Some(name.to_owned()), ..Self::default() }
    }
}

/// Why an actor is not created, killed or found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// The argument cannot be encoded.
    #[error("the argument cannot be encoded: {0}")]
    Argument(String),
    /// It is not, and will not be.
    #[error(transparent)]
    Refused(#[from] PlacementError),
    /// The coordinator could not be asked, or did not answer: whether it was done is not known.
    #[error("nobody knows whether it was done: {0}")]
    Unknown(AskError),
}

impl ActorRuntime {
    /// Creates an actor of class `C` in whichever process hosts it and has room, and waits until it
    /// is alive. It lives until it is killed or has failed too often, whatever becomes of this
    /// process. Must be called on a tokio runtime with time enabled.
    ///
    /// # Errors
    /// [`CreateError`]. After [`CreateError::Refused`] there is no such actor.
    pub async fn create<C: ActorClass>(
        &self,
        argument: &C::Argument,
        options: CreateOptions,
    ) -> Result<RemoteAddr<C::Message>, CreateError> {
        self.create_named(C::CLASS, argument, options).await
    }

    /// Same as [`ActorRuntime::create`], for a class that this process knows only by name.
    ///
    /// # Errors
    /// [`CreateError`].
    pub async fn create_named<M: ActorMessage>(
        &self,
        class: &str,
        argument: &impl Serialize,
        options: CreateOptions,
    ) -> Result<RemoteAddr<M>, CreateError> {
        let argument =
            codec::encode(argument).map_err(|error| CreateError::Argument(error.to_string()))?;
        let generation = self.draw();
        let name = options.name.unwrap_or_else(|| made_up(class, generation));
        let creation = Creation {
            name: name.clone(),
            class: class.to_owned(),
            argument,
            needs: options.needs,
            at: options.at,
            max_restarts: options.max_restarts,
            mailbox: options.mailbox,
            start_limit_ms: millis(options.start_limit).max(1),
            message_limit_ms: options.message_limit.map_or(0, |limit| millis(limit).max(1)),
        };
        let or_get = options.or_get;
        self.request(options.within, |again, left| PlacementRequest::Create {
            creation: creation.clone(),
            generation,
            again,
            or_get,
            within_ms: millis(left),
        })
        .await?;
        Ok(self.addr(&name))
    }

    /// Ends a named actor anywhere in the cluster at once: what it is doing is dropped. One that
    /// blocks in a handler is dead for all others; its thread ends when the handler returns.
    /// With `restart`, one that was created is started again, if it may be.
    ///
    /// # Errors
    /// [`CreateError`].
    pub async fn kill(
        &self,
        name: &str,
        restart: bool,
        within: Duration,
    ) -> Result<(), CreateError> {
        let name = name.to_owned();
        let kill = |_, _| PlacementRequest::Kill { name: name.clone(), restart };
        self.request(within, kill).await.map(drop)
    }

    /// Returns the address of an actor that exists somewhere in the cluster.
    ///
    /// # Errors
    /// [`CreateError`].
    pub async fn find<M: ActorMessage>(
        &self,
        name: &str,
        within: Duration,
    ) -> Result<RemoteAddr<M>, CreateError> {
        let wanted = name.to_owned();
        let find = |_, _| PlacementRequest::Find { name: wanted.clone() };
        self.request(within, find).await?;
        Ok(self.addr(name))
    }

    /// Sends a request to the coordinator, and again to the next one if the link is lost.
    async fn request(
        &self,
        within: Duration,
        mut request: impl FnMut(bool, Duration) -> PlacementRequest,
    ) -> Result<PlacementReply, CreateError> {
        let placer = self.addr::<PlacementRequest>(PLACER);
        // No ask waits longer, and the coordinator is to answer before this one is over.
        let within = within.min(DEADLINE_MAX.saturating_sub(MARGIN));
        let deadline = self.clock().now() + within;
        let mut again = false;
        loop {
            let left = deadline.saturating_sub(self.clock().now());
            let error = match placer.ask(&request(again, left), left + MARGIN).await {
                Ok(reply) => return Ok(reply?),
                Err(error) => error,
            };
            // What was sent may have arrived.
            again |= matches!(error, AskError::LinkLost(_));
            let goes_on = matches!(error, AskError::LinkLost(_) | AskError::Unavailable(_));
            if !goes_on || self.clock().now() + PAUSE >= deadline {
                return Err(CreateError::Unknown(error));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The name of an actor that was given none: its class, as far as a name may have that, and its
/// generation.
fn made_up(class: &str, generation: u64) -> String {
    let ending = format!("-{generation:016x}");
    let mut name = class.replace(['/', ':'], "-");
    truncate(&mut name, ACTOR_NAME_MAX.saturating_sub(ending.len()));
    name + &ending
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

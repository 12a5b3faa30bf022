//! The other end of a link, as an address for messages of one type.
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;

use super::link::{LinkHandle, SendError};
use crate::ids::Epoch;
use crate::wire::codec::{self, CodecError};
use crate::wire::frame::FrameKind;

/// A message that the other end of a link understands.
pub trait RemoteMessage: Serialize {
    /// Kind of frame that carries it.
    fn kind(&self) -> FrameKind;
}

/// Why a message cannot be sent. The link, not this error, reports the peer's death.
#[derive(Debug, thiserror::Error)]
pub enum TellError {
    /// It cannot be encoded.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The link does not accept it.
    #[error(transparent)]
    Link(#[from] SendError),
}

/// A message encoded once, for any number of receivers.
#[derive(Clone, Debug)]
pub struct Encoded {
    kind: FrameKind,
    body: Arc<Vec<u8>>,
}

impl Encoded {
    /// Encodes a message.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub fn new(message: &impl RemoteMessage) -> Result<Self, CodecError> {
        Ok(Self { kind: message.kind(), body: codec::encode(message)?.into() })
    }
}

/// The other end of a link; takes messages of type `M`.
#[derive(Debug)]
pub struct PeerAddr<M> {
    link: LinkHandle,
    takes: PhantomData<fn(M)>,
}

impl<M> Clone for PeerAddr<M> {
    fn clone(&self) -> Self {
        Self { link: self.link.clone(), takes: PhantomData }
    }
}

impl<M: RemoteMessage> PeerAddr<M> {
    /// The address of the peer behind `link`.
    #[must_use]
    pub fn new(link: LinkHandle) -> Self {
        Self { link, takes: PhantomData }
    }

    /// Queues a message; returns before it is sent.
    ///
    /// # Errors
    /// [`TellError`].
    pub fn tell(&self, epoch: Epoch, message: &M) -> Result<(), TellError> {
        Ok(self.tell_encoded(epoch, &Encoded::new(message)?)?)
    }

    /// Queues an already encoded message.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn tell_encoded(&self, epoch: Epoch, message: &Encoded) -> Result<(), SendError> {
        self.link.tell(message.kind, epoch.0, message.body.clone())
    }

    /// Queues a message as soon as the link has room for it.
    ///
    /// # Errors
    /// [`TellError`].
    pub async fn tell_when_room(&self, message: &M) -> Result<(), TellError> {
        Ok(self.tell_encoded_when_room(&Encoded::new(message)?).await?)
    }

    /// Queues an already encoded message as soon as the link has room for it. Sends nothing if
    /// dropped before it completes.
    ///
    /// # Errors
    /// [`SendError`].
    pub async fn tell_encoded_when_room(&self, message: &Encoded) -> Result<(), SendError> {
        self.link.tell_when_room(message.kind, 0, message.body.clone()).await
    }

    /// Ends the link.
    pub fn close(&self) {
        self.link.close();
    }
}

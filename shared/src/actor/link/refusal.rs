//! What a peer is told that is not taken, also when it is of another version and cannot say hello.
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{CloseReason, Connection};
use crate::protocol::PROTOCOL_VERSION;
use crate::wire::auth::AuthError;
use crate::wire::codec;
use crate::wire::frame::{FrameEncoder, FrameError, FrameKind, HANDSHAKE_MAX};

/// How long the peer has for closing its side once it is refused, and what it may send meanwhile.
const LAST_READS: Duration = Duration::from_secs(1);
const LAST_BYTES: usize = 64 << 10;

impl CloseReason {
    /// Whether dialling again would end in the same way: the operator has to do something.
    #[must_use]
    pub fn lasts(&self) -> bool {
        matches!(
            self,
            Self::Auth(_) | Self::Refused(_) | Self::Frame(FrameError::VersionMismatch { .. })
        )
    }

    /// The version that the peer speaks, if it is another one.
    #[must_use]
    pub fn other_version(&self) -> Option<u16> {
        match *self {
            Self::Auth(AuthError::Version { theirs })
            | Self::Frame(FrameError::VersionMismatch { theirs, .. }) => Some(theirs),
            _ => None,
        }
    }
}

impl Connection {
    /// Tells a peer that has not been answered yet why it is not taken, in a frame of the version
    /// that it speaks, and waits a moment for it to read that. Frames of refusals are the same in
    /// all versions.
    ///
    /// # Errors
    /// [`CloseReason`] when it cannot be told.
    pub async fn refuse(&mut self, version: u16, sentence: &str) -> Result<(), CloseReason> {
        let body = codec::encode(sentence).map_err(std::io::Error::other)?;
        let mut bytes = Vec::new();
        FrameEncoder::of_version(version).encode(FrameKind::Refused, 0, &body, &mut bytes)?;
        self.stream.write_all(&bytes).await?;
        self.stream.shutdown().await?;
        // A socket that is closed with something unread in it takes the refusal back.
        let drained = async {
            let (mut chunk, mut left) = ([0u8; 4096], LAST_BYTES);
            while left > 0
                && let Ok(n @ 1..) = self.stream.read(&mut chunk).await
            {
                left = left.saturating_sub(n);
            }
        };
        let _ = tokio::time::timeout(LAST_READS, drained).await;
        Ok(())
    }

    /// What the peer answered a greeting with, when it began as a frame does.
    pub(super) async fn refusal(&mut self, begun: &[u8], deadline: Duration) -> CloseReason {
        self.decoder.feed(begun);
        let frame = match self.receive(deadline).await {
            Ok(frame) if frame.kind == FrameKind::Refused => frame,
            Err(reason) if reason.other_version().is_some() => return reason,
            _ => return CloseReason::Auth(AuthError::NoGreeting),
        };
        // It has proved nothing: its words are shown, and no more than that.
        let sentence = codec::decode::<String, { HANDSHAKE_MAX as usize }>(&frame.body);
        let shown = |sentence: String| sentence.chars().filter(|c| !c.is_control()).collect();
        sentence
            .map_or(CloseReason::Auth(AuthError::NoGreeting), |it| CloseReason::Refused(shown(it)))
    }
}

/// What a peer of another version is told.
#[must_use]
pub fn other_version(theirs: u16) -> String {
    format!(
        "this coordinator speaks protocol {PROTOCOL_VERSION}, the peer {theirs}: run the same \
         version on both"
    )
}

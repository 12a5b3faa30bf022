//! What a rejected peer is told, including a peer of another protocol version, which cannot read a
//! hello.
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{CloseReason, Connection};
use crate::protocol::PROTOCOL_VERSION;
use crate::wire::auth::AuthError;
use crate::wire::codec;
use crate::wire::frame::{FrameEncoder, FrameError, FrameKind, HANDSHAKE_MAX};

/// For how long, and how many bytes, to read from a rejected peer until it closes its side.
const LAST_READS: Duration = Duration::from_secs(1);
const LAST_BYTES: usize = 64 << 10;

impl CloseReason {
    /// Whether another attempt would end the same way, so that the operator must act.
    #[must_use]
    pub fn lasts(&self) -> bool {
        matches!(
            self,
            Self::Auth(_)
                | Self::Refused(_)
                | Self::Frame(FrameError::VersionMismatch { .. } | FrameError::HttpServer)
        )
    }

    /// The peer's protocol version, if it differs from ours.
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
    /// Tells a peer that has not been answered yet why it is rejected, in a frame of the peer's
    /// protocol version, and gives it a moment to read that. Refusal frames have the same form in
    /// all versions.
    ///
    /// # Errors
    /// [`CloseReason`] when it cannot be sent.
    pub async fn refuse(&mut self, version: u16, sentence: &str) -> Result<(), CloseReason> {
        let body = codec::encode(sentence).map_err(std::io::Error::other)?;
        let mut bytes = Vec::new();
        FrameEncoder::of_version(version).encode(FrameKind::Refused, 0, &body, &mut bytes)?;
        self.stream.write_all(&bytes).await?;
        self.stream.shutdown().await?;
        // Closing a socket with unread data resets the connection, which would discard the refusal.
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

    /// Reads the frame that the peer sent in place of its challenge; `begun` holds its first bytes.
    /// Returns the peer's refusal if it is one.
    pub(super) async fn refusal(&mut self, begun: &[u8], deadline: Duration) -> CloseReason {
        self.decoder.feed(begun);
        let frame = match self.receive(deadline).await {
            Ok(frame) if frame.kind == FrameKind::Refused => frame,
            Err(reason) if reason.other_version().is_some() => return reason,
            _ => return CloseReason::Auth(AuthError::NoGreeting),
        };
        // The peer has proved nothing: show its sentence, but do not act on it.
        let sentence = codec::decode::<String, { HANDSHAKE_MAX as usize }>(&frame.body);
        let shown = |sentence: String| sentence.chars().filter(|c| !c.is_control()).collect();
        sentence
            .map_or(CloseReason::Auth(AuthError::NoGreeting), |it| CloseReason::Refused(shown(it)))
    }
}

/// The refusal of a peer with another protocol version.
#[must_use]
pub fn other_version(theirs: u16) -> String {
    format!(
        "this coordinator speaks protocol {PROTOCOL_VERSION}, the peer {theirs}: run the same \
         version on both"
    )
}

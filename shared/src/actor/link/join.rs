//! How a process joins the coordinator: it dials, proves that it knows the cluster secret, says
//! hello, and is welcomed or rejected.
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{CloseReason, Connection};
use crate::protocol::ToFetch;
use crate::wire::codec;
use crate::wire::frame::FrameKind;
use crate::wire::keyring::Keyring;

/// Deadline for dialling, and for each message of the handshake.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(3);
/// First wait between two attempts to reach the coordinator; doubles with each attempt.
pub const REDIAL_MIN: Duration = Duration::from_millis(50);
/// Longest wait between two attempts.
pub const REDIAL_MAX: Duration = Duration::from_secs(2);

/// Why the coordinator was not joined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// Worth another attempt.
    #[error("{0}")]
    Retry(String),
    /// Another attempt would end the same way.
    #[error("{0}")]
    Refused(String),
    /// It is taken when it has these files.
    #[error("files are missing: {}", .0.models.join(", "))]
    Fetch(ToFetch),
}

impl From<CloseReason> for JoinError {
    fn from(reason: CloseReason) -> Self {
        match reason.lasts() {
            true => Self::Refused(reason.to_string()),
            false => Self::Retry(reason.to_string()),
        }
    }
}

/// Interval between log lines while a peer cannot be reached.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// PURE: when to log that a peer cannot be reached: at the first failure, then once a minute.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unreached {
    began: Option<Duration>,
    said: Option<Duration>,
}

impl Unreached {
    /// Records a failed attempt. Returns the seconds since the first failure if it is time to log.
    pub fn failed(&mut self, now: Duration) -> Option<u64> {
        let began = *self.began.get_or_insert(now);
        let due = self.said.is_none_or(|said| now.saturating_sub(said) >= SAY_EVERY);
        due.then(|| {
            self.said = Some(now);
            now.saturating_sub(began).as_secs()
        })
    }

    /// Records a successful attempt.
    pub fn reached(&mut self) {
        *self = Self::default();
    }
}

/// Dials and performs the handshake once; sends `hello` in a frame of kind `kind`.
///
/// # Errors
/// [`JoinError`].
pub async fn join<W: DeserializeOwned>(
    address: &str,
    secrets: Option<&Keyring>,
    kind: FrameKind,
    hello: &impl Serialize,
) -> Result<(Connection, W), JoinError> {
    fn retry(error: impl std::fmt::Display) -> JoinError {
        JoinError::Retry(error.to_string())
    }
    let mut connection = Connection::dial(address, HANDSHAKE_DEADLINE).await.map_err(retry)?;
    if let Some(secrets) = secrets {
        connection.authenticate_as_client(&secrets.all(), HANDSHAKE_DEADLINE).await?;
    }
    connection.send(kind, &codec::encode(hello).map_err(retry)?).await?;
    let frame = connection.receive(HANDSHAKE_DEADLINE).await?;
    let reason = || {
        let reason: Result<String, _> = codec::decode_message(&frame.body);
        reason.unwrap_or_else(|_| "no reason given".to_owned())
    };
    match frame.kind {
        FrameKind::Welcome => {
            let welcome = codec::decode_message(&frame.body).map_err(retry)?;
            Ok((connection, welcome))
        }
        FrameKind::NotYet => Err(JoinError::Retry(reason())),
        FrameKind::Refused => Err(JoinError::Refused(reason())),
        FrameKind::Fetch => {
            Err(JoinError::Fetch(codec::decode_message(&frame.body).map_err(retry)?))
        }
        kind => Err(retry(format!("expected a welcome, got {kind:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_is_not_reached_is_spoken_of_once_a_minute() {
        let mut unreached = Unreached::default();
        let at = Duration::from_secs;
        assert_eq!(unreached.failed(at(100)), Some(0));
        assert_eq!(unreached.failed(at(159)), None);
        assert_eq!(unreached.failed(at(160)), Some(60));
        assert_eq!(unreached.failed(at(161)), None);
        unreached.reached();
        assert_eq!(unreached.failed(at(162)), Some(0), "another outage");
    }
}

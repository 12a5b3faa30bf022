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
    /// Likewise, as far as the peer is the coordinator: it has proved nothing, not even that it
    /// belongs to the cluster. Whoever was welcomed before dials again.
    #[error("{0}")]
    Unproven(String),
    /// It is taken when it has these files.
    #[error("files are missing: {}", .0.models.join(", "))]
    Fetch(ToFetch),
}

impl From<CloseReason> for JoinError {
    fn from(reason: CloseReason) -> Self {
        match reason.lasts() {
            // Whatever ends a handshake in this way comes before the peer's proof, or without it.
            true => Self::Unproven(reason.to_string()),
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
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::wire::auth::Secret;

    /// What a process that dials with the secret, or without one, makes of a peer.
    async fn joined<F: Future<Output = ()>>(
        secret: Option<&str>,
        peer: impl FnOnce(TcpStream) -> F,
    ) -> JoinError {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let secret = secret.map(|secret| Keyring::read(secret.as_bytes()).unwrap());
        let hello = "hello".to_owned();
        let joining = join::<String>(&address, secret.as_ref(), FrameKind::Hello, &hello);
        let peer = async { peer(listener.accept().await.unwrap().0).await };
        tokio::join!(joining, peer).0.map(|_| ()).unwrap_err()
    }

    const SECRET: &str = "a secret of at least thirty-two bytes";

    #[tokio::test]
    async fn who_proves_nothing_is_told_from_the_coordinator() {
        let http = async |mut stream: TcpStream| {
            let _ = stream.read(&mut [0; 4096]).await;
            stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(8)).await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await;
        };
        let refuses = async |stream: TcpStream| {
            let mut connection = Connection::new(stream).unwrap();
            let version = crate::protocol::PROTOCOL_VERSION;
            connection.refuse(version, "go away").await.unwrap();
        };
        for secret in [None, Some(SECRET)] {
            let error = joined(secret, http).await;
            assert!(matches!(error, JoinError::Unproven(_)), "{error:?}");
        }
        let error = joined(Some(SECRET), refuses).await;
        let JoinError::Unproven(reason) = &error else { panic!("{error:?}") };
        assert!(reason.contains("go away"), "{reason}");
        let of_another = async |stream: TcpStream| {
            let mut connection = Connection::new(stream).unwrap();
            let secret = Keyring::read(b"another secret of thirty-two bytes, too").unwrap().first();
            let _ = connection.authenticate_as_server(&secret, HANDSHAKE_DEADLINE).await;
        };
        let error = joined(Some(SECRET), of_another).await;
        assert!(matches!(error, JoinError::Unproven(_)), "{error:?}");
        // One that has the secret means it.
        let means_it = async |stream: TcpStream| {
            let mut connection = Connection::new(stream).unwrap();
            let secret: Secret = Keyring::read(SECRET.as_bytes()).unwrap().first();
            connection.authenticate_as_server(&secret, HANDSHAKE_DEADLINE).await.unwrap();
            connection.receive(HANDSHAKE_DEADLINE).await.unwrap();
            let body = codec::encode("never").unwrap();
            connection.send(FrameKind::Refused, &body).await.unwrap();
        };
        assert_eq!(joined(Some(SECRET), means_it).await, JoinError::Refused("never".to_owned()));
    }

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

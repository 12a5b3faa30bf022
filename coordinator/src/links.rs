//! Connections of workers and front ends: accepts them, performs the handshake, hands them to their
//! owners.
//!
//! Unauthenticated peers are kept cheap: few half-open connections, a deadline, small frames. With
//! a cluster secret, nothing is decoded before the peer has proved that it knows the secret.
//!
//! - `refused`: processes that were not let in of late
mod refused;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use actix::Addr;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::actor::link::refusal::other_version;
use shared::actor::link::{CloseReason, Connection};
use shared::actor::peer::PeerAddr;
use shared::clock::since_1970;
use shared::metrics::labels::{HandshakeRefusal, LinkEnd};
use shared::protocol::{BUILD_MAX, FrontendHello, Hello, PROTOCOL_VERSION, ToWorker, Welcome};
use shared::wire::auth::{AUTH_MAGIC, AuthError, Secret};
use shared::wire::codec;
use shared::wire::frame::{Frame, FrameError, FrameKind};
use shared::wire::keyring::Keyring;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

pub use self::refused::RefusedProcesses;
use crate::addresses::Addresses;
use crate::cluster::actor::{Admit, ClusterActor, JoinRefusal, Joined, NotJoined};
use crate::frontends::Frontends;

/// The address of one worker.
pub type WorkerLink = PeerAddr<ToWorker>;

/// Time limit for a new peer's hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(3);
/// Maximum number of connections that have not said hello yet; further ones wait to be accepted.
const HALF_OPEN_MAX: usize = 256;
/// The same per address, so that no stranger takes all places.
const HALF_OPEN_PER_ADDRESS: usize = 64;
/// Shortest interval between two warnings about rejected connections, or about those that cannot be
/// accepted.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(1);
/// Longest node name, in bytes.
const NODE_NAME_MAX: usize = 128;

/// Accepts workers and front ends until the task is dropped; lists those that are `refused`.
pub async fn accept(
    listener: TcpListener,
    cluster: Addr<ClusterActor>,
    frontends: Arc<Frontends>,
    secrets: Option<Keyring>,
    refused: RefusedProcesses,
) {
    let half_open = Arc::new(Semaphore::new(HALF_OPEN_MAX));
    let addresses = Addresses::default();
    let warnings = Arc::new(Mutex::new(WarningLimiter::default()));
    let mut failures = WarningLimiter::default();
    loop {
        // When all places are taken, new connections wait in the kernel's backlog instead of being
        // refused.
        let Ok(permit) = half_open.clone().acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Without file descriptors, for example, this goes on for long.
                match failures.may_warn(Instant::now()) {
                    Some(others) => tracing::warn!(%error, others, "cannot accept a connection"),
                    None => tracing::debug!(%error, "cannot accept a connection"),
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(place) = addresses.try_add(peer.ip(), HALF_OPEN_PER_ADDRESS) else {
            frontends.hub().observer().record().handshake_refused(HandshakeRefusal::Crowded);
            warn_rejected(
                &warnings,
                peer,
                &format!("{HALF_OPEN_PER_ADDRESS} connections of its address are half open"),
            );
            continue;
        };
        let (cluster, frontends) = (cluster.clone(), frontends.clone());
        // They may change between two links.
        let secret = secrets.as_ref().map(Keyring::first);
        let (warnings, refused) = (warnings.clone(), refused.clone());
        actix::spawn(async move {
            match shake_hands(stream, &cluster, &frontends, secret.as_ref()).await {
                Ok(Some(node)) => refused.let_in(peer.ip(), &node),
                Ok(None) => {}
                Err(rejected) => {
                    frontends.hub().observer().record().handshake_refused(rejected.refusal);
                    warn_rejected(&warnings, peer, &rejected.reason);
                    refused.note(since_1970(), peer.ip(), rejected);
                }
            }
            drop((permit, place));
        });
    }
}

/// Rate limit for warnings about rejected connections, so that they do not fill the log.
#[derive(Debug, Default)]
struct WarningLimiter {
    last: Option<Instant>,
    suppressed: u64,
}

impl WarningLimiter {
    /// Whether to log this one; if so, the number of earlier ones not logged.
    fn may_warn(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < COMPLAINT_INTERVAL) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

fn warn_rejected(warnings: &Mutex<WarningLimiter>, peer: SocketAddr, reason: &str) {
    let mut warnings = warnings.lock().unwrap_or_else(PoisonError::into_inner);
    match warnings.may_warn(Instant::now()) {
        Some(0) => tracing::warn!(%peer, reason, "a connection was not accepted"),
        Some(others) => {
            tracing::warn!(
                %peer, reason, others,
                "a connection was not accepted, like others before"
            );
        }
        None => tracing::debug!(%peer, reason, "a connection was not accepted"),
    }
}

/// A rejected peer, and the reason.
struct RejectedPeer {
    refusal: HandshakeRefusal,
    reason: String,
    /// Its name, if it got as far as telling.
    node: Option<String>,
}

impl RejectedPeer {
    fn new(refusal: HandshakeRefusal, reason: impl std::fmt::Display) -> Self {
        Self { refusal, reason: reason.to_string(), node: None }
    }

    fn of(self, node: &str) -> Self {
        Self { node: Some(node.to_owned()), ..self }
    }
}

impl From<CloseReason> for RejectedPeer {
    fn from(reason: CloseReason) -> Self {
        let refusal = match &reason {
            it if it.other_version().is_some() => HandshakeRefusal::Version,
            // The peer has a secret, this cluster has none.
            CloseReason::Auth(_) | CloseReason::Frame(FrameError::BadMagic(AUTH_MAGIC)) => {
                HandshakeRefusal::Authentication
            }
            CloseReason::PeerClosed | CloseReason::Io(_) | CloseReason::Local => {
                HandshakeRefusal::Gone
            }
            CloseReason::Silent { .. } | CloseReason::QueueFull => HandshakeRefusal::Silent,
            CloseReason::Frame(_) | CloseReason::Refused(_) | CloseReason::OwnerBusy => {
                HandshakeRefusal::Malformed
            }
        };
        Self::new(refusal, reason)
    }
}

/// The label under which a link's end is counted.
pub(crate) fn link_end(reason: &CloseReason) -> LinkEnd {
    match reason {
        CloseReason::PeerClosed => LinkEnd::Closed,
        CloseReason::Io(_) => LinkEnd::Broken,
        CloseReason::Silent { .. } => LinkEnd::Silent,
        CloseReason::QueueFull => LinkEnd::QueueFull,
        CloseReason::Local => LinkEnd::Local,
        CloseReason::Frame(_)
        | CloseReason::Auth(_)
        | CloseReason::Refused(_)
        | CloseReason::OwnerBusy => LinkEnd::Malformed,
    }
}

/// Returns the name of the process that is let in; a connection may also have no more to ask.
async fn shake_hands(
    stream: TcpStream,
    cluster: &Addr<ClusterActor>,
    frontends: &Arc<Frontends>,
    secret: Option<&Secret>,
) -> Result<Option<String>, RejectedPeer> {
    let ended = |error: actix::MailboxError| RejectedPeer::new(HandshakeRefusal::Admission, error);
    let mut connection = Connection::new(stream)
        .map_err(|error| RejectedPeer::new(HandshakeRefusal::Gone, error))?;
    let frame = greet(&mut connection, secret).await?;
    match frame.kind {
        FrameKind::Hello => {
            let hello: Hello = decode(&frame.body)?;
            let names = check(&[("node", &hello.node), ("host", &hello.host)])
                .and_then(|()| check_build(&hello.build, &hello.gpu));
            let admitted = match names.and_then(|()| hello.offer.check()) {
                Ok(()) => cluster.send(Admit(hello.clone())).await.map_err(ended)?,
                Err(reason) => Err(JoinRefusal::Never(reason)),
            };
            if let Err(JoinRefusal::Fetch(to_fetch)) = &admitted {
                // It is no stranger, and will be back.
                let body = codec::encode(to_fetch).map_err(malformed)?;
                in_time(connection.send(FrameKind::Fetch, &body)).await?;
                return Ok(None);
            }
            let slot = admitted.as_ref().ok().map(|welcome| welcome.worker);
            let welcome: Welcome = match answer(&mut connection, admitted).await {
                Ok(welcome) => welcome,
                Err(rejected) => {
                    let rejected = rejected.of(&hello.node);
                    if let Some(worker) = slot {
                        cluster.do_send(NotJoined { node: hello.node, worker });
                    }
                    return Err(rejected);
                }
            };
            let node = hello.node.clone();
            let joined = Joined { hello, worker: welcome.worker, connection };
            cluster.send(joined).await.map_err(ended)?;
            Ok(Some(node))
        }
        FrameKind::FrontendHello => {
            let hello: FrontendHello = decode(&frame.body)?;
            let admitted = check(&[("node", &hello.node)])
                .map_err(JoinRefusal::Never)
                .and_then(|()| frontends.admit(&hello));
            let welcome = answer(&mut connection, admitted).await;
            let welcome = welcome.map_err(|rejected| {
                frontends.not_joined(&hello.node);
                rejected.of(&hello.node)
            })?;
            frontends.joined(&hello, welcome.frontend, connection);
            Ok(Some(hello.node))
        }
        // A node asks whether its secret fits (a ping instead of a hello): getting this far is the
        // answer.
        FrameKind::Ping => {
            in_time(connection.send(FrameKind::Pong, &[])).await?;
            Ok(None)
        }
        kind => {
            let reason = format!("expected a hello, got {kind:?}");
            Err(RejectedPeer::new(HandshakeRefusal::Malformed, reason))
        }
    }
}

/// Receives a new peer's first frame. A peer with a mismatching secret setting or version is told
/// so; other peers are told nothing.
async fn greet(connection: &mut Connection, secret: Option<&Secret>) -> Result<Frame, CloseReason> {
    let first = match secret {
        Some(secret) => match connection.authenticate_as_server(secret, HELLO_DEADLINE).await {
            Ok(()) => return connection.receive(HELLO_DEADLINE).await,
            Err(reason) => Err(reason),
        },
        None => connection.receive(HELLO_DEADLINE).await,
    };
    let reason = match first {
        Ok(frame) => return Ok(frame),
        Err(reason) => reason,
    };
    let mismatch = match &reason {
        CloseReason::Auth(AuthError::NoGreeting) => {
            Some("this cluster has a secret: give its file with --cluster-secret-file".to_owned())
        }
        CloseReason::Frame(FrameError::BadMagic(AUTH_MAGIC)) => {
            Some("this coordinator runs without --cluster-secret-file".to_owned())
        }
        reason => reason.other_version().map(other_version),
    };
    if let Some(sentence) = mismatch {
        let version = reason.other_version().unwrap_or(PROTOCOL_VERSION);
        let refused = connection.refuse(version, &sentence);
        let _ = tokio::time::timeout(HELLO_DEADLINE, refused).await;
    }
    Err(reason)
}

fn malformed(error: impl std::fmt::Display) -> RejectedPeer {
    RejectedPeer::new(HandshakeRefusal::Malformed, error)
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, RejectedPeer> {
    codec::decode_message(body).map_err(malformed)
}

/// Sends a frame to a peer that may not read it, within the deadline.
async fn in_time<E: Into<CloseReason>>(
    sending: impl Future<Output = Result<(), E>>,
) -> Result<(), RejectedPeer> {
    match tokio::time::timeout(HELLO_DEADLINE, sending).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(error.into().into()),
        Err(_) => Err(RejectedPeer::new(
            HandshakeRefusal::Silent,
            "it did not read the answer to its hello",
        )),
    }
}

/// Sends the welcome or the refusal; returns the welcome.
async fn answer<T: Serialize>(
    connection: &mut Connection,
    admitted: Result<T, JoinRefusal>,
) -> Result<T, RejectedPeer> {
    let (kind, body) = match &admitted {
        Ok(welcome) => (FrameKind::Welcome, codec::encode(welcome)),
        Err(JoinRefusal::NotYet(reason)) => (FrameKind::NotYet, codec::encode(reason)),
        Err(JoinRefusal::Never(reason)) => (FrameKind::Refused, codec::encode(reason)),
        Err(JoinRefusal::Fetch(to_fetch)) => (FrameKind::Fetch, codec::encode(to_fetch)),
    };
    in_time(connection.send(kind, &body.map_err(malformed)?)).await?;
    admitted.map_err(|refusal| match refusal {
        JoinRefusal::NotYet(reason) | JoinRefusal::Never(reason) => {
            RejectedPeer::new(HandshakeRefusal::Admission, reason)
        }
        JoinRefusal::Fetch(_) => {
            RejectedPeer::new(HandshakeRefusal::Admission, "it lacks the model's files")
        }
    })
}

fn check(names: &[(&str, &String)]) -> Result<(), String> {
    for (field, value) in names {
        if value.is_empty() || value.len() > NODE_NAME_MAX {
            return Err(format!(
                "{field} has {} bytes, it must have 1 to {NODE_NAME_MAX}",
                value.len()
            ));
        }
        // It is printed as it is where operators look.
        if value.contains(char::is_control) {
            return Err(format!("{field} contains control characters"));
        }
    }
    Ok(())
}

/// Checks what a worker reports of its build and its GPU; workers on CPUs have none.
fn check_build(build: &str, gpu: &str) -> Result<(), String> {
    let bounds = [("build", build, 1..=BUILD_MAX), ("gpu", gpu, 0..=BUILD_MAX)];
    let wrong = bounds.into_iter().find(|(_, value, bound)| !bound.contains(&value.len()));
    wrong.map_or(Ok(()), |(field, value, bound)| {
        let (least, most) = bound.into_inner();
        Err(format!("{field} has {} bytes, it must have {least} to {most}", value.len()))
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn strangers_are_complained_about_once_in_a_while() {
        let (mut warnings, now) = (WarningLimiter::default(), Instant::now());
        assert_eq!(warnings.may_warn(now), Some(0));
        for _ in 0..5 {
            assert_eq!(warnings.may_warn(now + COMPLAINT_INTERVAL / 2), None);
        }
        assert_eq!(warnings.may_warn(now + COMPLAINT_INTERVAL), Some(5));
        assert_eq!(warnings.may_warn(now + 2 * COMPLAINT_INTERVAL), Some(0));
    }

    #[tokio::test]
    async fn an_answer_that_is_not_taken_has_its_time() {
        let never = std::future::pending::<Result<(), CloseReason>>();
        let stranger = tokio::time::timeout(2 * HELLO_DEADLINE, in_time(never)).await;
        let stranger = stranger.unwrap().unwrap_err();
        assert_eq!(stranger.refusal, HandshakeRefusal::Silent, "{}", stranger.reason);
        let gone = in_time(std::future::ready(Err(CloseReason::PeerClosed))).await.unwrap_err();
        assert_eq!(gone.refusal, HandshakeRefusal::Gone);
    }

    #[test]
    fn names_are_short_and_can_be_printed() {
        let of = |name: &str| check(&[("node", &name.to_owned())]);
        assert_eq!(of("node-1.example"), Ok(()));
        assert!(of("").is_err() && of(&"n".repeat(NODE_NAME_MAX + 1)).is_err());
        let refused = of("a\u{1b}[2Jb\nc").unwrap_err();
        assert!(refused.contains("node") && !refused.contains(char::is_control), "{refused}");
    }

    fn secret() -> Secret {
        Secret::new(&[7; 32]).unwrap()
    }

    /// A client's connection, and the greeting of the accepting side.
    async fn greeted(
        secret: Option<Secret>,
    ) -> (TcpStream, tokio::task::JoinHandle<Result<Frame, CloseReason>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut connection = Connection::new(listener.accept().await.unwrap().0).unwrap();
        let greeting = async move { greet(&mut connection, secret.as_ref()).await };
        (client, tokio::spawn(greeting))
    }

    /// Reads the refusal sent to a peer of this version.
    async fn told(mut client: TcpStream, version: u16) -> String {
        let mut bytes = Vec::new();
        client.read_to_end(&mut bytes).await.unwrap();
        assert_eq!(bytes[4..6], version.to_le_bytes(), "a frame of its own version: {bytes:?}");
        let len = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize;
        assert_eq!((bytes[6], bytes.len()), (FrameKind::Refused as u8, 32 + len));
        codec::decode_message(&bytes[32..]).unwrap()
    }

    #[tokio::test]
    async fn a_peer_of_another_version_is_told_in_its_own() {
        for theirs in [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, u16::MAX] {
            let sentence = other_version(theirs);
            assert!(sentence.contains(&format!("protocol {PROTOCOL_VERSION}, the peer {theirs}:")));
            // Without a secret the peer sends a frame; its kind and flags may be unknown here, and
            // not all of it is read.
            let (mut client, greeting) = greeted(None).await;
            let mut frame = vec![0xee; 40 << 10];
            frame[..4].copy_from_slice(b"TUTI");
            frame[4..6].copy_from_slice(&theirs.to_le_bytes());
            client.write_all(&frame).await.unwrap();
            assert_eq!(told(client, theirs).await, sentence);
            let reason = greeting.await.unwrap().unwrap_err();
            assert_eq!(reason.other_version(), Some(theirs), "{reason}");

            // With a secret it sends a greeting.
            let (mut client, greeting) = greeted(Some(secret())).await;
            let mut greets = [0xee; 48];
            greets[..4].copy_from_slice(&AUTH_MAGIC);
            greets[4..6].copy_from_slice(&theirs.to_le_bytes());
            client.write_all(&greets).await.unwrap();
            assert_eq!(told(client, theirs).await, sentence);
            let reason = greeting.await.unwrap().unwrap_err();
            assert_eq!(reason.other_version(), Some(theirs), "{reason}");
        }
    }

    #[tokio::test]
    async fn one_with_the_other_setting_is_told_so_and_does_not_dial_again() {
        let (client, greeting) = greeted(None).await;
        let mut client = Connection::new(client).unwrap();
        let told = client.authenticate_as_client(&[secret()], HELLO_DEADLINE).await.unwrap_err();
        assert!(told.lasts() && told.to_string().contains("runs without --cluster-secret-file"));
        assert!(greeting.await.unwrap().is_err());

        let (client, greeting) = greeted(Some(secret())).await;
        let mut client = Connection::new(client).unwrap();
        client.send(FrameKind::Ping, &[]).await.unwrap();
        let frame = client.receive(HELLO_DEADLINE).await.unwrap();
        let sentence: String = codec::decode_message(&frame.body).unwrap();
        assert!(
            frame.kind == FrameKind::Refused && sentence.contains("has a secret"),
            "{sentence}"
        );
        assert!(greeting.await.unwrap().is_err());

        // Other peers are told nothing.
        for known in [None, Some(secret())] {
            let (mut client, greeting) = greeted(known).await;
            client.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
            let reason = greeting.await.unwrap().unwrap_err();
            assert!(matches!(reason, CloseReason::Frame(FrameError::HttpClient)), "{reason}");
            let mut bytes = Vec::new();
            let _ = client.read_to_end(&mut bytes).await;
            assert!(bytes.is_empty(), "{bytes:?}");
        }
    }
}

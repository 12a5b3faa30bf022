//! A connection before it becomes a link: dialled or accepted, authenticated, handshaken.
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use super::queue::{self, LinkHandle};
use super::{CloseReason, LinkSink, Reader};
use crate::actor::liveness::{Liveness, LivenessConfig};
use crate::clock::Clock;
use crate::wire::auth::{
    self, AUTH_MAGIC, AuthError, CHALLENGE_LEN, GREETING_LEN, NONCE_LEN, PROOF_LEN, Secret,
    SessionKeys,
};
use crate::wire::frame::{Frame, FrameDecoder, FrameEncoder, FrameError, FrameKind, MAGIC};

/// A connection during the handshake, used frame by frame, before it has an owner.
pub struct Connection {
    pub(super) stream: TcpStream,
    encoder: FrameEncoder,
    pub(super) decoder: FrameDecoder,
    peer: SocketAddr,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects to `address`.
    ///
    /// # Errors
    /// When the peer cannot be reached within `deadline`.
    pub async fn dial(address: &str, deadline: Duration) -> io::Result<Self> {
        let stream = tokio::time::timeout(deadline, TcpStream::connect(address))
            .await
            .map_err(|_| io::Error::new(ErrorKind::TimedOut, "no answer"))??;
        Self::new(stream)
    }

    /// Wraps an accepted connection.
    ///
    /// # Errors
    /// When the socket is already closed.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let peer = stream.peer_addr()?;
        Ok(Self {
            stream,
            encoder: FrameEncoder::default(),
            decoder: FrameDecoder::default(),
            peer,
        })
    }

    /// The peer's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// This side's address.
    ///
    /// # Errors
    /// When the socket is closed.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Proves to the accepting side that this side knows the cluster secret, and requires the same
    /// proof in return, by any of these secrets.
    ///
    /// # Errors
    /// [`CloseReason::Auth`] when the peer knows none of them, others when it does not
    /// answer.
    pub async fn authenticate_as_client(
        &mut self,
        secrets: &[Secret],
        deadline: Duration,
    ) -> Result<(), CloseReason> {
        let greeting = auth::greeting(&nonce()?);
        let exchange = async {
            self.stream.write_all(&greeting).await?;
            let mut challenge = [0; CHALLENGE_LEN];
            // A peer that rejects this side answers with a frame, which is shorter than a
            // challenge.
            self.stream.read_exact(&mut challenge[..4]).await?;
            if challenge[..4] == MAGIC {
                return Ok(None);
            }
            let begun = [challenge[0], challenge[1], challenge[2], challenge[3]];
            let read = self.stream.read_exact(&mut challenge[4..]).await;
            let proven = read
                .map_err(CloseReason::from)
                .and_then(|_| Ok(auth::prove(secrets, &greeting, &challenge)?));
            // Only now, because a random nonce can begin like another protocol's answer.
            let (proof, keys) = proven.map_err(|reason| match FrameError::of_foreign(begun) {
                foreign @ FrameError::HttpServer => foreign.into(),
                _ => reason,
            })?;
            self.stream.write_all(&proof).await?;
            Ok(Some(keys))
        };
        let Some(keys) = within(deadline, exchange).await? else {
            return Err(self.refusal(&MAGIC, deadline).await);
        };
        self.set_keys(keys);
        Ok(())
    }

    /// The accepting side of [`Connection::authenticate_as_client`]. Ignores all content until the
    /// peer has proved that it knows the secret.
    ///
    /// # Errors
    /// Same as [`Connection::authenticate_as_client`].
    pub async fn authenticate_as_server(
        &mut self,
        secret: &Secret,
        deadline: Duration,
    ) -> Result<(), CloseReason> {
        let nonce = nonce()?;
        let exchange = async {
            let mut greeting = [0; GREETING_LEN];
            self.stream.read_exact(&mut greeting[..4]).await?;
            if greeting[..4] != AUTH_MAGIC {
                let begun = [greeting[0], greeting[1], greeting[2], greeting[3]];
                // Only a process without the secret begins with a frame; a stranger has none.
                return Err(match begun {
                    MAGIC => AuthError::NoGreeting.into(),
                    begun => FrameError::of_foreign(begun).into(),
                });
            }
            self.stream.read_exact(&mut greeting[4..]).await?;
            let challenge = auth::challenge(secret, &greeting, &nonce)?;
            self.stream.write_all(&challenge).await?;
            let mut proof = [0; PROOF_LEN];
            // A peer with another secret has seen the mismatch by now, and hangs up.
            let read = self.stream.read_exact(&mut proof).await;
            read.map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => AuthError::Unproven.into(),
                _ => CloseReason::from(error),
            })?;
            Ok(auth::verify(secret, &greeting, &nonce, &proof)?)
        };
        let keys = within(deadline, exchange).await?;
        self.set_keys(keys);
        Ok(())
    }

    fn set_keys(&mut self, keys: SessionKeys) {
        self.encoder.set_key(keys.send);
        self.decoder.set_key(keys.receive);
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// [`CloseReason`].
    pub async fn send(&mut self, kind: FrameKind, body: &[u8]) -> Result<(), CloseReason> {
        let mut bytes = Vec::new();
        self.encoder.encode(kind, 0, body, &mut bytes)?;
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Receives one frame.
    ///
    /// # Errors
    /// [`CloseReason`]; [`CloseReason::Silent`] when none came within `deadline`.
    pub async fn receive(&mut self, deadline: Duration) -> Result<Frame, CloseReason> {
        let receive = async {
            let mut chunk = [0u8; 4096];
            loop {
                if let Some(frame) = self.decoder.next_frame()? {
                    return Ok(frame);
                }
                match self.stream.read(&mut chunk).await? {
                    0 => return Err(CloseReason::PeerClosed),
                    n => self.decoder.feed(&chunk[..n]),
                }
            }
        };
        tokio::time::timeout(deadline, receive)
            .await
            .unwrap_or(Err(CloseReason::Silent { silent: deadline }))
    }

    /// Turns the connection into a link: spawns its tasks on the current tokio runtime.
    pub fn start(
        self,
        config: LivenessConfig,
        clock: Arc<dyn Clock>,
        sink: impl LinkSink,
    ) -> LinkHandle {
        self.start_with(config, clock, |_| sink)
    }

    /// As [`Connection::start`], for owners that need the link's handle before its first event:
    /// `make` builds the sink from it.
    pub fn start_with<S: LinkSink>(
        self,
        config: LivenessConfig,
        clock: Arc<dyn Clock>,
        make: impl FnOnce(&LinkHandle) -> S,
    ) -> LinkHandle {
        let (handle, queued) = queue::queues();
        let sink = make(&handle);
        let (read, write) = self.stream.into_split();
        let (writer_ended, write_ended) = mpsc::channel(1);
        let (over, is_over) = oneshot::channel();
        tokio::spawn(queue::write(write, self.encoder, queued, is_over, writer_ended));
        let reader = Reader {
            read,
            decoder: self.decoder,
            liveness: Liveness::new(config, clock.now()),
            clock,
            pongs: handle.pongs(),
            shared: handle.shared(),
            write_ended,
            poll_interval: config.ping_interval / 4,
        };
        tokio::spawn(reader.run(over, sink));
        handle
    }
}

/// Random bytes from the operating system.
fn nonce() -> Result<[u8; NONCE_LEN], CloseReason> {
    let mut nonce = [0; NONCE_LEN];
    getrandom::fill(&mut nonce).map_err(|error| CloseReason::Io(io::Error::other(error)))?;
    Ok(nonce)
}

async fn within<T>(
    deadline: Duration,
    exchange: impl Future<Output = Result<T, CloseReason>>,
) -> Result<T, CloseReason> {
    tokio::time::timeout(deadline, exchange)
        .await
        .unwrap_or(Err(CloseReason::Silent { silent: deadline }))
}

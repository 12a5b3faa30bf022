//! One TCP connection between two processes: frames in, frames out, pings.
//!
//! A link is two tasks: one reads frames and hands them to the owner's sink, one writes what is
//! queued. Neither waits for the other, and nothing queues without bound: a peer that does not
//! take its frames fills the queue, and the link ends. The end is reported once, with its reason.
pub mod refusal;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc};

use super::liveness::{Liveness, LivenessAction, LivenessConfig};
use crate::clock::Clock;
use crate::wire::auth::{
    self, AUTH_MAGIC, AuthError, CHALLENGE_LEN, GREETING_LEN, NONCE_LEN, PROOF_LEN, Secret,
    SessionKeys,
};
use crate::wire::frame::{Frame, FrameDecoder, FrameEncoder, FrameError, FrameKind, MAGIC};

/// Frames waiting to be written. Two steps in flight, pings and control messages are a handful; a
/// queue this long means that the peer has stopped reading.
pub const QUEUE_MAX: usize = 256;
/// Bytes read at once.
const READ_CHUNK: usize = 64 << 10;
/// Writers gather queued frames into one write up to about this size.
const WRITE_GATHER: usize = 256 << 10;

/// What a link tells its owner. `Closed` is the last.
#[derive(Debug)]
pub enum LinkEvent {
    /// A frame of the peer; pings are answered by the link itself.
    Frame(Frame),
    /// Nothing was heard for a while; the peer may be frozen.
    Suspect,
    /// A suspect peer was heard of again.
    Alive,
    /// The link is over.
    Closed {
        /// Why.
        reason: CloseReason,
    },
}

/// Every way a link can end.
#[derive(Debug, thiserror::Error)]
pub enum CloseReason {
    /// The peer closed the connection, or its process ended.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The peer sent something that is no frame of ours.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The peer did not authenticate.
    #[error("{0}")]
    Auth(#[from] AuthError),
    /// The peer does not take this side, and says why.
    #[error("{0}")]
    Refused(String),
    /// The peer was silent for too long.
    #[error("nothing was heard for {:.1} s", silent.as_secs_f64())]
    Silent {
        /// How long.
        silent: Duration,
    },
    /// The peer did not take its frames.
    #[error("{QUEUE_MAX} frames were waiting to be taken by the peer")]
    QueueFull,
    /// The owner does not take what the peer sends.
    #[error("the owner of the link does not take its frames")]
    OwnerBusy,
    /// This side closed it.
    #[error("closed by this side")]
    Local,
}

/// A frame cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The link is over.
    #[error("the link is closed")]
    Closed,
    /// The peer does not take its frames; the link ends by this.
    #[error("the peer does not take its frames")]
    Full,
    /// The body is over its kind's bound.
    #[error("{0}")]
    TooLarge(FrameError),
}

#[derive(Debug)]
struct Outgoing {
    kind: FrameKind,
    epoch: u64,
    body: Arc<[u8]>,
}

/// The sending side of a link; clones share it. The link ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct LinkHandle {
    queue: mpsc::Sender<Outgoing>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    overflowed: AtomicBool,
    closing: Notify,
}

/// Receives a link's events, in order, on the link's reading task. Must not block.
pub trait LinkSink: Send + 'static {
    /// Takes one event; returns false when the owner has no room for it, which ends the link: what
    /// a peer sends may not queue without bound. `Closed` must always be taken.
    fn event(&mut self, event: LinkEvent) -> bool;
}

impl<F: FnMut(LinkEvent) -> bool + Send + 'static> LinkSink for F {
    fn event(&mut self, event: LinkEvent) -> bool {
        self(event)
    }
}

/// A connection before its owner is known: used for the handshake, frame by frame.
pub struct Connection {
    stream: TcpStream,
    encoder: FrameEncoder,
    decoder: FrameDecoder,
    peer: SocketAddr,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Connection {
    /// Dials.
    ///
    /// # Errors
    /// When the peer cannot be reached within `deadline`.
    pub async fn dial(address: &str, deadline: Duration) -> io::Result<Self> {
        let stream = tokio::time::timeout(deadline, TcpStream::connect(address))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no answer"))??;
        Self::new(stream)
    }

    /// Wraps an accepted connection.
    ///
    /// # Errors
    /// When the socket is dead already.
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

    /// Who is on the other side.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// This side's address on the connection.
    ///
    /// # Errors
    /// When the socket is dead.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Proves to the accepting side that this one knows the secret, and has it prove the same.
    ///
    /// # Errors
    /// [`CloseReason::Auth`] when the peer does not know it, others when it does not answer.
    pub async fn authenticate_as_client(
        &mut self,
        secret: &Secret,
        deadline: Duration,
    ) -> Result<(), CloseReason> {
        let greeting = auth::greeting(&nonce()?);
        let exchange = async {
            self.stream.write_all(&greeting).await?;
            let mut challenge = [0; CHALLENGE_LEN];
            // A peer that refuses this side answers with a frame, which is shorter.
            self.stream.read_exact(&mut challenge[..4]).await?;
            if challenge[..4] == MAGIC {
                return Ok(None);
            }
            self.stream.read_exact(&mut challenge[4..]).await?;
            let (proof, keys) = auth::prove(secret, &greeting, &challenge)?;
            self.stream.write_all(&proof).await?;
            Ok(Some(keys))
        };
        let Some(keys) = within(deadline, exchange).await? else {
            return Err(self.refusal(&MAGIC, deadline).await);
        };
        self.set_keys(keys);
        Ok(())
    }

    /// The accepting side of [`Connection::authenticate_as_client`]. Nothing the peer sends is
    /// looked at before it has proved that it knows the secret.
    ///
    /// # Errors
    /// As there.
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
                return Err(CloseReason::Auth(AuthError::NoGreeting));
            }
            self.stream.read_exact(&mut greeting[4..]).await?;
            let challenge = auth::challenge(secret, &greeting, &nonce)?;
            self.stream.write_all(&challenge).await?;
            let mut proof = [0; PROOF_LEN];
            self.stream.read_exact(&mut proof).await?;
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

    /// Makes it a link: starts its tasks on the current runtime.
    pub fn start(
        self,
        config: LivenessConfig,
        clock: Arc<dyn Clock>,
        sink: impl LinkSink,
    ) -> LinkHandle {
        let (queue, outgoing) = mpsc::channel(QUEUE_MAX);
        let shared = Arc::new(Shared::default());
        let handle = LinkHandle { queue, shared: shared.clone() };
        let (read, write) = self.stream.into_split();
        let (ended, write_ended) = mpsc::channel(1);
        let pongs = handle.queue.downgrade();
        tokio::spawn(write_frames(write, self.encoder, outgoing, ended));
        let reader = Reader {
            read,
            decoder: self.decoder,
            liveness: Liveness::new(config, clock.now()),
            clock,
            pongs,
            poll_interval: config.ping_interval / 4,
        };
        tokio::spawn(reader.run(shared, write_ended, sink));
        handle
    }
}

/// Random bytes of the operating system.
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

impl LinkHandle {
    /// Queues one frame. `body` is shared, not copied: the same plan goes to every rank.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn tell(&self, kind: FrameKind, epoch: u64, body: Arc<[u8]>) -> Result<(), SendError> {
        let max = kind.body_max();
        if body.len() > max as usize {
            let len = body.len() as u64;
            return Err(SendError::TooLarge(FrameError::TooLarge { kind, len, max }));
        }
        self.queue.try_send(Outgoing { kind, epoch, body }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                self.shared.overflowed.store(true, Ordering::Release);
                self.shared.closing.notify_one();
                SendError::Full
            }
            mpsc::error::TrySendError::Closed(_) => SendError::Closed,
        })
    }

    /// Queues one frame if the queue is at most half full: for senders that others must not suffer
    /// from. Says [`SendError::Full`] otherwise, and the link goes on.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn offer(&self, kind: FrameKind, epoch: u64, body: Arc<[u8]>) -> Result<(), SendError> {
        if !self.queue.is_closed() && self.queue.capacity() < QUEUE_MAX / 2 {
            return Err(SendError::Full);
        }
        self.tell(kind, epoch, body)
    }

    /// Queues one frame as soon as there is room: for senders that may be held up, which never
    /// overflow the queue.
    ///
    /// # Errors
    /// [`SendError`], never [`SendError::Full`].
    pub async fn tell_when_room(
        &self,
        kind: FrameKind,
        epoch: u64,
        body: Arc<[u8]>,
    ) -> Result<(), SendError> {
        let max = kind.body_max();
        if body.len() > max as usize {
            let len = body.len() as u64;
            return Err(SendError::TooLarge(FrameError::TooLarge { kind, len, max }));
        }
        let outgoing = Outgoing { kind, epoch, body };
        self.queue.send(outgoing).await.map_err(|_| SendError::Closed)
    }

    /// Whether frames wait to be written.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        self.queue.capacity() < QUEUE_MAX
    }

    /// Ends the link; what is queued may be lost.
    pub fn close(&self) {
        self.shared.closing.notify_one();
    }
}

async fn write_frames(
    mut write: OwnedWriteHalf,
    mut encoder: FrameEncoder,
    mut outgoing: mpsc::Receiver<Outgoing>,
    ended: mpsc::Sender<io::Error>,
) {
    let mut bytes = Vec::new();
    while let Some(first) = outgoing.recv().await {
        bytes.clear();
        let mut next = Some(first);
        while let Some(frame) = next {
            // The size was checked when it was queued.
            let _ = encoder.encode(frame.kind, frame.epoch, &frame.body, &mut bytes);
            next = if bytes.len() < WRITE_GATHER { outgoing.try_recv().ok() } else { None };
        }
        if let Err(error) = write.write_all(&bytes).await {
            let _ = ended.try_send(error);
            return;
        }
    }
    // Every handle is gone: say goodbye in TCP's way.
    let _ = write.shutdown().await;
}

struct Reader {
    read: OwnedReadHalf,
    decoder: FrameDecoder,
    liveness: Liveness,
    clock: Arc<dyn Clock>,
    pongs: mpsc::WeakSender<Outgoing>,
    poll_interval: Duration,
}

impl Reader {
    async fn run(
        mut self,
        shared: Arc<Shared>,
        mut write_ended: mpsc::Receiver<io::Error>,
        mut sink: impl LinkSink,
    ) {
        let reason = self.read_frames(&shared, &mut write_ended, &mut sink).await;
        let _ = sink.event(LinkEvent::Closed { reason });
    }

    async fn read_frames(
        &mut self,
        shared: &Shared,
        write_ended: &mut mpsc::Receiver<io::Error>,
        sink: &mut impl LinkSink,
    ) -> CloseReason {
        let mut timer = tokio::time::interval(self.poll_interval);
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut chunk = vec![0u8; READ_CHUNK];
        // Frames that came with the handshake are in the decoder already.
        if let Err(reason) = self.take_frames(sink) {
            return reason;
        }
        loop {
            tokio::select! {
                read = self.read.read(&mut chunk) => match read {
                    Ok(0) => return CloseReason::PeerClosed,
                    Ok(n) => {
                        self.decoder.feed(&chunk[..n]);
                        if let Err(reason) = self.take_frames(sink) {
                            return reason;
                        }
                    }
                    Err(error) => return CloseReason::Io(error),
                },
                _ = timer.tick() => match self.liveness.poll(self.clock.now()) {
                    LivenessAction::Wait => {}
                    LivenessAction::Ping => self.reply(FrameKind::Ping),
                    LivenessAction::Suspect => {
                        // The silence itself goes on being watched.
                        let _ = sink.event(LinkEvent::Suspect);
                    }
                    LivenessAction::Dead { silent } => return CloseReason::Silent { silent },
                },
                ended = write_ended.recv() => return match ended {
                    Some(error) => CloseReason::Io(error),
                    None => CloseReason::Local,
                },
                () = shared.closing.notified() => {
                    let full = shared.overflowed.load(Ordering::Acquire);
                    return if full { CloseReason::QueueFull } else { CloseReason::Local };
                }
            }
        }
    }

    fn take_frames(&mut self, sink: &mut impl LinkSink) -> Result<(), CloseReason> {
        while let Some(frame) = self.decoder.next_frame()? {
            if self.liveness.heard(self.clock.now()) {
                let _ = sink.event(LinkEvent::Alive);
            }
            match frame.kind {
                FrameKind::Ping => self.reply(FrameKind::Pong),
                FrameKind::Pong => {}
                _ if sink.event(LinkEvent::Frame(frame)) => {}
                _ => return Err(CloseReason::OwnerBusy),
            }
        }
        Ok(())
    }

    fn reply(&self, kind: FrameKind) {
        // A full queue is itself a sign of trouble that liveness will find.
        if let Some(queue) = self.pongs.upgrade() {
            let _ = queue.try_send(Outgoing { kind, epoch: 0, body: Arc::from([]) });
        }
    }
}

//! The frames waiting to be sent over a link, and the task that writes them.
//!
//! A link has two queues: control frames, which hold the cluster together, go ahead of the possibly
//! many messages between named actors.
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::io::AsyncWriteExt as _;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::{Notify, mpsc, oneshot};

use super::SendError;
use crate::wire::frame::{FrameEncoder, FrameError, FrameKind};

/// Maximum number of queued frames of all kinds except `actor`. Two steps in flight, pings and
/// control messages are a handful; a full queue means that the peer has stopped reading.
pub const QUEUE_MAX: usize = 256;
/// Maximum number of queued frames of kind `actor`. A process may report all its actors and watches
/// at once.
pub const ACTOR_QUEUE_MAX: usize = 1 << 16;
/// Target size of one write; the writer gathers queued frames up to it.
const WRITE_GATHER: usize = 256 << 10;

/// A queued frame.
#[derive(Debug)]
pub(super) struct Outgoing {
    kind: FrameKind,
    epoch: u64,
    body: Arc<Vec<u8>>,
}

impl Outgoing {
    /// A frame without a body or an epoch.
    pub(super) fn bare(kind: FrameKind) -> Self {
        Self { kind, epoch: 0, body: Arc::default() }
    }

    fn new(kind: FrameKind, epoch: u64, body: Arc<Vec<u8>>) -> Result<Self, SendError> {
        let max = kind.body_max();
        if body.len() > max as usize {
            let len = body.len() as u64;
            return Err(SendError::TooLarge(FrameError::TooLarge { kind, len, max }));
        }
        Ok(Self { kind, epoch, body })
    }
}

/// Amount of queued data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queued {
    /// Frames.
    pub frames: usize,
    /// Bytes of their bodies.
    pub bytes: usize,
}

/// The sending side of a link; clones share it. After the last clone is dropped, queued frames are
/// written and the link ends.
#[derive(Clone, Debug)]
pub struct LinkHandle {
    queue: mpsc::Sender<Outgoing>,
    actors: mpsc::Sender<Outgoing>,
    shared: Arc<Shared>,
}

/// State shared by a link's tasks and handles.
#[derive(Debug, Default)]
pub(super) struct Shared {
    overflowed: AtomicBool,
    closing: Notify,
    /// Total body bytes of queued `actor` frames.
    actor_bytes: AtomicUsize,
}

impl Shared {
    /// Resolves when this side wants the link to end; true when the cause is a full queue.
    pub(super) async fn closing(&self) -> bool {
        self.closing.notified().await;
        self.overflowed.load(Ordering::Acquire)
    }
}

/// The receiving end of a handle's queues.
#[derive(Debug)]
pub(super) struct Queues {
    queue: mpsc::Receiver<Outgoing>,
    actors: mpsc::Receiver<Outgoing>,
    shared: Arc<Shared>,
}

/// Both ends of a link's queues.
pub(super) fn queues() -> (LinkHandle, Queues) {
    let (queue, queued) = mpsc::channel(QUEUE_MAX);
    let (actors, queued_actors) = mpsc::channel(ACTOR_QUEUE_MAX);
    let shared = Arc::new(Shared::default());
    let handle = LinkHandle { queue, actors, shared: shared.clone() };
    (handle, Queues { queue: queued, actors: queued_actors, shared })
}

impl LinkHandle {
    /// Queues one frame. `body` is shared, not copied: the same plan goes to every rank.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn tell(&self, kind: FrameKind, epoch: u64, body: Arc<Vec<u8>>) -> Result<(), SendError> {
        let outgoing = Outgoing::new(kind, epoch, body)?;
        let (queue, bytes) = match kind {
            FrameKind::Actor => (&self.actors, outgoing.body.len()),
            _ => (&self.queue, 0),
        };
        // Counted first: the writer may dequeue the frame before this function continues.
        self.shared.actor_bytes.fetch_add(bytes, Ordering::Relaxed);
        queue.try_send(outgoing).map_err(|error| {
            self.shared.actor_bytes.fetch_sub(bytes, Ordering::Relaxed);
            match error {
                mpsc::error::TrySendError::Full(_) => {
                    self.shared.overflowed.store(true, Ordering::Release);
                    self.shared.closing.notify_one();
                    SendError::Full
                }
                mpsc::error::TrySendError::Closed(_) => SendError::Closed,
            }
        })
    }

    /// Queues one frame of a kind other than `actor` as soon as there is room, for senders that can
    /// wait and so never overflow the queue. Sends nothing if dropped before it completes.
    ///
    /// # Errors
    /// [`SendError`], but never [`SendError::Full`]; returns at the latest when the link ends.
    pub async fn tell_when_room(
        &self,
        kind: FrameKind,
        epoch: u64,
        body: Arc<Vec<u8>>,
    ) -> Result<(), SendError> {
        let outgoing = Outgoing::new(kind, epoch, body)?;
        self.queue.send(outgoing).await.map_err(|_| SendError::Closed)
    }

    /// Whether frames are queued.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        !self.queue.is_closed() && self.queue.capacity() < QUEUE_MAX
    }

    /// Amount of queued frames of kind `actor`.
    #[must_use]
    pub fn queued_of_actors(&self) -> Queued {
        let frames = self.actors.max_capacity() - self.actors.capacity();
        Queued { frames, bytes: self.shared.actor_bytes.load(Ordering::Relaxed) }
    }

    /// Ends the link, even if the peer reads nothing; queued frames may be lost.
    pub fn close(&self) {
        self.shared.closing.notify_one();
    }

    /// Weak reference to the queue for pings and pongs; it does not keep the link alive.
    pub(super) fn pongs(&self) -> mpsc::WeakSender<Outgoing> {
        self.queue.downgrade()
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }
}

impl Queues {
    async fn first(&mut self) -> Option<Outgoing> {
        tokio::select! {
            biased;
            Some(frame) = self.queue.recv() => Some(frame),
            Some(frame) = self.actors.recv() => Some(self.of_actors(frame)),
            else => None,
        }
    }

    fn next(&mut self) -> Option<Outgoing> {
        if let Ok(frame) = self.queue.try_recv() {
            return Some(frame);
        }
        let frame = self.actors.try_recv().ok()?;
        Some(self.of_actors(frame))
    }

    fn of_actors(&self, frame: Outgoing) -> Outgoing {
        self.shared.actor_bytes.fetch_sub(frame.body.len(), Ordering::Relaxed);
        frame
    }
}

/// Writes queued frames until every handle is dropped, or the link `is_over`: a peer that reads
/// nothing would otherwise block a write for ever. Reports an error to `ended`, which is dropped in
/// any case.
pub(super) async fn write(
    write: OwnedWriteHalf,
    encoder: FrameEncoder,
    queues: Queues,
    is_over: oneshot::Receiver<()>,
    ended: mpsc::Sender<io::Error>,
) {
    tokio::select! {
        biased;
        _ = is_over => {}
        written = write_frames(write, encoder, queues) => if let Err(error) = written {
            let _ = ended.try_send(error);
        }
    }
}

async fn write_frames(
    mut write: OwnedWriteHalf,
    mut encoder: FrameEncoder,
    mut queues: Queues,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    while let Some(first) = queues.first().await {
        let mut next = Some(first);
        while let Some(frame) = next {
            // The size was checked when the frame was queued.
            let _ = encoder.encode(frame.kind, frame.epoch, &frame.body, &mut bytes);
            next = if bytes.len() < WRITE_GATHER { queues.next() } else { None };
        }
        write.write_all(&bytes).await?;
        bytes.clear();
        // Release the memory that a single large frame needed.
        bytes.shrink_to(2 * WRITE_GATHER);
    }
    // All handles are dropped: close the TCP stream in order.
    let _ = write.shutdown().await;
    Ok(())
}

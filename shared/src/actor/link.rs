//! One TCP connection between two processes: frames in, frames out, pings.
//!
//! A link is two tasks: one reads frames and hands them to the owner's sink, the other writes
//! queued frames. Neither waits for the other, and no queue is unbounded: a peer that does not read
//! its frames fills a queue, and the link ends. The end is reported once, with its reason, and
//! stops both tasks.
//!
//! - `connection`: the stage before: dialling, authentication, the handshake
//! - `queue`: the sending side
//! - [`join`]: the dialling side, up to its welcome
//! - [`refusal`]: what a rejected peer is told
mod connection;
pub mod join;
mod queue;
pub mod refusal;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::{mpsc, oneshot};

pub use self::connection::Connection;
pub use self::queue::{ACTOR_QUEUE_MAX, LinkHandle, QUEUE_MAX, Queued};
use self::queue::{Outgoing, Shared};
use super::liveness::{Liveness, LivenessAction};
use crate::clock::Clock;
use crate::wire::auth::AuthError;
use crate::wire::frame::{Frame, FrameDecoder, FrameError, FrameKind};

/// Bytes per read.
const READ_CHUNK: usize = 64 << 10;

/// Event that a link reports to its owner. `Closed` is the last one.
#[derive(Debug)]
pub enum LinkEvent {
    /// A frame from the peer; the link answers pings itself.
    Frame(Frame),
    /// Nothing arrived for a while; the peer may be frozen.
    Suspect,
    /// A suspect peer sent something again.
    Alive,
    /// The link has ended.
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
    /// The peer sent bytes that are not a valid frame.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The peer did not authenticate.
    #[error("{0}")]
    Auth(#[from] AuthError),
    /// The peer rejected this side and said why.
    #[error("{0}")]
    Refused(String),
    /// The peer was silent for too long.
    #[error("nothing was heard for {:.1} s", silent.as_secs_f64())]
    Silent {
        /// Length of the silence.
        silent: Duration,
    },
    /// The peer did not read its frames.
    #[error(
        "the peer does not take its frames: a queue of {QUEUE_MAX}, or {ACTOR_QUEUE_MAX} of actors, was full"
    )]
    QueueFull,
    /// The owner does not consume the peer's frames fast enough.
    #[error("the owner of the link does not take its frames")]
    OwnerBusy,
    /// This side closed it.
    #[error("closed by this side")]
    Local,
}

/// Why a frame cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The link has ended.
    #[error("the link is closed")]
    Closed,
    /// The peer does not read its frames; this error ends the link.
    #[error("the peer does not take its frames")]
    Full,
    /// The body exceeds its kind's bound.
    #[error("{0}")]
    TooLarge(FrameError),
}

/// Receives a link's events in order, on the link's reader task. Must not block.
pub trait LinkSink: Send + 'static {
    /// Takes one event. Returning false, for lack of room, ends the link: a peer's frames must not
    /// queue without bound. `Closed` must always be taken.
    fn event(&mut self, event: LinkEvent) -> bool;
}

impl<F: FnMut(LinkEvent) -> bool + Send + 'static> LinkSink for F {
    fn event(&mut self, event: LinkEvent) -> bool {
        self(event)
    }
}

struct Reader {
    read: OwnedReadHalf,
    decoder: FrameDecoder,
    liveness: Liveness,
    clock: Arc<dyn Clock>,
    pongs: mpsc::WeakSender<Outgoing>,
    shared: Arc<Shared>,
    write_ended: mpsc::Receiver<io::Error>,
    poll_interval: Duration,
}

impl Reader {
    /// Reads until the link ends; the writer ends through `over`.
    async fn run(mut self, over: oneshot::Sender<()>, mut sink: impl LinkSink) {
        let reason = self.read_frames(&mut sink).await;
        drop(over);
        while self.write_ended.recv().await.is_some() {}
        let _ = sink.event(LinkEvent::Closed { reason });
    }

    async fn read_frames(&mut self, sink: &mut impl LinkSink) -> CloseReason {
        let mut timer = tokio::time::interval(self.poll_interval);
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut chunk = vec![0u8; READ_CHUNK];
        // Frames that arrived with the handshake are already in the decoder.
        if let Err(reason) = self.take_frames(sink) {
            return reason;
        }
        loop {
            tokio::select! {
                read = self.read.read(&mut chunk) => match read {
                    Ok(0) => return CloseReason::PeerClosed,
                    Ok(n) => {
                        // Count bytes before the frame is complete: a large frame takes long on a
                        // slow link.
                        if self.liveness.heard(self.clock.now()) {
                            let _ = sink.event(LinkEvent::Alive);
                        }
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
                        // Silence is still being measured.
                        let _ = sink.event(LinkEvent::Suspect);
                    }
                    LivenessAction::Dead { silent } => return CloseReason::Silent { silent },
                },
                ended = self.write_ended.recv() => return match ended {
                    Some(error) => CloseReason::Io(error),
                    None => CloseReason::Local,
                },
                full = self.shared.closing() => {
                    return if full { CloseReason::QueueFull } else { CloseReason::Local };
                }
            }
        }
    }

    fn take_frames(&mut self, sink: &mut impl LinkSink) -> Result<(), CloseReason> {
        while let Some(frame) = self.decoder.next_frame()? {
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
        // If the queue is full, the liveness check will notice the trouble.
        if let Some(queue) = self.pongs.upgrade() {
            let _ = queue.try_send(Outgoing::bare(kind));
        }
    }
}

#[cfg(test)]
mod tests;

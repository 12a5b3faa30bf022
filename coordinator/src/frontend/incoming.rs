//! What a front end's link has received and the front end has not handled yet.
//!
//! A busy cluster sends thousands of small frames a second, so the queue is bounded by bytes: a
//! front end that stands still for seconds (a throttled container, a slow disk) catches up, and
//! does not lose its link for it.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shared::actor::link::LinkEvent;
use tokio::sync::mpsc;

/// Most bytes of received frames that wait.
pub(super) const INCOMING_BYTES_MAX: usize = 64 << 20;
/// What an event takes beside its frame's body: about its place in the queue.
const EVENT_BYTES: usize = 96;

/// The link's side of the queue.
#[derive(Debug)]
pub(super) struct Incoming {
    queue: mpsc::UnboundedSender<LinkEvent>,
    bytes: Arc<AtomicUsize>,
}

/// The front end's side of the queue.
#[derive(Debug)]
pub(super) struct Received {
    queue: mpsc::UnboundedReceiver<LinkEvent>,
    bytes: Arc<AtomicUsize>,
}

/// Makes a queue.
pub(super) fn queue() -> (Incoming, Received) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let bytes = Arc::new(AtomicUsize::new(0));
    (Incoming { queue: sender, bytes: bytes.clone() }, Received { queue: receiver, bytes })
}

fn size(event: &LinkEvent) -> usize {
    let body = match event {
        LinkEvent::Frame(frame) => frame.body.len(),
        _ => 0,
    };
    EVENT_BYTES + body
}

impl Incoming {
    /// Queues an event. False: there is no room for it, or nobody receives any more. The end of the
    /// link always has room.
    pub(super) fn put(&self, event: LinkEvent) -> bool {
        let size = size(&event);
        let before = self.bytes.fetch_add(size, Ordering::Relaxed);
        let fits = before + size <= INCOMING_BYTES_MAX;
        (fits || matches!(event, LinkEvent::Closed { .. })) && self.queue.send(event).is_ok()
    }
}

impl Received {
    /// The next event; `None` once the link is gone without having said why.
    pub(super) async fn next(&mut self) -> Option<LinkEvent> {
        let event = self.queue.recv().await?;
        self.bytes.fetch_sub(size(&event), Ordering::Relaxed);
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use shared::actor::link::CloseReason;
    use shared::wire::frame::{Frame, FrameKind};

    use super::*;

    fn frame(bytes: usize) -> LinkEvent {
        LinkEvent::Frame(Frame { kind: FrameKind::Events, epoch: 0, body: vec![0; bytes] })
    }

    #[tokio::test]
    async fn many_small_frames_wait_and_too_many_bytes_do_not() {
        let (incoming, mut received) = queue();
        for _ in 0..100_000 {
            assert!(incoming.put(frame(200)), "seconds of a busy cluster");
        }
        for _ in 0..100_000 {
            assert!(received.next().await.is_some());
        }
        let half = INCOMING_BYTES_MAX / 2 - EVENT_BYTES;
        assert!(incoming.put(frame(half)) && incoming.put(frame(half)));
        assert!(!incoming.put(frame(0)), "it is full");
        assert!(incoming.put(LinkEvent::Closed { reason: CloseReason::Local }), "the end is told");
    }
}

//! What happens to a front end's requests, on its way there.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use shared::actor::peer::PeerAddr;
use shared::ids::RequestId;
use shared::protocol::{EngineEvent, ToFrontend};
use tokio::sync::mpsc;

use crate::engine::{EngineError, Gone};
use crate::http::gate::Visit;
use crate::http::state::ReadinessCheck;

/// A frame of events is sent when it has about so many bytes.
const GATHER_BYTES: usize = 1 << 20;
/// Log-probabilities of a prompt travel in pieces of so many tokens.
pub const PROMPT_LOGPROBS_PIECE: usize = 4096;
/// How often readiness is looked at.
const READINESS_INTERVAL: Duration = Duration::from_millis(100);

/// Where the events of one request of a front end go.
#[derive(Clone, Debug)]
pub struct RemoteEvents(Arc<RemoteRequest>);

#[derive(Debug)]
struct RemoteRequest {
    /// The front end's number for it.
    id: RequestId,
    queue: mpsc::Sender<(RequestId, EngineEvent)>,
    open: Arc<AtomicBool>,
    /// Choices whose ends the front end has not been told.
    choices_left: AtomicUsize,
    /// The request is inside as long as the engine may send events.
    _visit: Option<Visit>,
}

impl RemoteEvents {
    /// Of a request that has `choices` ends to tell of.
    pub(super) fn new(
        id: RequestId,
        choices: usize,
        queue: mpsc::Sender<(RequestId, EngineEvent)>,
        open: Arc<AtomicBool>,
        visit: Option<Visit>,
    ) -> Self {
        let choices_left = AtomicUsize::new(choices);
        Self(Arc::new(RemoteRequest { id, queue, open, choices_left, _visit: visit }))
    }

    /// Queues one event.
    ///
    /// # Errors
    /// [`Gone`], also for a front end that is far behind: it is given up.
    pub fn send(&self, event: EngineEvent) -> Result<(), Gone> {
        if self.is_closed() {
            return Err(Gone);
        }
        let left = &self.0.choices_left;
        match &event {
            EngineEvent::Failed(_) => left.store(0, Ordering::Relaxed),
            EngineEvent::Finished { .. } => {
                let less = |left: usize| Some(left.saturating_sub(1));
                let _ = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
            EngineEvent::Token { .. }
            | EngineEvent::PromptLogprobs(_)
            | EngineEvent::Embedding(_) => {}
        }
        match event {
            EngineEvent::PromptLogprobs(all) if all.len() > PROMPT_LOGPROBS_PIECE => all
                .chunks(PROMPT_LOGPROBS_PIECE)
                .try_for_each(|piece| self.0.queue(EngineEvent::PromptLogprobs(piece.to_vec()))),
            event => self.0.queue(event),
        }
    }

    /// Whether the front end's link is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        !self.0.open.load(Ordering::Acquire)
    }
}

impl RemoteRequest {
    fn queue(&self, event: EngineEvent) -> Result<(), Gone> {
        self.queue.try_send((self.id, event)).map_err(|_| {
            // The sending task sees it and ends the link.
            self.open.store(false, Ordering::Release);
            Gone
        })
    }
}

impl Drop for RemoteRequest {
    /// What the engine lets go of without an end (a client's own cancellation, or a defect of
    /// whoever had it) ends nonetheless: the front end waits for it, unless it has forgotten it.
    fn drop(&mut self) {
        if *self.choices_left.get_mut() > 0 && self.open.load(Ordering::Acquire) {
            let message = "the coordinator has lost this request".to_owned();
            let _ = self.queue(EngineEvent::Failed(EngineError::Unavailable { message }));
        }
    }
}

/// Gathers events and sends them until the link is over.
pub(super) async fn send(
    mut events: mpsc::Receiver<(RequestId, EngineEvent)>,
    link: PeerAddr<ToFrontend>,
    open: Arc<AtomicBool>,
) {
    let mut gathered = Vec::new();
    while let Some(first) = events.recv().await {
        let mut bytes = weight(&first.1);
        gathered.push(first);
        while bytes < GATHER_BYTES
            && let Ok(next) = events.try_recv()
        {
            bytes += weight(&next.1);
            gathered.push(next);
        }
        let message = ToFrontend::Events(std::mem::take(&mut gathered));
        // A link that is full holds this task up, never the engine.
        let sent = link.tell_when_room(&message).await;
        if !open.load(Ordering::Acquire) {
            break;
        }
        if let Err(error) = sent {
            tracing::warn!(%error, "events for a front end could not be sent");
            break;
        }
        if let ToFrontend::Events(mut events) = message {
            events.clear();
            gathered = events;
        }
    }
    open.store(false, Ordering::Release);
    link.close();
}

/// About how many bytes an event has on the wire.
fn weight(event: &EngineEvent) -> usize {
    let logprobs = |token: &shared::protocol::TokenLogprobs| 16 + 10 * token.top.len();
    match event {
        EngineEvent::PromptLogprobs(all) => all.iter().map(logprobs).sum(),
        EngineEvent::Embedding(vector) => 16 + vector.len() * size_of::<f32>(),
        EngineEvent::Token { logprobs: Some(token), .. } => 16 + logprobs(token),
        _ => 16,
    }
}

/// Tells the front end whether requests can be served, whenever that changes.
pub(super) async fn send_readiness(
    readiness: ReadinessCheck,
    link: PeerAddr<ToFrontend>,
    open: Arc<AtomicBool>,
) {
    let mut timer = tokio::time::interval(READINESS_INTERVAL);
    let mut told = None;
    while open.load(Ordering::Acquire) {
        timer.tick().await;
        let now = readiness();
        if told.as_ref() == Some(&now) {
            continue;
        }
        let (ready, message) = (now.ready, now.message.clone());
        let message = ToFrontend::Readiness { ready, message };
        if link.tell_when_room(&message).await.is_err() {
            return;
        }
        told = Some(now);
    }
}

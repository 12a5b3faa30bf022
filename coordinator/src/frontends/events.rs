//! Events of a front end's requests, on their way to it.
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use shared::actor::peer::PeerAddr;
use shared::ids::RequestId;
use shared::protocol::{EngineEvent, ToFrontend};
use tokio::sync::{Notify, mpsc};

use crate::adapters::ServedAdapters;
use crate::engine::{EngineError, PROMPT_LOGPROBS_PIECE, ReceiverGone};
use crate::http::gate::Visit;
use crate::http::state::ReadinessCheck;

/// Approximate size, in bytes, at which a frame of events is sent.
const GATHER_BYTES: usize = 1 << 20;
/// Interval at which readiness is checked.
const READINESS_INTERVAL: Duration = Duration::from_millis(100);

/// Whether a link is open, for all who use it.
#[derive(Debug)]
pub(super) struct LinkState {
    is_open: AtomicBool,
    over: Notify,
}

impl LinkState {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { is_open: AtomicBool::new(true), over: Notify::new() })
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.is_open.store(false, Ordering::Release);
        self.over.notify_waiters();
    }

    /// Resolves when the link ends.
    async fn closed(&self) {
        let over = self.over.notified();
        tokio::pin!(over);
        // From here on, no notification is missed.
        over.as_mut().enable();
        if self.is_open() {
            over.await;
        }
    }
}

/// The queue for the events of one link's requests, and the requests that the engine has.
#[derive(Clone, Debug)]
pub(super) struct LinkRequests {
    queue: mpsc::Sender<(RequestId, EngineEvent)>,
    open: Arc<LinkState>,
    live: Arc<Mutex<HashMap<RequestId, Weak<RemoteRequest>>>>,
}

impl LinkRequests {
    pub(super) fn new(queue: mpsc::Sender<(RequestId, EngineEvent)>, open: Arc<LinkState>) -> Self {
        Self { queue, open, live: Arc::default() }
    }

    /// Registers a request of `choices` choices, each of which must be reported to end; `None` if a
    /// request with this `id` is running.
    pub(super) fn begin(
        &self,
        id: RequestId,
        choices: usize,
        visit: Option<Visit>,
    ) -> Option<RemoteEvents> {
        let mut live = self.live();
        if live.contains_key(&id) {
            return None;
        }
        let request = Arc::new(RemoteRequest {
            id,
            link: self.clone(),
            choices_left: AtomicUsize::new(choices),
            cancelled: AtomicBool::new(false),
            _visit: visit,
        });
        live.insert(id, Arc::downgrade(&request));
        Some(RemoteEvents(request))
    }

    /// The front end has dropped a request. The engine sees that its events are closed, even where
    /// a cancel command did not fit into a queue.
    pub(super) fn cancel(&self, id: RequestId) {
        let found = self.live().get(&id).and_then(Weak::upgrade);
        if let Some(request) = found {
            request.cancelled.store(true, Ordering::Release);
        }
    }

    /// Marks the link as ended.
    pub(super) fn close(&self) {
        self.open.close();
    }

    fn live(&self) -> MutexGuard<'_, HashMap<RequestId, Weak<RemoteRequest>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Receives the events of one request of a front end.
#[derive(Clone, Debug)]
pub struct RemoteEvents(Arc<RemoteRequest>);

#[derive(Debug)]
struct RemoteRequest {
    /// The front end's number for it.
    id: RequestId,
    link: LinkRequests,
    /// Choices whose end has not been sent yet.
    choices_left: AtomicUsize,
    /// Whether the front end has dropped it.
    cancelled: AtomicBool,
    /// Counts the request as running while the engine may send events.
    _visit: Option<Visit>,
}

impl RemoteEvents {
    /// Queues one event.
    ///
    /// # Errors
    /// [`ReceiverGone`]; also when the front end is so far behind that its link is given up.
    pub fn send(&self, event: EngineEvent) -> Result<(), ReceiverGone> {
        if self.is_closed() {
            return Err(ReceiverGone);
        }
        let less = |left: usize| Some(event.left_after(left));
        let _ = self.0.choices_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        match event {
            EngineEvent::PromptLogprobs(all) if all.len() > PROMPT_LOGPROBS_PIECE => all
                .chunks(PROMPT_LOGPROBS_PIECE)
                .try_for_each(|piece| self.0.queue(EngineEvent::PromptLogprobs(piece.to_vec()))),
            event => self.0.queue(event),
        }
    }

    /// Whether the link has ended, or the front end has cancelled the request.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl RemoteRequest {
    fn is_closed(&self) -> bool {
        !self.link.open.is_open() || self.cancelled.load(Ordering::Acquire)
    }

    fn queue(&self, event: EngineEvent) -> Result<(), ReceiverGone> {
        self.link.queue.try_send((self.id, event)).map_err(|_| {
            // The sending task notices this and ends the link.
            self.link.close();
            ReceiverGone
        })
    }
}

impl Drop for RemoteRequest {
    /// If the engine drops a request without reporting its end (because its client cancelled it, or
    /// by a defect), an end is reported here: the front end waits for it, unless it has dropped the
    /// request.
    fn drop(&mut self) {
        self.link.live().remove(&self.id);
        if *self.choices_left.get_mut() > 0 && !self.is_closed() {
            let message = "the coordinator has lost this request".to_owned();
            let _ = self.queue(EngineEvent::Failed(EngineError::Unavailable { message }));
        }
    }
}

/// Gathers events into frames and sends them until the link ends. It watches for that end even
/// while the link's queue is full: a front end that answers pings but reads nothing blocks this
/// task.
pub(super) async fn send(
    mut events: mpsc::Receiver<(RequestId, EngineEvent)>,
    link: PeerAddr<ToFrontend>,
    open: Arc<LinkState>,
) {
    let over = open.closed();
    tokio::pin!(over);
    let mut gathered = Vec::new();
    loop {
        let first = tokio::select! {
            first = events.recv() => first,
            () = &mut over => break,
        };
        let Some(first) = first else { break };
        let mut bytes = weight(&first.1);
        gathered.push(first);
        while bytes < GATHER_BYTES
            && let Ok(next) = events.try_recv()
        {
            bytes += weight(&next.1);
            gathered.push(next);
        }
        let message = ToFrontend::Events(std::mem::take(&mut gathered));
        // A full link blocks this task, never the engine.
        let sent = tokio::select! {
            sent = link.tell_when_room(&message) => sent,
            () = &mut over => break,
        };
        if let Err(error) = sent {
            tracing::warn!(%error, "events for a front end could not be sent");
            break;
        }
        if let ToFrontend::Events(mut events) = message {
            events.clear();
            gathered = events;
        }
    }
    open.close();
    link.close();
}

/// Approximate size of an event on the wire, in bytes.
fn weight(event: &EngineEvent) -> usize {
    let logprobs = |token: &shared::protocol::TokenLogprobs| 16 + 10 * token.top.len();
    match event {
        EngineEvent::PromptLogprobs(all) => all.iter().map(logprobs).sum(),
        EngineEvent::Embedding(vector) => 16 + vector.len() * size_of::<f32>(),
        EngineEvent::Token { logprobs: Some(token), .. } => 16 + logprobs(token),
        _ => 16,
    }
}

/// Tells the front end whether requests can be served and which adapters there are, at every
/// change.
pub(super) async fn send_state(
    (readiness, adapters): (ReadinessCheck, ServedAdapters),
    link: PeerAddr<ToFrontend>,
    open: Arc<LinkState>,
) {
    let mut timer = tokio::time::interval(READINESS_INTERVAL);
    let (mut told, mut told_adapters) = (None, None);
    while open.is_open() {
        timer.tick().await;
        let (now, adapters) = (readiness(), adapters.all());
        let mut news = Vec::new();
        if told_adapters.as_ref() != Some(&adapters) {
            news.push(ToFrontend::Adapters(adapters.clone()));
        }
        if told.as_ref() != Some(&now) {
            let (ready, message) = (now.ready, now.message.clone());
            news.push(ToFrontend::Readiness { ready, message });
        }
        for message in news {
            let sent = tokio::select! {
                sent = link.tell_when_room(&message) => sent,
                () = open.closed() => return,
            };
            if sent.is_err() {
                return;
            }
        }
        (told, told_adapters) = (Some(now), Some(adapters));
    }
}

//! Front ends of their own processes: their links, their requests, their reports.
//!
//! A link's reading task hands requests to the engine's queue; a task per front end gathers what
//! happens to its requests and sends it, many events in one frame. Neither waits for the other: a
//! full queue answers 429, a front end that does not take its events loses its link, and the
//! requests of a lost link are cancelled.
mod making;
mod slots;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use shared::actor::ActorRuntime;
use shared::actor::exchange::PeerId;
use shared::actor::link::{Connection, LinkEvent, LinkHandle};
use shared::actor::liveness::LivenessConfig;
use shared::actor::peer::PeerAddr;
use shared::clock::Clock;
use shared::ids::{Incarnation, RequestId};
use shared::metrics::Source;
use shared::metrics::labels::RejectReason;
use shared::protocol::actors::{ActorLife, ActorReport};
use shared::protocol::{
    EngineEvent, FromFrontend, FrontendHello, FrontendId, FrontendWelcome, Serving, SubmitRequest,
    ToFrontend, WorkerStats,
};
use shared::sampling::SUPPRESSED_MAX;
use shared::wire::codec;
use shared::wire::frame::FrameKind;
use tokio::sync::mpsc;

use self::making::Making;
use self::slots::{Admitted, Before, Slots};
use crate::cluster::actor::Refusal;
use crate::engine::{EngineCommand, EngineError, EventSender, GenerateRequest, Gone, StopCheck};
use crate::http::gate::{Gate, Visit};
use crate::http::params::Limits;
use crate::http::state::ReadinessCheck;
use crate::metrics::Hub;
use crate::text::model::TextModel;
use crate::text::stream::{StopRules, TextStream};

/// Events of one front end waiting to be sent. At 10,000 streams these are several steps.
const EVENTS_MAX: usize = 1 << 17;
/// A frame of events is sent when it has about so many bytes.
const GATHER_BYTES: usize = 1 << 20;
/// Log-probabilities of a prompt travel in pieces of so many tokens.
pub const PROMPT_LOGPROBS_PIECE: usize = 4096;
/// Interval of a front end's stats reports.
const STATS_INTERVAL: Duration = Duration::from_millis(500);
/// How often readiness is looked at.
const READINESS_INTERVAL: Duration = Duration::from_millis(100);
/// How often queues are looked at that shall become empty.
const FLUSH_POLL: Duration = Duration::from_millis(5);
/// A front end's own request numbers lie below this; the link's number comes above.
const LINK_SHIFT: u32 = 40;
/// Bytes of a response's id.
const RESPONSE_ID_MAX: usize = 256;

/// Takes front ends in. Lives as long as the coordinator.
pub struct Frontends {
    actors: ActorRuntime,
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
    commands: mpsc::Sender<EngineCommand>,
    text: Arc<TextModel>,
    serving: Serving,
    limits: Limits,
    readiness: ReadinessCheck,
    gate: Gate,
    slots: Mutex<Slots<Linked>>,
    /// Links so far; link 0 is this process's own front end.
    links: AtomicU64,
}

/// A link that is up.
#[derive(Debug)]
struct Linked {
    /// Unique among all links there ever were.
    number: u64,
    pid: u32,
    handle: LinkHandle,
    /// Events on their way.
    queue: mpsc::Sender<(RequestId, EngineEvent)>,
}

impl std::fmt::Debug for Frontends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frontends").field("serving", &self.serving).finish_non_exhaustive()
    }
}

impl Frontends {
    /// No front ends yet; their requests go to `commands`, if `gate` lets them in.
    #[must_use]
    pub fn new(
        hub: Arc<Hub>,
        clock: Arc<dyn Clock>,
        commands: mpsc::Sender<EngineCommand>,
        text: Arc<TextModel>,
        serving: Serving,
        readiness: ReadinessCheck,
        actors: ActorRuntime,
        gate: Gate,
    ) -> Self {
        Self {
            actors,
            hub,
            clock,
            commands,
            text,
            limits: Limits::new(serving.max_model_len),
            serving,
            readiness,
            gate,
            slots: Mutex::default(),
            links: AtomicU64::new(1),
        }
    }

    /// Linked front ends: name, slot, process id.
    #[must_use]
    pub fn linked(&self) -> Vec<(String, FrontendId, u32)> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.linked().map(|(node, id, link)| (node.to_owned(), id, link.pid)).collect()
    }

    /// Waits until the events there are have left this process, at most so long.
    pub async fn flush(&self, patience: Duration) {
        let waiting = || {
            let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            let links = || slots.linked().map(|(_, _, link)| link);
            let waits = |link: &Linked| link.queue.capacity() < EVENTS_MAX;
            (links().count(), links().any(|link| waits(link) || link.handle.has_queued()))
        };
        let flushed = async {
            while waiting().1 {
                tokio::time::sleep(FLUSH_POLL).await;
            }
        };
        let _ = tokio::time::timeout(patience, flushed).await;
        if waiting().0 > 0 {
            // What was taken from the last queue is being written.
            tokio::time::sleep(FLUSH_POLL * 4).await;
        }
    }

    /// The answer to a hello.
    ///
    /// # Errors
    /// Why this front end is not taken, in words for it.
    pub fn admit(&self, hello: &FrontendHello) -> Result<FrontendWelcome, Refusal> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let admitted = slots.admit(self.clock.now(), &hello.node, hello.incarnation, hello.slot);
        drop(slots);
        let Admitted { frontend, freed } = admitted?;
        if let Some(closed) = freed {
            self.hub.retire(Source::Frontend(frontend), closed);
        }
        Ok(FrontendWelcome {
            frontend,
            stats_interval_ms: STATS_INTERVAL.as_millis() as u64,
            serving: self.serving.clone(),
        })
    }

    /// A front end has been welcomed: its link begins.
    pub fn joined(self: &Arc<Self>, hello: &FrontendHello, id: FrontendId, connection: Connection) {
        let (queue, events) = mpsc::channel(EVENTS_MAX);
        let open = Arc::new(AtomicBool::new(true));
        let incarnation = hello.incarnation;
        let link_number = self.links.fetch_add(1, Ordering::Relaxed);
        let receiver = Receiver {
            frontends: self.clone(),
            id,
            incarnation,
            link_number,
            queue: queue.clone(),
            open: open.clone(),
            peer: self.actors.reserve_peer(),
            node: hello.node.clone(),
            making: Making::default(),
        };
        let peer = receiver.peer;
        let sink = move |event| receiver.take(event);
        // The link's end is told of behind this lock: not before the link has its slot.
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let link = connection.start(LivenessConfig::default(), self.clock.clone(), sink);
        let (number, pid, handle) = (link_number, hello.pid, link.clone());
        let linked = Linked { number, pid, handle, queue };
        let joined = slots.joined(&hello.node, id, incarnation, linked);
        drop(slots);
        match joined {
            Ok(Before { run, link: old }) => {
                if let Some(run) = run {
                    self.hub.retire(Source::Frontend(id), run);
                }
                if let Some(old) = old {
                    old.handle.close();
                }
            }
            // Between its admission and now another process has joined in its place.
            Err(late) => {
                late.handle.close();
                return;
            }
        }
        tracing::info!(frontend = %id, node = hello.node, pid = hello.pid, "joined");
        self.hub.observer().record().frontend_up(id);
        self.actors.peer_up_as(peer, &hello.node, link.clone());
        self.name(&hello.node, id, ActorLife::Alive, None);
        let addr = PeerAddr::new(link);
        actix::spawn(send_events(events, addr.clone(), open.clone()));
        actix::spawn(send_readiness(self.readiness.clone(), addr, open));
    }

    /// Tells of a front end as an actor.
    fn name(&self, node: &str, id: FrontendId, life: ActorLife, reason: Option<&str>) {
        let name = format!("frontend/{node}");
        let report = ActorReport {
            name: name.clone(),
            kind: "frontend".to_owned(),
            generation: u64::from(id.0),
            life,
            restarts: 0,
            max_restarts: None,
            reason: reason.map(str::to_owned),
        };
        if let Err(error) = self.actors.report(node, report) {
            tracing::debug!(%error, name, "not among the actors");
        }
        if life == ActorLife::Dead {
            self.actors.forget(&name);
        }
    }

    /// Returns whether this was its present link.
    fn left(
        &self,
        id: FrontendId,
        incarnation: Incarnation,
        link_number: u64,
        reason: &str,
    ) -> bool {
        tracing::info!(frontend = %id, %reason, "the front end is gone");
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // An old link of the same process may end after its next one began.
        let ended = slots.left(self.clock.now(), id, |link| link.number == link_number);
        drop(slots);
        if !ended {
            return false;
        }
        self.hub.lost(Source::Frontend(id), incarnation);
        self.hub.observer().record().frontend_down(id, self.clock.now());
        true
    }

    fn report(&self, id: FrontendId, incarnation: Incarnation, stats: &WorkerStats) {
        match self.hub.report(Source::Frontend(id), incarnation, stats) {
            Ok(_) => {
                let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                self.hub.observer().record().frontend_reported(id, since_1970);
            }
            Err(refused) => tracing::warn!(frontend = %id, %refused, "stats report"),
        }
    }

    /// Makes the engine's request of a front end's. The front end has checked everything for its
    /// client already; this only keeps a broken one from harming the engine.
    fn request(&self, id: RequestId, submit: SubmitRequest) -> Result<GenerateRequest, String> {
        let max = self.serving.max_model_len;
        let vocab = self.text.vocab_size;
        if submit.prompt.is_empty() || submit.prompt.len() > max as usize {
            return Err(format!("a prompt of {} tokens; 1 to {max} fit", submit.prompt.len()));
        }
        let tokens = submit.prompt.iter().chain(&submit.end_tokens);
        if let Some(token) = tokens.copied().find(|token| *token >= vocab) {
            return Err(format!("token {token} is not below the vocabulary's {vocab}"));
        }
        let choices = self.limits.n;
        if submit.n == 0 || submit.n > choices || submit.max_tokens > max {
            return Err(format!(
                "n {} of 1 to {choices}, max_tokens {} of 0 to {max}",
                submit.n, submit.max_tokens
            ));
        }
        let (stops, stop_bytes) = (self.limits.stops, self.limits.stop_bytes);
        if submit.stops.len() > stops {
            return Err(format!("{} stop strings, at most {stops}", submit.stops.len()));
        }
        let fits = |stop: &&String| !(1..=stop_bytes).contains(&stop.len());
        if let Some(stop) = submit.stops.iter().find(fits) {
            return Err(format!("a stop string of {} bytes, 1 to {stop_bytes} fit", stop.len()));
        }
        if submit.end_tokens.len() > SUPPRESSED_MAX {
            let count = submit.end_tokens.len();
            return Err(format!("{count} end tokens, at most {SUPPRESSED_MAX}"));
        }
        if submit.response_id.len() > RESPONSE_ID_MAX {
            let len = submit.response_id.len();
            return Err(format!("a response id of {len} bytes, at most {RESPONSE_ID_MAX}"));
        }
        if let Some(spec) = &submit.guide {
            spec.check().map_err(|error| format!("what the output must be {error}"))?;
        }
        submit.sampling.check(vocab)?;
        let (n, max_tokens) = (submit.n, submit.max_tokens);
        if submit.sampling.pooling.is_some() && (n, max_tokens) != (1, 0) {
            return Err(format!(
                "an embedding with n {n} and max_tokens {max_tokens}, not 1 and 0"
            ));
        }
        let waited = Duration::from_micros(submit.waited_us);
        let stop_checks = self.stop_checks(&submit);
        let sampling = submit.sampling;
        Ok(GenerateRequest {
            id,
            prompt: submit.prompt,
            sampling: (0..submit.n)
                .map(|choice| shared::sampling::SamplingParams { choice, ..sampling.clone() })
                .collect(),
            stop_checks,
            guides: Vec::new(),
            guide_spec: submit.guide.map(Arc::new),
            max_tokens: submit.max_tokens,
            // Of one that does not know yet that priorities are not followed any more.
            priority: if self.serving.priorities { submit.priority } else { 0 },
            cache_salt: submit.cache_salt,
            end_tokens: submit.end_tokens,
            stops: submit.stops.into(),
            keep_special: submit.keep_special,
            arrived: self.clock.now().saturating_sub(waited),
            response_id: submit.response_id.into(),
        })
    }

    /// Hands a request to the engine.
    fn enter(&self, request: Box<GenerateRequest>, events: RemoteEvents) {
        let command = EngineCommand::Submit { request, events: EventSender::Remote(events) };
        if let Err(mpsc::error::TrySendError::Full(command)) = self.commands.try_send(command)
            && let EngineCommand::Submit { events, .. } = command
        {
            let max = crate::engine::COMMAND_QUEUE_MAX as u32;
            self.refuse(&events, EngineError::QueueFull { queued: max, max, retry_after_s: 1 });
        }
    }

    /// Tells a front end that one of its requests does not run.
    fn refuse(&self, events: &EventSender, error: EngineError) {
        let reason = crate::replica::driver::reject_reason(&error);
        self.hub.observer().record().rejected(reason);
        let _ = events.send(EngineEvent::Failed(error));
    }

    fn stop_checks(&self, submit: &SubmitRequest) -> Vec<Box<dyn StopCheck>> {
        if submit.stops.is_empty() {
            return Vec::new();
        }
        let rules = Arc::new(StopRules {
            stops: submit.stops.clone(),
            end_tokens: submit.end_tokens.clone(),
            min_tokens: submit.sampling.min_tokens,
            // Where text ends is the front end's business.
            include_stop: false,
            keep_special: submit.keep_special,
        });
        let stream = TextStream::new(self.text.tokenizer.clone(), rules);
        (0..submit.n).map(|_| Box::new(stream.clone()) as Box<dyn StopCheck>).collect()
    }
}

/// The receiving side of one front end's link.
struct Receiver {
    frontends: Arc<Frontends>,
    id: FrontendId,
    incarnation: Incarnation,
    /// Unique among all links there ever were, so that two front ends' request numbers differ.
    link_number: u64,
    queue: mpsc::Sender<(RequestId, EngineEvent)>,
    open: Arc<AtomicBool>,
    /// The link, as named actors know it.
    peer: PeerId,
    node: String,
    /// Its requests that a grammar is being made for.
    making: Making,
}

impl Receiver {
    /// Takes what the link has; false ends it.
    fn take(&self, event: LinkEvent) -> bool {
        match event {
            LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                self.frontends.actors.frame(self.peer, &frame.body)
            }
            LinkEvent::Frame(frame) => {
                match codec::decode_message::<FromFrontend>(&frame.body) {
                    Ok(message) => return self.message(message),
                    Err(error) => {
                        tracing::error!(frontend = %self.id, %error, "sent what cannot be read");
                    }
                }
                false
            }
            LinkEvent::Suspect | LinkEvent::Alive => true,
            LinkEvent::Closed { reason } => {
                self.open.store(false, Ordering::Release);
                let (frontends, number) = (&self.frontends, self.link_number);
                let reason = reason.to_string();
                frontends.actors.peer_lost(self.peer, &reason);
                if frontends.left(self.id, self.incarnation, number, &reason) {
                    frontends.name(&self.node, self.id, ActorLife::Dead, Some(&reason));
                }
                true
            }
        }
    }

    fn message(&self, message: FromFrontend) -> bool {
        match message {
            FromFrontend::Submit(submit) => self.submit(*submit),
            FromFrontend::Cancel(id) => {
                let Some(id) = self.global(id) else { return self.impossible(&over(id)) };
                if self.making.cancel(id) {
                    return true;
                }
                // A full channel is no loss: what is not cancelled runs to its end.
                let _ = self.frontends.commands.try_send(EngineCommand::Cancel { id });
                true
            }
            FromFrontend::Stats(stats) => {
                self.frontends.report(self.id, self.incarnation, &stats);
                true
            }
            FromFrontend::Goodbye { reason } => {
                tracing::info!(frontend = %self.id, %reason, "the front end says goodbye");
                self.frontends.hub.observer().record().frontend_leaves(self.id);
                true
            }
        }
    }

    /// The engine's number for a request of this link; `None` for one that would be another link's.
    fn global(&self, id: RequestId) -> Option<RequestId> {
        (id.0 >> LINK_SHIFT == 0).then_some(RequestId(self.link_number << LINK_SHIFT | id.0))
    }

    /// What no working front end sends ends its link.
    fn impossible(&self, reason: &str) -> bool {
        tracing::error!(frontend = %self.id, %reason, "sent an impossible request");
        false
    }

    fn submit(&self, submit: SubmitRequest) -> bool {
        let frontends = &self.frontends;
        let visit = frontends.gate.enter();
        let late = visit.is_none();
        let events = RemoteEvents(Arc::new(RemoteRequest {
            id: submit.id,
            queue: self.queue.clone(),
            open: self.open.clone(),
            choices_left: AtomicUsize::new(submit.n as usize),
            _visit: visit,
        }));
        if late {
            frontends.hub.observer().record().rejected(RejectReason::ShuttingDown);
            let _ = events.send(EngineEvent::Failed(EngineError::ShuttingDown));
            return true;
        }
        let request = match self.global(submit.id) {
            Some(id) => frontends.request(id, submit),
            None => Err(over(submit.id)),
        };
        let request = match request {
            Ok(request) => Box::new(request),
            Err(reason) => return self.impossible(&reason),
        };
        if request.guide_spec.is_some() {
            self.making.make(self.frontends.clone(), request, events);
        } else {
            frontends.enter(request, events);
        }
        true
    }
}

fn over(id: RequestId) -> String {
    format!("request number {} is not below 2^{LINK_SHIFT}", id.0)
}

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
async fn send_events(
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
async fn send_readiness(
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

#[cfg(test)]
mod tests;

//! A front end's link to the coordinator: requests out, events in, stats on a timer. When the link
//! ends it dials again, without end.
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shared::actor::exchange::PeerId;
use shared::actor::link::join::{JoinError, REDIAL_MAX, REDIAL_MIN, Unreached, join};
use shared::actor::link::{Connection, LinkEvent, SendError};
use shared::actor::liveness::LivenessConfig;
use shared::actor::peer::{Encoded, PeerAddr};
use shared::clock::{Clock, jittered};
use shared::host::HostThread;
use shared::ids::RequestId;
use shared::membership::Destination;
use shared::metrics::labels::RejectReason;
use shared::metrics::{SharedStats, encode_snapshot};
use shared::protocol::{
    EngineError, EngineEvent, FromFrontend, FrontendHello, FrontendWelcome, Serving, SubmitRequest,
    ToFrontend, WorkerStats,
};
use shared::wire::codec;
use shared::wire::frame::FrameKind;
use tokio::sync::{mpsc, oneshot};

use super::{FrontendError, FrontendOptions};
use crate::engine::{EngineCommand, EventSender, GenerateRequest, Reading};
use crate::http::gate::Gate;
use crate::http::state::{Readiness, ReadinessCheck};
use crate::metrics::FrontendStats;

/// Time limit for the last messages, to clients and to the coordinator.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Most frames of events received from the link and not yet delivered to their requests.
const INCOMING_MAX: usize = 1024;

/// A request that the coordinator is working on.
#[derive(Debug)]
struct Live {
    events: EventSender,
    reading: Reading,
    choices_left: usize,
}

/// The front end's side of the link; see the module's documentation.
#[derive(Debug)]
pub(super) struct Uplink {
    options: FrontendOptions,
    hello: FrontendHello,
    serving: Serving,
    clock: Arc<dyn Clock>,
    stats: FrontendStats,
    commands: mpsc::Receiver<EngineCommand>,
    readiness: Arc<Mutex<Readiness>>,
    process: SharedStats,
    gate: Gate,
    live: HashMap<RequestId, Live>,
    /// Requests whose clients are gone and whose cancellation has not been sent yet.
    gone: Vec<RequestId>,
    /// The link's number in the actor runtime.
    peer: Option<PeerId>,
    /// Number of dialling attempts.
    dialled: u64,
}

/// How serving over one link ended.
enum Served {
    /// The link ended, for this reason.
    Lost(String),
    /// This process was told to stop.
    Stopped,
}

impl Uplink {
    /// The link of a front end with these `options`. The HTTP side sends `commands` and counts in
    /// `stats`.
    pub(super) fn new(
        options: FrontendOptions,
        hello: FrontendHello,
        serving: Serving,
        clock: Arc<dyn Clock>,
        stats: FrontendStats,
        commands: mpsc::Receiver<EngineCommand>,
    ) -> Self {
        let readiness =
            Readiness { ready: false, message: "the coordinator has not said yet".to_owned() };
        Self {
            options,
            hello,
            serving,
            clock,
            stats,
            commands,
            readiness: Arc::new(Mutex::new(readiness)),
            process: SharedStats::default(),
            gate: Gate::default(),
            live: HashMap::new(),
            gone: Vec::new(),
            peer: None,
            dialled: 0,
        }
    }

    /// Sets the gate that the HTTP side's requests pass.
    pub(super) fn behind(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// A check whether requests can be served now.
    pub(super) fn readiness(&self) -> ReadinessCheck {
        let readiness = self.readiness.clone();
        Arc::new(move || readiness.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Serves until told to stop (`None`), or until it cannot go on (the error).
    pub(super) async fn run(
        mut self,
        mut to: Destination,
        mut connection: Connection,
        mut welcome: FrontendWelcome,
        mut stop: oneshot::Receiver<()>,
    ) -> Option<FrontendError> {
        loop {
            self.hello.slot = Some(welcome.frontend);
            tracing::info!(frontend = %welcome.frontend, coordinator = to.address, "joined");
            let served = self.serve(&to, connection, &welcome, &mut stop).await;
            if let Some(peer) = self.peer.take() {
                self.options.actors.peer_lost(peer, "the link ended");
            }
            match served {
                Served::Stopped => return None,
                Served::Lost(reason) => {
                    tracing::warn!(%reason, "the link to the coordinator ended; dialling again");
                    self.fail_all(&reason);
                }
            }
            (to, connection, welcome) = tokio::select! {
                joined = self.dial(to) => match joined {
                    Ok(joined) => joined,
                    Err(error) => return Some(error),
                },
                _ = &mut stop => return None,
            };
            if !welcome.serving.is_same(&self.serving) {
                return Some(FrontendError::OtherModel(welcome.serving.served_model_name));
            }
        }
    }

    async fn serve(
        &mut self,
        to: &Destination,
        connection: Connection,
        welcome: &FrontendWelcome,
        stop: &mut oneshot::Receiver<()>,
    ) -> Served {
        let (name, nvml) = (welcome.frontend.to_string(), self.options.nvml.clone());
        let _host = HostThread::start(&name, nvml, self.process.clone());
        let (incoming, mut events) = mpsc::channel(INCOMING_MAX);
        let actors = self.options.actors.clone();
        let link = connection.start_with(LivenessConfig::default(), self.clock.clone(), |link| {
            let peer = actors.peer_up("the coordinator", link.clone());
            self.peer = Some(peer);
            move |event| match event {
                // Handled at once: messages between actors do not queue behind events.
                LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                    actors.frame(peer, &frame.body)
                }
                event => incoming.try_send(event).is_ok(),
            }
        });
        let link: PeerAddr<FromFrontend> = PeerAddr::new(link);
        let interval = Duration::from_millis(welcome.stats_interval_ms.clamp(10, 60_000));
        let mut timer = tokio::time::interval(interval);
        let mut address = self.options.coordinator.clone();
        let superseded = address.other(Some(to));
        tokio::pin!(superseded);
        // The message that the link has no room for yet. Until it is sent, no other is made, but
        // everything else goes on.
        let mut held: Option<Encoded> = None;
        loop {
            if held.is_none()
                && let Some(id) = self.gone.pop()
            {
                match Encoded::new(&FromFrontend::Cancel(id)) {
                    Ok(message) => held = Some(message),
                    Err(error) => return Served::Lost(error.to_string()),
                }
            }
            let next = tokio::select! {
                event = events.recv() => match event {
                    Some(LinkEvent::Frame(frame)) => {
                        match codec::decode_message::<ToFrontend>(&frame.body) {
                            Ok(message) => self.take(message),
                            Err(error) => return Served::Lost(error.to_string()),
                        }
                        continue;
                    }
                    Some(LinkEvent::Suspect | LinkEvent::Alive) => continue,
                    Some(LinkEvent::Closed { reason }) => {
                        return Served::Lost(reason.to_string());
                    }
                    // The channel was too full even for `Closed`: this side was too slow.
                    None => return Served::Lost("events came faster than they were taken".into()),
                },
                now = &mut superseded => {
                    return Served::Lost(format!("{} leads now", now.address));
                }
                sent = send(&link, held.as_ref()), if held.is_some() => {
                    held = None;
                    match sent {
                        // A closed link also reports its end as an event.
                        Ok(()) | Err(SendError::Closed) => continue,
                        Err(error) => return Served::Lost(error.to_string()),
                    }
                }
                Some(command) = self.commands.recv(), if held.is_none() => self.message(command),
                _ = timer.tick(), if held.is_none() => {
                    self.find_gone();
                    self.report()
                }
                _ = &mut *stop => {
                    self.end_all(&EngineError::ShuttingDown);
                    // So that the last report counts how these requests ended.
                    self.gate.empty_within(LAST_WORDS).await;
                    let reason = "the front end stops".to_owned();
                    let last = [self.report(), Some(FromFrontend::Goodbye { reason })];
                    let last_words = async {
                        for message in last.iter().flatten() {
                            let _ = link.tell_when_room(message).await;
                        }
                    };
                    let _ = tokio::time::timeout(LAST_WORDS, last_words).await;
                    return Served::Stopped;
                }
            };
            match next.as_ref().map(Encoded::new) {
                Some(Ok(message)) => held = Some(message),
                Some(Err(error)) => return Served::Lost(error.to_string()),
                None => {}
            }
        }
    }

    /// Dials until the coordinator answers; rejects requests meanwhile.
    async fn dial(
        &mut self,
        mut to: Destination,
    ) -> Result<(Destination, Connection, FrontendWelcome), FrontendError> {
        let (mut wait, mut unreached) = (REDIAL_MIN, Unreached::default());
        loop {
            self.dialled += 1;
            let pause = jittered(wait, self.options.run, self.dialled);
            let mut address = self.options.coordinator.clone();
            let (last, hello) = (to.clone(), self.hello.clone());
            let secret = self.options.secret.clone();
            let attempt = async move {
                // If another coordinator leads, dial it at once.
                let other = tokio::time::timeout(pause, address.other(Some(&last))).await;
                let to = other.unwrap_or(last);
                let joined = tokio::select! {
                    joined = join(&to.address, secret.as_ref(), FrameKind::FrontendHello, &hello) => joined,
                    _ = address.other(Some(&to)) => {
                        Err(JoinError::Retry("another coordinator leads".to_owned()))
                    }
                };
                (to, joined)
            };
            tokio::pin!(attempt);
            let (dialled, joined) = loop {
                tokio::select! {
                    done = &mut attempt => break done,
                    Some(command) = self.commands.recv() => self.refuse(command),
                }
            };
            if dialled != to {
                // A new leader may not listen yet, but will in a moment.
                wait = REDIAL_MIN;
            }
            to = dialled;
            match joined {
                Ok((connection, welcome)) => return Ok((to, connection, welcome)),
                Err(JoinError::Refused(reason)) => return Err(FrontendError::Refused(reason)),
                Err(JoinError::Retry(reason)) => {
                    if let Some(seconds) = unreached.failed(self.clock.now()) {
                        let coordinator = to.address.as_str();
                        tracing::warn!(coordinator, %reason, seconds, "cannot join yet; dialling until it answers");
                    }
                }
            }
            wait = (wait * 2).min(REDIAL_MAX);
        }
    }

    /// The message to the coordinator for a command.
    fn message(&mut self, command: EngineCommand) -> Option<FromFrontend> {
        Some(match command {
            EngineCommand::Submit { request, events } => {
                let choices_left = request.sampling.len();
                let id = request.id;
                let submit = submit(*request, self.clock.now())?;
                let reading = Reading::new(self.clock.now());
                self.live.insert(id, Live { events, reading, choices_left });
                FromFrontend::Submit(Box::new(submit))
            }
            EngineCommand::Cancel { id } => {
                self.live.remove(&id);
                FromFrontend::Cancel(id)
            }
        })
    }

    fn report(&mut self) -> Option<FromFrontend> {
        let (sequence, mut snapshot) = self.stats.report();
        snapshot.add(self.process.snapshot());
        snapshot.add(self.options.actors.stats().snapshot());
        snapshot.application = self.options.application.snapshot();
        match encode_snapshot(&snapshot) {
            Ok(snapshot) => Some(FromFrontend::Stats(WorkerStats { sequence, snapshot })),
            Err(error) => {
                tracing::error!(%error, "stats cannot be reported");
                None
            }
        }
    }

    fn take(&mut self, message: ToFrontend) {
        match message {
            ToFrontend::Readiness { ready, message } => self.set_readiness(ready, message),
            ToFrontend::Events(events) => {
                for (id, event) in events {
                    self.deliver(id, event);
                }
            }
        }
    }

    fn deliver(&mut self, id: RequestId, event: EngineEvent) {
        // Events of a request that has since been cancelled may still arrive.
        let Some(live) = self.live.get_mut(&id) else { return };
        match event {
            EngineEvent::Failed(_) => live.choices_left = 0,
            EngineEvent::Finished { .. } => live.choices_left = live.choices_left.saturating_sub(1),
            EngineEvent::Token { .. }
            | EngineEvent::PromptLogprobs(_)
            | EngineEvent::Embedding(_) => {}
        }
        let done = live.choices_left == 0;
        // The HTTP side cancels the request of a client that left, but only if the command queue
        // had room.
        let is_gone = live.events.send(event).is_err();
        live.reading.sent();
        if done || is_gone {
            self.live.remove(&id);
        }
        if is_gone && !done {
            self.gone.push(id);
        }
    }

    /// Finds requests whose clients are gone while no events arrive, or have long stopped reading.
    fn find_gone(&mut self) {
        let now = self.clock.now();
        let gone = |(id, live): (&RequestId, &mut Live)| {
            let waiting = live.events.waiting();
            (live.events.is_closed() || live.reading.is_stuck(now, waiting)).then_some(*id)
        };
        let ids: Vec<RequestId> = self.live.iter_mut().filter_map(gone).collect();
        for id in ids {
            self.live.remove(&id);
            self.gone.push(id);
        }
    }

    fn set_readiness(&self, ready: bool, message: String) {
        let mut readiness = self.readiness.lock().unwrap_or_else(PoisonError::into_inner);
        *readiness = Readiness { ready, message };
    }

    /// With the link, the coordinator has dropped its side of every request.
    fn fail_all(&mut self, reason: &str) {
        let message = format!("the link to the coordinator ended: {reason}");
        self.set_readiness(false, message.clone());
        self.end_all(&EngineError::Unavailable { message });
    }

    fn end_all(&mut self, error: &EngineError) {
        self.gone.clear();
        for (_, live) in self.live.drain() {
            let _ = live.events.send(EngineEvent::Failed(error.clone()));
        }
    }

    fn refuse(&self, command: EngineCommand) {
        if let EngineCommand::Submit { events, .. } = command {
            self.stats.rejected(RejectReason::Unavailable);
            let message = "there is no link to the coordinator".to_owned();
            let _ = events.send(EngineEvent::Failed(EngineError::Unavailable { message }));
        }
    }
}

/// Sends the held message as soon as the link has room.
async fn send(link: &PeerAddr<FromFrontend>, held: Option<&Encoded>) -> Result<(), SendError> {
    match held {
        Some(message) => link.tell_encoded_when_room(message).await,
        None => Ok(()),
    }
}

/// The request in wire form; `None` for one without choices, which does not occur.
fn submit(request: GenerateRequest, now: Duration) -> Option<SubmitRequest> {
    let n = u32::try_from(request.sampling.len()).ok()?;
    let waited = now.saturating_sub(request.arrived);
    Some(SubmitRequest {
        id: request.id,
        prompt: request.prompt,
        sampling: request.sampling.into_iter().next()?,
        n,
        stops: request.stops.to_vec(),
        keep_special: request.keep_special,
        goes_on: request.goes_on,
        guide: request.guide_spec.map(Arc::unwrap_or_clone),
        max_tokens: request.max_tokens,
        open_ended: request.open_ended,
        priority: request.priority,
        cache_salt: request.cache_salt,
        adapter: request.adapter,
        end_tokens: request.end_tokens,
        waited_us: u64::try_from(waited.as_micros()).unwrap_or(u64::MAX),
        response_id: request.response_id.as_ref().to_owned(),
    })
}

#[cfg(test)]
mod tests;

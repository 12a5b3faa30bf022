//! A front end's link to the coordinator: requests out, events in, stats on a timer. When the link
//! ends it dials again, without end; requests whose answers have not begun wait for the next one
//! ([`super::held`]).
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

use super::held::{HELD_FOR, Held, HeldRequest};
use super::{FrontendError, FrontendOptions};
use crate::engine::{EngineCommand, EventSender, GenerateRequest, Reading};
use crate::http::gate::Gate;
use crate::http::state::{Readiness, ReadinessCheck};
use crate::metrics::FrontendStats;

/// Time limit for the last messages, to clients and to the coordinator.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How often a request may lose its coordinator before it is not sent again.
const LOST_MAX: u32 = 2;
/// How often requests are looked at that wait while there is no link.
const LOOK: Duration = Duration::from_millis(250);
/// Most frames of events received from the link and not yet delivered to their requests.
const INCOMING_MAX: usize = 1024;

/// A request that the coordinator is working on.
#[derive(Debug)]
struct Live {
    events: EventSender,
    reading: Reading,
    choices_left: usize,
    /// The request itself, until its first event: it can be sent again.
    unanswered: Option<Unanswered>,
}

#[derive(Debug)]
struct Unanswered {
    submit: Box<SubmitRequest>,
    arrived: Duration,
    lost: u32,
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
    /// Requests that wait for a coordinator which can take them.
    held: Held,
    /// Since when new requests are held, too, though there is a link: until a replica serves.
    unsettled_since: Option<Duration>,
    /// The coordinator refuses requests, because it is told to end.
    is_leaving: bool,
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
            held: Held::default(),
            unsettled_since: None,
            is_leaving: false,
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
                    self.link_lost(&reason);
                }
            }
            (to, connection, welcome) = tokio::select! {
                joined = self.dial(to) => match joined {
                    Ok(joined) => joined,
                    Err(error) => {
                        self.end_all(&EngineError::Unavailable { message: error.to_string() });
                        return Some(error);
                    }
                },
                _ = &mut stop => {
                    self.end_all(&EngineError::ShuttingDown);
                    return None;
                }
            };
            if !welcome.serving.is_same(&self.serving) {
                let error = FrontendError::OtherModel(welcome.serving.served_model_name);
                self.end_all(&EngineError::Unavailable { message: error.to_string() });
                return Some(error);
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
        self.is_leaving = false;
        // A coordinator that has just begun to lead has no replica yet.
        self.unsettled_since = (self.dialled > 0).then(|| self.clock.now());
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
            if held.is_none()
                && !self.is_holding()
                && let Some(request) = self.held.pop()
            {
                let HeldRequest { submit, events, arrived, lost, .. } = request;
                if !events.is_closed() {
                    match Encoded::new(&self.submitted(submit, events, (arrived, lost))) {
                        Ok(message) => held = Some(message),
                        Err(error) => return Served::Lost(error.to_string()),
                    }
                }
                continue;
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
                    self.give_up_held();
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

    /// Dials until the coordinator answers; holds requests meanwhile.
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
                    Some(command) = self.commands.recv() => self.hold_command(command),
                    () = tokio::time::sleep(LOOK) => self.give_up_held(),
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

    /// The message to the coordinator for a command, if there is one to be sent now.
    fn message(&mut self, command: EngineCommand) -> Option<FromFrontend> {
        match command {
            command @ EngineCommand::Submit { .. } if self.is_holding() => {
                self.hold_command(command);
                None
            }
            EngineCommand::Submit { request, events } => {
                let arrived = request.arrived;
                Some(self.submitted(Box::new(submit(*request)?), events, (arrived, 0)))
            }
            EngineCommand::Cancel { id } => {
                // One that is held is dropped when its events are found to be closed.
                self.live.remove(&id)?;
                Some(FromFrontend::Cancel(id))
            }
        }
    }

    /// A request is sent, from now on it is live.
    fn submitted(
        &mut self,
        mut submit: Box<SubmitRequest>,
        events: EventSender,
        (arrived, lost): (Duration, u32),
    ) -> FromFrontend {
        let now = self.clock.now();
        let waited = now.saturating_sub(arrived);
        submit.waited_us = u64::try_from(waited.as_micros()).unwrap_or(u64::MAX);
        let (id, choices_left) = (submit.id, submit.n as usize);
        let unanswered = Some(Unanswered { submit: submit.clone(), arrived, lost });
        let reading = Reading::new(now);
        self.live.insert(id, Live { events, reading, choices_left, unanswered });
        FromFrontend::Submit(submit)
    }

    /// Whether requests are kept back from the coordinator that is linked.
    fn is_holding(&self) -> bool {
        let waits = |since| self.clock.now().saturating_sub(since) < HELD_FOR;
        self.is_leaving || self.unsettled_since.is_some_and(waits)
    }

    fn hold_command(&mut self, command: EngineCommand) {
        let EngineCommand::Submit { request, events } = command else { return };
        let arrived = request.arrived;
        let Some(submit) = submit(*request) else { return };
        let message = "there is no coordinator that takes requests".to_owned();
        let (submit, error) = (Box::new(submit), EngineError::Unavailable { message });
        let since = self.clock.now();
        self.hold(HeldRequest { submit, events, arrived, since, lost: 0, error });
    }

    fn hold(&mut self, request: HeldRequest) {
        if let Err(request) = self.held.push(request) {
            self.refuse(request);
        }
    }

    /// Tells clients that have waited for too long.
    fn give_up_held(&mut self) {
        for request in self.held.expired(self.clock.now()) {
            self.refuse(request);
        }
    }

    fn refuse(&self, HeldRequest { events, error, .. }: HeldRequest) {
        self.stats.rejected(match error {
            EngineError::ShuttingDown => RejectReason::ShuttingDown,
            _ => RejectReason::Unavailable,
        });
        let _ = events.send(EngineEvent::Failed(error));
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
            ToFrontend::Readiness { ready, message } => {
                if ready {
                    self.unsettled_since = None;
                }
                self.set_readiness(ready, message);
            }
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
        let unanswered = live.unanswered.take();
        if matches!(event, EngineEvent::Failed(EngineError::ShuttingDown))
            && let Some(Unanswered { submit, arrived, lost }) = unanswered
        {
            // Whoever leads next takes it.
            self.is_leaving = true;
            if let Some(Live { events, .. }) = self.live.remove(&id) {
                let (since, error) = (self.clock.now(), EngineError::ShuttingDown);
                self.hold(HeldRequest { submit, events, arrived, since, lost, error });
            }
            return;
        }
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

    /// With the link, the coordinator has dropped its side of every request. Those whose answers
    /// have not begun go to the next one.
    fn link_lost(&mut self, reason: &str) {
        let message = format!("the link to the coordinator ended: {reason}");
        self.set_readiness(false, message.clone());
        self.gone.clear();
        let error = EngineError::Unavailable { message };
        let mut lost: Vec<(RequestId, Live)> = self.live.drain().collect();
        lost.sort_unstable_by_key(|(id, _)| *id);
        for (_, Live { events, unanswered, .. }) in lost {
            match unanswered {
                Some(Unanswered { submit, arrived, lost }) if lost < LOST_MAX => {
                    let (since, lost, error) = (self.clock.now(), lost + 1, error.clone());
                    self.hold(HeldRequest { submit, events, arrived, since, lost, error });
                }
                _ => {
                    let _ = events.send(EngineEvent::Failed(error.clone()));
                }
            }
        }
    }

    fn end_all(&mut self, error: &EngineError) {
        self.gone.clear();
        for (_, live) in self.live.drain() {
            let _ = live.events.send(EngineEvent::Failed(error.clone()));
        }
        while let Some(request) = self.held.pop() {
            self.refuse(HeldRequest { error: error.clone(), ..request });
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

/// The request in wire form; `None` for one without choices, which does not occur. How long it has
/// waited is said when it is sent.
fn submit(request: GenerateRequest) -> Option<SubmitRequest> {
    let n = u32::try_from(request.sampling.len()).ok()?;
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
        waited_us: 0,
        response_id: request.response_id.as_ref().to_owned(),
        accepted: Vec::new(),
    })
}

#[cfg(test)]
mod tests;

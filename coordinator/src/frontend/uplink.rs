//! A front end's link to the coordinator: requests out, events in, stats on a timer. When the link
//! ends, it dials again, forever; requests wait for the next link and continue there
//! ([`super::requests`]).
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shared::actor::exchange::PeerId;
use shared::actor::link::{LinkEvent, SendError};
use shared::actor::liveness::LivenessConfig;
use shared::actor::peer::{Encoded, PeerAddr};
use shared::clock::Clock;
use shared::membership::{CoordinatorAddress, Destination};
use shared::metrics::encode_report;
use shared::protocol::{
    EngineError, FromFrontend, FrontendHello, Serving, ToFrontend, WorkerStats,
};
use shared::wire::codec;
use shared::wire::frame::FrameKind;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};

use super::adapters::Adapting;
use super::dial::{Dialler, JoinedLink};
use super::held::{HELD_FOR, Outage};
use super::incoming;
use super::requests::{LinkNumber, Requests, no_coordinator};
use super::usage::ProcessUsage;
use super::{FrontendError, FrontendOptions};
use crate::adapters::{AdapterAsk, AdapterChanges, ServedAdapters};
use crate::engine::EngineCommand;
use crate::http::gate::Gate;
use crate::http::state::{Readiness, ReadinessCheck};
use crate::metrics::FrontendStats;

/// Time limit for the last messages, to clients and to the coordinator.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long requests are held without a link if there is only one coordinator: longer than its
/// restart takes. No other takes over, so there is nothing more to wait for.
const HELD_FOR_THE_ONE: Duration = Duration::from_secs(15);
/// Interval at which held requests are checked while there is no link.
const LOOK: Duration = Duration::from_millis(250);

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
    process: ProcessUsage,
    gate: Gate,
    requests: Requests,
    adapting: Adapting,
    /// Whether a report of stats is due.
    report_is_due: bool,
    /// The link's number in the actor runtime.
    peer: Option<PeerId>,
    dialler: Dialler,
}

/// How serving over one link ended.
enum LinkEnd {
    /// The link ended, with the reason.
    Lost(String),
    /// This process was told to stop.
    Stopped,
}

impl Uplink {
    /// Makes the link of a front end with these `options`. The HTTP side sends `commands` and
    /// counts in `stats`.
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
        let dialler = Dialler::new(&options, clock.clone());
        let nvml = options.nvml.clone();
        Self {
            options,
            hello,
            serving,
            clock,
            requests: Requests::new(stats.clone()),
            stats,
            commands,
            readiness: Arc::new(Mutex::new(readiness)),
            process: ProcessUsage::new(nvml),
            gate: Gate::default(),
            adapting: Adapting::new(ServedAdapters::default(), AdapterChanges::channel().1),
            report_is_due: false,
            peer: None,
            dialler,
        }
    }

    /// Sets the gate that the HTTP side's requests pass.
    pub(super) fn behind(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// Keeps this list of adapters up to date, and passes commands about them on.
    pub(super) fn adapting(self, served: ServedAdapters, asks: mpsc::Receiver<AdapterAsk>) -> Self {
        Self { adapting: Adapting::new(served, asks), ..self }
    }

    /// Returns a check whether requests can be served now.
    pub(super) fn readiness(&self) -> ReadinessCheck {
        let readiness = self.readiness.clone();
        Arc::new(move || readiness.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Serves until told to stop (`None`), or until it cannot continue (the error).
    pub(super) async fn run(
        mut self,
        mut joined: JoinedLink,
        mut stop: oneshot::Receiver<()>,
    ) -> Option<FrontendError> {
        let mut again = false;
        loop {
            let welcome = &joined.2;
            self.hello.slot = Some(welcome.frontend);
            self.adapting.serve(&welcome.serving.adapters);
            tracing::info!(frontend = %welcome.frontend, coordinator = joined.0.address, "joined");
            let to = joined.0.clone();
            let link = self.requests.linked(self.clock.now(), again);
            let served = self.serve(joined, link, &mut stop).await;
            if let Some(peer) = self.peer.take() {
                self.options.actors.peer_lost(peer, "the link ended");
            }
            match served {
                LinkEnd::Stopped => return None,
                LinkEnd::Lost(reason) => {
                    tracing::warn!(%reason, "the link to the coordinator ended; dialling again");
                    self.set_readiness(false, self.waiting(&reason));
                    self.requests.link_lost(self.clock.now());
                    self.adapting.link_lost();
                }
            }
            (joined, again) = tokio::select! {
                joined = self.dial(to) => match joined {
                    Ok(joined) => (joined, true),
                    Err(error) => {
                        self.requests.end_all(&no_coordinator());
                        return Some(error);
                    }
                },
                _ = &mut stop => {
                    self.requests.end_all(&EngineError::ShuttingDown);
                    return None;
                }
            };
            let serving = &joined.2.serving;
            if let Some(difference) = self.serving.difference(serving) {
                let error = FrontendError::OtherModel(difference);
                self.requests.end_all(&no_coordinator());
                return Some(error);
            }
        }
    }

    async fn serve(
        &mut self,
        (to, connection, welcome): JoinedLink,
        number: LinkNumber,
        stop: &mut oneshot::Receiver<()>,
    ) -> LinkEnd {
        self.process.sample_as(welcome.frontend);
        // First of all: a coordinator without the last one's totals counts from this report on.
        self.report_is_due = true;
        let (incoming, mut events) = incoming::queue();
        let actors = self.options.actors.clone();
        let link = connection.start_with(LivenessConfig::default(), self.clock.clone(), |link| {
            let peer = actors.peer_up("the coordinator", link.clone());
            self.peer = Some(peer);
            move |event| match event {
                // Handled at once: messages between actors do not queue behind events.
                LinkEvent::Frame(frame) if frame.kind == FrameKind::Actor => {
                    actors.frame(peer, &frame.body)
                }
                event => incoming.put(event),
            }
        });
        let link: PeerAddr<FromFrontend> = PeerAddr::new(link);
        let every = Duration::from_millis(welcome.stats_interval_ms.clamp(10, 60_000));
        let mut timer = interval(every);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut address = self.options.coordinator.clone();
        let superseded = address.other(Some(&to));
        tokio::pin!(superseded);
        // A message that the link has no room for yet. Until it is sent, no other is made;
        // everything else continues.
        let mut waiting: Option<Encoded> = None;
        loop {
            if waiting.is_none() {
                waiting = match self.next_message().as_ref().map(Encoded::new).transpose() {
                    Ok(next) => next,
                    Err(error) => return LinkEnd::Lost(error.to_string()),
                };
            }
            // While the link is behind, commands wait in their own queue, whose bound clients are
            // told of, unless older requests are held here.
            let takes = waiting.is_none() || self.requests.has_held();
            tokio::select! {
                event = events.next() => {
                    if let Err(reason) = self.take(number, event) {
                        return LinkEnd::Lost(reason);
                    }
                }
                now = &mut superseded => {
                    return LinkEnd::Lost(format!("{} leads now", now.address));
                }
                sent = send(&link, waiting.as_ref()), if waiting.is_some() => {
                    waiting = None;
                    match sent {
                        // A closed link also reports its end as an event.
                        Ok(()) | Err(SendError::Closed) => {}
                        Err(error) => return LinkEnd::Lost(error.to_string()),
                    }
                }
                Some(command) = self.commands.recv(), if takes => {
                    self.requests.command(self.clock.now(), command);
                }
                ask = self.adapting.ask() => self.adapting.take(ask),
                _ = timer.tick() => {
                    let now = self.clock.now();
                    self.requests.find_gone(now);
                    self.requests.give_up(now, None);
                    self.report_is_due = true;
                }
                _ = &mut *stop => {
                    self.say_goodbye(&link).await;
                    return LinkEnd::Stopped;
                }
            }
        }
    }

    /// Returns the next message to the coordinator, if there is one.
    fn next_message(&mut self) -> Option<FromFrontend> {
        if std::mem::take(&mut self.report_is_due)
            && let Some(report) = self.report()
        {
            return Some(report);
        }
        self.adapting.next_message().or_else(|| self.requests.next(self.clock.now()))
    }

    /// Ends all requests and leaves.
    async fn say_goodbye(&mut self, link: &PeerAddr<FromFrontend>) {
        self.requests.end_all(&EngineError::ShuttingDown);
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
    }

    /// How long requests are held while there is no link.
    fn held_for(&self) -> Duration {
        match self.options.coordinator {
            CoordinatorAddress::Fixed(_) => HELD_FOR_THE_ONE,
            CoordinatorAddress::Followed(_) => HELD_FOR,
        }
    }

    /// The message of `/ready` while there is no link.
    fn waiting(&self, reason: &str) -> String {
        let seconds = self.held_for().as_secs();
        let next = match self.options.coordinator {
            CoordinatorAddress::Fixed(_) => "it",
            CoordinatorAddress::Followed(_) => "the one that leads next",
        };
        format!(
            "the link to the coordinator ended: {reason}; requests wait for {next}, \
             up to {seconds} s"
        )
    }

    /// Dials until a coordinator answers, holding requests meanwhile.
    async fn dial(&mut self, last: Destination) -> Result<JoinedLink, FrontendError> {
        let outage = Some(Outage { since: self.clock.now(), held_for: self.held_for() });
        let Self { dialler, requests, commands, clock, hello, .. } = self;
        let joined = dialler.dial(hello, Some(last));
        tokio::pin!(joined);
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                joined = &mut joined => return joined,
                Some(command) = commands.recv() => requests.command(clock.now(), command),
                _ = look.tick() => requests.give_up(clock.now(), outage),
            }
        }
    }

    fn report(&mut self) -> Option<FromFrontend> {
        let (sequence, mut snapshot) = self.stats.report();
        snapshot.add(self.process.snapshot());
        snapshot.add(self.options.actors.stats().snapshot());
        let encoded = encode_report(snapshot, &self.options.application);
        if let Some(line) = self.options.application.take_warning() {
            tracing::warn!("{line}");
        }
        match encoded {
            Ok(snapshot) => Some(FromFrontend::Stats(WorkerStats { sequence, snapshot })),
            Err(error) => {
                tracing::error!(%error, "stats cannot be reported");
                None
            }
        }
    }

    /// Handles an event of the link; the error says why the link is over.
    fn take(&mut self, number: LinkNumber, event: Option<LinkEvent>) -> Result<(), String> {
        let frame = match event {
            Some(LinkEvent::Frame(frame)) => frame,
            Some(LinkEvent::Suspect | LinkEvent::Alive) => return Ok(()),
            Some(LinkEvent::Closed { reason }) => return Err(reason.to_string()),
            None => return Err("it ended without a reason".to_owned()),
        };
        let message = codec::decode_message::<ToFrontend>(&frame.body);
        match message.map_err(|error| error.to_string())? {
            ToFrontend::Readiness { ready, message } => {
                if ready {
                    self.requests.replica_serves();
                }
                self.set_readiness(ready, message);
            }
            ToFrontend::Adapters(adapters) => self.adapting.serve(&adapters),
            ToFrontend::AdapterChanged(ask, outcome) => self.adapting.changed(ask, outcome),
            ToFrontend::Events(events) => {
                let now = self.clock.now();
                for (id, event) in events {
                    self.requests.deliver(now, number, id, event);
                }
            }
        }
        Ok(())
    }

    fn set_readiness(&self, ready: bool, message: String) {
        let mut readiness = self.readiness.lock().unwrap_or_else(PoisonError::into_inner);
        *readiness = Readiness { ready, message };
    }
}

/// Sends the waiting message as soon as the link has room.
async fn send(link: &PeerAddr<FromFrontend>, held: Option<&Encoded>) -> Result<(), SendError> {
    match held {
        Some(message) => link.tell_encoded_when_room(message).await,
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;

//! PURE: the requests of a front end, from arrival until their clients have everything: held while
//! no coordinator can take them, live while one has them, held again when it is lost, and sent
//! again with what was accepted so far.
//!
//! Events, commands and the time go in, messages come out; it has no socket and no clock.
use std::collections::HashMap;
use std::time::Duration;

use shared::ids::RequestId;
use shared::metrics::labels::{ExpiryReason, RejectReason};
use shared::protocol::{EngineError, EngineEvent, FromFrontend, RequestNote};

use super::held::{HELD_FOR, HeldRequest, HeldRequests, Outage, TOKENS_MAX};
use super::open_request::OpenRequest;
use crate::engine::{EngineCommand, EventSender, ReaderProgress};
use crate::metrics::FrontendStats;

/// How often a request may lose its coordinator before it is not sent again: a request that is
/// there every time may be the cause.
const LOST_MAX: u32 = 2;

/// What clients are told when nobody goes on with their requests. Why not, with addresses and the
/// operating system's words, is for the log and `/ready`.
pub(super) fn no_coordinator() -> EngineError {
    EngineError::Unavailable { message: "no coordinator went on with this request".to_owned() }
}

/// A request that the coordinator is working on.
#[derive(Debug)]
struct RunningRequest {
    open_request: OpenRequest,
    events: EventSender,
    reading: ReaderProgress,
}

/// Number of a link; links to coordinators are numbered one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LinkNumber(u64);

/// The requests of a front end; see the module's documentation.
#[derive(Debug)]
pub(super) struct Requests {
    stats: FrontendStats,
    live: HashMap<RequestId, RunningRequest>,
    /// Tokens of live requests that are kept for sending again.
    live_tokens: usize,
    /// Maximum of `live_tokens`.
    live_tokens_max: usize,
    /// Requests whose clients are gone and whose cancellation has not been sent yet.
    gone: Vec<RequestId>,
    /// Requests to be sent.
    held: HeldRequests,
    /// Since when requests are held although there is a link: until a replica serves.
    unsettled_since: Option<Duration>,
    /// Whether the coordinator refuses requests because it was told to end.
    is_leaving: bool,
    link: LinkNumber,
}

impl Requests {
    /// Starts with no requests; refusals are counted in `stats`.
    pub(super) fn new(stats: FrontendStats) -> Self {
        Self {
            stats,
            live: HashMap::new(),
            live_tokens: 0,
            live_tokens_max: TOKENS_MAX,
            gone: Vec::new(),
            held: HeldRequests::default(),
            unsettled_since: None,
            is_leaving: false,
            link: LinkNumber::default(),
        }
    }

    /// There is a link, for the first time or `again`. Returns its number, which its events carry.
    pub(super) fn linked(&mut self, now: Duration, again: bool) -> LinkNumber {
        self.is_leaving = false;
        // A coordinator that has just begun to lead has no replica yet.
        self.unsettled_since = again.then_some(now);
        self.link.0 += 1;
        self.link
    }

    /// A replica serves.
    pub(super) fn replica_serves(&mut self) {
        self.unsettled_since = None;
    }

    /// Handles a command of the HTTP side.
    pub(super) fn command(&mut self, now: Duration, command: EngineCommand) {
        match command {
            EngineCommand::Submit { request, events } => {
                let Some(open_request) = OpenRequest::new(*request) else { return };
                let message = "no coordinator accepts requests".to_owned();
                let error = EngineError::Unavailable { message };
                self.hold(HeldRequest { open_request, events, since: now, error });
            }
            EngineCommand::Cancel { id } => match self.forget(id) {
                Some(_) => self.gone.push(id),
                None => self.held.remove(id),
            },
        }
    }

    /// Returns the next message to the coordinator, if one can be sent now.
    pub(super) fn next(&mut self, now: Duration) -> Option<FromFrontend> {
        if let Some(id) = self.gone.pop() {
            return Some(FromFrontend::Cancel(id));
        }
        while !self.is_holding(now) {
            let HeldRequest { mut open_request, events, .. } = self.held.pop()?;
            if events.is_closed() {
                continue;
            }
            let message = FromFrontend::Submit(open_request.message(now));
            if self.live_tokens.saturating_add(open_request.weight()) > self.live_tokens_max {
                open_request.free_tokens();
            }
            self.live_tokens += open_request.weight();
            // The client may not have read an earlier coordinator's events yet.
            let reading = ReaderProgress::behind(now, events.waiting());
            let live = RunningRequest { open_request, events, reading };
            self.live.insert(live.open_request.id(), live);
            return Some(message);
        }
        None
    }

    /// Whether requests wait to be sent.
    pub(super) fn has_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether requests are withheld from the linked coordinator.
    fn is_holding(&self, now: Duration) -> bool {
        let waits = |since| now.saturating_sub(since) < HELD_FOR;
        self.is_leaving || self.unsettled_since.is_some_and(waits)
    }

    /// Passes an event of a link on to its client.
    pub(super) fn deliver(
        &mut self,
        now: Duration,
        link: LinkNumber,
        id: RequestId,
        event: EngineEvent,
    ) {
        if link != self.link {
            return;
        }
        // Events of a request that has since been cancelled may still arrive.
        let Some(live) = self.live.get_mut(&id) else { return };
        if event == EngineEvent::Failed(EngineError::ShuttingDown) {
            // The next leader continues it.
            self.is_leaving = true;
            if live.open_request.is_kept()
                && let Some(RunningRequest { open_request, events, .. }) = self.forget(id)
            {
                note_lost(&open_request, &events);
                let error = EngineError::ShuttingDown;
                return self.hold(HeldRequest { open_request, events, since: now, error });
            }
            return self.fail(now, id, EngineError::ShuttingDown);
        }
        let before = live.open_request.weight();
        let news = live.open_request.take(event);
        self.live_tokens = self.live_tokens + live.open_request.weight() - before;
        if self.live_tokens > self.live_tokens_max {
            self.live_tokens -= live.open_request.weight();
            live.open_request.free_tokens();
        }
        let Some(event) = news else { return };
        // The HTTP side cancels the request of a client that left, but only if the command queue
        // had room.
        let is_gone = live.events.send(event).is_err();
        live.reading.sent();
        let is_over = live.open_request.is_over();
        if is_over || is_gone {
            self.forget(id);
        }
        if is_gone && !is_over {
            self.gone.push(id);
        }
    }

    /// Finds requests whose clients are gone without an event noticing, or have long stopped
    /// reading.
    pub(super) fn find_gone(&mut self, now: Duration) {
        let gone = |(id, live): (&RequestId, &mut RunningRequest)| {
            let waiting = live.events.waiting();
            (live.events.is_closed() || live.reading.is_stuck(now, waiting)).then_some(*id)
        };
        let ids: Vec<RequestId> = self.live.iter_mut().filter_map(gone).collect();
        for id in ids {
            self.forget(id);
            self.gone.push(id);
        }
    }

    /// Fails requests that have been held for too long.
    pub(super) fn give_up(&mut self, now: Duration, outage: Option<Outage>) {
        for request in self.held.expired(now, outage) {
            self.refuse(request);
        }
    }

    /// The coordinator has dropped its side of every request with the link. They continue at the
    /// next one.
    pub(super) fn link_lost(&mut self, now: Duration) {
        self.gone.clear();
        self.live_tokens = 0;
        let mut lost: Vec<(RequestId, RunningRequest)> = self.live.drain().collect();
        lost.sort_unstable_by_key(|(id, _)| *id);
        for (_, RunningRequest { mut open_request, events, .. }) in lost {
            let why = match open_request.record_lost_link() {
                _ if !open_request.is_kept() => {
                    "; the request was not kept, since too many tokens were in progress"
                }
                times if times > LOST_MAX => "; so did those before that had this request",
                _ => "",
            };
            if why.is_empty() {
                note_lost(&open_request, &events);
                let error = no_coordinator();
                self.hold(HeldRequest { open_request, events, since: now, error });
            } else {
                let message = format!("the link to the coordinator ended{why}");
                let error = EngineError::Unavailable { message };
                self.refuse(HeldRequest { open_request, events, since: now, error });
            }
        }
    }

    /// Fails all requests.
    pub(super) fn end_all(&mut self, error: &EngineError) {
        self.gone.clear();
        self.live_tokens = 0;
        for (_, live) in self.live.drain() {
            let _ = live.events.send(EngineEvent::Failed(error.clone()));
        }
        while let Some(request) = self.held.pop() {
            self.refuse(HeldRequest { error: error.clone(), ..request });
        }
    }

    fn hold(&mut self, request: HeldRequest) {
        if let Err(request) = self.held.push(request) {
            self.refuse(*request);
        }
    }

    /// Ends a request that no coordinator goes on with.
    fn refuse(&self, HeldRequest { open_request, events, error, .. }: HeldRequest) {
        match error {
            _ if events.is_closed() => return,
            _ if open_request.has_begun() => self.stats.expired(ExpiryReason::NoCoordinator),
            EngineError::ShuttingDown => self.stats.rejected(RejectReason::ShuttingDown),
            _ => self.stats.rejected(RejectReason::Unavailable),
        }
        let _ = events.send(EngineEvent::Failed(error));
    }

    /// Ends a request that its coordinator gave up and that no other one can go on with.
    fn fail(&mut self, now: Duration, id: RequestId, error: EngineError) {
        if let Some(RunningRequest { open_request, events, .. }) = self.forget(id) {
            self.refuse(HeldRequest { open_request, events, since: now, error });
        }
    }

    /// Removes a live request.
    fn forget(&mut self, id: RequestId) -> Option<RunningRequest> {
        let live = self.live.remove(&id)?;
        self.live_tokens -= live.open_request.weight();
        Some(live)
    }
}

/// Notes that a request goes on at another coordinator, if it is traced.
fn note_lost(open_request: &OpenRequest, events: &EventSender) {
    if open_request.is_traced() {
        let _ = events.send(EngineEvent::Note(RequestNote::CoordinatorLost));
    }
}

#[cfg(test)]
mod random;
#[cfg(test)]
mod tests;

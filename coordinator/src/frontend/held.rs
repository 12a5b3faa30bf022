//! PURE: requests that a front end holds while no coordinator can take them.
//!
//! What a front end knows of a request is enough to continue it elsewhere: at the next leader, or
//! at the same coordinator over another link. So clients of a front end see a change of leader as a
//! delay.
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use shared::ids::RequestId;
use shared::protocol::EngineError;

use super::open_request::OpenRequest;
use crate::engine::EventSender;

/// How long requests are held while no coordinator serves: by default, longer than it takes for a
/// lease to end and for a leader to finish its requests (`--drain-timeout`).
pub(super) const HELD_FOR: Duration = Duration::from_secs(45);
/// Maximum number of requests held.
const REQUESTS_MAX: usize = 16 << 10;
/// Maximum number of tokens of all requests held: 128 MiB.
pub(super) const TOKENS_MAX: usize = 32 << 20;

/// A request, its client, and the error the client gets if nobody takes it in time.
#[derive(Debug)]
pub(super) struct HeldRequest {
    pub(super) open_request: OpenRequest,
    pub(super) events: EventSender,
    /// Since when it is held.
    pub(super) since: Duration,
    pub(super) error: EngineError,
}

/// A period without a link, and how long requests wait for one at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outage {
    /// When it began.
    pub(super) since: Duration,
    pub(super) held_for: Duration,
}

/// The requests held, in order of arrival.
#[derive(Debug, Default)]
pub(super) struct HeldRequests {
    requests: BTreeMap<u64, HeldRequest>,
    /// Key of each of them in `requests`.
    places: HashMap<RequestId, u64>,
    next: u64,
    tokens: usize,
}

impl HeldRequests {
    /// Holds a request.
    ///
    /// # Errors
    /// The request, if there is no room for it.
    pub(super) fn push(&mut self, request: HeldRequest) -> Result<(), Box<HeldRequest>> {
        let tokens = self.tokens.saturating_add(request.open_request.weight());
        if self.requests.len() >= REQUESTS_MAX || tokens > TOKENS_MAX {
            return Err(Box::new(request));
        }
        self.tokens = tokens;
        self.places.insert(request.open_request.id(), self.next);
        self.requests.insert(self.next, request);
        self.next += 1;
        Ok(())
    }

    /// Takes out the next one to send.
    pub(super) fn pop(&mut self) -> Option<HeldRequest> {
        let place = *self.requests.first_key_value()?.0;
        self.take(place)
    }

    /// Drops a request, if it is here: its client is gone.
    pub(super) fn remove(&mut self, id: RequestId) {
        if let Some(place) = self.places.get(&id).copied() {
            self.take(place);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Takes out requests that have been held for [`HELD_FOR`], or for less in an `outage`, and
    /// drops those whose clients are gone.
    pub(super) fn expired(&mut self, now: Duration, outage: Option<Outage>) -> Vec<HeldRequest> {
        let ends = |request: &HeldRequest| {
            let waited = |since: Duration| now.saturating_sub(since.max(request.since));
            request.events.is_closed()
                || waited(Duration::ZERO) >= HELD_FOR
                || outage.is_some_and(|it| waited(it.since) >= it.held_for)
        };
        let ending = self.requests.iter().filter(|(_, request)| ends(request));
        let places: Vec<u64> = ending.map(|(place, _)| *place).collect();
        let taken = places.into_iter().filter_map(|place| self.take(place));
        taken.filter(|request| !request.events.is_closed()).collect()
    }

    fn take(&mut self, place: u64) -> Option<HeldRequest> {
        let request = self.requests.remove(&place)?;
        self.places.remove(&request.open_request.id());
        self.tokens -= request.open_request.weight();
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use shared::sampling::SamplingParams;

    use super::*;
    use crate::engine::{EngineCommand, EngineHandle, GenerateRequest};

    #[test]
    fn what_is_held_goes_on_in_order_or_ends_in_time_and_has_a_bound() {
        let (engine, mut commands) = EngineHandle::channel();
        let mut clients = Vec::new();
        let mut request = |id: u64, since: u64, tokens: usize| {
            let greedy = vec![SamplingParams::greedy()];
            let open_request = GenerateRequest::new(RequestId(id), vec![1; tokens], greedy, 1);
            clients.push(Some(engine.submit(open_request).unwrap()));
            let Ok(EngineCommand::Submit { request, events }) = commands.try_recv() else {
                panic!()
            };
            let (open_request, since) =
                (OpenRequest::new(*request).unwrap(), Duration::from_secs(since));
            HeldRequest { open_request, events, since, error: EngineError::ShuttingDown }
        };
        let mut held = HeldRequests::default();
        for (id, since) in [(0, 5), (1, 0), (2, 1), (3, 6)] {
            held.push(request(id, since, 7)).unwrap();
        }
        assert!(held.push(request(4, 0, TOKENS_MAX - 27)).is_err(), "one token too many");
        held.push(request(5, 6, TOKENS_MAX - 28)).unwrap();
        assert!(held.push(request(6, 0, 1)).is_err(), "no room for a token");
        clients[3] = None;
        let ids = |requests: Vec<HeldRequest>| -> Vec<u64> {
            requests.iter().map(|request| request.open_request.id().0).collect()
        };
        assert_eq!(ids(held.expired(HELD_FOR, None)), [1], "the one that is held for longest");
        assert_eq!(ids(held.expired(HELD_FOR, None)), [0; 0]);
        let outage = |since: u64, held_for: u64| {
            let of = Duration::from_secs;
            Some(Outage { since: of(since), held_for: of(held_for) })
        };
        // One held since 1 s waits for a link that broke at 4 s; the others came later.
        assert_eq!(ids(held.expired(Duration::from_secs(11), outage(4, 8))), [0; 0]);
        assert_eq!(ids(held.expired(Duration::from_secs(12), outage(4, 8))), [2]);
        held.remove(RequestId(0));
        held.remove(RequestId(7));
        let rest = std::iter::from_fn(|| held.pop()).collect();
        assert_eq!(ids(rest), [5], "without those whose clients left");
        assert_eq!((held.tokens, held.places.len()), (0, 0));
    }
}

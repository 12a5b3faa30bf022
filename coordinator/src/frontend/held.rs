//! PURE: requests that a front end holds while no coordinator can take them.
//!
//! A request of which nothing has been told to its client can be sent again: to the coordinator
//! that leads next, or to the same one over another link. So clients of a front end see a change of
//! the leader as a wait, unless their answer had begun.
use std::collections::VecDeque;
use std::time::Duration;

use shared::protocol::{EngineError, SubmitRequest};

use crate::engine::EventSender;

/// How long requests are held for want of a coordinator that serves: more than a lease that ends
/// and a leader that finishes what runs (`--drain-timeout`) take by default.
pub(super) const HELD_FOR: Duration = Duration::from_secs(45);
/// Most requests held.
const REQUESTS_MAX: usize = 16 << 10;
/// Most prompt tokens of all requests held: 128 MiB.
const TOKENS_MAX: usize = 32 << 20;

/// A request, its client, and what the client is told if nobody takes it in time.
#[derive(Debug)]
pub(super) struct HeldRequest {
    pub(super) submit: Box<SubmitRequest>,
    pub(super) events: EventSender,
    pub(super) arrived: Duration,
    /// Since when it is held.
    pub(super) since: Duration,
    /// How often it was with a coordinator whose link broke: who is that every time may be the
    /// cause.
    pub(super) lost: u32,
    pub(super) error: EngineError,
}

/// The requests held, in the order in which they came here.
#[derive(Debug, Default)]
pub(super) struct Held {
    requests: VecDeque<HeldRequest>,
    tokens: usize,
}

impl Held {
    /// Holds a request.
    ///
    /// # Errors
    /// The request, when there is no room for it.
    pub(super) fn push(&mut self, request: HeldRequest) -> Result<(), HeldRequest> {
        let tokens = self.tokens.saturating_add(request.submit.prompt.len());
        if self.requests.len() >= REQUESTS_MAX || tokens > TOKENS_MAX {
            return Err(request);
        }
        self.tokens = tokens;
        self.requests.push_back(request);
        Ok(())
    }

    /// The next one to be sent.
    pub(super) fn pop(&mut self) -> Option<HeldRequest> {
        let request = self.requests.pop_front()?;
        self.tokens -= request.submit.prompt.len();
        Some(request)
    }

    /// Takes out those that have been held for too long, and drops those whose clients are gone.
    pub(super) fn expired(&mut self, now: Duration) -> Vec<HeldRequest> {
        let mut expired = Vec::new();
        for _ in 0..self.requests.len() {
            let Some(request) = self.pop() else { break };
            if request.events.is_closed() {
                continue;
            }
            if now.saturating_sub(request.since) >= HELD_FOR {
                expired.push(request);
            } else if let Err(request) = self.push(request) {
                // There was room for it a moment ago.
                expired.push(request);
            }
        }
        expired
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::RequestId;
    use shared::sampling::SamplingParams;

    use super::*;
    use crate::engine::{EngineCommand, EngineHandle, GenerateRequest};

    fn submit(id: u64, tokens: usize) -> Box<SubmitRequest> {
        Box::new(SubmitRequest {
            id: RequestId(id),
            prompt: vec![1; tokens],
            sampling: SamplingParams::greedy(),
            n: 1,
            stops: Vec::new(),
            keep_special: false,
            goes_on: false,
            max_tokens: 1,
            open_ended: false,
            guide: None,
            priority: 0,
            cache_salt: 0,
            adapter: 0,
            end_tokens: Vec::new(),
            waited_us: 0,
            response_id: String::new(),
            accepted: Vec::new(),
        })
    }

    #[test]
    fn what_is_held_goes_on_in_order_or_ends_in_time_and_has_a_bound() {
        let (engine, mut commands) = EngineHandle::channel();
        let mut clients = Vec::new();
        let mut request = |id: u64, since: u64, tokens: usize| {
            let asked =
                GenerateRequest::new(RequestId(id), vec![1], vec![SamplingParams::greedy()], 1);
            clients.push(Some(engine.submit(asked).unwrap()));
            let Ok(EngineCommand::Submit { events, .. }) = commands.try_recv() else { panic!() };
            let (submit, since) = (submit(id, tokens), Duration::from_secs(since));
            let (arrived, error) = (Duration::ZERO, EngineError::ShuttingDown);
            HeldRequest { submit, events, arrived, since, lost: 0, error }
        };
        let mut held = Held::default();
        for (id, since) in [(0, 5), (1, 0), (2, 1), (3, 6)] {
            held.push(request(id, since, 7)).unwrap();
        }
        assert!(held.push(request(4, 0, TOKENS_MAX - 27)).is_err(), "one token too many");
        held.push(request(5, 6, TOKENS_MAX - 28)).unwrap();
        assert!(held.push(request(6, 0, 1)).is_err(), "no room for a token");
        clients[3] = None;
        let ids = |requests: Vec<HeldRequest>| -> Vec<u64> {
            requests.iter().map(|request| request.submit.id.0).collect()
        };
        assert_eq!(ids(held.expired(HELD_FOR)), [1], "the one that is held for longest");
        assert_eq!(ids(held.expired(HELD_FOR)), [0; 0]);
        let rest = std::iter::from_fn(|| held.pop()).collect();
        assert_eq!(ids(rest), [0, 2, 5], "without the one whose client left");
        assert_eq!(held.tokens, 0);
    }
}

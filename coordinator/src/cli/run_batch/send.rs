//! Sends one request of a batch until it is answered.
use std::time::{Duration, Instant};

use shared::clock::jittered;
use ureq::Agent;
use zeroize::Zeroizing;

use super::super::http_client::describe_failure;
use super::input::Request;
use super::results::{Outcome, may_pass};

/// Most bytes of an answer.
const ANSWER_MAX: u64 = 1 << 30;
/// The first wait before another try, and the longest.
const WAITS: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(20));

/// A server, by its base URL.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) url: String,
    pub(super) agent: Agent,
}

/// How requests are sent.
pub(super) struct Sender {
    pub(super) servers: Vec<Server>,
    /// The value of `Authorization`.
    pub(super) authorization: Option<Zeroizing<String>>,
    /// How long a request that finds no server, or a busy one, is sent again.
    pub(super) patience: Duration,
}

impl Sender {
    /// Sends the batch's request number `number` to one of the servers, and again, each time to the
    /// next, as long as what is in its way may pass and there is patience left.
    pub(super) fn send(&self, number: usize, request: &Request) -> Outcome {
        let mut first_failure = None;
        let mut attempt = 0;
        loop {
            let server = &self.servers[(number + attempt) % self.servers.len()];
            let (outcome, wanted) = self.try_once(server, request);
            let is_over = match &outcome {
                Outcome::Answered { status, .. } => !may_pass(*status),
                Outcome::Failed { code, .. } => *code == TIMEOUT,
            };
            if is_over {
                return outcome;
            }
            let since: &Instant = first_failure.get_or_insert_with(Instant::now);
            let left = self.patience.saturating_sub(since.elapsed());
            if left.is_zero() {
                return outcome;
            }
            // As long as the server asks at least, or twice as long each time; never all at once.
            let doubled = WAITS.0.saturating_mul(1 << attempt.min(10)).min(WAITS.1);
            let least = wanted.unwrap_or(doubled / 2);
            let more = jittered(doubled / 2, number as u64, attempt as u64);
            std::thread::sleep(least.saturating_add(more).min(left));
            attempt += 1;
        }
    }

    /// Returns what came of it, and how long the server wants to be left alone.
    fn try_once(&self, server: &Server, request: &Request) -> (Outcome, Option<Duration>) {
        let url = format!("{}{}", server.url, request.url);
        let post = server.agent.post(&url).header("content-type", "application/json");
        let post = match &self.authorization {
            Some(value) => post.header("authorization", value.as_str()),
            None => post,
        };
        let failed = |error: &ureq::Error| {
            let code = if matches!(error, ureq::Error::Timeout(_)) { TIMEOUT } else { UNREACHED };
            Outcome::Failed { code, message: describe_failure(&url, error) }
        };
        let mut response = match post.send(&request.body) {
            Ok(response) => response,
            Err(error) => return (failed(&error), None),
        };
        let header = |name: &str| response.headers().get(name)?.to_str().ok();
        let request_id = header("x-request-id").unwrap_or_default().to_owned();
        let seconds = header("retry-after").and_then(|text| text.parse().ok());
        let wanted = seconds.map(Duration::from_secs);
        let status = response.status().as_u16();
        match response.body_mut().with_config().limit(ANSWER_MAX).read_to_string() {
            Ok(body) => (Outcome::Answered { status, request_id, body }, wanted),
            Err(error) => (failed(&error), None),
        }
    }
}

/// No answer within the time that a request may take.
pub(super) const TIMEOUT: &str = "timeout";
/// No server, or a connection that broke.
const UNREACHED: &str = "unreached";

//! Server-Sent Events, written in wire form, with pings during silence.
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::{CACHE_CONTROL, HeaderValue};
use actix_web::web::Bytes;
use futures_util::stream;
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};

use super::error::ApiError;

/// Silence after which something is sent, so that proxies keep the connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// What is sent then: a line with a name that no event has, a space. Of all that means nothing it
/// is taken best: clients that strip what they read, as vLLM's benchmark, lose the end of a comment
/// and take the next event for more of it, and for some, as openai-go before 3.43, an empty line
/// ends an event that is empty. An API that has an event for it says so ([`EventSource::ping`]).
const PING: &[u8] = b" \n";

/// Events in wire form.
#[derive(Debug, Default)]
pub struct Events {
    bytes: Vec<u8>,
}

impl Events {
    /// Appends an event.
    ///
    /// # Errors
    /// If it cannot be written as JSON, which is a bug; it is left out then.
    pub fn push(&mut self, event: &impl Serialize) -> Result<(), ApiError> {
        let before = self.bytes.len();
        self.bytes.extend_from_slice(b"data: ");
        if let Err(error) = serde_json::to_writer(&mut self.bytes, event) {
            self.bytes.truncate(before);
            return Err(ApiError::internal(error.to_string()));
        }
        self.bytes.extend_from_slice(b"\n\n");
        Ok(())
    }

    /// Appends an event with a name.
    ///
    /// # Errors
    /// Like [`Events::push`].
    pub fn push_named(&mut self, name: &str, event: &impl Serialize) -> Result<(), ApiError> {
        let before = self.bytes.len();
        self.bytes.extend_from_slice(b"event: ");
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(b'\n');
        self.push(event).inspect_err(|_| self.bytes.truncate(before))
    }

    /// Appends the last event; returns what [`EventSource::next`] is to return then.
    pub fn push_last(&mut self, event: &impl Serialize) -> Option<Result<(), ApiError>> {
        self.push(event).err().map(Err)
    }

    /// Whether there are no events.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes all events, followed by `more`; keeps the memory for later ones.
    fn take(&mut self, more: &[u8]) -> Bytes {
        self.bytes.extend_from_slice(more);
        let bytes = Bytes::copy_from_slice(&self.bytes);
        self.bytes.clear();
        bytes
    }
}

/// The source of a stream's events.
pub trait EventSource {
    /// Appends the next events, if there are any; returns `None` with the last, which may be empty.
    /// A failure is also the last. Cancel safe: if dropped while waiting, it has taken nothing.
    fn next(&mut self, out: &mut Events) -> impl Future<Output = Option<Result<(), ApiError>>>;

    /// What is sent after a silence.
    fn ping(&self) -> &'static [u8] {
        PING
    }

    /// Appends the regular end of a stream.
    fn end(&self, out: &mut Events) {
        out.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// Appends the event that ends a failed stream, without `[DONE]`, so that the client sees that
    /// this is no regular end.
    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        // It is JSON already.
        let _ = out.push(&error.json());
    }
}

/// The result of waiting for events.
enum Outcome {
    Events,
    Failed(ApiError),
    End,
    Silence,
}

/// A stream in progress.
struct Body<S> {
    source: S,
    events: Events,
    /// Fires at the end of a silence or earlier. It is reset only when it fires, so an event costs
    /// no timer operation.
    timer: Pin<Box<Sleep>>,
    heard: Instant,
}

impl<S: EventSource> Body<S> {
    fn new(source: S) -> Self {
        let timer = Box::pin(sleep(PING_INTERVAL));
        Self { source, events: Events::default(), timer, heard: Instant::now() }
    }

    async fn next(&mut self) -> Outcome {
        let Self { source, events, timer, heard } = self;
        loop {
            let next = tokio::select! {
                biased;
                next = source.next(events) => next,
                () = timer.as_mut() => {
                    let now = Instant::now();
                    let is_silent = now >= *heard + PING_INTERVAL;
                    if is_silent {
                        *heard = now;
                    }
                    timer.as_mut().reset(*heard + PING_INTERVAL);
                    if is_silent {
                        return Outcome::Silence;
                    }
                    continue;
                }
            };
            if matches!(next, Some(Ok(()))) && events.is_empty() {
                continue;
            }
            *heard = Instant::now();
            return match next {
                Some(Ok(())) => Outcome::Events,
                Some(Err(error)) => Outcome::Failed(error),
                None => Outcome::End,
            };
        }
    }
}

/// What the next piece of the body is made from.
enum Phase<S> {
    /// The first outcome, which was awaited before the response began.
    Begun(Outcome, Body<S>),
    Events(Body<S>),
    Over,
}

/// Streams the source's events and ends as the source says: by default with `[DONE]`, or with the
/// error alone.
///
/// The response begins with the first event, or after the first silence: a request that is rejected
/// or fails before that gets a plain error.
///
/// # Errors
/// A failure that comes first.
pub async fn respond<S: EventSource + 'static>(source: S) -> Result<HttpResponse, ApiError> {
    let mut body = Body::new(source);
    let first = match body.next().await {
        Outcome::Failed(error) => return Err(error),
        first => first,
    };
    let pieces = stream::unfold(Phase::Begun(first, body), |phase| async {
        let (outcome, mut body) = match phase {
            Phase::Begun(outcome, body) => (outcome, body),
            Phase::Events(mut body) => (body.next().await, body),
            Phase::Over => return None,
        };
        let (bytes, phase) = match outcome {
            Outcome::Silence => {
                let ping = body.source.ping();
                (body.events.take(ping), Phase::Events(body))
            }
            Outcome::Events => (body.events.take(b""), Phase::Events(body)),
            Outcome::Failed(error) => {
                body.source.fail(&error, &mut body.events);
                (body.events.take(b""), Phase::Over)
            }
            Outcome::End => {
                body.source.end(&mut body.events);
                (body.events.take(b""), Phase::Over)
            }
        };
        Some((Ok::<_, Infallible>(bytes), phase))
    });
    Ok(HttpResponse::Ok()
        // Without it Python's requests, for one, reads Latin-1.
        .content_type("text/event-stream; charset=utf-8")
        .insert_header((CACHE_CONTROL, HeaderValue::from_static("no-cache")))
        .insert_header(("X-Accel-Buffering", "no"))
        .streaming(pieces))
}

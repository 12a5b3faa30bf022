//! Every request has an id: the client's `X-Request-Id`, or one made here. The answer's header and
//! the response's `id` show it. So do the access log, if enabled, with the answer's token counts
//! and the request's trace, and the span that is exported of it.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::middleware::Next;
use actix_web::web::Data;
use actix_web::{Error, HttpMessage as _, HttpRequest};

use super::body::{Companion, accompanied, end_as_client_knows};
use super::error::ApiError;
use super::fields::is_request_id;
use super::keys::Meter;
use super::messages;
use super::state::AppState;
use super::trace::TraceParent;
use super::traced::RequestTrace;
use crate::traces::record::{CLIENT_LEFT, End};

const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// A request's id, stored among its extensions.
#[derive(Clone, Debug)]
struct RequestName(String);

/// Counts the tokens of a request for the access log, its trace and its key's limit, as far as
/// there are such. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    counts: Option<Arc<Counts>>,
    meter: Option<Meter>,
    trace: Option<Arc<RequestTrace>>,
}

#[derive(Debug, Default)]
struct Counts {
    prompt: AtomicU64,
    output: AtomicU64,
    /// Number of the API key; 0 for none.
    key: AtomicU64,
}

impl Tally {
    pub(super) fn counting() -> Self {
        Self { counts: Some(Arc::default()), meter: None, trace: None }
    }

    /// What is gathered of the request, if it is traced.
    #[must_use]
    pub fn trace(&self) -> Option<&RequestTrace> {
        self.trace.as_deref()
    }

    /// Counts against a key's limit, too.
    #[must_use]
    pub fn metered(self, meter: Option<Meter>) -> Self {
        Self { meter, ..self }
    }

    /// A prompt of so many tokens starts to run.
    pub fn prompt(&self, tokens: u64) {
        if let Some(counts) = &self.counts {
            counts.prompt.fetch_add(tokens, Ordering::Relaxed);
        }
        if let Some(meter) = &self.meter {
            meter.take(tokens);
        }
    }

    /// A prompt of so many tokens failed before anything came of it: its client is not charged.
    pub fn failed(&self, tokens: u64) {
        if let Some(meter) = &self.meter {
            meter.put_back(tokens);
        }
    }

    /// The whole request was refused: its client is not charged for the prompts that ran.
    pub fn refused(&self) {
        if let Some(meter) = &self.meter {
            meter.put_back_all();
        }
    }

    /// So many more tokens were generated.
    pub fn output(&self, tokens: u64) {
        if let Some(counts) = &self.counts {
            counts.output.fetch_add(tokens, Ordering::Relaxed);
        }
        if let Some(meter) = &self.meter {
            meter.take(tokens);
        }
    }

    /// The API key with this number admitted the request.
    pub fn key(&self, number: u64) {
        if let Some(counts) = &self.counts {
            counts.key.store(number, Ordering::Relaxed);
        }
    }

    fn known_key(&self) -> Option<u64> {
        let counts = self.counts.as_ref()?;
        Some(counts.key.load(Ordering::Relaxed)).filter(|number| *number > 0)
    }

    /// Returns the tokens of the prompts and of the output, if prompts ran.
    pub(super) fn counted(&self) -> Option<(u64, u64)> {
        let counts = self.counts.as_ref()?;
        let counted =
            (counts.prompt.load(Ordering::Relaxed), counts.output.load(Ordering::Relaxed));
        (counted.0 > 0).then_some(counted)
    }
}

/// Returns the counter of the request's tokens.
#[must_use]
pub fn tally(request: &HttpRequest) -> Tally {
    request.extensions().get::<Tally>().cloned().unwrap_or_default()
}

/// Returns the request's id.
#[must_use]
pub fn request_id(request: &HttpRequest) -> String {
    request.extensions().get::<RequestName>().map(|name| name.0.clone()).unwrap_or_default()
}

/// An error as the API of the request's path tells it.
#[must_use]
pub fn told(error: ApiError, request: &HttpRequest) -> ApiError {
    if messages::is_at(request.path()) { error.for_anthropic(&request_id(request)) } else { error }
}

/// Assigns the request its id, adds it to the answer's headers, and logs the request.
///
/// # Errors
/// The handler's own.
pub async fn identify<B: MessageBody + 'static>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<EitherBody<B>>, Error> {
    let Some(state) = request.app_data::<Data<AppState>>().cloned() else {
        return Ok(next.call(request).await?.map_into_left_body());
    };
    let given = request.headers().get(&HEADER).and_then(|value| value.to_str().ok());
    let given = given.filter(|id| is_request_id(id, &state.limits)).map(str::to_owned);
    let id = given.unwrap_or_else(|| state.request_id());
    let header = HeaderValue::from_str(&id);
    let is_anthropic = messages::is_at(request.path());
    request.extensions_mut().insert(RequestName(id.clone()));
    let parent =
        if state.access_log || state.traces.is_some() { trace(request.headers()) } else { None };
    let traced = RequestTrace::begin(&state, &request, &id, parent.as_ref());
    let mut line = (state.access_log || traced.is_some()).then(|| Line {
        began: state.clock.now(),
        id,
        method: request.method().clone(),
        path: request.path().to_owned(),
        peer: request.peer_addr(),
        status: None,
        sent: false,
        code: None,
        tally: Tally { trace: traced, ..Tally::counting() },
        trace: parent,
        state: state.clone(),
    });
    if let Some(line) = &line {
        request.extensions_mut().insert(line.tally.clone());
    }
    let response = next.call(request).await;
    if let Some(line) = &mut line {
        line.status = Some(match &response {
            Ok(response) => response.status().as_u16(),
            Err(error) => error.as_response_error().status_code().as_u16(),
        });
        line.sent = response.is_err();
        let error = match &response {
            Ok(response) => response.response().error(),
            Err(error) => Some(error),
        };
        line.code = error.and_then(|error| error.as_error::<ApiError>()?.code());
    }
    let mut response = response?;
    end_as_client_knows(&mut response);
    if let Ok(header) = header {
        if is_anthropic {
            response.headers_mut().insert(messages::REQUEST_ID, header.clone());
        }
        response.headers_mut().insert(HEADER, header);
    }
    Ok(match line {
        None => response.map_into_left_body(),
        Some(line) => response.map_body(|_, body| EitherBody::right(accompanied(body, line))),
    })
}

/// Returns the trace that the request belongs to, if it names one.
fn trace(headers: &HeaderMap) -> Option<TraceParent> {
    let mut given = headers.get_all("traceparent");
    // Two headers would contradict each other.
    let header = given.next().filter(|_| given.next().is_none())?;
    header.to_str().ok().and_then(TraceParent::parse)
}

/// A line of the access log, written when the answer is sent or its client has left; the request's
/// trace ends there, too.
#[derive(Debug)]
struct Line {
    state: Data<AppState>,
    began: Duration,
    id: String,
    method: Method,
    path: String,
    /// The other end of the connection: a client, or its proxy.
    peer: Option<SocketAddr>,
    /// `None` if the client left before there was one.
    status: Option<u16>,
    /// Whether the answer was sent to its end.
    sent: bool,
    /// Of the error that was the answer.
    code: Option<&'static str>,
    tally: Tally,
    trace: Option<TraceParent>,
}

impl Drop for Line {
    fn drop(&mut self) {
        let tokens = self.tally.counted();
        let status = self.status.unwrap_or(CLIENT_LEFT);
        if let Some(trace) = self.tally.trace() {
            trace.ended(End {
                status,
                sent: self.sent,
                tokens,
                key: self.tally.known_key(),
                code: self.code,
                ..End::default()
            });
        }
        if !self.state.access_log {
            return;
        }
        let duration = self.state.clock.now().saturating_sub(self.began);
        let (prompt, output) = tokens.unzip();
        let trace = self.trace.as_ref();
        tracing::info!(
            request = %self.id,
            peer = self.peer.map(tracing::field::display),
            key = self.tally.known_key(),
            method = %self.method,
            path = %self.path,
            status,
            whole = self.sent,
            duration_ms = duration.as_millis() as u64,
            prompt_tokens = prompt,
            output_tokens = output,
            trace_id = trace.map(|trace| tracing::field::display(&trace.trace_id)),
            parent_id = trace.map(|trace| tracing::field::display(&trace.parent_id)),
            "http"
        );
    }
}

impl Companion for Line {
    fn sent(&mut self) {
        self.sent = true;
    }
}

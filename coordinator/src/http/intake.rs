//! The way of every request with a body, from the gate to its answer: its key's limits, its
//! headers, its body within bounds, and the count of what is refused.
use std::borrow::Cow;
use std::time::Duration;

use actix_web::http::header::{CONTENT_ENCODING, CONTENT_TYPE, ContentType};
use actix_web::web::{BytesMut, Payload};
use actix_web::{HttpRequest, HttpResponse};
use futures_util::StreamExt as _;
use shared::metrics::labels::RejectReason;
use tokio::time::Instant;

use super::error::ApiError;
use super::fields::Fields;
use super::gate::{self, Visit};
use super::room::{Room, Share};
use super::state::AppState;
use super::terms::{self, Terms};
use super::{access, keys, pool};

/// Time limit for a body.
pub(super) const BODY_DEADLINE_S: u64 = 10;

/// Answers a request for the engine, errors as its API tells them.
pub(super) async fn answer(
    state: &AppState,
    request: &HttpRequest,
    body: Payload,
    respond: impl AsyncFnOnce(&AppState, Fields) -> Result<HttpResponse, ApiError>,
) -> Result<HttpResponse, ApiError> {
    admit(state, request, body, respond).await.map_err(|error| access::told(error, request))
}

/// Lets a request in, which counts as one that is inside until its answer is sent.
async fn admit(
    state: &AppState,
    request: &HttpRequest,
    body: Payload,
    respond: impl AsyncFnOnce(&AppState, Fields) -> Result<HttpResponse, ApiError>,
) -> Result<HttpResponse, ApiError> {
    let visit = enter(state)?;
    let turn = keys::enter(state, request)?;
    let answer = match terms(state, request) {
        Ok(terms) => match state.in_time(terms.deadline, read(state, request, body)).await {
            Ok(fields) => {
                let tally = fields.tally().clone();
                let answer = respond(state, fields.on_terms(terms)).await;
                // One prompt of several may be refused while others run.
                answer.inspect_err(|error| {
                    if error.is_queue_full() {
                        tally.refused();
                    }
                })
            }
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    let answer = answer.map(|it| visit.until_sent(it)).map(|it| match turn {
        Some(turn) => turn.until_sent(it),
        None => it,
    });
    let answer = answer.inspect_err(|error| count(state, error));
    answer.map_err(|error| error.of_request(&access::request_id(request)))
}

/// Reads what applies to a request from its headers and its key.
fn terms(state: &AppState, request: &HttpRequest) -> Result<Terms, ApiError> {
    let timeout = terms::timeout(request.headers())?;
    let owner = keys::owner(request).filter(|_| !state.share_prefix_cache);
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    Ok(Terms { deadline, salts: state.salts.of(owner) })
}

/// Answers a request that asks nothing of the engine, with JSON.
pub(super) async fn answer_text(
    state: &AppState,
    request: &HttpRequest,
    body: Payload,
    respond: impl AsyncFnOnce(&AppState, Fields) -> Result<String, ApiError>,
) -> Result<HttpResponse, ApiError> {
    let answer = match read(state, request, body).await {
        Ok(fields) => respond(state, fields).await,
        Err(error) => Err(error),
    };
    let answer = answer.inspect_err(|error| count(state, error));
    let answer = answer.map_err(|error| access::told(error, request))?;
    Ok(HttpResponse::Ok().content_type(ContentType::json()).body(answer))
}

/// Lets a request in, unless the server was told to end.
fn enter(state: &AppState) -> Result<Visit, ApiError> {
    state.gate.enter().ok_or_else(|| {
        state.stats.rejected(RejectReason::ShuttingDown);
        gate::closed()
    })
}

/// Counts a rejected request, unless that has been done already.
pub(super) fn count(state: &AppState, error: &ApiError) {
    if let Some(reason) = error.reason() {
        state.stats.rejected(reason);
    }
}

/// What a request says that its body is.
pub(super) fn content_type(request: &HttpRequest) -> Option<Cow<'_, str>> {
    let value = request.headers().get(CONTENT_TYPE)?;
    Some(String::from_utf8_lossy(value.as_bytes()))
}

/// Reads a body as JSON, and what counts the request's tokens.
///
/// # Errors
/// Everything that can be wrong with a body.
pub(super) async fn read(
    state: &AppState,
    request: &HttpRequest,
    body: Payload,
) -> Result<Fields, ApiError> {
    let kind = content_type(request);
    let essence = kind.as_deref().and_then(|kind| kind.split(';').next()).unwrap_or("").trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::content_type(kind.as_deref()));
    }
    let encoding = request.headers().get(CONTENT_ENCODING);
    if let Some(encoding) = encoding.filter(|it| !it.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(ApiError::content_encoding(&String::from_utf8_lossy(encoding.as_bytes())));
    }
    let bytes = collect(body, &state.room);
    let deadline = Duration::from_secs(BODY_DEADLINE_S);
    let (bytes, share) = tokio::time::timeout(deadline, bytes)
        .await
        .map_err(|_| ApiError::too_slow(BODY_DEADLINE_S))??;
    let id = access::request_id(request);
    let tally = access::tally(request).metered(keys::meter(state, request));
    let fields = if bytes.len() > pool::LARGE {
        let limits = state.limits.clone();
        state
            .with_text(bytes.len(), move |_| Ok(Fields::parse(&bytes, &limits)?.in_room(share)))
            .await
    } else {
        Fields::parse(&bytes, &state.limits)
    };
    Ok(fields?.of_request(&id).counted_in(tally))
}

async fn collect(mut body: Payload, room: &Room) -> Result<(BytesMut, Share), ApiError> {
    let mut whole = room.body();
    while let Some(chunk) = body.next().await {
        let chunk =
            chunk.map_err(|error| ApiError::body(format!("The body ended early: {error}")))?;
        whole.push(&chunk)?;
    }
    Ok(whole.whole())
}

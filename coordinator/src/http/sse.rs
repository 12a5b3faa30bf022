//! Server-Sent Events from a sequence of JSON values, with pings in silence.
use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::{CACHE_CONTROL, HeaderValue};
use actix_web::web::Bytes;
use futures_util::stream;
use serde_json::Value;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::error::ApiError;

/// A comment is sent after this much silence, so that proxies keep the connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Where a stream's events come from.
pub trait EventSource {
    /// The next events, at least one; `None` after the last. A failure is the last.
    fn next(&mut self) -> impl Future<Output = Option<Result<Vec<Value>, ApiError>>>;
}

/// What the next piece of the body is made of.
enum Phase<S> {
    /// What was waited for before the response began.
    Begun(Outcome, S),
    Events(S),
    Over,
}

/// What waiting for events gave: `Err` is silence.
type Outcome = Result<Option<Result<Vec<Value>, ApiError>>, Elapsed>;

/// Streams the source's events; ends with `[DONE]`, or with the error alone.
///
/// The response begins with the first event, or after the first silence: a request that is refused
/// or fails before is answered with a plain error.
///
/// # Errors
/// The failure that came first.
pub async fn respond<S: EventSource + 'static>(mut source: S) -> Result<HttpResponse, ApiError> {
    let first = match timeout(PING_INTERVAL, source.next()).await {
        Ok(Some(Err(error))) => return Err(error),
        first => first,
    };
    let body = stream::unfold(Phase::Begun(first, source), |phase| async {
        let (outcome, source) = match phase {
            Phase::Begun(outcome, source) => (outcome, source),
            Phase::Events(mut source) => (timeout(PING_INTERVAL, source.next()).await, source),
            Phase::Over => return None,
        };
        let (text, phase) = match outcome {
            Err(_) => (": ping\n\n".to_owned(), Phase::Events(source)),
            Ok(Some(Ok(events))) => {
                let text = events.iter().map(|event| format!("data: {event}\n\n")).collect();
                (text, Phase::Events(source))
            }
            // No [DONE]: the client must see that this is no regular end.
            Ok(Some(Err(error))) => (format!("data: {}\n\n", error.json()), Phase::Over),
            Ok(None) => ("data: [DONE]\n\n".to_owned(), Phase::Over),
        };
        Some((Ok::<_, Infallible>(Bytes::from(text)), phase))
    });
    Ok(HttpResponse::Ok()
        .content_type("text/event-stream")
        .insert_header((CACHE_CONTROL, HeaderValue::from_static("no-cache")))
        .insert_header(("X-Accel-Buffering", "no"))
        .streaming(body))
}

//! Server-Sent Events from a sequence of JSON values, with pings in silence.
use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::{CACHE_CONTROL, HeaderValue};
use actix_web::web::Bytes;
use futures_util::stream;
use serde_json::Value;

/// A comment is sent after this much silence, so that proxies keep the connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// Where a stream's events come from.
pub trait EventSource {
    /// The next events, at least one; `None` after the last. A failure is the last.
    fn next(&mut self) -> impl Future<Output = Option<Result<Vec<Value>, Value>>>;
}

enum Phase<S> {
    Events(S),
    Over,
}

/// A response that streams the source's events; ends with `[DONE]`, or with the error alone.
pub fn respond<S: EventSource + 'static>(source: S) -> HttpResponse {
    let body = stream::unfold(Phase::Events(source), |phase| async {
        let Phase::Events(mut source) = phase else { return None };
        let (text, phase) = match tokio::time::timeout(PING_INTERVAL, source.next()).await {
            Err(_) => (": ping\n\n".to_owned(), Phase::Events(source)),
            Ok(Some(Ok(events))) => {
                let text = events.iter().map(|event| format!("data: {event}\n\n")).collect();
                (text, Phase::Events(source))
            }
            // No [DONE]: the client must see that this is no regular end.
            Ok(Some(Err(error))) => (format!("data: {error}\n\n"), Phase::Over),
            Ok(None) => ("data: [DONE]\n\n".to_owned(), Phase::Over),
        };
        Some((Ok::<_, Infallible>(Bytes::from(text)), phase))
    });
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .insert_header((CACHE_CONTROL, HeaderValue::from_static("no-cache")))
        .insert_header(("X-Accel-Buffering", "no"))
        .streaming(body)
}

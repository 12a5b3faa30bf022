//! Counts every HTTP request and times it to the end of its answer.
use std::time::Duration;

use actix_web::Error;
use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::ConnectionType;
use actix_web::middleware::Next;
use actix_web::web::Data;
use shared::metrics::labels::Method;

use super::body::{Companion, accompanied};
use super::kept::{Kept, Turn};
use super::routes::{ROUTES, pattern};
use super::state::AppState;

/// Counts every HTTP request by route, method and status, and times it to the end of its answer.
///
/// # Errors
/// The handler's own.
pub(super) async fn observe(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let state = request.app_data::<Data<AppState>>().cloned();
    let turn = request.conn_data::<Kept>().map(Kept::turn);
    let counted = state.map(|state| {
        // As routes are matched: after percent-decoding.
        let path = request.match_info().unprocessed();
        let matched = request.resource_map().match_pattern(path);
        let known = ROUTES.iter().find(|(path, _)| matched.as_deref() == Some(pattern(path)));
        Counted {
            method: method(request.method().as_str()),
            began: state.clock.now(),
            route: known.map_or("other", |(path, _)| path),
            status: CLIENT_LEFT,
            state,
        }
    });
    if let Some(counted) = &counted {
        counted.state.stats.http_started();
    }
    match next.call(request).await {
        Ok(mut response) => {
            let is_closed = counted.as_ref().is_some_and(|counted| counted.state.gate.is_closed());
            if is_closed {
                // The client's next request is to go to another server.
                response.response_mut().head_mut().set_connection_type(ConnectionType::Close);
            }
            let status = response.status().as_u16();
            Ok(match counted {
                None => response.map_into_left_body(),
                Some(counted) => response.map_body(|_, body| {
                    EitherBody::right(accompanied(body, Answered { counted, status, _turn: turn }))
                }),
            })
        }
        Err(error) => {
            if let Some(mut counted) = counted {
                counted.status = error.as_response_error().status_code().as_u16();
            }
            Err(error)
        }
    }
}

/// Status counted for a request whose client left before the end of its answer.
const CLIENT_LEFT: u16 = 499;

/// Counts the request when dropped.
struct Counted {
    state: Data<AppState>,
    method: Method,
    began: Duration,
    route: &'static str,
    status: u16,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let duration = self.state.clock.now().saturating_sub(self.began);
        self.state.stats.http_finished(self.route, self.method, self.status, duration);
    }
}

/// A request with an answer: counted with its status once the client has all of it.
struct Answered {
    counted: Counted,
    status: u16,
    /// Its connection's.
    _turn: Option<Turn>,
}

impl Companion for Answered {
    fn sent(&mut self) {
        self.counted.status = self.status;
    }
}

fn method(name: &str) -> Method {
    match name {
        "GET" => Method::Get,
        "POST" => Method::Post,
        "HEAD" => Method::Head,
        "PUT" => Method::Put,
        "DELETE" => Method::Delete,
        "OPTIONS" => Method::Options,
        _ => Method::Other,
    }
}

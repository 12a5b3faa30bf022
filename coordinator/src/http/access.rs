//! Every request has an id: the client's `X-Request-Id`, or one made here. The answer's header and
//! the response's `id` say it.
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::middleware::Next;
use actix_web::web::Data;
use actix_web::{HttpMessage as _, HttpRequest};

use super::fields::is_request_id;
use super::state::AppState;

const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// A request's id, among its extensions.
#[derive(Clone, Debug)]
struct RequestName(String);

/// The request's id.
#[must_use]
pub fn request_id(request: &HttpRequest) -> String {
    request.extensions().get::<RequestName>().map(|name| name.0.clone()).unwrap_or_default()
}

/// Gives the request its id and the answer a header that says it.
///
/// # Errors
/// The handler's own.
pub async fn identify(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    let Some(state) = request.app_data::<Data<AppState>>().cloned() else {
        return next.call(request).await;
    };
    let given = request.headers().get(&HEADER).and_then(|value| value.to_str().ok());
    let given = given.filter(|id| is_request_id(id, &state.limits)).map(str::to_owned);
    let id = given.unwrap_or_else(|| state.request_id());
    let header = HeaderValue::from_str(&id);
    request.extensions_mut().insert(RequestName(id));
    let mut response = next.call(request).await?;
    if let Ok(header) = header {
        response.headers_mut().insert(HEADER, header);
    }
    Ok(response)
}

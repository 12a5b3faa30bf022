//! `GET /metrics`: the whole cluster, in the format asked for.
use std::sync::Arc;

use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse};
use shared::clock::Clock;

use super::error::ApiError;
use super::state::AppState;
use crate::metrics::Hub;
use crate::metrics::exposition;

/// What a scrape is made of.
#[derive(Debug)]
pub struct MetricsPage {
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
}

impl MetricsPage {
    /// A page of everything in `hub`.
    #[must_use]
    pub fn new(hub: Arc<Hub>, clock: Arc<dyn Clock>) -> Self {
        Self { hub, clock }
    }
}

/// Answers a scrape.
pub(super) async fn respond(
    state: Data<AppState>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let Some(page) = state.metrics.clone() else {
        return Err(ApiError::unknown_path("GET", request.path()));
    };
    // Rendering thousands of series takes milliseconds: not on a thread that serves streams.
    let page = web::block(move || {
        let began = page.clock.now();
        let text = exposition::render(&page.hub.merged());
        page.hub.observer().record().scraped(page.clock.now().saturating_sub(began));
        text
    });
    match page.await {
        Ok(Ok(page)) => Ok(HttpResponse::Ok().content_type(exposition::CONTENT_TYPE).body(page)),
        _ => Err(ApiError::overloaded("the metrics could not be rendered")),
    }
}

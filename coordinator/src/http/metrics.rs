//! `GET /metrics`: the whole cluster, in the format asked for.
use std::net::TcpListener;
use std::sync::Arc;

use actix_web::dev::Server;
use actix_web::http::header::{ACCEPT, VARY};
use actix_web::middleware::Compress;
use actix_web::web::{self, Data};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer};
use shared::clock::Clock;

use super::error::ApiError;
use super::state::AppState;
use crate::metrics::Hub;
use crate::metrics::exposition::{Format, Page, PageOptions};

/// What a scrape is made of.
#[derive(Debug)]
pub struct MetricsPage {
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
    options: PageOptions,
}

impl MetricsPage {
    /// A page of everything in `hub`.
    #[must_use]
    pub fn new(hub: Arc<Hub>, clock: Arc<dyn Clock>, options: PageOptions) -> Self {
        Self { hub, clock, options }
    }

    /// Merges and renders; takes milliseconds with thousands of series.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        let began = self.clock.now();
        let merged = self.hub.merged();
        let exemplars = match format {
            Format::OpenMetrics => self.hub.exemplars(),
            Format::Text => Vec::new(),
        };
        let gathered = self.hub.registry().gather();
        let page = Page { merged: &merged, exemplars: &exemplars, gathered: &gathered };
        let mut text = String::new();
        page.render(format, &self.options, &mut text);
        self.hub.observer().record().scraped(self.clock.now().saturating_sub(began));
        text
    }
}

/// Serves nothing but the page, on a listener of its own: for scrapers that may not reach the API.
///
/// # Errors
/// When the listener cannot be used.
pub fn start(listener: TcpListener, page: Arc<MetricsPage>) -> std::io::Result<Server> {
    let server = HttpServer::new(move || {
        let page = page.clone();
        let scrape = web::get().to(move |request: HttpRequest| answer(page.clone(), request));
        App::new().service(web::resource("/metrics").wrap(Compress::default()).route(scrape))
    });
    Ok(server.workers(1).shutdown_timeout(1).disable_signals().listen(listener)?.run())
}

/// Answers a scrape beside the API.
pub(super) async fn respond(
    state: Data<AppState>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    match state.metrics.clone() {
        Some(page) => answer(page, request).await,
        None => Err(ApiError::not_here(
            "This is a front end: the metrics of the whole cluster, its own among them, are at the \
             coordinator's /metrics",
        )),
    }
}

async fn answer(page: Arc<MetricsPage>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let accept = request.headers().get_all(ACCEPT).filter_map(|value| value.to_str().ok());
    let format = Format::negotiate(&accept.collect::<Vec<_>>().join(","));
    // Not on a thread that serves streams.
    let text = web::block(move || page.render(format))
        .await
        .map_err(|_| ApiError::overloaded("the metrics could not be rendered"))?;
    Ok(HttpResponse::Ok()
        .insert_header((VARY, "Accept"))
        .content_type(format.content_type())
        .body(text))
}

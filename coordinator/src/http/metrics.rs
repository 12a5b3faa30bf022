//! `GET /metrics`: the whole cluster at the coordinator, a front end's own counts at a front end in
//! its own process; in the requested format.
//!
//! - `pages`: pages that are being sent
mod pages;

use std::io::Write as _;
use std::sync::Arc;

use actix_web::dev::Server;
use actix_web::http::KeepAlive;
use actix_web::http::header::{
    ACCEPT, AcceptEncoding, ContentEncoding, Encoding, Header as _, VARY,
};
use actix_web::web::{self, Data, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};
use flate2::Compression;
use flate2::write::GzEncoder;
use shared::actor::pulse::Pulse;
use shared::clock::Clock;
use shared::ids::Incarnation;
use shared::membership::View;
use shared::metrics::{Exemplars, Limits, Merged, Merger, Source};
use shared::protocol::FrontendId;
use tokio::sync::watch;

use self::pages::{PageBody, SentPages};
use super::error::ApiError;
use super::listener::HttpListener;
use super::root_path::RootPath;
use super::routes::{get, get_version};
use super::server::small_server;
use super::state::{AppState, ReadinessCheck};
use super::tls::Tls;
use super::{access, probes};
use crate::checkpoint::Publication;
use crate::metrics::exposition::{Format, Page, PageOptions};
use crate::metrics::hub::process_registry;
use crate::metrics::{FrontendStats, Hub, membership};

/// The sources of a page.
#[derive(Debug)]
pub struct MetricsPage {
    of: Of,
    clock: Arc<dyn Clock>,
    options: PageOptions,
    /// What to show, if not simply the present.
    publication: Option<Arc<Publication>>,
    /// The leader, if that can change.
    view: Option<(watch::Receiver<View>, Incarnation)>,
    /// What is being sent, by [`PageKind::index`].
    sent: [SentPages; PageKind::NUM],
}

/// What a scraper takes.
#[derive(Clone, Copy, Debug)]
struct PageKind {
    format: Format,
    gzip: bool,
}

impl PageKind {
    const NUM: usize = 4;

    fn of(request: &HttpRequest) -> Self {
        let accept = request.headers().get_all(ACCEPT).filter_map(|value| value.to_str().ok());
        let format = Format::negotiate(&accept.collect::<Vec<_>>().join(","));
        let ours = [Encoding::identity(), Encoding::gzip()];
        let taken = AcceptEncoding::parse(request).ok();
        let chosen = taken.and_then(|taken| taken.negotiate(ours.iter()));
        Self { format, gzip: chosen == Some(Encoding::gzip()) }
    }

    fn index(self) -> usize {
        usize::from(self.format == Format::OpenMetrics) * 2 + usize::from(self.gzip)
    }
}

/// Whose metrics a page shows.
#[derive(Debug)]
enum Of {
    /// The cluster's.
    Cluster(Arc<Hub>),
    /// Those of one front end and its process.
    Frontend(FrontendStats, prometheus::Registry),
}

impl MetricsPage {
    /// Makes a page of everything in `hub`.
    #[must_use]
    pub fn new(hub: Arc<Hub>, clock: Arc<dyn Clock>, options: PageOptions) -> Self {
        Self {
            of: Of::Cluster(hub),
            clock,
            options,
            publication: None,
            view: None,
            sent: Default::default(),
        }
    }

    /// Makes a page of what a front end in its own process counts in `stats`.
    #[must_use]
    pub fn frontend(stats: FrontendStats, clock: Arc<dyn Clock>, options: PageOptions) -> Self {
        let options = PageOptions { frontend: true, ..options };
        let of = Of::Frontend(stats, process_registry());
        Self { of, clock, options, publication: None, view: None, sent: Default::default() }
    }

    /// Makes a leader's page: it shows moments that `publication` chooses, and only the membership
    /// once another process than `incarnation` leads, whose page then has the cluster's series.
    #[must_use]
    pub fn of_leader(
        self,
        publication: Option<Arc<Publication>>,
        view: watch::Receiver<View>,
        incarnation: Incarnation,
    ) -> Self {
        Self { publication, view: Some((view, incarnation)), ..self }
    }

    /// Merges and renders, which takes milliseconds with thousands of series.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        let began = self.clock.now();
        let mut text = String::new();
        match &self.of {
            Of::Cluster(hub) => {
                let gathered = hub.registry().gather();
                if let Some((view, incarnation)) = &self.view {
                    let view = view.borrow();
                    if view.other_than(incarnation.0).is_some() {
                        return membership::page(&view, &gathered, format);
                    }
                }
                let own = Merged::of(&hub.membership().snapshot());
                let snapshot = match &self.publication {
                    Some(publication) => publication.shown(),
                    None => Some(Arc::new(hub.page_snapshot())),
                };
                let (nothing, none) = (Merged::default(), Exemplars::new());
                let (merged, exemplars) =
                    snapshot.as_ref().map_or((&nothing, &none), |it| (&it.merged, &it.exemplars));
                let page = Page { merged, own: &own, exemplars, gathered: &gathered };
                page.render(format, &self.options, &mut text);
                hub.observer().record().scraped(self.clock.now().saturating_sub(began));
            }
            Of::Frontend(stats, registry) => {
                let mut merger = Merger::new(Limits::default());
                let (sequence, snapshot) = stats.report();
                let own = Source::Frontend(FrontendId(0));
                if let Err(error) = merger.apply(own, Incarnation(0), sequence, snapshot) {
                    tracing::error!(%error, "this front end's own metrics cannot be shown");
                }
                let (merged, gathered) = (merger.merged(), registry.gather());
                let own = Merged::default();
                let exemplars = Vec::new();
                let page =
                    Page { merged: &merged, own: &own, exemplars: &exemplars, gathered: &gathered };
                page.render(format, &self.options, &mut text);
            }
        }
        text
    }
}

/// Serves the page and the probes on a separate listener: for scrapers that may not reach the API,
/// and so that probes always get through, whatever clients do.
///
/// # Errors
/// If the listener cannot be used.
pub fn start(
    listener: HttpListener,
    page: Arc<MetricsPage>,
    readiness: ReadinessCheck,
    pulse: Pulse,
    tls: Option<&Tls>,
) -> std::io::Result<Server> {
    small_server(listener, tls, KeepAlive::default(), RootPath::default(), move |config| {
        declare(config, &page, &readiness, &pulse)
    })
}

/// Serves the page and the probes where the API will be, below `root` too, and refuses everything
/// else with 503. What is being waited for, with addresses and errors, is for operators: only
/// `/ready` tells it. Connections do not stay, so that the API soon has all of them.
///
/// # Errors
/// If the listener cannot be used.
pub fn start_waiting(
    listener: HttpListener,
    page: Arc<MetricsPage>,
    readiness: ReadinessCheck,
    pulse: Pulse,
    tls: Option<&Tls>,
    root: RootPath,
) -> std::io::Result<Server> {
    small_server(listener, tls, KeepAlive::Disabled, root, move |config| {
        declare(config, &page, &readiness, &pulse);
        config
            .route("/ping", get().to(HttpResponse::Ok))
            .route("/ping", web::post().to(HttpResponse::Ok))
            .route("/version", get().to(get_version))
            .default_service(web::to(|request: HttpRequest| {
                let error = ApiError::overloaded("this front end does not serve yet");
                std::future::ready(Err::<HttpResponse, _>(access::told(error, &request)))
            }));
    })
}

fn declare(
    config: &mut ServiceConfig,
    page: &Arc<MetricsPage>,
    readiness: &ReadinessCheck,
    pulse: &Pulse,
) {
    let page = page.clone();
    let scrape = get().to(move |request: HttpRequest| answer(page.clone(), request));
    config.service(web::resource("/metrics").route(scrape));
    probes::declare(config, readiness, pulse);
}

/// Answers a scrape on the API's listener.
pub(super) async fn respond(
    state: Data<AppState>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    match state.metrics.clone() {
        Some(page) => answer(page, request).await,
        None => Err(ApiError::not_here("Metrics are turned off here (--disable-metrics)")),
    }
}

async fn answer(page: Arc<MetricsPage>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let kind = PageKind::of(&request);
    let (rendering, clock) = (page.clone(), page.clock.clone());
    let sent = page.sent[kind.index()].get(clock, move || {
        let text = rendering.render(kind.format).into_bytes();
        if kind.gzip { compressed(&text) } else { text }
    });
    let sent = sent.await.map_err(|_| ApiError::overloaded("the metrics could not be rendered"))?;
    let mut response = HttpResponse::Ok();
    response.insert_header((VARY, "Accept, Accept-Encoding"));
    response.content_type(kind.format.content_type());
    if kind.gzip {
        response.insert_header(ContentEncoding::Gzip);
    }
    Ok(response.body(PageBody::new(sent)))
}

/// Compresses a page, once for all who get it.
fn compressed(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(text.len() / 8), Compression::fast());
    // Memory takes everything.
    let _ = encoder.write_all(text);
    encoder.finish().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use shared::clock::SystemClock;

    use super::super::probes::tests::check;
    use super::super::state::Readiness;
    use super::*;

    #[actix_rt::test]
    async fn servers_of_the_page_tell_a_stuck_process_from_one_that_lives() {
        let (stats, clock) = (FrontendStats::new(), Arc::new(SystemClock::start()));
        let page = Arc::new(MetricsPage::frontend(stats, clock, PageOptions::default()));
        let ready: ReadinessCheck = Arc::new(|| Readiness { ready: true, message: String::new() });
        check(|it, pulse| start(it.into(), page.clone(), ready.clone(), pulse, None)).await;
        check(|it, pulse| {
            let root = RootPath::default();
            start_waiting(it.into(), page.clone(), ready.clone(), pulse, None, root)
        })
        .await;
    }
}

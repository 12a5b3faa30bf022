//! A coordinator that does not lead: it holds its addresses, reports who leads, and waits.
//!
//! Its HTTP answers that it is alive, that it is not ready and why, and refuses everything else
//! with 503 and the leader's address, so that a load balancer in front of several coordinators
//! finds the one that serves. Its metrics are only those of its membership: totals would begin at
//! zero here and jump when it leads. It hangs up on workers and front ends that dial it; they dial
//! again.
use std::io;
use std::time::Duration;

use actix_web::dev::{Server, ServerHandle};
use actix_web::http::KeepAlive;
use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::json;
use shared::actor::pulse::Pulse;
use shared::membership::View;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::coordinator::{PreparedCoordinator, StartError};
use crate::http::error::ApiError;
use crate::http::listener::{Endpoint, HttpListener, UNIX_SCHEME};
use crate::http::probes;
use crate::http::root_path::RootPath;
use crate::http::routes::{get, get_version};
use crate::http::server::small_server;
use crate::http::tls::Tls;
use crate::metrics::exposition::Format;
use crate::metrics::membership;

/// A running standby.
#[derive(Debug)]
pub struct Standby {
    servers: Vec<ServerHandle>,
    hanging_up: JoinHandle<()>,
}

impl Standby {
    /// Stands by on the addresses of `prepared`, which keeps them. It lives as long as its main
    /// thread has a pulse.
    ///
    /// # Errors
    /// If an address cannot be used.
    pub fn start(
        prepared: &PreparedCoordinator,
        view: &watch::Receiver<View>,
        pulse: &Pulse,
    ) -> Result<Self, StartError> {
        let failed = |address: Endpoint, option: &'static str| {
            move |error| StartError::Listen { address, option, error }
        };
        let mut servers = Vec::new();
        let mut serve_on = |listener: io::Result<HttpListener>, root: RootPath| {
            let server = serve(listener?, view.clone(), pulse.clone(), prepared.tls(), root)?;
            servers.push(server.handle());
            actix::spawn(server);
            Ok::<_, io::Error>(())
        };
        let http = &prepared.http;
        serve_on(http.listener.try_clone(), prepared.root_path().clone())
            .map_err(failed(http.endpoint.clone(), http.endpoint.option()))?;
        if let Some(metrics) = &prepared.metrics {
            let listener = metrics.listener.try_clone().map(HttpListener::Tcp);
            serve_on(listener, RootPath::default())
                .map_err(failed(metrics.address.into(), "--metrics-listen"))?;
        }
        let cluster = prepared.cluster.listener.try_clone();
        let cluster = cluster.and_then(tokio::net::TcpListener::from_std);
        let address = prepared.cluster.address.into();
        let cluster = cluster.map_err(failed(address, "--cluster-listen"))?;
        Ok(Self { servers, hanging_up: actix::spawn(close_connections(cluster)) })
    }

    /// Stops. Connections from now on wait for the next listener on these addresses.
    pub async fn stop(self) {
        self.hanging_up.abort();
        let _ = self.hanging_up.await;
        for server in self.servers {
            server.stop(false).await;
        }
    }
}

/// Beginning of what a standby reports.
const STANDS_BY: &str = "this coordinator stands by: ";

/// Reports who leads, in one sentence.
#[must_use]
pub fn reason(view: &View) -> String {
    let what = match &view.leader {
        Some(leader) if view.connected => format!("{} leads", url(&leader.record.http)),
        Some(leader) => format!("{} led when etcd last answered", url(&leader.record.http)),
        None if view.connected => "no coordinator leads yet".to_owned(),
        None => "etcd does not answer".to_owned(),
    };
    format!("{STANDS_BY}{what}")
}

/// Whether a server's message is that of a standby.
#[must_use]
pub fn is_reason(message: &str) -> bool {
    message.starts_with(STANDS_BY)
}

/// The URL of a server, such as a leader from its record: an address, or a full URL if it is not
/// plain HTTP, or a Unix socket.
#[must_use]
pub fn url(http: &str) -> String {
    let is_whole = http.contains("://") || http.starts_with(UNIX_SCHEME);
    let scheme = if is_whole { "" } else { "http://" };
    format!("{scheme}{http}")
}

async fn close_connections(listener: tokio::net::TcpListener) {
    loop {
        if listener.accept().await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

fn serve(
    listener: HttpListener,
    view: watch::Receiver<View>,
    pulse: Pulse,
    tls: Option<&Tls>,
    root: RootPath,
) -> io::Result<Server> {
    small_server(listener, tls, KeepAlive::default(), root, move |config| {
        config
            .app_data(Data::new(view.clone()))
            .app_data(Data::new(pulse.clone()))
            .route("/live", get().to(live))
            .route("/health", get().to(live))
            .route("/ping", get().to(HttpResponse::Ok))
            .route("/ping", web::post().to(HttpResponse::Ok))
            .route("/version", get().to(get_version))
            .route("/ready", get().to(ready))
            .route("/metrics", get().to(metrics))
            .default_service(web::to(refuse));
    })
}

async fn live(pulse: Data<Pulse>) -> Result<HttpResponse, ApiError> {
    probes::live(&pulse).await
}

async fn ready(view: Data<watch::Receiver<View>>) -> HttpResponse {
    let message = reason(&view.borrow());
    HttpResponse::ServiceUnavailable().json(json!({"ready": false, "message": message}))
}

async fn refuse(view: Data<watch::Receiver<View>>) -> Result<HttpResponse, ApiError> {
    Err(ApiError::overloaded(reason(&view.borrow())))
}

async fn metrics(view: Data<watch::Receiver<View>>, request: HttpRequest) -> HttpResponse {
    let accept = request.headers().get("accept").and_then(|value| value.to_str().ok());
    let format = Format::negotiate(accept.unwrap_or(""));
    let text = membership::page(&view.borrow(), &[], format);
    HttpResponse::Ok().content_type(format.content_type()).body(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[actix_rt::test]
    async fn a_standby_tells_a_stuck_process_from_one_that_lives() {
        let (_sender, view) = watch::channel(View::default());
        probes::tests::check(|listener, pulse| {
            serve(listener.into(), view.clone(), pulse, None, RootPath::default())
        })
        .await;
    }

    #[test]
    fn a_leader_is_named_by_its_url_or_its_socket() {
        assert_eq!(url("h:80"), "http://h:80");
        assert_eq!(url("https://h:80"), "https://h:80");
        assert_eq!(url("unix:/run/tutti.sock"), "unix:/run/tutti.sock");
    }
}

//! Probes: whether a process lives, and whether it is ready.
use std::net::TcpListener;

use actix_web::HttpResponse;
use actix_web::dev::Server;
use actix_web::http::KeepAlive;
use actix_web::web::{self, ServiceConfig};

use super::routes::{self, get};
use super::server::small_server;
use super::state::ReadinessCheck;

/// Serves `/live` and `/ready` and nothing else.
///
/// # Errors
/// If the listener cannot be used.
pub fn start(listener: TcpListener, readiness: ReadinessCheck) -> std::io::Result<Server> {
    small_server(listener, None, KeepAlive::default(), move |config| declare(config, &readiness))
}

/// Declares them.
pub(super) fn declare(config: &mut ServiceConfig, readiness: &ReadinessCheck) {
    let readiness = readiness.clone();
    let probe = get().to(move || std::future::ready(routes::ready(readiness())));
    config
        .service(web::resource("/ready").route(probe))
        .service(web::resource(["/live", "/health"]).route(get().to(HttpResponse::Ok)));
}

//! Probes: whether a process lives, and whether it is ready.
use std::net::TcpListener;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::dev::Server;
use actix_web::http::KeepAlive;
use actix_web::web::{self, ServiceConfig};
use shared::actor::pulse::Pulse;

use super::error::ApiError;
use super::routes::{self, get};
use super::server::small_server;
use super::state::ReadinessCheck;

/// A process whose main thread is silent for longer than this lives no more: whoever looks after it
/// should start it again. Longer than anything that such a thread does in one go.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Serves `/live` and `/ready` and nothing else.
///
/// # Errors
/// If the listener cannot be used.
pub fn start(
    listener: TcpListener,
    readiness: ReadinessCheck,
    pulse: Pulse,
) -> std::io::Result<Server> {
    small_server(listener, None, KeepAlive::default(), move |config| {
        declare(config, &readiness, &pulse);
    })
}

/// Declares them.
pub(super) fn declare(config: &mut ServiceConfig, readiness: &ReadinessCheck, pulse: &Pulse) {
    let (readiness, pulse) = (readiness.clone(), pulse.clone());
    let probe = get().to(move || std::future::ready(routes::ready(readiness())));
    let lives = get().to(move || std::future::ready(live(&pulse)));
    config
        .service(web::resource("/ready").route(probe))
        .service(web::resource(["/live", "/health"]).route(lives));
}

/// Answers whether the process lives. This runs on a thread of its own, which says nothing of the
/// one that does the work.
///
/// # Errors
/// 503 if that one is stuck.
pub(crate) fn live(pulse: &Pulse) -> Result<HttpResponse, ApiError> {
    if is_alive(pulse.silence()) {
        Ok(HttpResponse::Ok().finish())
    } else {
        Err(ApiError::overloaded("the main thread of this process is stuck"))
    }
}

fn is_alive(silence: Option<Duration>) -> bool {
    silence.is_none_or(|silence| silence <= SILENCE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_whose_main_thread_is_stuck_does_not_live() {
        assert!(is_alive(None), "it is still starting");
        assert!(is_alive(Some(Duration::ZERO)) && is_alive(Some(SILENCE_MAX)));
        assert!(!is_alive(Some(SILENCE_MAX + Duration::from_millis(1))));
        let pulse = Pulse::default();
        assert_eq!(live(&pulse).unwrap().status(), 200);
        pulse.beat();
        assert_eq!(live(&pulse).unwrap().status(), 200);
    }
}

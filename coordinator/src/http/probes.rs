//! Probes: whether a process lives, and whether it is ready.
use std::net::TcpListener;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::dev::Server;
use actix_web::http::KeepAlive;
use actix_web::web::{self, ServiceConfig};
use shared::actor::pulse::{GOES_ON_WITHIN, Pulse};

use super::error::ApiError;
use super::root_path::RootPath;
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
    let root = RootPath::default();
    small_server(listener.into(), None, KeepAlive::default(), root, move |config| {
        declare(config, &readiness, &pulse);
    })
}

/// Declares them.
pub(super) fn declare(config: &mut ServiceConfig, readiness: &ReadinessCheck, pulse: &Pulse) {
    let (readiness, pulse) = (readiness.clone(), pulse.clone());
    let probe = get().to(move || std::future::ready(routes::ready(readiness())));
    let lives = get().to(move || {
        let pulse = pulse.clone();
        async move { live(&pulse).await }
    });
    config
        .service(web::resource("/ready").route(probe))
        .service(web::resource(["/live", "/health"]).route(lives));
}

/// Answers whether the process lives. This runs on a thread of its own, which says nothing of the
/// one that does the work.
///
/// # Errors
/// 503 if that one is stuck.
pub(crate) async fn live(pulse: &Pulse) -> Result<HttpResponse, ApiError> {
    if !is_alive(pulse.silence()) {
        // Where the whole process stood still, this thread may be the first to go on.
        tokio::time::sleep(GOES_ON_WITHIN).await;
        if !is_alive(pulse.silence()) {
            return Err(ApiError::overloaded("the main thread of this process is stuck"));
        }
    }
    Ok(HttpResponse::Ok().finish())
}

fn is_alive(silence: Option<Duration>) -> bool {
    silence.is_none_or(|silence| silence <= SILENCE_MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::super::state::Readiness;
    use super::*;

    /// Checks that a server tells a process that is stuck from one that lives.
    pub(crate) async fn check(serve: impl Fn(TcpListener, Pulse) -> std::io::Result<Server>) {
        for (silence, status) in [(Duration::ZERO, "200"), (2 * SILENCE_MAX, "503")] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let address = listener.local_addr().unwrap();
            let server = serve(listener, Pulse::silent_for(silence)).unwrap();
            let handle = server.handle();
            actix_rt::spawn(server);
            for path in ["/live", "/health"] {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let request =
                    format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
                stream.write_all(request.as_bytes()).await.unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await.unwrap();
                let expected = format!("HTTP/1.1 {status} ");
                assert!(answer.starts_with(&expected), "{path} after {silence:?}: {answer}");
            }
            handle.stop(false).await;
        }
    }

    #[actix_rt::test]
    async fn probes_alone_tell_a_stuck_process_from_one_that_lives() {
        let ready: ReadinessCheck = Arc::new(|| Readiness { ready: true, message: String::new() });
        check(|listener, pulse| start(listener, ready.clone(), pulse)).await;
    }

    #[actix_rt::test]
    async fn a_process_whose_main_thread_is_stuck_does_not_live() {
        assert!(is_alive(None), "it is still starting");
        assert!(is_alive(Some(Duration::ZERO)) && is_alive(Some(SILENCE_MAX)));
        assert!(!is_alive(Some(SILENCE_MAX + Duration::from_millis(1))));
        assert_eq!(live(&Pulse::default()).await.unwrap().status(), 200);
        assert_eq!(live(&Pulse::silent_for(Duration::ZERO)).await.unwrap().status(), 200);
        assert!(live(&Pulse::silent_for(2 * SILENCE_MAX)).await.is_err());
    }

    #[actix_rt::test]
    async fn a_process_that_stood_still_as_a_whole_lives() {
        let pulse = Pulse::silent_for(2 * SILENCE_MAX);
        // The main thread goes on right after the first look.
        let (answer, ()) = tokio::join!(biased; live(&pulse), async { pulse.beat() });
        assert_eq!(answer.unwrap().status(), 200);
    }
}

//! Starts the servers: connections and their limits, what wraps every request.
use std::io;

use actix_cors::Cors;
use actix_web::dev::Server;
use actix_web::http::KeepAlive;
use actix_web::middleware::{Condition, from_fn};
use actix_web::web::ServiceConfig;
use actix_web::{App, HttpServer};

use super::connections::{HEAD_DEADLINE, KEPT};
use super::listener::HttpListener;
use super::root_path::{self, RootPath};
use super::routes::routes;
use super::state::AppState;
use super::tls::{self, Tls};
use super::{access, keys, traffic};
#[cfg(target_os = "linux")]
use crate::engine::TAKEN_WITHIN;

/// Maximum number of connections of a server without the API.
const SMALL_CONNECTIONS_MAX: usize = 1024;
/// Bytes of an answer that wait in a socket. What its client does not take stays with the request,
/// which is cancelled if that persists ([`TAKEN_WITHIN`]); a socket's own megabytes would hide a
/// slow client for minutes.
#[cfg(target_os = "linux")]
const UNSENT_MAX: u32 = 128 << 10;
/// Maximum number of connections, over all threads.
const CONNECTIONS_MAX: usize = 20_000;

/// Has a server listen, with TLS or without. A macro, since a function would have to name traits
/// that actix-web keeps to itself.
macro_rules! listening {
    ($server:ident, $listener:ident, $tls:ident) => {
        match ($listener, $tls) {
            (HttpListener::Tcp(listener), Some(tls)) => {
                $server.listen_rustls_0_23(listener, tls.config())?
            }
            (HttpListener::Tcp(listener), None) => $server.listen(listener)?,
            (HttpListener::Unix(listener), None) => $server.listen_uds(listener)?,
            (HttpListener::Unix(_), Some(_)) => return Err(no_tls()),
        }
    };
}

/// Starts the server, which runs until its handle stops it.
///
/// # Errors
/// If the listener cannot be used.
pub fn start(
    listener: impl Into<HttpListener>,
    state: AppState,
    threads: usize,
) -> io::Result<Server> {
    let (listener, tls) = (listener.into(), state.tls.clone());
    let (counted, stats) = (state.connections.clone(), state.stats.clone());
    let connections = CONNECTIONS_MAX.div_ceil(threads.max(1));
    bound_unsent(&listener)?;
    let server = HttpServer::new(move || {
        let state = state.clone();
        App::new()
            .wrap(from_fn(keys::authenticate))
            .wrap(cors(&state.allowed_origins))
            .wrap(from_fn(traffic::observe))
            .wrap(from_fn(access::identify))
            .wrap(from_fn(root_path::take_off))
            .configure(move |config| routes(config, &state))
    });
    let server = server
        .workers(threads)
        .max_connections(connections)
        // Unfinished handshakes must not keep others out: each is a connection, with a deadline.
        .max_connection_rate(connections)
        .tls_handshake_timeout(tls::HANDSHAKE_DEADLINE)
        .on_connect(move |stream, data| counted.take(stream, data, &stats))
        .client_request_timeout(HEAD_DEADLINE)
        .keep_alive(KEPT)
        // A client that closes its side is gone: its request is cancelled, streaming or not.
        .h1_allow_half_closed(false)
        .shutdown_timeout(5)
        .disable_signals();
    Ok(listening!(server, listener, tls).run())
}

/// actix-web does not serve it, and proxies on the same host do not ask for it.
fn no_tls() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "there is no TLS on Unix sockets")
}

/// Bounds what waits in a connection's socket, and for how long. Connections inherit it from their
/// listener. The buffers of a Unix socket are small, and who is gone from its other end is noticed.
fn bound_unsent(listener: &HttpListener) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if let HttpListener::Tcp(listener) = listener {
        let socket = socket2::SockRef::from(listener);
        socket.set_tcp_notsent_lowat(UNSENT_MAX)?;
        // Nobody asks for the next piece of an answer whose last piece is stuck, so only the
        // connection's own timer notices that its client is gone for good.
        socket.set_tcp_user_timeout(Some(TAKEN_WITHIN))?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = listener;
    Ok(())
}

/// Starts a single-threaded server without the API, for probes and scrapes, whose connections are
/// kept after an answer as `kept` says, and whose paths may begin with `root`.
///
/// # Errors
/// If the listener cannot be used.
pub fn small_server(
    listener: HttpListener,
    tls: Option<&Tls>,
    kept: KeepAlive,
    root: RootPath,
    routes: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
) -> io::Result<Server> {
    bound_unsent(&listener)?;
    let server = HttpServer::new(move || {
        let app = App::new().app_data(root.clone()).wrap(from_fn(root_path::take_off));
        app.configure(routes.clone())
    });
    let server = server
        .workers(1)
        .max_connections(SMALL_CONNECTIONS_MAX)
        .max_connection_rate(SMALL_CONNECTIONS_MAX)
        .tls_handshake_timeout(tls::HANDSHAKE_DEADLINE)
        .client_request_timeout(HEAD_DEADLINE)
        .keep_alive(kept)
        .shutdown_timeout(1)
        .disable_signals();
    Ok(listening!(server, listener, tls).run())
}

/// Lets scripts of these web origins use the API; without any, browsers block all of them.
fn cors(origins: &[String]) -> Condition<Cors> {
    let cors = if origins.iter().any(|origin| origin == "*") {
        Cors::default().allow_any_origin().send_wildcard()
    } else {
        origins.iter().fold(Cors::default(), |cors, origin| cors.allowed_origin(origin))
    };
    let cors = cors
        .allow_any_method()
        .allow_any_header()
        .expose_headers(["request-id", "x-request-id", "retry-after"])
        .expose_headers(keys::RATE_HEADERS.into_iter().flatten())
        .max_age(600);
    Condition::new(!origins.is_empty(), cors)
}

//! Routes, connection limits, start and stop.
use std::net::TcpListener;
use std::time::Duration;

use actix_cors::Cors;
use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{Server, ServiceRequest, ServiceResponse};
use actix_web::http::ConnectionType;
use actix_web::http::header::{CONTENT_ENCODING, CONTENT_TYPE, ContentType};
use actix_web::middleware::{Compress, Condition, Next, from_fn};
use actix_web::web::{self, BytesMut, Data, Payload, ServiceConfig};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, Route, guard, http};
use futures_util::StreamExt as _;
use serde_json::json;
use shared::metrics::labels::{Method, RejectReason};
use tokio::time::Instant;

use super::body::{Companion, accompanied};
use super::connections::{HEAD_DEADLINE, KEPT};
use super::error::ApiError;
use super::gate::{self, Visit};
use super::kept::{Kept, Turn};
use super::params::Fields;
use super::room::{Room, Share};
use super::state::{AppState, Readiness};
use super::terms::Terms;
use super::{
    access, adapters, admin, chat, completions, embeddings, keys, messages, metrics, models,
    openapi, pool, responses, terms,
    tls::{self, Tls},
    tokenize,
};
#[cfg(target_os = "linux")]
use crate::engine::TAKEN_WITHIN;

/// Maximum number of connections of a server without the API.
const SMALL_CONNECTIONS_MAX: usize = 1024;
/// Time limit for its body.
pub(super) const BODY_DEADLINE_S: u64 = 10;
/// Bytes of an answer that wait in a socket. What its client does not take stays with the request,
/// which is cancelled if that persists ([`TAKEN_WITHIN`]); a socket's own megabytes would hide a
/// slow client for minutes.
#[cfg(target_os = "linux")]
const UNSENT_MAX: u32 = 128 << 10;
/// Maximum number of connections, over all threads.
const CONNECTIONS_MAX: usize = 20_000;

/// Every path and its methods, for `Allow` and for the labels of HTTP metrics.
pub(super) const ROUTES: [(&str, &str); 21] = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/models", "GET, HEAD"),
    ("/v1/models/{id}", "GET, HEAD"),
    ("/v1/load_lora_adapter", "POST"),
    ("/v1/unload_lora_adapter", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/health", "GET, HEAD"),
    ("/live", "GET, HEAD"),
    ("/ready", "GET, HEAD"),
    ("/metrics", "GET, HEAD"),
    ("/load", "GET, HEAD"),
    ("/ping", "GET, HEAD, POST"),
    ("/version", "GET, HEAD"),
    ("/openapi.json", "GET, HEAD"),
    ("/", "GET, HEAD"),
];

/// Starts the server, which runs until its handle stops it.
///
/// # Errors
/// If the listener cannot be used.
pub fn start(listener: TcpListener, state: AppState, threads: usize) -> std::io::Result<Server> {
    let tls = state.tls.clone();
    let (counted, stats) = (state.connections.clone(), state.stats.clone());
    let connections = CONNECTIONS_MAX.div_ceil(threads.max(1));
    // Connections inherit this from their listener.
    #[cfg(target_os = "linux")]
    {
        let socket = socket2::SockRef::from(&listener);
        socket.set_tcp_notsent_lowat(UNSENT_MAX)?;
        // Nobody asks for the next piece of an answer whose last piece is stuck, so only the
        // connection's own timer notices that its client is gone for good.
        socket.set_tcp_user_timeout(Some(TAKEN_WITHIN))?;
    }
    let server = HttpServer::new(move || {
        let state = state.clone();
        App::new()
            .wrap(from_fn(keys::authenticate))
            .wrap(cors(&state.allowed_origins))
            .wrap(from_fn(observe))
            .wrap(from_fn(access::identify))
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
    Ok(match tls {
        Some(tls) => server.listen_rustls_0_23(listener, tls.config())?,
        None => server.listen(listener)?,
    }
    .run())
}

/// Starts a single-threaded server without the API: for probes and scrapes.
///
/// # Errors
/// If the listener cannot be used.
pub fn small_server(
    listener: TcpListener,
    tls: Option<&Tls>,
    routes: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
) -> std::io::Result<Server> {
    let server = HttpServer::new(move || App::new().configure(routes.clone()))
        .workers(1)
        .max_connections(SMALL_CONNECTIONS_MAX)
        .max_connection_rate(SMALL_CONNECTIONS_MAX)
        .tls_handshake_timeout(tls::HANDSHAKE_DEADLINE)
        .client_request_timeout(HEAD_DEADLINE)
        .shutdown_timeout(1)
        .disable_signals();
    Ok(match tls {
        Some(tls) => server.listen_rustls_0_23(listener, tls.config())?,
        None => server.listen(listener)?,
    }
    .run())
}

/// Declares the routes; also used by tests.
pub fn routes(config: &mut ServiceConfig, state: &AppState) {
    config.app_data(Data::new(state.clone()));
    for (path, allow) in ROUTES {
        let route: Route = match path {
            "/v1/completions" => web::post().to(post_completions),
            "/v1/chat/completions" => web::post().to(post_chat),
            "/v1/responses" => web::post().to(post_responses),
            "/v1/messages" => web::post().to(post_messages),
            "/v1/messages/count_tokens" => web::post().to(post_count_tokens),
            "/v1/embeddings" => web::post().to(post_embeddings),
            "/v1/load_lora_adapter" => web::post().to(post_load_adapter),
            "/v1/unload_lora_adapter" => web::post().to(post_unload_adapter),
            "/tokenize" => web::post().to(post_tokenize),
            "/detokenize" => web::post().to(post_detokenize),
            "/ping" => {
                any([http::Method::GET, http::Method::HEAD, http::Method::POST]).to(get_health)
            }
            "/load" => get().to(get_load),
            "/v1/models" => get().to(get_models),
            "/v1/models/{id}" => get().to(get_model),
            "/ready" => get().to(get_ready),
            "/metrics" => get().to(metrics::respond),
            "/openapi.json" => get().to(get_openapi),
            "/version" | "/" => get().to(get_version),
            _ => get().to(get_health),
        };
        let refuse = move |request: HttpRequest| async move {
            let error = ApiError::method(request.method().as_str(), allow);
            Err::<HttpResponse, _>(access::told(error, &request))
        };
        let resource = web::resource(pattern(path)).route(route).default_service(web::to(refuse));
        if path == "/metrics" {
            // Only this one: compressing a stream would delay its events.
            config.service(resource.wrap(Compress::default()));
        } else {
            config.service(resource);
        }
    }
    admin::routes(config);
    config.default_service(web::to(|request: HttpRequest| async move {
        let error = ApiError::unknown_path(request.method().as_str(), request.path());
        Err::<HttpResponse, _>(access::told(error, &request))
    }));
}

/// Accepts any of these methods.
fn any<const N: usize>(methods: [http::Method; N]) -> Route {
    web::route().guard(guard::fn_guard(move |it| methods.contains(&it.head().method)))
}

/// Accepts GET, and HEAD, which gateways use for probes.
pub(crate) fn get() -> Route {
    any([http::Method::GET, http::Method::HEAD])
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

/// Returns the pattern of a path: a model's name may contain slashes (`organisation/model`).
fn pattern(path: &str) -> &str {
    if path == "/v1/models/{id}" { "/v1/models/{id:.+}" } else { path }
}

async fn post_completions(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer(&state, &request, body, completions::respond).await
}

async fn post_chat(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer(&state, &request, body, chat::respond).await
}

async fn post_responses(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer(&state, &request, body, responses::respond).await
}

async fn post_messages(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer(&state, &request, body, messages::respond).await
}

async fn post_embeddings(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer(&state, &request, body, embeddings::respond).await
}

/// Answers a request for the engine, errors as its API tells them.
async fn answer(
    state: &AppState,
    request: &HttpRequest,
    body: Payload,
    respond: impl AsyncFnOnce(&AppState, Fields) -> Result<HttpResponse, ApiError>,
) -> Result<HttpResponse, ApiError> {
    admit(state, request, body, respond).await.map_err(|error| access::told(error, request))
}

/// Lets a request in, which counts as one that is inside until its answer is sent.
async fn admit(
    state: &AppState,
    request: &HttpRequest,
    body: Payload,
    respond: impl AsyncFnOnce(&AppState, Fields) -> Result<HttpResponse, ApiError>,
) -> Result<HttpResponse, ApiError> {
    let visit = enter(state)?;
    let turn = keys::enter(state, request)?;
    let answer = match terms(state, request) {
        Ok(terms) => match state.in_time(terms.deadline, read(state, request, body)).await {
            Ok(fields) => respond(state, fields.on_terms(terms)).await,
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    let answer = answer.map(|it| visit.until_sent(it)).map(|it| match turn {
        Some(turn) => turn.until_sent(it),
        None => it,
    });
    let answer = answer.inspect_err(|error| count(state, error));
    answer.map_err(|error| error.of_request(&access::request_id(request)))
}

/// Reads what applies to a request from its headers and its key.
fn terms(state: &AppState, request: &HttpRequest) -> Result<Terms, ApiError> {
    let timeout = terms::timeout(request.headers())?;
    let owner = keys::owner(request).filter(|_| !state.share_prefix_cache);
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    Ok(Terms { deadline, salts: state.salts.of(owner) })
}

async fn post_load_adapter(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    let changed = async {
        let changes = adapters::allowed(&state, &request)?;
        adapters::load(changes, &read(&state, &request, body).await?).await
    };
    changed.await.inspect_err(|error| count(&state, error))
}

async fn post_unload_adapter(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    let changed = async {
        let changes = adapters::allowed(&state, &request)?;
        adapters::unload(changes, &read(&state, &request, body).await?).await
    };
    changed.await.inspect_err(|error| count(&state, error))
}

async fn post_tokenize(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer_text(&state, &request, body, tokenize::tokenize).await
}

async fn post_count_tokens(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer_text(&state, &request, body, messages::count_tokens).await
}

async fn post_detokenize(
    state: Data<AppState>,
    request: HttpRequest,
    body: Payload,
) -> Result<HttpResponse, ApiError> {
    answer_text(&state, &request, body, tokenize::detokenize).await
}

/// Answers a request that asks nothing of the engine, with JSON.
async fn answer_text(
    state: &AppState,
    request: &HttpRequest,
    body: Payload,
    respond: impl AsyncFnOnce(&AppState, Fields) -> Result<String, ApiError>,
) -> Result<HttpResponse, ApiError> {
    let answer = match read(state, request, body).await {
        Ok(fields) => respond(state, fields).await,
        Err(error) => Err(error),
    };
    let answer = answer.inspect_err(|error| count(state, error));
    let answer = answer.map_err(|error| access::told(error, request))?;
    Ok(HttpResponse::Ok().content_type(ContentType::json()).body(answer))
}

/// Reports how many requests are being answered, in vLLM's format.
async fn get_load(state: Data<AppState>) -> HttpResponse {
    HttpResponse::Ok().json(json!({"server_load": state.gate.inside()}))
}

/// Lets a request in, unless the server was told to end.
fn enter(state: &AppState) -> Result<Visit, ApiError> {
    state.gate.enter().ok_or_else(|| {
        state.stats.rejected(RejectReason::ShuttingDown);
        gate::closed()
    })
}

/// Counts a rejected request, unless that has been done already.
fn count(state: &AppState, error: &ApiError) {
    if let Some(reason) = error.reason() {
        state.stats.rejected(reason);
    }
}

async fn read(state: &AppState, request: &HttpRequest, body: Payload) -> Result<Fields, ApiError> {
    let found = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let found = found.unwrap_or("");
    let essence = found.split(';').next().unwrap_or("").trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::content_type(found));
    }
    let encoding = request.headers().get(CONTENT_ENCODING);
    if let Some(encoding) = encoding.filter(|it| !it.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(ApiError::content_encoding(&String::from_utf8_lossy(encoding.as_bytes())));
    }
    let bytes = collect(body, &state.room);
    let deadline = Duration::from_secs(BODY_DEADLINE_S);
    let (bytes, share) = tokio::time::timeout(deadline, bytes)
        .await
        .map_err(|_| ApiError::too_slow(BODY_DEADLINE_S))??;
    let id = access::request_id(request);
    let tally = access::tally(request).metered(keys::meter(state, request));
    let fields = if bytes.len() > pool::LARGE {
        let limits = state.limits.clone();
        state
            .with_text(bytes.len(), move |_| Ok(Fields::parse(&bytes, &limits)?.in_room(share)))
            .await
    } else {
        Fields::parse(&bytes, &state.limits)
    };
    Ok(fields?.of_request(&id).counted_in(tally))
}

async fn collect(mut body: Payload, room: &Room) -> Result<(BytesMut, Share), ApiError> {
    let mut whole = room.body();
    while let Some(chunk) = body.next().await {
        let chunk =
            chunk.map_err(|error| ApiError::body(format!("The body ended early: {error}")))?;
        whole.push(&chunk)?;
    }
    Ok(whole.whole())
}

async fn get_models(state: Data<AppState>) -> HttpResponse {
    HttpResponse::Ok().json(models::list(&state))
}

async fn get_model(state: Data<AppState>, id: web::Path<String>) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(models::get(&state, &id)?))
}

async fn get_health() -> HttpResponse {
    HttpResponse::Ok().finish()
}

async fn get_ready(state: Data<AppState>) -> HttpResponse {
    let readiness = if state.gate.is_closed() { Readiness::ending() } else { (state.readiness)() };
    ready(readiness)
}

/// Makes the answer of `/ready`.
pub(super) fn ready(readiness: Readiness) -> HttpResponse {
    let body = json!({"ready": readiness.ready, "message": readiness.message});
    if readiness.ready {
        HttpResponse::Ok().json(body)
    } else {
        HttpResponse::ServiceUnavailable().json(body)
    }
}

/// `GET /version`.
pub(crate) async fn get_version() -> HttpResponse {
    HttpResponse::Ok().json(json!({"name": "tutti", "version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /openapi.json`.
async fn get_openapi(state: Data<AppState>) -> HttpResponse {
    HttpResponse::Ok().json(openapi::document(&state))
}

/// Counts every HTTP request by route, method and status, and times it to the end of its answer.
async fn observe(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
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

//! Every path and what answers it.
use std::sync::Once;

use actix_web::http::Method;
use actix_web::http::header::{ACCESS_CONTROL_REQUEST_METHOD, ContentType, ORIGIN};
use actix_web::web::{self, Data, Payload, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse, Resource, Route, guard};
use serde_json::json;
use shared::protocol::PROTOCOL_VERSION;

use super::error::ApiError;
use super::fields::Fields;
use super::intake::{self, read};
use super::state::{AppState, Readiness};
use super::{
    access, adapters, admin, chat, classes, completions, embeddings, invocations, messages,
    metrics, models, openapi, pooling, probes, responses, scores, tokenize,
};

/// Where the tokenizer is described, if the operator wants that.
const TOKENIZER_INFO: &str = "/tokenizer_info";

/// Every path and its methods, for `Allow` and for the labels of HTTP metrics.
pub(super) const ROUTES: [(&str, &str); 30] = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/rerank", "POST"),
    ("/v2/rerank", "POST"),
    ("/rerank", "POST"),
    ("/v1/score", "POST"),
    ("/score", "POST"),
    ("/classify", "POST"),
    ("/pooling", "POST"),
    ("/v1/models", "GET, HEAD"),
    ("/v1/models/{id}", "GET, HEAD"),
    ("/v1/load_lora_adapter", "POST"),
    ("/v1/unload_lora_adapter", "POST"),
    ("/invocations", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    (TOKENIZER_INFO, "GET, HEAD"),
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

/// Every path that is served and its methods, with those of operators.
pub fn paths() -> impl Iterator<Item = (&'static str, &'static str)> {
    ROUTES.into_iter().chain(admin::PATHS)
}

/// Whether a path among [`ROUTES`] is served with the operator's options; if not, it is unknown.
pub(super) fn is_served(path: &str, state: &AppState) -> bool {
    path != TOKENIZER_INFO || state.text.tokenizer_info.is_some()
}

/// Declares the routes; also used by tests.
pub fn routes(config: &mut ServiceConfig, state: &AppState) {
    config.app_data(Data::new(state.clone())).app_data(state.root_path.clone());
    for (path, allow) in ROUTES {
        if !is_served(path, state) {
            continue;
        }
        let route: Route = match path {
            "/v1/completions" => post(completions::respond),
            "/v1/chat/completions" => post(chat::respond),
            "/v1/responses" => post(responses::respond),
            "/v1/messages" => post(messages::respond),
            "/v1/messages/count_tokens" => post_text(messages::count_tokens),
            "/v1/embeddings" => post(embeddings::respond),
            "/v1/rerank" | "/v2/rerank" | "/rerank" => post(scores::rerank),
            "/v1/score" | "/score" => post(scores::score),
            "/classify" => post(classes::respond),
            "/pooling" => post(pooling::respond),
            "/v1/load_lora_adapter" => web::post().to(post_load_adapter),
            "/v1/unload_lora_adapter" => web::post().to(post_unload_adapter),
            "/invocations" => post(invocations::respond),
            "/tokenize" => post_text(tokenize::tokenize),
            "/detokenize" => post_text(tokenize::detokenize),
            "/ping" => any([Method::GET, Method::HEAD, Method::POST]).to(HttpResponse::Ok),
            "/load" => get().to(get_load),
            "/v1/models" => get().to(get_models),
            "/v1/models/{id}" => get().to(get_model),
            "/ready" => get().to(get_ready),
            "/metrics" => get().to(metrics::respond),
            TOKENIZER_INFO => get().to(get_tokenizer_info),
            "/openapi.json" => get().to(get_openapi),
            "/version" | "/" => get().to(get_version),
            // "/live" and "/health".
            _ => get().to(get_live),
        };
        config.service(resource(pattern(path), allow, route));
    }
    admin::routes(config);
    config.default_service(web::to(|request: HttpRequest| async move {
        let error = ApiError::unknown_path(request.method().as_str(), request.path());
        Err::<HttpResponse, _>(access::told(error, &request))
    }));
}

/// Answers a path: other methods than those in `allow` get a 405.
pub(super) fn resource(path: &str, allow: &'static str, route: Route) -> Resource {
    web::resource(path).route(route).default_service(web::to(
        move |request: HttpRequest| async move {
            tell_of_origins(&request);
            let error = ApiError::method(request.method().as_str(), allow);
            Err::<HttpResponse, _>(access::told(error, &request))
        },
    ))
}

/// A browser asks whether a web page may use the API, and it may not: its user sees no more than a
/// failed request, so the operator is told why, once.
fn tell_of_origins(request: &HttpRequest) {
    static TOLD: Once = Once::new();
    let asks = request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    if asks && request.method() == Method::OPTIONS {
        TOLD.call_once(|| {
            tracing::warn!(
                origin = ?request.headers().get(ORIGIN),
                "a web page may not use the API: --allowed-origins names those that may"
            );
        });
    }
}

/// Answers with what the engine makes of a body.
fn post(
    respond: impl AsyncFn(&AppState, Fields) -> Result<HttpResponse, ApiError> + Copy + 'static,
) -> Route {
    web::post().to(move |state: Data<AppState>, request: HttpRequest, body: Payload| async move {
        intake::answer(&state, &request, body, respond).await
    })
}

/// Answers with JSON, without asking anything of the engine.
fn post_text(
    respond: impl AsyncFn(&AppState, Fields) -> Result<String, ApiError> + Copy + 'static,
) -> Route {
    web::post().to(move |state: Data<AppState>, request: HttpRequest, body: Payload| async move {
        intake::answer_text(&state, &request, body, respond).await
    })
}

/// Accepts any of these methods.
fn any<const N: usize>(methods: [Method; N]) -> Route {
    web::route().guard(guard::fn_guard(move |it| methods.contains(&it.head().method)))
}

/// Accepts GET, and HEAD, which gateways use for probes.
pub(crate) fn get() -> Route {
    any([Method::GET, Method::HEAD])
}

/// Returns the pattern of a path: a model's name may contain slashes (`organisation/model`).
pub(super) fn pattern(path: &str) -> &str {
    if path == "/v1/models/{id}" { "/v1/models/{id:.+}" } else { path }
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
    changed.await.inspect_err(|error| intake::count(&state, error))
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
    changed.await.inspect_err(|error| intake::count(&state, error))
}

/// Reports how many requests are being answered, in vLLM's format.
async fn get_load(state: Data<AppState>) -> HttpResponse {
    HttpResponse::Ok().json(json!({"server_load": state.gate.inside()}))
}

async fn get_models(state: Data<AppState>) -> HttpResponse {
    HttpResponse::Ok().json(models::list(&state))
}

async fn get_model(state: Data<AppState>, id: web::Path<String>) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(models::get(&state, &id)?))
}

async fn get_live(state: Data<AppState>) -> Result<HttpResponse, ApiError> {
    probes::live(&state.pulse).await
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
    let (version, protocol) = (env!("CARGO_PKG_VERSION"), PROTOCOL_VERSION);
    HttpResponse::Ok().json(json!({"name": "tutti", "version": version, "protocol": protocol}))
}

/// `GET /tokenizer_info`.
async fn get_tokenizer_info(
    state: Data<AppState>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let info = state.text.tokenizer_info.clone();
    let unknown = || ApiError::unknown_path(request.method().as_str(), request.path());
    Ok(HttpResponse::Ok().content_type(ContentType::json()).body(info.ok_or_else(unknown)?))
}

/// `GET /openapi.json`.
async fn get_openapi(state: Data<AppState>) -> HttpResponse {
    HttpResponse::Ok().json(openapi::document(&state))
}

#[cfg(test)]
mod tests {
    use super::super::probes::tests::check;
    use super::super::server;
    use super::super::state::tests::state_of;
    use crate::engine::EngineHandle;

    #[actix_rt::test]
    async fn the_api_tells_a_stuck_process_from_one_that_lives() {
        let (engine, _commands) = EngineHandle::channel();
        let (state, _hub) = state_of(engine);
        check(|listener, pulse| server::start(listener, state.clone().with_pulse(pulse), 1)).await;
    }
}

//! `GET /openapi.json`: the API as an OpenAPI 3.1 document, for this model and these options. It
//! says of each field what the server accepts; numbers written as strings, which it accepts too,
//! are left out.
//!
//! - `places`: every path
//! - `schema`: small JSON schemas
//! - `requests`: the bodies of requests
//! - `parts`: what the conversations among them are made of
//! - `answers`: what is answered; `tokens`: what that tells of tokens
//! - `operators`: bodies and answers of the operator's API
mod answers;
mod operators;
mod parts;
mod places;
mod requests;
mod schema;
mod tokens;

use serde_json::{Map, Value, json};

use self::places::Answer::{Empty, Json, Metrics, Sentence, Stream};
use self::places::{OPERATORS, PLACES, Place, meaning};
use self::requests::Requests;
use self::schema::{any_of, integer, properties, reference};
use super::conversation::{EFFORT, EFFORTS};
use super::routes::{ROUTES, is_served};
use super::state::AppState;
use super::thinking::Thinking;
use super::{adapters, admin, keys, messages, terms};
use crate::text::reply::CallFormat;

/// Returns the document.
#[must_use]
pub fn document(state: &AppState) -> Value {
    let mut paths = Map::new();
    let mut add = |places: &[Place], routes: &[(&str, &str)]| {
        for place in places.iter().filter(|place| is_served(place.path, state)) {
            let methods = routes.iter().find(|(path, _)| *path == place.path);
            let methods = methods.map_or("", |(_, methods)| methods);
            paths.insert(place.path.to_owned(), of_path(state, place, methods));
        }
    };
    add(PLACES, &ROUTES);
    if state.admin.is_some() {
        add(OPERATORS, &admin::PATHS);
    }
    let mut components = json!({"schemas": schemas(state)});
    let mut ways = Map::new();
    if !state.keys.is_empty() {
        ways.insert("bearer".to_owned(), json!({"type": "http", "scheme": "bearer"}));
        let header = json!({"type": "apiKey", "in": "header", "name": "x-api-key"});
        ways.insert("key".to_owned(), header);
    }
    if state.admin.as_ref().is_some_and(|admin| admin.secret.is_some()) {
        let operator = json!({
            "type": "http", "scheme": "bearer",
            "description": "A token made from the cluster's secret.",
        });
        ways.insert("operator".to_owned(), operator);
    }
    if !ways.is_empty() {
        components["securitySchemes"] = ways.into();
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Tutti", "version": env!("CARGO_PKG_VERSION"),
            "description": "A server of language models, with OpenAI's API and Anthropic's. \
                            Fields that are null count as absent, and fields that are not listed \
                            are ignored. Numbers may also be written as strings.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": state.root_path.url()}],
        "paths": paths,
        "components": components,
    })
}

fn schemas(state: &AppState) -> Map<String, Value> {
    let template = state.text.template.as_ref();
    let knows = |name: &str| template.is_some_and(|it| it.knows(name, false));
    let is_harmony = template.and_then(|it| it.calls()) == Some(CallFormat::Harmony);
    let requests = Requests {
        limits: &state.limits,
        text: &state.text,
        models: state.models.all(),
        budgets: Thinking::of(state, 0).is_some(),
        documents: knows("documents"),
        efforts: (is_harmony && knows(EFFORT)).then_some(&EFFORTS),
    };
    let mut schemas = answers::all();
    schemas.extend(properties(json!({
        "CompletionRequest": requests.completions(),
        "ChatCompletionRequest": requests.chat(),
        "ResponseRequest": requests.responses(),
        "MessageRequest": requests.messages(),
        "TokenCountRequest": requests.count_tokens(),
        "EmbeddingsRequest": requests.embeddings(),
        "ClassifyRequest": requests.classify(),
        "PoolingRequest": requests.pooling(),
        "RerankRequest": requests.rerank(),
        "DetokenizeRequest": requests.detokenize(),
        "LoadAdapterRequest": requests::load_adapter(),
        "UnloadAdapterRequest": requests::unload_adapter(),
    })));
    // Bodies of several forms.
    let tokenize = [requests.tokenize_prompt(), requests.tokenize_chat()];
    add_forms(&mut schemas, "TokenizeRequest", &TOKENIZE_FORMS, tokenize);
    add_forms(&mut schemas, "ScoreRequest", &SCORE_FORMS, requests.scores());
    let invocations = ["Completion", "ChatCompletion", "Embeddings", "Classify", "Rerank", "Score"];
    let invocation = any_of(invocations.map(|name| reference(&format!("{name}Request"))));
    schemas.insert("InvocationRequest".to_owned(), invocation);
    if state.admin.is_some() {
        schemas.extend(operators::all());
    }
    schemas
}

/// The forms of `/tokenize`'s body.
const TOKENIZE_FORMS: [&str; 2] = ["TokenizePromptRequest", "TokenizeChatRequest"];
/// Those of `/score`'s, in the order of its pairs of names.
const SCORE_FORMS: [&str; 4] =
    ["ScoreTextsRequest", "ScoreDocumentsRequest", "ScoreItemsRequest", "ScoreDataRequest"];

/// Adds a body that has one of several forms. Each is a component: generators of clients make a
/// class of each.
fn add_forms<const N: usize>(
    schemas: &mut Map<String, Value>,
    name: &str,
    names: &[&str; N],
    forms: [Value; N],
) {
    schemas.insert(name.to_owned(), any_of(names.map(reference)));
    schemas.extend(names.iter().map(|name| (*name).to_owned()).zip(forms));
}

/// What a path does with each of its methods.
fn of_path(state: &AppState, place: &Place, methods: &str) -> Value {
    let mut of = Map::new();
    for method in methods.split(", ") {
        of.insert(method.to_lowercase(), operation(state, place, method));
    }
    if place.path == "/v1/models/{id}" {
        let id = json!({
            "name": "id", "in": "path", "required": true, "schema": {"type": "string"},
            "description": "A name, which may contain slashes.",
        });
        of.insert("parameters".to_owned(), json!([id]));
    }
    of.into()
}

fn operation(state: &AppState, place: &Place, method: &str) -> Value {
    let is_head = method == "HEAD";
    let mut responses = Map::new();
    let content = match place.answer {
        Empty => None,
        Json(schema) => Some(json!({"application/json": {"schema": reference(schema)}})),
        Stream(whole, event) => Some(json!({
            "application/json": {"schema": reference(whole)},
            "text/event-stream": {
                "schema": {"type": "string", "description": "With `stream`: events."},
                "x-event-schema": any_of([reference(event), reference(error_of(place.path))]),
            },
        })),
        Metrics => Some(json!({"text/plain": {}, "application/openmetrics-text": {}})),
        Sentence => Some(json!({"text/plain": {}})),
    };
    let mut good = json!({"description": "The answer."});
    if let Some(content) = content.filter(|_| !is_head) {
        good["content"] = content;
    }
    responses.insert("200".to_owned(), good);
    let is_guarded = keys::is_guarded(place.path) && !state.keys.is_empty();
    let unauthorized = is_guarded.then_some(401);
    for status in place.errors.iter().copied().chain(unauthorized) {
        let mut error = json!({"description": meaning(status)});
        if !is_head {
            let schema = match place.answer {
                Json("Readiness") => "Readiness",
                _ => error_of(place.path),
            };
            error["content"] = json!({"application/json": {"schema": reference(schema)}});
        }
        responses.insert(status.to_string(), error);
    }
    let mut operation = json!({
        "summary": place.summary, "operationId": operation_id(place.path, method),
        "responses": responses,
    });
    if let Some(body) = place.body {
        let content = json!({"application/json": {"schema": reference(body)}});
        operation["requestBody"] = json!({"required": true, "content": content});
    }
    let parameters = parameters(place);
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    let adapts = adapters::PATHS.contains(&place.path);
    let mut ways = Vec::new();
    if is_guarded || adapts && state.runtime_adapters && !state.keys.is_empty() {
        ways.extend([json!({"bearer": []}), json!({"key": []})]);
    }
    let operates = adapts || admin::is_at(place.path);
    if operates && state.admin.as_ref().is_some_and(|admin| admin.secret.is_some()) {
        ways.push(json!({"operator": []}));
    }
    if !ways.is_empty() {
        operation["security"] = ways.into();
    }
    operation
}

/// The component of a path's errors.
fn error_of(path: &str) -> &'static str {
    if messages::is_at(path) { "MessagesError" } else { "Error" }
}

fn parameters(place: &Place) -> Vec<Value> {
    let query = |name: &str, required: bool, schema: Value| json!({"name": name, "in": "query", "required": required, "schema": schema});
    if place.path == "/admin/logs" {
        return vec![
            query("node", true, json!({"type": "string"})),
            query("lines", false, integer(0, i64::MAX)),
            query("previous", false, json!({"type": "boolean"})),
            query("pid", false, integer(0, u32::MAX)),
        ];
    }
    if place.path == admin::RESET {
        let no = json!({"type": "boolean", "enum": [false]});
        return admin::reset::NEVER.map(|name| query(name, false, no.clone())).into();
    }
    if !place.errors.contains(&504) {
        return Vec::new();
    }
    let seconds = json!({"type": "number", "exclusiveMinimum": 0, "maximum": terms::TIMEOUT_MAX_S});
    let timeout = json!({
        "name": "X-Request-Timeout", "in": "header", "schema": seconds,
        "description": "Seconds after which the answer is no longer wanted.",
    });
    vec![timeout]
}

fn operation_id(path: &str, method: &str) -> String {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let words: Vec<&str> = words.collect();
    let words = if words.is_empty() { vec!["root"] } else { words };
    format!("{}_{}", method.to_lowercase(), words.join("_"))
}

//! `GET /openapi.json`: the API as an OpenAPI 3.1 document, for this model and these options. It
//! says of each field what the server accepts; numbers written as strings, which it accepts too,
//! are left out.
//!
//! - `schema`: small JSON schemas
//! - `requests`: the bodies of requests
//! - `parts`: what the conversations among them are made of
//! - `answers`: what is answered
mod answers;
mod parts;
mod requests;
mod schema;

use serde_json::{Map, Value, json};

use self::requests::Requests;
use self::schema::{any_of, bytes, given, integer, properties, reference};
use super::conversation::{EFFORT, EFFORTS};
use super::routes::ROUTES;
use super::state::AppState;
use super::{adapters, admin, keys, messages, terms};
use crate::text::reply::{CallFormat, Reasoning};

/// A path.
struct Place {
    path: &'static str,
    summary: &'static str,
    /// The component of its body, for POST.
    body: Option<&'static str>,
    answer: Answer,
    /// The other statuses that it may answer.
    errors: &'static [u16],
}

/// What a path answers if all goes well.
enum Answer {
    /// Nothing but its status.
    Empty,
    /// JSON.
    Json(&'static str),
    /// JSON, or a stream of such events.
    Stream(&'static str, &'static str),
    /// The metrics, as text.
    Metrics,
    /// A sentence.
    Sentence,
}

use Answer::{Empty, Json, Metrics, Sentence, Stream};

/// Of paths that reach the engine.
const ENGINE: &[u16] = &[400, 404, 408, 413, 415, 429, 500, 503, 504];
/// The same where 503 and a full queue are 529.
const OVERLOADED: &[u16] = &[400, 404, 408, 413, 415, 429, 500, 504, 529];
/// Of paths that only read text.
const READING: &[u16] = &[400, 404, 408, 413, 415, 500, 503];

/// Of paths that change adapters: 404 where they may not change.
const ADAPTING: &[u16] = &[400, 401, 403, 404, 408, 413, 415, 500, 503];

/// Every path of [`ROUTES`].
const PLACES: &[Place] = &[
    Place {
        path: "/v1/completions",
        summary: "Complete prompts",
        body: Some("CompletionRequest"),
        answer: Stream("Completion", "CompletionEvent"),
        errors: ENGINE,
    },
    Place {
        path: "/v1/chat/completions",
        summary: "Answer a conversation",
        body: Some("ChatCompletionRequest"),
        answer: Stream("ChatCompletion", "ChatCompletionEvent"),
        errors: ENGINE,
    },
    Place {
        path: "/v1/responses",
        summary: "Answer a conversation, in OpenAI's Responses API; nothing is stored",
        body: Some("ResponseRequest"),
        answer: Stream("Response", "ResponseEvent"),
        errors: ENGINE,
    },
    Place {
        path: "/v1/messages",
        summary: "Answer a conversation, in Anthropic's API",
        body: Some("MessageRequest"),
        answer: Stream("Message", "MessageEvent"),
        errors: OVERLOADED,
    },
    Place {
        path: "/v1/messages/count_tokens",
        summary: "Count the tokens of a conversation's prompt",
        body: Some("TokenCountRequest"),
        answer: Json("TokenCount"),
        errors: &[400, 404, 408, 413, 415, 500, 529],
    },
    Place {
        path: "/v1/embeddings",
        summary: "Compute a vector for each text",
        body: Some("EmbeddingsRequest"),
        answer: Json("Embeddings"),
        errors: ENGINE,
    },
    Place {
        path: "/v1/models",
        summary: "List the model, its other names and its adapters",
        body: None,
        answer: Json("Models"),
        errors: &[],
    },
    Place {
        path: "/v1/models/{id}",
        summary: "Show one of them",
        body: None,
        answer: Json("Model"),
        errors: &[404],
    },
    Place {
        path: "/tokenize",
        summary: "Turn text or a conversation into tokens",
        body: Some("TokenizeRequest"),
        answer: Json("Tokens"),
        errors: READING,
    },
    Place {
        path: "/detokenize",
        summary: "Turn tokens into text",
        body: Some("DetokenizeRequest"),
        answer: Json("Text"),
        errors: READING,
    },
    Place {
        path: "/v1/load_lora_adapter",
        summary: "Load a LoRA adapter, and serve it as a model of its own",
        body: Some("LoadAdapterRequest"),
        answer: Sentence,
        errors: ADAPTING,
    },
    Place {
        path: "/v1/unload_lora_adapter",
        summary: "Serve a LoRA adapter no longer; requests that use it end undisturbed",
        body: Some("UnloadAdapterRequest"),
        answer: Sentence,
        errors: ADAPTING,
    },
    Place {
        path: "/health",
        summary: "Answer while the process runs",
        body: None,
        answer: Empty,
        errors: &[],
    },
    Place {
        path: "/live",
        summary: "Answer while the process runs",
        body: None,
        answer: Empty,
        errors: &[],
    },
    Place {
        path: "/ready",
        summary: "Say whether requests can be served",
        body: None,
        answer: Json("Readiness"),
        errors: &[503],
    },
    Place {
        path: "/metrics",
        summary: "Show the metrics, in Prometheus's or OpenMetrics' text format",
        body: None,
        answer: Metrics,
        errors: &[404, 503],
    },
    Place {
        path: "/load",
        summary: "Say how many requests are being answered",
        body: None,
        answer: Json("Load"),
        errors: &[],
    },
    Place {
        path: "/ping",
        summary: "Answer while the process runs",
        body: None,
        answer: Empty,
        errors: &[],
    },
    Place {
        path: "/version",
        summary: "Show the program's version",
        body: None,
        answer: Json("Version"),
        errors: &[],
    },
    Place {
        path: "/openapi.json",
        summary: "Show this document",
        body: None,
        answer: Json("Document"),
        errors: &[],
    },
    Place {
        path: "/",
        summary: "Show the program's version",
        body: None,
        answer: Json("Version"),
        errors: &[],
    },
];

/// Statuses of all of the operator's paths.
const OPERATOR: &[u16] = &[400, 401, 403, 408, 415, 503];

/// The operator's paths, and their methods.
const OPERATORS: &[(Place, &str)] = &[
    (
        Place {
            path: "/admin/status",
            summary: "Show the cluster",
            body: None,
            answer: Json("Status"),
            errors: OPERATOR,
        },
        "GET",
    ),
    (
        Place {
            path: "/admin/logs",
            summary: "Show the last lines of a process's log",
            body: None,
            answer: Json("Log"),
            errors: OPERATOR,
        },
        "GET",
    ),
    (
        Place {
            path: "/admin/scale",
            summary: "Bound the replicas, or set the number of local workers",
            body: Some("ScaleRequest"),
            answer: Json("Scaled"),
            errors: OPERATOR,
        },
        "POST",
    ),
    (
        Place {
            path: "/admin/drain",
            summary: "Let a worker finish its requests and leave",
            body: Some("DrainRequest"),
            answer: Json("Drained"),
            errors: OPERATOR,
        },
        "POST",
    ),
    (
        Place {
            path: "/admin/actors/kill",
            summary: "End an actor of an application at once",
            body: Some("KillRequest"),
            answer: Json("Killed"),
            errors: OPERATOR,
        },
        "POST",
    ),
];

/// Returns the document.
#[must_use]
pub fn document(state: &AppState) -> Value {
    let mut paths = Map::new();
    for place in PLACES {
        let methods = ROUTES.iter().find(|(path, _)| *path == place.path);
        let methods = methods.map_or("", |(_, methods)| methods);
        paths.insert(place.path.to_owned(), of_path(state, place, methods));
    }
    if state.admin.is_some() {
        for (place, methods) in OPERATORS {
            paths.insert(place.path.to_owned(), of_path(state, place, methods));
        }
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
        "servers": [{"url": "/"}],
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
        reasons: state.reasoning != Reasoning::Untold,
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
        "TokenizeRequest": requests.tokenize(),
        "DetokenizeRequest": requests.detokenize(),
        "LoadAdapterRequest": requests::load_adapter(),
        "UnloadAdapterRequest": requests::unload_adapter(),
    })));
    if state.admin.is_some() {
        schemas.extend(answers::of_operators());
        let mut scale = given(
            &[],
            properties(json!({
                "replicas": integer(0, u32::MAX), "workers": integer(1, admin::LOCAL_WORKERS_MAX),
            })),
        );
        scale["properties"]["reset"] = json!({"type": "boolean"});
        let mut drain = given(&["node"], properties(json!({"node": bytes(0, admin::BODY_MAX)})));
        let mut kill = given(&["actor"], properties(json!({"actor": bytes(0, admin::BODY_MAX)})));
        kill["properties"]["restart"] = json!({"type": "boolean"});
        for schema in [&mut scale, &mut drain, &mut kill] {
            schema["additionalProperties"] = false.into();
        }
        schemas.insert("ScaleRequest".to_owned(), scale);
        schemas.insert("DrainRequest".to_owned(), drain);
        schemas.insert("KillRequest".to_owned(), kill);
    }
    schemas
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
    let operates = adapts || place.path.starts_with("/admin/");
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
    if place.path == "/admin/logs" {
        let query = |name: &str, required: bool, schema: Value| json!({"name": name, "in": "query", "required": required, "schema": schema});
        return vec![
            query("node", true, json!({"type": "string"})),
            query("lines", false, integer(0, i64::MAX)),
            query("previous", false, json!({"type": "boolean"})),
            query("pid", false, integer(0, u32::MAX)),
        ];
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

/// What a status means.
fn meaning(status: u16) -> &'static str {
    match status {
        400 => "A field is wrong, or prompt and output do not fit.",
        401 => "No API key or token, or an unknown one.",
        403 => "Not for this client.",
        404 => "There is no such model, or not at this process.",
        408 => "The body arrived too slowly.",
        413 => "The body is too large.",
        415 => "The body is not JSON.",
        429 => "The queue is full, or the API key has reached its limit: see Retry-After.",
        500 => "An error in the server.",
        503 => "Nothing can serve this now: see Retry-After.",
        504 => "The client's time limit has passed.",
        _ => "There is more to do than can be done now: see Retry-After.",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_route_is_described_and_no_other() {
        let described: BTreeSet<&str> = PLACES.iter().map(|place| place.path).collect();
        let routes: BTreeSet<&str> = ROUTES.iter().map(|(path, _)| *path).collect();
        assert_eq!(described, routes);
        assert_eq!((PLACES.len(), ROUTES.len()), (described.len(), routes.len()), "each once");
    }
}

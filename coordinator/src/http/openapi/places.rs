//! PURE: every path, with what it takes and what it answers.
use Answer::{Empty, Json, Metrics, Sentence, Stream};

/// A path.
pub(super) struct Place {
    pub(super) path: &'static str,
    pub(super) summary: &'static str,
    /// The component of its body, for POST.
    pub(super) body: Option<&'static str>,
    pub(super) answer: Answer,
    /// The other statuses that it may answer.
    pub(super) errors: &'static [u16],
}

/// What a path answers if all goes well.
pub(super) enum Answer {
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

/// Of paths that reach the engine.
const ENGINE: &[u16] = &[400, 404, 408, 413, 415, 429, 500, 503, 504];
/// The same where 503 and a full queue are 529.
const OVERLOADED: &[u16] = &[400, 404, 408, 413, 415, 429, 500, 504, 529];
/// Of paths that only read text.
const READING: &[u16] = &[400, 404, 408, 413, 415, 500, 503];

/// Of paths that change adapters: 404 where they may not change.
const ADAPTING: &[u16] = &[400, 401, 403, 404, 408, 413, 415, 500, 503];

/// Every path of the server's routes.
pub(super) const PLACES: &[Place] = &[
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
        answer: Stream("ModelResponse", "ResponseEvent"),
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
        path: "/v1/rerank",
        summary: "Order documents by how well they go with a query",
        body: Some("RerankRequest"),
        answer: Json("Ranking"),
        errors: ENGINE,
    },
    Place {
        path: "/v2/rerank",
        summary: "The same",
        body: Some("RerankRequest"),
        answer: Json("Ranking"),
        errors: ENGINE,
    },
    Place {
        path: "/rerank",
        summary: "The same",
        body: Some("RerankRequest"),
        answer: Json("Ranking"),
        errors: ENGINE,
    },
    Place {
        path: "/v1/score",
        summary: "Say how well texts go together",
        body: Some("ScoreRequest"),
        answer: Json("Scores"),
        errors: ENGINE,
    },
    Place {
        path: "/score",
        summary: "The same",
        body: Some("ScoreRequest"),
        answer: Json("Scores"),
        errors: ENGINE,
    },
    Place {
        path: "/classify",
        summary: "Sort texts into the classes of a model that has them",
        body: Some("ClassifyRequest"),
        answer: Json("Classes"),
        errors: ENGINE,
    },
    Place {
        path: "/pooling",
        summary: "Show what the model makes of each text: its classes, or else a vector",
        body: Some("PoolingRequest"),
        answer: Json("Pooled"),
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
        path: "/invocations",
        summary: "Answer what SageMaker sends: chat, completions, embeddings, classes, rerank, score",
        body: Some("InvocationRequest"),
        answer: Stream("Invocation", "InvocationEvent"),
        errors: ENGINE,
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
        path: "/tokenizer_info",
        summary: "Show the tokenizer's configuration, with the chat template in use",
        body: None,
        answer: Json("TokenizerInfo"),
        errors: &[],
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
        summary: "Say whether the process lives",
        body: None,
        answer: Empty,
        errors: &[503],
    },
    Place {
        path: "/live",
        summary: "Say whether the process lives",
        body: None,
        answer: Empty,
        errors: &[503],
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
        summary: "Show the versions of the program and of its protocol",
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
        summary: "Show the versions of the program and of its protocol",
        body: None,
        answer: Json("Version"),
        errors: &[],
    },
];

/// Statuses of all of the operator's paths.
const OPERATOR: &[u16] = &[400, 401, 403, 408, 415, 503];

/// The operator's paths.
pub(super) const OPERATORS: &[Place] = &[
    Place {
        path: "/admin/status",
        summary: "Show the cluster",
        body: None,
        answer: Json("Status"),
        errors: OPERATOR,
    },
    Place {
        path: "/admin/logs",
        summary: "Show the last lines of a process's log",
        body: None,
        answer: Json("Log"),
        errors: OPERATOR,
    },
    Place {
        path: "/admin/scale",
        summary: "Bound the replicas, or set the number of local workers",
        body: Some("ScaleRequest"),
        answer: Json("Scaled"),
        errors: OPERATOR,
    },
    Place {
        path: "/admin/drain",
        summary: "Let a worker finish its requests and leave",
        body: Some("DrainRequest"),
        answer: Json("Drained"),
        errors: OPERATOR,
    },
    Place {
        path: "/admin/actors/kill",
        summary: "End an actor of an application at once",
        body: Some("KillRequest"),
        answer: Json("Killed"),
        errors: OPERATOR,
    },
    Place {
        path: "/reset_prefix_cache",
        summary: "Forget all prompts in the prefix cache",
        body: None,
        answer: Json("Reset"),
        errors: &[400, 401, 403, 503],
    },
];

/// What a status means.
pub(super) fn meaning(status: u16) -> &'static str {
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

    use super::super::super::admin;
    use super::super::super::routes::ROUTES;
    use super::*;
    use crate::metrics::frontend::USUAL_ROUTES;

    #[test]
    fn every_route_is_described_and_no_other() {
        let described: BTreeSet<&str> = PLACES.iter().map(|place| place.path).collect();
        let routes: BTreeSet<&str> = ROUTES.iter().map(|(path, _)| *path).collect();
        assert_eq!(described, routes);
        assert_eq!((PLACES.len(), ROUTES.len()), (described.len(), routes.len()), "each once");
        let described: Vec<&str> = OPERATORS.iter().map(|place| place.path).collect();
        assert_eq!(described, admin::PATHS.map(|(path, _)| path));
    }

    #[test]
    fn requests_for_the_engine_are_counted_from_the_start() {
        let reaches = |place: &&Place| [ENGINE, OVERLOADED].contains(&place.errors);
        let reached: BTreeSet<&str> =
            PLACES.iter().filter(reaches).map(|place| place.path).collect();
        assert_eq!(reached, BTreeSet::from(USUAL_ROUTES));
    }
}

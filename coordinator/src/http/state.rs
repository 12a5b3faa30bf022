//! What handlers share.
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shared::actor::pulse::Pulse;
use shared::clock::{Clock, since_1970};
use shared::ids::RequestId;
use shared::metrics::labels::ExpiryReason;
use shared::mix::split_mix;
use shared::wire::keyring::Keyring;
use tokio::time::Instant;

use super::admin::Admin;
use super::connections::Connections;
use super::error::ApiError;
use super::fields::Fields;
use super::gate::Gate;
use super::keys::ApiKeys;
use super::metrics::MetricsPage;
use super::models::Models;
use super::options::{ApiOptions, forms};
use super::params::{Common, Guidance, Limits, adapter};
use super::pool::TextPool;
use super::room::Room;
use super::root_path::RootPath;
use super::structured::Asked;
use super::terms::Salts;
use super::tls::Tls;
use crate::adapters::AdapterChanges;
use crate::engine::EngineHandle;
use crate::guide::GrammarError;
use crate::metrics::FrontendStats;
use crate::text::model::TextModel;
use crate::text::reply::{CallFormat, Reasoning};
use crate::text::template::ChatTemplate;
use crate::traces::Traces;

/// Whether requests can be served now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// Whether they can.
    pub ready: bool,
    /// What is being waited for, if not.
    pub message: String,
}

impl Readiness {
    /// The readiness of a server that was told to end.
    #[must_use]
    pub fn ending() -> Self {
        let message = "the server is shutting down: it finishes running requests and accepts no \
                       new ones";
        Self { ready: false, message: message.to_owned() }
    }
}

/// Tells whether requests can be served now.
pub type ReadinessCheck = Arc<dyn Fn() -> Readiness + Send + Sync>;

/// What handlers share.
#[derive(Clone)]
pub struct AppState {
    /// The names of the model and its adapters in the API.
    pub models: Models,
    /// The tokenizer and templates.
    pub text: Arc<TextModel>,
    /// The handle to the engine.
    pub engine: EngineHandle,
    /// The bounds of requests.
    pub limits: Arc<Limits>,
    /// The process's clock.
    pub clock: Arc<dyn Clock>,
    /// Counts of this front end.
    pub stats: FrontendStats,
    /// The operator's API; at the coordinator.
    pub admin: Option<Admin>,
    /// The cluster's metrics, at the coordinator.
    pub metrics: Option<Arc<MetricsPage>>,
    /// Whether requests can be served now.
    pub readiness: ReadinessCheck,
    /// Whether the thread that serves them runs.
    pub pulse: Pulse,
    /// Whether requests are let in.
    pub gate: Gate,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    next_request: Arc<AtomicU64>,
    /// Distinguishes this process's response ids from others'.
    run: u64,
    seeds: u64,
    /// Who may use the API.
    pub keys: ApiKeys,
    /// Web origins whose scripts may use it.
    pub allowed_origins: Arc<[String]>,
    /// Whether each request is logged.
    pub access_log: bool,
    /// Traces requests, if traces are exported.
    pub traces: Option<Traces>,
    /// Format of the model's tool calls, if known.
    pub tool_calls: Option<CallFormat>,
    /// How reasoning is told apart from answers.
    pub reasoning: Reasoning,
    /// TLS, if HTTPS is served.
    pub tls: Option<Tls>,
    /// The path under which a proxy shows the API.
    pub root_path: RootPath,
    /// Keeps cached prompts of different owners apart.
    pub salts: Salts,
    /// Whether API keys share cached prompts.
    pub share_prefix_cache: bool,
    /// How many connections one address may have.
    pub connections: Connections,
    /// How much memory request bodies may take together.
    pub room: Room,
    /// Carries out changes of LoRA adapters, if there is room for any.
    pub adapter_changes: Option<AdapterChanges>,
    /// Whether all who may use the API may ask for them; operators always may.
    pub runtime_adapters: bool,
    /// The cluster's secrets, if it has any, by which operators are known.
    pub operators: Option<Keyring>,
    /// Runs work on text.
    texts: TextPool,
}

impl std::fmt::Debug for AppState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AppState").field("models", &self.models).finish_non_exhaustive()
    }
}

impl AppState {
    /// Makes the state. `run` is drawn at random for this process.
    #[must_use]
    pub fn new(
        text: Arc<TextModel>,
        engine: EngineHandle,
        limits: Limits,
        clock: Arc<dyn Clock>,
        stats: FrontendStats,
        readiness: ReadinessCheck,
        run: u64,
    ) -> Self {
        Self {
            models: Models::default(),
            text,
            engine,
            room: Room::new(limits.body_bytes),
            limits: Arc::new(limits),
            clock,
            stats,
            admin: None,
            metrics: None,
            readiness,
            pulse: Pulse::default(),
            gate: Gate::default(),
            created: since_1970().as_secs(),
            next_request: Arc::new(AtomicU64::new(1)),
            run,
            seeds: RandomState::new().hash_one(run),
            keys: ApiKeys::default(),
            allowed_origins: Arc::default(),
            access_log: false,
            traces: None,
            tool_calls: None,
            reasoning: Reasoning::default(),
            tls: None,
            root_path: RootPath::default(),
            salts: Salts::default(),
            share_prefix_cache: false,
            connections: Connections::default(),
            adapter_changes: None,
            runtime_adapters: false,
            operators: None,
            texts: TextPool::default(),
        }
    }

    /// Applies the operator's options.
    #[must_use]
    pub fn with_api(self, options: &ApiOptions) -> Self {
        let mut limits = (*self.limits).clone().chosen(options);
        let told = self.text.template.as_ref().and_then(ChatTemplate::calls);
        let (tool_calls, reasoning) = forms(options, told);
        limits.harmony = reasoning == Reasoning::Harmony;
        options.keys.count_in(&self.stats);
        if let Some(tls) = &options.tls {
            tls.count_in(&self.stats);
        }
        if let Some(traces) = &options.traces {
            traces.count_in(&self.stats);
        }
        Self {
            room: Room::new(limits.body_bytes),
            limits: Arc::new(limits),
            keys: options.keys.clone(),
            allowed_origins: options.allowed_origins.as_slice().into(),
            access_log: options.access_log,
            traces: options.traces.clone(),
            tool_calls,
            reasoning,
            tls: options.tls.clone(),
            root_path: options.root_path.clone(),
            share_prefix_cache: options.share_prefix_cache,
            connections: Connections::new(options.connections),
            runtime_adapters: options.runtime_adapters,
            ..self
        }
    }

    /// Sets the names that requests give.
    #[must_use]
    pub fn with_models(self, models: Models) -> Self {
        Self { models, ..self }
    }

    /// Rejects requests for a model that is not served.
    ///
    /// # Errors
    /// 404 for another model.
    pub fn check_model(&self, fields: &Fields) -> Result<(), ApiError> {
        adapter(fields, &self.models).map(drop)
    }

    /// Sets a gate that others close or watch.
    #[must_use]
    pub fn with_gate(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// Sets the pulse of the thread without which nothing is served.
    #[must_use]
    pub fn with_pulse(self, pulse: Pulse) -> Self {
        Self { pulse, ..self }
    }

    /// Adds the operator's API at `/admin`.
    #[must_use]
    pub fn with_admin(self, admin: Admin) -> Self {
        Self { admin: Some(admin), ..self }
    }

    /// Of a cluster with these secrets, if it has any.
    #[must_use]
    pub fn of_cluster(self, secrets: Option<&Keyring>) -> Self {
        Self { salts: Salts::new(secrets), operators: secrets.cloned(), ..self }
    }

    /// Sends changes of adapters there.
    #[must_use]
    pub fn with_adapter_changes(self, changes: Option<AdapterChanges>) -> Self {
        Self { adapter_changes: changes, ..self }
    }

    /// Adds the cluster's metrics at `/metrics`.
    #[must_use]
    pub fn with_metrics(self, page: Arc<MetricsPage>) -> Self {
        Self { metrics: Some(page), ..self }
    }

    /// Returns a new request's number.
    #[must_use]
    pub fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns an id for a request whose client gives none, such as `18c3f0a2b4d5e6f7-12`.
    #[must_use]
    pub fn request_id(&self) -> String {
        format!("{:016x}-{}", self.run, self.next_request().0)
    }

    /// Returns a random number, for requests that name no seed.
    #[must_use]
    pub fn draw_seed(&self, request: RequestId) -> u64 {
        // From a random start, which no client is told; different for every request.
        split_mix(self.seeds, request.0)
    }

    /// Compiles the constraint on a request's output.
    ///
    /// # Errors
    /// 400 naming the field, also if it takes too long; 503 if too many others wait.
    pub async fn make_guide(&self, common: &mut Common) -> Result<(), ApiError> {
        let Some(Asked { field, spec, .. }) = common.asked.take() else { return Ok(()) };
        let made = self.text.grammars.compile(&self.text, &spec).await;
        let made = made.map_err(|error| match error {
            GrammarError::Refused(why) => ApiError::field(field, format!("`{field}`: {why}")),
            GrammarError::Busy => ApiError::overloaded(error.to_string()),
            GrammarError::Broke => ApiError::internal(error.to_string()),
        })?;
        common.guide = Some(Guidance { field, spec: Arc::new(spec), grammar: made });
        Ok(())
    }

    /// Does work before a request runs, or gives up when its client's deadline passes.
    ///
    /// # Errors
    /// The work's own, and 504.
    pub async fn in_time<R>(
        &self,
        deadline: Option<Instant>,
        work: impl Future<Output = Result<R, ApiError>>,
    ) -> Result<R, ApiError> {
        let Some(deadline) = deadline else { return work.await };
        tokio::time::timeout_at(deadline, work).await.unwrap_or_else(|_| {
            self.stats.expired(ExpiryReason::Deadline);
            Err(ApiError::expired())
        })
    }

    /// Runs work on a text of so many bytes off the threads that serve connections, a bounded
    /// number at a time.
    ///
    /// # Errors
    /// The work's own error, and 503 if too much work is queued.
    pub async fn with_text<R: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&TextModel) -> Result<R, ApiError> + Send + 'static,
    ) -> Result<R, ApiError> {
        let text = self.text.clone();
        self.texts.run(bytes, move || work(&text)).await
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;
    use std::sync::mpsc;
    use std::time::Duration;

    use serde_json::{Value, json};
    use shared::clock::SystemClock;
    use shared::ids::Incarnation;
    use shared::metrics::catalogue::REQUESTS_EXPIRED;

    use super::super::terms::Terms;
    use super::super::{chat, completions, embeddings};
    use super::*;
    use crate::metrics::Hub;

    /// The demo model's state, with this engine.
    pub(in super::super) fn state_of(engine: EngineHandle) -> (AppState, Hub) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
        let text = Arc::new(TextModel::load(&folder).unwrap());
        let hub = Hub::new(Incarnation(1), shared::metrics::Limits::default());
        let clock = Arc::new(SystemClock::start());
        let ready = Arc::new(|| Readiness { ready: true, message: String::new() });
        let limits = Limits::new(text.max_positions);
        let stats = hub.frontend().clone();
        (AppState::new(text, engine, limits, clock, stats, ready, 7), hub)
    }

    #[actix_rt::test]
    async fn the_time_of_a_request_passes_while_its_text_waits_to_be_read() {
        let (engine, _commands) = EngineHandle::channel();
        let (mut state, hub) = state_of(engine);
        state.texts = TextPool::new(1, Duration::from_secs(60));
        let (go, wait) = mpsc::channel::<()>();
        let busy = {
            let texts = state.texts.clone();
            actix_rt::spawn(async move { texts.run(0, move || Ok(wait.recv().is_ok())).await })
        };
        tokio::task::yield_now().await;
        let fields = |body: Value| {
            let fields = Fields::parse(body.to_string().as_bytes(), &state.limits).unwrap();
            let deadline = Some(Instant::now() + Duration::from_millis(50));
            fields.on_terms(Terms { deadline, ..Terms::default() })
        };
        let messages = json!({"messages": [{"role": "user", "content": "a"}]});
        for (index, error) in [
            completions::respond(&state, fields(json!({"prompt": "a"}))).await.unwrap_err(),
            chat::respond(&state, fields(messages)).await.unwrap_err(),
            embeddings::respond(&state, fields(json!({"input": ["a", "b"]}))).await.unwrap_err(),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(error.json()["error"]["code"], "request_timeout", "{index}: {error}");
        }
        let expired = hub.merged().counter(REQUESTS_EXPIRED, ["deadline"]);
        assert_eq!(expired, Some(3), "each counts once");
        assert!(!busy.is_finished());
        go.send(()).unwrap();
        assert!(busy.await.unwrap().unwrap());
    }
}

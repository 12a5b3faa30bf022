//! What handlers share.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use shared::clock::Clock;
use shared::ids::RequestId;
use tokio::sync::Semaphore;

use super::admin::Admin;
use super::error::ApiError;
use super::gate::Gate;
use super::metrics::MetricsPage;
use super::params::Limits;
use crate::engine::EngineHandle;
use crate::metrics::FrontendStats;
use crate::text::model::TextModel;

/// Longest wait for the tokenizer.
const TOKENIZE_DEADLINE: Duration = Duration::from_secs(2);

/// Whether requests can be served now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// They can.
    pub ready: bool,
    /// What is being waited for, when not.
    pub message: String,
}

impl Readiness {
    /// Of a server that has been told to end.
    #[must_use]
    pub fn ending() -> Self {
        let message = "the server is ending: it finishes what runs and takes nothing new";
        Self { ready: false, message: message.to_owned() }
    }
}

/// Answers whether requests can be served now.
pub type ReadinessCheck = Arc<dyn Fn() -> Readiness + Send + Sync>;

/// What handlers share.
#[derive(Clone)]
pub struct AppState {
    /// The model's name in the API.
    pub model_name: Arc<str>,
    /// Its text side.
    pub text: Arc<TextModel>,
    /// The way to the engine.
    pub engine: EngineHandle,
    /// The bounds of requests.
    pub limits: Arc<Limits>,
    /// The process's clock.
    pub clock: Arc<dyn Clock>,
    /// Where this front end counts.
    pub stats: FrontendStats,
    /// The operator's side, at the coordinator.
    pub admin: Option<Admin>,
    /// The cluster's metrics, at the coordinator.
    pub metrics: Option<Arc<MetricsPage>>,
    /// Whether requests can be served now.
    pub readiness: ReadinessCheck,
    /// Whether requests are let in.
    pub gate: Gate,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    next_request: Arc<AtomicU64>,
    /// Tells this process's response ids from others'.
    run: u64,
    /// Bounds the work on the blocking pool.
    tokenizers: Arc<Semaphore>,
}

impl std::fmt::Debug for AppState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AppState").field("model_name", &self.model_name).finish_non_exhaustive()
    }
}

impl AppState {
    /// Puts the state together. `run` is drawn at random for this process.
    #[must_use]
    pub fn new(
        model_name: &str,
        text: Arc<TextModel>,
        engine: EngineHandle,
        limits: Limits,
        clock: Arc<dyn Clock>,
        stats: FrontendStats,
        readiness: ReadinessCheck,
        run: u64,
    ) -> Self {
        Self {
            model_name: model_name.into(),
            text,
            engine,
            limits: Arc::new(limits),
            clock,
            stats,
            admin: None,
            metrics: None,
            readiness,
            gate: Gate::default(),
            created: since_1970(),
            next_request: Arc::new(AtomicU64::new(1)),
            run,
            tokenizers: Arc::new(Semaphore::new(256)),
        }
    }

    /// With a gate that others close or watch.
    #[must_use]
    pub fn with_gate(self, gate: Gate) -> Self {
        Self { gate, ..self }
    }

    /// With the operator's side at `/admin`.
    #[must_use]
    pub fn with_admin(self, admin: Admin) -> Self {
        Self { admin: Some(admin), ..self }
    }

    /// With the cluster's metrics at `/metrics`.
    #[must_use]
    pub fn with_metrics(self, page: Arc<MetricsPage>) -> Self {
        Self { metrics: Some(page), ..self }
    }

    /// A new request's number.
    #[must_use]
    pub fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }

    /// An id for a request whose client gives none, such as `18c3f0a2b4d5e6f7-12`.
    #[must_use]
    pub fn request_id(&self) -> String {
        format!("{:016x}-{}", self.run, self.next_request().0)
    }

    /// A random number, for requests that name no seed.
    #[must_use]
    pub fn draw_seed(&self, request: RequestId) -> u64 {
        // splitmix64 of a random start: different for every request.
        let mut z = self.run.wrapping_add(request.0.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Runs work on text off the threads that serve connections, in bounded number and time.
    ///
    /// # Errors
    /// The work's own, and 503 when there is too much of it.
    pub async fn with_text<R: Send + 'static>(
        &self,
        work: impl FnOnce(&TextModel) -> Result<R, ApiError> + Send + 'static,
    ) -> Result<R, ApiError> {
        let busy = || ApiError::overloaded("the tokenizer is overloaded");
        let permit =
            tokio::time::timeout(TOKENIZE_DEADLINE, self.tokenizers.clone().acquire_owned());
        let permit = permit.await.map_err(|_| busy())?.map_err(|_| busy())?;
        let text = self.text.clone();
        let work = actix_web::web::block(move || {
            let _permit = permit;
            work(&text)
        });
        tokio::time::timeout(TOKENIZE_DEADLINE, work)
            .await
            .map_err(|_| busy())?
            .map_err(|_| busy())?
    }
}

/// Seconds since 1970.
#[must_use]
pub fn since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

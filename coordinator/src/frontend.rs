//! A front end in a process of its own: HTTP, templates, tokens to text and back. The engine is at
//! the other end of a link to the coordinator.
//!
//! It learns from the coordinator what is served, loads the same tokenizer, and serves the same
//! API; any number of them serve one cluster. What it counts is in the coordinator's `/metrics`; its
//! own shows its process, and its HTTP under names of their own.
mod uplink;

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix_web::dev::ServerHandle;
use shared::actor::ActorRuntime;
use shared::actor::link::Connection;
use shared::actor::link::join::{JoinError, REDIAL_MAX, REDIAL_MIN, join};
use shared::clock::{Clock, SystemClock, jittered};
use shared::ids::Incarnation;
use shared::membership::{CoordinatorAddress, Destination};
use shared::metrics::application::Metrics;
use shared::protocol::{FrontendHello, FrontendWelcome};
use shared::wire::auth::Secret;
use shared::wire::frame::FrameKind;
use tokio::sync::oneshot;

use self::uplink::Uplink;
use crate::coordinator::CLOSE_PATIENCE;
use crate::engine::EngineHandle;
use crate::http::gate::Gate;
use crate::http::metrics::MetricsPage;
use crate::http::models::Models;
use crate::http::options::ApiOptions;
use crate::http::params::Limits;
use crate::http::server;
use crate::http::state::AppState;
use crate::http::tls::scheme;
use crate::metrics::FrontendStats;
use crate::metrics::exposition::PageOptions;
use crate::text::model::{TextModel, TextModelError};

/// How long leaving may take.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// What `tutti frontend` was asked for.
#[derive(Clone, Debug)]
pub struct FrontendOptions {
    /// Where the coordinator is.
    pub coordinator: CoordinatorAddress,
    /// This front end's name, unique among front ends.
    pub node: String,
    /// Where HTTP is served.
    pub listen: SocketAddr,
    /// The model folder; where the coordinator has it unless given.
    pub model: Option<PathBuf>,
    /// What is chosen of the HTTP API.
    pub api: ApiOptions,
    /// Threads that serve HTTP.
    pub http_threads: usize,
    /// The NVML library, when it is not where the system's loader finds it.
    pub nvml: Option<PathBuf>,
    /// The cluster's secret.
    pub secret: Option<Secret>,
    /// Drawn at random for this process.
    pub run: u64,
    /// What the application counts; reported with everything else.
    pub application: Metrics,
    /// The process's named actors; the program may have some of its own.
    pub actors: ActorRuntime,
}

/// A front end cannot start, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The coordinator will not have it.
    #[error("the coordinator refuses this front end: {0}")]
    Refused(String),
    /// The model folder cannot be used.
    #[error(transparent)]
    Model(#[from] TextModelError),
    /// It is another model's.
    #[error(
        "{} turns text into tokens differently from the coordinator's model folder: \
         the files must be the same, and --chat-template too", folder.display()
    )]
    OtherText {
        /// The folder.
        folder: PathBuf,
    },
    /// The coordinator serves something else now.
    #[error("the coordinator now serves {0}; this front end was started for another model")]
    OtherModel(String),
    /// The address cannot be used.
    #[error("cannot listen on {address} (--listen): {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The operating system's words.
        error: std::io::Error,
    },
}

/// A running front end.
#[derive(Debug)]
pub struct Frontend {
    http_addr: SocketAddr,
    scheme: &'static str,
    http: ServerHandle,
    gate: Gate,
    stop: oneshot::Sender<()>,
    ended: oneshot::Receiver<FrontendError>,
}

impl Frontend {
    /// Joins the coordinator, waiting for it as long as it takes, and starts to serve.
    ///
    /// # Errors
    /// [`FrontendError`].
    pub async fn start(options: FrontendOptions) -> Result<Self, FrontendError> {
        let address = options.listen;
        let failed = |error| FrontendError::Listen { address, error };
        let bind = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let bound = listener.local_addr()?;
            Ok((listener, bound))
        };
        let (listener, http_addr) = bind().map_err(failed)?;
        let hello = FrontendHello {
            node: options.node.clone(),
            incarnation: Incarnation(options.run),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            slot: None,
        };
        let (to, connection, welcome) = dial_until_welcome(&options, &hello).await?;
        let serving = welcome.serving.clone();
        let folder = options.model.clone().unwrap_or_else(|| PathBuf::from(&serving.model));
        let text = Arc::new(TextModel::load_with(&folder, options.api.chat_template.as_deref())?);
        if text.fingerprint != serving.text_fingerprint {
            return Err(FrontendError::OtherText { folder });
        }
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
        let stats = FrontendStats::new();
        let (engine, commands) = EngineHandle::channel();
        let (threads, run) = (options.http_threads, options.run);
        let (api, secret) = (options.api.clone(), options.secret.clone());
        let gate = Gate::default();
        let uplink =
            Uplink::new(options, hello, serving.clone(), clock.clone(), stats.clone(), commands)
                .behind(gate.clone());
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let page_options = PageOptions {
            model_name: serving.served_model_name.clone(),
            clock_start: since_1970.saturating_sub(clock.now()),
            ..PageOptions::default()
        };
        let page = MetricsPage::frontend(stats.clone(), clock.clone(), page_options);
        let page = Arc::new(page);
        let state = AppState::new(
            text,
            engine,
            Limits::new(serving.max_model_len).with_priorities(serving.priorities),
            clock,
            stats,
            uplink.readiness(),
            run,
        )
        .with_models(Models::of(&serving))
        .of_cluster(secret.as_ref())
        .with_api(&api)
        .with_gate(gate.clone())
        .with_metrics(page);
        let scheme = scheme(api.tls.as_ref());
        let http = server::start(listener, state, threads).map_err(failed)?;
        let handle = http.handle();
        actix::spawn(http);
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        actix::spawn(async move {
            if let Some(error) = uplink.run(to, connection, welcome, stopped).await {
                let _ = end.send(error);
            }
        });
        Ok(Self { http_addr, scheme, http: handle, gate, stop, ended })
    }

    /// Where HTTP is served.
    #[must_use]
    pub fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// The URL of where HTTP is served.
    #[must_use]
    pub fn http_url(&self) -> String {
        format!("{}://{}", self.scheme, self.http_addr)
    }

    /// Resolves when it cannot go on.
    pub async fn failed(&mut self) -> FrontendError {
        match (&mut self.ended).await {
            Ok(error) => error,
            // The link's task ends without an error only when told to.
            Err(_) => std::future::pending().await,
        }
    }

    /// Requests that run.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.gate.inside()
    }

    /// Takes no new requests, is not ready any more, and waits for the requests that run, at most
    /// so long. Returns whether all have ended.
    pub fn finish(&self, patience: Duration) -> impl Future<Output = bool> + use<> {
        let gate = self.gate.clone();
        gate.close();
        async move { gate.empty_within(patience).await }
    }

    /// Fails what still runs, reports for the last time, and leaves.
    pub async fn stop(self) {
        self.gate.close();
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(STOP_PATIENCE, self.ended).await;
        // Connections without a request are not waited for.
        let _ = tokio::time::timeout(CLOSE_PATIENCE, self.http.stop(true)).await;
    }
}

/// Dials until the coordinator answers.
async fn dial_until_welcome(
    options: &FrontendOptions,
    hello: &FrontendHello,
) -> Result<(Destination, Connection, FrontendWelcome), FrontendError> {
    let (mut wait, mut attempt) = (REDIAL_MIN, 0);
    let mut address = options.coordinator.clone();
    let mut to = address.other(None).await;
    loop {
        let coordinator = to.address.as_str();
        let joined = tokio::select! {
            joined = join(coordinator, options.secret.as_ref(), FrameKind::FrontendHello, hello) => joined,
            _ = address.other(Some(&to)) => {
                Err(JoinError::Retry("another coordinator leads".to_owned()))
            }
        };
        match joined {
            Ok((connection, welcome)) => return Ok((to, connection, welcome)),
            Err(JoinError::Refused(reason)) => return Err(FrontendError::Refused(reason)),
            Err(JoinError::Retry(reason)) => {
                if wait == REDIAL_MIN {
                    tracing::info!(coordinator, %reason, "cannot join yet; dialling until it answers");
                }
            }
        }
        wait = (wait * 2).min(REDIAL_MAX);
        attempt += 1;
        let pause = jittered(wait, options.run, attempt);
        let other = tokio::time::timeout(pause, address.other(Some(&to))).await;
        to = other.unwrap_or(to);
    }
}

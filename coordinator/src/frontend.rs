//! A front end in its own process: HTTP, chat templates, tokenization. The engine is at the other
//! end of a link to the coordinator.
//!
//! It asks the coordinator which model is served, loads the same tokenizer, and serves the same
//! API; any number of front ends serve one cluster. Its counters appear on the coordinator's
//! `/metrics`; its own `/metrics` shows its process, and its HTTP under separate names.
//!
//! - `start_up`: what it answers until it serves
//! - `dial`: dials until a coordinator answers
//! - `adapters`: commands about LoRA adapters, which the coordinator carries out
//! - `incoming`: what the link has received and nobody has handled yet
//! - `uplink`: the link to the coordinator
//! - `usage`: resource use of this process
//! - `requests`: PURE: the requests, whichever coordinator has them
//! - `open_request`: PURE: one request, with what was accepted so far
//! - `held`: PURE: requests that wait for a coordinator that can take them
mod adapters;
mod dial;
mod held;
mod incoming;
mod open_request;
mod requests;
mod start_up;
mod uplink;
mod usage;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use shared::actor::ActorRuntime;
use shared::actor::pulse::Pulse;
use shared::clock::{Clock, SystemClock, since_1970};
use shared::hub::{DownloadHandle, Hub, HubModel, ModelArgument, ModelPart};
use shared::ids::Incarnation;
use shared::membership::CoordinatorAddress;
use shared::metrics::application::Metrics;
use shared::protocol::{FrontendHello, TEXT_PARTS};
use shared::wire::keyring::Keyring;
use tokio::sync::oneshot;

use self::dial::Dialler;
use self::start_up::{Bound, OwnedServer, StartUp};
use self::uplink::Uplink;
use crate::adapters::{AdapterChanges, ServedAdapters};
use crate::coordinator::{CLOSE_PATIENCE, TRACES_PATIENCE};
use crate::engine::EngineHandle;
use crate::http::gate::Gate;
use crate::http::listener::{BoundHttp, Endpoint, SocketFile};
use crate::http::metrics::{self, MetricsPage};
use crate::http::models::Models;
use crate::http::options::ApiOptions;
use crate::http::params::Limits;
use crate::http::server;
use crate::http::state::{AppState, Readiness, ReadinessCheck};
use crate::http::tls::scheme;
use crate::metrics::FrontendStats;
use crate::metrics::exposition::PageOptions;
use crate::text::model::{TextModel, TextModelError, TextOptions};
use crate::traces::Traces;

/// Time limit for leaving.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// The options of `tutti frontend`.
#[derive(Clone, Debug)]
pub struct FrontendOptions {
    /// The coordinator's address.
    pub coordinator: CoordinatorAddress,
    /// This front end's name, unique among front ends.
    pub node: String,
    /// Where HTTP is served.
    pub listen: Endpoint,
    /// A separate address for probes and scrapes, if any.
    pub metrics_listen: Option<SocketAddr>,
    /// The model folder; by default, and for a name on the hub, what the coordinator names.
    pub model: Option<PathBuf>,
    /// Where models of the hub come from, or why there is none.
    pub hub: Result<Hub, String>,
    /// Options of the HTTP API.
    pub api: ApiOptions,
    /// Number of threads that serve HTTP.
    pub http_threads: usize,
    /// Path of the NVML library, if the system's loader does not find it.
    pub nvml: Option<PathBuf>,
    /// The cluster's secrets, if it has any.
    pub secret: Option<Keyring>,
    /// A random number that identifies this process run.
    pub run: u64,
    /// The application's own metrics, reported together with all others.
    pub application: Metrics,
    /// The process's named actors; an embedding program may add its own.
    pub actors: ActorRuntime,
}

/// Why a front end cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The coordinator rejects it.
    #[error("the coordinator refuses this front end: {0}")]
    Refused(String),
    /// The model folder cannot be used.
    #[error(transparent)]
    Model(#[from] TextModelError),
    /// The model folder differs from the coordinator's.
    #[error(
        "{} is not what the coordinator serves: one of these differs: {TEXT_PARTS}",
        folder.display()
    )]
    OtherText {
        /// The folder.
        folder: PathBuf,
    },
    /// The files of a model of the hub cannot be had.
    #[error("{0}")]
    NoFiles(String),
    /// The coordinator now serves another model; in what it differs.
    #[error("the coordinator now serves another model than this front end was started for: {0}")]
    OtherModel(String),
    /// The address, or the Unix socket, cannot be used.
    #[error("cannot listen on {address} ({option}): {error}")]
    Listen {
        /// The address.
        address: Endpoint,
        /// The option that names it.
        option: &'static str,
        /// The operating system's error.
        error: std::io::Error,
    },
}

/// The folder with the text side of what a coordinator serves: the one that is `given`, or where
/// that is. A name on the hub is no other folder: it is in a file that all roles read, and the
/// coordinator alone knows which state of it is served.
async fn folder_of(
    given: Option<&Path>,
    served: &str,
    hub: &Result<Hub, String>,
) -> Result<PathBuf, FrontendError> {
    if let Some(given) = given {
        // What is neither is reported as a folder that is not there.
        let Ok(ModelArgument::Hub(name)) = ModelArgument::read(given, Path::exists) else {
            return Ok(given.to_owned());
        };
        let is_it = |model: HubModel| model.name == name;
        if !HubModel::parse(served).and_then(Result::ok).is_some_and(is_it) {
            tracing::warn!(
                model = name,
                served,
                "the coordinator serves another model, which is used"
            );
        }
    }
    text_of(served, hub).await
}

/// The folder with the text side of what a coordinator serves: a folder, or a model of the hub that
/// is fetched first.
async fn text_of(model: &str, hub: &Result<Hub, String>) -> Result<PathBuf, FrontendError> {
    let Some(model) = HubModel::parse(model) else { return Ok(PathBuf::from(model)) };
    let hub = hub.clone().map_err(FrontendError::NoFiles)?;
    let wanted = model.map_err(FrontendError::NoFiles)?.wanted();
    let watch = Arc::new(DownloadHandle::default());
    let called_off = CancelOnDrop(watch.clone());
    let fetched = on_thread("fetch", move || hub.fetch(&wanted, ModelPart::Text, &watch)).await?;
    drop(called_off);
    fetched.map(|it| it.folder).map_err(|error| FrontendError::NoFiles(error.to_string()))
}

/// Reads a model folder on another thread: this one has to show that it lives.
async fn read_text(folder: PathBuf, options: TextOptions) -> Result<TextModel, FrontendError> {
    Ok(on_thread("read text", move || TextModel::load_with(&folder, &options)).await??)
}

/// Does work on a thread of its own. Not one of the runtime's threads, for whose ends it waits: a
/// front end that is told to end does not finish this first.
async fn on_thread<R: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R, FrontendError> {
    let (done, result) = oneshot::channel();
    let thread = std::thread::Builder::new().name(name.to_owned());
    let spawned = thread.spawn(move || drop(done.send(work())));
    spawned
        .map_err(|error| FrontendError::NoFiles(format!("no thread to {name} with: {error}")))?;
    let gone = |_| FrontendError::NoFiles(format!("the thread to {name} with ended early"));
    result.await.map_err(gone)
}

/// Calls a download off when nobody waits for it any more.
struct CancelOnDrop(Arc<DownloadHandle>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The readiness of a front end that takes no more requests once the gate is closed.
fn closing(gate: Gate, check: ReadinessCheck) -> ReadinessCheck {
    Arc::new(move || if gate.is_closed() { Readiness::ending() } else { check() })
}

/// A running front end.
#[derive(Debug)]
pub struct Frontend {
    endpoint: Endpoint,
    /// The file of the Unix socket that serves HTTP, if one does.
    socket: Option<SocketFile>,
    scheme: &'static str,
    http: ServerHandle,
    /// The server of probes and scrapes, and its URL.
    probes: Option<(String, OwnedServer)>,
    gate: Gate,
    actors: ActorRuntime,
    stop: oneshot::Sender<()>,
    ended: oneshot::Receiver<FrontendError>,
    traces: Option<Traces>,
}

impl Frontend {
    /// Joins the coordinator, retrying until it answers, and starts to serve. Meanwhile it answers
    /// probes, `/ready` with what it waits for, and refuses everything else.
    ///
    /// # Errors
    /// [`FrontendError`].
    pub async fn start(options: FrontendOptions) -> Result<Self, FrontendError> {
        let bound = Bound::new(&options.listen, options.listen.option())?;
        let hello = FrontendHello {
            node: options.node.clone(),
            incarnation: Incarnation(options.run),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            slot: None,
        };
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
        let stats = FrontendStats::new();
        let page_options = PageOptions {
            clock_start: since_1970().saturating_sub(clock.now()),
            ..PageOptions::default()
        };
        let page = MetricsPage::frontend(stats.clone(), clock.clone(), page_options);
        let (page, start_up, gate) = (Arc::new(page), StartUp::new(), Gate::default());
        let (tls, pulse) = (options.api.tls.clone(), Pulse::default());
        actix::spawn(pulse.clone().keep());
        let probes = match options.metrics_listen {
            Some(address) => {
                let bound = Bound::new(&address.into(), "--metrics-listen")?;
                let url = bound.http.endpoint.url(scheme(tls.as_ref()));
                let check = closing(gate.clone(), start_up.check());
                let serve =
                    |it| metrics::start(it, page.clone(), check, pulse.clone(), tls.as_ref());
                Some((url, OwnedServer::start(&bound, serve)?))
            }
            None => None,
        };
        let waiting = |it| {
            let (page, check, root) =
                (page.clone(), start_up.check(), options.api.root_path.clone());
            metrics::start_waiting(it, page, check, pulse.clone(), tls.as_ref(), root)
        };
        let waiting = OwnedServer::start(&bound, waiting)?;
        let mut dialler = Dialler::new(&options, clock.clone()).telling(start_up.clone());
        let joined = dialler.dial(&hello, None).await?;
        let serving = joined.2.serving.clone();
        start_up.waits_for(format!("it loads what it needs of {}", serving.served_model_name));
        let folder = folder_of(options.model.as_deref(), &serving.model, &options.hub).await?;
        let text = Arc::new(read_text(folder.clone(), options.api.text.clone()).await?);
        if text.fingerprint != serving.text_fingerprint {
            return Err(FrontendError::OtherText { folder });
        }
        let (engine, commands) = EngineHandle::channel();
        let (threads, run) = (options.http_threads, options.run);
        let (api, secret) = (options.api.clone(), options.secret.clone());
        let actors = options.actors.clone();
        let adapters = ServedAdapters::of(&serving.adapters);
        let (changes, asks) = AdapterChanges::channel();
        let uplink =
            Uplink::new(options, hello, serving.clone(), clock.clone(), stats.clone(), commands)
                .behind(gate.clone())
                .adapting(adapters.clone(), asks);
        let state = AppState::new(
            text,
            engine,
            Limits::new(serving.max_model_len).with_priorities(serving.priorities),
            clock,
            stats,
            uplink.readiness(),
            run,
        )
        .with_models(Models::of(&serving, adapters))
        .with_adapter_changes(Some(changes))
        .with_pulse(pulse)
        .of_cluster(secret.as_ref())
        .with_api(&api)
        .with_gate(gate.clone())
        .with_metrics(page);
        let readiness = state.readiness.clone();
        waiting.end().await;
        start_up.serves(readiness);
        let failed = bound.failed();
        let BoundHttp { file: socket, listener, endpoint } = bound.http;
        let http = server::start(listener, state, threads).map_err(failed)?;
        let handle = http.handle();
        actix::spawn(http);
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        actix::spawn(async move {
            if let Some(error) = uplink.run(joined, stopped).await {
                let _ = end.send(error);
            }
        });
        let (traces, scheme) = (api.traces, scheme(tls.as_ref()));
        let http = handle;
        Ok(Self { endpoint, socket, scheme, http, probes, gate, actors, stop, ended, traces })
    }

    /// Where HTTP is served.
    #[must_use]
    pub fn http(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The URL that serves HTTP; `unix:PATH` for a Unix socket.
    #[must_use]
    pub fn http_url(&self) -> String {
        self.endpoint.url(self.scheme)
    }

    /// The URL that serves probes and scrapes alone, if there is one.
    #[must_use]
    pub fn metrics_url(&self) -> Option<&str> {
        self.probes.as_ref().map(|(url, _)| url.as_str())
    }

    /// Resolves when the front end cannot continue.
    pub async fn failed(&mut self) -> FrontendError {
        match (&mut self.ended).await {
            Ok(error) => error,
            // The link's task ends without an error only when it is told to.
            Err(_) => std::future::pending().await,
        }
    }

    /// Number of running requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.gate.inside()
    }

    /// Takes no new requests, reports not ready, and waits up to `patience` for the running
    /// requests and for this process's own actors. Returns whether all requests have ended.
    pub fn finish(&self, patience: Duration) -> impl Future<Output = bool> + use<> {
        let (gate, actors) = (self.gate.clone(), self.actors.clone());
        gate.close();
        async move { tokio::join!(gate.empty_within(patience), actors.finish(patience)).0 }
    }

    /// Fails the requests still running, sends the last report, and leaves.
    pub async fn stop(self) {
        self.gate.close();
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(STOP_PATIENCE, self.ended).await;
        // Before its listener is closed.
        drop(self.socket);
        // Does not wait for connections without a request.
        let _ = tokio::time::timeout(CLOSE_PATIENCE, self.http.stop(true)).await;
        if let Some(traces) = self.traces {
            traces.flush(TRACES_PATIENCE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_on_the_hub_is_where_the_coordinator_has_it() {
        let hub = Err("no hub".to_owned());
        for (given, found) in [
            (None, "/served"),
            (Some("org/demo"), "/served"),
            (Some("/own"), "/own"),
            (Some("neither"), "neither"),
        ] {
            let folder = folder_of(given.map(Path::new), "/served", &hub).await.unwrap();
            assert_eq!(folder, Path::new(found));
        }
        let served = format!("hf://org/demo@{}", "0".repeat(40));
        let fetched = folder_of(Some(Path::new("org/demo")), &served, &hub).await;
        assert_eq!(fetched.unwrap_err().to_string(), "no hub");
    }

    #[test]
    fn a_runtime_that_ends_does_not_wait_for_such_a_thread() {
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let done = runtime.block_on(async {
            let work = on_thread("wait", move || wait.recv_timeout(Duration::from_secs(60)));
            tokio::time::timeout(Duration::from_millis(10), work).await.is_ok()
        });
        drop(runtime);
        assert!(!done);
        go.send(()).expect("the thread still waits");
    }
}

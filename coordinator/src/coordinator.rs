//! Puts a coordinator together: listeners, cluster actor, replicas, HTTP, the stats log line.
//!
//! Everything but HTTP lives on one arbiter (thread): links, cluster and replicas exchange messages
//! without crossing threads, and a step needs no lock that another thread holds for long.
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix::{Actor as _, Addr};
use actix_web::dev::ServerHandle;
use shared::actor::ActorRuntime;
use shared::clock::{Clock, SystemClock};
use shared::host::HostThread;
use shared::ids::{Incarnation, ReplicaId};
use shared::log::SharedLog;
use shared::metrics;
use shared::metrics::compat::Compat;
use shared::protocol::{EngineConfig, Serving};
use shared::wire::auth::Secret;
use tokio::sync::{mpsc, watch};

use crate::cluster::actor::{
    ClusterActor, Command, Drain, ProcessEnded, ReplicaFactory, Stop, Supervised,
};
use crate::cluster::records::Ended;
use crate::cluster::view::{ClusterView, not_ready};
use crate::cluster::{ClusterConfig, PlacementRules};
use crate::engine::{EngineCommand, EngineHandle};
use crate::frontends::Frontends;
use crate::http::admin::{Admin, ScaleWorkers};
use crate::http::metrics::{self as metrics_page, MetricsPage};
use crate::http::params::Limits;
use crate::http::server;
use crate::http::state::{AppState, Readiness, ReadinessCheck};
use crate::links;
use crate::metrics::exposition::PageOptions;
use crate::metrics::log_line::Field;
use crate::metrics::{Hub, JsonLines, LogLine, StatLogger, StatLoggers, ThroughputGauges, logger};
use crate::replica::actor::{ReplicaActor, ReplicaLoad};
use crate::replica::driver::{DriverLimits, ReplicaDriver};
use crate::scheduler::{ConfigError, Scheduler, SchedulerConfig};
use crate::text::model::{TextModel, TextModelError};

/// Steps in flight: one runs, the next is there when it is done.
const STEPS_IN_FLIGHT: u32 = 2;
/// Deadline of a collective's set-up and of each of its operations.
const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long ranks may stay away before a replica goes on with fewer: a restarted process is back
/// sooner.
const RESHARD_AFTER: Duration = Duration::from_millis(1500);

/// What a coordinator is asked for.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// The model folder, as workers see it too.
    pub model: PathBuf,
    /// The model's name in the API.
    pub served_model_name: String,
    /// Ranks per replica.
    pub tensor_parallel: u32,
    /// Fewest ranks per replica when workers are missing.
    pub min_tensor_parallel: u32,
    /// Most replicas; as many as the workers allow when absent.
    pub max_replicas: Option<u32>,
    /// Which workers go together.
    pub placement: PlacementRules,
    /// Where HTTP is served.
    pub listen: SocketAddr,
    /// Where workers dial in.
    pub cluster_listen: SocketAddr,
    /// Longest sequence; the model's own limit when absent.
    pub max_model_len: Option<u32>,
    /// Most sequences in one step.
    pub max_num_seqs: u32,
    /// Most tokens in one step.
    pub max_num_batched_tokens: u32,
    /// Tokens per KV block.
    pub block_size: u32,
    /// KV cache memory per rank, in bytes.
    pub kv_cache_bytes: u64,
    /// Most requests waiting.
    pub max_queued_requests: u32,
    /// How long is waited for what.
    pub limits: DriverLimits,
    /// How statistics are logged.
    pub log_stats: LogStats,
    /// Whether anything is measured; without, there is no `/metrics`.
    pub metrics: bool,
    /// Where `/metrics` is served besides, if anywhere.
    pub metrics_listen: Option<SocketAddr>,
    /// Whose names are published beside ours.
    pub metrics_compat: Vec<Compat>,
    /// Threads that serve HTTP.
    pub http_threads: usize,
    /// NVML's library, when the system's loader does not find it.
    pub nvml: Option<PathBuf>,
    /// Who starts and stops worker processes, where this process does.
    pub workers: Option<mpsc::Sender<ScaleWorkers>>,
    /// Drawn at random for this process, and never shown.
    pub collective_key: u64,
    /// The cluster's secret.
    pub secret: Option<Secret>,
    /// Drawn at random for this process.
    pub run: u64,
    /// The last lines of this process's log.
    pub log: SharedLog,
}

/// How statistics are logged.
#[derive(Clone, Debug)]
pub struct LogStats {
    /// Between two lines; zero turns the lines off.
    pub interval: Duration,
    /// What the log line has.
    pub fields: Vec<Field>,
    /// Where JSON lines go; `-` is stdout.
    pub json: Option<PathBuf>,
}

/// A coordinator cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model folder cannot be served.
    #[error(transparent)]
    Model(#[from] TextModelError),
    /// Sizes are in conflict.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Sizes do not fit the model.
    #[error("{0}")]
    Sizes(String),
    /// A file cannot be written.
    #[error("cannot write {} (--log-stats-json): {error}", file.display())]
    StatsFile {
        /// The file.
        file: PathBuf,
        /// The operating system's words.
        error: io::Error,
    },
    /// An address cannot be used.
    #[error("cannot listen on {address} ({option}): {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The option that names it.
        option: &'static str,
        /// The operating system's words.
        error: io::Error,
    },
}

/// A running coordinator.
#[derive(Debug)]
pub struct Coordinator {
    http_addr: SocketAddr,
    cluster_addr: SocketAddr,
    cluster: Addr<ClusterActor>,
    http: ServerHandle,
    /// The listener of `/metrics` alone.
    metrics: Option<(SocketAddr, ServerHandle)>,
    _host: HostThread,
    view: watch::Receiver<ClusterView>,
    clock: Arc<dyn Clock>,
    actors: ActorRuntime,
}

impl Coordinator {
    /// Starts a coordinator on the current actix system.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(options: CoordinatorOptions) -> Result<Self, StartError> {
        let text = Arc::new(TextModel::load(&options.model)?);
        let max_model_len = options.max_model_len.unwrap_or(text.max_positions);
        if max_model_len > text.max_positions {
            return Err(StartError::Sizes(format!(
                "--max-model-len {max_model_len} is over the model's own limit of {}",
                text.max_positions
            )));
        }
        let engine = EngineConfig {
            block_size: options.block_size,
            max_model_len,
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: options.max_num_batched_tokens,
            kv_cache_bytes: options.kv_cache_bytes,
        };
        let scheduling = SchedulerConfig {
            block_size: engine.block_size,
            max_model_len,
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            max_queued_requests: options.max_queued_requests,
            max_steps_in_flight: STEPS_IN_FLIGHT,
        };
        scheduling.validate()?;
        let (http_listener, http_addr) = listen(options.listen, "--listen")?;
        let (cluster_listener, cluster_addr) = listen(options.cluster_listen, "--cluster-listen")?;
        let metrics_listener = options
            .metrics_listen
            .map(|address| listen(address, "--metrics-listen"))
            .transpose()?;

        let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
        let make_hub = if options.metrics { Hub::new } else { Hub::off };
        let hub = Arc::new(make_hub(Incarnation(options.run), metrics::Limits::default()));
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock_start = since_1970.saturating_sub(clock.now());
        hub.observer().record().started(env!("CARGO_PKG_VERSION"), since_1970);

        let host = HostThread::start("coordinator", options.nvml, hub.process().clone());
        let config = ClusterConfig {
            tensor_parallel: options.tensor_parallel,
            degrees: degrees(options.tensor_parallel, options.min_tensor_parallel),
            reshard_after: RESHARD_AFTER,
            max_replicas: options.max_replicas,
            placement: options.placement,
            model: options.model.to_string_lossy().into_owned(),
            engine,
            collective_timeout: COLLECTIVE_TIMEOUT,
            worker_stats: options.metrics,
            collective_key: options.collective_key,
            run: options.run,
        };
        let factory = replica_factory(scheduling, options.limits, clock.clone(), hub.clone());
        let (view_sender, view) = watch::channel(ClusterView::default());
        let actors = ActorRuntime::hub("coordinator", options.run, clock.clone());
        hub.with_actors(actors.stats().clone());
        let cluster = ClusterActor::new(
            config,
            clock.clone(),
            hub.clone(),
            factory,
            view_sender,
            actors.clone(),
        )
        .start();
        let listener = tokio::net::TcpListener::from_std(cluster_listener).map_err(|error| {
            StartError::Listen { address: cluster_addr, option: "--cluster-listen", error }
        })?;
        let (handle, commands) = EngineHandle::channel();
        actix::spawn(forward(commands, cluster.clone()));
        let readiness: ReadinessCheck = {
            let (view, clock) = (view.clone(), clock.clone());
            let degree = options.tensor_parallel;
            Arc::new(move || {
                let view = view.borrow();
                if view.is_ready(clock.now()) {
                    return Readiness { ready: true, message: "serving".to_owned() };
                }
                Readiness { ready: false, message: not_ready(&view, degree) }
            })
        };
        let serving = Serving {
            model: options.model.to_string_lossy().into_owned(),
            served_model_name: options.served_model_name.clone(),
            max_model_len,
            text_fingerprint: text.fingerprint,
        };
        let frontends = Arc::new(Frontends::new(
            hub.clone(),
            clock.clone(),
            handle.commands(),
            text.clone(),
            serving,
            readiness.clone(),
            actors.clone(),
        ));
        actix::spawn(links::accept(
            listener,
            cluster.clone(),
            frontends.clone(),
            options.secret.clone(),
        ));
        let page_options = PageOptions {
            model_name: options.served_model_name.clone(),
            compat: options.metrics_compat,
            clock_start,
        };
        let page = Arc::new(MetricsPage::new(hub.clone(), clock.clone(), page_options));
        let state = AppState::new(
            &options.served_model_name,
            text,
            handle,
            Limits::new(max_model_len),
            clock.clone(),
            hub.frontend().clone(),
            readiness,
            options.run,
        );
        let state = if options.metrics { state.with_metrics(page.clone()) } else { state };
        let state = state.with_admin(Admin {
            cluster: cluster.clone(),
            frontends,
            secret: options.secret,
            workers: options.workers,
            log: options.log,
            actors: actors.clone(),
        });
        let failed = |error| StartError::Listen { address: http_addr, option: "--listen", error };
        let http = server::start(http_listener, state, options.http_threads).map_err(failed)?;
        let http_handle = http.handle();
        actix::spawn(http);
        let metrics = match metrics_listener {
            None => None,
            Some((listener, address)) => {
                let option = "--metrics-listen";
                let failed = |error| StartError::Listen { address, option, error };
                let server = metrics_page::start(listener, page).map_err(failed)?;
                let handle = server.handle();
                actix::spawn(server);
                Some((address, handle))
            }
        };
        let (loggers, interval) = stat_loggers(&options.log_stats, &hub, clock.now(), clock_start)?;
        actix::spawn(log_stats(hub, clock.clone(), loggers, interval));
        let http = http_handle;
        let _host = host;
        Ok(Self { http_addr, cluster_addr, cluster, http, metrics, _host, view, clock, actors })
    }

    /// Where HTTP is served.
    #[must_use]
    pub fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// Where workers dial in.
    #[must_use]
    pub fn cluster_addr(&self) -> SocketAddr {
        self.cluster_addr
    }

    /// Where `/metrics` is served alone, if anywhere.
    #[must_use]
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|(address, _)| *address)
    }

    /// The cluster, as it changes.
    #[must_use]
    pub fn view(&self) -> watch::Receiver<ClusterView> {
        self.view.clone()
    }

    /// A worker shall leave.
    ///
    /// # Errors
    /// Why it cannot.
    pub async fn drain(&self, node: &str) -> Result<(), String> {
        let drained = self.cluster.send(Drain(node.to_owned())).await;
        drained.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// The named actors of the whole cluster, this process's own among them.
    #[must_use]
    pub fn actors(&self) -> &ActorRuntime {
        &self.actors
    }

    /// A node's worker process is started again when it ends, so often in a row; or, without a
    /// number, not any more.
    pub fn supervised(&self, node: &str, max_restarts: Option<u32>) {
        self.cluster.do_send(Supervised { node: node.to_owned(), max_restarts });
    }

    /// A worker process that this process started has ended: kept for those who ask why.
    pub fn process_ended(&self, ended: Ended) {
        self.cluster.do_send(ProcessEnded(ended));
    }

    /// Whether requests can be served now.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.view.borrow().is_ready(self.clock.now())
    }

    /// Stops: no new requests, running ones fail, connections end. Workers are told to end when
    /// `workers_too`; otherwise they go on dialling.
    pub async fn stop(self, workers_too: bool) {
        let reason = "the coordinator stops".to_owned();
        let _ = self.cluster.send(Stop { reason, workers_too }).await;
        self.http.stop(true).await;
        if let Some((_, metrics)) = self.metrics {
            metrics.stop(false).await;
        }
    }
}

/// Degrees from `wanted` down to `least`, halving.
fn degrees(wanted: u32, least: u32) -> Vec<u32> {
    std::iter::successors(Some(wanted.max(1)), |degree| {
        degree.is_multiple_of(2).then_some(degree / 2)
    })
    .take_while(|degree| *degree == wanted || *degree >= least.max(1))
    .collect()
}

fn listen(
    address: SocketAddr,
    option: &'static str,
) -> Result<(TcpListener, SocketAddr), StartError> {
    let bind = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    bind().map_err(|error| StartError::Listen { address, option, error })
}

fn replica_factory(
    scheduling: SchedulerConfig,
    limits: DriverLimits,
    clock: Arc<dyn Clock>,
    hub: Arc<Hub>,
) -> ReplicaFactory {
    Box::new(move |id: ReplicaId, cluster: Addr<ClusterActor>, load: Arc<ReplicaLoad>| {
        let scheduler = Scheduler::new(scheduling)?;
        let observer = hub.observer().clone();
        let driver = ReplicaDriver::new(clock.now(), id, scheduler, observer, limits);
        let orphanage = cluster.clone().recipient();
        Ok(ReplicaActor::new(id, driver, clock.clone(), load, cluster.recipient(), orphanage))
    })
}

/// Hands the front end's commands to the cluster actor, as fast as it takes them.
async fn forward(mut commands: mpsc::Receiver<EngineCommand>, cluster: Addr<ClusterActor>) {
    while let Some(command) = commands.recv().await {
        if cluster.send(Command(command)).await.is_err() {
            return;
        }
    }
}

/// The loggers asked for, and how often they are called.
fn stat_loggers(
    options: &LogStats,
    hub: &Hub,
    now: Duration,
    clock_start: Duration,
) -> Result<(Vec<Box<dyn StatLogger>>, Duration), StartError> {
    let mut loggers: Vec<Box<dyn StatLogger>> =
        vec![Box::new(ThroughputGauges::new(now, hub.observer().clone()))];
    if options.interval.is_zero() {
        // The gauges go on.
        return Ok((loggers, logger::DEFAULT_INTERVAL));
    }
    loggers.push(Box::new(LogLine::new(now, options.fields.clone())));
    if let Some(file) = &options.json {
        let out: Box<dyn io::Write + Send> = if file.as_os_str() == "-" {
            Box::new(io::stdout())
        } else {
            let open = std::fs::OpenOptions::new().create(true).append(true).open(file);
            Box::new(open.map_err(|error| StartError::StatsFile { file: file.clone(), error })?)
        };
        loggers.push(Box::new(JsonLines::new(now, clock_start, out)));
    }
    Ok((loggers, options.interval))
}

async fn log_stats(
    hub: Arc<Hub>,
    clock: Arc<dyn Clock>,
    loggers: Vec<Box<dyn StatLogger>>,
    interval: Duration,
) {
    let mut loggers = StatLoggers::new(loggers, interval, clock.now());
    loop {
        tokio::time::sleep(loggers.next().saturating_sub(clock.now())).await;
        loggers.tick(clock.now(), || hub.merged());
    }
}

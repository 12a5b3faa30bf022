//! Puts a coordinator together: listeners, cluster actor, replicas, HTTP, the stats log line. There
//! are two steps: [`PreparedCoordinator`] has checked everything and bound the addresses;
//! [`Coordinator`] serves.
//!
//! Everything except HTTP lives on one arbiter (thread): links, cluster and replicas exchange
//! messages without crossing threads, and no step waits for a lock that another thread holds for
//! long.
//!
//! - `options`: what a coordinator is started with; `prepared`: checks it, and binds the addresses
//! - `parts`: makes its parts from the options
//! - `changes`: carries out commands about LoRA adapters
//! - `stats`: the loggers of statistics
mod changes;
mod options;
mod parts;
mod prepared;
mod stats;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::{Actor as _, Addr};
use actix_web::dev::ServerHandle;
use shared::actor::ActorRuntime;
use shared::actor::pulse::Pulse;
use shared::clock::{Clock, SystemClock, since_1970};
use shared::host::HostThread;
use shared::membership::{DesiredStateSender, Role, View};
use shared::protocol::{KvCacheDtype, Lora};
use tokio::sync::{mpsc, watch};

use crate::adapters::{AdapterChanges, ServedAdapters};
use crate::checkpoint::Publication;
use crate::cluster::actor::{
    ClusterActor, Command, Drain, HasLeavingAdapters, ProcessEnded, Stop, Supervised,
};
use crate::cluster::records::ProcessExit;
use crate::cluster::view::ClusterView;
use crate::engine::{EngineCommand, EngineHandle};
use crate::frontends::Frontends;
use crate::http::admin::Admin;
use crate::http::gate::Gate;
use crate::http::listener::{BoundHttp, Endpoint, SocketFile};
use crate::http::models::Models;
use crate::http::params::Limits;
use crate::http::server;
use crate::http::state::AppState;
use crate::http::tls::scheme;
use crate::kept_actors::{ActorKeeper, ActorsLeft};
use crate::links::{self, RefusedProcesses};
use crate::metrics::membership;
use crate::traces::Traces;

use self::changes::Changes;
pub use self::options::{CoordinatorOptions, LogStats, ModelSources, StartError};
pub(crate) use self::prepared::BoundListener;
pub use self::prepared::PreparedCoordinator;

/// How long delivering the last events to clients may take.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);
/// How long the last spans may take to the collector of traces.
pub(crate) const TRACES_PATIENCE: Duration = Duration::from_secs(2);
/// How long connections may take to close after that.
pub(crate) const CLOSE_PATIENCE: Duration = Duration::from_millis(300);

/// What membership provides to a coordinator that leads.
#[derive(Debug)]
pub struct Leadership {
    /// The cluster as etcd has it.
    pub view: watch::Receiver<View>,
    /// Where operators' commands are left for the next leader.
    pub desires: DesiredStateSender,
    /// The pulse of the main thread, which beats already.
    pub pulse: Pulse,
    /// What `/metrics` shows, if totals outlive the leader.
    pub publication: Option<Arc<Publication>>,
    /// Created actors that earlier leaders kept; without, none are kept.
    pub actors: Option<ActorsLeft>,
    /// The adapters as workers are told of them, read when this process took the lead; without,
    /// they are read when it begins to serve.
    pub lora: Option<Lora>,
}

impl Leadership {
    /// Nodes of the present workers, which join as soon as they know who leads.
    fn workers(&self) -> BTreeSet<String> {
        let view = self.view.borrow();
        let workers = view.records.values().filter(|record| record.role == Role::Worker);
        workers.map(|record| record.node.clone()).collect()
    }
}

/// A running coordinator.
#[derive(Debug)]
pub struct Coordinator {
    endpoint: Endpoint,
    /// The file of the Unix socket that serves HTTP, if one does.
    socket: Option<SocketFile>,
    scheme: &'static str,
    cluster_addr: SocketAddr,
    cluster: Addr<ClusterActor>,
    http: ServerHandle,
    /// Which the requests of this process's own HTTP clients pass, and those of front ends.
    gate: Gate,
    frontends_gate: Gate,
    frontends: Arc<Frontends>,
    /// The separate listener of `/metrics`.
    metrics: Option<(SocketAddr, ServerHandle)>,
    /// Takes connections of workers and front ends.
    accepting: tokio::task::JoinHandle<()>,
    _host: HostThread,
    view: watch::Receiver<ClusterView>,
    clock: Arc<dyn Clock>,
    actors: ActorRuntime,
    /// Keeps created actors in etcd.
    keeper: Option<ActorKeeper>,
    traces: Option<Traces>,
}

impl Coordinator {
    /// Starts a coordinator on the current actix system.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(options: CoordinatorOptions) -> Result<Self, StartError> {
        Self::serve(PreparedCoordinator::new(options)?, None)
    }

    /// Starts to serve; with `leadership`, as the leader.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn serve(
        prepared: PreparedCoordinator,
        mut leadership: Option<Leadership>,
    ) -> Result<Self, StartError> {
        let PreparedCoordinator {
            options,
            text,
            identity,
            engine,
            cpu_step_tokens,
            scheduling,
            hub,
            http,
            cluster: bound,
            metrics,
        } = prepared;
        let cluster_addr = bound.address;
        let (tls, traces) = (options.api.tls.clone(), options.api.traces.clone());
        let max_model_len = engine.max_model_len;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::start());
        let since_1970 = since_1970();
        let clock_start = since_1970.saturating_sub(clock.now());
        hub.observer().record().started(env!("CARGO_PKG_VERSION"), since_1970);
        let cache_dtype = match options.kv_cache_dtype {
            KvCacheDtype::Auto => options.dtype.name(),
            KvCacheDtype::Fp8 => options.kv_cache_dtype.name(),
        };
        hub.observer().record().cache(cache_dtype, options.prefix_caching);

        let lora = leadership.as_mut().and_then(|leadership| leadership.lora.take());
        let lora = lora
            .unwrap_or_else(|| parts::lora_sources(options.sources.lora.clone(), &options.lora));
        // A thread has one pulse: that of a leader's beats since before it led.
        let pulse = match &leadership {
            Some(leadership) => leadership.pulse.clone(),
            None => {
                let pulse = Pulse::default();
                actix::spawn(pulse.clone().keep());
                pulse
            }
        };
        let host = HostThread::start("coordinator", options.nvml.clone(), hub.process().clone());
        if let Some(leadership) = &leadership {
            let view = leadership.view.clone();
            actix::spawn(membership::observe(hub.membership().clone(), view));
        }
        let config = parts::cluster_config(&options, lora, identity, engine, cpu_step_tokens);
        let factory =
            parts::replica_factory(scheduling, options.limits, clock.clone(), hub.clone());
        let (view_sender, view) = watch::channel(ClusterView::default());
        let actors = ActorRuntime::hub("coordinator", options.run, clock.clone());
        hub.with_actors(actors.stats().clone());
        if leadership.as_ref().is_some_and(|it| !it.workers().is_empty()) {
            actors.settle();
        }
        // Before any process can report what it runs.
        let left = leadership.as_mut().and_then(|leadership| leadership.actors.take());
        let keeper = left.map(|left| ActorKeeper::start(actors.clone(), left));
        let keeper = keeper.transpose().map_err(StartError::Thread)?;
        let cluster = ClusterActor::new(
            config,
            clock.clone(),
            hub.clone(),
            factory,
            view_sender,
            actors.clone(),
        );
        let adapters = ServedAdapters::default();
        let cluster = with_leadership(cluster, leadership.as_ref())
            .serving_adapters(adapters.clone())
            .start();
        let (changes, asks) = AdapterChanges::channel();
        let carried_out = Changes {
            cluster: cluster.clone(),
            hub: options.hub.clone(),
            view: leadership.as_ref().map(|leadership| leadership.view.clone()),
            run: options.run,
        };
        actix::spawn(carried_out.run(asks));
        let listener = tokio::net::TcpListener::from_std(bound.listener).map_err(|error| {
            let address = cluster_addr.into();
            StartError::Listen { address, option: "--cluster-listen", error }
        })?;
        let (handle, commands) = EngineHandle::channel();
        actix::spawn(forward(commands, cluster.clone()));
        let (gate, frontends_gate) = (Gate::default(), Gate::default());
        let ready_behind = |gate: &Gate| {
            parts::readiness(view.clone(), clock.clone(), gate.clone(), options.tensor_parallel)
        };
        let readiness = ready_behind(&gate);
        let serving = parts::serving(&options, max_model_len, text.fingerprint);
        let frontends = Arc::new(Frontends::new(
            hub.clone(),
            clock.clone(),
            handle.commands(),
            text.clone(),
            serving.clone(),
            (adapters.clone(), changes.clone()),
            ready_behind(&frontends_gate),
            actors.clone(),
            frontends_gate.clone(),
        ));
        actix::spawn(Frontends::watch_absences(Arc::downgrade(&frontends)));
        let refused = RefusedProcesses::default();
        let accepting = actix::spawn(links::accept(
            listener,
            cluster.clone(),
            frontends.clone(),
            options.secret.clone(),
            refused.clone(),
        ));
        let page = parts::page(&options, &hub, &clock, clock_start, leadership.as_ref());
        let readiness_alone = readiness.clone();
        let state = AppState::new(
            text,
            handle,
            Limits::new(max_model_len).with_priorities(options.priorities),
            clock.clone(),
            hub.frontend().clone(),
            readiness,
            options.run,
        )
        .with_models(Models::of(&serving, adapters))
        .with_adapter_changes(Some(changes))
        .with_pulse(pulse.clone())
        .of_cluster(options.secret.as_ref())
        .with_api(&options.api);
        let state = if options.metrics { state.with_metrics(page.clone()) } else { state };
        let state = state.with_gate(gate.clone());
        let state = state.with_admin(Admin {
            cluster: cluster.clone(),
            frontends: frontends.clone(),
            secret: options.secret,
            workers: options.workers,
            log: options.log,
            actors: actors.clone(),
            membership: leadership.as_ref().map(|leadership| leadership.view.clone()),
            run: options.run,
            refused,
        });
        let BoundHttp { file: socket, listener, endpoint } = http;
        let server = server::start(listener, state, options.http_threads).map_err(|error| {
            let (address, option) = (endpoint.clone(), endpoint.option());
            StartError::Listen { address, option, error }
        })?;
        let http = server.handle();
        actix::spawn(server);
        let metrics = metrics
            .map(|bound| parts::start_metrics(bound, page, readiness_alone, pulse, tls.as_ref()))
            .transpose()?;
        let (loggers, interval) =
            stats::loggers(&options.log_stats, &hub, clock.now(), clock_start)?;
        actix::spawn(stats::run(hub, clock.clone(), loggers, interval));
        Ok(Self {
            endpoint,
            socket,
            scheme: scheme(tls.as_ref()),
            cluster_addr,
            cluster,
            http,
            gate,
            frontends_gate,
            frontends,
            metrics,
            accepting,
            _host: host,
            view,
            clock,
            actors,
            keeper,
            traces,
        })
    }

    /// Where HTTP is served.
    #[must_use]
    pub fn http(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The address that workers dial.
    #[must_use]
    pub fn cluster_addr(&self) -> SocketAddr {
        self.cluster_addr
    }

    /// The URL that serves HTTP; `unix:PATH` for a Unix socket.
    #[must_use]
    pub fn http_url(&self) -> String {
        self.endpoint.url(self.scheme)
    }

    /// The URL that serves `/metrics` separately, if any.
    #[must_use]
    pub fn metrics_url(&self) -> Option<String> {
        let alone = self.metrics.as_ref();
        alone.map(|(address, _)| format!("{}://{address}/metrics", self.scheme))
    }

    /// A receiver of the cluster's view.
    #[must_use]
    pub fn view(&self) -> watch::Receiver<ClusterView> {
        self.view.clone()
    }

    /// Resolves when the cluster's actor ends early, which only a defect can cause: nothing is
    /// served from then on.
    pub async fn failed(&self) -> &'static str {
        ended(self.view.clone()).await;
        "the cluster actor is gone"
    }

    /// Drains workers.
    ///
    /// # Errors
    /// Why they cannot be drained; then all stay.
    pub async fn drain(&self, nodes: Vec<String>) -> Result<(), String> {
        let drained = self.cluster.send(Drain(nodes)).await;
        drained.map_err(|error| error.to_string())?.map(drop)
    }

    /// The named actors of the whole cluster, including this process's own.
    #[must_use]
    pub fn actors(&self) -> &ActorRuntime {
        &self.actors
    }

    /// Notes how often in a row a node's worker process is restarted when it ends; `None` if no
    /// longer.
    pub fn supervised(&self, node: &str, max_restarts: Option<u32>) {
        self.cluster.do_send(Supervised { node: node.to_owned(), max_restarts });
    }

    /// A worker process started by this process has ended; recorded for those who ask why.
    pub fn process_ended(&self, ended: ProcessExit) {
        self.cluster.do_send(ProcessEnded(ended));
    }

    /// Whether requests can be served now.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.view.borrow().is_ready(self.clock.now())
    }

    /// From now on takes no new requests and reports not ready.
    pub fn close(&self) {
        self.gate.close();
        self.frontends_gate.close();
    }

    /// Number of running requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.own_requests() + self.frontends_gate.inside()
    }

    /// Number of running requests of its own HTTP clients, which end with it.
    #[must_use]
    pub fn own_requests(&self) -> usize {
        self.gate.inside()
    }

    /// Names of the linked front ends.
    #[must_use]
    pub fn frontends(&self) -> BTreeSet<String> {
        self.frontends.linked().into_iter().map(|(node, ..)| node).collect()
    }

    /// Whether requests may still use adapters that are not served any more, or nobody knows.
    pub async fn adapters_leave(&self) -> bool {
        self.cluster.send(HasLeavingAdapters).await.unwrap_or(true)
    }

    /// Takes no new requests of its own HTTP clients and waits up to `patience` for theirs, and for
    /// this process's own actors; front ends are served on, for their requests can go on at the
    /// next leader. Returns whether its own requests have ended.
    pub async fn finish_own(&self, patience: Duration) -> bool {
        self.gate.close();
        tokio::join!(self.gate.empty_within(patience), self.actors.finish(patience)).0
    }

    /// Takes no new requests and waits up to `patience` for the running ones, and for this
    /// process's own actors. Returns whether all requests have ended.
    pub async fn finish(&self, patience: Duration) -> bool {
        self.close();
        let (own, others, _) = tokio::join!(
            self.gate.empty_within(patience),
            self.frontends_gate.empty_within(patience),
            self.actors.finish(patience)
        );
        let finished = own && others;
        if finished {
            self.frontends.flush(FLUSH_PATIENCE).await;
        }
        finished
    }

    /// Stops: takes no new requests, fails running ones, ends connections. Workers are told to end
    /// if `workers_too`; otherwise they keep dialling.
    pub async fn stop(mut self, workers_too: bool) {
        self.close();
        // What becomes of actors from now on is the next leader's business.
        if let Some(keeper) = self.keeper.take() {
            keeper.finish().await;
        }
        // Processes that dial from now on find nobody and keep dialling, elsewhere if another
        // leads.
        self.accepting.abort();
        let reason = "the coordinator stops".to_owned();
        let _ = self.cluster.send(Stop { reason, workers_too }).await;
        // Requests that fail are still told so.
        let (own, others) = (&self.gate, &self.frontends_gate);
        tokio::join!(own.empty_within(FLUSH_PATIENCE), others.empty_within(FLUSH_PATIENCE));
        self.frontends.flush(FLUSH_PATIENCE).await;
        // Before its listener is closed.
        drop(self.socket.take());
        // Does not wait for connections without a request.
        let _ = tokio::time::timeout(CLOSE_PATIENCE, self.http.stop(true)).await;
        if let Some((_, metrics)) = self.metrics {
            metrics.stop(false).await;
        }
        if let Some(traces) = self.traces {
            traces.flush(TRACES_PATIENCE).await;
        }
    }
}

/// Prepares the cluster's actor to continue where the last leader ended, if there was one.
fn with_leadership(cluster: ClusterActor, leadership: Option<&Leadership>) -> ClusterActor {
    let Some(leadership) = leadership else { return cluster };
    let told = leadership.view.borrow().desired.clone();
    if let Some(replicas) = told.as_ref().and_then(|told| told.replicas) {
        tracing::info!(
            replicas,
            "limit on replicas that `tutti scale` set at the last leader (0: none)"
        );
    }
    cluster.expecting(leadership.workers()).desiring(told, leadership.desires.clone())
}

/// Hands the front end's commands to the cluster actor as fast as it accepts them.
async fn forward(mut commands: mpsc::Receiver<EngineCommand>, cluster: Addr<ClusterActor>) {
    while let Some(command) = commands.recv().await {
        if cluster.send(Command(command)).await.is_err() {
            return;
        }
    }
}

/// Resolves when nobody publishes the view any more.
pub(crate) async fn ended(mut view: watch::Receiver<ClusterView>) {
    while view.changed().await.is_ok() {}
}

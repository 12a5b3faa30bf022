//! Makes a coordinator's parts from its options.
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actix::Addr;
use actix_web::dev::ServerHandle;
use shared::actor::pulse::Pulse;
use shared::clock::Clock;
use shared::ids::{Incarnation, ReplicaId};
use shared::model_identity::ModelIdentity;
use shared::protocol::{EngineConfig, Lora, Serving};
use tokio::sync::watch;

use super::{BoundListener, CoordinatorOptions, Leadership, StartError};
use crate::cluster::ClusterConfig;
use crate::cluster::actor::{ClusterActor, ReplicaFactory};
use crate::cluster::view::{ClusterView, not_ready};
use crate::http::gate::Gate;
use crate::http::metrics::{self as metrics_page, MetricsPage};
use crate::http::state::{Readiness, ReadinessCheck};
use crate::http::tls::Tls;
use crate::metrics::Hub;
use crate::metrics::exposition::PageOptions;
use crate::replica::actor::{ReplicaActor, ReplicaLoad};
use crate::replica::driver::{DriverLimits, ReplicaDriver};
use crate::scheduler::{Scheduler, SchedulerConfig};

/// Deadline of a collective's set-up and of each of its operations.
const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long ranks may stay away before a replica continues with fewer: a restarted process is back
/// sooner.
const RESHARD_AFTER: Duration = Duration::from_millis(1500);

pub(super) fn cluster_config(
    options: &CoordinatorOptions,
    lora: Lora,
    identity: Option<ModelIdentity>,
    engine: EngineConfig,
    cpu_step_tokens: u32,
) -> ClusterConfig {
    ClusterConfig {
        tensor_parallel: options.tensor_parallel,
        degrees: degrees(options.tensor_parallel, options.min_tensor_parallel),
        reshard_after: RESHARD_AFTER,
        max_replicas: options.max_replicas,
        placement: options.placement.clone(),
        model: options.sources.model.clone(),
        identity,
        config_overrides: options.api.text.config_overrides.clone(),
        dtype: options.dtype,
        quantization: options.quantization,
        lora,
        model_names: [&options.served_model_name]
            .into_iter()
            .chain(&options.model_aliases)
            .cloned()
            .collect(),
        draft_model: options.sources.draft_model.clone(),
        engine,
        cpu_step_tokens,
        collective_timeout: COLLECTIVE_TIMEOUT,
        step_timeout: options.limits.step_timeout,
        form_timeout: options.form_timeout,
        worker_stats: options.metrics,
        collective_key: options.collective_key.clone(),
        run: options.run,
    }
}

/// The adapters as workers are told of them, from where these come from and where they are `here`.
/// Where they may change, each with what its folder contains here, if it can be read.
pub(super) fn lora_sources(mut sources: Lora, here: &Lora) -> Lora {
    if sources.places > 0 {
        for (source, here) in sources.adapters.iter_mut().zip(&here.adapters) {
            source.identity = ModelIdentity::of_adapter(Path::new(&here.path)).ok();
        }
    }
    sources
}

pub(super) fn serving(
    options: &CoordinatorOptions,
    max_model_len: u32,
    text_fingerprint: u64,
) -> Serving {
    Serving {
        model: options.sources.model.clone(),
        served_model_name: options.served_model_name.clone(),
        model_aliases: options.model_aliases.clone(),
        adapters: options.sources.lora.adapters.clone(),
        max_model_len,
        text_fingerprint,
        priorities: options.priorities,
    }
}

/// Makes the page of `/metrics`.
pub(super) fn page(
    options: &CoordinatorOptions,
    hub: &Arc<Hub>,
    clock: &Arc<dyn Clock>,
    clock_start: Duration,
    leadership: Option<&Leadership>,
) -> Arc<MetricsPage> {
    let page_options = PageOptions {
        model_name: options.served_model_name.clone(),
        compat: options.metrics_compat.clone(),
        clock_start,
        frontend: false,
    };
    let page = MetricsPage::new(hub.clone(), clock.clone(), page_options);
    Arc::new(match leadership {
        Some(Leadership { view, publication, .. }) => {
            page.of_leader(publication.clone(), view.clone(), Incarnation(options.run))
        }
        None => page,
    })
}

/// Makes the check whether requests can be served, and why not.
pub(super) fn readiness(
    view: watch::Receiver<ClusterView>,
    clock: Arc<dyn Clock>,
    gate: Gate,
    degree: u32,
) -> ReadinessCheck {
    Arc::new(move || {
        if gate.is_closed() {
            return Readiness::ending();
        }
        let view = view.borrow();
        if view.is_ready(clock.now()) {
            return Readiness { ready: true, message: "serving".to_owned() };
        }
        Readiness { ready: false, message: not_ready(&view, degree) }
    })
}

/// Serves `/metrics` and probes on a separate address.
pub(super) fn start_metrics(
    bound: BoundListener,
    page: Arc<MetricsPage>,
    readiness: ReadinessCheck,
    pulse: Pulse,
    tls: Option<&Tls>,
) -> Result<(SocketAddr, ServerHandle), StartError> {
    let BoundListener { listener, address } = bound;
    let option = "--metrics-listen";
    let failed = |error| StartError::Listen { address: address.into(), option, error };
    let server = metrics_page::start(listener.into(), page, readiness, pulse, tls);
    let server = server.map_err(failed)?;
    let handle = server.handle();
    actix::spawn(server);
    Ok((address, handle))
}

/// Degrees from `wanted` down to `least`, halving each time.
fn degrees(wanted: u32, least: u32) -> Vec<u32> {
    std::iter::successors(Some(wanted.max(1)), |degree| {
        degree.is_multiple_of(2).then_some(degree / 2)
    })
    .take_while(|degree| *degree == wanted || *degree >= least.max(1))
    .collect()
}

pub(super) fn replica_factory(
    scheduling: SchedulerConfig,
    limits: DriverLimits,
    clock: Arc<dyn Clock>,
    hub: Arc<Hub>,
) -> ReplicaFactory {
    Box::new(move |id: ReplicaId, cluster: Addr<ClusterActor>, load: Arc<ReplicaLoad>| {
        let scheduler = Scheduler::new(scheduling)?;
        let observer = hub.observer().clone();
        let driver = ReplicaDriver::new(clock.now(), id, scheduler, observer, limits);
        let (migrations, paces) = (cluster.clone().recipient(), cluster.clone().recipient());
        let cluster = cluster.recipient();
        Ok(ReplicaActor::new(id, driver, clock.clone(), load, cluster, migrations, paces))
    })
}

//! `tutti worker`: one rank, until it is told to stop; or several in their own processes (`host`).
use std::ffi::OsString;
use std::hash::{BuildHasher as _, Hasher as _};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use shared::actor::ActorRuntime;
use shared::clock::SystemClock;
use shared::membership::Role;
use shared::metrics::application::Metrics;
use shared::wire::auth::Secret;
use tokio::sync::oneshot;
use worker::actor::WorkerEnd;
use worker::device::prepare_nccl;
use worker::health::WorkerHealth;
use worker::run::WorkerOptions;

use super::heartbeat::{beat_to_systemd, farewell, parent_gone};
use super::options::Workers;
use super::output::{error_line, leave_at_once};
use super::signals::Signals;
use super::{CliError, WorkerArgs, devices, etcd, health, host, logging, secret};

/// Why a worker ends after a first signal, and after a second one.
const TOLD: &str = "it is told to end";
const TOLD_AT_ONCE: &str = "told to end at once";

/// Returns the interface of NCCL's connections, as far as it is known.
fn nccl_interface(args: &WorkerArgs) -> Option<&str> {
    let local = |address: &&str| {
        let host = address.rsplit_once(':').map_or(*address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    };
    let here = args.coordinator.as_deref().filter(local).map(|_| "lo");
    args.compute.nccl_interface.as_deref().or(here)
}

pub(crate) fn run(args: &WorkerArgs, given: &[OsString]) -> Result<(), CliError> {
    // Even if "all" is one: names and supervision must not depend on how many GPUs answer today.
    if let Some(workers) = args.workers.filter(|workers| *workers != Workers::Number(1)) {
        return host::run(args, given, devices::of_host(&args.compute, workers));
    }
    // While this is still the only thread.
    let interface = nccl_interface(args);
    let prepared = prepare_nccl(interface);
    let (node, incarnation) = (args.node.clone().unwrap_or_else(default_node), random());
    let log = logging::init(&args.common, "worker", &node);
    if !prepared {
        tracing::warn!(
            interface,
            "NCCL's environment is left unchanged: the process already has threads"
        );
    }
    let device = devices::choose(&args.compute, args.compute.threads.unwrap_or_else(cores))?;
    let secret = secret::read(&args.common)?;
    let offer = args.resources.offer()?;
    let coordinator = args.coordinator.as_deref();
    let (coordinator, mut membership) =
        etcd::find(coordinator, &args.etcd, Role::Worker, &node, incarnation)?;
    let (clock, health) = (Arc::new(SystemClock::start()), WorkerHealth::default());
    let options = WorkerOptions {
        coordinator,
        actors: ActorRuntime::spoke(&node, incarnation, clock),
        node,
        host: args.host_id.clone().unwrap_or_else(host_id),
        device,
        collective_listen: args.collective_listen,
        incarnation,
        offer,
        application: Metrics::new(),
        nvml: args.common.nvml_lib.clone(),
        secret,
        log,
        hub: args.cache.hub(),
        drain_timeout: worker::run::DRAIN_TIMEOUT,
        health: health.clone(),
    };
    let is_child = args.exit_with_stdin;
    let is_ready = health.clone();
    let gone = parent_gone(is_child, move || is_ready.readiness().is_ok());
    // Whoever supervises several workers answers for all of them; a configuration file names the
    // address to them, too.
    let listen = args.health_listen.filter(|_| !is_child);
    let end = actix::System::new().block_on(async move {
        let mut signals = Signals::listen()?;
        beat_to_systemd();
        health::serve(listen, health::of_worker(health))?;
        // The first signal makes it leave, the second ends it at once.
        let (leave, left) = oneshot::channel();
        let left = async { left.await.unwrap_or_else(|_| TOLD.to_owned()) };
        let signalled = async {
            signals.next().await;
            let _ = leave.send(TOLD.to_owned());
            signals.next().await;
        };
        let stop = async {
            tokio::select! {
                () = gone => "its parent is gone".to_owned(),
                reason = left => reason,
            }
        };
        let end = tokio::select! {
            end = worker::run::run(options, stop) => end.map_err(|error| {
                CliError::Failed(format!("cannot start the worker: {error}"))
            }),
            error = etcd::failed(&mut membership) => Err(error),
            () = signalled => Ok(WorkerEnd::Shutdown { reason: TOLD_AT_ONCE.to_owned() }),
        };
        if is_child {
            farewell();
        }
        if let Some(membership) = membership {
            membership.leave().await;
        }
        if let Ok(WorkerEnd::DeviceLost { reason }) = end {
            let error = CliError::Device(reason);
            error_line(&error.to_string());
            // Destructors give a broken GPU's memory back, which may take for ever.
            leave_at_once(error.code());
        }
        end
    })?;
    match end {
        WorkerEnd::Shutdown { reason } if is_child && [TOLD, TOLD_AT_ONCE].contains(&&*reason) => {
            // Its parent still wants it and starts another one.
            Err(CliError::Again(format!("the worker ends: {reason}")))
        }
        WorkerEnd::Shutdown { reason } => {
            tracing::info!(%reason, "the worker ends");
            Ok(())
        }
        WorkerEnd::Refused { reason } => {
            Err(CliError::Failed(format!("the coordinator refuses this worker: {reason}")))
        }
        WorkerEnd::DeviceLost { reason } => Err(CliError::Device(reason)),
        WorkerEnd::Failed { message } => Err(CliError::Failed(message)),
    }
}

/// Number of cores that this process may use.
pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1))
}

/// Identifies the host: equal for processes that can share memory and see each other's processes.
/// So containers with their own /dev/shm or process ids count as separate hosts.
pub(crate) fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .ok()
        .filter(|id| !id.is_empty())
        .unwrap_or_else(hostname);
    let memory = std::fs::metadata("/dev/shm").map_or(0, |folder| folder.dev());
    let processes = std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
    format!("{boot}-{memory:x}-{processes:x}")
}

/// Returns a number that no other process has drawn: hashers are seeded by the operating system.
/// Not for secrets.
pub(crate) fn random() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

/// Makes a secret of this process alone.
pub(crate) fn random_secret() -> Result<Secret, CliError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| {
        CliError::Failed(format!("the system's random number generator failed: {error}"))
    })?;
    Ok(Secret::of_random(bytes))
}

pub(crate) fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "host".to_owned(), |name| name.trim().to_owned())
}

/// Returns the default name of a process. In containers all processes may have the same id, and
/// hosts the same name.
pub(crate) fn default_node() -> String {
    format!("{}-{}-{:04x}", hostname(), std::process::id(), random() as u16)
}

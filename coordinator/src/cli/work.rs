//! `tutti worker`: one rank, until it is told to stop.
use std::hash::{BuildHasher as _, Hasher as _};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;

use shared::membership::Role;
use shared::metrics::application::Metrics;
use tokio::sync::oneshot;
use worker::actor::WorkerEnd;
use worker::run::WorkerOptions;

use super::output::error_line;
use super::{CliError, WorkerArgs, devices, etcd, logging, secret};

pub(crate) fn run(args: &WorkerArgs) -> Result<(), CliError> {
    logging::init(&args.common.log_level);
    let device = devices::choose(&args.compute, args.compute.threads.unwrap_or_else(cores))?;
    let secret = secret::read(&args.common)?;
    let (node, incarnation) = (args.node.clone().unwrap_or_else(default_node), random());
    let coordinator = args.coordinator.as_deref();
    let (coordinator, mut membership) =
        etcd::find(coordinator, &args.etcd, Role::Worker, &node, incarnation)?;
    let options = WorkerOptions {
        coordinator,
        node,
        host: args.host_id.clone().unwrap_or_else(host_id),
        device,
        collective_listen: args.collective_listen,
        incarnation,
        application: Metrics::new(),
        nvml: args.common.nvml_lib.clone(),
        secret,
    };
    let parent_gone = args.exit_with_stdin.then(stdin_closes);
    let end = actix::System::new().block_on(async move {
        let gone = async {
            match parent_gone {
                Some(gone) => drop(gone.await),
                None => std::future::pending().await,
            }
        };
        let end = tokio::select! {
            end = worker::run::run(options) => end.map_err(|error| {
                CliError::Failed(format!("cannot start the worker: {error}"))
            }),
            error = etcd::failed(&mut membership) => Err(error),
            () = gone => Ok(WorkerEnd::Shutdown { reason: "its parent is gone".to_owned() }),
            () = interrupted() => Ok(WorkerEnd::Shutdown { reason: "interrupted".to_owned() }),
        };
        if let Some(membership) = membership {
            membership.leave().await;
        }
        if let Ok(WorkerEnd::DeviceLost { reason }) = end {
            let error = CliError::Device(reason);
            error_line(&error.to_string());
            #[allow(
                clippy::disallowed_methods,
                reason = "destructors give a broken GPU's memory back, which may take for ever"
            )]
            std::process::exit(error.code().into());
        }
        end
    })?;
    match end {
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

/// Resolves on SIGINT (Ctrl-C) or SIGTERM.
pub(crate) async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

/// Cores this process may use.
pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1))
}

/// Identifies the host: equal for processes that can share memory and see each other's processes,
/// so that containers with a /dev/shm or process ids of their own count as hosts of their own.
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

/// A random number from the operating system's entropy.
pub(crate) fn random() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "host".to_owned(), |name| name.trim().to_owned())
}

/// A process's name where none is given.
pub(crate) fn default_node() -> String {
    format!("{}-{}", hostname(), std::process::id())
}

/// Resolves when stdin reaches its end.
fn stdin_closes() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let mut byte = [0u8; 64];
        while std::io::stdin().read(&mut byte).is_ok_and(|n| n > 0) {}
        let _ = sender.send(());
    });
    receiver
}

//! `tutti up`: a coordinator in this process, workers as child processes.
mod progress;

use std::net::SocketAddr;
use std::time::Duration;

use coordinator::cluster::view::{ClusterView, UnresponsiveNodes};
use coordinator::coordinator::Coordinator;
use coordinator::http::admin::{OWN_NODE, ScaleWorkers};
use tokio::sync::{mpsc, watch};

use self::progress::LoadBar;
use super::children::{ChildEvent, Children, WorkerCommand};
use super::health::ReadyWorkers;
use super::heartbeat::{StartUpBeats, beat_to_systemd};
use super::options::{TENSOR_PARALLEL, Workers};
use super::output::print_line;
use super::serve::{ModelHints, WeightsLocation, check_model, coordinator_options, finish};
use super::signals::Signals;
use super::work::cores;
use super::{CliError, UpArgs, devices, logging, serve};

/// How long a worker that was asked to stop may take before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(3);

/// Checks the given numbers against each other, before querying the host for the others.
pub(crate) fn check_numbers(args: &UpArgs) -> Result<(), CliError> {
    let degree = args.serving.tensor_parallel;
    if let (Some(workers), Some(degree)) = (args.workers.and_then(Workers::number), degree)
        && workers < degree
    {
        return Err(CliError::Usage(format!(
            "--workers {workers} is below --tensor-parallel {degree}: not even one replica would \
             be complete"
        )));
    }
    serve::check_least(&args.serving, degree.unwrap_or(TENSOR_PARALLEL))?;
    serve::check_stats(&args.serving)
}

pub(crate) fn run(args: &UpArgs) -> Result<(), CliError> {
    let log = logging::init(&args.common, "up", OWN_NODE);
    let start_up = StartUpBeats::start();
    let shared = devices::share_out(
        &args.compute,
        args.workers.and_then(Workers::number),
        args.serving.tensor_parallel,
    )?;
    let devices::Shared { workers, degree, devices, text: on } = shared;
    if workers < degree {
        return Err(CliError::Usage(format!(
            "--workers {workers} is below --tensor-parallel {degree}: not even one replica would \
             be complete"
        )));
    }
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut serving = args.serving.clone();
    serving.tensor_parallel = Some(degree);
    let model = ModelHints { weights: WeightsLocation::Here, pinned: None };
    let mut options = coordinator_options(&args.common, &serving, any_port, model, log)?;
    check_model(&options, WeightsLocation::Here)?;
    let (scaler, scaling) = mpsc::channel(8);
    options.workers = Some(scaler);
    let patience = Duration::from_secs(args.serving.drain_timeout);
    let model = options.sources.model.clone();
    actix::System::new().block_on(async move {
        let mut signals = Signals::listen()?;
        let coordinator = Coordinator::start(options)?;
        drop(start_up);
        beat_to_systemd();
        let command = worker_command(args, &coordinator, devices, workers)?;
        print_line(&format!("tutti {}: {model}", env!("CARGO_PKG_VERSION")));
        print_line(&format!(
            "{workers} {on} workers, tensor parallel {degree}, {} replica(s)",
            workers / degree
        ));
        let view = coordinator.view();
        let (events, ends) = mpsc::channel(64);
        let (kick, kicked) = watch::channel(UnresponsiveNodes::new());
        let least = args.serving.min_tensor_parallel.unwrap_or(degree).min(degree);
        let mut children = Children::start(command, workers, events, kicked, ReadyWorkers::default());
        let outcome = tokio::select! {
            () = async {
                signals.next().await;
                finish(&coordinator, patience, &mut signals).await;
            } => Ok(()),
            outcome = supervise(&coordinator, view, ends, &kick, scaling, (&mut children, least)) => outcome,
        };
        print_line("stopping");
        coordinator.stop(true).await;
        children.stop().await;
        if outcome.is_ok() {
            tracing::info!("all workers have ended, and so does tutti up");
        }
        outcome
    })
}

fn worker_command(
    args: &UpArgs,
    coordinator: &Coordinator,
    devices: Vec<String>,
    workers: u32,
) -> Result<WorkerCommand, CliError> {
    let program = std::env::current_exe()
        .map_err(|error| CliError::Failed(format!("cannot find this program's file: {error}")))?;
    let threads = args.compute.threads.unwrap_or_else(|| (cores() / workers).max(1));
    let files = [
        ("--nvml-lib", &args.common.nvml_lib),
        ("--cluster-secret-file", &args.common.cluster_secret_file),
        ("--cuda-kernels", &args.compute.cuda.cuda_kernels),
        ("--nccl-lib", &args.compute.cuda.nccl_lib),
        ("--download-dir", &args.serving.hub.cache.download_dir),
    ];
    let files = files.into_iter().filter_map(|(option, file)| {
        Some([option.to_owned(), file.as_ref()?.to_string_lossy().into_owned()])
    });
    let folders =
        args.compute.cuda.cuda_lib_dir.iter().flat_map(|folder| {
            ["--cuda-lib-dir".to_owned(), folder.to_string_lossy().into_owned()]
        });
    let flags = [
        ("--no-cuda-graphs", args.compute.no_cuda_graphs),
        ("--no-cuda-overlap", args.compute.no_cuda_overlap),
        ("--batch-invariant", args.compute.batch_invariant),
    ];
    let flags = flags.into_iter().filter(|(_, on)| *on).map(|(flag, _)| flag.to_owned());
    let interface = args.compute.nccl_interface.iter();
    let interface = interface.flat_map(|name| ["--nccl-interface".to_owned(), name.clone()]);
    let args = [
        "worker".to_owned(),
        "--coordinator".to_owned(),
        coordinator.cluster_addr().to_string(),
        "--log-level".to_owned(),
        args.common.log_level.clone(),
        "--log-format".to_owned(),
        args.common.log_format.name().to_owned(),
        "--gpu-memory-utilization".to_owned(),
        args.compute.gpu_memory_utilization.to_string(),
        "--cuda-exchange".to_owned(),
        args.compute.cuda_exchange.name().to_owned(),
        "--cuda-warmup".to_owned(),
        args.compute.cuda_warmup.to_string(),
        "--exit-with-stdin".to_owned(),
    ];
    let args = args.into_iter().chain(files.flatten()).chain(folders).chain(flags);
    let args = args.chain(interface).map(Into::into).collect();
    let (name, patience) = ("local".to_owned(), STOP_PATIENCE);
    Ok(WorkerCommand { program, args, threads, devices, name, patience })
}

/// Starts workers, including those that left or were given up, or lets the last ones leave: all of
/// them, or none if one is indispensable.
async fn scale(
    coordinator: &Coordinator,
    children: &mut Children,
    workers: u32,
) -> Result<(), String> {
    let view = coordinator.view();
    // Who is drained is not among those counted, though its process still runs.
    children.drained(&view.borrow().leaving);
    let leaving = children.nodes_from(workers);
    // Others cannot be told, and one unknown name would keep all of them here.
    let is_linked = |node: &&String| view.borrow().workers.iter().any(|(_, it, _)| it == *node);
    let told: Vec<String> = leaving.iter().filter(is_linked).cloned().collect();
    if !told.is_empty() {
        coordinator.drain(told.clone()).await?;
    }
    for node in &leaving {
        children.dismiss(node, told.contains(node));
    }
    // Before others get these names.
    children.drained(&view.borrow().leaving);
    children.try_again();
    while children.count() < workers {
        children.add();
    }
    let (threads, cores) = (children.threads(), cores());
    if threads.saturating_mul(workers) > cores {
        tracing::warn!(
            workers,
            threads,
            cores,
            "more threads than cores: workers keep the --threads that they were started with"
        );
    }
    Ok(())
}

/// Shows progress, announces readiness, and ends only when continuing makes no sense: for example
/// with fewer than the `least` workers that a replica needs.
async fn supervise(
    coordinator: &Coordinator,
    mut view: watch::Receiver<ClusterView>,
    mut ends: mpsc::Receiver<ChildEvent>,
    kick: &watch::Sender<UnresponsiveNodes>,
    mut scaling: mpsc::Receiver<ScaleWorkers>,
    (children, least): (&mut Children, u32),
) -> Result<(), CliError> {
    let mut bar = Some(LoadBar::new());
    let mut announced = false;
    let mut timer = tokio::time::interval(Duration::from_millis(20));
    loop {
        tokio::select! {
            _ = timer.tick(), if !announced => {}
            changed = view.changed() => if changed.is_err() {
                return Err(CliError::Failed("the cluster actor is gone".to_owned()));
            },
            Some(ScaleWorkers { workers, answer }) = scaling.recv() => {
                let _ = answer.send(scale(coordinator, children, workers).await);
            }
            Some(event) = ends.recv() => match event {
                ChildEvent::Ended(ended) => coordinator.process_ended(ended),
                ChildEvent::Started { node, max_restarts } => {
                    coordinator.supervised(&node, Some(max_restarts));
                }
                ChildEvent::Left { node, watcher } => {
                    if children.left(&node, watcher) {
                        coordinator.supervised(&node, None);
                    }
                    tracing::info!(node, "a worker left");
                }
                ChildEvent::Restarting { node, status, after } => {
                    tracing::warn!(node, status, ?after, "a worker ended; restarting it");
                }
                ChildEvent::GaveUp { node, watcher, reason } => {
                    if !children.give_up(&node, watcher) {
                        // It has been started again since.
                        continue;
                    }
                    coordinator.supervised(&node, None);
                    let serves = !view.borrow().serving.is_empty();
                    if !serves && children.num_tried() < least {
                        return Err(CliError::Failed(format!("worker {node}: {reason}")));
                    }
                    tracing::error!(
                        node, reason,
                        "a worker keeps failing and is not restarted any more; `tutti scale \
                         --workers N` tries again"
                    );
                }
            },
        }
        let now = view.borrow_and_update().clone();
        if let Some(reason) = now.unservable().filter(|_| now.serving.is_empty()) {
            return Err(CliError::Failed(reason.to_owned()));
        }
        if *kick.borrow() != now.frozen {
            kick.send_replace(now.frozen.clone());
        }
        if let Some(bar) = &bar {
            bar.show(now.load);
        }
        if !announced && coordinator.is_ready() {
            announced = true;
            drop(bar.take());
            print_line(&format!("ready: {}", coordinator.http_url()));
        }
    }
}

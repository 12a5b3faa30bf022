//! `tutti frontend`: HTTP in its own process, until it is told to stop.
use std::sync::Arc;
use std::time::Duration;

use coordinator::frontend::{Frontend, FrontendOptions};

use shared::actor::ActorRuntime;
use shared::clock::SystemClock;
use shared::membership::Role;
use shared::metrics::application::Metrics;

use super::heartbeat::beat_to_systemd;
use super::options::endpoint;
use super::output::print_line;
use super::signals::Signals;
use super::work::{cores, default_node, random};
use super::{CliError, FrontendArgs, api, etcd, logging, secret};

pub(crate) fn run(args: &FrontendArgs) -> Result<(), CliError> {
    let (node, run) = (args.node.clone().unwrap_or_else(default_node), random());
    logging::init(&args.common, "frontend", &node);
    let secret = secret::read(&args.common)?;
    let coordinator = args.coordinator.as_deref();
    let (coordinator, mut membership) =
        etcd::find(coordinator, &args.etcd, Role::Frontend, &node, run)?;
    let listen = endpoint(args.listen, args.uds.as_ref());
    let options = FrontendOptions {
        coordinator,
        actors: ActorRuntime::spoke(&node, run, Arc::new(SystemClock::start())),
        node,
        metrics_listen: args.metrics_listen,
        model: args.model.clone(),
        hub: args.cache.hub(),
        api: api::options(&args.api, &listen)?,
        listen,
        http_threads: args.http_threads.unwrap_or_else(|| cores().clamp(1, 8)) as usize,
        nvml: args.common.nvml_lib.clone(),
        secret,
        run,
        application: Metrics::new(),
    };
    let patience = Duration::from_secs(args.drain_timeout);
    actix::System::new().block_on(async move {
        beat_to_systemd();
        let end = tokio::select! {
            end = serve(options, patience) => end,
            error = etcd::failed(&mut membership) => Err(error),
        };
        if let Some(membership) = membership {
            membership.leave().await;
        }
        end
    })
}

async fn serve(options: FrontendOptions, patience: Duration) -> Result<(), CliError> {
    let mut signals = Signals::listen()?;
    let started = tokio::select! {
        started = Frontend::start(options) => started,
        () = signals.next() => return Ok(()),
    };
    let mut frontend = started.map_err(|error| CliError::Failed(error.to_string()))?;
    print_line(&format!("tutti frontend: {}", frontend.http_url()));
    if let Some(url) = frontend.metrics_url() {
        print_line(&format!("metrics only: {url}"));
    }
    tokio::select! {
        () = signals.next() => {}
        error = frontend.failed() => return Err(CliError::Failed(error.to_string())),
    }
    tokio::select! {
        _ = signals.drain(frontend.requests(), patience, frontend.finish(patience)) => {}
        error = frontend.failed() => return Err(CliError::Failed(error.to_string())),
    }
    frontend.stop().await;
    tracing::info!("the front end ends");
    Ok(())
}

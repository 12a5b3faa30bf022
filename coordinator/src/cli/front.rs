//! `tutti frontend`: HTTP in a process of its own, until it is told to stop.
use std::sync::Arc;

use coordinator::frontend::{Frontend, FrontendOptions};

use shared::actor::ActorRuntime;
use shared::clock::SystemClock;
use shared::metrics::application::Metrics;

use super::output::print_line;
use super::work::{cores, default_node, interrupted, random};
use super::{CliError, FrontendArgs, logging, secret};

pub(crate) fn run(args: &FrontendArgs) -> Result<(), CliError> {
    logging::init(&args.common.log_level);
    let (node, run) = (args.node.clone().unwrap_or_else(default_node), random());
    let options = FrontendOptions {
        coordinator: args.coordinator.clone(),
        actors: ActorRuntime::spoke(&node, run, Arc::new(SystemClock::start())),
        node,
        listen: args.listen,
        model: args.model.clone(),
        http_threads: args.http_threads.unwrap_or_else(|| cores().clamp(1, 8)) as usize,
        nvml: args.common.nvml_lib.clone(),
        secret: secret::read(&args.common)?,
        run,
        application: Metrics::new(),
    };
    actix::System::new().block_on(async move {
        let started = tokio::select! {
            started = Frontend::start(options) => started,
            () = interrupted() => return Ok(()),
        };
        let mut frontend = started.map_err(|error| CliError::Failed(error.to_string()))?;
        print_line(&format!("tutti frontend: http://{}", frontend.http_addr()));
        tokio::select! {
            () = interrupted() => {}
            error = frontend.failed() => return Err(CliError::Failed(error.to_string())),
        }
        frontend.stop().await;
        Ok(())
    })
}

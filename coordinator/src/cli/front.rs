//! `tutti frontend`: HTTP in a process of its own, until it is told to stop.
use coordinator::frontend::{Frontend, FrontendOptions};

use shared::membership::Role;
use shared::metrics::application::Metrics;

use super::output::print_line;
use super::work::{cores, default_node, interrupted, random};
use super::{CliError, FrontendArgs, etcd, logging, secret};

pub(crate) fn run(args: &FrontendArgs) -> Result<(), CliError> {
    logging::init(&args.common.log_level);
    let secret = secret::read(&args.common)?;
    let (node, run) = (args.node.clone().unwrap_or_else(default_node), random());
    let coordinator = args.coordinator.as_deref();
    let (coordinator, mut membership) =
        etcd::find(coordinator, &args.etcd, Role::Frontend, &node, run)?;
    let options = FrontendOptions {
        coordinator,
        node,
        listen: args.listen,
        model: args.model.clone(),
        http_threads: args.http_threads.unwrap_or_else(|| cores().clamp(1, 8)) as usize,
        nvml: args.common.nvml_lib.clone(),
        secret,
        run,
        application: Metrics::new(),
    };
    actix::System::new().block_on(async move {
        let end = tokio::select! {
            end = serve(options) => end,
            error = etcd::failed(&mut membership) => Err(error),
        };
        if let Some(membership) = membership {
            membership.leave().await;
        }
        end
    })
}

async fn serve(options: FrontendOptions) -> Result<(), CliError> {
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
}

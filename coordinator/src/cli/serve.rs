//! `tutti coordinator`: HTTP and scheduling; workers dial in.
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coordinator::coordinator::{Coordinator, CoordinatorOptions, LogStats};
use coordinator::metrics::log_line::Field;
use coordinator::replica::driver::DriverLimits;

use shared::log::SharedLog;
use shared::metrics::compat::Compat;
use shared::protocol::{Adapter, Lora};

use super::lora::LoraArgs;
use super::options::{CommonArgs, CompatArg, PolicyArg, ServingArgs, TENSOR_PARALLEL};
use super::output::print_line;
use super::signals::Signals;
use super::work::{cores, random, random_secret};
use super::{CliError, CoordinatorArgs, api, elected, etcd, logging, secret};

/// Default maximum of tokens in a step, which suits CPUs; and the one for workers on GPUs.
const BATCHED_TOKENS: u32 = 512;
pub(crate) const BATCHED_TOKENS_GPU: u32 = 2048;

/// Default address that workers dial.
const CLUSTER_LISTEN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8001);

pub(crate) fn run(args: &CoordinatorArgs) -> Result<(), CliError> {
    let log = logging::init(&args.common.log_level);
    let options = coordinator_options(&args.common, &args.serving, CLUSTER_LISTEN, log)?;
    check_model(&options, Weights::MayBeElsewhere)?;
    let lease = Duration::from_secs(args.leader_lease);
    let patience = Duration::from_secs(args.serving.drain_timeout);
    if let Some(etcd) = etcd::options(&args.etcd, lease)? {
        let interval = Duration::from_secs(args.checkpoint_interval);
        let checkpoints = Some(interval).filter(|it| !it.is_zero() && options.metrics);
        let advertise = args.advertise.as_deref();
        let run = elected::run(options, etcd, advertise, checkpoints, patience);
        return actix::System::new().block_on(run);
    }
    if args.advertise.is_some() {
        return Err(CliError::Usage("--advertise is given without --etcd".to_owned()));
    }
    actix::System::new().block_on(async move {
        let mut signals = Signals::listen()?;
        let degree = options.tensor_parallel;
        let coordinator =
            Coordinator::start(options).map_err(|error| CliError::Failed(error.to_string()))?;
        print_line(&format!("tutti coordinator: {}", coordinator.http_url()));
        if let Some(url) = coordinator.metrics_url() {
            print_line(&format!("metrics only: {url}"));
        }
        print_line(&format!(
            "waiting for {degree} workers: tutti worker --coordinator {}",
            coordinator.cluster_addr()
        ));
        let end = tokio::select! {
            () = async {
                signals.next().await;
                finish(&coordinator, patience, &mut signals).await;
            } => Ok(()),
            reason = coordinator.failed() => Err(CliError::Failed(reason.to_owned())),
        };
        coordinator.stop(false).await;
        end
    })
}

/// Takes no new requests and lets running ones finish.
pub(crate) async fn finish(coordinator: &Coordinator, patience: Duration, signals: &mut Signals) {
    coordinator.close();
    signals.drain(coordinator.requests(), patience, coordinator.finish(patience)).await;
}

/// Checks the options and fills in what depends on the machine.
pub(crate) fn coordinator_options(
    common: &CommonArgs,
    args: &ServingArgs,
    cluster_listen: SocketAddr,
    log: SharedLog,
) -> Result<CoordinatorOptions, CliError> {
    let secret = secret::read(common)?;
    let cluster_listen = args.cluster_listen.unwrap_or(cluster_listen);
    secret::require(cluster_listen, secret.as_ref(), args.insecure_no_auth)?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => demo_model()?,
    };
    let model = std::path::absolute(&model).unwrap_or(model);
    let degree = args.tensor_parallel.unwrap_or(TENSOR_PARALLEL);
    check_least(args, degree)?;
    let mut names = args.served_model_name.iter().cloned();
    let folder = || model.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = names.next().or_else(folder).unwrap_or_else(|| "model".to_owned());
    Ok(CoordinatorOptions {
        served_model_name: name,
        model_aliases: names.collect(),
        model,
        dtype: args.dtype,
        quantization: args.quantization,
        lora: lora(&args.lora)?,
        tensor_parallel: degree,
        min_tensor_parallel: args.min_tensor_parallel.unwrap_or(degree),
        max_replicas: args.replicas,
        placement: args.placement.rules()?,
        listen: args.listen,
        cluster_listen,
        secret,
        max_model_len: args.max_model_len,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens.unwrap_or(BATCHED_TOKENS),
        block_size: args.block_size,
        // 0 leaves the choice to the workers.
        kv_cache_bytes: args.kv_cache_memory.unwrap_or(0),
        swap_bytes: args.swap_space,
        prefix_caching: !args.no_enable_prefix_caching,
        speculation: args.speculative_config.as_ref().map(|config| config.speculation),
        draft_model: args
            .speculative_config
            .as_ref()
            .and_then(|config| config.draft_model.as_deref())
            .map(|folder| std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned())),
        api: api::options(&args.api, args.listen)?,
        priorities: args.scheduling_policy == PolicyArg::Priority,
        max_queued_requests: args.max_queued_requests,
        limits: DriverLimits {
            step_timeout: Duration::from_secs(args.step_timeout),
            unavailable_timeout: Duration::from_secs(args.unavailable_timeout),
            max_queue_wait: (args.max_queue_wait > 0)
                .then(|| Duration::from_secs(args.max_queue_wait)),
        },
        form_timeout: Duration::from_secs(args.form_timeout),
        log_stats: LogStats {
            interval: Duration::from_secs(args.log_stats_interval),
            fields: log_fields(&args.log_stats_fields),
            json: args.log_stats_json.clone(),
        },
        metrics: !args.disable_metrics,
        metrics_listen: args.metrics_listen,
        metrics_compat: compat(&args.metrics_compat)?,
        http_threads: cores().clamp(1, 8) as usize,
        nvml: common.nvml_lib.clone(),
        workers: None,
        collective_key: random_secret()?,
        run: random(),
        log,
    })
}

/// Returns the servers whose metric names are also published, each name once.
fn compat(args: &[CompatArg]) -> Result<Vec<Compat>, CliError> {
    let one = |compat: &CompatArg| match compat {
        CompatArg::Vllm => Compat::Vllm,
        CompatArg::VllmCluster => Compat::VllmCluster,
        CompatArg::Aphrodite => Compat::Aphrodite,
    };
    let mut all: Vec<Compat> = args.iter().map(one).collect();
    all.sort_unstable();
    all.dedup();
    if all.contains(&Compat::Vllm) && all.contains(&Compat::VllmCluster) {
        let message = "--metrics-compat: vllm and vllm-cluster have the same names with different \
                       labels; give only one of them";
        return Err(CliError::Usage(message.to_owned()));
    }
    Ok(all)
}

/// Checks the minimum degree against the wanted one.
pub(crate) fn check_least(args: &ServingArgs, degree: u32) -> Result<(), CliError> {
    match args.min_tensor_parallel {
        Some(least) if least > degree => Err(CliError::Usage(format!(
            "--min-tensor-parallel {least} is above --tensor-parallel {degree}: it is the smallest \
             number of workers with which a replica continues"
        ))),
        _ => Ok(()),
    }
}

/// Where the model's weights are, as seen from a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    /// On this host.
    Here,
    /// On its workers' hosts; this one may do without.
    MayBeElsewhere,
}

/// Checks what workers would reject about the model before there are any: its configuration, its
/// degree, the headers of its files, its adapters. Loads nothing.
pub(crate) fn check_model(options: &CoordinatorOptions, weights: Weights) -> Result<(), CliError> {
    let CoordinatorOptions { model, tensor_parallel: degree, lora, .. } = options;
    let checked = if weights == Weights::MayBeElsewhere && !worker::check::has_weights(model) {
        worker::check::degree(model, *degree).inspect(|()| {
            tracing::warn!(
                model = %model.display(),
                "this host does not have the model's weights: every worker's host must have them"
            );
        })
    } else {
        worker::check::model(model, *degree, options.quantization).and_then(|_| {
            let none = lora.adapters.is_empty();
            if none { Ok(()) } else { worker::check::adapters(model, lora, *degree).map(drop) }
        })
    };
    checked.map_err(|error| CliError::Failed(error.to_string()))
}

/// Returns the named adapters with absolute paths: workers may run in another folder.
pub(crate) fn lora(args: &LoraArgs) -> Result<Lora, CliError> {
    let absolute = |adapter: &Adapter| {
        let path = Path::new(&adapter.path);
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Adapter { path: path.to_string_lossy().into_owned(), ..adapter.clone() }
    };
    let adapters = args.adapters().map(absolute).collect();
    Ok(Lora { adapters, max_rank: args.max_lora_rank })
}

/// Returns the named fields; clap has checked the names.
fn log_fields(names: &[String]) -> Vec<Field> {
    names
        .iter()
        .filter_map(|name| Field::ALL.iter().find(|(known, _)| known == name))
        .map(|(_, field)| *field)
        .collect()
}

/// Finds the repository's demo model: in the working folder, or beside the place where the program
/// was built.
pub(crate) fn demo_model() -> Result<PathBuf, CliError> {
    let demo = Path::new("models/demo");
    let mut candidates = vec![demo.to_owned()];
    if let Ok(program) = std::env::current_exe() {
        candidates.extend(program.ancestors().skip(1).map(|dir| dir.join(demo)));
    }
    candidates.into_iter().find(|dir| dir.join("config.json").is_file()).ok_or_else(|| {
        CliError::Usage(
            "--model is missing, and models/demo is neither in the current folder nor beside the \
             program"
                .to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_is_published_twice() {
        use CompatArg::{Aphrodite, Vllm, VllmCluster};
        let twice = compat(&[Aphrodite, Vllm, Aphrodite]).unwrap();
        assert_eq!(twice, [Compat::Vllm, Compat::Aphrodite]);
        assert_eq!(compat(&[VllmCluster]).unwrap(), [Compat::VllmCluster]);
        let error = compat(&[Vllm, VllmCluster]).unwrap_err().to_string();
        assert!(error.contains("vllm-cluster"), "{error}");
    }
}

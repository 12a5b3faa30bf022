//! `tutti coordinator`: HTTP and scheduling; workers dial in.
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coordinator::coordinator::{Coordinator, CoordinatorOptions, LogStats, ModelSources};
use coordinator::http::admin::OWN_NODE;
use coordinator::metrics::log_line::Field;
use coordinator::replica::driver::DriverLimits;

use shared::hub::{ModelArgument, ModelPart};
use shared::log::SharedLog;
use shared::membership::{EtcdOptions, PinnedRevision};
use shared::metrics::compat::Compat;
use shared::protocol::Lora;

use super::heartbeat::{StartUpBeats, beat_to_systemd};
use super::lora::LoraArgs;
use super::options::{CommonArgs, CompatArg, PolicyArg, ServingArgs, TENSOR_PARALLEL, endpoint};
use super::output::print_line;
use super::signals::Signals;
use super::work::{cores, random, random_secret};
use super::{CliError, CoordinatorArgs, api, elected, etcd, hub, logging, secret};

/// Default address that workers dial.
const CLUSTER_LISTEN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8001);

/// How long etcd may take to say what the cluster serves.
const ETCD_PATIENCE: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &CoordinatorArgs) -> Result<(), CliError> {
    let log = logging::init(&args.common, "coordinator", OWN_NODE);
    let start_up = StartUpBeats::start();
    let lease = Duration::from_secs(args.leader_lease);
    let etcd = etcd::options(&args.etcd, lease)?;
    let model = ModelHints {
        weights: WeightsLocation::MayBeElsewhere,
        pinned: pinned(etcd.as_ref(), args)?,
    };
    let options = coordinator_options(&args.common, &args.serving, CLUSTER_LISTEN, model, log)?;
    check_model(&options, WeightsLocation::MayBeElsewhere)?;
    let patience = Duration::from_secs(args.serving.drain_timeout);
    if let Some(etcd) = etcd {
        let interval = Duration::from_secs(args.checkpoint_interval);
        let checkpoints = Some(interval).filter(|it| !it.is_zero() && options.metrics);
        let advertise = args.advertise.as_deref();
        let run = elected::run(options, etcd, advertise, checkpoints, patience, start_up);
        return actix::System::new().block_on(run);
    }
    if args.advertise.is_some() {
        return Err(CliError::Usage("--advertise is given without --etcd".to_owned()));
    }
    actix::System::new().block_on(async move {
        let mut signals = Signals::listen()?;
        let degree = options.tensor_parallel;
        let coordinator = Coordinator::start(options)?;
        drop(start_up);
        beat_to_systemd();
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
        if end.is_ok() {
            tracing::info!("the coordinator ends");
        }
        end
    })
}

/// Which state of a model of the hub the cluster serves, if this coordinator is to serve one and
/// etcd says it.
fn pinned(
    etcd: Option<&EtcdOptions>,
    args: &CoordinatorArgs,
) -> Result<Option<PinnedRevision>, CliError> {
    let (Some(etcd), Some(model)) = (etcd, &args.serving.model) else { return Ok(None) };
    if !matches!(hub::read("--model", model)?, ModelArgument::Hub(_)) {
        return Ok(None);
    }
    let hints = actix::System::new().block_on(etcd.pinned(ETCD_PATIENCE));
    Ok(hints.unwrap_or_else(|error| {
        tracing::warn!(error, "etcd does not say which state of the model the cluster serves");
        None
    }))
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
    hints: ModelHints,
    log: SharedLog,
) -> Result<CoordinatorOptions, CliError> {
    let secret = secret::read(common)?;
    let cluster_listen = args.cluster_listen.unwrap_or(cluster_listen);
    secret::require(cluster_listen, secret.as_ref(), args.insecure_no_auth)?;
    let degree = args.tensor_parallel.unwrap_or(TENSOR_PARALLEL);
    check_least(args, degree)?;
    check_stats(args)?;
    let listen = endpoint(args.listen, args.uds.as_ref());
    let (placement, api) = (args.placement.rules()?, api::options(&args.api, &listen)?);
    let metrics_compat = compat(&args.metrics_compat)?;
    // All that can be wrong without the model has been looked at: it may take long to come.
    let here = hints.weights == WeightsLocation::Here;
    let part = if here { ModelPart::All } else { ModelPart::Text };
    let found = match &args.model {
        Some(model) => hub::find(model, &args.hub, part, hints.pinned)?,
        None => hub::LocatedModel::folder(&demo_model()?),
    };
    let draft = args.speculative_config.as_ref().and_then(|config| config.draft_model.as_deref());
    let draft_model = draft.map(|draft| hub::find_draft(draft, &args.hub, here)).transpose()?;
    let (lora, lora_sources) = hub::find_adapters(&adapters(&args.lora), &args.hub)?;
    let mut names = args.served_model_name.iter().cloned();
    let own = || match &found.pinned {
        Some(pinned) => Some(pinned.name.clone()),
        None => found.folder.file_name().map(|name| name.to_string_lossy().into_owned()),
    };
    let name = names.next().or_else(own).unwrap_or_else(|| "model".to_owned());
    Ok(CoordinatorOptions {
        sources: ModelSources {
            model: found.source,
            lora: lora_sources,
            draft_model,
            pinned: found.pinned,
        },
        served_model_name: name,
        model_aliases: names.collect(),
        model: found.folder,
        dtype: args.dtype,
        quantization: args.quantization,
        lora,
        tensor_parallel: degree,
        min_tensor_parallel: args.min_tensor_parallel.unwrap_or(degree),
        max_replicas: args.replicas,
        placement,
        listen,
        cluster_listen,
        secret,
        max_model_len: args.max_model_len,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens.0,
        max_mixed_prefill_tokens: args.max_mixed_prefill_tokens.0,
        block_size: args.block_size,
        kv_cache_dtype: args.kv_cache_dtype,
        // 0 leaves the choice to the workers.
        kv_cache_bytes: args.kv_cache_memory.unwrap_or(0),
        swap_bytes: args.swap_space,
        prefix_caching: !args.no_enable_prefix_caching,
        prefix_states: args.prefix_states,
        speculation: args.speculative_config.as_ref().map(|config| config.speculation),
        api,
        priorities: args.scheduling_policy == PolicyArg::Priority,
        max_queued_requests: args.max_queued_requests,
        limits: DriverLimits {
            step_timeout: Duration::from_secs(args.step_timeout),
            step_floor: Duration::from_secs(args.min_step_timeout),
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
        metrics_compat,
        http_threads: cores().clamp(1, 8) as usize,
        nvml: common.nvml_lib.clone(),
        workers: None,
        collective_key: random_secret()?,
        run: random(),
        log,
        hub: args.hub.cache.hub(),
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

/// Checks that the statistics to be written are taken.
pub(crate) fn check_stats(args: &ServingArgs) -> Result<(), CliError> {
    match &args.log_stats_json {
        Some(file) if args.log_stats_interval == 0 => Err(CliError::Usage(format!(
            "--log-stats-json {} gets nothing with --log-stats-interval 0, which turns the \
             statistics off: leave out one of them",
            file.display()
        ))),
        _ => Ok(()),
    }
}

/// What is known of the model before it is found.
#[derive(Clone, Debug)]
pub(crate) struct ModelHints {
    /// Where its weights are to be.
    pub(crate) weights: WeightsLocation,
    /// The state of a model of the hub that the cluster serves.
    pub(crate) pinned: Option<PinnedRevision>,
}

/// Where the model's weights are, as seen from a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightsLocation {
    /// On this host.
    Here,
    /// On its workers' hosts; this one may do without.
    MayBeElsewhere,
}

/// Checks what workers would reject about the model before there are any: its configuration, its
/// degree, the headers of its files, its adapters. Loads nothing.
pub(crate) fn check_model(
    options: &CoordinatorOptions,
    weights: WeightsLocation,
) -> Result<(), CliError> {
    let CoordinatorOptions { model, tensor_parallel: degree, lora, .. } = options;
    let overrides = &options.api.text.config_overrides;
    let checks_adapters = || {
        if lora.adapters.is_empty() {
            return Ok(());
        }
        worker::check::adapters(model, overrides, lora, *degree).map(drop)
    };
    let elsewhere = weights == WeightsLocation::MayBeElsewhere;
    let checked = if elsewhere && options.sources.pinned.is_some() {
        // Workers fetch them; what is here may be on its way.
        worker::check::degree(model, overrides, *degree).and_then(|()| checks_adapters())
    } else if elsewhere && !worker::check::has_weights(model) {
        worker::check::degree(model, overrides, *degree).inspect(|()| {
            tracing::warn!(
                model = %model.display(),
                "this host does not have the model's weights: every worker's host must have them"
            );
        })
    } else {
        let fits = worker::check::model_with(model, overrides, *degree, options.quantization);
        fits.and_then(|_| checks_adapters())
    };
    checked.map_err(|error| CliError::Failed(error.to_string()))
}

/// The adapters named, as they were given.
pub(crate) fn adapters(args: &LoraArgs) -> Lora {
    let adapters = args.adapters().map(|(name, path)| (name.clone(), path.clone()));
    Lora { places: args.max_loras.unwrap_or(0), ..Lora::fixed(adapters, args.max_lora_rank) }
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

//! Options of the commands that ask a running coordinator, this machine or a file.
use std::path::PathBuf;

use clap::{Args, Subcommand};
use coordinator::http::admin::LOCAL_WORKERS_MAX;
use shared::model_config::ConfigOverrides;
use shared::protocol::{Dtype, KvCacheDtype, Quantization};

use super::super::etcd::EtcdArgs;
use super::super::http_client::TrustArgs;
use super::super::hub::HubArgs;
use super::compute::{ComputeArgs, CudaArgs};
use super::serving::{parse_dtype, parse_kv_cache_dtype, parse_quantization};

/// Options of the commands that talk to a running coordinator.
#[derive(Args, Clone, Debug)]
pub(crate) struct OperatorArgs {
    /// The coordinator's HTTP address, http:// (may be omitted) or https://, unless the one that
    /// leads is found through --etcd
    #[arg(
        long,
        value_name = "URL",
        default_value = "http://127.0.0.1:8000",
        conflicts_with = "etcd"
    )]
    pub(crate) server: String,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
    /// File with the cluster's secret, if it has one
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
}

/// Options of `tutti status`.
#[derive(Args, Clone, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Show processes that have ended, and why
    #[arg(long, conflicts_with = "json")]
    pub(crate) dead: bool,
}

/// Options of `tutti logs`.
#[derive(Args, Clone, Debug)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// The worker's node name, as `tutti status` shows it, or `coordinator`
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
    /// Maximum number of lines to show
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) lines: u32,
    /// Show the log of the process that ended last, even if a new one runs under the same name
    #[arg(long, conflicts_with = "pid")]
    pub(crate) previous: bool,
    /// Show the log of the process with this id, as listed by `tutti status --dead`
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `tutti scale`.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = true, args = ["replicas", "reset", "workers"])]
pub(crate) struct ScaleArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// Maximum number of replicas; 0 for as many as the workers allow
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub(crate) replicas: Option<u32>,
    /// Return to the number of replicas that the coordinator was started with (its --replicas)
    #[arg(long, conflicts_with = "replicas")]
    pub(crate) reset: bool,
    /// Number of local workers (of `tutti up`)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(LOCAL_WORKERS_MAX)))]
    pub(crate) workers: Option<u32>,
}

/// Options of `tutti drain`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// The worker's node name, as `tutti status` shows it
    #[arg(value_name = "NODE")]
    pub(crate) node: String,
}

/// Options of `tutti reset-prefix-cache`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ResetPrefixCacheArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
}

/// Options of `tutti actors`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ActorsArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// kill: end an actor at once
    #[arg(value_name = "kill", value_parser = ["kill"], requires = "actor", conflicts_with = "json")]
    pub(crate) action: Option<String>,
    /// The actor's name
    #[arg(value_name = "ACTOR")]
    pub(crate) actor: Option<String>,
    /// With kill: start it again, if it was created by class and has restarts left
    #[arg(long, requires = "action")]
    pub(crate) restart: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `tutti adapters`.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdaptersArgs {
    #[command(subcommand)]
    pub(crate) command: AdapterCommand,
}

/// What to do about an adapter; `tutti status` lists them.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum AdapterCommand {
    /// Load an adapter on all workers, and serve it as a model of its own
    Load(LoadArgs),
    /// Serve an adapter no longer; requests that use it end undisturbed
    Unload(UnloadArgs),
}

/// Options of `tutti adapters load`.
#[derive(Args, Clone, Debug)]
pub(crate) struct LoadArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// Its name in the API
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Its folder, the same on every worker's host, or its name on Hugging Face's hub (ORG/NAME)
    #[arg(value_name = "PATH")]
    pub(crate) path: String,
    /// Take the place of an adapter of the same name, whose requests end undisturbed
    #[arg(long)]
    pub(crate) replace: bool,
}

/// Options of `tutti adapters unload`.
#[derive(Args, Clone, Debug)]
pub(crate) struct UnloadArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// Its name in the API
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
}

/// Options of `tutti bench`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// Model folder, or a name on Hugging Face's hub [default: models/demo]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) hub: HubArgs,
    /// Keys that go before those of the model's config.json, as when serving
    #[arg(long, value_name = "JSON", value_parser = ConfigOverrides::parse)]
    pub(crate) hf_overrides: Option<ConfigOverrides>,
    /// Type of the activations in matrix products: auto, float32 or bfloat16, as when serving
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = parse_dtype)]
    pub(crate) dtype: Dtype,
    /// Quantise weights while loading: int8 or none, as when serving
    #[arg(long, value_name = "METHOD", default_value = "none", value_parser = parse_quantization)]
    pub(crate) quantization: Quantization,
    /// Type of the KV cache: auto or fp8, as when serving
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = parse_kv_cache_dtype)]
    pub(crate) kv_cache_dtype: KvCacheDtype,
    /// Tensor-parallel ranks, as threads of this process
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) tensor_parallel: u32,
    /// Prompt length of the prefill case, in tokens [default: 512, or as many as the model has
    /// positions for]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=131_072))]
    pub(crate) prompt_tokens: Option<u32>,
    /// Number of steps in each decode case
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) decode_steps: u32,
    /// Batch sizes of the decode cases, comma separated
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "1,8,16", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) batches: Vec<u32>,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

/// Options of `tutti metrics`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MetricsArgs {
    /// Print Markdown, as in docs/metrics.md
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// Options of `tutti check-config`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CheckConfigArgs {
    /// The TOML file
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

/// Options of `tutti devices`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DevicesArgs {
    #[command(flatten)]
    pub(crate) cuda: CudaArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

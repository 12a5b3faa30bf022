//! The options of a coordinator, and why it cannot start.
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use shared::hub::Hub;
use shared::log::SharedLog;
use shared::membership::PinnedRevision;
use shared::metrics::compat::Compat;
use shared::protocol::{Dtype, KvCacheDtype, Lora, Quantization};
use shared::wire::auth::Secret;
use shared::wire::keyring::Keyring;
use tokio::sync::mpsc;

use crate::cluster::PlacementRules;
use crate::http::admin::ScaleWorkers;
use crate::http::listener::Endpoint;
use crate::http::options::ApiOptions;
use crate::metrics::log_line::Field;
use crate::replica::driver::DriverLimits;
use crate::scheduler::{ConfigError, Speculation};
use crate::text::model::TextModelError;

/// The options of a coordinator.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    /// The model folder on this host.
    pub model: PathBuf,
    /// What the other processes are told to use.
    pub sources: ModelSources,
    /// Compute data type.
    pub dtype: Dtype,
    /// Quantization of the weights.
    pub quantization: Quantization,
    /// The adapters beside it, with their folders on this host.
    pub lora: Lora,
    /// The model's name in the API.
    pub served_model_name: String,
    /// Its other names in the API.
    pub model_aliases: Vec<String>,
    /// Ranks per replica.
    pub tensor_parallel: u32,
    /// Minimum ranks per replica when workers are missing.
    pub min_tensor_parallel: u32,
    /// Maximum number of replicas; absent: as many as the workers allow.
    pub max_replicas: Option<u32>,
    /// Which workers go together.
    pub placement: PlacementRules,
    /// Where HTTP is served.
    pub listen: Endpoint,
    /// The address that workers dial.
    pub cluster_listen: SocketAddr,
    /// Maximum length of a sequence; absent: the model's own limit.
    pub max_model_len: Option<u32>,
    /// Maximum number of sequences in one step.
    pub max_num_seqs: u32,
    /// Maximum number of tokens in one step; absent: as suits the replica's devices.
    pub max_num_batched_tokens: Option<u32>,
    /// Maximum number of prompt tokens in one step while sequences decode; absent: likewise.
    pub max_mixed_prefill_tokens: Option<u32>,
    /// Tokens per KV block.
    pub block_size: u32,
    /// Data type of the KV cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// KV cache memory per rank, in bytes.
    pub kv_cache_bytes: u64,
    /// Host memory for swapped KV blocks per rank, in bytes; 0 for none.
    pub swap_bytes: u64,
    /// Whether sequences reuse the KV blocks that the cache still has of their prompts.
    pub prefix_caching: bool,
    /// Number of states of linear attention that are kept for that; absent:
    /// [`Self::usual_prefix_states`].
    pub prefix_states: Option<u32>,
    /// Whether sequences draft tokens, and how.
    pub speculation: Option<Speculation>,
    /// Whether requests have priorities; otherwise they run in order of arrival.
    pub priorities: bool,
    /// Maximum number of requests per replica that wait for their first step.
    pub max_queued_requests: u32,
    /// Options of the HTTP API.
    pub api: ApiOptions,
    /// Time limits of requests and steps.
    pub limits: DriverLimits,
    /// How long a rank may be silent while it is formed: longer than it takes to load the largest
    /// matrix or to pin host memory.
    pub form_timeout: Duration,
    /// How statistics are logged.
    pub log_stats: LogStats,
    /// Whether anything is measured; if not, there is no `/metrics`.
    pub metrics: bool,
    /// Additional address that serves `/metrics`, if any.
    pub metrics_listen: Option<SocketAddr>,
    /// Other servers whose metric names are published in addition to ours.
    pub metrics_compat: Vec<Compat>,
    /// Number of threads that serve HTTP.
    pub http_threads: usize,
    /// Path of the NVML library, if the system's loader does not find it.
    pub nvml: Option<PathBuf>,
    /// Starts and stops worker processes, if this process does so.
    pub workers: Option<mpsc::Sender<ScaleWorkers>>,
    /// Drawn at random for this process; never shown.
    pub collective_key: Secret,
    /// The cluster's secrets, if it has any.
    pub secret: Option<Keyring>,
    /// Drawn at random for this process.
    pub run: u64,
    /// The last lines of this process's log.
    pub log: SharedLog,
    /// Where models of the hub come from, or why there is none.
    pub hub: Result<Hub, String>,
}

/// Where workers and front ends load what they serve from: folders, which they see at the same
/// paths as this host, or models of the hub, as [`HubModel`](shared::hub::HubModel) is written.
#[derive(Clone, Debug)]
pub struct ModelSources {
    /// The model.
    pub model: String,
    /// The adapters beside it.
    pub lora: Lora,
    /// The model that drafts, where one does.
    pub draft_model: Option<String>,
    /// Which state of the model of the hub that is, if it is one.
    pub pinned: Option<PinnedRevision>,
}

/// How statistics are logged.
#[derive(Clone, Debug)]
pub struct LogStats {
    /// Interval between two lines; zero turns them off.
    pub interval: Duration,
    /// Fields of the log line.
    pub fields: Vec<Field>,
    /// Where JSON lines are written; `-` is stdout.
    pub json: Option<PathBuf>,
}

/// Why a coordinator cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The model folder cannot be served.
    #[error(transparent)]
    Model(#[from] TextModelError),
    /// Sizes conflict.
    #[error("{}", in_options(.0))]
    Config(#[from] ConfigError),
    /// Sizes do not fit the model.
    #[error("{0}")]
    Sizes(String),
    /// A file cannot be written.
    #[error("cannot write {} (--log-stats-json): {error}", file.display())]
    StatsFile {
        /// The file.
        file: PathBuf,
        /// The operating system's error.
        error: io::Error,
    },
    /// An address, or a Unix socket, cannot be used.
    #[error("cannot listen on {address} ({option}): {error}")]
    Listen {
        /// The address.
        address: Endpoint,
        /// The option that names it.
        option: &'static str,
        /// The operating system's error.
        error: io::Error,
    },
    /// The operating system refuses a thread.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

impl CoordinatorOptions {
    /// Number of states of linear attention that are kept where none is given. Even a single
    /// conversation needs two.
    #[must_use]
    pub const fn usual_prefix_states(max_num_seqs: u32) -> u32 {
        if max_num_seqs < 3 { 2 } else { max_num_seqs.div_ceil(2) }
    }
}

/// Rewrites an error about sizes with the names of the options.
fn in_options(error: &ConfigError) -> String {
    const NAMES: [&str; 6] = [
        "block_size",
        "max_mixed_prefill_tokens",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_queued_requests",
    ];
    NAMES.iter().fold(error.to_string(), |text, name| {
        text.replace(name, &format!("--{}", name.replace('_', "-")))
    })
}

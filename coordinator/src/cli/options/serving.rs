//! Options of the roles that serve HTTP: `tutti up` and `tutti coordinator`.
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use coordinator::metrics::log_line::Field;
use shared::protocol::{Dtype, Quantization};

use super::super::api::ApiArgs;
use super::super::lora::LoraArgs;
use super::super::resources::PlacementArgs;
use super::super::speculative::{self, Speculative};
use super::super::vllm;
use super::parse_bytes;

/// A server whose metric names can be published too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompatArg {
    /// The vllm: names, a series for each replica
    Vllm,
    /// The vllm: names, one series for the whole cluster: for gateways that choose among servers
    VllmCluster,
    /// The aphrodite: names
    Aphrodite,
}

/// Which waiting request is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArg {
    /// In order of arrival
    Fcfs,
    /// By the requests' `priority`, lower first; of equals in order of arrival
    Priority,
}

/// The names of the log line's fields.
pub(super) fn log_fields() -> clap::builder::PossibleValuesParser {
    clap::builder::PossibleValuesParser::new(Field::ALL.map(|(name, _)| name))
}

/// Options of the roles that serve HTTP.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServingArgs {
    /// Model folder in Hugging Face format, at the same path on every worker's host
    /// [default: models/demo]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// The model's names in the API, separated by spaces or commas: requests may give any, answers
    /// say the first [default: the folder's name]
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub(crate) served_model_name: Vec<String>,
    /// What matrix products take of their activations: bfloat16 (rounded to it; twice as fast where
    /// the CPU has bf16 instructions), float32, or auto: bfloat16 when the model's config.json says
    /// so, when its weights are packed integers (GPTQ, AWQ), and on GPUs, else float32
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = parse_dtype)]
    pub(crate) dtype: Dtype,
    /// Quantise weights while they are loaded: int8 (half the memory of the layers, and a few
    /// sequences decoded 1.6 times as fast where memory is the limit, for a little precision) or
    /// none
    #[arg(long, value_name = "METHOD", default_value = "none", value_parser = parse_quantization)]
    pub(crate) quantization: Quantization,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    /// Workers per replica: each holds 1/N of every layer [default: 2; for `up` no more than it
    /// starts]
    #[arg(long, alias = "tensor-parallel-size", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) tensor_parallel: Option<u32>,
    /// Go on with fewer workers per replica, down to this many, when some stay away; back to
    /// --tensor-parallel when they return [default: --tensor-parallel]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) min_tensor_parallel: Option<u32>,
    #[command(flatten)]
    pub(crate) placement: PlacementArgs,
    /// Most replicas; workers beyond are kept as spares [default: as many as the workers allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) replicas: Option<u32>,
    /// Where HTTP is served
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8000")]
    pub(crate) listen: SocketAddr,
    /// Where workers dial in [default: 127.0.0.1:8001; for `up` any free port]
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) cluster_listen: Option<SocketAddr>,
    /// Let workers and front ends of other hosts join without a secret
    #[arg(long)]
    pub(crate) insecure_no_auth: bool,
    /// Longest prompt plus output, in tokens, also as 4k (4,000), 4K (4,096), 1m or 1M [default:
    /// the model's own limit]
    #[arg(long, value_name = "TOKENS", value_parser = vllm::parse_length)]
    pub(crate) max_model_len: Option<u32>,
    /// Most sequences in one engine step
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_num_seqs: u32,
    /// Most tokens in one engine step (longer prompts are prefilled in chunks) [default: 512; for
    /// `up` on GPUs 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=131_072))]
    pub(crate) max_num_batched_tokens: Option<u32>,
    /// Tokens per KV cache block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) block_size: u32,
    /// KV cache memory per worker: bytes, or with a suffix KiB, MiB, GiB [default: 512MiB on CPUs,
    /// on GPUs what --gpu-memory-utilization leaves]
    #[arg(long, alias = "kv-cache-memory-bytes", value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) kv_cache_memory: Option<u64>,
    /// Host memory per worker for the KV of requests that are put back when the KV cache is full,
    /// so that they need not be computed again: in GiB, or bytes with a suffix KiB, MiB, GiB; 0:
    /// they are computed again
    #[arg(long, value_name = "GIB", default_value = "0", value_parser = parse_swap_space)]
    pub(crate) swap_space: u64,
    /// Compute every prompt whole, also where the KV cache still has its beginning
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,
    /// Draft tokens from what a text repeats of its prompt or of itself, and verify several in one
    /// step; the text is the same. JSON as vLLM has it:
    /// {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2};
    /// or by a small model with the same tokens, whose folder the host of each replica's rank 0 has
    /// at this path: {"method":"draft_model","model":"/models/small","num_speculative_tokens":5};
    /// with "disable_by_batch_size":N nothing is drafted while more than N sequences run
    #[arg(long, value_name = "JSON", value_parser = speculative::parse)]
    pub(crate) speculative_config: Option<Speculative>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Which waiting request is next: the first to come, or the one with the lowest `priority`, of
    /// equals the first to come. Out of KV cache memory the other end of that order is put back.
    /// Less urgent requests may wait for ever
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = PolicyArg::Fcfs)]
    pub(crate) scheduling_policy: PolicyArg,
    /// Most requests of each replica that wait for their first step; beyond it clients get 429.
    /// Their choices (n) and prompt tokens have bounds, too: 2 and 4,096 times as many, and no less
    /// than 16,384 and 33,554,432
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_queued_requests: u32,
    /// Give up an engine step after this many seconds and form the replica again
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) step_timeout: u64,
    /// Give up forming a replica when nothing was heard of a rank for so many seconds: more than
    /// the largest matrix takes to load, and than GPU hosts take to pin --swap-space
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=36_000))]
    pub(crate) form_timeout: u64,
    /// Fail requests when no replica has been ready for this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) unavailable_timeout: u64,
    /// Fail requests with 503 that have waited for so many seconds and not begun; 0: they wait as
    /// long as it takes
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub(crate) max_queue_wait: u64,
    /// When told to end (SIGTERM, Ctrl-C): seconds that running requests may take to finish
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) drain_timeout: u64,
    /// Serve /metrics, /live and /ready on an address of their own too, for scrapers that may not
    /// reach the API, and for probes that find a place whatever clients do
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Also publish the names of other servers, comma separated: their dashboards and autoscaling
    /// rules then work unchanged
    #[arg(long, value_name = "SERVERS", value_enum, value_delimiter = ',')]
    pub(crate) metrics_compat: Vec<CompatArg>,
    /// Measure nothing: to see for yourself what the metrics cost
    #[arg(long)]
    pub(crate) disable_metrics: bool,
    /// What the log's line of engine statistics holds, comma separated
    #[arg(long, value_name = "FIELDS", value_delimiter = ',', value_parser = log_fields(),
          default_value = "prompt-throughput,generation-throughput,running,swapped,pending,gpu-cache,cpu-cache")]
    pub(crate) log_stats_fields: Vec<String>,
    /// Append the statistics as JSON lines to this file too; - is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) log_stats_json: Option<PathBuf>,
    /// Seconds between two lines of engine statistics in the log; 0 turns them off
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) log_stats_interval: u64,
}

/// Parses `auto`, `float32`, `bfloat16`.
pub(super) fn parse_dtype(text: &str) -> Result<Dtype, String> {
    if let "float16" | "half" = text {
        return Err(
            "float16 is not computed in: choose bfloat16 or float32 (checkpoints in float16 \
                    are fine)"
                .to_owned(),
        );
    }
    let found = Dtype::ALL.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| {
        let names = Dtype::ALL.map(Dtype::name).join(", ");
        format!("it must be one of: {names}")
    })
}

/// Parses a number of GiB, such as `4` or `0.5`, or what `parse_bytes` accepts with a unit.
pub(crate) fn parse_swap_space(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let Ok(gib) = text.parse::<f64>() else {
        return parse_bytes(text).map_err(|why| {
            format!("expected GiB, such as 4 or 0.5, or a size with a unit: {why}")
        });
    };
    let bytes = gib * (1u64 << 30) as f64;
    if !(0.0..=(1u64 << 50) as f64).contains(&bytes) {
        return Err("must be 0 to 1048576 GiB".to_owned());
    }
    Ok(bytes as u64)
}

/// Parses `none`, `int8`.
pub(crate) fn parse_quantization(text: &str) -> Result<Quantization, String> {
    let found = Quantization::ALL.into_iter().find(|method| method.name() == text);
    found.ok_or_else(|| {
        let names = Quantization::ALL.map(Quantization::name).join(", ");
        format!(
            "it must be one of: {names} (what a checkpoint is quantised with is read from its \
             config.json)"
        )
    })
}

//! Every option of every role, declared once. A configuration file uses the same names as keys.
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use coordinator::http::admin::LOCAL_WORKERS_MAX;
use coordinator::metrics::log_line::Field;
use shared::protocol::{Dtype, Quantization};
use worker::device::Exchange;

use super::api::ApiArgs;
use super::asking::TrustArgs;
use super::doctor::DoctorArgs;
use super::etcd::{EtcdArgs, parse_address};
use super::lora::LoraArgs;
use super::resources::{PlacementArgs, ResourceArgs};
use super::speculative::{self, Speculative};

/// Serve language models on your own nodes: one binary, one scheduler, one /metrics.
#[derive(Debug, Parser)]
#[command(name = "tutti", version, propagate_version = true)]
#[command(after_help = "Start here:\n  tutti up                      \
    a coordinator and two tensor-parallel CPU workers on this host\n  \
    curl localhost:8000/v1/completions -H 'content-type: application/json' \\\n    \
    -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 40}'")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The roles.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a coordinator and local workers, restart workers that crash, stop all with Ctrl-C
    Up(UpArgs),
    /// Start a coordinator: HTTP, scheduling, metrics; workers dial in
    Coordinator(CoordinatorArgs),
    /// Start one worker and join a coordinator
    Worker(WorkerArgs),
    /// Start one more HTTP front end for a coordinator
    Frontend(FrontendArgs),
    /// Show nodes, replicas and their states
    Status(StatusArgs),
    /// Show the last lines of a node's log, also when its process is gone
    Logs(LogsArgs),
    /// Change how many replicas there may be, or how many local workers `tutti up` runs
    Scale(ScaleArgs),
    /// Have a worker leave: its requests go on elsewhere, then its process ends
    Drain(DrainArgs),
    /// Check whether this host can become a node, and say how to mend what is wrong
    Doctor(DoctorArgs),
    /// Measure the engine on this machine: prefill and decode tokens/s, as one JSON line
    Bench(BenchArgs),
    /// Show what this host can compute on: CPU, GPUs, NVIDIA's libraries, and what is missing
    Devices(DevicesArgs),
    /// Print the metrics catalogue
    Metrics(MetricsArgs),
    /// Check a configuration file and say what is wrong with it
    CheckConfig(CheckConfigArgs),
}

/// Reads the parsed command line.
pub(crate) fn from_matches(matches: &clap::ArgMatches) -> Result<Command, clap::Error> {
    Cli::from_arg_matches(matches).map(|cli| cli.command)
}

/// The whole command line, as clap sees it.
pub(crate) fn command() -> clap::Command {
    Cli::command()
}

/// What workers compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// GPUs when enough are usable, else the CPU.
    Auto,
    /// CPU cores.
    Cpu,
    /// A GPU: this one, or any.
    Cuda(Option<u32>),
}

/// Parses `auto`, `cpu`, `cuda`, `cuda:1`.
fn parse_device(text: &str) -> Result<Device, String> {
    match text {
        "auto" => return Ok(Device::Auto),
        "cpu" => return Ok(Device::Cpu),
        "cuda" => return Ok(Device::Cuda(None)),
        _ => {}
    }
    let number = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    number
        .map(|number| Device::Cuda(Some(number)))
        .ok_or_else(|| "expected auto, cpu, cuda or cuda:N, where N numbers GPUs from 0".to_owned())
}

/// Worker processes of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workers {
    /// As many as there is something to compute on.
    All,
    /// So many.
    Number(u32),
}

impl Workers {
    /// The number, where one was said.
    pub(crate) fn number(self) -> Option<u32> {
        match self {
            Self::All => None,
            Self::Number(number) => Some(number),
        }
    }
}

/// Parses `all` or a number.
fn parse_workers(text: &str) -> Result<Workers, String> {
    if text == "all" {
        return Ok(Workers::All);
    }
    let number = text.parse().ok().filter(|number| (1..=LOCAL_WORKERS_MAX).contains(number));
    number
        .map(Workers::Number)
        .ok_or_else(|| format!("expected a number from 1 to {LOCAL_WORKERS_MAX}, or all"))
}

/// Parses one of [`Exchange::NAMES`].
fn parse_exchange(text: &str) -> Result<Exchange, String> {
    let found = Exchange::NAMES.iter().find(|(name, _)| *name == text);
    let names: Vec<&str> = Exchange::NAMES.iter().map(|(name, _)| *name).collect();
    found.map(|(_, exchange)| *exchange).ok_or_else(|| format!("expected {}", names.join(", ")))
}

/// Parses a share, such as 0.9.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0, at most 1".to_owned())
}

/// A server whose metric names can be published too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompatArg {
    /// The vllm: names
    Vllm,
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
fn log_fields() -> clap::builder::PossibleValuesParser {
    clap::builder::PossibleValuesParser::new(Field::ALL.map(|(name, _)| name))
}

/// Workers of a replica where nothing is said.
pub(crate) const TENSOR_PARALLEL: u32 = 2;

/// Options of `tutti up`.
#[derive(Args, Clone, Debug)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) serving: ServingArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// Local worker processes to start; more than --tensor-parallel makes more replicas [default: one
    /// for each usable GPU; on the CPU 2, or --tensor-parallel]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    pub(crate) workers: Option<Workers>,
}

/// Options of `tutti coordinator`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CoordinatorArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) serving: ServingArgs,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
    /// Where others reach --cluster-listen, told to them through etcd [default: --cluster-listen;
    /// where that is every address, the one that leads to etcd]
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) advertise: Option<String>,
    /// With --etcd: another coordinator takes over when this one has not been heard of for so many
    /// seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(2..=600))]
    pub(crate) leader_lease: u64,
    /// With --etcd: write the totals of /metrics there every so many seconds, so that the next
    /// leader goes on from them, and show what is written; 0 for never
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) checkpoint_interval: u64,
}

/// Options of `tutti worker`.
#[derive(Args, Clone, Debug)]
pub(crate) struct WorkerArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// The coordinator's cluster address, where it is not found through --etcd
    /// [default: 127.0.0.1:8001]
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) coordinator: Option<String>,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
    /// This worker's name, unique in the cluster; of several they are NAME-0, NAME-1 ..
    /// [default: HOSTNAME-PID-RANDOM]
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// Worker processes of this host: a number, or all for one on each usable GPU. One process
    /// supervises them; on the CPU they share the cores [default: 1]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    pub(crate) workers: Option<Workers>,
    /// Where this worker accepts other ranks of its replica (TCP collective), as other hosts reach
    /// it [default: any port of the address that leads to the coordinator]
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) collective_listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) resources: ResourceArgs,
    /// Identifies the host: workers with equal values exchange data through shared memory, others
    /// over TCP [default: told by boot, /dev/shm and process namespace]
    #[arg(long, value_name = "ID")]
    pub(crate) host_id: Option<String>,
    /// Exit when stdin closes: how `tutti up` makes sure that no worker outlives it
    #[arg(long, hide = true)]
    pub(crate) exit_with_stdin: bool,
}

/// Options of `tutti frontend`.
#[derive(Args, Clone, Debug)]
pub(crate) struct FrontendArgs {
    #[command(flatten)]
    pub(crate) common: CommonArgs,
    /// The coordinator's cluster address, where it is not found through --etcd
    /// [default: 127.0.0.1:8001]
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) coordinator: Option<String>,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
    /// This front end's name, unique among front ends [default: HOSTNAME-PID-RANDOM]
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// Where HTTP is served
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8010")]
    pub(crate) listen: SocketAddr,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Model folder, for its tokenizer and chat template [default: where the coordinator has it]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Threads that serve HTTP [default: the cores, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) http_threads: Option<u32>,
    /// When told to end (SIGTERM, Ctrl-C): seconds that running requests may take to finish
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) drain_timeout: u64,
}

/// Options of the commands that talk to a running coordinator.
#[derive(Args, Clone, Debug)]
pub(crate) struct OperatorArgs {
    /// The coordinator's HTTP address: http:// (may be left out) or https://
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) server: String,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
    /// File with the cluster's secret, where it has one
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
}

/// Options of `tutti status`.
#[derive(Args, Clone, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Processes that ended, and why
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
    /// Most lines
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) lines: u32,
    /// The process that ended last, though another runs under the name again
    #[arg(long, conflicts_with = "pid")]
    pub(crate) previous: bool,
    /// The process with this id, as `tutti status --dead` shows it
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of `tutti scale`.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = true, args = ["replicas", "reset", "workers"])]
pub(crate) struct ScaleArgs {
    #[command(flatten)]
    pub(crate) operator: OperatorArgs,
    /// At most so many replicas; 0 for as many as the workers allow
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=4096))]
    pub(crate) replicas: Option<u32>,
    /// As many replicas as the coordinator was started with (its --replicas), whatever was said
    /// since
    #[arg(long, conflicts_with = "replicas")]
    pub(crate) reset: bool,
    /// So many local workers (of `tutti up`)
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

/// Options of `tutti bench`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// Model folder [default: models/demo]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// What matrix products take of their activations: auto, float32 or bfloat16, as when serving
    #[arg(long, value_name = "DTYPE", default_value = "auto", value_parser = parse_dtype)]
    pub(crate) dtype: Dtype,
    /// Quantise weights while they are loaded: int8 or none, as when serving
    #[arg(long, value_name = "METHOD", default_value = "none", value_parser = parse_quantization)]
    pub(crate) quantization: Quantization,
    /// Ranks, as threads of this process
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) tensor_parallel: u32,
    /// Tokens of the prefill case's prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=131_072))]
    pub(crate) prompt_tokens: u32,
    /// Decode steps of each decode case
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) decode_steps: u32,
    /// Sequences of the decode cases, comma separated
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "1,8,16", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) batches: Vec<u32>,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

/// Options of `tutti metrics`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MetricsArgs {
    /// As Markdown: what docs/metrics.md is made of
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

/// Options of every role.
#[derive(Args, Clone, Debug)]
pub(crate) struct CommonArgs {
    /// TOML file whose keys are these options' names; the command line wins over the file
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// error, warn, info, debug or trace; RUST_LOG, when set, wins
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = ["error", "warn", "info", "debug", "trace"])]
    pub(crate) log_level: String,
    /// NVIDIA's management library, for the GPU series of /metrics [default: where the system's
    /// loader finds libnvidia-ml.so.1, if anywhere]
    #[arg(long, value_name = "FILE")]
    pub(crate) nvml_lib: Option<PathBuf>,
    /// File with the cluster's secret, at least 32 bytes that only its owner may read; the same on
    /// every node. TUTTI_CLUSTER_SECRET in the environment does the same without a file
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
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
    /// sequences decoded 1.6 times as fast where memory is the limit, for a little precision) or none
    #[arg(long, value_name = "METHOD", default_value = "none", value_parser = parse_quantization)]
    pub(crate) quantization: Quantization,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    /// Workers per replica: each holds 1/N of every layer [default: 2; for `up` no more than it starts]
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
    /// Longest prompt plus output, in tokens [default: the model's own limit]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) max_model_len: Option<u32>,
    /// Most sequences in one engine step
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) max_num_seqs: u32,
    /// Most tokens in one engine step (longer prompts are prefilled in chunks) [default: 512; for `up` on
    /// GPUs 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=131_072))]
    pub(crate) max_num_batched_tokens: Option<u32>,
    /// Tokens per KV cache block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) block_size: u32,
    /// KV cache memory per worker: bytes, or with a suffix KiB, MiB, GiB [default: 512MiB on CPUs,
    /// on GPUs what --gpu-memory-utilization leaves]
    #[arg(long, alias = "kv-cache-memory-bytes", value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) kv_cache_memory: Option<u64>,
    /// Host memory per worker for the KV of requests that are put back when the KV cache is full, so
    /// that they need not be computed again: in GiB, or bytes with a suffix KiB, MiB, GiB; 0: they
    /// are computed again
    #[arg(long, value_name = "GIB", default_value = "0", value_parser = parse_swap_space)]
    pub(crate) swap_space: u64,
    /// Compute every prompt whole, also where the KV cache still has its beginning
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,
    /// Draft tokens from what a text repeats of its prompt or of itself, and verify several in one
    /// step; the text is the same. JSON as vLLM has it:
    /// {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2};
    /// or by a small model with the same tokens, whose folder the host of each replica's rank 0 has at
    /// this path: {"method":"draft_model","model":"/models/small","num_speculative_tokens":5};
    /// with "disable_by_batch_size":N nothing is drafted while more than N sequences run
    #[arg(long, value_name = "JSON", value_parser = speculative::parse)]
    pub(crate) speculative_config: Option<Speculative>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Which waiting request is next: the first to come, or the one with the lowest `priority`, of
    /// equals the first to come. Out of KV cache memory the other end of that order is put back. Less
    /// urgent requests may wait for ever
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = PolicyArg::Fcfs)]
    pub(crate) scheduling_policy: PolicyArg,
    /// Most requests of each replica that wait for their first step; beyond it clients get 429. Their
    /// choices (n) and prompt tokens have bounds, too: 2 and 4,096 times as many, and no less than
    /// 16,384 and 33,554,432
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_queued_requests: u32,
    /// Give up an engine step after this many seconds and form the replica again
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) step_timeout: u64,
    /// Give up forming a replica when nothing was heard of a rank for so many seconds: more than the
    /// largest matrix takes to load, and than GPU hosts take to pin --swap-space
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=36_000))]
    pub(crate) form_timeout: u64,
    /// Fail requests when no replica has been ready for this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) unavailable_timeout: u64,
    /// When told to end (SIGTERM, Ctrl-C): seconds that running requests may take to finish
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) drain_timeout: u64,
    /// Serve /metrics on an address of its own too, for scrapers that may not reach the API
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

/// Where CUDA's parts are.
#[derive(Args, Clone, Debug)]
pub(crate) struct CudaArgs {
    /// Folders with NVIDIA's libraries (libcuda, libcublasLt, libnccl), comma separated, searched
    /// before the places that the system's loader knows
    #[arg(long, value_name = "DIRS", value_delimiter = ',')]
    pub(crate) cuda_lib_dir: Vec<PathBuf>,
    /// NCCL's library [default: libnccl.so.2 from --cuda-lib-dir, where the system's loader looks,
    /// CUDA's folders or Python's packages]
    #[arg(long, value_name = "FILE")]
    pub(crate) nccl_lib: Option<PathBuf>,
    /// Folder with .fatbin files to use instead of the embedded kernels
    #[arg(long, value_name = "DIR", hide = true)]
    pub(crate) cuda_kernels: Option<PathBuf>,
}

/// Options of `tutti devices`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DevicesArgs {
    #[command(flatten)]
    pub(crate) cuda: CudaArgs,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Options of the roles that compute.
#[derive(Args, Clone, Debug)]
pub(crate) struct ComputeArgs {
    /// What to compute on: cpu, cuda (a GPU), cuda:N (that GPU), or auto: a GPU when one is usable,
    /// else the CPU
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = parse_device)]
    pub(crate) device: Device,
    #[command(flatten)]
    pub(crate) cuda: CudaArgs,
    /// The share of a GPU's memory that may be in use altogether; the KV cache takes what weights
    /// and activations leave of it
    #[arg(long, value_name = "SHARE", default_value = "0.9", value_parser = parse_share)]
    pub(crate) gpu_memory_utilization: f64,
    /// Run GPU steps kernel by kernel instead of as CUDA graphs: slower, to find faults
    #[arg(long)]
    pub(crate) no_cuda_graphs: bool,
    /// How many seconds a worker that has loaded its weights may capture CUDA graphs for before it
    /// serves; what is left then, or all with 0, is captured when steps first need it
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=120))]
    pub(crate) cuda_warmup: u64,
    /// Give a request the same tokens on a GPU whatever else is in the batch, and when it goes on
    /// elsewhere after a failure; slower. CPUs always do
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    /// Have every GPU kernel begin when those before it are complete: slower, to find faults
    #[arg(long)]
    pub(crate) no_cuda_overlap: bool,
    /// What ranks on GPUs exchange data by: peers: this program's own kernels, on GPUs that see each
    /// other's memory; nccl; host: through host memory; auto: the best of what there is, by size
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = parse_exchange)]
    pub(crate) cuda_exchange: Exchange,
    /// The network interface of NCCL's connections, such as eth0: they are neither encrypted nor
    /// authenticated [default: lo when the coordinator is on this host's loopback; else NCCL chooses]
    #[arg(long, value_name = "NAME")]
    pub(crate) nccl_interface: Option<String>,
    /// Compute threads per worker [default: all cores that it may use; `up` shares them among its
    /// workers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
}

/// Parses `auto`, `float32`, `bfloat16`.
fn parse_dtype(text: &str) -> Result<Dtype, String> {
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

/// Parses a number of GiB, as `4` and `0.5`, or what `parse_bytes` takes with a unit.
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

/// Parses `1073741824`, `512MiB`, `2GiB`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let number: u64 = digits
        .parse()
        .map_err(|_| "expected a number of bytes such as 1073741824 or 512MiB".to_owned())?;
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        unit => return Err(format!("unknown unit '{unit}': use KiB, MiB, GiB or TiB")),
    };
    number
        .checked_mul(factor)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| "must be at least 1 byte and fit in 64 bits".to_owned())
}

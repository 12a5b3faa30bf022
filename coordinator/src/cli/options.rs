//! Every option of every role, declared once. Configuration files use the same names as keys.
//!
//! - `compute`: options about what workers compute on
//! - `serving`: options of the roles that serve HTTP
//! - `operator`: options of the commands that ask a running cluster
mod compute;
mod operator;
mod serving;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use coordinator::http::admin::OWN_NODE;
use coordinator::http::listener::{Endpoint, SOCKET_PATH_MAX};
use shared::protocol::PROTOCOL_VERSION;
use shared::protocol::actors::ACTOR_NAME_MAX;

pub(crate) use self::compute::{ComputeArgs, CudaArgs, Device, Workers, parse_workers};
pub(crate) use self::operator::{
    ActorsArgs, AdapterCommand, AdaptersArgs, BenchArgs, CheckConfigArgs, DevicesArgs, DrainArgs,
    LoadArgs, LogsArgs, MetricsArgs, OperatorArgs, ResetPrefixCacheArgs, ScaleArgs, StatusArgs,
    UnloadArgs,
};
pub(crate) use self::serving::{
    CompatArg, PolicyArg, ServingArgs, parse_quantization, parse_swap_space,
};
use super::api::ApiArgs;
use super::doctor::DoctorArgs;
use super::etcd::{EtcdArgs, parse_address};
use super::hub::CacheArgs;
use super::reference::OptionsArgs;
use super::resources::ResourceArgs;
use super::run_batch::RunBatchArgs;

/// What `--version` prints: processes of one protocol form a cluster.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (protocol {PROTOCOL_VERSION})", env!("CARGO_PKG_VERSION")));

/// Serve language models on your own nodes: one binary, one scheduler, one /metrics.
#[derive(Debug, Parser)]
#[command(name = "tutti", version = VERSION.as_str(), propagate_version = true)]
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
    /// Start a coordinator and local workers, and restart workers that crash; Ctrl-C stops them all
    Up(UpArgs),
    /// Start a coordinator (HTTP, scheduling, metrics) that workers connect to
    Coordinator(CoordinatorArgs),
    /// Start a worker that joins a coordinator
    Worker(WorkerArgs),
    /// Start an additional HTTP front end for a coordinator
    Frontend(FrontendArgs),
    /// Show nodes, replicas and their states
    Status(StatusArgs),
    /// Show the last lines of a node's log, even after its process has ended
    Logs(LogsArgs),
    /// Change the maximum number of replicas, or how many local workers `tutti up` runs
    Scale(ScaleArgs),
    /// Remove a worker gracefully: its requests continue elsewhere, then its process exits
    Drain(DrainArgs),
    /// Show the actors of applications and the processes that host their classes; or kill an actor
    Actors(ActorsArgs),
    /// Forget the prompts in all prefix caches
    ResetPrefixCache(ResetPrefixCacheArgs),
    /// Load or unload a LoRA adapter while the cluster runs (--max-loras)
    Adapters(AdaptersArgs),
    /// Answer all requests of a file, many at a time, as a client of a running cluster
    RunBatch(RunBatchArgs),
    /// Check whether this host can run as a node, and say how to fix any problems
    Doctor(DoctorArgs),
    /// Measure the engine on this machine: prefill and decode tokens/s, as one JSON line
    Bench(BenchArgs),
    /// Show what this host can compute on: CPU, GPUs, NVIDIA's libraries, and what is missing
    Devices(DevicesArgs),
    /// Print the metrics catalogue
    Metrics(MetricsArgs),
    /// Print every option and the commands that have it
    Options(OptionsArgs),
    /// Check a configuration file and report any problems
    CheckConfig(CheckConfigArgs),
}

/// Reads the parsed command line.
pub(crate) fn from_matches(matches: &clap::ArgMatches) -> Result<Command, clap::Error> {
    Cli::from_arg_matches(matches).map(|cli| cli.command)
}

/// Returns the whole command line, as clap sees it.
pub(crate) fn command() -> clap::Command {
    with_negative_numbers(Cli::command())
}

/// A negative number is a value, so that the error about it names the option and its bounds.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(with_negative_numbers);
    command.mut_args(|argument| match argument.get_action().takes_values() {
        true => argument.allow_negative_numbers(true),
        false => argument,
    })
}

/// Default number of workers per replica.
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
    /// Local worker processes to start; more than --tensor-parallel form further replicas [default:
    /// one per usable GPU; on the CPU 2, or --tensor-parallel]
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
    /// Address at which other nodes reach --cluster-listen, published in etcd [default:
    /// --cluster-listen; if that is a wildcard address, this host's address on the route to etcd]
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) advertise: Option<String>,
    /// With --etcd: another coordinator takes over when this one has been silent for this many
    /// seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(2..=600))]
    pub(crate) leader_lease: u64,
    /// With --etcd: how often to write the totals of /metrics to etcd, so that the next leader
    /// continues from them; /metrics then shows the totals as last written. 0 turns this off
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
    /// The coordinator's cluster address, unless it is found through --etcd [default:
    /// 127.0.0.1:8001]
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) coordinator: Option<String>,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
    /// This worker's name, unique in the cluster; several workers are called NAME-0, NAME-1 and so
    /// on [default: HOSTNAME-PID-RANDOM]
    #[arg(long, value_name = "NAME", value_parser = parse_node)]
    pub(crate) node: Option<String>,
    /// Worker processes on this host: a number, or all for one per usable GPU. One process
    /// supervises them; on the CPU they share the cores [default: 1]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    pub(crate) workers: Option<Workers>,
    /// Address on which this worker accepts other ranks of its replica (TCP collective), as other
    /// hosts reach it [default: any port on the address that leads to the coordinator]
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) collective_listen: Option<SocketAddr>,
    /// Address of /live and /ready, for probes, if any: /ready answers 200 while this worker is
    /// linked to its coordinator and serves, or is a spare; of several (--workers), while all are
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) health_listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) resources: ResourceArgs,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    /// Identifies the host: workers with the same ID exchange data through shared memory, others
    /// over TCP [default: derived from the boot id, /dev/shm and the process namespace]
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
    /// The coordinator's cluster address, unless it is found through --etcd [default:
    /// 127.0.0.1:8001]
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) coordinator: Option<String>,
    #[command(flatten)]
    pub(crate) etcd: EtcdArgs,
    /// This front end's name, unique among front ends [default: HOSTNAME-PID-RANDOM]
    #[arg(long, value_name = "NAME", value_parser = parse_node)]
    pub(crate) node: Option<String>,
    /// Address to serve HTTP on
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8010")]
    pub(crate) listen: SocketAddr,
    /// Serve HTTP on a Unix socket with this path instead. Who may use it depends on the process's
    /// umask and on the folder; there is no TLS
    #[arg(long, value_name = "PATH", value_parser = parse_socket, conflicts_with = "listen")]
    pub(crate) uds: Option<PathBuf>,
    /// Also serve /metrics, /live and /ready on a separate address, for scrapers that must not
    /// reach the API and for probes that must get through whatever clients do
    #[arg(long, value_name = "IP:PORT")]
    pub(crate) metrics_listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Model folder, for its tokenizer and chat template; a name on Hugging Face's hub, as in a
    /// file of all roles, leaves it to the coordinator [default: where the coordinator has it; a
    /// model of the hub is downloaded, without its weights]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    /// Threads that serve HTTP [default: the number of cores, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) http_threads: Option<u32>,
    /// Seconds that running requests get to finish on shutdown (SIGTERM, Ctrl-C)
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub(crate) drain_timeout: u64,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// For programs that gather logs
    Json,
}

impl LogFormat {
    /// Its name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// Options of every role.
#[derive(Args, Clone, Debug)]
pub(crate) struct CommonArgs {
    /// TOML file whose keys are the names of these options; the command line takes precedence
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Log level: error, warn, info, debug or trace; RUST_LOG takes precedence if set
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = ["error", "warn", "info", "debug", "trace"])]
    pub(crate) log_level: String,
    /// Form of the log on stderr: text, or json: an object per line, with timestamp, level, target,
    /// message, fields, process, node and pid
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    /// NVIDIA's management library (NVML), for the GPU series of /metrics [default:
    /// libnvidia-ml.so.1, if the system's loader finds it]
    #[arg(long, value_name = "FILE")]
    pub(crate) nvml_lib: Option<PathBuf>,
    /// File with the cluster's secret, at least 32 bytes that only its owner may read; the same on
    /// every node. To replace it, the file may have several, one per line: all are accepted, and
    /// the first is used; a changed file is read again. TUTTI_CLUSTER_SECRET in the environment
    /// does the same without a file, once
    #[arg(long, value_name = "FILE")]
    pub(crate) cluster_secret_file: Option<PathBuf>,
}

/// Where HTTP is served: on a Unix socket, if there is to be one.
pub(crate) fn endpoint(listen: SocketAddr, uds: Option<&PathBuf>) -> Endpoint {
    uds.map_or(Endpoint::Tcp(listen), |path| Endpoint::Unix(path.clone()))
}

/// Checks the path of a Unix socket.
pub(crate) fn parse_socket(text: &str) -> Result<PathBuf, String> {
    match text.len() {
        1..=SOCKET_PATH_MAX => Ok(PathBuf::from(text)),
        bytes => Err(format!(
            "the path of a Unix socket has 1 to {SOCKET_PATH_MAX} bytes, this one has {bytes}"
        )),
    }
}

/// Maximum length of a node's name: its actors are named after it.
const NODE_MAX: usize = ACTOR_NAME_MAX - "frontend/".len();

/// Checks a node's name.
pub(crate) fn parse_node(text: &str) -> Result<String, String> {
    if text == OWN_NODE {
        return Err(format!("{OWN_NODE} is the coordinator's own name: choose another"));
    }
    if text.contains(char::is_control) {
        return Err("a node's name has no control characters".to_owned());
    }
    match text.len() {
        1..=NODE_MAX => Ok(text.to_owned()),
        bytes => Err(format!("a node's name has 1 to {NODE_MAX} bytes, this one has {bytes}")),
    }
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

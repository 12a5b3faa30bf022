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

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use self::compute::parse_workers;
pub(crate) use self::compute::{ComputeArgs, CudaArgs, Device, Workers};
pub(crate) use self::operator::{
    BenchArgs, CheckConfigArgs, DevicesArgs, DrainArgs, LogsArgs, MetricsArgs, OperatorArgs,
    ScaleArgs, StatusArgs,
};
pub(crate) use self::serving::{
    CompatArg, PolicyArg, ServingArgs, parse_quantization, parse_swap_space,
};
use super::api::ApiArgs;
use super::doctor::DoctorArgs;
use super::etcd::{EtcdArgs, parse_address};
use super::reference::OptionsArgs;
use super::resources::ResourceArgs;

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
    /// Print every option and the commands that have it
    Options(OptionsArgs),
    /// Check a configuration file and say what is wrong with it
    CheckConfig(CheckConfigArgs),
}

/// Reads the parsed command line.
pub(crate) fn from_matches(matches: &clap::ArgMatches) -> Result<Command, clap::Error> {
    Cli::from_arg_matches(matches).map(|cli| cli.command)
}

/// Returns the whole command line, as clap sees it.
pub(crate) fn command() -> clap::Command {
    Cli::command()
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
    /// Local worker processes to start; more than --tensor-parallel makes more replicas [default:
    /// one for each usable GPU; on the CPU 2, or --tensor-parallel]
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

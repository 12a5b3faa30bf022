//! What workers compute on, and how.
use std::path::PathBuf;

use clap::Args;
use coordinator::http::admin::LOCAL_WORKERS_MAX;
use worker::device::ExchangePolicy;

/// What workers compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// GPUs if enough are usable, otherwise the CPU.
    Auto,
    /// CPU cores.
    Cpu,
    /// A GPU: this one, or any.
    Cuda(Option<u32>),
}

/// Parses `auto`, `cpu`, `cuda`, `cuda:1`.
pub(super) fn parse_device(text: &str) -> Result<Device, String> {
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
    /// One for each usable device.
    All,
    /// This many.
    Number(u32),
}

impl Workers {
    /// The number, if one was given.
    pub(crate) fn number(self) -> Option<u32> {
        match self {
            Self::All => None,
            Self::Number(number) => Some(number),
        }
    }
}

/// Parses `all` or a number.
pub(crate) fn parse_workers(text: &str) -> Result<Workers, String> {
    if text == "all" {
        return Ok(Workers::All);
    }
    let number = text.parse().ok().filter(|number| (1..=LOCAL_WORKERS_MAX).contains(number));
    number
        .map(Workers::Number)
        .ok_or_else(|| format!("expected a number from 1 to {LOCAL_WORKERS_MAX}, or all"))
}

/// Parses one of [`ExchangePolicy::NAMES`].
pub(super) fn parse_exchange(text: &str) -> Result<ExchangePolicy, String> {
    let found = ExchangePolicy::NAMES.iter().find(|(name, _)| *name == text);
    let names: Vec<&str> = ExchangePolicy::NAMES.iter().map(|(name, _)| *name).collect();
    found.map(|(_, exchange)| *exchange).ok_or_else(|| format!("expected {}", names.join(", ")))
}

/// Parses a share such as 0.9.
pub(super) fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "expected a number above 0, at most 1".to_owned())
}

/// Where CUDA's parts are.
#[derive(Args, Clone, Debug)]
pub(crate) struct CudaArgs {
    /// Folders with NVIDIA's libraries (libcuda, libcublasLt, libnccl), comma separated, searched
    /// before the system loader's own paths
    #[arg(long, value_name = "DIRS", value_delimiter = ',')]
    pub(crate) cuda_lib_dir: Vec<PathBuf>,
    /// NCCL's library [default: libnccl.so.2 from --cuda-lib-dir, the system loader's paths, CUDA's
    /// folders or Python's packages]
    #[arg(long, value_name = "FILE")]
    pub(crate) nccl_lib: Option<PathBuf>,
    /// Folder with .fatbin files to use instead of the embedded kernels
    #[arg(long, value_name = "DIR", hide = true)]
    pub(crate) cuda_kernels: Option<PathBuf>,
}

/// Options of the roles that compute.
#[derive(Args, Clone, Debug)]
pub(crate) struct ComputeArgs {
    /// Device to compute on: cpu, cuda (any GPU), cuda:N (that GPU), or auto (a GPU if one is
    /// usable, otherwise the CPU)
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = parse_device)]
    pub(crate) device: Device,
    #[command(flatten)]
    pub(crate) cuda: CudaArgs,
    /// Fraction of a GPU's memory that may be in use in total; the KV cache gets what weights and
    /// activations leave of it
    #[arg(long, value_name = "SHARE", default_value = "0.9", value_parser = parse_share)]
    pub(crate) gpu_memory_utilization: f64,
    /// Run GPU steps kernel by kernel instead of as CUDA graphs; slower, for debugging
    #[arg(long)]
    pub(crate) no_cuda_graphs: bool,
    /// Seconds that a worker may spend capturing CUDA graphs after it has loaded its weights and
    /// before it serves; the remaining ones (with 0, all of them) are captured when a step first
    /// needs them
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=120))]
    pub(crate) cuda_warmup: u64,
    /// On GPUs, make a request's tokens independent of what else is in the batch, also when it
    /// continues elsewhere after a failure; slower. CPUs always do this
    #[arg(long)]
    pub(crate) batch_invariant: bool,
    /// Start each GPU kernel only after those before it have completed; slower, for debugging
    #[arg(long)]
    pub(crate) no_cuda_overlap: bool,
    /// How ranks on GPUs exchange data: peers (this program's own kernels, for GPUs with access to
    /// each other's memory), nccl, host (through host memory), or auto (the best available for each
    /// size)
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = parse_exchange)]
    pub(crate) cuda_exchange: ExchangePolicy,
    /// Network interface for NCCL's connections, such as eth0; they are neither encrypted nor
    /// authenticated [default: lo if the coordinator is on this host's loopback interface,
    /// otherwise NCCL chooses]
    #[arg(long, value_name = "NAME")]
    pub(crate) nccl_interface: Option<String>,
    /// Compute threads per worker [default: all cores available to it; `up` divides them among its
    /// workers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
}

//! Checks and measures on a GPU, and prints one table. `tests/gpu/run` runs it there. Besides this
//! program and the model folders it needs only a driver.
//!
//! - `operations`: every operation against the float32 reference, with poisoned outputs, and once
//!   more with inputs that arrive late
//! - `goldens`: every model folder's golden values
//! - `speed`: bandwidth; decode and prefill of random models of known shapes
//! - `ranks-peers`: two and four ranks that can access each other's memory, on one GPU and on two,
//!   four and eight if there are as many, and one rank that is killed or frozen
//! - `ranks-nccl`: one rank; two on two GPUs or, if NCCL supports it, on one, and one killed or
//!   frozen; four and eight on as many
//! - `ranks-threads`: the latency of a sum when two and four ranks run concurrently on one GPU
//! - `torch`: decode of the same shapes by torch, as a CUDA graph, and products by its cuBLAS
//! - `sanitizer`: `operations` in small sizes within NVIDIA's compute-sanitizer, once for each of
//!   its tools
//!
//! Each part is a separate process with a time limit (`supervisor`), so a kernel that hangs or
//! accesses invalid memory costs only its own step. Lines are printed as they come, and appended to
//! the `--report` file.
//!
//! - `--only PART,..`: only the parts whose names contain one of these
//! - `--step TEXT` (repeatable): only the steps whose names contain one of these texts
//! - `--time-limit SECONDS`: stops after that; the rest is reported as not run
//! - `--no-overlap`: every kernel begins when the preceding ones are complete
//!
//! Exit codes: 0 success, 1 a failure or something not run, 2 no usable GPU or an invalid option.
//! `cargo test` runs it without `--require-gpu`: on a host without a GPU it then checks itself, in
//! small sizes (`--quick`), on the driver stand-in of `tests/fake_cuda`.
#![allow(clippy::print_stdout, reason = "it prints a table")]

mod adapters;
mod attention;
mod delta;
mod driver;
mod exchange;
mod experts;
mod fp8;
mod goldens;
mod head;
mod int4;
mod kernels_speed;
mod mixed;
mod norms;
mod operations;
mod outside;
mod ranks;
mod sampling;
mod selfcheck;
mod shapes;
mod speed;
mod supervisor;
mod values;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use kernels::KernelError;
use kernels::collective::single_rank;
use kernels::cuda::context::{Context, Driver};
use kernels::cuda::devices::{Survey, survey};
use kernels::cuda::held::is_gpu_held;
use kernels::cuda::peer::tuning::Thresholds;
use kernels::cuda::{CudaBackend, CudaOptions, ExchangePolicy};
use kernels::process::exit_without_handlers;

/// Command-line options.
#[derive(Clone, Debug)]
struct Options {
    root: PathBuf,
    folders: Vec<PathBuf>,
    kernels: Option<PathBuf>,
    nccl_lib: Option<PathBuf>,
    /// A Python that has torch.
    python: Option<PathBuf>,
    /// compute-sanitizer, unless it is looked for.
    sanitizer: Option<PathBuf>,
    /// Set in the process of one of several ranks: rank, name of the shared memory, file for rank
    /// 0's message; and the number of ranks.
    child: Option<(u32, String, PathBuf)>,
    ranks: u32,
    /// How such a process exchanges data, and whether it continues until the other rank is gone.
    exchange: ExchangePolicy,
    endless: bool,
    /// The model folder whose golden values such a process checks.
    golden: Option<PathBuf>,
    /// The sizes up to which each of this project's exchanges is used; by default they are
    /// measured, with messages of at most `measured_most` bytes.
    thresholds: Option<Thresholds>,
    measured_most: usize,
    ordinal: Option<u32>,
    quick: bool,
    /// Kernels may begin before the preceding ones are complete.
    overlap: bool,
    require_gpu: bool,
    /// Only parts whose names contain one of these.
    only: Vec<String>,
    /// Only steps whose names contain one of these.
    steps: Vec<String>,
    /// Set in the process of one part: the part, its first step, and whether it continues in the
    /// same process after a step fails.
    part: Option<String>,
    skip: usize,
    keep_going: bool,
    /// Time limit of a step in seconds, if not the default.
    step_limit: Option<u64>,
    /// Time limit of all parts together in seconds, if not the default.
    time_limit: Option<u64>,
    /// File that each line is appended to.
    report: Option<PathBuf>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            root: testkit::models::repository(),
            folders: Vec::new(),
            kernels: None,
            nccl_lib: None,
            python: None,
            sanitizer: None,
            child: None,
            ranks: 2,
            exchange: ExchangePolicy::Nccl,
            endless: false,
            golden: None,
            thresholds: None,
            measured_most: usize::MAX,
            ordinal: None,
            quick: false,
            overlap: true,
            require_gpu: false,
            only: Vec::new(),
            steps: Vec::new(),
            part: None,
            skip: 0,
            keep_going: false,
            step_limit: None,
            time_limit: None,
            report: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} wants a value"));
            match arg.as_str() {
                "--root" => options.root = PathBuf::from(value()?),
                "--cuda-lib-dir" => {
                    options.folders.extend(value()?.split(',').map(PathBuf::from));
                }
                "--cuda-kernels" => options.kernels = Some(PathBuf::from(value()?)),
                "--python" => options.python = Some(PathBuf::from(value()?)),
                "--sanitizer" => options.sanitizer = Some(PathBuf::from(value()?)),
                "--nccl-lib" => options.nccl_lib = Some(PathBuf::from(value()?)),
                "--exchange" => {
                    let wanted = value()?;
                    let known = ExchangePolicy::NAMES.into_iter().find(|(name, _)| *name == wanted);
                    options.exchange = known.ok_or("--exchange wants a name")?.1;
                }
                "--unmeasured" => options.thresholds = Some(Thresholds::default()),
                "--measured-most" => {
                    let wanted = value()?.parse();
                    options.measured_most = wanted.map_err(|_| "--measured-most wants bytes")?;
                }
                "--endless" => options.endless = true,
                "--golden" => options.golden = Some(PathBuf::from(value()?)),
                "--child" => {
                    let rank = value()?.parse().map_err(|_| "--child wants a rank")?;
                    options.child = Some((rank, value()?, PathBuf::from(value()?)));
                }
                "--ranks" => {
                    options.ranks = value()?.parse().map_err(|_| "--ranks wants a number")?;
                }
                "--gpu" => options.ordinal = value()?.parse().ok(),
                "--only" => options.only.extend(value()?.split(',').map(str::to_owned)),
                "--step" => options.steps.push(value()?),
                "--part" => options.part = Some(value()?),
                "--skip" => options.skip = value()?.parse().map_err(|_| "--skip wants a number")?,
                "--step-limit" => options.step_limit = value()?.parse().ok(),
                "--time-limit" => {
                    let wanted = value()?.parse();
                    options.time_limit = Some(wanted.map_err(|_| "--time-limit wants seconds")?);
                }
                "--report" => options.report = Some(PathBuf::from(value()?)),
                "--keep-going" => options.keep_going = true,
                "--no-overlap" => options.overlap = false,
                "--quick" => options.quick = true,
                "--require-gpu" => options.require_gpu = true,
                // Options that `cargo test` passes on.
                _ if arg.starts_with('-') => {}
                _ => options.only.push(arg),
            }
        }
        Ok(options)
    }

    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| part.contains(only.as_str()))
    }

    fn wants_step(&self, step: &str) -> bool {
        self.steps.is_empty() || self.steps.iter().any(|text| step.contains(text.as_str()))
    }

    /// The options that all child processes of this program get.
    fn common(&self) -> Vec<std::ffi::OsString> {
        let mut args: Vec<std::ffi::OsString> = Vec::new();
        let mut pair = |name: &str, value: &std::ffi::OsStr| {
            args.extend([name.into(), value.to_owned()]);
        };
        pair("--root", self.root.as_os_str());
        for folder in &self.folders {
            pair("--cuda-lib-dir", folder.as_os_str());
        }
        if let Some(kernels) = &self.kernels {
            pair("--cuda-kernels", kernels.as_os_str());
        }
        let files = [
            ("--nccl-lib", &self.nccl_lib),
            ("--python", &self.python),
            ("--sanitizer", &self.sanitizer),
        ];
        for (name, file) in files {
            if let Some(file) = file {
                pair(name, file.as_os_str());
            }
        }
        for step in &self.steps {
            pair("--step", step.as_ref());
        }
        for (is_set, flag) in [(self.quick, "--quick"), (!self.overlap, "--no-overlap")] {
            if is_set {
                args.push(flag.into());
            }
        }
        args
    }

    fn cuda(&self, ordinal: u32) -> CudaOptions {
        // Less than the supervisor gives a step, so that a kernel that hangs is reported as such.
        let patience = Duration::from_secs(if self.quick { 60 } else { 15 });
        CudaOptions {
            patience,
            overlap: self.overlap,
            thresholds: self.thresholds,
            measured_most: self.measured_most,
            nccl_lib: self.nccl_lib.clone(),
            ..Survey::options(ordinal, &self.folders, self.kernels.as_deref())
        }
    }

    fn backend(&self, ordinal: u32, graphs: bool) -> Result<CudaBackend, KernelError> {
        CudaBackend::new(CudaOptions { graphs, ..self.cuda(ordinal) }, single_rank())
    }

    fn survey(&self) -> Survey {
        survey(&self.folders, self.kernels.as_deref(), self.nccl_lib.as_deref())
    }
}

/// Returns the number of captured graphs. A backend that fails to capture a step continues without
/// graphs, or without overlap, and its results are right: a check that does not look here would
/// pass without testing graphs.
///
/// # Errors
/// Why there are no graphs, or why their kernels do not overlap.
fn graphs_made(backend: &CudaBackend) -> Result<String, String> {
    match (backend.given_up(), backend.num_graphs()) {
        (Some(reason), _) => Err(format!("given up: {reason}")),
        (None, 0) => Err("no step became a graph".to_owned()),
        (None, made) => Ok(format!("{made} graphs")),
    }
}

/// The lines of a part so far: each goes to the supervisor as soon as it is known.
#[derive(Debug, Default)]
struct Table {
    faults: usize,
    /// A kernel has failed, so every later call to the GPU in this process fails too.
    is_broken: bool,
}

/// Words of the error for a GPU that does not finish in time.
const HANGS: &str = "it hangs";
/// Errors that leave a context unusable: every later call in it fails with the same error.
const BROKEN: [&str; 15] = [
    HANGS,
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_UNKNOWN",
];

/// What begins the words of a line that is well because this machine cannot show otherwise.
const UNCHECKED: &str = "not available here";

/// Marks of a part's messages to its supervisor, which passes on all other output unchanged.
const STEP: &str = "@step ";
const ROW: &str = "@row ";

impl Table {
    fn add(&mut self, what: impl Into<String>, result: Result<String, String>) {
        let (state, words) = match result {
            Ok(figure) => ("ok", figure),
            Err(fault) => ("FAILED", fault),
        };
        self.faults += usize::from(state == "FAILED");
        self.is_broken |= state == "FAILED" && BROKEN.iter().any(|name| words.contains(name));
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        println!("{ROW}{state}\t{}\t{words}", what.into());
    }
}

/// A step of a part.
struct Step<'a> {
    name: String,
    run: Box<dyn FnOnce(&mut Table) + 'a>,
}

impl<'a> Step<'a> {
    fn new(name: impl Into<String>, run: impl FnOnce(&mut Table) + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }
}

/// The parts. Each comes after those whose correctness it depends on; what is right matters more
/// than how fast it is, and takes less time.
const PARTS: [&str; 8] = [
    "operations",
    "goldens",
    "ranks-peers",
    "ranks-nccl",
    "ranks-threads",
    "speed",
    "torch",
    "sanitizer",
];
/// Exit code of a part that ended after a failed step, and that has further steps to run.
const AGAIN: u8 = 3;

/// Runs one part. A failed step ends the process, because it may have broken the context.
fn part(options: &Options, name: &str) -> ExitCode {
    let ordinal = options.ordinal.unwrap_or(0);
    let mut steps = match name {
        "operations" => operations::steps(options, ordinal),
        "goldens" => goldens::steps(options, ordinal),
        "speed" => speed::steps(options, ordinal),
        "torch" => outside::torch_steps(options, ordinal),
        "sanitizer" => outside::sanitizer_steps(options, ordinal),
        _ => ranks::steps(options, ordinal, name),
    };
    steps.retain(|step| options.wants_step(&step.name));
    let count = steps.len();
    let mut table = Table::default();
    // Each step creates its own backends. The context below them stays, as in a worker: libraries
    // that keep state in it may not survive its end.
    let folders = options.cuda(ordinal).folders;
    let runs_others = ["torch", "sanitizer"].contains(&name);
    let _context = (!runs_others)
        .then(|| Driver::load(&folders).and_then(|driver| Context::new(driver, ordinal)));
    for (index, step) in steps.into_iter().enumerate().skip(options.skip) {
        println!("{STEP}{}", step.name);
        (step.run)(&mut table);
        let ends = table.is_broken || table.faults > 0 && !options.keep_going;
        if ends && index + 1 < count {
            return left(AGAIN);
        }
    }
    left(u8::from(table.faults > 0))
}

/// Ends a part. Of what a hung kernel left on the GPU, the driver's exit handlers could wait for
/// ever.
fn left(code: u8) -> ExitCode {
    if is_gpu_held() {
        let _ = std::io::stdout().flush();
        exit_without_handlers(code);
    }
    ExitCode::from(code)
}

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            println!("{message}");
            return ExitCode::from(2);
        }
    };
    if let Some((rank, name, relay)) = &options.child {
        let said = ranks::child(&options, *rank, name, relay);
        println!("{}", said.as_ref().unwrap_or_else(|error| error));
        // What this rank left behind does not end before the other rank.
        return left(u8::from(said.is_err()));
    }
    match options.part.as_deref() {
        Some("head") => head::print(&options),
        Some(name) => part(&options, name),
        None => supervisor::run(options),
    }
}

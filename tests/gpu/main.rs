//! What can only be known on a GPU, as one table. `tests/gpu/run` runs it there; nothing but a driver
//! is needed besides this program and the model folders.
//!
//! - `operations`: every operation against the float32 reference, outputs poisoned before
//! - `goldens`: every model folder's golden values
//! - `ranks`: two ranks that see each other's memory, on one GPU or two, and one that is killed or
//!   frozen; NCCL with one rank, and with two on two GPUs or, where NCCL can, on one
//! - `speed`: bandwidth; decode and prefill of random models of known shapes
//!
//! Exit codes: 0 all is well, 1 something is wrong, 2 no usable GPU. `cargo test` runs it without
//! `--require-gpu`: on a host without a GPU it then checks itself, in small sizes (`--quick`), on the
//! stand-in of `tests/fake_cuda`. `--no-overlap` has every kernel begin when those before it are
//! complete; `--only PART` runs one part.
#![allow(clippy::print_stdout, reason = "it prints a table")]

mod goldens;
mod operations;
mod ranks;
mod speed;

use std::path::PathBuf;
use std::process::ExitCode;

use kernels::collective::single_rank;
use kernels::cuda::devices::{Survey, survey};
use kernels::cuda::peer::tuning::Thresholds;
use kernels::cuda::{CudaBackend, CudaOptions, Exchange};
use kernels::{Backend as _, KernelError};

/// What to do, and where things are.
#[derive(Debug)]
struct Options {
    root: PathBuf,
    folders: Vec<PathBuf>,
    kernels: Option<PathBuf>,
    nccl_lib: Option<PathBuf>,
    /// To be one of two processes: rank, name of the shared memory, file for rank 0's word.
    child: Option<(u32, String, PathBuf)>,
    /// How such a process exchanges data, and whether it does so until the other is gone.
    exchange: Exchange,
    endless: bool,
    /// Up to which sizes which of this project's exchanges is used; measured when none are given.
    thresholds: Option<Thresholds>,
    ordinal: Option<u32>,
    quick: bool,
    /// Kernels begin before those before them are complete.
    overlap: bool,
    require_gpu: bool,
    /// Only parts whose name contains this.
    only: Option<String>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self {
            root: testkit::models::repository(),
            folders: Vec::new(),
            kernels: None,
            nccl_lib: None,
            child: None,
            exchange: Exchange::Nccl,
            endless: false,
            thresholds: None,
            ordinal: None,
            quick: false,
            overlap: true,
            require_gpu: false,
            only: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} wants a value"));
            match arg.as_str() {
                "--root" => options.root = PathBuf::from(value()?),
                "--cuda-lib-dir" => {
                    options.folders.extend(value()?.split(',').map(PathBuf::from));
                }
                "--cuda-kernels" => options.kernels = Some(PathBuf::from(value()?)),
                "--nccl-lib" => options.nccl_lib = Some(PathBuf::from(value()?)),
                "--exchange" => {
                    let wanted = value()?;
                    let known = Exchange::NAMES.into_iter().find(|(name, _)| *name == wanted);
                    options.exchange = known.ok_or("--exchange wants a name")?.1;
                }
                "--endless" => options.endless = true,
                "--child" => {
                    let rank = value()?.parse().map_err(|_| "--child wants a rank")?;
                    options.child = Some((rank, value()?, PathBuf::from(value()?)));
                }
                "--gpu" => options.ordinal = value()?.parse().ok(),
                "--only" => options.only = Some(value()?),
                "--no-overlap" => options.overlap = false,
                "--quick" => options.quick = true,
                "--require-gpu" => options.require_gpu = true,
                // What `cargo test` passes on.
                _ if arg.starts_with('-') => {}
                _ => options.only = Some(arg),
            }
        }
        Ok(options)
    }

    fn wants(&self, part: &str) -> bool {
        self.only.as_ref().is_none_or(|only| part.contains(only.as_str()))
    }

    fn backend(&self, ordinal: u32, graphs: bool) -> Result<CudaBackend, KernelError> {
        let options = CudaOptions {
            graphs,
            overlap: self.overlap,
            ..Survey::options(ordinal, &self.folders, self.kernels.as_deref())
        };
        CudaBackend::new(options, single_rank())
    }
}

/// One line of the table.
#[derive(Debug)]
struct Row {
    what: String,
    /// What was measured, in words.
    figure: String,
    /// What is wrong, if anything.
    fault: Option<String>,
}

/// The lines so far; each is printed as soon as it is known.
#[derive(Debug, Default)]
struct Table {
    rows: Vec<Row>,
}

impl Table {
    fn add(&mut self, what: impl Into<String>, result: Result<String, String>) {
        let (figure, fault) = match result {
            Ok(figure) => (figure, None),
            Err(fault) => (String::new(), Some(fault)),
        };
        let row = Row { what: what.into(), figure, fault };
        let state = if row.fault.is_some() { "FAILED" } else { "ok" };
        let words = row.fault.as_ref().unwrap_or(&row.figure);
        println!("{:<44} {state:<7} {words}", row.what);
        self.rows.push(row);
    }

    fn faults(&self) -> usize {
        self.rows.iter().filter(|row| row.fault.is_some()).count()
    }
}

fn main() -> ExitCode {
    let mut options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            println!("{message}");
            return ExitCode::from(2);
        }
    };
    if let Some((rank, name, relay)) = &options.child {
        let said = ranks::child(&options, *rank, name, relay);
        println!("{}", said.as_ref().unwrap_or_else(|error| error));
        return if said.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let mut found =
        survey(&options.folders, options.kernels.as_deref(), options.nccl_lib.as_deref());
    let mut stand_in = false;
    let mut ordinal = options.ordinal.or_else(|| found.roomiest()).unwrap_or(0);
    if let Some(reason) = found.refusal(ordinal) {
        println!("no GPU: {reason}");
        if options.require_gpu {
            return ExitCode::from(2);
        }
        if found.driver.is_ok() {
            // Its library is loaded, and the stand-in's cannot be any more.
            return ExitCode::SUCCESS;
        }
        let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
        let fakes = testkit::fake_cuda::fake_cuda_of(folder, 4).and_then(|fake| {
            let nccl = testkit::fake_cuda::fake_nccl(folder, &fake, None)?;
            Ok((fake, nccl))
        });
        match fakes {
            Ok((fake, nccl)) => {
                println!("checking the check itself, on a stand-in for the driver");
                options.folders = vec![fake.libraries];
                options.kernels = Some(fake.kernels);
                options.nccl_lib = Some(nccl);
                options.quick = true;
                stand_in = options.only.is_none();
                options.only.get_or_insert_with(|| "operations".to_owned());
                ordinal = 0;
                found = survey(
                    &options.folders,
                    options.kernels.as_deref(),
                    options.nccl_lib.as_deref(),
                );
            }
            Err(error) => {
                println!("the stand-in for the driver does not compile: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    let mut table = Table::default();
    match options.backend(ordinal, true) {
        Ok(backend) => println!("{}", backend.describe()),
        Err(error) => {
            println!("no GPU: {error}");
            return ExitCode::from(2);
        }
    }
    if options.wants("operations") {
        operations::check(&options, ordinal, &mut table);
    }
    if options.wants("goldens") {
        goldens::check(&options, ordinal, &mut table);
    }
    if stand_in || options.wants("ranks") {
        ranks::check(&options, ordinal, &found, &mut table);
    }
    if options.wants("speed") {
        speed::measure(&options, ordinal, &mut table);
    }
    let (all, faults) = (table.rows.len(), table.faults());
    println!("{all} lines, {faults} failed");
    if faults > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

//! The command line: parses options, takes values not given from a configuration file, starts the
//! requested role and turns its end into an exit code.
//!
//! Exit codes: 0 done, 1 failed, 2 bad options or configuration, 69 the requested device cannot be
//! used, 71 the device failed, 75 start it again (another coordinator leads now, and this one is to
//! stand by; or a supervised worker process was signalled), 78 another process has the same name.
//!
//! - `up`: a coordinator and local workers
//! - `serve`, `elected`: a single coordinator, and one of several
//! - `handing_over`: what becomes of requests when a leader ends
//! - `work`, `host`, `children`: a worker, all workers of a host, and supervised worker processes
//! - `front`: a front end
//! - `operate`, `http_client`: commands to a running cluster, and how they reach it
//! - `run_batch`: answers all requests of a file
//! - `doctor`, `devices`, `bench`: what a host has, and whether it will do
//! - `options`, `config_file`, `flags`: options, files of them, and flags with values
//! - `reference`: the page of all options
//! - `api`, `etcd`, `lora`, `resources`, `speculative`, `vllm`: groups of options, and vLLM's names
//!   for them
//! - `secret`, `core_dumps`: the cluster secret; no core dumps that would contain it
//! - `claims`, `heartbeat`, `health`, `open_files`, `signals`: GPUs in use, heartbeats, probes,
//!   limits and signals of a process
//! - `hub`: models by their names on the hub
//! - `traces`: starts the export of traces
//! - `logging`, `output`: the log, and what is printed
mod api;
mod bench;
mod children;
mod claims;
mod config_file;
mod core_dumps;
mod devices;
mod doctor;
mod elected;
mod etcd;
mod flags;
mod front;
mod handing_over;
mod health;
mod heartbeat;
mod host;
mod http_client;
mod hub;
mod logging;
mod lora;
mod open_files;
mod operate;
mod options;
mod output;
mod reference;
mod resources;
mod run_batch;
mod secret;
mod serve;
mod signals;
mod speculative;
mod traces;
mod up;
mod vllm;
mod work;

use std::ffi::OsString;
use std::process::ExitCode;

use coordinator::coordinator::StartError;
use worker::device::is_gpu_held;

pub(crate) use self::options::{Command, CoordinatorArgs, FrontendArgs, UpArgs, WorkerArgs};
use self::output::{error_line, leave_at_once, print_line};

/// What went wrong, mapped to the exit code.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// An option or a configuration file is wrong.
    #[error("{0}")]
    Usage(String),
    /// The role failed.
    #[error("{0}")]
    Failed(String),
    /// The device failed.
    #[error("{0}")]
    Device(String),
    /// The requested device cannot be used.
    #[error("{0}")]
    NoDevice(String),
    /// Another coordinator leads.
    #[error("{0}")]
    Superseded(String),
    /// A supervised worker was ended by a signal that its parent did not send.
    #[error("{0}")]
    Again(String),
    /// Another process has the same name.
    #[error("{0}")]
    NameTaken(String),
    /// It was told to end before it began.
    #[error("told to end")]
    Ended,
}

impl CliError {
    /// Returns the exit code that tells a supervisor what to do (above 2, those of sysexits.h).
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Ended => 0,
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::NoDevice(_) => 69,
            Self::Device(_) => 71,
            Self::Superseded(_) | Self::Again(_) => 75,
            Self::NameTaken(_) => 78,
        }
    }
}

impl From<StartError> for CliError {
    /// Options that contradict each other, or that do not fit the model, are wrong however often
    /// they are tried: a supervisor must not start that again.
    fn from(error: StartError) -> Self {
        match error {
            StartError::Config(_) | StartError::Sizes(_) => Self::Usage(error.to_string()),
            StartError::Model(_)
            | StartError::StatsFile { .. }
            | StartError::Listen { .. }
            | StartError::Thread(_) => Self::Failed(error.to_string()),
        }
    }
}

/// Runs the program with `args`, the first of which is its own name.
pub(crate) fn main(args: Vec<OsString>) -> ExitCode {
    let command = match parse(&args) {
        Ok(command) => command,
        Err(error) => {
            // clap prints help and version to stdout with exit code 0, errors to stderr with 2.
            output::note_write(error.print());
            let code = u8::try_from(error.exit_code()).unwrap_or(2);
            return ExitCode::from(said_all(code));
        }
    };
    open_files::raise();
    core_dumps::forbid();
    let serves = matches!(
        command,
        Command::Up(_) | Command::Coordinator(_) | Command::Worker(..) | Command::Frontend(_)
    );
    let result = match command {
        Command::Up(args) => up::run(&args),
        Command::Coordinator(args) => serve::run(&args),
        Command::Worker(role) => work::run(&role, &args),
        Command::Frontend(args) => front::run(&args),
        Command::Status(args) => operate::status(&args),
        Command::Logs(args) => operate::logs(&args),
        Command::Scale(args) => operate::scale(&args),
        Command::Drain(args) => operate::drain(&args),
        Command::Actors(args) => operate::actors(&args),
        Command::ResetPrefixCache(args) => operate::reset_prefix_cache(&args),
        Command::Adapters(args) => operate::adapters(&args),
        Command::RunBatch(args) => run_batch::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Devices(args) => {
            devices::run(&args);
            Ok(())
        }
        Command::Metrics(args) => {
            print_line(&catalogue(args.markdown));
            Ok(())
        }
        Command::Options(args) => {
            print_line(&reference::text(&options::command(), &args));
            Ok(())
        }
        Command::CheckConfig(args) => config_file::check(&args.file).map(|(keys, refusal)| {
            print_line(&format!("{}: {keys} keys, all known", args.file.display()));
            if let Some(refusal) = refusal {
                print_line(&format!("`tutti up` would not start with it: {refusal}"));
            }
        }),
    };
    logging::flush();
    let code = match result {
        Ok(()) | Err(CliError::Ended) => 0,
        Err(error) => {
            error_line(&error.to_string());
            error.code()
        }
    };
    // A server has done its work, whatever became of the few lines that it prints.
    let code = if serves { code } else { said_all(code) };
    // Something on a GPU outlasted all that was to end it.
    if is_gpu_held() {
        leave_at_once(code);
    }
    ExitCode::from(code)
}

/// Turns success into failure if what was printed could not be written, and says so.
fn said_all(code: u8) -> u8 {
    match output::unwritten() {
        Some(problem) if code == 0 => {
            error_line(&problem);
            CliError::Failed(problem).code()
        }
        _ => code,
    }
}

/// Returns the metrics catalogue, as a page or with one name per line.
fn catalogue(markdown: bool) -> String {
    if markdown {
        return coordinator::metrics::markdown::markdown().trim_end().to_owned();
    }
    let names: Vec<&str> =
        shared::metrics::catalogue::CATALOGUE.iter().map(|series| series.name).collect();
    names.join("\n")
}

/// Parses twice when a configuration file is named: the file's values become the defaults of the
/// second parse, so that the command line wins and every value is checked by the same rules.
fn parse(args: &[OsString]) -> Result<Command, clap::Error> {
    let args = &vllm::understood(args)?;
    let args = &doctor::without_others(args);
    let command = || flags::with_values(options::command(), args);
    let matches = command().try_get_matches_from(args)?;
    let Some((name, file)) = config_file::named_in(&matches) else {
        etcd::check_given(&matches)?;
        return options::from_matches(&matches);
    };
    let given = matches.subcommand().map(|(_, given)| given);
    let command = config_file::apply(command(), &name, &file, given)?;
    let matches = command.try_get_matches_from(args).map_err(|error| {
        if error.use_stderr() {
            clap::Error::raw(
                error.kind(),
                format!("{}(some values come from {})\n", error.render(), file.display()),
            )
        } else {
            error
        }
    })?;
    etcd::check_given(&matches)?;
    options::from_matches(&matches)
}

#[cfg(test)]
mod tests;

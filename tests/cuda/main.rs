//! The program with GPUs, on a stand-in for NVIDIA's driver: what it finds, what it serves, and one
//! clear message for each possible fault.
//!
//! - [`devices`]: `tutti devices` and `--device`
//! - [`faults`]: errors of the driver, and the messages about them
//! - [`nccl`]: ranks on two GPUs that exchange data through a stand-in for NCCL, and its failures
//! - [`peers`]: two processes that access each other's GPU memory
//! - [`serving`]: `tutti up` on one and on two GPUs, and on one that fails
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends by panicking, and so do its helpers"
)]

mod devices;
mod faults;
mod nccl;
mod peers;
mod serving;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;

use testkit::fake_cuda::{FakeCuda, fake_cuda, fake_nccl};
use testkit::local_cluster::tutti_binary;
use testkit::models::repository;

/// The stand-in, compiled once.
fn fake() -> &'static FakeCuda {
    static FAKE: OnceLock<FakeCuda> = OnceLock::new();
    FAKE.get_or_init(|| fake_cuda(Path::new(env!("CARGO_TARGET_TMPDIR")), None).unwrap())
}

/// The options that select the stand-in.
fn options(fake: &FakeCuda) -> Vec<String> {
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    [
        "--cuda-lib-dir".to_owned(),
        text(&fake.libraries),
        "--cuda-kernels".to_owned(),
        text(&fake.kernels),
    ]
    .into()
}

/// The stand-in for NCCL over it; `without` names a symbol that it lacks.
fn nccl(without: Option<&str>) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = fake_nccl(folder, fake(), without).unwrap();
    library.to_str().unwrap().to_owned()
}

/// Runs the program to its end.
fn tutti(args: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(tutti_binary())
        .args(args)
        .envs(environment.iter().copied())
        .current_dir(repository())
        .output()
        .unwrap()
}

/// Runs it with the stand-in; returns exit code, stdout and stderr.
fn with_fake(args: &[&str], environment: &[(&str, &str)]) -> (i32, String, String) {
    let options = options(fake());
    let args: Vec<&str> = args.iter().copied().chain(options.iter().map(String::as_str)).collect();
    described(&tutti(&args, environment))
}

fn described(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

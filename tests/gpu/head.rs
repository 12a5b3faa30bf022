//! The head of the table: driver, GPU, libraries, this program; and which GPU is used.
use std::process::{Command, ExitCode};

use kernels::cuda::devices::FoundDevice;

use crate::Options;

/// Marks the line with the GPU that is used.
pub(crate) const GPU: &str = "@gpu ";

/// Prints the head, or why there is no GPU (exit code 2).
pub(crate) fn print(options: &Options) -> ExitCode {
    let found = options.survey();
    let ordinal = options.ordinal.or_else(|| found.roomiest()).unwrap_or(0);
    if let Some(reason) = found.refusal(ordinal) {
        println!("no GPU: {reason}");
        return ExitCode::from(2);
    }
    println!("tutti {} of {}", env!("CARGO_PKG_VERSION"), commit());
    println!("driver: {}; {}", found.driver_text(), kernel_module());
    for FoundDevice { info, memory_free } in &found.devices {
        let free = memory_free.as_ref().map_or_else(Clone::clone, |free| (free >> 20).to_string());
        println!(
            "GPU {}: {}, sm_{}{}, {} multiprocessors, {} MiB, {free} free, {} bytes of shared \
             memory per block, {} {}",
            info.ordinal,
            info.name,
            info.capability.0,
            info.capability.1,
            info.multiprocessors,
            info.memory_total >> 20,
            info.shared_memory,
            info.pci,
            info.uuid
        );
    }
    let products = found.cublas_lt.as_ref().map_or_else(String::as_str, |()| "found");
    println!("cuBLASLt: {products}; NCCL: {}", found.nccl_text());
    for file in loaded() {
        println!("loaded: {file}");
    }
    for line in management_tool() {
        println!("nvidia-smi: {line}");
    }
    println!("{GPU}{ordinal}");
    ExitCode::SUCCESS
}

/// NVIDIA library files that this process really uses: a host can have several versions.
fn loaded() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let names = ["/libcuda.so", "/libcublasLt.so", "/libnccl.so", "/libnvidia-ml.so"];
    let files = maps.lines().filter_map(|line| line.find('/').map(|at| line[at..].to_owned()));
    let mut files: Vec<String> =
        files.filter(|file| names.iter().any(|name| file.contains(name))).collect();
    files.dedup();
    files
}

/// The commit that this program was built from, if `tests/gpu/run --build` built it.
fn commit() -> &'static str {
    option_env!("TUTTI_COMMIT").unwrap_or("an unnamed commit")
}

fn kernel_module() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    text.lines().next().unwrap_or("no /proc/driver/nvidia/version").to_owned()
}

/// Facts that may explain odd figures: clocks, limits, modes.
fn management_tool() -> Vec<String> {
    let fields = "index,driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit,\
                  temperature.gpu,mig.mode.current,compute_mode,persistence_mode,ecc.mode.current";
    let query = format!("--query-gpu={fields}");
    match Command::new("nvidia-smi").args([&query, "--format=csv"]).output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect(),
        Err(error) => vec![error.to_string()],
    }
}

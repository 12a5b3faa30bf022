//! GPUs, as reported by NVIDIA's management library.
use std::path::Path;

use shared::host::HostSampler;

use super::Finding;

const CHECK: &str = "gpu driver";

/// Number of GPUs, as far as the library tells.
pub(super) fn count(nvml: Option<&Path>) -> u32 {
    u32::try_from(HostSampler::new("doctor", nvml).devices().len()).unwrap_or(u32::MAX)
}

/// Looks for the library and for GPUs. A host without both is a CPU node, which is fine.
pub(super) fn check(nvml: Option<&Path>) -> Finding {
    let sampler = HostSampler::new("doctor", nvml);
    let devices = sampler.devices();
    match sampler.nvml_problem() {
        Some(problem) if nvml.is_some() => {
            Finding::fail(CHECK, format!("--nvml-lib: {problem}"), "name NVIDIA's own library")
        }
        Some(problem) if Path::new("/dev/nvidiactl").exists() => Finding::warn(
            CHECK,
            format!("there is a GPU, but NVML cannot be used: {problem}"),
            "install the driver's libraries, or name NVML with --nvml-lib FILE",
        ),
        Some(_) => Finding::ok(CHECK, "no NVML and no GPU: a CPU node"),
        None if devices.is_empty() => Finding::warn(
            CHECK,
            "NVML is installed but finds no GPU",
            "give the container access to the GPUs, or check nvidia-smi",
        ),
        None => {
            let names: Vec<String> = devices
                .iter()
                .map(|gpu| format!("{} {} GiB", gpu.name, gpu.memory_bytes >> 30))
                .collect();
            Finding::ok(CHECK, names.join(", "))
        }
    }
}

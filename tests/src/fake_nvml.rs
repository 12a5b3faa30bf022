//! A stand-in for NVIDIA's management library, compiled from `tests/fake_nvml/nvml.c`.
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file that says which GPUs there are, beside the library.
const GPUS: &str = "gpus";

/// Compiles the library into `folder`. It finds two GPUs, `GPU-aaaa` and `GPU-bbbb`, unless
/// [`set_gpus`] says otherwise.
///
/// # Errors
/// The compiler's error.
pub fn fake_nvml(folder: &Path) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fake_nvml/nvml.c");
    let library = folder.join("libnvidia-ml.so.1");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror"])
        .arg(format!("-DGPUS=\"{}\"", folder.join(GPUS).display()))
        .arg("-o")
        .arg(&library)
        .arg(&source)
        .output();
    match compiled {
        Ok(output) if output.status.success() => Ok(library),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("cc: {error}")),
    }
}

/// Sets which GPUs the library in `folder` finds from now on: their UUIDs by index, with `lost` for
/// one that has fallen off the bus.
///
/// # Errors
/// The file system's error.
pub fn set_gpus(folder: &Path, uuids: &[&str]) -> io::Result<()> {
    std::fs::write(folder.join(GPUS), uuids.join("\n"))
}

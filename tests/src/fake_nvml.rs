//! A stand-in for NVIDIA's management library, compiled from `tests/fake_nvml/nvml.c`.
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the library into `folder`.
///
/// # Errors
/// The compiler's error.
pub fn fake_nvml(folder: &Path) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fake_nvml/nvml.c");
    let library = folder.join("libnvidia-ml.so.1");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg(&source)
        .output();
    match compiled {
        Ok(output) if output.status.success() => Ok(library),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(format!("cc: {error}")),
    }
}

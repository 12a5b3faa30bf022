//! A stand-in for NVIDIA's management library, compiled from `tests/fake_nvml/nvml.c`.
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the library into `folder`. `None`, with a notice, when there is no C compiler and this
/// is not continuous integration.
///
/// # Panics
/// When it does not compile, or in continuous integration without a compiler.
#[must_use]
pub fn fake_nvml(folder: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("fake_nvml/nvml.c");
    let library = folder.join("libnvidia-ml.so.1");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(&library)
        .arg(&source)
        .output();
    match compiled {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
            Some(library)
        }
        Err(error) => {
            let needed = std::env::var_os("CI").is_some();
            assert!(!needed, "cc is needed in continuous integration: {error}");
            eprintln!("cc is not here ({error}): no stand-in for NVML");
            None
        }
    }
}

//! Compiles the CUDA kernels when `TUTTI_CUDA=1`; otherwise writes an empty list and is done.
//!
//! Ordinary builds need no CUDA and pay nothing. `kernels/cuda/build` finds nvcc, compiles every
//! `.cu` file to a fatbin below `OUT_DIR`, and says what is missing. It is the same script that the
//! checks of `tests/run` use.
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    if let Err(message) = run() {
        // The one way in which a build script can say what is wrong.
        println!("cargo::error={message}");
    }
}

fn run() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed=TUTTI_CUDA");
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?);
    let wanted = match env::var("TUTTI_CUDA").as_deref() {
        Ok("1") => true,
        Ok("" | "0") | Err(env::VarError::NotPresent) => false,
        other => return Err(format!("TUTTI_CUDA is {other:?}: 1 builds the kernels, 0 does not")),
    };
    let mut list = String::new();
    if wanted {
        for name in ["NVCC", "CUDA_HOME", "PATH"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        println!("cargo::rerun-if-changed=cuda");
        for image in compile(&out)? {
            let name = image.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            writeln!(list, "    ({name:?}, include_bytes!({:?})),", image.display().to_string())
                .map_err(|error| error.to_string())?;
        }
    } else {
        println!("cargo::rerun-if-changed=build.rs");
    }
    let text = format!(
        "/// Name of the source file without `.cu`, fatbin; empty when built without kernels.\n\
         pub(crate) const IMAGES: &[(&str, &[u8])] = &[\n{list}];\n"
    );
    fs::write(out.join("fatbins.rs"), text).map_err(|error| format!("fatbins.rs: {error}"))
}

/// Runs the script, and returns the images it made, by name.
fn compile(out: &Path) -> Result<Vec<PathBuf>, String> {
    let images = out.join("fatbins");
    let script = Path::new("cuda/build");
    let output = Command::new(script)
        .arg(&images)
        .output()
        .map_err(|error| format!("{}: {error}", script.display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} failed: {}", script.display(), text.replace('\n', " | ")));
    }
    let mut paths: Vec<PathBuf> = fs::read_dir(&images)
        .map_err(|error| format!("{}: {error}", images.display()))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "fatbin"))
        .collect();
    paths.sort();
    Ok(paths)
}

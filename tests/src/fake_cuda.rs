//! Stand-ins for NVIDIA's driver and cuBLASLt, compiled from `tests/fake_cuda/driver.cpp` with the
//! CUDA kernels' own sources and their emulation; and for NCCL (`tests/fake_nccl/nccl.cpp`). Those
//! files describe their options.
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::made_once::made_once;
use crate::ptx::{self, Ptx};

/// Optimised, since a model runs on it; without fused multiply-add, so that sums are computed as
/// written. Its threads switch often and look at thread-local variables each time, so these are
/// reached without a call.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O3",
    "-ftls-model=initial-exec",
    "-fPIC",
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-DTUTTI_EMULATE",
];

/// The location of the stand-in.
#[derive(Clone, Debug)]
pub struct FakeCuda {
    /// The folder with the libraries.
    pub libraries: PathBuf,
    /// The folder with the files that it takes for kernels.
    pub kernels: PathBuf,
}

/// Compiles it below `folder`, unless it exists already. `without` names a symbol to leave out.
///
/// # Errors
/// The compiler's error.
pub fn fake_cuda(folder: &Path, without: Option<&str>) -> Result<FakeCuda, String> {
    fake_cuda_with(folder, without, 1)
}

/// Same with several GPUs, for tests that cannot set the environment variable for it.
///
/// # Errors
/// Same as [`fake_cuda`].
pub fn fake_cuda_of(folder: &Path, devices: u32) -> Result<FakeCuda, String> {
    fake_cuda_with(folder, None, devices)
}

/// A stand-in for NCCL on top of a stand-in for the driver; `without` names a symbol to leave out.
///
/// # Errors
/// The compiler's error.
pub fn fake_nccl(folder: &Path, cuda: &FakeCuda, without: Option<&str>) -> Result<PathBuf, String> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = tests.join("fake_nccl/nccl.cpp");
    let mut hasher = DefaultHasher::new();
    (&cuda.libraries, without).hash(&mut hasher);
    std::fs::read(&source).map_err(|error| error.to_string())?.hash(&mut hasher);
    let target = folder.join(format!("fake-nccl-{:016x}", hasher.finish())).join("libnccl.so.2");
    let made = target.parent().unwrap_or(folder);
    std::fs::create_dir_all(made).map_err(|error| error.to_string())?;
    made_once(&target, || compile_nccl(folder, &source, cuda, without, &target))?;
    Ok(target)
}

fn compile_nccl(
    folder: &Path,
    source: &Path,
    cuda: &FakeCuda,
    without: Option<&str>,
    target: &Path,
) -> Result<(), String> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = tempfile::tempdir_in(folder).map_err(|error| error.to_string())?;
    let library = scratch.path().join("libnccl.so.2");
    let compiled = Command::new("c++")
        .args(FLAGS)
        .args(without.map(|symbol| format!("-D{symbol}={symbol}_is_absent")))
        .args(["-shared", "-Wl,-soname,libnccl.so.2", "-I"])
        .arg(tests.join("fake_cuda"))
        .arg(source)
        .arg("-o")
        .arg(&library)
        .arg(cuda.libraries.join("libcuda.so.1"))
        .output()
        .map_err(|error| format!("c++ (package g++ on Debian): {error}"))?;
    if !compiled.status.success() {
        return Err(String::from_utf8_lossy(&compiled.stderr).into_owned());
    }
    std::fs::rename(library, target).map_err(|error| error.to_string())
}

fn fake_cuda_with(folder: &Path, without: Option<&str>, devices: u32) -> Result<FakeCuda, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cuda = root.join("kernels/cuda");
    let driver = root.join("tests/fake_cuda/driver.cpp");
    let mut sources = vec![driver.clone(), root.join("tests/fake_cuda/hooks.h")];
    for folder in [&cuda, &cuda.join("emulate"), &cuda.join("emulate/ptx")] {
        let entries = std::fs::read_dir(folder).map_err(|error| error.to_string())?;
        sources.extend(
            entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_file()),
        );
    }
    sources.sort();
    let ptx = chosen_ptx(folder)?;
    let mut hasher = DefaultHasher::new();
    (FLAGS, without, ptx.as_ref().map(|ptx| ptx.hash)).hash(&mut hasher);
    for path in &sources {
        (path, std::fs::read(path).map_err(|error| error.to_string())?).hash(&mut hasher);
    }
    let hash = hasher.finish();
    let target = folder.join(format!("fake-cuda-{hash:016x}-{devices}"));
    made_once(&target, || {
        let kernels = emulated_kernels(folder, &cuda, &sources, ptx.as_ref())?;
        let driver = objects(&folder.join(format!("fake-cuda-driver-{hash:016x}")), |scratch| {
            std::fs::write(scratch.join("entries.inc"), entries(&cuda)?)
                .map_err(|error| error.to_string())?;
            let defines = without.map(|symbol| format!("-D{symbol}={symbol}_is_absent"));
            compile(scratch, &cuda, &[&driver], defines.as_slice())
        })?;
        let scratch = tempfile::tempdir_in(folder).map_err(|error| error.to_string())?;
        let unit = scratch.path().join("devices.cpp");
        let text = format!(
            "extern const unsigned default_devices;\n\
             const unsigned default_devices = {devices};\n"
        );
        std::fs::write(&unit, text).map_err(|error| error.to_string())?;
        compile(scratch.path(), &cuda, &[&unit], &[])?;
        let devices = vec![scratch.path().join("0.o")];
        link(scratch.path(), &[devices, driver, kernels].concat())?;
        let kernels = scratch.path().join("kernels");
        std::fs::create_dir(&kernels).map_err(|error| error.to_string())?;
        std::fs::write(kernels.join("all.fatbin"), "fake fatbin")
            .map_err(|error| error.to_string())?;
        std::fs::rename(scratch.keep(), &target).map_err(|error| error.to_string())
    })?;
    Ok(FakeCuda { libraries: target.join("lib"), kernels: target.join("kernels") })
}

/// The objects that `compile` leaves in the folder it is given, under `target`.
fn objects(
    target: &Path,
    compile: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<Vec<PathBuf>, String> {
    made_once(target, || {
        let folder = target.parent().unwrap_or(target);
        let scratch = tempfile::tempdir_in(folder).map_err(|error| error.to_string())?;
        compile(scratch.path())?;
        std::fs::rename(scratch.keep(), target).map_err(|error| error.to_string())
    })?;
    let files = std::fs::read_dir(target).map_err(|error| error.to_string())?;
    let mut objects: Vec<PathBuf> = files
        .filter_map(|file| Some(file.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "o"))
        .collect();
    objects.sort();
    Ok(objects)
}

/// With `TUTTI_ENGINE=ptx` the kernels are the PTX that nvcc makes of them.
fn chosen_ptx(folder: &Path) -> Result<Option<Ptx>, String> {
    if std::env::var("TUTTI_ENGINE").is_ok_and(|engine| engine == "ptx") {
        return ptx::prepare(folder)?
            .map(Some)
            .ok_or_else(|| "no nvcc: kernels/cuda/get-nvcc".into());
    }
    Ok(None)
}

/// The objects of the kernels and of their emulation, which all variants of the driver share: they
/// take most of the compiler's time.
fn emulated_kernels(
    folder: &Path,
    cuda: &Path,
    sources: &[PathBuf],
    ptx: Option<&Ptx>,
) -> Result<Vec<PathBuf>, String> {
    let is_unit = |path: &&PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let other = ["main.cpp", "ranks.cpp", "rules.cu", "driver.cpp"].contains(&name);
        let of_ptx = path.starts_with(cuda.join("emulate/ptx")) || name == "guarded.cpp";
        match ptx {
            Some(_) => of_ptx && name.ends_with(".cpp"),
            None if name == "guarded.cpp" => true,
            None => (name.ends_with(".cu") || name.ends_with(".cpp")) && !other && !of_ptx,
        }
    };
    let stubs = ptx.map(|ptx| &ptx.stubs);
    let units: Vec<&PathBuf> = sources.iter().filter(is_unit).chain(stubs).collect();
    let flags: Vec<String> = match ptx {
        Some(_) => ptx::FLAGS.iter().map(|&flag| flag.to_owned()).collect(),
        None => Vec::new(),
    };
    let mut hasher = DefaultHasher::new();
    (FLAGS, &flags, ptx.map(|ptx| ptx.hash)).hash(&mut hasher);
    for path in sources.iter().filter(|path| path.starts_with(cuda)) {
        (path, std::fs::read(path).map_err(|error| error.to_string())?).hash(&mut hasher);
    }
    let target = folder.join(format!("fake-cuda-kernels-{:016x}", hasher.finish()));
    objects(&target, |scratch| compile(scratch, cuda, &units, &flags))
}

/// One line per kernel in the header, with its sm_90 resources: maximum threads per block,
/// registers, bytes of static shared memory.
fn entries(cuda: &Path) -> Result<String, String> {
    let read = |name| std::fs::read_to_string(cuda.join(name)).map_err(|error| error.to_string());
    let (header, resources) = (read("kernels.h")?, read("resources.txt")?);
    let names = header.split("__global__ void ").skip(1).filter_map(|rest| rest.split('(').next());
    let line = |name: &str| {
        let of = |line: &&str| line.split(' ').next() == Some(name);
        let numbers: Vec<&str> = resources.lines().find(of)?.split(' ').collect();
        let [_, threads, _, _, registers, shared] = numbers[..] else { return None };
        Some(format!("ENTRY({name}, {threads}, {registers}, {shared}),\n"))
    };
    let missing =
        |name: &str| format!("{name} is not in resources.txt: kernels/cuda/check --update");
    names.map(|name| line(name).ok_or_else(|| missing(name))).collect()
}

/// Compiles each unit, all at once, to an object below `scratch` that is named for its index.
fn compile(
    scratch: &Path,
    cuda: &Path,
    units: &[&PathBuf],
    defines: &[String],
) -> Result<(), String> {
    let mut running = Vec::new();
    for (index, unit) in units.iter().enumerate() {
        let object = scratch.join(format!("{index}.o"));
        let child = Command::new("c++")
            .args(FLAGS)
            .args(defines)
            .args(["-I".as_ref(), scratch.as_os_str(), "-I".as_ref(), cuda.as_os_str()])
            .args(["-x", "c++", "-c"])
            .arg(unit)
            .arg("-o")
            .arg(&object)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("c++ (package g++ on Debian): {error}"))?;
        running.push(child);
    }
    for child in running {
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
    }
    Ok(())
}

/// Links the library, below `scratch/lib`.
fn link(scratch: &Path, objects: &[PathBuf]) -> Result<(), String> {
    let libraries = scratch.join("lib");
    std::fs::create_dir(&libraries).map_err(|error| error.to_string())?;
    let driver = libraries.join("libcuda.so.1");
    // One library under two names, so that both use the same stream queues.
    let linked = Command::new("c++")
        .args(FLAGS)
        .args(["-shared", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(&driver)
        .args(objects)
        .output()
        .map_err(|error| error.to_string())?;
    if !linked.status.success() {
        return Err(String::from_utf8_lossy(&linked.stderr).into_owned());
    }
    let products = libraries.join("libcublasLt.so.13");
    let stub = Command::new("c++")
        .args(["-shared", "-Wl,-soname,libcublasLt.so.13", "-Wl,--no-as-needed", "-o"])
        .arg(&products)
        .arg(&driver)
        .output()
        .map_err(|error| error.to_string())?;
    match stub.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&stub.stderr).into_owned()),
    }
}

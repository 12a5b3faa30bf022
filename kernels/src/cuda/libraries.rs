//! Finds NVIDIA's libraries at run time, before `cudarc` looks for them. `cudarc` panics if a
//! library or a symbol is missing, so none of its functions is called before this module has found
//! them all.
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cudarc::{cublaslt, driver};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// A library to look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaLibrary {
    /// The driver's own library.
    Driver,
    /// cuBLASLt: matrix products for prefill.
    CublasLt,
}

impl CudaLibrary {
    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "NVIDIA driver",
            Self::CublasLt => "cuBLASLt",
        }
    }

    /// File names within a folder, the preferred one first; the first is also the name for the
    /// loader. Names without a version come last: a toolkit's folder of stubs has such a driver,
    /// which does nothing.
    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        }
    }

    /// Folders within Python's packages; for CUDA 13, one folder holds all libraries.
    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &[],
            Self::CublasLt => &["nvidia/cu13/lib", "nvidia/cublas/lib"],
        }
    }

    /// Symbols that this program calls.
    fn symbols(self) -> &'static [&'static str] {
        match self {
            Self::Driver => DRIVER_SYMBOLS,
            Self::CublasLt => CUBLASLT_SYMBOLS,
        }
    }
}

const DRIVER_SYMBOLS: &[&str] = &[
    "cuCtxSetCurrent",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncLoad",
    "cuFuncSetAttribute",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuInit",
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuLaunchKernelEx",
    "cuMemAllocHost_v2",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamQuery",
];

const CUBLASLT_SYMBOLS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// Why a library cannot be used, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryError {
    /// Name of the library, for people.
    pub library: &'static str,
    /// Reason.
    pub reason: String,
}

impl fmt::Display for LibraryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no {}: {}", self.library, self.reason)
    }
}

impl std::error::Error for LibraryError {}

/// Folders of CUDA's libraries on hosts whose loader does not know them.
pub(super) fn usual_folders() -> Vec<PathBuf> {
    usual_folders_in(&|name| std::env::var_os(name))
}

/// Folders of `libraries` within the packages of the Pythons that this process's environment knows.
pub(super) fn python_folders(libraries: &[&str]) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for home in python_homes(&|name| std::env::var_os(name)) {
        let Ok(entries) = std::fs::read_dir(home.join("lib")) else { continue };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with("python3") {
                for packages in ["site-packages", "dist-packages"] {
                    let packages = entry.path().join(packages);
                    folders.extend(libraries.iter().map(|library| packages.join(library)));
                }
            }
        }
    }
    folders.sort();
    folders.dedup();
    folders
}

/// The variables of an environment.
type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

fn usual_folders_in(variable: Variables<'_>) -> Vec<PathBuf> {
    let home = |name| variable(name).map(PathBuf::from);
    let cudas = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(home);
    let mut folders: Vec<PathBuf> =
        cudas.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("lib64")).collect();
    // Conda's own packages of CUDA put libraries beside its others.
    folders.extend(home("CONDA_PREFIX").map(|home| home.join("lib")));
    folders
}

/// Where Pythons are installed: `lib/python3*` below these has their packages.
fn python_homes(variable: Variables<'_>) -> Vec<PathBuf> {
    let home = |name| variable(name).map(PathBuf::from);
    let mut homes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(home).collect();
    let path = variable("PATH").unwrap_or_default();
    let has_python = |folder: &PathBuf| folder.join("python3").exists();
    let pythons = std::env::split_paths(&path).filter(has_python);
    homes.extend(pythons.filter_map(|folder| Some(folder.parent()?.to_owned())));
    homes.extend(home("HOME").map(|home| home.join(".local")));
    // On Debian and Ubuntu the system's Python is in /usr, and what pip installs for it is here.
    homes.push(PathBuf::from("/usr/local"));
    homes
}

/// Looks for a library in `folders` (the first that has one counts), then where the system's loader
/// looks, then (except for the driver) in CUDA's usual folders and in Python's packages; checks
/// that it has all symbols called here.
///
/// # Errors
/// [`LibraryError`]; `cudarc` must then not be asked for anything from that library.
pub fn find(library: CudaLibrary, folders: &[PathBuf]) -> Result<(), LibraryError> {
    // One at a time: loading concurrently is well defined, but the order of the search would not
    // be.
    static SEARCH: Mutex<()> = Mutex::new(());
    let _one = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
    let missing = |reason: String| LibraryError { library: library.name(), reason };
    let mut faults = Vec::new();
    let mut usable = |folder: &Path| match preload(library, folder) {
        Ok(is_loaded) => is_loaded,
        Err(fault) => {
            faults.push(fault);
            false
        }
    };
    let _ = folders.iter().any(|folder| usable(folder));
    if !is_present(library) && library != CudaLibrary::Driver {
        let others = usual_folders().into_iter().chain(python_folders(library.packages()));
        let _ = others.into_iter().any(|folder| usable(&folder) && is_present(library));
    }
    if !is_present(library) {
        // A library that was found but does not load explains more than one that was not found.
        let reason = if faults.is_empty() { not_found(library) } else { faults.join("; ") };
        return Err(missing(reason));
    }
    let lacking: Vec<&str> =
        library.symbols().iter().copied().filter(|name| !has(library, name)).collect();
    if let [first, others @ ..] = lacking.as_slice() {
        let more =
            if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
        return Err(missing(format!(
            "the library found lacks {first}{more}: it is too old for this program"
        )));
    }
    Ok(())
}

/// Loads the library from `folder`, if it exists, so that later look-ups by bare name find it: the
/// loader then knows it by its SONAME. Its symbols stay local, since they must not be mixed with
/// those of another copy that a look-up by another name finds. Returns false if the folder has
/// none.
fn preload(library: CudaLibrary, folder: &Path) -> Result<bool, String> {
    for file in library.files() {
        let path = folder.join(file);
        if !path.is_file() {
            continue;
        }
        // SAFETY: NVIDIA's libraries run initialisers that are safe to run in any process.
        let loaded = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
        let loaded = loaded.map_err(|error| format!("{}: {}", path.display(), reason(&error)))?;
        // Stays loaded for the life of the process.
        let _ = loaded.into_raw();
        return Ok(true);
    }
    Ok(false)
}

fn is_present(library: CudaLibrary) -> bool {
    match library {
        // SAFETY: loads the library, as above.
        CudaLibrary::Driver => unsafe { driver::sys::is_culib_present() },
        // SAFETY: as above.
        CudaLibrary::CublasLt => unsafe { cublaslt::sys::is_culib_present() },
    }
}

fn has(library: CudaLibrary, symbol: &str) -> bool {
    match library {
        CudaLibrary::Driver => {
            // SAFETY: the library is present, so this does not panic.
            let found = unsafe { driver::sys::culib() };
            // SAFETY: the address is only checked, never called.
            unsafe { found.get::<*const ()>(symbol.as_bytes()) }.is_ok()
        }
        CudaLibrary::CublasLt => {
            // SAFETY: the library is present, so this does not panic.
            let found = unsafe { cublaslt::sys::culib() };
            // SAFETY: the address is only checked, never called.
            unsafe { found.get::<*const ()>(symbol.as_bytes()) }.is_ok()
        }
    }
}

fn open_by_name(library: CudaLibrary) -> Result<Library, libloading::Error> {
    let name = library.files().first().copied().unwrap_or_default();
    // SAFETY: NVIDIA's libraries run initialisers that are safe to run in any process.
    unsafe { Library::open(Some(name), RTLD_NOW) }
}

fn not_found(library: CudaLibrary) -> String {
    match open_by_name(library) {
        Err(error) => reason(&error),
        Ok(_) => "it is there under a name that is not looked for".to_owned(),
    }
}

/// The loader's own message, in one line.
pub(super) fn reason(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    let words = source.map_or_else(|| error.to_string(), ToString::to_string);
    words.lines().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_listed_once() {
        for library in [CudaLibrary::Driver, CudaLibrary::CublasLt] {
            assert!(library.symbols().is_sorted_by(|a, b| a < b), "{library:?}");
        }
    }

    #[test]
    fn libraries_are_looked_for_where_distributions_put_them() {
        let system = |name: &str| (name == "PATH").then(|| OsString::from("/nowhere:/usr/bin"));
        assert!(python_homes(&system).contains(&PathBuf::from("/usr/local")));
        let conda = |name: &str| (name == "CONDA_PREFIX").then(|| OsString::from("/opt/conda"));
        let cuda = PathBuf::from("/usr/local/cuda/lib64");
        assert_eq!(usual_folders_in(&conda), [cuda, PathBuf::from("/opt/conda/lib")]);
        assert_eq!(python_homes(&conda)[0], PathBuf::from("/opt/conda"));
    }

    /// Holds on hosts with and without a GPU: no panic, and one line that names the library.
    #[test]
    fn a_missing_library_is_an_error_and_no_panic() {
        for library in [CudaLibrary::Driver, CudaLibrary::CublasLt] {
            if let Err(missing) = find(library, &[]) {
                let line = missing.to_string();
                assert!(line.starts_with(&format!("no {}", library.name())), "{line}");
                assert!(!line.contains('\n'), "{line}");
            }
        }
    }
}

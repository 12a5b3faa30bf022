//! Finds the driver's library and cuBLASLt at run time. Nothing is called in them before all
//! functions were found, and then in the very library that was found here (`cuda::calls`).
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::calls::{cublaslt, driver};

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

    /// File names, the preferred one first: within a folder, and for the loader. Names without a
    /// version come last: a toolkit's folder of stubs has such a driver, which does nothing.
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

    /// Whether it is in use already.
    fn is_found(self) -> bool {
        match self {
            Self::Driver => driver::is_found(),
            Self::CublasLt => cublaslt::is_found(),
        }
    }

    /// Uses this copy of it from now on.
    fn resolve(self, library: Library) -> Result<(), Vec<&'static str>> {
        match self {
            Self::Driver => driver::resolve(library),
            Self::CublasLt => cublaslt::resolve(library),
        }
    }
}

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

/// Looks for a library in `folders`, then where the system's loader looks, then (except for the
/// driver) in CUDA's usual folders and in Python's packages. The first one that loads counts, for
/// the life of the process; checks that it has all functions called here.
///
/// # Errors
/// [`LibraryError`]; its functions must then not be called.
pub fn find(library: CudaLibrary, folders: &[PathBuf]) -> Result<(), LibraryError> {
    // One at a time: loading concurrently is well defined, but the order of the search would not
    // be.
    static SEARCH: Mutex<()> = Mutex::new(());
    let _one = SEARCH.lock().unwrap_or_else(PoisonError::into_inner);
    if library.is_found() {
        return Ok(());
    }
    let missing = |reason: String| LibraryError { library: library.name(), reason };
    let found = load(library, folders).map_err(missing)?;
    let lacking = library.resolve(found).err().unwrap_or_default();
    let [first, others @ ..] = lacking.as_slice() else { return Ok(()) };
    let more =
        if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    Err(missing(format!("the library found lacks {first}{more}: it is too old for this program")))
}

/// Loads the first copy of a library that can be loaded; the error is one line.
fn load(library: CudaLibrary, folders: &[PathBuf]) -> Result<Library, String> {
    let mut faults = Vec::new();
    let mut usable = |folder: &Path| {
        let paths = library.files().iter().map(|file| folder.join(file));
        let path = paths.into_iter().find(|path| path.is_file())?;
        open(&path).map_err(|fault| faults.push(format!("{}: {fault}", path.display()))).ok()
    };
    if let Some(found) = folders.iter().find_map(|folder| usable(folder)) {
        return Ok(found);
    }
    let mut absent = None;
    for name in library.files() {
        match open(Path::new(name)) {
            Ok(found) => return Ok(found),
            Err(fault) => absent = absent.or(Some(fault)),
        }
    }
    if library != CudaLibrary::Driver {
        let others = usual_folders().into_iter().chain(python_folders(library.packages()));
        if let Some(found) = others.into_iter().find_map(|folder| usable(&folder)) {
            return Ok(found);
        }
    }
    // A library that was found but does not load explains more than one that was not found.
    Err(if faults.is_empty() { absent.unwrap_or_default() } else { faults.join("; ") })
}

/// Loads a library by its path, or by a name that the system's loader knows. Its symbols stay
/// local: they must not be mixed with those of another copy.
fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: NVIDIA's libraries run initialisers that are safe to run in any process.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| reason(&error))
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
    fn functions_are_listed_once() {
        for names in [driver::NAMES, cublaslt::NAMES] {
            assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
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

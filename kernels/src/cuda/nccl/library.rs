//! NCCL's library and its functions: loaded at run time and checked completely before the first
//! call. A library that is missing, too old or lacks a function is an error in one line.
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::cuda::calls::driver::CUstream;
use crate::cuda::choice::{NCCL_MIN, Version};
use crate::cuda::libraries::{LibraryError, python_folders, reason, usual_folders};

/// Size of a unique id in bytes.
pub const UNIQUE_ID_BYTES: usize = 128;
/// File names, the usual one first.
const FILES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Folders within Python's packages.
const PACKAGES: &[&str] = &["nvidia/nccl/lib"];

/// `ncclResult_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(pub(super) c_int);

impl Status {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const IN_PROGRESS: Self = Self(7);

    fn name(self) -> &'static str {
        match self.0 {
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            8 => "ncclTimeout",
            _ => "an unknown status",
        }
    }

    /// Whether this rank itself could not do what was asked, and would not another time.
    pub(super) fn is_own(self) -> bool {
        matches!(self.0, 1 | 3 | 4 | 5)
    }

    fn meaning(self) -> &'static str {
        match self.0 {
            1 => "a call of CUDA failed; NCCL_DEBUG=WARN says which",
            2 => "a call of the operating system failed; NCCL_DEBUG=WARN says which",
            3 => "NCCL found a fault of its own, or memory was overwritten",
            4 => "an argument is wrong: a bug in this program",
            5 => "ranks do not fit together: differing settings, or a GPU that several ranks share",
            6 => "another rank failed or went away",
            8 => "another rank did not answer in time",
            _ => "NCCL gives no reason",
        }
    }
}

/// Id that ranks connect with: created by rank 0, secret, used once.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; UNIQUE_ID_BYTES]);

/// The version whose form [`Config`] has: 2.19.0.
const CONFIG_VERSION: c_uint = 21_900;

/// A communicator of NCCL's.
pub(super) type Comm = *mut c_void;

/// `ncclConfig_t` of NCCL 2.19. The struct has only grown at its end, and NCCL treats missing
/// fields as unset, so this form suits every later version, too. `tests/fake_nccl/abi.cpp` compares
/// it, and all functions called here, with NCCL's header.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Traffic class of later versions; ignored because of `version`.
    unused: c_int,
}

impl Config {
    /// Configuration of a communicator whose calls do not wait for other ranks.
    pub(super) fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: c_int::MIN,
            min_ctas: c_int::MIN,
            max_ctas: c_int::MIN,
            net_name: std::ptr::null(),
            split_share: c_int::MIN,
            unused: c_int::MIN,
        }
    }
}

type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type CommInit = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
type CommGetAsyncError = unsafe extern "C" fn(Comm, *mut c_int) -> c_int;
type CommAbort = unsafe extern "C" fn(Comm) -> c_int;
type GetLastError = unsafe extern "C" fn(Comm) -> *const c_char;
type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, CUstream) -> c_int;
type AllGather =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, CUstream) -> c_int;

/// `ncclFloat32`, `ncclBfloat16`, `ncclInt8`, `ncclSum`
pub(super) const FLOAT32: c_int = 7;
pub(super) const BFLOAT16: c_int = 9;
pub(super) const INT8: c_int = 0;
pub(super) const SUM: c_int = 0;

/// NCCL's functions.
pub(super) struct Nccl {
    version: u32,
    pub(super) get_unique_id: GetUniqueId,
    pub(super) comm_init: CommInit,
    pub(super) comm_get_async_error: CommGetAsyncError,
    pub(super) comm_abort: CommAbort,
    get_last_error: GetLastError,
    pub(super) all_reduce: AllReduce,
    pub(super) all_gather: AllGather,
    /// Keeps the functions alive.
    _library: Library,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {}", Version(self.version))
    }
}

impl Nccl {
    /// Error message for a status, followed by NCCL's last message about any communicator.
    pub(super) fn line(&self, status: Status, what: &str) -> String {
        // SAFETY: null is allowed, since no communicator is queried. Returns null or a buffer of
        // the whole process, always terminated by a zero. The next error of any communicator is
        // written into it, so the text can be torn at worst.
        let said = unsafe { (self.get_last_error)(std::ptr::null_mut()) };
        let said = if said.is_null() {
            String::new()
        } else {
            // SAFETY: a zero-terminated text, as above.
            unsafe { CStr::from_ptr(said) }.to_string_lossy().trim().replace(['\n', '\r'], " ")
        };
        let said: String = said.chars().take(200).collect();
        let said = if said.is_empty() { said } else { format!(" (NCCL last said: {said})") };
        format!("{what}: {} ({}): {}{said}", status.name(), status.0, status.meaning())
    }
}

/// Loads NCCL: `file` if given; otherwise from `folders`, from where the system's loader looks,
/// from CUDA's usual folders, or from Python's packages. The first call decides for the process.
pub(super) fn load(folders: &[PathBuf], file: Option<&Path>) -> Result<Arc<Nccl>, LibraryError> {
    static LOADED: Mutex<Option<Arc<Nccl>>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(nccl) = &*loaded {
        return Ok(nccl.clone());
    }
    let missing = |reason: String| LibraryError { library: "NCCL", reason };
    let (library, from) = open(folders, file).map_err(missing)?;
    let nccl = Arc::new(resolve(library).map_err(|why| missing(format!("{from}: {why}")))?);
    *loaded = Some(nccl.clone());
    Ok(nccl)
}

/// NCCL's version: 22809 is 2.28.9.
///
/// # Errors
/// [`LibraryError`], also if it is too old.
pub fn version(folders: &[PathBuf], file: Option<&Path>) -> Result<u32, LibraryError> {
    load(folders, file).map(|nccl| nccl.version)
}

fn open(folders: &[PathBuf], file: Option<&Path>) -> Result<(Library, String), String> {
    let load = |path: &Path| {
        // SAFETY: NVIDIA's libraries run initialisers that are safe to run in any process.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| format!("{}: {}", path.display(), reason(&error)))
            .map(|library| (library, path.display().to_string()))
    };
    if let Some(file) = file {
        return load(file);
    }
    let in_folders = |folders: &[PathBuf]| -> Option<PathBuf> {
        let files = folders.iter().flat_map(|folder| FILES.map(|file| folder.join(file)));
        files.into_iter().find(|path| path.is_file())
    };
    if let Some(path) = in_folders(folders) {
        return load(&path);
    }
    let mut first = None;
    for name in FILES {
        match load(Path::new(name)) {
            Ok(found) => return Ok(found),
            Err(error) => first = first.or(Some(error)),
        }
    }
    if let Some(path) =
        in_folders(&usual_folders()).or_else(|| in_folders(&python_folders(PACKAGES)))
    {
        return load(&path);
    }
    Err(first.unwrap_or_default())
}

/// Finds every function.
fn resolve(library: Library) -> Result<Nccl, String> {
    macro_rules! function {
        ($name:literal, $type:ty) => {{
            // SAFETY: every NCCL that has the function has it with this signature.
            let found = unsafe { library.get::<$type>($name.as_bytes()) };
            *found.map_err(|_| format!("it lacks {}: another version of NCCL is needed", $name))?
        }};
    }
    let get_version = function!("ncclGetVersion", GetVersion);
    let mut version = 0;
    // SAFETY: writes one int.
    let status = unsafe { get_version(&raw mut version) };
    let version = u32::try_from(version).unwrap_or(0);
    if status != 0 || version < NCCL_MIN {
        return Err(format!(
            "it is of version {}, this program needs {} or later",
            Version(version),
            Version(NCCL_MIN)
        ));
    }
    Ok(Nccl {
        version,
        get_unique_id: function!("ncclGetUniqueId", GetUniqueId),
        comm_init: function!("ncclCommInitRankConfig", CommInit),
        comm_get_async_error: function!("ncclCommGetAsyncError", CommGetAsyncError),
        comm_abort: function!("ncclCommAbort", CommAbort),
        get_last_error: function!("ncclGetLastError", GetLastError),
        all_reduce: function!("ncclAllReduce", AllReduce),
        all_gather: function!("ncclAllGather", AllGather),
        _library: library,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets of NCCL's header according to a C compiler.
    #[test]
    fn the_configuration_has_ncclconfig_ts_layout() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, magic), 8);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
        let config = Config::non_blocking();
        assert_eq!((config.size, config.blocking, config.version), (48, 0, 21_900));
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let folder = std::env::temp_dir().join(format!("tutti-no-nccl-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("libnccl.so.2");
        std::fs::write(&file, "not a library").unwrap();
        let errors = [
            version(std::slice::from_ref(&folder), None).unwrap_err(),
            version(&[], Some(&file)).unwrap_err(),
            version(&[], Some(&folder.join("absent.so"))).unwrap_err(),
        ];
        std::fs::remove_dir_all(&folder).unwrap();
        for error in errors {
            let line = error.to_string();
            assert!(line.starts_with("no NCCL: ") && line.contains(".so"), "{line}");
            assert!(!line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn every_status_has_a_line() {
        for code in 1..=9 {
            let status = Status(code);
            assert!(!status.name().is_empty() && !status.meaning().is_empty());
        }
    }
}

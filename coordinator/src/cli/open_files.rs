//! The limit of open files, connections included.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard one. The lower default exists for programs that
/// use `select`; here every client's stream is an open file.
pub(super) fn raise() {
    let limit = getrlimit(Resource::Nofile);
    // If that fails, the old limit holds, which `tutti doctor` shows.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

//! How many files, connections included, the process may have open.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises what the process may have open to what its operator allows at most. The lower default is
/// there for programs that use `select`; every client's stream here is an open file.
pub(super) fn raise() {
    let limit = getrlimit(Resource::Nofile);
    // Where it is refused the old one holds, which `tutti doctor` shows.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

//! Whether the process may leave a core dump: it would hold prompts, answers and keys.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The variable that permits core dumps: any value except 0.
const VARIABLE: &str = "TUTTI_CORE_DUMPS";

/// Forbids core dumps of this process and of those it starts, unless the operator wants them.
pub(super) fn forbid() {
    if std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty() && value != "0") {
        return;
    }
    let limit = getrlimit(Resource::Core);
    // The hard limit stays: a debugger's user may want to raise the soft one.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), ..limit });
}

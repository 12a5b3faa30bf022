//! Whether the process may leave a core dump: it would hold prompts, answers and keys.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The variable that lets it: with any value but 0.
const VARIABLE: &str = "TUTTI_CORE_DUMPS";

/// Lets this process, and those that it starts, leave none, unless its operator wants some.
pub(super) fn forbid() {
    if std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty() && value != "0") {
        return;
    }
    let limit = getrlimit(Resource::Core);
    // The bound that may be raised again stays: a debugger's user may want to.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), ..limit });
}

//! What NCCL is told by the process's environment, which is all it reads some settings from.
use std::ffi::OsStr;

const GRAPH_REGISTER: &str = "NCCL_GRAPH_REGISTER";

/// The network interface that NCCL's own connections use, as `NCCL_SOCKET_IFNAME` takes it.
pub const INTERFACE: &str = "NCCL_SOCKET_IFNAME";

/// Prepares the environment for NCCL: connections over `interface` alone when one is named and
/// whoever started the process has said nothing else; and, whatever was said, no agreements between
/// ranks behind their backs while graphs are captured: one that fails to capture would be waited
/// for. To be called before the process has a second thread; says whether it was.
#[must_use]
pub fn prepare(interface: Option<&str>) -> bool {
    let named = interface.filter(|_| std::env::var_os(INTERFACE).is_none()).map(exactly);
    let settings = [(INTERFACE, named), (GRAPH_REGISTER, Some("0".to_owned()))];
    settings.into_iter().all(|(name, value)| value.is_none_or(|value| set(name, value.as_ref())))
}

/// An interface's name as NCCL takes it: a bare one would be the beginning of others' names, too.
/// What has NCCL's own syntax already (`=`, `^`, lists) stays.
fn exactly(interface: &str) -> String {
    match interface.contains(['=', '^', ',']) {
        true => interface.to_owned(),
        false => format!("={interface}"),
    }
}

#[allow(clippy::disallowed_methods, reason = "NCCL takes these settings from nowhere else")]
fn set(name: &str, value: &OsStr) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    if threads != 1 {
        return false;
    }
    // SAFETY: this is the process's only thread, as was just seen: nobody reads the environment.
    unsafe { std::env::set_var(name, value) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_whole_names() {
        assert_eq!(exactly("lo"), "=lo");
        for own in ["=eth0", "^docker", "eth0,eth1", "^=lo"] {
            assert_eq!(exactly(own), own);
        }
    }

    /// A test has a thread beside the process's first.
    #[test]
    fn nothing_is_set_beside_other_threads() {
        assert!(!set("TUTTI_NEVER_SET", "1".as_ref()));
        assert_eq!(std::env::var_os("TUTTI_NEVER_SET"), None);
    }
}

//! What NCCL is told by the process's environment, which is all it reads some settings from.
use std::ffi::OsStr;

/// The network interface that NCCL's own connections use, as `NCCL_SOCKET_IFNAME` takes it.
pub const INTERFACE: &str = "NCCL_SOCKET_IFNAME";

/// Prepares the environment for NCCL, where whoever started the process has not: connections over
/// `interface` alone when one is named, and no agreements between ranks while graphs are captured,
/// since not all need capture the same step. To be called before the process has a second thread;
/// says whether it was.
#[must_use]
pub fn prepare(interface: Option<&str>) -> bool {
    let settings = [(INTERFACE, interface), ("NCCL_GRAPH_REGISTER", Some("0"))];
    settings.into_iter().all(|(name, value)| match value {
        Some(value) if std::env::var_os(name).is_none() => set(name, value.as_ref()),
        _ => true,
    })
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

    /// A test has a thread beside the process's first.
    #[test]
    fn nothing_is_set_beside_other_threads() {
        assert!(!set("TUTTI_NEVER_SET", "1".as_ref()));
        assert_eq!(std::env::var_os("TUTTI_NEVER_SET"), None);
    }
}

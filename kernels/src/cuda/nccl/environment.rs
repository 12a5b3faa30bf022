//! NCCL's settings that it only reads from the process's environment.
use std::ffi::OsStr;

/// What NCCL must be set to, whatever the environment says. With `NCCL_GRAPH_REGISTER` ranks would
/// communicate while they capture a graph, and wait for one that fails to. `NCCL_COMM_BLOCKING`
/// takes precedence over what a communicator is made with: calls would wait for other ranks, and
/// nothing would end them.
const FIXED: [(&str, &str); 2] = [("NCCL_GRAPH_REGISTER", "0"), ("NCCL_COMM_BLOCKING", "0")];

/// What NCCL is set to unless the environment has it. From version 2.24 on, each rank would listen
/// for NCCL's tools and for the other ranks (RAS), and answer everybody.
const DEFAULTS: [(&str, &str); 1] = [("NCCL_RAS_ENABLE", "0")];

/// The variable that names the network interface for NCCL's own connections.
pub const INTERFACE: &str = "NCCL_SOCKET_IFNAME";

/// Prepares the environment for NCCL. Unless the variables for that are set, restricts connections
/// to `interface`, if given, and keeps ports for NCCL's tools closed. In any case sets what this
/// program relies on. Must be called before the process has a second thread; returns whether it
/// was.
#[must_use]
pub fn prepare(interface: Option<&str>) -> bool {
    let settings = settings(interface, |name| std::env::var_os(name).is_some());
    settings.iter().all(|(name, value)| set(name, value.as_ref()))
}

/// What to set, given what is there.
fn settings(
    interface: Option<&str>,
    is_there: impl Fn(&str) -> bool,
) -> Vec<(&'static str, String)> {
    let named = interface.map(|interface| (INTERFACE, exactly(interface)));
    let owned = |(name, value): (&'static str, &str)| (name, value.to_owned());
    let chosen = named.into_iter().chain(DEFAULTS.map(owned));
    let missing = chosen.filter(|(name, _)| !is_there(name));
    missing.chain(FIXED.map(owned)).collect()
}

/// An interface's name for NCCL: a bare one would match as a prefix of others' names, too. A name
/// that already uses NCCL's syntax (`=`, `^`, lists) is unchanged.
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
    // SAFETY: this is the process's only thread, as just checked, so nobody reads the environment.
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

    #[test]
    fn what_the_environment_has_stays_unless_this_program_relies_on_it() {
        let all = |there: &[&str], interface| {
            let settings = settings(interface, |name| there.contains(&name));
            settings.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        let fixed = ["NCCL_GRAPH_REGISTER=0", "NCCL_COMM_BLOCKING=0"];
        let with = |own: &[&'static str]| [own, &fixed].concat();
        assert_eq!(all(&[], None), with(&["NCCL_RAS_ENABLE=0"]));
        assert_eq!(all(&[], Some("lo")), with(&["NCCL_SOCKET_IFNAME==lo", "NCCL_RAS_ENABLE=0"]));
        assert_eq!(all(&["NCCL_RAS_ENABLE"], None), with(&[]));
        assert_eq!(all(&[INTERFACE], Some("lo")), with(&["NCCL_RAS_ENABLE=0"]));
        assert_eq!(all(&["NCCL_GRAPH_REGISTER", "NCCL_RAS_ENABLE"], None), with(&[]));
    }

    /// A test always has a thread besides the process's first.
    #[test]
    fn nothing_is_set_beside_other_threads() {
        assert!(!set("TUTTI_NEVER_SET", "1".as_ref()));
        assert_eq!(std::env::var_os("TUTTI_NEVER_SET"), None);
    }
}

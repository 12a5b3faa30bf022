//! Memory that a process may use: the host's, or its control group's (cgroup) if that is less.
//!
//! `root` is `/` except in tests.
use std::fs;
use std::path::{Path, PathBuf};

/// A limit from here on is none: version 1 has no word for that.
const NO_LIMIT: u64 = 1 << 62;

/// Names in one version of control groups.
#[derive(Debug)]
struct Names {
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` about what the kernel can take back: file pages, whether used once or
    /// often, and slab caches, of a group and of those in it.
    reclaimable: &'static [&'static str],
}

const V2: Names = Names {
    limit: "memory.max",
    used: "memory.current",
    reclaimable: &["inactive_file", "active_file", "slab_reclaimable"],
};
const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: &["total_inactive_file", "total_active_file"],
};

/// What a control group may use, and what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounded {
    /// Its limit, in bytes.
    pub(super) limit: u64,
    /// What it uses and the kernel cannot take back, in bytes, if the system reports it.
    pub(super) used: Option<u64>,
}

/// Memory available without swapping, in bytes; `None` if the system does not report it.
#[must_use]
pub fn available_memory(root: &Path) -> Option<u64> {
    let host = of_host(root, "MemAvailable:")?;
    let left = |group: Bounded| Some(group.limit.saturating_sub(group.used?));
    Some(bounded(root).filter_map(left).fold(host, u64::min))
}

/// All memory of the host, in bytes; `None` if the system does not report it. Limits of control
/// groups are left out: that of a process's own group is not that of another one.
#[must_use]
pub fn total_memory(root: &Path) -> Option<u64> {
    of_host(root, "MemTotal:")
}

/// The most memory that this process could ever have, in bytes; `None` if the system does not
/// report it.
#[must_use]
pub fn most_memory(root: &Path) -> Option<u64> {
    let host = total_memory(root)?;
    Some(bounded(root).map(|group| group.limit).fold(host, u64::min))
}

/// Returns the control group that bounds this process: the one with the least limit of its own and
/// those around it; `None` if there is no limit.
pub(super) fn memory_limit(root: &Path) -> Option<Bounded> {
    bounded(root).min_by_key(|group| group.limit)
}

/// This process's control group and those around it, as far as they have limits; the innermost
/// first. In a container that does not see its own path, the group's files are at the top of the
/// hierarchy.
fn bounded(root: &Path) -> impl Iterator<Item = Bounded> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let unified = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    // NUMBER:CONTROLLER,CONTROLLER:/PATH
    let of_memory = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(":/")?;
        controllers.split(',').any(|it| it == "memory").then(|| path.to_owned())
    };
    let folders = |top: &str, group: &str| -> Vec<PathBuf> {
        Path::new(group).ancestors().map(|group| root.join(top).join(group)).collect()
    };
    let v2 = folders("sys/fs/cgroup", unified);
    let v1 = groups.lines().find_map(of_memory);
    let v1 = v1.map(|group| folders("sys/fs/cgroup/memory", &group)).unwrap_or_default();
    let v2 = v2.into_iter().filter_map(|folder| read(&folder, &V2));
    v2.chain(v1.into_iter().filter_map(|folder| read(&folder, &V1)))
}

fn read(folder: &Path, names: &Names) -> Option<Bounded> {
    // `max` is not a number: there is no limit.
    let limit = number(&folder.join(names.limit)).filter(|limit| *limit < NO_LIMIT)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let used = number(&folder.join(names.used));
    let used = used.map(|used| used.saturating_sub(reclaimable(&stat, names)));
    Some(Bounded { limit, used })
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// A line of the host's, in bytes.
fn of_host(root: &Path, name: &str) -> Option<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Bytes that the kernel can take back when memory runs short.
fn reclaimable(stat: &str, names: &Names) -> u64 {
    let bytes = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        names.reclaimable.contains(&name).then(|| bytes.trim().parse::<u64>().ok())?
    };
    stat.lines().filter_map(bytes).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> PathBuf {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("tutti-memory-{}-{next}", std::process::id()));
        for (name, text) in files {
            let file = root.join(name);
            fs::create_dir_all(file.parent().unwrap_or(&root)).unwrap_or_default();
            fs::write(file, text).unwrap_or_default();
        }
        root
    }

    #[test]
    fn the_least_of_all_groups_around_a_process_is_its_limit() {
        let max = |of: &'static str, text| (of, text);
        let found = |files: &[(&str, &str)]| {
            let root = host(files);
            let found = memory_limit(&root);
            let _ = fs::remove_dir_all(root);
            found.map(|bounded| bounded.limit)
        };
        let own = ("proc/self/cgroup", "1:name=x:/y\n0::/system.slice/tutti.service\n");
        let top = "sys/fs/cgroup/memory.max";
        let slice = "sys/fs/cgroup/system.slice/memory.max";
        let service = "sys/fs/cgroup/system.slice/tutti.service/memory.max";
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[own, max(service, "max\n"), max(slice, "max\n")]), None);
        assert_eq!(found(&[own, max(service, "5000\n"), max(slice, "max\n")]), Some(5000));
        assert_eq!(found(&[own, max(service, "5000\n"), max(slice, "4000\n")]), Some(4000));
        // In a container, its own group is at the top, whatever its path on the host.
        assert_eq!(found(&[max(top, "3000\n")]), Some(3000));
        assert_eq!(found(&[("proc/self/cgroup", "0::/\n"), max(top, "3000\n")]), Some(3000));
        assert_eq!(found(&[own, max(top, "3000\n")]), Some(3000));
    }

    #[test]
    fn the_smaller_of_host_and_group_counts() {
        let meminfo = ("proc/meminfo", "MemTotal: 16 kB\nMemAvailable:   8 kB\n");
        let max = |text| ("sys/fs/cgroup/memory.max", text);
        let current = ("sys/fs/cgroup/memory.current", "3000\n");
        let stat = ("sys/fs/cgroup/memory.stat", "anon 2000\ninactive_file 1000\n");
        let found = |files: &[(&str, &str)]| {
            let root = host(files);
            let found = available_memory(&root);
            let _ = fs::remove_dir_all(root);
            found
        };
        assert_eq!(found(&[meminfo]), Some(8192));
        assert_eq!(found(&[meminfo, max("max\n"), current]), Some(8192));
        assert_eq!(found(&[meminfo, max("4000\n"), current]), Some(1000));
        assert_eq!(found(&[meminfo, max("4000\n"), current, stat]), Some(2000));
        let often =
            "anon 500\ninactive_file 1000\nactive_file 700\nslab_reclaimable 800\nshmem 9\n";
        let stat = ("sys/fs/cgroup/memory.stat", often);
        assert_eq!(found(&[meminfo, max("4000\n"), current, stat]), Some(3500));
        assert_eq!(found(&[meminfo, max("2000\n"), current]), Some(0));
        // A service's group is below the top, unlike a container's.
        let own = ("proc/self/cgroup", "0::/system.slice/tutti.service\n");
        let slice = [
            ("sys/fs/cgroup/system.slice/memory.max", "5000\n"),
            ("sys/fs/cgroup/system.slice/memory.current", "4500\n"),
        ];
        let service = [
            ("sys/fs/cgroup/system.slice/tutti.service/memory.max", "4000\n"),
            ("sys/fs/cgroup/system.slice/tutti.service/memory.current", "3000\n"),
        ];
        assert_eq!(found(&[&[meminfo, own][..], &service].concat()), Some(1000));
        assert_eq!(found(&[&[meminfo, own][..], &service, &slice].concat()), Some(500));
        assert_eq!(found(&[]), None);
    }
    #[test]
    fn what_a_group_uses_is_that_of_the_one_with_the_limit() {
        let found = |files: &[(&str, &str)]| {
            let root = host(files);
            let found = memory_limit(&root).map(|bounded| (bounded.limit, bounded.used));
            let _ = fs::remove_dir_all(root);
            found
        };
        let pod = "sys/fs/cgroup/pod.slice";
        let files = |folder: &str, limit: &str, used: &str, stat: &str| -> Vec<(String, String)> {
            [("memory.max", limit), ("memory.current", used), ("memory.stat", stat)]
                .map(|(name, text)| (format!("{folder}/{name}"), text.to_owned()))
                .to_vec()
        };
        let own = ("proc/self/cgroup".to_owned(), "0::/pod.slice/c1\n".to_owned());
        let inner = files(&format!("{pod}/c1"), "4000\n", "3900\n", "anon 1\ninactive_file 900\n");
        let outer = files(pod, "5000\n", "4900\n", "active_file 100\n");
        let all = [&[own][..], &inner, &outer].concat();
        let all: Vec<(&str, &str)> = all.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(found(&all), Some((4000, Some(3000))));
        assert_eq!(found(&[("sys/fs/cgroup/memory.max", "7\n")]), Some((7, None)));
        // Version 1: its own path is not seen in a container, and no limit is a large number.
        let own = ("proc/self/cgroup", "9:cpu,cpuacct:/x\n5:memory:/docker/c1\n0::/x\n");
        let v1 = |name: &'static str, text| (name, text);
        let used = v1("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n");
        let stat = "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 300\n";
        let stat = v1("sys/fs/cgroup/memory/memory.stat", stat);
        let limit = |text| v1("sys/fs/cgroup/memory/memory.limit_in_bytes", text);
        assert_eq!(found(&[own, limit("4000\n"), used, stat]), Some((4000, Some(2200))));
        assert_eq!(found(&[own, limit("9223372036854771712\n"), used, stat]), None);
        let inner = v1("sys/fs/cgroup/memory/docker/c1/memory.limit_in_bytes", "2000\n");
        assert_eq!(found(&[own, limit("4000\n"), used, stat, inner]), Some((2000, None)));
    }
}

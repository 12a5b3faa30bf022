//! Memory that a process may use: the host's, or its control group's (cgroup) if that is less.
//!
//! Only cgroup v2 is supported. `root` is `/` except in tests.
use std::fs;
use std::path::{Path, PathBuf};

/// Memory available without swapping, in bytes; `None` if the system does not report it.
#[must_use]
pub fn available_memory(root: &Path) -> Option<u64> {
    let host = of_host(&fs::read_to_string(root.join("proc/meminfo")).ok()?)?;
    let left = |group: &PathBuf| {
        let used = number(&group.join("memory.current"))?;
        // The kernel reclaims the group's page cache when memory runs short.
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        Some(limit(group)?.saturating_sub(used.saturating_sub(cached(&stat))))
    };
    let groups = groups(root);
    Some(groups.iter().filter_map(left).fold(host, u64::min))
}

/// Returns the memory that this process's control group may use, in bytes: the least of its own
/// limit and those of the groups around it; `None` if there is no limit.
pub(super) fn memory_limit(root: &Path) -> Option<u64> {
    groups(root).iter().filter_map(|group| limit(group)).min()
}

/// The folders of this process's control group and of those around it. In a container that does not
/// see its own path, the group's files are at the top of the hierarchy.
fn groups(root: &Path) -> Vec<PathBuf> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let top = root.join("sys/fs/cgroup");
    Path::new(group).ancestors().map(|group| top.join(group)).collect()
}

fn limit(group: &Path) -> Option<u64> {
    // `max` is not a number: there is no limit.
    number(&group.join("memory.max"))
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn of_host(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// Bytes that the kernel can reclaim: file pages, whether used once or often, and slab caches.
fn cached(stat: &str) -> u64 {
    const RECLAIMABLE: [&str; 3] = ["inactive_file", "active_file", "slab_reclaimable"];
    let bytes = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        RECLAIMABLE.contains(&name).then(|| bytes.trim().parse::<u64>().ok())?
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
            found
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
}

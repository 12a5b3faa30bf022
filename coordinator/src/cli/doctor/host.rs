//! Resources that the host gives a process: shared memory, open files, cores.
use std::path::Path;

use super::Finding;

/// Limit of open files below which a coordinator turns clients away: each stream is one.
const FILES_WANTED: u64 = 4096;
/// Limit of open files below which not even a small cluster works.
const FILES_NEEDED: u64 = 256;

/// Checks shared memory, through which ranks on one host exchange their sums.
pub(super) fn shared_memory(folder: &Path, workers: u32, degree: u32) -> Finding {
    const CHECK: &str = "shared memory";
    let needed = worker::check::shared_memory_bytes(workers, degree);
    let free = match rustix::fs::statvfs(folder) {
        Ok(found) => found.f_bavail.saturating_mul(found.f_frsize),
        Err(error) if needed == 0 => {
            return Finding::ok(CHECK, format!("{}: {error}; none is needed", folder.display()));
        }
        Err(error) => {
            let found = format!("{}: {error}", folder.display());
            return Finding::fail(CHECK, found, "mount a tmpfs on /dev/shm");
        }
    };
    let found = format!("{}: {} free, {} needed", folder.display(), mib(free), mib(needed));
    if free < needed {
        return Finding::fail(CHECK, found, "a larger /dev/shm (in containers --shm-size=1g)");
    }
    Finding::ok(CHECK, found)
}

/// Checks the limit of open files: every client is one.
pub(super) fn open_files(limits: &Path) -> Finding {
    const CHECK: &str = "open files";
    let text = std::fs::read_to_string(limits).unwrap_or_default();
    let Some(soft) = soft_limit(&text) else {
        return Finding::warn(CHECK, "the limit cannot be read", "see ulimit -n");
    };
    let found = format!("at most {soft} at a time");
    let fix = "ulimit -n 65536 (systemd: LimitNOFILE=65536)";
    match soft {
        0..FILES_NEEDED => Finding::fail(CHECK, found, fix),
        FILES_NEEDED..FILES_WANTED => Finding::warn(
            CHECK,
            format!("{found}: a coordinator could serve about as many clients"),
            fix,
        ),
        _ => Finding::ok(CHECK, found),
    }
}

/// Returns the soft limit of open files from the text of `/proc/self/limits`.
fn soft_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// Checks the cores: more workers than cores slow each other down.
pub(super) fn processors(cores: u32, workers: u32) -> Finding {
    const CHECK: &str = "cores";
    let found = format!("{cores} cores for {workers} worker(s)");
    if workers > cores {
        return Finding::warn(CHECK, found, "fewer workers on this host, unless they use GPUs");
    }
    Finding::ok(CHECK, found)
}

/// Formats bytes in MiB, rounded up so that a need never looks like nothing.
pub(super) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    #[test]
    fn the_soft_limit_of_open_files_is_found() {
        let text = "Limit  Soft Limit  Hard Limit  Units\n\
                    Max processes             1   2   processes\n\
                    Max open files            1024                 4096                 files\n";
        assert_eq!(soft_limit(text), Some(1024));
        assert_eq!(soft_limit("Max open files   unlimited  unlimited  files"), Some(u64::MAX));
        assert_eq!(soft_limit(""), None);
    }

    #[test]
    fn limits_are_judged() {
        let judged = |soft: &str| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            std::io::Write::write_all(
                &mut file,
                format!("Max open files  {soft} {soft} files").as_bytes(),
            )
            .unwrap();
            open_files(file.path()).level
        };
        assert_eq!(judged("100"), Severity::Fail);
        assert_eq!(judged("1024"), Severity::Warn);
        assert_eq!(judged("65536"), Severity::Ok);
        assert_eq!(processors(2, 3).level, Severity::Warn);
        assert_eq!(processors(2, 2).level, Severity::Ok);
    }

    #[test]
    fn shared_memory_is_compared_with_the_need() {
        assert_eq!(shared_memory(Path::new("/dev/shm"), 1, 1).level, Severity::Ok);
        let gone = Path::new("/no/such/folder");
        assert_eq!(shared_memory(gone, 2, 2).level, Severity::Fail);
        assert_eq!(shared_memory(gone, 2, 1).level, Severity::Ok);
        // 64 ranks take 32 MiB per group: no host has room for so many groups.
        assert!(worker::check::shared_memory_bytes(64, 64) > 32 << 20);
    }
}

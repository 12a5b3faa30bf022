//! Rereads files when they change. Files of a set change one after another, so a state counts as
//! complete only when seen twice (`Watch`, pure).
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval between two checks of the files.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Identifies a state of all files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamps(pub(super) Vec<Option<Stamp>>);

/// Identifies a state of one file; there is none for a file that cannot be examined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// Time of the last change of content, mode or owner, in seconds and nanoseconds since 1970.
    pub(super) changed: (i64, i64),
    pub(super) bytes: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Watch {
    /// State at the last reading.
    read: Stamps,
    /// State at the last check, if that was new.
    pending: Option<Stamps>,
    /// Whether the last reading failed, perhaps only for a while.
    failed: bool,
}

impl Watch {
    /// Starts with files in the state in which they were read.
    pub(crate) fn new(read: Stamps) -> Self {
        Self { read, pending: None, failed: false }
    }

    /// Whether to read the files, given their state now.
    pub(super) fn look(&mut self, now: Stamps) -> bool {
        if now == self.read {
            self.pending = None;
            return self.failed;
        }
        if self.pending.as_ref() == Some(&now) {
            self.pending = None;
            self.read = now;
            return true;
        }
        self.pending = Some(now);
        false
    }

    /// Reports the result of a reading; a failed one is retried at every check.
    pub(super) fn has_read(&mut self, failed: bool) {
        self.failed = failed;
    }
}

/// Returns the files' state now.
pub(crate) fn stamps(files: &[PathBuf]) -> Stamps {
    Stamps(files.iter().map(|file| stamp(file)).collect())
}

fn stamp(file: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(file).ok()?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
        bytes: metadata.size(),
    })
}

/// Calls `read` when the files have changed, until its result is no longer used. A failure is
/// logged once, however often it recurs.
pub(crate) fn keep_current<T>(
    what: &str,
    files: &[PathBuf],
    mut watch: Watch,
    every: Duration,
    current: &Weak<T>,
    read: impl Fn(&Arc<T>) -> Result<(), String>,
) {
    let mut said = String::new();
    loop {
        std::thread::sleep(every);
        let Some(current) = current.upgrade() else { return };
        if !watch.look(stamps(files)) {
            continue;
        }
        let outcome = read(&current);
        watch.has_read(outcome.is_err());
        match outcome {
            Ok(()) => {
                said.clear();
                tracing::info!("{what} have changed and are in use from now on");
            }
            Err(error) if error == said => {}
            Err(error) => {
                tracing::error!(
                    %error,
                    "{what} have changed and cannot be used: those read before stay in use"
                );
                said = error;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamps(states: &[u64]) -> Stamps {
        let stamp = |inode| Stamp { device: 1, inode, changed: (0, 0), bytes: 1 };
        Stamps(states.iter().map(|state| (*state > 0).then(|| stamp(*state))).collect())
    }

    #[test]
    fn files_are_read_once_when_they_have_come_to_rest() {
        let mut watch = Watch::new(stamps(&[1, 1]));
        let mut look = |states: &[u64]| watch.look(stamps(states));
        assert!(!look(&[1, 1]));
        // The certificate changes first, then the key: in between they do not match.
        assert!(!look(&[2, 1]) && !look(&[2, 2]));
        assert!(look(&[2, 2]) && !look(&[2, 2]));
        // One is missing for a moment.
        assert!(!look(&[0, 2]) && !look(&[2, 2]) && !look(&[2, 2]));
        // One is missing for good: that is an error, reported once.
        assert!(!look(&[0, 2]) && look(&[0, 2]) && !look(&[0, 2]));
        // A file that cannot be read now may become readable without changing.
        watch.has_read(true);
        let mut look = |states: &[u64]| watch.look(stamps(states));
        assert!(look(&[0, 2]) && look(&[0, 2]));
        watch.has_read(false);
        let mut look = |states: &[u64]| watch.look(stamps(states));
        assert!(!look(&[0, 2]));
        // Back to a state that was not read since.
        assert!(!look(&[2, 2]) && look(&[2, 2]));
    }
}

//! Files that are read again when they change. They change one after the other, so only what looks
//! the same twice is taken for complete (`Watch`, pure).
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Between two looks at the files.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What tells one state of all files from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamps(pub(super) Vec<Option<Stamp>>);

/// What tells one state of a file from another; there is none of a file that cannot be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// The change of content, mode or owner, in seconds and nanoseconds since 1970.
    pub(super) changed: (i64, i64),
    pub(super) bytes: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Watch {
    /// As they were when last read.
    read: Stamps,
    /// As they were at the last look, where that was something new.
    pending: Option<Stamps>,
    /// What was read could not be used, or nothing could be read: for a while, perhaps.
    failed: bool,
}

impl Watch {
    /// Of files that have been read.
    pub(crate) fn new(read: Stamps) -> Self {
        Self { read, pending: None, failed: false }
    }

    /// Whether the files are to be read now that they look like this.
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

    /// What became of the last reading; one that failed is tried again at every look.
    pub(super) fn has_read(&mut self, failed: bool) {
        self.failed = failed;
    }
}

/// How these files look now.
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

/// Has `read` read the files again when they have changed, until nobody uses what was read of them.
/// What cannot be used is said once, however often it is tried.
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
        // The certificate first, then the key: between them they do not belong together.
        assert!(!look(&[2, 1]) && !look(&[2, 2]));
        assert!(look(&[2, 2]) && !look(&[2, 2]));
        // One is away for a moment.
        assert!(!look(&[0, 2]) && !look(&[2, 2]) && !look(&[2, 2]));
        // One is away for good: that is worth an error, once.
        assert!(!look(&[0, 2]) && look(&[0, 2]) && !look(&[0, 2]));
        // What cannot be read now may be read later, as it is.
        watch.has_read(true);
        let mut look = |states: &[u64]| watch.look(stamps(states));
        assert!(look(&[0, 2]) && look(&[0, 2]));
        watch.has_read(false);
        let mut look = |states: &[u64]| watch.look(stamps(states));
        assert!(!look(&[0, 2]));
        // Back to what was never read since.
        assert!(!look(&[2, 2]) && look(&[2, 2]));
    }
}

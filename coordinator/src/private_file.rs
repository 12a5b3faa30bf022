//! Files that hold a secret: checks that only their owner can read them.
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Checks that nobody else can read a file.
///
/// # Errors
/// What is wrong with it, without the file's name.
pub fn check(file: &Path) -> Result<(), String> {
    let metadata = fs::metadata(file).map_err(|error| error.to_string())?;
    // Before its mode: `chmod 600` would not help a folder.
    if metadata.is_dir() {
        return Err("it is a folder, not a file".to_owned());
    }
    let own = fs::metadata("/proc/self").map_or(metadata.uid(), |process| process.uid());
    if is_private(metadata.mode(), metadata.uid(), own) {
        return Ok(());
    }
    Err(format!("others may read it (mode {:o}): chmod 600 it", metadata.mode() & 0o777))
}

/// Whether a file with this mode and owner is private to a process of user `own`. Only the owner
/// may read it, except that a group may read files of root: systemd (`LoadCredential`) and
/// Kubernetes hand secrets to processes that way.
fn is_private(mode: u32, owner: u32, own: u32) -> bool {
    let others = if owner == 0 && own != 0 { 0o037 } else { 0o077 };
    mode & others == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_not_to_be_made_private() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(check(folder.path()), Err("it is a folder, not a file".to_owned()));
    }

    #[test]
    fn a_group_may_read_what_root_gave_it_and_nothing_else() {
        assert!(is_private(0o100_600, 1000, 1000) && is_private(0o100_600, 0, 0));
        assert!(!is_private(0o100_640, 1000, 1000) && !is_private(0o100_640, 0, 0));
        assert!(is_private(0o100_440, 0, 1000) && is_private(0o100_640, 0, 1000));
        assert!(!is_private(0o100_660, 0, 1000) && !is_private(0o100_644, 0, 1000));
        assert!(!is_private(0o100_604, 1000, 1000) && !is_private(0o100_640, 7, 1000));
    }
}

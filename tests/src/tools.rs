//! External programs that tests run: in `PATH`, or where `tests/run` unpacks them.
use std::path::PathBuf;

use crate::models::repository;

/// Folder, below the repository, where `tests/run` unpacks them.
const UNPACKED: &str = "target/tools/usr/bin";

/// Returns the path of program `name`, if it is installed.
#[must_use]
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([repository().join(UNPACKED)]);
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_in_path_are_found_and_others_are_not() {
        let shell = find("sh").unwrap();
        assert!(shell.is_absolute() && shell.ends_with("sh"), "{}", shell.display());
        assert_eq!(find("a-program-that-nobody-has"), None);
    }
}

//! The file of the cluster's secrets: read, and read again when it changes, so that a secret can be
//! replaced while everything runs. What cannot be used changes nothing.
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shared::wire::keyring::Keyring;
use zeroize::Zeroizing;

use crate::http::watch::{self, Watch};
use crate::private_file;

/// Reads the file.
///
/// # Errors
/// Why it cannot be used, without its name, and without anything that is in it.
pub fn read(file: &Path) -> Result<Keyring, String> {
    private_file::check(file)?;
    let bytes = std::fs::read(file).map(Zeroizing::new).map_err(|error| error.to_string())?;
    Keyring::read(&bytes).map_err(|error| error.to_string())
}

/// Reads the file, and looks at it every so often from then on, as long as the process runs.
///
/// # Errors
/// As [`read`]; also when the operating system gives no thread.
pub fn start(file: &Path, every: Duration) -> Result<Keyring, String> {
    let paths: [PathBuf; 1] = [file.to_owned()];
    // Before it is read: what changes meanwhile is read again.
    let watch = Watch::new(watch::stamps(&paths));
    let keyring = read(file)?;
    let used = Arc::new(keyring.clone());
    let thread = std::thread::Builder::new().name("cluster-secret".to_owned());
    let work = move || {
        let again = |used: &Arc<Keyring>| {
            let [path] = &paths;
            let secrets = read(path).map_err(|error| format!("{}: {error}", path.display()))?;
            used.replace(&secrets);
            Ok(())
        };
        let seen = Arc::downgrade(&used);
        watch::keep_current("cluster secrets", &paths, watch, every, &seen, again);
    };
    thread
        .spawn(work)
        .map_err(|error| format!("cannot start the thread that watches it: {error}"))?;
    Ok(keyring)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Instant;

    use super::*;

    fn write(path: &Path, text: &str, mode: u32) {
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, Permissions::from_mode(mode)).unwrap();
        fs::rename(&new, path).unwrap();
    }

    #[test]
    fn a_changed_file_is_used_and_one_that_cannot_be_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let [a, b] = ["a".repeat(40), "b".repeat(40)];
        write(&path, &a, 0o600);
        let keyring = start(&path, Duration::from_millis(20)).unwrap();
        let token = |text: &str| Keyring::read(text.as_bytes()).unwrap().first().token("t");
        let until = |what: &str, found: &dyn Fn() -> bool| {
            let began = Instant::now();
            while !found() {
                assert!(began.elapsed() < Duration::from_secs(20), "{what}");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        write(&path, &format!("{b}\n{a}\n"), 0o600);
        until("the new one", &|| keyring.first().token("t") == token(&b));
        assert!(keyring.verify_token("t", &token(&a)), "the old one is known still");
        for (text, mode) in [("short\n", 0o600), ("", 0o600), (a.as_str(), 0o644)] {
            write(&path, text, mode);
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(keyring.all().len(), 2, "{text:?} {mode:o}");
        }
        write(&path, &b, 0o600);
        until("the new one alone", &|| keyring.all().len() == 1);
        assert!(!keyring.verify_token("t", &token(&a)));
    }
}

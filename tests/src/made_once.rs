//! Files that several test programs make and use, such as compiled emulations.
use std::fs::File;
use std::path::Path;

/// Runs `make` unless `target` exists: one process and thread at a time, the others wait for it.
/// What `make` leaves at `target` must be complete at once, as a rename is, since a test that is
/// ended leaves what it was making.
///
/// # Errors
/// Those of `make`; a lock beside `target` that cannot be had; nothing at `target` in the end.
pub fn made_once(target: &Path, make: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    if target.exists() {
        return Ok(());
    }
    let path = target.with_added_extension("lock");
    let failed = |error| format!("{}: {error}", path.display());
    let lock = File::create(&path).map_err(failed)?;
    lock.lock().map_err(failed)?;
    if !target.exists() {
        make()?;
    }
    if target.exists() { Ok(()) } else { Err(format!("{} was not made", target.display())) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn all_have_it_and_one_made_it() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("made-0.5");
        let calls = AtomicU32::new(0);
        let make = || {
            calls.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            std::fs::write(&target, "").map_err(|error| error.to_string())
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    made_once(&target, make).unwrap();
                    assert!(target.exists());
                });
            }
        });
        assert_eq!(calls.into_inner(), 1);
    }

    #[test]
    fn who_fails_leaves_it_to_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("made");
        assert_eq!(made_once(&target, || Err("no".into())), Err("no".into()));
        assert!(made_once(&target, || Ok(())).unwrap_err().ends_with("made was not made"));
        let make = || std::fs::write(&target, "").map_err(|error| error.to_string());
        assert_eq!(made_once(&target, make), Ok(()));
    }
}

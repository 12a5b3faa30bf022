//! Fetching files of the hub that were not there when the worker joined, as those of adapters that
//! were loaded since. A thread of its own does it, so that whoever waits can report how far it is,
//! and can call it off however long the hub says nothing.
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use shared::hub::DownloadHandle;

/// Makes sure that files of the hub are there; called off by the handle.
pub(super) type Fetch = Box<dyn FnOnce(&Arc<DownloadHandle>) -> Result<(), String> + Send>;

/// Interval between looks at the progress.
const LOOK: Duration = Duration::from_millis(50);

/// A fetch that is called off when nobody waits for it any more.
struct Called(Arc<DownloadHandle>);

impl Drop for Called {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Waits for a fetch. `goes_on` is told of progress, and when there is none; it says whether the
/// files are still wanted.
///
/// # Errors
/// One sentence.
pub(super) fn wait(
    fetch: Fetch,
    goes_on: &mut dyn FnMut(Option<(u64, u64)>) -> bool,
) -> Result<(), String> {
    let handle = Arc::new(DownloadHandle::default());
    let (done, outcome) = mpsc::sync_channel(1);
    let called = Called(handle.clone());
    let thread = std::thread::Builder::new().name("fetch".to_owned());
    let spawned = thread.spawn(move || {
        let _ = done.send(fetch(&handle));
    });
    spawned.map_err(|error| format!("no thread to download with: {error}"))?;
    let mut last = (0, 0);
    loop {
        match outcome.recv_timeout(LOOK) {
            Ok(outcome) => return outcome,
            Err(RecvTimeoutError::Disconnected) => {
                return Err("the download panicked: this is a bug, see the worker's log".to_owned());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let progress = called.0.progress();
        let news = (progress != std::mem::replace(&mut last, progress)).then_some(progress);
        if !goes_on(news) {
            return Err("its files are not wanted any more".to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use super::*;

    #[test]
    fn an_outcome_is_passed_on() {
        let never = &mut |_: Option<(u64, u64)>| true;
        assert_eq!(wait(Box::new(|_| Ok(())), never), Ok(()));
        let error = wait(Box::new(|_| Err("no such adapter".to_owned())), never);
        assert_eq!(error, Err("no such adapter".to_owned()));
        let error = wait(Box::new(|_| panic!("on purpose")), never).unwrap_err();
        assert!(error.contains("panicked"), "{error}");
    }

    #[test]
    fn a_hub_that_says_nothing_keeps_nobody_and_is_no_progress() {
        let is_over = Arc::new(AtomicBool::new(false));
        let (over, began) = (is_over.clone(), Instant::now());
        let stuck: Fetch = Box::new(move |_| {
            // A read that nothing ends.
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        });
        let mut looks = 0;
        let outcome = wait(stuck, &mut |news| {
            assert_eq!(news, None, "nothing has come");
            looks += 1;
            looks < 3
        });
        assert!(outcome.unwrap_err().contains("not wanted"));
        assert!(began.elapsed() < Duration::from_secs(5));
        is_over.store(true, Ordering::Relaxed);
    }
}

//! Waiting for something with a bound: a test that waits for what never comes fails and says what
//! it waited for.
use std::time::{Duration, Instant};

/// Long enough for anything that a busy machine does at all.
pub const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);

/// Waits until `wanted` returns a value; `what` says what that means.
///
/// # Panics
/// When it does not within [`PATIENCE`].
pub async fn until<T>(what: &str, mut wanted: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = wanted().await {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain: {what}");
        tokio::time::sleep(POLL).await;
    }
}

//! Waiting for something with a bound: a test that waits for what never comes fails and says what
//! it waited for.
use std::time::{Duration, Instant};

/// Long enough for anything that a busy machine does at all.
pub const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);

/// Waits until `is_so` is true; `what` says what that means.
///
/// # Panics
/// When it is not within [`PATIENCE`].
pub async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain: {what}");
        tokio::time::sleep(POLL).await;
    }
}

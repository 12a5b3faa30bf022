//! Waiting for a condition, with a bound: a test whose condition never holds fails and says what it
//! waited for.
use std::time::{Duration, Instant};

/// Long enough for anything that a busy machine completes at all.
pub const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(5);
const POLL_MAX: Duration = Duration::from_millis(200);

/// Pause before the next look at something that has been waited for this long: a twentieth of that,
/// at least `min`, since looks share their cores with what they wait for.
#[must_use]
pub fn poll(waited: Duration, min: Duration) -> Duration {
    (waited / 20).clamp(min, POLL_MAX)
}

/// Waits until `wanted` returns a value; `what` describes it.
///
/// # Panics
/// If it does not within [`PATIENCE`].
pub async fn until<T>(what: &str, mut wanted: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = wanted().await {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain: {what}");
        tokio::time::sleep(poll(began.elapsed(), POLL)).await;
    }
}

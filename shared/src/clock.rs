//! Time as a value. Pure cores take `now: Duration`, the time since the process started; only
//! shells read a [`Clock`]. Times of different processes are never compared.
use std::fmt::Debug;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::mix::split_mix;

/// A monotonic clock that starts near zero when the process starts.
pub trait Clock: Send + Sync + Debug {
    /// Returns the time since this clock was made. Never goes back.
    fn now(&self) -> Duration;
}

/// Returns the wall-clock time since 1970, for people and for data that outlives a process.
#[must_use]
pub fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns a random wait of at most `most` before attempt number `attempt`; `seed` is a random
/// number of the process. It keeps processes that wait for the same thing from coming back at the
/// same moment.
#[must_use]
pub fn jittered(most: Duration, seed: u64, attempt: u64) -> Duration {
    most.mul_f64((split_mix(seed, attempt) >> 11) as f64 / (1u64 << 53) as f64)
}

/// The operating system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    started: Instant,
}

impl SystemClock {
    /// Starts a clock at zero.
    #[must_use]
    pub fn start() -> Self {
        Self { started: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

/// A clock that moves only when told to: for tests and simulation.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// Advances the clock by `step`.
    pub fn advance(&self, step: Duration) {
        let mut now = self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *now += step;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_is_spread_over_the_whole_wait() {
        let most = Duration::from_secs(8);
        for draw in
            [|n| jittered(Duration::from_secs(8), n, 1), |n| jittered(Duration::from_secs(8), 7, n)]
        {
            let mut eighths = [0; 8];
            for n in 0..8000 {
                let wait = draw(n);
                assert!(wait < most);
                eighths[wait.as_secs() as usize] += 1;
            }
            assert!(eighths.iter().all(|count| (850..1150).contains(count)), "{eighths:?}");
        }
        assert_eq!(jittered(Duration::ZERO, 1, 2), Duration::ZERO);
    }
}

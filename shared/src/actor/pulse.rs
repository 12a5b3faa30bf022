//! Whether a thread still runs its tasks. One that is stuck in a lock, an endless loop or a call
//! that never returns has no pulse, while the other threads of its process answer as ever.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Interval of beats.
const EVERY: Duration = Duration::from_millis(500);
/// A thread that is found silent may only not have had its turn yet, because the whole process
/// stood still and another of its threads went on first. If nothing else is wrong, it beats within
/// this time: twice the interval of beats.
pub const GOES_ON_WITHIN: Duration = Duration::from_secs(1);
/// In place of a time: it has not begun to beat.
const NEVER: u64 = u64::MAX;

/// The pulse of a thread. Clones share it.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<Beats>);

#[derive(Debug)]
struct Beats {
    start: Instant,
    /// When the last beat was, in milliseconds since `start`; [`NEVER`] before the first.
    last: AtomicU64,
}

impl Default for Pulse {
    fn default() -> Self {
        Self(Arc::new(Beats { start: Instant::now(), last: AtomicU64::new(NEVER) }))
    }
}

impl Pulse {
    /// A pulse whose last beat was this long ago, for tests of what watches one.
    #[doc(hidden)]
    #[must_use]
    pub fn silent_for(silence: Duration) -> Self {
        let start = Instant::now().checked_sub(silence).unwrap_or_else(Instant::now);
        Self(Arc::new(Beats { start, last: AtomicU64::new(0) }))
    }

    /// Beats once.
    pub fn beat(&self) {
        self.beat_at(self.0.start.elapsed());
    }

    /// Beats for ever, if the thread whose pulse it is runs this as one of its tasks.
    pub async fn keep(self) {
        loop {
            self.beat();
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Returns the time since the last beat; `None` before the first, because a thread may be busy
    /// for long until it runs tasks at all.
    #[must_use]
    pub fn silence(&self) -> Option<Duration> {
        self.silence_at(self.0.start.elapsed())
    }

    fn beat_at(&self, now: Duration) {
        let now = u64::try_from(now.as_millis()).unwrap_or(NEVER).min(NEVER - 1);
        self.0.last.store(now, Ordering::Relaxed);
    }

    fn silence_at(&self, now: Duration) -> Option<Duration> {
        let last = self.0.last.load(Ordering::Relaxed);
        (last != NEVER).then(|| now.saturating_sub(Duration::from_millis(last)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_from_the_last_beat_and_only_after_the_first() {
        let (pulse, second) = (Pulse::default(), Duration::from_secs(1));
        assert_eq!(pulse.silence_at(1000 * second), None, "it is still starting");
        let other = pulse.clone();
        other.beat_at(1000 * second);
        assert_eq!(pulse.silence_at(1000 * second), Some(Duration::ZERO));
        assert_eq!(pulse.silence_at(1007 * second), Some(7 * second));
        pulse.beat_at(1007 * second);
        assert_eq!(pulse.silence_at(1008 * second), Some(second));
    }

    #[test]
    fn a_silent_one_can_beat_again() {
        let pulse = Pulse::silent_for(Duration::from_secs(40));
        assert!(pulse.silence().is_some_and(|silence| silence >= Duration::from_secs(40)));
        pulse.beat();
        assert!(pulse.silence().is_some_and(|silence| silence < Duration::from_secs(40)));
    }

    #[tokio::test]
    async fn a_thread_that_runs_its_tasks_has_a_pulse() {
        let pulse = Pulse::default();
        let beating = tokio::spawn(pulse.clone().keep());
        tokio::task::yield_now().await;
        assert!(pulse.silence().is_some());
        // The thread runs nothing meanwhile.
        std::thread::sleep(EVERY);
        assert!(pulse.silence().is_some_and(|silence| silence >= EVERY - EVERY / 10));
        beating.abort();
    }
}

//! Retries where there was no room, for many parts of one request: one part retries, the others
//! wait for its result. So a full queue is asked only as often as it suggests, however many parts
//! wait, and once it has room again, all of them ask at once.
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};

/// State shared by the parts of one request.
#[derive(Debug)]
pub(super) struct Again {
    /// Held by the part that retries on behalf of all.
    turn: Mutex<()>,
    /// How often the holder of the turn found room.
    found: AtomicU64,
    /// No part retries after this.
    until: Instant,
}

impl Again {
    pub(super) fn new(until: Instant) -> Self {
        Self { turn: Mutex::new(()), found: AtomicU64::new(0), until }
    }

    /// Attempts something until it succeeds, fails for good, or time runs out. `pause` returns the
    /// delay after which a failed attempt may be retried, if it may.
    ///
    /// # Errors
    /// The last attempt's.
    pub(super) async fn ask<T, E>(
        &self,
        attempt: impl AsyncFn() -> Result<T, E>,
        pause: impl Fn(&E) -> Option<Duration>,
    ) -> Result<T, E> {
        let mut turn = None;
        loop {
            let before = self.found.load(Ordering::Relaxed);
            let error = match attempt().await {
                Ok(found) => {
                    if turn.is_some() {
                        self.found.fetch_add(1, Ordering::Relaxed);
                    }
                    return Ok(found);
                }
                Err(error) => error,
            };
            let Some(pause) = pause(&error) else { return Err(error) };
            if turn.is_none() {
                turn = timeout_at(self.until, self.turn.lock()).await.ok();
                if turn.is_some() && self.found.load(Ordering::Relaxed) != before {
                    turn = None;
                    continue;
                }
            }
            let now = Instant::now();
            if turn.is_none() || now >= self.until {
                return Err(error);
            }
            sleep_until((now + pause).min(self.until)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use futures_util::future::join_all;

    use super::*;

    const PAUSE: Duration = Duration::from_millis(100);
    const PARTS: usize = 200;

    fn full(error: &&str) -> Option<Duration> {
        (*error == "full").then_some(PAUSE)
    }

    #[tokio::test]
    async fn one_asks_for_all_and_when_there_is_room_all_ask() {
        let again = Again::new(Instant::now() + Duration::from_secs(60));
        let (asked, has_room) = (AtomicUsize::new(0), AtomicBool::new(false));
        let attempt = async || {
            asked.fetch_add(1, Ordering::Relaxed);
            // What is counted before there is room fails, however long it then takes.
            let found = has_room.load(Ordering::Relaxed);
            tokio::task::yield_now().await;
            if found { Ok(()) } else { Err("full") }
        };
        let asks = join_all((0..PARTS).map(|_| again.ask(attempt, full)));
        let room = async {
            let began = Instant::now();
            let has_asked_again = || asked.load(Ordering::Relaxed) >= PARTS + 4;
            while !has_asked_again() && began.elapsed() < 200 * PAUSE {
                tokio::time::sleep(PAUSE / 10).await;
            }
            has_room.store(true, Ordering::Relaxed);
            (asked.load(Ordering::Relaxed) - PARTS, Instant::now())
        };
        let (answers, (repeated, since)) = tokio::join!(asks, room);
        assert!(answers.iter().all(Result::is_ok));
        assert!((4..10).contains(&repeated), "each once, then one of them: {repeated}");
        assert_eq!(asked.load(Ordering::Relaxed), PARTS + repeated + PARTS);
        // In turns, it would take twice as long.
        assert!(since.elapsed() < 100 * PAUSE, "they do not take turns: {:?}", since.elapsed());
    }

    #[tokio::test]
    async fn nobody_waits_for_longer_than_the_time_that_there_is_nor_where_it_is_of_no_use() {
        let again = Again::new(Instant::now() + 3 * PAUSE);
        let began = Instant::now();
        let never = async || Err::<(), _>("full");
        let answers = join_all((0..5).map(|_| again.ask(never, full))).await;
        assert!(answers.iter().all(|answer| *answer == Err("full")));
        assert!(began.elapsed() >= 3 * PAUSE);
        let again = Again::new(Instant::now() + Duration::from_secs(60));
        assert_eq!(again.ask(async || Err::<(), _>("broken"), full).await, Err("broken"));
    }
}

//! The trait of everything that takes the merged totals, and the timer that calls it periodically.
use std::time::Duration;

use shared::metrics::Merged;

/// Takes merged totals. Adding one needs no change of engine code.
pub trait StatLogger: std::fmt::Debug + Send {
    /// Takes the totals at `now`. Called by timer even when nothing happens: rates must fall to 0
    /// without a step.
    fn log(&mut self, now: Duration, merged: &Merged);

    /// Starts anew at `now`: what is in `merged` happened in no interval of this logger, but was
    /// counted by an earlier coordinator.
    fn begin(&mut self, now: Duration, merged: &Merged) {
        let _ = (now, merged);
    }
}

/// Calls its loggers once per interval.
#[derive(Debug)]
pub struct StatLoggers {
    loggers: Vec<Box<dyn StatLogger>>,
    interval: Duration,
    next: Duration,
}

/// Default interval of the loggers.
pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(10);

impl StatLoggers {
    /// Calls `loggers` every `interval`, first at `now + interval`.
    #[must_use]
    pub fn new(loggers: Vec<Box<dyn StatLogger>>, interval: Duration, now: Duration) -> Self {
        Self { loggers, interval, next: now.saturating_add(interval) }
    }

    /// Returns when [`StatLoggers::tick`] next has something to do.
    #[must_use]
    pub fn next(&self) -> Duration {
        self.next
    }

    /// Starts a new interval for every logger.
    pub fn begin(&mut self, now: Duration, merged: &Merged) {
        self.next = now.saturating_add(self.interval);
        for logger in &mut self.loggers {
            logger.begin(now, merged);
        }
    }

    /// Calls every logger if the interval is over; `merged` is only computed then. Missed intervals
    /// are not made up for.
    pub fn tick(&mut self, now: Duration, merged: impl FnOnce() -> Merged) {
        if now < self.next || self.loggers.is_empty() {
            return;
        }
        self.next = now.saturating_add(self.interval);
        let merged = merged();
        for logger in &mut self.loggers {
            logger.log(now, &merged);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    #[derive(Debug)]
    struct Tell(Sender<Duration>);

    impl StatLogger for Tell {
        fn log(&mut self, now: Duration, _merged: &Merged) {
            let _ = self.0.send(now);
        }
    }

    #[test]
    fn every_interval_once_and_not_made_up_for() {
        let (sender, calls) = channel();
        let seconds = Duration::from_secs;
        let mut loggers = StatLoggers::new(vec![Box::new(Tell(sender))], seconds(10), seconds(5));
        for now in [5, 14, 15, 16, 24, 60, 61, 69, 70] {
            loggers.tick(seconds(now), Merged::default);
        }
        drop(loggers);
        let calls: Vec<_> = calls.iter().map(|now| now.as_secs()).collect();
        assert_eq!(calls, [15, 60, 70]);
    }
}

//! PURE: how fast a replica completes requests, and hence when one that finds no room may retry.
use std::time::Duration;

use shared::ids::RequestId;
use shared::mix::mix;

/// Length of the window looked at, in seconds.
const WINDOW_S: u64 = 30;
/// Longest wait asked for; the shortest is a second.
const WAIT_MAX_S: u64 = 60;

/// Recently ended requests, by second.
#[derive(Clone, Copy, Debug)]
pub struct Completions {
    /// When the first request began to run of those that did since the last end.
    unended: Option<u64>,
    /// Second of the clock, and the number of requests that ended in it.
    seconds: [(u64, u64); WINDOW_S as usize],
}

impl Default for Completions {
    fn default() -> Self {
        Self { unended: None, seconds: [(0, 0); WINDOW_S as usize] }
    }
}

impl Completions {
    /// A request begins to run.
    pub fn began(&mut self, now: Duration) {
        self.unended.get_or_insert(now.as_secs());
    }

    /// A request that had begun to run has ended.
    pub fn ended(&mut self, now: Duration) {
        self.unended = None;
        let second = now.as_secs();
        let bucket = &mut self.seconds[(second % WINDOW_S) as usize];
        if bucket.0 != second {
            *bucket = (second, 0);
        }
        bucket.1 += 1;
    }

    /// Returns the seconds after which a request may retry while `waiting` others wait: as long as
    /// these take at the recent pace, from 1 to 60. If none has ended lately, the first one may
    /// take as long again as it has run. Each request is told up to a quarter more or less, so
    /// that requests refused together do not retry together.
    #[must_use]
    pub fn retry_after_s(&self, now: Duration, waiting: u64, request: RequestId) -> u32 {
        let now = now.as_secs();
        let recent = self.seconds.iter().filter(|(second, _)| second + WINDOW_S > now);
        let recent = recent.filter(|(_, ended)| *ended > 0);
        let (ended, since) = recent
            .fold((0, now), |(sum, since), (second, ended)| (sum + ended, since.min(*second)));
        let took = now.saturating_sub(since) + 1;
        let wait = match ended {
            0 => self.unended.map_or(WAIT_MAX_S, |began| now.saturating_sub(began).min(WAIT_MAX_S)),
            ended => waiting.saturating_mul(took).div_ceil(ended).min(WAIT_MAX_S),
        };
        // 75 to 125 percent.
        let share = 75 + mix(request.0, &[WINDOW_S as u32]) % 51;
        (wait * share).div_ceil(100).clamp(1, WAIT_MAX_S) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Whether many requests are told to wait within this range, and not all for equally long.
    fn told(completions: &Completions, now: u64, waiting: u64, range: (u32, u32)) -> bool {
        let told = (0..200).map(|id| completions.retry_after_s(at(now), waiting, RequestId(id)));
        let (least, most) = (told.clone().min().unwrap(), told.max().unwrap());
        range.0 <= least && most <= range.1 && 2 * (most - least) >= range.1 - range.0
    }

    #[test]
    fn what_waits_is_divided_by_the_pace_of_late() {
        let mut completions = Completions::default();
        assert!(told(&completions, 100, 5, (45, 60)), "nothing is known");
        completions.began(at(100));
        completions.began(at(107));
        assert!(told(&completions, 100, 5, (1, 1)), "one has just begun");
        assert!(told(&completions, 108, 5, (6, 10)), "one has run for 8 s");
        assert!(told(&completions, 170, 5, (45, 60)), "and for long");
        // Ten a second for 20 s.
        for second in 100..120 {
            (0..10).for_each(|_| completions.ended(at(second)));
        }
        assert!(told(&completions, 119, 200, (15, 25)), "20 s");
        assert!(told(&completions, 119, 80, (6, 10)), "8 s");
        assert!(told(&completions, 119, 1, (1, 2)));
        assert!(told(&completions, 119, 1_000_000, (45, 60)));
        // The last of them were 29 s ago; the others are forgotten.
        assert!(told(&completions, 148, 10, (23, 38)), "10 in 30 s");
        assert!(told(&completions, 149, 10, (45, 60)), "none in 30 s");
        completions.began(at(141));
        assert!(told(&completions, 149, 10, (6, 10)), "none, but one has begun");
        // A burst after a long rest is a pace of its own.
        (0..50).for_each(|_| completions.ended(at(500)));
        assert!(told(&completions, 500, 500, (8, 13)), "10 s");
    }
}

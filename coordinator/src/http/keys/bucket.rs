//! PURE: a token bucket: so many of something per minute, requests or tokens, in a burst after a
//! pause, then evenly. What was taken beyond it is made up for before more may begin.
use std::time::Duration;

/// One of what is counted, in a bucket's units: with these, a microsecond brings as many units as
/// a minute brings of what is counted.
const ONE: u64 = 60_000_000;

/// See the module's documentation. Stores what is missing from full, so a new one is full.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    /// More than the bucket holds, if more was taken.
    missing: u64,
    at: Duration,
}

/// What a bucket holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// Whole ones that may be taken.
    pub(super) count: u64,
    /// Time until it is full.
    pub(super) until_full: Duration,
}

fn full(per_minute: u32) -> u64 {
    u64::from(per_minute.max(1)) * ONE
}

impl Bucket {
    fn refill(&mut self, now: Duration, per_minute: u32) {
        let passed = u64::try_from(now.saturating_sub(self.at).as_micros()).unwrap_or(u64::MAX);
        self.missing = self.missing.saturating_sub(passed.saturating_mul(per_minute.max(1).into()));
        self.at = self.at.max(now);
    }

    /// Whether there is one to take.
    ///
    /// # Errors
    /// How long until there is.
    pub(super) fn check(&mut self, now: Duration, per_minute: u32) -> Result<(), Duration> {
        self.refill(now, per_minute);
        match (self.missing.saturating_add(ONE)).saturating_sub(full(per_minute)) {
            0 => Ok(()),
            over => Err(Duration::from_micros(over.div_ceil(per_minute.max(1).into()))),
        }
    }

    /// Takes so many, whether they are there or not.
    pub(super) fn take(&mut self, now: Duration, per_minute: u32, count: u64) {
        self.refill(now, per_minute);
        self.missing = self.missing.saturating_add(count.saturating_mul(ONE));
    }

    /// Puts back what was taken in vain.
    pub(super) fn put_back(&mut self, count: u64) {
        self.missing = self.missing.saturating_sub(count.saturating_mul(ONE));
    }

    /// What it holds.
    pub(super) fn left(&mut self, now: Duration, per_minute: u32) -> Left {
        self.refill(now, per_minute);
        let count = full(per_minute).saturating_sub(self.missing) / ONE;
        let wait = self.missing.div_ceil(per_minute.max(1).into());
        Left { count, until_full: Duration::from_micros(wait) }
    }

    /// The rate is another from now on: what was taken at the old one is missing at most once.
    pub(super) fn forgive(&mut self, per_minute: u32) {
        self.missing = self.missing.min(full(per_minute));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(100);

    fn take_one(bucket: &mut Bucket, now: Duration, per_minute: u32) -> Result<(), Duration> {
        bucket.check(now, per_minute)?;
        bucket.take(now, per_minute, 1);
        Ok(())
    }

    #[test]
    fn a_bucket_gives_what_a_minute_has_and_then_its_rate() {
        let seconds = Duration::from_secs_f64;
        let mut bucket = Bucket::default();
        for _ in 0..30 {
            assert_eq!(take_one(&mut bucket, START, 30), Ok(()));
        }
        assert_eq!(take_one(&mut bucket, START, 30), Err(seconds(2.0)));
        assert_eq!(take_one(&mut bucket, seconds(101.5), 30), Err(seconds(0.5)));
        assert_eq!(take_one(&mut bucket, seconds(102.0), 30), Ok(()));
        assert_eq!(take_one(&mut bucket, seconds(102.0), 30), Err(seconds(2.0)));
        // Never more than a minute's worth, however long the pause.
        let mut taken = 0;
        while take_one(&mut bucket, seconds(1e6), 30).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, 30);
        // In any minute after the first burst, no more than the rate start.
        let mut bucket = Bucket::default();
        let begun: u32 = (0..600)
            .map(|tenth| {
                let now = seconds(f64::from(tenth) / 10.0);
                u32::from(take_one(&mut bucket, now, 60).is_ok())
            })
            .sum();
        assert_eq!(begun, 60 + 59);
        // A clock that goes back adds nothing.
        assert!(take_one(&mut bucket, seconds(1.0), 60).is_err());
    }

    #[test]
    fn what_was_taken_beyond_it_is_made_up_for() {
        let mut bucket = Bucket::default();
        let after = |seconds| START + Duration::from_secs(seconds);
        let minute = Duration::from_secs(60);
        assert_eq!(bucket.left(START, 600), Left { count: 600, until_full: Duration::ZERO });
        bucket.take(START, 600, 150);
        assert_eq!(bucket.left(START, 600), Left { count: 450, until_full: minute / 4 });
        bucket.take(START, 600, 1650);
        // Two minutes' worth are owed: after those it is as empty as after a burst.
        assert_eq!(bucket.left(START, 600), Left { count: 0, until_full: 3 * minute });
        assert_eq!(bucket.check(START, 600), Err(2 * minute + Duration::from_millis(100)));
        assert!(bucket.check(after(120), 600).is_err());
        assert_eq!(bucket.check(after(121), 600), Ok(()));
        assert_eq!(bucket.left(after(121), 600).count, 10);
        bucket.put_back(590);
        assert_eq!(bucket.left(after(121), 600), Left { count: 600, until_full: Duration::ZERO });
        // No sum of what is taken overflows.
        bucket.take(after(121), u32::MAX, u64::MAX);
        bucket.take(after(121), 1, u64::MAX);
        assert!(bucket.check(after(121), u32::MAX).is_err());
        // Another rate does not make anybody wait for more than a minute.
        bucket.forgive(600);
        assert_eq!(bucket.check(after(121), 600), Err(Duration::from_millis(100)));
    }
}

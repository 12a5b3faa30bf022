//! What the owner of an API key has under way, and may begin.
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use actix_web::HttpResponse;

use super::super::body::{Companion, accompanied};
use super::super::error::ApiError;

/// How much the owner of a key may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Requests under way at a time.
    pub requests: Option<u32>,
    /// Requests begun in a minute; so many at once after a rest.
    pub per_minute: Option<u32>,
}

/// The owner of a key.
#[derive(Debug)]
pub(super) struct Account {
    /// Of the key.
    pub(super) hash: [u8; 32],
    limits: KeyLimits,
    used: Arc<Used>,
}

/// What is used of it; the same when the file of keys is read again.
#[derive(Debug, Default)]
struct Used {
    requests: AtomicU32,
    bucket: Mutex<Bucket>,
}

/// PURE: requests that may begin, filled with time; what is missing of a full bucket.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// Sixty-millionths of requests: microseconds times requests in a minute.
    missing: u64,
    at: Duration,
}

/// What one request is in a bucket.
const ONE: u64 = 60_000_000;

impl Bucket {
    /// Takes one request where so many may begin in a minute.
    ///
    /// # Errors
    /// How long until there is one.
    fn take(&mut self, now: Duration, per_minute: u32) -> Result<(), Duration> {
        let rate = u64::from(per_minute.max(1));
        let passed = u64::try_from(now.saturating_sub(self.at).as_micros()).unwrap_or(u64::MAX);
        self.missing = self.missing.saturating_sub(passed.saturating_mul(rate));
        self.at = self.at.max(now);
        let full = rate * ONE;
        // A lower rate than before may have come with another file.
        self.missing = self.missing.min(full);
        let over = (self.missing + ONE).saturating_sub(full);
        if over > 0 {
            return Err(Duration::from_micros(over.div_ceil(rate)));
        }
        self.missing += ONE;
        Ok(())
    }
}

/// Why the owner of a key may not begin a request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// So many are under way.
    Requests(u32),
    /// So many have begun within a minute; there is a place after some time.
    PerMinute(u32, Duration),
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Requests(max) => Self::key_limit(
                format!("{max} requests of this API key are in progress, which is its limit"),
                Duration::from_secs(1),
            ),
            Refusal::PerMinute(max, wait) => Self::key_limit(
                format!(
                    "this API key has begun {max} requests within a minute, which is its limit"
                ),
                wait,
            ),
        }
    }
}

impl Account {
    /// Of a key with these limits; `before` is what was known of it.
    pub(super) fn like(hash: [u8; 32], limits: KeyLimits, before: Option<&Self>) -> Self {
        let used = before.map(|before| before.used.clone()).unwrap_or_default();
        Self { hash, limits, used }
    }

    /// Begins a request.
    ///
    /// # Errors
    /// [`Refusal`].
    pub(super) fn enter(&self, now: Duration) -> Result<Turn, Refusal> {
        let before = self.used.requests.fetch_add(1, Ordering::Relaxed);
        let turn = Turn(self.used.clone());
        if let Some(max) = self.limits.requests
            && before >= max
        {
            return Err(Refusal::Requests(max));
        }
        if let Some(max) = self.limits.per_minute {
            let mut bucket = self.used.bucket.lock().unwrap_or_else(PoisonError::into_inner);
            bucket.take(now, max).map_err(|wait| Refusal::PerMinute(max, wait))?;
        }
        Ok(turn)
    }
}

/// A request under way, until this is dropped.
#[derive(Debug)]
pub struct Turn(Arc<Used>);

impl Turn {
    /// A response whose request is under way until its body has been handed over whole, or dropped.
    #[must_use]
    pub fn until_sent(self, response: HttpResponse) -> HttpResponse {
        response.map_body(|_, body| accompanied(body, self))
    }
}

impl Companion for Turn {}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_are_under_way_and_no_more() {
        let limits = KeyLimits { requests: Some(2), per_minute: None };
        let account = Account::like([1; 32], limits, None);
        let (first, second) = (account.enter(Duration::ZERO), account.enter(Duration::ZERO));
        assert!(first.is_ok() && second.is_ok());
        assert_eq!(account.enter(Duration::ZERO).unwrap_err(), Refusal::Requests(2));
        drop(first);
        assert!(account.enter(Duration::ZERO).is_ok(), "what was refused took no place");
        // The file of keys is read again, with a lower bound.
        let limits = KeyLimits { requests: Some(1), per_minute: None };
        let again = Account::like([1; 32], limits, Some(&account));
        assert_eq!(again.enter(Duration::ZERO).unwrap_err(), Refusal::Requests(1));
        drop(second);
        assert!(again.enter(Duration::ZERO).is_ok());
    }

    #[test]
    fn a_bucket_gives_what_a_minute_has_and_then_its_rate() {
        let seconds = Duration::from_secs_f64;
        let mut bucket = Bucket::default();
        for _ in 0..30 {
            assert_eq!(bucket.take(seconds(100.0), 30), Ok(()));
        }
        assert_eq!(bucket.take(seconds(100.0), 30), Err(seconds(2.0)));
        assert_eq!(bucket.take(seconds(101.5), 30), Err(seconds(0.5)));
        assert_eq!(bucket.take(seconds(102.0), 30), Ok(()));
        assert_eq!(bucket.take(seconds(102.0), 30), Err(seconds(2.0)));
        // Never more than a minute's, however long the rest.
        let mut taken = 0;
        while bucket.take(seconds(1e6), 30).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, 30);
        // Over any minute behind the first burst no more than the rate begins.
        let mut bucket = Bucket::default();
        let begun: u32 = (0..600)
            .map(|tenth| u32::from(bucket.take(seconds(f64::from(tenth) / 10.0), 60).is_ok()))
            .sum();
        assert_eq!(begun, 60 + 59);
        // A clock that goes back gives nothing.
        assert!(bucket.take(seconds(1.0), 60).is_err());
    }
}

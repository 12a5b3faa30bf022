//! What the owner of an API key has under way, and may start.
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use actix_web::HttpResponse;

use super::super::body::{Companion, accompanied};
use super::super::error::ApiError;

/// Limits of a key's owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Maximum number of requests under way.
    pub requests: Option<u32>,
    /// Requests started per minute; after a pause, this many at once.
    pub per_minute: Option<u32>,
}

/// The owner of a key.
#[derive(Debug)]
pub(super) struct Account {
    /// Hash of the key.
    pub(super) hash: [u8; 32],
    limits: KeyLimits,
    used: Arc<Used>,
}

/// Usage of a key; kept when the file of keys is reread.
#[derive(Debug, Default)]
struct Used {
    requests: AtomicU32,
    bucket: Mutex<Bucket>,
}

/// PURE: token bucket of requests that may start, refilled over time; stores what is missing from
/// full.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// In sixty-millionths of a request: microseconds times requests per minute.
    missing: u64,
    at: Duration,
}

/// One request, in units of a bucket.
const ONE: u64 = 60_000_000;

impl Bucket {
    /// Takes one request at a rate of so many per minute.
    ///
    /// # Errors
    /// How long until one is available.
    fn take(&mut self, now: Duration, per_minute: u32) -> Result<(), Duration> {
        let rate = u64::from(per_minute.max(1));
        let passed = u64::try_from(now.saturating_sub(self.at).as_micros()).unwrap_or(u64::MAX);
        self.missing = self.missing.saturating_sub(passed.saturating_mul(rate));
        self.at = self.at.max(now);
        let full = rate * ONE;
        // A reread file may have lowered the rate.
        self.missing = self.missing.min(full);
        let over = (self.missing + ONE).saturating_sub(full);
        if over > 0 {
            return Err(Duration::from_micros(over.div_ceil(rate)));
        }
        self.missing += ONE;
        Ok(())
    }
}

/// Why the owner of a key may not start a request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// So many are under way.
    Requests(u32),
    /// So many have started within a minute; the next may start after this time.
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
    /// Makes the account of a key with these limits, keeping the usage of `before`.
    pub(super) fn like(hash: [u8; 32], limits: KeyLimits, before: Option<&Self>) -> Self {
        let used = before.map(|before| before.used.clone()).unwrap_or_default();
        Self { hash, limits, used }
    }

    /// Starts a request.
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
    /// Keeps the request under way until the response's body has been sent whole or dropped.
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
        // The file of keys is reread, with a lower bound.
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
        // Never more than a minute's worth, however long the pause.
        let mut taken = 0;
        while bucket.take(seconds(1e6), 30).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, 30);
        // In any minute after the first burst, no more than the rate start.
        let mut bucket = Bucket::default();
        let begun: u32 = (0..600)
            .map(|tenth| u32::from(bucket.take(seconds(f64::from(tenth) / 10.0), 60).is_ok()))
            .sum();
        assert_eq!(begun, 60 + 59);
        // A clock that goes back adds nothing.
        assert!(bucket.take(seconds(1.0), 60).is_err());
    }
}

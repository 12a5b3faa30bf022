//! What the owner of an API key has under way, and may start.
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use actix_web::HttpResponse;
use shared::clock::Clock;

use super::super::body::{Companion, accompanied};
use super::super::error::ApiError;
use super::bucket::{Bucket, Left};

/// Limits of a key's owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Maximum number of requests under way.
    pub requests: Option<u32>,
    /// Requests started per minute; after a pause, this many at once.
    pub per_minute: Option<u32>,
    /// Tokens per minute, of prompts and output together; after a pause, this many at once. A
    /// request may start as long as any are left, and what it takes beyond them is made up for.
    pub tokens_per_minute: Option<u32>,
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
    starts: Mutex<Bucket>,
    tokens: Mutex<Bucket>,
    /// The present limit of tokens, also for requests that began under another.
    tokens_per_minute: AtomicU32,
}

fn locked(bucket: &Mutex<Bucket>) -> MutexGuard<'_, Bucket> {
    bucket.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why the owner of a key may not start a request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// So many are under way.
    Requests(u32),
    /// So many have started within a minute; the next may start after this time.
    PerMinute(u32, Duration),
    /// So many tokens were used within a minute; there is one again after this time.
    Tokens(u32, Duration),
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
            Refusal::Tokens(max, wait) => Self::key_limit(
                format!(
                    "this API key has used {max} tokens within a minute, which is its limit; \
                     prompts and answers count"
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
        if let Some(before) = before {
            for (bucket, old, new) in [
                (&used.starts, before.limits.per_minute, limits.per_minute),
                (&used.tokens, before.limits.tokens_per_minute, limits.tokens_per_minute),
            ] {
                if let Some(new) = new.filter(|_| old != new) {
                    locked(bucket).forgive(new);
                }
            }
        }
        if let Some(present) = limits.tokens_per_minute {
            used.tokens_per_minute.store(present, Ordering::Relaxed);
        }
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
        if let Some(max) = self.limits.tokens_per_minute {
            let checked = locked(&self.used.tokens).check(now, max);
            checked.map_err(|wait| Refusal::Tokens(max, wait))?;
        }
        if let Some(max) = self.limits.per_minute {
            let mut bucket = locked(&self.used.starts);
            bucket.check(now, max).map_err(|wait| Refusal::PerMinute(max, wait))?;
            bucket.take(now, max, 1);
        }
        Ok(turn)
    }

    /// The limits per minute that it has: the name of what is counted, the limit, what is left.
    pub(super) fn rates(&self, now: Duration) -> impl Iterator<Item = (&'static str, u32, Left)> {
        let rates = [
            ("requests", self.limits.per_minute, &self.used.starts),
            ("tokens", self.limits.tokens_per_minute, &self.used.tokens),
        ];
        let rate = move |(name, max, bucket): (_, Option<u32>, &Mutex<Bucket>)| {
            max.map(|max| (name, max, locked(bucket).left(now, max)))
        };
        rates.into_iter().filter_map(rate)
    }
}

/// Counts the tokens of a request against its key's limit. Clones count together.
#[derive(Clone)]
pub struct Meter {
    used: Arc<Used>,
    /// What this request took and did not put back.
    taken: Arc<AtomicU64>,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("used", &self.used).finish_non_exhaustive()
    }
}

impl Meter {
    /// For a request of an account; `None` if its tokens have no limit.
    pub(super) fn of(account: &Account, clock: &Arc<dyn Clock>) -> Option<Self> {
        account.limits.tokens_per_minute?;
        Some(Self { used: account.used.clone(), taken: Arc::default(), clock: clock.clone() })
    }

    /// So many tokens were used.
    pub fn take(&self, tokens: u64) {
        let per_minute = self.used.tokens_per_minute.load(Ordering::Relaxed);
        self.taken.fetch_add(tokens, Ordering::Relaxed);
        locked(&self.used.tokens).take(self.clock.now(), per_minute, tokens);
    }

    /// Nothing came of so many.
    pub fn put_back(&self, tokens: u64) {
        let less = |taken: u64| Some(taken.saturating_sub(tokens));
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        // Nothing is put back twice.
        locked(&self.used.tokens).put_back(tokens.min(taken.unwrap_or(0)));
    }

    /// Nothing came of the whole request.
    pub fn put_back_all(&self) {
        let tokens = self.taken.swap(0, Ordering::Relaxed);
        locked(&self.used.tokens).put_back(tokens);
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
        let limits = KeyLimits { requests: Some(2), ..KeyLimits::default() };
        let account = Account::like([1; 32], limits, None);
        let (first, second) = (account.enter(Duration::ZERO), account.enter(Duration::ZERO));
        assert!(first.is_ok() && second.is_ok());
        assert_eq!(account.enter(Duration::ZERO).unwrap_err(), Refusal::Requests(2));
        drop(first);
        assert!(account.enter(Duration::ZERO).is_ok(), "what was refused took no place");
        // The file of keys is reread, with a lower bound.
        let limits = KeyLimits { requests: Some(1), ..KeyLimits::default() };
        let again = Account::like([1; 32], limits, Some(&account));
        assert_eq!(again.enter(Duration::ZERO).unwrap_err(), Refusal::Requests(1));
        drop(second);
        assert!(again.enter(Duration::ZERO).is_ok());
    }

    #[test]
    fn a_request_puts_back_what_it_took_itself_and_once() {
        let limits = KeyLimits { tokens_per_minute: Some(60), ..KeyLimits::default() };
        let clock: Arc<dyn Clock> = Arc::new(shared::clock::ManualClock::default());
        let account = Account::like([1; 32], limits, None);
        let left = || account.rates(Duration::ZERO).map(|rate| rate.2.count).next();
        let (other, meter) = (Meter::of(&account, &clock), Meter::of(&account, &clock));
        let (other, meter) = (other.unwrap(), meter.unwrap());
        other.take(10);
        for tokens in [5, 7, 9] {
            meter.clone().take(tokens);
        }
        assert_eq!(left(), Some(29));
        meter.put_back(9);
        meter.put_back_all();
        assert_eq!(left(), Some(50));
        meter.put_back_all();
        meter.put_back(7);
        assert_eq!(left(), Some(50));
    }

    #[test]
    fn a_request_that_goes_on_fills_the_bucket_at_the_present_rate() {
        let of = |rate| KeyLimits { tokens_per_minute: Some(rate), ..KeyLimits::default() };
        let clock = Arc::new(shared::clock::ManualClock::default());
        let shared: Arc<dyn Clock> = clock.clone();
        let account = Account::like([1; 32], of(60_000), None);
        let stream = Meter::of(&account, &shared).unwrap();
        stream.take(60_000);
        let lowered = Account::like([1; 32], of(60), Some(&account));
        Meter::of(&lowered, &shared).unwrap().take(61);
        for _ in 0..10 {
            clock.advance(Duration::from_millis(100));
            stream.take(1);
        }
        let refused = lowered.enter(clock.now()).unwrap_err();
        assert!(matches!(refused, Refusal::Tokens(60, wait) if wait >= Duration::from_secs(9)));
    }
}

//! API keys: who may use `/v1`, if that is restricted, and how much of it at a time.
//!
//! - `file`: the file of keys, reread when it changes
//! - `account`: what the owner of a key has under way, and may start
//! - `bucket`: so many of something per minute
//! - `rates`: headers that tell what is left
mod account;
mod bucket;
mod file;
mod rates;

use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{AUTHORIZATION, HeaderMap, HeaderName};
use actix_web::middleware::Next;
use actix_web::web::Data;
use actix_web::{Error, HttpMessage as _, HttpRequest, ResponseError as _};
use sha2::{Digest as _, Sha256};
use shared::clock::since_1970;
use shared::metrics::labels::RejectReason;

use self::account::Account;
pub use self::account::{KeyLimits, Meter, Refusal, Turn};
pub use self::file::{KeyFile, KeyFileError};
pub(super) use self::rates::NAMES as RATE_HEADERS;
use super::error::ApiError;
use super::state::AppState;
use super::{access, adapters, admin, messages};
use crate::metrics::FrontendStats;

/// Where Anthropic's clients say their key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The known keys; without any, everybody is admitted. Only their hashes are kept, and nothing
/// about them is ever shown. Clones share them.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<Keys>);

#[derive(Default)]
struct Keys {
    accounts: RwLock<Vec<Arc<Account>>>,
    /// Counts reloads of the file.
    stats: OnceLock<FrontendStats>,
}

/// A key and its owner's limits.
#[derive(Clone, Copy)]
pub struct ApiKey {
    hash: [u8; 32],
    limits: KeyLimits,
}

/// A key that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiKeyError {
    /// It has no characters.
    #[error("an API key is empty")]
    Empty,
    /// No client can send it.
    #[error("an API key contains a space or a character that is not printable ASCII")]
    Unprintable,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKeys").field("number", &self.accounts().len()).finish()
    }
}

impl ApiKey {
    /// Makes a key whose owner has these limits.
    ///
    /// # Errors
    /// [`ApiKeyError`], which does not show the key.
    pub fn new(key: &str, limits: KeyLimits) -> Result<Self, ApiKeyError> {
        match key {
            "" => Err(ApiKeyError::Empty),
            key if !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Err(ApiKeyError::Unprintable)
            }
            key => Ok(Self { hash: Sha256::digest(key.as_bytes()).into(), limits }),
        }
    }
}

impl ApiKeys {
    /// Makes a set of keys without limits.
    ///
    /// # Errors
    /// [`ApiKeyError`], which does not show the key.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<Self, ApiKeyError> {
        let keys = keys.into_iter().map(|key| ApiKey::new(key, KeyLimits::default()));
        keys.collect::<Result<Vec<_>, _>>().map(Self::of)
    }

    /// Makes a set of keys; if one is given twice, the last limits hold.
    #[must_use]
    pub fn of(keys: impl IntoIterator<Item = ApiKey>) -> Self {
        let found = Self::default();
        found.replace(keys);
        found
    }

    /// Replaces the keys. An owner who keeps the key keeps the requests under way.
    fn replace(&self, keys: impl IntoIterator<Item = ApiKey>) {
        let before = self.accounts();
        let mut accounts: Vec<Arc<Account>> = Vec::new();
        for ApiKey { hash, limits } in keys {
            let known = before.iter().find(|it| it.hash == hash);
            let account = Account::like(hash, limits, known.map(AsRef::as_ref));
            // A key given twice keeps its number.
            match accounts.iter_mut().find(|it| it.hash == hash) {
                Some(given) => *given = Arc::new(account),
                None => accounts.push(Arc::new(account)),
            }
        }
        *self.0.accounts.write().unwrap_or_else(PoisonError::into_inner) = accounts;
    }

    fn accounts(&self) -> Vec<Arc<Account>> {
        self.0.accounts.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets where reloads of the file of keys are counted.
    pub(super) fn count_in(&self, stats: &FrontendStats) {
        let _ = self.0.stats.set(stats.clone());
    }

    /// Whether everybody is admitted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.accounts.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Returns the key's account and number, from 1 in the order given. Takes constant time with
    /// regard to the keys: whole hashes are compared, with all of them.
    fn owner(&self, key: &str) -> Option<(u64, Arc<Account>)> {
        let given: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        let accounts = self.0.accounts.read().unwrap_or_else(PoisonError::into_inner);
        let place = accounts.iter().enumerate().fold(usize::MAX, |found, (place, account)| {
            let both = account.hash.iter().zip(&given);
            let differ = both.fold(0, |differ, (a, b)| differ | (a ^ b));
            if std::hint::black_box(differ) == 0 { place } else { found }
        });
        accounts.get(place).map(|account| (place as u64 + 1, account.clone()))
    }

    /// Whether whoever sends these headers is admitted.
    #[must_use]
    pub(super) fn knows(&self, headers: &HeaderMap) -> bool {
        self.admit(headers).is_ok()
    }

    /// Returns the owner of a request with these headers, if keys are required.
    ///
    /// # Errors
    /// [`Unknown`] if it has no known key.
    fn admit(&self, headers: &HeaderMap) -> Result<Option<(u64, Arc<Account>)>, Unknown> {
        if self.is_empty() {
            return Ok(None);
        }
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let (scheme, key) =
            header(AUTHORIZATION).and_then(|it| it.split_once(' ')).unwrap_or_default();
        let bearer = scheme.eq_ignore_ascii_case("bearer").then_some(key);
        // As Anthropic's clients say it, some of which also send the other.
        let keys = [bearer, header(X_API_KEY)].into_iter().flatten();
        keys.map(str::trim).find_map(|key| self.owner(key)).map(Some).ok_or(Unknown)
    }
}

/// A request without a known key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unknown;

/// Paths open to everybody: probes and `/metrics`, as in vLLM.
const OPEN: [&str; 8] =
    ["/", "/health", "/live", "/load", "/metrics", "/ping", "/ready", "/version"];

/// Whether a path, as written in the request, needs a key: every path that is not known to be open.
/// The operator's have their own secret, and changes of adapters have their own rule. Routes are
/// matched after percent-decoding, so a path that does not name an open one letter by letter needs
/// a key, however it is spelt.
pub(super) fn is_guarded(path: &str) -> bool {
    !OPEN.contains(&path) && !admin::is_at(path) && !adapters::PATHS.contains(&path)
}

/// Rejects requests without a key where one is needed, and notes the owner of the others. Browsers
/// send OPTIONS without a key to ask what they may do.
///
/// # Errors
/// The handler's own.
pub async fn authenticate<B: MessageBody + 'static>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<EitherBody<B>>, Error> {
    let state = request.app_data::<Data<AppState>>();
    let asked = state.filter(|_| is_guarded(request.path()) && request.method() != Method::OPTIONS);
    match asked.map(|state| (state, state.keys.admit(request.headers()))) {
        Some((state, Err(Unknown))) => {
            state.stats.rejected(RejectReason::Unauthorized);
            let error = access::told(ApiError::unknown_key(), request.request());
            let answer = error.error_response();
            return Ok(request.into_response(answer).map_into_right_body());
        }
        Some((state, Ok(Some((number, account))))) => {
            let (clock, owner) = (state.clock.clone(), account.clone());
            access::tally(request.request()).key(number);
            request.extensions_mut().insert(Owner(account));
            let mut response = next.call(request).await?.map_into_left_body();
            if response.request().extensions().contains::<Limited>() {
                let is_anthropic = messages::is_at(response.request().path());
                let rates = owner.rates(clock.now());
                match is_anthropic {
                    true => rates::tell_anthropic(rates, since_1970(), response.headers_mut()),
                    false => rates::tell_openai(rates, response.headers_mut()),
                }
            }
            return Ok(response);
        }
        Some((_, Ok(None))) | None => {}
    }
    Ok(next.call(request).await?.map_into_left_body())
}

/// The owner of a request, stored among its extensions.
struct Owner(Arc<Account>);

/// Among the extensions of a request that its key's limits apply to.
struct Limited;

/// Counts the tokens of a request against its key's limit, if it has one.
#[must_use]
pub(super) fn meter(state: &AppState, request: &HttpRequest) -> Option<Meter> {
    let extensions = request.extensions();
    extensions.get::<Owner>().and_then(|owner| Meter::of(&owner.0, &state.clock))
}

/// Distinguishes the requests of one key from others': its hash.
#[must_use]
pub(super) fn owner(request: &HttpRequest) -> Option<[u8; 32]> {
    request.extensions().get::<Owner>().map(|owner| owner.0.hash)
}

/// Lets the owner of a request's key start another request, if there are keys.
///
/// # Errors
/// 429 with the time to retry, which is counted.
pub(super) fn enter(state: &AppState, request: &HttpRequest) -> Result<Option<Turn>, ApiError> {
    let account = request.extensions().get::<Owner>().map(|owner| owner.0.clone());
    let Some(account) = account else { return Ok(None) };
    request.extensions_mut().insert(Limited);
    account.enter(state.clock.now()).map(Some).map_err(|refusal| {
        state.stats.rejected(RejectReason::KeyLimit);
        refusal.into()
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use actix_web::http::header::HeaderValue;

    use super::*;

    fn key(key: &str) -> ApiKey {
        ApiKey::new(key, KeyLimits::default()).unwrap()
    }

    fn admit(keys: &ApiKeys, value: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
        keys.admit(&headers).is_ok()
    }

    #[test]
    fn only_whole_keys_are_let_in_and_no_key_is_shown() {
        let keys = ApiKeys::of([key("first-key"), key("second")]);
        assert!(admit(&keys, "Bearer first-key") && admit(&keys, "bearer second"));
        assert_eq!(keys.owner("second").map(|(number, _)| number), Some(2));
        for wrong in ["Bearer first", "Bearer first-keys", "Bearer ", "first-key", "Basic second"] {
            assert!(!admit(&keys, wrong), "{wrong}");
        }
        assert!(keys.admit(&HeaderMap::new()).is_err());
        assert!(ApiKeys::default().admit(&HeaderMap::new()).is_ok_and(|it| it.is_none()));
        let shown = format!("{keys:?} {:?}", key("first-key"));
        assert!(!shown.contains("first"), "{shown}");
        let none = KeyLimits::default();
        assert_eq!(ApiKey::new("", none).unwrap_err(), ApiKeyError::Empty);
        assert_eq!(ApiKey::new("a b", none).unwrap_err(), ApiKeyError::Unprintable);
    }

    #[test]
    fn keys_that_are_replaced_keep_what_their_owners_have_under_way() {
        let limits = KeyLimits { requests: Some(1), ..KeyLimits::default() };
        let of = |name: &str| ApiKey::new(name, limits).unwrap();
        let keys = ApiKeys::of([of("old"), of("kept")]);
        let now = Duration::ZERO;
        let turn = keys.owner("kept").unwrap().1.enter(now).unwrap();
        keys.replace([of("kept"), of("new")]);
        assert!(!admit(&keys, "Bearer old") && admit(&keys, "Bearer new"));
        assert!(keys.owner("kept").unwrap().1.enter(now).is_err(), "one is under way");
        drop(turn);
        assert!(keys.owner("kept").unwrap().1.enter(now).is_ok());
    }
}

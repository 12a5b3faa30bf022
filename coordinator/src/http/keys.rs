//! API keys: who may use `/v1`, where that is restricted.
use std::fmt;
use std::sync::Arc;

use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{AUTHORIZATION, HeaderMap};
use actix_web::middleware::Next;
use actix_web::web::Data;
use actix_web::{Error, ResponseError as _};
use sha2::{Digest as _, Sha256};
use shared::metrics::labels::RejectReason;

use super::access;
use super::error::ApiError;
use super::state::AppState;

/// The keys that are let in; none lets everybody in. Only their hashes are kept, and nothing of
/// them is ever shown.
#[derive(Clone, Default)]
pub struct ApiKeys {
    hashes: Arc<[[u8; 32]]>,
}

/// A key cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiKeyError {
    /// It has no characters.
    #[error("an API key is empty")]
    Empty,
    /// No client can send it.
    #[error("an API key has a character that is not printable ASCII, or a space")]
    Unprintable,
}

/// The keys of a file's text: one per line; `#` at a line's beginning or behind white space begins a
/// comment.
///
/// # Errors
/// Names the line, and does not show the key.
pub fn in_file(text: &str) -> Result<Vec<&str>, String> {
    let mut keys = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let begins = |(at, _): &(usize, &str)| {
            line[..*at].chars().next_back().is_none_or(char::is_whitespace)
        };
        let comment = line.match_indices('#').find(begins).map_or(line.len(), |(at, _)| at);
        match line[..comment].trim() {
            "" => {}
            key => {
                check(key).map_err(|error| format!("line {}: {error}", index + 1))?;
                keys.push(key);
            }
        }
    }
    Ok(keys)
}

fn check(key: &str) -> Result<(), ApiKeyError> {
    match key {
        "" => Err(ApiKeyError::Empty),
        key if key.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(()),
        _ => Err(ApiKeyError::Unprintable),
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKeys").field("number", &self.hashes.len()).finish()
    }
}

impl ApiKeys {
    /// Takes these keys.
    ///
    /// # Errors
    /// [`ApiKeyError`], which does not show the key.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Result<Self, ApiKeyError> {
        let hash = |key: &str| check(key).map(|()| Sha256::digest(key.as_bytes()).into());
        let hashes: Result<Vec<[u8; 32]>, _> = keys.into_iter().map(hash).collect();
        Ok(Self { hashes: hashes?.into() })
    }

    /// Whether nobody is kept out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Which of them this is, from 1; 0 for none. The time it takes tells nothing of the keys: hashes
    /// are compared, whole, with all of them.
    fn number(&self, key: &str) -> u64 {
        let given: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        self.hashes.iter().zip(1..).fold(0, |found, (hash, number)| {
            let differ = hash.iter().zip(&given).fold(0, |differ, (a, b)| differ | (a ^ b));
            found.max(u64::from(std::hint::black_box(differ) == 0) * number)
        })
    }

    /// The number of the key that lets a request with these headers in, from 1 in the order given; 0
    /// where nobody is kept out, `None` for who is.
    #[must_use]
    pub fn admit(&self, headers: &HeaderMap) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        let header = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let (scheme, key) = header.and_then(|it| it.split_once(' ')).unwrap_or_default();
        let number = self.number(key.trim());
        (scheme.eq_ignore_ascii_case("bearer") && number > 0).then_some(number)
    }
}

/// What everybody may ask: probes and `/metrics`, as at vLLM.
const OPEN: [&str; 8] =
    ["/", "/health", "/live", "/load", "/metrics", "/ping", "/ready", "/version"];

/// Whether a path, as it is in the request, is for those with a key: all that is not known to be for
/// everybody. `/admin` has its own secret. Routes are found by the path with its percent-encoding
/// undone, so what names no open path here letter by letter needs a key, however it is spelt.
fn is_guarded(path: &str) -> bool {
    !OPEN.contains(&path) && !path.starts_with("/admin/")
}

/// Refuses requests without a key where one is needed. Browsers ask by OPTIONS, without one, whether
/// they may.
///
/// # Errors
/// The handler's own.
pub async fn authenticate<B: MessageBody + 'static>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<EitherBody<B>>, Error> {
    let state = request.app_data::<Data<AppState>>();
    let guarded = is_guarded(request.path()) && request.method() != Method::OPTIONS;
    if let Some(state) = state.filter(|_| guarded)
        && state
            .keys
            .admit(request.headers())
            .inspect(|key| access::tally(request.request()).key(*key))
            .is_none()
    {
        state.stats.rejected(RejectReason::Unauthorized);
        let answer = ApiError::unknown_key().error_response();
        return Ok(request.into_response(answer).map_into_right_body());
    }
    Ok(next.call(request).await?.map_into_left_body())
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    #[test]
    fn only_whole_keys_are_let_in_and_no_key_is_shown() {
        let keys = ApiKeys::new(["first-key", "second"]).unwrap();
        let admit = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            keys.admit(&headers)
        };
        assert_eq!((admit("Bearer first-key"), admit("bearer second")), (Some(1), Some(2)));
        for wrong in ["Bearer first", "Bearer first-keys", "Bearer ", "first-key", "Basic second"] {
            assert_eq!(admit(wrong), None, "{wrong}");
        }
        assert_eq!(keys.admit(&HeaderMap::new()), None);
        assert_eq!(ApiKeys::default().admit(&HeaderMap::new()), Some(0));
        let file = "# all\n one \n\ntwo#x # Anna's\n\t# three\n";
        assert_eq!(in_file(file), Ok(vec!["one", "two#x"]));
        let error = in_file("one\ntwo words\n").unwrap_err();
        assert!(error.starts_with("line 2: ") && !error.contains("words"), "{error}");
        assert!(!format!("{keys:?}").contains("first"));
        assert_eq!(ApiKeys::new([""]).unwrap_err(), ApiKeyError::Empty);
        assert_eq!(ApiKeys::new(["a b"]).unwrap_err(), ApiKeyError::Unprintable);
    }
}

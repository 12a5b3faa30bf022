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
        let hash = |key: &str| match key {
            "" => Err(ApiKeyError::Empty),
            key if !key.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Err(ApiKeyError::Unprintable)
            }
            key => Ok(Sha256::digest(key.as_bytes()).into()),
        };
        let hashes: Result<Vec<[u8; 32]>, _> = keys.into_iter().map(hash).collect();
        Ok(Self { hashes: hashes?.into() })
    }

    /// Whether nobody is kept out.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Whether this is one of them. The time it takes tells nothing of the keys: hashes are
    /// compared, whole, with all of them.
    fn holds(&self, key: &str) -> bool {
        let given: [u8; 32] = Sha256::digest(key.as_bytes()).into();
        self.hashes.iter().fold(false, |found, hash| {
            let differ = hash.iter().zip(&given).fold(0, |differ, (a, b)| differ | (a ^ b));
            found | (std::hint::black_box(differ) == 0)
        })
    }

    /// Whether a request with these headers is let in.
    #[must_use]
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        let header = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let (scheme, key) = header.and_then(|it| it.split_once(' ')).unwrap_or_default();
        self.is_empty() || (scheme.eq_ignore_ascii_case("bearer") && self.holds(key.trim()))
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
    let refused = state.filter(|state| {
        is_guarded(request.path())
            && request.method() != Method::OPTIONS
            && !state.keys.admit(request.headers())
    });
    if let Some(state) = refused {
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
        assert!(admit("Bearer first-key") && admit("bearer second"));
        for wrong in ["Bearer first", "Bearer first-keys", "Bearer ", "first-key", "Basic second"] {
            assert!(!admit(wrong), "{wrong}");
        }
        assert!(!keys.admit(&HeaderMap::new()) && ApiKeys::default().admit(&HeaderMap::new()));
        assert!(!format!("{keys:?}").contains("first"));
        assert_eq!(ApiKeys::new([""]).unwrap_err(), ApiKeyError::Empty);
        assert_eq!(ApiKeys::new(["a b"]).unwrap_err(), ApiKeyError::Unprintable);
    }
}

//! What applies to a request besides its body: its deadline and its owner.
use std::fmt;
use std::time::Duration;

use actix_web::http::header::{HeaderMap, HeaderName};
use shared::wire::auth::Secret;
use shared::wire::keyring::Keyring;
use tokio::time::Instant;

use super::error::ApiError;

/// Seconds after which its client no longer wants the answer.
const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");
/// Maximum value: a day.
pub(super) const TIMEOUT_MAX_S: f64 = 86_400.0;

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// Its deadline.
    pub deadline: Option<Instant>,
    /// Determines who shares cached prompts with it.
    pub salts: Salts,
}

/// Returns the time limit that a client sets in these headers, if any.
///
/// # Errors
/// 400 if it is not a number of seconds within the bound.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(&TIMEOUT) else { return Ok(None) };
    let seconds = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
    let seconds = seconds.filter(|seconds| *seconds > 0.0 && *seconds <= TIMEOUT_MAX_S);
    seconds.map(|seconds| Some(Duration::from_secs_f64(seconds))).ok_or_else(|| {
        let message = format!(
            "The header X-Request-Timeout must be a number of seconds above 0 and at most \
             {TIMEOUT_MAX_S}"
        );
        ApiError::body(message)
    })
}

/// Keeps cached prompts apart: by API key and by the request's own salt.
///
/// Numbers are derived with a key that all front ends of a cluster have, so that they agree
/// everywhere; without that key nobody can find another owner's number.
#[derive(Clone, Default)]
pub struct Salts {
    secrets: Option<Keyring>,
    owner: Option<[u8; 32]>,
}

impl fmt::Debug for Salts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Salts")
    }
}

impl Salts {
    /// Of a cluster with these secrets, if it has any.
    #[must_use]
    pub fn new(secrets: Option<&Keyring>) -> Self {
        Self { secrets: secrets.cloned(), owner: None }
    }

    /// Returns the salts of requests with this API key's hash.
    #[must_use]
    pub fn of(&self, owner: Option<[u8; 32]>) -> Self {
        Self { secrets: self.secrets.clone(), owner }
    }

    /// Returns a number: requests with equal numbers share cached prompts; 0 is that of requests
    /// without key and salt.
    #[must_use]
    pub fn number(&self, salt: Option<&str>) -> u64 {
        if self.owner.is_none() && salt.is_none() {
            return 0;
        }
        let owner = self.owner.as_ref().map_or(&[][..], |owner| &owner[..]);
        // The number of parts distinguishes an empty salt from none.
        let parts = [owner, salt.unwrap_or_default().as_bytes()];
        let parts = if salt.is_some() { &parts[..] } else { &parts[..1] };
        // Without a secret anybody may join, and see all prompts.
        let open = || Secret::of_random([0; 32]);
        let key = self.secrets.as_ref().map(|it| it.first().derived("cached prompts"));
        key.unwrap_or_else(open).number_of(parts).max(1)
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    #[test]
    fn a_timeout_is_a_number_of_seconds() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(TIMEOUT, HeaderValue::from_str(value).unwrap());
            timeout(&headers)
        };
        assert_eq!(timeout(&HeaderMap::new()).unwrap(), None);
        assert_eq!(read("30").unwrap(), Some(Duration::from_secs(30)));
        assert_eq!(read(" 0.25").unwrap(), Some(Duration::from_millis(250)));
        for wrong in ["0", "-1", "86400.1", "NaN", "inf", "1e300", "soon", ""] {
            assert!(read(wrong).unwrap_err().to_string().contains("86400"), "{wrong}");
        }
    }

    #[test]
    fn keys_and_salts_share_nothing_and_front_ends_agree() {
        let secret = |fill| Keyring::from(Secret::new(&[fill; 40]).unwrap());
        let ours = secret(7);
        let (here, there) = (Salts::new(Some(&ours)), Salts::new(Some(&ours)));
        let all = |salts: &Salts| {
            let mut numbers = Vec::new();
            for owner in [None, Some([1; 32]), Some([2; 32])] {
                let salts = salts.of(owner);
                numbers.extend([None, Some("a"), Some("b")].map(|salt| salts.number(salt)));
            }
            numbers
        };
        let numbers = all(&here);
        assert_eq!(numbers, all(&there), "of every front end");
        assert_eq!(numbers[0], 0, "without key and salt all share");
        let different: std::collections::BTreeSet<u64> = numbers.iter().copied().collect();
        assert_eq!(different.len(), numbers.len(), "{numbers:?}");
        // Another cluster's numbers reveal nothing about these.
        let other = all(&Salts::new(Some(&secret(8))));
        assert!(numbers[1..].iter().all(|number| !other.contains(number)));
        // A salt equal to another key's hash does not give that key's number.
        let text = String::from_utf8(vec![b'x'; 32]).unwrap();
        assert_ne!(here.number(Some(&text)), here.of(Some([b'x'; 32])).number(None));
        assert!(all(&Salts::default())[1..].iter().all(|number| *number > 0));
    }
}

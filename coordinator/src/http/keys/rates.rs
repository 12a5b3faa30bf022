//! Headers that tell what is left of a key's limits per minute: each API's clients read their own.
use std::time::Duration;

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};

use super::bucket::Left;
use crate::text::date::rfc_3339;

/// A limit: what it counts, how much of that a minute has, and what is left.
type Rate = (&'static str, u32, Left);

/// The names of all headers: of each kind, the limit, what is left, and when all is there again.
pub(in super::super) const NAMES: [[&str; 3]; 4] =
    [OPENAI[0], OPENAI[1], ANTHROPIC[0], ANTHROPIC[1]];

/// Those of OpenAI's API, for requests and for tokens.
const OPENAI: [[&str; 3]; 2] = [
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
];

/// Those of Anthropic's.
const ANTHROPIC: [[&str; 3]; 2] = [
    [
        "anthropic-ratelimit-requests-limit",
        "anthropic-ratelimit-requests-remaining",
        "anthropic-ratelimit-requests-reset",
    ],
    [
        "anthropic-ratelimit-tokens-limit",
        "anthropic-ratelimit-tokens-remaining",
        "anthropic-ratelimit-tokens-reset",
    ],
];

/// As OpenAI's API tells it: the time until all is there again.
pub(super) fn tell_openai(rates: impl Iterator<Item = Rate>, headers: &mut HeaderMap) {
    tell(rates, headers, OPENAI, in_units);
}

/// As Anthropic's API tells it: the moment at which all is there again; `now` is since 1970.
pub(super) fn tell_anthropic(
    rates: impl Iterator<Item = Rate>,
    now: Duration,
    headers: &mut HeaderMap,
) {
    // Never too early: whole seconds are rounded up.
    tell(rates, headers, ANTHROPIC, |wait| {
        rfc_3339((now + wait + Duration::from_nanos(999_999_999)).as_secs())
    });
}

fn tell(
    rates: impl Iterator<Item = Rate>,
    headers: &mut HeaderMap,
    names: [[&'static str; 3]; 2],
    written: impl Fn(Duration) -> String,
) {
    for (what, max, left) in rates {
        let Some(names) = names.iter().find(|names| names[0].contains(what)) else { continue };
        let values = [max.to_string(), left.count.to_string(), written(left.until_full)];
        for (name, value) in names.iter().zip(values) {
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
    }
}

/// A time as OpenAI's headers write it: `120ms`, `1.5s`, `6m0s`.
fn in_units(time: Duration) -> String {
    let milliseconds = time.as_nanos().div_ceil(1_000_000);
    let (minutes, rest) = (milliseconds / 60_000, milliseconds % 60_000);
    let seconds = format!("{}s", rest as f64 / 1000.0);
    match (minutes / 60, minutes % 60) {
        (0, 0) if milliseconds < 1000 => format!("{milliseconds}ms"),
        (0, 0) => seconds,
        (0, minutes) => format!("{minutes}m{seconds}"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_openai_does() {
        for (milliseconds, written) in [
            (0, "0ms"),
            (120, "120ms"),
            (1000, "1s"),
            (8640, "8.64s"),
            (360_000, "6m0s"),
            (3_600_500, "1h0m0.5s"),
        ] {
            assert_eq!(in_units(Duration::from_millis(milliseconds)), written);
        }
        assert_eq!(in_units(Duration::from_micros(1)), "1ms", "never too early");
    }

    #[test]
    fn moments_are_written_as_anthropic_does() {
        let mut headers = HeaderMap::new();
        let left = Left { count: 3, until_full: Duration::from_millis(1500) };
        // `date -u -d 2026-12-31T23:59:58Z +%s`
        let now = Duration::from_secs(1_798_761_598);
        tell_anthropic([("tokens", 5, left)].into_iter(), now, &mut headers);
        let header = |name: &str| {
            let header = headers.get(format!("anthropic-ratelimit-tokens-{name}")).unwrap();
            header.to_str().unwrap()
        };
        assert_eq!((header("limit"), header("remaining")), ("5", "3"));
        assert_eq!(header("reset"), "2027-01-01T00:00:00Z", "never too early");
        assert_eq!(headers.len(), 3);
    }
}

//! PURE: what a collector's answer means for the spans that were sent, as OTLP says it.
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

/// Wait before a message is sent again, without a word of the collector; doubled each time.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait, whatever the collector asks for.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// What came of sending a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// An answer with this status, and the seconds of its `Retry-After` if it has that.
    Status(u16, Option<u64>),
    /// There was none.
    None,
}

/// What becomes of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The collector has it.
    Taken,
    /// It may be sent again after so long.
    Again(Duration),
    /// The collector will not take it.
    Refused,
}

/// Returns what becomes of a message that was sent `before` times before this answer came.
/// `random` spreads the waits of processes that were refused together.
#[must_use]
pub fn verdict(answer: &Answer, before: u32, random: u64) -> Verdict {
    let backoff = || {
        let wait = FIRST_WAIT.saturating_mul(1 << before.min(16)).min(WAIT_MAX);
        // From half of it to all of it.
        wait / 2 + (wait / 2).mul_f64((random % 1024) as f64 / 1024.0)
    };
    match answer {
        Answer::None => Verdict::Again(backoff()),
        Answer::Status(200..=299, _) => Verdict::Taken,
        Answer::Status(429 | 502 | 503 | 504, Some(seconds)) => {
            Verdict::Again(Duration::from_secs(*seconds).min(WAIT_MAX))
        }
        Answer::Status(429 | 502 | 503 | 504, None) => Verdict::Again(backoff()),
        Answer::Status(..) => Verdict::Refused,
    }
}

/// Returns how many spans of a message the collector did not take although it answered that it
/// did, and what it says about that.
#[must_use]
pub fn rejected(body: &str) -> (u64, String) {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Body {
        partial_success: Option<Partial>,
    }
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Partial {
        rejected_spans: Value,
        error_message: String,
    }
    let body: Body = serde_json::from_str(body).unwrap_or_default();
    let partial = body.partial_success.unwrap_or_default();
    let spans = match &partial.rejected_spans {
        Value::String(digits) => digits.parse().unwrap_or(0),
        number => number.as_u64().unwrap_or(0),
    };
    (spans, partial.error_message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_collector_is_asked_again_and_one_that_refuses_is_not() {
        let of = |status, after| verdict(&Answer::Status(status, after), 0, 0);
        assert_eq!((of(200, None), of(202, None)), (Verdict::Taken, Verdict::Taken));
        for status in [400, 401, 404, 413, 415, 500, 501, 301] {
            assert_eq!(of(status, Some(1)), Verdict::Refused, "{status}");
        }
        for status in [429, 502, 503, 504] {
            assert_eq!(of(status, Some(7)), Verdict::Again(Duration::from_secs(7)), "{status}");
            assert_eq!(of(status, None), Verdict::Again(FIRST_WAIT / 2), "{status}");
        }
        assert_eq!(of(503, Some(u64::MAX)), Verdict::Again(WAIT_MAX));
        assert_eq!(of(503, Some(0)), Verdict::Again(Duration::ZERO));
    }

    #[test]
    fn waits_grow_and_are_spread() {
        let mut least = Duration::ZERO;
        for before in 0..40 {
            let wait = |random| match verdict(&Answer::None, before, random) {
                Verdict::Again(wait) => wait,
                other => panic!("{other:?}"),
            };
            assert!(wait(0) >= least && wait(0) < wait(1023) && wait(1023) < WAIT_MAX);
            least = wait(0);
        }
        assert_eq!(least, WAIT_MAX / 2);
    }

    #[test]
    fn what_is_not_taken_of_a_message_is_known() {
        for (body, expected) in [
            (r#"{"partialSuccess":{"rejectedSpans":"3","errorMessage":"m"}}"#, (3, "m")),
            (r#"{"partialSuccess":{"rejectedSpans":3}}"#, (3, "")),
            (r#"{"partialSuccess":{"errorMessage":"hint"}}"#, (0, "hint")),
            (r#"{"partialSuccess":{}}"#, (0, "")),
            (r#"{"partialSuccess":null}"#, (0, "")),
            ("{}", (0, "")),
            ("", (0, "")),
            ("<html>", (0, "")),
            (r#"{"partialSuccess":{"rejectedSpans":-1}}"#, (0, "")),
        ] {
            let (spans, message) = rejected(body);
            assert_eq!((spans, message.as_str()), expected, "{body}");
        }
    }
}

//! PURE: the trace that a client's request belongs to, from the header `traceparent` of W3C Trace
//! Context: `00-TRACE-PARENT-FLAGS`, all in lower-case hexadecimal digits; and from `tracestate`.
use std::sync::Arc;

use crate::traces::Caller;

/// Length of version 00, in bytes.
const BYTES: usize = 55;

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The whole trace: 32 digits, not all zero.
    pub trace_id: String,
    /// The caller's span in it: 16 digits, not all zero.
    pub parent_id: String,
    /// Whether the caller's spans are recorded.
    pub sampled: bool,
}

impl TraceParent {
    /// Parses a header; `None` if it is not valid, which counts as absent.
    #[must_use]
    pub fn parse(header: &str) -> Option<Self> {
        // Later versions may append more to this format.
        let known = header.get(..BYTES)?;
        let more = &header[BYTES..];
        let mut parts = known.split('-');
        let mut part = |digits: usize| parts.next().filter(|part| is_hex(part, digits));
        let (version, trace, parent, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        let complete = match version {
            "ff" => false,
            "00" => more.is_empty(),
            _ => more.is_empty() || more.starts_with('-'),
        };
        let named = |id: &str| id.bytes().any(|b| b != b'0');
        let sampled = u8::from_str_radix(flags, 16).is_ok_and(|flags| flags & 1 == 1);
        (complete && named(trace) && named(parent)).then(|| Self {
            trace_id: trace.to_owned(),
            parent_id: parent.to_owned(),
            sampled,
        })
    }

    /// The same for a trace to which spans are added; `state` is what `tracestate` says.
    #[must_use]
    pub fn caller(&self, state: Arc<str>) -> Caller {
        let (mut trace, mut span) = ([0; 16], [0; 8]);
        read_hex(&self.trace_id, &mut trace);
        read_hex(&self.parent_id, &mut span);
        Caller { trace, span, sampled: self.sampled, state }
    }
}

/// Reads digits, of which there are enough.
fn read_hex(digits: &str, bytes: &mut [u8]) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        let pair = digits.get(2 * index..2 * index + 2);
        *byte = pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()).unwrap_or(0);
    }
}

/// Longest `tracestate` that is kept, as W3C asks for.
const STATE_MAX: usize = 512;

/// Returns the `tracestate` of a request with these headers of that name, as one; empty if there is
/// none, or one of them is not text, or they are too long.
#[must_use]
pub fn trace_state<'a>(headers: impl Iterator<Item = Option<&'a str>>) -> Arc<str> {
    let mut state = String::new();
    for header in headers {
        let Some(text) = header else { return Arc::default() };
        if !state.is_empty() {
            state.push(',');
        }
        state.push_str(text);
        if state.len() > STATE_MAX {
            return Arc::default();
        }
    }
    state.into()
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";

    #[test]
    fn headers_of_this_and_later_versions_are_read() {
        for (version, flags, sampled) in [
            ("00", "01", true),
            ("00", "00", false),
            ("00", "03", true),
            ("00", "fe", false),
            ("cc", "01", true),
            ("cc", "01-what-else", true),
        ] {
            let (trace_id, parent_id) = (TRACE.to_owned(), PARENT.to_owned());
            let expected = Some(TraceParent { trace_id, parent_id, sampled });
            let header = format!("{version}-{TRACE}-{PARENT}-{flags}");
            assert_eq!(TraceParent::parse(&header), expected, "{header}");
        }
    }

    #[test]
    fn a_caller_is_what_its_headers_say() {
        let parent = TraceParent::parse(&format!("00-{TRACE}-{PARENT}-01")).unwrap();
        let caller = parent.caller("a=1".into());
        assert_eq!(u128::from_be_bytes(caller.trace), u128::from_str_radix(TRACE, 16).unwrap());
        assert_eq!(u64::from_be_bytes(caller.span), u64::from_str_radix(PARENT, 16).unwrap());
        assert!(caller.sampled && &*caller.state == "a=1");
        let state = |values: &[Option<&str>]| trace_state(values.iter().copied()).to_string();
        assert_eq!(state(&[]), "");
        assert_eq!(state(&[Some("a=1"), Some("b=2,c=3")]), "a=1,b=2,c=3");
        assert_eq!(state(&[Some("a=1"), None]), "");
        assert_eq!(state(&[Some(&"x".repeat(512))]).len(), 512);
        assert_eq!(state(&[Some(&"x".repeat(513))]), "");
    }

    #[test]
    fn what_is_no_header_of_the_kind_is_as_good_as_none() {
        let zero = "0".repeat(32);
        for header in [
            String::new(),
            "00".to_owned(),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{TRACE}-{PARENT}-01-more"),
            format!("cc-{TRACE}-{PARENT}-01.more"),
            format!("00-{zero}-{PARENT}-01"),
            format!("00-{TRACE}-{}-01", &zero[..16]),
            format!("00-{}-{PARENT}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{PARENT}-0g"),
            format!("0-0{TRACE}-{PARENT}-01"),
            format!("00-{TRACE}-{PARENT}é01"),
            format!("00_{TRACE}_{PARENT}_01"),
            format!("é0-{TRACE}-{PARENT}-01"),
        ] {
            assert_eq!(TraceParent::parse(&header), None, "{header}");
        }
    }
}

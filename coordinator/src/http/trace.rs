//! PURE: the trace that a client's request belongs to, from the header `traceparent` of W3C Trace
//! Context: `00-TRACE-PARENT-FLAGS`, all in lower-case hexadecimal digits.

/// Length of version 00, in bytes.
const BYTES: usize = 55;

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The whole trace: 32 digits, not all zero.
    pub trace_id: String,
    /// The caller's span in it: 16 digits, not all zero.
    pub parent_id: String,
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
        let (version, trace, parent, _) = (part(2)?, part(32)?, part(16)?, part(2)?);
        let complete = match version {
            "ff" => false,
            "00" => more.is_empty(),
            _ => more.is_empty() || more.starts_with('-'),
        };
        let named = |id: &str| id.bytes().any(|b| b != b'0');
        (complete && named(trace) && named(parent))
            .then(|| Self { trace_id: trace.to_owned(), parent_id: parent.to_owned() })
    }
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
        let expected =
            Some(TraceParent { trace_id: TRACE.to_owned(), parent_id: PARENT.to_owned() });
        for (version, flags) in [("00", "01"), ("00", "00"), ("cc", "01"), ("cc", "01-what-else")] {
            let header = format!("{version}-{TRACE}-{PARENT}-{flags}");
            assert_eq!(TraceParent::parse(&header), expected, "{header}");
        }
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

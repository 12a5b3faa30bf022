//! PURE: spans as OTLP's JSON: protobuf's JSON mapping, except that ids are hexadecimal and enums
//! numbers; integers of 64 bits are decimal strings.
//!
//! Written here rather than by the `opentelemetry` crates: SDK, OTLP exporter and protobuf would
//! add some megabytes to a program of 30, for one kind of message. Collectors take JSON where they
//! take protobuf over HTTP.
use std::fmt::Write as _;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::span::{Event, Parent, Span, Status, Value};

/// W3C's flag of a trace that is sampled, and OTLP's of a span whose parent is known to be of
/// another process or of this one.
const SAMPLED: u32 = 0x1;
const PARENT_KNOWN: u32 = 0x100;
const PARENT_REMOTE: u32 = 0x200;
/// The number of a failure.
const ERROR: u8 = 2;
/// Who makes these spans.
const SCOPE: &str = "tutti";

/// The parts of every message around its spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    before: String,
}

const AFTER: &str = "]}]}]}";

impl Envelope {
    /// Of a process that is described by these attributes.
    #[must_use]
    pub fn new(resource: &[(String, String)]) -> Self {
        let values = resource.iter().map(|(key, value)| (key, Value::from(value.as_str())));
        let attributes = Attributes(values.collect::<Vec<_>>().as_slice()).json();
        let version = env!("CARGO_PKG_VERSION");
        let mut before = String::new();
        // Writing to a string does not fail.
        let _ = write!(
            before,
            "{{\"resourceSpans\":[{{\"resource\":{{\"attributes\":{attributes}}},\
             \"scopeSpans\":[{{\"scope\":{{\"name\":\"{SCOPE}\",\"version\":\"{version}\"}},\
             \"spans\":["
        );
        Self { before }
    }

    /// Makes one message of spans that are encoded.
    #[must_use]
    pub fn message(&self, spans: &[String]) -> String {
        let size = spans.iter().map(|span| span.len() + 1).sum::<usize>();
        let mut message = String::with_capacity(self.before.len() + size + AFTER.len());
        message.push_str(&self.before);
        for (index, span) in spans.iter().enumerate() {
            if index > 0 {
                message.push(',');
            }
            message.push_str(span);
        }
        message.push_str(AFTER);
        message
    }
}

/// Encodes a span.
#[must_use]
pub fn encode(span: &Span) -> String {
    let flags = match span.parent {
        None => SAMPLED,
        Some(Parent { remote: false, .. }) => SAMPLED | PARENT_KNOWN,
        Some(Parent { remote: true, .. }) => SAMPLED | PARENT_KNOWN | PARENT_REMOTE,
    };
    json(&SpanJson {
        trace_id: hex(&span.trace),
        span_id: hex(&span.id),
        trace_state: &span.state,
        parent_span_id: span.parent.map(|parent| hex(&parent.id)),
        flags,
        name: span.name,
        kind: span.kind as u8,
        start_time_unix_nano: span.start.as_nanos().to_string(),
        end_time_unix_nano: span.end.as_nanos().to_string(),
        attributes: Attributes(&span.attributes),
        events: span.events.iter().map(EventJson::of).collect(),
        status: match &span.status {
            Status::Unset => StatusJson { code: None, message: "" },
            Status::Error(message) => StatusJson { code: Some(ERROR), message },
        },
    })
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SpanJson<'a> {
    trace_id: String,
    span_id: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    trace_state: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_span_id: Option<String>,
    flags: u32,
    name: &'a str,
    kind: u8,
    start_time_unix_nano: String,
    end_time_unix_nano: String,
    attributes: Attributes<'a, &'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    events: Vec<EventJson<'a>>,
    status: StatusJson<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EventJson<'a> {
    time_unix_nano: String,
    name: &'a str,
    attributes: Attributes<'a, &'static str>,
}

impl<'a> EventJson<'a> {
    fn of(event: &'a Event) -> Self {
        Self {
            time_unix_nano: event.at.as_nanos().to_string(),
            name: event.name,
            attributes: Attributes(&event.attributes),
        }
    }
}

#[derive(Serialize)]
struct StatusJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<u8>,
    #[serde(skip_serializing_if = "str::is_empty")]
    message: &'a str,
}

/// A list of attributes.
struct Attributes<'a, K>(&'a [(K, Value)]);

impl<K: AsRef<str>> Attributes<'_, K> {
    fn json(&self) -> String {
        json(self)
    }
}

impl<K: AsRef<str>> Serialize for Attributes<'_, K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct One<'a> {
            key: &'a str,
            value: AnyValue<'a>,
        }
        serializer.collect_seq(
            self.0.iter().map(|(key, value)| One { key: key.as_ref(), value: AnyValue(value) }),
        )
    }
}

/// A value with its type.
struct AnyValue<'a>(&'a Value);

impl Serialize for AnyValue<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Values<T> {
            values: Vec<T>,
        }
        let mut map = serializer.serialize_map(Some(1))?;
        match self.0 {
            Value::Text(text) => map.serialize_entry("stringValue", &**text)?,
            Value::Int(number) => map.serialize_entry("intValue", &number.to_string())?,
            // JSON has no other numbers; protobuf's mapping names these.
            Value::Float(number) if number.is_nan() => map.serialize_entry("doubleValue", "NaN")?,
            Value::Float(number) if number.is_infinite() => {
                let name = if *number > 0.0 { "Infinity" } else { "-Infinity" };
                map.serialize_entry("doubleValue", name)?;
            }
            Value::Float(number) => map.serialize_entry("doubleValue", number)?,
            Value::Texts(texts) => {
                let values = texts.iter().map(|text| Value::from(*text)).collect::<Vec<_>>();
                let values = values.iter().map(AnyValue).collect();
                map.serialize_entry("arrayValue", &Values { values })?;
            }
        }
        map.end()
    }
}

fn json(value: &impl Serialize) -> String {
    // Nothing above fails, and maps have texts as keys.
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value as Json, json};

    use super::super::span::Kind;
    use super::*;

    fn span() -> Span {
        Span {
            trace: *b"\x01\x23\x45\x67\x89\xab\xcd\xef\0\0\0\0\0\0\0\x0f",
            id: [0xff; 8],
            parent: None,
            state: "".into(),
            name: "n",
            kind: Kind::Internal,
            start: Duration::new(1_700_000_000, 1),
            end: Duration::new(1_700_000_001, 999_999_999),
            attributes: Vec::new(),
            events: Vec::new(),
            status: Status::Unset,
        }
    }

    fn parsed(span: &Span) -> Json {
        serde_json::from_str(&encode(span)).unwrap()
    }

    #[test]
    fn a_span_is_as_otlp_writes_it_in_json() {
        let expected = json!({
            "traceId": "0123456789abcdef000000000000000f", "spanId": "ffffffffffffffff",
            "flags": 1, "name": "n", "kind": 1,
            "startTimeUnixNano": "1700000000000000001", "endTimeUnixNano": "1700000001999999999",
            "attributes": [], "status": {},
        });
        assert_eq!(parsed(&span()), expected);
        let full = Span {
            parent: Some(Parent { id: [0, 1, 2, 3, 4, 5, 6, 7], remote: true }),
            state: "a=1,b=\"2\"".into(),
            kind: Kind::Server,
            attributes: vec![
                ("text", "\u{e9} \"\n".into()),
                ("largest", u64::MAX.into()),
                ("small", Value::Int(-1)),
                ("float", Value::from(0.7_f32)),
                ("whole", Value::Float(2.0)),
                ("none", Value::Float(f64::NAN)),
                ("least", Value::Float(f64::NEG_INFINITY)),
                ("list", Value::Texts(vec!["stop", "length"])),
                ("empty", Value::Texts(Vec::new())),
            ],
            events: vec![Event {
                at: Duration::from_millis(1_700_000_000_500),
                name: "e",
                attributes: vec![("seconds", Duration::from_millis(250).into())],
            }],
            status: Status::Error("why".to_owned()),
            ..span()
        };
        let parsed = parsed(&full);
        assert_eq!(parsed["parentSpanId"], "0001020304050607");
        assert_eq!((&parsed["traceState"], &parsed["flags"]), (&json!("a=1,b=\"2\""), &json!(769)));
        assert_eq!(
            (&parsed["kind"], &parsed["status"]),
            (&json!(2), &json!({"code": 2, "message": "why"}))
        );
        let attribute = |key: &str, value: Json| json!({"key": key, "value": value});
        let expected = json!([
            attribute("text", json!({"stringValue": "\u{e9} \"\n"})),
            attribute("largest", json!({"intValue": "9223372036854775807"})),
            attribute("small", json!({"intValue": "-1"})),
            attribute("float", json!({"doubleValue": 0.7})),
            attribute("whole", json!({"doubleValue": 2.0})),
            attribute("none", json!({"doubleValue": "NaN"})),
            attribute("least", json!({"doubleValue": "-Infinity"})),
            attribute(
                "list",
                json!({"arrayValue": {"values": [
                {"stringValue": "stop"}, {"stringValue": "length"}]}})
            ),
            attribute("empty", json!({"arrayValue": {"values": []}})),
        ]);
        assert_eq!(parsed["attributes"], expected);
        assert_eq!(
            parsed["events"],
            json!([{"timeUnixNano": "1700000000500000000", "name": "e",
                "attributes": [attribute("seconds", json!({"doubleValue": 0.25}))]}])
        );
        let local = Span { parent: Some(Parent { id: [1; 8], remote: false }), ..span() };
        assert_eq!(self::parsed(&local)["flags"], 257);
    }

    #[test]
    fn a_message_has_all_spans_under_one_resource() {
        let resource = [("service.name".to_owned(), "a\"b".to_owned())];
        let spans = [encode(&span()), encode(&Span { name: "m", ..span() })];
        let message = Envelope::new(&resource).message(&spans);
        let message: Json = serde_json::from_str(&message).unwrap();
        let all = &message["resourceSpans"];
        assert_eq!(all.as_array().unwrap().len(), 1);
        assert_eq!(
            all[0]["resource"],
            json!({"attributes": [{"key": "service.name", "value": {"stringValue": "a\"b"}}]})
        );
        let scope = &all[0]["scopeSpans"][0];
        assert_eq!(scope["scope"]["name"], "tutti");
        assert_eq!(
            (&scope["spans"][0]["name"], &scope["spans"][1]["name"]),
            (&json!("n"), &json!("m"))
        );
    }
}

//! PURE: a span of a trace, with OpenTelemetry's terms.
use std::sync::Arc;
use std::time::Duration;

/// Identifies a trace.
pub type TraceId = [u8; 16];
/// Identifies a span within its trace.
pub type SpanId = [u8; 8];

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Its trace.
    pub trace: TraceId,
    /// Itself.
    pub id: SpanId,
    /// The span that it is a part of.
    pub parent: Option<Parent>,
    /// The header `tracestate` of its trace, which other systems write and read; empty for none.
    pub state: Arc<str>,
    /// What it is.
    pub name: &'static str,
    /// Its role.
    pub kind: Kind,
    /// When it began, since 1970.
    pub start: Duration,
    /// When it ended, since 1970.
    pub end: Duration,
    /// What is known of it.
    pub attributes: Vec<(&'static str, Value)>,
    /// What happened meanwhile.
    pub events: Vec<Event>,
    /// Whether it failed.
    pub status: Status,
}

/// The span that another is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// That span.
    pub id: SpanId,
    /// Whether another process has it.
    pub remote: bool,
}

/// The role of a span, numbered as in OTLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A part of the work of its parent.
    Internal = 1,
    /// Answers a request.
    Server = 2,
}

/// Something that happened at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// When, since 1970.
    pub at: Duration,
    /// What.
    pub name: &'static str,
    /// What is known of it.
    pub attributes: Vec<(&'static str, Value)>,
}

/// Whether a span failed. Success is not claimed: that is for whoever reads the trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// Not that this process knows.
    #[default]
    Unset,
    /// It did; with an explanation, which may be empty.
    Error(String),
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A text.
    Text(Arc<str>),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// Texts.
    Texts(Vec<&'static str>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<Arc<str>> for Value {
    fn from(text: Arc<str>) -> Self {
        Self::Text(text)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Int(number.into())
    }
}

impl From<f32> for Value {
    /// The number as it was written: 0.7, not 0.699999988079071.
    fn from(number: f32) -> Self {
        Self::Float(number.to_string().parse().unwrap_or_else(|_| number.into()))
    }
}

impl From<Duration> for Value {
    /// In seconds.
    fn from(duration: Duration) -> Self {
        Self::Float(duration.as_secs_f64())
    }
}

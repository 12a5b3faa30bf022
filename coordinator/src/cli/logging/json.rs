//! Log lines as JSON, one object each, for programs that gather logs (`--log-format json`).
use std::fmt;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Prefix of what events of the `log` crate say about themselves.
const OF_LOG: &str = "log.";

/// Who writes the log.
#[derive(Clone, Debug)]
pub(crate) struct LogSource {
    /// The kind of process, such as `worker`.
    pub(crate) process: &'static str,
    /// Its name in the cluster.
    pub(crate) node: String,
}

impl LogSource {
    /// A line about this event of this process.
    fn line(&self, level: &str, target: &str, message: &str, fields: Map<String, Value>) -> String {
        let mut time = String::new();
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        json!({
            "timestamp": time,
            "level": level,
            "target": target,
            "message": message,
            "fields": fields,
            "process": self.process,
            "node": self.node,
            "pid": std::process::id(),
        })
        .to_string()
    }

    /// A line of what this program prints beside its log.
    pub(super) fn said(&self, level: &str, message: &str) -> String {
        self.line(level, "tutti", message, Map::new())
    }

    /// The lines of what another process wrote to its stderr: what is no object is made one.
    pub(super) fn passed_on(&self, text: &str) -> String {
        let mut lines = String::with_capacity(text.len());
        for line in text.lines() {
            if line.starts_with('{') {
                lines.push_str(line);
            } else {
                lines.push_str(&self.line("ERROR", "stderr", line, Map::new()));
            }
            lines.push('\n');
        }
        lines
    }
}

/// What an event has.
#[derive(Default)]
struct Fields {
    message: String,
    target: Option<String>,
    others: Map<String, Value>,
}

impl Fields {
    fn set(&mut self, field: &Field, value: Value) {
        let name = field.name();
        match (name, value) {
            ("message", Value::String(text)) => self.message = text,
            ("log.target", Value::String(text)) => self.target = Some(text),
            _ if name.starts_with(OF_LOG) => {}
            (name, value) => drop(self.others.insert(name.to_owned(), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field, Value::String(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field, value.into());
    }
}

impl<S, N> FormatEvent<S, N> for LogSource
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        // Libraries have spans; what they are about may be all that tells whom a line is about.
        for span in context.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            let about = extensions.get::<FormattedFields<N>>().map(|it| it.fields.as_str());
            let text = format!("{}{{{}}}", span.name(), about.unwrap_or_default());
            match fields.others.get_mut("spans") {
                Some(Value::Array(spans)) => spans.push(text.into()),
                _ => drop(fields.others.insert("spans".to_owned(), json!([text]))),
            }
        }
        let metadata = event.metadata();
        let target = fields.target.as_deref().unwrap_or(metadata.target());
        let level = metadata.level().as_str();
        writeln!(writer, "{}", self.line(level, target, &fields.message, fields.others))
    }
}

#[cfg(test)]
mod tests {
    use shared::log::{LogLimits, SharedLog};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    fn source() -> LogSource {
        LogSource { process: "worker", node: "n\"0".to_owned() }
    }

    #[test]
    fn a_line_is_an_object_with_all_that_an_event_has() {
        let log = SharedLog::default();
        let kept = log.clone();
        let layer = tracing_subscriber::fmt::layer()
            .event_format(source())
            .with_writer(move || kept.writer());
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let error = std::io::Error::other("a \"quoted\"\nreason");
            let (node, none) = ("other", None::<u64>);
            tracing::warn!(node, %error, n = 3u64, at = -1i64, half = 0.5, is = true, none, "it {}", 1);
        });
        let lines = log.ring().since(0, LogLimits::OWN).lines;
        assert_eq!(lines.len(), 1, "{lines:?}");
        let line: Value = serde_json::from_str(&lines[0]).unwrap();
        for (key, wanted) in [
            ("level", json!("WARN")),
            ("target", json!(module_path!())),
            ("message", json!("it 1")),
            ("process", json!("worker")),
            ("node", json!("n\"0")),
            ("pid", json!(std::process::id())),
            (
                "fields",
                json!({
                    "node": "other", "error": "a \"quoted\"\nreason", "n": 3, "at": -1,
                    "half": 0.5, "is": true,
                }),
            ),
        ] {
            assert_eq!(line[key], wanted, "{key}");
        }
        // RFC 3339, in UTC: 2026-01-31T23:59:59.000000Z.
        let time = line["timestamp"].as_str().unwrap();
        let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert!(form.starts_with("0000-00-00T00:00:00") && form.ends_with('Z'), "{time}");
    }

    #[test]
    fn what_others_write_becomes_objects() {
        let text = source().passed_on("{\"level\":\"INFO\"}\nan abort's \"last\" words\n");
        let lines: Vec<Value> = text.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
        assert_eq!(lines[0], json!({"level": "INFO"}));
        assert_eq!(lines[1]["message"], "an abort's \"last\" words");
        assert_eq!(lines.len(), 2);
    }
}

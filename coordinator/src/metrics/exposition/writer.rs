//! Writes families as lines. A scrape of a thousand workers has a hundred thousand of them, so a
//! series' labels are written once and copied, and nothing else is allocated per line.
use std::fmt::Write as _;
use std::time::Duration;

use shared::metrics::local::Exemplar;
use shared::metrics::{Exemplars, HistogramTotals, Value};

use super::Format;

/// What all series of a family share.
pub(super) struct Family<'a> {
    pub(super) name: &'a str,
    pub(super) help: &'a str,
    /// `counter`, `gauge` or `histogram`.
    pub(super) kind: &'a str,
    /// A histogram's bounds, without the infinite one.
    pub(super) bounds: &'a [f64],
    /// Integer count of a counter that makes 1.
    pub(super) scale: f64,
    /// A label that every series has.
    pub(super) constant: Option<(&'a str, &'a str)>,
    pub(super) labels: &'a [&'a str],
}

pub(super) struct Writer<'a> {
    format: Format,
    clock_start: Duration,
    text: &'a mut String,
    /// The labels of the series being written.
    labels: String,
}

impl<'a> Writer<'a> {
    pub(super) fn new(format: Format, clock_start: Duration, text: &'a mut String) -> Self {
        Self { format, clock_start, text, labels: String::new() }
    }

    /// Writes a family; nothing if it has no series.
    pub(super) fn family<'s>(
        &mut self,
        family: &Family<'_>,
        series: impl Iterator<Item = (&'s [String], &'s Value)>,
        exemplars: &Exemplars,
    ) {
        let mut series = series.peekable();
        if series.peek().is_none() {
            return;
        }
        self.head(family.name, family.help, family.kind);
        let infinite = "+Inf".to_owned();
        let bounds: Vec<String> =
            family.bounds.iter().map(|le| float(*le)).chain([infinite]).collect();
        let exemplars: Vec<_> = match self.format {
            Format::OpenMetrics => {
                exemplars.iter().filter(|(id, ..)| id.definition().name == family.name).collect()
            }
            Format::Text => Vec::new(),
        };
        let mut labels = std::mem::take(&mut self.labels);
        for (values, value) in series {
            labels.clear();
            if let Some((name, value)) = family.constant {
                label(&mut labels, name, value);
            }
            for (name, value) in family.labels.iter().zip(values) {
                label(&mut labels, name, value);
            }
            match value {
                Value::Counter(total) if family.scale == 1.0 => {
                    self.sample(family.name, "", &labels, |text| {
                        let _ = write!(text, "{total}");
                    });
                }
                Value::Counter(total) => {
                    let total = *total as f64 / family.scale;
                    self.sample(family.name, "", &labels, |text| {
                        let _ = write!(text, "{total}");
                    });
                }
                Value::Gauge(value) => self.sample(family.name, "", &labels, |text| {
                    let _ = write!(text, "{value}");
                }),
                Value::Histogram(totals) => {
                    let of_bucket = |bucket: usize| {
                        let mut held = exemplars.iter();
                        let found = held.find(|(_, of, at, _)| **of == *values && *at == bucket);
                        found.map(|(.., exemplar)| exemplar)
                    };
                    self.histogram(family.name, &labels, &bounds, totals, of_bucket);
                }
            }
        }
        self.labels = labels;
    }

    /// Writes the lines before a family's samples.
    pub(super) fn head(&mut self, name: &str, help: &str, kind: &str) {
        let family = match self.format {
            // OpenMetrics names a counter family without the suffix of its samples.
            Format::OpenMetrics if kind == "counter" => name.strip_suffix("_total").unwrap_or(name),
            _ => name,
        };
        self.text.push_str("# HELP ");
        self.text.push_str(family);
        self.text.push(' ');
        escape(self.text, help, self.format == Format::OpenMetrics);
        self.text.push_str("\n# TYPE ");
        self.text.push_str(family);
        self.text.push(' ');
        self.text.push_str(kind);
        self.text.push('\n');
        if self.format == Format::OpenMetrics {
            for unit in ["seconds", "bytes", "ratio", "celsius", "watts"] {
                if family.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_')) {
                    // Writing to a String cannot fail.
                    let _ = writeln!(self.text, "# UNIT {family} {unit}");
                }
            }
        }
    }

    /// What the samples of the counter `name` have behind that name: OpenMetrics requires `_total`.
    pub(super) fn counter_suffix(&self, name: &str) -> &'static str {
        match self.format {
            Format::OpenMetrics if !name.ends_with("_total") => "_total",
            Format::OpenMetrics | Format::Text => "",
        }
    }

    /// Writes one line; `value` writes the number.
    pub(super) fn sample(
        &mut self,
        name: &str,
        suffix: &str,
        labels: &str,
        value: impl FnOnce(&mut String),
    ) {
        self.text.push_str(name);
        self.text.push_str(suffix);
        if !labels.is_empty() {
            self.text.push('{');
            self.text.push_str(labels);
            self.text.push('}');
        }
        self.text.push(' ');
        value(self.text);
        self.text.push('\n');
    }

    fn histogram<'e>(
        &mut self,
        name: &str,
        labels: &str,
        bounds: &[String],
        totals: &HistogramTotals,
        exemplar: impl Fn(usize) -> Option<&'e Exemplar>,
    ) {
        let mut cumulative = 0u64;
        for (index, le) in bounds.iter().enumerate() {
            cumulative = cumulative.saturating_add(totals.buckets.get(index).copied().unwrap_or(0));
            self.text.push_str(name);
            self.text.push_str("_bucket{");
            if !labels.is_empty() {
                self.text.push_str(labels);
                self.text.push(',');
            }
            self.text.push_str("le=\"");
            self.text.push_str(le);
            self.text.push_str("\"} ");
            let _ = write!(self.text, "{cumulative}");
            if let Some(held) = exemplar(index) {
                let at = self.clock_start.saturating_add(held.at).as_secs_f64();
                self.text.push_str(" # {");
                label_into(self.text, "request_id", &held.request_id);
                let _ = write!(self.text, "}} {} {at:.3}", held.value);
            }
            self.text.push('\n');
        }
        self.sample(name, "_sum", labels, |text| {
            let _ = write!(text, "{}", totals.sum());
        });
        self.sample(name, "_count", labels, |text| {
            let _ = write!(text, "{cumulative}");
        });
    }

    /// Writes the end of a page.
    pub(super) fn end(&mut self) {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
    }
}

/// Appends `name="value"`, after a comma unless it is the first.
pub(super) fn label(labels: &mut String, name: &str, value: &str) {
    if !labels.is_empty() {
        labels.push(',');
    }
    label_into(labels, name, value);
}

fn label_into(text: &mut String, name: &str, value: &str) {
    text.push_str(name);
    text.push_str("=\"");
    escape(text, value, true);
    text.push('"');
}

fn escape(text: &mut String, raw: &str, quotes: bool) {
    for c in raw.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '"' if quotes => text.push_str("\\\""),
            c => text.push(c),
        }
    }
}

/// Formats a bound as OpenMetrics requires: always with a decimal point.
pub(super) fn float(value: f64) -> String {
    let text = value.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

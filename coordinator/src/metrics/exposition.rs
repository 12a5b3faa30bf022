//! A scrape: merged totals as text, in the format that the scraper requests.
//!
//! - Prometheus text 0.0.4, the fallback
//! - OpenMetrics 1.0, which adds exemplars: the request behind a latency
//!
//! Bucket bounds are written alike in both (`1.0`), so that a change of format does not change
//! series.
mod writer;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus::proto::{Histogram, MetricFamily, MetricType};
use shared::metrics::catalogue::FRONTEND_PAGE;
use shared::metrics::compat::Compat;
use shared::metrics::labels::MODEL_NAME;
use shared::metrics::{Definition, Exemplars, Kind, Merged, application};

use self::writer::{Family, Writer};
use super::logger::StatLogger;

/// A text format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text, version 0.0.4.
    #[default]
    Text,
    /// OpenMetrics, version 1.0.0.
    OpenMetrics,
}

impl Format {
    /// Returns the Content-Type of a page.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Text => prometheus::TEXT_FORMAT,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Returns the format that an Accept header prefers; text if it prefers none of ours.
    #[must_use]
    pub fn negotiate(accept: &str) -> Self {
        let mut best = (0.0, Self::Text);
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut quality, mut version) = (1.0, String::new());
            for parameter in parts {
                match parameter.split_once('=') {
                    Some(("q", value)) => quality = value.trim().parse().unwrap_or(0.0),
                    Some(("version", value)) => value.trim().clone_into(&mut version),
                    _ => {}
                }
            }
            let format = match kind.as_str() {
                "application/openmetrics-text" if ["", "1.0.0", "0.0.1"].contains(&&*version) => {
                    Self::OpenMetrics
                }
                "text/plain" if ["", "0.0.4"].contains(&&*version) => Self::Text,
                "*/*" | "text/*" => Self::Text,
                _ => continue,
            };
            if quality > best.0 {
                best = (quality, format);
            }
        }
        best.1
    }
}

/// What a page holds besides the totals.
#[derive(Clone, Debug, Default)]
pub struct PageOptions {
    /// The value of `model_name`.
    pub model_name: String,
    /// Other servers whose metric names are published in addition to ours.
    pub compat: Vec<Compat>,
    /// Wall-clock time, since 1970, when the process's clock was at 0.
    pub clock_start: Duration,
    /// Whether the page is a front end's: only what it counts itself, under separate names.
    pub frontend: bool,
}

impl PageOptions {
    /// Returns a series' name on this page, if it is included.
    fn name(&self, of: &Definition) -> Option<&'static str> {
        if !self.frontend {
            return Some(of.name);
        }
        let own = FRONTEND_PAGE.iter().find(|(_, series)| series.definition().name == of.name);
        own.map(|(name, _)| *name)
    }
}

/// Everything that is published at one moment.
#[derive(Debug)]
pub struct Page<'a> {
    /// The cluster's totals.
    pub merged: &'a Merged,
    /// Series that the scraped process has about itself; none of `merged`.
    pub own: &'a Merged,
    /// Requests behind latencies; written if the format supports exemplars.
    pub exemplars: &'a Exemplars,
    /// Metrics of the `prometheus` crate's registry in this process.
    pub gathered: &'a [MetricFamily],
}

impl Page<'_> {
    /// Writes the page into `text`, which is cleared first and whose memory is reused.
    pub fn render(&self, format: Format, options: &PageOptions, text: &mut String) {
        text.clear();
        let mut writer = Writer::new(format, options.clock_start, text);
        let mut families: Vec<_> = self.merged.families().chain(self.own.families()).collect();
        families.sort_unstable_by_key(|(definition, _)| definition.name);
        for (definition, series) in families {
            let Some(name) = options.name(definition) else { continue };
            let labels: Vec<&str> = definition.labels.iter().map(|label| label.name).collect();
            let constant = definition.model.then_some((MODEL_NAME, options.model_name.as_str()));
            writer.family(
                &Family {
                    name,
                    help: definition.help,
                    kind: word(definition.kind),
                    bounds: definition.buckets(),
                    scale: definition.counter_scale(),
                    constant,
                    labels: &labels,
                },
                series.iter().map(|(labels, value)| (&**labels, value)),
                self.exemplars,
            );
        }
        for family in self.merged.application() {
            let declaration = &family.declaration;
            let (kind, bounds) = match &declaration.kind {
                application::Kind::Counter => ("counter", &[][..]),
                application::Kind::Gauge(_) => ("gauge", &[][..]),
                application::Kind::Histogram(bounds) => ("histogram", bounds.as_slice()),
            };
            let labels: Vec<&str> = declaration.tags.iter().map(String::as_str).collect();
            writer.family(
                &Family {
                    name: &declaration.name,
                    help: &declaration.help,
                    kind,
                    bounds,
                    scale: 1.0,
                    constant: None,
                    labels: &labels,
                },
                family.series.iter().map(|(labels, value)| (&**labels, value)),
                &Vec::new(),
            );
        }
        for compat in &options.compat {
            for family in compat.families(self.merged) {
                writer.family(
                    &Family {
                        name: family.name,
                        help: &family.help,
                        kind: word(family.kind),
                        bounds: family.bounds(),
                        scale: family.scale,
                        constant: Some((MODEL_NAME, options.model_name.as_str())),
                        labels: &family.labels,
                    },
                    family.series.iter().map(|(labels, value)| (&**labels, value)),
                    &Vec::new(),
                );
            }
        }
        for family in self.gathered {
            gathered(&mut writer, family);
        }
        writer.end();
    }
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Counter => "counter",
        Kind::Gauge(_) => "gauge",
        Kind::Histogram(_) => "histogram",
    }
}

/// Writes a family of the `prometheus` crate's registry: a counter, gauge or histogram.
fn gathered(writer: &mut Writer<'_>, family: &MetricFamily) {
    let (name, of) = (family.name(), family.get_field_type());
    let kind = match of {
        MetricType::COUNTER => "counter",
        MetricType::GAUGE => "gauge",
        MetricType::HISTOGRAM => "histogram",
        MetricType::SUMMARY | MetricType::UNTYPED => return not_shown(name),
    };
    writer.head(name, family.help(), kind);
    for metric in family.get_metric() {
        let mut labels = String::new();
        for pair in metric.get_label() {
            writer::label(&mut labels, pair.name(), pair.value());
        }
        let (suffix, value) = match of {
            MetricType::COUNTER => (writer.counter_suffix(name), metric.get_counter().get_value()),
            MetricType::HISTOGRAM => {
                gathered_histogram(writer, name, &labels, metric.get_histogram());
                continue;
            }
            _ => ("", metric.get_gauge().get_value()),
        };
        writer.sample(name, suffix, &labels, |text| {
            let _ = write!(text, "{value}");
        });
    }
}

/// Writes one histogram of that registry, whose buckets are cumulative already. The infinite one
/// is implied.
fn gathered_histogram(writer: &mut Writer<'_>, name: &str, labels: &str, totals: &Histogram) {
    let finite = totals.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
    let buckets = finite.map(|it| (writer::float(it.upper_bound()), it.cumulative_count()));
    let all = ("+Inf".to_owned(), totals.get_sample_count());
    for (le, count) in buckets.chain([all]) {
        let mut labels = labels.to_owned();
        writer::label(&mut labels, "le", &le);
        writer.sample(name, "_bucket", &labels, |text| {
            let _ = write!(text, "{count}");
        });
    }
    writer.sample(name, "_sum", labels, |text| {
        let _ = write!(text, "{}", totals.get_sample_sum());
    });
    writer.sample(name, "_count", labels, |text| {
        let _ = write!(text, "{}", totals.get_sample_count());
    });
}

/// Logs once of each family that it is not on the page.
fn not_shown(family: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(family.to_owned()) {
        tracing::warn!(family, "/metrics shows no summaries or untyped metrics of libraries");
    }
}

/// The Prometheus logger: holds the text of the last totals it was given. A scrape logs the present
/// totals and takes the text; the buffer is reused.
#[derive(Debug, Default)]
pub struct Exposition {
    options: PageOptions,
    text: String,
}

impl Exposition {
    /// Makes a logger of pages with `options`, in the text format.
    #[must_use]
    pub fn new(options: PageOptions) -> Self {
        Self { options, text: String::new() }
    }

    /// The text of the last totals.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl StatLogger for Exposition {
    fn log(&mut self, _now: Duration, merged: &Merged) {
        let own = Merged::default();
        let page = Page { merged, own: &own, exemplars: &Vec::new(), gathered: &[] };
        page.render(Format::Text, &self.options, &mut self.text);
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{Counter, HistogramOpts};
    use shared::ids::Incarnation;
    use shared::metrics::Limits;

    use super::*;
    use crate::metrics::Hub;

    #[test]
    fn what_libraries_register_is_on_both_pages() {
        let hub = Hub::new(Incarnation(1), Limits::default());
        let options = HistogramOpts::new("library_call_seconds", "Time of a call.")
            .buckets(vec![0.5, 2.0])
            .const_label("pool", "a");
        let seconds = prometheus::Histogram::with_opts(options).unwrap();
        let calls = Counter::new("library_calls", "Calls.").unwrap();
        hub.registry().register(Box::new(seconds.clone())).unwrap();
        hub.registry().register(Box::new(calls.clone())).unwrap();
        for value in [0.25, 1.0, 3.0] {
            seconds.observe(value);
        }
        calls.inc_by(3.0);
        let gathered = hub.registry().gather();
        let nothing = Merged::default();
        let page =
            Page { merged: &nothing, own: &nothing, exemplars: &Vec::new(), gathered: &gathered };
        for (format, sample) in
            [(Format::Text, "library_calls"), (Format::OpenMetrics, "library_calls_total")]
        {
            let mut text = String::new();
            page.render(format, &PageOptions::default(), &mut text);
            assert!(text.contains("# TYPE library_call_seconds histogram\n"), "{text}");
            let histogram = "\
library_call_seconds_bucket{pool=\"a\",le=\"0.5\"} 1
library_call_seconds_bucket{pool=\"a\",le=\"2.0\"} 2
library_call_seconds_bucket{pool=\"a\",le=\"+Inf\"} 3
library_call_seconds_sum{pool=\"a\"} 4.25
library_call_seconds_count{pool=\"a\"} 3
";
            assert!(text.contains(histogram), "{text}");
            let counter = format!("# TYPE library_calls counter\n{sample} 3\n");
            assert!(text.contains(&counter), "{text}");
        }
    }
}

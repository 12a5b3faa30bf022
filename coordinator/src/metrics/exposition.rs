//! Merged totals as Prometheus text, version 0.0.4.
//!
//! Totals are merged already, so families are built from them directly instead of through the
//! library's own counters: a histogram of it cannot take added-up buckets.
use std::time::Duration;

use prometheus::TextEncoder;
use prometheus::proto;
use shared::metrics::{Definition, HistogramTotals, Kind, LabelValues, Merged, Value};

use super::logger::StatLogger;

/// Content-Type of the text.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// Renders merged totals.
///
/// # Errors
/// Returns the encoder's error, which only a family without a name or a sample causes.
pub fn render(merged: &Merged) -> Result<String, prometheus::Error> {
    let mut text = String::new();
    encode(merged, &mut text)?;
    Ok(text)
}

/// The Prometheus logger: holds the text of the last totals it was given. A scrape logs the totals
/// of that moment and takes the text; its buffer is used again.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// The last totals' text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl StatLogger for Exposition {
    fn log(&mut self, _now: Duration, merged: &Merged) {
        self.text.clear();
        if let Err(error) = encode(merged, &mut self.text) {
            // Half a text would be read as series that vanished.
            self.text.clear();
            tracing::error!(%error, "the metrics could not be rendered");
        }
    }
}

fn encode(merged: &Merged, text: &mut String) -> Result<(), prometheus::Error> {
    let mut families: Vec<_> = merged
        .families()
        .map(|(definition, family)| {
            let samples = family.iter().map(|(labels, value)| sample(definition, labels, value));
            let mut family = proto::MetricFamily::default();
            family.set_name(definition.name.to_owned());
            family.set_help(definition.help.to_owned());
            family.set_field_type(match definition.kind {
                Kind::Counter => proto::MetricType::COUNTER,
                Kind::Gauge(_) => proto::MetricType::GAUGE,
                Kind::Histogram(_) => proto::MetricType::HISTOGRAM,
            });
            family.set_metric(samples.collect());
            family
        })
        .collect();
    families.sort_by(|a, b| a.name().cmp(b.name()));
    TextEncoder::new().encode_utf8(&families, text)
}

fn sample(definition: &Definition, labels: &LabelValues, value: &Value) -> proto::Metric {
    let pairs = definition.labels.iter().zip(labels.iter()).map(|(label, value)| {
        let mut pair = proto::LabelPair::default();
        pair.set_name(label.name.to_owned());
        pair.set_value(value.clone());
        pair
    });
    let mut metric = proto::Metric::from_label(pairs.collect());
    match value {
        Value::Counter(total) => {
            let mut counter = proto::Counter::default();
            counter.set_value(*total as f64);
            metric.set_counter(counter);
        }
        Value::Gauge(value) => {
            let mut gauge = proto::Gauge::default();
            gauge.set_value(*value);
            metric.set_gauge(gauge);
        }
        Value::Histogram(totals) => metric.set_histogram(histogram(definition.buckets(), totals)),
    }
    metric
}

/// Buckets become cumulative here. The infinite one is left out: the encoder writes it from the
/// count, and would print an explicit one as `inf`.
fn histogram(bounds: &[f64], totals: &HistogramTotals) -> proto::Histogram {
    let mut cumulative = 0;
    let buckets = bounds.iter().zip(&totals.buckets).map(|(bound, count)| {
        cumulative += count;
        let mut bucket = proto::Bucket::default();
        bucket.set_upper_bound(*bound);
        bucket.set_cumulative_count(cumulative);
        bucket
    });
    let mut histogram = proto::Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(totals.count());
    histogram.set_sample_sum(totals.sum());
    histogram
}

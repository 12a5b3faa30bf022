//! The periodic log line.
//!
//! Its default text is the one that operators of other servers already parse; the values are the
//! merged ones. It is quiet when idle: after one line that shows zero, nothing until something
//! happens.
use std::time::Duration;

use shared::metrics::Merged;

use super::interval::{Interval, Intervals, Speculation};
use super::logger::StatLogger;

/// A part of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Prompt tokens computed per second.
    PromptThroughput,
    /// Tokens generated per second.
    GenerationThroughput,
    /// Requests in a batch.
    Running,
    /// Requests in host memory.
    Swapped,
    /// Requests waiting.
    Pending,
    /// Use of the device's KV cache.
    GpuCache,
    /// Use of the host's KV cache.
    CpuCache,
    /// Requests that ended in the interval.
    Finished,
    /// Preemptions in the interval.
    Preemptions,
    /// Mean time to first token.
    Ttft,
    /// Mean time between tokens.
    InterToken,
    /// Mean end-to-end latency.
    E2e,
    /// Replicas that serve.
    Replicas,
    /// Workers that are linked.
    Workers,
}

impl Field {
    /// Every field, by its name in options.
    pub const ALL: [(&'static str, Self); 14] = [
        ("prompt-throughput", Self::PromptThroughput),
        ("generation-throughput", Self::GenerationThroughput),
        ("running", Self::Running),
        ("swapped", Self::Swapped),
        ("pending", Self::Pending),
        ("gpu-cache", Self::GpuCache),
        ("cpu-cache", Self::CpuCache),
        ("finished", Self::Finished),
        ("preemptions", Self::Preemptions),
        ("ttft", Self::Ttft),
        ("inter-token", Self::InterToken),
        ("e2e", Self::E2e),
        ("replicas", Self::Replicas),
        ("workers", Self::Workers),
    ];

    /// The default fields of the line.
    pub const DEFAULT: [Self; 7] = [
        Self::PromptThroughput,
        Self::GenerationThroughput,
        Self::Running,
        Self::Swapped,
        Self::Pending,
        Self::GpuCache,
        Self::CpuCache,
    ];

    fn text(self, interval: &Interval) -> String {
        let seconds =
            |mean: Option<f64>| mean.map_or_else(|| "-".to_owned(), |mean| format!("{mean:.4} s"));
        match self {
            Self::PromptThroughput => {
                format!("Avg prompt throughput: {:.1} tokens/s", interval.prompt_throughput)
            }
            Self::GenerationThroughput => {
                format!("Avg generation throughput: {:.1} tokens/s", interval.generation_throughput)
            }
            Self::Running => format!("Running: {} reqs", interval.running),
            Self::Swapped => format!("Swapped: {} reqs", interval.swapped),
            Self::Pending => format!("Pending: {} reqs", interval.pending),
            Self::GpuCache => format!("GPU KV cache usage: {:.1}%", 100.0 * interval.kv_usage),
            Self::CpuCache => format!("CPU KV cache usage: {:.1}%", 100.0 * interval.host_kv_usage),
            Self::Finished => format!("Finished: {} reqs", interval.finished),
            Self::Preemptions => format!("Preemptions: {}", interval.preemptions),
            Self::Ttft => format!("Avg time to first token: {}", seconds(interval.ttft)),
            Self::InterToken => {
                format!("Avg inter-token latency: {}", seconds(interval.inter_token))
            }
            Self::E2e => format!("Avg end-to-end latency: {}", seconds(interval.e2e)),
            Self::Replicas => format!("Replicas: {}", interval.replicas),
            Self::Workers => format!("Workers: {}", interval.workers),
        }
    }
}

/// Writes the log line.
#[derive(Debug)]
pub struct LogLine {
    intervals: Intervals,
    fields: Vec<Field>,
    was_idle: bool,
}

impl LogLine {
    /// Starts the averages of the first line at `now`, with totals at 0.
    #[must_use]
    pub fn new(now: Duration, fields: Vec<Field>) -> Self {
        Self { intervals: Intervals::new(now), fields, was_idle: true }
    }

    /// Returns the lines for the time since the last call; none if there is nothing to say.
    pub fn lines(&mut self, now: Duration, merged: &Merged) -> Vec<String> {
        let Some(interval) = self.intervals.next(now, merged) else { return Vec::new() };
        let idle = interval.is_idle();
        let quiet = idle && self.was_idle;
        self.was_idle = idle;
        if quiet {
            return Vec::new();
        }
        let fields: Vec<String> = self.fields.iter().map(|field| field.text(&interval)).collect();
        let mut lines = vec![format!("{}.", fields.join(", "))];
        lines.extend(interval.speculation.map(speculation));
        lines
    }
}

/// The line about speculative decoding.
fn speculation(of: Speculation) -> String {
    let ratio = |part: u64, whole: u64| if whole > 0 { part as f64 / whole as f64 } else { 0.0 };
    // Each draft of k tokens could emit k + 1.
    let drafts = of.emittable.saturating_sub(of.draft);
    format!(
        "Speculative metrics: Draft acceptance rate: {:.3}, System efficiency: {:.3}, \
         Number of speculative tokens: {:.0}, Number of accepted tokens: {}, \
         Number of draft tokens: {}, Number of emitted tokens: {}.",
        ratio(of.accepted, of.draft),
        ratio(of.emitted, of.emittable),
        ratio(of.draft, drafts),
        of.accepted,
        of.draft,
        of.emitted,
    )
}

impl StatLogger for LogLine {
    fn begin(&mut self, now: Duration, merged: &Merged) {
        self.intervals.begin(now, merged);
    }

    fn log(&mut self, now: Duration, merged: &Merged) {
        for line in self.lines(now, merged) {
            tracing::info!("{line}");
        }
    }
}

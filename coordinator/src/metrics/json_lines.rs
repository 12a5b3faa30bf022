//! The interval's figures as one JSON object per line: for scripts, without a Prometheus server.
use std::io::Write;
use std::time::Duration;

use serde_json::{Value, json};
use shared::metrics::Merged;

use super::interval::Intervals;
use super::logger::StatLogger;

/// Writes JSON lines.
pub struct JsonLines {
    intervals: Intervals,
    out: Box<dyn Write + Send>,
    clock_start: Duration,
    failed: bool,
}

impl std::fmt::Debug for JsonLines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JsonLines").field("intervals", &self.intervals).finish_non_exhaustive()
    }
}

impl JsonLines {
    /// Makes a logger to `out`. `clock_start` is the wall-clock time, since 1970, when the
    /// process's clock was at 0.
    #[must_use]
    pub fn new(now: Duration, clock_start: Duration, out: Box<dyn Write + Send>) -> Self {
        Self { intervals: Intervals::new(now), out, clock_start, failed: false }
    }

    /// Returns the object for the time since the last call.
    pub fn object(&mut self, now: Duration, merged: &Merged) -> Option<Value> {
        let interval = self.intervals.next(now, merged)?;
        let mut object = json!({
            "time": (self.clock_start + now).as_secs_f64(),
            "interval_seconds": interval.seconds,
            "prompt_tokens_per_second": interval.prompt_throughput,
            "generation_tokens_per_second": interval.generation_throughput,
            "requests_running": interval.running,
            "requests_waiting": interval.pending,
            "requests_swapped": interval.swapped,
            "requests_in_flight": interval.in_flight,
            "requests_finished": interval.finished,
            "requests_failed": interval.failed,
            "requests_aborted": interval.aborted,
            "requests_rejected": interval.rejected,
            "kv_cache_usage_ratio": interval.kv_usage,
            "host_kv_cache_usage_ratio": interval.host_kv_usage,
            "preemptions": interval.preemptions,
            "time_to_first_token_seconds": interval.ttft,
            "inter_token_latency_seconds": interval.inter_token,
            "e2e_request_latency_seconds": interval.e2e,
            "replicas": interval.replicas,
            "workers": interval.workers,
        });
        if let Some(speculation) = interval.speculation {
            object["spec_decode_draft_tokens"] = json!(speculation.draft);
            object["spec_decode_accepted_tokens"] = json!(speculation.accepted);
            object["spec_decode_emitted_tokens"] = json!(speculation.emitted);
        }
        Some(object)
    }
}

impl StatLogger for JsonLines {
    fn begin(&mut self, now: Duration, merged: &Merged) {
        self.intervals.begin(now, merged);
    }

    fn log(&mut self, now: Duration, merged: &Merged) {
        let Some(object) = self.object(now, merged) else { return };
        let written = self.out.write_all(format!("{object}\n").as_bytes());
        let written = written.and_then(|()| self.out.flush());
        // Logged once: a full disk would otherwise fill the log, too.
        if let Err(error) = written
            && !std::mem::replace(&mut self.failed, true)
        {
            tracing::error!(%error, "stats cannot be written as JSON");
        }
    }
}

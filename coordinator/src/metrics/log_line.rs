//! The periodic log line.
//!
//! Its text is the one that operators of other servers already parse; the values are the merged
//! ones. Quiet when idle: after one line that shows zero, nothing until something happens.
use std::time::Duration;

use shared::metrics::Merged;
use shared::metrics::catalogue::{
    GENERATION_TOKENS, KV_CACHE_BLOCKS, KV_CACHE_BLOCKS_USED, PROMPT_TOKENS_BY_SOURCE,
    REQUESTS_RUNNING, REQUESTS_SWAPPED, REQUESTS_WAITING,
};
use shared::metrics::labels::PromptSource;

use super::logger::StatLogger;

/// Writes the log line.
#[derive(Debug)]
pub struct LogLine {
    at: Duration,
    prompt: u64,
    generation: u64,
    was_idle: bool,
}

impl LogLine {
    /// Averages of the first line count from `now`, with totals at 0.
    #[must_use]
    pub fn new(now: Duration) -> Self {
        Self { at: now, prompt: 0, generation: 0, was_idle: true }
    }

    /// The line for the time since the last call, or `None` when there is nothing to say.
    pub fn line(&mut self, now: Duration, merged: &Merged) -> Option<String> {
        let elapsed = now.saturating_sub(self.at).as_secs_f64();
        if elapsed <= 0.0 {
            return None;
        }
        // Only prompt tokens that cost computation: a cache hit is no throughput.
        let prompt = merged.counter_sum_of(PROMPT_TOKENS_BY_SOURCE, PromptSource::LocalCompute);
        let generation = merged.counter_sum(GENERATION_TOKENS);
        let per_second = |now: u64, before: u64| now.saturating_sub(before) as f64 / elapsed;
        let prompt_rate = per_second(prompt, self.prompt);
        let generation_rate = per_second(generation, self.generation);
        let running = merged.gauge_sum(REQUESTS_RUNNING);
        let swapped = merged.gauge_sum(REQUESTS_SWAPPED);
        let pending = merged.gauge_sum(REQUESTS_WAITING);
        (self.at, self.prompt, self.generation) = (now, prompt, generation);

        let idle = prompt_rate + generation_rate + running + swapped + pending == 0.0;
        let quiet = idle && self.was_idle;
        self.was_idle = idle;
        if quiet {
            return None;
        }
        let blocks = merged.gauge_sum(KV_CACHE_BLOCKS);
        let used = merged.gauge_sum(KV_CACHE_BLOCKS_USED);
        let usage = if blocks > 0.0 { 100.0 * used / blocks } else { 0.0 };
        // There is no host cache yet: its share of use is 0.
        Some(format!(
            "Avg prompt throughput: {prompt_rate:.1} tokens/s, \
             Avg generation throughput: {generation_rate:.1} tokens/s, \
             Running: {running} reqs, Swapped: {swapped} reqs, Pending: {pending} reqs, \
             GPU KV cache usage: {usage:.1}%, CPU KV cache usage: {:.1}%.",
            0.0
        ))
    }
}

impl StatLogger for LogLine {
    fn log(&mut self, now: Duration, merged: &Merged) {
        if let Some(line) = self.line(now, merged) {
            tracing::info!("{line}");
        }
    }
}

//! The thread that sends spans to a collector, and the bounded queue before it.
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use shared::metrics::labels::SpanLoss;
use shared::mix::mix;
use tokio::sync::oneshot;
use ureq::Agent;
use ureq::http::{HeaderName, HeaderValue};

use super::otlp::{Envelope, encode};
use super::retry::{Answer, Verdict, rejected, verdict};
use super::settings::{Batches, Settings};
use super::span::Span;
use crate::metrics::FrontendStats;

/// Largest message, in bytes. Collectors take at least so much.
const MESSAGE_MAX: usize = 4 << 20;
/// Longest part of an answer that is read.
const ANSWER_MAX: u64 = 64 << 10;
/// Time between two lines of the log about lost spans.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(60);

/// See the module's documentation. When it is dropped, its thread ends.
#[derive(Debug)]
pub(super) struct Exporter {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Something about the queue has changed that its thread waits for.
    changed: Condvar,
    batches: Batches,
    stats: OnceLock<FrontendStats>,
}

#[derive(Debug, Default)]
struct Queue {
    spans: VecDeque<Span>,
    /// When the oldest of them was put there.
    since: Option<Instant>,
    /// Spans that its thread is sending.
    sending: usize,
    /// Spans that found no room since the thread last looked.
    overflown: u64,
    /// Until when everything is to be sent, and whom to tell.
    flush: Option<(Instant, Vec<oneshot::Sender<()>>)>,
    closed: bool,
}

impl Exporter {
    /// Starts the thread.
    pub(super) fn start(settings: &Settings, agent: Agent, envelope: Envelope) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            batches: settings.batches,
            stats: OnceLock::new(),
        });
        let sender = Sender {
            shared: shared.clone(),
            agent,
            envelope,
            endpoint: settings.endpoint.clone(),
            headers: settings.headers.clone(),
            timeout: settings.timeout,
            complaint: Complaint::default(),
            tries: 0,
        };
        std::thread::Builder::new().name("traces".to_owned()).spawn(move || sender.run())?;
        Ok(Self { shared })
    }

    /// Queues a request's spans: all of them, or none if there is no room.
    pub(super) fn offer(&self, spans: Vec<Span>) {
        let Shared { batches, changed, .. } = &*self.shared;
        let count = spans.len();
        let mut queue = self.shared.queue();
        if queue.spans.len() + queue.sending + count > batches.queued {
            queue.overflown += count as u64;
            drop(queue);
            return self.shared.lost(SpanLoss::QueueFull, count as u64);
        }
        queue.since.get_or_insert_with(Instant::now);
        queue.spans.extend(spans);
        if queue.spans.len() >= batches.spans || queue.spans.len() == count {
            // Enough for a message, or the first: its time begins to run.
            changed.notify_one();
        }
    }

    pub(super) fn count_in(&self, stats: &FrontendStats) {
        let _ = self.shared.stats.set(stats.clone());
    }

    pub(super) async fn flush(&self, patience: Duration) {
        let (done, sent) = oneshot::channel();
        {
            let mut queue = self.shared.queue();
            let until = Instant::now() + patience;
            let flush = queue.flush.get_or_insert_with(|| (until, Vec::new()));
            flush.0 = flush.0.min(until);
            flush.1.push(done);
        }
        self.shared.changed.notify_one();
        if tokio::time::timeout(patience, sent).await.is_err() {
            let queue = self.shared.queue();
            let spans = queue.spans.len() + queue.sending;
            tracing::warn!(spans, "spans are lost: the collector did not take them in time");
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.changed.notify_one();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic elsewhere leaves a usable queue behind.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self, reason: SpanLoss, spans: u64) {
        if let Some(stats) = self.stats.get() {
            stats.spans_dropped(reason, spans);
        }
    }

    /// Waits until a message is due and takes its spans; `None` when nobody traces any more.
    fn take(&self) -> Option<Vec<Span>> {
        let mut queue = self.queue();
        queue.sending = 0;
        loop {
            if queue.spans.is_empty()
                && let Some((_, done)) = queue.flush.take()
            {
                // Who does not wait any more need not be told.
                for done in done {
                    let _ = done.send(());
                }
            }
            if queue.closed {
                return None;
            }
            let waited = queue.since.map(|since| since.elapsed());
            let due = queue.spans.len() >= self.batches.spans
                || waited.is_some_and(|waited| waited >= self.batches.delay)
                || queue.flush.is_some();
            if due && !queue.spans.is_empty() {
                let count = queue.spans.len().min(self.batches.spans);
                let taken = queue.spans.drain(..count).collect();
                queue.since = (!queue.spans.is_empty()).then(Instant::now);
                queue.sending = count;
                return Some(taken);
            }
            queue = match waited {
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(waited) => {
                    let left = self.batches.delay.saturating_sub(waited);
                    let woken = self.changed.wait_timeout(queue, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Waits before a message is sent again, no longer than until everything must be sent; returns
    /// whether it may be sent again at `at`.
    fn pause(&self, at: Instant) -> bool {
        let mut queue = self.queue();
        loop {
            if queue.closed || queue.flush.as_ref().is_some_and(|(until, _)| *until <= at) {
                return false;
            }
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let woken = self.changed.wait_timeout(queue, left);
            queue = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The thread's own.
struct Sender {
    shared: Arc<Shared>,
    agent: Agent,
    envelope: Envelope,
    endpoint: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    timeout: Duration,
    complaint: Complaint,
    /// Number of attempts, which spreads the waits between them.
    tries: u64,
}

impl Sender {
    fn run(mut self) {
        while let Some(spans) = self.shared.take() {
            let encoded: Vec<String> = spans.iter().map(encode).collect();
            let mut rest = encoded.as_slice();
            while !rest.is_empty() {
                let mut bytes = 0;
                let fits = |span: &&String| {
                    bytes += span.len();
                    bytes <= MESSAGE_MAX
                };
                let count = rest.iter().take_while(fits).count().max(1);
                let (now, later) = rest.split_at(count);
                self.send(now);
                rest = later;
            }
            let overflown = std::mem::take(&mut self.shared.queue().overflown);
            if overflown > 0 {
                self.complaint.lost(overflown, || "the queue is full".to_owned());
            }
        }
    }

    /// Sends one message until it is taken or given up.
    fn send(&mut self, spans: &[String]) {
        let message = self.envelope.message(spans);
        let (began, count) = (Instant::now(), spans.len() as u64);
        for before in 0.. {
            self.tries += 1;
            let (answer, said) = self.attempt(&message);
            // No secret depends on it.
            let random = mix(self.tries, &[std::process::id()]);
            match verdict(&answer, before, random) {
                Verdict::Taken => return self.taken(count, &said),
                Verdict::Again(wait) => {
                    let at = Instant::now() + wait;
                    if at - began < self.shared.batches.patience && self.shared.pause(at) {
                        continue;
                    }
                    self.shared.lost(SpanLoss::Unreachable, count);
                }
                Verdict::Refused => self.shared.lost(SpanLoss::Refused, count),
            }
            let endpoint = &self.endpoint;
            return self.complaint.lost(count, || match answer {
                Answer::Status(status, _) => format!("{endpoint} answers {status}: {said}"),
                Answer::None => format!("{endpoint} cannot be asked: {said}"),
            });
        }
    }

    /// A message was taken, perhaps not all of it.
    fn taken(&mut self, spans: u64, body: &str) {
        let (refused, why) = rejected(body);
        let refused = refused.min(spans);
        if let Some(stats) = self.shared.stats.get() {
            stats.spans_exported(spans - refused);
        }
        if refused > 0 {
            self.shared.lost(SpanLoss::Refused, refused);
            let why = shown(&why);
            self.complaint.lost(refused, || format!("the collector refuses them: {why}"));
        } else {
            self.complaint.works();
        }
    }

    /// Sends a message once. Returns the answer, and its body or what went wrong.
    fn attempt(&self, message: &str) -> (Answer, String) {
        let request = self.agent.post(&self.endpoint);
        let mut request = request.header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.config().timeout_global(Some(self.timeout)).build();
        match request.send(message) {
            Ok(mut response) => {
                let after = response.headers().get("retry-after");
                let after = after.and_then(|it| it.to_str().ok()?.trim().parse().ok());
                let answer = Answer::Status(response.status().as_u16(), after);
                let body = response.body_mut().with_config().limit(ANSWER_MAX).read_to_string();
                let body = body.unwrap_or_default();
                let is_taken = response.status().is_success();
                (answer, if is_taken { body } else { shown(&body) })
            }
            Err(error) => (Answer::None, error.to_string()),
        }
    }
}

/// The beginning of what a collector says, in one line.
fn shown(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).take(200).collect()
}

/// Says rarely that spans are lost.
#[derive(Debug, Default)]
struct Complaint {
    /// When it was last said, while spans are being lost.
    said: Option<Instant>,
    /// Spans lost since then.
    spans: u64,
}

impl Complaint {
    fn lost(&mut self, spans: u64, why: impl FnOnce() -> String) {
        self.spans += spans;
        if self.said.is_none_or(|said| said.elapsed() >= COMPLAINT_INTERVAL) {
            let (spans, why) = (std::mem::take(&mut self.spans), why());
            tracing::warn!(spans, why, "spans are lost");
            self.said = Some(Instant::now());
        }
    }

    fn works(&mut self) {
        // Not at once after a complaint: a collector that comes and goes would fill the log.
        if self.said.is_some_and(|said| said.elapsed() >= COMPLAINT_INTERVAL) {
            tracing::info!(spans = self.spans, "spans are exported again");
            *self = Self::default();
        }
    }
}

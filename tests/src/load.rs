//! A steady load of streaming requests that notices everything: failed requests, texts that differ
//! from the undisturbed ones, and every silence that a client sees.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::client::Client;

/// Number of different requests; clients send them in turn.
const REQUESTS: u32 = 12;
/// Shorter silences are steps, not pauses.
const PAUSE_MIN: Duration = Duration::from_millis(20);

/// A silence between two events of a stream, or before the first one.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    /// Its beginning.
    pub began: Instant,
    /// Its length.
    pub lasted: Duration,
}

/// The observations of a load.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Number of complete answers with the undisturbed text.
    pub good: u32,
    /// Descriptions of all other outcomes.
    pub failures: Vec<String>,
    /// All silences, ordered by when they ended.
    pub pauses: Vec<Pause>,
}

impl Seen {
    /// The longest silence that ended after `from` and began before `until`.
    #[must_use]
    pub fn longest(&self, from: Instant, until: Instant) -> Duration {
        let meets = |pause: &&Pause| pause.began < until && pause.began + pause.lasted > from;
        self.pauses.iter().filter(meets).map(|pause| pause.lasted).max().unwrap_or_default()
    }
}

/// Clients that each stream one request after the other.
#[derive(Debug)]
pub struct Load {
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

/// One of the requests.
fn request(index: u32, tokens: u32) -> Value {
    let prompt = format!("Once upon a time, there was {} little foxes.", index + 2);
    json!({
        "model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0.8,
        "seed": index, "ignore_eos": true, "stream": true,
    })
}

/// Streams a request; returns its text.
async fn stream(
    client: &Client,
    body: &Value,
    mut pause: impl FnMut(Pause),
) -> Result<String, String> {
    let mut began = Instant::now();
    let said = |error: &dyn std::fmt::Display| error.to_string();
    let mut response = client.open("/v1/completions", body).await.map_err(|error| said(&error))?;
    let status = response.status();
    let (mut bytes, mut events) = (Vec::new(), 0);
    loop {
        let chunk = response.chunk().await.map_err(|error| said(&error))?;
        let lasted = began.elapsed();
        if lasted >= PAUSE_MIN {
            pause(Pause { began, lasted });
        }
        let Some(chunk) = chunk else { break };
        bytes.extend_from_slice(&chunk);
        // What only keeps the connection open does not end a silence.
        if !chunk.trim_ascii().is_empty() {
            (began, events) = (Instant::now(), events + 1);
        }
    }
    let all = String::from_utf8(bytes).map_err(|error| said(&error))?;
    if !status.is_success() || !all.ends_with("data: [DONE]\n\n") {
        let end: String = all.chars().rev().take(200).collect();
        let end: String = end.chars().rev().collect();
        return Err(format!("{status}, after {events} pieces: {end}"));
    }
    let mut text = String::new();
    for line in all.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if let Ok(event) = serde_json::from_str::<Value>(line) {
            text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
        }
    }
    Ok(text)
}

impl Load {
    /// Requests every text once, undisturbed, then starts `count` clients per server, whose
    /// requests generate `tokens` tokens each. A client rests between two requests.
    ///
    /// # Errors
    /// When an undisturbed request fails.
    pub async fn start(
        servers: &[Client],
        count: u32,
        tokens: u32,
        rest: Duration,
    ) -> Result<Self, String> {
        let mut texts = BTreeMap::new();
        for (index, server) in (0..REQUESTS).zip(servers.iter().cycle()) {
            let text = stream(server, &request(index, tokens), |_| {}).await?;
            texts.insert(index, text);
        }
        let (texts, seen) = (Arc::new(texts), Arc::new(Mutex::new(Seen::default())));
        let (stop, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let each = servers.iter().flat_map(|server| (0..count).map(move |_| server.clone()));
        let clients = each
            .map(|server| {
                let (texts, seen) = (texts.clone(), seen.clone());
                let (stop, next) = (stop.clone(), next.clone());
                tokio::spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        let index = next.fetch_add(1, Ordering::Relaxed) % REQUESTS;
                        let note = |pause| lock(&seen).pauses.push(pause);
                        let text = stream(&server, &request(index, tokens), note).await;
                        let wrong = match text {
                            Ok(text) if Some(&text) == texts.get(&index) => None,
                            Ok(text) => Some(format!("{text:?}")),
                            Err(error) => Some(error),
                        };
                        match wrong {
                            None => lock(&seen).good += 1,
                            Some(it) => lock(&seen).failures.push(format!("request {index}: {it}")),
                        }
                        tokio::time::sleep(rest).await;
                    }
                })
            })
            .collect();
        Ok(Self { seen, stop, clients })
    }

    /// The observations so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }

    /// Lets running requests finish; returns all observations.
    pub async fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            let _ = client.await;
        }
        lock(&self.seen).clone()
    }
}

fn lock(seen: &Mutex<Seen>) -> std::sync::MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

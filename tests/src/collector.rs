//! A stand-in for a collector of traces: takes messages in OTLP's JSON over HTTP, and answers as it
//! is told.
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::wait::until;

/// How it answers.
#[derive(Clone, Debug)]
pub struct Manner {
    /// The status.
    pub status: u16,
    /// More headers, each with its line's end.
    pub headers: String,
    /// The body.
    pub body: String,
    /// How long it waits before.
    pub delay: Duration,
}

impl Default for Manner {
    fn default() -> Self {
        let (headers, body) = (String::new(), r#"{"partialSuccess":{}}"#.to_owned());
        Self { status: 200, headers, body, delay: Duration::ZERO }
    }
}

/// A message that came.
#[derive(Clone, Debug)]
pub struct Message {
    /// When.
    pub at: Instant,
    /// Method and path.
    pub request: String,
    /// The headers, with names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Value,
    /// How it was answered.
    pub status: u16,
}

/// A running collector.
#[derive(Clone, Debug)]
pub struct Collector {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    manner: Manner,
    messages: Vec<Message>,
}

impl Collector {
    /// Starts one that takes everything.
    ///
    /// # Errors
    /// If there is no port.
    pub fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let collector = Self { address: listener.local_addr()?, state: Arc::default() };
        let state = collector.state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = state.clone();
                std::thread::spawn(move || serve(stream, &state));
            }
        });
        Ok(collector)
    }

    /// Where it takes messages.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/v1/traces", self.address)
    }

    /// Answers like this from now on.
    pub fn answer(&self, manner: Manner) {
        lock(&self.state).manner = manner;
    }

    /// The messages so far.
    #[must_use]
    pub fn messages(&self) -> Vec<Message> {
        lock(&self.state).messages.clone()
    }

    /// The spans of all messages that were taken.
    #[must_use]
    pub fn spans(&self) -> Vec<Value> {
        let taken = self.messages().into_iter().filter(|message| message.status == 200);
        taken.flat_map(|message| spans(&message.body)).collect()
    }

    /// Waits for a request's spans, its own first.
    ///
    /// # Panics
    /// If it does not come.
    pub async fn request(&self, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
        until("the spans of a request", async || {
            let all = self.spans();
            let own = all.iter().find(|span| span["name"] == "llm_request" && is_it(span))?;
            let parts = all.iter().filter(|span| {
                span["traceId"] == own["traceId"] && span["parentSpanId"] == own["spanId"]
            });
            Some([own].into_iter().chain(parts).cloned().collect())
        })
        .await
    }
}

/// The spans of a message.
#[must_use]
pub fn spans(message: &Value) -> Vec<Value> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let scopes = list(&message["resourceSpans"]).into_iter().flat_map(|it| list(&it["scopeSpans"]));
    scopes.flat_map(|scope| list(&scope["spans"])).collect()
}

/// The value of an attribute of a span, event or resource, as plain JSON; null if there is none.
#[must_use]
pub fn attribute(of: &Value, key: &str) -> Value {
    let attributes = of["attributes"].as_array().map_or(&[][..], Vec::as_slice);
    let found = attributes.iter().find(|it| it["key"] == key);
    found.map_or(Value::Null, |it| plain(&it["value"]))
}

fn plain(value: &Value) -> Value {
    let int = |digits: &Value| digits.as_str()?.parse::<i64>().ok().map(Value::from);
    match value.as_object().and_then(|object| object.iter().next()) {
        Some((kind, it)) if kind == "intValue" => int(it).unwrap_or(Value::Null),
        Some((kind, it)) if kind == "arrayValue" => {
            let all = it["values"].as_array().map_or(&[][..], Vec::as_slice);
            all.iter().map(plain).collect()
        }
        Some((_, it)) => it.clone(),
        None => Value::Null,
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers the requests of one connection.
fn serve(stream: TcpStream, state: &Mutex<State>) {
    let Ok(mut answers) = stream.try_clone() else { return };
    let mut lines = BufReader::new(stream);
    loop {
        let Some((request, headers)) = head(&mut lines) else { return };
        let length = headers.iter().find(|(name, _)| name == "content-length");
        let length = length.and_then(|(_, value)| value.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        if lines.read_exact(&mut body).is_err() {
            return;
        }
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let manner = {
            let mut state = lock(state);
            let (at, status) = (Instant::now(), state.manner.status);
            state.messages.push(Message { at, request, headers, body, status });
            state.manner.clone()
        };
        std::thread::sleep(manner.delay);
        let Manner { status, headers, body, .. } = manner;
        let length = body.len();
        let answer = format!(
            "HTTP/1.1 {status} Told\r\ncontent-type: application/json\r\ncontent-length: \
             {length}\r\n{headers}\r\n{body}"
        );
        if answers.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// Reads a request up to its body.
fn head(lines: &mut BufReader<TcpStream>) -> Option<(String, Vec<(String, String)>)> {
    let mut line = || {
        let mut line = String::new();
        lines.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        Some(line.trim_end().to_owned())
    };
    let request = line()?.trim_end_matches(" HTTP/1.1").to_owned();
    let mut headers = Vec::new();
    loop {
        let header = line()?;
        let Some((name, value)) = header.split_once(':') else { return Some((request, headers)) };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
}

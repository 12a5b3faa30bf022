//! A small client for a running server: JSON requests, SSE streams, scrapes.
use std::time::Duration;

use futures_util::StreamExt as _;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde_json::Value;

use crate::scrape::Scrape;
use crate::wait::poll;

/// A client of one server.
#[derive(Clone, Debug)]
pub struct Client {
    base: String,
    http: reqwest::Client,
}

/// A reply: status and JSON body.
#[derive(Clone, Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// The body; a JSON string when it is not JSON.
    pub body: Value,
}

/// The contents of a stream.
#[derive(Clone, Debug, Default)]
pub struct Streamed {
    /// All `data:` events except the final `[DONE]`.
    pub events: Vec<Value>,
    /// Whether `[DONE]` arrived.
    pub done: bool,
}

type Error = Box<dyn std::error::Error + Send + Sync>;

impl Client {
    /// A client of the server at `base`, such as `http://127.0.0.1:8000`.
    ///
    /// # Errors
    /// When the HTTP client cannot be created.
    pub fn new(base: &str) -> Result<Self, Error> {
        let http = reqwest::Client::builder().timeout(Duration::from_secs(120)).build()?;
        Ok(Self { base: base.to_owned(), http })
    }

    /// The same, with an API key.
    ///
    /// # Errors
    /// As [`Client::new`], or the key cannot be in a header.
    pub fn with_key(base: &str, key: &str) -> Result<Self, Error> {
        let value = HeaderValue::from_str(&format!("Bearer {key}"))?;
        let headers = HeaderMap::from_iter([(AUTHORIZATION, value)]);
        let http = reqwest::Client::builder().timeout(Duration::from_secs(120));
        Ok(Self { base: base.to_owned(), http: http.default_headers(headers).build()? })
    }

    /// The server's base URL.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// GET.
    ///
    /// # Errors
    /// When there was no reply.
    pub async fn get(&self, path: &str) -> Result<Reply, Error> {
        let response = self.http.get(format!("{}{path}", self.base)).send().await?;
        reply(response).await
    }

    /// POST with a JSON body.
    ///
    /// # Errors
    /// When there was no reply.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Reply, Error> {
        let url = format!("{}{path}", self.base);
        reply(self.http.post(url).json(body).send().await?).await
    }

    /// POST with a JSON body, reading Server-Sent Events to the end.
    ///
    /// # Errors
    /// When the stream breaks or an event is not JSON.
    pub async fn stream(&self, path: &str, body: &Value) -> Result<Streamed, Error> {
        let url = format!("{}{path}", self.base);
        let response = self.http.post(url).json(body).send().await?.error_for_status()?;
        let mut bytes = response.bytes_stream();
        let mut text = Vec::new();
        while let Some(chunk) = bytes.next().await {
            text.extend_from_slice(&chunk?);
        }
        let mut streamed = Streamed::default();
        for line in String::from_utf8(text)?.lines() {
            match line.strip_prefix("data: ") {
                Some("[DONE]") => streamed.done = true,
                Some(event) => streamed.events.push(serde_json::from_str(event)?),
                None => {}
            }
        }
        Ok(streamed)
    }

    /// Starts a request and returns the response as soon as its head has arrived: for tests that
    /// disconnect in the middle of a stream.
    ///
    /// # Errors
    /// When no head arrived.
    pub async fn open(&self, path: &str, body: &Value) -> Result<reqwest::Response, Error> {
        Ok(self.http.post(format!("{}{path}", self.base)).json(body).send().await?)
    }

    /// Scrapes `/metrics`.
    ///
    /// # Errors
    /// When the page does not parse.
    pub async fn scrape(&self) -> Result<Scrape, Error> {
        Ok(Scrape::parse(&self.metrics_page().await?)?)
    }

    /// The text of `/metrics`.
    ///
    /// # Errors
    /// When there was no page.
    pub async fn metrics_page(&self) -> Result<String, Error> {
        let response = self.http.get(format!("{}/metrics", self.base)).send().await?;
        Ok(response.error_for_status()?.text().await?)
    }

    /// Scrapes until `wanted` holds, for at most `deadline`; returns the last scrape in either
    /// case.
    ///
    /// # Errors
    /// When scraping fails.
    pub async fn scrape_until(
        &self,
        deadline: Duration,
        wanted: impl Fn(&Scrape) -> bool,
    ) -> Result<Scrape, Error> {
        let began = std::time::Instant::now();
        loop {
            let scrape = self.scrape().await?;
            if wanted(&scrape) || began.elapsed() > deadline {
                return Ok(scrape);
            }
            tokio::time::sleep(poll(began.elapsed(), Duration::from_millis(20))).await;
        }
    }
}

async fn reply(response: reqwest::Response) -> Result<Reply, Error> {
    let status = response.status().as_u16();
    let text = response.text().await?;
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    Ok(Reply { status, body })
}

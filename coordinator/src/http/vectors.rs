//! A vector of length 1 for each of several texts, computed like prompts without output tokens: for
//! `embeddings`, and for `scores`, which compares them.
use std::iter;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::ContentType;
use actix_web::web::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use shared::metrics::labels::RejectReason;
use tokio::time::Instant;

use super::again::Again;
use super::conversation;
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{Next, RunningPrompt};
use super::params::{Common, Limits, Truncation};
use super::refused::{self, Endpoint};
use super::state::AppState;
use crate::text::model::TextModel;

/// Maximum number of texts of one request in the engine at a time: the others wait here, so that a
/// long list does not fill the queue that all clients share.
pub(super) const AT_A_TIME: usize = 64;

/// How long after its arrival a request's later texts wait for room in the queue.
const QUEUE_PATIENCE: Duration = Duration::from_secs(600);

/// A text as the client gave it.
#[derive(Clone, Debug)]
pub(super) enum Input {
    Text(Arc<str>),
    Tokens(Vec<u32>),
}

impl Input {
    /// The text, if that is what was given.
    pub(super) fn text(&self) -> Option<&Arc<str>> {
        match self {
            Self::Text(text) => Some(text),
            Self::Tokens(_) => None,
        }
    }
}

/// The texts of one field.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) field: &'static str,
    pub(super) inputs: Vec<Input>,
    /// Most tokens of each text itself, if the request says so: longer ones lose their end. Special
    /// tokens come on top, so that something of the text is left.
    pub(super) keep: Option<usize>,
}

/// A request for vectors.
#[derive(Debug)]
pub(super) struct Vectors {
    common: Common,
    arrived: Duration,
    /// The answer's id.
    pub(super) id: Arc<str>,
    /// The served model's name, or the adapter's.
    pub(super) model: Arc<str>,
    special: bool,
    /// Most tokens of each text, if the request says so.
    keep: Option<usize>,
    /// Numbers of each vector, if not all.
    pub(super) dimensions: Option<u32>,
}

impl Vectors {
    /// Reads the fields that all such requests have; `prefix` begins the answer's id.
    ///
    /// # Errors
    /// 400 naming the field.
    pub(super) fn read(
        state: &AppState,
        fields: &Fields,
        endpoint: Endpoint,
        prefix: &str,
    ) -> Result<Self, ApiError> {
        let (arrived, limits) = (state.clock.now(), &state.limits);
        refused::check(fields, endpoint)?;
        let mut common = Common::read(fields, limits, &state.text, &state.models)?;
        let pooling = state.text.pooling.clone();
        let pooling = pooling.map_err(|why| {
            ApiError::field("model", format!("this model's embeddings are not supported: {why}"))
        })?;
        // Nothing is sampled, so sampling parameters have no effect.
        (common.n, common.sampling.pooling) = (1, Some(pooling));
        common.stops.clear();
        let keep = common.truncation.map(|truncation| match truncation {
            Truncation::To(max) => max.min(limits.max_model_len) as usize,
            Truncation::Fit => limits.max_model_len as usize,
        });
        Ok(Self {
            arrived,
            id: fields.response_id(prefix, limits)?.into(),
            model: state.models.name(&common.adapter),
            special: fields.boolean("add_special_tokens", true)?,
            keep,
            dimensions: None,
            common,
        })
    }

    /// Computes the vectors of all groups, which are those of `fields`, and gives them to `take` in
    /// the order of the texts. It keeps at most those of the first group. Returns the number of
    /// tokens of all texts.
    ///
    /// # Errors
    /// 400 naming the field, the engine's refusals, and the errors of `take`.
    pub(super) async fn compute(
        mut self,
        state: &AppState,
        fields: Fields,
        groups: Vec<Group>,
        mut take: impl FnMut(Vec<f32>) -> Result<(), ApiError>,
    ) -> Result<usize, ApiError> {
        let limits = &state.limits;
        let last = groups.last().map_or("", |group| group.field);
        let width = self.dimensions.unwrap_or(state.text.hidden_size);
        if let Some(first) = groups.first() {
            check_numbers(first.field, first.inputs.len(), width, limits)?;
        }
        let (bytes, share) = (fields.bytes(), fields.share());
        // The fields may be much larger than what is kept of them.
        drop(fields);
        let (special, keep, max) = (self.special, self.keep, limits.max_model_len);
        let encode = move |text: &TextModel| {
            let _share = share;
            let added = if special { text.num_special() } else { 0 };
            let encoded = groups.into_iter().map(|group| {
                let own = group.keep.map(|own| own.saturating_add(added).min(max as usize));
                let keep = own.into_iter().chain(keep).min();
                encode(text, group, special, keep, max)
            });
            encoded.collect::<Result<Vec<_>, _>>()
        };
        // The deadline is watched for all texts together, and so counts once.
        let deadline = self.common.deadline.take();
        let encoded = state.in_time(deadline, state.with_text(bytes, encode)).await?;
        let encoded: Vec<Vec<u32>> = encoded.into_iter().flatten().collect();
        let tokens: usize = encoded.iter().map(Vec::len).sum();
        if tokens > limits.prompt_tokens {
            let max = limits.prompt_tokens;
            let message = format!("`{last}` has {tokens} tokens in total, the limit is {max}");
            return Err(ApiError::field(last, message));
        }
        let again = Again::new(Instant::now() + QUEUE_PATIENCE);
        let running = Running { state, asked: &self, again };
        let vectors = stream::iter(encoded.into_iter().enumerate())
            .map(|(index, tokens)| running.vector(index, tokens))
            .buffered(AT_A_TIME);
        let all = async {
            let mut vectors = pin!(vectors);
            while let Some(vector) = vectors.try_next().await? {
                take(vector)?;
            }
            Ok(())
        };
        state
            .in_time(deadline, all)
            .await
            // Counted once, however often it was retried and for however many texts.
            .map_err(|error| match error.is_queue_full() {
                true => error.counted_as(RejectReason::QueueFull),
                false => error,
            })?;
        Ok(tokens)
    }
}

/// What all texts of a request share.
struct Running<'a> {
    state: &'a AppState,
    asked: &'a Vectors,
    again: Again,
}

impl Running<'_> {
    /// Returns the vector of one text. Once the first texts are under way, one that finds the queue
    /// full retries: the work done for the others would be lost.
    async fn vector(&self, index: usize, tokens: Vec<u32>) -> Result<Vec<f32>, ApiError> {
        let (count, tally) = (tokens.len() as u64, &self.asked.common.tally);
        tally.prompt(count);
        let pause = |error: &ApiError| {
            let pause = error.full_for().filter(|_| index >= AT_A_TIME)?;
            // Up to a quarter more, so that requests refused together do not retry together.
            let draw = self.state.draw_seed(self.state.next_request()) % 1024;
            Some(pause + pause * draw as u32 / 4096)
        };
        let vector = self.again.ask(async || self.attempt(tokens.clone()).await, pause).await;
        vector.inspect_err(|_| tally.failed(count))
    }

    /// Makes one attempt. For each, the client has waited since the request arrived.
    async fn attempt(&self, tokens: Vec<u32>) -> Result<Vec<f32>, ApiError> {
        let Vectors { common, arrived, id, dimensions, .. } = self.asked;
        let running = RunningPrompt::start(self.state, common, tokens, 0, *arrived, id)?;
        Ok(unit(embedding(running).await?, *dimensions))
    }
}

/// Waits for the embedding of one text.
async fn embedding(mut running: RunningPrompt) -> Result<Vec<f32>, ApiError> {
    let mut found = None;
    while let Some(next) = running.next().await {
        if let Next::Embedding(vector) = next? {
            found = Some(vector);
        }
    }
    found.ok_or_else(|| ApiError::internal("the engine gave no embedding"))
}

/// Cuts a vector to its first `dimensions` numbers and scales it to length 1.
fn unit(mut vector: Vec<f32>, dimensions: Option<u32>) -> Vec<f32> {
    vector.truncate(dimensions.map_or(usize::MAX, |dimensions| dimensions as usize));
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    vector
}

/// Answers with a list, which is written one entry at a time: `head` ends with the list's first
/// bracket, `tail` begins with its last.
pub(super) fn list<T: Serialize>(
    head: String,
    entries: impl Iterator<Item = T> + 'static,
    tail: String,
) -> HttpResponse {
    let entries = entries.enumerate().map(|(index, entry)| {
        let mut text = if index > 0 { b",".to_vec() } else { Vec::new() };
        serde_json::to_writer(&mut text, &entry)?;
        Ok::<_, serde_json::Error>(Bytes::from(text))
    });
    let one = |text: String| iter::once(Ok(Bytes::from(text)));
    let pieces = one(head).chain(entries).chain(one(tail));
    HttpResponse::Ok().content_type(ContentType::json()).streaming(stream::iter(pieces))
}

/// Checks that so many vectors are not too large.
fn check_numbers(field: &str, count: usize, width: u32, limits: &Limits) -> Result<(), ApiError> {
    let (max, width) = (limits.embedding_numbers, width.max(1) as usize);
    if count.saturating_mul(width) <= max {
        return Ok(());
    }
    let fit = max / width;
    let message = format!(
        "`{field}`: the request has {count} entries, each a vector of {width} numbers; there is \
         room for {max} numbers, or {fit} entries"
    );
    Err(ApiError::field(field, message))
}

/// Tokenizes the texts of a group: keeps at most `keep` tokens of each if given, otherwise rejects
/// texts of more than `max`.
fn encode(
    model: &TextModel,
    group: Group,
    special: bool,
    keep: Option<usize>,
    max: u32,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let name = group.field;
    let failed = |error: String| ApiError::field(name, error);
    let encode = |(index, input)| {
        let tokens = match (input, keep) {
            (Input::Text(text), Some(keep)) => {
                model.encode_beginning(&text, special, keep).map_err(failed)?
            }
            (Input::Text(text), None) => {
                conversation::check_fits(model, name, &text, Some(max))?;
                model.encode(&text, special).map_err(failed)?
            }
            (Input::Tokens(mut tokens), keep) => {
                tokens.truncate(keep.unwrap_or(usize::MAX));
                tokens
            }
        };
        if tokens.is_empty() {
            return Err(failed(format!("`{name}[{index}]` has no tokens")));
        }
        if tokens.len() > max as usize {
            let message = format!(
                "This model's maximum context length is {max} tokens. However, `{name}[{index}]` \
                 has {} tokens. Please reduce it, or set `truncate_prompt_tokens`.",
                tokens.len()
            );
            return Err(ApiError::context_length(name, message));
        }
        Ok(tokens)
    };
    group.inputs.into_iter().enumerate().map(encode).collect()
}

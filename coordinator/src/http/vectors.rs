//! A vector of numbers for each of several texts or pairs of texts, computed like prompts without
//! output tokens: an embedding, or a number for each class. For `embeddings`, `classes`, `pooling`,
//! and `scores`, which compares texts.
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
use super::classes::no_vectors;
use super::conversation;
use super::error::ApiError;
use super::fields::Fields;
use super::generation::{Next, RunningPrompt};
use super::pairs::Pairs;
use super::params::{Common, Limits, Truncation};
use super::refused::{self, Endpoint};
use super::state::AppState;
use crate::text::model::TextModel;

/// Maximum number of texts of one request in the engine at a time: the others wait here, so that a
/// long list does not fill the queue that all clients share.
pub(super) const AT_A_TIME: usize = 64;

/// Most bytes of all pairs of a request, as a multiple of those of the largest body: what is
/// tokenized at once cannot be interrupted.
const PAIRS_PER_BODY: usize = 8;

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

/// What a request is about.
#[derive(Debug)]
pub(super) enum Texts {
    /// A vector for each text.
    Each(Vec<Group>),
    /// A vector for each pair: of the text on the left, or the one at the same place, and of each
    /// on the right.
    Pairs(Group, Group),
}

impl Texts {
    /// How many bytes there are to tokenize, of a request of so many: the text on the left may be
    /// part of each pair.
    fn bytes(&self, request: usize) -> usize {
        match self {
            Self::Each(_) => request,
            Self::Pairs(left, right) => {
                let own = left.inputs.iter().filter_map(Input::text).map(|text| text.len());
                let times = right.inputs.len() / left.inputs.len().max(1);
                request.saturating_add(own.sum::<usize>().saturating_mul(times))
            }
        }
    }

    /// The field whose texts come last.
    fn last(&self) -> &'static str {
        match self {
            Self::Each(groups) => groups.last().map_or("", |group| group.field),
            Self::Pairs(_, right) => right.field,
        }
    }
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
    /// Whether classes' numbers become probabilities, and other vectors have length 1: otherwise
    /// they are as the model makes them.
    pub(super) activates: bool,
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
        can_answer(&state.text, endpoint)?;
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
            activates: fields.boolean("use_activation", true)?,
            common,
        })
    }

    /// Computes the vectors of `texts` like [`compute`](Self::compute), and keeps all of them.
    ///
    /// # Errors
    /// Those of [`compute`](Self::compute).
    pub(super) async fn compute_all(
        self,
        state: &AppState,
        fields: Fields,
        texts: Texts,
    ) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
        let mut all = Vec::new();
        let take = |vector| {
            all.push(vector);
            Ok(())
        };
        let tokens = self.compute(state, fields, texts, take).await?;
        Ok((all, tokens))
    }

    /// Computes the vectors of `texts`, which are those of `fields`, and gives them to `take` in
    /// their order. Of groups it keeps at most the vectors of the first one. Returns the number of
    /// tokens of all texts.
    ///
    /// # Errors
    /// 400 naming the field, the engine's refusals, and the errors of `take`.
    pub(super) async fn compute(
        mut self,
        state: &AppState,
        fields: Fields,
        texts: Texts,
        mut take: impl FnMut(Vec<f32>) -> Result<(), ApiError>,
    ) -> Result<usize, ApiError> {
        let limits = &state.limits;
        let last = texts.last();
        self.common.prompt_field = last;
        let width = self.dimensions.unwrap_or(state.text.numbers());
        if let Texts::Each(groups) = &texts
            && let Some(first) = groups.first()
        {
            check_numbers(first.field, first.inputs.len(), width, limits)?;
        }
        let (bytes, share) = (texts.bytes(fields.bytes()), fields.share());
        // The fields may be much larger than what is kept of them.
        drop(fields);
        let (special, keep, max) = (self.special, self.keep, limits.max_model_len);
        let most = limits.prompt_tokens;
        let most_bytes = limits.body_bytes.saturating_mul(PAIRS_PER_BODY);
        let encode = move |text: &TextModel| {
            let _share = share;
            let groups = match texts {
                Texts::Each(groups) => groups,
                Texts::Pairs(left, right) => {
                    let bytes = most_bytes;
                    let pairs = Pairs { model: text, special, keep, max, most, bytes };
                    return pairs.encode(&left, &right).map(|pairs| vec![pairs]);
                }
            };
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
        let Vectors { common, arrived, id, dimensions, activates, .. } = self.asked;
        let running = RunningPrompt::start(self.state, common, tokens, 0, *arrived, id)?;
        let mut vector = embedding(running).await?;
        vector.truncate(dimensions.map_or(usize::MAX, |dimensions| dimensions as usize));
        match &self.state.text.classifier {
            _ if !activates => {}
            Some(classifier) => classifier.activation.apply(&mut vector),
            None => scale_to_unit(&mut vector),
        }
        Ok(vector)
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

/// Scales a vector to length 1.
fn scale_to_unit(vector: &mut [f32]) {
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
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
        check_length(name, index, tokens.len(), max)?;
        Ok(tokens)
    };
    group.inputs.into_iter().enumerate().map(encode).collect()
}

/// Rejects a text without tokens, or of more than `max`.
pub(super) fn check_length(name: &str, index: usize, len: usize, max: u32) -> Result<(), ApiError> {
    if len == 0 {
        return Err(ApiError::field(name, format!("`{name}[{index}]` has no tokens")));
    }
    if len <= max as usize {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {max} tokens. However, `{name}[{index}]` has \
         {len} tokens. Please reduce it, or set `truncate_prompt_tokens`."
    );
    Err(ApiError::context_length(name, message))
}

/// Checks that the model is one that the endpoint is for.
fn can_answer(text: &TextModel, endpoint: Endpoint) -> Result<(), ApiError> {
    let classes = text.classifier.as_ref().map(|classifier| classifier.names.len());
    let wrong = match (endpoint, classes) {
        (Endpoint::Embeddings, Some(_)) => no_vectors(text),
        (Endpoint::Classify, None) => Some(
            "this model generates text and has no classes: a model for `/classify` has an \
             architecture that ends in ForSequenceClassification, or `classifier_from_token` in \
             its `config.json`"
                .to_owned(),
        ),
        (Endpoint::Rerank | Endpoint::Score, Some(count)) if count > 1 => Some(format!(
            "this model sorts texts into {count} classes, with `/classify`; only a model with one \
             judges how well two texts go together"
        )),
        _ => None,
    };
    wrong.map_or(Ok(()), |message| Err(ApiError::field("model", message)))
}

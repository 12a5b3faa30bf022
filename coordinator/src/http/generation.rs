//! A running request as a sequence of text pieces: one prompt, its `n` choices.
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use serde::Serialize;
use shared::metrics::labels::{ExpiryReason, RejectReason};
use shared::protocol::{RequestNote, TokenLogprobs};
use tokio::time::{Instant, Sleep, sleep_until};

use super::access::Tally;
use super::error::ApiError;
use super::params::Common;
use super::state::AppState;
use super::token_fields::TokenFields;
use crate::engine::{
    EngineError, EngineEvent, FinishReason, GenerateRequest, Generation, StopCheck,
};
use crate::metrics::FrontendStats;
use crate::text::stream::{StopRules, TextStream};

/// What one event adds to one choice.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    /// Index of the choice within its prompt.
    pub choice: u32,
    /// Text that is certain now; may be empty.
    pub text: String,
    /// The token that it comes from; none if it is only a choice's end.
    pub token: Option<u32>,
    /// The token's log-probabilities, if requested.
    pub logprobs: Option<TokenLogprobs>,
    /// Set with the choice's last piece.
    pub finish_reason: Option<&'static str>,
    /// What ended the choice, if the request named it; only with the last piece.
    pub stop_reason: Option<StopReason>,
}

impl Piece {
    /// The ids of its tokens, if the client wants them.
    #[must_use]
    pub fn token_ids(&self, wanted: TokenFields) -> Option<&[u32]> {
        wanted.ids.then_some(self.token.as_slice())
    }
}

/// What ended a choice, of what the request named, in vLLM's format: null for the model's own end
/// tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// A token of `stop_token_ids`.
    Token(u32),
    /// A string of `stop`.
    Text(String),
}

/// What comes next.
#[derive(Clone, Debug)]
pub enum Next {
    /// Log-probabilities of the prompt.
    Prompt(Vec<TokenLogprobs>),
    /// The embedding of the prompt.
    Embedding(Vec<f32>),
    /// A piece of one choice.
    Piece(Piece),
}

/// The fields of a request that an error of the engine's may be about.
#[derive(Clone, Copy, Debug)]
struct Named {
    prompt: &'static str,
    /// What bounds the output.
    output: Option<&'static str>,
    /// What constrains it.
    guide: Option<&'static str>,
}

impl Named {
    fn of(common: &Common) -> Self {
        let guide = common.guide.as_ref().map(|it| it.field);
        Self { prompt: common.prompt_field, output: common.output_field, guide }
    }

    /// The engine's error as the client is told of it.
    fn told(self, error: EngineError) -> ApiError {
        match error {
            EngineError::TooLarge { needed, available } => {
                ApiError::cache_length(self.prompt, self.output, needed, available)
            }
            error @ EngineError::Guide { .. } => match self.guide {
                Some(field) => ApiError::from(error).of(field),
                None => error.into(),
            },
            error => error.into(),
        }
    }
}

/// A running request.
#[derive(Debug)]
pub struct RunningPrompt {
    generation: Generation,
    /// Counts that the queue was full; `None` where a caller counts, who may ask again.
    counts: Option<FrontendStats>,
    /// When its client no longer wants it.
    deadline: Option<Pin<Box<Sleep>>>,
    stats: FrontendStats,
    /// Whether it was in a step, as far as that is noted.
    has_run: bool,
    /// An event received while looking for the end of a token's choice.
    next: Option<EngineEvent>,
    choices: Vec<TextStream>,
    tally: Tally,
    named: Named,
    /// End tokens that the request did not name.
    model_end_tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// How many of them the KV cache had; known at the end.
    pub cached_tokens: u64,
    /// Tokens accepted so far, all choices together.
    pub completion_tokens: u64,
    /// The engine gave it up, for which its client is not to blame.
    pub has_failed: bool,
}

impl RunningPrompt {
    /// Hands a prompt to the engine.
    ///
    /// # Errors
    /// The engine's immediate refusal; later failures come from [`RunningPrompt::next`].
    pub fn start(
        state: &AppState,
        common: &Common,
        prompt: Vec<u32>,
        max_tokens: u32,
        arrived: std::time::Duration,
        response_id: &Arc<str>,
    ) -> Result<Self, ApiError> {
        if common.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            state.stats.expired(ExpiryReason::Deadline);
            return Err(ApiError::expired());
        }
        let id = state.next_request();
        let rules = Arc::new(StopRules {
            stops: common.stops.clone(),
            end_tokens: common.end_tokens.clone(),
            min_tokens: common.sampling.min_tokens,
            include_stop: common.include_stop,
            shown: common.shown_end_tokens(),
            keep_special: common.keep_special,
            fenced: common.fences.then(|| state.text.special_tokens().clone()),
        });
        let stream = state.text.stream(rules, common.goes_on.then_some(&prompt));
        let thinking = common.thinking.as_ref().map(|it| Arc::new(it.behind(&prompt)));
        let guides =
            common.guides(thinking.as_ref(), state.text.vocab_size, stream.has_text_before())?;
        let mut sampling = common.sampling.clone();
        if !common.seeded {
            sampling.seed = state.draw_seed(id);
        }
        let stop_checks = if common.stops.is_empty() {
            Vec::new()
        } else {
            (0..common.n).map(|_| Box::new(stream.clone()) as Box<dyn StopCheck>).collect()
        };
        let prompt_tokens = prompt.len() as u64;
        let request = GenerateRequest {
            id,
            prompt,
            sampling: (0..common.n)
                .map(|choice| shared::sampling::SamplingParams { choice, ..sampling.clone() })
                .collect(),
            stop_checks,
            guides,
            guide_spec: common.guide.as_ref().map(|it| it.spec.clone()),
            thinking,
            bad_words: common.bad_words.clone(),
            max_tokens,
            open_ended: common.is_open_ended(),
            priority: common.priority,
            cache_salt: common.cache_salt,
            adapter: common.adapter.clone(),
            end_tokens: common.end_tokens.clone(),
            stops: common.stops.as_slice().into(),
            keep_special: common.keep_special,
            goes_on: common.goes_on,
            arrived,
            response_id: response_id.clone(),
            traced: common.tally.trace().is_some(),
            resumed: None,
        };
        // An embedding's caller may retry, and counts prompts and errors itself.
        let is_asked_once = common.sampling.pooling.is_none();
        let counts = is_asked_once.then(|| state.stats.clone());
        if let Some(trace) = common.tally.trace() {
            trace.asked(state, common, max_tokens, response_id);
        }
        let named = Named::of(common);
        let generation = state.engine.submit(request).inspect_err(|error| {
            if let Some(trace) = common.tally.trace().filter(|_| counts.is_some()) {
                trace.failed(error);
            }
            match error {
                EngineError::QueueFull { .. } => count_full(counts.as_ref(), error),
                _ => state.stats.rejected(error.into()),
            }
        });
        let generation = generation.map_err(|error| named.told(error))?;
        let choices = vec![stream; common.n as usize];
        if is_asked_once {
            common.tally.prompt(prompt_tokens);
        }
        Ok(Self {
            generation,
            counts,
            deadline: common.deadline.map(|deadline| Box::pin(sleep_until(deadline))),
            stats: state.stats.clone(),
            has_run: false,
            next: None,
            choices,
            tally: common.tally.clone(),
            named,
            model_end_tokens: common.model_end_tokens.clone(),
            prompt_tokens,
            cached_tokens: 0,
            completion_tokens: 0,
            has_failed: false,
        })
    }

    /// Does not charge the client for this prompt, if nothing has come of it: another of the same
    /// request failed.
    pub fn give_back(&mut self) {
        if self.completion_tokens == 0 && self.generation.is_running() {
            self.tally.failed(self.prompt_tokens);
            // It fails once.
            self.generation.cancel();
        }
    }

    /// Returns the next piece; `None` after the last.
    ///
    /// # Errors
    /// If the request failed; nothing comes after that.
    pub async fn next(&mut self) -> Option<Result<Next, ApiError>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Like [`RunningPrompt::next`], for callers that wait for several at once.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Next, ApiError>>> {
        if self.is_over(context) {
            // Whatever is still to come: nothing more is computed.
            self.generation.cancel();
            self.next = None;
            self.stats.expired(ExpiryReason::Deadline);
            if let Some(trace) = self.tally.trace() {
                trace.expired();
            }
            return Poll::Ready(Some(Err(ApiError::expired())));
        }
        let event = match self.next.take() {
            Some(event) => Some(event),
            None => ready!(self.poll_event(context)),
        };
        let Some(event) = event else { return Poll::Ready(None) };
        let mut next = self.take(event);
        if let Ok(Next::Piece(piece)) = &mut next
            && piece.finish_reason.is_none()
        {
            self.end_with(piece, context);
        }
        Poll::Ready(Some(next))
    }

    /// The engine's next event but its notes, which are for the request's trace.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<EngineEvent>> {
        loop {
            match ready!(self.generation.poll_next(context)) {
                Some(EngineEvent::Note(note)) => {
                    if let Some(trace) = self.tally.trace() {
                        trace.note(note, self.has_run);
                    }
                    self.has_run |= matches!(note, RequestNote::Scheduled { .. });
                }
                event => return Poll::Ready(event),
            }
        }
    }

    /// Whether its time has expired before it is complete.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        let Some(deadline) = &mut self.deadline else { return false };
        self.generation.is_running() && deadline.as_mut().poll(context).is_ready()
    }

    /// Reports a choice's end with its last token, if it has arrived already: a separate event
    /// would look like another token to clients that measure the time between tokens.
    fn end_with(&mut self, piece: &mut Piece, context: &mut Context<'_>) {
        match self.poll_event(context) {
            Poll::Ready(Some(EngineEvent::Finished { choice, reason, cached }))
                if choice == piece.choice =>
            {
                let end = self.finished(choice, reason, cached);
                piece.text.push_str(&end.text);
                (piece.finish_reason, piece.stop_reason) = (end.finish_reason, end.stop_reason);
            }
            Poll::Ready(other) => self.next = other,
            Poll::Pending => {}
        }
    }

    fn take(&mut self, event: EngineEvent) -> Result<Next, ApiError> {
        match event {
            EngineEvent::PromptLogprobs(logprobs) => Ok(Next::Prompt(logprobs)),
            EngineEvent::Embedding(vector) => Ok(Next::Embedding(vector)),
            EngineEvent::Token { choice, token, logprobs } => {
                if self.completion_tokens == 0
                    && let Some(trace) = self.tally.trace()
                {
                    trace.first_token();
                }
                self.completion_tokens += 1;
                self.tally.output(1);
                let mut text = String::new();
                if let Some(stream) = self.choices.get_mut(choice as usize) {
                    stream.push_token(token, &mut text);
                }
                Ok(Next::Piece(Piece {
                    choice,
                    text,
                    token: Some(token),
                    logprobs,
                    ..Piece::default()
                }))
            }
            EngineEvent::Finished { choice, reason, cached } => {
                Ok(Next::Piece(self.finished(choice, reason, cached)))
            }
            EngineEvent::Failed(error) => {
                self.has_failed = true;
                count_full(self.counts.as_ref(), &error);
                // One of several texts may be asked for again.
                if let Some(trace) = self.tally.trace()
                    && (self.counts.is_some() || !matches!(error, EngineError::QueueFull { .. }))
                {
                    trace.failed(&error);
                }
                if self.completion_tokens == 0 && self.counts.is_some() {
                    self.tally.failed(self.prompt_tokens);
                }
                Err(self.named.told(error))
            }
            // Not among those that are polled for.
            EngineEvent::Note(_) => Ok(Next::Piece(Piece::default())),
        }
    }
}

impl RunningPrompt {
    /// Makes a choice's last piece.
    fn finished(&mut self, choice: u32, mut reason: FinishReason, cached: u32) -> Piece {
        // The other choices find what the first one computed.
        if choice == 0 {
            self.cached_tokens = u64::from(cached);
        }
        let mut text = String::new();
        if let Some(stream) = self.choices.get_mut(choice as usize) {
            stream.finish(&mut text);
            // It may be found in what was held back, of which the engine does not know.
            if stream.stop_string().is_some() {
                reason = FinishReason::StopString;
            }
        }
        let told = match reason {
            FinishReason::EndToken(_) | FinishReason::StopString | FinishReason::Complete => "stop",
            FinishReason::Length => "length",
        };
        if let Some(trace) = self.tally.trace() {
            trace.choice_ended(told, if choice == 0 { self.cached_tokens } else { 0 });
        }
        let finish_reason = Some(told);
        let stop_reason = self.stop_reason(choice, reason);
        Piece { choice, text, token: None, logprobs: None, finish_reason, stop_reason }
    }

    fn stop_reason(&self, choice: u32, reason: FinishReason) -> Option<StopReason> {
        match reason {
            FinishReason::EndToken(token) => {
                let named = !self.model_end_tokens.contains(&token);
                named.then_some(StopReason::Token(token))
            }
            FinishReason::StopString => {
                let stream = self.choices.get(choice as usize)?;
                stream.stop_string().map(|stop| StopReason::Text(stop.to_owned()))
            }
            _ => None,
        }
    }
}

/// Counts that the engine's queue was full; the engine counts its other refusals itself.
fn count_full(stats: Option<&FrontendStats>, error: &EngineError) {
    if let (Some(stats), EngineError::QueueFull { .. }) = (stats, error) {
        stats.rejected(RejectReason::QueueFull);
    }
}

/// What a request used, in the format of OpenAI's API.
pub(super) fn usage(prompt: u64, cached: u64, completion: u64) -> serde_json::Value {
    serde_json::json!({
        "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

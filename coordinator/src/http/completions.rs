//! `POST /v1/completions`.
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use actix_web::HttpResponse;
use serde::Serialize;
use serde_json::Value;
use shared::protocol::TokenLogprobs;

use super::bad_words::Words;
use super::classes;
use super::conversation;
use super::envelope::Envelope;
use super::error::ApiError;
use super::generation::{Next, Piece, RunningPrompt, StopReason, usage};
use super::logprobs::{CompletionLogprobs, TokenNames};
use super::params::{Common, Fields, Limits, StreamUsage, token_id};
use super::prompt_logprobs::PromptLogprobs;
use super::refused::{self, Endpoint};
use super::sse::{self, EventSource, Events};
use super::state::AppState;
use super::thinking::Thinking;
use crate::text::model::TextModel;

/// One prompt as the client gave it.
#[derive(Clone, Debug)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Answers a request.
///
/// # Errors
/// Everything a client can do wrong, and the engine's refusals.
pub async fn respond(state: &AppState, fields: Fields) -> Result<HttpResponse, ApiError> {
    let arrived = state.clock.now();
    let limits = &state.limits;
    let mut common = Common::read(&fields, limits, &state.text, &state.models)?;
    classes::check_generates(&state.text)?;
    refused::check(&fields, Endpoint::Completions)?;
    common.goes_on = true;
    common.thinking = Thinking::read(state, &fields, &common)?;
    let bad_words = Words::read(&fields, limits, &common)?;
    let echo = fields.boolean("echo", false)?;
    let special = fields.boolean("add_special_tokens", true)?;
    let logprobs = fields.count("logprobs", 0, limits.logprobs)?;
    let least = u32::from(!echo);
    // Exceeding the model's length has an error code of its own, which clients act on.
    let max_tokens = fields.count("max_tokens", least, u32::MAX)?;
    common.max_tokens = Some(max_tokens.unwrap_or(16));
    common.output_field = max_tokens.map(|_| "max_tokens");
    common.check_least()?;
    common.sampling.logprobs = logprobs;
    let echoed_logprobs = logprobs.filter(|_| echo);
    // Enough for both.
    common.sampling.prompt_logprobs = echoed_logprobs.max(common.tokens.prompt_logprobs);
    let prompts = prompts(&fields, limits, &state.text)?;
    let choices = prompts.len() * common.n as usize;
    if choices > limits.choices {
        let message = format!(
            "`n`: {} prompts with {} choices each are {choices} choices, the limit is {}",
            prompts.len(),
            common.n,
            limits.choices
        );
        return Err(ApiError::field("n", message));
    }
    let id: Arc<str> = fields.response_id("cmpl-", limits)?.into();
    let fit = common.fit(limits);
    let (bytes, share) = (fields.bytes(), fields.share());
    let keep_special = common.keep_special;
    let echo_special = echo.then_some(keep_special);
    let encode = move |text: &TextModel| {
        let _share = share;
        let bad_words = bad_words.map(|words| words.tokens(text)).transpose()?;
        Ok((encode(text, prompts, echo_special, special, fit)?, bad_words))
    };
    // The fields may be much larger than what is kept of them.
    drop(fields);
    let deadline = common.deadline;
    state.in_time(deadline, state.make_guide(&mut common)).await?;
    let (encoded, bad_words) = state.in_time(deadline, state.with_text(bytes, encode)).await?;
    common.bad_words = bad_words;
    let (wanted, model) = (common.tokens, &state.text);
    let names = TokenNames::new(model.clone(), wanted.named_by_id);
    let (mut choices, mut told) = (Vec::new(), Vec::new());
    let mut running = Vec::new();
    let (mut prompt_tokens, mut echoed, mut output_tokens) = (0, 0, 0_usize);
    for (mut text, mut tokens) in encoded {
        if tokens.is_empty() {
            return Err(ApiError::field("prompt", "`prompt` is empty: it has no tokens"));
        }
        if common.truncate(&mut tokens, limits) && echo {
            text = Some(echoed_text(&state.text, &tokens, keep_special));
        }
        let max_tokens = common.output_tokens("prompt", tokens.len(), limits)?;
        prompt_tokens += tokens.len() * common.n as usize;
        echoed += text.as_ref().map_or(0, String::len) * common.n as usize;
        check_sizes(limits, prompt_tokens, echoed)?;
        limits.check_alternatives("logprobs", prompt_tokens, echoed_logprobs)?;
        limits.check_alternatives("prompt_logprobs", prompt_tokens, wanted.prompt_logprobs)?;
        output_tokens += max_tokens as usize * common.n as usize;
        if !common.stream {
            limits.check_output_alternatives("logprobs", output_tokens, logprobs)?;
        }
        for _ in 0..common.n {
            let new = || CompletionLogprobs::new(names.clone(), keep_special);
            let gathered = logprobs.map(|_| new());
            choices.push(Choice::new(&tokens, text.as_deref(), gathered, wanted.ids));
        }
        told.push(Told {
            token_ids: wanted.ids.then(|| tokens.clone()),
            logprobs: wanted
                .prompt_logprobs
                .map(|alternatives| PromptLogprobs::new(model.clone(), alternatives)),
        });
        running.push((tokens, max_tokens));
    }
    // Nothing runs before everything is validated.
    let running = running
        .into_iter()
        .map(|(tokens, max)| RunningPrompt::start(state, &common, tokens, max, arrived, &id))
        .collect::<Result<Vec<_>, _>>()?;
    let envelope = Envelope::new(state, &common.adapter, id, "text_completion");
    let mut completion = Completion { common, echo, envelope, running, turn: 0, choices, told };
    if completion.common.stream {
        return sse::respond(completion).await;
    }
    while let Some(next) = completion.advance().await {
        next?;
    }
    Ok(completion.respond_whole())
}

/// Checks the memory kept for all choices: prompt tokens, and what is echoed of prompts.
fn check_sizes(limits: &Limits, prompt_tokens: usize, echoed: usize) -> Result<(), ApiError> {
    limits.check_prompts(prompt_tokens)?;
    if echoed > limits.echoed_bytes {
        let max = limits.echoed_bytes;
        let message = format!("`echo`: {echoed} bytes over all choices, the limit is {max}");
        return Err(ApiError::field("echo", message));
    }
    Ok(())
}

fn prompts(fields: &Fields, limits: &Limits, text: &TextModel) -> Result<Vec<Prompt>, ApiError> {
    let (max, vocab) = (limits.prompts, text.vocab_size);
    let wrong = || {
        let ids = vocab - 1;
        ApiError::field(
            "prompt",
            format!(
                "`prompt` must be a string, a list of 1 to {max} strings, a list of token ids \
                 from 0 to {ids}, or a list of 1 to {max} such lists; none may be empty"
            ),
        )
    };
    let id = |value: &Value| {
        token_id(value, text).ok_or_else(|| {
            let expected = format!("token ids from 0 to {}, of a vocabulary of {vocab}", vocab - 1);
            Fields::wrong("prompt", value, &expected)
        })
    };
    let tokens = |list: &Vec<Value>| match list.as_slice() {
        [] => Err(wrong()),
        list => list.iter().map(id).collect::<Result<_, _>>().map(Prompt::Tokens),
    };
    match fields.get("prompt") {
        None => Err(ApiError::field("prompt", "`prompt` is required")),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(list)) if list.first().is_some_and(Value::is_number) => {
            Ok(vec![tokens(list)?])
        }
        Some(Value::Array(list)) if (1..=max).contains(&list.len()) => list
            .iter()
            .map(|prompt| match prompt {
                Value::String(text) => Ok(Prompt::Text(text.clone())),
                Value::Array(list) => tokens(list),
                _ => Err(wrong()),
            })
            .collect(),
        Some(Value::Array(list)) if list.len() > max => {
            let message = format!("`prompt` has {} prompts, the limit is {max}", list.len());
            Err(ApiError::field("prompt", message))
        }
        Some(_) => Err(wrong()),
    }
}

/// Prompts as tokens, each with the text to echo.
type Encoded = Vec<(Option<String>, Vec<u32>)>;

/// Encodes prompts; `echo` tells whether they are echoed, and if so whether special tokens are part
/// of the text.
fn encode(
    model: &TextModel,
    prompts: Vec<Prompt>,
    echo: Option<bool>,
    special: bool,
    max_tokens: Option<u32>,
) -> Result<Encoded, ApiError> {
    let encode = |prompt| match prompt {
        Prompt::Text(text) => {
            conversation::check_fits(model, "prompt", &text, max_tokens)?;
            let tokens = model.encode(&text, special).map_err(|e| ApiError::field("prompt", e))?;
            Ok((echo.map(|_| text), tokens))
        }
        Prompt::Tokens(tokens) => {
            Ok((echo.map(|special| echoed_text(model, &tokens, special)), tokens))
        }
    };
    prompts.into_iter().map(encode).collect()
}

/// The text to echo of a prompt of tokens.
fn echoed_text(model: &TextModel, tokens: &[u32], keep_special: bool) -> String {
    model.tokenizer.decode(tokens, !keep_special).unwrap_or_default()
}

/// What is told of a prompt with each of its choices, if the client wants it.
#[derive(Debug)]
struct Told {
    token_ids: Option<Vec<u32>>,
    logprobs: Option<PromptLogprobs>,
}

/// The state of one choice of one prompt.
#[derive(Debug)]
struct Choice {
    text: String,
    /// The ids of its tokens, if the client wants them.
    token_ids: Option<Vec<u32>>,
    /// Whether an event of it is in the stream.
    begun: bool,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    logprobs: Option<CompletionLogprobs>,
    /// The prompt's first token, if the prompt is echoed with log-probabilities.
    first: Option<u32>,
    /// Characters of the echoed text, until the first token after it.
    echoed: Option<usize>,
    /// The text to echo, until it is in the stream.
    echo: Option<String>,
}

impl Choice {
    fn new(
        tokens: &[u32],
        echo: Option<&str>,
        logprobs: Option<CompletionLogprobs>,
        has_ids: bool,
    ) -> Self {
        Self {
            text: echo.unwrap_or_default().to_owned(),
            token_ids: has_ids.then(Vec::new),
            begun: false,
            finish_reason: None,
            stop_reason: None,
            logprobs,
            first: tokens.first().copied().filter(|_| echo.is_some()),
            echoed: echo.map(|echo| echo.chars().count()),
            echo: echo.map(str::to_owned),
        }
    }
}

#[derive(Debug)]
struct Completion {
    common: Common,
    /// Whether prompts are part of the texts.
    echo: bool,
    envelope: Envelope,
    running: Vec<RunningPrompt>,
    /// The prompt polled first.
    turn: usize,
    choices: Vec<Choice>,
    /// Of each prompt.
    told: Vec<Told>,
}

impl Completion {
    /// Takes the next event of any prompt; `None` after the last one. Returns the choice's index
    /// and the new piece.
    async fn advance(&mut self) -> Option<Result<Option<(usize, Piece)>, ApiError>> {
        loop {
            let (prompt, next) = poll_fn(|context| self.poll_prompts(context)).await?;
            match next {
                Err(error) => {
                    self.give_back_behind(prompt);
                    return Some(Err(error));
                }
                Ok(Next::Embedding(_)) => {}
                Ok(Next::Prompt(logprobs)) => self.take_prompt(prompt, logprobs),
                Ok(Next::Piece(piece)) => return Some(Ok(self.take_piece(prompt, piece))),
            }
        }
    }

    /// A prompt that failed ends the answer. Its client is charged for those that text has come of,
    /// since a stream has told it, and not for those that only waited beside them.
    fn give_back_behind(&mut self, failed: usize) {
        if self.running[failed].has_failed {
            let others = self.running.iter_mut().enumerate().filter(|(at, _)| *at != failed);
            others.for_each(|(_, running)| running.give_back());
        }
    }

    /// Polls the prompts in turn, so that none waits for the others to end.
    fn poll_prompts(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<(usize, Result<Next, ApiError>)>> {
        let count = self.running.len();
        let mut over = 0;
        for offset in 0..count {
            let prompt = (self.turn + offset) % count;
            match self.running[prompt].poll_next(context) {
                Poll::Ready(Some(next)) => {
                    self.turn = prompt + 1;
                    return Poll::Ready(Some((prompt, next)));
                }
                Poll::Ready(None) => over += 1,
                Poll::Pending => {}
            }
        }
        if over == count { Poll::Ready(None) } else { Poll::Pending }
    }

    fn of_prompt(&self, prompt: usize) -> std::ops::Range<usize> {
        let n = self.common.n as usize;
        prompt * n..(prompt + 1) * n
    }

    fn take_prompt(&mut self, prompt: usize, logprobs: Vec<TokenLogprobs>) {
        let range = self.of_prompt(prompt);
        let alternatives = self.common.sampling.logprobs.unwrap_or(0) as usize;
        for choice in self.choices[range].iter_mut().filter(|_| self.echo) {
            let Some(gathered) = &mut choice.logprobs else { continue };
            if let Some(first) = choice.first.take() {
                gathered.push_first(first, &choice.text);
            }
            for token in &logprobs {
                // There are more where `prompt_logprobs` asks for more.
                let top = token.top.iter().take(alternatives).copied().collect();
                gathered.push(TokenLogprobs { top, ..*token });
            }
        }
        if let Some(all) = self.told.get_mut(prompt).and_then(|told| told.logprobs.as_mut()) {
            all.extend(logprobs);
        }
    }

    fn take_piece(&mut self, prompt: usize, piece: Piece) -> Option<(usize, Piece)> {
        let index = self.of_prompt(prompt).start + piece.choice as usize;
        let choice = self.choices.get_mut(index)?;
        if !self.common.stream {
            choice.text.push_str(&piece.text);
            choice.token_ids.iter_mut().for_each(|ids| ids.extend(piece.token));
        }
        choice.finish_reason = piece.finish_reason;
        choice.stop_reason = piece.stop_reason.clone();
        if let Some(gathered) = &mut choice.logprobs
            && let Some(token) = &piece.logprobs
        {
            // A prompt of one token is echoed without log-probabilities.
            if let Some(first) = choice.first.take() {
                gathered.push_first(first, &choice.text);
            }
            if let Some(characters) = choice.echoed.take() {
                gathered.go_on_behind(characters);
            }
            gathered.push(token.clone());
        }
        Some((index, piece))
    }

    fn usage(&self) -> Value {
        let prompt: u64 = self.running.iter().map(|running| running.prompt_tokens).sum();
        let completion: u64 = self.running.iter().map(|running| running.completion_tokens).sum();
        let cached: u64 = self.running.iter().map(|running| running.cached_tokens).sum();
        usage(prompt, cached, completion)
    }

    /// The prompt of a choice.
    fn prompt_of(&self, index: usize) -> Option<&Told> {
        self.told.get(index / (self.common.n as usize).max(1))
    }

    fn respond_whole(&self) -> HttpResponse {
        let choices: Vec<ChoiceBody<'_>> = self
            .choices
            .iter()
            .enumerate()
            .map(|(index, choice)| ChoiceBody {
                index,
                text: &choice.text,
                logprobs: choice.logprobs.as_ref(),
                finish_reason: choice.finish_reason,
                stop_reason: choice.stop_reason.as_ref(),
                token_ids: choice.token_ids.as_deref(),
                prompt_token_ids: self.prompt_of(index).and_then(|it| it.token_ids.as_deref()),
                prompt_logprobs: self.prompt_of(index).and_then(|it| it.logprobs.as_ref()),
            })
            .collect();
        HttpResponse::Ok().json(self.envelope.with(&choices, Some(&self.usage())))
    }

    /// Appends the event of a piece; none for a piece that only holds text back, unless its token
    /// is told.
    fn push(&mut self, index: usize, piece: &Piece, out: &mut Events) -> Result<(), ApiError> {
        let usage = match self.common.usage {
            StreamUsage::Never => None,
            StreamUsage::Last => Some(Value::Null),
            StreamUsage::Every => Some(self.usage()),
        };
        let choice = &mut self.choices[index];
        let echo = choice.echo.take();
        let token_ids = piece.token_ids(self.common.tokens);
        let silent = piece.text.is_empty() && piece.finish_reason.is_none();
        if silent && piece.logprobs.is_none() && token_ids.is_none() && echo.is_none() {
            return Ok(());
        }
        let begins = !std::mem::replace(&mut choice.begun, true);
        let text = echo.map(|echo| echo + &piece.text);
        let logprobs = choice.logprobs.as_mut().map(CompletionLogprobs::take);
        let logprobs = logprobs.as_ref();
        let text = text.as_deref().unwrap_or(&piece.text);
        let (finish_reason, stop_reason) = (piece.finish_reason, piece.stop_reason.as_ref());
        let prompt = self.prompt_of(index).filter(|_| begins);
        let choice = ChoiceBody {
            index,
            text,
            logprobs,
            finish_reason,
            stop_reason,
            token_ids,
            prompt_token_ids: prompt.and_then(|it| it.token_ids.as_deref()),
            // Streams have none.
            prompt_logprobs: None,
        };
        out.push(&self.envelope.with(&[choice], usage.as_ref()))
    }
}

/// A choice of an event or of the whole answer.
#[derive(Serialize)]
struct ChoiceBody<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<&'a CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<&'a PromptLogprobs>,
}

impl EventSource for Completion {
    async fn next(&mut self, out: &mut Events) -> Option<Result<(), ApiError>> {
        let pushed = match self.advance().await {
            Some(Err(error)) => Err(error),
            Some(Ok(Some((index, piece)))) => self.push(index, &piece, out),
            Some(Ok(None)) => Ok(()),
            None if self.common.usage != StreamUsage::Never => {
                return out.push_last(&self.envelope.with::<Value>(&[], Some(&self.usage())));
            }
            None => return None,
        };
        Some(pushed)
    }
}

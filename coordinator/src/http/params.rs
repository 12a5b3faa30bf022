//! Validated parameters of requests, common to completions and chat.
//!
//! Fields that OpenAI or vLLM know and this server does not are refused ([`super::refused`]);
//! fields that nobody knows are ignored, as OpenAI's own servers and vLLM do.
use std::sync::Arc;

use serde_json::Value;
use shared::protocol::{BadWords, GuideSpec, ThinkingBudget};
use shared::sampling::SamplingParams;
use tokio::time::Instant;

use super::access::Tally;
use super::error::ApiError;
pub use super::fields::Fields;
use super::fields::{any_number, whole_number};
pub use super::limits::Limits;
use super::limits::{MODEL_BYTES, SALT_BYTES, ranges};
use super::models::Models;
use super::structured::{self, Asked};
use super::thinking::Thinking;
use super::token_fields::TokenFields;
use crate::adapters::AdapterUse;
use crate::engine::TokenGuide;
use crate::guide::{self, Grammar};
use crate::text::model::TextModel;

/// Parameters common to completions and chat.
#[derive(Clone, Debug)]
pub struct Common {
    /// Choices per prompt.
    pub n: u32,
    /// Tokens per choice; absent: what the context leaves.
    pub max_tokens: Option<u32>,
    /// Most tokens per choice, whatever is asked for.
    new_tokens_max: u32,
    /// Whether `max_tokens` is only an upper bound: see [`Common::cap_output`].
    pub is_capped: bool,
    /// The field that the prompts came in.
    pub prompt_field: &'static str,
    /// The field that set `max_tokens`, if one did and it is more than an upper bound.
    pub output_field: Option<&'static str>,
    /// Sampling parameters; `choice` is set per choice, `seed` if the client names one.
    pub sampling: SamplingParams,
    /// Whether the client named a seed.
    pub seeded: bool,
    /// Stop strings.
    pub stops: Vec<String>,
    /// Lower is earlier.
    pub priority: i32,
    /// Requests with another salt share no cached prompts with it.
    pub cache_salt: u64,
    /// The adapter it is computed with.
    pub adapter: AdapterUse,
    /// End tokens.
    pub end_tokens: Vec<u32>,
    /// End tokens of the model itself.
    pub model_end_tokens: Vec<u32>,
    /// Whether to answer with Server-Sent Events.
    pub stream: bool,
    /// Which events of the stream report usage.
    pub usage: StreamUsage,
    /// What the client wants to know of tokens.
    pub tokens: TokenFields,
    /// Whether the stop string that ends a choice is part of its text.
    pub include_stop: bool,
    /// Whether special tokens are part of the text.
    pub keep_special: bool,
    /// Whether special tokens are told apart from text that spells them: see
    /// [`StopRules::fenced`](crate::text::stream::StopRules::fenced).
    pub fences: bool,
    /// What is kept of a prompt that is too long.
    pub truncation: Option<Truncation>,
    /// Constraint on the output.
    pub asked: Option<Asked>,
    /// The compiled constraint.
    pub guide: Option<Guidance>,
    /// How much it may reason.
    pub thinking: Option<Thinking>,
    /// What it must not say.
    pub bad_words: Option<Arc<BadWords>>,
    /// Whether the text continues the prompt's, as that of completions does.
    pub goes_on: bool,
    /// Counts the request's tokens.
    pub tally: Tally,
    /// Its deadline.
    pub deadline: Option<Instant>,
}

/// A compiled constraint on the output.
#[derive(Clone, Debug)]
pub struct Guidance {
    /// The field that set it.
    pub field: &'static str,
    /// Its specification.
    pub spec: Arc<GuideSpec>,
    /// Its grammar.
    pub grammar: Arc<Grammar>,
}

/// Which events of a stream report usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamUsage {
    /// None.
    #[default]
    Never,
    /// A separate last one.
    Last,
    /// That one, and every other reports the usage so far.
    Every,
}

/// Returns the adapter that a request's `model` names; none for the model itself, or if it names
/// nothing, which an empty name does too, as in vLLM.
///
/// # Errors
/// 404 if it is not served.
pub fn adapter(fields: &Fields, models: &Models) -> Result<AdapterUse, ApiError> {
    match fields.string("model", MODEL_BYTES)?.filter(|model| !model.is_empty()) {
        Some(model) => models.find(model).ok_or_else(|| models.unknown(model)),
        None => Ok(AdapterUse::default()),
    }
}

/// How much of a prompt's end is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    /// So many tokens.
    To(u32),
    /// As many as fit with the output.
    Fit,
}

impl Common {
    /// Reads the common fields.
    ///
    /// # Errors
    /// 400 naming field and bound, 404 for another model.
    pub fn read(
        fields: &Fields,
        limits: &Limits,
        text: &TextModel,
        models: &Models,
    ) -> Result<Self, ApiError> {
        let adapter = adapter(fields, models)?;
        fields.string("user", limits.user_bytes)?;
        let n = fields.count("n", 1, limits.n)?.unwrap_or(1);
        if let Some(best_of) = fields.count("best_of", 1, limits.n)?
            && best_of != n
        {
            return Err(ApiError::field("best_of", format!("`best_of` must equal `n` ({n})")));
        }
        let stream = fields.boolean("stream", false)?;
        let defaults = &text.defaults;
        let mut model_end_tokens = Vec::new();
        if !fields.boolean("ignore_eos", false)? {
            model_end_tokens.clone_from(&text.end_tokens);
            if limits.harmony {
                model_end_tokens.extend(&text.harmony_ends);
                model_end_tokens.sort_unstable();
                model_end_tokens.dedup();
            }
        }
        let mut end_tokens = model_end_tokens.clone();
        end_tokens.extend(token_ids(fields, "stop_token_ids", limits.stop_token_ids, text)?);
        let min_tokens = fields.count("min_tokens", 0, limits.max_output())?.unwrap_or(0);
        let repetition = fields.number("repetition_penalty", ranges::REPETITION_PENALTY)?;
        let top_p = fields.number("top_p", ranges::TOP_P)?;
        if top_p.is_some_and(|top_p| f64::from(top_p) <= ranges::TOP_P.0) {
            return Err(ApiError::field("top_p", "`top_p` must be above 0 and at most 1"));
        }
        let seed = fields.integer("seed", i64::MIN, i64::MAX)?;
        let top_k = fields.integer("top_k", ranges::TOP_K.0, ranges::TOP_K.1)?;
        let top_k = top_k.map(|k| u32::try_from(k).unwrap_or(0));
        let sampling = SamplingParams {
            temperature: fields
                .number("temperature", ranges::TEMPERATURE)?
                .or(defaults.temperature)
                .unwrap_or(1.0),
            top_p: top_p.or(defaults.top_p).unwrap_or(1.0),
            top_k: top_k.or(defaults.top_k).unwrap_or(0),
            min_p: fields.number("min_p", ranges::MIN_P)?.or(defaults.min_p).unwrap_or(0.0),
            seed: seed.unwrap_or(0).cast_unsigned(),
            choice: 0,
            presence_penalty: fields.number("presence_penalty", ranges::PENALTY)?.unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", ranges::PENALTY)?.unwrap_or(0.0),
            repetition_penalty: repetition.or(defaults.repetition_penalty).unwrap_or(1.0),
            logit_bias: logit_bias(fields, limits, text)?,
            suppress_until_min: if min_tokens > 0 { end_tokens.clone() } else { Vec::new() },
            min_tokens,
            logprobs: None,
            prompt_logprobs: None,
            pooling: None,
        };
        let usage = stream_usage(fields, stream, limits.reports_usage)?;
        let asked = structured::read(fields, text.vocab_size, &end_tokens, &|mark| {
            text.special_token(mark)
        })?;
        Ok(Self {
            n,
            max_tokens: None,
            new_tokens_max: defaults.max_new_tokens.unwrap_or(u32::MAX),
            is_capped: false,
            prompt_field: "prompt",
            output_field: None,
            sampling,
            seeded: seed.is_some(),
            stops: stops(fields, limits)?,
            priority: priority(fields, limits)?,
            cache_salt: cache_salt(fields)?,
            adapter,
            end_tokens,
            model_end_tokens,
            stream,
            usage,
            tokens: TokenFields::read(fields, limits, stream)?,
            include_stop: fields.boolean("include_stop_str_in_output", false)?,
            keep_special: !fields.boolean("skip_special_tokens", true)?,
            fences: false,
            truncation: truncation(fields, limits)?,
            asked,
            guide: None,
            thinking: None,
            bad_words: None,
            goes_on: false,
            tally: fields.tally().clone(),
            deadline: fields.terms().deadline,
        })
    }

    /// Makes a guide for each choice, if the output is constrained, reasoning bounded or words are
    /// not wanted. The vocabulary has `vocab` tokens; `behind_text` tells whether text precedes.
    ///
    /// # Errors
    /// 400 naming the field, if the output cannot begin there.
    pub fn guides(
        &self,
        thinking: Option<&Arc<ThinkingBudget>>,
        vocab: u32,
        behind_text: bool,
    ) -> Result<Vec<Box<dyn TokenGuide>>, ApiError> {
        let grammar = self.guide.as_ref().map(|it| &it.grammar);
        let bad_words = self.bad_words.as_ref().map(|words| (words, vocab));
        let guides = guide::guides(self.n as usize, grammar, thinking, bad_words, behind_text);
        guides.map_err(|why| {
            let field = self.guide.as_ref().map_or("structured_outputs", |it| it.field);
            structured::wrong(field, &format!("cannot begin: {why}"))
        })
    }

    /// Returns the end tokens that are part of the text: those that the request names, if what ends
    /// the text is included in it.
    #[must_use]
    pub fn shown_end_tokens(&self) -> Vec<u32> {
        let named = self.end_tokens.iter().filter(|it| !self.model_end_tokens.contains(it));
        named.copied().filter(|_| self.include_stop).collect()
    }

    /// Maximum number of tokens of a prompt that is not truncated.
    #[must_use]
    pub fn fit(&self, limits: &Limits) -> Option<u32> {
        self.truncation.is_none().then_some(limits.max_model_len)
    }

    /// Cuts the beginning of a prompt that is longer than the client wants; returns whether
    /// anything was cut.
    pub fn truncate(&self, tokens: &mut Vec<u32>, limits: &Limits) -> bool {
        let max = match self.truncation {
            None => return false,
            Some(Truncation::To(max)) => max,
            Some(Truncation::Fit) => {
                let output = match (self.max_tokens, limits.reserved_output()) {
                    // A shorter output will do, so that no prompt need be cut for a longer one.
                    (Some(max), usual) if self.is_capped => max.min(usual),
                    (max, usual) => max.unwrap_or(usual),
                };
                limits.max_model_len.saturating_sub(output).max(1)
            }
        };
        let over = tokens.len().saturating_sub(max as usize);
        tokens.drain(..over);
        over > 0
    }

    /// Bounds the tokens per choice by what the model's length leaves after a prompt of `prompt`
    /// tokens.
    pub fn cap_output(&mut self, prompt: usize, limits: &Limits) {
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let left = limits.max_model_len.saturating_sub(prompt).max(1);
        self.max_tokens = self.max_tokens.map(|asked| asked.min(left));
    }

    /// Checks the minimum number of tokens against the maximum, which is known by now.
    ///
    /// # Errors
    /// 400 naming both.
    pub fn check_least(&self) -> Result<(), ApiError> {
        let (least, Some(most)) = (self.sampling.min_tokens, self.max_tokens) else {
            return Ok(());
        };
        if least <= most {
            return Ok(());
        }
        let message = format!("`min_tokens` ({least}) is above `max_tokens` ({most})");
        Err(ApiError::field("min_tokens", message))
    }

    /// Whether fewer tokens will do if the KV cache has no room for all.
    #[must_use]
    pub fn is_open_ended(&self) -> bool {
        self.is_capped || self.max_tokens.is_none()
    }

    /// Returns the tokens per choice for a prompt of `prompt` tokens, which came in this field.
    ///
    /// # Errors
    /// 400 naming both if prompt and output do not fit.
    pub fn output_tokens(
        &self,
        field: &str,
        prompt: usize,
        limits: &Limits,
    ) -> Result<u32, ApiError> {
        let context = limits.max_model_len;
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let asked = self.max_tokens.unwrap_or_else(|| context.saturating_sub(prompt).max(1));
        let asked = asked.min(self.new_tokens_max);
        if u64::from(prompt) + u64::from(asked) <= u64::from(context) {
            return Ok(asked);
        }
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you requested {} \
             tokens ({prompt} in the prompt; {asked} for the completion). Please reduce your \
             prompt; or completion length.",
            u64::from(prompt) + u64::from(asked)
        );
        let param = if prompt >= context { field } else { "max_tokens" };
        Err(ApiError::context_length(param, message))
    }
}

fn stream_usage(fields: &Fields, stream: bool, always: bool) -> Result<StreamUsage, ApiError> {
    let name = "stream_options";
    let unasked = if always { StreamUsage::Last } else { StreamUsage::Never };
    let options = match fields.get(name) {
        None => return Ok(unasked),
        Some(Value::Object(options)) if !stream && !options.is_empty() => {
            let message = format!("`{name}` is allowed only with `stream`: true");
            return Err(ApiError::field(name, message));
        }
        Some(Value::Object(options)) => options,
        Some(other) => return Err(Fields::wrong(name, other, "an object")),
    };
    let flag = |option: &str| match options.get(option) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(Fields::wrong(&format!("{name}.{option}"), other, "true or false")),
    };
    // As in vLLM: usage in every event requires usage in the last one.
    Ok(match (flag("include_usage")? || always, flag("continuous_usage_stats")?) {
        (false, _) => StreamUsage::Never,
        (true, false) => StreamUsage::Last,
        (true, true) => StreamUsage::Every,
    })
}

fn truncation(fields: &Fields, limits: &Limits) -> Result<Option<Truncation>, ApiError> {
    let name = "truncate_prompt_tokens";
    Ok(match fields.integer(name, -1, i64::from(limits.max_model_len))? {
        None => None,
        Some(-1) => Some(Truncation::Fit),
        Some(0) => return Err(ApiError::field(name, format!("`{name}` must be -1 or above 0"))),
        Some(tokens) => Some(Truncation::To(u32::try_from(tokens).unwrap_or(u32::MAX))),
    })
}

fn stops(fields: &Fields, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let name = "stop";
    let expected = format!(
        "a string or a list of at most {} strings, each of 1 to {} bytes",
        limits.stops, limits.stop_bytes
    );
    let list: &[Value] = match fields.get(name) {
        None => &[],
        Some(Value::Array(list)) => list,
        Some(one) => std::slice::from_ref(one),
    };
    let fits = |text: &&str| (1..=limits.stop_bytes).contains(&text.len());
    let stops: Option<Vec<String>> =
        list.iter().map(|stop| stop.as_str().filter(fits).map(str::to_owned)).collect();
    match stops.filter(|stops| stops.len() <= limits.stops) {
        Some(stops) => Ok(stops),
        None => Err(Fields::wrong(name, &Value::Array(list.to_vec()), &expected)),
    }
}

/// vLLM's `cache_salt`: a request shares no cached prompt with requests that have another salt, or
/// none, so nobody else can infer its prompt from response times. The same holds between API keys.
/// 0 means neither.
fn cache_salt(fields: &Fields) -> Result<u64, ApiError> {
    let name = "cache_salt";
    let Some(value) = fields.get(name) else { return Ok(fields.terms().salts.number(None)) };
    let salt = value.as_str().filter(|salt| (1..=SALT_BYTES).contains(&salt.len()));
    let salt = salt.ok_or_else(|| {
        Fields::wrong(name, value, &format!("a string of 1 to {SALT_BYTES} bytes"))
    })?;
    Ok(fields.terms().salts.number(Some(salt)))
}

fn token_ids(
    fields: &Fields,
    name: &str,
    max: usize,
    text: &TextModel,
) -> Result<Vec<u32>, ApiError> {
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let ids = value
        .as_array()
        .filter(|list| list.len() <= max)
        .and_then(|list| list.iter().map(|id| token_id(id, text)).collect::<Option<Vec<u32>>>());
    ids.ok_or_else(|| {
        let expected =
            format!("a list of at most {max} token ids from 0 to {}", text.vocab_size - 1);
        Fields::wrong(name, value, &expected)
    })
}

/// Reads a token id of the vocabulary.
pub(super) fn token_id(value: &Value, text: &TextModel) -> Option<u32> {
    let id = whole_number(value).and_then(|id| u32::try_from(id).ok())?;
    (id < text.vocab_size).then_some(id)
}

fn priority(fields: &Fields, limits: &Limits) -> Result<i32, ApiError> {
    let name = "priority";
    let priority = fields.integer(name, i32::MIN.into(), i32::MAX.into())?.unwrap_or(0);
    if priority != 0 && !limits.priorities {
        let message = "`priority` is not supported here: the server must be started with \
                       --scheduling-policy priority";
        return Err(ApiError::field(name, message));
    }
    Ok(i32::try_from(priority).unwrap_or(0))
}

fn logit_bias(
    fields: &Fields,
    limits: &Limits,
    text: &TextModel,
) -> Result<Vec<(u32, f32)>, ApiError> {
    let name = "logit_bias";
    let (low, high) = ranges::LOGIT_BIAS;
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let entry = |(id, bias): (&String, &Value)| {
        let id = id.parse::<u32>().ok().filter(|id| *id < text.vocab_size)?;
        let bias = any_number(bias).filter(|bias| (low..=high).contains(bias))?;
        Some((id, bias as f32))
    };
    let map = value.as_object().filter(|map| map.len() <= limits.logit_bias);
    map.and_then(|map| map.iter().map(entry).collect()).ok_or_else(|| {
        let expected = format!(
            "an object of at most {} token ids (0 to {}) with numbers from {low} to {high}",
            limits.logit_bias,
            text.vocab_size - 1
        );
        Fields::wrong(name, value, &expected)
    })
}

//! Request bodies to validated requests: every field, its bound, its error.
//!
//! Fields are read one by one from the JSON, so that an error names the field and the bound. `null`
//! is the same as absent. Unknown fields are ignored, as OpenAI's own servers and vLLM do.
use std::hash::Hasher as _;

use serde_json::{Map, Value};
use shared::sampling::SamplingParams;

use super::error::ApiError;
use crate::text::model::TextModel;
use crate::text::template::Message;

/// Every bound of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Nesting of its JSON.
    pub json_depth: usize,
    /// Prompts of one completions request.
    pub prompts: usize,
    /// Messages of one conversation.
    pub messages: usize,
    /// Choices of one prompt.
    pub n: u32,
    /// Stop strings.
    pub stops: usize,
    /// Bytes of one stop string.
    pub stop_bytes: usize,
    /// Stop token ids.
    pub stop_token_ids: usize,
    /// Entries of `logit_bias`.
    pub logit_bias: usize,
    /// Alternatives reported by completions.
    pub logprobs: u32,
    /// Alternatives reported by chat.
    pub top_logprobs: u32,
    /// Bytes of `user`.
    pub user_bytes: usize,
    /// Tokens of prompt and output.
    pub max_model_len: u32,
}

impl Limits {
    /// The default bounds, for sequences of `max_model_len` tokens.
    #[must_use]
    pub fn new(max_model_len: u32) -> Self {
        Self {
            body_bytes: 1 << 20,
            json_depth: 32,
            prompts: 64,
            messages: 1024,
            n: 8,
            stops: 4,
            stop_bytes: 256,
            stop_token_ids: 64,
            logit_bias: 1024,
            logprobs: 5,
            top_logprobs: 20,
            user_bytes: 256,
            max_model_len,
        }
    }
}

/// A body's fields.
#[derive(Clone, Debug)]
pub struct Fields {
    map: Map<String, Value>,
}

impl Fields {
    /// Parses a body.
    ///
    /// # Errors
    /// 400 when it is no JSON object within the bounds.
    pub fn parse(body: &[u8], limits: &Limits) -> Result<Self, ApiError> {
        if depth(body) > limits.json_depth {
            let max = limits.json_depth;
            return Err(ApiError::body(format!("The JSON is nested deeper than {max} levels")));
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { map }),
            Ok(_) => Err(ApiError::body("The body must be a JSON object")),
            Err(error) => Err(ApiError::body(format!("The body is not valid JSON: {error}"))),
        }
    }

    /// A field that is there and not null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn wrong(name: &str, value: &Value, expected: &str) -> ApiError {
        let mut found = value.to_string();
        if found.chars().count() > 60 {
            found = found.chars().take(60).chain("...".chars()).collect();
        }
        ApiError::field(name, format!("`{name}` must be {expected}, not {found}"))
    }

    /// A boolean.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn boolean(&self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(Self::wrong(name, other, "true or false")),
        }
    }

    /// An integer in `min..=max`.
    ///
    /// # Errors
    /// 400 naming the field and the bounds.
    pub fn integer(&self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_i64().filter(|number| (min..=max).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(Self::wrong(name, value, &format!("an integer from {min} to {max}"))),
        }
    }

    /// As [`Fields::integer`], for what is counted.
    ///
    /// # Errors
    /// As there.
    pub fn count(&self, name: &str, min: u32, max: u32) -> Result<Option<u32>, ApiError> {
        let number = self.integer(name, i64::from(min), i64::from(max))?;
        Ok(number.and_then(|number| u32::try_from(number).ok()))
    }

    /// A finite number in `min..=max`.
    ///
    /// # Errors
    /// 400 naming the field and the bounds.
    pub fn number(&self, name: &str, min: f64, max: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().filter(|number| *number >= min && *number <= max) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(Self::wrong(name, value, &format!("a number from {min} to {max}"))),
        }
    }

    /// A string of at most `max` bytes.
    ///
    /// # Errors
    /// 400 naming the field and the bound.
    pub fn string(&self, name: &str, max: usize) -> Result<Option<&str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) if text.len() <= max => Ok(Some(text)),
            Some(other) => {
                Err(Self::wrong(name, other, &format!("a string of at most {max} bytes")))
            }
        }
    }

    /// Refuses a field whose value asks for what is not there.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn refuse(&self, name: &str, harmless: &[Value]) -> Result<(), ApiError> {
        match self.get(name) {
            Some(value) if !harmless.contains(value) => {
                Err(ApiError::field(name, format!("`{name}` is not supported")))
            }
            _ => Ok(()),
        }
    }
}

/// Greatest nesting of arrays and objects, outside of strings.
fn depth(json: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0usize, 0usize);
    let (mut in_string, mut escaped) = (false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// What completions and chat have in common.
#[derive(Clone, Debug)]
pub struct Common {
    /// Choices per prompt.
    pub n: u32,
    /// Tokens per choice; what the context leaves, when absent.
    pub max_tokens: Option<u32>,
    /// How tokens are chosen; `choice` is set per choice, `seed` when the client names one.
    pub sampling: SamplingParams,
    /// The client named a seed.
    pub seeded: bool,
    /// Stop strings.
    pub stops: Vec<String>,
    /// Requests of another salt share no cached prompts with it.
    pub cache_salt: u64,
    /// End tokens.
    pub end_tokens: Vec<u32>,
    /// Answer in Server-Sent Events.
    pub stream: bool,
    /// End the stream with a usage event.
    pub include_usage: bool,
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
        model_name: &str,
    ) -> Result<Self, ApiError> {
        if let Some(model) = fields.string("model", 4096)?
            && model != model_name
        {
            return Err(ApiError::unknown_model(model));
        }
        fields.string("user", limits.user_bytes)?;
        let n = fields.count("n", 1, limits.n)?.unwrap_or(1);
        if let Some(best_of) = fields.count("best_of", 1, limits.n)?
            && best_of != n
        {
            return Err(ApiError::field("best_of", format!("`best_of` must equal `n` ({n})")));
        }
        let stream = fields.boolean("stream", false)?;
        let defaults = &text.defaults;
        let mut end_tokens =
            if fields.boolean("ignore_eos", false)? { Vec::new() } else { text.end_tokens.clone() };
        end_tokens.extend(token_ids(fields, "stop_token_ids", limits.stop_token_ids, text)?);
        let min_tokens = fields.count("min_tokens", 0, limits.max_model_len)?.unwrap_or(0);
        let repetition = fields.number("repetition_penalty", 0.01, 100.0)?;
        let top_p = fields.number("top_p", 0.0, 1.0)?;
        if top_p == Some(0.0) {
            return Err(ApiError::field("top_p", "`top_p` must be above 0 and at most 1"));
        }
        let seed = fields.integer("seed", i64::MIN, i64::MAX)?;
        let top_k = fields.integer("top_k", -1, i64::from(i32::MAX))?;
        let top_k = top_k.map(|k| u32::try_from(k).unwrap_or(0));
        let sampling = SamplingParams {
            temperature: fields
                .number("temperature", 0.0, 2.0)?
                .or(defaults.temperature)
                .unwrap_or(1.0),
            top_p: top_p.or(defaults.top_p).unwrap_or(1.0),
            top_k: top_k.or(defaults.top_k).unwrap_or(0),
            min_p: fields.number("min_p", 0.0, 1.0)?.or(defaults.min_p).unwrap_or(0.0),
            seed: seed.unwrap_or(0).cast_unsigned(),
            choice: 0,
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            repetition_penalty: repetition.or(defaults.repetition_penalty).unwrap_or(1.0),
            logit_bias: logit_bias(fields, limits, text)?,
            suppress_until_min: if min_tokens > 0 { end_tokens.clone() } else { Vec::new() },
            min_tokens,
            logprobs: None,
            prompt_logprobs: None,
        };
        let include_usage = include_usage(fields, stream)?;
        Ok(Self {
            n,
            max_tokens: None,
            sampling,
            seeded: seed.is_some(),
            stops: stops(fields, limits)?,
            cache_salt: cache_salt(fields, limits)?,
            end_tokens,
            stream,
            include_usage,
        })
    }

    /// Tokens per choice for a prompt of `prompt` tokens.
    ///
    /// # Errors
    /// 400 naming both when prompt and output do not fit.
    pub fn output_tokens(&self, prompt: usize, limits: &Limits) -> Result<u32, ApiError> {
        let context = limits.max_model_len;
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let asked = self.max_tokens.unwrap_or_else(|| context.saturating_sub(prompt).max(1));
        if u64::from(prompt) + u64::from(asked) <= u64::from(context) {
            return Ok(asked);
        }
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you requested {} \
             tokens ({prompt} in the prompt; {asked} for the completion). Please reduce your \
             prompt; or completion length.",
            u64::from(prompt) + u64::from(asked)
        );
        let param = if prompt >= context { "prompt" } else { "max_tokens" };
        Err(ApiError::context_length(param, message))
    }
}

fn include_usage(fields: &Fields, stream: bool) -> Result<bool, ApiError> {
    let name = "stream_options";
    match fields.get(name) {
        None => Ok(false),
        Some(Value::Object(_)) if !stream => {
            Err(ApiError::field(name, format!("`{name}` is allowed only with `stream`: true")))
        }
        Some(Value::Object(options)) => match options.get("include_usage") {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(include)) => Ok(*include),
            Some(other) => {
                Err(Fields::wrong("stream_options.include_usage", other, "true or false"))
            }
        },
        Some(other) => Err(Fields::wrong(name, other, "an object")),
    }
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

/// vLLM's `cache_salt`: who gives one shares no cached prompt with those who give another, or none,
/// and so cannot learn from the time of an answer what they ask. 0 is none.
fn cache_salt(fields: &Fields, limits: &Limits) -> Result<u64, ApiError> {
    let name = "cache_salt";
    let Some(value) = fields.get(name) else { return Ok(0) };
    let salt = value.as_str().filter(|salt| (1..=limits.user_bytes).contains(&salt.len()));
    let salt = salt.ok_or_else(|| {
        Fields::wrong(name, value, &format!("a string of 1 to {} bytes", limits.user_bytes))
    })?;
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(salt.as_bytes());
    Ok(hasher.finish().max(1))
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

/// A token id of the vocabulary.
pub(super) fn token_id(value: &Value, text: &TextModel) -> Option<u32> {
    let id = value.as_u64().and_then(|id| u32::try_from(id).ok())?;
    (id < text.vocab_size).then_some(id)
}

fn logit_bias(
    fields: &Fields,
    limits: &Limits,
    text: &TextModel,
) -> Result<Vec<(u32, f32)>, ApiError> {
    let name = "logit_bias";
    let Some(value) = fields.get(name) else { return Ok(Vec::new()) };
    let entry = |(id, bias): (&String, &Value)| {
        let id = id.parse::<u32>().ok().filter(|id| *id < text.vocab_size)?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
        Some((id, bias as f32))
    };
    let map = value.as_object().filter(|map| map.len() <= limits.logit_bias);
    map.and_then(|map| map.iter().map(entry).collect()).ok_or_else(|| {
        let expected = format!(
            "an object of at most {} token ids (0 to {}) with numbers from -100 to 100",
            limits.logit_bias,
            text.vocab_size - 1
        );
        Fields::wrong(name, value, &expected)
    })
}

/// Reads a conversation.
///
/// # Errors
/// 400 naming the message and what it must be.
pub fn messages(fields: &Fields, limits: &Limits) -> Result<Vec<Message>, ApiError> {
    let name = "messages";
    let list = match fields.get(name) {
        Some(Value::Array(list)) if (1..=limits.messages).contains(&list.len()) => list,
        Some(other) => {
            let expected = format!("a list of 1 to {} messages", limits.messages);
            return Err(Fields::wrong(name, other, &expected));
        }
        None => return Err(ApiError::field(name, "`messages` is required")),
    };
    list.iter().enumerate().map(|(index, value)| message(index, value)).collect()
}

fn message(index: usize, value: &Value) -> Result<Message, ApiError> {
    let at = |part: &str| format!("messages[{index}]{part}");
    let wrong = |part: &str, expected: &str| {
        let message = format!("`{}` must be {expected}", at(part));
        ApiError::field("messages", message)
    };
    let fields = value.as_object().ok_or_else(|| wrong("", "an object"))?;
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
    if !["system", "developer", "user", "assistant", "tool"].contains(&role) {
        return Err(wrong(".role", "one of system, developer, user, assistant and tool"));
    }
    let role = if role == "developer" { "system" } else { role };
    let part = |part: &Value| {
        let text = part.get("type").and_then(Value::as_str) == Some("text");
        part.get("text").and_then(Value::as_str).filter(|_| text).map(str::to_owned)
    };
    let content = match fields.get("content") {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(parts)) => parts.iter().map(part).collect::<Option<String>>(),
        None | Some(Value::Null) if role == "assistant" => Some(String::new()),
        _ => None,
    };
    let content = content.ok_or_else(|| wrong(".content", "a string or a list of text parts"))?;
    Ok(Message { role: role.to_owned(), content })
}

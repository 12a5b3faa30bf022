//! Fields of OpenAI's, Anthropic's and vLLM's APIs that would change the answer and are not
//! supported: refused by name, unless their value asks for nothing. Ignoring one would give an
//! answer to another question.
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use super::thinking;

/// Values of a field that ask for nothing, besides `null`.
#[derive(Clone, Copy, Debug)]
enum Neutral {
    /// No other.
    Null,
    /// `false`.
    False,
    /// `true`.
    True,
    /// `0`.
    Zero,
    /// `1`.
    One,
    /// An empty string, list or object.
    Empty,
    /// One of these strings.
    Words(&'static [&'static str]),
    /// The list with this one string.
    Only(&'static str),
}

use Neutral::{Empty, False, Null, One, Only, True, Words, Zero};

/// OpenAI's words for the speed and price of an answer; here all are equal.
const SERVICE_TIERS: [&str; 5] = ["auto", "default", "flex", "priority", "scale"];
/// OpenAI's words for how much a model says: a hint that models here are not given.
pub(super) const VERBOSITIES: [&str; 3] = ["low", "medium", "high"];

/// Fields of all endpoints.
const COMMON: &[(&str, Neutral)] = &[
    ("detokenize", True),
    ("early_stopping", False),
    ("ec_transfer_params", Null),
    ("kv_transfer_params", Null),
    ("length_penalty", One),
    ("logprob_token_ids", Null),
    ("logits_processors", Empty),
    ("repetition_detection", Null),
    ("return_prompt_text", False),
    ("use_beam_search", False),
    ("vllm_xargs", Empty),
    ("watermarking", False),
];

/// Fields of all endpoints but `/v1/completions` and `/v1/chat/completions`: see
/// [`super::token_fields`] and [`super::bad_words`].
const TOKENS: &[(&str, Neutral)] = &[
    (super::bad_words::FIELD, Empty),
    ("prompt_logprobs", Null),
    ("return_token_ids", False),
    ("return_tokens_as_token_ids", False),
];

/// The field of [`super::thinking`], where nothing is generated; `/v1/messages` has another.
const BUDGET: &[(&str, Neutral)] = &[(thinking::FIELD, Null)];

/// Fields of `/v1/completions` only.
const COMPLETIONS: &[(&str, Neutral)] =
    &[("prompt_embeds", Null), ("suffix", Empty), ("truncation_side", Words(&["left"]))];

/// Fields of `/v1/chat/completions` only.
const CHAT: &[(&str, Neutral)] = &[
    ("audio", Null),
    ("chat_template", Null),
    ("echo", False),
    ("function_call", Words(&["none"])),
    ("functions", Empty),
    ("mm_processor_kwargs", Empty),
    ("modalities", Only("text")),
    ("moderation", Null),
    ("service_tier", Words(&SERVICE_TIERS)),
    ("truncation_side", Words(&["left"])),
    ("verbosity", Words(&VERBOSITIES)),
    ("web_search_options", Null),
];

/// Fields of `/v1/responses` only.
const RESPONSES: &[(&str, Neutral)] = &[
    ("access_programs", Empty),
    ("add_generation_prompt", True),
    ("background", False),
    ("chat_template", Null),
    ("context_management", Empty),
    ("continue_final_message", False),
    ("conversation", Null),
    ("documents", Empty),
    ("enable_response_messages", False),
    ("image", Empty),
    ("mm_processor_kwargs", Empty),
    ("moderation", Null),
    ("n", One),
    ("previous_input_messages", Empty),
    ("previous_response", Null),
    ("previous_response_id", Null),
    ("prompt", Null),
    ("service_tier", Words(&SERVICE_TIERS)),
];

/// Of `/v1/messages` alone; names of chat's that it says otherwise are told by
/// [`super::messages`].
const MESSAGES: &[(&str, Neutral)] = &[
    ("add_generation_prompt", True),
    ("audio", Null),
    ("best_of", One),
    ("chat_template", Null),
    ("container", Null),
    ("continue_final_message", False),
    ("echo", False),
    ("logprobs", False),
    ("mcp_servers", Empty),
    ("mm_processor_kwargs", Empty),
    ("modalities", Only("text")),
    ("moderation", Null),
    ("n", One),
    ("speed", Words(&["standard"])),
    ("thread", Null),
    ("top_logprobs", Zero),
    ("truncation_side", Words(&["left"])),
    ("verbosity", Words(&VERBOSITIES)),
    ("web_search_options", Null),
];

/// Fields of all endpoints that make numbers of texts.
const TEXTS: &[(&str, Neutral)] = &[
    ("activation", True),
    ("mm_processor_kwargs", Empty),
    ("padding", Words(&["do_not_pad"])),
    ("truncation_side", Words(&["right"])),
];

/// Fields of those that may answer with vectors.
const VECTORS: &[(&str, Neutral)] = &[
    ("embed_dtype", Words(&["float32"])),
    ("endianness", Words(&["little", "native"])),
    ("messages", Null),
    ("normalize", True),
];

/// Fields of `/rerank` and `/score` only.
const COMPARISON: &[(&str, Neutral)] = &[
    ("chat_template_kwargs", Empty),
    ("instruction", Empty),
    ("max_chunks_per_doc", Null),
    ("rank_fields", Only("text")),
    ("return_embeddings", False),
    ("softmax", Null),
];

/// Fields of `/classify` only.
const CLASSES: &[(&str, Neutral)] = &[("messages", Null), ("softmax", Null)];

/// Fields of `/pooling` only.
const POOLING: &[(&str, Neutral)] = &[("data", Null), ("softmax", Null)];

/// Fields of `/v1/embeddings` only.
const EMBEDDINGS: &[(&str, Neutral)] = &[("additional_data", Null), ("use_activation", True)];

impl Neutral {
    /// The values, null among them, as a JSON schema. Each enumeration is of one type, as
    /// generators of clients want it.
    fn schema(self) -> Value {
        match self {
            Null => json!({"type": "null"}),
            False => json!({"anyOf": [{"type": "null"}, {"const": false}]}),
            True => json!({"anyOf": [{"type": "null"}, {"const": true}]}),
            Zero => json!({"anyOf": [{"type": "null"}, {"const": 0}]}),
            One => json!({"anyOf": [{"type": "null"}, {"const": 1}]}),
            Empty => json!({"anyOf": [
                {"type": "null"},
                {"type": "string", "maxLength": 0},
                {"type": "array", "items": {}, "maxItems": 0},
                {"type": "object", "maxProperties": 0},
            ]}),
            Words(words) => {
                let mut all = json!(words);
                all.as_array_mut().into_iter().for_each(|all| all.insert(0, Value::Null));
                json!({"enum": all})
            }
            Only(word) => json!({"anyOf": [
                {"type": "null"},
                {"type": "array", "items": {"const": word}, "minItems": 1, "maxItems": 1},
            ]}),
        }
    }

    fn holds(self, value: &Value) -> bool {
        match self {
            Null => false,
            False => *value == json!(false),
            True => *value == json!(true),
            Zero => value.as_f64() == Some(0.0),
            One => value.as_f64() == Some(1.0),
            Empty => match value {
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            },
            Words(words) => value.as_str().is_some_and(|value| words.contains(&value)),
            Only(word) => *value == json!([word]),
        }
    }
}

/// The endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/rerank`.
    Rerank,
    /// `/score`.
    Score,
    /// `/classify`.
    Classify,
    /// `/pooling`.
    Pooling,
}

impl Endpoint {
    /// All of its fields.
    fn refused(self) -> impl Iterator<Item = &'static (&'static str, Neutral)> {
        let lists: &'static [&'static [(&'static str, Neutral)]] = match self {
            Self::Completions => &[COMMON, COMPLETIONS],
            Self::Chat => &[COMMON, CHAT],
            Self::Responses => &[COMMON, TOKENS, RESPONSES],
            Self::Messages => &[COMMON, TOKENS, MESSAGES],
            Self::Embeddings => &[COMMON, TOKENS, BUDGET, TEXTS, VECTORS, EMBEDDINGS],
            Self::Rerank | Self::Score => &[COMMON, TOKENS, BUDGET, TEXTS, COMPARISON],
            Self::Classify => &[COMMON, TOKENS, BUDGET, TEXTS, CLASSES],
            Self::Pooling => &[COMMON, TOKENS, BUDGET, TEXTS, VECTORS, POOLING],
        };
        lists.iter().copied().flatten()
    }
}

/// Rejects unsupported fields.
///
/// # Errors
/// 400 naming the field.
pub fn check(fields: &Fields, endpoint: Endpoint) -> Result<(), ApiError> {
    for (name, neutral) in endpoint.refused() {
        if fields.get(name).is_some_and(|value| !neutral.holds(value)) {
            return Err(ApiError::field(name, format!("`{name}` is not supported{}", why(name))));
        }
    }
    Ok(())
}

/// What a client can do instead, if that is not obvious.
fn why(name: &str) -> &'static str {
    match name {
        "conversation" | "previous_response_id" | "previous_response" => {
            ": responses are not stored; send the earlier messages in `input`"
        }
        "background" => ": responses are not stored, so they cannot be retrieved later",
        "instruction" => {
            ": write it into the query, in the form that the model was trained with, or, where \
             `--chat-template` makes prompts of pairs, into that file"
        }
        _ => "",
    }
}

/// Returns what is accepted of each field of an endpoint that would be rejected otherwise.
pub(super) fn schemas(endpoint: Endpoint) -> impl Iterator<Item = (&'static str, Value)> {
    endpoint.refused().map(|(name, neutral)| (*name, neutral.schema()))
}

/// Returns every rejected field of an endpoint: for the documentation's test.
#[must_use]
pub fn names(endpoint: Endpoint) -> Vec<&'static str> {
    endpoint.refused().map(|(name, _)| *name).collect()
}

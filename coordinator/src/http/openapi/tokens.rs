//! PURE: what answers of completions and chat tell of tokens.
use serde_json::{Value, json};

use super::answers::count;
use super::schema::{answer, any_list, properties, reference, string};

/// The ids of tokens.
pub(super) fn ids() -> Value {
    any_list(count())
}

/// All tokens' log-probabilities, as in completions.
pub(super) fn logprobs() -> Value {
    let logprob = json!({"type": ["number", "null"]});
    let top = json!({"type": ["object", "null"], "additionalProperties": {"type": "number"}});
    answer(
        json!({
            "tokens": any_list(string()), "token_logprobs": any_list(logprob),
            "top_logprobs": any_list(top), "text_offset": any_list(count()),
        }),
        json!({}),
    )
}

/// One token's log-probabilities, as in chat.
pub(super) fn logprob() -> Value {
    let mut all = properties(of_token());
    all.insert("top_logprobs".to_owned(), any_list(reference("TopLogprob")));
    answer(Value::Object(all), json!({}))
}

pub(super) fn top_logprob() -> Value {
    answer(of_token(), json!({}))
}

fn of_token() -> Value {
    json!({"token": string(), "logprob": {"type": "number"}, "bytes": any_list(count())})
}

//! PURE: what answers of completions and chat tell of tokens.
use serde_json::{Value, json};

use super::answers::count;
use super::schema::{answer, any_list, properties, reference, string};

/// The ids of tokens.
pub(super) fn ids() -> Value {
    any_list(count())
}

/// The ids of a prompt's tokens and, unless it is of an event, their log-probabilities.
pub(super) fn of_prompt(is_event: bool) -> Value {
    let entry = json!({
        "type": ["object", "null"], "additionalProperties": reference("PromptLogprob"),
        "description": "The prompt's token and its alternatives, by their ids.",
    });
    match is_event {
        true => json!({"prompt_token_ids": ids()}),
        false => json!({"prompt_token_ids": ids(), "prompt_logprobs": any_list(entry)}),
    }
}

pub(super) fn prompt_logprob() -> Value {
    let own = json!({"logprob": {"type": "number"}, "rank": count(), "decoded_token": string()});
    answer(own, json!({}))
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

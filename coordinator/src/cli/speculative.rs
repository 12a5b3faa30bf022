//! `--speculative-config`: JSON with the names and defaults of vLLM's.
use std::path::PathBuf;

use coordinator::scheduler::{Method, NgramConfig, Speculation};
use serde_json::{Map, Value};

const METHOD: &str = "method";
const MODEL: &str = "model";
const TOKENS: &str = "num_speculative_tokens";
const MAX: &str = "prompt_lookup_max";
const MIN: &str = "prompt_lookup_min";
const BATCH_SIZE: &str = "disable_by_batch_size";
const DEGREE: &str = "draft_tensor_parallel_size";

const NGRAM: &str = "ngram";
const DRAFT_MODEL: &str = "draft_model";

/// Default n-gram length if neither bound is given.
const LOOKUP: u32 = 5;

/// The parsed option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Speculative {
    pub(crate) speculation: Speculation,
    /// The draft model's folder, if there is a draft model.
    pub(crate) draft_model: Option<PathBuf>,
}

/// Parses the option. Bounds that depend on other options are checked with those.
pub(super) fn parse(text: &str) -> Result<Speculative, String> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let Value::Object(fields) = value else {
        return Err(format!(
            "expected a JSON object, such as {{\"{METHOD}\":\"{NGRAM}\",\"{TOKENS}\":5}}"
        ));
    };
    let (known, method, draft_model) = match method(&fields)? {
        NGRAM => {
            let (max, min) = (number(&fields, MAX)?, number(&fields, MIN)?);
            let lookup = NgramConfig {
                prompt_lookup_max: max.or(min).unwrap_or(LOOKUP),
                prompt_lookup_min: min.or(max).unwrap_or(LOOKUP),
            };
            (&[METHOD, TOKENS, MAX, MIN, BATCH_SIZE][..], Method::Ngram(lookup), None)
        }
        _ => {
            let folder = match fields.get(MODEL) {
                Some(Value::String(folder)) if !folder.is_empty() => PathBuf::from(folder),
                Some(other) => return Err(format!("{MODEL} is {other}, expected a model folder")),
                None => return Err(format!("{MODEL} is missing: the draft model's folder")),
            };
            if let Some(degree) = number(&fields, DEGREE)?.filter(|degree| *degree != 1) {
                return Err(format!(
                    "{DEGREE} is {degree}, only 1 is supported: one rank of a replica drafts"
                ));
            }
            let known = &[METHOD, MODEL, TOKENS, BATCH_SIZE, DEGREE][..];
            (known, Method::DraftModel, Some(folder))
        }
    };
    if let Some(field) = fields.keys().find(|field| !known.contains(&field.as_str())) {
        return Err(format!("unknown field {field:?}, expected {}", known.join(", ")));
    }
    let speculation = Speculation {
        num_speculative_tokens: number(&fields, TOKENS)?
            .ok_or_else(|| format!("{TOKENS} is missing: how many tokens are drafted at most"))?,
        method,
        disable_by_batch_size: number(&fields, BATCH_SIZE)?,
    };
    speculation.validate(u32::MAX).map_err(|error| error.to_string())?;
    Ok(Speculative { speculation, draft_model })
}

/// Returns how drafts are made: a model without a method means that draft model.
fn method(fields: &Map<String, Value>) -> Result<&'static str, String> {
    let supported = format!("\"{NGRAM}\" and \"{DRAFT_MODEL}\" are supported");
    match fields.get(METHOD) {
        Some(Value::String(method)) if method == NGRAM => Ok(NGRAM),
        Some(Value::String(method)) if method == DRAFT_MODEL => Ok(DRAFT_MODEL),
        None | Some(Value::Null) if fields.contains_key(MODEL) => Ok(DRAFT_MODEL),
        None | Some(Value::Null) => Err(format!("{METHOD} is missing, {supported}")),
        Some(other) => Err(format!("{METHOD} is {other}, {supported}")),
    }
}

/// Returns a field's number; null stands for the default, as in vLLM.
fn number(fields: &Map<String, Value>, name: &str) -> Result<Option<u32>, String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(format!("{name} is {value}, expected a whole number, 1 or more")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(config: &Speculative) -> (u32, u32) {
        match config.speculation.method {
            Method::Ngram(lookup) => (lookup.prompt_lookup_max, lookup.prompt_lookup_min),
            Method::DraftModel => panic!("{config:?}"),
        }
    }

    #[test]
    fn names_and_defaults_are_those_of_vllm() {
        let config = parse(r#"{"method":"ngram","num_speculative_tokens":4}"#).unwrap();
        let lookup_5 = NgramConfig { prompt_lookup_max: 5, prompt_lookup_min: 5 };
        let speculation = Speculation {
            num_speculative_tokens: 4,
            method: Method::Ngram(lookup_5),
            disable_by_batch_size: None,
        };
        assert_eq!(config, Speculative { speculation, draft_model: None });
        let text = r#"{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,
            "prompt_lookup_min":2,"disable_by_batch_size":8}"#;
        let config = parse(text).unwrap();
        assert_eq!(lookup(&config), (4, 2));
        assert_eq!(config.speculation.disable_by_batch_size, Some(8));
        // A single bound counts as both.
        for (name, length) in [(MAX, 4), (MIN, 3)] {
            let text =
                format!(r#"{{"method":"ngram","num_speculative_tokens":3,"{name}":{length}}}"#);
            assert_eq!(lookup(&parse(&text).unwrap()), (length, length));
        }
    }

    #[test]
    fn a_folder_is_a_draft_model() {
        let expected = Speculative {
            speculation: Speculation {
                num_speculative_tokens: 5,
                method: Method::DraftModel,
                disable_by_batch_size: Some(4),
            },
            draft_model: Some(PathBuf::from("/models/small")),
        };
        let common = r#""model":"/models/small","num_speculative_tokens":5"#;
        for more in [
            r#""disable_by_batch_size":4"#,
            r#""disable_by_batch_size":4,"method":"draft_model","draft_tensor_parallel_size":1"#,
            r#""disable_by_batch_size":4,"method":null,"draft_tensor_parallel_size":null"#,
        ] {
            assert_eq!(parse(&format!("{{{common},{more}}}")).unwrap(), expected);
        }
        let error = |text: &str| parse(text).unwrap_err();
        let bad = error(r#"{"method":"draft_model","num_speculative_tokens":5}"#);
        assert_eq!(bad, "model is missing: the draft model's folder");
        for model in ["3", r#""""#] {
            let bad = error(&format!(r#"{{"model":{model},"num_speculative_tokens":5}}"#));
            assert_eq!(bad, format!("model is {model}, expected a model folder"));
        }
        let bad = error(&format!(r#"{{{common},"draft_tensor_parallel_size":2}}"#));
        assert!(bad.starts_with("draft_tensor_parallel_size is 2, only 1 is supported"), "{bad}");
        let bad = error(&format!(r#"{{{common},"prompt_lookup_max":2}}"#));
        assert!(bad.starts_with("unknown field \"prompt_lookup_max\", expected method, model"));
    }

    #[test]
    fn errors_name_the_field_its_value_and_what_it_must_be() {
        let with = |field: &str| {
            parse(&format!(r#"{{"method":"ngram","num_speculative_tokens":3,{field}}}"#))
                .unwrap_err()
        };
        assert!(parse("ngram").unwrap_err().starts_with("it is not JSON"));
        assert!(parse("[]").unwrap_err().starts_with("expected a JSON object"));
        let error = with(r#""model":"x""#);
        assert!(error.starts_with("unknown field \"model\", expected method, "), "{error}");
        let error = parse(r#"{"num_speculative_tokens":3}"#).unwrap_err();
        assert_eq!(error, "method is missing, \"ngram\" and \"draft_model\" are supported");
        let error = parse(r#"{"method":"eagle","num_speculative_tokens":3}"#).unwrap_err();
        assert_eq!(error, "method is \"eagle\", \"ngram\" and \"draft_model\" are supported");
        let error = parse(r#"{"method":"ngram"}"#).unwrap_err();
        assert!(error.starts_with("num_speculative_tokens is missing"), "{error}");
        let error = with(r#""prompt_lookup_max":1.5"#);
        assert_eq!(error, "prompt_lookup_max is 1.5, expected a whole number, 1 or more");
        let error = with(r#""prompt_lookup_max":99"#);
        assert_eq!(error, "prompt_lookup_max is 99, it must be 1 to 16");
        let error = with(r#""prompt_lookup_max":2,"prompt_lookup_min":3"#);
        assert_eq!(error, "prompt_lookup_min (3) is above prompt_lookup_max (2)");
        let error = with(r#""disable_by_batch_size":1"#);
        assert!(error.starts_with("disable_by_batch_size is 1, it must be 2 to"), "{error}");
    }
}

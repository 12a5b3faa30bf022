//! `--speculative-config`: JSON with the names and defaults of vLLM's.
use coordinator::scheduler::Speculation;
use serde_json::Value;

const METHOD: &str = "method";
const TOKENS: &str = "num_speculative_tokens";
const MAX: &str = "prompt_lookup_max";
const MIN: &str = "prompt_lookup_min";
const BATCH_SIZE: &str = "disable_by_batch_size";

/// The lengths of n-grams where neither is given.
const LOOKUP: u32 = 5;

/// Parses it. Bounds that depend on other options are checked with those.
pub(super) fn parse(text: &str) -> Result<Speculation, String> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let Value::Object(fields) = value else {
        return Err(format!(
            "expected a JSON object, such as {{\"{METHOD}\":\"ngram\",\"{TOKENS}\":5}}"
        ));
    };
    let known = [METHOD, TOKENS, MAX, MIN, BATCH_SIZE];
    if let Some(field) = fields.keys().find(|field| !known.contains(&field.as_str())) {
        return Err(format!("unknown field {field:?}, expected {}", known.join(", ")));
    }
    match fields.get(METHOD) {
        Some(Value::String(method)) if method == "ngram" => {}
        Some(other) => return Err(format!("{METHOD} is {other}, only \"ngram\" is supported")),
        None => return Err(format!("{METHOD} is missing, only \"ngram\" is supported")),
    }
    // null stands for the default, as there.
    let number = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(format!("{name} is {value}, expected a whole number, 1 or more")),
        },
    };
    let (max, min) = (number(MAX)?, number(MIN)?);
    let config = Speculation {
        num_speculative_tokens: number(TOKENS)?
            .ok_or_else(|| format!("{TOKENS} is missing: how many tokens are drafted at most"))?,
        prompt_lookup_max: max.or(min).unwrap_or(LOOKUP),
        prompt_lookup_min: min.or(max).unwrap_or(LOOKUP),
        disable_by_batch_size: number(BATCH_SIZE)?,
    };
    config.validate(u32::MAX).map_err(|error| error.to_string())?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_defaults_are_those_of_vllm() {
        let config = parse(r#"{"method":"ngram","num_speculative_tokens":4}"#).unwrap();
        let expected = Speculation {
            num_speculative_tokens: 4,
            prompt_lookup_max: 5,
            prompt_lookup_min: 5,
            disable_by_batch_size: None,
        };
        assert_eq!(config, expected);
        let text = r#"{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,
            "prompt_lookup_min":2,"disable_by_batch_size":8}"#;
        let config = parse(text).unwrap();
        assert_eq!((config.prompt_lookup_max, config.prompt_lookup_min), (4, 2));
        assert_eq!(config.disable_by_batch_size, Some(8));
        // One length given is both.
        for (name, length) in [(MAX, 4), (MIN, 3)] {
            let text =
                format!(r#"{{"method":"ngram","num_speculative_tokens":3,"{name}":{length}}}"#);
            let config = parse(&text).unwrap();
            assert_eq!((config.prompt_lookup_max, config.prompt_lookup_min), (length, length));
        }
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
        assert_eq!(error, "method is missing, only \"ngram\" is supported");
        let error = parse(r#"{"method":"eagle","num_speculative_tokens":3}"#).unwrap_err();
        assert_eq!(error, "method is \"eagle\", only \"ngram\" is supported");
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

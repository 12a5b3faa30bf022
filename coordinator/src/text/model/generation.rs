//! Sampling defaults and end tokens of a model: what its `generation_config.json` says, or what the
//! operator chooses instead of it and above it. Files in the hub's cache are not for editing.
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{TextModelError, optional_json, read_json};
// Those of requests.
use crate::http::limits::ranges as bounds;

/// The file.
pub(super) const FILE: &str = "generation_config.json";

/// Where a model's sampling defaults come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GenerationSource {
    /// The model's own file.
    #[default]
    Model,
    /// Nowhere: this server's own defaults. The model's end tokens stay, as in vLLM.
    None,
    /// Another file, or the folder that has it.
    Other(PathBuf),
}

impl GenerationSource {
    /// The file, if it is not the model's own.
    pub(super) fn file(&self) -> Option<PathBuf> {
        match self {
            Self::Other(path) if path.is_dir() => Some(path.join(FILE)),
            Self::Other(path) => Some(path.clone()),
            Self::Model | Self::None => None,
        }
    }
}

/// A model's sampling defaults, for parameters that a request does not set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Probability mass of nucleus sampling.
    pub top_p: Option<f32>,
    /// Number of most likely tokens to keep.
    pub top_k: Option<u32>,
    /// Smallest probability to keep, relative to the largest.
    pub min_p: Option<f32>,
    /// Penalty on repeated tokens.
    pub repetition_penalty: Option<f32>,
    /// Most tokens of an answer, whatever a request asks for. A model's file does not set it: there
    /// it is what its authors tried, not a bound.
    pub max_new_tokens: Option<u32>,
}

impl SamplingDefaults {
    /// Sets what the operator overrides.
    #[must_use]
    fn overridden(self, by: &Self) -> Self {
        Self {
            temperature: by.temperature.or(self.temperature),
            top_p: by.top_p.or(self.top_p),
            top_k: by.top_k.or(self.top_k),
            min_p: by.min_p.or(self.min_p),
            repetition_penalty: by.repetition_penalty.or(self.repetition_penalty),
            max_new_tokens: by.max_new_tokens.or(self.max_new_tokens),
        }
    }

    /// Reads an operator's JSON, whose keys are those of the file.
    ///
    /// # Errors
    /// Names the key, what is wrong with its value, and the bound.
    pub fn parse(text: &str) -> Result<Self, String> {
        let map: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))?;
        let mut parsed = Self::default();
        for (key, value) in &map {
            if key == "max_new_tokens" {
                parsed.max_new_tokens = Some(count(key, value, 1)?);
            } else if !parsed.set(key, value)? {
                return Err(format!(
                    "`{key}` is not known: temperature, top_p, top_k, min_p, repetition_penalty \
                     and max_new_tokens can be given"
                ));
            }
        }
        Ok(parsed)
    }

    /// Reads a model's file, which has much else. A value that no request could have is skipped,
    /// and nothing else with it; `told` hears what is wrong with it.
    fn of_file(config: &Value, mut told: impl FnMut(String)) -> Self {
        let mut parsed = Self::default();
        for (key, value) in config.as_object().into_iter().flatten() {
            if !value.is_null()
                && let Err(problem) = parsed.set(key, value)
            {
                told(problem);
            }
        }
        parsed
    }

    /// Sets what `key` names; false if that is nothing of a request's.
    fn set(&mut self, key: &str, value: &Value) -> Result<bool, String> {
        match key {
            "temperature" => self.temperature = Some(number(key, value, bounds::TEMPERATURE)?),
            "top_p" if value.as_f64() == Some(0.0) => {
                return Err(format!("`{key}` is {value}: it must be above 0 and at most 1"));
            }
            "top_p" => self.top_p = Some(number(key, value, bounds::TOP_P)?),
            "min_p" => self.min_p = Some(number(key, value, bounds::MIN_P)?),
            "repetition_penalty" => {
                self.repetition_penalty = Some(number(key, value, bounds::REPETITION_PENALTY)?);
            }
            // As in requests, -1 is for all tokens.
            "top_k" if value.as_i64() == Some(-1) => self.top_k = Some(0),
            "top_k" => self.top_k = Some(count(key, value, 0)?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn number(key: &str, value: &Value, (least, most): (f64, f64)) -> Result<f32, String> {
    match value.as_f64() {
        Some(number) if (least..=most).contains(&number) => Ok(number as f32),
        _ => Err(format!("`{key}` is {value}: it must be a number from {least} to {most}")),
    }
}

fn count(key: &str, value: &Value, least: u32) -> Result<u32, String> {
    let most = i32::MAX as u32;
    let found = value.as_u64().and_then(|it| u32::try_from(it).ok());
    found.filter(|it| (least..=most).contains(it)).ok_or_else(|| {
        format!("`{key}` is {value}: it must be a whole number from {least} to {most}")
    })
}

/// Reads the defaults, and the ids of end tokens, of a model in `folder`.
///
/// # Errors
/// [`TextModelError`] when a file is not JSON, or the operator's is missing.
pub(super) fn read(
    folder: &Path,
    source: &GenerationSource,
    overrides: &SamplingDefaults,
) -> Result<(SamplingDefaults, Vec<u64>), TextModelError> {
    let config = match source.file() {
        Some(file) => read_json(&file)?,
        None => optional_json(&folder.join(FILE))?,
    };
    let ends = end_ids(&config);
    let defaults = match source {
        GenerationSource::None => SamplingDefaults::default(),
        _ => SamplingDefaults::of_file(&config, |problem| {
            let file = source.file().unwrap_or_else(|| folder.join(FILE));
            tracing::warn!(file = %file.display(), problem, "a sampling default is not used");
        }),
    };
    Ok((defaults.overridden(overrides), ends))
}

/// The end tokens that a configuration names.
pub(super) fn end_ids(config: &Value) -> Vec<u64> {
    match config.get("eos_token_id") {
        Some(Value::Number(id)) => id.as_u64().into_iter().collect(),
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operator_gives_is_checked_as_requests_are() {
        let parsed = SamplingDefaults::parse(
            r#"{"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1,
                "repetition_penalty": 1.1, "max_new_tokens": 9}"#,
        );
        let expected = SamplingDefaults {
            temperature: Some(0.0),
            top_p: Some(0.5),
            top_k: Some(0),
            min_p: Some(0.1),
            repetition_penalty: Some(1.1),
            max_new_tokens: Some(9),
        };
        assert_eq!(parsed, Ok(expected));
        assert_eq!(SamplingDefaults::parse("{}"), Ok(SamplingDefaults::default()));
        for (text, words) in [
            ("[]", ["JSON object", ""]),
            ("{", ["JSON object", ""]),
            (r#"{"temperature": 101}"#, ["`temperature` is 101", "0 to 100"]),
            (r#"{"temperature": "hot"}"#, ["`temperature` is \"hot\"", "number"]),
            (r#"{"top_p": 0}"#, ["`top_p` is 0", "above 0"]),
            (r#"{"top_p": 1.5}"#, ["`top_p` is 1.5", "0 to 1"]),
            (r#"{"top_k": 1.5}"#, ["`top_k` is 1.5", "whole number"]),
            (r#"{"max_new_tokens": 0}"#, ["`max_new_tokens` is 0", "from 1"]),
            (r#"{"do_sample": true}"#, ["`do_sample` is not known", "temperature"]),
        ] {
            let error = SamplingDefaults::parse(text).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{text}: {error}");
        }
    }

    #[test]
    fn a_value_of_a_file_that_no_request_could_have_is_left_out_alone() {
        let config = serde_json::json!({
            "temperature": 0.6, "top_p": "all", "top_k": 20.5, "min_p": null, "do_sample": true,
            "repetition_penalty": 1.1, "max_new_tokens": 5,
        });
        let mut told = Vec::new();
        let found = SamplingDefaults::of_file(&config, |problem| told.push(problem));
        let expected = SamplingDefaults {
            temperature: Some(0.6),
            repetition_penalty: Some(1.1),
            ..SamplingDefaults::default()
        };
        assert_eq!(found, expected);
        told.sort();
        let problems = ["`top_k` is 20.5", "`top_p` is \"all\""];
        assert_eq!(told.len(), problems.len(), "{told:?}");
        assert!(told.iter().zip(problems).all(|(told, start)| told.starts_with(start)), "{told:?}");
        let all = serde_json::json!({"top_k": -1});
        let none = |_| panic!("that is no problem");
        assert_eq!(SamplingDefaults::of_file(&all, none).top_k, Some(0));
        assert_eq!(SamplingDefaults::of_file(&Value::Null, none), SamplingDefaults::default());
    }

    #[test]
    fn a_file_is_followed_unless_another_is_chosen_and_overridden_key_by_key() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own =
            r#"{"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 4], "max_new_tokens": 5}"#;
        std::fs::write(folder.path().join(FILE), own).unwrap();
        let file = other.path().join(FILE);
        std::fs::write(&file, r#"{"top_p": 0.8, "eos_token_id": 7}"#).unwrap();
        let over = SamplingDefaults::parse(r#"{"temperature": 0.1, "min_p": 0.2}"#).unwrap();
        let none = SamplingDefaults::default();
        let read_from = |source, overrides| read(folder.path(), &source, overrides).unwrap();
        let model = SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..none };
        assert_eq!(read_from(GenerationSource::Model, &none), (model, vec![3, 4]));
        let both = SamplingDefaults { temperature: Some(0.1), min_p: Some(0.2), ..model };
        assert_eq!(read_from(GenerationSource::Model, &over), (both, vec![3, 4]));
        assert_eq!(read_from(GenerationSource::None, &none), (none, vec![3, 4]));
        assert_eq!(read_from(GenerationSource::None, &over), (over, vec![3, 4]));
        let top_p = SamplingDefaults { top_p: Some(0.8), ..none };
        for path in [file.clone(), other.path().to_owned()] {
            assert_eq!(read_from(GenerationSource::Other(path), &none), (top_p, vec![7]));
        }
        let missing = GenerationSource::Other(other.path().join("none.json"));
        let error = read(folder.path(), &missing, &none).unwrap_err().to_string();
        assert!(error.contains("none.json"), "{error}");
    }
}

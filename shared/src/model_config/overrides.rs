//! PURE: keys laid over a model's `config.json`, as `--hf-overrides` gives them: a model of the hub
//! is in a cache that nobody edits.
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Most bytes of them as JSON text: far more than any `config.json` has, and little in the message
/// that forms a rank.
pub const OVERRIDES_BYTES_MAX: usize = 64 << 10;
/// The text model of a multimodal one: its keys are laid over the file's one by one.
const NESTED: &str = "text_config";
/// Tables for rotary embeddings, in either dialect.
const ROPE_TABLES: [&str; 2] = ["rope_parameters", "rope_scaling"];
/// What such a table says of the weights, whatever the scaling.
const ROPE_OF_WEIGHTS: [&str; 2] = ["rope_theta", "partial_rotary_factor"];

/// Keys laid over a model's `config.json`; none by default. Messages have them as text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ConfigOverrides(Option<Arc<Given>>);

/// What there is of keys, at least one.
#[derive(Debug, PartialEq, Eq)]
struct Given {
    /// As it was given, because a number may change when it is written and read again, and all
    /// must read the same.
    text: String,
    keys: Map<String, Value>,
}

impl ConfigOverrides {
    /// Reads a JSON object.
    ///
    /// # Errors
    /// What is wrong with it, in one sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > OVERRIDES_BYTES_MAX {
            return Err(format!("it has {} bytes, the limit is {OVERRIDES_BYTES_MAX}", text.len()));
        }
        let keys: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))?;
        let given = Some(keys).filter(|keys| !keys.is_empty());
        Ok(Self(given.map(|keys| Arc::new(Given { text: text.to_owned(), keys }))))
    }

    /// Whether nothing is laid over the file.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the contents of a `config.json` with these keys in place of its own; null removes
    /// one. A `text_config` is not replaced but changed in the same way.
    ///
    /// # Errors
    /// One sentence if a table for rotary embeddings is replaced by one that lacks what the weights
    /// were trained with: the architecture's default, taken silently, would give nonsense.
    pub fn lay_over(&self, mut config: Value) -> Result<Value, String> {
        if let (Value::Object(file), Some(given)) = (&mut config, &self.0) {
            lay(file, &given.keys)?;
        }
        Ok(config)
    }

    /// An error about the result: what is wrong may not be in the file.
    #[must_use]
    pub fn explain(&self, message: String) -> String {
        if self.is_empty() { message } else { format!("with --hf-overrides: {message}") }
    }

    /// The same bytes for the same keys and values, however they were written.
    #[must_use]
    pub fn canonical(&self) -> Vec<u8> {
        let keys = self.0.as_ref().map(|given| given.keys.clone());
        let mut sorted = Value::Object(keys.unwrap_or_default());
        sorted.sort_all_objects();
        sorted.to_string().into_bytes()
    }
}

impl TryFrom<String> for ConfigOverrides {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.is_empty() { Ok(Self::default()) } else { Self::parse(&text) }
    }
}

impl From<ConfigOverrides> for String {
    fn from(overrides: ConfigOverrides) -> Self {
        overrides.0.map(|given| given.text.clone()).unwrap_or_default()
    }
}

fn lay(file: &mut Map<String, Value>, over: &Map<String, Value>) -> Result<(), String> {
    let before = ROPE_OF_WEIGHTS.map(|key| (key, in_rope_table(file, key).cloned()));
    for (key, value) in over {
        if value.is_null() {
            file.shift_remove(key);
        } else if key == NESTED
            && let (Some(Value::Object(file)), Value::Object(over)) = (file.get_mut(key), value)
        {
            lay(file, over)?;
        } else {
            file.insert(key.clone(), value.clone());
        }
    }
    for (key, said) in before {
        let Some(said) = said else { continue };
        let is_said = in_rope_table(file, key).is_some() || file.contains_key(key);
        // Whoever removes it by name means it.
        if !is_said && !over.contains_key(key) {
            return Err(format!(
                "the file's table for rotary embeddings has {key} ({said}), the one that replaces \
                 it has none: add it"
            ));
        }
    }
    Ok(())
}

fn in_rope_table<'a>(config: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    let mut found = ROPE_TABLES.iter().filter_map(|table| config.get(*table)?.get(key));
    found.find(|value| !value.is_null())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn laid(file: Value, over: Value) -> Result<Value, String> {
        ConfigOverrides::parse(&over.to_string()).unwrap().lay_over(file)
    }

    #[test]
    fn keys_replace_the_files_and_null_removes_them() {
        let file = json!({"a": 1, "b": {"c": 1, "d": 2}, "e": [1, 2], "f": true});
        let over = json!({"a": "x", "b": {"c": 3}, "e": null, "g": null, "h": 5});
        let expected = json!({"a": "x", "b": {"c": 3}, "f": true, "h": 5});
        assert_eq!(laid(file.clone(), over), Ok(expected));
        assert_eq!(laid(file.clone(), json!({})), Ok(file.clone()));
        assert_eq!(ConfigOverrides::default().lay_over(file.clone()), Ok(file));
        // What is no object is for its reader to refuse.
        assert_eq!(laid(json!([1]), json!({"a": 1})), Ok(json!([1])));
    }

    #[test]
    fn a_nested_text_model_is_changed_key_by_key() {
        let file = json!({"text_config": {"a": 1, "b": {"c": 1}, "d": 2}, "other": {"a": 1}});
        let over = json!({"text_config": {"a": 5, "b": {"e": 1}, "d": null}, "other": {"b": 2}});
        let expected = json!({"text_config": {"a": 5, "b": {"e": 1}}, "other": {"b": 2}});
        assert_eq!(laid(file.clone(), over), Ok(expected));
        assert_eq!(laid(file.clone(), json!({"text_config": null})).unwrap().get(NESTED), None);
        assert_eq!(laid(file, json!({"text_config": 3})).unwrap()[NESTED], 3);
        let new = laid(json!({}), json!({"text_config": {"a": 1}})).unwrap();
        assert_eq!(new, json!({"text_config": {"a": 1}}));
    }

    #[test]
    fn the_base_of_rotary_embeddings_does_not_get_lost_with_its_table() {
        let newer = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}});
        let yarn = json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}});
        let error = laid(newer.clone(), yarn.clone()).unwrap_err();
        assert!(
            error.contains("has rope_theta (1000000.0)") && error.contains("add it"),
            "{error}"
        );
        let nested = |inner: &Value| json!({"text_config": inner});
        assert!(laid(nested(&newer), nested(&yarn)).is_err());
        let partial = json!({"rope_scaling": {"partial_rotary_factor": 0.5}});
        let error = laid(partial, json!({"rope_scaling": null})).unwrap_err();
        assert!(error.contains("partial_rotary_factor (0.5)"), "{error}");
        for said in [
            json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}),
            json!({"rope_parameters": {"rope_type": "yarn"}, "rope_theta": 1e6}),
            json!({"rope_parameters": null, "rope_scaling": {"rope_theta": 1e6}}),
            json!({"rope_parameters": {"rope_type": "yarn"}, "rope_theta": null}),
            json!({"hidden_size": 8}),
        ] {
            assert!(laid(newer.clone(), said.clone()).is_ok(), "{said}");
        }
        // In the older dialect it is beside the table.
        let older = json!({"rope_theta": 1e6, "rope_scaling": null});
        assert_eq!(laid(older, yarn).unwrap()["rope_theta"], 1e6);
    }

    #[test]
    fn what_is_no_object_or_too_long_is_refused() {
        for (text, told) in [
            ("", "not a JSON object: EOF"),
            ("{", "not a JSON object: EOF"),
            ("rope", "not a JSON object: expected"),
            ("[1]", "not a JSON object: invalid type: sequence"),
            ("null", "not a JSON object: invalid type: null"),
        ] {
            let error = ConfigOverrides::parse(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
        let of = |bytes: usize| format!("{{\"a\":\"{}\"}}", "x".repeat(bytes - 8));
        assert!(ConfigOverrides::parse(&of(OVERRIDES_BYTES_MAX)).is_ok());
        let error = ConfigOverrides::parse(&of(OVERRIDES_BYTES_MAX + 1)).unwrap_err();
        assert_eq!(error, "it has 65537 bytes, the limit is 65536");
    }

    #[test]
    fn it_is_the_same_in_another_process_and_in_another_order() {
        let text = r#"{"b": {"y": 1e22, "x": 0.30000000000000004}, "a": null}"#;
        let given = ConfigOverrides::parse(text).unwrap();
        assert_eq!(String::from(given.clone()), text, "nothing is rounded on the way");
        assert_eq!(ConfigOverrides::try_from(text.to_owned()), Ok(given.clone()));
        let other = r#"{"a":null,"b":{"x":0.30000000000000004,"y":1e22}}"#;
        assert_eq!(ConfigOverrides::parse(other).unwrap().canonical(), given.canonical());
        let other = ConfigOverrides::parse(r#"{"a":null}"#).unwrap();
        assert_ne!(other.canonical(), given.canonical());
        let none = ConfigOverrides::parse(" {} ").unwrap();
        assert!(none.is_empty() && none == ConfigOverrides::default());
        assert_eq!(ConfigOverrides::try_from(String::new()), Ok(none.clone()));
        assert!(ConfigOverrides::try_from("[]".to_owned()).is_err());
        let message = "a is 1".to_owned();
        assert_eq!(none.explain(message.clone()), message);
        assert_eq!(given.explain(message), "with --hf-overrides: a is 1");
    }
}

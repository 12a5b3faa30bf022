//! How embeddings are pooled, as a model folder says in `1_Pooling/config.json`, the format of
//! sentence-transformers.
use std::path::Path;

use serde_json::Value;
use shared::sampling::Pooling;

use super::{TextModelError, optional_json};

/// The files that say so.
pub(super) const FILES: [&str; 2] = ["modules.json", "1_Pooling/config.json"];

/// Reads the pooling mode. A folder without the file holds a generative model, whose last
/// token's vector is used, since it depends on all tokens. The inner error is an unsupported mode;
/// the model can then do everything else.
///
/// # Errors
/// [`TextModelError`] when a file is not JSON.
pub(super) fn read(folder: &Path) -> Result<Result<Pooling, String>, TextModelError> {
    let modules = optional_json(&folder.join(FILES[0]))?;
    let config = optional_json(&folder.join(FILES[1]))?;
    let kinds = modules.as_array().into_iter().flatten();
    let kinds = kinds.filter_map(|module| module.get("type").and_then(Value::as_str));
    let mut kinds = kinds.map(|kind| kind.rsplit('.').next().unwrap_or(kind));
    let known = ["Transformer", "Pooling", "Normalize"];
    if let Some(other) = kinds.find(|kind| !known.contains(kind)) {
        return Ok(Err(format!("modules.json has a module {other:?}, which is not supported")));
    }
    Ok(of_config(&config))
}

fn of_config(config: &Value) -> Result<Pooling, String> {
    let Some(config) = config.as_object() else { return Ok(Pooling::Last) };
    let flags = config.iter().filter(|(_, value)| **value == Value::Bool(true));
    let flags = flags.filter_map(|(name, _)| name.strip_prefix("pooling_mode_"));
    // Newer files name the mode in one key.
    let word = config.get("pooling_mode").and_then(Value::as_str);
    let modes: Vec<&str> = word.map_or_else(|| flags.collect(), |word| vec![word]);
    match modes.as_slice() {
        ["lasttoken"] => Ok(Pooling::Last),
        ["mean_tokens" | "mean"] => Ok(Pooling::Mean),
        ["cls_token" | "cls"] => Ok(Pooling::First),
        other => Err(format!(
            "1_Pooling/config.json asks for {}: lasttoken, mean and cls are supported, one at a time",
            if other.is_empty() { "nothing".to_owned() } else { other.join(" and ") }
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn files_of_both_kinds_are_understood_and_others_named() {
        let flags = |name: &str| {
            let mut config = json!({"word_embedding_dimension": 64, "include_prompt": true,
                "pooling_mode_cls_token": false, "pooling_mode_max_tokens": false});
            config[name] = true.into();
            of_config(&config)
        };
        assert_eq!(of_config(&Value::Null), Ok(Pooling::Last));
        assert_eq!(flags("pooling_mode_lasttoken"), Ok(Pooling::Last));
        assert_eq!(flags("pooling_mode_mean_tokens"), Ok(Pooling::Mean));
        assert_eq!(flags("pooling_mode_cls_token"), Ok(Pooling::First));
        assert_eq!(of_config(&json!({"pooling_mode": "mean"})), Ok(Pooling::Mean));
        assert!(flags("pooling_mode_max_tokens").unwrap_err().contains("max_tokens"));
        assert!(of_config(&json!({})).unwrap_err().contains("nothing"));
        let two = json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true});
        assert!(of_config(&two).unwrap_err().contains(" and "));
    }

    #[test]
    fn modules_that_change_the_vector_are_not_left_out_in_silence() {
        let folder = tempfile::tempdir().unwrap();
        let module = |kind: &str| json!({"type": format!("sentence_transformers.models.{kind}")});
        let write = |kinds: &[&str]| {
            let list: Vec<Value> = kinds.iter().map(|kind| module(kind)).collect();
            std::fs::write(folder.path().join(FILES[0]), json!(list).to_string()).unwrap();
        };
        write(&["Transformer", "Pooling", "Normalize"]);
        assert_eq!(read(folder.path()).unwrap(), Ok(Pooling::Last));
        write(&["Transformer", "Pooling", "Dense"]);
        assert!(read(folder.path()).unwrap().unwrap_err().contains("Dense"));
        std::fs::write(folder.path().join(FILES[0]), "[").unwrap();
        assert!(read(folder.path()).is_err());
    }
}

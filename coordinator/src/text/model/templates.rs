//! Which chat templates a model folder has.
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::TextModelError;
use crate::text::template::TOOL_USE;

/// Where a template has a file of its own: the usual one, and that for conversations with tools.
pub(super) const FILES: [&str; 2] =
    ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"];

/// Where a model folder has its chat templates: each with the file that it is in.
#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) default: Option<(PathBuf, String)>,
    /// For conversations with tools.
    pub(super) tool_use: Option<(PathBuf, String)>,
}

impl Sources {
    /// As transformers looks for them: files of their own go before what `tokenizer_config.json`
    /// says, which is one template or a list of named ones. One that the operator chose is the only
    /// one.
    pub(super) fn find(
        folder: &Path,
        chosen: Option<&Path>,
        configured: Option<&Value>,
        config_file: &Path,
    ) -> Result<Self, TextModelError> {
        let read = |file: PathBuf| match std::fs::read_to_string(&file) {
            Ok(text) => Ok(Some((file, text))),
            Err(error) => Err(TextModelError::new(&file, error)),
        };
        if let Some(chosen) = chosen {
            return Ok(Self { default: read(chosen.to_owned())?, tool_use: None });
        }
        let own = |name: &str| {
            let file = folder.join(name);
            if file.is_file() { read(file) } else { Ok(None) }
        };
        let (default, tool_use) = (own(FILES[0])?, own(FILES[1])?);
        if default.is_some() {
            return Ok(Self { default, tool_use });
        }
        let of_config = |text: &str| (config_file.to_owned(), text.to_owned());
        Ok(match configured {
            Some(Value::String(text)) => Self { default: Some(of_config(text)), tool_use },
            Some(Value::Array(list)) => {
                let source = |entry: &Value| Some(of_config(entry.get("template")?.as_str()?));
                let named = |name: &str| {
                    let entry = list.iter().find(|entry| entry.get("name") == Some(&name.into()));
                    entry.and_then(source)
                };
                Self {
                    default: named("default").or_else(|| list.first().and_then(source)),
                    tool_use: tool_use.or_else(|| named(TOOL_USE)),
                }
            }
            _ => Self { default: tool_use, tool_use: None },
        })
    }
}

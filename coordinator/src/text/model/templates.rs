//! Finds the chat templates of a model folder.
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{TextModelError, optional_json};
use crate::text::template::TOOL_USE;

/// Template files: the usual one, and the one for conversations with tools.
pub(super) const FILES: [&str; 2] =
    ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"];

/// The chat templates of a model folder, each with the file that holds it.
#[derive(Debug, Default)]
pub(super) struct TemplateSources {
    pub(super) default: Option<(PathBuf, String)>,
    /// The template for conversations with tools.
    pub(super) tool_use: Option<(PathBuf, String)>,
}

impl TemplateSources {
    /// Searches as transformers does: separate files take precedence over `tokenizer_config.json`,
    /// which holds one template or a list of named ones. A template chosen by the operator is the
    /// only one.
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
            _ => {
                // Multimodal models have it there.
                let file = folder.join("chat_template.json");
                let read = optional_json(&file)?;
                match read.get("chat_template").and_then(Value::as_str) {
                    Some(text) => Self { default: Some((file, text.to_owned())), tool_use },
                    None => Self { default: tool_use, tool_use: None },
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::model::{TextModel, TextOptions};
    use crate::text::template::Conversation;

    /// The prompts of a conversation without tools and of one with tools, given these files.
    fn rendered(config: &Value, files: &[(&str, &str)], chosen: Option<&str>) -> [String; 2] {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "tokenizer.json"] {
            std::fs::copy(demo.join(file), folder.path().join(file)).unwrap();
        }
        let write = |name: &str, text: &str| {
            let file = folder.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, text).unwrap();
            file
        };
        write("tokenizer_config.json", &json!({"chat_template": config}).to_string());
        files.iter().for_each(|(name, text)| drop(write(name, text)));
        let chosen = chosen.map(|text| write("chosen.jinja", text));
        let options = TextOptions { chat_template: chosen, ..TextOptions::default() };
        let template = TextModel::load_with(folder.path(), &options).unwrap().template;
        let plain = Conversation::new(vec![json!({"role": "user", "content": "x"})]);
        let tools = Some(json!([{"type": "function", "function": {"name": "f"}}]));
        let tools = Conversation { tools, ..plain.clone() };
        [plain, tools].map(|it| template.as_ref().unwrap().render(&it).unwrap())
    }

    #[test]
    fn conversations_with_tools_have_a_template_of_their_own_where_there_is_one() {
        // As in Hermes 3.
        let named = |name: &str, text: &str| json!({"name": name, "template": text});
        let list = json!([named("tool_use", "listed"), named("default", "plain")]);
        let (own, added) = ((FILES[0], "own"), (FILES[1], "added"));
        for (config, files, chosen, expected) in [
            (&list, &[][..], None, ["plain", "listed"]),
            (&list, &[added], None, ["plain", "added"]),
            (&list, &[own], None, ["own", "own"]),
            (&list, &[own, added], None, ["own", "added"]),
            (&json!("one"), &[], None, ["one", "one"]),
            (&json!([named("rag", "first")]), &[], None, ["first", "first"]),
            (&Value::Null, &[added], None, ["added", "added"]),
            (&list, &[own, added], Some("chosen"), ["chosen", "chosen"]),
        ] {
            assert_eq!(rendered(config, files, chosen), expected, "{config} {files:?}");
        }
    }
}

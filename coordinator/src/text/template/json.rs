//! Messages as some templates want them, and the filter `tojson` as in transformers: Python's
//! `json.dumps` without escapes of non-ASCII characters. Models were trained on exactly this text.
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::OUTPUT_MAX;

/// The format of the output.
struct JsonFormat {
    /// The indentation of one level, when the output has several lines.
    indent: Option<String>,
    between: String,
    behind_key: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(spaces)) if spaces <= 64 => " ".repeat(spaces),
            _ => return Err(wrong("tojson: `indent` must be a string or an integer up to 64")),
        }),
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let between = if indent.is_some() { "," } else { ", " };
    let [between, behind_key] = match separators {
        None => [between.to_owned(), ": ".to_owned()],
        Some(two) => <[String; 2]>::try_from(two)
            .map_err(|_| wrong("tojson: `separators` must be two strings"))?,
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    let form = JsonFormat { indent, between, behind_key, sort_keys, ensure_ascii };
    let mut text = String::new();
    form.write(value, 0, &mut text)?;
    Ok(text)
}

/// Whether a template asks if a message's content is null. Others may print it, as `none`.
pub(super) fn asks_for_null(source: &str) -> bool {
    ["content is none", "content'] is none", "content\"] is none"]
        .iter()
        .any(|question| source.contains(question))
}

/// Makes the empty contents of messages with calls null: templates like that of DeepSeek R1's
/// distills only show a message's calls then.
pub(super) fn null_contents_of_calls(messages: &mut serde_json::Value) {
    for message in messages.as_array_mut().into_iter().flatten() {
        let has_calls = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty());
        if has_calls && message["role"] == "assistant" && message["content"] == "" {
            message["content"] = serde_json::Value::Null;
        }
    }
}

/// Writes the arguments of all calls in these messages as text; whether there are any.
pub(super) fn write_arguments(messages: &mut serde_json::Value) -> bool {
    let calls = messages.as_array_mut().into_iter().flatten().filter_map(|message| {
        message.get_mut("tool_calls").and_then(serde_json::Value::as_array_mut)
    });
    let mut any = false;
    for call in calls.flatten() {
        let arguments = call.get_mut("function").and_then(|it| it.get_mut("arguments"));
        let Some(arguments) = arguments.filter(|it| it.is_object()) else { continue };
        let none = std::iter::empty::<(&str, Value)>();
        if let Ok(text) = tojson(&Value::from(Serde(&*arguments)), Kwargs::from_iter(none)) {
            *arguments = text.into();
            any = true;
        }
    }
    any
}

fn wrong(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

impl JsonFormat {
    fn write(&self, value: &Value, level: usize, text: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => text.push_str(&value.to_string()),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), text),
            ValueKind::Seq | ValueKind::Iterable => {
                self.write_all(['[', ']'], value.try_iter()?, level, text, |item, text| {
                    self.write(&item, level + 1, text)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_all(['{', '}'], keys.into_iter(), level, text, |key, text| {
                    match key.as_str() {
                        Some(key) => self.write_string(key, text),
                        None => self.write_string(&key.to_string(), text),
                    }
                    text.push_str(&self.behind_key);
                    self.write(&value.get_item(&key)?, level + 1, text)
                })?;
            }
            _ => return Err(wrong("tojson: this value cannot be represented in JSON")),
        }
        Ok(())
    }

    fn write_all(
        &self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = Value>,
        level: usize,
        text: &mut String,
        mut write: impl FnMut(Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        text.push(open);
        let mut empty = true;
        for item in items {
            if !empty {
                text.push_str(&self.between);
            }
            empty = false;
            self.new_line(level + 1, text);
            write(item, text)?;
            // Indentation can inflate a value within a single step of the template.
            if text.len() > OUTPUT_MAX {
                let message = format!("tojson: more than {OUTPUT_MAX} bytes");
                return Err(Error::new(ErrorKind::OutOfFuel, message));
            }
        }
        if !empty {
            self.new_line(level, text);
        }
        text.push(close);
        Ok(())
    }

    fn new_line(&self, level: usize, text: &mut String) {
        if let Some(indent) = &self.indent {
            text.push('\n');
            (0..level).for_each(|_| text.push_str(indent));
        }
    }

    fn write_string(&self, string: &str, text: &mut String) {
        text.push('"');
        for c in string.chars() {
            match c {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

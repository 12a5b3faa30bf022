//! A choice's message, whole or in parts: reasoning, content, tool calls.
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::text::reply::Part;

/// Joins replies of several messages into one reasoning and one answer: two of the same kind are
/// separated by a line break, as in vLLM.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lines {
    reasoning: Line,
    content: Line,
}

#[derive(Clone, Copy, Debug, Default)]
enum Line {
    #[default]
    Empty,
    Begun,
    Ended,
}

impl Line {
    fn end(&mut self) {
        if matches!(self, Self::Begun) {
            *self = Self::Ended;
        }
    }

    fn go_on(&mut self, text: &mut String) {
        if matches!(std::mem::replace(self, Self::Begun), Self::Ended) {
            text.insert(0, '\n');
        }
    }
}

impl Lines {
    /// Puts the separator between messages before the next part of the reply.
    pub fn join(&mut self, part: &mut Part) {
        match part {
            Part::Reasoning(text) => self.reasoning.go_on(text),
            Part::Content(text) => self.content.go_on(text),
            Part::End => {
                self.reasoning.end();
                self.content.end();
            }
            Part::Call { .. } | Part::Arguments { .. } => {}
        }
    }
}

/// The message so far.
#[derive(Clone, Debug, Default)]
pub struct Message {
    content: String,
    reasoning: String,
    calls: Vec<Call>,
}

#[derive(Clone, Debug)]
struct Call {
    name: String,
    arguments: String,
}

impl Message {
    /// Takes the next part of the reply.
    pub fn take(&mut self, part: Part) {
        match part {
            Part::Content(text) => self.content.push_str(&text),
            Part::Reasoning(text) => self.reasoning.push_str(&text),
            Part::Call { name, .. } => self.calls.push(Call { name, arguments: String::new() }),
            Part::Arguments { text, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
            Part::End => {}
        }
    }

    /// Returns it in the format of OpenAI's API; `ids` are those of the calls.
    #[must_use]
    pub fn json(&self, ids: &CallIds, choice: u32) -> Value {
        let mut message = Map::new();
        let is_else = !self.calls.is_empty() || !self.reasoning.is_empty();
        let content = Some(&self.content).filter(|text| !text.is_empty() || !is_else);
        message.insert("role".to_owned(), "assistant".into());
        message.insert("content".to_owned(), json!(content));
        message.insert("refusal".to_owned(), Value::Null);
        // vLLM's name and DeepSeek's: clients know one or the other. Null without any, since some
        // read them unasked, and a missing field is an error there.
        let reasoning = Some(&self.reasoning).filter(|text| !text.is_empty());
        message.insert("reasoning".to_owned(), json!(reasoning));
        message.insert("reasoning_content".to_owned(), json!(reasoning));
        if !self.calls.is_empty() {
            let calls = (0..).zip(&self.calls).map(|(index, call)| {
                json!({
                    "id": ids.id(choice, index), "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                })
            });
            message.insert("tool_calls".to_owned(), calls.collect());
        }
        Value::Object(message)
    }
}

/// What an event adds to a message.
#[derive(Debug, Default, Serialize)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallDelta>,
}

#[derive(Debug, Serialize)]
struct CallDelta {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Debug, Default, Serialize)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl Delta {
    /// The first of each message, which names the role.
    #[must_use]
    pub fn greeting() -> Self {
        Self { role: Some("assistant"), content: Some(String::new()), ..Self::default() }
    }

    /// Whether it adds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.content.is_none() && self.reasoning.is_none() && self.tool_calls.is_empty()
    }

    /// Adds the next part of the reply.
    pub fn take(&mut self, part: Part, ids: &CallIds, choice: u32) {
        match part {
            Part::Content(text) => self.content.get_or_insert_default().push_str(&text),
            Part::Reasoning(text) => {
                self.reasoning.get_or_insert_default().push_str(&text);
                self.reasoning_content.clone_from(&self.reasoning);
            }
            Part::Call { index, name } => self.tool_calls.push(CallDelta {
                index,
                id: Some(ids.id(choice, index)),
                kind: Some("function"),
                function: FunctionDelta { name: Some(name), arguments: String::new() },
            }),
            Part::Arguments { index, text } => {
                match self.tool_calls.last_mut().filter(|call| call.index == index) {
                    Some(call) => call.function.arguments.push_str(&text),
                    None => self.tool_calls.push(CallDelta {
                        index,
                        id: None,
                        kind: None,
                        function: FunctionDelta { name: None, arguments: text },
                    }),
                }
            }
            Part::End => {}
        }
    }
}

/// The ids of one answer's calls, different from any other's.
#[derive(Clone, Copy, Debug)]
pub struct CallIds {
    /// Random number drawn for the answer.
    pub drawn: u64,
}

impl CallIds {
    /// Returns nine letters and digits, which the templates of Mistral's models require.
    #[must_use]
    pub fn id(self, choice: u32, index: u32) -> String {
        let call = u64::from(choice) << 32 | u64::from(index);
        // Two calls differ in few bits, and only a few digits are shown.
        let mut number = self.drawn.wrapping_add((call + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number ^= number >> 27;
        let digit = |at: u32| {
            let digit = number / 36u64.pow(at) % 36;
            char::from_digit(digit as u32, 36).unwrap_or('0')
        };
        (0..9).map(digit).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn calls_have_ids_of_their_own() {
        let mut seen = HashSet::new();
        for drawn in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            for (choice, index) in (0..16).flat_map(|choice| (0..16).map(move |it| (choice, it))) {
                let id = CallIds { drawn }.id(choice, index);
                assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
                assert!(seen.insert(id));
            }
        }
    }

    #[test]
    fn deltas_add_up_to_the_message() {
        let (ids, mut delta) = (CallIds { drawn: 7 }, Delta::default());
        assert!(delta.is_empty());
        let parts = [
            Part::Reasoning("a".to_owned()),
            Part::Reasoning("b".to_owned()),
            Part::Call { index: 0, name: "f".to_owned() },
            Part::Arguments { index: 0, text: "{".to_owned() },
            Part::Arguments { index: 0, text: "}".to_owned() },
            Part::Call { index: 1, name: "g".to_owned() },
        ];
        let mut message = Message::default();
        for part in parts {
            delta.take(part.clone(), &ids, 0);
            message.take(part);
        }
        let told = serde_json::to_value(&delta).unwrap();
        let whole = message.json(&ids, 0);
        assert_eq!(told["reasoning"], "ab");
        for key in ["reasoning", "reasoning_content"] {
            assert_eq!(told[key], whole[key], "{key}");
        }
        for index in 0..2 {
            for key in ["id", "type", "function"] {
                assert_eq!(told["tool_calls"][index][key], whole["tool_calls"][index][key]);
            }
        }
        assert_eq!(whole["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{}"}));
        assert_eq!(whole["content"], Value::Null);
        assert_eq!(Message::default().json(&ids, 0)["content"], "");
        let more = Part::Arguments { index: 1, text: "{}".to_owned() };
        let mut next = Delta::default();
        next.take(more, &ids, 0);
        let expected = json!({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]});
        assert_eq!(serde_json::to_value(&next).unwrap(), expected);
    }
}

//! PURE: the content of a message as far as it has come: blocks, one behind the other, and the
//! events that tell a client of them.
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::super::error::ApiError;
use super::super::message::CallIds;
use super::super::sse::Events;
use crate::text::reply::Part;

/// Where events are written to; nowhere, for an answer that comes whole.
pub(super) type Sink<'a> = Option<&'a mut Events>;

/// What a block of reasoning is signed with. Some clients send a block back only if it is signed;
/// nobody checks it.
const SIGNATURE: &str = "unsigned";

/// What a block is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    Call { id: String, name: String },
}

/// A block.
#[derive(Clone, Debug)]
struct Block {
    kind: Kind,
    /// The text; a call's input, as the model wrote it.
    text: String,
}

impl Block {
    fn json(&self) -> Value {
        match &self.kind {
            Kind::Thinking => json!({
                "type": "thinking", "thinking": self.text, "signature": SIGNATURE,
            }),
            Kind::Text => json!({"type": "text", "text": self.text, "citations": null}),
            Kind::Call { id, name } => {
                // What a bound cut, and what the model got wrong, is no object: it says nothing.
                let input = serde_json::from_str::<Map<String, Value>>(&self.text);
                let input = input.unwrap_or_default();
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        }
    }

    /// As it begins.
    fn opening(&self) -> Value {
        match &self.kind {
            Kind::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Kind::Text | Kind::Call { .. } => {
                Self { kind: self.kind.clone(), text: String::new() }.json()
            }
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Delta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'a str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: &'a str },
}

#[derive(Serialize)]
struct OfBlock<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_block: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
}

/// The content.
#[derive(Clone, Debug)]
pub(super) struct Output {
    blocks: Vec<Block>,
    /// The last one goes on.
    is_open: bool,
    ids: CallIds,
}

impl Output {
    /// No block yet.
    #[must_use]
    pub(super) fn new(ids: CallIds) -> Self {
        Self { blocks: Vec::new(), is_open: false, ids }
    }

    /// The blocks.
    #[must_use]
    pub(super) fn json(&self) -> Value {
        self.blocks.iter().map(Block::json).collect()
    }

    /// Whether tools are called.
    #[must_use]
    pub(super) fn has_calls(&self) -> bool {
        self.blocks.iter().any(|block| matches!(block.kind, Kind::Call { .. }))
    }

    /// Takes what the reply said next.
    ///
    /// # Errors
    /// When an event is no JSON, which is a fault of this program.
    pub(super) fn take(&mut self, part: Part, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        match part {
            Part::Reasoning(text) => {
                self.turn_to(Kind::Thinking, sink)?;
                self.add(&text, sink)
            }
            Part::Content(text) => {
                self.turn_to(Kind::Text, sink)?;
                self.add(&text, sink)
            }
            Part::Call { index, name } => {
                self.close(sink)?;
                self.open(Kind::Call { id: self.ids.id(0, index), name }, sink)
            }
            Part::Arguments { text, .. } => self.add(&text, sink),
            Part::End => self.close(sink),
        }
    }

    /// Closes the last block; one that says nothing is made where there is none, since clients look
    /// for an answer.
    ///
    /// # Errors
    /// As [`Output::take`].
    pub(super) fn finish(&mut self, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        if self.blocks.is_empty() {
            self.turn_to(Kind::Text, sink)?;
        }
        self.close(sink)
    }

    /// Goes on with a block of this kind.
    fn turn_to(&mut self, kind: Kind, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        if self.is_open && self.blocks.last().is_some_and(|block| block.kind == kind) {
            return Ok(());
        }
        self.close(sink)?;
        self.open(kind, sink)
    }

    fn open(&mut self, kind: Kind, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        let block = Block { kind, text: String::new() };
        let index = self.blocks.len();
        let content_block = Some(block.opening());
        self.blocks.push(block);
        self.is_open = true;
        tell(OfBlock { kind: "content_block_start", index, content_block, delta: None }, sink)
    }

    fn add(&mut self, text: &str, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        let index = self.blocks.len().saturating_sub(1);
        let Some(block) = self.blocks.last_mut().filter(|_| !text.is_empty()) else {
            return Ok(());
        };
        block.text.push_str(text);
        let delta = match block.kind {
            Kind::Thinking => Delta::Thinking { thinking: text },
            Kind::Text => Delta::Text { text },
            Kind::Call { .. } => Delta::Input { partial_json: text },
        };
        let (kind, delta) = ("content_block_delta", Some(delta));
        tell(OfBlock { kind, index, content_block: None, delta }, sink)
    }

    /// Ends the block that is open, if one is.
    fn close(&mut self, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        if !std::mem::replace(&mut self.is_open, false) {
            return Ok(());
        }
        let index = self.blocks.len().saturating_sub(1);
        if self.blocks.last().is_some_and(|block| block.kind == Kind::Thinking) {
            let delta = Some(Delta::Signature { signature: SIGNATURE });
            let kind = "content_block_delta";
            tell(OfBlock { kind, index, content_block: None, delta }, sink)?;
        }
        let kind = "content_block_stop";
        tell(OfBlock { kind, index, content_block: None, delta: None }, sink)
    }
}

fn tell(event: OfBlock<'_>, sink: &mut Sink<'_>) -> Result<(), ApiError> {
    let Some(events) = sink else { return Ok(()) };
    events.push_named(event.kind, &event)
}

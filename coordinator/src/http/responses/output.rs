//! PURE: the output of a response so far: a list of items, and the events that report them to a
//! client.
use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::super::error::ApiError;
use super::super::logprobs::ChatLogprob;
use super::super::message::CallIds;
use super::super::sse::Events;
use super::tools::{self, Offer, Offers};
use crate::text::reply::Part;

/// Destination of events; `None` for an answer sent whole.
pub(super) type Sink<'a> = Option<&'a mut Events>;

/// The kind of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { call_id: String, offer: Offer },
}

/// The status of an item or a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    /// More follows.
    InProgress,
    /// It is complete.
    Completed,
    /// A limit cut it.
    Incomplete,
    /// It failed; only for responses.
    Failed,
}

/// An item.
#[derive(Clone, Debug)]
struct Item {
    id: String,
    kind: Kind,
    /// The text, or a call's arguments.
    text: String,
    logprobs: Vec<ChatLogprob>,
    status: Status,
}

/// A part of an item's content.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentPart<'a> {
    ReasoningText { text: &'a str },
    OutputText { text: &'a str, annotations: [(); 0], logprobs: &'a [ChatLogprob] },
}

impl Item {
    /// The input of a custom tool, which is known when the call is complete.
    fn input(&self) -> String {
        match self.status {
            Status::InProgress => String::new(),
            _ => tools::input(&self.text),
        }
    }

    /// Returns the part of its content.
    fn part(&self) -> ContentPart<'_> {
        let text = &self.text;
        match self.kind {
            Kind::Reasoning => ContentPart::ReasoningText { text },
            _ => ContentPart::OutputText { text, annotations: [], logprobs: &self.logprobs },
        }
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &self.id)?;
        // An item that was just added has no part yet.
        let is_new = self.text.is_empty() && self.status == Status::InProgress;
        let content = [self.part()];
        let content = if is_new { &[][..] } else { &content };
        match &self.kind {
            Kind::Reasoning => {
                map.serialize_entry("type", "reasoning")?;
                map.serialize_entry("summary", &[(); 0])?;
                map.serialize_entry("content", content)?;
            }
            Kind::Message => {
                map.serialize_entry("type", "message")?;
                map.serialize_entry("role", "assistant")?;
                map.serialize_entry("content", content)?;
            }
            Kind::Call { call_id, offer } => {
                let is_custom = offer.is_custom;
                let kind = if is_custom { "custom_tool_call" } else { "function_call" };
                map.serialize_entry("type", kind)?;
                map.serialize_entry("call_id", call_id)?;
                if let Some(namespace) = &offer.namespace {
                    map.serialize_entry("namespace", namespace)?;
                }
                map.serialize_entry("name", &offer.name)?;
                match is_custom {
                    true => map.serialize_entry("input", &self.input())?,
                    false => map.serialize_entry("arguments", &self.text)?,
                }
            }
        }
        map.serialize_entry("status", &self.status)?;
        map.end()
    }
}

/// An event: its name, number and contents, written without building a tree of values.
#[derive(Debug, Serialize)]
struct Event<'a, B> {
    #[serde(rename = "type")]
    kind: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    body: &'a B,
}

#[derive(Serialize)]
struct OfItem<'a> {
    output_index: usize,
    item: &'a Item,
}

#[derive(Serialize)]
struct OfPart<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: u32,
    part: ContentPart<'a>,
}

/// More text, or all of it.
#[derive(Serialize)]
struct OfText<'a> {
    item_id: &'a str,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [ChatLogprob]>,
}

impl<'a> OfText<'a> {
    /// Nothing yet of an item.
    fn of(item_id: &'a str, output_index: usize) -> Self {
        Self {
            item_id,
            output_index,
            content_index: None,
            delta: None,
            text: None,
            name: None,
            arguments: None,
            input: None,
            logprobs: None,
        }
    }
}

#[derive(Serialize)]
struct OfResponse<'a, R> {
    response: &'a R,
}

/// Writes an event about the whole response.
///
/// # Errors
/// If it is not valid JSON, which is a bug.
pub(super) fn tell(
    kind: &'static str,
    sequence_number: u64,
    response: &impl Serialize,
    sink: &mut Sink<'_>,
) -> Result<(), ApiError> {
    let Some(events) = sink else { return Ok(()) };
    let body = &OfResponse { response };
    events.push_named(kind, &Event { kind, sequence_number, body })
}

/// The output.
#[derive(Clone, Debug)]
pub(super) struct Output {
    items: Vec<Item>,
    /// Suffix of the items' ids: the response's id.
    name: String,
    ids: CallIds,
    offers: Offers,
    /// Number of the next event.
    sequence: u64,
}

impl Serialize for Output {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.items.serialize(serializer)
    }
}

impl Output {
    /// Starts without items. `name` distinguishes the ids of its items from others'.
    #[must_use]
    pub(super) fn new(name: &str, ids: CallIds, offers: Offers) -> Self {
        Self { items: Vec::new(), name: name.to_owned(), ids, offers, sequence: 0 }
    }

    /// Returns the number of the next event.
    pub(super) fn number(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }

    fn event(
        &mut self,
        kind: &'static str,
        body: &impl Serialize,
        sink: &mut Sink<'_>,
    ) -> Result<(), ApiError> {
        let Some(events) = sink else { return Ok(()) };
        let sequence_number = self.number();
        events.push_named(kind, &Event { kind, sequence_number, body })
    }

    /// Takes the next part of the reply; `logprobs` belong to text of the answer.
    ///
    /// # Errors
    /// Like [`tell`].
    pub(super) fn take(
        &mut self,
        part: Part,
        logprobs: Vec<ChatLogprob>,
        sink: &mut Sink<'_>,
    ) -> Result<(), ApiError> {
        match part {
            Part::Reasoning(text) => {
                self.turn_to(Kind::Reasoning, sink)?;
                self.add(&text, Vec::new(), sink)
            }
            Part::Content(text) => {
                self.turn_to(Kind::Message, sink)?;
                self.add(&text, logprobs, sink)
            }
            Part::Call { index, name } => {
                self.close(Status::Completed, sink)?;
                let (call_id, offer) = (self.ids.id(0, index), self.offers.of(&name));
                self.open(Kind::Call { call_id, offer }, sink)
            }
            Part::Arguments { text, .. } => self.add(&text, Vec::new(), sink),
            Part::End => self.close(Status::Completed, sink),
        }
    }

    /// Closes the last item at the end of the output; without any item, makes an empty message,
    /// since clients look for an answer. If it is a call, `cuts_call` tells whether its arguments
    /// are incomplete although the output is not.
    ///
    /// # Errors
    /// Like [`tell`].
    pub(super) fn finish(
        &mut self,
        status: Status,
        cuts_call: bool,
        sink: &mut Sink<'_>,
    ) -> Result<(), ApiError> {
        if self.items.is_empty() {
            self.turn_to(Kind::Message, sink)?;
        }
        let is_call = |item: &Item| matches!(item.kind, Kind::Call { .. });
        let is_cut = cuts_call && self.items.last().is_some_and(is_call);
        self.close(if is_cut { Status::Incomplete } else { status }, sink)
    }

    /// Continues with an item of this kind.
    fn turn_to(&mut self, kind: Kind, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        let last = self.items.last();
        if last.is_some_and(|it| it.kind == kind && it.status == Status::InProgress) {
            return Ok(());
        }
        self.close(Status::Completed, sink)?;
        self.open(kind, sink)
    }

    fn open(&mut self, kind: Kind, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        let output_index = self.items.len();
        let prefix = match kind {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { offer: Offer { is_custom: true, .. }, .. } => "ctc",
            Kind::Call { .. } => "fc",
        };
        let id = format!("{prefix}_{}_{output_index}", self.name);
        let item = Item {
            id,
            kind,
            text: String::new(),
            logprobs: Vec::new(),
            status: Status::InProgress,
        };
        self.event("response.output_item.added", &OfItem { output_index, item: &item }, sink)?;
        if !matches!(item.kind, Kind::Call { .. }) {
            let part = item.part();
            let of_part = OfPart { item_id: &item.id, output_index, content_index: 0, part };
            self.event("response.content_part.added", &of_part, sink)?;
        }
        self.items.push(item);
        Ok(())
    }

    fn add(
        &mut self,
        text: &str,
        logprobs: Vec<ChatLogprob>,
        sink: &mut Sink<'_>,
    ) -> Result<(), ApiError> {
        let Some(mut item) = self.items.pop() else { return Ok(()) };
        let is_call = matches!(item.kind, Kind::Call { .. });
        let of_text = OfText {
            content_index: (!is_call).then_some(0),
            delta: Some(text),
            logprobs: (item.kind == Kind::Message).then_some(&logprobs),
            ..OfText::of(&item.id, self.items.len())
        };
        let kind = match &item.kind {
            Kind::Reasoning => Some("response.reasoning_text.delta"),
            Kind::Message => Some("response.output_text.delta"),
            // It is told whole: only complete JSON says for certain what it is.
            Kind::Call { offer, .. } if offer.is_custom => None,
            Kind::Call { .. } => Some("response.function_call_arguments.delta"),
        };
        let told = match kind.filter(|_| !text.is_empty()) {
            Some(kind) => self.event(kind, &of_text, sink),
            None => Ok(()),
        };
        item.text.push_str(text);
        item.logprobs.extend(logprobs);
        self.items.push(item);
        told
    }

    /// Ends the open item, if there is one.
    fn close(&mut self, status: Status, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        let open = self.items.pop_if(|item| item.status == Status::InProgress);
        let Some(mut item) = open else { return Ok(()) };
        item.status = status;
        let told = self.tell_end(&item, sink);
        self.items.push(item);
        told
    }

    fn tell_end(&mut self, item: &Item, sink: &mut Sink<'_>) -> Result<(), ApiError> {
        if sink.is_none() {
            return Ok(());
        }
        let (item_id, output_index) = (item.id.as_str(), self.items.len());
        let input = item.input();
        let mut of_text = OfText::of(item_id, output_index);
        let kind = match &item.kind {
            Kind::Reasoning => {
                (of_text.content_index, of_text.text) = (Some(0), Some(item.text.as_str()));
                "response.reasoning_text.done"
            }
            Kind::Message => {
                (of_text.content_index, of_text.text) = (Some(0), Some(item.text.as_str()));
                of_text.logprobs = Some(&item.logprobs);
                "response.output_text.done"
            }
            Kind::Call { offer, .. } if offer.is_custom => {
                if !input.is_empty() {
                    let delta = OfText { delta: Some(&input), ..OfText::of(item_id, output_index) };
                    self.event("response.custom_tool_call_input.delta", &delta, sink)?;
                }
                of_text.input = Some(&input);
                "response.custom_tool_call_input.done"
            }
            Kind::Call { offer, .. } => {
                of_text.name = Some(&offer.name);
                of_text.arguments = Some(&item.text);
                "response.function_call_arguments.done"
            }
        };
        self.event(kind, &of_text, sink)?;
        if !matches!(item.kind, Kind::Call { .. }) {
            let part = item.part();
            let of_part = OfPart { item_id, output_index, content_index: 0, part };
            self.event("response.content_part.done", &of_part, sink)?;
        }
        self.event("response.output_item.done", &OfItem { output_index, item }, sink)
    }
}

//! PURE: replies of gpt-oss in OpenAI's harmony format: messages, each with a header that names its
//! channel and, for a call, its recipient.
//!
//! ```text
//! <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..<|return|>
//! <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
//! ```
//!
//! `analysis` is reasoning, `final` the answer; `commentary` without a recipient is a preamble for
//! the user before tool calls. Models omit marks and write headers of their own: whatever is not a
//! header is text. No text is lost, and no mark ever becomes part of it.
//!
//! - [`grammar`]: grammars of harmony replies
//! - `header`: headers of messages
pub mod grammar;
mod header;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::header::{Address, Header};
use super::grammar::Special;
use super::{Part, ReplyRules, undecided};

pub(super) const START: &str = "<|start|>";
pub(super) const END: &str = "<|end|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
const RETURN: &str = "<|return|>";
const CALL: &str = "<|call|>";
/// All marks.
pub(super) const MARKS: [&str; 7] = [START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL];
/// The marks that end a reply.
pub const ENDS: [&str; 2] = [RETURN, CALL];

/// Surrounds the text of each special token, so that text that merely spells a mark is not taken
/// for one. No keyboard types it.
pub const FENCE: char = '\u{f8fe}';
/// Maximum length of a special token's text, in bytes.
const TOKEN_MAX: usize = 128;

/// How a reply's messages are recognised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Harmony {
    /// Marks are special tokens, each between two [`FENCE`] characters; otherwise marks are text.
    pub fenced: bool,
    /// Where in a message the prompt ends.
    pub opening: Opening,
}

impl Harmony {
    /// Whether the vocabulary has special tokens for the marks.
    #[must_use]
    pub fn is_fenced(&self, special: Special<'_>) -> bool {
        special(MESSAGE).is_some()
    }
}

/// Where in a message a prompt ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opening(State);

impl Opening {
    /// The place where `prompt` ends.
    #[must_use]
    pub fn after(prompt: &str) -> Self {
        let Some(at) = prompt.rfind(START) else { return Self::default() };
        let rules =
            Arc::new(ReplyRules { harmony: Some(Harmony::default()), ..Default::default() });
        let Some(mut reader) = Reader::new(&rules) else { return Self::default() };
        reader.push(&prompt[at..], &mut Vec::new());
        let held = std::mem::take(&mut reader.held);
        reader.text(&held, &mut Vec::new());
        Self(reader.state)
    }

    /// What to append to a prompt so that the answer follows, without reasoning.
    #[must_use]
    pub fn to_answer(&self) -> &'static str {
        match &self.0 {
            State::Body(MessageBody { of: MessageKind::Reasoning, .. }) => {
                "<|end|><|start|>assistant<|channel|>final<|message|>"
            }
            State::Body(_) => "",
            State::Header(_) => "<|channel|>final<|message|>",
            State::Between => "<|start|>assistant<|channel|>final<|message|>",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum State {
    /// Between messages.
    #[default]
    Between,
    Header(Header),
    Body(MessageBody),
}

/// Within a message, after its header.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MessageBody {
    of: MessageKind,
    /// It has text already.
    begun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageKind {
    Reasoning,
    Content,
    Call,
}

/// Parses one reply.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    rules: Arc<ReplyRules>,
    fenced: bool,
    state: State,
    /// Text that may be the beginning of a mark.
    held: String,
    num_calls: u32,
}

impl Reader {
    /// A parser at the start of a reply; `None` if the rules are not those of harmony.
    pub(super) fn new(rules: &Arc<ReplyRules>) -> Option<Self> {
        let Harmony { fenced, opening } = rules.harmony.as_ref()?;
        Some(Self {
            rules: rules.clone(),
            fenced: *fenced,
            state: opening.0.clone(),
            held: String::new(),
            num_calls: 0,
        })
    }

    /// Whether the next text is reasoning.
    pub(super) fn reasons(&self) -> bool {
        matches!(self.state, State::Body(MessageBody { of: MessageKind::Reasoning, .. }))
    }

    /// Whether text that followed would be part of a call that has begun.
    pub(super) fn is_within_call(&self) -> bool {
        matches!(self.state, State::Body(MessageBody { of: MessageKind::Call, .. }))
    }

    /// Takes more text; appends the parts that are certain.
    pub(super) fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.held.push_str(text);
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_str();
        loop {
            let found = if self.fenced { fenced(rest) } else { plain(rest) };
            self.text(&rest[..found.at], parts);
            if let Some(mark) = found.mark {
                self.mark(mark, parts);
            }
            rest = &rest[found.at + found.length..];
            if found.at + found.length == 0 {
                break;
            }
        }
        self.held = rest.to_owned();
    }

    /// The reply is complete: appends what was held back.
    pub(super) fn finish(&mut self, parts: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        // A stop string may have cut the text within a mark.
        let end = held.find(FENCE).filter(|_| self.fenced).unwrap_or(held.len());
        self.text(&held[..end], parts);
        self.close(true, parts);
    }

    /// Takes text between two marks.
    fn text(&mut self, text: &str, parts: &mut Vec<Part>) {
        let mut text = text;
        match &mut self.state {
            State::Body(_) => {}
            State::Between => {
                // White space between messages has no meaning.
                text = text.trim_start();
                if !text.is_empty() {
                    self.state =
                        State::Body(MessageBody { of: MessageKind::Content, begun: false });
                }
            }
            State::Header(header) => {
                text = header.push(text);
                if text.is_empty() && !header.is_text() {
                    return;
                }
                // It is not a header, or its end is missing.
                self.abandon(false, parts);
            }
        }
        self.push_text(text, parts);
    }

    /// Ends a header early: takes what it says so far, and treats the rest as its message's text.
    fn abandon(&mut self, is_over: bool, parts: &mut Vec<Part>) {
        let State::Header(header) = std::mem::take(&mut self.state) else { return };
        let (address, rest) = header.abandoned(is_over);
        if rest.is_empty() && is_over {
            return;
        }
        self.open(&address, parts);
        self.push_text(&rest, parts);
    }

    /// Starts the text of a message.
    fn open(&mut self, address: &Address, parts: &mut Vec<Part>) {
        let of = match address.function() {
            Some(name) if self.rules.calls.is_some() => {
                let index = self.num_calls;
                self.num_calls += 1;
                if index == 0 || !self.rules.single_call {
                    parts.push(Part::Call { index, name: name.to_owned() });
                }
                MessageKind::Call
            }
            // A message to one of the model's own tools, or to itself, is part of its reasoning.
            None if address.is_inward() => MessageKind::Reasoning,
            _ if address.channel.as_deref() == Some(header::ANALYSIS) => MessageKind::Reasoning,
            _ => MessageKind::Content,
        };
        self.state = State::Body(MessageBody { of, begun: false });
    }

    /// Adds text to the current message.
    fn push_text(&mut self, text: &str, parts: &mut Vec<Part>) {
        let State::Body(body) = &mut self.state else { return };
        let text =
            if body.of == MessageKind::Call && !body.begun { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        body.begun = true;
        let text = text.to_owned();
        match body.of {
            MessageKind::Reasoning => parts.push(Part::Reasoning(text)),
            MessageKind::Content => parts.push(Part::Content(text)),
            MessageKind::Call => self.add(text, parts),
        }
    }

    /// More arguments of the current call.
    fn add(&self, text: String, parts: &mut Vec<Part>) {
        let index = self.num_calls.saturating_sub(1);
        if index == 0 || !self.rules.single_call {
            parts.push(Part::Arguments { index, text });
        }
    }

    fn mark(&mut self, mark: &str, parts: &mut Vec<Part>) {
        match mark {
            START => {
                self.close(false, parts);
                self.state = State::Header(Header::default());
            }
            CHANNEL => {
                if let State::Header(header) = &mut self.state
                    && header.is_before_channel()
                {
                    header.begin_channel();
                    return;
                }
                // The mark between two messages is missing.
                self.close(false, parts);
                self.state = State::Header(Header::of_channel());
            }
            CONSTRAIN => match &mut self.state {
                State::Header(header) => header.begin_kind(),
                State::Between => self.state = State::Header(Header::of_kind()),
                State::Body(_) => {}
            },
            MESSAGE => match std::mem::take(&mut self.state) {
                State::Header(header) => self.open(&header.address(), parts),
                State::Between => self.open(&Address::default(), parts),
                body => self.state = body,
            },
            END | RETURN | CALL => self.close(false, parts),
            // Other special tokens have no meaning.
            _ => {}
        }
    }

    /// Ends the message.
    fn close(&mut self, is_over: bool, parts: &mut Vec<Part>) {
        if matches!(self.state, State::Header(_)) {
            self.abandon(true, parts);
        }
        match std::mem::take(&mut self.state) {
            State::Body(MessageBody { of: MessageKind::Call, begun: false }) => {
                self.add("{}".to_owned(), parts)
            }
            State::Body(MessageBody {
                of: MessageKind::Reasoning | MessageKind::Content,
                begun: true,
            }) if !is_over => {
                parts.push(Part::End);
            }
            _ => {}
        }
    }
}

/// The first mark in a text.
struct FoundMark<'a> {
    /// Bytes before the mark; without a mark, bytes that are certainly text.
    at: usize,
    /// Bytes of the mark; 0 if there is none yet.
    length: usize,
    mark: Option<&'a str>,
}

/// Finds marks that are text.
fn plain(text: &str) -> FoundMark<'_> {
    let found = MARKS.iter().filter_map(|mark| Some((text.find(mark)?, *mark))).min();
    match found {
        Some((at, mark)) => FoundMark { at, length: mark.len(), mark: Some(mark) },
        None => FoundMark { at: text.len() - begun(text), length: 0, mark: None },
    }
}

/// Number of bytes at the end of `text` that may begin a mark.
fn begun(text: &str) -> usize {
    let most = undecided(text, MARKS.into_iter());
    let tail = &text[text.len() - most..];
    most - (tail.len() - tail.trim_start().len())
}

/// Finds special tokens between fences.
fn fenced(text: &str) -> FoundMark<'_> {
    let wide = FENCE.len_utf8();
    let Some(at) = text.find(FENCE) else {
        return FoundMark { at: text.len(), length: 0, mark: None };
    };
    let behind = &text[at + wide..];
    match behind.find(FENCE) {
        Some(end) if end <= TOKEN_MAX => {
            FoundMark { at, length: end + 2 * wide, mark: Some(&behind[..end]) }
        }
        // The fence is an ordinary character here.
        Some(_) => FoundMark { at: at + wide, length: 0, mark: None },
        None if behind.len() > TOKEN_MAX => FoundMark { at: at + wide, length: 0, mark: None },
        None => FoundMark { at, length: 0, mark: None },
    }
}

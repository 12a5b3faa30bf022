//! PURE: replies of gpt-oss, in OpenAI's harmony format: messages, each with a header that names its
//! channel and, of a call, whom it is to.
//!
//! ```text
//! <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..<|return|>
//! <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
//! ```
//!
//! `analysis` is reasoning, `final` the answer, `commentary` to nobody is said to the user before
//! tools are called. Models leave out marks and write headers of their own: whatever is no header is
//! text, none of it is lost, and no mark is ever part of it.
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
/// Those that end a reply.
pub const ENDS: [&str; 2] = [RETURN, CALL];

/// Stands on both sides of a special token in text that has them, so that nobody takes for a mark
/// what only spells one. No keyboard writes it.
pub const FENCE: char = '\u{f8fe}';
/// Bytes of a special token's text.
const TOKEN_MAX: usize = 128;

/// How a reply's messages are told from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Harmony {
    /// Marks are special tokens, between two of [`FENCE`]; otherwise they are text.
    pub fenced: bool,
    /// Where the prompt ends.
    pub opening: Opening,
}

impl Harmony {
    /// Whether marks are special tokens of this vocabulary.
    #[must_use]
    pub fn is_fenced(&self, special: Special<'_>) -> bool {
        special(MESSAGE).is_some()
    }
}

/// Where in a message a prompt ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opening(State);

impl Opening {
    /// Where this prompt ends.
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

    /// What a prompt goes on with, for the answer to come next, without reasoning.
    #[must_use]
    pub fn to_answer(&self) -> &'static str {
        match &self.0 {
            State::Body(Body { of: Of::Reasoning, .. }) => {
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
    /// No message has begun.
    #[default]
    Between,
    Header(Header),
    Body(Body),
}

/// A message behind its header.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Body {
    of: Of,
    /// It has text.
    begun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Reasoning,
    Content,
    Call,
}

/// Reads one reply.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    rules: Arc<ReplyRules>,
    fenced: bool,
    state: State,
    /// What may be the beginning of a mark.
    held: String,
    num_calls: u32,
}

impl Reader {
    /// A reader that has read nothing, where a reply is messages.
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

    /// Whether what comes next is reasoning.
    pub(super) fn reasons(&self) -> bool {
        matches!(self.state, State::Body(Body { of: Of::Reasoning, .. }))
    }

    /// Takes more text; appends what it says, as far as that is certain.
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

    /// The text is over: appends what was held back.
    pub(super) fn finish(&mut self, parts: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        // A stop string may have ended the text within a mark.
        let end = held.find(FENCE).filter(|_| self.fenced).unwrap_or(held.len());
        self.text(&held[..end], parts);
        self.close(true, parts);
    }

    /// Takes text between marks.
    fn text(&mut self, text: &str, parts: &mut Vec<Part>) {
        let mut text = text;
        match &mut self.state {
            State::Body(_) => {}
            State::Between => {
                // Nothing is said by white space between messages.
                text = text.trim_start();
                if !text.is_empty() {
                    self.state = State::Body(Body { of: Of::Content, begun: false });
                }
            }
            State::Header(header) => {
                text = header.push(text);
                if text.is_empty() && !header.is_text() {
                    return;
                }
                // It is none, or its end is missing.
                self.abandon(false, parts);
            }
        }
        self.say(text, parts);
    }

    /// Takes a header for what it says so far, and what is more for its message's text.
    fn abandon(&mut self, is_over: bool, parts: &mut Vec<Part>) {
        let State::Header(header) = std::mem::take(&mut self.state) else { return };
        let (address, rest) = header.abandoned(is_over);
        if rest.is_empty() && is_over {
            return;
        }
        self.open(&address, parts);
        self.say(&rest, parts);
    }

    /// Begins a message's text.
    fn open(&mut self, address: &Address, parts: &mut Vec<Part>) {
        let of = match address.function() {
            Some(name) if self.rules.calls.is_some() => {
                let index = self.num_calls;
                self.num_calls += 1;
                if index == 0 || !self.rules.single_call {
                    parts.push(Part::Call { index, name: name.to_owned() });
                }
                Of::Call
            }
            // What is to a tool of the model's own, or to itself, is part of its thoughts.
            None if address.is_inward() => Of::Reasoning,
            _ if address.channel.as_deref() == Some(header::ANALYSIS) => Of::Reasoning,
            _ => Of::Content,
        };
        self.state = State::Body(Body { of, begun: false });
    }

    /// More of a message's text.
    fn say(&mut self, text: &str, parts: &mut Vec<Part>) {
        let State::Body(body) = &mut self.state else { return };
        let text = if body.of == Of::Call && !body.begun { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        body.begun = true;
        let text = text.to_owned();
        match body.of {
            Of::Reasoning => parts.push(Part::Reasoning(text)),
            Of::Content => parts.push(Part::Content(text)),
            Of::Call => self.add(text, parts),
        }
    }

    /// More arguments of the call that was begun last.
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
            // Other special tokens say nothing.
            _ => {}
        }
    }

    /// Ends the message.
    fn close(&mut self, is_over: bool, parts: &mut Vec<Part>) {
        if matches!(self.state, State::Header(_)) {
            self.abandon(true, parts);
        }
        match std::mem::take(&mut self.state) {
            State::Body(Body { of: Of::Call, begun: false }) => self.add("{}".to_owned(), parts),
            State::Body(Body { of: Of::Reasoning | Of::Content, begun: true }) if !is_over => {
                parts.push(Part::End);
            }
            _ => {}
        }
    }
}

/// What a text says up to the first mark in it.
struct Found<'a> {
    /// Bytes before it, or that are certainly text.
    at: usize,
    /// Bytes of the mark; none where more text tells.
    length: usize,
    mark: Option<&'a str>,
}

/// Marks that are text.
fn plain(text: &str) -> Found<'_> {
    let found = MARKS.iter().filter_map(|mark| Some((text.find(mark)?, *mark))).min();
    match found {
        Some((at, mark)) => Found { at, length: mark.len(), mark: Some(mark) },
        None => Found { at: text.len() - begun(text), length: 0, mark: None },
    }
}

/// Bytes at the end of a text that may begin a mark.
fn begun(text: &str) -> usize {
    let most = undecided(text, &MARKS);
    let tail = &text[text.len() - most..];
    most - (tail.len() - tail.trim_start().len())
}

/// Special tokens between fences.
fn fenced(text: &str) -> Found<'_> {
    let wide = FENCE.len_utf8();
    let Some(at) = text.find(FENCE) else {
        return Found { at: text.len(), length: 0, mark: None };
    };
    let behind = &text[at + wide..];
    match behind.find(FENCE) {
        Some(end) if end <= TOKEN_MAX => {
            Found { at, length: end + 2 * wide, mark: Some(&behind[..end]) }
        }
        // A character like any other.
        Some(_) => Found { at: at + wide, length: 0, mark: None },
        None if behind.len() > TOKEN_MAX => Found { at: at + wide, length: 0, mark: None },
        None => Found { at, length: 0, mark: None },
    }
}

//! PURE: parses the text of a reply into reasoning, answer and tool calls, incrementally: the text
//! arrives in pieces of any size, and where it is split makes no difference.
//!
//! Models write calls in the format that their chat template taught them ([`CallFormat`]). Text
//! that looks like a call at first and turns out not to be one is passed on as text; nothing is
//! lost.
//!
//! - `call`: a call that is read character by character
//! - `format`: the formats of tool calls
//! - [`grammar`]: grammars for replies that must call tools or match a schema
//! - `headed`: calls as a name and its arguments with marks between
//! - [`harmony`]: the replies of gpt-oss
//! - `json`: a call's JSON object
//! - `marks`: marks in a text that goes on
//! - `opening`: what precedes a call
//! - `prefix`: the result of matching the beginning of a text
//! - `python`: calls written as in Python
//! - `rules`: what is looked for in a reply, and what is found
//! - `xml`: calls written as elements
mod call;
mod format;
pub mod grammar;
pub mod harmony;
mod headed;
mod json;
mod marks;
mod opening;
mod prefix;
mod python;
mod rules;
#[cfg(test)]
mod tests;
mod xml;

use std::sync::Arc;

use self::call::Call;
pub use self::format::CallFormat;
use self::format::Syntax;
pub use self::harmony::Harmony;
pub use self::headed::kimi_call_id;
use self::json::{CallObject, Progress};
use self::marks::{first_of, undecided};
use self::prefix::Prefix;
pub use self::rules::{Part, Reasoning, ReplyRules, ThinkMarks};
use self::xml::Notation;
pub use self::xml::Parameters;

/// White space up to this many bytes is held back, since it may not belong to the answer; more of
/// it does.
const SPACE_MAX: usize = 4096;
/// Some models write this before a call, where the tokenizer shows it.
const PYTHON_TAG: &str = "<|python_tag|>";

/// Parses one reply.
#[derive(Clone, Debug)]
pub struct ReplyReader {
    rules: Arc<ReplyRules>,
    state: State,
    /// Text that is not parsed yet.
    held: String,
    /// Bytes of the held text already searched for the end of a parameter.
    looked: usize,
    num_calls: u32,
    /// The mark behind the answer, where one has opened it.
    answer_end: Option<&'static str>,
    /// Parses replies in harmony format instead.
    messages: Option<harmony::Reader>,
}

#[derive(Clone, Debug)]
enum State {
    /// Only white space was read so far; after reasoning (`thought`) it does not belong to the
    /// answer.
    Start { thought: bool },
    /// White space is skipped until the reasoning has begun.
    Reasoning { begun: bool },
    /// White space after reasoning and calls is skipped until the answer has begun.
    Content { begun: bool },
    /// After the mark that opens calls, where it does not tell what follows.
    Opened { opening: String },
    /// Within a call's JSON object or its like; `opening` is the text that opened it.
    Call { opening: String, call: Call, listed: bool },
    /// After a tag that may open a call written as an element.
    Tagged { opening: String },
    /// Within a call's element, after `count` parameters.
    Element { function: String, count: u32 },
    /// After a call, and `passed` of the marks that may follow it.
    Closing { listed: bool, passed: usize },
}

impl ReplyReader {
    /// A parser at the start of a reply.
    #[must_use]
    pub fn new(rules: Arc<ReplyRules>) -> Self {
        let begins = rules.reasoning.is_some() && rules.begins_reasoning;
        let state = if begins {
            State::Reasoning { begun: false }
        } else {
            State::Start { thought: false }
        };
        let messages = harmony::Reader::new(&rules);
        let held = String::new();
        Self { rules, state, held, looked: 0, num_calls: 0, answer_end: None, messages }
    }

    /// Takes more text; appends the parts that are certain.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        if let Some(messages) = &mut self.messages {
            return messages.push(text, parts);
        }
        self.held.push_str(text);
        while !self.held.is_empty() && self.advance(parts) {}
    }

    /// Whether the next text is reasoning, as far as the text has been parsed.
    #[must_use]
    pub fn reasons(&self) -> bool {
        match &self.messages {
            Some(messages) => messages.reasons(),
            None => matches!(self.state, State::Reasoning { .. }),
        }
    }

    /// Whether text that followed would be part of a call that has begun.
    #[must_use]
    pub fn is_within_call(&self) -> bool {
        match (&self.messages, &self.state) {
            (Some(messages), _) => messages.is_within_call(),
            (None, State::Call { call, .. }) => call.is_begun(),
            (None, state) => matches!(state, State::Element { .. }),
        }
    }

    /// The reply is complete: appends what was held back.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        if let Some(messages) = &mut self.messages {
            return messages.finish(parts);
        }
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Content { begun: true }) {
            // An incomplete call of a model that can only write calls.
            _ if self.rules.only_calls => {}
            State::Start { thought: false } | State::Content { begun: true } => {
                content(&held, parts);
            }
            State::Tagged { opening } | State::Opened { opening } => {
                content(&(opening + &held), parts);
            }
            State::Start { thought: true } | State::Content { begun: false } => {
                content(held.trim_start(), parts);
            }
            State::Reasoning { begun } => {
                reasoning(if begun { &held } else { held.trim_start() }, parts);
            }
            State::Call { opening, call, .. } if !call.is_begun() => {
                content(&(opening + call.text() + &held), parts);
            }
            State::Call { .. } | State::Element { .. } | State::Closing { .. } => {}
        }
    }

    /// Parses more of the held text; false if that needs more text.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Start { thought } => self.start(thought),
            State::Reasoning { begun } => self.reason(begun, parts),
            State::Content { begun } => self.answer(begun, parts),
            State::Opened { .. } => self.opened(parts),
            State::Call { .. } => self.call(parts),
            State::Tagged { .. } => self.tagged(parts),
            State::Element { .. } => self.element(parts),
            State::Closing { listed, passed } => self.close(listed, passed),
        }
    }

    fn start(&mut self, thought: bool) -> bool {
        let text = self.held.trim_start();
        if text.is_empty() {
            if self.held.len() > SPACE_MAX {
                self.state = State::Content { begun: !thought };
            }
            return self.held.len() > SPACE_MAX;
        }
        if let Some(marks) = self.rules.reasoning.filter(|_| !thought) {
            if let Some(rest) = text.strip_prefix(marks.open) {
                self.held = rest.to_owned();
                self.state = State::Reasoning { begun: false };
                return true;
            }
            if marks.open.starts_with(text) {
                return false;
            }
        }
        if let Some([open, close]) = self.rules.reasoning.and_then(|marks| marks.answer) {
            if let Some(rest) = text.strip_prefix(open) {
                self.held = rest.to_owned();
                self.answer_end = Some(close);
                self.state = State::Content { begun: false };
                return true;
            }
            if open.starts_with(text) {
                return false;
            }
        }
        match self.rules.calls {
            Some(CallFormat::Llama3Json) => return self.bare_call(thought),
            Some(CallFormat::Pythonic) if text.starts_with('[') => {
                let space = self.held.len() - text.len();
                let opening: String = self.held.drain(..space).collect();
                let opening = if thought { String::new() } else { opening };
                self.state = State::Opened { opening };
            }
            _ => self.state = State::Content { begun: !thought },
        }
        true
    }

    /// A reply that is a call as a whole begins with its object.
    fn bare_call(&mut self, thought: bool) -> bool {
        let text = self.held.trim_start();
        if PYTHON_TAG.starts_with(text) {
            return false;
        }
        let text = text.strip_prefix(PYTHON_TAG).unwrap_or(text).trim_start();
        if text.is_empty() {
            return false;
        }
        self.state = if text.starts_with('{') {
            let opening = self.held[..self.held.len() - text.len()].to_owned();
            self.held = text.to_owned();
            let call = Call::Object(CallObject::with_arguments());
            State::Call { opening, call, listed: false }
        } else {
            State::Content { begun: !thought }
        };
        true
    }

    fn reason(&mut self, begun: bool, parts: &mut Vec<Part>) -> bool {
        let marks = self.rules.reasoning.unwrap_or_default();
        if !begun {
            self.skip_space();
            // The model opens reasoning that the prompt has already opened.
            if let Some(rest) = self.held.strip_prefix(marks.open) {
                self.held = rest.to_owned();
                return true;
            }
            if marks.open.starts_with(&self.held) {
                return false;
            }
        }
        // Some models begin calls within their reasoning, which ends there.
        let calls = self.rules.calls_that_end_reasoning();
        let ends = || calls.iter().copied().chain([marks.close]);
        if let Some((at, end)) = first_of(&self.held, ends()) {
            reasoning(self.held[..at].trim_end(), parts);
            let is_closed = end == marks.close;
            self.held.drain(..if is_closed { at + end.len() } else { at });
            self.state = State::Start { thought: true };
            return true;
        }
        let certain = self.held.len() - undecided(&self.held, ends());
        if certain > 0 {
            reasoning(&self.held[..certain], parts);
            self.held.drain(..certain);
            self.state = State::Reasoning { begun: true };
        }
        false
    }

    fn answer(&mut self, begun: bool, parts: &mut Vec<Part>) -> bool {
        if !begun {
            self.skip_space();
        }
        let openings = self.rules.calls.map_or(&[][..], CallFormat::openings);
        let answer_end = self.answer_end;
        let marks = || openings.iter().copied().chain(answer_end);
        let Some((at, opening)) = first_of(&self.held, marks()) else {
            let certain = self.held.len() - undecided(&self.held, marks());
            if certain > 0 {
                content(&self.held[..certain], parts);
                self.held.drain(..certain);
                self.state = State::Content { begun: true };
            }
            return false;
        };
        if Some(opening) == answer_end {
            content(self.held[..at].trim_end(), parts);
            self.held.drain(..at + opening.len());
            self.answer_end = None;
            self.state = State::Content { begun: false };
            return true;
        }
        // White space before a call does not belong to the answer, unless it turns out not to be a
        // call.
        let before = self.held[..at].trim_end().len();
        content(&self.held[..before], parts);
        // Models sometimes forget the tag around a function, which then opens the call itself.
        let end = at + opening.len() - CallFormat::own(opening);
        let opening = self.held[before..end].to_owned();
        self.held.drain(..end);
        self.state = match self.rules.calls.map(CallFormat::syntax) {
            Some(Syntax::Elements(_)) => State::Tagged { opening },
            Some(Syntax::Object) | None => {
                State::Call { opening, call: Call::Object(CallObject::new()), listed: false }
            }
            Some(_) => State::Opened { opening },
        };
        true
    }

    /// Behind a mark: `[{..}, {..}]`, `{..}`, `name{..}` with marks between, or `[f(..), g(..)]`.
    fn opened(&mut self, parts: &mut Vec<Part>) -> bool {
        let State::Opened { opening } = &self.state else { return false };
        let syntax = self.rules.calls.map_or(Syntax::Object, CallFormat::syntax);
        match opening::opened(syntax, opening, &self.held) {
            Prefix::Match((call, listed), taken) => {
                let opening = format!("{opening}{}", &self.held[..taken]);
                self.held.drain(..taken);
                self.state = State::Call { opening, call, listed };
            }
            Prefix::Unknown => return false,
            Prefix::NoMatch => self.is_no_call(parts),
        }
        true
    }

    fn call(&mut self, parts: &mut Vec<Part>) -> bool {
        let State::Call { opening, call, listed } = &mut self.state else { return false };
        let (was_begun, listed) = (call.is_begun(), *listed);
        let mut arguments = String::new();
        let (taken, length) = call.push(&self.held, &mut arguments);
        self.held.drain(..length);
        if taken == Progress::Broken && !call.is_begun() {
            content(&format!("{opening}{}", call.text()), parts);
            self.state = State::Content { begun: true };
            return true;
        }
        if let Some(name) = call.name().filter(|_| call.is_begun() && !was_begun) {
            let name = name.to_owned();
            self.begin(name, parts);
        }
        self.add(arguments, parts);
        if taken == Progress::All {
            return false;
        }
        self.state = State::Closing { listed, passed: 0 };
        true
    }

    /// How this format writes elements.
    fn notation(&self) -> &'static Notation {
        match self.rules.calls.map(CallFormat::syntax) {
            Some(Syntax::Elements(notation)) => notation,
            _ => &xml::QWEN,
        }
    }

    /// `<function=f>`, or text that begins like it.
    fn tagged(&mut self, parts: &mut Vec<Part>) -> bool {
        let space = self.held.len() - self.held.trim_start().len();
        match self.notation().function(&self.held[space..]) {
            Prefix::Unknown if space <= SPACE_MAX => return false,
            Prefix::Match(function, taken) => {
                self.held.drain(..space + taken);
                self.begin(function.clone(), parts);
                self.add("{".to_owned(), parts);
                self.state = State::Element { function, count: 0 };
            }
            Prefix::Unknown | Prefix::NoMatch => self.is_no_call(parts),
        }
        true
    }

    /// The text that seemed to open a call is plain text.
    fn is_no_call(&mut self, parts: &mut Vec<Part>) {
        let state = std::mem::replace(&mut self.state, State::Content { begun: true });
        let (State::Opened { opening } | State::Tagged { opening }) = state else { return };
        content(&opening, parts);
        if opening.trim().is_empty() {
            // It was the beginning of a call, which must not be tried again.
            let first = self.held.chars().next().map_or(0, char::len_utf8);
            content(&self.held[..first], parts);
            self.held.drain(..first);
        }
    }

    /// Parses the next parameter of a call's element.
    fn element(&mut self, parts: &mut Vec<Part>) -> bool {
        let notation = self.notation();
        let State::Element { function, count } = &mut self.state else { return false };
        let space = self.held.len() - self.held.trim_start().len();
        self.held.drain(..space);
        self.looked = self.looked.saturating_sub(space);
        if self.held.starts_with(notation.function_end) {
            self.held.drain(..notation.function_end.len());
            self.state = State::Closing { listed: false, passed: 0 };
            self.add("}".to_owned(), parts);
            return true;
        }
        match notation.parameter(&self.held, self.looked, function, &self.rules.parameters) {
            Prefix::Match(member, taken) => {
                self.held.drain(..taken);
                self.looked = 0;
                let between = if *count == 0 { "" } else { ", " };
                *count += u32::from(!member.is_empty());
                if !member.is_empty() {
                    self.add(format!("{between}{member}"), parts);
                }
            }
            Prefix::Unknown => {
                self.looked = self.held.len();
                return false;
            }
            Prefix::NoMatch if notation.function_end.starts_with(&self.held) => return false,
            // Skips a character that has no place here.
            Prefix::NoMatch => {
                let first = self.held.chars().next().map_or(0, char::len_utf8);
                self.held.drain(..first);
            }
        }
        true
    }

    /// Skips what is between a call and what follows.
    fn close(&mut self, listed: bool, passed: usize) -> bool {
        let Some(format) = self.rules.calls else { return false };
        // Models miscount the braces that close an object.
        let is_tagged = matches!(format.syntax(), Syntax::Object) && !format.closings().is_empty();
        let miscounts = is_tagged && passed == 0;
        let is_between = |it| (listed && it == ',') || (miscounts && it == '}');
        self.skip(|it| it.is_whitespace() || is_between(it));
        let is_llama = format == CallFormat::Llama3Json;
        if is_llama {
            self.skip(|it| it.is_whitespace() || it == ';');
        }
        if listed || is_llama {
            let Some(first) = self.held.chars().next() else { return false };
            if let Some(call) = opening::next_call(format, first) {
                self.state = State::Call { opening: String::new(), call, listed };
                return true;
            }
            if listed && first == ']' {
                self.held.drain(..1);
                self.state = State::Closing { listed: false, passed };
                return true;
            }
        }
        let notation = self.notation();
        let repeats = notation.repeats && passed == 0;
        if repeats && self.held.starts_with(notation.function) {
            self.state = State::Tagged { opening: String::new() };
            return true;
        }
        let marks = format.closings().get(passed..).unwrap_or_default();
        for (mark, passed) in marks.iter().zip(passed + 1..) {
            if self.held.starts_with(mark) {
                self.held.drain(..mark.len());
                self.state = State::Closing { listed: false, passed };
                return true;
            }
        }
        let may_repeat = repeats && notation.function.starts_with(&self.held);
        if may_repeat || marks.iter().any(|mark| mark.starts_with(&self.held)) {
            return false;
        }
        self.state = State::Content { begun: false };
        true
    }

    fn begin(&mut self, name: String, parts: &mut Vec<Part>) {
        let index = self.num_calls;
        self.num_calls += 1;
        if index == 0 || !self.rules.single_call {
            parts.push(Part::Call { index, name });
        }
    }

    /// More arguments of the current call.
    fn add(&mut self, text: String, parts: &mut Vec<Part>) {
        let index = self.num_calls.saturating_sub(1);
        if !text.is_empty() && (index == 0 || !self.rules.single_call) {
            parts.push(Part::Arguments { index, text });
        }
    }

    fn skip_space(&mut self) {
        self.skip(char::is_whitespace);
    }

    fn skip(&mut self, which: impl Fn(char) -> bool) {
        let rest = self.held.trim_start_matches(which).len();
        self.held.drain(..self.held.len() - rest);
    }
}

fn content(text: &str, parts: &mut Vec<Part>) {
    if !text.is_empty() {
        parts.push(Part::Content(text.to_owned()));
    }
}

fn reasoning(text: &str, parts: &mut Vec<Part>) {
    if !text.is_empty() {
        parts.push(Part::Reasoning(text.to_owned()));
    }
}

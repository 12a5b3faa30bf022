//! A call as Python writes it, `f(a=1, b="x")`, parsed incrementally. Its arguments become JSON,
//! one at a time.
//!
//! - `literal`: the values of arguments
mod literal;

use serde_json::Value;

pub(super) use self::literal::parse as literal;
use super::json::Progress;

/// Longest name of a function or an argument, in bytes.
const NAME_MAX: usize = 256;

/// `f(a=1, b="x")`.
#[derive(Clone, Debug, Default)]
pub(super) struct PythonCall {
    /// The text read before this was certain to be a call.
    text: String,
    name: String,
    begun: bool,
    place: Place,
    /// The current argument's name, then its value, as written.
    key: String,
    value: String,
    scan: Scan,
    count: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Name,
    /// Before an argument, or the end of the call.
    Argument,
    Key,
    /// Behind an argument's name and white space.
    Equals,
    Value,
}

/// The position within a value.
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    depth: u32,
    string: InString,
}

#[derive(Clone, Copy, Debug, Default)]
enum InString {
    #[default]
    No,
    /// Behind this many quotes that open a string, or are an empty one.
    Opening(char, u8),
    /// Within a string that ends with one quote or three, of which `seen` are there.
    Within { quote: char, quotes: u8, seen: u8, escaped: bool },
}

impl Scan {
    /// Takes the next character; whether the value ends before it.
    fn push(&mut self, c: char) -> bool {
        self.string = match self.string {
            InString::Opening(quote, 1) if c == quote => InString::Opening(quote, 2),
            InString::Opening(quote, 2) if c == quote => {
                InString::Within { quote, quotes: 3, seen: 0, escaped: false }
            }
            InString::Opening(quote, 1) => {
                let within = InString::Within { quote, quotes: 1, seen: 0, escaped: false };
                return self.push_within(within, c);
            }
            InString::Within { .. } => return self.push_within(self.string, c),
            // An empty string has ended.
            InString::No | InString::Opening(..) => {
                self.string = InString::No;
                return self.push_outside(c);
            }
        };
        false
    }

    fn push_within(&mut self, string: InString, c: char) -> bool {
        let InString::Within { quote, quotes, seen, escaped } = string else { return false };
        let seen = if c == quote && !escaped { seen + 1 } else { 0 };
        let escaped = c == '\\' && !escaped;
        self.string = if seen == quotes {
            InString::No
        } else {
            InString::Within { quote, quotes, seen, escaped }
        };
        false
    }

    fn push_outside(&mut self, c: char) -> bool {
        match c {
            '"' | '\'' => self.string = InString::Opening(c, 1),
            '(' | '[' | '{' => self.depth += 1,
            ',' | ')' | ']' | '}' if self.depth == 0 => return true,
            ')' | ']' | '}' => self.depth -= 1,
            _ => {}
        }
        false
    }
}

impl PythonCall {
    /// Whether this is certainly a call.
    pub(super) fn is_begun(&self) -> bool {
        self.begun
    }

    /// The function's name, once known.
    pub(super) fn name(&self) -> Option<&str> {
        self.begun.then_some(self.name.as_str())
    }

    /// The text read while this was not certain to be a call.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether a call may begin with this character.
    pub(super) fn may_begin(c: char) -> bool {
        c == '_' || c.is_alphabetic()
    }

    /// Reads the part of `text` that belongs to the call, and returns its length in bytes,
    /// excluding the character that no call can contain. Appends new text of the arguments to
    /// `arguments`.
    pub(super) fn push(&mut self, text: &str, arguments: &mut String) -> (Progress, usize) {
        for (at, c) in text.char_indices() {
            let taken = self.take(c, arguments);
            if taken == Progress::Broken {
                if self.begun {
                    arguments.push('}');
                }
                return (taken, at);
            }
            if !self.begun {
                self.text.push(c);
            }
            if taken == Progress::Whole {
                return (taken, at + c.len_utf8());
            }
        }
        (Progress::All, text.len())
    }

    fn take(&mut self, c: char, arguments: &mut String) -> Progress {
        let is_part = |c: char| c == '_' || c.is_alphanumeric();
        match (self.place, c) {
            (Place::Name, '(') if !self.name.is_empty() && !self.name.ends_with('.') => {
                self.place = Place::Argument;
            }
            // Names of tools may have dots and dashes, unlike Python's.
            (Place::Name, c)
                if self.name.len() < NAME_MAX
                    && (Self::may_begin(c)
                        || (!self.name.is_empty() && (is_part(c) || c == '.' || c == '-'))) =>
            {
                self.name.push(c);
            }
            (Place::Argument, ')') => return self.end(arguments),
            (Place::Argument | Place::Equals, c) if c.is_whitespace() => {}
            (Place::Argument, c) if Self::may_begin(c) => {
                self.key = c.to_string();
                self.place = Place::Key;
            }
            (Place::Key, c) if is_part(c) && self.key.len() < NAME_MAX => self.key.push(c),
            (Place::Key, c) if c.is_whitespace() => self.place = Place::Equals,
            (Place::Key | Place::Equals, '=') => {
                self.begin(arguments);
                self.place = Place::Value;
                self.value.clear();
                self.scan = Scan::default();
            }
            (Place::Value, c) => return self.take_value(c, arguments),
            _ => return Progress::Broken,
        }
        Progress::All
    }

    fn take_value(&mut self, c: char, arguments: &mut String) -> Progress {
        if !self.scan.push(c) {
            self.value.push(c);
            return Progress::All;
        }
        // What is no literal is given as it is written: clients expect JSON.
        let text = self.value.trim();
        let value = literal(text).unwrap_or_else(|| text.into());
        let between = if self.count == 0 { "" } else { ", " };
        arguments.push_str(&format!("{between}{}: {value}", Value::from(self.key.as_str())));
        self.count += 1;
        self.place = Place::Argument;
        match c {
            ',' => Progress::All,
            ')' => self.end(arguments),
            _ => Progress::Broken,
        }
    }

    fn begin(&mut self, arguments: &mut String) {
        if !self.begun {
            self.begun = true;
            arguments.push('{');
        }
    }

    fn end(&mut self, arguments: &mut String) -> Progress {
        self.begin(arguments);
        arguments.push('}');
        Progress::Whole
    }
}

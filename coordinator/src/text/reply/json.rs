//! A call's JSON object, parsed incrementally.

/// The result of reading a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All of the text belongs to the object, which may continue.
    All,
    /// The object ends within the text.
    Whole,
    /// The text cannot be a call.
    Broken,
}

/// `{"name": "f", "arguments": {..}}` (or `parameters`), or the arguments alone.
#[derive(Clone, Debug)]
pub(super) struct CallObject {
    /// The text read before this was certain to be a call.
    text: String,
    needs_arguments: bool,
    name: Option<String>,
    /// The name is known, and arguments have begun.
    begun: bool,
    place: ParserState,
    value: ValueState,
    /// The current key, or a value that is only usable as a whole, as written.
    written: String,
    member: Member,
    has_arguments: bool,
    /// Arguments that came before the name.
    early: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParserState {
    Before,
    FirstKey,
    Key,
    InKey,
    Colon,
    BeforeValue,
    InValue,
    AfterValue,
    /// Within arguments that have no object around them.
    Alone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Name,
    /// Usually an object.
    Arguments,
    /// Neither object nor list: JSON within a string, as some models write it, or nothing.
    ArgumentsApart,
    Other,
}

/// The position within a value.
#[derive(Clone, Copy, Debug, Default)]
struct ValueState {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueEnd {
    No,
    WithThis,
    BeforeThis,
}

impl ValueState {
    fn push(&mut self, c: char) -> ValueEnd {
        if self.escaped {
            self.escaped = false;
            return ValueEnd::No;
        }
        if self.in_string {
            match c {
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return if !self.in_string && self.depth == 0 {
                ValueEnd::WithThis
            } else {
                ValueEnd::No
            };
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                if self.depth == 0 {
                    return ValueEnd::WithThis;
                }
            }
            '}' | ']' | ',' if self.depth == 0 => return ValueEnd::BeforeThis,
            c if c.is_whitespace() && self.depth == 0 => return ValueEnd::BeforeThis,
            _ => {}
        }
        ValueEnd::No
    }
}

impl CallObject {
    /// Before the first character; a call may omit arguments, which are then `{}`.
    pub(super) fn new() -> Self {
        Self {
            text: String::new(),
            needs_arguments: false,
            name: None,
            begun: false,
            place: ParserState::Before,
            value: ValueState::default(),
            written: String::new(),
            member: Member::Other,
            has_arguments: false,
            early: String::new(),
        }
    }

    /// Like [`CallObject::new`], but an object without arguments is not a call.
    pub(super) fn with_arguments() -> Self {
        Self { needs_arguments: true, ..Self::new() }
    }

    /// For the arguments alone, of a function whose name is known.
    pub(super) fn of(name: String) -> Self {
        Self {
            name: Some(name),
            place: ParserState::Alone,
            member: Member::Arguments,
            ..Self::new()
        }
    }

    /// Whether this is certainly a call.
    pub(super) fn is_begun(&self) -> bool {
        self.begun
    }

    /// The function's name, once known.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The text read while this was not certain to be a call.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Reads the part of `text` that belongs to the object, and returns its length in bytes,
    /// excluding the character that no call can contain. Appends new text of the arguments to
    /// `arguments`.
    pub(super) fn push(&mut self, text: &str, arguments: &mut String) -> (Progress, usize) {
        for (at, c) in text.char_indices() {
            let taken = self.take(c, arguments);
            if taken == Progress::Broken {
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
        self.place = match (self.place, c) {
            (ParserState::Alone, _) => return self.take_alone(c, arguments),
            (ParserState::InKey, '"') if !self.value.escaped => {
                self.member = self.member();
                ParserState::Colon
            }
            (ParserState::InKey, c) => {
                self.value.escaped = c == '\\' && !self.value.escaped;
                self.written.push(c);
                ParserState::InKey
            }
            (ParserState::InValue, c) => return self.take_value(c, arguments),
            (place, c) if c.is_whitespace() => place,
            (ParserState::Before, '{') => ParserState::FirstKey,
            (ParserState::FirstKey | ParserState::Key, '"') => {
                self.written.clear();
                self.value = ValueState::default();
                ParserState::InKey
            }
            (ParserState::FirstKey | ParserState::AfterValue, '}') => return self.end(arguments),
            (ParserState::Colon, ':') => ParserState::BeforeValue,
            (ParserState::BeforeValue, c) => {
                self.written.clear();
                self.value = ValueState::default();
                self.begin_value(c, arguments);
                self.place = ParserState::InValue;
                return self.take_value(c, arguments);
            }
            (ParserState::AfterValue, ',') => ParserState::Key,
            _ => return Progress::Broken,
        };
        Progress::All
    }

    /// The member that the key names. Only the first `arguments` counts.
    fn member(&self) -> Member {
        match self.written.as_str() {
            "name" if self.name.is_none() => Member::Name,
            "arguments" | "parameters" if !self.has_arguments => Member::Arguments,
            _ => Member::Other,
        }
    }

    fn begin_value(&mut self, c: char, arguments: &mut String) {
        if self.member == Member::Arguments {
            self.has_arguments = true;
            if c != '{' && c != '[' {
                self.member = Member::ArgumentsApart;
            }
            self.begin(arguments);
        }
    }

    /// It is a call once both name and arguments are there.
    fn begin(&mut self, arguments: &mut String) {
        if self.name.is_some() && self.has_arguments && !self.begun {
            self.begun = true;
            arguments.push_str(&std::mem::take(&mut self.early));
        }
    }

    fn take_value(&mut self, c: char, arguments: &mut String) -> Progress {
        let ends = self.value.push(c);
        if ends != ValueEnd::BeforeThis {
            match self.member {
                Member::Arguments if self.begun => arguments.push(c),
                Member::Arguments => self.early.push(c),
                Member::Name | Member::ArgumentsApart => self.written.push(c),
                Member::Other => {}
            }
        }
        if ends == ValueEnd::No {
            return Progress::All;
        }
        self.place = ParserState::AfterValue;
        let written: Result<String, _> = serde_json::from_str(&self.written);
        match (self.member, written) {
            (Member::Name, Ok(name)) => {
                self.name = Some(name);
                self.begin(arguments);
            }
            (Member::Name, Err(_)) => return Progress::Broken,
            (Member::ArgumentsApart, written) => {
                let text = written.unwrap_or_else(|_| std::mem::take(&mut self.written));
                // Clients expect JSON.
                let text = if matches!(text.trim(), "" | "null") { "{}" } else { &text };
                let to = if self.begun { &mut *arguments } else { &mut self.early };
                to.push_str(text);
            }
            _ => {}
        }
        if ends == ValueEnd::BeforeThis { self.take(c, arguments) } else { Progress::All }
    }

    fn take_alone(&mut self, c: char, arguments: &mut String) -> Progress {
        self.begun = true;
        let ends = self.value.push(c);
        if ends != ValueEnd::BeforeThis {
            arguments.push(c);
        }
        if ends == ValueEnd::No { Progress::All } else { Progress::Whole }
    }

    fn end(&mut self, arguments: &mut String) -> Progress {
        if self.name.is_none() || (self.needs_arguments && !self.has_arguments) {
            return Progress::Broken;
        }
        if !self.has_arguments {
            arguments.push_str("{}");
        }
        self.begun = true;
        Progress::Whole
    }
}

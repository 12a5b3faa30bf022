//! PURE: headers of messages: a role, a channel, the message's recipient, the type of its text.
//!
//! `assistant<|channel|>commentary to=functions.NAME <|constrain|>json`: the recipient may also
//! precede the channel, and the mark before the last word may be missing.

pub(super) const ANALYSIS: &str = "analysis";
const CHANNELS: [&str; 3] = [ANALYSIS, "commentary", "final"];
const ASSISTANT: &str = "assistant";
const ROLES: [&str; 5] = [ASSISTANT, "user", "system", "developer", "tool"];
/// The types of a message's text.
const KINDS: [&str; 4] = ["json", "code", "text", "python"];
const TO: &str = "to=";
const FUNCTIONS: &str = "functions.";
/// Recipients that are not functions: the tools that the model was trained with, and itself.
const INWARD: [&str; 4] = ["browser", "python", "container", ASSISTANT];
/// Recipients of an answer.
const OUTWARD: [&str; 2] = ["user", "all"];
/// Longest header, in bytes.
const HEAD_MAX: usize = 256;

/// A header, as far as it has been read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    /// The text before the channel.
    role: String,
    /// The text after the channel's mark.
    channel: Option<String>,
    /// The text after the mark of the type.
    kind: Option<String>,
}

/// The content of a header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) channel: Option<String>,
    recipient: Option<String>,
}

impl Address {
    /// The function that is called, if any. Models may omit the prefix `functions.`.
    pub(super) fn function(&self) -> Option<&str> {
        let recipient = self.recipient.as_deref()?;
        if let Some(name) = recipient.strip_prefix(FUNCTIONS) {
            return Some(name).filter(|name| !name.is_empty());
        }
        let first = recipient.split('.').next().unwrap_or_default();
        let is_none = INWARD.contains(&first) || OUTWARD.contains(&recipient);
        (!is_none && recipient != "functions").then_some(recipient)
    }

    /// Whether the recipient is neither a function nor the user.
    pub(super) fn is_inward(&self) -> bool {
        let recipient = self.recipient.as_deref();
        recipient.is_some_and(|it| self.function().is_none() && !OUTWARD.contains(&it))
    }
}

impl Header {
    /// A header that begins with its channel.
    pub(super) fn of_channel() -> Self {
        Self { channel: Some(String::new()), ..Self::default() }
    }

    /// A header that begins with its type.
    pub(super) fn of_kind() -> Self {
        Self { kind: Some(String::new()), ..Self::default() }
    }

    /// Takes text between marks; returns what exceeds a header's bound.
    pub(super) fn push<'a>(&mut self, text: &'a str) -> &'a str {
        let length = self.role.len()
            + self.channel.as_ref().map_or(0, String::len)
            + self.kind.as_ref().map_or(0, String::len);
        let (taken, rest) =
            text.split_at(text.floor_char_boundary(HEAD_MAX.saturating_sub(length)));
        let section = self.kind.as_mut().or(self.channel.as_mut()).unwrap_or(&mut self.role);
        section.push_str(taken);
        rest
    }

    pub(super) fn is_before_channel(&self) -> bool {
        self.channel.is_none() && self.kind.is_none()
    }

    pub(super) fn begin_channel(&mut self) {
        self.channel.get_or_insert_default();
    }

    pub(super) fn begin_kind(&mut self) {
        self.kind.get_or_insert_default();
    }

    /// Whether this must be text rather than a header, whatever follows.
    pub(super) fn is_text(&self) -> bool {
        self.is_before_channel() && !may_be_header(self.behind_role())
    }

    /// The text after the role, before the channel.
    fn behind_role(&self) -> &str {
        if let Some(rest) = self.role.strip_prefix(ASSISTANT) {
            return rest;
        }
        let end = self.role.find(char::is_whitespace).unwrap_or(self.role.len());
        &self.role[end..]
    }

    /// The channel and the recipient, as far as known.
    pub(super) fn address(&self) -> Address {
        let sections = [Some(&self.role), self.channel.as_ref(), self.kind.as_ref()];
        let mut words = sections.into_iter().flatten().flat_map(|it| it.split_whitespace());
        let recipient = words.find_map(|it| it.strip_prefix(TO)).filter(|it| !it.is_empty());
        let channel = match &self.channel {
            Some(section) => {
                let first = section.split_whitespace().next().filter(|it| !it.starts_with(TO));
                known(section.trim_start()).or(first)
            }
            None => self.behind_role().split_whitespace().find_map(known),
        };
        Address { channel: channel.map(str::to_owned), recipient: recipient.map(str::to_owned) }
    }

    /// What a header without an end says, and the part of it that is text. If nothing follows
    /// (`is_over`), incomplete words count as complete.
    pub(super) fn abandoned(self, is_over: bool) -> (Address, String) {
        let address = self.address();
        let rest = match (&self.kind, &self.channel) {
            (Some(kind), _) => without(kind, &KINDS, is_over),
            (None, Some(channel)) => {
                let rest = without(channel, &CHANNELS, is_over);
                let to = rest.trim_start();
                let rest = match to.strip_prefix(TO) {
                    Some(named) => named.find(char::is_whitespace).map_or("", |at| &named[at..]),
                    None if is_over && TO.starts_with(to) => "",
                    None => rest,
                };
                let is_call = address.recipient.is_some();
                if is_call { without(rest, &KINDS, is_over) } else { rest }
            }
            (None, None) => {
                let word = self.role.split_whitespace().next().unwrap_or_default();
                let is_role = ROLES.iter().any(|role| role.starts_with(word))
                    || word.starts_with(ASSISTANT)
                    || word.starts_with(FUNCTIONS)
                    || word.starts_with(TO);
                if is_over && is_role && may_be_header(self.behind_role()) {
                    return (address, String::new());
                }
                let is_assistant = self.role.starts_with(ASSISTANT);
                let text = if is_assistant { self.behind_role() } else { &self.role };
                return (Address::default(), text.to_owned());
            }
        };
        let rest = rest.to_owned();
        (address, rest)
    }
}

/// The channel name that a text begins with.
fn known(text: &str) -> Option<&str> {
    CHANNELS.iter().find(|name| text.starts_with(**name)).copied()
}

/// Removes from `text` a leading word that is one of `words`, with the white space before it. If
/// nothing follows (`is_over`), an incomplete word counts as complete.
fn without<'a>(text: &'a str, words: &[&str], is_over: bool) -> &'a str {
    let from = text.trim_start();
    let begins =
        |word: &&&str| from.get(..word.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(word));
    match words.iter().find(begins) {
        Some(word) => &from[word.len()..],
        None if is_over && words.iter().any(|word| word.starts_with(from)) => "",
        None => text,
    }
}

/// Whether the text after a role may be the rest of a header.
fn may_be_header(text: &str) -> bool {
    let is_open = !text.ends_with(char::is_whitespace);
    let mut words = text.split_whitespace().peekable();
    let (mut is_to, mut is_on, mut is_of) = (false, false, false);
    while let Some(word) = words.next() {
        let is_last = is_open && words.peek().is_none();
        let is = |known: &&str| *known == word || (is_last && known.starts_with(word));
        if !is_to && (word.starts_with(TO) || (is_last && TO.starts_with(word))) {
            is_to = true;
        } else if !is_on && CHANNELS.iter().any(&is) {
            is_on = true;
        } else if (is_to || is_on) && !is_of && KINDS.iter().any(&is) {
            is_of = true;
        } else {
            return false;
        }
    }
    true
}

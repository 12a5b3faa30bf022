//! The formats in which models write tool calls.

/// A tool call format, by the name of vLLM's parser for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Qwen 2.5 and 3, Hermes.
    Hermes,
    /// `{"name": .., "parameters": {..}}` as the whole reply, with `;` between several: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS]` and a list of `{"name": .., "arguments": {..}}`, or a name and its arguments:
    /// Mistral.
    Mistral,
    /// `<tool_call><function=..><parameter=..>..</parameter></function></tool_call>`: Qwen3-Coder.
    Qwen3Coder,
    /// A message to `functions.NAME`: gpt-oss ([`super::harmony`]).
    Harmony,
}

pub(super) const TOOL_CALL: &str = "<tool_call>";
pub(super) const TOOL_CALL_END: &str = "</tool_call>";
pub(super) const MISTRAL: &str = "[TOOL_CALLS]";
/// Longest name of a call with all marks around it, in bytes.
pub(super) const HEAD_MAX: usize = 256;
pub(super) const ARGUMENTS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

impl CallFormat {
    /// All formats.
    pub const ALL: [Self; 5] =
        [Self::Hermes, Self::Llama3Json, Self::Mistral, Self::Qwen3Coder, Self::Harmony];

    /// The name of vLLM's parser.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Harmony => "openai",
        }
    }

    /// The format that a chat template teaches, as far as its text reveals.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        // What each template tells its model to write, the more specific first.
        let marks = [
            ("<|channel|>final<|message|>", Self::Harmony),
            ("<function=", Self::Qwen3Coder),
            (TOOL_CALL, Self::Hermes),
            (MISTRAL, Self::Mistral),
            ("\"parameters\": dictionary of argument name and its value", Self::Llama3Json),
        ];
        marks.iter().find(|(mark, _)| source.contains(mark)).map(|(_, format)| *format)
    }

    /// The marks that open a call; none where a call is the whole reply.
    pub(super) fn openings(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[TOOL_CALL],
            Self::Llama3Json | Self::Harmony => &[],
            Self::Mistral => &[MISTRAL],
            // The model sometimes forgets the first.
            Self::Qwen3Coder => &[TOOL_CALL, super::xml::FUNCTION],
        }
    }

    /// The marks of the format, for which some vocabularies have special tokens.
    pub(super) fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[TOOL_CALL, TOOL_CALL_END],
            Self::Llama3Json | Self::Harmony => &[],
            Self::Mistral => &[MISTRAL, ARGUMENTS],
            Self::Qwen3Coder => &[TOOL_CALL, TOOL_CALL_END, super::xml::FUNCTION],
        }
    }
}

/// Whether the text begins with a mark rather than with a list.
pub(super) fn is_mark(text: &str) -> bool {
    [ARGUMENTS, CALL_ID].iter().any(|mark| text.starts_with(mark))
}

/// Whether the text may become a mark.
pub(super) fn may_become_mark(text: &str) -> bool {
    [ARGUMENTS, CALL_ID].iter().any(|mark| mark.starts_with(text) && *mark != text)
}

/// A call's name, without the marks between it and its arguments.
pub(super) fn without_marks(text: &str) -> String {
    let end = [ARGUMENTS, CALL_ID].iter().filter_map(|mark| text.find(mark)).min();
    text[..end.unwrap_or(text.len())].trim().to_owned()
}

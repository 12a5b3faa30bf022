//! What is looked for in a reply, and the parts that are found.
use super::format::CallFormat;
use super::harmony::{self, Harmony};
use super::xml::Parameters;
use super::{THINK, THINK_END};

/// The next part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A call begins.
    Call {
        /// Index of the call in the reply, from 0.
        index: u32,
        /// The function's name.
        name: String,
    },
    /// More of a call's arguments: together a JSON object, if the model wrote one.
    Arguments {
        /// Index of the call in the reply.
        index: u32,
        /// The text to append.
        text: String,
    },
    /// The end of a message; reasoning or an answer that follows is another message.
    End,
}

/// What is looked for in a reply.
#[derive(Clone, Debug, Default)]
pub struct ReplyRules {
    /// Text between `<think>` and `</think>` is reasoning.
    pub reasoning: bool,
    /// The prompt ends within reasoning, which its template has opened.
    pub begins_reasoning: bool,
    /// The format of tool calls; with `None`, none are looked for.
    pub calls: Option<CallFormat>,
    /// Drop all calls but the first.
    pub single_call: bool,
    /// The model can only write calls: text that is no call is a truncated one.
    pub only_calls: bool,
    /// The types of the functions' parameters, for the format whose values are untyped.
    pub parameters: Parameters,
    /// The reply is in harmony format, whatever is looked for in it.
    pub harmony: Option<Harmony>,
}

impl ReplyRules {
    /// Whether anything is looked for.
    #[must_use]
    pub fn reads(&self) -> bool {
        self.reasoning || self.calls.is_some() || self.harmony.is_some()
    }

    /// The marks to look for in the text.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> {
        let harmony: &[&str] = if self.harmony.is_some() { &harmony::MARKS } else { &[] };
        let thought: &[&str] = if self.reasoning { &[THINK, THINK_END] } else { &[] };
        let calls = self.calls.into_iter().flat_map(CallFormat::marks);
        thought.iter().chain(harmony).copied().chain(calls)
    }
}

/// How a model's reasoning is told apart from its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reasoning {
    /// Not at all.
    #[default]
    Untold,
    /// Reasoning is between `<think>` and `</think>`; the prompt may have opened it.
    Marked,
    /// Reasoning is everything before `</think>`, opened or not, unless the prompt ends with that
    /// mark: DeepSeek R1 models are trained to reason first.
    First,
    /// The reply is in harmony format, whose messages have channels.
    Harmony,
}

impl Reasoning {
    /// Whether text that continues this prompt's last message continues its reasoning.
    #[must_use]
    pub fn goes_on_in(self, prompt: &str) -> bool {
        matches!(self, Self::Marked | Self::First)
            && prompt.rfind(THINK).is_some_and(|at| !prompt[at..].contains(THINK_END))
    }

    /// Whether a reply to this prompt begins with reasoning.
    #[must_use]
    pub fn begins_after(self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        match self {
            Self::Untold | Self::Harmony => false,
            Self::Marked => prompt.ends_with(THINK),
            Self::First => !prompt.ends_with(THINK_END),
        }
    }
}

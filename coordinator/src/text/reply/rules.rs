//! What is looked for in a reply, and what is found.
use super::format::CallFormat;
use super::harmony::{self, Harmony};
use super::xml::Parameters;
use super::{THINK, THINK_END};

/// What the text said next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Of the reasoning.
    Reasoning(String),
    /// Of the answer.
    Content(String),
    /// A call begins.
    Call {
        /// Which call of the reply; the first has the index 0.
        index: u32,
        /// The function.
        name: String,
    },
    /// More of a call's arguments: all together a JSON object, if the model wrote one.
    Arguments {
        /// Which call of the reply.
        index: u32,
        /// More of it.
        text: String,
    },
    /// A message of the reply is over; reasoning or an answer that follows is another one.
    End,
}

/// What is looked for in a reply.
#[derive(Clone, Debug, Default)]
pub struct ReplyRules {
    /// `<think>` .. `</think>` is reasoning.
    pub reasoning: bool,
    /// The prompt ends within the reasoning: the template has opened it.
    pub begins_reasoning: bool,
    /// How calls are written; none are looked for otherwise.
    pub calls: Option<CallFormat>,
    /// All calls but the first are left out.
    pub single_call: bool,
    /// The model can write nothing else: what is no call is one that was cut short.
    pub only_calls: bool,
    /// The functions' parameters, for the format whose values have no types of their own.
    pub parameters: Parameters,
    /// The reply is messages of harmony, whatever is looked for in them.
    pub harmony: Option<Harmony>,
}

impl ReplyRules {
    /// Whether anything is looked for.
    #[must_use]
    pub fn reads(&self) -> bool {
        self.reasoning || self.calls.is_some() || self.harmony.is_some()
    }

    /// What is looked for in the text.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> {
        let harmony: &[&str] = if self.harmony.is_some() { &harmony::MARKS } else { &[] };
        let thought: &[&str] = if self.reasoning { &[THINK, THINK_END] } else { &[] };
        let calls = self.calls.map_or(&[][..], CallFormat::marks);
        thought.iter().chain(calls).chain(harmony).copied()
    }
}

/// How a model's reasoning is told from its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reasoning {
    /// It is not.
    #[default]
    Untold,
    /// It is what stands between `<think>` and `</think>`; the prompt may have opened it.
    Marked,
    /// It is what comes before `</think>`, whether or not it was opened, unless the prompt ends with
    /// that: models of DeepSeek's R1 are trained to reason first.
    First,
    /// The reply is messages of harmony, which have channels.
    Harmony,
}

impl Reasoning {
    /// Whether what goes on with this prompt's last message does so within its reasoning.
    #[must_use]
    pub fn goes_on_in(self, prompt: &str) -> bool {
        matches!(self, Self::Marked | Self::First)
            && prompt.rfind(THINK).is_some_and(|at| !prompt[at..].contains(THINK_END))
    }

    /// Whether a reply to this prompt begins within the reasoning.
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

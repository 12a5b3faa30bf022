//! What is looked for in a reply, and the parts that are found.
use super::format::CallFormat;
use super::harmony::{self, Harmony};
use super::xml::Parameters;

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
    /// Text between these marks is reasoning.
    pub reasoning: Option<ThinkMarks>,
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
        self.reasoning.is_some() || self.calls.is_some() || self.harmony.is_some()
    }

    /// The marks of calls that end reasoning which is open.
    #[must_use]
    pub fn calls_that_end_reasoning(&self) -> &'static [&'static str] {
        self.calls.map_or(&[], CallFormat::ends_of_reasoning)
    }

    /// The marks to look for in the text.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> {
        let harmony: &[&str] = if self.harmony.is_some() { &harmony::MARKS } else { &[] };
        let thought = self.reasoning.into_iter().flat_map(|marks| {
            [marks.open, marks.close].into_iter().chain(marks.answer.into_iter().flatten())
        });
        let calls = self.calls.into_iter().flat_map(CallFormat::marks);
        thought.chain(harmony.iter().copied()).chain(calls)
    }
}

/// The marks around a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkMarks {
    /// Before it.
    pub open: &'static str,
    /// Behind it.
    pub close: &'static str,
    /// Around the answer behind it, where the model writes such marks.
    pub answer: Option<[&'static str; 2]>,
}

impl ThinkMarks {
    /// Those of most models.
    pub const THINK: Self = Self { open: "<think>", close: "</think>", answer: None };
    /// Those of Magistral.
    pub const MISTRAL: Self = Self { open: "[THINK]", close: "[/THINK]", answer: None };
    /// Those of Seed-OSS.
    pub const SEED: Self = Self { open: "<seed:think>", close: "</seed:think>", answer: None };
    /// Those of ERNIE 4.5's thinking models.
    pub const ERNIE: Self = Self { answer: Some(["<response>", "</response>"]), ..Self::THINK };
}

impl Default for ThinkMarks {
    fn default() -> Self {
        Self::THINK
    }
}

/// How a model's reasoning is told apart from its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reasoning {
    /// Not at all.
    #[default]
    Untold,
    /// Reasoning is between these marks; the prompt may have opened it.
    Marked(ThinkMarks),
    /// Reasoning is everything before the second mark, opened or not, unless the prompt ends with
    /// that: DeepSeek R1 models are trained to reason first.
    First(ThinkMarks),
    /// The reply is in harmony format, whose messages have channels.
    Harmony,
}

impl Reasoning {
    /// What one of vLLM's parsers does, by its name, or `think`.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Some(match name {
            "think" | "qwen3" | "deepseek_v3" | "glm45" | "kimi_k2" | "minimax_m2" | "olmo3" => {
                Self::Marked(ThinkMarks::THINK)
            }
            "mistral" => Self::Marked(ThinkMarks::MISTRAL),
            "seed_oss" => Self::Marked(ThinkMarks::SEED),
            "deepseek_r1" | "step3" => Self::First(ThinkMarks::THINK),
            "ernie45" => Self::First(ThinkMarks::ERNIE),
            "openai_gptoss" => Self::Harmony,
            _ => return None,
        })
    }

    /// The marks around reasoning, if there are any.
    #[must_use]
    pub fn marks(self) -> Option<ThinkMarks> {
        match self {
            Self::Untold | Self::Harmony => None,
            Self::Marked(marks) | Self::First(marks) => Some(marks),
        }
    }

    /// Whether text that continues this prompt's last message continues its reasoning.
    #[must_use]
    pub fn goes_on_in(self, prompt: &str) -> bool {
        self.marks().is_some_and(|marks| {
            prompt.rfind(marks.open).is_some_and(|at| !prompt[at..].contains(marks.close))
        })
    }

    /// Whether a reply to this prompt begins with reasoning.
    #[must_use]
    pub fn begins_after(self, prompt: &str) -> bool {
        let prompt = prompt.trim_end();
        match self {
            Self::Untold | Self::Harmony => false,
            Self::Marked(marks) => {
                // Seed-OSS that has no budget for reasoning says so as reasoning.
                let prompt = prompt.strip_suffix("<seed:cot_budget_reflect>").unwrap_or(prompt);
                prompt.trim_end().ends_with(marks.open)
            }
            Self::First(marks) => !prompt.ends_with(marks.close),
        }
    }
}

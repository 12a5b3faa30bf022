//! The formats in which models write tool calls.
use super::headed::{self, HeadMarks};
use super::xml::{self, Notation};

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
    /// As Qwen3-Coder, between `<seed:tool_call>` and its end: Seed-OSS.
    SeedOss,
    /// `<tool_call>f<arg_key>..</arg_key><arg_value>..</arg_value></tool_call>`: GLM-4.5 to 4.7.
    Glm45,
    /// `<minimax:tool_call><invoke name=".."><parameter name="..">..</parameter></invoke>`:
    /// MiniMax-M2.
    MinimaxM2,
    /// `name<｜tool▁sep｜>` and its arguments in a Markdown fence: DeepSeek V3 and R1.
    DeepseekV3,
    /// `name<｜tool▁sep｜>{..}`: DeepSeek V3.1.
    DeepseekV31,
    /// `<｜DSML｜function_calls><｜DSML｜invoke name=".."><｜DSML｜parameter name=".." string="true">`:
    /// DeepSeek V3.2.
    DeepseekV32,
    /// `functions.name:0<|tool_call_argument_begin|>{..}`: Kimi K2.
    KimiK2,
    /// `<|tool_call|>` and a list of `{"name": .., "arguments": {..}}`: Granite 3.
    Granite,
    /// `functools` and a list of `{"name": .., "arguments": {..}}`: Phi-4-mini.
    Phi4MiniJson,
    /// `<|action_start|><|plugin|>{"name": .., "parameters": {..}}<|action_end|>`: InternLM.
    Internlm,
    /// `[f(a=1), g(b="x")]` as the whole reply or between marks: Llama 3.2 and 4, OLMo 3.
    Pythonic,
    /// A message to `functions.NAME`: gpt-oss ([`super::harmony`]).
    Harmony,
}

/// What follows the mark that opens calls.
#[derive(Clone, Copy, Debug)]
pub(super) enum Syntax {
    /// A JSON object.
    Object,
    /// A list of JSON objects, or one.
    List,
    /// Such a list, or names that are followed by their arguments.
    Mistral,
    /// Names between marks, followed by their arguments.
    Headed(&'static HeadMarks),
    /// Elements.
    Elements(&'static Notation),
    /// Calls as Python writes them.
    Python,
}

pub(super) const TOOL_CALL: &str = "<tool_call>";
pub(super) const TOOL_CALL_END: &str = "</tool_call>";
pub(super) const MISTRAL: &str = "[TOOL_CALLS]";
pub(super) const ARGUMENTS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const GRANITE: &str = "<|tool_call|>";
/// The list that follows is part of the mark, since the word alone is a word.
pub(super) const FUNCTOOLS: &str = "functools[";
const PHI_END: &str = "<|/tool_call|>";
pub(super) const ACTION: &str = "<|action_start|><|plugin|>";
pub(super) const ACTION_END: &str = "<|action_end|>";
const PYTHON: &str = "<|python_start|>";
const PYTHON_END: &str = "<|python_end|>";
/// Names of vLLM's parsers that read the same text as another, or text that is read like it here.
const ALIASES: [(&str, &str); 6] = [
    ("llama4_json", "llama3_json"),
    ("qwen3_xml", "qwen3_coder"),
    ("glm47", "glm45"),
    ("ernie45", "hermes"),
    ("llama4_pythonic", "pythonic"),
    ("olmo3", "pythonic"),
];
const FUNCTION_CALLS: &str = "<function_calls>";
const FUNCTION_CALLS_END: &str = "</function_calls>";

impl CallFormat {
    /// All formats.
    pub const ALL: [Self; 16] = [
        Self::Hermes,
        Self::Llama3Json,
        Self::Mistral,
        Self::Qwen3Coder,
        Self::SeedOss,
        Self::Glm45,
        Self::MinimaxM2,
        Self::DeepseekV3,
        Self::DeepseekV31,
        Self::DeepseekV32,
        Self::KimiK2,
        Self::Granite,
        Self::Phi4MiniJson,
        Self::Internlm,
        Self::Pythonic,
        Self::Harmony,
    ];

    /// The name of vLLM's parser.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::Qwen3Coder => "qwen3_coder",
            Self::SeedOss => "seed_oss",
            Self::Glm45 => "glm45",
            Self::MinimaxM2 => "minimax_m2",
            Self::DeepseekV3 => "deepseek_v3",
            Self::DeepseekV31 => "deepseek_v31",
            Self::DeepseekV32 => "deepseek_v32",
            Self::KimiK2 => "kimi_k2",
            Self::Granite => "granite",
            Self::Phi4MiniJson => "phi4_mini_json",
            Self::Internlm => "internlm",
            Self::Pythonic => "pythonic",
            Self::Harmony => "openai",
        }
    }

    /// The format that a name of one of vLLM's parsers stands for.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let alias = ALIASES.iter().find(|(alias, _)| *alias == name);
        let name = alias.map_or(name, |(_, name)| name);
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// All names that [`CallFormat::of_name`] knows, those for one format beside each other.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().map(Self::name).flat_map(|name| {
            let others = ALIASES.iter().filter(move |(_, of)| *of == name);
            std::iter::once(name).chain(others.map(|(alias, _)| *alias))
        })
    }

    /// The format that a chat template teaches, as far as its text reveals.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        // What each template tells its model to write, the more specific first.
        let marks = [
            ("<|channel|>final<|message|>", Self::Harmony),
            ("<seed:tool_call>", Self::SeedOss),
            ("<minimax:tool_call>", Self::MinimaxM2),
            ("<arg_key>", Self::Glm45),
            (headed::CALLS, Self::DeepseekV31),
            (xml::DSML, Self::DeepseekV32),
            (headed::KIMI.calls[0], Self::KimiK2),
            (ACTION, Self::Internlm),
            ("<function=", Self::Qwen3Coder),
            // Some of its templates show Granite's mark, too.
            ("<|tool|>", Self::Phi4MiniJson),
            (GRANITE, Self::Granite),
            (FUNCTION_CALLS, Self::Pythonic),
            ("[func_name1(", Self::Pythonic),
            (TOOL_CALL, Self::Hermes),
            (MISTRAL, Self::Mistral),
            ("\"parameters\": dictionary of argument name and its value", Self::Llama3Json),
        ];
        let found = marks.iter().find(|(mark, _)| source.contains(mark)).map(|(_, format)| *format);
        match found {
            Some(Self::DeepseekV31) if source.contains(headed::FENCE) => Some(Self::DeepseekV3),
            // Granite 3.1 shows this mark, but has its model write a list.
            Some(Self::Hermes) if source.contains("followed by a JSON list of tools") => {
                Some(Self::Granite)
            }
            found => found,
        }
    }

    pub(super) fn syntax(self) -> Syntax {
        match self {
            Self::Hermes | Self::Llama3Json | Self::Internlm | Self::Harmony => Syntax::Object,
            Self::Granite | Self::Phi4MiniJson => Syntax::List,
            Self::Mistral => Syntax::Mistral,
            Self::DeepseekV3 | Self::DeepseekV31 => Syntax::Headed(&headed::DEEPSEEK),
            Self::KimiK2 => Syntax::Headed(&headed::KIMI),
            Self::DeepseekV32 => Syntax::Elements(&xml::DEEPSEEK),
            Self::Qwen3Coder => Syntax::Elements(&xml::QWEN),
            Self::SeedOss => Syntax::Elements(&xml::SEED),
            Self::Glm45 => Syntax::Elements(&xml::GLM),
            Self::MinimaxM2 => Syntax::Elements(&xml::MINIMAX),
            Self::Pythonic => Syntax::Python,
        }
    }

    /// Whether the values of a call's parameters are text, whose type the function's schema tells.
    #[must_use]
    pub fn is_untyped(self) -> bool {
        matches!(self.syntax(), Syntax::Elements(_))
    }

    /// The format of calls that must be made: one that a grammar can hold the model to.
    #[must_use]
    pub fn forced(self) -> Self {
        match self {
            format if format.is_untyped() => Self::Hermes,
            // Also written by Llama, the best known of its models.
            Self::Pythonic => Self::Llama3Json,
            format => format,
        }
    }

    /// The marks that open a call; none where a call is the whole reply.
    pub(super) fn openings(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[TOOL_CALL],
            Self::Llama3Json | Self::Harmony => &[],
            Self::Mistral => &[MISTRAL],
            // Models sometimes forget the first.
            Self::Qwen3Coder => &[TOOL_CALL, xml::FUNCTION],
            Self::SeedOss => &[xml::SEED_CALL, xml::FUNCTION],
            Self::MinimaxM2 => &[xml::MINIMAX_CALL],
            Self::DeepseekV3 | Self::DeepseekV31 => &[headed::CALLS, headed::CALL],
            Self::DeepseekV32 => &[xml::DEEPSEEK_CALL],
            Self::KimiK2 => &headed::KIMI_OPENINGS,
            Self::Glm45 => &[TOOL_CALL],
            Self::Granite => &[GRANITE, TOOL_CALL],
            Self::Phi4MiniJson => &[FUNCTOOLS, GRANITE],
            Self::Internlm => &[ACTION],
            Self::Pythonic => &[PYTHON, FUNCTION_CALLS],
        }
    }

    /// The marks of calls that models begin without ending their reasoning: tokens that stand for
    /// nothing else.
    pub(super) fn ends_of_reasoning(self) -> &'static [&'static str] {
        match self {
            Self::KimiK2 => headed::KIMI.calls,
            _ => &[],
        }
    }

    /// Bytes at the end of an opening mark that are part of the call itself.
    pub(super) fn own(opening: &str) -> usize {
        match opening {
            xml::FUNCTION => opening.len(),
            FUNCTOOLS => 1,
            _ => 0,
        }
    }

    /// The marks that may follow a call, in this order, each at most once.
    pub(super) fn closings(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder | Self::Granite => &[TOOL_CALL_END],
            // The end of a call of GLM is the end of its element.
            Self::Llama3Json | Self::Mistral | Self::Glm45 | Self::Harmony => &[],
            Self::SeedOss => &[xml::SEED_CALL_END],
            Self::MinimaxM2 => &[xml::MINIMAX_CALL_END],
            Self::DeepseekV3 | Self::DeepseekV31 => {
                &[headed::FENCE_END, headed::CALL_END, headed::CALLS_END]
            }
            Self::DeepseekV32 => &[xml::DEEPSEEK_CALL_END],
            Self::KimiK2 => &headed::KIMI_CLOSINGS,
            Self::Phi4MiniJson => &[PHI_END],
            Self::Internlm => &[ACTION_END],
            Self::Pythonic => &[PYTHON_END, FUNCTION_CALLS_END],
        }
    }

    /// The marks of the format, for which some vocabularies have special tokens.
    pub(super) fn marks(self) -> impl Iterator<Item = &'static str> {
        // Special tokens that are only part of a mark, or stand between others.
        let more: &[&str] = match self {
            Self::Mistral => &[ARGUMENTS],
            Self::Glm45 => &xml::GLM_MARKS,
            Self::DeepseekV3 | Self::DeepseekV31 => &[headed::SEPARATOR],
            Self::DeepseekV32 => &[xml::DSML],
            Self::KimiK2 => &[headed::KIMI.separator],
            Self::Internlm => &["<|action_start|>", "<|plugin|>"],
            _ => &[],
        };
        self.openings().iter().chain(self.closings()).chain(more).copied()
    }
}

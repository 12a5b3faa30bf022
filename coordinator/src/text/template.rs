//! Conversations to prompts, by the model's own Jinja chat template, in a sandbox: no files, no
//! includes, bounded steps and output. Beyond Jinja, templates may use what transformers provides.
//!
//! - [`harmony`]: conversations as harmony templates expect them
//! - `instructions`: conversations as templates expect them that take one system message
//! - `json`: the filter `tojson`
//! - [`kimi`]: conversations as Kimi's templates expect them
pub mod harmony;
mod instructions;
mod json;
pub mod kimi;

use std::error::Error as _;
use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, json};

use super::date;
use super::reply::CallFormat;

/// Maximum number of steps of a template, half a second of them. Most templates take about a
/// hundred for each message. That of gpt-oss looks behind each call of a tool whether an answer
/// follows, so twice the messages take four times the steps: this is enough for about 2,000.
const FUEL: u64 = 20_000_000;
/// Longest prompt, in bytes: a million tokens take a quarter of it.
const OUTPUT_MAX: usize = 16 << 20;

/// The input of a template.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The messages: objects with a `role`, most with a `content`.
    pub messages: Vec<serde_json::Value>,
    /// Definitions of the functions that the model may call.
    pub tools: Option<serde_json::Value>,
    /// Documents for the model (RAG).
    pub documents: Option<serde_json::Value>,
    /// End the prompt where the assistant speaks next.
    pub add_generation_prompt: bool,
    /// End the prompt within the last message, for the model to continue it.
    pub continue_final_message: bool,
    /// The client's template variables.
    pub variables: Map<String, serde_json::Value>,
}

impl Conversation {
    /// A conversation in which the assistant speaks next.
    #[must_use]
    pub fn new(messages: Vec<serde_json::Value>) -> Self {
        Self {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            variables: Map::new(),
        }
    }
}

/// Variables that every template gets, or that have a meaning in transformers; clients cannot set
/// them.
pub const RESERVED: [&str; 9] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "bos_token",
    "eos_token",
];

/// Why a conversation cannot be rendered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenderError {
    /// The template rejects the conversation.
    Conversation(String),
    /// The prompt, or the steps to it, exceed a bound.
    TooLong(String),
    /// The template itself is at fault.
    Template(String),
}

impl fmt::Display for RenderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conversation(message) | Self::TooLong(message) | Self::Template(message) => {
                f.write_str(message)
            }
        }
    }
}

/// The argument of `raise_exception`: as the source of the resulting error, it distinguishes that
/// from faults of the template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
    calls: Option<CallFormat>,
    /// There is a separate template for conversations with tools.
    has_tool_use: bool,
    /// It asks whether a message's content is null, as that of calls is in OpenAI's API.
    asks_for_null: bool,
    /// Variables that a conversation does not set.
    variables: Map<String, serde_json::Value>,
}

/// The template's name in its environment.
const NAME: &str = "chat_template";
/// The name of the template for conversations with tools, in its environment and in model folders.
pub const TOOL_USE: &str = "tool_use";
/// Marks the end of the message to be continued. No keyboard types it, and its last character, a
/// space, reveals whether the template trims.
const END_MARK: &str = "\u{f8ff}\u{e000}\u{f8ff} ";

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// The template's error, with its line.
    pub fn new(source: &str, bos_token: String, eos_token: String) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(64);
        // As transformers sets them.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| describe(&error))?);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, message.clone());
            Err(error.with_source(RaisedException(message)))
        });
        environment.add_function("strftime_now", date::strftime_now);
        environment.add_filter("tojson", json::tojson);
        environment
            .add_template_owned(NAME, without_generation_blocks(source))
            .map_err(|error| describe(&error))?;
        let mut template = Self {
            environment,
            bos_token,
            eos_token,
            calls: CallFormat::of_template(source),
            has_tool_use: false,
            asks_for_null: json::asks_for_null(source),
            variables: Map::new(),
        };
        // A template may show how earlier calls are written, but not tell the model about tools.
        if !template.knows("tools", true) {
            template.calls = None;
        }
        Ok(template)
    }

    /// Adds a separate template for conversations with tools.
    ///
    /// # Errors
    /// The template's error, with its line.
    pub fn with_tool_use(mut self, source: &str) -> Result<Self, String> {
        let source_without = without_generation_blocks(source);
        let added = self.environment.add_template_owned(TOOL_USE, source_without);
        added.map_err(|error| format!("{TOOL_USE}: {}", describe(&error)))?;
        self.calls = CallFormat::of_template(source).or(self.calls);
        self.has_tool_use = true;
        self.asks_for_null |= json::asks_for_null(source);
        Ok(self)
    }

    /// Sets variables for conversations that do not set them.
    #[must_use]
    pub fn with_variables(self, variables: Map<String, serde_json::Value>) -> Self {
        Self { variables, ..self }
    }

    /// The name of the template for conversations with or without tools.
    fn name(&self, has_tools: bool) -> &'static str {
        if has_tools && self.has_tool_use { TOOL_USE } else { NAME }
    }

    /// The format of tool calls that it teaches the model, as far as its text reveals.
    #[must_use]
    pub fn calls(&self) -> Option<CallFormat> {
        self.calls
    }

    /// Whether the template for conversations with or without tools reads the variable `variable`.
    #[must_use]
    pub fn knows(&self, variable: &str, has_tools: bool) -> bool {
        let template = self.environment.get_template(self.name(has_tools));
        template.is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    /// Renders a simple conversation, to find errors before the first request.
    ///
    /// # Errors
    /// Like [`ChatTemplate::render`].
    pub fn probe(&self) -> Result<(), RenderError> {
        let messages = vec![json!({"role": "user", "content": "Hello"})];
        self.render(&Conversation::new(messages)).map(drop)
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// [`RenderError`].
    pub fn render(&self, conversation: &Conversation) -> Result<String, RenderError> {
        let rendered = self.render_messages(conversation, json!(conversation.messages));
        match &rendered {
            // Templates that join a call's arguments to text, as DeepSeek's do, want them as text.
            Err(RenderError::Template(_)) => {
                let mut messages = json!(conversation.messages);
                if !json::write_arguments(&mut messages) {
                    return rendered;
                }
                self.render_messages(conversation, messages).or(rendered)
            }
            // Some, as Qwen3.5's, refuse system messages that are not the first.
            Err(RenderError::Conversation(_)) => {
                match instructions::first(&conversation.messages) {
                    Some(messages) => {
                        self.render_messages(conversation, json!(messages)).or(rendered)
                    }
                    None => rendered,
                }
            }
            _ => rendered,
        }
    }

    fn render_messages(
        &self,
        conversation: &Conversation,
        mut messages: serde_json::Value,
    ) -> Result<String, RenderError> {
        let failed = |error: Error| {
            let mut source = error.source();
            let mut raised = false;
            while let Some(error) = source {
                raised |= error.is::<RaisedException>();
                source = error.source();
            }
            match error.kind() {
                ErrorKind::OutOfFuel => RenderError::TooLong(format!(
                    "the conversation is too long for the {}",
                    describe(&error)
                )),
                _ if raised => RenderError::Conversation(describe(&error)),
                _ => RenderError::Template(describe(&error)),
            }
        };
        let name = self.name(conversation.tools.is_some());
        let template = self.environment.get_template(name).map_err(failed)?;
        let mut variables = self.variables.clone();
        variables.extend(conversation.variables.clone());
        if conversation.continue_final_message {
            mark_end(&mut messages)?;
        }
        if self.asks_for_null {
            json::null_contents_of_calls(&mut messages);
        }
        for (name, value) in [
            ("messages", messages),
            ("tools", json!(conversation.tools)),
            ("documents", json!(conversation.documents)),
            ("add_generation_prompt", json!(conversation.add_generation_prompt)),
            ("bos_token", json!(self.bos_token)),
            ("eos_token", json!(self.eos_token)),
        ] {
            variables.insert(name.to_owned(), value);
        }
        let text = template.render(Serde(variables)).map_err(failed)?;
        if text.len() > OUTPUT_MAX {
            return Err(RenderError::TooLong(format!(
                "the prompt has {} bytes, the limit is {OUTPUT_MAX}",
                text.len()
            )));
        }
        if conversation.continue_final_message {
            return open_ended(text);
        }
        Ok(text)
    }
}

/// Marks where the last message's content ends, since the same text may also occur elsewhere in the
/// prompt.
fn mark_end(messages: &mut serde_json::Value) -> Result<(), RenderError> {
    let content = messages.as_array_mut().and_then(|list| list.last_mut()?.get_mut("content"));
    if let Some(serde_json::Value::String(content)) = content
        && !content.trim().is_empty()
    {
        content.push_str(END_MARK);
        return Ok(());
    }
    let message = "`continue_final_message`: the last message's content is empty";
    Err(RenderError::Conversation(message.to_owned()))
}

/// Cuts the prompt where its last message's content ends, as transformers does.
fn open_ended(mut text: String) -> Result<String, RenderError> {
    let Some(at) = text.rfind(END_MARK.trim_end()) else {
        let message = "`continue_final_message`: the chat template leaves out the last message's \
                       content";
        return Err(RenderError::Conversation(message.to_owned()));
    };
    // Unless the template trims, the content ends with the white space that the client wrote.
    let trims = !text[at..].starts_with(END_MARK);
    text.truncate(at);
    if trims {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

/// Replaces `{% generation %}` blocks, which mark what counts in training, by blocks that are
/// always rendered, keeping the white space control of the source.
fn without_generation_blocks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        text.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inner = &tag[2..tag.len() - 2];
        let word = inner.trim_matches(['-', '+']).trim();
        match word {
            "generation" => text.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => text.push_str(&tag.replace("endgeneration", "endif")),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text.push_str(rest);
    text
}

fn describe(error: &Error) -> String {
    match error.line() {
        Some(line) => format!("chat template, line {line}: {error}"),
        None => format!("chat template: {error}"),
    }
}

#[cfg(test)]
mod tests;

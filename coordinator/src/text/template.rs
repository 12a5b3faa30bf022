//! Chat messages to a prompt, by the model's own Jinja template, in a sandbox: no files, no
//! includes, bounded steps and output.
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;

/// Steps a template may take; a long conversation takes some thousands.
const FUEL: u64 = 1_000_000;
/// Longest prompt text.
const OUTPUT_MAX: usize = 4 << 20;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// system, user, assistant or tool.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

/// The template's name in its environment.
const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// The template's mistake, with its line.
    pub fn new(source: String, bos_token: String, eos_token: String) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(64);
        // As transformers sets them.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| describe(&error))?);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source).map_err(|error| describe(&error))?;
        Ok(Self { environment, bos_token, eos_token })
    }

    /// Renders a conversation up to where the assistant speaks next.
    ///
    /// # Errors
    /// What the template objects to.
    pub fn render(&self, messages: &[Message]) -> Result<String, String> {
        let template = self.environment.get_template(NAME).map_err(|error| describe(&error))?;
        let context = context! {
            messages => Serde(messages),
            add_generation_prompt => true,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
        };
        let text = template.render(context).map_err(|error| describe(&error))?;
        if text.len() > OUTPUT_MAX {
            return Err(format!("the prompt has {} bytes, the bound is {OUTPUT_MAX}", text.len()));
        }
        Ok(text)
    }
}

fn describe(error: &Error) -> String {
    match error.line() {
        Some(line) => format!("chat template, line {line}: {error}"),
        None => format!("chat template: {error}"),
    }
}

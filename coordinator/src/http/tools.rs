//! Tools: which the model is told of, whether it may or must call them, and how its calls are told
//! from its text.
use serde_json::Value;
use shared::protocol::GuideSpec;

use super::conversation::objects;
use super::error::ApiError;
use super::fields::Fields;
use super::params::Limits;
use super::structured::{self, Asked};
use crate::text::reply::grammar::{self, Function, Special};
use crate::text::reply::{CallFormat, Parameters, ReplyRules};

/// Whether tools are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// They are not: what looks like a call is text.
    None,
    /// The model decides.
    Auto,
    /// One at least.
    Required,
    /// This one.
    Function(String),
}

/// What a request says of tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tools {
    list: Option<Value>,
    choice: ToolChoice,
    /// One call at most.
    single: bool,
}

impl Tools {
    /// Reads the fields.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn read(fields: &Fields, limits: &Limits) -> Result<Self, ApiError> {
        let list = told(fields, limits)?;
        let choice = choice(fields, list.as_ref())?;
        let single = !fields.boolean("parallel_tool_calls", true)?;
        Ok(Self { list, choice, single })
    }

    /// What the template is told.
    #[must_use]
    pub fn told(&self) -> Option<&Value> {
        self.list.as_ref()
    }

    /// Whether a choice that ends with calls says so; not where that was the client's choice.
    #[must_use]
    pub fn finish_with_calls(&self) -> bool {
        matches!(self.choice, ToolChoice::Auto | ToolChoice::Required)
    }

    /// What the reply must be: calls where they must be made, whatever else was asked for, and what
    /// was asked for or calls where the model decides. It is made a grammar once it is known where the
    /// prompt ends.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn wanted(
        &self,
        fields: &Fields,
        asked: Option<Asked>,
        format: Option<CallFormat>,
        special: Special<'_>,
    ) -> Result<Option<Wanted>, ApiError> {
        let (functions, several) = match (&self.choice, &asked) {
            (ToolChoice::None, _) | (ToolChoice::Auto, None) => {
                return asked.map(Wanted::answer).transpose();
            }
            (ToolChoice::Auto | ToolChoice::Required, _) => {
                (self.functions(|_| true), !self.single)
            }
            (ToolChoice::Function(wanted), _) => (self.functions(|name| name == wanted), false),
        };
        let rules = grammar::calls("calls", forced(format), &functions, several, special);
        let field = "tool_choice";
        if let (ToolChoice::Auto, Some(asked)) = (&self.choice, asked) {
            let Some(answer) = asked.rules("answer")? else {
                return Wanted::answer(asked).map(Some);
            };
            let body = "calls | answer";
            let rules = rules + &answer;
            return Ok(Some(Wanted { body, rules, field: asked.field, own: None, calls: true }));
        }
        let wanted = Wanted { body: "calls", rules, field, own: None, calls: true };
        wanted.made(None, special)?.check_end(fields)?;
        Ok(Some(wanted))
    }

    fn functions(&self, which: impl Fn(&str) -> bool) -> Vec<Function> {
        let tools = self.list.iter().filter_map(Value::as_array).flatten();
        let function = |tool: &Value| {
            let name = name(tool).filter(|name| which(name))?.to_owned();
            let parameters = tool.get("function").and_then(|it| it.get("parameters"));
            let parameters = parameters.and_then(Value::as_object).cloned();
            let strict = tool.get("function").and_then(|it| it.get("strict"));
            Some(Function { name, parameters, strict: strict == Some(&Value::Bool(true)) })
        };
        tools.filter_map(function).collect()
    }

    /// What is looked for in the reply of a model that writes calls in this form.
    ///
    /// # Errors
    /// 400 where that is not known.
    pub fn rules(&self, format: Option<CallFormat>) -> Result<ReplyRules, ApiError> {
        let mut rules = ReplyRules { single_call: self.single, ..ReplyRules::default() };
        match (&self.choice, format) {
            (ToolChoice::None, _) => {}
            (ToolChoice::Auto, None) => {
                let message = "`tools`: how this model writes calls is not known, its chat template \
                               does not say; the server's operator can (--tool-call-parser), and \
                               with `tool_choice`: \"none\" calls are part of the text";
                return Err(ApiError::field("tools", message));
            }
            (ToolChoice::Auto, format) => rules.calls = format,
            (ToolChoice::Required | ToolChoice::Function(_), format) => {
                rules.calls = Some(forced(format));
                rules.only_calls = true;
            }
        }
        if rules.calls == Some(CallFormat::Qwen3Coder) {
            rules.parameters = self.list.as_ref().map(Parameters::of).unwrap_or_default();
        }
        Ok(rules)
    }
}

/// What a reply must be.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The rule, of those below, that the reply follows behind its reasoning.
    body: &'static str,
    rules: String,
    /// The field that asked for it.
    field: &'static str,
    /// What a client's own grammar says of the whole reply, and its list of tokens.
    own: Option<Asked>,
    /// Calls may be part of it.
    calls: bool,
}

impl Wanted {
    fn answer(asked: Asked) -> Result<Self, ApiError> {
        let rules = asked.rules("answer")?.unwrap_or_default();
        Ok(Self { body: "answer", rules, field: asked.field, own: Some(asked), calls: false })
    }

    /// Whether calls can be part of the reply.
    #[must_use]
    pub fn has_calls(&self) -> bool {
        self.calls
    }

    /// Whether the reply may have reasoning before it.
    #[must_use]
    pub fn lets_reason(&self) -> bool {
        !self.rules.is_empty()
    }

    /// What the engine is asked for. Where reasoning is told apart, `opened` says whether the prompt
    /// has opened it.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn made(&self, opened: Option<bool>, special: Special<'_>) -> Result<Asked, ApiError> {
        let grammar = match (opened, &self.own) {
            (Some(_), Some(own)) if self.rules.is_empty() => return Ok(own.clone()),
            (None, Some(own)) => return Ok(own.clone()),
            (None, None) => grammar::whole(self.body, &self.rules),
            (Some(is_open), _) => grammar::reasoned(self.body, &self.rules, is_open, special),
        };
        let asked = Asked { field: self.field, spec: GuideSpec::Made(grammar) };
        asked.spec.check().map_err(|error| structured::wrong(self.field, &error))?;
        Ok(asked)
    }
}

/// The form of calls that must be made: one with JSON in it, which every model can be held to.
fn forced(format: Option<CallFormat>) -> CallFormat {
    match format {
        None | Some(CallFormat::Qwen3Coder) => CallFormat::Hermes,
        Some(format) => format,
    }
}

/// The tools that a template is told of; none where there are none.
///
/// # Errors
/// 400 naming the field.
pub fn told(fields: &Fields, limits: &Limits) -> Result<Option<Value>, ApiError> {
    let tools = objects(fields, "tools", limits.tools)?;
    for (index, tool) in tools.iter().filter_map(Value::as_array).flatten().enumerate() {
        let name = name(tool).filter(|name| !name.is_empty());
        if tool.get("type").and_then(Value::as_str) != Some("function") || name.is_none() {
            let message =
                format!("`tools[{index}]` must have the type \"function\" and a `function.name`");
            return Err(ApiError::field("tools", message));
        }
        let parameters = tool.get("function").and_then(|it| it.get("parameters"));
        if parameters.is_some_and(|it| !it.is_object() && !it.is_null()) {
            let message = format!("`tools[{index}].function.parameters` must be a JSON schema");
            return Err(ApiError::field("tools", message));
        }
    }
    Ok(tools)
}

fn name(tool: &Value) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

fn choice(fields: &Fields, tools: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let field = "tool_choice";
    let Some(tools) = tools else {
        return match fields.get(field).map(|choice| choice.as_str().unwrap_or("a function")) {
            None | Some("none" | "auto") => Ok(ToolChoice::None),
            Some(_) => Err(ApiError::field(field, "`tool_choice` needs `tools`")),
        };
    };
    let expected = "\"none\", \"auto\", \"required\", or {\"type\": \"function\", \"function\": \
                    {\"name\": ..}}";
    match fields.get(field) {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) if word == "none" => Ok(ToolChoice::None),
        Some(Value::String(word)) if word == "auto" => Ok(ToolChoice::Auto),
        Some(Value::String(word)) if word == "required" => Ok(ToolChoice::Required),
        Some(value) => {
            let is_function = value.get("type").and_then(Value::as_str) == Some("function");
            let wanted = name(value).filter(|_| is_function);
            let wanted = wanted.ok_or_else(|| Fields::wrong(field, value, expected))?;
            if !tools.as_array().into_iter().flatten().any(|tool| name(tool) == Some(wanted)) {
                let message = format!("`tool_choice` names {wanted:?}, which is none of `tools`");
                return Err(ApiError::field(field, message));
            }
            Ok(ToolChoice::Function(wanted.to_owned()))
        }
    }
}

//! Tools: which ones the model is offered, whether it may or must call them, and how its calls are
//! told apart from text.
use serde_json::{Map, Value};
use shared::protocol::GuideSpec;

use super::conversation::objects;
use super::error::ApiError;
use super::fields::Fields;
use super::params::Limits;
use super::structured::{self, Asked};
use crate::text::reply::grammar::{self, Function, Special};
use crate::text::reply::harmony::{self, Opening};
use crate::text::reply::{CallFormat, Parameters, ReplyRules, ThinkMarks};

/// Whether tools are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Not at all: what looks like a call is text.
    None,
    /// The model decides.
    Auto,
    /// At least one.
    Required,
    /// The one with this name.
    Function(String),
}

/// The type of all tools.
const FUNCTION: &str = "function";

/// What a request says about tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tools {
    list: Option<Value>,
    choice: ToolChoice,
    /// Whether there is at most one call.
    single: bool,
}

impl Tools {
    /// Reads the fields.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn read(fields: &Fields, limits: &Limits) -> Result<Self, ApiError> {
        let mut list = told(fields, limits)?;
        let choice = choice(fields, limits, list.as_mut())?;
        let single = !fields.boolean("parallel_tool_calls", true)?;
        Ok(Self { list, choice, single })
    }

    /// Returns the tools as given to the template.
    #[must_use]
    pub fn told(&self) -> Option<&Value> {
        self.list.as_ref()
    }

    /// Whether a choice that ends with calls says so; not if the client itself chose the function.
    #[must_use]
    pub fn finish_with_calls(&self) -> bool {
        matches!(self.choice, ToolChoice::Auto | ToolChoice::Required)
    }

    /// Returns the constraint on the reply: calls if they must be made, whatever the client's
    /// constraint; that constraint or calls if the model decides.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn wanted(
        &self,
        fields: &Fields,
        asked: Option<Asked>,
        format: Option<CallFormat>,
    ) -> Result<Option<Wanted>, ApiError> {
        let field = "tool_choice";
        let (functions, several, answer) = match (&self.choice, asked) {
            (ToolChoice::None, asked) | (ToolChoice::Auto, asked @ None) => {
                return Ok(asked.map(Wanted::Answer));
            }
            // Whoever has tags has calls among them, in the model's own format.
            (ToolChoice::Auto, Some(asked)) if asked.is_whole() || asked.is_tagged() => {
                return Ok(Some(Wanted::Answer(asked)));
            }
            (ToolChoice::Auto, asked) => (self.functions(|_| true), !self.single, asked),
            (ToolChoice::Required, _) => (self.functions(|_| true), !self.single, None),
            (ToolChoice::Function(wanted), _) => {
                (self.functions(|name| name == wanted), false, None)
            }
        };
        if answer.is_none() {
            structured::check_end(fields, field)?;
        }
        let calls = Calls { field, format: forced(format), functions, several };
        Ok(Some(Wanted::Calls(calls, answer)))
    }

    /// Returns the functions that may be called, with the rule `arguments` for each one's: to tell
    /// which of them has a schema that no grammar can be made of.
    #[must_use]
    pub fn arguments(&self) -> Vec<(String, GuideSpec)> {
        let functions = self.functions(|name| match &self.choice {
            ToolChoice::Function(wanted) => name == wanted,
            _ => true,
        });
        let grammar = |function: &Function| {
            GuideSpec::Made(grammar::whole("arguments", &function.rule("arguments")))
        };
        functions.iter().map(|function| (function.name.clone(), grammar(function))).collect()
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

    /// Returns what to look for in the reply of a model that writes calls in this format.
    ///
    /// # Errors
    /// 400 if that is not known.
    pub fn rules(&self, format: Option<CallFormat>) -> Result<ReplyRules, ApiError> {
        let mut rules = ReplyRules { single_call: self.single, ..ReplyRules::default() };
        match (&self.choice, format) {
            (ToolChoice::None, _) => {}
            (ToolChoice::Auto, None) => {
                let message = "`tools`: how this model writes calls is not known, since its chat \
                               template does not show it; the server's operator can set it \
                               (--tool-call-parser), and with `tool_choice`: \"none\" calls are \
                               part of the text";
                return Err(ApiError::field("tools", message));
            }
            (ToolChoice::Auto, format) => rules.calls = format,
            (ToolChoice::Required | ToolChoice::Function(_), format) => {
                rules.calls = Some(forced(format));
                rules.only_calls = true;
            }
        }
        if rules.calls.is_some_and(CallFormat::is_untyped) {
            rules.parameters = self.list.as_ref().map(Parameters::of).unwrap_or_default();
        }
        Ok(rules)
    }
}

/// The constraint on a reply.
#[derive(Clone, Debug)]
pub enum Wanted {
    /// The client's constraint.
    Answer(Asked),
    /// Calls, or else the client's constraint.
    Calls(Calls, Option<Asked>),
}

/// Where a reply begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begins {
    /// With the constrained text.
    Plain,
    /// With reasoning between these marks, which the prompt has opened or the model may.
    Reasoned(ThinkMarks, bool),
    /// With, or within, a message in harmony format.
    Message(Opening),
}

/// Calls that are constrained by their functions' schemas.
#[derive(Clone, Debug)]
pub struct Calls {
    /// The field that asked for them.
    field: &'static str,
    format: CallFormat,
    functions: Vec<Function>,
    /// Whether more than one may be made.
    several: bool,
}

impl Wanted {
    /// The format of the calls that can be part of the reply, if any can.
    #[must_use]
    pub fn calls(&self) -> Option<CallFormat> {
        match self {
            Self::Calls(calls, _) => Some(calls.format),
            Self::Answer(_) => None,
        }
    }

    /// Whether calls are where the model writes them, if anywhere: within a structural tag.
    #[must_use]
    pub fn is_tagged(&self) -> bool {
        matches!(self, Self::Answer(answer) if answer.is_tagged())
    }

    /// Whether reasoning may precede it.
    #[must_use]
    pub fn lets_reason(&self) -> bool {
        !matches!(self, Self::Answer(answer) if answer.is_whole())
    }

    /// Compiles it to the engine's constraint on a reply that begins so; `special` looks up special
    /// tokens by their text. The work grows with tools and schemas.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn made(self, begins: &Begins, special: Special<'_>) -> Result<Asked, ApiError> {
        // A mark that is no token of its own is text, which must not be taken for the answer's.
        let unless = match begins {
            Begins::Reasoned(marks, false) if special(marks.open).is_none() => Some(marks.open),
            _ => None,
        };
        let (body, field, rules) = match self {
            Self::Answer(answer) if *begins == Begins::Plain => return Ok(answer),
            Self::Answer(answer) => match answer.rules("answer", unless)? {
                Some(rules) => ("answer", answer.field, rules),
                None => return Ok(answer),
            },
            Self::Calls(calls, None) => ("calls", calls.field, calls.rules(special)),
            Self::Calls(calls, Some(answer)) => {
                let rules =
                    calls.rules(special) + &answer.rules("answer", unless)?.unwrap_or_default();
                ("calls | answer", answer.field, rules)
            }
        };
        let grammar = match begins {
            Begins::Plain => grammar::whole(body, &rules),
            Begins::Reasoned(marks, is_open) => {
                grammar::reasoned(body, &rules, *marks, *is_open, special)
            }
            Begins::Message(opening) => {
                let message = harmony::grammar::answer("message", "answer", special);
                let (last, rules, rest) = match body {
                    "answer" => ("message", rules + &message, Some(body)),
                    "calls" => ("calls", rules, None),
                    _ => ("calls | message", rules + &message, Some("answer")),
                };
                harmony::grammar::whole(opening, last, rest, &rules, special)
            }
        };
        let spec = GuideSpec::Made(grammar);
        spec.check().map_err(|error| structured::wrong(field, &error))?;
        Ok(Asked::new(field, spec))
    }
}

impl Calls {
    fn rules(&self, special: Special<'_>) -> String {
        if self.format == CallFormat::Harmony {
            return harmony::grammar::calls("calls", &self.functions, special);
        }
        grammar::calls("calls", self.format, &self.functions, self.several, special)
    }
}

/// The format of calls that a grammar holds the model to.
fn forced(format: Option<CallFormat>) -> CallFormat {
    format.unwrap_or(CallFormat::Hermes).forced()
}

/// Returns the tools given to a template; `None` if there are none.
///
/// # Errors
/// 400 naming the field.
pub fn told(fields: &Fields, limits: &Limits) -> Result<Option<Value>, ApiError> {
    let mut tools = objects(fields, "tools", limits.tools)?;
    let list = tools.as_mut().and_then(Value::as_array_mut);
    for (index, tool) in list.into_iter().flatten().enumerate() {
        // As in vLLM: there is no other type. Templates show it first.
        if let Some(tool) = tool.as_object_mut()
            && tool.get("type").is_none_or(Value::is_null)
        {
            tool.shift_insert(0, "type".to_owned(), FUNCTION.into());
        }
        let name = name(tool).filter(|name| !name.is_empty());
        if kind(tool) != Some(FUNCTION) || name.is_none() {
            let message =
                format!("`tools[{index}]` must have the type \"function\" and a `function.name`");
            return Err(ApiError::field("tools", message));
        }
        let parameters = tool.get("function").and_then(|it| it.get("parameters"));
        if let Some(parameters) = parameters.filter(|it| !it.is_null()) {
            check_parameters(index, parameters)?;
        }
    }
    Ok(tools)
}

/// Rejects a schema whose values are no objects: arguments are.
fn check_parameters(index: usize, parameters: &Value) -> Result<(), ApiError> {
    let field = format!("tools[{index}].function.parameters");
    let wrong = |field: &str, value, expected| Fields::wrong(field, value, expected).of("tools");
    let schema = parameters.as_object();
    let schema = schema.ok_or_else(|| wrong(&field, parameters, "a JSON schema"))?;
    match wrong_type(schema) {
        None => Ok(()),
        Some(kind) => Err(wrong(&format!("{field}.type"), kind, "\"object\"")),
    }
}

/// Returns the type of a function's arguments by their schema, if they could be no objects.
pub(super) fn wrong_type(schema: &Map<String, Value>) -> Option<&Value> {
    schema.get("type").filter(|kind| match kind {
        Value::Null => false,
        Value::String(kind) => kind != "object",
        Value::Array(kinds) => !kinds.contains(&"object".into()),
        _ => true,
    })
}

fn name(tool: &Value) -> Option<&str> {
    tool.get("function")?.get("name")?.as_str()
}

fn kind(value: &Value) -> Option<&str> {
    value.get("type").and_then(Value::as_str)
}

/// The function that is named so; as in vLLM, the type can be left out.
fn called(value: &Value) -> Option<&str> {
    let is_function = value.get("type").is_none_or(|kind| kind.is_null() || *kind == FUNCTION);
    name(value).filter(|_| is_function)
}

/// How functions are called, and which alone may be.
fn allowed(value: &Value) -> Option<(ToolChoice, Vec<&str>)> {
    let allowed = value.get("allowed_tools")?;
    let mode = match allowed.get("mode")?.as_str()? {
        "auto" => ToolChoice::Auto,
        "required" => ToolChoice::Required,
        _ => return None,
    };
    let list = allowed.get("tools")?.as_array().filter(|list| !list.is_empty())?;
    Some((mode, list.iter().map(called).collect::<Option<_>>()?))
}

/// Rejects a field that lists more tools than there may be.
///
/// # Errors
/// 400 naming the field.
pub(super) fn check_count(field: &str, count: usize, limits: &Limits) -> Result<(), ApiError> {
    match count <= limits.tools {
        true => Ok(()),
        false => {
            let message = format!("`{field}` lists {count} tools, the limit is {}", limits.tools);
            Err(ApiError::field(field, message))
        }
    }
}

/// Which tools are called; those that may not be are taken out of the list.
fn choice(
    fields: &Fields,
    limits: &Limits,
    tools: Option<&mut Value>,
) -> Result<ToolChoice, ApiError> {
    let field = "tool_choice";
    let Some(tools) = tools.and_then(Value::as_array_mut) else {
        return match fields.get(field).map(|choice| choice.as_str().unwrap_or("a function")) {
            None | Some("none" | "auto") => Ok(ToolChoice::None),
            Some(_) => Err(ApiError::field(field, "`tool_choice` needs `tools`")),
        };
    };
    let expected = "\"none\", \"auto\", \"required\", {\"type\": \"function\", \"function\": \
                    {\"name\": ..}} or {\"type\": \"allowed_tools\", \"allowed_tools\": \
                    {\"mode\": .., \"tools\": ..}}";
    match fields.get(field) {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) if word == "none" => Ok(ToolChoice::None),
        Some(Value::String(word)) if word == "auto" => Ok(ToolChoice::Auto),
        Some(Value::String(word)) if word == "required" => Ok(ToolChoice::Required),
        Some(value) => {
            let wrong = || Fields::wrong(field, value, expected);
            let known = |tools: &[Value], wanted: &str| {
                if tools.iter().any(|tool| name(tool) == Some(wanted)) {
                    return Ok(());
                }
                let message = format!("`tool_choice` names {wanted:?}, which is not in `tools`");
                Err(ApiError::field(field, message))
            };
            if kind(value) == Some("allowed_tools") {
                let (mode, names) = allowed(value).ok_or_else(wrong)?;
                check_count(field, names.len(), limits)?;
                names.iter().try_for_each(|wanted| known(tools, wanted))?;
                tools.retain(|tool| name(tool).is_some_and(|it| names.contains(&it)));
                return Ok(mode);
            }
            let wanted = called(value).ok_or_else(wrong)?;
            known(tools, wanted)?;
            Ok(ToolChoice::Function(wanted.to_owned()))
        }
    }
}

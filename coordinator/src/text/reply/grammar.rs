//! Replies that must call tools, or must be what was asked for once the reasoning is over: grammars
//! in Lark's notation, as llguidance reads it.
use serde_json::{Map, Value, json};

use super::format::{self, CallFormat};
use super::{THINK, THINK_END};

const START: &str = "start: body\n";

/// What may stand between the parts of arguments: as in the calls that models were taught by.
const WHITESPACE: &str = " ?";

/// A function that may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments; any object where there is none.
    pub parameters: Option<Map<String, Value>>,
}

/// The rule `body`: calls of these functions, one or, if `several`, more of them. `special` are the
/// vocabulary's special tokens by their text.
#[must_use]
pub fn calls(
    format: CallFormat,
    functions: &[Function],
    several: bool,
    special: impl Fn(&str) -> Option<u32>,
) -> String {
    let mark = |text: &str| match special(text) {
        Some(token) => format!("<[{token}]>"),
        None => quoted(text),
    };
    // Models that are told of the mark before arguments have a token for it.
    let named = format == CallFormat::Mistral && special(format::ARGUMENTS).is_some();
    let mut rules = String::new();
    for (index, function) in functions.iter().enumerate() {
        let name = Value::from(function.name.as_str());
        let arguments = arguments(function);
        let call = match format {
            CallFormat::Mistral if named => {
                format!("{} {}", quoted(&function.name), mark(format::ARGUMENTS))
            }
            CallFormat::Llama3Json => quoted(&format!("{{\"name\": {name}, \"parameters\": ")),
            _ => quoted(&format!("{{\"name\": {name}, \"arguments\": ")),
        };
        let close = if named { "" } else { " \"}\"" };
        rules += &format!("call{index}: {call} arguments{index}{close}\n");
        rules += &format!("arguments{index}: %json {arguments}\n");
    }
    let any: Vec<String> = (0..functions.len()).map(|index| format!("call{index}")).collect();
    rules += &format!("call: {}\n", any.join(" | "));
    let list = |first: &str, between: &str| match several {
        true => format!("{first} ({between}{first})*"),
        false => first.to_owned(),
    };
    let opening = mark(format::MISTRAL);
    let body = match format {
        CallFormat::Llama3Json => list("call", "\"; \" "),
        CallFormat::Mistral if named => list(&format!("{opening} call"), ""),
        CallFormat::Mistral => format!("{opening} \"[\" {} \"]\"", list("call", "\", \" ")),
        CallFormat::Hermes | CallFormat::Qwen3Coder => {
            let (open, close) = (format::TOOL_CALL, format::TOOL_CALL_END);
            let element =
                format!("{} call {}", quoted(&format!("{open}\n")), quoted(&format!("\n{close}")));
            list(&element, "\"\\n\" ")
        }
    };
    format!("body: {body}\n{rules}")
}

fn arguments(function: &Function) -> Value {
    let mut schema = function.parameters.clone().unwrap_or_default();
    schema.entry("type").or_insert_with(|| "object".into());
    schema.insert("x-guidance".to_owned(), json!({"whitespace_pattern": WHITESPACE}));
    Value::Object(schema)
}

/// The rule `body`: what a regular expression matches.
#[must_use]
pub fn regex(regex: &str) -> String {
    // What delimits it, unless it is escaped already.
    let (mut escaped, mut written) = (false, String::with_capacity(regex.len()));
    for c in regex.chars() {
        match c {
            '/' if !escaped => written.push_str("\\/"),
            '\n' => written.push_str(if escaped { "n" } else { "\\n" }),
            _ => written.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    format!("body: /{written}/\n")
}

/// The rule `body`: one of these strings.
#[must_use]
pub fn choice(strings: &[String]) -> String {
    let strings: Vec<String> = strings.iter().map(|string| quoted(string)).collect();
    format!("body: {}\n", strings.join(" | "))
}

/// The grammar of a reply that is `body`, one of whose rules that is.
#[must_use]
pub fn whole(body: &str) -> String {
    format!("{START}{body}")
}

/// What [`whole`] was made of.
#[must_use]
pub fn body(whole: &str) -> Option<&str> {
    whole.strip_prefix(START)
}

/// The grammar of a reply that is `body` behind its reasoning, which the prompt has opened or the
/// model may.
#[must_use]
pub fn reasoned(body: &str, is_open: bool) -> String {
    let start = if is_open {
        "thought body".to_owned()
    } else {
        format!("({} thought)? body", quoted(THINK))
    };
    let end = quoted(THINK_END);
    format!(
        "start: {start}\nthought: until_end /\\n{{0,2}}/\nuntil_end[lazy]: /(?s:.*)/ {end}\n{body}"
    )
}

/// Text as Lark's strings are written: as JSON's.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

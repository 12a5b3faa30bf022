//! Grammars of replies that must call tools, or must match a schema after their reasoning, in
//! Lark's notation as llguidance reads it.
use serde_json::{Map, Value, json};

use super::format::{self, CallFormat};
use super::{ThinkMarks, headed};
use crate::guide;

/// White space allowed between the parts of arguments: as in the calls that models were trained on.
const WHITESPACE: &str = " ?";

/// A function that may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments; without one, or with an empty one, it has none, as OpenAI
    /// says.
    pub parameters: Option<Map<String, Value>>,
    /// An unknown part of the schema is an error; otherwise it is ignored.
    pub strict: bool,
}

/// Looks up a special token by its text.
pub type Special<'a> = &'a dyn Fn(&str) -> Option<u32>;

/// Writes the rule `head` and those it needs: one call of these functions, or more if `several`.
#[must_use]
pub fn calls(
    head: &str,
    format: CallFormat,
    functions: &[Function],
    several: bool,
    special: Special<'_>,
) -> String {
    let mark = |text: &str| mark(text, special);
    let format = format.forced();
    // Models trained with the mark before arguments have a token for it.
    let named = format == CallFormat::Mistral && special(format::ARGUMENTS).is_some();
    let mut rules = String::new();
    for (index, function) in functions.iter().enumerate() {
        let name = Value::from(function.name.as_str());
        let (open, close) = match format {
            CallFormat::Mistral if named => {
                (format!("{} {}", quoted(&function.name), mark(format::ARGUMENTS)), String::new())
            }
            CallFormat::DeepseekV3 => {
                let (call, separator) = (mark(headed::CALL), mark(headed::SEPARATOR));
                let name = quoted(&format!("{}\n{}\n", function.name, headed::FENCE));
                let end = quoted(&format!("\n{}", headed::FENCE_END));
                let open = format!("{call} \"function\" {separator} {name}");
                (open, format!(" {end} {}", mark(headed::CALL_END)))
            }
            CallFormat::DeepseekV31 => {
                let (call, separator) = (mark(headed::CALL), mark(headed::SEPARATOR));
                let open = format!("{call} {} {separator}", quoted(&function.name));
                (open, format!(" {}", mark(headed::CALL_END)))
            }
            CallFormat::KimiK2 => {
                let marks = &headed::KIMI;
                let name = quoted(&format!("{}{}:", headed::KIMI_PREFIX, function.name));
                let open =
                    format!("{} {name} /[0-9]{{1,4}}/ {}", mark(marks.call), mark(marks.separator));
                (open, format!(" {}", mark(headed::KIMI_CALL_END)))
            }
            CallFormat::Llama3Json | CallFormat::Internlm => {
                let open = format!("{{\"name\": {name}, \"parameters\": ");
                (quoted(&open), " \"}\"".to_owned())
            }
            _ => {
                let open = format!("{{\"name\": {name}, \"arguments\": ");
                (quoted(&open), " \"}\"".to_owned())
            }
        };
        rules += &format!("call{index}: {open} arguments{index}{close}\n");
        rules += &function.rule(&format!("arguments{index}"));
    }
    let any: Vec<String> = (0..functions.len()).map(|index| format!("call{index}")).collect();
    rules += &format!("call: {}\n", any.join(" | "));
    let list = |first: &str, between: &str| match several {
        true => format!("{first} ({between}{first})*"),
        false => first.to_owned(),
    };
    let in_brackets = |opening: &str| format!("{opening} \"[\" {} \"]\"", list("call", "\", \" "));
    let body = match format {
        CallFormat::Llama3Json => list("call", "\"; \" "),
        CallFormat::Mistral if named => list(&format!("{} call", mark(format::MISTRAL)), ""),
        CallFormat::Mistral => in_brackets(&mark(format::MISTRAL)),
        CallFormat::Granite => in_brackets(&mark(format::GRANITE)),
        CallFormat::Phi4MiniJson => in_brackets(&quoted(format::FUNCTOOLS.trim_end_matches('['))),
        CallFormat::Internlm => {
            let [open, plugin, close] =
                ["<|action_start|>", "<|plugin|>", format::ACTION_END].map(mark);
            list(&format!("{open} {plugin} \"\\n\" call {close}"), "")
        }
        CallFormat::DeepseekV3 | CallFormat::DeepseekV31 => {
            let (open, close) = (mark(headed::CALLS), mark(headed::CALLS_END));
            let between = if format == CallFormat::DeepseekV3 { "\"\\n\" " } else { "" };
            format!("{open} {} {close}", list("call", between))
        }
        CallFormat::KimiK2 => {
            let (open, close) = (mark(headed::KIMI.calls[0]), mark(headed::KIMI_CLOSINGS[1]));
            format!("{open} {} {close}", list("call", ""))
        }
        // Harmony replies have a grammar of their own.
        _ => {
            let (open, close) = (mark(format::TOOL_CALL), mark(format::TOOL_CALL_END));
            list(&format!("{open} \"\\n\" call \"\\n\" {close}"), "\"\\n\" ")
        }
    };
    format!("{head}: {body}\n{rules}")
}

impl Function {
    /// The rule `head`: its arguments.
    #[must_use]
    pub fn rule(&self, head: &str) -> String {
        json(head, &self.schema())
    }

    pub(super) fn schema(&self) -> Value {
        let mut schema = match &self.parameters {
            Some(parameters) if !parameters.is_empty() => Value::Object(parameters.clone()),
            _ => json!({"additionalProperties": false}),
        };
        schema = match self.strict {
            true => guide::without_truisms(&schema),
            false => guide::loosened(&schema),
        };
        if schema.get("type").is_none() {
            schema["type"] = "object".into();
        }
        // Lenient, since clients do not write the schemas of all tools that they offer.
        let guidance = json!({"whitespace_pattern": WHITESPACE, "lenient": !self.strict,
            "coerce_one_of": true});
        schema["x-guidance"] = guidance;
        guide::closed(&schema)
    }
}

/// The rule `head`: JSON that matches `schema`, which also says what white space is allowed.
#[must_use]
pub fn json(head: &str, schema: &Value) -> String {
    format!("{head}: %json {schema}\n")
}

/// The rule `head`: text that matches a regular expression.
#[must_use]
pub fn regex(head: &str, regex: &str) -> String {
    // Escapes the delimiter, unless that is escaped already.
    let (mut escaped, mut written) = (false, String::with_capacity(regex.len()));
    for c in regex.chars() {
        match c {
            '/' if !escaped => written.push_str("\\/"),
            '\n' => written.push_str(if escaped { "n" } else { "\\n" }),
            _ => written.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    // One that ends within an escape is wrong, but must not hide where it ends.
    let rest = if escaped { "\\" } else { "" };
    format!("{head}: /{written}{rest}/\n")
}

/// The rule `head`: one of these strings.
#[must_use]
pub fn choice(head: &str, strings: &[String]) -> String {
    // As one terminal: thousands of rules would be tried one by one.
    let strings: Vec<String> = strings.iter().map(|string| quoted(string)).collect();
    format!("{head}: CHOICE\nCHOICE: {}\n", strings.join(" | "))
}

/// The grammar of a reply that matches the rule `body`, one of `rules`.
#[must_use]
pub fn whole(body: &str, rules: &str) -> String {
    format!("start: {body}\n{rules}")
}

/// Like [`whole`], after the reply's reasoning between `marks`, which the prompt has opened
/// (`is_open`) or the model may open.
#[must_use]
pub fn reasoned(
    body: &str,
    rules: &str,
    marks: ThinkMarks,
    is_open: bool,
    special: Special<'_>,
) -> String {
    let start = if is_open {
        format!("thought ({body})")
    } else {
        format!("({} thought)? ({body})", mark(marks.open, special))
    };
    let end = mark(marks.close, special);
    // A token that is not text ends any text; otherwise the match must be lazy.
    let lazy = if special(marks.close).is_some() { "" } else { "[lazy]" };
    format!(
        "start: {start}\nthought: until_end /\\n{{0,2}}/\nuntil_end{lazy}: /(?s:.*)/ {end}\n{rules}"
    )
}

/// A mark of a format: a special token, where the vocabulary has one.
pub(crate) fn mark(text: &str, special: Special<'_>) -> String {
    special(text).map_or_else(|| quoted(text), |token| format!("<[{token}]>"))
}

/// Text as a string in Lark's notation, which is that of JSON.
pub(crate) fn quoted(text: &str) -> String {
    // JSON leaves this character as it is.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

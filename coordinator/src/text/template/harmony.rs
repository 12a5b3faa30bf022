//! PURE: conversations as harmony templates expect them. These templates allow one call per
//! message, take a tool result's function name from the preceding call, and read system text only
//! in the first message.
use std::collections::HashMap;

use serde_json::{Value, json};

/// Separates the reasoning before a call from what was said to the user: templates have room for
/// only one of the two.
const THEN_SAID: &str = "<|end|><|start|>assistant<|channel|>commentary<|message|>";

/// The messages as a harmony template expects them, with all their content.
#[must_use]
pub fn messages(list: Vec<Value>) -> Vec<Value> {
    let mut given: Vec<Value> = Vec::with_capacity(list.len());
    let mut instructions: Vec<String> = Vec::new();
    let mut list = list.into_iter().peekable();
    while let Some(message) = list.next() {
        match text(&message, "role") {
            "system" | "developer" => instructions.push(text(&message, "content").to_owned()),
            "assistant" if message.get("tool_calls").is_some() => {
                let mut results = Vec::new();
                while let Some(result) = list.next_if(|it| text(it, "role") == "tool") {
                    results.push(result);
                }
                given.extend(one_by_one(with_thoughts(message), results));
            }
            _ => given.push(message),
        }
    }
    if !instructions.is_empty() {
        given.insert(0, json!({"role": "system", "content": instructions.join("\n\n")}));
    }
    given
}

/// The tools as a harmony template expects them: each has a description.
#[must_use]
pub fn tools(mut tools: Value) -> Value {
    for tool in tools.as_array_mut().into_iter().flatten() {
        if let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut)
            && !function.get("description").is_some_and(Value::is_string)
        {
            function.insert("description".to_owned(), "".into());
        }
    }
    tools
}

fn text<'a>(message: &'a Value, name: &str) -> &'a str {
    message.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Appends what was said before the calls to the reasoning, where there are both.
fn with_thoughts(mut message: Value) -> Value {
    let (thought, said) = (text(&message, "thinking"), text(&message, "content"));
    if !thought.is_empty() && !said.is_empty() {
        let both = format!("{thought}{THEN_SAID}{said}");
        message["thinking"] = both.into();
        message["content"] = "".into();
    }
    message
}

/// Splits a message with several calls into several messages, each followed by its call's results.
fn one_by_one(message: Value, results: Vec<Value>) -> Vec<Value> {
    let calls = message.get("tool_calls").and_then(Value::as_array).cloned().unwrap_or_default();
    if calls.len() < 2 {
        return std::iter::once(message).chain(results).collect();
    }
    // Results name their call; results that do not are assigned in order.
    let mut of_call: Vec<Vec<Value>> = vec![Vec::new(); calls.len()];
    let mut of_id: HashMap<&str, usize> = HashMap::new();
    for (at, call) in calls.iter().enumerate() {
        of_id.entry(text(call, "id")).or_insert(at);
    }
    let mut rest = Vec::new();
    for result in results {
        let id = text(&result, "tool_call_id");
        let at = of_id.get(id).filter(|_| !id.is_empty());
        match at.and_then(|at| of_call.get_mut(*at)) {
            Some(of_call) => of_call.push(result),
            None => rest.push(result),
        }
    }
    let mut rest = rest.into_iter();
    for of_call in of_call.iter_mut().filter(|of_call| of_call.is_empty()) {
        of_call.extend(rest.next());
    }
    let mut given = Vec::new();
    for (index, (call, results)) in calls.into_iter().zip(of_call).enumerate() {
        let mut one = json!({"role": "assistant", "content": ""});
        if index == 0 {
            one = message.clone();
        }
        one["tool_calls"] = json!([call]);
        given.push(one);
        given.extend(results);
    }
    given.extend(rest);
    given
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": {}}})
    }

    fn result(id: &str, content: &str) -> Value {
        json!({"role": "tool", "tool_call_id": id, "content": content})
    }

    #[test]
    fn calls_stand_alone_each_with_its_result() {
        let user = json!({"role": "user", "content": "x"});
        let calls = |list: &[Value]| json!({"role": "assistant", "content": "", "thinking": "hm", "tool_calls": list});
        let alone =
            |call: &Value| json!({"role": "assistant", "content": "", "tool_calls": [call]});
        let [a, b, c] = [call("1", "a"), call("2", "b"), call("3", "c")];
        for results in [
            vec![result("3", "of c"), result("1", "of a"), result("2", "of b")],
            vec![result("", "of a"), result("2", "of b"), result("x", "of c")],
        ] {
            let mut list = vec![user.clone(), calls(&[a.clone(), b.clone(), c.clone()])];
            list.extend(results);
            list.push(user.clone());
            let given = messages(list);
            let said: Vec<&str> = given.iter().map(|it| text(it, "content")).collect();
            assert_eq!(said, ["x", "", "of a", "", "of b", "", "of c", "x"]);
            assert_eq!(given[1], calls(std::slice::from_ref(&a)));
            assert_eq!((&given[3], &given[5]), (&alone(&b), &alone(&c)));
        }
        // A result without a call is for the template to reject; calls may lack results.
        let given = messages(vec![
            calls(&[a.clone(), b.clone()]),
            result("2", "of b"),
            result("9", "of a"),
            result("9", "more"),
        ]);
        let said: Vec<&str> = given.iter().map(|it| text(it, "content")).collect();
        assert_eq!(said, ["", "of a", "", "of b", "more"]);
        let one = vec![calls(&[a]), result("7", "of a"), result("8", "more")];
        assert_eq!(messages(one.clone()), one);
    }

    #[test]
    fn what_the_system_says_anywhere_is_said_first() {
        let say = |role: &str, content: &str| json!({"role": role, "content": content});
        let list = vec![say("system", "a"), say("user", "b"), say("system", "c"), say("user", "d")];
        let expected = [say("system", "a\n\nc"), say("user", "b"), say("user", "d")];
        assert_eq!(messages(list), expected);
        let plain = vec![say("user", "b"), say("assistant", "c")];
        assert_eq!(messages(plain.clone()), plain);
    }

    #[test]
    fn what_was_thought_and_said_before_a_call_has_one_place() {
        let message = json!({"role": "assistant", "content": "Let me look.", "thinking": "Need it.",
            "tool_calls": [call("1", "a")]});
        let given = messages(vec![message]);
        assert_eq!(given[0]["content"], "");
        let both = "Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.";
        assert_eq!(given[0]["thinking"], both);
    }

    #[test]
    fn tools_have_a_description() {
        let given =
            tools(json!([{"type": "function", "function": {"name": "a", "description": null}},
            {"type": "function", "function": {"name": "b", "description": "c"}}]));
        assert_eq!(given[0]["function"], json!({"name": "a", "description": ""}));
        assert_eq!(given[1]["function"]["description"], "c");
    }
}

//! PURE: conversations as Kimi's templates expect them. The id of a call, which they show the
//! model, names the function and counts the conversation's calls: after other ids, such as those
//! that clients of this API get, the model writes calls that nobody understands.
use std::collections::HashMap;

use serde_json::Value;

use crate::text::reply::kimi_call_id;

/// The messages with ids of calls as Kimi writes them.
#[must_use]
pub fn messages(mut list: Vec<Value>) -> Vec<Value> {
    let mut count = 0;
    let mut ids: HashMap<String, String> = HashMap::new();
    for message in &mut list {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let name = call.get("function").and_then(|it| it.get("name")).and_then(Value::as_str);
            let id = kimi_call_id(name.unwrap_or_default(), count);
            count += 1;
            if let Some(given) = call.get("id").and_then(Value::as_str) {
                ids.insert(given.to_owned(), id.clone());
            }
            if let Some(call) = call.as_object_mut() {
                call.insert("id".to_owned(), id.into());
            }
        }
        // The last call of this id before its result, should a client use one again.
        if let Some(given) = message.get_mut("tool_call_id")
            && let Some(id) = given.as_str().and_then(|id| ids.get(id))
        {
            *given = id.clone().into();
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn calls_are_counted_through_the_conversation() {
        let call = |id: &str, name: &str| json!({"id": id, "function": {"name": name}});
        let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "x"});
        let nameless = json!({"function": {"name": "h"}});
        let given = vec![
            json!({"role": "user", "content": "Look"}),
            json!({"role": "assistant", "tool_calls": [call("abc", "f"), call("def", "g")]}),
            result("def"),
            result("abc"),
            json!({"role": "assistant", "tool_calls": [call("abc", "g"), nameless]}),
            result("abc"),
            result("unknown"),
        ];
        let told = messages(given.clone());
        assert_eq!(told[0], given[0]);
        let ids = |at: usize| {
            let calls = told[at]["tool_calls"].as_array().unwrap();
            calls.iter().map(|call| call["id"].as_str().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(ids(1), ["functions.f:0", "functions.g:1"]);
        assert_eq!(ids(4), ["functions.g:2", "functions.h:3"]);
        let of = |at: usize| told[at]["tool_call_id"].as_str().unwrap();
        assert_eq!(
            [of(2), of(3), of(5), of(6)],
            ["functions.g:1", "functions.f:0", "functions.g:2", "unknown"]
        );
    }
}

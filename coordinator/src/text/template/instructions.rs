//! PURE: conversations as templates expect them that take one system message, the first. Agents
//! send several: their own, the user's, and more while they work.
use serde_json::{Value, json};

/// Returns the messages with instructions only at the beginning, in one message; those that come
/// later are part of a user's turn, at their place. `None` if the messages are so already.
#[must_use]
pub(super) fn first(messages: &[Value]) -> Option<Vec<Value>> {
    let is_system = |message: &Value| message["role"] == "system";
    let leading = messages.iter().take_while(|it| is_system(it)).count();
    if leading < 2 && !messages[leading..].iter().any(is_system) {
        return None;
    }
    let mut made: Vec<Value> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let role = match message["role"].as_str()? {
            "system" if index >= leading => "user",
            role => role,
        };
        let content = message["content"].as_str()?;
        let is_added = is_system(message);
        // A user's turn behind instructions that became one is part of it.
        let follows = role == "user" && index > leading && is_system(&messages[index - 1]);
        match made.last_mut() {
            Some(last) if last["role"] == role && (is_added || follows) => {
                let joined = format!("{}\n\n{content}", last["content"].as_str()?);
                last["content"] = joined.into();
            }
            _ if is_added => made.push(json!({"role": role, "content": content})),
            _ => made.push(message.clone()),
        }
    }
    Some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_come_first_or_from_the_user() {
        let said = |turns: &[(&str, &str)]| {
            let message =
                |(role, content): &(&str, &str)| json!({"role": role, "content": content});
            turns.iter().map(message).collect::<Vec<_>>()
        };
        for unchanged in [
            &[][..],
            &[("user", "a")],
            &[("system", "a")],
            &[("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")],
        ] {
            assert_eq!(first(&said(unchanged)), None);
        }
        for (given, made) in [
            (
                &[("system", "a"), ("system", "b"), ("user", "c")][..],
                &[("system", "a\n\nb"), ("user", "c")][..],
            ),
            (&[("user", "a"), ("system", "b")], &[("user", "a\n\nb")]),
            (
                &[("system", "a"), ("user", "b"), ("system", "c"), ("user", "d"), ("user", "e")],
                &[("system", "a"), ("user", "b\n\nc\n\nd"), ("user", "e")],
            ),
            (
                &[("user", "a"), ("assistant", "b"), ("system", "c"), ("assistant", "d")],
                &[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
            ),
            (
                &[
                    ("system", "a"),
                    ("system", "b"),
                    ("assistant", "c"),
                    ("system", "d"),
                    ("user", "e"),
                ],
                &[("system", "a\n\nb"), ("assistant", "c"), ("user", "d\n\ne")],
            ),
        ] {
            assert_eq!(first(&said(given)), Some(said(made)));
        }
        // What else a message has, it keeps.
        let call = json!({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]});
        let made = first(&[call.clone(), json!({"role": "system", "content": "x"})]).unwrap();
        assert_eq!(made[0], call);
    }
}

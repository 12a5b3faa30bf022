//! Grammars of harmony replies that must call functions, or whose answer must match something, in
//! Lark's notation. They cover all messages: the model reasons freely, then writes the required
//! one.
use super::super::grammar::{Function, Special, mark, quoted};
use super::{
    CHANNEL, CONSTRAIN, END, MESSAGE, MessageBody, MessageKind, Opening, START, State, header,
};

/// The rule `head` and those it needs: a call of one of these functions, which ends the reply.
#[must_use]
pub fn calls(head: &str, functions: &[Function], special: Special<'_>) -> String {
    let mark = |text: &str| mark(text, special);
    let (channel, constrain, message) = (mark(CHANNEL), mark(CONSTRAIN), mark(MESSAGE));
    let mut rules = String::new();
    for (index, function) in functions.iter().enumerate() {
        let to = format!(" to=functions.{}", function.name);
        let (before, within) = (quoted(&to), quoted(&format!("commentary{to}")));
        rules += &format!(
            "call{index}: ({channel} {within} | {before} {channel} \"commentary\") of_json \
             {message} arguments{index}\narguments{index}: %json {}\n",
            function.schema()
        );
    }
    let any: Vec<String> = (0..functions.len()).map(|index| format!("call{index}")).collect();
    format!(
        "{head}: {}\nof_json: (\" \"? {constrain} \"json\" | \" json\")?\n{rules}",
        any.join(" | ")
    )
}

/// The rule `head`: the message of an answer that matches the rule `body`.
#[must_use]
pub fn answer(head: &str, body: &str, special: Special<'_>) -> String {
    let mark = |text: &str| mark(text, special);
    let (channel, constrain, message) = (mark(CHANNEL), mark(CONSTRAIN), mark(MESSAGE));
    format!("{head}: {channel} \"final\" (\" \"? {constrain} \"json\")? {message} {body}\n")
}

/// The grammar of a reply that continues from `opening` and ends with the rule `last`, one of
/// `rules`. `body` is the remainder of that rule where the prompt has already begun the message.
#[must_use]
pub fn whole(
    opening: &Opening,
    last: &str,
    body: Option<&str>,
    rules: &str,
    special: Special<'_>,
) -> String {
    let mark = |text: &str| mark(text, special);
    let next = format!("{} \"assistant\"", mark(START));
    let start = match (&opening.0, body) {
        (State::Body(MessageBody { of: MessageKind::Content, .. }), Some(body)) => body.to_owned(),
        (State::Body(_), _) => format!("until_end {next} thought* ({last})"),
        (State::Between, _) => format!("{next} thought* ({last})"),
        (State::Header(_), _) => format!("thought* ({last})"),
    };
    // A token that is not text ends any text; otherwise the match must be lazy.
    let lazy = if special(END).is_some() { "" } else { "[lazy]" };
    format!(
        "start: {start}\nthought: {} \"{}\" {} until_end {next}\nuntil_end{lazy}: /(?s:.*)/ {}\n{rules}",
        mark(CHANNEL),
        header::ANALYSIS,
        mark(MESSAGE),
        mark(END)
    )
}

//! Calls as a name and its arguments with marks between: DeepSeek, Kimi.
use super::format::{ARGUMENTS, CALL_ID};
use super::prefix::Prefix;

/// Opens one or more calls.
pub(super) const CALLS: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
/// Opens a call.
pub(super) const CALL: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
/// Marks around a call's name.
#[derive(Debug)]
pub(super) struct HeadMarks {
    /// Opens one or more calls.
    pub(super) calls: &'static [&'static str],
    /// Opens a call.
    pub(super) call: &'static str,
    /// Behind the name.
    pub(super) separator: &'static str,
    /// The name has this before it, and the call's number behind it.
    is_numbered: bool,
}

pub(super) const DEEPSEEK: HeadMarks =
    HeadMarks { calls: &[CALLS], call: CALL, separator: SEPARATOR, is_numbered: false };
/// Kimi K2 also writes its mark around all calls in the singular.
pub(super) const KIMI: HeadMarks = HeadMarks {
    calls: &["<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"],
    call: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    is_numbered: true,
};
pub(super) const KIMI_OPENINGS: [&str; 3] = [KIMI.calls[0], KIMI.calls[1], KIMI.call];
pub(super) const KIMI_CALL_END: &str = "<|tool_call_end|>";
/// The marks behind a call; a reply has one of the last two.
pub(super) const KIMI_CLOSINGS: [&str; 3] =
    [KIMI_CALL_END, "<|tool_calls_section_end|>", "<|tool_call_section_end|>"];
/// Before a function's name in the id that Kimi gives a call.
pub(super) const KIMI_PREFIX: &str = "functions.";
/// What DeepSeek V3 puts arguments in.
pub(super) const FENCE: &str = "```json";
pub(super) const FENCE_END: &str = "```";
/// Longest name of a call with all marks around it, in bytes.
const HEAD_MAX: usize = 256;

/// Matches what precedes a call's arguments, which begin with `{`. Behind `opening` the mark of a
/// call may still be missing.
pub(super) fn head(marks: &HeadMarks, opening: &str, text: &str) -> Prefix<String> {
    let rest = text.trim_start();
    let rest = match rest.strip_prefix(marks.call) {
        Some(rest) => rest,
        None if marks.call.starts_with(rest) => return Prefix::Unknown,
        None if marks.calls.iter().any(|mark| opening.ends_with(mark)) => return Prefix::NoMatch,
        None => rest,
    };
    let begin = text.len() - rest.len();
    let Some((head, taken)) = until_arguments(rest) else {
        return if rest.len() < HEAD_MAX { Prefix::Unknown } else { Prefix::NoMatch };
    };
    let Some((before, behind)) = head.split_once(marks.separator) else { return Prefix::NoMatch };
    // V3 has the type of the call first, which is always `function`.
    let behind = behind.trim().trim_end_matches(FENCE).trim_end_matches(FENCE_END).trim();
    let name = match marks.is_numbered {
        true if behind.is_empty() => without_number(before.trim()),
        true => return Prefix::NoMatch,
        false if behind.is_empty() => before.trim(),
        false => behind,
    };
    if name.is_empty() || name.contains(['<', '\n']) {
        return Prefix::NoMatch;
    }
    Prefix::Match(name.to_owned(), begin + taken)
}

/// The id that Kimi gives the call of a function, so many calls after the conversation's first.
#[must_use]
pub fn kimi_call_id(function: &str, count: usize) -> String {
    format!("{KIMI_PREFIX}{function}:{count}")
}

/// The function's name in `functions.name:0`, the id of a call of Kimi.
fn without_number(id: &str) -> &str {
    let name = id.strip_prefix(KIMI_PREFIX).unwrap_or(id);
    match name.rsplit_once(':') {
        Some((name, number)) if number.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => name,
    }
}

/// Matches the name, or nothing, between Mistral's mark and an object; the length is without that.
pub(super) fn mistral(text: &str) -> Prefix<String> {
    match until_arguments(text) {
        Some((head, taken)) => {
            let end = [ARGUMENTS, CALL_ID].iter().filter_map(|mark| head.find(mark)).min();
            Prefix::Match(head[..end.unwrap_or(head.len())].trim().to_owned(), taken)
        }
        None if text.len() < HEAD_MAX => Prefix::Unknown,
        None => Prefix::NoMatch,
    }
}

/// Whether the text begins with a mark of Mistral's rather than with a list.
pub(super) fn is_mark(text: &str) -> bool {
    [ARGUMENTS, CALL_ID].iter().any(|mark| text.starts_with(mark))
}

/// Whether the text may become such a mark.
pub(super) fn may_become_mark(text: &str) -> bool {
    [ARGUMENTS, CALL_ID].iter().any(|mark| mark.starts_with(text) && *mark != text)
}

/// The text before the first `{`, unless that is too long, and its length.
fn until_arguments(text: &str) -> Option<(&str, usize)> {
    let head = &text[..text.floor_char_boundary(HEAD_MAX)];
    head.find('{').map(|at| (&head[..at], at))
}

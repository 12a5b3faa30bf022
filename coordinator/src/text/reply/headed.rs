//! Calls as a name and its arguments with marks between: DeepSeek.
use super::format::{ARGUMENTS, CALL_ID};
use super::prefix::Prefix;

/// Opens one or more calls.
pub(super) const CALLS: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
/// Opens a call.
pub(super) const CALL: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
/// What DeepSeek V3 puts arguments in.
pub(super) const FENCE: &str = "```json";
pub(super) const FENCE_END: &str = "```";
/// Longest name of a call with all marks around it, in bytes.
const HEAD_MAX: usize = 256;

/// Matches what precedes a call's arguments, which begin with `{`. Behind `opening` the mark of a
/// call may still be missing.
pub(super) fn head(opening: &str, text: &str) -> Prefix<String> {
    let rest = text.trim_start();
    let rest = match rest.strip_prefix(CALL) {
        Some(rest) => rest,
        None if CALL.starts_with(rest) => return Prefix::Unknown,
        None if opening.ends_with(CALLS) => return Prefix::NoMatch,
        None => rest,
    };
    let begin = text.len() - rest.len();
    let Some((head, taken)) = until_arguments(rest) else {
        return if rest.len() < HEAD_MAX { Prefix::Unknown } else { Prefix::NoMatch };
    };
    let Some((before, behind)) = head.split_once(SEPARATOR) else { return Prefix::NoMatch };
    // V3 has the type of the call first, which is always `function`.
    let behind = behind.trim().trim_end_matches(FENCE).trim_end_matches(FENCE_END).trim();
    let name = if behind.is_empty() { before.trim() } else { behind };
    if name.is_empty() || name.contains(['<', '\n']) {
        return Prefix::NoMatch;
    }
    Prefix::Match(name.to_owned(), begin + taken)
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

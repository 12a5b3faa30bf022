//! What precedes a call: a mark and what stands between it and the call, or another call.
use super::SPACE_MAX;
use super::call::Call;
use super::format::{CallFormat, Syntax};
use super::headed;
use super::json::CallObject;
use super::prefix::Prefix;
use super::python::PythonCall;

/// Matches what precedes the first call behind a mark; whether more follow in a list.
pub(super) fn opened(syntax: Syntax, opening: &str, held: &str) -> Prefix<(Call, bool)> {
    let text = held.trim_start();
    let space = held.len() - text.len();
    // More white space than this is text, which must not be read again and again.
    let until_more = |space: usize| match space > SPACE_MAX {
        true => Prefix::NoMatch,
        false => Prefix::Unknown,
    };
    let Some(first) = text.chars().next() else { return until_more(space) };
    let object = || Call::Object(CallObject::new());
    let named = |head: Prefix<String>| match head {
        Prefix::Match(name, taken) if name.is_empty() => Prefix::Match((object(), false), taken),
        Prefix::Match(name, taken) => {
            Prefix::Match((Call::Object(CallObject::of(name)), false), taken)
        }
        Prefix::Unknown => Prefix::Unknown,
        Prefix::NoMatch => Prefix::NoMatch,
    };
    match (syntax, first) {
        (Syntax::Mistral, '[') if headed::may_become_mark(text) => Prefix::Unknown,
        (Syntax::Mistral, '[') if headed::is_mark(text) => named(headed::mistral(held)),
        (Syntax::List | Syntax::Mistral, '[') => Prefix::Match((object(), true), space + 1),
        (Syntax::List, '{') => Prefix::Match((object(), false), space),
        (Syntax::Mistral, _) => named(headed::mistral(held)),
        (Syntax::Headed(marks), _) => named(headed::head(marks, opening, held)),
        (Syntax::Python, '[') => {
            let inside = held.len() - text[1..].trim_start().len();
            let next = held[inside..].chars().next();
            let Some(next) = next else { return until_more(inside - space) };
            if PythonCall::may_begin(next) {
                Prefix::Match((Call::Python(PythonCall::default()), true), inside)
            } else {
                Prefix::NoMatch
            }
        }
        // As OLMo 3 writes them, without a list.
        (Syntax::Python, first) if PythonCall::may_begin(first) && !opening.trim().is_empty() => {
            Prefix::Match((Call::Python(PythonCall::default()), true), space)
        }
        _ => Prefix::NoMatch,
    }
}

/// The call behind another that begins with this character.
pub(super) fn next_call(format: CallFormat, first: char) -> Option<Call> {
    match (format.syntax(), first) {
        (Syntax::Python, first) if PythonCall::may_begin(first) => {
            Some(Call::Python(PythonCall::default()))
        }
        (Syntax::Object, '{') => Some(Call::Object(CallObject::with_arguments())),
        (Syntax::List | Syntax::Mistral, '{') => Some(Call::Object(CallObject::new())),
        _ => None,
    }
}

//! vLLM's options that have another name here, or none: operators' existing command lines are
//! understood or answered with the alternative.
//!
//! - `table`: the options, and what is here instead
mod table;

use std::ffi::OsString;

use clap::error::ErrorKind;

use self::table::ROWS;
use super::logging;

/// How an option is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handling {
    /// A flag that asks for what is always the case: dropped. How to get the opposite, if at all.
    Always(&'static str),
    /// A flag that is dropped with this message.
    Unneeded(&'static str),
    /// A flag, refused with this alternative. Turned off, it asks for nothing.
    Flag(&'static str),
    /// Refused, with this alternative.
    Other(&'static str),
}

use Handling::{Always, Flag, Other, Unneeded};

/// What an argument of the command line is among vLLM's options.
#[derive(Debug)]
struct Found<'a> {
    /// As it was written, with its value.
    written: &'a str,
    /// Without its value.
    name: &'a str,
    /// What a flag's value says; `None` for other values.
    on: Option<bool>,
    here: Handling,
}

/// An option here as in vLLM, whose opposite is not.
const OURS: &str = "no-enable-prefix-caching";
/// The words for a flag's value, on and off.
const WORDS: [[&str; 5]; 2] = [["true", "1", "yes", "on", "t"], ["false", "0", "no", "off", "f"]];

/// Reads a flag's value, in any case.
pub(super) fn switched(value: &str) -> Option<bool> {
    let is_among = |words: &[&str]| words.iter().any(|word| word.eq_ignore_ascii_case(value));
    match (is_among(&WORDS[0]), is_among(&WORDS[1])) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

/// Looks up the option in `--name`, `--name=value`, `--name.key=value`, `--no-name` or `-tp`.
fn find(written: &str) -> Option<Found<'_>> {
    let (name, value) = match written.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (written, None),
    };
    let bare = name.split('.').next().unwrap_or(name);
    let bare = bare.strip_prefix("--").unwrap_or(bare).replace('_', "-");
    // A level of `-O` is part of the word.
    let level = bare.strip_prefix("-O").is_some_and(|it| it.bytes().all(|b| b.is_ascii_digit()));
    let bare = if level { "-O" } else { &bare };
    let of = |name: &str| {
        let row = ROWS.iter().find(|row| row.names.contains(&name));
        row.map(|row| row.here)
    };
    let on = value.map_or(Some(true), switched);
    if let Some(here) = of(bare) {
        return Some(Found { written, name, on, here });
    }
    let here = of(bare.strip_prefix("no-").filter(|_| bare != OURS)?)?;
    Some(Found { written, name, on: on.map(|on| !on), here })
}

impl Found<'_> {
    /// Returns what to tell of an option that is dropped, if anything.
    ///
    /// # Errors
    /// What to write instead.
    fn dropped(&self) -> Result<Option<String>, String> {
        let (written, name) = (self.written, self.name);
        match (self.here, self.on) {
            (Other(what), _) => {
                Err(format!("`{name}` is a vLLM option; here: {}", without_links(what)))
            }
            (_, None) => Err(format!(
                "`{written}`: `{name}` is a flag of vLLM, which takes no value but true or false"
            )),
            (Always(otherwise), Some(false)) => {
                Err(format!("`{written}`: this is always the case here; {otherwise}"))
            }
            (Flag(what), Some(true)) => {
                Err(format!("`{name}` is a vLLM option; here: {}", without_links(what)))
            }
            (Unneeded(why), Some(true)) => Ok(Some(format!("`{name}` is left out: {why}"))),
            // What is off is off here.
            (Flag(_) | Unneeded(_), Some(false)) | (Always(_), Some(true)) => Ok(None),
        }
    }
}

/// A text of the table without Markdown's links: those in parentheses are told as files.
fn without_links(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        let Some(((label, target), after)) =
            link.split_once(')').and_then(|(link, after)| Some((link.split_once("](")?, after)))
        else {
            break;
        };
        plain.push_str(before);
        if before.ends_with('(') {
            let file = target.strip_prefix("../").map(str::to_owned);
            plain.push_str(&file.unwrap_or_else(|| format!("docs/{target}")));
        } else {
            plain.push_str(label);
        }
        rest = after;
    }
    plain.push_str(rest);
    plain
}

/// Returns the advice about a configuration file's key.
pub(crate) fn hint(key: &str) -> Option<String> {
    let option = format!("--{key}");
    let found = find(&option)?;
    Some(match found.here {
        Always(otherwise) => format!("this is always the case: leave it out; {otherwise}"),
        Unneeded(why) => format!("leave it out: {why}"),
        Flag(what) | Other(what) => {
            format!("this is a vLLM option; here: {}", without_links(what))
        }
    })
}

/// Removes options without effect from the command line of the roles that correspond to `vllm
/// serve`.
///
/// # Errors
/// Names the alternative.
pub(crate) fn understood(args: &[OsString]) -> Result<Vec<OsString>, clap::Error> {
    let role = args.get(1).and_then(|role| role.to_str());
    if role == Some("serve") {
        let model = args.get(2).and_then(|it| it.to_str()).filter(|it| !it.starts_with('-'));
        let model = model.unwrap_or("MODEL");
        return Err(refused(&format!(
            "`serve` is a vLLM command; here: `tutti up --model {model}`"
        )));
    }
    // Other commands have nothing of vLLM's to leave out.
    let is_server = matches!(role, Some("up" | "coordinator" | "doctor"));
    if !is_server && !matches!(role, Some("worker" | "frontend")) {
        return Ok(args.to_vec());
    }
    let mut kept = Vec::with_capacity(args.len());
    for argument in args {
        let found = argument.to_str().filter(|it| it.starts_with('-')).and_then(find);
        let dropped = found.map(|found| found.dropped()).transpose();
        match dropped.map_err(|message| refused(&message))? {
            Some(note) if is_server => {
                if let Some(note) = note {
                    logging::say("INFO", &format!("note: {note}"));
                }
            }
            _ => kept.push(argument.clone()),
        }
    }
    Ok(kept)
}

fn refused(message: &str) -> clap::Error {
    clap::Error::raw(ErrorKind::UnknownArgument, format!("{message}\n"))
}

/// Parses a number of tokens like vLLM: `4096`, `4k` (4,000), `4K` (4,096), `1.5k`, `1m`, `1M`.
///
/// # Errors
/// Says what is expected.
pub(crate) fn parse_length(text: &str) -> Result<u32, String> {
    let expected =
        || "expected 2 or more tokens, such as 4096, 4K (4,096) or 4k (4,000)".to_owned();
    let text = text.trim();
    let (number, factor) = match text.char_indices().next_back() {
        Some((at, 'k')) => (&text[..at], 1_000),
        Some((at, 'K')) => (&text[..at], 1 << 10),
        Some((at, 'm')) => (&text[..at], 1_000_000),
        Some((at, 'M')) => (&text[..at], 1 << 20),
        _ => (text, 1),
    };
    // As in vLLM, fractions only of powers of ten.
    let decimal = factor % 10 == 0 && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let tokens = match number.parse::<u64>() {
        Ok(number) => number.checked_mul(factor),
        Err(_) if decimal => number.parse::<f64>().ok().map(|it| (it * factor as f64) as u64),
        Err(_) => None,
    };
    let tokens = tokens.and_then(|it| u32::try_from(it).ok()).filter(|it| *it >= 2);
    tokens.ok_or_else(expected)
}

#[cfg(test)]
mod tests;

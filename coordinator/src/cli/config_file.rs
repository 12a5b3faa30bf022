//! Configuration files: TOML, flat, each key the name of a command line option of some role.
//!
//! A file's values become the defaults of the options, so one set of rules checks both, and the
//! command line wins. One file may serve several roles: keys of other roles are left alone.
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use clap::error::ErrorKind;
use clap::parser::ValueSource;

use super::{CliError, etcd};

/// The roles that processes are started in, with the options that a file may have. What a node to
/// be is checked with (`tutti doctor`) are theirs, or concern no node.
const ROLES: [&str; 4] = ["up", "coordinator", "worker", "frontend"];

/// Keys of which one takes the place of the other.
const INSTEAD: [[&str; 2]; 1] = [["listen", "uds"]];

/// Returns the subcommand and the file named by `--config`, if any.
pub(crate) fn named_in(matches: &ArgMatches) -> Option<(String, PathBuf)> {
    let (name, matches) = matches.subcommand()?;
    let file = matches.try_get_one::<PathBuf>("config").ok().flatten()?;
    Some((name.to_owned(), file.clone()))
}

/// Makes the file's values the defaults of subcommand `name`, as far as what is `given` on the
/// command line does not take their place.
pub(crate) fn apply(
    command: clap::Command,
    name: &str,
    file: &Path,
    given: Option<&ArgMatches>,
) -> Result<clap::Command, clap::Error> {
    let values = read(&command, file)
        .map_err(|message| clap::Error::raw(ErrorKind::ValueValidation, format!("{message}\n")))?;
    Ok(command.mut_subcommand(name, |mut subcommand| {
        for (key, value) in values {
            let id = key.replace('-', "_");
            if given.is_some_and(|given| is_replaced(&id, given)) {
                continue;
            }
            if subcommand.get_arguments().any(|arg| arg.get_id() == id.as_str()) {
                subcommand = subcommand.mut_arg(id, |arg| arg.default_value(value));
            }
        }
        subcommand
    }))
}

/// Whether the command line has the option that takes the place of `id`.
fn is_replaced(id: &str, given: &ArgMatches) -> bool {
    let pair = INSTEAD.iter().find(|pair| pair.contains(&id));
    let other = pair.and_then(|pair| pair.iter().copied().find(|other| *other != id));
    other.is_some_and(|other| {
        given.ids().any(|known| known == other)
            && given.value_source(other) == Some(ValueSource::CommandLine)
    })
}

/// Checks a file by the rules of every role that knows one of its keys. Returns the number of its
/// keys, and why `tutti up` alone would not start with it, if so: it may be meant for other roles.
pub(crate) fn check(file: &Path) -> Result<(usize, Option<String>), CliError> {
    let command = super::options::command();
    let values = read(&command, file).map_err(CliError::Usage)?;
    let mut refusal = None;
    for subcommand in ROLES {
        let command = apply(super::options::command(), subcommand, file, None)
            .map_err(|error| CliError::Usage(error.to_string()))?;
        let at = |error| CliError::Usage(format!("{}: {error}", file.display()));
        let matches = command.try_get_matches_from(["tutti", subcommand]).map_err(at)?;
        match super::options::from_matches(&matches).map_err(at)? {
            super::Command::Up(args) => {
                refusal = super::up::check_numbers(&args).err().map(|error| error.to_string());
            }
            super::Command::Worker(args) => {
                etcd::check_found_once(args.coordinator.as_deref(), &args.etcd)
                    .map_err(|error| CliError::Usage(format!("{}: {error}", file.display())))?;
            }
            // A front end finds its coordinator as a worker does.
            _ => {}
        }
    }
    Ok((values.len(), refusal))
}

/// Reads the file into (key, value as text) pairs; every key must be an option of some role.
fn read(command: &clap::Command, file: &Path) -> Result<Vec<(String, String)>, String> {
    let at = |message: String| format!("{}: {message}", file.display());
    let text = std::fs::read_to_string(file)
        .map_err(|error| at(format!("cannot read the configuration file: {error}")))?;
    let table = text.parse::<toml::Table>().map_err(|error| at(not_toml(&text, &error)))?;
    let known = known_keys(command);
    let mut values: Vec<(String, String)> = Vec::with_capacity(table.len());
    for (given, value) in table {
        let key = written_out(command, &given).unwrap_or_else(|| given.clone());
        if values.iter().any(|(other, _)| *other == key) {
            return Err(at(format!("'{given}' is another name of '{key}', which is given too")));
        }
        if !known.contains(&key) {
            let near = || nearest(&key, &known).map(|near| format!("did you mean '{near}'?"));
            let hint = super::vllm::hint(&key).or_else(near);
            let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
            return Err(at(format!("unknown key '{key}'{hint}")));
        }
        let text = match value {
            toml::Value::String(text) => text,
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Float(number) => number.to_string(),
            toml::Value::Boolean(flag) => flag.to_string(),
            other => {
                return Err(at(format!(
                    "key '{key}' is {} {}, expected a string, number or boolean",
                    if other.type_str() == "array" { "an" } else { "a" },
                    other.type_str()
                )));
            }
        };
        values.push((key, text));
    }
    let has = |key: &str| values.iter().any(|(given, _)| given == key);
    if let Some([one, other]) = INSTEAD.iter().find(|pair| pair.iter().all(|key| has(key))) {
        return Err(at(format!("'{one}' and '{other}' cannot be combined: leave out one of them")));
    }
    Ok(values)
}

/// What is wrong with it, and in which line. Not the line itself: it may hold an API key.
fn not_toml(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let line = before.map(|before| format!("line {}: ", before.matches('\n').count() + 1));
    format!("not TOML: {}{}", line.unwrap_or_default(), error.message())
}

/// The options of all roles.
fn options_of_roles(command: &clap::Command) -> impl Iterator<Item = &clap::Arg> {
    let roles = command.get_subcommands().filter(|role| ROLES.contains(&role.get_name()));
    roles.flat_map(clap::Command::get_arguments)
}

/// The name of the option that `key` is another name of.
fn written_out(command: &clap::Command, key: &str) -> Option<String> {
    let is_alias = |it: &clap::Arg| it.get_all_aliases().unwrap_or_default().contains(&key);
    let found = options_of_roles(command).find(|it| is_alias(it))?;
    found.get_long().map(str::to_owned)
}

/// Option names of all roles, without those that make no sense in a file.
fn known_keys(command: &clap::Command) -> Vec<String> {
    let mut keys: Vec<String> = options_of_roles(command)
        .filter_map(clap::Arg::get_long)
        .filter(|key| !["config", "help", "version", "exit-with-stdin"].contains(key))
        .map(str::to_owned)
        .collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// The known key with the smallest edit distance, if it is a likely typing error.
fn nearest<'a>(key: &str, known: &'a [String]) -> Option<&'a str> {
    let key = key.replace('_', "-");
    known
        .iter()
        .map(|candidate| (edit_distance(&key, candidate), candidate.as_str()))
        .min()
        .filter(|(distance, _)| *distance <= 3)
        .map(|(_, candidate)| candidate)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

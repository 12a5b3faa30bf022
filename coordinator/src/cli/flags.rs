//! Flags with a value, `--access-log=false`: generated command lines have them, and some programs
//! take them. They say what they do.
use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

use super::vllm::switched;

/// The commands, with values for those flags that have one in `args`.
pub(crate) fn with_values(command: Command, args: &[OsString]) -> Command {
    let Some(role) = args.get(1).and_then(|role| role.to_str()) else { return command };
    if command.find_subcommand(role).is_none() {
        return command;
    }
    let names: Vec<&str> = args
        .iter()
        .filter_map(|argument| Some(argument.to_str()?.strip_prefix("--")?.split_once('=')?.0))
        .collect();
    command.mut_subcommand(role, |subcommand| {
        subcommand.mut_args(|argument| {
            if is_flag(&argument) && names.iter().any(|name| has_name(&argument, name)) {
                with_value(argument)
            } else {
                argument
            }
        })
    })
}

fn is_flag(argument: &Arg) -> bool {
    matches!(argument.get_action(), ArgAction::SetTrue)
}

fn has_name(argument: &Arg, name: &str) -> bool {
    argument.get_long() == Some(name)
        || argument.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}

/// Lets a flag have a value behind `=`, and only there.
fn with_value(argument: Arg) -> Arg {
    let parse =
        |text: &str| switched(text).ok_or("write it without a value, or with =true or =false");
    argument
        .action(ArgAction::Set)
        .num_args(0..=1)
        .require_equals(true)
        .default_value("false")
        .default_missing_value("true")
        .value_name("true|false")
        .value_parser(parse)
}

#[cfg(test)]
mod tests {
    use super::super::options::{self, Command as Role};
    use super::*;

    fn access_log(words: &[&str]) -> Result<bool, String> {
        let args: Vec<OsString> = ["tutti", "up"].iter().chain(words).map(OsString::from).collect();
        let matches = with_values(options::command(), &args).try_get_matches_from(&args);
        match options::from_matches(&matches.map_err(|error| error.to_string())?) {
            Ok(Role::Up(args)) => Ok(args.serving.api.access_log),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_flag_with_a_value_does_what_it_says() {
        for (words, wanted) in [
            (&[][..], false),
            (&["--access-log"], true),
            (&["--access-log=true"], true),
            (&["--access-log=True"], true),
            (&["--access-log=1"], true),
            (&["--access-log=false"], false),
            (&["--access-log=False"], false),
            (&["--access-log=0"], false),
        ] {
            assert_eq!(access_log(words), Ok(wanted), "{words:?}");
        }
        for words in [&["--access-log=maybe"][..], &["--access-log="]] {
            let error = access_log(words).unwrap_err();
            assert!(error.contains("--access-log") && error.contains("=false"), "{error}");
        }
        let error = access_log(&["--access-log", "false"]).unwrap_err();
        assert!(error.contains("'false'"), "a value behind a space is another argument: {error}");
    }

    /// Every flag of every role, so that none is left that ignores its value.
    #[test]
    fn all_flags_can_be_turned_off() {
        let command = options::command();
        for role in ["up", "coordinator", "worker", "frontend", "doctor"] {
            let subcommand = command.find_subcommand(role).unwrap();
            let flags = subcommand.get_arguments().filter(|it| is_flag(it));
            for name in flags.filter_map(Arg::get_long) {
                let given = format!("--{name}=False");
                let args: Vec<OsString> = ["tutti", role, &given].map(OsString::from).to_vec();
                let read = with_values(options::command(), &args).try_get_matches_from(&args);
                let matches = read.unwrap_or_else(|error| panic!("{role} {name}: {error}"));
                let (_, found) = matches.subcommand().unwrap();
                assert_eq!(found.get_one(&name.replace('-', "_")), Some(&false), "{role} {name}");
            }
        }
    }
}

//! `tutti options`: every option of every command, as clap knows them. `docs/options.md` is this
//! page; a test checks that it is current.
use std::fmt::Write as _;

use clap::{Arg, Args, Command};

const HEAD: &str = "\
# Options

Every command and every option, generated from the program. To change it, change the option and run
`UPDATE_DOCS=1 cargo test -p tests --test tidy options`. `tutti COMMAND --help` says the same.

The options of `up`, `coordinator`, `worker` and `frontend` can be set in a TOML file under the same
names (`--config FILE`); the command line takes precedence.
";

/// Options of `tutti options`.
#[derive(Args, Clone, Debug)]
pub(crate) struct OptionsArgs {
    /// Print Markdown, as in docs/options.md
    #[arg(long)]
    pub(crate) markdown: bool,
}

/// One row of the table: an option as some commands have it.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    names: Vec<String>,
    value: String,
    default: String,
    help: String,
    commands: Vec<String>,
}

/// Returns the page, or a list of the options and the commands that have them.
pub(crate) fn text(command: &Command, args: &OptionsArgs) -> String {
    let rows = rows(command);
    if args.markdown {
        return page(command, &rows).trim_end().to_owned();
    }
    let line = |row: &Row| format!("{}: {}", row.names.join(", "), row.commands.join(", "));
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Returns the commands with their whole names; those that only lead to others are left out.
fn commands(command: &Command) -> Vec<(String, &Command)> {
    let mut found = Vec::new();
    for subcommand in command.get_subcommands() {
        let name = subcommand.get_name();
        let within = commands(subcommand);
        if within.is_empty() {
            found.push((name.to_owned(), subcommand));
        }
        found.extend(within.into_iter().map(|(rest, it)| (format!("{name} {rest}"), it)));
    }
    found
}

/// Collects the options by name; commands that have exactly the same option share a row.
fn rows(command: &Command) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (name, subcommand) in commands(command) {
        let options = subcommand.get_arguments().filter(|it| !it.is_positional());
        for option in options.filter(|it| !it.is_hide_set()) {
            let mut row = row(option);
            let same = |it: &&mut Row| {
                (&it.names, &it.value, &it.default, &it.help)
                    == (&row.names, &row.value, &row.default, &row.help)
            };
            match rows.iter_mut().find(same) {
                Some(row) => row.commands.push(name.clone()),
                None => {
                    row.commands.push(name.clone());
                    rows.push(row);
                }
            }
        }
    }
    // Stable: options with one name stay in the order of their commands.
    rows.sort_by(|a, b| a.names.cmp(&b.names));
    rows
}

fn row(option: &Arg) -> Row {
    let long = option.get_long().into_iter();
    let names = long.chain(option.get_all_aliases().unwrap_or_default());
    let names = names.map(|name| format!("--{name}")).collect();
    let takes_value = option.get_action().takes_values();
    let value = match option.get_value_names().filter(|_| takes_value) {
        Some(names) => names.join(" "),
        None => String::new(),
    };
    let help = help(option);
    // Defaults that depend on something are text at the end of the help.
    let (help, mut default) = match help.rsplit_once("[default: ") {
        Some((help, default)) => (help.trim_end(), default.trim_end_matches(']').to_owned()),
        None => (help.as_str(), String::new()),
    };
    if takes_value && default.is_empty() {
        let values = option.get_default_values().iter();
        default = values.map(|it| it.to_string_lossy()).collect::<Vec<_>>().join(",");
    }
    let mut help = help.to_owned();
    let values = option.get_possible_values();
    let values: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
    if takes_value && !values.iter().all(|value| help.contains(value)) {
        let lead = if help.is_empty() { "" } else { ". " };
        let _ = write!(help, "{lead}One of: {}", values.join(", "));
    }
    Row { names, value, default, help, commands: Vec::new() }
}

fn help(option: &Arg) -> String {
    let help = option.get_long_help().or_else(|| option.get_help());
    let text = help.map(ToString::to_string).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What a command takes without a name, in brackets if it may be left out, with a space before it.
fn arguments(command: &Command) -> String {
    let names = command.get_positionals().flat_map(|it| it.get_value_names()).flatten();
    let names: Vec<String> = names.map(ToString::to_string).collect();
    let names = names.join(" ");
    match command.get_positionals().any(Arg::is_required_set) {
        true => format!(" {names}"),
        false if names.is_empty() => String::new(),
        false => format!(" [{names}]"),
    }
}

fn page(command: &Command, rows: &[Row]) -> String {
    let mut page = String::from(HEAD);
    page.push_str("\n## Commands\n\n| command | description |\n| --- | --- |\n");
    for (name, subcommand) in commands(command) {
        let arguments = arguments(subcommand);
        let about = subcommand.get_about().map(ToString::to_string).unwrap_or_default();
        // Writing to a String cannot fail.
        let _ = writeln!(page, "| `tutti {name}{arguments}` | {} |", prose(&about));
    }
    page.push_str(
        "\n## By name\n\n| option | default | commands | description |\n\
         | --- | --- | --- | --- |\n",
    );
    for row in rows {
        let names: Vec<String> = row.names.iter().map(|name| format!("`{name}`")).collect();
        let mut names = names.join(", ");
        if !row.value.is_empty() {
            let _ = write!(names, " {}", row.value);
        }
        let _ = writeln!(
            page,
            "| {names} | {} | {} | {} |",
            prose(&row.default),
            row.commands.join(", "),
            prose(&row.help)
        );
    }
    page
}

/// Escapes text for a Markdown table: nothing in it is markup, except code in backticks.
fn prose(text: &str) -> String {
    let parts = text.split('`').enumerate().map(|(index, part)| {
        let part = part.replace('|', "\\|");
        let marks = ['<', '*'].into_iter().filter(|_| index % 2 == 0);
        marks.fold(part, |part, mark| part.replace(mark, &format!("\\{mark}")))
    });
    parts.collect::<Vec<_>>().join("`")
}

#[cfg(test)]
mod tests {
    use clap::ArgAction;

    use super::*;

    fn sample() -> Command {
        let listen = |default: &'static str| {
            Arg::new("listen")
                .long("listen")
                .alias("address")
                .value_name("IP:PORT")
                .default_value(default)
                .help("Where HTTP\nis served")
        };
        let flag = || {
            Arg::new("fast")
                .long("fast")
                .action(ArgAction::SetTrue)
                .help("<b> | `a|<c>` [default: no]")
        };
        Command::new("tutti")
            .subcommand(Command::new("up").about("Starts").arg(listen("a:1")).arg(flag()))
            .subcommand(Command::new("front").arg(listen("a:2")).arg(flag()))
            .subcommand(
                Command::new("log").arg(Arg::new("node").value_name("NODE").required(true)).arg(
                    Arg::new("level").long("level").value_name("L").value_parser(["low", "high"]),
                ),
            )
            .subcommand(
                Command::new("set").subcommand(
                    Command::new("up")
                        .arg(Arg::new("node").value_name("NODE"))
                        .arg(Arg::new("level").long("level").value_name("N").help("How high")),
                ),
            )
            .subcommand(Command::new("x").arg(Arg::new("secret").long("secret").hide(true)))
    }

    #[test]
    fn equal_options_share_a_row_and_others_do_not() {
        let rows = rows(&sample());
        let found: Vec<(&str, &str, &str, String)> = rows
            .iter()
            .map(|it| (&*it.names[0], &*it.value, &*it.default, it.commands.join(",")))
            .collect();
        assert_eq!(
            found,
            [
                ("--fast", "", "no", "up,front".to_owned()),
                ("--level", "L", "", "log".to_owned()),
                ("--level", "N", "", "set up".to_owned()),
                ("--listen", "IP:PORT", "a:1", "up".to_owned()),
                ("--listen", "IP:PORT", "a:2", "front".to_owned()),
            ]
        );
        assert_eq!(rows[1].help, "One of: low, high");
        assert_eq!(rows[3].names, ["--listen", "--address"]);
        assert_eq!(rows[3].help, "Where HTTP is served");
    }

    #[test]
    fn the_page_escapes_what_markdown_would_read() {
        let page = text(&sample(), &OptionsArgs { markdown: true });
        assert!(page.contains("| `--fast` | no | up, front | \\<b> \\| `a\\|<c>` |"), "{page}");
        assert!(page.contains("| `tutti log NODE` |"), "{page}");
        assert!(
            page.contains("| `tutti set up [NODE]` |") && !page.contains("`tutti set`"),
            "{page}"
        );
        assert!(!page.contains("secret"), "{page}");
    }
}
